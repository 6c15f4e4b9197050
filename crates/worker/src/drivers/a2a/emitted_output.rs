//! What of a turn has been told, so that nothing is told twice: an event may come again after a break, and a task may be
//! looked at again and again.
//!
//! What an agent makes is its answer, and so is what it says when it is done. What it says while it works is progress
//! ("looking that up…"), which most agents send besides: it is told as thought, because an answer with such lines in it
//! is of no use to whoever reads it from a pipe. An agent that says nothing else has answered by them after all; then
//! they are told again, as text, when it is done.

use std::collections::{BTreeMap, BTreeSet};

use qd_protocol::link::TurnUpdate;

use super::messages::{A2aArtifact, A2aMessage, A2aTask};

/// The text of one turn that is remembered. An agent that makes more is stopped: nobody reads that, and it has to be
/// kept to be compared.
pub(super) const TURN_TEXT_MAX: usize = 64 << 20;

/// What has been told.
#[derive(Debug, Default)]
pub(super) struct A2aEmittedOutput {
    /// What was made, by its id, as far as it was told.
    artifacts: BTreeMap<String, String>,
    /// The one that was told last.
    last_artifact: Option<String>,
    /// Messages of which nothing more is to be told.
    emitted_messages: BTreeSet<String>,
    /// Words on the way, of which no answer has come yet.
    unanswered_progress: Vec<String>,
    /// The last of all words on the way, for those that come without an id.
    last_progress: String,
    /// Whether any of the answer was told, and whether that ended with its line.
    answer_started: bool,
    ends_with_newline: bool,
    /// How much of all this there is.
    bytes: usize,
}

impl A2aEmittedOutput {
    /// Whether an agent says more than is taken.
    pub(super) fn exceeds_limit(&self) -> bool {
        self.bytes > TURN_TEXT_MAX
    }

    /// A piece of what the agent makes, or all of it again.
    pub(super) fn artifact_updates(&mut self, artifact: &A2aArtifact, append: bool) -> Vec<TurnUpdate> {
        let known = self.artifacts.entry(artifact.id.clone()).or_default();
        let more = if append {
            artifact.text.clone()
        } else if let Some(more) = artifact.text.strip_prefix(known.as_str()) {
            more.to_owned()
        } else if known.starts_with(&artifact.text) {
            // A look that came from behind: more than that has been told.
            return Vec::new();
        } else {
            known.clear();
            // It is another text, and what was told before cannot be taken back.
            self.last_artifact = None;
            artifact.text.clone()
        };
        if more.is_empty() {
            return Vec::new();
        }
        known.push_str(&more);
        let goes_on = self.last_artifact.as_ref() == Some(&artifact.id);
        self.last_artifact = Some(artifact.id.clone());
        vec![self.answer_update(more, goes_on)]
    }

    /// What a look at a task shows that has not been told.
    pub(super) fn task_updates(&mut self, task: &A2aTask) -> Vec<TurnUpdate> {
        let mut said = Vec::new();
        // Without a name it cannot be told from what was told before.
        for message in task.history.iter().filter(|message| message.id.is_some()) {
            // The last word of all says more than progress, and is told by how the task stands.
            if task.status.message.as_ref().is_none_or(|last| last.id != message.id) {
                said.extend(self.progress_updates(message));
            }
        }
        for artifact in &task.artifacts {
            said.extend(self.artifact_updates(artifact, false));
        }
        said
    }

    /// Words on the way.
    pub(super) fn progress_updates(&mut self, message: &A2aMessage) -> Vec<TurnUpdate> {
        if !self.is_new_message(message) {
            return Vec::new();
        }
        self.bytes += message.text.len();
        self.unanswered_progress.push(message.text.clone());
        vec![TurnUpdate::Thought { text: format!("{}\n", message.text) }]
    }

    /// The agent is done, with these words if any.
    pub(super) fn final_updates(&mut self, message: Option<&A2aMessage>) -> Vec<TurnUpdate> {
        let mut said = Vec::new();
        if let Some(message) = message
            && self.is_new_message(message)
            && !self.artifacts.values().any(|made| made.contains(message.text.trim()))
        {
            said.push(self.answer_update(message.text.clone(), false));
        }
        if !self.answer_started && !self.unanswered_progress.is_empty() {
            let words = std::mem::take(&mut self.unanswered_progress).join("\n");
            said.push(self.answer_update(words, false));
        }
        said
    }

    /// A message that is answered, or told in another way.
    pub(super) fn mark_emitted(&mut self, message: &A2aMessage) {
        self.emitted_messages.extend(message.id.clone());
    }

    fn is_new_message(&mut self, message: &A2aMessage) -> bool {
        if message.text.trim().is_empty() {
            return false;
        }
        let new = match &message.id {
            Some(id) => self.emitted_messages.insert(id.clone()),
            None => self.last_progress != message.text,
        };
        if new {
            self.last_progress.clone_from(&message.text);
        }
        new
    }

    /// A piece of the answer, on a line of its own unless it goes on with what was told last.
    fn answer_update(&mut self, text: String, goes_on: bool) -> TurnUpdate {
        let text = if self.answer_started && !goes_on && !self.ends_with_newline && !text.starts_with('\n') {
            format!("\n{text}")
        } else if self.answer_started {
            text
        } else {
            text.trim_start_matches('\n').to_owned()
        };
        self.bytes += text.len();
        self.answer_started = true;
        self.ends_with_newline = text.ends_with('\n');
        TurnUpdate::Text { text }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::drivers::a2a::messages::{A2aTaskRef, A2aTaskState, A2aTaskStatus};

    fn artifact(id: &str, text: &str) -> A2aArtifact {
        A2aArtifact { id: id.to_owned(), text: text.to_owned() }
    }

    fn message(id: Option<&str>, text: &str) -> A2aMessage {
        A2aMessage { id: id.map(str::to_owned), task_ref: A2aTaskRef::default(), text: text.to_owned() }
    }

    fn joined(said: Vec<TurnUpdate>) -> String {
        let text = |said: TurnUpdate| match said {
            TurnUpdate::Text { text } => text,
            TurnUpdate::Thought { text } => format!("({})", text.trim_end()),
            other => panic!("not told here: {other:?}"),
        };
        said.into_iter().map(text).collect()
    }

    #[test]
    fn what_is_made_again_is_told_as_far_as_it_is_new() {
        let mut told = A2aEmittedOutput::default();
        assert_eq!(joined(told.artifact_updates(&artifact("a", "one "), false)), "one ");
        assert_eq!(joined(told.artifact_updates(&artifact("a", "two"), true)), "two");
        assert_eq!(joined(told.artifact_updates(&artifact("a", "one two"), false)), "");
        assert_eq!(joined(told.artifact_updates(&artifact("a", "one"), false)), "", "a look from behind");
        assert_eq!(joined(told.artifact_updates(&artifact("a", "one two three"), false)), " three");
        assert_eq!(joined(told.artifact_updates(&artifact("a", "another"), false)), "\nanother");
        assert_eq!(joined(told.artifact_updates(&artifact("b", "second\n"), false)), "\nsecond\n");
        assert_eq!(
            joined(told.artifact_updates(&artifact("a", " one"), true)),
            " one",
            "on a line of its own already"
        );
    }

    #[test]
    fn words_on_the_way_are_thoughts_and_are_told_once() {
        let mut told = A2aEmittedOutput::default();
        assert_eq!(joined(told.progress_updates(&message(Some("m"), "looking"))), "(looking)");
        assert_eq!(joined(told.progress_updates(&message(Some("m"), "looking"))), "");
        assert_eq!(joined(told.progress_updates(&message(None, "still"))), "(still)");
        assert_eq!(joined(told.progress_updates(&message(None, "still"))), "");
        assert_eq!(joined(told.progress_updates(&message(Some("n"), " "))), "");
        assert_eq!(joined(told.artifact_updates(&artifact("a", "42"), false)), "42");
        assert_eq!(joined(told.final_updates(None)), "", "there is an answer, so they were only thoughts");
    }

    #[test]
    fn an_answer_is_never_missing_from_the_text() {
        let mut told = A2aEmittedOutput::default();
        told.progress_updates(&message(Some("m"), "thinking"));
        assert_eq!(joined(told.final_updates(Some(&message(Some("n"), "42")))), "42", "its last word");
        let mut told = A2aEmittedOutput::default();
        told.progress_updates(&message(Some("m"), "it is"));
        told.progress_updates(&message(Some("n"), "42"));
        assert_eq!(joined(told.final_updates(None)), "it is\n42", "nothing but words on the way");
        let mut told = A2aEmittedOutput::default();
        told.artifact_updates(&artifact("a", "the answer is 42\n"), false);
        assert_eq!(
            joined(told.final_updates(Some(&message(Some("n"), "the answer is 42")))),
            "",
            "it was told"
        );
        assert_eq!(joined(told.final_updates(Some(&message(Some("o"), "goodbye")))), "goodbye");
    }

    #[test]
    fn a_look_tells_what_was_missed_and_leaves_the_last_word_to_the_status() {
        let mut told = A2aEmittedOutput::default();
        told.progress_updates(&message(Some("1"), "first"));
        let last = message(Some("3"), "third");
        let task = A2aTask {
            task_ref: A2aTaskRef::default(),
            status: A2aTaskStatus {
                state: A2aTaskState::Working,
                message: Some(last.clone()),
                timestamp: String::new(),
            },
            artifacts: vec![artifact("a", "made")],
            history: vec![
                message(Some("1"), "first"),
                message(Some("2"), "second"),
                last,
                message(None, "?"),
            ],
        };
        assert_eq!(joined(told.task_updates(&task)), "(second)made");
        assert_eq!(joined(told.task_updates(&task)), "");
    }

    #[test]
    fn an_agent_without_end_is_noticed() {
        let mut told = A2aEmittedOutput::default();
        let piece = artifact("a", &"x".repeat(TURN_TEXT_MAX / 4));
        (0..4).for_each(|_| drop(told.artifact_updates(&piece, true)));
        assert!(!told.exceeds_limit());
        told.artifact_updates(&artifact("a", "x"), true);
        assert!(told.exceeds_limit());
    }
}
