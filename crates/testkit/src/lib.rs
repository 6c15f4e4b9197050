//! What the suites share: the real binary in a temporary home, a client for HTTP and SSE that knows only the
//! contract, builders for the `script` agent, the order of a run's events as one check, and a terminal. It uses none
//! of the product's crates, so that a mistake in a wire type cannot hide itself; it panics where a test should fail.
//!
//! - [`home`]: a temporary home, and any `qd` command in it.
//! - [`daemon`]: `qd serve` in a home, killed and started again at will.
//! - [`client`]: one HTTP request at a time, over the socket or TCP.
//! - [`session`], [`fleet`]: the verbs of a workspace, a session and a fleet, over a client.
//! - [`stream`]: a reader of server-sent events.
//! - [`script`]: steps of the `script` agent.
//! - [`rules`]: what must hold of any journal.
//! - [`processes`]: what `/proc` says of a home's daemon, workers and agents.
//! - [`escapees`]: programs that do not want to die.
//! - [`clis`]: the real agents, installed and isolated.
//! - [`mcp`]: a client of `qd mcp`, by hand.
//! - [`model`]: a model for real agents, scripted by their prompts.
//! - [`proxy`]: a network that breaks when told to.
//! - [`remote`]: an agent elsewhere, scripted by its prompts.
//! - [`random`]: numbers from a printed seed.
//! - [`terminal`]: a real terminal, by tmux.
//! - [`figures`], [`raw_log`], [`wire`]: what the benchmarks are made of: tables, the disk as a limit, one connection.

pub mod benchmark_figures;
pub mod blocking_connection;
pub mod client;
pub mod daemon;
pub mod escapees;
pub mod fleet;
pub mod home;
pub mod journal_rules;
pub mod mcp;
pub mod model;
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
pub use fleet::TestFleet;
pub use home::{TestCommand, TestCommandOutput, TestHome};
pub use mcp::TestMcpClient;
pub use model::FakeModel;
pub use processes::ObservedProcess;
pub use proxy::TestProxy;
pub use random::SeededRandom;
pub use raw_log::RawLog;
pub use real_agents::{InstalledAgents, RealAgent};
pub use remote_agent::FakeRemoteAgent;
pub use session::{TestSession, TestWorkspace};
pub use stream::{TestEvent, TestEventStream};
pub use terminal::TestTerminal;

/// How long a test waits for anything. It is a net and not an expectation: whoever meets it has failed.
pub const WAIT_LIMIT: Duration = Duration::from_secs(30);

/// Waits for `future`, and fails with `what` if it does not come.
pub async fn within<F: Future>(what: &str, future: F) -> F::Output {
    match tokio::time::timeout(WAIT_LIMIT, future).await {
        Ok(value) => value,
        Err(_) => panic!("waited {WAIT_LIMIT:?} in vain for {what}"),
    }
}

/// Tries `probe` again and again until it gives something. Only for what sends no event: a process, a screen, a file.
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
    sha2::Sha256::digest(content).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// `content` in base64, as attachments are sent.
pub fn base64(content: &[u8]) -> String {
    use base64::Engine;
    base64::engine::general_purpose::STANDARD.encode(content)
}
