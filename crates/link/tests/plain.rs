//! The promises to a peer without a subprotocol, kept over real sockets: what the contract says of runs, cancels,
//! messages, approvals and connections, and how a worker serves them.
#![expect(clippy::unwrap_used, reason = "a test that fails should say where")]

#[path = "plain/door.rs"]
mod door;
#[path = "plain/guest.rs"]
mod guest;
#[path = "plain/runs.rs"]
mod runs;
