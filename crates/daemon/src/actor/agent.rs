//! The actor's view of its agent: the link to the worker, if there is one, and the phase of the agent behind it.

use std::time::Duration;

use qd_core::session::{AgentAvailability, AgentPhase, SessionState};
use qd_link::{AgentLink, LinkEvent, NumberedUpdate};
use qd_protocol::RunId;
use qd_protocol::frame::v1::AgentPresence;
use qd_protocol::limits::KILL_S;
use qd_protocol::link::{AgentCommand, TurnLimits, UpdateNumber};
use qd_protocol::worker::AgentSpec;
use tokio::time::Instant;

/// How long a worker may take to end its agent and exit before it is killed.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(KILL_S);
/// The pause before a worker that does not exit is killed again.
const KILL_RETRY: Duration = Duration::from_secs(5);
/// How long a reattached worker may take to deliver missed updates before deadlines that passed meanwhile apply.
const CATCH_UP_TIMEOUT: Duration = Duration::from_secs(5);

/// The session's agent, if it has one.
#[derive(Default)]
pub(super) struct SessionAgent {
    link: Option<Box<AgentLink>>,
    phase: AgentPhase,
    /// When the worker is killed, if it was told to exit and has not done so by then.
    kill_at: Option<Instant>,
    is_lost: bool,
    /// When the connection was last lost.
    lost_since: Option<Instant>,
    /// Whether this worker was started by a previous daemon and has not been reached yet: reattaching makes an event.
    is_from_previous_daemon: bool,
    /// Whether settings have changed since the agent was started.
    outdated: bool,
}

impl SessionAgent {
    pub(super) fn availability(&self) -> AgentAvailability {
        match self.link {
            Some(_) => self.phase.availability(self.is_lost, self.outdated),
            None => AgentAvailability::Absent,
        }
    }

    pub(super) fn has_worker(&self) -> bool {
        self.link.is_some()
    }

    /// Whether there is an agent that could be stopped if it has nothing to do.
    pub(super) fn is_idle(&self) -> bool {
        self.link.is_some() && !self.is_lost && matches!(self.phase, AgentPhase::Ready { .. })
    }

    /// Whether a start, stop or reconnect is under way that must end before the session may sleep.
    pub(super) fn is_changing(&self) -> bool {
        self.link.is_some() && (self.phase.is_changing() || self.is_lost)
    }

    /// Whether the agent counts towards the slots: a worker whose agent was stopped does not.
    pub(super) fn is_live(&self) -> bool {
        self.link.is_some() && self.phase.is_live()
    }

    /// Takes the link to a worker that was just launched.
    pub(super) fn set_new_link(&mut self, link: AgentLink) {
        *self = Self { link: Some(Box::new(link)), ..Self::default() };
    }

    /// Takes the link to a worker of a previous daemon, which counts as lost until it is reached.
    pub(super) fn set_existing_link(&mut self, link: AgentLink) {
        let (link, lost_since) = (Some(Box::new(link)), Some(Instant::now()));
        *self = Self { link, lost_since, is_lost: true, is_from_previous_daemon: true, ..Self::default() };
    }

    /// Starts the agent again in the worker whose agent was stopped.
    pub(super) fn start(&mut self, spec: Box<AgentSpec>) {
        if let Some(link) = &self.link
            && self.phase == AgentPhase::IdleStopped
        {
            link.start_agent(spec);
            self.phase = AgentPhase::Starting;
            self.outdated = false;
        }
    }

    /// Waits for the next event of the link; forever if there is none.
    pub(super) async fn next_link_event(&mut self) -> LinkEvent {
        match &mut self.link {
            Some(link) => link.next_event().await,
            None => std::future::pending().await,
        }
    }

    pub(super) fn send(&self, command: AgentCommand) {
        if let Some(link) = &self.link {
            link.send(command);
        }
    }

    /// Sends the remaining limits of a turn, which the worker enforces while no daemon is attached.
    pub(super) fn send_limits(&self, run: RunId, limits: TurnLimits) {
        if let Some(link) = &self.link {
            link.set_turn_limits(run, limits);
        }
    }

    pub(super) fn acknowledge(&mut self, number: UpdateNumber) {
        if let Some(link) = &mut self.link {
            link.ack(number);
        }
    }

    /// Updates that were received and are not known to be journalled.
    pub(super) fn unacknowledged(&self) -> Vec<NumberedUpdate> {
        self.link.iter().flat_map(|link| link.unacked().cloned()).collect()
    }

    pub(super) fn mark_ready(&mut self, steers: bool) {
        if self.phase == AgentPhase::Starting {
            self.phase = AgentPhase::Ready { steers };
        }
    }

    pub(super) fn mark_lost(&mut self) {
        self.is_lost = true;
        self.lost_since = Some(Instant::now());
    }

    /// Until when deadlines are ignored, because updates that met them may not have arrived yet.
    pub(super) fn catch_up_deadline(&self) -> Option<Instant> {
        let behind = self.link.as_ref().is_some_and(|link| !link.is_caught_up());
        self.lost_since.filter(|_| behind).map(|since| since + CATCH_UP_TIMEOUT)
    }

    /// Records that the worker is connected. Returns true if it was connected before, to this daemon or a previous
    /// one.
    pub(super) fn mark_attached(&mut self, presence: AgentPresence, reattached: bool) -> bool {
        self.is_lost = false;
        self.phase = self.phase.after_attach(presence);
        std::mem::take(&mut self.is_from_previous_daemon) || reattached
    }

    pub(super) fn mark_idle_stopped(&mut self) {
        if self.phase == AgentPhase::Stopping {
            self.phase = AgentPhase::IdleStopped;
        }
    }

    /// Records that the agent ends with the turn that has just ended.
    pub(super) fn mark_stopping(&mut self) {
        if matches!(self.phase, AgentPhase::Ready { .. }) {
            self.phase = AgentPhase::Stopping;
        }
    }

    /// Whether this is a worker of a previous daemon that was never reached.
    pub(super) fn was_never_reached(&self) -> bool {
        self.is_from_previous_daemon
    }

    /// Whether this is a worker of this daemon whose agent has not become ready.
    pub(super) fn is_starting(&self) -> bool {
        self.phase == AgentPhase::Starting && !self.is_from_previous_daemon
    }

    /// Records that the agent's last update has arrived; only its acknowledgement is left to do.
    pub(super) fn mark_ended(&mut self) {
        self.phase = AgentPhase::Ended;
    }

    /// Takes the link of an agent whose last update has arrived.
    pub(super) fn take_ended_link(&mut self) -> Option<Box<AgentLink>> {
        match self.phase {
            AgentPhase::Ended => std::mem::take(self).link,
            _ => None,
        }
    }

    pub(super) fn clear_link(&mut self) {
        *self = Self::default();
    }

    /// Records that settings have changed: the next run gets an agent that was started with them.
    pub(super) fn mark_outdated(&mut self) {
        self.outdated = self.link.is_some();
    }

    /// Stops an outdated agent once it is in no turn. The run that it is started for again may be suspended.
    pub(super) fn stop_if_outdated(&mut self, state: &SessionState) {
        if self.outdated && state.current_turn().is_none() && self.is_idle() {
            self.stop_idle();
        }
    }

    /// Stops the agent, and keeps the processes that its turns left running.
    pub(super) fn stop_idle(&mut self) {
        if let Some(link) = &self.link
            && matches!(self.phase, AgentPhase::Ready { .. } | AgentPhase::Starting)
        {
            link.stop_idle_agent();
            self.phase = AgentPhase::Stopping;
        }
    }

    /// Ends the agent and all that it started.
    pub(super) fn close(&mut self) {
        if let Some(link) = &self.link
            && !matches!(self.phase, AgentPhase::Closing | AgentPhase::Ended)
        {
            link.close();
            self.phase = AgentPhase::Closing;
            self.kill_at = Some(Instant::now() + CLOSE_TIMEOUT);
        }
    }

    /// When a worker that was told to exit is killed.
    pub(super) fn kill_deadline(&self) -> Option<Instant> {
        self.kill_at.filter(|_| self.link.is_some() && self.phase == AgentPhase::Closing)
    }

    /// Gives a worker that was just killed some time before it is killed again.
    pub(super) fn extend_kill_deadline(&mut self) {
        self.kill_at = Some(Instant::now() + KILL_RETRY);
    }

    /// Drops the link: the agent continues without a daemon.
    pub(super) fn detach(&mut self) {
        *self = Self::default();
    }
}
