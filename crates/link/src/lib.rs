//! The numbered link between a session and its agent: what is said goes up once and in order, what is commanded goes
//! down once, and a cancel overtakes. It knows no agent and no journal.
//!
//! Layout, in reading order:
//! - `local`: a link inside one process, and the task behind it.
//! - `up`: merging, cutting, numbering and the window, without a transport.
//! - `down`: the order of commands and each of them once, without a transport.
//! - `seat`: the worker's end of a session's link over a socket, which outlives its connections.
//! - `agent_link`: the daemon's end of it.
//! - [`fit`]: bounds for what becomes one event.
//! - `spool`: where a seat keeps what the daemon has not acknowledged.
//! - `proof`: how both ends show that they know the same secret.
//! - `line`: one connection, as both ends use it.
//! - [`socket`]: the WebSocket under it.
//! - [`executor`]: what anybody implements to be a worker.
//! - [`terminal`]: the first frames of a connection that shows a terminal.
//! - [`plain`]: the frames of a peer without a subprotocol, both sides.
//! - [`serve`]: the door of a worker.
//! - `file_spool`: a spool on disk, written by a worker and read by whoever comes after it.
//! - [`announce`]: how a worker that somebody else started is found.
//! - `record`: how the workers of a home are found, and told to be alive.

mod agent_link;
pub mod announce;
mod command_queue;
pub mod event_size;
pub mod executor;
mod file_spool;
mod link_connection;
mod local;
pub mod plain;
mod proof;
pub mod record;
pub mod serve;
pub mod socket;
mod spool;
pub mod terminal_handshake;
mod update_window;
mod worker_endpoint;

pub use agent_link::{AgentLink, LinkEvent, LinkOptions, WorkerConnector, WorkerUnreachable};
pub use executor::{
    Executor, PlainApproval, RunAssignment, RunError, RunHandle, RunStopped, TurnOutcome, TurnUpdate,
};
pub use file_spool::FileSpool;
pub use local::{
    AgentEndpoint, AgentOutput, AgentOutputFilter, LinkClosed, LocalLinkEvent, SessionEndpoint, host_agent,
    host_agent_with_filter, local_link,
};
pub use plain::PlainClient;
pub use serve::{ServeMode, ServerTransport, WorkerServeError, WorkerServer};
pub use spool::{MemorySpool, Spool};
pub use update_window::{NumberedUpdate, PENDING_ASKS_MAX, WINDOW_BYTES};
pub use worker_endpoint::{
    LifecycleRequest, StartedConnection, TurnClock, WorkerEndpoint, WorkerEndpointOptions,
    WorkerEndpointStatus, read_hello, receive_agent_start,
};
