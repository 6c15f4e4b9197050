//! The quirks of one agent, taken from its manifest and ready to use. Everything that the ACP driver does differently
//! for one agent than for another depends on a field here.

use std::collections::BTreeMap;

use agent_client_protocol::v1::schema::Meta;
use qd_protocol::manifest::{
    AgentModes, FailureMarker, Manifest, QuestionMethod, RefusalRule, SlashCommandRules, SteerMethod,
    TokenScope,
};
use qd_protocol::worker::AgentSpec;
use regex::Regex;
use serde_json::Value;

use crate::pricing::TokenPricing;

/// The quirks of one ACP agent.
#[derive(Debug, Clone, Default)]
pub(super) struct AcpProfile {
    /// How the agent takes a steer.
    pub(super) steer: SteerMethod,
    /// What the agent does after a tool was refused.
    pub(super) on_tool_refused: RefusalRule,
    /// The session mode in which the agent asks for permission, if it does not start in that mode.
    pub(super) ask_mode: Option<String>,
    /// Whether we do not offer to read files for the agent.
    pub(super) reads_files_itself: bool,
    /// Whether the model was given on the command line, so that it need not be set over the protocol.
    pub(super) model_set_at_start: bool,
    pub(super) questions: QuestionMethod,
    /// Whether the agent replays the old conversation only after it has answered the resume request.
    pub(super) late_replay: bool,
    /// Whether the agent's token counts are per turn or per session.
    pub(super) tokens_of: TokenScope,
    /// The price of tokens, used until the agent reports a cost itself.
    pub(super) pricing: TokenPricing,
    pub(super) error_patterns: Vec<Regex>,
    pub(super) notice_patterns: Vec<Regex>,
    pub(super) failed_when: Option<FailureMarker>,
    /// What opens a session in which the agent asks before it acts.
    pub(super) session_meta: Meta,
    pub(super) slash_commands: SlashCommandRules,
    pub(super) todo_tools: Vec<String>,
    /// What ends the tool's name at the beginning of a call's id.
    pub(super) name_in_call_id: Option<String>,
    /// Whether the text with which a call is announced describes it.
    pub(super) describes_calls: bool,
    pub(super) modes: AgentModes,
    /// Options of the session that must have these values, so that the agent asks before it acts.
    pub(super) kept_options: BTreeMap<String, String>,
}

impl AcpProfile {
    pub(super) fn from_manifest(manifest: &Manifest, spec: &AgentSpec) -> Self {
        // The manifest's patterns were validated when it was read. A bad one that got past that matches nothing.
        let patterns = |list: &[String]| list.iter().filter_map(|pattern| Regex::new(pattern).ok()).collect();
        Self {
            steer: manifest.turn.steer.clone(),
            on_tool_refused: manifest.turn.refused,
            ask_mode: manifest.turn.ask_mode.clone(),
            reads_files_itself: manifest.turn.reads_files_itself,
            model_set_at_start: manifest.startup.model_arg.is_some(),
            questions: manifest.turn.questions,
            late_replay: manifest.resume.late_replay,
            tokens_of: manifest.cost.tokens_of,
            pricing: TokenPricing::from_spec(spec),
            error_patterns: patterns(&manifest.parse.error_lines),
            notice_patterns: patterns(&manifest.parse.notice_lines),
            failed_when: manifest.turn.failed_when.clone(),
            session_meta: manifest.policy.session_meta.clone(),
            slash_commands: manifest.turn.slash_commands.clone(),
            todo_tools: manifest.turn.todo_tools.clone(),
            name_in_call_id: manifest.turn.name_in_call_id.clone(),
            describes_calls: manifest.turn.describes_calls,
            modes: manifest.modes.clone(),
            kept_options: manifest.policy.session_options.clone(),
        }
    }

    /// Whether the text is a notice for people and not part of the answer.
    pub(super) fn is_notice(&self, text: &str) -> bool {
        self.notice_patterns.iter().any(|pattern| pattern.is_match(text))
    }

    /// Whether a line of the text matches an error pattern.
    pub(super) fn is_error(&self, text: &str) -> bool {
        text.lines().any(|line| self.error_patterns.iter().any(|pattern| pattern.is_match(line)))
    }

    /// Whether the `_meta` of an update marks the turn as failed.
    pub(super) fn reports_failure(&self, meta: Option<&Meta>) -> bool {
        let (Some(FailureMarker { meta: pointer, is }), Some(meta)) = (&self.failed_when, meta) else {
            return false;
        };
        // `Meta` is a map and has no `pointer()`. Looking up the first segment here saves cloning it into a `Value` for
        // every update.
        let Some((first, rest)) = pointer.strip_prefix('/').map(|it| it.split_once('/').unwrap_or((it, "")))
        else {
            return false;
        };
        let found = meta.get(first).and_then(|value| match rest.is_empty() {
            true => Some(value),
            false => value.pointer(&format!("/{rest}")),
        });
        found.and_then(Value::as_str) == Some(is)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_failure_is_known_by_a_value_at_a_pointer() {
        let profile_with_pointer = |meta: &str| AcpProfile {
            failed_when: Some(FailureMarker { meta: meta.to_owned(), is: "bad".to_owned() }),
            ..AcpProfile::default()
        };
        let meta = json!({"a": {"b": {"c": "bad"}, "d": "good"}, "e": "bad"});
        let meta = meta.as_object();
        assert!(
            profile_with_pointer("/a/b/c").reports_failure(meta)
                && profile_with_pointer("/e").reports_failure(meta)
        );
        assert!(
            !profile_with_pointer("/a/d").reports_failure(meta)
                && !profile_with_pointer("/x/y").reports_failure(meta)
        );
        assert!(
            !profile_with_pointer("e").reports_failure(meta)
                && !profile_with_pointer("/e").reports_failure(None)
        );
        assert!(!AcpProfile::default().reports_failure(meta));
    }
}
