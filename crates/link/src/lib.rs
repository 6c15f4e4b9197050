//! The numbered link between a session and its agent. Updates from the agent go up once and in order, commands go down
//! once, and a cancel overtakes the other commands. This crate knows no agent and no journal.
//!
//! Modules, in reading order:
//! - `local`: a link inside one process, and the task behind it.
//! - `update_window`: merges, splits, numbers and bounds the agent's updates, without a transport.
//! - `command_queue`: orders commands and drops repeats, without a transport.
//! - `worker_endpoint`: the worker's end of a session's link over a socket. It outlives its connections.
//! - `agent_link`: the daemon's end of the same link.
//! - [`event_size`]: cuts an update down to what one event can hold.
//! - `task_watch`: notices when a task of a worker dies.
//! - `spool`: keeps the updates that the daemon has not acknowledged.
//! - `proof`: how both ends prove that they know the same secret.
//! - `link_connection`: one connection, as both ends use it.
//! - [`socket`]: the WebSocket under it.
//! - [`executor`]: the trait to implement for a worker of your own.
//! - [`terminal_handshake`]: the first frames of a connection that shows a terminal.
//! - [`plain`]: the frames of a peer without a subprotocol, both sides.
//! - [`serve`]: the server that accepts connections for a worker.
//! - `file_spool`: a spool on disk, written by a worker and read by the daemon after the worker's death.
//! - [`announce`]: how a worker that was started by somebody else is found.
//! - [`record`]: how the workers of a home are found and checked for life.

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
mod task_watch;
pub mod terminal_handshake;
mod update_window;
mod worker_endpoint;

pub use agent_link::{AgentLink, LinkEvent, LinkOptions, WorkerConnector, WorkerEnding, WorkerUnreachable};
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
