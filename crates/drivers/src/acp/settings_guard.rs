//! The mode of the agent's session, and the options of it that must keep their values so that the agent asks before it
//! acts. This module decides which requests put them right; the handshake and the loop in `conversation` send them.

use std::collections::{BTreeMap, VecDeque};

use agent_client_protocol::v1::schema::{SessionId, SessionUpdate};
use qd_protocol::event::RunError;
use qd_protocol::link::TurnUpdate;
use qd_protocol::manifest::AgentModes;
use serde_json::{Value, json};

use super::session_settings::{AcpConfigOption, AcpSessionSettings};
use crate::mode_guard::{MODE_UNAVAILABLE, ModeGuard, ModeReaction};

/// Watches the settings of one session.
#[derive(Debug)]
pub(super) struct AcpSettingsGuard {
    session: SessionId,
    modes: ModeGuard,
    mode_setter: Option<AcpModeSetter>,
    /// The id of the option that has the mode, if one does. Some agents set the mode in one way and report it in another.
    mode_option: Option<String>,
    /// Options that must have these values.
    kept_options: BTreeMap<String, String>,
}

/// How the mode of a session is set.
#[derive(Debug, Clone, PartialEq, Eq)]
enum AcpModeSetter {
    SessionMode,
    /// As the option with this id.
    Option(String),
}

/// A request that changes a setting.
#[derive(Debug, PartialEq)]
pub(super) struct AcpSettingRequest {
    pub(super) method: &'static str,
    pub(super) params: Value,
    /// The agent's own name of the mode that it sets, if it sets the mode.
    mode: Option<String>,
}

impl AcpSettingRequest {
    /// What it sets, for a message.
    pub(super) fn description(&self) -> String {
        match (&self.mode, self.params["configId"].as_str()) {
            (Some(mode), _) => format!("its mode `{mode}`"),
            (None, option) => format!("its setting `{}`", option.unwrap_or_default()),
        }
    }
}

impl AcpSettingsGuard {
    /// Watches a session that was opened with these settings.
    pub(super) fn new(
        session: SessionId,
        modes: AgentModes,
        kept_options: BTreeMap<String, String>,
        settings: &AcpSessionSettings,
    ) -> Self {
        let option = match &modes.option {
            Some(id) => settings.option_with_id(id),
            None => settings.option_in_category("mode"),
        };
        let mode_option = option.map(|option| option.id.clone());
        let (mode_setter, current) = match (&settings.modes, option) {
            (Some(session_modes), _) if modes.option.is_none() => {
                (Some(AcpModeSetter::SessionMode), Some(session_modes.current_mode_id.clone()))
            }
            (_, Some(option)) => {
                (Some(AcpModeSetter::Option(option.id.clone())), option.current_text().map(str::to_owned))
            }
            (_, None) => (None, None),
        };
        let modes = ModeGuard::new(modes, current);
        Self { session, modes, mode_setter, mode_option, kept_options }
    }

    /// The requests for options that have another value than they must have.
    pub(super) fn kept_option_requests(&self, options: &[AcpConfigOption]) -> Vec<AcpSettingRequest> {
        let request = |option: &AcpConfigOption| {
            let kept = self.kept_options.get(&option.id)?;
            (option.current_text() != Some(kept)).then(|| self.option_request(&option.id, kept))
        };
        options.iter().filter_map(request).collect()
    }

    /// The requests that are needed before a turn in this mode of the session. `after_command`: the prompt before was a
    /// command of the agent's own, which may have changed any setting, and some agents report that only in the next turn.
    pub(super) fn requests_before_turn(
        &self,
        mode: Option<&str>,
        after_command: bool,
    ) -> Result<VecDeque<AcpSettingRequest>, RunError> {
        let kept = self.kept_options.iter().filter(|_| after_command);
        let mut requests: VecDeque<_> = kept.map(|(id, value)| self.option_request(id, value)).collect();
        if let Some(mode) = self.modes.mode_before_turn(mode)? {
            let unavailable = || {
                let message =
                    format!("the agent does not let its client choose its mode, so it cannot be in `{mode}`");
                RunError::new(MODE_UNAVAILABLE, message)
            };
            requests.push_back(self.mode_request(&mode).ok_or_else(unavailable)?);
        }
        Ok(requests)
    }

    /// Judges the mode that the agent is in after a call of this tool.
    pub(super) fn judge_tool(&mut self, tool: &str) -> (Vec<TurnUpdate>, Vec<AcpSettingRequest>) {
        match self.modes.mode_after_tool(tool) {
            Some(mode) => self.judge_mode(&mode),
            None => (Vec::new(), Vec::new()),
        }
    }

    /// Records the mode that the agent was put into, by its own name.
    pub(super) fn record_mode(&mut self, mode: &str) {
        self.modes.record_mode(mode);
    }

    /// Records that the agent has granted a request.
    pub(super) fn record_granted(&mut self, request: &AcpSettingRequest) {
        if let Some(mode) = &request.mode {
            self.modes.record_mode(mode);
        }
    }

    /// Records that the agent has refused to change a setting back. Returns the error for its turn.
    pub(super) fn record_refused(&mut self, request: &AcpSettingRequest, why: &str) -> RunError {
        let setting = match request.params["configId"].as_str() {
            Some(option) => format!("setting `{option}`"),
            None => "mode".to_owned(),
        };
        self.modes.record_refusal(&setting, why)
    }

    /// Judges a report of the agent about its settings. Returns what the session is told, and the requests that change
    /// back what the agent must not have changed.
    pub(super) fn judge_report(
        &mut self,
        update: &SessionUpdate,
    ) -> (Vec<TurnUpdate>, Vec<AcpSettingRequest>) {
        match update {
            SessionUpdate::CurrentModeUpdate(update)
                if self.mode_setter == Some(AcpModeSetter::SessionMode) =>
            {
                self.judge_mode(&update.current_mode_id.to_string())
            }
            SessionUpdate::ConfigOptionUpdate(update) => {
                // Read as in the handshake: the protocol's own types leave out what they do not know.
                let options = serde_json::to_value(&update.config_options).unwrap_or_default();
                self.judge_options(&serde_json::from_value::<Vec<_>>(options).unwrap_or_default())
            }
            _ => (Vec::new(), Vec::new()),
        }
    }

    fn judge_options(&mut self, options: &[AcpConfigOption]) -> (Vec<TurnUpdate>, Vec<AcpSettingRequest>) {
        let mut requests = self.kept_option_requests(options);
        let notice = |request: &AcpSettingRequest| {
            let option = request.params["configId"].as_str().unwrap_or_default();
            TurnUpdate::notice(format!(
                "the agent changed its setting `{option}`, so that it would act without asking; it is changed back"
            ))
        };
        let mut updates: Vec<TurnUpdate> = requests.iter().map(notice).collect();
        let mode = options.iter().find(|option| Some(&option.id) == self.mode_option.as_ref());
        if let Some(mode) = mode.and_then(AcpConfigOption::current_text) {
            let (mode_updates, mode_requests) = self.judge_mode(mode);
            updates.extend(mode_updates);
            requests.extend(mode_requests);
        }
        (updates, requests)
    }

    fn judge_mode(&mut self, mode: &str) -> (Vec<TurnUpdate>, Vec<AcpSettingRequest>) {
        let ModeReaction { update, switch_back_to } = self.modes.judge_report(mode);
        let request = switch_back_to.and_then(|back| self.mode_request(&back));
        (update.into_iter().collect(), request.into_iter().collect())
    }

    /// The request that sets this mode, by the agent's own name.
    fn mode_request(&self, mode: &str) -> Option<AcpSettingRequest> {
        let request = match self.mode_setter.as_ref()? {
            AcpModeSetter::Option(id) => self.option_request(id, mode),
            AcpModeSetter::SessionMode => {
                let params = json!({"sessionId": self.session, "modeId": mode});
                AcpSettingRequest { method: "session/set_mode", params, mode: None }
            }
        };
        Some(AcpSettingRequest { mode: Some(mode.to_owned()), ..request })
    }

    fn option_request(&self, id: &str, value: &str) -> AcpSettingRequest {
        let params = json!({"sessionId": self.session, "configId": id, "value": value});
        AcpSettingRequest { method: "session/set_config_option", params, mode: None }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn guard(settings: Value) -> AcpSettingsGuard {
        let offered = [("default", "default"), ("plan", "x#plan")];
        let offered = offered.map(|(name, id)| (name.to_owned(), id.to_owned())).into_iter().collect();
        let modes = AgentModes { offered, fallback: Some("default".to_owned()), ..AgentModes::default() };
        let kept = BTreeMap::from([("allow_all".to_owned(), "off".to_owned())]);
        AcpSettingsGuard::new(SessionId::new("s"), modes, kept, &AcpSessionSettings::parse(settings))
    }

    fn report(update: Value) -> SessionUpdate {
        serde_json::from_value(update).unwrap()
    }

    #[test]
    fn the_mode_is_set_in_the_way_that_the_agent_offers() {
        let guard = guard(json!({"modes": {"currentModeId": "default", "availableModes": []}}));
        let requests = guard.requests_before_turn(Some("plan"), true).unwrap();
        assert_eq!(requests[0].params, json!({"sessionId": "s", "configId": "allow_all", "value": "off"}));
        assert_eq!(requests[1].method, "session/set_mode");
        assert_eq!(requests[1].params, json!({"sessionId": "s", "modeId": "x#plan"}));
        let guard = self::guard(json!({}));
        let refused = guard.requests_before_turn(Some("plan"), false);
        assert_eq!(refused.unwrap_err().code, MODE_UNAVAILABLE);
        assert!(guard.requests_before_turn(None, false).unwrap().is_empty());
    }

    #[test]
    fn an_option_that_makes_the_agent_ask_is_kept_and_one_may_be_the_mode() {
        let option = |id: &str, value: &str| {
            json!({"id": id, "name": id, "category": if id == "m" { "mode" } else { "permissions" }, "type": "select",
                "currentValue": value, "options": [{"value": value, "name": value}]})
        };
        let mut guard = guard(json!({"configOptions": [option("m", "default"), option("allow_all", "off")]}));
        let options = json!([option("m", "x#plan"), option("allow_all", "on")]);
        let update = report(json!({"sessionUpdate": "config_option_update", "configOptions": options}));
        let (updates, requests) = guard.judge_report(&update);
        assert!(
            matches!(&updates[..], [TurnUpdate::Notice { .. }, TurnUpdate::Mode { mode }] if mode == "plan")
        );
        assert_eq!(requests.len(), 1);
        assert_eq!(requests[0].params, json!({"sessionId": "s", "configId": "allow_all", "value": "off"}));
        let requests = guard.requests_before_turn(Some("default"), false).unwrap();
        assert_eq!(requests[0].params, json!({"sessionId": "s", "configId": "m", "value": "default"}));
    }
}
