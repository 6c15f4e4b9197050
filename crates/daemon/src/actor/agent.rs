//! The session's side of its agent: the link to its worker if there is one, and what is known of it.

use std::time::Duration;

use qd_core::session::{Link, State};
use qd_link::{AgentLink, Heard, Numbered};
use qd_protocol::RunId;
use qd_protocol::frame::v1::Seat;
use qd_protocol::limits::KILL_S;
use qd_protocol::link::{Down, TurnLimits, UpNumber};
use qd_protocol::worker::AgentSpec;
use tokio::time::Instant;

/// How long a worker may take to end all that it has before it is ended itself.
const CLOSE: Duration = Duration::from_secs(KILL_S);
/// How often a worker is ended that does not end.
const KILL_AGAIN: Duration = Duration::from_secs(5);
/// How long a worker that was out of sight may take to say what was missed, before deadlines count that passed meanwhile.
const CATCH_UP: Duration = Duration::from_secs(5);

/// An agent, perhaps.
#[derive(Default)]
pub(super) struct Agent {
    link: Option<Box<AgentLink>>,
    phase: Phase,
    is_lost: bool,
    /// Since when it was out of sight, the last time that it was.
    away: Option<Instant>,
    /// Whether this is a worker from before: being there again is then worth an event.
    was_there: bool,
    /// Whether settings have changed that it was started with.
    outdated: bool,
}

/// How far it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum Phase {
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
    Over,
}

impl Agent {
    pub(super) fn state(&self) -> Link {
        match self.phase {
            _ if self.link.is_none() => Link::Absent,
            Phase::Over => Link::Absent,
            _ if self.is_lost => Link::Lost,
            // One that is outdated finishes its turn, but the next run waits for another.
            Phase::Ready { steers } if !self.outdated => Link::Ready { steers },
            Phase::Resting => Link::Resting,
            Phase::Ready { .. } | Phase::Starting | Phase::Stopping | Phase::Closing { .. } => Link::Starting,
        }
    }

    /// Whether there is a worker.
    pub(super) fn is_there(&self) -> bool {
        self.link.is_some()
    }

    /// Whether there is an agent that could be put to rest.
    pub(super) fn is_idle(&self) -> bool {
        self.link.is_some() && !self.is_lost && matches!(self.phase, Phase::Ready { .. })
    }

    /// Whether something is on its way that has to come before anybody sleeps.
    pub(super) fn is_changing(&self) -> bool {
        let changes = matches!(self.phase, Phase::Starting | Phase::Stopping | Phase::Closing { .. });
        self.link.is_some() && (changes || self.is_lost)
    }

    /// Whether its memory counts: a worker that only rests has none.
    pub(super) fn is_live(&self) -> bool {
        self.link.is_some() && !matches!(self.phase, Phase::Resting | Phase::Over)
    }

    /// A new worker.
    pub(super) fn launched(&mut self, link: AgentLink) {
        *self = Self { link: Some(Box::new(link)), ..Self::default() };
    }

    /// A worker from before; it is lost until it is found.
    pub(super) fn attaching(&mut self, link: AgentLink) {
        let (link, away) = (Some(Box::new(link)), Some(Instant::now()));
        *self = Self { link, away, is_lost: true, was_there: true, ..Self::default() };
    }

    /// Starts the agent again in the worker that rests.
    pub(super) fn start(&mut self, spec: Box<AgentSpec>) {
        if let Some(link) = &self.link
            && self.phase == Phase::Resting
        {
            link.start(spec);
            self.phase = Phase::Starting;
            self.outdated = false;
        }
    }

    /// Waits for the agent to say something; for ever, if there is none.
    pub(super) async fn hear(&mut self) -> Heard {
        match &mut self.link {
            Some(link) => link.hear().await,
            None => std::future::pending().await,
        }
    }

    pub(super) fn send(&self, down: Down) {
        if let Some(link) = &self.link {
            link.send(down);
        }
    }

    /// Says what is left to a turn, should it be alone.
    pub(super) fn limit(&self, run: RunId, limits: TurnLimits) {
        if let Some(link) = &self.link {
            link.limit(run, limits);
        }
    }

    pub(super) fn acknowledge(&mut self, number: UpNumber) {
        if let Some(link) = &mut self.link {
            link.ack(number);
        }
    }

    /// What was heard and is not known to be journalled.
    pub(super) fn unacknowledged(&self) -> Vec<Numbered> {
        self.link.iter().flat_map(|link| link.unacked().cloned()).collect()
    }

    pub(super) fn ready(&mut self, steers: bool) {
        if self.phase == Phase::Starting {
            self.phase = Phase::Ready { steers };
        }
    }

    pub(super) fn lost(&mut self) {
        self.is_lost = true;
        self.away = Some(Instant::now());
    }

    /// Until when no deadline counts, because what the agent did about it may not have been heard.
    pub(super) fn catches_up_until(&self) -> Option<Instant> {
        let behind = self.link.as_ref().is_some_and(|link| !link.is_caught_up());
        self.away.filter(|_| behind).map(|since| since + CATCH_UP)
    }

    /// The worker is there; true if it was there before, and so is found again.
    pub(super) fn attached(&mut self, seat: Seat, again: bool) -> bool {
        self.is_lost = false;
        if !matches!(self.phase, Phase::Stopping | Phase::Closing { .. } | Phase::Over) {
            self.phase = match seat {
                Seat::Ready { steers } => Phase::Ready { steers },
                Seat::Resting => Phase::Resting,
                Seat::Empty | Seat::Starting | Seat::Gone => Phase::Starting,
            };
        }
        std::mem::take(&mut self.was_there) || again
    }

    pub(super) fn rested(&mut self) {
        if self.phase == Phase::Stopping {
            self.phase = Phase::Resting;
        }
    }

    /// It ends with the turn that has just ended.
    pub(super) fn ending(&mut self) {
        if matches!(self.phase, Phase::Ready { .. }) {
            self.phase = Phase::Stopping;
        }
    }

    /// Whether it is one from before that we have found no trace of.
    pub(super) fn was_never_met(&self) -> bool {
        self.was_there
    }

    /// It has said its last word; what is left to do is to acknowledge it.
    pub(super) fn over(&mut self) {
        self.phase = Phase::Over;
    }

    /// The link of one that has said its last word.
    pub(super) fn take_over(&mut self) -> Option<Box<AgentLink>> {
        match self.phase {
            Phase::Over => std::mem::take(self).link,
            _ => None,
        }
    }

    pub(super) fn gone(&mut self) {
        *self = Self::default();
    }

    /// Settings have changed: the next run gets an agent that was started with them.
    pub(super) fn outdate(&mut self) {
        self.outdated = self.link.is_some();
    }

    /// Lets go of an outdated agent once it works on nothing.
    pub(super) fn refresh(&mut self, state: &State) {
        if self.outdated && state.active().is_none() && self.is_idle() {
            self.rest();
        }
    }

    /// Stops the agent, and keeps what its turns left running.
    pub(super) fn rest(&mut self) {
        if let Some(link) = &self.link
            && matches!(self.phase, Phase::Ready { .. } | Phase::Starting)
        {
            link.rest();
            self.phase = Phase::Stopping;
        }
    }

    /// Ends the agent and all that it started.
    pub(super) fn close(&mut self) {
        if let Some(link) = &self.link
            && !matches!(self.phase, Phase::Closing { .. } | Phase::Over)
        {
            link.close();
            self.phase = Phase::Closing { until: Instant::now() + CLOSE };
        }
    }

    /// When a worker that was told to end is ended.
    pub(super) fn patience(&self) -> Option<Instant> {
        match self.phase {
            Phase::Closing { until } if self.link.is_some() => Some(until),
            _ => None,
        }
    }

    /// Gives a worker that was just ended a little time to be gone.
    pub(super) fn wait_on(&mut self) {
        if let Phase::Closing { until } = &mut self.phase {
            *until = Instant::now() + KILL_AGAIN;
        }
    }

    /// Lets go: the agent goes on without us.
    pub(super) fn detach(&mut self) {
        *self = Self::default();
    }
}
