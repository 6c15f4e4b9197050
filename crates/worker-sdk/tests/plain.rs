//! The promises to a peer without a subprotocol, kept over real sockets: what the contract says of runs, cancels,
//! messages, approvals and connections, and how a worker serves them.
#![expect(clippy::unwrap_used, reason = "a test that fails should say where")]

#[path = "plain/connections.rs"]
mod connections;
#[path = "plain/runs.rs"]
mod runs;
#[path = "plain/support.rs"]
mod support;
