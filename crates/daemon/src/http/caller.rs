//! Who sent a request. `handle_request` determines the caller once, before any handler runs, and every command that a
//! handler sends says that this caller caused its events.

use std::sync::Arc;

use axum::extract::{FromRequestParts, Request};
use axum::http::Method;
use axum::http::request::Parts;
use qd_keeper::procfs;
use qd_protocol::event::EventActor;
use qd_protocol::limits::ACTOR_TEXT_MAX;
use qd_protocol::{ApiError, SessionId, WorkspaceId};

use super::route_access::workspace_not_allowed;
use crate::client_tokens::ClientBearer;
use crate::edge::{BearerSession, ConnectionPeer, HttpError, internal_error};

/// How much of a command line is read; what is left after redaction is cut to [`ACTOR_TEXT_MAX`].
const COMMAND_LINE_READ_MAX: u64 = 4 << 10;
/// Stands for what is not shown.
const HIDDEN: &str = "***";

/// Who sent a request; a request extension.
#[derive(Debug, Clone)]
pub(super) struct Caller {
    /// Who caused the events that follow from the request.
    pub(super) actor: Arc<EventActor>,
    /// The session in whose name the request comes, by its session token.
    pub(super) session: Option<SessionId>,
    /// The client whose token the request carries.
    pub(super) client: Option<ClientBearer>,
}

impl Caller {
    /// The caller of a request that was admitted. `agent` is the session whose agent it descends from.
    pub(super) fn of_request(request: &Request, agent: Option<SessionId>) -> Self {
        let bearer =
            request.extensions().get::<BearerSession>().map(|BearerSession(session)| session.clone());
        let client = request.extensions().get::<ClientBearer>().cloned();
        let peer = request.extensions().get::<ConnectionPeer>();
        let actor = match (bearer.clone().or(agent), peer) {
            (Some(session_id), _) => EventActor::Agent { session_id },
            (None, peer) if let Some(client) = &client => EventActor::Token {
                name: client.name.clone(),
                role: client.role,
                address: match peer {
                    Some(ConnectionPeer::Tcp { addr, .. }) => addr.to_string(),
                    _ => "unix".to_owned(),
                },
            },
            // On the socket of a session, everybody acts for it.
            (None, Some(ConnectionPeer::Session { session, .. })) => {
                EventActor::Agent { session_id: session.clone() }
            }
            (None, Some(ConnectionPeer::Unix { process, uid })) => {
                // Only what changes something is written down.
                let is_change = !matches!(*request.method(), Method::GET | Method::HEAD);
                let command = process.filter(|_| is_change).and_then(|(pid, start)| command_of(pid, start));
                EventActor::User { uid: *uid, pid: process.map(|(pid, _)| pid), command }
            }
            // The guard lets nobody without a token in over TCP, except to routes that change nothing.
            (None, Some(ConnectionPeer::Tcp { .. }) | None) => EventActor::DAEMON,
        };
        Self { actor: Arc::new(actor), session: bearer, client }
    }

    /// The only workspace that the caller may reach, if there is one.
    pub(super) fn workspace(&self) -> Option<&WorkspaceId> {
        self.client.as_ref()?.workspace.as_ref()
    }

    /// Waits until the caller's token is revoked or expires; for ever if it has none.
    pub(super) async fn wait_for_end(self) {
        match self.client {
            Some(client) => client.wait_for_end().await,
            None => std::future::pending().await,
        }
    }

    /// Refuses a caller that is bound to another workspace.
    pub(super) fn require_workspace(&self, workspace: &WorkspaceId) -> Result<(), ApiError> {
        match &self.client {
            Some(ClientBearer { workspace: Some(own), name, .. }) if own != workspace => {
                Err(workspace_not_allowed(name, own))
            }
            _ => Ok(()),
        }
    }
}

impl<S: Send + Sync> FromRequestParts<S> for Caller {
    type Rejection = HttpError;

    async fn from_request_parts(head: &mut Parts, _: &S) -> Result<Self, HttpError> {
        head.extensions.get::<Self>().cloned().ok_or_else(|| internal_error().into())
    }
}

/// The command line of a process, if it is still the one that connected.
fn command_of(pid: u32, start: u64) -> Option<String> {
    let arguments = procfs::arguments(pid, COMMAND_LINE_READ_MAX)?;
    (procfs::start_ticks(pid) == Some(start)).then(|| redact_command(&arguments))
}

/// A command line as it may be written to the journal: on one line, without tokens, JSON and values of variables, within
/// [`ACTOR_TEXT_MAX`].
fn redact_command(arguments: &[String]) -> String {
    let before = [""].into_iter().chain(arguments.iter().map(String::as_str));
    let shown = before.zip(arguments).map(|(before, argument)| redact_argument(before, argument));
    let mut text = shown.collect::<Vec<_>>().join(" ");
    if text.len() > ACTOR_TEXT_MAX {
        text.truncate(text.floor_char_boundary(ACTOR_TEXT_MAX - '\u{2026}'.len_utf8()));
        text.push('\u{2026}');
    }
    text
}

/// One argument, given the one before it.
fn redact_argument(before: &str, argument: &str) -> String {
    let is_token = before == "--token"
        || ["qdt_", "qdw_", "--token="].iter().any(|part| argument.contains(part))
        || argument.to_ascii_lowercase().contains("bearer");
    if is_token {
        return HIDDEN.to_owned();
    }
    // The body of a request may have the values of variables.
    if argument.contains('{') {
        return "{\u{2026}}".to_owned();
    }
    let (flag, assignment) = match argument.strip_prefix("--env=") {
        Some(assignment) => ("--env=", assignment),
        None => ("", argument),
    };
    let is_upper = |c: char| c.is_ascii_uppercase() || c.is_ascii_digit() || c == '_';
    match assignment.split_once('=') {
        Some((name, _)) if before == "--env" || !flag.is_empty() || name.chars().all(is_upper) => {
            format!("{flag}{name}={HIDDEN}")
        }
        _ => argument.split(|c: char| c.is_whitespace() || c.is_control()).collect::<Vec<_>>().join(" "),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(arguments: &[&str]) -> String {
        let arguments: Vec<String> = arguments.iter().map(|&argument| argument.to_owned()).collect();
        redact_command(&arguments)
    }

    #[test]
    fn a_command_line_is_one_short_line_without_secrets() {
        assert_eq!(shown(&["qd", "allow", "ask_1"]), "qd allow ask_1");
        assert_eq!(shown(&["qd", "workers", "token", "lab"]), "qd workers token lab");
        assert_eq!(shown(&["qd", "run", "a\nb\u{1b}[31mc", "x=y"]), "qd run a b [31mc x=y");
        for (arguments, expected) in [
            (&["qd", "--token", "secret0"][..], "qd --token ***"),
            (&["qd", "--token=secret0"], "qd ***"),
            (&["curl", "-H", "Authorization: Bearer secret0"], "curl -H ***"),
            (&["a", "--x=qdt_ops_secret0"], "a ***"),
            (&["qd", "run", "--env", "key=a secret0"], "qd run --env key=***"),
            (&["qd", "run", "--env=key=a secret0"], "qd run --env=key=***"),
            (&["env", "API_KEY=a secret0", "x"], "env API_KEY=*** x"),
            (&["curl", "--json", "{\"env\":{\"K\":\"secret0\"}}"], "curl --json {\u{2026}}"),
        ] {
            assert_eq!(shown(arguments), expected);
        }
        let long = shown(&[&"\u{e4}".repeat(1000)]);
        assert!(long.len() <= ACTOR_TEXT_MAX && long.ends_with('\u{2026}'), "{long}");
    }
}
