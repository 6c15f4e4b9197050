//! The control connection of one process that has joined, from its hello to its end. It says which sessions' agents to
//! hold and hears which it will not; no word of an agent comes this way.

use std::collections::HashSet;
use std::fs;
use std::time::Duration;

use qd_link::socket::{Incoming, Role, STEP, Socket, SocketError};
use qd_protocol::event::RunError;
use qd_protocol::frame::join::{Hello, SeatName, ToDaemon, ToWorker};
use qd_protocol::frame::v1::Versions;
use qd_protocol::limits::{PING_S, TITLE_MAX};
use qd_protocol::{Millis, TokenId, WorkerId};
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, timeout};

use super::{About, Control, ELSEWHERE, Host, Joined, OUTBOX, is_label, whereabouts};
use crate::edge::Line;

/// Silence before a sign of life is asked for, and after which there is nobody.
const PING: Duration = Duration::from_secs(PING_S);
const SILENCE: Duration = Duration::from_secs(3 * PING_S);
/// Labels and agents of one process.
const OFFERS_MAX: usize = 64;
/// Sessions that one process may hold.
const SEATS_MAX: usize = 4096;
/// Bytes of what a process says about a refusal that are taken over.
const WORDS_MAX: usize = 4096;

/// A process that was let in.
pub(super) struct Guest {
    host: String,
    connection: u64,
    pub(super) name: String,
    pub(super) orders: mpsc::Receiver<ToWorker>,
    /// What it holds and nobody wants any more.
    pub(super) unwanted: Vec<SeatName>,
}

/// Why a process was not let in: a stable code, and what to do.
pub(super) type Unfit = (&'static str, String);

impl Joined {
    /// Serves a control connection to its end, or ours.
    pub(crate) async fn attend(&self, line: Line, token: TokenId, stop: watch::Receiver<bool>) {
        let mut socket = Socket::upgraded(line, Role::Server).await;
        let hello = match timeout(STEP, first_word(&mut socket)).await {
            Ok(Ok(hello)) => hello,
            Ok(Err(_)) | Err(_) => return,
        };
        match self.welcome(*hello, token) {
            Ok(mut guest) => {
                tracing::info!(name = guest.name, "a worker has joined");
                let ended = self.converse(&mut socket, &mut guest, stop).await;
                let why = ended.err().map_or_else(|| "it was let go".to_owned(), |error| error.to_string());
                tracing::info!(name = guest.name, why, "a joined worker is away");
                self.part(&guest);
            }
            Err((code, message)) => {
                tracing::info!(code, message, "a worker may not join");
                let refused = ToWorker::Refused { code: code.to_owned(), message };
                // Whether it hears why changes nothing for us.
                let _heard = timeout(STEP, socket.send(&refused)).await;
            }
        }
        socket.close().await;
    }

    async fn converse(
        &self,
        socket: &mut Socket<Line>,
        guest: &mut Guest,
        mut stop: watch::Receiver<bool>,
    ) -> Result<(), SocketError> {
        say(socket, &ToWorker::Welcome { name: guest.name.clone() }).await?;
        for seat in std::mem::take(&mut guest.unwanted) {
            say(socket, &ToWorker::Close(seat)).await?;
        }
        let mut heard = Instant::now();
        let mut next_ping = heard + PING;
        loop {
            tokio::select! {
                () = stopped(&mut stop) => return Ok(()),
                order = guest.orders.recv() => match order {
                    Some(order) => say(socket, &order).await?,
                    // Another connection of the same process, or its token is revoked.
                    None => return Ok(()),
                },
                incoming = socket.next() => {
                    heard = Instant::now();
                    next_ping = heard + PING;
                    match incoming? {
                        Incoming::Text(text) => self.take(guest, text.as_str()),
                        Incoming::Binary(_) | Incoming::Alive => self.heard(guest),
                    }
                    // Answers a ping, if it was one.
                    timed(socket.flush()).await?;
                }
                () = tokio::time::sleep_until(next_ping) => {
                    if heard.elapsed() >= SILENCE {
                        return Err(SocketError::TimedOut);
                    }
                    next_ping += PING;
                    socket.feed_ping().await?;
                    timed(socket.flush()).await?;
                }
            }
        }
    }

    /// Lets a process in, in the place of an older connection of the same.
    pub(super) fn welcome(&self, hello: Hello, token: TokenId) -> Result<Guest, Unfit> {
        check(&hello)?;
        let host = hello.host.clone();
        let wanted = |seat: &SeatName| {
            let at = fs::read_to_string(whereabouts(&self.dir, &seat.worker)).unwrap_or_default();
            at.strip_prefix(ELSEWHERE) == Some(&host)
        };
        let unwanted = hello.seats.iter().filter(|seat| !wanted(seat)).cloned().collect();
        let mut state = self.lock();
        // Under the lock, so that a token is not revoked between this look and the entry that a revocation removes.
        if !self.tokens.knows(&token) {
            return Err(("unauthorized", "the token was revoked".to_owned()));
        }
        let older = state.hosts.get(&host).and_then(|known| known.about.as_ref());
        if older.is_some_and(|about| about.token != token) {
            return Err(("host_taken", "a process of this name has joined with another token".to_owned()));
        }
        let others = state.hosts.iter().filter(|(other, _)| **other != host);
        let taken: HashSet<&str> =
            others.filter_map(|(_, other)| Some(other.about.as_ref()?.name.as_str())).collect();
        let name = (1..).map(|n| nth(&hello.name, n)).find(|name| !taken.contains(name.as_str()));
        let name = name.expect("names do not run out before processes do");
        state.connections += 1;
        let connection = state.connections;
        let (outbox, orders) = mpsc::channel(OUTBOX);
        let since = state.hosts.get(&host).map_or_else(Millis::now, |known| known.since);
        let entry = Host {
            about: Some(About::of(hello, name.clone(), token)),
            control: Some(Control { connection, outbox }),
            last_word: Instant::now(),
            since,
        };
        state.hosts.insert(host.clone(), entry);
        drop(state);
        self.changed.send_replace(());
        Ok(Guest { host, connection, name, orders, unwanted })
    }

    /// The connection is over. Sessions wait for the process, and not for this connection of it.
    pub(super) fn part(&self, guest: &Guest) {
        let mut state = self.lock();
        let Some(host) = state.hosts.get_mut(&guest.host) else { return };
        let is_newer = host.control.as_ref().is_some_and(|control| control.connection != guest.connection);
        if is_newer {
            return;
        }
        host.control = None;
        let held =
            state.placements.values_mut().filter(|placement| placement.host.as_ref() == Some(&guest.host));
        held.for_each(|placement| placement.expected = None);
        state.prune(&guest.host);
        drop(state);
        self.changed.send_replace(());
    }

    pub(super) fn heard(&self, guest: &Guest) {
        if let Some(host) = self.lock().hosts.get_mut(&guest.host) {
            host.last_word = Instant::now();
        }
    }

    /// What a process says. A frame that cannot be read is none.
    pub(super) fn take(&self, guest: &Guest, text: &str) {
        self.heard(guest);
        let Ok(ToDaemon::Refused { session, worker, code, message }) = serde_json::from_str(text) else {
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
        let words = message.get(..message.floor_char_boundary(WORDS_MAX)).unwrap_or_default();
        placement.end(Some(RunError::new(code, format!("{}: {words}", guest.name))));
        drop(state);
        self.changed.send_replace(());
    }
}

async fn stopped(stop: &mut watch::Receiver<bool>) {
    // A sender that is gone has stopped as well.
    drop(stop.wait_for(|stop| *stop).await);
}

/// The hello; anything else is no beginning.
async fn first_word(socket: &mut Socket<Line>) -> Result<Box<Hello>, SocketError> {
    loop {
        if let Incoming::Text(text) = socket.next().await? {
            return match serde_json::from_str(text.as_str()) {
                Ok(ToDaemon::Hello(hello)) => Ok(hello),
                _ => Err(SocketError::Closed),
            };
        }
    }
}

async fn say(socket: &mut Socket<Line>, frame: &ToWorker) -> Result<(), SocketError> {
    timed(socket.send(frame)).await
}

/// A peer that does not read is as good as silent.
async fn timed(step: impl Future<Output = Result<(), SocketError>>) -> Result<(), SocketError> {
    timeout(SILENCE, step).await.map_err(|_| SocketError::TimedOut)?
}

fn check(hello: &Hello) -> Result<(), Unfit> {
    let Hello { versions, software, host, name, labels, agents, seats } = hello;
    if Versions::OURS.meet(*versions).is_none() {
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
    if seats.len() > SEATS_MAX {
        return invalid("a worker holds 4096 sessions at most");
    }
    Ok(())
}

/// `name`, `name-2`, `name-3`…
fn nth(name: &str, n: u32) -> String {
    if n == 1 { name.to_owned() } else { format!("{name}-{n}") }
}
