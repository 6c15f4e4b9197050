//! The updates of an agent that its session has not taken yet. Adjacent text is merged, long text is split, updates are
//! counted, and the amount that may wait is bounded. On a local link the count is the number that the session sees;
//! over a socket, the outbox of the endpoint gives that number. No task, lock or transport is known here.

use qd_protocol::limits::{DELTA_MAX, LINK_WINDOW};
use qd_protocol::link::{AgentUpdate, TurnUpdate, UpdateNumber};
use qd_worker_sdk::executor::PENDING_ASKS_MAX;
use serde_json::Value;

/// How many bytes of updates may wait for the session. [`LINK_WINDOW`] alone would let two hundred large tool outputs
/// wait.
pub const WINDOW_BYTES: usize = 8 << 20;

/// An update with its number in the session.
#[derive(Debug, Clone, PartialEq)]
pub struct NumberedUpdate {
    pub number: UpdateNumber,
    pub update: AgentUpdate,
}

#[derive(Debug)]
pub(crate) struct UpdateWindow {
    /// The last number that was given out.
    last: UpdateNumber,
    /// A plain vector, because it is only ever taken whole, and an empty one costs nothing while the agent is idle.
    updates: Vec<NumberedUpdate>,
    /// The approximate size of all updates.
    bytes: usize,
}

impl UpdateWindow {
    pub(crate) fn starting_after(last: UpdateNumber) -> Self {
        Self { last, updates: Vec::new(), bytes: 0 }
    }

    /// Takes a piece, or gives it back if it has to wait. The piece may be merged into the last waiting update, but
    /// never into one that was already taken.
    #[must_use]
    pub(crate) fn try_push(&mut self, update: AgentUpdate) -> Option<AgentUpdate> {
        if !self.accepts(&update) {
            return Some(update);
        }
        self.push(update);
        None
    }

    /// Whether the window has room for this piece.
    pub(crate) fn accepts(&self, update: &AgentUpdate) -> bool {
        self.has_room(update, self.merges_with_last(update))
    }

    /// Takes a piece even if the window is full.
    pub(crate) fn push(&mut self, update: AgentUpdate) {
        let merges = self.merges_with_last(&update);
        self.bytes = self.bytes.saturating_add(approximate_bytes(&update));
        if merges && let (Some(last), Some(more)) = (self.updates.last_mut(), streamed_text(&update)) {
            if let Some(text) = streamed_text_mut(&mut last.update) {
                text.push_str(more);
            }
        } else {
            self.last = UpdateNumber(self.last.0 + 1);
            self.updates.push(NumberedUpdate { number: self.last, update });
        }
    }

    pub(crate) fn merges_with_last(&self, update: &AgentUpdate) -> bool {
        self.updates.last().is_some_and(|last| can_merge(&last.update, update))
    }

    /// Takes all waiting updates, in order.
    pub(crate) fn take(&mut self) -> Vec<NumberedUpdate> {
        self.bytes = 0;
        std::mem::take(&mut self.updates)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.updates.is_empty()
    }

    /// Only updates that the agent sends on its own initiative have to wait. The others answer the session, which
    /// bounds them already. If they waited, an agent that must stop could not report that it has stopped.
    fn has_room(&self, update: &AgentUpdate, merges: bool) -> bool {
        match update {
            AgentUpdate::Turn { .. } => {
                (merges || self.updates.len() < LINK_WINDOW) && self.bytes < WINDOW_BYTES
            }
            // Asks may wait beyond the window, so that a question is not blocked by the text before it.
            AgentUpdate::Ask { .. } => self.updates.len() < LINK_WINDOW + PENDING_ASKS_MAX,
            AgentUpdate::Ready { .. }
            | AgentUpdate::Confined(_)
            | AgentUpdate::AskWithdrawn { .. }
            | AgentUpdate::AskDelivered { .. }
            | AgentUpdate::SteerTaken { .. }
            | AgentUpdate::SteerMissed { .. }
            | AgentUpdate::TurnEnded { .. }
            | AgentUpdate::IdleStopped
            | AgentUpdate::Gone(_) => true,
        }
    }
}

/// Splits text that is longer than [`DELTA_MAX`] at character boundaries. Other updates stay whole, and empty text
/// yields nothing.
pub(crate) fn split_update(mut update: AgentUpdate) -> UpdatePieces {
    match streamed_text_mut(&mut update) {
        Some(text) if text.is_empty() => UpdatePieces::Whole(None),
        Some(text) if text.len() > DELTA_MAX => {
            let text = std::mem::take(text);
            UpdatePieces::Cut { template: update, text, offset: 0 }
        }
        _ => UpdatePieces::Whole(Some(update)),
    }
}

/// See [`split_update`].
#[derive(Debug)]
pub(crate) enum UpdatePieces {
    /// The update was short enough.
    Whole(Option<AgentUpdate>),
    /// The remaining text begins at `offset`.
    Cut { template: AgentUpdate, text: String, offset: usize },
}

impl Iterator for UpdatePieces {
    type Item = AgentUpdate;

    fn next(&mut self) -> Option<AgentUpdate> {
        match self {
            Self::Whole(piece) => piece.take(),
            Self::Cut { template, text, offset } => {
                let end = text.floor_char_boundary(offset.saturating_add(DELTA_MAX));
                if *offset >= end {
                    return None;
                }
                let mut piece = template.clone();
                if let Some(slot) = streamed_text_mut(&mut piece) {
                    slot.push_str(&text[*offset..end]);
                }
                *offset = end;
                Some(piece)
            }
        }
    }
}

/// Whether `next` can be appended to `last` without a visible difference.
fn can_merge(last: &AgentUpdate, next: &AgentUpdate) -> bool {
    let (
        AgentUpdate::Turn { run, update: last_update },
        AgentUpdate::Turn { run: next_run, update: next_update },
    ) = (last, next)
    else {
        return false;
    };
    let (text, more) = match (last_update, next_update) {
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

/// The text of an update that is streamed in pieces.
fn streamed_text(update: &AgentUpdate) -> Option<&str> {
    match update {
        AgentUpdate::Turn {
            update:
                TurnUpdate::Text { text } | TurnUpdate::Thought { text } | TurnUpdate::ToolOutput { text, .. },
            ..
        } => Some(text),
        _ => None,
    }
}

fn streamed_text_mut(update: &mut AgentUpdate) -> Option<&mut String> {
    match update {
        AgentUpdate::Turn {
            update:
                TurnUpdate::Text { text } | TurnUpdate::Thought { text } | TurnUpdate::ToolOutput { text, .. },
            ..
        } => Some(text),
        _ => None,
    }
}

/// The approximate size of output in bytes. Other updates count as 0, because their number is bounded.
pub(crate) fn approximate_bytes(update: &AgentUpdate) -> usize {
    let AgentUpdate::Turn { update: turn_update, .. } = update else { return 0 };
    match turn_update {
        TurnUpdate::Text { text }
        | TurnUpdate::Thought { text }
        | TurnUpdate::ToolOutput { text, .. }
        | TurnUpdate::Notice { text, .. } => text.len(),
        TurnUpdate::ToolStarted { input: value, .. } | TurnUpdate::ToolFinished { output: value, .. } => {
            value_bytes(value)
        }
        TurnUpdate::Plan { entries } => {
            entries.iter().map(|entry| entry.content.len() + entry.status.len()).sum()
        }
        TurnUpdate::Mode { mode } => mode.len(),
        TurnUpdate::Usage { .. }
        | TurnUpdate::ModelCall
        | TurnUpdate::Context(_)
        | TurnUpdate::Compacted { .. } => 0,
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

    fn turn_update(run: &str, update: TurnUpdate) -> AgentUpdate {
        AgentUpdate::Turn { run: RunId::parse(run).unwrap(), update }
    }

    fn text_update(text: &str) -> AgentUpdate {
        turn_update("r", TurnUpdate::Text { text: text.to_owned() })
    }

    fn output_update(call: &str, text: &str) -> AgentUpdate {
        turn_update("r", TurnUpdate::ToolOutput { call_id: call.to_owned(), text: text.to_owned() })
    }

    fn window_contents(updates: impl IntoIterator<Item = AgentUpdate>) -> Vec<NumberedUpdate> {
        let mut window = UpdateWindow::starting_after(UpdateNumber(0));
        for update in updates {
            for piece in split_update(update) {
                assert_eq!(window.try_push(piece), None);
            }
        }
        window.take()
    }

    #[test]
    fn only_neighbours_of_the_same_kind_run_and_call_are_merged() {
        let updates = [
            text_update("a"),
            text_update("b"),
            turn_update("r", TurnUpdate::Thought { text: "c".to_owned() }),
            text_update("d"),
            turn_update("other", TurnUpdate::Text { text: "e".to_owned() }),
            output_update("1", "f"),
            output_update("1", "g"),
            output_update("2", "h"),
        ];
        let numbered = window_contents(updates);
        let pieces: Vec<_> = numbered.iter().map(|update| streamed_text(&update.update).unwrap()).collect();
        assert_eq!(pieces, ["ab", "c", "d", "e", "fg", "h"]);
        assert_eq!(numbered.iter().map(|update| update.number.0).collect::<Vec<_>>(), [1, 2, 3, 4, 5, 6]);
    }

    #[test]
    fn what_was_taken_is_never_changed_and_numbers_go_on() {
        let mut window = UpdateWindow::starting_after(UpdateNumber(40));
        assert_eq!(window.try_push(text_update("a")), None);
        assert_eq!(window.take(), [NumberedUpdate { number: UpdateNumber(41), update: text_update("a") }]);
        assert_eq!(window.try_push(text_update("b")), None);
        assert_eq!(window.take(), [NumberedUpdate { number: UpdateNumber(42), update: text_update("b") }]);
        assert!(window.is_empty());
    }

    #[test]
    fn words_wait_at_the_window_and_what_answers_a_command_does_not() {
        let mut window = UpdateWindow::starting_after(UpdateNumber(0));
        for _ in 0..LINK_WINDOW {
            assert_eq!(window.try_push(turn_update("r", TurnUpdate::ModelCall)), None);
        }
        assert_eq!(window.try_push(text_update("x")), Some(text_update("x")));
        assert_eq!(window.try_push(AgentUpdate::SteerMissed { steer: qd_protocol::EventNumber(1) }), None);
        assert_eq!(window.take().len(), LINK_WINDOW + 1);
        assert_eq!(window.try_push(text_update("x")), None);
    }

    #[test]
    fn few_things_that_are_large_wait_as_well() {
        let mut window = UpdateWindow::starting_after(UpdateNumber(0));
        let large = turn_update(
            "r",
            TurnUpdate::ToolFinished {
                call_id: "1".to_owned(),
                name: "t".to_owned(),
                output: Value::String("x".repeat(1 << 20)),
                is_error: false,
            },
        );
        let accepted =
            std::iter::repeat_with(|| window.try_push(large.clone())).take_while(Option::is_none).count();
        assert_eq!(accepted, WINDOW_BYTES >> 20);
    }

    #[test]
    fn a_piece_that_fits_is_never_cut() {
        let (long, short) = ("x".repeat(DELTA_MAX), "y".repeat(10));
        let numbered = window_contents([text_update(&short), text_update(&long), text_update(&short)]);
        let pieces: Vec<_> = numbered.iter().map(|update| streamed_text(&update.update).unwrap()).collect();
        assert_eq!(pieces, [&short, &long, &short]);
    }

    proptest! {
        #[test]
        fn merging_and_cutting_lose_and_double_nothing(
            chunks in proptest::collection::vec(("[aä€😀]{0,5}", 0usize..40_000), 0..12),
            takes in proptest::collection::vec(any::<bool>(), 12),
        ) {
            let mut window = UpdateWindow::starting_after(UpdateNumber(7));
            let (mut sent, mut received) = (String::new(), Vec::new());
            for ((unit, times), take) in chunks.iter().zip(takes) {
                let chunk = unit.repeat(*times);
                sent.push_str(&chunk);
                for piece in split_update(text_update(&chunk)) {
                    prop_assert!(streamed_text(&piece).unwrap().len() <= DELTA_MAX);
                    if let Some(piece) = window.try_push(piece) {
                        received.extend(window.take());
                        assert_eq!(window.try_push(piece), None);
                    }
                }
                if take {
                    received.extend(window.take());
                }
            }
            received.extend(window.take());
            let mut joined = String::new();
            for (update, number) in received.iter().zip(8..) {
                let piece = streamed_text(&update.update).unwrap();
                prop_assert!(!piece.is_empty() && piece.len() <= DELTA_MAX);
                prop_assert_eq!(update.number, UpdateNumber(number));
                joined.push_str(piece);
            }
            prop_assert!(joined == sent);
        }
    }
}
