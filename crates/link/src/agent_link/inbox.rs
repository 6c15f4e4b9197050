//! What a worker has sent and its session has not taken yet: each number once and without gaps, connects and
//! disconnects in their order, and a bound on how much may wait. No task, lock or connection is known here.

use std::collections::VecDeque;

use qd_protocol::frame::v1::{DaemonLinkFrame, WorkerHello};
use qd_protocol::limits::LINK_WINDOW;
use qd_protocol::link::{AgentExitReason, AgentUpdate, UpdateNumber};
use qd_protocol::worker::AgentSpec;

use super::LinkEvent;
use super::outbox::AgentLinkOutbox;
use crate::update_window::{NumberedUpdate, WINDOW_BYTES};

/// A number is missing, so updates were lost on the way.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the worker sent update {got:?} after {after:?}")]
pub(super) struct NumberGap {
    after: UpdateNumber,
    got: UpdateNumber,
}

/// What the worker has sent and the session has not taken, and how far the session has acknowledged it. It contains the
/// outbox, because received updates decide what is sent.
#[derive(Debug)]
pub(super) struct AgentLinkInbox {
    pub(super) outbox: AgentLinkOutbox,
    queue: VecDeque<QueuedLinkEvent>,
    queued_updates: usize,
    queued_bytes: usize,
    last_received: UpdateNumber,
    /// The last number that is journalled.
    last_acked: UpdateNumber,
    /// The last number that the worker had given out when the connection was made.
    last_at_connect: UpdateNumber,
    connected: bool,
    /// Whether an `Attached` event has been delivered to the session, or is queued.
    attach_reported: bool,
    /// Why the agent ended, once the session has been told; every further call repeats it.
    gone: Option<AgentExitReason>,
}

#[derive(Debug)]
struct QueuedLinkEvent {
    event: LinkEvent,
    bytes: usize,
}

impl AgentLinkInbox {
    pub(super) fn new(journalled: UpdateNumber, start: Option<Box<AgentSpec>>) -> Self {
        Self {
            outbox: AgentLinkOutbox::new(start),
            queue: VecDeque::new(),
            queued_updates: 0,
            queued_bytes: 0,
            last_received: journalled,
            last_acked: journalled,
            last_at_connect: journalled,
            connected: false,
            attach_reported: false,
            gone: None,
        }
    }

    pub(super) fn last_received(&self) -> UpdateNumber {
        self.last_received
    }

    pub(super) fn last_acked(&self) -> UpdateNumber {
        self.last_acked
    }

    /// Everything up to this number is journalled.
    pub(super) fn ack(&mut self, upto: UpdateNumber) {
        self.last_acked = self.last_acked.max(upto.min(self.last_received));
    }

    /// Whether more can be received before the session takes an event.
    pub(super) fn has_room(&self) -> bool {
        self.queued_updates <= LINK_WINDOW && self.queued_bytes <= WINDOW_BYTES
    }

    /// Whether the session has taken every update that the worker had when the connection was made.
    pub(super) fn is_caught_up(&self) -> bool {
        self.connected && self.last_received >= self.last_at_connect && self.queue.is_empty()
    }

    pub(super) fn on_connected(&mut self, acked: UpdateNumber, hello: &WorkerHello) {
        self.connected = true;
        self.last_at_connect = hello.last;
        self.outbox.on_connected(acked, hello.presence);
        self.push_event(
            LinkEvent::Attached {
                applied: hello.applied,
                presence: hello.presence,
                pid: hello.pid,
                run_time_ms: hello.run_time_ms,
                model: hello.model.clone(),
                sandbox: hello.sandbox,
                reattached: self.attach_reported,
            },
            0,
        );
        self.attach_reported = true;
    }

    /// Records a break. If the session has not taken the `Attached` event yet, that event is dropped instead.
    pub(super) fn on_disconnected(&mut self) {
        self.connected = false;
        self.outbox.on_disconnected();
        match self.queue.back() {
            Some(QueuedLinkEvent { event: LinkEvent::Attached { reattached, .. }, .. }) => {
                self.attach_reported = *reattached;
                self.queue.pop_back();
            }
            _ => self.push_event(LinkEvent::Disconnected, 0),
        }
    }

    /// Receives updates numbered from `first`. Known numbers are dropped. `bytes` is their approximate size.
    pub(super) fn receive_updates(
        &mut self,
        first: UpdateNumber,
        updates: Vec<AgentUpdate>,
        bytes: usize,
    ) -> Result<(), NumberGap> {
        if first.0 > self.last_received.0 + 1 {
            return Err(NumberGap { after: self.last_received, got: first });
        }
        let duplicates = usize::try_from(self.last_received.0 + 1 - first.0).unwrap_or(usize::MAX);
        let new_updates: Vec<_> = (first.0..)
            .zip(updates)
            .skip(duplicates)
            .map(|(number, update)| NumberedUpdate { number: UpdateNumber(number), update })
            .collect();
        let Some(last) = new_updates.last() else { return Ok(()) };
        self.last_received = last.number;
        new_updates.iter().for_each(|numbered| self.outbox.on_update(&numbered.update));
        self.queued_updates += new_updates.len();
        self.queued_bytes += bytes;
        match self.queue.back_mut() {
            Some(QueuedLinkEvent { event: LinkEvent::Updates(queued), bytes: queued_bytes }) => {
                queued.extend(new_updates);
                *queued_bytes += bytes;
            }
            _ => self.push_event(LinkEvent::Updates(new_updates), bytes),
        }
        Ok(())
    }

    pub(super) fn on_agent_gone(&mut self, reason: AgentExitReason) {
        self.connected = false;
        self.push_event(LinkEvent::Gone(reason), 0);
    }

    pub(super) fn next_frame(&mut self) -> Option<DaemonLinkFrame> {
        self.outbox.next_frame(self.last_acked)
    }

    pub(super) fn take_event(&mut self) -> Option<LinkEvent> {
        if let Some(gone) = &self.gone {
            return Some(LinkEvent::Gone(gone.clone()));
        }
        let QueuedLinkEvent { event, bytes } = self.queue.pop_front()?;
        match &event {
            LinkEvent::Updates(updates) => {
                self.queued_updates -= updates.len();
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
        Some(event)
    }

    fn has_queued_attach(&self) -> bool {
        self.queue.iter().any(|queued| matches!(queued.event, LinkEvent::Attached { .. }))
    }

    fn push_event(&mut self, event: LinkEvent, bytes: usize) {
        self.queue.push_back(QueuedLinkEvent { event, bytes });
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
            sandbox: None,
        }
    }

    fn attached_event(reattached: bool) -> LinkEvent {
        LinkEvent::Attached {
            applied: EventNumber(0),
            presence: AgentPresence::Starting,
            pid: 1,
            run_time_ms: None,
            model: None,
            sandbox: None,
            reattached,
        }
    }

    fn updates_event(numbers: impl IntoIterator<Item = u64>) -> LinkEvent {
        let numbered = |number| NumberedUpdate { number: UpdateNumber(number), update: model_call_update() };
        LinkEvent::Updates(numbers.into_iter().map(numbered).collect())
    }

    fn drain_events(inbox: &mut AgentLinkInbox) -> Vec<LinkEvent> {
        std::iter::from_fn(|| inbox.take_event()).collect()
    }

    #[test]
    fn a_number_is_heard_once_and_never_after_a_hole() {
        let mut inbox = AgentLinkInbox::new(UpdateNumber(5), None);
        inbox.receive_updates(UpdateNumber(4), vec![model_call_update(); 4], 1).unwrap();
        inbox.receive_updates(UpdateNumber(7), vec![model_call_update(); 2], 1).unwrap();
        inbox.receive_updates(UpdateNumber(1), vec![model_call_update(); 3], 1).unwrap();
        assert!(inbox.receive_updates(UpdateNumber(10), vec![model_call_update()], 1).is_err());
        assert_eq!(drain_events(&mut inbox), [updates_event(6..=8)]);
        assert_eq!(inbox.last_received(), UpdateNumber(8));
    }

    #[test]
    fn breaks_that_a_session_did_not_see_are_not_told() {
        let mut inbox = AgentLinkInbox::new(UpdateNumber(0), None);
        for _ in 0..10 {
            inbox.on_connected(UpdateNumber(0), &hello());
            inbox.on_disconnected();
        }
        inbox.on_connected(UpdateNumber(0), &hello());
        assert_eq!(drain_events(&mut inbox), [attached_event(false)]);
        for _ in 0..10 {
            inbox.on_disconnected();
            inbox.on_connected(UpdateNumber(0), &hello());
        }
        assert_eq!(drain_events(&mut inbox), [LinkEvent::Disconnected, attached_event(true)]);
    }

    #[test]
    fn what_was_said_before_a_break_is_heard_before_it() {
        let mut inbox = AgentLinkInbox::new(UpdateNumber(0), None);
        inbox.on_connected(UpdateNumber(0), &hello());
        inbox.receive_updates(UpdateNumber(1), vec![model_call_update()], 1).unwrap();
        inbox.on_disconnected();
        inbox.on_connected(UpdateNumber(0), &hello());
        inbox.receive_updates(UpdateNumber(1), vec![model_call_update(); 2], 1).unwrap();
        let order = [
            attached_event(false),
            updates_event([1]),
            LinkEvent::Disconnected,
            attached_event(true),
            updates_event([2]),
        ];
        assert_eq!(drain_events(&mut inbox), order);
    }

    #[test]
    fn room_is_made_by_hearing_alone() {
        let mut inbox = AgentLinkInbox::new(UpdateNumber(0), None);
        inbox.receive_updates(UpdateNumber(1), vec![model_call_update(); LINK_WINDOW], 1).unwrap();
        assert!(inbox.has_room());
        inbox
            .receive_updates(UpdateNumber(1 + LINK_WINDOW as u64), vec![model_call_update()], WINDOW_BYTES)
            .unwrap();
        assert!(!inbox.has_room());
        inbox.ack(inbox.last_received());
        assert!(!inbox.has_room());
        drain_events(&mut inbox);
        assert!(inbox.has_room());
    }

    #[test]
    fn that_the_agent_is_gone_is_told_as_often_as_asked() {
        let mut inbox = AgentLinkInbox::new(UpdateNumber(0), None);
        inbox.receive_updates(UpdateNumber(1), vec![model_call_update()], 1).unwrap();
        inbox.on_agent_gone(AgentExitReason::Lost);
        assert_eq!(inbox.take_event(), Some(updates_event([1])));
        assert_eq!(inbox.take_event(), Some(LinkEvent::Gone(AgentExitReason::Lost)));
        assert_eq!(inbox.take_event(), Some(LinkEvent::Gone(AgentExitReason::Lost)));
    }
}
