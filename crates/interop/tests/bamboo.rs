//! Both ways: a foreign parent drives our worker, and our client drives a foreign worker. Run, order of events, steer,
//! approval, cancel, supersede, disconnect; and both find each other's records.
#![expect(clippy::unwrap_used, reason = "a test that fails should say where")]

#[path = "bamboo/our_client.rs"]
mod our_client;
#[path = "bamboo/our_worker.rs"]
mod our_worker;
#[path = "bamboo/records.rs"]
mod records;

use std::time::Duration;

/// Waits for something that must come.
async fn within<F: Future>(wait: F) -> F::Output {
    tokio::time::timeout(Duration::from_secs(30), wait).await.expect("it comes")
}
