//! What of a turn has been told, so that nothing is told twice: an event may come again after a break, and a task may be
//! looked at again and again.
//!
//! What an agent makes is its answer, and so is what it says when it is done. What it says while it works is progress
//! ("looking that up…"), which most agents send besides: it is told as thought, because an answer with such lines in it
//! is of no use to whoever reads it from a pipe. An agent that says nothing else has answered by them after all; then
//! they are told again, as text, when it is done.

use std::collections::{BTreeMap, BTreeSet};

use qd_protocol::link::Said;

use super::words::{Artifact, Message, Task};

/// The text of one turn that is remembered. An agent that makes more is stopped: nobody reads that, and it has to be
/// kept to be compared.
pub(super) const ANSWER_MAX: usize = 64 << 20;

/// What has been told.
#[derive(Debug, Default)]
pub(super) struct Told {
    /// What was made, by its id, as far as it was told.
    artifacts: BTreeMap<String, String>,
    /// The one that was told last.
    last: Option<String>,
    /// Messages of which nothing more is to be told.
    messages: BTreeSet<String>,
    /// Words on the way, of which no answer has come yet.
    progress: Vec<String>,
    /// The last of all words on the way, for those that come without an id.
    last_words: String,
    /// Whether any of the answer was told, and whether that ended with its line.
    begun: bool,
    line_ended: bool,
    /// How much of all this there is.
    bytes: usize,
}

impl Told {
    /// Whether an agent says more than is taken.
    pub(super) fn is_too_much(&self) -> bool {
        self.bytes > ANSWER_MAX
    }

    /// A piece of what the agent makes, or all of it again.
    pub(super) fn artifact(&mut self, artifact: &Artifact, append: bool) -> Vec<Said> {
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
            self.last = None;
            artifact.text.clone()
        };
        if more.is_empty() {
            return Vec::new();
        }
        known.push_str(&more);
        let goes_on = self.last.as_ref() == Some(&artifact.id);
        self.last = Some(artifact.id.clone());
        vec![self.text(more, goes_on)]
    }

    /// What a look at a task shows that has not been told.
    pub(super) fn task(&mut self, task: &Task) -> Vec<Said> {
        let mut said = Vec::new();
        // Without a name it cannot be told from what was told before.
        for message in task.history.iter().filter(|message| message.id.is_some()) {
            // The last word of all says more than progress, and is told by how the task stands.
            if task.status.message.as_ref().is_none_or(|last| last.id != message.id) {
                said.extend(self.progress(message));
            }
        }
        for artifact in &task.artifacts {
            said.extend(self.artifact(artifact, false));
        }
        said
    }

    /// Words on the way.
    pub(super) fn progress(&mut self, message: &Message) -> Vec<Said> {
        if !self.is_new(message) {
            return Vec::new();
        }
        self.bytes += message.text.len();
        self.progress.push(message.text.clone());
        vec![Said::Thought { text: format!("{}\n", message.text) }]
    }

    /// The agent is done, with these words if any.
    pub(super) fn done(&mut self, message: Option<&Message>) -> Vec<Said> {
        let mut said = Vec::new();
        if let Some(message) = message
            && self.is_new(message)
            && !self.artifacts.values().any(|made| made.contains(message.text.trim()))
        {
            said.push(self.text(message.text.clone(), false));
        }
        if !self.begun && !self.progress.is_empty() {
            let words = std::mem::take(&mut self.progress).join("\n");
            said.push(self.text(words, false));
        }
        said
    }

    /// A message that is answered, or told in another way.
    pub(super) fn pass_over(&mut self, message: &Message) {
        self.messages.extend(message.id.clone());
    }

    fn is_new(&mut self, message: &Message) -> bool {
        if message.text.trim().is_empty() {
            return false;
        }
        let new = match &message.id {
            Some(id) => self.messages.insert(id.clone()),
            None => self.last_words != message.text,
        };
        if new {
            self.last_words.clone_from(&message.text);
        }
        new
    }

    /// A piece of the answer, on a line of its own unless it goes on with what was told last.
    fn text(&mut self, text: String, goes_on: bool) -> Said {
        let text = if self.begun && !goes_on && !self.line_ended && !text.starts_with('\n') {
            format!("\n{text}")
        } else if self.begun {
            text
        } else {
            text.trim_start_matches('\n').to_owned()
        };
        self.bytes += text.len();
        self.begun = true;
        self.line_ended = text.ends_with('\n');
        Said::Text { text }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::drivers::a2a::words::{Of, State, Status};

    fn artifact(id: &str, text: &str) -> Artifact {
        Artifact { id: id.to_owned(), text: text.to_owned() }
    }

    fn message(id: Option<&str>, text: &str) -> Message {
        Message { id: id.map(str::to_owned), of: Of::default(), text: text.to_owned() }
    }

    fn joined(said: Vec<Said>) -> String {
        let text = |said: Said| match said {
            Said::Text { text } => text,
            Said::Thought { text } => format!("({})", text.trim_end()),
            other => panic!("not told here: {other:?}"),
        };
        said.into_iter().map(text).collect()
    }

    #[test]
    fn what_is_made_again_is_told_as_far_as_it_is_new() {
        let mut told = Told::default();
        assert_eq!(joined(told.artifact(&artifact("a", "one "), false)), "one ");
        assert_eq!(joined(told.artifact(&artifact("a", "two"), true)), "two");
        assert_eq!(joined(told.artifact(&artifact("a", "one two"), false)), "");
        assert_eq!(joined(told.artifact(&artifact("a", "one"), false)), "", "a look from behind");
        assert_eq!(joined(told.artifact(&artifact("a", "one two three"), false)), " three");
        assert_eq!(joined(told.artifact(&artifact("a", "another"), false)), "\nanother");
        assert_eq!(joined(told.artifact(&artifact("b", "second\n"), false)), "\nsecond\n");
        assert_eq!(
            joined(told.artifact(&artifact("a", " one"), true)),
            " one",
            "on a line of its own already"
        );
    }

    #[test]
    fn words_on_the_way_are_thoughts_and_are_told_once() {
        let mut told = Told::default();
        assert_eq!(joined(told.progress(&message(Some("m"), "looking"))), "(looking)");
        assert_eq!(joined(told.progress(&message(Some("m"), "looking"))), "");
        assert_eq!(joined(told.progress(&message(None, "still"))), "(still)");
        assert_eq!(joined(told.progress(&message(None, "still"))), "");
        assert_eq!(joined(told.progress(&message(Some("n"), " "))), "");
        assert_eq!(joined(told.artifact(&artifact("a", "42"), false)), "42");
        assert_eq!(joined(told.done(None)), "", "there is an answer, so they were only thoughts");
    }

    #[test]
    fn an_answer_is_never_missing_from_the_text() {
        let mut told = Told::default();
        told.progress(&message(Some("m"), "thinking"));
        assert_eq!(joined(told.done(Some(&message(Some("n"), "42")))), "42", "its last word");
        let mut told = Told::default();
        told.progress(&message(Some("m"), "it is"));
        told.progress(&message(Some("n"), "42"));
        assert_eq!(joined(told.done(None)), "it is\n42", "nothing but words on the way");
        let mut told = Told::default();
        told.artifact(&artifact("a", "the answer is 42\n"), false);
        assert_eq!(joined(told.done(Some(&message(Some("n"), "the answer is 42")))), "", "it was told");
        assert_eq!(joined(told.done(Some(&message(Some("o"), "goodbye")))), "goodbye");
    }

    #[test]
    fn a_look_tells_what_was_missed_and_leaves_the_last_word_to_the_status() {
        let mut told = Told::default();
        told.progress(&message(Some("1"), "first"));
        let last = message(Some("3"), "third");
        let task = Task {
            of: Of::default(),
            status: Status { state: State::Working, message: Some(last.clone()), timestamp: String::new() },
            artifacts: vec![artifact("a", "made")],
            history: vec![
                message(Some("1"), "first"),
                message(Some("2"), "second"),
                last,
                message(None, "?"),
            ],
        };
        assert_eq!(joined(told.task(&task)), "(second)made");
        assert_eq!(joined(told.task(&task)), "");
    }

    #[test]
    fn an_agent_without_end_is_noticed() {
        let mut told = Told::default();
        let piece = artifact("a", &"x".repeat(ANSWER_MAX / 4));
        (0..4).for_each(|_| drop(told.artifact(&piece, true)));
        assert!(!told.is_too_much());
        told.artifact(&artifact("a", "x"), true);
        assert!(told.is_too_much());
    }
}
