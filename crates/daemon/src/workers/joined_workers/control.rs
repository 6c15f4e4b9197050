//! The control connection of one joined process, from its hello to its end. The daemon sends which sessions to hold,
//! and receives refusals. Nothing of an agent travels on this connection.

use std::collections::HashSet;
use std::fs;
use std::time::Duration;

use qd_link::socket::{IncomingFrame, Role, STEP_TIMEOUT, Socket, SocketError};
use qd_protocol::api::WorkerToken;
use qd_protocol::event::RunError;
use qd_protocol::frame::join::{DaemonJoinFrame, JoinHello, SessionWorker, WorkerJoinFrame};
use qd_protocol::frame::v1::ProtocolVersions;
use qd_protocol::limits::{HEAD_MAX, PING_S, TITLE_MAX};
use qd_protocol::{ErrorCode, Millis, TokenId, WorkerId};
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, timeout};

use super::{
    JOINED_PREFIX, JoinedControl, JoinedHost, JoinedHostInfo, JoinedWorkers, OUTBOX_MAX, host_file, is_label,
};
use crate::edge::UpgradedConnection;

/// The silence after which a ping is sent, and the silence after which the connection counts as dead.
const PING_INTERVAL: Duration = Duration::from_secs(PING_S);
const SILENCE_TIMEOUT: Duration = Duration::from_secs(3 * PING_S);
/// The most labels, and the most agents, of one process.
pub(crate) const OFFERS_MAX: usize = 64;
/// The most sessions that one process may hold.
const SESSIONS_MAX: usize = 4096;
/// The most bytes of a refusal's message that are kept.
const MESSAGE_MAX: usize = 4096;

/// The connection of a process that was admitted.
pub(super) struct JoinedConnection {
    host: String,
    connection: u64,
    pub(super) name: String,
    pub(super) frames: mpsc::Receiver<DaemonJoinFrame>,
    /// Sessions that the process holds and that no session wants any more.
    pub(super) stale_sessions: Vec<SessionWorker>,
}

/// Why a process was not admitted: a stable code, and a message that says what to do.
pub(super) type HelloRefusal = (&'static str, String);

impl JoinedWorkers {
    /// Serves a control connection until the process disconnects or the daemon stops.
    pub(crate) async fn serve_control(
        &self,
        connection: UpgradedConnection,
        token: TokenId,
        stop: watch::Receiver<bool>,
    ) {
        let mut socket = Socket::from_upgraded(connection, Role::Server).await;
        let hello = match timeout(STEP_TIMEOUT, read_hello(&mut socket)).await {
            Ok(Ok(hello)) => hello,
            Ok(Err(_)) | Err(_) => return,
        };
        match self.admit_host(*hello, token) {
            Ok(mut joined) => {
                tracing::info!(name = joined.name, "a worker has joined");
                let ended = self.run_control(&mut socket, &mut joined, stop).await;
                let reason =
                    ended.err().map_or_else(|| "closed by the daemon".to_owned(), |error| error.to_string());
                tracing::info!(name = joined.name, reason, "a joined worker has disconnected");
                self.release_connection(&joined);
            }
            Err((code, message)) => {
                tracing::info!(code, message, "refused a worker that wanted to join");
                let refused = DaemonJoinFrame::Refused { code: code.to_owned(), message };
                // It does not matter whether the refusal arrives.
                let _sent = timeout(STEP_TIMEOUT, socket.send(&refused)).await;
            }
        }
        socket.close().await;
    }

    async fn run_control(
        &self,
        socket: &mut Socket<UpgradedConnection>,
        joined: &mut JoinedConnection,
        mut stop: watch::Receiver<bool>,
    ) -> Result<(), SocketError> {
        send_frame(socket, &DaemonJoinFrame::Welcome { name: joined.name.clone() }).await?;
        for session_worker in std::mem::take(&mut joined.stale_sessions) {
            send_frame(socket, &DaemonJoinFrame::Close(session_worker)).await?;
        }
        let mut last_heard = Instant::now();
        let mut next_ping = last_heard + PING_INTERVAL;
        loop {
            tokio::select! {
                () = wait_for_stop(&mut stop) => return Ok(()),
                frame = joined.frames.recv() => match frame {
                    Some(frame) => send_frame(socket, &frame).await?,
                    // The process has a newer connection, or its token was revoked.
                    None => return Ok(()),
                },
                incoming = socket.next() => {
                    last_heard = Instant::now();
                    next_ping = last_heard + PING_INTERVAL;
                    match incoming? {
                        IncomingFrame::Text(text) => self.handle_frame(joined, text.as_str()),
                        IncomingFrame::Binary(_) | IncomingFrame::Alive => self.note_heard(joined),
                    }
                    // Sends the pong, if the frame was a ping.
                    with_timeout(socket.flush()).await?;
                }
                () = tokio::time::sleep_until(next_ping) => {
                    if last_heard.elapsed() >= SILENCE_TIMEOUT {
                        return Err(SocketError::TimedOut);
                    }
                    next_ping += PING_INTERVAL;
                    socket.feed_ping().await?;
                    with_timeout(socket.flush()).await?;
                }
            }
        }
    }

    /// Admits a process. A new connection replaces an older one of the same process.
    pub(super) fn admit_host(
        &self,
        hello: JoinHello,
        token: TokenId,
    ) -> Result<JoinedConnection, HelloRefusal> {
        check_hello(&hello)?;
        let host = hello.process_id.clone();
        let assigned_here = |worker: &SessionWorker| {
            let holder = fs::read_to_string(host_file(&self.dir, &worker.worker)).unwrap_or_default();
            holder.strip_prefix(JOINED_PREFIX) == Some(&host)
        };
        let stale_sessions = hello.workers.iter().filter(|worker| !assigned_here(worker)).cloned().collect();
        let mut state = self.lock();
        // Checked under the lock, so that the token cannot be revoked between this check and the insertion below.
        let Some(known_token) = self.tokens.find(&token) else {
            return Err(("unauthorized", "the token was revoked".to_owned()));
        };
        check_token_allows(&known_token, &hello)?;
        let known_info = state.hosts.get(&host).and_then(|known| known.info.as_ref());
        if known_info.is_some_and(|info| info.token != token) {
            return Err((
                "host_taken",
                "a worker with this id has already joined with another token".to_owned(),
            ));
        }
        let others = state.hosts.iter().filter(|(other, _)| **other != host);
        let taken: HashSet<&str> =
            others.filter_map(|(_, other)| Some(other.info.as_ref()?.name.as_str())).collect();
        let name = (1..).map(|n| numbered_name(&hello.name, n)).find(|name| !taken.contains(name.as_str()));
        let name = name.expect("names do not run out before processes do");
        state.last_connection += 1;
        let connection = state.last_connection;
        let (outbox, frames) = mpsc::channel(OUTBOX_MAX);
        let joined_at = state.hosts.get(&host).map_or_else(Millis::now, |known| known.joined_at);
        let entry = JoinedHost {
            info: Some(JoinedHostInfo::from_hello(hello, name.clone(), token)),
            control: Some(JoinedControl { connection, outbox }),
            last_heard: Instant::now(),
            joined_at,
        };
        state.hosts.insert(host.clone(), entry);
        drop(state);
        self.hosts_changed.send_replace(());
        Ok(JoinedConnection { host, connection, name, frames, stale_sessions })
    }

    /// Marks a connection as closed. Sessions keep waiting for the process, not for this connection of it.
    pub(super) fn release_connection(&self, joined: &JoinedConnection) {
        let mut state = self.lock();
        let Some(host) = state.hosts.get_mut(&joined.host) else { return };
        let is_newer = host.control.as_ref().is_some_and(|control| control.connection != joined.connection);
        if is_newer {
            return;
        }
        host.control = None;
        let held =
            state.placements.values_mut().filter(|placement| placement.host.as_ref() == Some(&joined.host));
        held.for_each(|placement| placement.dial_waiter = None);
        state.forget_if_unused(&joined.host);
        drop(state);
        self.hosts_changed.send_replace(());
    }

    pub(super) fn note_heard(&self, joined: &JoinedConnection) {
        if let Some(host) = self.lock().hosts.get_mut(&joined.host) {
            host.last_heard = Instant::now();
        }
    }

    /// Handles a frame of the process. Unknown frames are ignored.
    pub(super) fn handle_frame(&self, joined: &JoinedConnection, text: &str) {
        self.note_heard(joined);
        let Ok(WorkerJoinFrame::Refused { session, worker, code, message }) = serde_json::from_str(text)
        else {
            return;
        };
        let mut state = self.lock();
        let Some(placement) = state.placements.get_mut(&worker) else { return };
        // A process may refuse only sessions that were assigned to it.
        if placement.session != session || placement.host.as_ref() != Some(&joined.host) {
            return;
        }
        tracing::info!(%session, %worker, code, message, name = joined.name, "a joined worker refused a session");
        let is_code = code.len() <= 64 && code.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'_');
        let code = if is_code { code.as_str() } else { "worker_refused" };
        let message = message.get(..message.floor_char_boundary(MESSAGE_MAX)).unwrap_or_default();
        placement.mark_ended(Some(RunError::new(code, format!("{}: {message}", joined.name))));
        drop(state);
        self.hosts_changed.send_replace(());
    }
}

async fn wait_for_stop(stop: &mut watch::Receiver<bool>) {
    // A dropped sender means a stop as well.
    drop(stop.wait_for(|stop| *stop).await);
}

/// Reads the hello. Any other text frame ends the connection.
async fn read_hello(socket: &mut Socket<UpgradedConnection>) -> Result<Box<JoinHello>, SocketError> {
    loop {
        if let IncomingFrame::Text(text) = socket.next().await? {
            return match serde_json::from_str(text.as_str()) {
                Ok(WorkerJoinFrame::Hello(hello)) => Ok(hello),
                _ => Err(SocketError::Closed),
            };
        }
    }
}

async fn send_frame(
    socket: &mut Socket<UpgradedConnection>,
    frame: &DaemonJoinFrame,
) -> Result<(), SocketError> {
    with_timeout(socket.send(frame)).await
}

/// A peer that does not read counts as silent.
async fn with_timeout(step: impl Future<Output = Result<(), SocketError>>) -> Result<(), SocketError> {
    timeout(SILENCE_TIMEOUT, step).await.map_err(|_| SocketError::TimedOut)?
}

fn check_hello(hello: &JoinHello) -> Result<(), HelloRefusal> {
    let JoinHello { versions, software, process_id: host, name, labels, agents, workers, sandbox } = hello;
    if ProtocolVersions::SUPPORTED.newest_common(*versions).is_none() {
        let message = format!(
            "this daemon ({}) and the worker ({software}) have no protocol version in common; upgrade the older one",
            env!("CARGO_PKG_VERSION")
        );
        return Err(("unsupported_version", message));
    }
    let is_one_line =
        |text: &str, limit: usize| (1..=limit).contains(&text.len()) && !text.chars().any(char::is_control);
    let invalid = |message: &str| Err(("invalid_value", message.to_owned()));
    if WorkerId::parse(host).is_err() || !is_one_line(name, TITLE_MAX) || !is_one_line(software, TITLE_MAX) {
        return invalid("a worker needs an id, a name and a version, each on one line");
    }
    if labels.len() > OFFERS_MAX || !labels.iter().all(|label| is_label(label)) {
        return invalid("a label is 1 to 64 characters of A-Za-z0-9_.-, and a worker has at most 64 labels");
    }
    if agents.len() > OFFERS_MAX || !agents.iter().all(|agent| is_one_line(&agent.name, TITLE_MAX)) {
        return invalid("an agent needs a name on one line, and a worker offers at most 64 agents");
    }
    if sandbox.missing.as_ref().is_some_and(|missing| !is_one_line(missing, HEAD_MAX)) {
        return invalid("what a worker says about confinement must be on one line");
    }
    if workers.len() > SESSIONS_MAX {
        return invalid("a worker holds at most 4096 sessions");
    }
    Ok(())
}

/// Refuses labels and agents that the token was not made for. Otherwise whoever has the token of one machine could get
/// the sessions of another, with their variables.
fn check_token_allows(token: &WorkerToken, hello: &JoinHello) -> Result<(), HelloRefusal> {
    let refused = |what: &str, allowed: &[String], given: &str| {
        let message = format!(
            "this token is for the {what}s {}, not for {given}; join with one of these, or create a token with `qd \
             workers token --{what} {given}`",
            allowed.join(", ")
        );
        Err((ErrorCode::WorkerNotAllowed.as_str(), message))
    };
    if let Some(allowed) = &token.labels
        && let Some(label) = hello.labels.iter().find(|label| !allowed.contains(label))
    {
        return refused("label", allowed, label);
    }
    if let Some(allowed) = &token.agents
        && let Some(agent) = hello.agents.iter().find(|agent| !allowed.contains(&agent.name))
    {
        return refused("agent", allowed, &agent.name);
    }
    Ok(())
}

/// `name`, `name-2`, `name-3`…
fn numbered_name(name: &str, n: u32) -> String {
    if n == 1 { name.to_owned() } else { format!("{name}-{n}") }
}
