//! What is peculiar to one agent: its manifest, ready to be used. All that a driver does differently for one agent than
//! for another, it does because of something that stands here.

use agent_client_protocol::v1::schema::Meta;
use qd_protocol::manifest::{FailedWhen, Manifest, QuestionsBy, Refused, Steer, TokensOf};
use qd_protocol::worker::AgentSpec;
use regex::Regex;
use serde_json::Value;

use crate::drivers::price::Pricing;

/// What is peculiar to an agent.
#[derive(Debug, Clone, Default)]
pub(super) struct Profile {
    /// Its verb for a word on the way.
    pub(super) steer: Steer,
    /// What it does when a tool is refused.
    pub(super) refused: Refused,
    /// The mode in which it asks, if it does not begin in that.
    pub(super) ask_mode: Option<String>,
    /// Whether it was told its model when it was started.
    pub(super) model_is_told: bool,
    /// How it asks people questions.
    pub(super) questions: QuestionsBy,
    /// Whether it repeats the past only after it has said that it is ready.
    pub(super) late_replay: bool,
    /// Of what it counts tokens.
    pub(super) tokens_of: TokensOf,
    /// What its tokens cost, until it says so itself.
    pub(super) pricing: Pricing,
    pub(super) errors: Vec<Regex>,
    pub(super) notices: Vec<Regex>,
    pub(super) failed_when: Option<FailedWhen>,
}

impl Profile {
    pub(super) fn of(manifest: &Manifest, spec: &AgentSpec) -> Self {
        // Patterns were tried when the manifest was read; one that got past that matches nothing.
        let patterns = |list: &[String]| list.iter().filter_map(|it| Regex::new(it).ok()).collect();
        Self {
            steer: manifest.turn.steer.clone(),
            refused: manifest.turn.refused,
            ask_mode: manifest.turn.ask_mode.clone(),
            model_is_told: manifest.startup.model_arg.is_some(),
            questions: manifest.turn.questions,
            late_replay: manifest.resume.late_replay,
            tokens_of: manifest.cost.tokens_of,
            pricing: Pricing::of(spec),
            errors: patterns(&manifest.parse.error_lines),
            notices: patterns(&manifest.parse.notice_lines),
            failed_when: manifest.turn.failed_when.clone(),
        }
    }

    /// Whether words are for people and no part of the answer.
    pub(super) fn is_notice(&self, text: &str) -> bool {
        self.notices.iter().any(|pattern| pattern.is_match(text))
    }

    /// Whether words tell that the turn failed.
    pub(super) fn is_error(&self, text: &str) -> bool {
        text.lines().any(|line| self.errors.iter().any(|pattern| pattern.is_match(line)))
    }

    /// Whether an update tells it.
    pub(super) fn tells_failure(&self, meta: Option<&Meta>) -> bool {
        let (Some(FailedWhen { meta: pointer, is }), Some(meta)) = (&self.failed_when, meta) else {
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
        let at = |meta: &str| Profile {
            failed_when: Some(FailedWhen { meta: meta.to_owned(), is: "bad".to_owned() }),
            ..Profile::default()
        };
        let meta = json!({"a": {"b": {"c": "bad"}, "d": "good"}, "e": "bad"});
        let meta = meta.as_object();
        assert!(at("/a/b/c").tells_failure(meta) && at("/e").tells_failure(meta));
        assert!(!at("/a/d").tells_failure(meta) && !at("/x/y").tells_failure(meta));
        assert!(!at("e").tells_failure(meta) && !at("/e").tells_failure(None));
        assert!(!Profile::default().tells_failure(meta));
    }
}
