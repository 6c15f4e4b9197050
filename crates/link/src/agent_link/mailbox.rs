//! What has come from a worker and its session has not heard: each number once and without a hole, breaks and returns in
//! their order, and a bound on how much of it may wait. No task, lock or connection is known here.

use std::collections::VecDeque;

use qd_protocol::frame::v1::{ToWorker, WorkerHello};
use qd_protocol::limits::LINK_WINDOW;
use qd_protocol::link::{Gone, Up, UpNumber};
use qd_protocol::worker::AgentSpec;

use super::Heard;
use super::outbox::Outbox;
use crate::up::{Numbered, WINDOW_BYTES};

/// A number is missing: what came is not what the worker said.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the worker goes on with {got:?} after {after:?}")]
pub(super) struct Hole {
    after: UpNumber,
    got: UpNumber,
}

/// See the module. The session's side of it is beside it, since what is heard decides what is said.
#[derive(Debug)]
pub(super) struct Mailbox {
    pub(super) outbox: Outbox,
    waiting: VecDeque<Waiting>,
    things: usize,
    bytes: usize,
    /// The last number that was taken in.
    heard: UpNumber,
    /// The last number that is in the journal.
    acked: UpNumber,
    /// The last number that the worker had given when it was reached.
    last: UpNumber,
    /// Whether there is a connection.
    connected: bool,
    /// Whether the session has heard, or will, that there was one.
    was_attached: bool,
    /// The last word, to be told as often as asked.
    gone: Option<Gone>,
}

#[derive(Debug)]
struct Waiting {
    heard: Heard,
    bytes: usize,
}

impl Mailbox {
    pub(super) fn new(taken: UpNumber, start: Option<Box<AgentSpec>>) -> Self {
        Self {
            outbox: Outbox::new(start),
            waiting: VecDeque::new(),
            things: 0,
            bytes: 0,
            heard: taken,
            acked: taken,
            last: taken,
            connected: false,
            was_attached: false,
            gone: None,
        }
    }

    /// The last number that was taken in.
    pub(super) fn heard(&self) -> UpNumber {
        self.heard
    }

    /// The last number that is in the journal.
    pub(super) fn acked(&self) -> UpNumber {
        self.acked
    }

    /// Everything up to here is in the journal.
    pub(super) fn ack(&mut self, upto: UpNumber) {
        self.acked = self.acked.max(upto.min(self.heard));
    }

    /// Whether more can be taken in before the session takes some out.
    pub(super) fn has_room(&self) -> bool {
        self.things <= LINK_WINDOW && self.bytes <= WINDOW_BYTES
    }

    /// Whether the session has heard all that the worker had said when it was reached.
    pub(super) fn is_caught_up(&self) -> bool {
        self.connected && self.heard >= self.last && self.waiting.is_empty()
    }

    /// A connection is there, by this hello.
    pub(super) fn attached(&mut self, taken: UpNumber, hello: &WorkerHello) {
        self.connected = true;
        self.last = hello.last;
        self.outbox.connected(taken, hello.seat);
        self.put(
            Heard::Attached {
                applied: hello.applied,
                seat: hello.seat,
                pid: hello.pid,
                run_time_ms: hello.run_time_ms,
                model: hello.model.clone(),
                again: self.was_attached,
            },
            0,
        );
        self.was_attached = true;
    }

    /// The connection broke. A session that has not heard of it need not hear that it broke.
    pub(super) fn lost(&mut self) {
        self.connected = false;
        self.outbox.broke();
        match self.waiting.back() {
            Some(Waiting { heard: Heard::Attached { again, .. }, .. }) => {
                self.was_attached = *again;
                self.waiting.pop_back();
            }
            _ => self.put(Heard::Lost, 0),
        }
    }

    /// Something was said, numbered from `first`; what is known already is dropped. `bytes` is about what it weighs.
    pub(super) fn said(&mut self, first: UpNumber, ups: Vec<Up>, bytes: usize) -> Result<(), Hole> {
        if first.0 > self.heard.0 + 1 {
            return Err(Hole { after: self.heard, got: first });
        }
        let known = usize::try_from(self.heard.0 + 1 - first.0).unwrap_or(usize::MAX);
        let news: Vec<_> = (first.0..)
            .zip(ups)
            .skip(known)
            .map(|(number, up)| Numbered { number: UpNumber(number), up })
            .collect();
        let Some(last) = news.last() else { return Ok(()) };
        self.heard = last.number;
        news.iter().for_each(|thing| self.outbox.heard(&thing.up));
        self.things += news.len();
        self.bytes += bytes;
        match self.waiting.back_mut() {
            Some(Waiting { heard: Heard::Said(said), bytes: before }) => {
                said.extend(news);
                *before += bytes;
            }
            _ => self.put(Heard::Said(news), bytes),
        }
        Ok(())
    }

    /// The agent is no more.
    pub(super) fn gone(&mut self, gone: Gone) {
        self.connected = false;
        self.put(Heard::Gone(gone), 0);
    }

    /// What the worker is told next.
    pub(super) fn next_frame(&mut self) -> Option<ToWorker> {
        self.outbox.next(self.acked)
    }

    /// What the session hears next.
    pub(super) fn take(&mut self) -> Option<Heard> {
        if let Some(gone) = &self.gone {
            return Some(Heard::Gone(gone.clone()));
        }
        let Waiting { heard, bytes } = self.waiting.pop_front()?;
        match &heard {
            Heard::Said(said) => {
                self.things -= said.len();
                self.bytes -= bytes;
            }
            Heard::Attached { .. } if self.connected && !self.attached_waits() => self.outbox.told(),
            Heard::Attached { .. } | Heard::Lost => {}
            Heard::Gone(gone) => self.gone = Some(gone.clone()),
        }
        if self.waiting.is_empty() {
            self.waiting = VecDeque::new();
        }
        Some(heard)
    }

    fn attached_waits(&self) -> bool {
        self.waiting.iter().any(|waiting| matches!(waiting.heard, Heard::Attached { .. }))
    }

    fn put(&mut self, heard: Heard, bytes: usize) {
        self.waiting.push_back(Waiting { heard, bytes });
    }
}

#[cfg(test)]
mod tests {
    use qd_protocol::frame::v1::Seat;
    use qd_protocol::link::Said;
    use qd_protocol::{Number, RunId};

    use super::*;

    fn turn() -> Up {
        Up::Said { run: RunId::parse("r").unwrap(), what: Said::Turn }
    }

    fn hello() -> WorkerHello {
        WorkerHello {
            version: 1,
            software: String::new(),
            capabilities: Vec::new(),
            nonce: String::new(),
            proof: String::new(),
            seat: Seat::Starting,
            last: UpNumber(0),
            applied: Number(0),
            pid: 1,
            run_time_ms: None,
            model: None,
        }
    }

    fn attached(again: bool) -> Heard {
        Heard::Attached {
            applied: Number(0),
            seat: Seat::Starting,
            pid: 1,
            run_time_ms: None,
            model: None,
            again,
        }
    }

    fn said(numbers: impl IntoIterator<Item = u64>) -> Heard {
        let thing = |number| Numbered { number: UpNumber(number), up: turn() };
        Heard::Said(numbers.into_iter().map(thing).collect())
    }

    fn taken(mailbox: &mut Mailbox) -> Vec<Heard> {
        std::iter::from_fn(|| mailbox.take()).collect()
    }

    #[test]
    fn a_number_is_heard_once_and_never_after_a_hole() {
        let mut mailbox = Mailbox::new(UpNumber(5), None);
        mailbox.said(UpNumber(4), vec![turn(); 4], 1).unwrap();
        mailbox.said(UpNumber(7), vec![turn(); 2], 1).unwrap();
        mailbox.said(UpNumber(1), vec![turn(); 3], 1).unwrap();
        assert!(mailbox.said(UpNumber(10), vec![turn()], 1).is_err());
        assert_eq!(taken(&mut mailbox), [said(6..=8)]);
        assert_eq!(mailbox.heard(), UpNumber(8));
    }

    #[test]
    fn breaks_that_a_session_did_not_see_are_not_told() {
        let mut mailbox = Mailbox::new(UpNumber(0), None);
        for _ in 0..10 {
            mailbox.attached(UpNumber(0), &hello());
            mailbox.lost();
        }
        mailbox.attached(UpNumber(0), &hello());
        assert_eq!(taken(&mut mailbox), [attached(false)]);
        for _ in 0..10 {
            mailbox.lost();
            mailbox.attached(UpNumber(0), &hello());
        }
        assert_eq!(taken(&mut mailbox), [Heard::Lost, attached(true)]);
    }

    #[test]
    fn what_was_said_before_a_break_is_heard_before_it() {
        let mut mailbox = Mailbox::new(UpNumber(0), None);
        mailbox.attached(UpNumber(0), &hello());
        mailbox.said(UpNumber(1), vec![turn()], 1).unwrap();
        mailbox.lost();
        mailbox.attached(UpNumber(0), &hello());
        mailbox.said(UpNumber(1), vec![turn(); 2], 1).unwrap();
        let order = [attached(false), said([1]), Heard::Lost, attached(true), said([2])];
        assert_eq!(taken(&mut mailbox), order);
    }

    #[test]
    fn room_is_made_by_hearing_alone() {
        let mut mailbox = Mailbox::new(UpNumber(0), None);
        mailbox.said(UpNumber(1), vec![turn(); LINK_WINDOW], 1).unwrap();
        assert!(mailbox.has_room());
        mailbox.said(UpNumber(1 + LINK_WINDOW as u64), vec![turn()], WINDOW_BYTES).unwrap();
        assert!(!mailbox.has_room());
        mailbox.ack(mailbox.heard());
        assert!(!mailbox.has_room());
        taken(&mut mailbox);
        assert!(mailbox.has_room());
    }

    #[test]
    fn that_the_agent_is_gone_is_told_as_often_as_asked() {
        let mut mailbox = Mailbox::new(UpNumber(0), None);
        mailbox.said(UpNumber(1), vec![turn()], 1).unwrap();
        mailbox.gone(Gone::Lost);
        assert_eq!(mailbox.take(), Some(said([1])));
        assert_eq!(mailbox.take(), Some(Heard::Gone(Gone::Lost)));
        assert_eq!(mailbox.take(), Some(Heard::Gone(Gone::Lost)));
    }
}
