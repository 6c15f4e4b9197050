//! Under which conditions scenes are played: how strictly the agents are confined, and who runs the daemon. Variables
//! change that for all scenes at once, to run them by hand.

use qd_testkit::{InstalledAgents, OrdinaryUser, TestHome};

/// The level for all sessions: `off`, `deck` or `workspace`.
const LEVEL_VARIABLE: &str = "QD_REAL_SANDBOX";
/// Who runs the daemon: `ordinary`. Without it, whoever runs the tests.
const USER_VARIABLE: &str = "QD_REAL_USER";

#[derive(Debug, Clone, Default)]
pub(super) struct SceneConditions {
    /// `None` leaves it to the daemon's own default.
    level: Option<String>,
    /// `None` is whoever runs the tests.
    pub(super) user: Option<OrdinaryUser>,
}

impl SceneConditions {
    /// What the variables say.
    pub(super) fn from_environment() -> Self {
        let level = std::env::var(LEVEL_VARIABLE).ok();
        if let Some(level) = &level {
            assert!(["off", "deck", "workspace"].contains(&level.as_str()), "{LEVEL_VARIABLE}: {level}?");
        }
        let user = std::env::var(USER_VARIABLE).ok();
        match user.as_deref() {
            None => Self { level, user: None },
            Some("ordinary") => Self { level, ..Self::ordinary_user() },
            Some(other) => panic!("{USER_VARIABLE} is `ordinary` or not set, and not `{other}`"),
        }
    }

    /// An ordinary user runs the daemon. This machine must have one.
    pub(super) fn ordinary_user() -> Self {
        let user = OrdinaryUser::find().expect("the machine has an ordinary user");
        Self { level: None, user: Some(user.reading(InstalledAgents::installed().folder())) }
    }

    pub(super) fn at(self, level: &str) -> Self {
        Self { level: Some(level.to_owned()), ..self }
    }

    /// Writes these settings of the daemon, and the level.
    pub(super) fn configure(&self, home: &TestHome, settings: &str) {
        let level = self.level.as_ref().map(|level| format!("sandbox = \"{level}\"\n"));
        home.configure(&format!("{}{settings}", level.unwrap_or_default()));
    }
}
