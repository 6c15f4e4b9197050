//! Worker processes on other machines that have joined: their identity, the agents they offer, and the sessions they
//! hold. A session is assigned to one of them and stays with it. `route` has the connections of sessions, `control`
//! the control connection of a process. Their pids mean nothing here.
//!
//! Design: docs/design/one-connection-per-session.md

mod control;
mod route;

use std::collections::HashMap;
use std::fs;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};
use qd_core::sandbox::plan_sandbox;
use qd_link::{AgentLink, LinkOptions};
use qd_protocol::api::{Agent, JoinedWorker};
use qd_protocol::event::RunError;
use qd_protocol::frame::join::{DaemonJoinFrame, JoinHello, SessionWorker};
use qd_protocol::sandbox_spec::{SandboxSpec, SandboxSupport};
use qd_protocol::worker::AgentSpec;
use qd_protocol::{Millis, SessionId, TokenId, WorkerId};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::{RecordedWorker, WorkerKeys, WorkerTokenStore, host_file};
use crate::edge::UpgradedConnection;
pub(crate) use control::OFFERS_MAX;
use route::JoinedWorkerConnector;

/// The longest label.
pub(super) const LABEL_CHARS_MAX: usize = 64;
/// Stands before the process's id in the file that names the holder of a worker.
const JOINED_PREFIX: &str = "joined:";
/// The most frames that may wait for one process. Frames are few and small; a process that falls this far behind is
/// disconnected, and gets what still applies when it reconnects.
const OUTBOX_MAX: usize = 256;

/// An agent on another machine, as a session names it: `NAME@LABEL`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct RemoteAgentName {
    pub(super) agent: String,
    pub(super) label: String,
}

impl RemoteAgentName {
    /// Parses `NAME@LABEL`.
    pub(super) fn parse(text: &str) -> Option<Self> {
        let (agent, label) = text.rsplit_once('@')?;
        let valid = !agent.is_empty() && is_label(label);
        valid.then(|| Self { agent: agent.to_owned(), label: label.to_owned() })
    }
}

/// All joined worker processes of a daemon.
#[derive(Debug)]
pub(crate) struct JoinedWorkers {
    dir: PathBuf,
    keys: WorkerKeys,
    tokens: Arc<WorkerTokenStore>,
    /// How long the daemon waits for a silent process.
    lease: Duration,
    state: Mutex<JoinedWorkersState>,
    /// Notified when a process connects or disconnects, for routes that wait for one.
    hosts_changed: watch::Sender<()>,
}

#[derive(Debug, Default)]
struct JoinedWorkersState {
    /// By the id that each process chose for itself.
    hosts: HashMap<String, JoinedHost>,
    placements: HashMap<WorkerId, WorkerPlacement>,
    /// Counts connections, to tell a new connection of a process from an older one.
    last_connection: u64,
}

/// A process that has joined, or one that a previous daemon knew and that may come back.
#[derive(Debug)]
struct JoinedHost {
    /// Unknown until the process has joined this daemon.
    info: Option<JoinedHostInfo>,
    /// The control connection, while the process is connected.
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
    sandbox: SandboxSupport,
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
    /// The process that holds the worker; `None` until one is chosen.
    host: Option<String>,
    /// The route that waits for the process to dial.
    dial_waiter: Option<oneshot::Sender<UpgradedConnection>>,
    /// Whether the process has ever dialled.
    has_dialled: bool,
    /// Set once the worker is lost or can never start; with the reason, if there is one.
    ended: Option<Option<RunError>>,
    /// Closes the worker's connection.
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

    /// The agent with this name and label, if a joined process offers it.
    pub(super) fn find_agent(&self, name: &RemoteAgentName) -> Option<Agent> {
        let state = self.lock();
        let offers = state.hosts.values().filter_map(|host| host.info.as_ref()?.find_agent(name));
        offers.max_by_key(|agent| agent.available).cloned()
    }

    /// How strongly the machines that offer this agent can confine it: what the best of them can do.
    pub(super) fn sandbox_support(&self, name: &RemoteAgentName) -> Option<SandboxSupport> {
        let state = self.lock();
        let infos = state.hosts.values().filter_map(|host| host.info.as_ref());
        let offering = infos.filter(|info| info.find_agent(name).is_some()).map(|info| &info.sandbox);
        offering.max_by_key(|support| (support.strongest, support.network_off)).cloned()
    }

    /// Opens a link to a new worker on a machine that offers the agent. This does not wait for the machine.
    pub(super) fn launch(
        self: &Arc<Self>,
        spec: AgentSpec,
        remote_agent: RemoteAgentName,
        options: LinkOptions,
    ) -> AgentLink {
        let placement = WorkerPlacement::new(spec.session.clone(), remote_agent, None);
        self.open_link(spec.worker.clone(), placement, Some(Box::new(spec)), options)
    }

    /// Opens a link to a worker that already exists. A worker that was never assigned to a process is lost at once.
    pub(super) fn attach(
        self: &Arc<Self>,
        attachment: &RecordedWorker,
        remote_agent: RemoteAgentName,
        options: LinkOptions,
    ) -> AgentLink {
        let text = fs::read_to_string(host_file(&self.dir, &attachment.worker)).ok();
        let host = text.and_then(|text| text.strip_prefix(JOINED_PREFIX).map(str::to_owned));
        if let Some(host) = &host {
            self.lock().hosts.entry(host.clone()).or_insert_with(JoinedHost::from_previous_daemon);
        }
        self.open_link(
            attachment.worker.clone(),
            WorkerPlacement::new(attachment.session.clone(), remote_agent, host),
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
        let session_worker = SessionWorker { session: placement.session.clone(), worker: worker.clone() };
        self.lock().placements.insert(worker.clone(), placement);
        let route = JoinedWorkerConnector::new(Arc::clone(self), session_worker, spec);
        AgentLink::open(LinkOptions { secret: self.keys.secret(worker.as_str()), ..options }, route)
    }

    /// Forgets a worker that no session wants any more. If its process still holds it, the process is told to close
    /// it.
    pub(super) fn forget(&self, worker: &WorkerId) {
        let mut state = self.lock();
        let Some(WorkerPlacement { session, host: Some(host), .. }) = state.placements.remove(worker) else {
            return;
        };
        state.send_frame(&host, DaemonJoinFrame::Close(SessionWorker { session, worker: worker.clone() }));
        state.forget_if_unused(&host);
    }

    /// Stops waiting for a worker: its process is told to close it, and it counts as lost from now on.
    pub(super) fn abandon(&self, worker: &WorkerId) {
        let mut state = self.lock();
        let Some(placement) = state.placements.get_mut(worker) else { return };
        placement.mark_ended(None);
        let session_worker = SessionWorker { session: placement.session.clone(), worker: worker.clone() };
        if let Some(host) = placement.host.clone() {
            state.send_frame(&host, DaemonJoinFrame::Close(session_worker));
        }
        drop(state);
        self.hosts_changed.send_replace(());
    }

    /// Disconnects all processes that joined with this token. The sessions they held are lost.
    pub(crate) fn expel(&self, token: &TokenId) {
        let mut state = self.lock();
        let JoinedWorkersState { hosts, placements, .. } = &mut *state;
        hosts.retain(|name, host| {
            let expelled = host.info.as_ref().is_some_and(|info| info.token == *token);
            if expelled {
                let held = placements.values_mut().filter(|placement| placement.host.as_ref() == Some(name));
                held.for_each(|placement| placement.mark_ended(None));
            }
            !expelled
        });
        drop(state);
        self.hosts_changed.send_replace(());
    }

    /// Removes the holder files of workers that no session knows, left by a daemon that died before it could remove
    /// them.
    pub(super) fn forget_strays(&self, is_stray: impl Fn(&WorkerId) -> bool) {
        let Ok(entries) = fs::read_dir(&self.dir) else { return };
        for path in entries.flatten().map(|entry| entry.path()) {
            let name = path.file_name().and_then(|name| name.to_str()?.strip_suffix(".at"));
            let Some(worker) = name.and_then(|name| WorkerId::parse(name).ok()) else { continue };
            let is_remote = fs::read_to_string(&path).is_ok_and(|text| text.starts_with(JOINED_PREFIX));
            if is_remote && is_stray(&worker) {
                tracing::info!(%worker, "forgetting a joined worker that belongs to no session");
                // If the file cannot be removed, the next check finds it again.
                let _left = fs::remove_file(&path);
            }
        }
    }

    /// The name of the process that holds a worker, and how much longer it is waited for.
    pub(super) fn holder(&self, worker: &WorkerId) -> Option<(String, Duration)> {
        let state = self.lock();
        let host = state.hosts.get(state.placements.get(worker)?.host.as_ref()?)?;
        Some((host.info.as_ref()?.name.clone(), host.remaining_lease(self.lease)))
    }

    /// All joined processes, by name.
    pub(crate) fn list(&self) -> Vec<JoinedWorker> {
        let state = self.lock();
        let mut list: Vec<JoinedWorker> = state
            .hosts
            .iter()
            .filter_map(|(host, known)| {
                let info = known.info.as_ref()?;
                Some(JoinedWorker {
                    name: info.name.clone(),
                    labels: info.labels.clone(),
                    agents: info.agents.iter().map(|agent| agent.name.clone()).collect(),
                    sessions: state.held_by(host).map(|placement| placement.session.clone()).collect(),
                    connected: known.control.is_some(),
                    joined_at: known.joined_at,
                    lease_expires_at: Millis::now().plus(millis(known.remaining_lease(self.lease))),
                    version: info.version.clone(),
                })
            })
            .collect();
        list.sort_by(|a, b| a.name.cmp(&b.name));
        list
    }

    /// Each assignment under the lock leaves the data whole, so a panic does too.
    fn lock(&self) -> MutexGuard<'_, JoinedWorkersState> {
        self.state.lock()
    }
}

impl JoinedWorkersState {
    /// Sends a frame to a process, if it is connected. A process that does not keep up is disconnected.
    fn send_frame(&mut self, host: &str, frame: DaemonJoinFrame) -> bool {
        let Some(host) = self.hosts.get_mut(host) else { return false };
        let sent = host.control.as_ref().is_some_and(|control| control.outbox.try_send(frame).is_ok());
        if !sent {
            host.control = None;
        }
        sent
    }

    fn held_by(&self, host: &str) -> impl Iterator<Item = &WorkerPlacement> {
        self.placements.values().filter(move |placement| placement.host.as_deref() == Some(host))
    }

    /// The connected process that offers the agent, can confine it as asked, and holds the fewest sessions.
    fn choose_host(&self, name: &RemoteAgentName, sandbox: Option<&SandboxSpec>) -> Option<String> {
        let candidates = self.hosts.iter().filter(|(_, host)| {
            let Some(info) = host.info.as_ref().filter(|_| host.control.is_some()) else { return false };
            let can_confine =
                sandbox.is_none_or(|spec| plan_sandbox(spec.asked, spec.network, &info.sandbox).is_ok());
            can_confine && info.find_agent(name).is_some_and(|agent| agent.available)
        });
        candidates.map(|(host, _)| host).min_by_key(|host| (self.held_by(host).count(), *host)).cloned()
    }

    /// Forgets a process that is disconnected and holds nothing.
    fn forget_if_unused(&mut self, host: &str) {
        let holds = self.held_by(host).next().is_some();
        if !holds && self.hosts.get(host).is_some_and(|host| host.control.is_none()) {
            self.hosts.remove(host);
        }
    }
}

impl JoinedHost {
    /// A process that a previous daemon knew. It has a full lease to come back.
    fn from_previous_daemon() -> Self {
        Self { info: None, control: None, last_heard: Instant::now(), joined_at: Millis::now() }
    }

    /// How much longer the daemon waits for this process.
    fn remaining_lease(&self, lease: Duration) -> Duration {
        if self.control.is_some() { lease } else { lease.saturating_sub(self.last_heard.elapsed()) }
    }
}

impl JoinedHostInfo {
    fn from_hello(hello: JoinHello, name: String, token: TokenId) -> Self {
        let JoinHello { labels, agents, software: version, sandbox, .. } = hello;
        Self { name, labels, agents, version, token, sandbox }
    }

    fn find_agent(&self, name: &RemoteAgentName) -> Option<&Agent> {
        self.labels.contains(&name.label).then_some(())?;
        self.agents.iter().find(|agent| agent.name == name.agent)
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

    /// Marks the worker as lost. The reason is dropped if the worker has ever dialled: then it does not explain the
    /// loss.
    fn mark_ended(&mut self, reason: Option<RunError>) {
        let reason = reason.filter(|_| !self.has_dialled);
        self.ended.get_or_insert(reason);
        self.dial_waiter = None;
        self.disconnect.cancel();
    }
}

/// Whether a text can be a label, and so stand after the `@`.
pub(crate) fn is_label(text: &str) -> bool {
    (1..=LABEL_CHARS_MAX).contains(&text.len()) && text.chars().all(is_label_char)
}

pub(super) fn is_label_char(c: char) -> bool {
    c.is_ascii_alphanumeric() || matches!(c, '_' | '.' | '-')
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests;
