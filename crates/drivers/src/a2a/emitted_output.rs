//! Keeps what a turn has already emitted, so that nothing is emitted twice: an event may come again after a break, and
//! a task may be polled many times.
//!
//! Artifacts are the agent's answer, and so is its message when it is done. Messages while it works are progress
//! ("looking that up…"), which most agents send as well. They are emitted as thoughts, because an answer with such
//! lines in it is of no use to a program that reads it from a pipe. If an agent sends nothing else, these messages are
//! its answer after all. Then they are emitted again, as text, when it is done.

use std::collections::{BTreeMap, BTreeSet};

use qd_protocol::link::TurnUpdate;

use super::messages::{A2aArtifact, A2aMessage, A2aTask};

/// The most text in one turn, in bytes. An agent that sends more is cancelled: nobody reads that much, and it has to be
/// kept for comparison.
pub(super) const TURN_TEXT_MAX: usize = 64 << 20;

/// The output that was already emitted.
#[derive(Debug, Default)]
pub(super) struct A2aEmittedOutput {
    /// The emitted text of each artifact, by id.
    artifacts: BTreeMap<String, String>,
    /// The artifact that was emitted last.
    last_artifact: Option<String>,
    /// The ids of messages that are done with.
    emitted_messages: BTreeSet<String>,
    /// Progress messages, kept in case they turn out to be the only answer.
    unanswered_progress: Vec<String>,
    /// The last progress text, to recognise repeats of messages without an id.
    last_progress: String,
    /// Whether any of the answer was emitted.
    answer_started: bool,
    /// Whether the emitted answer ends with a newline.
    ends_with_newline: bool,
    /// The size of all text so far.
    bytes: usize,
}

impl A2aEmittedOutput {
    /// Whether the agent has sent more than the limit.
    pub(super) fn exceeds_limit(&self) -> bool {
        self.bytes > TURN_TEXT_MAX
    }

    /// The updates for a piece of an artifact, or for the whole of it again.
    pub(super) fn artifact_updates(&mut self, artifact: &A2aArtifact, append: bool) -> Vec<TurnUpdate> {
        let known = self.artifacts.entry(artifact.id.clone()).or_default();
        let new_text = if append {
            artifact.text.clone()
        } else if let Some(new_text) = artifact.text.strip_prefix(known.as_str()) {
            new_text.to_owned()
        } else if known.starts_with(&artifact.text) {
            // The poll is older than the stream: more than that was already emitted.
            return Vec::new();
        } else {
            known.clear();
            // The text was replaced, and what was emitted before cannot be taken back.
            self.last_artifact = None;
            artifact.text.clone()
        };
        if new_text.is_empty() {
            return Vec::new();
        }
        known.push_str(&new_text);
        let continues = self.last_artifact.as_ref() == Some(&artifact.id);
        self.last_artifact = Some(artifact.id.clone());
        vec![self.answer_update(new_text, continues)]
    }

    /// The updates for everything in a polled task that was not emitted yet.
    pub(super) fn task_updates(&mut self, task: &A2aTask) -> Vec<TurnUpdate> {
        let mut updates = Vec::new();
        // A message without an id cannot be told apart from those already emitted.
        for message in task.history.iter().filter(|message| message.id.is_some()) {
            // The last message is not just progress; it is handled with the task's status.
            if task.status.message.as_ref().is_none_or(|last| last.id != message.id) {
                updates.extend(self.progress_updates(message));
            }
        }
        for artifact in &task.artifacts {
            updates.extend(self.artifact_updates(artifact, false));
        }
        updates
    }

    /// The updates for a progress message.
    pub(super) fn progress_updates(&mut self, message: &A2aMessage) -> Vec<TurnUpdate> {
        if !self.is_new_message(message) {
            return Vec::new();
        }
        self.bytes += message.text.len();
        self.unanswered_progress.push(message.text.clone());
        vec![TurnUpdate::Thought { text: format!("{}\n", message.text) }]
    }

    /// The updates at the end of the task, with its last message if there is one.
    pub(super) fn final_updates(&mut self, message: Option<&A2aMessage>) -> Vec<TurnUpdate> {
        let mut updates = Vec::new();
        if let Some(message) = message
            && self.is_new_message(message)
            && !self.artifacts.values().any(|text| text.contains(message.text.trim()))
        {
            updates.push(self.answer_update(message.text.clone(), false));
        }
        if !self.answer_started && !self.unanswered_progress.is_empty() {
            let text = std::mem::take(&mut self.unanswered_progress).join("\n");
            updates.push(self.answer_update(text, false));
        }
        updates
    }

    /// Marks a message as handled in another way.
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

    /// The update for a piece of the answer. It starts on a new line unless it continues the piece before.
    fn answer_update(&mut self, text: String, continues: bool) -> TurnUpdate {
        let text = if self.answer_started && !continues && !self.ends_with_newline && !text.starts_with('\n')
        {
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
    use crate::a2a::messages::{A2aTaskRef, A2aTaskState, A2aTaskStatus};

    fn artifact(id: &str, text: &str) -> A2aArtifact {
        A2aArtifact { id: id.to_owned(), text: text.to_owned() }
    }

    fn message(id: Option<&str>, text: &str) -> A2aMessage {
        A2aMessage { id: id.map(str::to_owned), task_ref: A2aTaskRef::default(), text: text.to_owned() }
    }

    fn joined(updates: Vec<TurnUpdate>) -> String {
        let text = |update: TurnUpdate| match update {
            TurnUpdate::Text { text } => text,
            TurnUpdate::Thought { text } => format!("({})", text.trim_end()),
            other => panic!("not emitted here: {other:?}"),
        };
        updates.into_iter().map(text).collect()
    }

    #[test]
    fn an_artifact_that_is_sent_again_is_emitted_as_far_as_it_is_new() {
        let mut output = A2aEmittedOutput::default();
        assert_eq!(joined(output.artifact_updates(&artifact("a", "one "), false)), "one ");
        assert_eq!(joined(output.artifact_updates(&artifact("a", "two"), true)), "two");
        assert_eq!(joined(output.artifact_updates(&artifact("a", "one two"), false)), "");
        assert_eq!(joined(output.artifact_updates(&artifact("a", "one"), false)), "", "an older poll");
        assert_eq!(joined(output.artifact_updates(&artifact("a", "one two three"), false)), " three");
        assert_eq!(joined(output.artifact_updates(&artifact("a", "another"), false)), "\nanother");
        assert_eq!(joined(output.artifact_updates(&artifact("b", "second\n"), false)), "\nsecond\n");
        assert_eq!(
            joined(output.artifact_updates(&artifact("a", " one"), true)),
            " one",
            "on a line of its own already"
        );
    }

    #[test]
    fn progress_messages_are_thoughts_and_are_emitted_once() {
        let mut output = A2aEmittedOutput::default();
        assert_eq!(joined(output.progress_updates(&message(Some("m"), "looking"))), "(looking)");
        assert_eq!(joined(output.progress_updates(&message(Some("m"), "looking"))), "");
        assert_eq!(joined(output.progress_updates(&message(None, "still"))), "(still)");
        assert_eq!(joined(output.progress_updates(&message(None, "still"))), "");
        assert_eq!(joined(output.progress_updates(&message(Some("n"), " "))), "");
        assert_eq!(joined(output.artifact_updates(&artifact("a", "42"), false)), "42");
        assert_eq!(joined(output.final_updates(None)), "", "there is an answer, so they were only progress");
    }

    #[test]
    fn an_answer_is_never_missing_from_the_text() {
        let mut output = A2aEmittedOutput::default();
        output.progress_updates(&message(Some("m"), "thinking"));
        assert_eq!(joined(output.final_updates(Some(&message(Some("n"), "42")))), "42", "its last message");
        let mut output = A2aEmittedOutput::default();
        output.progress_updates(&message(Some("m"), "it is"));
        output.progress_updates(&message(Some("n"), "42"));
        assert_eq!(joined(output.final_updates(None)), "it is\n42", "nothing but progress");
        let mut output = A2aEmittedOutput::default();
        output.artifact_updates(&artifact("a", "the answer is 42\n"), false);
        assert_eq!(
            joined(output.final_updates(Some(&message(Some("n"), "the answer is 42")))),
            "",
            "it was emitted"
        );
        assert_eq!(joined(output.final_updates(Some(&message(Some("o"), "goodbye")))), "goodbye");
    }

    #[test]
    fn a_poll_emits_what_was_missed_and_leaves_the_last_message_to_the_status() {
        let mut output = A2aEmittedOutput::default();
        output.progress_updates(&message(Some("1"), "first"));
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
        assert_eq!(joined(output.task_updates(&task)), "(second)made");
        assert_eq!(joined(output.task_updates(&task)), "");
    }

    #[test]
    fn endless_output_exceeds_the_limit() {
        let mut output = A2aEmittedOutput::default();
        let piece = artifact("a", &"x".repeat(TURN_TEXT_MAX / 4));
        (0..4).for_each(|_| drop(output.artifact_updates(&piece, true)));
        assert!(!output.exceeds_limit());
        output.artifact_updates(&artifact("a", "x"), true);
        assert!(output.exceeds_limit());
    }
}
