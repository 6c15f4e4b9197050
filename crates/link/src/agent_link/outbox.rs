//! What a session has to send to its worker: requests, which are kept until they are answered, and commands, which the
//! session sends again after every break. No task, lock or connection is known here.

use qd_protocol::RunId;
use qd_protocol::frame::v1::{AgentPresence, DaemonLinkFrame};
use qd_protocol::link::{AgentCommand, AgentUpdate, TurnLimits, UpdateNumber};
use qd_protocol::worker::AgentSpec;

use crate::command_queue::CommandQueue;

#[derive(Debug)]
pub(super) struct AgentLinkOutbox {
    /// Commands that may be sent.
    commands: CommandQueue,
    /// Commands that were sent while the session knew of no connection. They wait, because the session's older
    /// outstanding commands go first.
    held_commands: CommandQueue,
    phase: OutboxPhase,
    /// The remaining limits of a turn, until they are sent.
    pending_limits: Option<(RunId, TurnLimits)>,
    /// The agent to start, until it is known to be starting.
    pending_start: Option<Box<AgentSpec>>,
    /// The agent is to be stopped; set until it is.
    idle_stop_pending: bool,
    /// The agent is to be ended; set until it is.
    close_requested: bool,
    /// The worker had nothing of the session when this connection was made.
    worker_is_empty: bool,
    sent: SentOnConnection,
}

/// How far the session is with the current connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum OutboxPhase {
    /// The session knows of no connection.
    Disconnected,
    /// The session has taken the `Attached` event and is resending its outstanding commands.
    Resending,
    /// The session has resent everything.
    Open,
}

/// What has already been sent on this connection.
#[derive(Debug, Default)]
struct SentOnConnection {
    acked: UpdateNumber,
    start: bool,
    idle_stop_requested: bool,
    close: bool,
}

impl AgentLinkOutbox {
    pub(super) fn new(pending_start: Option<Box<AgentSpec>>) -> Self {
        Self {
            commands: CommandQueue::default(),
            held_commands: CommandQueue::default(),
            phase: OutboxPhase::Disconnected,
            pending_limits: None,
            pending_start,
            idle_stop_pending: false,
            close_requested: false,
            worker_is_empty: false,
            sent: SentOnConnection::default(),
        }
    }

    pub(super) fn push_command(&mut self, command: AgentCommand) {
        match self.phase {
            OutboxPhase::Disconnected => self.held_commands.push(command),
            OutboxPhase::Resending | OutboxPhase::Open => self.commands.push(command),
        }
    }

    pub(super) fn set_turn_limits(&mut self, run: RunId, limits: TurnLimits) {
        self.pending_limits = Some((run, limits));
    }

    pub(super) fn request_start(&mut self, spec: Box<AgentSpec>) {
        self.pending_start = Some(spec);
        self.sent.start = false;
    }

    pub(super) fn request_idle_stop(&mut self) {
        // A request that is still open was sent already; after an answer this is a new request.
        self.sent.idle_stop_requested &= self.idle_stop_pending;
        self.idle_stop_pending = true;
    }

    pub(super) fn request_close(&mut self) {
        self.close_requested = true;
    }

    /// Whether there is an agent to start on a worker that has none.
    pub(super) fn can_start(&self) -> bool {
        self.pending_start.is_some()
    }

    /// Whether the agent was closed before the worker was told to start it. A worker without an agent waits for a start
    /// and would not answer a close.
    pub(super) fn is_closed_before_start(&self) -> bool {
        self.close_requested && self.worker_is_empty && !self.sent.start
    }

    /// A connection was made. The worker knows of the acknowledgement `acked` and reports this presence.
    pub(super) fn on_connected(&mut self, acked: UpdateNumber, presence: AgentPresence) {
        self.sent = SentOnConnection { acked, ..SentOnConnection::default() };
        self.worker_is_empty = presence == AgentPresence::Empty;
        match presence {
            // While a stop is outstanding, the agent that is there is the old one and not the one to start.
            AgentPresence::Starting | AgentPresence::Ready { .. } if !self.idle_stop_pending => {
                self.pending_start = None
            }
            AgentPresence::Gone => self.pending_start = None,
            AgentPresence::Empty
            | AgentPresence::Starting
            | AgentPresence::Ready { .. }
            | AgentPresence::IdleStopped => {}
        }
    }

    /// The session has taken the `Attached` event.
    pub(super) fn begin_resend(&mut self) {
        self.phase = OutboxPhase::Resending;
    }

    /// The session waits for events again, so it has resent its outstanding commands. Returns true if commands may now
    /// go out.
    pub(super) fn finish_resend(&mut self) -> bool {
        let resent = self.phase == OutboxPhase::Resending;
        if resent {
            self.phase = OutboxPhase::Open;
            self.commands.append(std::mem::take(&mut self.held_commands));
        }
        resent
    }

    /// The connection broke. What was sent on it is forgotten; the session resends it.
    pub(super) fn on_disconnected(&mut self) {
        self.phase = OutboxPhase::Disconnected;
        self.held_commands.append(std::mem::take(&mut self.commands));
        self.pending_limits = None;
    }

    /// Clears the requests that this update answers.
    pub(super) fn on_update(&mut self, update: &AgentUpdate) {
        match update {
            AgentUpdate::Ready { .. } if !self.idle_stop_pending => self.pending_start = None,
            AgentUpdate::IdleStopped => self.idle_stop_pending = false,
            AgentUpdate::Gone(_) => {
                self.pending_start = None;
                self.idle_stop_pending = false;
                self.close_requested = false;
            }
            _ => {}
        }
    }

    /// The next frame to send on this connection.
    pub(super) fn next_frame(&mut self, acked: UpdateNumber) -> Option<DaemonLinkFrame> {
        if self.sent.acked < acked {
            self.sent.acked = acked;
            return Some(DaemonLinkFrame::Ack(acked));
        }
        if self.close_requested && !std::mem::replace(&mut self.sent.close, true) {
            return Some(DaemonLinkFrame::Close);
        }
        if self.idle_stop_pending
            && !self.close_requested
            && !std::mem::replace(&mut self.sent.idle_stop_requested, true)
        {
            return Some(DaemonLinkFrame::StopIdleAgent);
        }
        // The new agent is not started before the old one has stopped: a worker could not tell a repeated stop request
        // from a stop of the new agent.
        if let Some(spec) = &self.pending_start
            && !self.idle_stop_pending
            && !self.close_requested
            && !std::mem::replace(&mut self.sent.start, true)
        {
            return Some(DaemonLinkFrame::Start(spec.clone()));
        }
        match self.phase {
            // Limits go after the prompt that they belong to.
            OutboxPhase::Open => self.commands.pop().map(DaemonLinkFrame::Command).or_else(|| {
                let (run, limits) = self.pending_limits.take()?;
                Some(DaemonLinkFrame::Limits { run, limits })
            }),
            OutboxPhase::Disconnected | OutboxPhase::Resending => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use qd_protocol::link::AgentExitReason;
    use qd_protocol::{EventNumber, RunId, SessionId, WorkerId};

    use super::*;

    fn steer(number: u64) -> AgentCommand {
        AgentCommand::Steer {
            number: EventNumber(number),
            run: RunId::parse("r").unwrap(),
            text: String::new(),
        }
    }

    fn spec() -> Box<AgentSpec> {
        Box::new(AgentSpec::new(SessionId::from_random(&[1]), WorkerId::from_random(&[2]), "a", "/"))
    }

    fn drain_frames(outbox: &mut AgentLinkOutbox) -> Vec<DaemonLinkFrame> {
        std::iter::from_fn(|| outbox.next_frame(UpdateNumber(0))).collect()
    }

    fn connect(outbox: &mut AgentLinkOutbox, presence: AgentPresence) {
        outbox.on_connected(UpdateNumber(0), presence);
        outbox.begin_resend();
    }

    const READY: AgentPresence = AgentPresence::Ready { steers: true };

    #[test]
    fn an_agent_rests_as_often_as_it_is_wanted_on_one_connection() {
        let mut outbox = AgentLinkOutbox::new(None);
        connect(&mut outbox, READY);
        for _ in 0..3 {
            outbox.request_idle_stop();
            assert!(matches!(drain_frames(&mut outbox)[..], [DaemonLinkFrame::StopIdleAgent]));
            outbox.request_idle_stop();
            assert!(drain_frames(&mut outbox).is_empty(), "the request was already sent");
            outbox.on_update(&AgentUpdate::IdleStopped);
            outbox.request_start(spec());
            assert!(matches!(drain_frames(&mut outbox)[..], [DaemonLinkFrame::Start(_)]));
            outbox.on_update(&AgentUpdate::Ready { agent_session_id: None, steers: true });
        }
    }

    #[test]
    fn a_close_before_the_start_was_sent_finds_nothing_to_close() {
        let mut outbox = AgentLinkOutbox::new(Some(spec()));
        connect(&mut outbox, AgentPresence::Empty);
        assert!(!outbox.is_closed_before_start());
        outbox.request_close();
        assert!(outbox.is_closed_before_start());
        let mut outbox = AgentLinkOutbox::new(Some(spec()));
        connect(&mut outbox, AgentPresence::Empty);
        assert!(matches!(drain_frames(&mut outbox)[..], [DaemonLinkFrame::Start(_)]));
        outbox.request_close();
        assert!(!outbox.is_closed_before_start());
        assert!(matches!(drain_frames(&mut outbox)[..], [DaemonLinkFrame::Close]));
    }

    #[test]
    fn what_is_owed_goes_out_before_what_was_said_without_a_connection() {
        let mut outbox = AgentLinkOutbox::new(None);
        connect(&mut outbox, READY);
        [1, 2, 3].map(steer).into_iter().for_each(|command| outbox.push_command(command));
        outbox.finish_resend();
        assert_eq!(outbox.next_frame(UpdateNumber(0)), Some(DaemonLinkFrame::Command(steer(1))));

        outbox.on_disconnected();
        outbox.push_command(steer(4));
        connect(&mut outbox, READY);
        assert_eq!(drain_frames(&mut outbox), [], "the session has not resent its commands yet");
        [1, 2, 3, 4].map(steer).into_iter().for_each(|command| outbox.push_command(command));
        outbox.finish_resend();
        assert_eq!(
            drain_frames(&mut outbox),
            [1, 2, 3, 4].map(|number| DaemonLinkFrame::Command(steer(number)))
        );
    }

    #[test]
    fn what_was_said_without_a_connection_goes_out_even_if_it_is_not_said_again() {
        let mut outbox = AgentLinkOutbox::new(None);
        outbox.push_command(steer(4));
        connect(&mut outbox, READY);
        outbox.push_command(steer(3));
        outbox.finish_resend();
        assert_eq!(drain_frames(&mut outbox), [3, 4].map(|number| DaemonLinkFrame::Command(steer(number))));
    }

    #[test]
    fn a_rest_is_said_on_every_connection_until_the_agent_rests_and_a_start_waits_for_it() {
        let mut outbox = AgentLinkOutbox::new(None);
        connect(&mut outbox, READY);
        outbox.request_idle_stop();
        outbox.request_start(spec());
        assert_eq!(drain_frames(&mut outbox), [DaemonLinkFrame::StopIdleAgent]);
        assert_eq!(drain_frames(&mut outbox), []);
        outbox.on_disconnected();
        connect(&mut outbox, READY);
        assert_eq!(drain_frames(&mut outbox), [DaemonLinkFrame::StopIdleAgent]);
        outbox.on_update(&AgentUpdate::IdleStopped);
        assert_eq!(drain_frames(&mut outbox), [DaemonLinkFrame::Start(spec())]);
        outbox.on_disconnected();
        connect(&mut outbox, AgentPresence::IdleStopped);
        assert_eq!(drain_frames(&mut outbox), [DaemonLinkFrame::Start(spec())]);
        outbox.on_disconnected();
        connect(&mut outbox, AgentPresence::Starting);
        assert_eq!(drain_frames(&mut outbox), [], "the start request has arrived");
    }

    #[test]
    fn an_end_is_said_on_every_connection_until_it_has_come_and_nothing_is_wanted_beside_it() {
        let mut outbox = AgentLinkOutbox::new(Some(spec()));
        outbox.request_idle_stop();
        outbox.request_close();
        for _ in 0..2 {
            connect(&mut outbox, AgentPresence::Empty);
            assert_eq!(drain_frames(&mut outbox), [DaemonLinkFrame::Close]);
            outbox.on_disconnected();
        }
        outbox.on_update(&AgentUpdate::Gone(AgentExitReason::Stopped));
        connect(&mut outbox, AgentPresence::Gone);
        assert_eq!(drain_frames(&mut outbox), []);
    }

    #[test]
    fn acknowledgements_are_merged_and_go_first() {
        let mut outbox = AgentLinkOutbox::new(None);
        outbox.on_connected(UpdateNumber(3), READY);
        outbox.request_close();
        assert_eq!(outbox.next_frame(UpdateNumber(3)), Some(DaemonLinkFrame::Close));
        assert_eq!(outbox.next_frame(UpdateNumber(9)), Some(DaemonLinkFrame::Ack(UpdateNumber(9))));
        assert_eq!(outbox.next_frame(UpdateNumber(9)), None);
    }
}
