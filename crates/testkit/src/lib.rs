//! Shared by the test suites: the real binary in a temporary home, an HTTP and SSE client that knows only the
//! contract, builders for the `script` agent, checks of the journal, and a terminal. It uses none of the product's
//! crates, so a mistake in a wire type cannot hide itself. It panics where a test should fail.
//!
//! - [`home`]: a temporary home, and any `qd` command in it.
//! - [`daemon`]: `qd serve` in a home, killed and restarted at will.
//! - [`client`]: one HTTP request at a time, over the socket or TCP.
//! - [`session`], [`fleet`]: the operations of a workspace, a session and a fleet, over a client.
//! - [`stream`]: a reader of server-sent events.
//! - [`script`]: steps of the `script` agent.
//! - [`journal_rules`]: rules that every journal must obey.
//! - [`ordinary_user`]: another user, who runs the daemon although root runs the tests.
//! - [`processes`]: the daemon, workers and agents of a home, as seen in `/proc`.
//! - [`escapees`]: programs that resist being killed.
//! - [`faulty_libc`]: disks and clocks that fail on command.
//! - [`git`]: repositories and commits.
//! - [`real_agents`]: the real agents, installed and isolated.
//! - [`mcp`]: a handwritten client of `qd mcp`.
//! - [`model`]: a model for real agents, scripted by their prompts.
//! - [`proxy`]: a network that breaks on command.
//! - [`remote_agent`]: a remote agent, scripted by its prompts.
//! - [`random`]: random numbers from a printed seed.
//! - [`terminal`]: a real terminal, in tmux.
//! - [`benchmark_figures`], [`raw_log`], [`blocking_connection`]: for the benchmarks: tables, the disk as a limit, one
//!   connection.

pub mod benchmark_figures;
pub mod blocking_connection;
pub mod client;
pub mod daemon;
pub mod escapees;
pub mod faulty_libc;
pub mod fleet;
pub mod git;
pub mod home;
pub mod journal_rules;
pub mod mcp;
pub mod model;
pub mod ordinary_user;
pub mod processes;
pub mod proxy;
pub mod random;
pub mod raw_log;
pub mod real_agents;
pub mod remote_agent;
mod response_body;
pub mod script;
pub mod session;
pub mod stream;
pub mod terminal;

use std::time::Duration;

pub use benchmark_figures::BenchmarkTable;
pub use blocking_connection::BlockingConnection;
pub use client::{TestClient, TestResponse};
pub use daemon::{TestDaemon, TestDaemonOptions};
pub use faulty_libc::FaultyLibc;
pub use fleet::TestFleet;
pub use home::{TestCommand, TestCommandOutput, TestHome};
pub use mcp::TestMcpClient;
pub use model::FakeModel;
pub use ordinary_user::OrdinaryUser;
pub use processes::ObservedProcess;
pub use proxy::TestProxy;
pub use random::SeededRandom;
pub use raw_log::RawLog;
pub use real_agents::{InstalledAgents, RealAgent};
pub use remote_agent::FakeRemoteAgent;
pub use session::{TestSession, TestWorkspace};
pub use stream::{TestEvent, TestEventStream};
pub use terminal::TestTerminal;

/// How long a test waits for anything. This is a safety net: a test that reaches it has failed.
pub const WAIT_LIMIT: Duration = Duration::from_secs(30);

/// Waits for `future`, and fails with `what` if it takes longer than [`WAIT_LIMIT`].
pub async fn within<F: Future>(what: &str, future: F) -> F::Output {
    match tokio::time::timeout(WAIT_LIMIT, future).await {
        Ok(value) => value,
        Err(_) => panic!("timed out after {WAIT_LIMIT:?} waiting for {what}"),
    }
}

/// Calls `probe` repeatedly until it returns something. Only for conditions that send no event: a process, a screen, a
/// file.
pub async fn poll_until<T>(what: &str, mut probe: impl AsyncFnMut() -> Option<T>) -> T {
    const PAUSE: Duration = Duration::from_millis(10);
    within(what, async {
        loop {
            if let Some(found) = probe().await {
                return found;
            }
            tokio::time::sleep(PAUSE).await;
        }
    })
    .await
}

/// The lower-case hexadecimal SHA-256 of `content`.
pub fn sha256(content: &[u8]) -> String {
    use sha2::Digest;
    hex::encode(sha2::Sha256::digest(content))
}

/// `content` in base64, the form in which attachments are sent.
pub fn base64(content: &[u8]) -> String {
    use base64::Engine;
    base64::engine::general_purpose::STANDARD.encode(content)
}
