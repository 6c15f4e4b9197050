//! What the daemon wants of a worker beyond commands to the agent. After a break it may say the same again, so each
//! wish is judged by where all those before it lead; nothing here waits or is timed.

use std::collections::VecDeque;

use qd_protocol::worker::AgentSpec;

/// Wishes that may wait for the worker; a daemon that waits for its answers has no more than three.
const REQUESTS_MAX: usize = 16;

/// What the daemon wants of the worker beyond commands to the agent.
#[derive(Debug, Clone, PartialEq)]
pub enum LifecycleRequest {
    /// An agent, in a seat that rests.
    Start(Box<AgentSpec>),
    /// No agent for now; what its turns left running stays.
    Rest,
    /// No agent any more, nor anything that it started.
    Close,
}

/// Those that wait.
#[derive(Debug)]
pub(super) struct LifecycleQueue {
    queue: VecDeque<LifecycleRequest>,
    /// Where the seat will be when all of them are done.
    target: LifecycleTarget,
    /// An agent was wanted and has not been seated.
    awaits_agent: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum LifecycleTarget {
    Running,
    Resting,
    Closed,
}

impl LifecycleQueue {
    /// Those of a seat whose agent is about to come.
    pub(super) fn new() -> Self {
        Self { queue: VecDeque::new(), target: LifecycleTarget::Running, awaits_agent: true }
    }

    /// Takes a wish in, unless it is there already or done; true if it waits now.
    pub(super) fn push(&mut self, wanted: LifecycleRequest) -> bool {
        let to = match (self.target, &wanted) {
            (LifecycleTarget::Resting, LifecycleRequest::Start(_)) => LifecycleTarget::Running,
            (LifecycleTarget::Running, LifecycleRequest::Rest) => LifecycleTarget::Resting,
            (LifecycleTarget::Running | LifecycleTarget::Resting, LifecycleRequest::Close) => {
                LifecycleTarget::Closed
            }
            _ => return false,
        };
        if self.queue.len() >= REQUESTS_MAX && to != LifecycleTarget::Closed {
            tracing::warn!("the daemon wants more of a worker than the worker does");
            return false;
        }
        self.target = to;
        self.awaits_agent |= to == LifecycleTarget::Running;
        self.queue.push_back(wanted);
        true
    }

    /// The next one.
    pub(super) fn pop(&mut self) -> Option<LifecycleRequest> {
        self.queue.pop_front()
    }

    /// Whether an agent is on its way.
    pub(super) fn awaits_agent(&self) -> bool {
        self.awaits_agent
    }

    /// The agent has come.
    pub(super) fn on_agent_set(&mut self) {
        self.awaits_agent = false;
    }

    /// The agent rests, because the daemon wanted it or because the worker did.
    pub(super) fn on_agent_rested(&mut self) {
        if self.target == LifecycleTarget::Running && !self.awaits_agent {
            self.target = LifecycleTarget::Resting;
        }
    }
}

#[cfg(test)]
mod tests {
    use qd_protocol::{SessionId, WorkerId};

    use super::*;

    fn start() -> LifecycleRequest {
        LifecycleRequest::Start(Box::new(AgentSpec::new(
            SessionId::from_random(&[1]),
            WorkerId::from_random(&[2]),
            "a",
            "/",
        )))
    }

    #[test]
    fn a_wish_that_is_said_again_after_a_break_is_done_once() {
        let mut wishes = LifecycleQueue::new();
        assert!(!wishes.push(start()), "the agent is coming already");
        wishes.on_agent_set();
        assert!(wishes.push(LifecycleRequest::Rest));
        assert!(!wishes.push(LifecycleRequest::Rest));
        wishes.on_agent_rested();
        assert!(!wishes.push(LifecycleRequest::Rest));
        assert!(wishes.push(start()) && wishes.awaits_agent());
        assert!(!wishes.push(start()));
        wishes.on_agent_set();
        assert!(!wishes.push(start()));
        assert!(wishes.push(LifecycleRequest::Close));
        assert!(
            !wishes.push(LifecycleRequest::Close)
                && !wishes.push(LifecycleRequest::Rest)
                && !wishes.push(start())
        );
        let order: Vec<_> = std::iter::from_fn(|| wishes.pop()).collect();
        assert_eq!(order, [LifecycleRequest::Rest, start(), LifecycleRequest::Close]);
    }

    #[test]
    fn an_agent_that_is_wanted_while_the_last_one_stops_is_not_forgotten() {
        let mut wishes = LifecycleQueue::new();
        wishes.on_agent_set();
        assert!(wishes.push(LifecycleRequest::Rest) && wishes.push(start()));
        wishes.on_agent_rested();
        assert!(wishes.awaits_agent());
        assert!(!wishes.push(start()), "the one that is on its way is enough");
    }

    #[test]
    fn an_agent_that_its_worker_put_to_rest_can_be_wanted_again() {
        let mut wishes = LifecycleQueue::new();
        wishes.on_agent_set();
        wishes.on_agent_rested();
        assert!(wishes.push(start()));
    }

    #[test]
    fn wishes_are_bounded_and_an_end_can_always_be_wished_for() {
        let mut wishes = LifecycleQueue::new();
        wishes.on_agent_set();
        for _ in 0..100 {
            wishes.push(LifecycleRequest::Rest);
            wishes.push(start());
        }
        assert!(wishes.push(LifecycleRequest::Close));
        assert_eq!(wishes.queue.len(), REQUESTS_MAX + 1);
    }
}
