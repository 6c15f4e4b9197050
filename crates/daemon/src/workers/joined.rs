//! Processes on other machines that have joined: who they are, what they offer, and whose agents they hold. A session
//! is given to one of them and stays with it; how it is reached is in `route`, the connection on which a process is
//! told so in `control`. No pid of theirs means anything here.

mod control;
mod route;

use std::collections::HashMap;
use std::fs;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use qd_link::{AgentLink, LinkOptions};
use qd_protocol::api::{Agent, JoinedWorker};
use qd_protocol::event::RunError;
use qd_protocol::frame::join::{Hello, SeatName, ToWorker};
use qd_protocol::worker::AgentSpec;
use qd_protocol::{Millis, SessionId, TokenId, WorkerId};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::{Had, Keys, Tokens, whereabouts};
use crate::edge::Line;
use route::Joint;

/// What stands before a process's name where it is written down who holds a worker.
const ELSEWHERE: &str = "joined:";
/// Frames that may wait for one process. They are few and small; a process that is this far behind is cut off, and told
/// again what counts when it comes back.
const OUTBOX: usize = 256;

/// An agent on another machine, as a session names it: `NAME@LABEL`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Elsewhere {
    pub(super) agent: String,
    pub(super) label: String,
}

impl Elsewhere {
    /// Reads `NAME@LABEL`.
    pub(super) fn parse(text: &str) -> Option<Self> {
        let (agent, label) = text.rsplit_once('@')?;
        let whole = !agent.is_empty() && is_label(label);
        whole.then(|| Self { agent: agent.to_owned(), label: label.to_owned() })
    }
}

/// All that have joined.
#[derive(Debug)]
pub(crate) struct Joined {
    dir: PathBuf,
    keys: Keys,
    tokens: Arc<Tokens>,
    /// How long a silent process is waited for.
    lease: Duration,
    state: Mutex<State>,
    /// Told when a process comes or goes, for those who wait for one.
    changed: watch::Sender<()>,
}

#[derive(Debug, Default)]
struct State {
    /// By the word that each has made for itself.
    hosts: HashMap<String, Host>,
    placements: HashMap<WorkerId, Placement>,
    /// Tells a connection from those before it.
    connections: u64,
}

/// A process that has joined, or one from before our start that may come back.
#[derive(Debug)]
struct Host {
    /// Unknown until it comes back.
    about: Option<About>,
    /// Its control connection, if it has one.
    control: Option<Control>,
    last_word: Instant,
    since: Millis,
}

#[derive(Debug)]
struct About {
    name: String,
    labels: Vec<String>,
    agents: Vec<Agent>,
    version: String,
    token: TokenId,
}

#[derive(Debug)]
struct Control {
    connection: u64,
    outbox: mpsc::Sender<ToWorker>,
}

/// Where a session's worker is, or is to be.
#[derive(Debug)]
struct Placement {
    session: SessionId,
    wanted: Elsewhere,
    /// None has been found yet.
    host: Option<String>,
    /// Who waits for the process to dial.
    expected: Option<oneshot::Sender<Line>>,
    /// Whether it ever did.
    met: bool,
    /// It will never be: why, if somebody has said.
    over: Option<Option<RunError>>,
    /// Ends its connection.
    cut: CancellationToken,
}

impl Joined {
    pub(super) fn new(dir: PathBuf, keys: Keys, tokens: Arc<Tokens>, lease: Duration) -> Self {
        let (state, changed) = (Mutex::default(), watch::Sender::new(()));
        Self { dir, keys, tokens, lease, state, changed }
    }

    /// The agent that somebody who has joined offers under this name and label.
    pub(super) fn offer(&self, wanted: &Elsewhere) -> Option<Agent> {
        let state = self.lock();
        let offers = state.hosts.values().filter_map(|host| host.about.as_ref()?.offer(wanted));
        offers.max_by_key(|agent| agent.available).cloned()
    }

    /// The link to a new worker on whichever machine fits. Nothing is waited for here.
    pub(super) fn launch(
        self: &Arc<Self>,
        spec: AgentSpec,
        wanted: Elsewhere,
        options: LinkOptions,
    ) -> AgentLink {
        let placement = Placement::new(spec.session.clone(), wanted, None);
        self.open(spec.worker.clone(), placement, Some(Box::new(spec)), options)
    }

    /// The link to a worker that there was. One that was never given to anybody is lost at once.
    pub(super) fn attach(self: &Arc<Self>, had: &Had, wanted: Elsewhere, options: LinkOptions) -> AgentLink {
        let text = fs::read_to_string(whereabouts(&self.dir, &had.worker)).ok();
        let host = text.and_then(|text| text.strip_prefix(ELSEWHERE).map(str::to_owned));
        if let Some(host) = &host {
            self.lock().hosts.entry(host.clone()).or_insert_with(Host::from_before);
        }
        self.open(had.worker.clone(), Placement::new(had.session.clone(), wanted, host), None, options)
    }

    fn open(
        self: &Arc<Self>,
        worker: WorkerId,
        placement: Placement,
        spec: Option<Box<AgentSpec>>,
        options: LinkOptions,
    ) -> AgentLink {
        let seat = SeatName { session: placement.session.clone(), worker: worker.clone() };
        self.lock().placements.insert(worker.clone(), placement);
        let route = Joint::new(Arc::clone(self), seat, spec);
        AgentLink::open(LinkOptions { secret: self.keys.secret(worker.as_str()), ..options }, route)
    }

    /// Forgets a worker that nobody wants any more. If its process holds it still, that is told to close it.
    pub(super) fn forget(&self, worker: &WorkerId) {
        let mut state = self.lock();
        let Some(Placement { session, host: Some(host), .. }) = state.placements.remove(worker) else {
            return;
        };
        state.tell(&host, ToWorker::Close(SeatName { session, worker: worker.clone() }));
        state.prune(&host);
    }

    /// Waits for a worker no longer: it is told to close, and counts as lost from now on.
    pub(super) fn abandon(&self, worker: &WorkerId) {
        let mut state = self.lock();
        let Some(placement) = state.placements.get_mut(worker) else { return };
        placement.end(None);
        let seat = SeatName { session: placement.session.clone(), worker: worker.clone() };
        if let Some(host) = placement.host.clone() {
            state.tell(&host, ToWorker::Close(seat));
        }
        drop(state);
        self.changed.send_replace(());
    }

    /// Ends the connections of all that joined with this token. What they held is lost.
    pub(crate) fn expel(&self, token: &TokenId) {
        let mut state = self.lock();
        let State { hosts, placements, .. } = &mut *state;
        hosts.retain(|name, host| {
            let expelled = host.about.as_ref().is_some_and(|about| about.token == *token);
            if expelled {
                let held = placements.values_mut().filter(|placement| placement.host.as_ref() == Some(name));
                held.for_each(|placement| placement.end(None));
            }
            !expelled
        });
        drop(state);
        self.changed.send_replace(());
    }

    /// Forgets where workers were that no session knows: of a daemon that died before it could.
    pub(super) fn end_strays(&self, is_stray: impl Fn(&WorkerId) -> bool) {
        let Ok(entries) = fs::read_dir(&self.dir) else { return };
        for path in entries.flatten().map(|entry| entry.path()) {
            let name = path.file_name().and_then(|name| name.to_str()?.strip_suffix(".at"));
            let Some(worker) = name.and_then(|name| WorkerId::parse(name).ok()) else { continue };
            let elsewhere = fs::read_to_string(&path).is_ok_and(|text| text.starts_with(ELSEWHERE));
            if elsewhere && is_stray(&worker) {
                tracing::info!(%worker, "a joined worker that no session knows is forgotten");
                // If it cannot be removed, it is found again by the next look.
                let _left = fs::remove_file(&path);
            }
        }
    }

    /// The name of the process that holds a worker, and how long it is waited for from now on.
    pub(super) fn holder(&self, worker: &WorkerId) -> Option<(String, Duration)> {
        let state = self.lock();
        let host = state.hosts.get(state.placements.get(worker)?.host.as_ref()?)?;
        Some((host.about.as_ref()?.name.clone(), host.patience(self.lease)))
    }

    /// Everybody who has joined, by name.
    pub(crate) fn list(&self) -> Vec<JoinedWorker> {
        let state = self.lock();
        let mut list: Vec<JoinedWorker> = state
            .hosts
            .iter()
            .filter_map(|(host, known)| {
                let about = known.about.as_ref()?;
                Some(JoinedWorker {
                    name: about.name.clone(),
                    labels: about.labels.clone(),
                    agents: about.agents.iter().map(|agent| agent.name.clone()).collect(),
                    sessions: state.held_by(host).map(|placement| placement.session.clone()).collect(),
                    connected: known.control.is_some(),
                    joined_at: known.since,
                    lease_expires_at: Millis::now().plus(millis(known.patience(self.lease))),
                    version: about.version.clone(),
                })
            })
            .collect();
        list.sort_by(|a, b| a.name.cmp(&b.name));
        list
    }

    /// Every change under the lock is made of assignments that each leave it whole.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// Says something to a process, if it is connected. One that does not keep up is cut off.
    fn tell(&mut self, host: &str, frame: ToWorker) -> bool {
        let Some(host) = self.hosts.get_mut(host) else { return false };
        let told = host.control.as_ref().is_some_and(|control| control.outbox.try_send(frame).is_ok());
        if !told {
            host.control = None;
        }
        told
    }

    fn held_by(&self, host: &str) -> impl Iterator<Item = &Placement> {
        self.placements.values().filter(move |placement| placement.host.as_deref() == Some(host))
    }

    /// Of those that fit and are connected, the one with the least to do.
    fn choose(&self, wanted: &Elsewhere) -> Option<String> {
        let fits = self.hosts.iter().filter(|(_, host)| {
            let offer = host.about.as_ref().and_then(|about| about.offer(wanted));
            host.control.is_some() && offer.is_some_and(|agent| agent.available)
        });
        fits.map(|(name, _)| name).min_by_key(|name| (self.held_by(name).count(), *name)).cloned()
    }

    /// Forgets a process that is away and holds nothing.
    fn prune(&mut self, host: &str) {
        let holds = self.held_by(host).next().is_some();
        if !holds && self.hosts.get(host).is_some_and(|host| host.control.is_none()) {
            self.hosts.remove(host);
        }
    }
}

impl Host {
    /// One that was there before we were. It has as long to come back as one that has just gone.
    fn from_before() -> Self {
        Self { about: None, control: None, last_word: Instant::now(), since: Millis::now() }
    }

    /// How long it is waited for from now on.
    fn patience(&self, lease: Duration) -> Duration {
        if self.control.is_some() { lease } else { lease.saturating_sub(self.last_word.elapsed()) }
    }
}

impl About {
    fn of(hello: Hello, name: String, token: TokenId) -> Self {
        Self { name, labels: hello.labels, agents: hello.agents, version: hello.software, token }
    }

    fn offer(&self, wanted: &Elsewhere) -> Option<&Agent> {
        self.labels.contains(&wanted.label).then_some(())?;
        self.agents.iter().find(|agent| agent.name == wanted.agent)
    }
}

impl Placement {
    fn new(session: SessionId, wanted: Elsewhere, host: Option<String>) -> Self {
        Self { session, wanted, host, expected: None, met: false, over: None, cut: CancellationToken::new() }
    }

    /// It will never be. What is said of one that was there for a while is not why it is lost.
    fn end(&mut self, why: Option<RunError>) {
        let why = why.filter(|_| !self.met);
        self.over.get_or_insert(why);
        self.expected = None;
        self.cut.cancel();
    }
}

/// What can stand after the `@`, and be a label.
fn is_label(text: &str) -> bool {
    (1..=64).contains(&text.len())
        && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'.' | b'-'))
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests;
