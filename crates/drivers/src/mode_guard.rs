//! The mode of an agent: which one a turn needs, and what follows if the agent switches to another by itself. An agent
//! must not stay in a mode that its manifest does not offer, because it might act there without asking. This module
//! decides; each driver has its own way to set a mode.

use qd_protocol::event::RunError;
use qd_protocol::link::TurnUpdate;
use qd_protocol::manifest::AgentModes;

/// The code of an error that means that an agent cannot be in the mode of its session.
pub(crate) const MODE_UNAVAILABLE: &str = "mode_unavailable";
/// The code of an error that means that an agent does not ask before it acts, and cannot be made to.
const OVERRIDES_POLICY: &str = "agent_overrides_policy";

/// Watches the mode of one agent. Modes have the agent's own names here, unless it says otherwise.
#[derive(Debug, Default)]
pub(crate) struct ModeGuard {
    modes: AgentModes,
    /// The mode that the agent is in, if it has reported one.
    current: Option<String>,
    /// The offered mode that the agent was last in.
    last_offered: Option<String>,
    /// Why the agent can no longer be made to ask.
    failure: Option<RunError>,
}

/// What follows from a report of the agent.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct ModeReaction {
    /// What the session is told.
    pub(crate) update: Option<TurnUpdate>,
    /// The mode that the agent must be switched back to.
    pub(crate) switch_back_to: Option<String>,
}

impl ModeGuard {
    /// Watches an agent that starts in the mode `current`, if that is known.
    pub(crate) fn new(modes: AgentModes, current: Option<String>) -> Self {
        Self { modes, current, last_offered: None, failure: None }
    }

    /// The mode into which the agent must be put before a turn, if it is in another. `mode` is the session's name of the
    /// mode; without one the agent stays where it is, unless that mode is not offered.
    pub(crate) fn mode_before_turn(&self, mode: Option<&str>) -> Result<Option<String>, RunError> {
        if let Some(failure) = &self.failure {
            return Err(failure.clone());
        }
        let is_offered = self.current.as_deref().is_none_or(|mode| self.modes.name_of(mode).is_some());
        let wanted = match mode {
            None if is_offered => return Ok(None),
            None => self.modes.fallback.as_deref(),
            Some(mode) => Some(mode),
        };
        let Some(wanted) = wanted else { return Ok(None) };
        let Some(id) = self.modes.offered.get(wanted) else {
            return Err(RunError::new(MODE_UNAVAILABLE, format!("the agent has no mode `{wanted}`")));
        };
        Ok((self.current.as_ref() != Some(id)).then(|| id.clone()))
    }

    /// Records the mode that the agent was put into.
    pub(crate) fn record_mode(&mut self, mode: &str) {
        self.current = Some(mode.to_owned());
        if self.modes.name_of(mode).is_some() {
            self.last_offered = Some(mode.to_owned());
        }
    }

    /// The mode that the agent is in after a call of this tool, for agents that do not report it otherwise.
    pub(crate) fn mode_after_tool(&self, tool: &str) -> Option<String> {
        self.modes.switched_by.get(tool).cloned()
    }

    /// Judges the mode that the agent reports.
    pub(crate) fn judge_report(&mut self, mode: &str) -> ModeReaction {
        if self.current.as_deref() == Some(mode) || self.modes.offered.is_empty() {
            return ModeReaction::default();
        }
        self.record_mode(mode);
        if let Some(name) = self.modes.name_of(mode) {
            let update = Some(TurnUpdate::Mode { mode: name.to_owned() });
            return ModeReaction { update, switch_back_to: None };
        }
        let fallback = self.modes.fallback.as_ref().and_then(|name| self.modes.offered.get(name));
        let back = self.last_offered.as_ref().or(fallback).cloned();
        let name = back.as_deref().and_then(|back| self.modes.name_of(back)).unwrap_or_default();
        let notice = TurnUpdate::notice(format!(
            "the agent switched to its mode `{mode}`, in which it might act without asking; it is switched back to `{name}`"
        ));
        ModeReaction { update: Some(notice), switch_back_to: back }
    }

    /// Records that the agent has refused to change a setting back without which it might not ask. No turn starts after
    /// that. Returns the error for the running turn.
    pub(crate) fn record_refusal(&mut self, setting: &str, why: &str) -> RunError {
        let message = format!(
            "the agent changed its {setting} by itself, so that it might act without asking, and refuses to change it \
             back: {why}"
        );
        let failure = RunError::new(OVERRIDES_POLICY, message);
        self.failure = Some(failure.clone());
        failure
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn guard(current: &str) -> ModeGuard {
        let offered = [("default", "default"), ("plan", "x#plan")];
        let offered = offered.map(|(name, id)| (name.to_owned(), id.to_owned())).into_iter().collect();
        let modes = AgentModes { offered, fallback: Some("default".to_owned()), ..AgentModes::default() };
        ModeGuard::new(modes, Some(current.to_owned()))
    }

    #[test]
    fn an_agent_is_put_into_a_mode_only_if_it_is_in_another() {
        let mut guard = guard("default");
        assert_eq!(guard.mode_before_turn(None).unwrap(), None);
        assert_eq!(guard.mode_before_turn(Some("default")).unwrap(), None);
        assert_eq!(guard.mode_before_turn(Some("plan")).unwrap().as_deref(), Some("x#plan"));
        guard.record_mode("x#plan");
        assert_eq!(guard.mode_before_turn(Some("plan")).unwrap(), None);
        assert_eq!(guard.judge_report("x#plan"), ModeReaction::default(), "it was asked to");
        assert_eq!(guard.mode_before_turn(Some("other")).unwrap_err().code, MODE_UNAVAILABLE);
    }

    #[test]
    fn a_mode_that_is_not_offered_is_left_again() {
        let mut guard = guard("yolo");
        let before = guard.mode_before_turn(None).unwrap();
        assert_eq!(before.as_deref(), Some("default"), "the agent's own settings had it start elsewhere");
        guard.record_mode("default");
        let ModeReaction { update, switch_back_to } = guard.judge_report("x#plan");
        assert_eq!((update, switch_back_to), (Some(TurnUpdate::Mode { mode: "plan".to_owned() }), None));
        let ModeReaction { update, switch_back_to } = guard.judge_report("yolo");
        assert!(matches!(update, Some(TurnUpdate::Notice { .. })), "{update:?}");
        assert_eq!(switch_back_to.as_deref(), Some("x#plan"));
        assert_eq!(guard.record_refusal("mode", "no").code, OVERRIDES_POLICY);
        assert_eq!(
            guard.mode_before_turn(None).unwrap_err().code,
            OVERRIDES_POLICY,
            "no turn starts any more"
        );
    }

    #[test]
    fn an_agent_whose_manifest_offers_no_modes_is_left_alone() {
        let mut guard = ModeGuard::new(AgentModes::default(), Some("any".to_owned()));
        assert_eq!(guard.judge_report("other"), ModeReaction::default());
        assert_eq!(guard.mode_before_turn(None).unwrap(), None);
    }
}
