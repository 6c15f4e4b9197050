//! The daemon of Quarterdeck: the async shell around the state machines of `qd-core`. The daemon itself never decides
//! a state transition.
//!
//! Layout, from the outside in:
//! - [`edge`]: sockets, TLS certificates, authentication and connection limits.
//! - `http`: the API, one file per family of routes.
//! - `daemon`: the state that all parts share, and the path from a request to its session.
//! - `workspaces`, `sessions`, `fleets`, `halt`, `budget`, `quotas`: operations that span more than one session.
//! - `mail`, `maildir`: messages to sessions, over the API and through folders.
//! - `user_content`: prompts and attachments of callers, validated and stored.
//! - `registry`: which sessions are awake; guarantees at most one actor per session.
//! - `actor`: the shell around one session's machine.
//! - `workers`: the processes that hold agents: start, reattach, count and end them.
//! - `agents`: the agents that this machine can start.
//! - `worktrees`: git worktrees of sessions, on threads that may block.
//! - `descriptors`: how the limit on open files is divided among files, workers and connections.
//! - [`doctor`]: rebuilds the list rows from events. `journal_check`: looks for damage in the journal.
//! - `derived_data`: keeps what searches and usage reports are answered from in step with the journal.
//! - `text_merging`: merges streamed text of long ago.
//! - `metrics`: counters for operators.
//! - `keyed_locks`, `clock`, `random`, `sync`: locks by name, the clocks, randomness, and the locks of `registry`.
//! - `recovery`: resumes the work of the last daemon.
//! - `serve`: starts, runs and stops the whole daemon.

mod actor;
mod agents;
mod budget;
mod client_tokens;
mod clock;
mod daemon;
mod derived_data;
mod descriptors;
pub mod doctor;
pub mod edge;
mod fleets;
mod halt;
mod http;
mod journal_check;
mod keyed_locks;
mod mail;
mod maildir;
mod metrics;
mod quotas;
mod random;
mod recovery;
mod registry;
mod serve;
mod sessions;
mod sync;
#[cfg(test)]
mod temporary_home;
mod text_merging;
mod token_store;
mod user_content;
mod workers;
mod workspaces;
mod worktrees;

pub use serve::{DaemonServeError, ServeOptions, serve};

use qd_protocol::{ApiError, ErrorCode};

/// The error for a field whose value is not allowed.
fn invalid_value(message: impl Into<String>) -> ApiError {
    ApiError::new(ErrorCode::InvalidValue, message)
}
