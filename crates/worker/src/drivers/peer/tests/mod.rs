//! Promises of the driver, seen from the session's end of a link. At the other end is a worker on loopback whose every
//! frame the test sends itself.

mod asks;
mod breaks;
mod fake_worker;
mod starts;
mod turns;

use qd_protocol::link::AgentUpdate;

use self::fake_worker::{FakePeerListener, FakePeerWorker};
use crate::drivers::harness::DriverHarness;

/// An agent that is ready, its far end, and where the next connection would come.
async fn ready_worker() -> (DriverHarness, FakePeerWorker, FakePeerListener) {
    let listening = FakePeerListener::start().await;
    let mut stage = DriverHarness::remote(&listening.agent_name(), |_| {});
    let hand = listening.accept().await;
    assert_eq!(stage.next_update().await, AgentUpdate::Ready { agent_session_id: None, steers: true });
    (stage, hand, listening)
}

/// One that has a run `a`, which has begun.
async fn worker_in_run() -> (DriverHarness, FakePeerWorker, FakePeerListener) {
    let (mut stage, mut hand, listening) = ready_worker().await;
    stage.prompt("a", "x");
    hand.expect_run().await;
    (stage, hand, listening)
}
