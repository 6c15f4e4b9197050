//! What an agent has said and its session has not taken yet: neighbours merged, long text cut, all of it numbered,
//! and a bound on how much of it may wait. No task, lock or transport is known here, so that a socket can use it too.

use qd_protocol::limits::{DELTA_MAX, LINK_WINDOW};
use qd_protocol::link::{Said, Up, UpNumber};
use serde_json::Value;

/// Bytes an agent may have said that its session has not taken yet. [`LINK_WINDOW`] alone would let two hundred large
/// tool outputs wait.
pub const WINDOW_BYTES: usize = 8 << 20;
/// Asks that may wait beyond the window, so that a question is not held up by the words before it.
pub const ASK_ROOM: usize = 64;

/// Something said, with its number in the session.
#[derive(Debug, Clone, PartialEq)]
pub struct Numbered {
    /// Its number.
    pub number: UpNumber,
    /// What was said.
    pub up: Up,
}

/// What waits to be taken.
#[derive(Debug)]
pub(crate) struct Untaken {
    /// The last number that was given.
    last: UpNumber,
    /// A plain vector: it is only ever taken whole, and an empty one costs nothing while the agent is idle.
    things: Vec<Numbered>,
    /// What the things weigh together.
    bytes: usize,
}

impl Untaken {
    pub(crate) fn after(last: UpNumber) -> Self {
        Self { last, things: Vec::new(), bytes: 0 }
    }

    /// Takes one piece in, or gives it back if it has to wait. It may be added to the last thing that waits; nothing is
    /// ever added to what was taken.
    #[must_use]
    pub(crate) fn offer(&mut self, up: Up) -> Option<Up> {
        if !self.takes(&up) {
            return Some(up);
        }
        self.add(up);
        None
    }

    /// Whether there is room for this piece.
    pub(crate) fn takes(&self, up: &Up) -> bool {
        self.has_room(up, self.merges(up))
    }

    /// Takes one piece in, room or not.
    pub(crate) fn add(&mut self, up: Up) {
        let merges = self.merges(&up);
        self.bytes = self.bytes.saturating_add(weight(&up));
        if merges && let (Some(last), Some(more)) = (self.things.last_mut(), delta(&up)) {
            if let Some(text) = delta_mut(&mut last.up) {
                text.push_str(more);
            }
        } else {
            self.last = UpNumber(self.last.0 + 1);
            self.things.push(Numbered { number: self.last, up });
        }
    }

    fn merges(&self, up: &Up) -> bool {
        self.things.last().is_some_and(|last| continues(&last.up, up))
    }

    /// All that waits, in order.
    pub(crate) fn take(&mut self) -> Vec<Numbered> {
        self.bytes = 0;
        std::mem::take(&mut self.things)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.things.is_empty()
    }

    /// Only what an agent says of its own accord waits. The rest answers something the session sent, so the session
    /// has bounded it already; if it waited, an agent that must stop could not say that it has.
    fn has_room(&self, up: &Up, merges: bool) -> bool {
        match up {
            Up::Said { .. } => (merges || self.things.len() < LINK_WINDOW) && self.bytes < WINDOW_BYTES,
            Up::Ask { .. } => self.things.len() < LINK_WINDOW + ASK_ROOM,
            Up::Ready { .. }
            | Up::AskWithdrawn { .. }
            | Up::AskDelivered { .. }
            | Up::SteerTaken { .. }
            | Up::SteerMissed { .. }
            | Up::Terminal { .. }
            | Up::Rested
            | Up::Gone(_) => true,
        }
    }
}

/// Cuts text that is longer than [`DELTA_MAX`] on character borders; leaves everything else whole, and nothing of an
/// empty piece.
pub(crate) fn pieces(mut up: Up) -> Pieces {
    match delta_mut(&mut up) {
        Some(text) if text.is_empty() => Pieces::Whole(None),
        Some(text) if text.len() > DELTA_MAX => {
            let text = std::mem::take(text);
            Pieces::Cut { mould: up, text, at: 0 }
        }
        _ => Pieces::Whole(Some(up)),
    }
}

/// See [`pieces`].
#[derive(Debug)]
pub(crate) enum Pieces {
    /// It was short enough.
    Whole(Option<Up>),
    /// What is left of it begins at `at`.
    Cut { mould: Up, text: String, at: usize },
}

impl Iterator for Pieces {
    type Item = Up;

    fn next(&mut self) -> Option<Up> {
        match self {
            Self::Whole(up) => up.take(),
            Self::Cut { mould, text, at } => {
                let end = text.floor_char_boundary(at.saturating_add(DELTA_MAX));
                if *at >= end {
                    return None;
                }
                let mut piece = mould.clone();
                if let Some(slot) = delta_mut(&mut piece) {
                    slot.push_str(&text[*at..end]);
                }
                *at = end;
                Some(piece)
            }
        }
    }
}

/// Whether `next` can be added to the end of `last` without anybody noticing.
fn continues(last: &Up, next: &Up) -> bool {
    let (Up::Said { run, what }, Up::Said { run: next_run, what: next_what }) = (last, next) else {
        return false;
    };
    let (text, more) = match (what, next_what) {
        (Said::Text { text }, Said::Text { text: more }) => (text, more),
        (Said::Thought { text }, Said::Thought { text: more }) => (text, more),
        (Said::ToolOutput { call_id, text }, Said::ToolOutput { call_id: next_call, text: more })
            if call_id == next_call =>
        {
            (text, more)
        }
        _ => return false,
    };
    text.len() + more.len() <= DELTA_MAX && run == next_run
}

/// The text of something that is streamed piece by piece.
fn delta(up: &Up) -> Option<&str> {
    match up {
        Up::Said {
            what: Said::Text { text } | Said::Thought { text } | Said::ToolOutput { text, .. },
            ..
        } => Some(text),
        _ => None,
    }
}

fn delta_mut(up: &mut Up) -> Option<&mut String> {
    match up {
        Up::Said {
            what: Said::Text { text } | Said::Thought { text } | Said::ToolOutput { text, .. },
            ..
        } => Some(text),
        _ => None,
    }
}

/// About how many bytes it holds; exact where it can be large.
pub(crate) fn weight(up: &Up) -> usize {
    let Up::Said { what, .. } = up else { return 0 };
    match what {
        Said::Text { text }
        | Said::Thought { text }
        | Said::ToolOutput { text, .. }
        | Said::Notice { text } => text.len(),
        Said::ToolStarted { input: value, .. } | Said::ToolFinished { output: value, .. } => {
            value_weight(value)
        }
        Said::Plan { entries } => entries.iter().map(|entry| entry.content.len() + entry.status.len()).sum(),
        Said::Usage { .. } | Said::Turn => 0,
    }
}

fn value_weight(value: &Value) -> usize {
    match value {
        Value::String(text) => text.len(),
        Value::Array(items) => items.iter().map(|item| size_of::<Value>() + value_weight(item)).sum(),
        Value::Object(fields) => {
            fields.iter().map(|(key, field)| size_of::<Value>() + key.len() + value_weight(field)).sum()
        }
        Value::Null | Value::Bool(_) | Value::Number(_) => 0,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use qd_protocol::RunId;

    use super::*;

    fn said(run: &str, what: Said) -> Up {
        Up::Said { run: RunId::parse(run).unwrap(), what }
    }

    fn text(text: &str) -> Up {
        said("r", Said::Text { text: text.to_owned() })
    }

    fn output(call: &str, text: &str) -> Up {
        said("r", Said::ToolOutput { call_id: call.to_owned(), text: text.to_owned() })
    }

    fn taken(ups: impl IntoIterator<Item = Up>) -> Vec<Numbered> {
        let mut untaken = Untaken::after(UpNumber(0));
        for up in ups {
            for piece in pieces(up) {
                assert_eq!(untaken.offer(piece), None);
            }
        }
        untaken.take()
    }

    #[test]
    fn only_neighbours_of_the_same_kind_run_and_call_are_merged() {
        let ups = [
            text("a"),
            text("b"),
            said("r", Said::Thought { text: "c".to_owned() }),
            text("d"),
            said("other", Said::Text { text: "e".to_owned() }),
            output("1", "f"),
            output("1", "g"),
            output("2", "h"),
        ];
        let things = taken(ups);
        let pieces: Vec<_> = things.iter().map(|thing| delta(&thing.up).unwrap()).collect();
        assert_eq!(pieces, ["ab", "c", "d", "e", "fg", "h"]);
        assert_eq!(things.iter().map(|thing| thing.number.0).collect::<Vec<_>>(), [1, 2, 3, 4, 5, 6]);
    }

    #[test]
    fn what_was_taken_is_never_changed_and_numbers_go_on() {
        let mut untaken = Untaken::after(UpNumber(40));
        assert_eq!(untaken.offer(text("a")), None);
        assert_eq!(untaken.take(), [Numbered { number: UpNumber(41), up: text("a") }]);
        assert_eq!(untaken.offer(text("b")), None);
        assert_eq!(untaken.take(), [Numbered { number: UpNumber(42), up: text("b") }]);
        assert!(untaken.is_empty());
    }

    #[test]
    fn words_wait_at_the_window_and_what_answers_a_command_does_not() {
        let mut untaken = Untaken::after(UpNumber(0));
        for _ in 0..LINK_WINDOW {
            assert_eq!(untaken.offer(said("r", Said::Turn)), None);
        }
        assert_eq!(untaken.offer(text("x")), Some(text("x")));
        assert_eq!(untaken.offer(Up::SteerMissed { steer: qd_protocol::Number(1) }), None);
        assert_eq!(untaken.take().len(), LINK_WINDOW + 1);
        assert_eq!(untaken.offer(text("x")), None);
    }

    #[test]
    fn few_things_that_are_large_wait_as_well() {
        let mut untaken = Untaken::after(UpNumber(0));
        let large = said(
            "r",
            Said::ToolFinished {
                call_id: "1".to_owned(),
                name: "t".to_owned(),
                output: Value::String("x".repeat(1 << 20)),
                is_error: false,
            },
        );
        let room =
            std::iter::repeat_with(|| untaken.offer(large.clone())).take_while(Option::is_none).count();
        assert_eq!(room, WINDOW_BYTES >> 20);
    }

    #[test]
    fn a_piece_that_fits_is_never_cut() {
        let (long, short) = ("x".repeat(DELTA_MAX), "y".repeat(10));
        let things = taken([text(&short), text(&long), text(&short)]);
        let pieces: Vec<_> = things.iter().map(|thing| delta(&thing.up).unwrap()).collect();
        assert_eq!(pieces, [&short, &long, &short]);
    }

    proptest! {
        #[test]
        fn merging_and_cutting_lose_and_double_nothing(
            chunks in proptest::collection::vec(("[aä€😀]{0,5}", 0usize..40_000), 0..12),
            takes in proptest::collection::vec(any::<bool>(), 12),
        ) {
            let mut untaken = Untaken::after(UpNumber(7));
            let (mut said, mut heard) = (String::new(), Vec::new());
            for ((unit, times), take) in chunks.iter().zip(takes) {
                let chunk = unit.repeat(*times);
                said.push_str(&chunk);
                for piece in pieces(text(&chunk)) {
                    prop_assert!(delta(&piece).unwrap().len() <= DELTA_MAX);
                    if let Some(piece) = untaken.offer(piece) {
                        heard.extend(untaken.take());
                        assert_eq!(untaken.offer(piece), None);
                    }
                }
                if take {
                    heard.extend(untaken.take());
                }
            }
            heard.extend(untaken.take());
            let mut joined = String::new();
            for (thing, number) in heard.iter().zip(8..) {
                let piece = delta(&thing.up).unwrap();
                prop_assert!(!piece.is_empty() && piece.len() <= DELTA_MAX);
                prop_assert_eq!(thing.number, UpNumber(number));
                joined.push_str(piece);
            }
            prop_assert!(joined == said);
        }
    }
}
