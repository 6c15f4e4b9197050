//! What has come from a worker and its session has not heard: each number once and without a hole, breaks and returns in
//! their order, and a bound on how much of it may wait. No task, lock or connection is known here.

use std::collections::VecDeque;

use qd_protocol::frame::v1::{DaemonLinkFrame, WorkerHello};
use qd_protocol::limits::LINK_WINDOW;
use qd_protocol::link::{AgentExitReason, AgentUpdate, UpdateNumber};
use qd_protocol::worker::AgentSpec;

use super::LinkEvent;
use super::outbox::AgentLinkOutbox;
use crate::update_window::{NumberedUpdate, WINDOW_BYTES};

/// A number is missing: what came is not what the worker said.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the worker goes on with {got:?} after {after:?}")]
pub(super) struct NumberGap {
    after: UpdateNumber,
    got: UpdateNumber,
}

/// See the module. The session's side of it is beside it, since what is heard decides what is said.
#[derive(Debug)]
pub(super) struct AgentLinkInbox {
    pub(super) outbox: AgentLinkOutbox,
    queue: VecDeque<QueuedLinkEvent>,
    queued_updates: usize,
    queued_bytes: usize,
    /// The last number that was taken in.
    last_received: UpdateNumber,
    /// The last number that is in the journal.
    last_acked: UpdateNumber,
    /// The last number that the worker had given when it was reached.
    last_at_connect: UpdateNumber,
    /// Whether there is a connection.
    connected: bool,
    /// Whether the session has heard, or will, that there was one.
    attach_reported: bool,
    /// The last word, to be told as often as asked.
    gone: Option<AgentExitReason>,
}

#[derive(Debug)]
struct QueuedLinkEvent {
    event: LinkEvent,
    bytes: usize,
}

impl AgentLinkInbox {
    pub(super) fn new(taken: UpdateNumber, start: Option<Box<AgentSpec>>) -> Self {
        Self {
            outbox: AgentLinkOutbox::new(start),
            queue: VecDeque::new(),
            queued_updates: 0,
            queued_bytes: 0,
            last_received: taken,
            last_acked: taken,
            last_at_connect: taken,
            connected: false,
            attach_reported: false,
            gone: None,
        }
    }

    /// The last number that was taken in.
    pub(super) fn last_received(&self) -> UpdateNumber {
        self.last_received
    }

    /// The last number that is in the journal.
    pub(super) fn last_acked(&self) -> UpdateNumber {
        self.last_acked
    }

    /// Everything up to here is in the journal.
    pub(super) fn ack(&mut self, upto: UpdateNumber) {
        self.last_acked = self.last_acked.max(upto.min(self.last_received));
    }

    /// Whether more can be taken in before the session takes some out.
    pub(super) fn has_room(&self) -> bool {
        self.queued_updates <= LINK_WINDOW && self.queued_bytes <= WINDOW_BYTES
    }

    /// Whether the session has heard all that the worker had said when it was reached.
    pub(super) fn is_caught_up(&self) -> bool {
        self.connected && self.last_received >= self.last_at_connect && self.queue.is_empty()
    }

    /// A connection is there, by this hello.
    pub(super) fn on_connected(&mut self, taken: UpdateNumber, hello: &WorkerHello) {
        self.connected = true;
        self.last_at_connect = hello.last;
        self.outbox.on_connected(taken, hello.presence);
        self.push_event(
            LinkEvent::Attached {
                applied: hello.applied,
                presence: hello.presence,
                pid: hello.pid,
                run_time_ms: hello.run_time_ms,
                model: hello.model.clone(),
                reattached: self.attach_reported,
            },
            0,
        );
        self.attach_reported = true;
    }

    /// The connection broke. A session that has not heard of it need not hear that it broke.
    pub(super) fn on_disconnected(&mut self) {
        self.connected = false;
        self.outbox.on_disconnected();
        match self.queue.back() {
            Some(QueuedLinkEvent { event: LinkEvent::Attached { reattached: again, .. }, .. }) => {
                self.attach_reported = *again;
                self.queue.pop_back();
            }
            _ => self.push_event(LinkEvent::Disconnected, 0),
        }
    }

    /// Something was said, numbered from `first`; what is known already is dropped. `bytes` is about what it weighs.
    pub(super) fn receive_updates(
        &mut self,
        first: UpdateNumber,
        ups: Vec<AgentUpdate>,
        bytes: usize,
    ) -> Result<(), NumberGap> {
        if first.0 > self.last_received.0 + 1 {
            return Err(NumberGap { after: self.last_received, got: first });
        }
        let known = usize::try_from(self.last_received.0 + 1 - first.0).unwrap_or(usize::MAX);
        let news: Vec<_> = (first.0..)
            .zip(ups)
            .skip(known)
            .map(|(number, up)| NumberedUpdate { number: UpdateNumber(number), update: up })
            .collect();
        let Some(last) = news.last() else { return Ok(()) };
        self.last_received = last.number;
        news.iter().for_each(|thing| self.outbox.on_update(&thing.update));
        self.queued_updates += news.len();
        self.queued_bytes += bytes;
        match self.queue.back_mut() {
            Some(QueuedLinkEvent { event: LinkEvent::Updates(said), bytes: before }) => {
                said.extend(news);
                *before += bytes;
            }
            _ => self.push_event(LinkEvent::Updates(news), bytes),
        }
        Ok(())
    }

    /// The agent is no more.
    pub(super) fn on_agent_gone(&mut self, gone: AgentExitReason) {
        self.connected = false;
        self.push_event(LinkEvent::Gone(gone), 0);
    }

    /// What the worker is told next.
    pub(super) fn next_frame(&mut self) -> Option<DaemonLinkFrame> {
        self.outbox.next_frame(self.last_acked)
    }

    /// What the session hears next.
    pub(super) fn take_event(&mut self) -> Option<LinkEvent> {
        if let Some(gone) = &self.gone {
            return Some(LinkEvent::Gone(gone.clone()));
        }
        let QueuedLinkEvent { event: heard, bytes } = self.queue.pop_front()?;
        match &heard {
            LinkEvent::Updates(said) => {
                self.queued_updates -= said.len();
                self.queued_bytes -= bytes;
            }
            LinkEvent::Attached { .. } if self.connected && !self.has_queued_attach() => {
                self.outbox.begin_resend()
            }
            LinkEvent::Attached { .. } | LinkEvent::Disconnected => {}
            LinkEvent::Gone(gone) => self.gone = Some(gone.clone()),
        }
        if self.queue.is_empty() {
            self.queue = VecDeque::new();
        }
        Some(heard)
    }

    fn has_queued_attach(&self) -> bool {
        self.queue.iter().any(|waiting| matches!(waiting.event, LinkEvent::Attached { .. }))
    }

    fn push_event(&mut self, heard: LinkEvent, bytes: usize) {
        self.queue.push_back(QueuedLinkEvent { event: heard, bytes });
    }
}

#[cfg(test)]
mod tests {
    use qd_protocol::frame::v1::AgentPresence;
    use qd_protocol::link::TurnUpdate;
    use qd_protocol::{EventNumber, RunId};

    use super::*;

    fn model_call_update() -> AgentUpdate {
        AgentUpdate::Turn { run: RunId::parse("r").unwrap(), update: TurnUpdate::ModelCall }
    }

    fn hello() -> WorkerHello {
        WorkerHello {
            version: 1,
            software: String::new(),
            capabilities: Vec::new(),
            nonce: String::new(),
            proof: String::new(),
            presence: AgentPresence::Starting,
            last: UpdateNumber(0),
            applied: EventNumber(0),
            pid: 1,
            run_time_ms: None,
            model: None,
        }
    }

    fn attached_event(again: bool) -> LinkEvent {
        LinkEvent::Attached {
            applied: EventNumber(0),
            presence: AgentPresence::Starting,
            pid: 1,
            run_time_ms: None,
            model: None,
            reattached: again,
        }
    }

    fn updates_event(numbers: impl IntoIterator<Item = u64>) -> LinkEvent {
        let thing = |number| NumberedUpdate { number: UpdateNumber(number), update: model_call_update() };
        LinkEvent::Updates(numbers.into_iter().map(thing).collect())
    }

    fn drain_events(mailbox: &mut AgentLinkInbox) -> Vec<LinkEvent> {
        std::iter::from_fn(|| mailbox.take_event()).collect()
    }

    #[test]
    fn a_number_is_heard_once_and_never_after_a_hole() {
        let mut mailbox = AgentLinkInbox::new(UpdateNumber(5), None);
        mailbox.receive_updates(UpdateNumber(4), vec![model_call_update(); 4], 1).unwrap();
        mailbox.receive_updates(UpdateNumber(7), vec![model_call_update(); 2], 1).unwrap();
        mailbox.receive_updates(UpdateNumber(1), vec![model_call_update(); 3], 1).unwrap();
        assert!(mailbox.receive_updates(UpdateNumber(10), vec![model_call_update()], 1).is_err());
        assert_eq!(drain_events(&mut mailbox), [updates_event(6..=8)]);
        assert_eq!(mailbox.last_received(), UpdateNumber(8));
    }

    #[test]
    fn breaks_that_a_session_did_not_see_are_not_told() {
        let mut mailbox = AgentLinkInbox::new(UpdateNumber(0), None);
        for _ in 0..10 {
            mailbox.on_connected(UpdateNumber(0), &hello());
            mailbox.on_disconnected();
        }
        mailbox.on_connected(UpdateNumber(0), &hello());
        assert_eq!(drain_events(&mut mailbox), [attached_event(false)]);
        for _ in 0..10 {
            mailbox.on_disconnected();
            mailbox.on_connected(UpdateNumber(0), &hello());
        }
        assert_eq!(drain_events(&mut mailbox), [LinkEvent::Disconnected, attached_event(true)]);
    }

    #[test]
    fn what_was_said_before_a_break_is_heard_before_it() {
        let mut mailbox = AgentLinkInbox::new(UpdateNumber(0), None);
        mailbox.on_connected(UpdateNumber(0), &hello());
        mailbox.receive_updates(UpdateNumber(1), vec![model_call_update()], 1).unwrap();
        mailbox.on_disconnected();
        mailbox.on_connected(UpdateNumber(0), &hello());
        mailbox.receive_updates(UpdateNumber(1), vec![model_call_update(); 2], 1).unwrap();
        let order = [
            attached_event(false),
            updates_event([1]),
            LinkEvent::Disconnected,
            attached_event(true),
            updates_event([2]),
        ];
        assert_eq!(drain_events(&mut mailbox), order);
    }

    #[test]
    fn room_is_made_by_hearing_alone() {
        let mut mailbox = AgentLinkInbox::new(UpdateNumber(0), None);
        mailbox.receive_updates(UpdateNumber(1), vec![model_call_update(); LINK_WINDOW], 1).unwrap();
        assert!(mailbox.has_room());
        mailbox
            .receive_updates(UpdateNumber(1 + LINK_WINDOW as u64), vec![model_call_update()], WINDOW_BYTES)
            .unwrap();
        assert!(!mailbox.has_room());
        mailbox.ack(mailbox.last_received());
        assert!(!mailbox.has_room());
        drain_events(&mut mailbox);
        assert!(mailbox.has_room());
    }

    #[test]
    fn that_the_agent_is_gone_is_told_as_often_as_asked() {
        let mut mailbox = AgentLinkInbox::new(UpdateNumber(0), None);
        mailbox.receive_updates(UpdateNumber(1), vec![model_call_update()], 1).unwrap();
        mailbox.on_agent_gone(AgentExitReason::Lost);
        assert_eq!(mailbox.take_event(), Some(updates_event([1])));
        assert_eq!(mailbox.take_event(), Some(LinkEvent::Gone(AgentExitReason::Lost)));
        assert_eq!(mailbox.take_event(), Some(LinkEvent::Gone(AgentExitReason::Lost)));
    }
}
