//! The wire types of Quarterdeck: everything that goes over HTTP, over a link or into the journal.
//!
//! Layout, in reading order:
//! - [`ids`]: one type for each kind of id, and the positions [`Seq`] and [`EventNumber`].
//! - [`time`]: milliseconds since the epoch in memory, RFC 3339 on the wire; readings of all clocks of a machine.
//! - [`text`]: text of any length; if it is too large for an event, it is stored in a file beside the journal.
//! - [`policy`]: what a session's agent may do without approval.
//! - [`event`]: every kind of event in the journal.
//! - [`link`]: the commands that a session sends to its agent, and the updates that the agent's side reports.
//! - [`frame`]: the WebSocket frames that carry them, with and without the subprotocol.
//! - [`sandbox`] and [`sandbox_spec`]: how strongly an agent is confined.
//! - [`model_host`]: where an agent's model is, for agents without network.
//! - [`manifest`]: how an agent is found, started and driven.
//! - [`worker`]: what a worker is started with, and the record by which it is found again.
//! - [`fleet`]: several sessions and the routes between them.
//! - [`mail`]: messages between sessions.
//! - [`api`]: requests and responses of the HTTP API.
//! - [`worktree`]: git worktrees of sessions, the changes in them, and merges.
//! - [`policy_trial`]: trying a policy on past asks.
//! - [`search`] and [`usage_report`]: finding text in all sessions, and what they have used.
//! - [`sse`]: a parser for server-sent events.
//! - [`error`]: the body of every error response, and the stable error codes.
//! - [`limits`]: every limit, by name.
//!
//! This crate does no I/O and makes no decisions.

pub mod api;
pub mod audit;
pub mod error;
pub mod event;
pub mod fleet;
pub mod frame;
pub mod ids;
pub mod limits;
pub mod link;
pub mod mail;
pub mod manifest;
pub mod model_host;
pub mod policy;
pub mod policy_trial;
pub mod sandbox;
pub mod sandbox_spec;
pub mod search;
pub mod sse;
pub mod text;
pub mod time;
pub mod usage_report;
pub mod worker;
pub mod worktree;

pub use error::{ApiError, ErrorCode};
pub use event::{Event, EventBody, FinishReason, TokenUsage};
pub use ids::{
    AccountId, AskId, EventNumber, FleetId, MailId, MessageId, RunId, Seq, SessionId, TokenId, WorkerId,
    WorkspaceId,
};
pub use text::LongText;
pub use time::{ClockReading, MachineUptime, Millis};
