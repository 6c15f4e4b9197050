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
use qd_protocol::frame::join::{DaemonJoinFrame, JoinHello, SessionWorker};
use qd_protocol::worker::AgentSpec;
use qd_protocol::{Millis, SessionId, TokenId, WorkerId};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::{WorkerAttachment, WorkerKeys, WorkerTokenStore, holder_file};
use crate::edge::UpgradedConnection;
use route::JoinedHostRoute;

/// What stands before a process's name where it is written down who holds a worker.
const JOINED_PREFIX: &str = "joined:";
/// Frames that may wait for one process. They are few and small; a process that is this far behind is cut off, and told
/// again what counts when it comes back.
const OUTBOX_MAX: usize = 256;

/// An agent on another machine, as a session names it: `NAME@LABEL`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct RemoteAgentName {
    pub(super) agent: String,
    pub(super) label: String,
}

impl RemoteAgentName {
    /// Reads `NAME@LABEL`.
    pub(super) fn parse(text: &str) -> Option<Self> {
        let (agent, label) = text.rsplit_once('@')?;
        let whole = !agent.is_empty() && is_label(label);
        whole.then(|| Self { agent: agent.to_owned(), label: label.to_owned() })
    }
}

/// All that have joined.
#[derive(Debug)]
pub(crate) struct JoinedWorkers {
    dir: PathBuf,
    keys: WorkerKeys,
    tokens: Arc<WorkerTokenStore>,
    /// How long a silent process is waited for.
    lease: Duration,
    state: Mutex<JoinedWorkersState>,
    /// Told when a process comes or goes, for those who wait for one.
    hosts_changed: watch::Sender<()>,
}

#[derive(Debug, Default)]
struct JoinedWorkersState {
    /// By the word that each has made for itself.
    hosts: HashMap<String, JoinedHost>,
    placements: HashMap<WorkerId, WorkerPlacement>,
    /// Tells a connection from those before it.
    last_connection: u64,
}

/// A process that has joined, or one from before our start that may come back.
#[derive(Debug)]
struct JoinedHost {
    /// Unknown until it comes back.
    info: Option<JoinedHostInfo>,
    /// Its control connection, if it has one.
    control: Option<JoinedControl>,
    last_heard: Instant,
    joined_at: Millis,
}

#[derive(Debug)]
struct JoinedHostInfo {
    name: String,
    labels: Vec<String>,
    agents: Vec<Agent>,
    version: String,
    token: TokenId,
}

#[derive(Debug)]
struct JoinedControl {
    connection: u64,
    outbox: mpsc::Sender<DaemonJoinFrame>,
}

/// Where a session's worker is, or is to be.
#[derive(Debug)]
struct WorkerPlacement {
    session: SessionId,
    remote_agent: RemoteAgentName,
    /// None has been found yet.
    host: Option<String>,
    /// Who waits for the process to dial.
    dial_waiter: Option<oneshot::Sender<UpgradedConnection>>,
    /// Whether it ever did.
    has_dialled: bool,
    /// It will never be: why, if somebody has said.
    ended: Option<Option<RunError>>,
    /// Ends its connection.
    disconnect: CancellationToken,
}

impl JoinedWorkers {
    pub(super) fn new(
        dir: PathBuf,
        keys: WorkerKeys,
        tokens: Arc<WorkerTokenStore>,
        lease: Duration,
    ) -> Self {
        let (state, hosts_changed) = (Mutex::default(), watch::Sender::new(()));
        Self { dir, keys, tokens, lease, state, hosts_changed }
    }

    /// The agent that somebody who has joined offers under this name and label.
    pub(super) fn find_agent(&self, wanted: &RemoteAgentName) -> Option<Agent> {
        let state = self.lock();
        let offers = state.hosts.values().filter_map(|host| host.info.as_ref()?.find_agent(wanted));
        offers.max_by_key(|agent| agent.available).cloned()
    }

    /// The link to a new worker on whichever machine fits. Nothing is waited for here.
    pub(super) fn launch(
        self: &Arc<Self>,
        spec: AgentSpec,
        wanted: RemoteAgentName,
        options: LinkOptions,
    ) -> AgentLink {
        let placement = WorkerPlacement::new(spec.session.clone(), wanted, None);
        self.open_link(spec.worker.clone(), placement, Some(Box::new(spec)), options)
    }

    /// The link to a worker that there was. One that was never given to anybody is lost at once.
    pub(super) fn attach(
        self: &Arc<Self>,
        had: &WorkerAttachment,
        wanted: RemoteAgentName,
        options: LinkOptions,
    ) -> AgentLink {
        let text = fs::read_to_string(holder_file(&self.dir, &had.worker)).ok();
        let host = text.and_then(|text| text.strip_prefix(JOINED_PREFIX).map(str::to_owned));
        if let Some(host) = &host {
            self.lock().hosts.entry(host.clone()).or_insert_with(JoinedHost::from_previous_daemon);
        }
        self.open_link(
            had.worker.clone(),
            WorkerPlacement::new(had.session.clone(), wanted, host),
            None,
            options,
        )
    }

    fn open_link(
        self: &Arc<Self>,
        worker: WorkerId,
        placement: WorkerPlacement,
        spec: Option<Box<AgentSpec>>,
        options: LinkOptions,
    ) -> AgentLink {
        let seat = SessionWorker { session: placement.session.clone(), worker: worker.clone() };
        self.lock().placements.insert(worker.clone(), placement);
        let route = JoinedHostRoute::new(Arc::clone(self), seat, spec);
        AgentLink::open(LinkOptions { secret: self.keys.secret(worker.as_str()), ..options }, route)
    }

    /// Forgets a worker that nobody wants any more. If its process holds it still, that is told to close it.
    pub(super) fn forget(&self, worker: &WorkerId) {
        let mut state = self.lock();
        let Some(WorkerPlacement { session, host: Some(host), .. }) = state.placements.remove(worker) else {
            return;
        };
        state.send_frame(&host, DaemonJoinFrame::Close(SessionWorker { session, worker: worker.clone() }));
        state.forget_if_unused(&host);
    }

    /// Waits for a worker no longer: it is told to close, and counts as lost from now on.
    pub(super) fn abandon(&self, worker: &WorkerId) {
        let mut state = self.lock();
        let Some(placement) = state.placements.get_mut(worker) else { return };
        placement.mark_ended(None);
        let seat = SessionWorker { session: placement.session.clone(), worker: worker.clone() };
        if let Some(host) = placement.host.clone() {
            state.send_frame(&host, DaemonJoinFrame::Close(seat));
        }
        drop(state);
        self.hosts_changed.send_replace(());
    }

    /// Ends the connections of all that joined with this token. What they held is lost.
    pub(crate) fn expel(&self, token: &TokenId) {
        let mut state = self.lock();
        let JoinedWorkersState { hosts, placements, .. } = &mut *state;
        hosts.retain(|name, host| {
            let expelled = host.info.as_ref().is_some_and(|about| about.token == *token);
            if expelled {
                let held = placements.values_mut().filter(|placement| placement.host.as_ref() == Some(name));
                held.for_each(|placement| placement.mark_ended(None));
            }
            !expelled
        });
        drop(state);
        self.hosts_changed.send_replace(());
    }

    /// Forgets where workers were that no session knows: of a daemon that died before it could.
    pub(super) fn forget_strays(&self, is_stray: impl Fn(&WorkerId) -> bool) {
        let Ok(entries) = fs::read_dir(&self.dir) else { return };
        for path in entries.flatten().map(|entry| entry.path()) {
            let name = path.file_name().and_then(|name| name.to_str()?.strip_suffix(".at"));
            let Some(worker) = name.and_then(|name| WorkerId::parse(name).ok()) else { continue };
            let elsewhere = fs::read_to_string(&path).is_ok_and(|text| text.starts_with(JOINED_PREFIX));
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
        Some((host.info.as_ref()?.name.clone(), host.remaining_lease(self.lease)))
    }

    /// Everybody who has joined, by name.
    pub(crate) fn list(&self) -> Vec<JoinedWorker> {
        let state = self.lock();
        let mut list: Vec<JoinedWorker> = state
            .hosts
            .iter()
            .filter_map(|(host, known)| {
                let about = known.info.as_ref()?;
                Some(JoinedWorker {
                    name: about.name.clone(),
                    labels: about.labels.clone(),
                    agents: about.agents.iter().map(|agent| agent.name.clone()).collect(),
                    sessions: state.held_by(host).map(|placement| placement.session.clone()).collect(),
                    connected: known.control.is_some(),
                    joined_at: known.joined_at,
                    lease_expires_at: Millis::now().plus(millis(known.remaining_lease(self.lease))),
                    version: about.version.clone(),
                })
            })
            .collect();
        list.sort_by(|a, b| a.name.cmp(&b.name));
        list
    }

    /// Every change under the lock is made of assignments that each leave it whole.
    fn lock(&self) -> MutexGuard<'_, JoinedWorkersState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl JoinedWorkersState {
    /// Says something to a process, if it is connected. One that does not keep up is cut off.
    fn send_frame(&mut self, host: &str, frame: DaemonJoinFrame) -> bool {
        let Some(host) = self.hosts.get_mut(host) else { return false };
        let told = host.control.as_ref().is_some_and(|control| control.outbox.try_send(frame).is_ok());
        if !told {
            host.control = None;
        }
        told
    }

    fn held_by(&self, host: &str) -> impl Iterator<Item = &WorkerPlacement> {
        self.placements.values().filter(move |placement| placement.host.as_deref() == Some(host))
    }

    /// Of those that fit and are connected, the one with the least to do.
    fn choose_host(&self, wanted: &RemoteAgentName) -> Option<String> {
        let fits = self.hosts.iter().filter(|(_, host)| {
            let offer = host.info.as_ref().and_then(|about| about.find_agent(wanted));
            host.control.is_some() && offer.is_some_and(|agent| agent.available)
        });
        fits.map(|(name, _)| name).min_by_key(|name| (self.held_by(name).count(), *name)).cloned()
    }

    /// Forgets a process that is away and holds nothing.
    fn forget_if_unused(&mut self, host: &str) {
        let holds = self.held_by(host).next().is_some();
        if !holds && self.hosts.get(host).is_some_and(|host| host.control.is_none()) {
            self.hosts.remove(host);
        }
    }
}

impl JoinedHost {
    /// One that was there before we were. It has as long to come back as one that has just gone.
    fn from_previous_daemon() -> Self {
        Self { info: None, control: None, last_heard: Instant::now(), joined_at: Millis::now() }
    }

    /// How long it is waited for from now on.
    fn remaining_lease(&self, lease: Duration) -> Duration {
        if self.control.is_some() { lease } else { lease.saturating_sub(self.last_heard.elapsed()) }
    }
}

impl JoinedHostInfo {
    fn from_hello(hello: JoinHello, name: String, token: TokenId) -> Self {
        Self { name, labels: hello.labels, agents: hello.agents, version: hello.software, token }
    }

    fn find_agent(&self, wanted: &RemoteAgentName) -> Option<&Agent> {
        self.labels.contains(&wanted.label).then_some(())?;
        self.agents.iter().find(|agent| agent.name == wanted.agent)
    }
}

impl WorkerPlacement {
    fn new(session: SessionId, remote_agent: RemoteAgentName, host: Option<String>) -> Self {
        Self {
            session,
            remote_agent,
            host,
            dial_waiter: None,
            has_dialled: false,
            ended: None,
            disconnect: CancellationToken::new(),
        }
    }

    /// It will never be. What is said of one that was there for a while is not why it is lost.
    fn mark_ended(&mut self, why: Option<RunError>) {
        let why = why.filter(|_| !self.has_dialled);
        self.ended.get_or_insert(why);
        self.dial_waiter = None;
        self.disconnect.cancel();
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
