//! The daemon's requests to start, stop or close the agent. After a break the daemon may repeat a request, so each is
//! compared with the state that all earlier ones lead to. Nothing here waits or is timed.
//!
//! Design: docs/design/worker-stops-idle-agents.md

use std::collections::VecDeque;

use qd_protocol::worker::AgentSpec;

/// How many requests may wait for the worker. A daemon that waits for its answers has at most three.
const REQUESTS_MAX: usize = 16;

/// What the daemon requests of the worker, beyond commands to the agent.
#[derive(Debug, Clone, PartialEq)]
pub enum LifecycleRequest {
    /// Start an agent after the last one was stopped.
    Start(Box<AgentSpec>),
    /// Stop the idle agent; what its turns left running stays.
    StopIdleAgent,
    /// End the agent and everything it started.
    Close,
}

#[derive(Debug)]
pub(super) struct LifecycleQueue {
    queue: VecDeque<LifecycleRequest>,
    /// The state after all requests are done.
    target: LifecycleTarget,
    /// An agent was requested and has not been set yet.
    awaits_agent: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum LifecycleTarget {
    Running,
    StoppingIdleAgent,
    Closed,
}

impl LifecycleQueue {
    /// The queue of an endpoint whose agent is about to start.
    pub(super) fn new() -> Self {
        Self { queue: VecDeque::new(), target: LifecycleTarget::Running, awaits_agent: true }
    }

    /// Queues a request, unless it is a repeat. Returns true if it was queued.
    pub(super) fn push(&mut self, request: LifecycleRequest) -> bool {
        let target = match (self.target, &request) {
            (LifecycleTarget::StoppingIdleAgent, LifecycleRequest::Start(_)) => LifecycleTarget::Running,
            (LifecycleTarget::Running, LifecycleRequest::StopIdleAgent) => LifecycleTarget::StoppingIdleAgent,
            (LifecycleTarget::Running | LifecycleTarget::StoppingIdleAgent, LifecycleRequest::Close) => {
                LifecycleTarget::Closed
            }
            _ => return false,
        };
        if self.queue.len() >= REQUESTS_MAX && target != LifecycleTarget::Closed {
            tracing::warn!("dropping a lifecycle request: too many are waiting");
            return false;
        }
        self.target = target;
        self.awaits_agent |= target == LifecycleTarget::Running;
        self.queue.push_back(request);
        true
    }

    pub(super) fn pop(&mut self) -> Option<LifecycleRequest> {
        self.queue.pop_front()
    }

    /// Whether an agent is about to start.
    pub(super) fn awaits_agent(&self) -> bool {
        self.awaits_agent
    }

    pub(super) fn on_agent_set(&mut self) {
        self.awaits_agent = false;
    }

    /// The agent was stopped, by request of the daemon or by the worker itself.
    pub(super) fn on_idle_stopped(&mut self) {
        if self.target == LifecycleTarget::Running && !self.awaits_agent {
            self.target = LifecycleTarget::StoppingIdleAgent;
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
    fn a_request_that_is_repeated_after_a_break_is_done_once() {
        let mut requests = LifecycleQueue::new();
        assert!(!requests.push(start()), "the agent is coming already");
        requests.on_agent_set();
        assert!(requests.push(LifecycleRequest::StopIdleAgent));
        assert!(!requests.push(LifecycleRequest::StopIdleAgent));
        requests.on_idle_stopped();
        assert!(!requests.push(LifecycleRequest::StopIdleAgent));
        assert!(requests.push(start()) && requests.awaits_agent());
        assert!(!requests.push(start()));
        requests.on_agent_set();
        assert!(!requests.push(start()));
        assert!(requests.push(LifecycleRequest::Close));
        assert!(
            !requests.push(LifecycleRequest::Close)
                && !requests.push(LifecycleRequest::StopIdleAgent)
                && !requests.push(start())
        );
        let order: Vec<_> = std::iter::from_fn(|| requests.pop()).collect();
        assert_eq!(order, [LifecycleRequest::StopIdleAgent, start(), LifecycleRequest::Close]);
    }

    #[test]
    fn an_agent_that_is_requested_while_the_last_one_stops_is_not_forgotten() {
        let mut requests = LifecycleQueue::new();
        requests.on_agent_set();
        assert!(requests.push(LifecycleRequest::StopIdleAgent) && requests.push(start()));
        requests.on_idle_stopped();
        assert!(requests.awaits_agent());
        assert!(!requests.push(start()), "the one that is on its way is enough");
    }

    #[test]
    fn an_agent_that_its_worker_stopped_can_be_requested_again() {
        let mut requests = LifecycleQueue::new();
        requests.on_agent_set();
        requests.on_idle_stopped();
        assert!(requests.push(start()));
    }

    #[test]
    fn requests_are_bounded_and_a_close_is_always_accepted() {
        let mut requests = LifecycleQueue::new();
        requests.on_agent_set();
        for _ in 0..100 {
            requests.push(LifecycleRequest::StopIdleAgent);
            requests.push(start());
        }
        assert!(requests.push(LifecycleRequest::Close));
        assert_eq!(requests.queue.len(), REQUESTS_MAX + 1);
    }
}
