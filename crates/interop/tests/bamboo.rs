//! Interoperability with `bamboo-subagent` in both directions: their parent drives our worker, and our client drives
//! their worker. The tests cover runs, order of events, steers, approvals, cancels, superseded runs and disconnects,
//! and that each side finds the other's records.
#![expect(clippy::unwrap_used, reason = "a test that fails should say where")]

#[path = "bamboo/our_client.rs"]
mod our_client;
#[path = "bamboo/our_worker.rs"]
mod our_worker;
#[path = "bamboo/records.rs"]
mod records;

use std::time::Duration;

/// Waits at most 30 s.
async fn within<F: Future>(wait: F) -> F::Output {
    tokio::time::timeout(Duration::from_secs(30), wait).await.expect("it comes")
}
