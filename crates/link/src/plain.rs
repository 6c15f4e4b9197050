//! The frames of a peer that offers no subprotocol: the connection is the run's life, and nothing is repeated. The
//! rules are those of the contract's section on workers, to the letter, so that an existing parent or worker that
//! speaks them works with ours.
//!
//! - `event`: the names under which a run's words travel.
//! - `outbox`: what waits for the peer, bounded.
//! - `server`: one connection of a worker.
//! - [`client`]: the parent's side.

pub mod client;
mod event;
mod outbox;
pub(crate) mod server;

pub use client::PlainClient;
pub use event::parse_event;
pub(crate) use outbox::PlainRunOutput;
