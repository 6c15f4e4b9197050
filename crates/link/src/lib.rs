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
mod down;
pub mod executor;
mod file_spool;
pub mod fit;
mod line;
mod local;
pub mod plain;
mod proof;
pub mod record;
mod seat;
pub mod serve;
pub mod socket;
mod spool;
pub mod terminal;
mod up;

pub use agent_link::{AgentLink, Heard, LinkOptions, Route, Unreachable};
pub use executor::{Approval, Executor, Job, Outcome, RunError, Said, Stopped, Turn};
pub use file_spool::FileSpool;
pub use local::{AgentEnd, Closed, Filter, FromAgent, SessionEnd, Voice, host, host_with, local};
pub use plain::PlainClient;
pub use seat::{Clock, Seat, SeatOptions, SeatState, Started, Wanted, greet, offer_empty};
pub use serve::{Serve, ServeError, Server, Transport};
pub use spool::{MemorySpool, Spool};
pub use up::{ASK_ROOM, Numbered, WINDOW_BYTES};
