//! Which confinement an agent gets: which of several requests counts, and whether a machine can satisfy it. The daemon
//! decides so before it starts an agent, and a worker again before it confines one. Nothing here looks at a machine.

use qd_protocol::sandbox::{NetworkSetting, SandboxLevel, SandboxSetting};
use qd_protocol::sandbox_spec::{SandboxReport, SandboxSupport};
use qd_protocol::{ApiError, ErrorCode};

/// The most that `auto` gives. More would keep agents from files that they may need.
pub const AUTO_LEVEL_MAX: SandboxLevel = SandboxLevel::Deck;

/// What each place asks for. `None` leaves the decision to the next.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SandboxRequests<T> {
    /// The session, or the fleet that it belongs to.
    pub session: Option<T>,
    /// The agent's manifest.
    pub manifest: Option<T>,
    /// The user's settings.
    pub settings: Option<T>,
    /// A trusted project, in its own file or its own manifest. It can only make the confinement stricter.
    pub project: Option<T>,
}

impl SandboxRequests<SandboxSetting> {
    /// The level that counts: the session's, else the manifest's, else that of the settings, else `auto`; or the
    /// project's if it is stricter.
    pub fn setting(self) -> SandboxSetting {
        let chosen = self.session.or(self.manifest).or(self.settings).unwrap_or_default();
        self.project.map_or(chosen, |project| stricter_setting(chosen, project))
    }
}

impl SandboxRequests<NetworkSetting> {
    /// Whether the agent reaches the network, by the same order.
    pub fn setting(self) -> NetworkSetting {
        let chosen = self.session.or(self.manifest).or(self.settings).unwrap_or_default();
        if self.project == Some(NetworkSetting::Off) { NetworkSetting::Off } else { chosen }
    }
}

/// The one of two settings that promises more.
pub fn stricter_setting(one: SandboxSetting, other: SandboxSetting) -> SandboxSetting {
    if strictness(other) > strictness(one) { other } else { one }
}

/// The setting that confines another agent at least as strictly as one at this level. On the same machine `auto` gives
/// the other what it gave the first; on another machine the level has to be asked for by name.
pub fn setting_of_level(level: SandboxLevel, on_same_machine: bool) -> SandboxSetting {
    match level {
        SandboxLevel::Off => SandboxSetting::Off,
        SandboxLevel::Deck if on_same_machine => SandboxSetting::Auto,
        SandboxLevel::Deck => SandboxSetting::Deck,
        SandboxLevel::Workspace => SandboxSetting::Workspace,
    }
}

/// The order in which settings promise more. `auto` promises nothing, but confines where it can.
fn strictness(setting: SandboxSetting) -> u8 {
    match setting {
        SandboxSetting::Off => 0,
        SandboxSetting::Auto => 1,
        SandboxSetting::Deck => 2,
        SandboxSetting::Workspace => 3,
    }
}

/// The level that an agent gets on a machine. A level that is asked for by name is given or refused, never weakened.
pub fn resolve_sandbox(
    asked: SandboxSetting,
    support: &SandboxSupport,
) -> Result<SandboxLevel, SandboxUnavailable> {
    let named = |level: SandboxLevel| match support.strongest >= level {
        true => Ok(level),
        false => {
            Err(SandboxUnavailable { wanted: UnavailableSandbox::Level(asked), missing: describe(support) })
        }
    };
    match asked {
        SandboxSetting::Off => Ok(SandboxLevel::Off),
        SandboxSetting::Auto => Ok(support.strongest.min(AUTO_LEVEL_MAX)),
        SandboxSetting::Deck => named(SandboxLevel::Deck),
        SandboxSetting::Workspace => named(SandboxLevel::Workspace),
    }
}

/// The confinement that an agent gets on a machine, network included. Only a confined agent can be cut off from the
/// network, so `network: off` with less than `deck` is refused.
pub fn plan_sandbox(
    asked: SandboxSetting,
    network: NetworkSetting,
    support: &SandboxSupport,
) -> Result<SandboxReport, SandboxUnavailable> {
    let level = resolve_sandbox(asked, support)?;
    if network == NetworkSetting::Off {
        let missing = match (asked, level) {
            (SandboxSetting::Off, _) => Some("it needs `sandbox` to be `deck` or `workspace`".to_owned()),
            (_, SandboxLevel::Off) => Some(describe(support)),
            _ if !support.network_off => Some(describe(support)),
            _ => None,
        };
        if let Some(missing) = missing {
            return Err(SandboxUnavailable { wanted: UnavailableSandbox::NetworkOff, missing });
        }
    }
    let is_weaker = asked == SandboxSetting::Auto && level == SandboxLevel::Off;
    let why = is_weaker.then(|| describe(support));
    Ok(SandboxReport { asked, level, network, why })
}

/// How a machine says what it lacks.
fn describe(support: &SandboxSupport) -> String {
    support.missing.clone().unwrap_or_else(|| "this machine cannot confine agents".to_owned())
}

/// What is asked for by name and cannot be had.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum UnavailableSandbox {
    Level(SandboxSetting),
    /// No network.
    NetworkOff,
}

impl UnavailableSandbox {
    /// The setting as people write it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Level(SandboxSetting::Auto) => "sandbox: auto",
            Self::Level(SandboxSetting::Off) => "sandbox: off",
            Self::Level(SandboxSetting::Deck) => "sandbox: deck",
            Self::Level(SandboxSetting::Workspace) => "sandbox: workspace",
            Self::NetworkOff => "network: off",
        }
    }
}

/// An agent cannot be confined as was asked for.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{}` cannot be had: {missing}; `qd doctor` shows what this machine can do", wanted.name())]
pub struct SandboxUnavailable {
    pub wanted: UnavailableSandbox,
    /// What is missing, and how to get it.
    pub missing: String,
}

impl SandboxUnavailable {
    /// For an agent that runs somewhere we do not control.
    pub fn elsewhere(wanted: UnavailableSandbox) -> Self {
        Self { wanted, missing: AGENT_ELSEWHERE.to_owned() }
    }
}

/// Why an agent that is a part of its worker is not confined.
pub const AGENT_IN_WORKER: &str = "the agent is a part of its worker and starts no processes";
/// Why an agent that is reached at an address is never confined.
pub const AGENT_ELSEWHERE: &str = "the agent runs elsewhere, where Quarterdeck starts no processes";

impl From<SandboxUnavailable> for ApiError {
    fn from(error: SandboxUnavailable) -> Self {
        ApiError::new(ErrorCode::SandboxUnavailable, error.to_string())
            .with_detail("wanted", error.wanted.name())
            .with_detail("missing", error.missing)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use NetworkSetting as Network;
    use SandboxLevel as Level;
    use SandboxSetting as Setting;

    const SETTINGS: [Setting; 4] = [Setting::Auto, Setting::Off, Setting::Deck, Setting::Workspace];
    const LEVELS: [Level; 3] = [Level::Off, Level::Deck, Level::Workspace];

    fn support(strongest: Level, network_off: bool) -> SandboxSupport {
        let missing = (strongest < Level::Workspace).then(|| "no user namespaces".to_owned());
        SandboxSupport { strongest, network_off, missing, ..SandboxSupport::default() }
    }

    #[test]
    fn a_named_level_is_given_or_refused_and_auto_gives_the_strongest_up_to_deck() {
        for asked in SETTINGS {
            for strongest in LEVELS {
                let given = resolve_sandbox(asked, &support(strongest, true));
                let expected = match (asked, strongest) {
                    (Setting::Off, _) | (Setting::Auto, Level::Off) => Some(Level::Off),
                    (Setting::Auto, Level::Deck | Level::Workspace) => Some(Level::Deck),
                    (Setting::Deck, Level::Deck | Level::Workspace) => Some(Level::Deck),
                    (Setting::Workspace, Level::Workspace) => Some(Level::Workspace),
                    (Setting::Deck, Level::Off) | (Setting::Workspace, Level::Off | Level::Deck) => None,
                };
                assert_eq!(given.clone().ok(), expected, "{asked:?} on {strongest:?}");
                if let Err(error) = given {
                    assert_eq!(error.wanted, UnavailableSandbox::Level(asked));
                    assert!(error.to_string().contains("no user namespaces"), "{error}");
                }
            }
        }
    }

    #[test]
    fn an_agent_with_the_setting_of_a_level_gets_at_least_that_level_or_is_refused() {
        for strongest in LEVELS {
            for level in LEVELS.into_iter().filter(|level| *level <= strongest) {
                let given = resolve_sandbox(setting_of_level(level, true), &support(strongest, true));
                assert_eq!(given.ok(), Some(level), "on the same machine");
                for elsewhere in LEVELS {
                    let given = resolve_sandbox(setting_of_level(level, false), &support(elsewhere, true));
                    assert!(given.is_err() || given.is_ok_and(|given| given >= level), "{level:?}");
                }
            }
        }
    }

    #[test]
    fn no_network_is_given_to_a_confined_agent_or_refused() {
        for asked in SETTINGS {
            for strongest in LEVELS {
                for can_cut in [false, true] {
                    let support = support(strongest, can_cut);
                    let level = resolve_sandbox(asked, &support).ok();
                    let on = plan_sandbox(asked, Network::On, &support);
                    assert_eq!(
                        on.map(|report| (report.level, report.network)).ok(),
                        level.map(|level| (level, Network::On))
                    );
                    let off = plan_sandbox(asked, Network::Off, &support);
                    let possible = level.filter(|level| *level > Level::Off && can_cut);
                    assert_eq!(
                        off.map(|report| (report.level, report.network)).ok(),
                        possible.map(|level| (level, Network::Off))
                    );
                }
            }
        }
    }

    #[test]
    fn only_an_agent_that_auto_leaves_unconfined_says_why() {
        for asked in SETTINGS {
            for strongest in LEVELS {
                let Ok(report) = plan_sandbox(asked, Network::On, &support(strongest, true)) else {
                    continue;
                };
                let is_left = asked == Setting::Auto && strongest == Level::Off;
                assert_eq!(report.why.is_some(), is_left, "{report:?}");
            }
        }
    }

    #[test]
    fn the_session_counts_before_the_manifest_and_the_settings_and_a_project_only_tightens() {
        let places = || [None].into_iter().chain(SETTINGS.map(Some));
        for session in places() {
            for manifest in places() {
                for settings in places() {
                    for project in places() {
                        let requests = SandboxRequests { session, manifest, settings, project };
                        let chosen = session.or(manifest).or(settings).unwrap_or(Setting::Auto);
                        let result = requests.setting();
                        assert!(result == chosen || Some(result) == project, "{requests:?}");
                        assert!(strictness(result) >= strictness(chosen), "{requests:?}");
                        assert!(project.is_none_or(|floor| strictness(result) >= strictness(floor)));
                    }
                }
            }
        }
        let network =
            SandboxRequests { session: Some(Network::On), project: Some(Network::Off), ..Default::default() };
        assert_eq!(network.setting(), Network::Off);
        let network = SandboxRequests {
            settings: Some(Network::Off),
            project: Some(Network::On),
            ..Default::default()
        };
        assert_eq!(network.setting(), Network::Off, "a project cannot loosen");
    }
}
