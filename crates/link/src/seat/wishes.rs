//! What the daemon wants of a worker beyond commands to the agent. After a break it may say the same again, so each
//! wish is judged by where all those before it lead; nothing here waits or is timed.

use std::collections::VecDeque;

use qd_protocol::worker::AgentSpec;

/// Wishes that may wait for the worker; a daemon that waits for its answers has no more than three.
const WISHES_MAX: usize = 16;

/// What the daemon wants of the worker beyond commands to the agent.
#[derive(Debug, Clone, PartialEq)]
pub enum Wanted {
    /// An agent, in a seat that rests.
    Start(Box<AgentSpec>),
    /// No agent for now; what its turns left running stays.
    Rest,
    /// No agent any more, nor anything that it started.
    Close,
}

/// Those that wait.
#[derive(Debug)]
pub(super) struct Wishes {
    queue: VecDeque<Wanted>,
    /// Where the seat will be when all of them are done.
    heading: Heading,
    /// An agent was wanted and has not been seated.
    awaits_agent: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Heading {
    Agent,
    Rest,
    Close,
}

impl Wishes {
    /// Those of a seat whose agent is about to come.
    pub(super) fn new() -> Self {
        Self { queue: VecDeque::new(), heading: Heading::Agent, awaits_agent: true }
    }

    /// Takes a wish in, unless it is there already or done; true if it waits now.
    pub(super) fn put(&mut self, wanted: Wanted) -> bool {
        let to = match (self.heading, &wanted) {
            (Heading::Rest, Wanted::Start(_)) => Heading::Agent,
            (Heading::Agent, Wanted::Rest) => Heading::Rest,
            (Heading::Agent | Heading::Rest, Wanted::Close) => Heading::Close,
            _ => return false,
        };
        if self.queue.len() >= WISHES_MAX && to != Heading::Close {
            tracing::warn!("the daemon wants more of a worker than the worker does");
            return false;
        }
        self.heading = to;
        self.awaits_agent |= to == Heading::Agent;
        self.queue.push_back(wanted);
        true
    }

    /// The next one.
    pub(super) fn take(&mut self) -> Option<Wanted> {
        self.queue.pop_front()
    }

    /// Whether an agent is on its way.
    pub(super) fn awaits_agent(&self) -> bool {
        self.awaits_agent
    }

    /// The agent has come.
    pub(super) fn seated(&mut self) {
        self.awaits_agent = false;
    }

    /// The agent rests, because the daemon wanted it or because the worker did.
    pub(super) fn rested(&mut self) {
        if self.heading == Heading::Agent && !self.awaits_agent {
            self.heading = Heading::Rest;
        }
    }
}

#[cfg(test)]
mod tests {
    use qd_protocol::{SessionId, WorkerId};

    use super::*;

    fn start() -> Wanted {
        Wanted::Start(Box::new(AgentSpec::new(
            SessionId::from_random(&[1]),
            WorkerId::from_random(&[2]),
            "a",
            "/",
        )))
    }

    #[test]
    fn a_wish_that_is_said_again_after_a_break_is_done_once() {
        let mut wishes = Wishes::new();
        assert!(!wishes.put(start()), "the agent is coming already");
        wishes.seated();
        assert!(wishes.put(Wanted::Rest));
        assert!(!wishes.put(Wanted::Rest));
        wishes.rested();
        assert!(!wishes.put(Wanted::Rest));
        assert!(wishes.put(start()) && wishes.awaits_agent());
        assert!(!wishes.put(start()));
        wishes.seated();
        assert!(!wishes.put(start()));
        assert!(wishes.put(Wanted::Close));
        assert!(!wishes.put(Wanted::Close) && !wishes.put(Wanted::Rest) && !wishes.put(start()));
        let order: Vec<_> = std::iter::from_fn(|| wishes.take()).collect();
        assert_eq!(order, [Wanted::Rest, start(), Wanted::Close]);
    }

    #[test]
    fn an_agent_that_is_wanted_while_the_last_one_stops_is_not_forgotten() {
        let mut wishes = Wishes::new();
        wishes.seated();
        assert!(wishes.put(Wanted::Rest) && wishes.put(start()));
        wishes.rested();
        assert!(wishes.awaits_agent());
        assert!(!wishes.put(start()), "the one that is on its way is enough");
    }

    #[test]
    fn an_agent_that_its_worker_put_to_rest_can_be_wanted_again() {
        let mut wishes = Wishes::new();
        wishes.seated();
        wishes.rested();
        assert!(wishes.put(start()));
    }

    #[test]
    fn wishes_are_bounded_and_an_end_can_always_be_wished_for() {
        let mut wishes = Wishes::new();
        wishes.seated();
        for _ in 0..100 {
            wishes.put(Wanted::Rest);
            wishes.put(start());
        }
        assert!(wishes.put(Wanted::Close));
        assert_eq!(wishes.queue.len(), WISHES_MAX + 1);
    }
}
