//! The control connection of one process that has joined, from its hello to its end. It says which sessions' agents to
//! hold and hears which it will not; no word of an agent comes this way.

use std::collections::HashSet;
use std::fs;
use std::time::Duration;

use qd_link::socket::{IncomingFrame, Role, STEP_TIMEOUT, Socket, SocketError};
use qd_protocol::event::RunError;
use qd_protocol::frame::join::{DaemonJoinFrame, JoinHello, SessionWorker, WorkerJoinFrame};
use qd_protocol::frame::v1::ProtocolVersions;
use qd_protocol::limits::{PING_S, TITLE_MAX};
use qd_protocol::{Millis, TokenId, WorkerId};
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, timeout};

use super::{
    JOINED_PREFIX, JoinedControl, JoinedHost, JoinedHostInfo, JoinedWorkers, OUTBOX_MAX, holder_file,
    is_label,
};
use crate::edge::UpgradedConnection;

/// Silence before a sign of life is asked for, and after which there is nobody.
const PING_INTERVAL: Duration = Duration::from_secs(PING_S);
const SILENCE_TIMEOUT: Duration = Duration::from_secs(3 * PING_S);
/// Labels and agents of one process.
const OFFERS_MAX: usize = 64;
/// Sessions that one process may hold.
const SESSIONS_MAX: usize = 4096;
/// Bytes of what a process says about a refusal that are taken over.
const MESSAGE_MAX: usize = 4096;

/// A process that was let in.
pub(super) struct JoinedConnection {
    host: String,
    connection: u64,
    pub(super) name: String,
    pub(super) frames: mpsc::Receiver<DaemonJoinFrame>,
    /// What it holds and nobody wants any more.
    pub(super) stale_sessions: Vec<SessionWorker>,
}

/// Why a process was not let in: a stable code, and what to do.
pub(super) type HelloRefusal = (&'static str, String);

impl JoinedWorkers {
    /// Serves a control connection to its end, or ours.
    pub(crate) async fn serve_control(
        &self,
        line: UpgradedConnection,
        token: TokenId,
        stop: watch::Receiver<bool>,
    ) {
        let mut socket = Socket::from_upgraded(line, Role::Server).await;
        let hello = match timeout(STEP_TIMEOUT, read_hello(&mut socket)).await {
            Ok(Ok(hello)) => hello,
            Ok(Err(_)) | Err(_) => return,
        };
        match self.admit_host(*hello, token) {
            Ok(mut guest) => {
                tracing::info!(name = guest.name, "a worker has joined");
                let ended = self.run_control(&mut socket, &mut guest, stop).await;
                let why = ended.err().map_or_else(|| "it was let go".to_owned(), |error| error.to_string());
                tracing::info!(name = guest.name, why, "a joined worker is away");
                self.release_connection(&guest);
            }
            Err((code, message)) => {
                tracing::info!(code, message, "a worker may not join");
                let refused = DaemonJoinFrame::Refused { code: code.to_owned(), message };
                // Whether it hears why changes nothing for us.
                let _heard = timeout(STEP_TIMEOUT, socket.send(&refused)).await;
            }
        }
        socket.close().await;
    }

    async fn run_control(
        &self,
        socket: &mut Socket<UpgradedConnection>,
        guest: &mut JoinedConnection,
        mut stop: watch::Receiver<bool>,
    ) -> Result<(), SocketError> {
        send_frame(socket, &DaemonJoinFrame::Welcome { name: guest.name.clone() }).await?;
        for seat in std::mem::take(&mut guest.stale_sessions) {
            send_frame(socket, &DaemonJoinFrame::Close(seat)).await?;
        }
        let mut heard = Instant::now();
        let mut next_ping = heard + PING_INTERVAL;
        loop {
            tokio::select! {
                () = wait_for_stop(&mut stop) => return Ok(()),
                order = guest.frames.recv() => match order {
                    Some(order) => send_frame(socket, &order).await?,
                    // Another connection of the same process, or its token is revoked.
                    None => return Ok(()),
                },
                incoming = socket.next() => {
                    heard = Instant::now();
                    next_ping = heard + PING_INTERVAL;
                    match incoming? {
                        IncomingFrame::Text(text) => self.handle_frame(guest, text.as_str()),
                        IncomingFrame::Binary(_) | IncomingFrame::Alive => self.note_heard(guest),
                    }
                    // Answers a ping, if it was one.
                    with_timeout(socket.flush()).await?;
                }
                () = tokio::time::sleep_until(next_ping) => {
                    if heard.elapsed() >= SILENCE_TIMEOUT {
                        return Err(SocketError::TimedOut);
                    }
                    next_ping += PING_INTERVAL;
                    socket.feed_ping().await?;
                    with_timeout(socket.flush()).await?;
                }
            }
        }
    }

    /// Lets a process in, in the place of an older connection of the same.
    pub(super) fn admit_host(
        &self,
        hello: JoinHello,
        token: TokenId,
    ) -> Result<JoinedConnection, HelloRefusal> {
        check_hello(&hello)?;
        let host = hello.host.clone();
        let wanted = |seat: &SessionWorker| {
            let at = fs::read_to_string(holder_file(&self.dir, &seat.worker)).unwrap_or_default();
            at.strip_prefix(JOINED_PREFIX) == Some(&host)
        };
        let unwanted = hello.workers.iter().filter(|seat| !wanted(seat)).cloned().collect();
        let mut state = self.lock();
        // Under the lock, so that a token is not revoked between this look and the entry that a revocation removes.
        if !self.tokens.is_valid(&token) {
            return Err(("unauthorized", "the token was revoked".to_owned()));
        }
        let older = state.hosts.get(&host).and_then(|known| known.info.as_ref());
        if older.is_some_and(|about| about.token != token) {
            return Err(("host_taken", "a process of this name has joined with another token".to_owned()));
        }
        let others = state.hosts.iter().filter(|(other, _)| **other != host);
        let taken: HashSet<&str> =
            others.filter_map(|(_, other)| Some(other.info.as_ref()?.name.as_str())).collect();
        let name = (1..).map(|n| numbered_name(&hello.name, n)).find(|name| !taken.contains(name.as_str()));
        let name = name.expect("names do not run out before processes do");
        state.last_connection += 1;
        let connection = state.last_connection;
        let (outbox, orders) = mpsc::channel(OUTBOX_MAX);
        let since = state.hosts.get(&host).map_or_else(Millis::now, |known| known.joined_at);
        let entry = JoinedHost {
            info: Some(JoinedHostInfo::from_hello(hello, name.clone(), token)),
            control: Some(JoinedControl { connection, outbox }),
            last_heard: Instant::now(),
            joined_at: since,
        };
        state.hosts.insert(host.clone(), entry);
        drop(state);
        self.hosts_changed.send_replace(());
        Ok(JoinedConnection { host, connection, name, frames: orders, stale_sessions: unwanted })
    }

    /// The connection is over. Sessions wait for the process, and not for this connection of it.
    pub(super) fn release_connection(&self, guest: &JoinedConnection) {
        let mut state = self.lock();
        let Some(host) = state.hosts.get_mut(&guest.host) else { return };
        let is_newer = host.control.as_ref().is_some_and(|control| control.connection != guest.connection);
        if is_newer {
            return;
        }
        host.control = None;
        let held =
            state.placements.values_mut().filter(|placement| placement.host.as_ref() == Some(&guest.host));
        held.for_each(|placement| placement.dial_waiter = None);
        state.forget_if_unused(&guest.host);
        drop(state);
        self.hosts_changed.send_replace(());
    }

    pub(super) fn note_heard(&self, guest: &JoinedConnection) {
        if let Some(host) = self.lock().hosts.get_mut(&guest.host) {
            host.last_heard = Instant::now();
        }
    }

    /// What a process says. A frame that cannot be read is none.
    pub(super) fn handle_frame(&self, guest: &JoinedConnection, text: &str) {
        self.note_heard(guest);
        let Ok(WorkerJoinFrame::Refused { session, worker, code, message }) = serde_json::from_str(text)
        else {
            return;
        };
        let mut state = self.lock();
        let Some(placement) = state.placements.get_mut(&worker) else { return };
        // It can speak only of what it was given.
        if placement.session != session || placement.host.as_ref() != Some(&guest.host) {
            return;
        }
        tracing::info!(%session, %worker, code, message, name = guest.name, "a joined worker refuses a session");
        let is_code = code.len() <= 64 && code.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'_');
        let code = if is_code { code.as_str() } else { "worker_refused" };
        let words = message.get(..message.floor_char_boundary(MESSAGE_MAX)).unwrap_or_default();
        placement.mark_ended(Some(RunError::new(code, format!("{}: {words}", guest.name))));
        drop(state);
        self.hosts_changed.send_replace(());
    }
}

async fn wait_for_stop(stop: &mut watch::Receiver<bool>) {
    // A sender that is gone has stopped as well.
    drop(stop.wait_for(|stop| *stop).await);
}

/// The hello; anything else is no beginning.
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

/// A peer that does not read is as good as silent.
async fn with_timeout(step: impl Future<Output = Result<(), SocketError>>) -> Result<(), SocketError> {
    timeout(SILENCE_TIMEOUT, step).await.map_err(|_| SocketError::TimedOut)?
}

fn check_hello(hello: &JoinHello) -> Result<(), HelloRefusal> {
    let JoinHello { versions, software, host, name, labels, agents, workers: seats } = hello;
    if ProtocolVersions::SUPPORTED.newest_common(*versions).is_none() {
        let message = format!(
            "this daemon is {} and speaks other versions of the protocol than {software}; upgrade the older one",
            env!("CARGO_PKG_VERSION")
        );
        return Err(("unsupported_version", message));
    }
    let line =
        |text: &str, most: usize| (1..=most).contains(&text.len()) && !text.chars().any(char::is_control);
    let invalid = |message: &str| Err(("invalid_value", message.to_owned()));
    if WorkerId::parse(host).is_err() || !line(name, TITLE_MAX) || !line(software, TITLE_MAX) {
        return invalid("a worker has an id, a name and a version of one line each");
    }
    if labels.len() > OFFERS_MAX || !labels.iter().all(|label| is_label(label)) {
        return invalid("a label is 1 to 64 of A-Za-z0-9_.-, and a worker bears 64 at most");
    }
    if agents.len() > OFFERS_MAX || !agents.iter().all(|agent| line(&agent.name, TITLE_MAX)) {
        return invalid("an agent has a name of one line, and a worker offers 64 at most");
    }
    if seats.len() > SESSIONS_MAX {
        return invalid("a worker holds 4096 sessions at most");
    }
    Ok(())
}

/// `name`, `name-2`, `name-3`…
fn numbered_name(name: &str, n: u32) -> String {
    if n == 1 { name.to_owned() } else { format!("{name}-{n}") }
}
