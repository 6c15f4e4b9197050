//! Write a worker for [Quarterdeck](https://github.com/quarterdeck/quarterdeck): a program that takes assignments over a
//! WebSocket, works on them, and streams what it does. A worker is an async function; the server around it handles
//! frames, order, slow peers, cancels and panics. The README has a complete one.
//!
//! Modules, in reading order:
//! - [`executor`]: the trait to implement, and a run as its executor sees it.
//! - [`serve`]: the server that accepts connections for an executor.
//! - [`announce`]: how a worker makes itself known in a folder.
//! - [`plain`]: the frames on the wire, and a client that speaks them.
//! - [`socket`]: the WebSocket under both.
//!
//! Of Quarterdeck, this crate needs only `qd-protocol`, which has types and limits but no I/O. A smaller part would not
//! do: updates and outcomes of runs are the same types that the daemon stores and its other workers send, so a copy
//! could drift from them. The subprotocol `quarterdeck.v1`, for runs that outlive their connection, is not here: it takes
//! spools and proofs that a worker of your own does not need. It plugs in with [`WorkerServer::with_subprotocol`].
#![warn(missing_docs)]

pub mod announce;
pub mod executor;
pub mod plain;
pub mod serve;
pub mod socket;

pub use executor::{Executor, RunAssignment, RunHandle, RunStopped};
pub use plain::PlainClient;
pub use serve::{ServeMode, ServerTransport, WorkerServeError, WorkerServer};

/// The types of `qd-protocol` that executors and parents use.
pub use qd_protocol::event::RunError;
pub use qd_protocol::frame::plain::{PlainApproval, PlainRunStatus, PlainWorkerFrame};
pub use qd_protocol::link::{TurnOutcome, TurnUpdate};
