//! The session's side of its agent: the link to its worker if there is one, and what is known of it.

use std::time::Duration;

use qd_core::session::{AgentAvailability, SessionState};
use qd_link::{AgentLink, LinkEvent, NumberedUpdate};
use qd_protocol::RunId;
use qd_protocol::frame::v1::AgentPresence;
use qd_protocol::limits::KILL_S;
use qd_protocol::link::{AgentCommand, TurnLimits, UpdateNumber};
use qd_protocol::worker::AgentSpec;
use tokio::time::Instant;

/// How long a worker may take to end all that it has before it is ended itself.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(KILL_S);
/// How often a worker is ended that does not end.
const KILL_RETRY: Duration = Duration::from_secs(5);
/// How long a worker that was out of sight may take to say what was missed, before deadlines count that passed meanwhile.
const CATCH_UP_TIMEOUT: Duration = Duration::from_secs(5);

/// An agent, perhaps.
#[derive(Default)]
pub(super) struct SessionAgent {
    link: Option<Box<AgentLink>>,
    phase: SessionAgentPhase,
    is_lost: bool,
    /// Since when it was out of sight, the last time that it was.
    lost_since: Option<Instant>,
    /// Whether this is a worker from before: being there again is then worth an event.
    is_from_before: bool,
    /// Whether settings have changed that it was started with.
    outdated: bool,
}

/// How far it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum SessionAgentPhase {
    /// It was asked for, and has not said that it is ready.
    #[default]
    Starting,
    /// It takes prompts.
    Ready { steers: bool },
    /// It was told to rest, or is about to end, and has not said that it does.
    Stopping,
    /// It rests: there is a worker with what its turns left running.
    Resting,
    /// It was told to end and has so long.
    Closing { until: Instant },
    /// It has said its last word.
    Ended,
}

impl SessionAgent {
    pub(super) fn link_state(&self) -> AgentAvailability {
        match self.phase {
            _ if self.link.is_none() => AgentAvailability::Absent,
            SessionAgentPhase::Ended => AgentAvailability::Absent,
            _ if self.is_lost => AgentAvailability::Lost,
            // One that is outdated finishes its turn, but the next run waits for another.
            SessionAgentPhase::Ready { steers } if !self.outdated => {
                AgentAvailability::Ready { steerable: steers }
            }
            SessionAgentPhase::Resting => AgentAvailability::WorkerOnly,
            SessionAgentPhase::Ready { .. }
            | SessionAgentPhase::Starting
            | SessionAgentPhase::Stopping
            | SessionAgentPhase::Closing { .. } => AgentAvailability::Starting,
        }
    }

    /// Whether there is a worker.
    pub(super) fn has_worker(&self) -> bool {
        self.link.is_some()
    }

    /// Whether there is an agent that could be put to rest.
    pub(super) fn is_idle(&self) -> bool {
        self.link.is_some() && !self.is_lost && matches!(self.phase, SessionAgentPhase::Ready { .. })
    }

    /// Whether something is on its way that has to come before anybody sleeps.
    pub(super) fn is_changing(&self) -> bool {
        let changes = matches!(
            self.phase,
            SessionAgentPhase::Starting | SessionAgentPhase::Stopping | SessionAgentPhase::Closing { .. }
        );
        self.link.is_some() && (changes || self.is_lost)
    }

    /// Whether its memory counts: a worker that only rests has none.
    pub(super) fn is_live(&self) -> bool {
        self.link.is_some() && !matches!(self.phase, SessionAgentPhase::Resting | SessionAgentPhase::Ended)
    }

    /// A new worker.
    pub(super) fn set_new_link(&mut self, link: AgentLink) {
        *self = Self { link: Some(Box::new(link)), ..Self::default() };
    }

    /// A worker from before; it is lost until it is found.
    pub(super) fn set_existing_link(&mut self, link: AgentLink) {
        let (link, away) = (Some(Box::new(link)), Some(Instant::now()));
        *self = Self { link, lost_since: away, is_lost: true, is_from_before: true, ..Self::default() };
    }

    /// Starts the agent again in the worker that rests.
    pub(super) fn start(&mut self, spec: Box<AgentSpec>) {
        if let Some(link) = &self.link
            && self.phase == SessionAgentPhase::Resting
        {
            link.start_agent(spec);
            self.phase = SessionAgentPhase::Starting;
            self.outdated = false;
        }
    }

    /// Waits for the agent to say something; for ever, if there is none.
    pub(super) async fn next_link_event(&mut self) -> LinkEvent {
        match &mut self.link {
            Some(link) => link.next_event().await,
            None => std::future::pending().await,
        }
    }

    pub(super) fn send(&self, down: AgentCommand) {
        if let Some(link) = &self.link {
            link.send(down);
        }
    }

    /// Says what is left to a turn, should it be alone.
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

    /// What was heard and is not known to be journalled.
    pub(super) fn unacknowledged(&self) -> Vec<NumberedUpdate> {
        self.link.iter().flat_map(|link| link.unacked().cloned()).collect()
    }

    pub(super) fn mark_ready(&mut self, steers: bool) {
        if self.phase == SessionAgentPhase::Starting {
            self.phase = SessionAgentPhase::Ready { steers };
        }
    }

    pub(super) fn mark_lost(&mut self) {
        self.is_lost = true;
        self.lost_since = Some(Instant::now());
    }

    /// Until when no deadline counts, because what the agent did about it may not have been heard.
    pub(super) fn catch_up_deadline(&self) -> Option<Instant> {
        let behind = self.link.as_ref().is_some_and(|link| !link.is_caught_up());
        self.lost_since.filter(|_| behind).map(|since| since + CATCH_UP_TIMEOUT)
    }

    /// The worker is there; true if it was there before, and so is found again.
    pub(super) fn mark_attached(&mut self, seat: AgentPresence, again: bool) -> bool {
        self.is_lost = false;
        if !matches!(
            self.phase,
            SessionAgentPhase::Stopping | SessionAgentPhase::Closing { .. } | SessionAgentPhase::Ended
        ) {
            self.phase = match seat {
                AgentPresence::Ready { steers } => SessionAgentPhase::Ready { steers },
                AgentPresence::Resting => SessionAgentPhase::Resting,
                AgentPresence::Empty | AgentPresence::Starting | AgentPresence::Gone => {
                    SessionAgentPhase::Starting
                }
            };
        }
        std::mem::take(&mut self.is_from_before) || again
    }

    pub(super) fn mark_resting(&mut self) {
        if self.phase == SessionAgentPhase::Stopping {
            self.phase = SessionAgentPhase::Resting;
        }
    }

    /// It ends with the turn that has just ended.
    pub(super) fn mark_stopping(&mut self) {
        if matches!(self.phase, SessionAgentPhase::Ready { .. }) {
            self.phase = SessionAgentPhase::Stopping;
        }
    }

    /// Whether it is one from before that we have found no trace of.
    pub(super) fn was_never_reached(&self) -> bool {
        self.is_from_before
    }

    /// It has said its last word; what is left to do is to acknowledge it.
    pub(super) fn mark_ended(&mut self) {
        self.phase = SessionAgentPhase::Ended;
    }

    /// The link of one that has said its last word.
    pub(super) fn take_ended_link(&mut self) -> Option<Box<AgentLink>> {
        match self.phase {
            SessionAgentPhase::Ended => std::mem::take(self).link,
            _ => None,
        }
    }

    pub(super) fn clear_link(&mut self) {
        *self = Self::default();
    }

    /// Settings have changed: the next run gets an agent that was started with them.
    pub(super) fn mark_outdated(&mut self) {
        self.outdated = self.link.is_some();
    }

    /// Lets go of an outdated agent once it works on nothing.
    pub(super) fn rest_if_outdated(&mut self, state: &SessionState) {
        if self.outdated && state.active_run().is_none() && self.is_idle() {
            self.rest();
        }
    }

    /// Stops the agent, and keeps what its turns left running.
    pub(super) fn rest(&mut self) {
        if let Some(link) = &self.link
            && matches!(self.phase, SessionAgentPhase::Ready { .. } | SessionAgentPhase::Starting)
        {
            link.rest_agent();
            self.phase = SessionAgentPhase::Stopping;
        }
    }

    /// Ends the agent and all that it started.
    pub(super) fn close(&mut self) {
        if let Some(link) = &self.link
            && !matches!(self.phase, SessionAgentPhase::Closing { .. } | SessionAgentPhase::Ended)
        {
            link.close();
            self.phase = SessionAgentPhase::Closing { until: Instant::now() + CLOSE_TIMEOUT };
        }
    }

    /// When a worker that was told to end is ended.
    pub(super) fn kill_deadline(&self) -> Option<Instant> {
        match self.phase {
            SessionAgentPhase::Closing { until } if self.link.is_some() => Some(until),
            _ => None,
        }
    }

    /// Gives a worker that was just ended a little time to be gone.
    pub(super) fn extend_kill_deadline(&mut self) {
        if let SessionAgentPhase::Closing { until } = &mut self.phase {
            *until = Instant::now() + KILL_RETRY;
        }
    }

    /// Lets go: the agent goes on without us.
    pub(super) fn detach(&mut self) {
        *self = Self::default();
    }
}
