//! What the tests of all themes begin with: an endpoint, an agent that the test plays, and a link to the endpoint.

use std::time::Duration;

use qd_link::{AgentEndpoint, AgentLink, LinkEvent, LinkOptions, MemorySpool, WorkerEndpoint, local_link};
use qd_protocol::link::{AgentExitReason, AgentUpdate, TurnOutcome, TurnStopReason, UpdateNumber};
use tokio::time::Instant;

use crate::pipe_worker::{PipeWorker, REACH_TIMEOUT, endpoint_options, link_options, run, wait_attached};

pub(crate) const READY: AgentUpdate = AgentUpdate::Ready { agent_session_id: None, steers: true };

pub(crate) fn terminal() -> AgentUpdate {
    AgentUpdate::TurnEnded { run: run(), outcome: TurnOutcome::of(TurnStopReason::EndTurn) }
}

pub(crate) fn endpoint_without_agent() -> WorkerEndpoint {
    WorkerEndpoint::new(endpoint_options(), Box::new(MemorySpool::default()))
}

/// Gives the endpoint an agent that the test plays.
pub(crate) fn play_agent(endpoint: &WorkerEndpoint) -> AgentEndpoint {
    let (agent, session_end) = local_link(UpdateNumber(0));
    endpoint.set_agent(session_end);
    agent
}

/// An endpoint with an agent that the test plays.
pub(crate) fn endpoint_with_agent() -> (WorkerEndpoint, AgentEndpoint) {
    let endpoint = endpoint_without_agent();
    let agent = play_agent(&endpoint);
    (endpoint, agent)
}

pub(crate) fn open(worker: &PipeWorker, journalled: u64) -> AgentLink {
    AgentLink::open(LinkOptions { journalled: UpdateNumber(journalled), ..link_options() }, worker.clone())
}

/// A link whose journal is empty, once it is attached.
pub(crate) async fn attach(worker: &PipeWorker) -> AgentLink {
    let mut link = open(worker, 0);
    wait_attached(&mut link).await;
    link
}

/// Breaks the connection and waits until the link has noticed.
pub(crate) async fn break_connection(worker: &PipeWorker, link: &mut AgentLink) {
    worker.cut();
    assert_eq!(link.next_event().await, LinkEvent::Disconnected);
}

/// The message with which a link reports that it has given the worker up, and how long that took.
pub(crate) async fn wait_given_up(link: &mut AgentLink, since: Instant) -> (String, Duration) {
    match link.next_event().await {
        LinkEvent::Gone(AgentExitReason::Unreachable(error)) => {
            assert_eq!(error.code, "worker_unreachable");
            (error.message, since.elapsed())
        }
        other => panic!("got {other:?}"),
    }
}

/// One attempt and a pause may follow after the limit.
pub(crate) fn is_in_time(given_up_after: Duration) -> bool {
    (REACH_TIMEOUT..REACH_TIMEOUT + Duration::from_secs(20)).contains(&given_up_after)
}
