//! The daemon of Quarterdeck: the shell around the machines of `qd-core`. It never decides a transition itself.
//!
//! Layout, from the outside in:
//! - [`edge`]: sockets, certificates, who may come in, limits.
//! - `http`: the API, one file per family of routes.
//! - `daemon`: what all parts share, and the way to a session.
//! - `places`, `sessions`, `fleets`, `halt`, `budget`: what is not one session's own business.
//! - `mail`, `maildir`: messages to sessions, over the API and through folders.
//! - `words`: what callers say, checked and kept.
//! - `registry`: who is awake, and how two of one session are impossible.
//! - `actor`: the shell around one session's machine.
//! - `workers`: the processes that hold agents: started, found again, counted, ended.
//! - `worktrees`: git worktrees of sessions, on threads that may block.
//! - [`home`], [`config`]: what is on disk beside the journal, and what the user has set.
//! - [`doctor`]: lists made again from events.
//! - `serve`: all of it, from start to end.

mod actor;
mod agents;
mod budget;
pub mod config;
mod daemon;
pub mod doctor;
pub mod edge;
mod fleets;
mod halt;
pub mod home;
mod http;
mod keyed_locks;
mod mail;
mod maildir;
mod metrics;
mod random;
mod registry;
mod serve;
mod sessions;
mod sync;
mod user_content;
mod workers;
mod workspaces;
mod worktrees;

pub use serve::{DaemonServeError, ServeOptions, serve};

use qd_protocol::{ApiError, ErrorCode};

/// A field has a value that it cannot have.
fn invalid_value(message: impl Into<String>) -> ApiError {
    ApiError::new(ErrorCode::InvalidValue, message)
}
