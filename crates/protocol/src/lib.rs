//! The words of Quarterdeck, as types: what goes over HTTP, over a link and into the journal.
//!
//! Layout, in reading order:
//! - [`ids`]: the ids of the contract, each its own type, and the numbers `Seq` and `Number`.
//! - [`time`]: milliseconds since the epoch on the inside, RFC 3339 on the wire.
//! - [`text`]: text that may have been too large for an event and then lives in a file beside the journal.
//! - [`policy`]: what a session lets its agent do without asking.
//! - [`event`]: everything that can be in the journal.
//! - [`link`]: what a session says to its agent, and what it hears from it.
//! - [`frame`]: how a worker's socket carries that, with the subprotocol and without.
//! - [`manifest`]: how an agent is found, started and understood.
//! - [`worker`]: what a worker is started with and how it is found again.
//! - [`fleet`]: several sessions and the routes between them.
//! - [`mail`]: messages between sessions.
//! - [`api`]: requests and answers of the HTTP API.
//! - [`worktree`]: git worktrees of sessions, what changed in them, and how that is merged.
//! - [`trial`]: a policy tried on asks of the past.
//! - [`sse`]: server-sent events, read.
//! - [`error`]: the one shape of every refusal, and the stable codes.
//! - [`limits`]: every limit, by name.
//!
//! Nothing here does I/O or decides anything.

pub mod api;
pub mod error;
pub mod event;
pub mod fleet;
pub mod frame;
pub mod ids;
pub mod limits;
pub mod link;
pub mod mail;
pub mod manifest;
pub mod policy;
pub mod policy_trial;
pub mod sse;
pub mod text;
pub mod time;
pub mod worker;
pub mod worktree;

pub use error::{ApiError, ErrorCode};
pub use event::{Event, EventBody, FinishReason, TokenUsage};
pub use ids::{
    AskId, EventNumber, FleetId, MailId, MessageId, RunId, Seq, SessionId, TokenId, WorkerId, WorkspaceId,
};
pub use text::LongText;
pub use time::Millis;
