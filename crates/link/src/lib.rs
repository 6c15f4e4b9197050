//! The numbered link between a session and its agent. Updates from the agent go up once and in order, commands go down
//! once, and a cancel overtakes the other commands. This crate knows no agent and no journal. What third parties need to
//! write a worker is in `qd-worker-sdk`, on whose sockets the link runs.
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
//! - [`terminal_handshake`]: the first frames of a connection that shows a terminal.
//! - `executor_link`: the link of a worker that consists of just an executor of the SDK.
//! - `file_spool`: a spool on disk, written by a worker and read by the daemon after the worker's death.
//! - [`record`]: how the workers of a home are found and checked for life.
//! - [`socket_path`]: sockets whose path is too long for the kernel.

mod agent_link;
mod command_queue;
pub mod event_size;
mod executor_link;
mod file_spool;
mod link_connection;
mod local;
mod output_rate;
mod proof;
pub mod record;
pub mod socket_path;
mod spool;
mod task_watch;
pub mod terminal_handshake;
mod update_window;
mod worker_endpoint;

pub use agent_link::{AgentLink, LinkEvent, LinkOptions, WorkerConnector, WorkerEnding, WorkerUnreachable};
pub use executor_link::LinkSubprotocol;
pub use file_spool::FileSpool;
pub use local::{
    AgentEndpoint, AgentOutput, AgentOutputFilter, LinkClosed, LocalLinkEvent, SessionEndpoint, host_agent,
    host_agent_with_filter, local_link,
};
/// The sockets that links run over, and the plain frames, which some agents speak.
pub use qd_worker_sdk::{PlainClient, plain, socket};
pub use spool::{MemorySpool, Spool};
pub use update_window::{NumberedUpdate, WINDOW_BYTES};
pub use worker_endpoint::{
    LifecycleRequest, StartedConnection, TurnClock, WorkerEndpoint, WorkerEndpointOptions,
    WorkerEndpointStatus, read_hello, receive_agent_start,
};
