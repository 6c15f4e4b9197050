//! The frames of a peer that offers no subprotocol. A run lives and dies with its connection, and nothing is sent
//! twice. The frames follow the contract's section on workers exactly, so existing parents and workers that speak them
//! work with ours.
//!
//! - `event`: the JSON form of a run's updates.
//! - `outbox`: frames waiting for the peer, bounded.
//! - `server`: one connection of a worker.
//! - [`client`]: the parent's side.

pub mod client;
mod event;
mod outbox;
pub(crate) mod server;

pub use client::PlainClient;
pub use event::parse_event;
pub(crate) use outbox::PlainRunOutput;
