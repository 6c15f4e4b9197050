//! What an agent has said and its session has not taken yet: neighbours merged, long text cut, all of it numbered,
//! and a bound on how much of it may wait. No task, lock or transport is known here, so that a socket can use it too.

use qd_protocol::limits::{DELTA_MAX, LINK_WINDOW};
use qd_protocol::link::{AgentUpdate, TurnUpdate, UpdateNumber};
use serde_json::Value;

/// Bytes an agent may have said that its session has not taken yet. [`LINK_WINDOW`] alone would let two hundred large
/// tool outputs wait.
pub const WINDOW_BYTES: usize = 8 << 20;
/// Asks that may wait beyond the window, so that a question is not held up by the words before it.
pub const PENDING_ASKS_MAX: usize = 64;

/// Something said, with its number in the session.
#[derive(Debug, Clone, PartialEq)]
pub struct NumberedUpdate {
    /// Its number.
    pub number: UpdateNumber,
    /// What was said.
    pub update: AgentUpdate,
}

/// What waits to be taken.
#[derive(Debug)]
pub(crate) struct UpdateWindow {
    /// The last number that was given.
    last: UpdateNumber,
    /// A plain vector: it is only ever taken whole, and an empty one costs nothing while the agent is idle.
    updates: Vec<NumberedUpdate>,
    /// What the things weigh together.
    bytes: usize,
}

impl UpdateWindow {
    pub(crate) fn starting_after(last: UpdateNumber) -> Self {
        Self { last, updates: Vec::new(), bytes: 0 }
    }

    /// Takes one piece in, or gives it back if it has to wait. It may be added to the last thing that waits; nothing is
    /// ever added to what was taken.
    #[must_use]
    pub(crate) fn try_push(&mut self, up: AgentUpdate) -> Option<AgentUpdate> {
        if !self.accepts(&up) {
            return Some(up);
        }
        self.push(up);
        None
    }

    /// Whether there is room for this piece.
    pub(crate) fn accepts(&self, up: &AgentUpdate) -> bool {
        self.has_room(up, self.merges_with_last(up))
    }

    /// Takes one piece in, room or not.
    pub(crate) fn push(&mut self, up: AgentUpdate) {
        let merges = self.merges_with_last(&up);
        self.bytes = self.bytes.saturating_add(approximate_bytes(&up));
        if merges && let (Some(last), Some(more)) = (self.updates.last_mut(), streamed_text(&up)) {
            if let Some(text) = streamed_text_mut(&mut last.update) {
                text.push_str(more);
            }
        } else {
            self.last = UpdateNumber(self.last.0 + 1);
            self.updates.push(NumberedUpdate { number: self.last, update: up });
        }
    }

    fn merges_with_last(&self, up: &AgentUpdate) -> bool {
        self.updates.last().is_some_and(|last| can_merge(&last.update, up))
    }

    /// All that waits, in order.
    pub(crate) fn take(&mut self) -> Vec<NumberedUpdate> {
        self.bytes = 0;
        std::mem::take(&mut self.updates)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.updates.is_empty()
    }

    /// Only what an agent says of its own accord waits. The rest answers something the session sent, so the session
    /// has bounded it already; if it waited, an agent that must stop could not say that it has.
    fn has_room(&self, up: &AgentUpdate, merges: bool) -> bool {
        match up {
            AgentUpdate::Turn { .. } => {
                (merges || self.updates.len() < LINK_WINDOW) && self.bytes < WINDOW_BYTES
            }
            AgentUpdate::Ask { .. } => self.updates.len() < LINK_WINDOW + PENDING_ASKS_MAX,
            AgentUpdate::Ready { .. }
            | AgentUpdate::AskWithdrawn { .. }
            | AgentUpdate::AskDelivered { .. }
            | AgentUpdate::SteerTaken { .. }
            | AgentUpdate::SteerMissed { .. }
            | AgentUpdate::Terminal { .. }
            | AgentUpdate::Rested
            | AgentUpdate::Gone(_) => true,
        }
    }
}

/// Cuts text that is longer than [`DELTA_MAX`] on character borders; leaves everything else whole, and nothing of an
/// empty piece.
pub(crate) fn split_update(mut up: AgentUpdate) -> UpdatePieces {
    match streamed_text_mut(&mut up) {
        Some(text) if text.is_empty() => UpdatePieces::Whole(None),
        Some(text) if text.len() > DELTA_MAX => {
            let text = std::mem::take(text);
            UpdatePieces::Cut { template: up, text, offset: 0 }
        }
        _ => UpdatePieces::Whole(Some(up)),
    }
}

/// See [`pieces`].
#[derive(Debug)]
pub(crate) enum UpdatePieces {
    /// It was short enough.
    Whole(Option<AgentUpdate>),
    /// What is left of it begins at `at`.
    Cut { template: AgentUpdate, text: String, offset: usize },
}

impl Iterator for UpdatePieces {
    type Item = AgentUpdate;

    fn next(&mut self) -> Option<AgentUpdate> {
        match self {
            Self::Whole(up) => up.take(),
            Self::Cut { template: mould, text, offset: at } => {
                let end = text.floor_char_boundary(at.saturating_add(DELTA_MAX));
                if *at >= end {
                    return None;
                }
                let mut piece = mould.clone();
                if let Some(slot) = streamed_text_mut(&mut piece) {
                    slot.push_str(&text[*at..end]);
                }
                *at = end;
                Some(piece)
            }
        }
    }
}

/// Whether `next` can be added to the end of `last` without anybody noticing.
fn can_merge(last: &AgentUpdate, next: &AgentUpdate) -> bool {
    let (AgentUpdate::Turn { run, update: what }, AgentUpdate::Turn { run: next_run, update: next_what }) =
        (last, next)
    else {
        return false;
    };
    let (text, more) = match (what, next_what) {
        (TurnUpdate::Text { text }, TurnUpdate::Text { text: more }) => (text, more),
        (TurnUpdate::Thought { text }, TurnUpdate::Thought { text: more }) => (text, more),
        (
            TurnUpdate::ToolOutput { call_id, text },
            TurnUpdate::ToolOutput { call_id: next_call, text: more },
        ) if call_id == next_call => (text, more),
        _ => return false,
    };
    text.len() + more.len() <= DELTA_MAX && run == next_run
}

/// The text of something that is streamed piece by piece.
fn streamed_text(up: &AgentUpdate) -> Option<&str> {
    match up {
        AgentUpdate::Turn {
            update:
                TurnUpdate::Text { text } | TurnUpdate::Thought { text } | TurnUpdate::ToolOutput { text, .. },
            ..
        } => Some(text),
        _ => None,
    }
}

fn streamed_text_mut(up: &mut AgentUpdate) -> Option<&mut String> {
    match up {
        AgentUpdate::Turn {
            update:
                TurnUpdate::Text { text } | TurnUpdate::Thought { text } | TurnUpdate::ToolOutput { text, .. },
            ..
        } => Some(text),
        _ => None,
    }
}

/// About how many bytes it holds; exact where it can be large.
pub(crate) fn approximate_bytes(up: &AgentUpdate) -> usize {
    let AgentUpdate::Turn { update: what, .. } = up else { return 0 };
    match what {
        TurnUpdate::Text { text }
        | TurnUpdate::Thought { text }
        | TurnUpdate::ToolOutput { text, .. }
        | TurnUpdate::Notice { text } => text.len(),
        TurnUpdate::ToolStarted { input: value, .. } | TurnUpdate::ToolFinished { output: value, .. } => {
            value_bytes(value)
        }
        TurnUpdate::Plan { entries } => {
            entries.iter().map(|entry| entry.content.len() + entry.status.len()).sum()
        }
        TurnUpdate::Usage { .. } | TurnUpdate::ModelCall => 0,
    }
}

fn value_bytes(value: &Value) -> usize {
    match value {
        Value::String(text) => text.len(),
        Value::Array(items) => items.iter().map(|item| size_of::<Value>() + value_bytes(item)).sum(),
        Value::Object(fields) => {
            fields.iter().map(|(key, field)| size_of::<Value>() + key.len() + value_bytes(field)).sum()
        }
        Value::Null | Value::Bool(_) | Value::Number(_) => 0,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use qd_protocol::RunId;

    use super::*;

    fn turn_update(run: &str, what: TurnUpdate) -> AgentUpdate {
        AgentUpdate::Turn { run: RunId::parse(run).unwrap(), update: what }
    }

    fn text_update(text: &str) -> AgentUpdate {
        turn_update("r", TurnUpdate::Text { text: text.to_owned() })
    }

    fn output_update(call: &str, text: &str) -> AgentUpdate {
        turn_update("r", TurnUpdate::ToolOutput { call_id: call.to_owned(), text: text.to_owned() })
    }

    fn window_contents(ups: impl IntoIterator<Item = AgentUpdate>) -> Vec<NumberedUpdate> {
        let mut untaken = UpdateWindow::starting_after(UpdateNumber(0));
        for up in ups {
            for piece in split_update(up) {
                assert_eq!(untaken.try_push(piece), None);
            }
        }
        untaken.take()
    }

    #[test]
    fn only_neighbours_of_the_same_kind_run_and_call_are_merged() {
        let ups = [
            text_update("a"),
            text_update("b"),
            turn_update("r", TurnUpdate::Thought { text: "c".to_owned() }),
            text_update("d"),
            turn_update("other", TurnUpdate::Text { text: "e".to_owned() }),
            output_update("1", "f"),
            output_update("1", "g"),
            output_update("2", "h"),
        ];
        let things = window_contents(ups);
        let pieces: Vec<_> = things.iter().map(|thing| streamed_text(&thing.update).unwrap()).collect();
        assert_eq!(pieces, ["ab", "c", "d", "e", "fg", "h"]);
        assert_eq!(things.iter().map(|thing| thing.number.0).collect::<Vec<_>>(), [1, 2, 3, 4, 5, 6]);
    }

    #[test]
    fn what_was_taken_is_never_changed_and_numbers_go_on() {
        let mut untaken = UpdateWindow::starting_after(UpdateNumber(40));
        assert_eq!(untaken.try_push(text_update("a")), None);
        assert_eq!(untaken.take(), [NumberedUpdate { number: UpdateNumber(41), update: text_update("a") }]);
        assert_eq!(untaken.try_push(text_update("b")), None);
        assert_eq!(untaken.take(), [NumberedUpdate { number: UpdateNumber(42), update: text_update("b") }]);
        assert!(untaken.is_empty());
    }

    #[test]
    fn words_wait_at_the_window_and_what_answers_a_command_does_not() {
        let mut untaken = UpdateWindow::starting_after(UpdateNumber(0));
        for _ in 0..LINK_WINDOW {
            assert_eq!(untaken.try_push(turn_update("r", TurnUpdate::ModelCall)), None);
        }
        assert_eq!(untaken.try_push(text_update("x")), Some(text_update("x")));
        assert_eq!(untaken.try_push(AgentUpdate::SteerMissed { steer: qd_protocol::EventNumber(1) }), None);
        assert_eq!(untaken.take().len(), LINK_WINDOW + 1);
        assert_eq!(untaken.try_push(text_update("x")), None);
    }

    #[test]
    fn few_things_that_are_large_wait_as_well() {
        let mut untaken = UpdateWindow::starting_after(UpdateNumber(0));
        let large = turn_update(
            "r",
            TurnUpdate::ToolFinished {
                call_id: "1".to_owned(),
                name: "t".to_owned(),
                output: Value::String("x".repeat(1 << 20)),
                is_error: false,
            },
        );
        let room =
            std::iter::repeat_with(|| untaken.try_push(large.clone())).take_while(Option::is_none).count();
        assert_eq!(room, WINDOW_BYTES >> 20);
    }

    #[test]
    fn a_piece_that_fits_is_never_cut() {
        let (long, short) = ("x".repeat(DELTA_MAX), "y".repeat(10));
        let things = window_contents([text_update(&short), text_update(&long), text_update(&short)]);
        let pieces: Vec<_> = things.iter().map(|thing| streamed_text(&thing.update).unwrap()).collect();
        assert_eq!(pieces, [&short, &long, &short]);
    }

    proptest! {
        #[test]
        fn merging_and_cutting_lose_and_double_nothing(
            chunks in proptest::collection::vec(("[aä€😀]{0,5}", 0usize..40_000), 0..12),
            takes in proptest::collection::vec(any::<bool>(), 12),
        ) {
            let mut untaken = UpdateWindow::starting_after(UpdateNumber(7));
            let (mut said, mut heard) = (String::new(), Vec::new());
            for ((unit, times), take) in chunks.iter().zip(takes) {
                let chunk = unit.repeat(*times);
                said.push_str(&chunk);
                for piece in split_update(text_update(&chunk)) {
                    prop_assert!(streamed_text(&piece).unwrap().len() <= DELTA_MAX);
                    if let Some(piece) = untaken.try_push(piece) {
                        heard.extend(untaken.take());
                        assert_eq!(untaken.try_push(piece), None);
                    }
                }
                if take {
                    heard.extend(untaken.take());
                }
            }
            heard.extend(untaken.take());
            let mut joined = String::new();
            for (thing, number) in heard.iter().zip(8..) {
                let piece = streamed_text(&thing.update).unwrap();
                prop_assert!(!piece.is_empty() && piece.len() <= DELTA_MAX);
                prop_assert_eq!(thing.number, UpdateNumber(number));
                joined.push_str(piece);
            }
            prop_assert!(joined == said);
        }
    }
}
