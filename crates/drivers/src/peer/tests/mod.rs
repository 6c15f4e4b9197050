//! Promises of the driver, seen from the session's end of a link. The worker is on loopback, and the test sends each of
//! its frames itself.

mod asks;
mod breaks;
mod fake_worker;
mod starts;
mod turns;

use qd_protocol::link::AgentUpdate;

use self::fake_worker::{FakePeerListener, FakePeerWorker};
use crate::harness::DriverHarness;

/// A ready agent, the worker's side of its connection, and the listener for the next connection.
async fn ready_worker() -> (DriverHarness, FakePeerWorker, FakePeerListener) {
    let listener = FakePeerListener::start().await;
    let mut harness = DriverHarness::remote(&listener.agent_name(), |_| {});
    let worker = listener.accept().await;
    assert_eq!(harness.next_update().await, AgentUpdate::Ready { agent_session_id: None, steers: true });
    (harness, worker, listener)
}

/// Like [`ready_worker`], with a run `a` that has begun.
async fn worker_in_run() -> (DriverHarness, FakePeerWorker, FakePeerListener) {
    let (mut harness, mut worker, listener) = ready_worker().await;
    harness.prompt("a", "x");
    worker.expect_run().await;
    (harness, worker, listener)
}
