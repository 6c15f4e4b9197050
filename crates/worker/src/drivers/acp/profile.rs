//! What is peculiar to one agent: its manifest, ready to be used. All that a driver does differently for one agent than
//! for another, it does because of something that stands here.

use agent_client_protocol::v1::schema::Meta;
use qd_protocol::manifest::{FailureMarker, Manifest, QuestionMethod, RefusalRule, SteerMethod, TokenScope};
use qd_protocol::worker::AgentSpec;
use regex::Regex;
use serde_json::Value;

use crate::drivers::pricing::TokenPricing;

/// What is peculiar to an agent.
#[derive(Debug, Clone, Default)]
pub(super) struct AcpProfile {
    /// Its verb for a word on the way.
    pub(super) steer: SteerMethod,
    /// What it does when a tool is refused.
    pub(super) on_tool_refused: RefusalRule,
    /// The mode in which it asks, if it does not begin in that.
    pub(super) ask_mode: Option<String>,
    /// Whether it was told its model when it was started.
    pub(super) model_set_at_start: bool,
    /// How it asks people questions.
    pub(super) questions: QuestionMethod,
    /// Whether it repeats the past only after it has said that it is ready.
    pub(super) late_replay: bool,
    /// Of what it counts tokens.
    pub(super) tokens_of: TokenScope,
    /// What its tokens cost, until it says so itself.
    pub(super) pricing: TokenPricing,
    pub(super) error_patterns: Vec<Regex>,
    pub(super) notice_patterns: Vec<Regex>,
    pub(super) failed_when: Option<FailureMarker>,
}

impl AcpProfile {
    pub(super) fn from_manifest(manifest: &Manifest, spec: &AgentSpec) -> Self {
        // Patterns were tried when the manifest was read; one that got past that matches nothing.
        let patterns = |list: &[String]| list.iter().filter_map(|it| Regex::new(it).ok()).collect();
        Self {
            steer: manifest.turn.steer.clone(),
            on_tool_refused: manifest.turn.refused,
            ask_mode: manifest.turn.ask_mode.clone(),
            model_set_at_start: manifest.startup.model_arg.is_some(),
            questions: manifest.turn.questions,
            late_replay: manifest.resume.late_replay,
            tokens_of: manifest.cost.tokens_of,
            pricing: TokenPricing::from_spec(spec),
            error_patterns: patterns(&manifest.parse.error_lines),
            notice_patterns: patterns(&manifest.parse.notice_lines),
            failed_when: manifest.turn.failed_when.clone(),
        }
    }

    /// Whether words are for people and no part of the answer.
    pub(super) fn is_notice(&self, text: &str) -> bool {
        self.notice_patterns.iter().any(|pattern| pattern.is_match(text))
    }

    /// Whether words tell that the turn failed.
    pub(super) fn is_error(&self, text: &str) -> bool {
        text.lines().any(|line| self.error_patterns.iter().any(|pattern| pattern.is_match(line)))
    }

    /// Whether an update tells it.
    pub(super) fn reports_failure(&self, meta: Option<&Meta>) -> bool {
        let (Some(FailureMarker { meta: pointer, is }), Some(meta)) = (&self.failed_when, meta) else {
            return false;
        };
        // Not cloned for every update: the first step of the pointer is taken by hand.
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
    fn a_failure_is_known_by_a_word_at_its_place() {
        let at = |meta: &str| AcpProfile {
            failed_when: Some(FailureMarker { meta: meta.to_owned(), is: "bad".to_owned() }),
            ..AcpProfile::default()
        };
        let meta = json!({"a": {"b": {"c": "bad"}, "d": "good"}, "e": "bad"});
        let meta = meta.as_object();
        assert!(at("/a/b/c").reports_failure(meta) && at("/e").reports_failure(meta));
        assert!(!at("/a/d").reports_failure(meta) && !at("/x/y").reports_failure(meta));
        assert!(!at("e").reports_failure(meta) && !at("/e").reports_failure(None));
        assert!(!AcpProfile::default().reports_failure(meta));
    }
}
