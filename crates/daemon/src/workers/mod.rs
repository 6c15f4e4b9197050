//! The workers as the daemon knows them: which agents exist, how a session gets a worker, how it reattaches to the
//! one it had, and which processes descend from which worker. Interpreting a worker's updates is the actor's job.

mod agent_slots;
mod joined_workers;
mod local;
mod local_processes;
mod sandboxes;
mod session_tokens;
mod worker_tokens;

use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use hmac::{Hmac, KeyInit, Mac};
use parking_lot::{Mutex, MutexGuard};
use qd_catalog::AgentNameError;
use qd_home::{DaemonHome, HomeError, SecretToken};
use qd_keeper::{hosts_agents, procfs};
use qd_link::socket::{ByteStream, Socket, SocketError};
use qd_link::terminal_handshake::TerminalRequestError;
use qd_link::{AgentLink, LinkOptions};
use qd_protocol::api::{Agent, Worker};
use qd_protocol::event::RunError;
use qd_protocol::limits::LEASE_S;
use qd_protocol::link::UpdateNumber;
use qd_protocol::manifest::DriverKind;
use qd_protocol::sandbox_spec::SESSION_SOCKET_NAME;
use qd_protocol::worker::{AgentSpec, McpAccess, SESSION_TOKEN_VAR, Secret, TOKEN_FILE_PREFIX};
use qd_protocol::{ApiError, ErrorCode, Millis, SessionId, WorkerId};
use qd_sandbox::{PidNamespaceId, SANDBOX_COMMAND, pid_namespaces_below_ours};
use sha2::Sha256;

use crate::agents::{IdleSetting, LocalAgents};
use crate::edge::SessionSockets;
pub(crate) use agent_slots::{AgentSlotLimits, AgentSlots, SlotChanges, SlotStanding};
use joined_workers::RemoteAgentName;
pub(crate) use joined_workers::{JoinedWorkers, OFFERS_MAX, is_label};
use local::LocalHosts;
use sandboxes::Sandboxes;
pub(crate) use sandboxes::{SandboxDefaults, SandboxRequest};
pub(crate) use session_tokens::SessionTokens;
pub(crate) use worker_tokens::{JoinAddress, WorkerTokenStore};

/// How long daemon and workers wait for each other.
#[derive(Debug, Clone, Copy)]
pub(crate) struct WorkerTimeouts {
    /// How long the daemon waits for a silent worker on another machine.
    pub(crate) lease: Duration,
    /// How long the daemon tries to reach a worker that lives but does not answer.
    pub(crate) reach: Duration,
    /// How long a worker waits for a daemon while its agent is in a turn.
    pub(crate) orphan_busy: Duration,
    /// How long a worker waits for a daemon while its agent is idle.
    pub(crate) orphan_idle: Duration,
}

/// How many processes are remembered as unrelated to any agent.
const UNRELATED_MAX: usize = 4096;

#[derive(Debug)]
pub(crate) struct Workers {
    agents: LocalAgents,
    hosts: LocalHosts,
    joined: Arc<JoinedWorkers>,
    tokens: Arc<WorkerTokenStore>,
    /// The address that other machines join at, set once the daemon listens.
    join_address: OnceLock<JoinAddress>,
    session_tokens: SessionTokens,
    session_sockets: SessionSockets,
    sandboxes: Sandboxes,
    keys: WorkerKeys,
    reach_timeout: Duration,
    live: Mutex<HashMap<SessionId, LiveWorker>>,
    /// Processes that are known not to descend from an agent, by pid and start time.
    unrelated: Mutex<HashSet<(u32, u64)>>,
}

/// The worker of a session.
#[derive(Debug, Clone)]
struct LiveWorker {
    worker: WorkerId,
    agent: String,
    /// Whether it runs on another machine, whose pids mean nothing here.
    is_remote: bool,
    started_at: Millis,
    /// Known once the worker has been connected.
    pid: Option<u32>,
}

/// A session's worker as the journal has it, with the number of the last journalled update.
#[derive(Debug, Clone)]
pub(crate) struct RecordedWorker {
    pub(crate) session: SessionId,
    pub(crate) worker: WorkerId,
    pub(crate) agent: String,
    pub(crate) since: Millis,
    pub(crate) taken: UpdateNumber,
}

/// How the process behind a connection relates to our agents.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum CallerAncestry {
    /// It descends from no agent.
    Unrelated,
    /// It descends from the agent of this session.
    Agent(SessionId),
    /// It descends from an agent that we do not know, or has exited, so that it cannot be determined.
    Unknown,
}

impl Workers {
    /// The workers of a home. Local ones are this binary, executed again as `exe __worker`.
    pub(crate) fn new(
        home: &DaemonHome,
        exe: PathBuf,
        agents: LocalAgents,
        timeouts: WorkerTimeouts,
        sandbox: SandboxDefaults,
    ) -> Result<Self, HomeError> {
        let keys = WorkerKeys::of_home(home)?;
        let hosts = LocalHosts::new(home, exe, keys.clone(), timeouts);
        let tokens = Arc::new(WorkerTokenStore::open(home, keys.clone())?);
        let joined =
            Arc::new(JoinedWorkers::new(home.workers(), keys.clone(), Arc::clone(&tokens), timeouts.lease));
        Ok(Self {
            agents,
            hosts,
            joined,
            tokens,
            join_address: OnceLock::new(),
            session_tokens: SessionTokens::of(home),
            session_sockets: SessionSockets::default(),
            sandboxes: Sandboxes::new(home, sandbox),
            keys,
            reach_timeout: timeouts.reach,
            live: Mutex::default(),
            unrelated: Mutex::default(),
        })
    }

    /// The workers that have joined from other machines.
    pub(crate) fn joined(&self) -> &Arc<JoinedWorkers> {
        &self.joined
    }

    /// The tokens that workers on other machines join with.
    pub(crate) fn worker_tokens(&self) -> &Arc<WorkerTokenStore> {
        &self.tokens
    }

    /// The address that other machines join at; `None` if the daemon listens on unix sockets only.
    pub(crate) fn join_address(&self) -> Option<&JoinAddress> {
        self.join_address.get()
    }

    /// Sets the join address, once.
    pub(crate) fn set_join_address(&self, address: JoinAddress) {
        // There is only one call, so nothing is overwritten.
        let _second = self.join_address.set(address);
    }

    pub(crate) fn agents(&self) -> &LocalAgents {
        &self.agents
    }

    /// The agent with this name: an agent of this machine, or `NAME@LABEL` of a joined worker.
    pub(crate) fn agent(&self, name: &str, project: &Path) -> Result<Agent, ApiError> {
        let Some(remote) = self.remote_agent(name) else {
            return self.agents.find(name, Some(project)).ok_or_else(|| self.unknown_agent(name, project));
        };
        self.joined.find_agent(&remote).ok_or_else(|| {
            let RemoteAgentName { agent, label } = remote;
            let how = format!("qd worker join URL --token TOKEN --label {label}");
            let message = format!(
                "no joined worker with the label `{label}` offers {agent}; run `{how}` on the machine that \
                     should run it, with the token that `qd workers token` prints here"
            );
            ApiError::new(ErrorCode::AgentUnavailable, message).with_detail("install", how)
        })
    }

    fn unknown_agent(&self, name: &str, project: &Path) -> ApiError {
        let message = match qd_catalog::manifest_from_name_in(name, project) {
            Err(error) if error != AgentNameError::Plain => {
                format!("`{name}` does not describe an agent: {error}")
            }
            _ => {
                let list = self.agents.list(Some(project));
                let names: Vec<&str> = list.iter().map(|agent| agent.name.as_str()).collect();
                let problems = self.agents.manifest_problems(Some(project));
                let problems = problems
                    .iter()
                    .map(|problem| format!("; {}: {}", problem.path.display(), problem.message));
                format!(
                    "unknown agent {name}; known agents: {}{}",
                    names.join(", "),
                    problems.collect::<String>()
                )
            }
        };
        ApiError::new(ErrorCode::UnknownAgent, message)
    }

    /// Whether the agent with this name runs on this machine.
    pub(crate) fn is_local(&self, name: &str) -> bool {
        self.remote_agent(name).is_none()
    }

    /// Parses `NAME@LABEL`. A command given as the agent's name may contain an `@` of its own.
    fn remote_agent(&self, name: &str) -> Option<RemoteAgentName> {
        RemoteAgentName::parse(name).filter(|_| !qd_catalog::is_self_describing(name))
    }

    /// The patterns of the variables that decide which login an agent uses. An agent on another machine is taken for the
    /// one that has its name here.
    pub(crate) fn login_variables(&self, name: &str, project: &Path) -> Vec<String> {
        match self.remote_agent(name) {
            None => self.agents.login_variables(name, project),
            Some(remote) => self.agents.login_variables(&remote.agent, project),
        }
    }

    /// How long an idle agent is kept before it is stopped; `None` if it never is, because its conversation could not
    /// be resumed.
    pub(crate) fn idle_timeout(&self, name: &str, project: &Path, setting: IdleSetting) -> Option<Duration> {
        match self.remote_agent(name) {
            None => self.agents.idle_timeout(name, project, setting),
            // Less is known of agents on other machines. An agent that runs one command per prompt has nothing to
            // resume.
            Some(remote) => match self.joined.find_agent(&remote) {
                Some(agent) if !agent.resumes && agent.driver != DriverKind::Exec.name() => None,
                _ => Some(setting.timeout),
            },
        }
    }

    /// Launches a new worker for a session, which starts its agent at once.
    pub(crate) async fn launch(
        &self,
        spec: AgentSpec,
        tools: bool,
        since: Millis,
    ) -> Result<AgentLink, RunError> {
        let attachment = RecordedWorker {
            session: spec.session.clone(),
            worker: spec.worker.clone(),
            agent: spec.agent.clone(),
            since,
            taken: spec.after,
        };
        self.remember(&attachment);
        let remote = self.remote_agent(&spec.agent);
        let (spec, options) = (*self.complete_spec(spec, tools), self.link_options(&attachment));
        match remote {
            Some(remote) => Ok(self.joined.launch(spec, remote, options)),
            None => {
                let link = self.hosts.launch(spec, options).await;
                link.inspect_err(|_| self.forget(&attachment.session))
            }
        }
    }

    /// Opens a link to the worker that a session already has, wherever it is.
    pub(crate) fn attach(&self, attachment: RecordedWorker) -> AgentLink {
        self.remember(&attachment);
        match self.remote_agent(&attachment.agent) {
            Some(remote) => self.joined.attach(&attachment, remote, self.link_options(&attachment)),
            None => {
                self.reopen_session_socket(&attachment.session);
                self.hosts.attach(&attachment, self.link_options(&attachment))
            }
        }
    }

    /// Completes the spec that an agent is started with: mark, prices, silence, limits, manifest, the session's socket, and
    /// the tools of `qd mcp` if `tools` is set and the agent can take them.
    pub(crate) fn complete_spec(&self, mut spec: AgentSpec, tools: bool) -> Box<AgentSpec> {
        spec.mark = self.keys.mark(&spec.worker);
        spec.prices = self.agents.prices().clone();
        spec.silence = self.agents.silence();
        spec.limits = Some(Box::new(self.agents.limits()));
        let is_local = self.is_local(&spec.agent);
        match self.remote_agent(&spec.agent) {
            // The other machine decides how its agent is started.
            Some(RemoteAgentName { agent, .. }) => spec.agent = agent,
            // An agent that works in a worktree already has the manifest of its project.
            None if spec.manifest.is_some() => {}
            None => spec.manifest = self.agents.launch_manifest(&spec.agent, &spec.cwd, None).map(Box::new),
        }
        if is_local {
            self.prepare_tools(&mut spec, tools);
        }
        Box::new(spec)
    }

    /// The mark in the environment of a worker's processes, by which a later daemon finds and ends them.
    pub(crate) fn mark(&self, worker: &WorkerId) -> String {
        self.keys.mark(worker)
    }

    /// Gives the agent of this machine a socket of its session's own, and the tools if it gets them. A failure is not
    /// fatal: the agent starts without them.
    fn prepare_tools(&self, spec: &mut AgentSpec, tools: bool) {
        let Some(manifest) = spec.manifest.as_ref() else { return };
        // Nothing of these agents runs in processes of their own.
        if matches!(manifest.driver(), DriverKind::Echo | DriverKind::A2a | DriverKind::Worker) {
            return;
        }
        let tools = tools && manifest.capabilities.mcp;
        let prepared = self.open_session_socket(&spec.session).and_then(|host| match tools {
            true => self.mcp_access(&spec.session, host).map(Some),
            false => Ok(None),
        });
        match prepared {
            Ok(None) => {}
            Ok(Some(access)) => {
                // The path alone: whoever sees an environment must not be able to speak for its session.
                let token = format!("{TOKEN_FILE_PREFIX}{}", access.token_file.display());
                spec.env.insert(SESSION_TOKEN_VAR.to_owned(), token);
                spec.mcp = Some(Box::new(access));
            }
            Err(error) => {
                tracing::warn!(session = %spec.session, %error, "an agent starts without the tools of `qd mcp`");
            }
        }
    }

    fn mcp_access(&self, session: &SessionId, host: String) -> Result<McpAccess, HomeError> {
        let token = Secret(self.session_tokens.token(session)?);
        Ok(McpAccess { host, token_file: self.session_tokens.token_file(session), token })
    }

    /// Opens the socket of a session, and returns its address.
    fn open_session_socket(&self, session: &SessionId) -> Result<String, HomeError> {
        let directory = self.session_tokens.prepare_directory(session)?;
        let opened = self.session_sockets.open(session, &directory);
        let path = directory.join(SESSION_SOCKET_NAME);
        let address = format!("unix:{}", path.display());
        opened.map(|()| address).map_err(|source| HomeError::Io { action: "listen on", path, source })
    }

    /// Opens the socket of a session whose agent was started by an earlier daemon, if it was given one.
    fn reopen_session_socket(&self, session: &SessionId) {
        if self.session_tokens.has_directory(session)
            && let Err(error) = self.open_session_socket(session)
        {
            tracing::warn!(%session, %error, "the agent of a session cannot reach its tools any more");
        }
    }

    /// The sockets of sessions, for the edge to serve.
    pub(crate) fn session_sockets(&self) -> &SessionSockets {
        &self.session_sockets
    }

    /// Makes the token of a session's lost agent worthless: nobody knows whether all of its processes are gone. The
    /// next agent gets a new token.
    pub(crate) fn revoke_session_token(&self, session: &SessionId) {
        if let Err(error) = self.session_tokens.revoke(session) {
            tracing::warn!(%session, %error, "could not revoke the token of a lost agent");
        }
    }

    /// The tokens with which agents act for their sessions.
    pub(crate) fn session_tokens(&self) -> &SessionTokens {
        &self.session_tokens
    }

    /// Records the pid of a session's worker, once it has connected.
    pub(crate) fn set_pid(&self, session: &SessionId, pid: u32) {
        if let Some(live) = self.lock().get_mut(session) {
            live.pid = Some(pid);
        }
    }

    /// Forgets the worker of a session, which is gone, and removes its files.
    pub(crate) fn forget(&self, session: &SessionId) {
        let gone = self.lock().remove(session);
        self.session_sockets.close(session);
        if let Some(live) = gone {
            self.hosts.remove_files(&live.worker);
            self.joined.forget(&live.worker);
        }
    }

    /// Kills the process of a session's worker. A remote worker is told to close, and counts as lost from now on.
    pub(crate) fn kill(&self, session: &SessionId) {
        let live = self.lock().get(session).cloned();
        match live {
            Some(live) if live.is_remote => self.joined.abandon(&live.worker),
            Some(live) => self.hosts.kill(&live.worker),
            None => {}
        }
    }

    /// Lets the session's worker continue, in case somebody stopped it. Does nothing on other machines.
    pub(crate) fn resume(&self, session: &SessionId) {
        let live = self.lock().get(session).cloned();
        if let Some(live) = live.filter(|live| !live.is_remote) {
            self.hosts.resume(&live.worker);
        }
    }

    /// Ends the processes that several agents shared. Call it once no agent is left.
    pub(crate) fn end_shared(&self) {
        self.hosts.end_shared();
    }

    /// Ends workers of this machine that belong to no session; see [`LocalHosts::end_strays`]. `with_obligations` are
    /// the sessions that may have a worker according to the journal: theirs are kept even if the session could not be
    /// loaded.
    pub(crate) async fn end_strays(&self, with_obligations: &HashSet<SessionId>) {
        let is_stray = |worker: &WorkerId| {
            let Some(session) = worker.session() else { return true };
            match self.lock().get(&session) {
                Some(live) => live.worker != *worker,
                None => !with_obligations.contains(&session),
            }
        };
        self.joined.forget_strays(is_stray);
        self.hosts.end_strays(is_stray).await;
    }

    /// Connects to the terminal of a session's agent, for one viewer.
    pub(crate) async fn connect_terminal(
        &self,
        session: &SessionId,
    ) -> Result<Socket<Box<dyn ByteStream>>, ApiError> {
        let none = |why: &str| {
            let message = format!("session {session} has no terminal to show: {why}");
            Err(ApiError::new(ErrorCode::NoTerminal, message))
        };
        let live = self.lock().get(session).cloned();
        let connection = match live {
            None => return none("its agent does not run; a prompt starts it"),
            Some(live) if live.is_remote => return none("its agent is on another machine"),
            Some(live) => self.hosts.connect_terminal(session, &live.worker).await,
        };
        match connection {
            Ok(socket) => Ok(socket),
            Err(TerminalRequestError::Refused { message, .. }) => none(&message),
            Err(TerminalRequestError::Socket(SocketError::Refused { status: 400, .. })) => {
                none("its worker is an earlier version of qd")
            }
            Err(error) => none(&format!("could not connect to its worker: {error}")),
        }
    }

    /// The connected workers, oldest first, each with the processes below it.
    pub(crate) fn list(&self) -> Vec<Worker> {
        let local_lease = Duration::from_secs(LEASE_S);
        let mut list: Vec<Worker> = self
            .lock()
            .iter()
            .filter_map(|(session, live)| {
                let holder = self.joined.holder(&live.worker).filter(|_| live.is_remote);
                let (host, lease) = holder.map_or((None, local_lease), |(name, lease)| (Some(name), lease));
                Some(Worker {
                    id: live.worker.to_string(),
                    session_id: session.clone(),
                    pid: live.pid?,
                    started_at: live.started_at,
                    lease_expires_at: Millis::now()
                        .plus(u64::try_from(lease.as_millis()).unwrap_or(u64::MAX)),
                    agent: live.agent.clone(),
                    host,
                    processes: live.pid.filter(|_| !live.is_remote).map(processes_below).unwrap_or_default(),
                })
            })
            .collect();
        list.sort_by(|a, b| (a.started_at, &a.id).cmp(&(b.started_at, &b.id)));
        list
    }

    pub(crate) fn count(&self) -> usize {
        self.lock().len()
    }

    /// Whether a process, given by pid and start time, descends from an agent. For a process that has exited the
    /// answer is `Unknown`: it may have been an agent's, and `Unknown` gives the fewest rights.
    pub(crate) fn caller_ancestry(&self, pid: u32, start: u64) -> CallerAncestry {
        if procfs::start_ticks(pid) != Some(start) {
            return CallerAncestry::Unknown;
        }
        let mut known = self.unrelated.lock();
        if known.contains(&(pid, start)) {
            return CallerAncestry::Unrelated;
        }
        let ancestry = self.trace_ancestry(pid);
        // An unrelated process stays unrelated, because an agent adopts no processes. The pid must still be the same
        // process.
        if ancestry == CallerAncestry::Unrelated && procfs::start_ticks(pid) == Some(start) {
            if known.len() >= UNRELATED_MAX {
                known.clear();
            }
            known.insert((pid, start));
        }
        ancestry
    }

    fn trace_ancestry(&self, pid: u32) -> CallerAncestry {
        if let Some(session) = self.session_of_sandbox(pid) {
            return CallerAncestry::Agent(session);
        }
        let ancestors: Vec<Option<u32>> = procfs::ancestry(pid).collect();
        // Descent counts before marks: a process can put any mark into its environment that it has read somewhere.
        let descends_from =
            |live: &LiveWorker| !live.is_remote && live.pid != Some(pid) && ancestors.contains(&live.pid);
        if let Some(session) = self.session_of(|live| live.pid.is_some() && descends_from(live)) {
            return CallerAncestry::Agent(session);
        }
        let mut ancestry = CallerAncestry::Unrelated;
        for ancestor in ancestors {
            let Some(ancestor) = ancestor else { return CallerAncestry::Unknown };
            if let Some(mark) = procfs::mark_of(ancestor) {
                if let Some(worker) = self.keys.worker_of_mark(&mark) {
                    return self
                        .session_of(|live| live.worker == worker)
                        .map_or(CallerAncestry::Unknown, CallerAncestry::Agent);
                }
                // An agent of another home, or one of ours that was started before the key was replaced.
                ancestry = CallerAncestry::Unknown;
            }
            // The ancestor may be a worker that has not connected yet, or the keeper of a dead worker.
            if hosts_agents(ancestor) {
                ancestry = CallerAncestry::Unknown;
            }
        }
        ancestry
    }

    /// The session in whose sandbox a process is, by its PID namespace or one around that. No process can leave the
    /// namespace that it was started in, so neither a lost parent nor an empty environment hides where it belongs.
    fn session_of_sandbox(&self, pid: u32) -> Option<SessionId> {
        let sandbox = *pid_namespaces_below_ours(pid).ok()?.last()?;
        let holds_sandbox = |worker: u32| {
            let mut started = procfs::children(worker).into_iter().flat_map(procfs::children);
            started.any(|process| {
                procfs::is_started_as(process, SANDBOX_COMMAND)
                    && PidNamespaceId::of_process(process).is_ok_and(|id| id == sandbox)
            })
        };
        self.session_of(|live| !live.is_remote && live.pid.is_some_and(holds_sandbox))
    }

    fn session_of(&self, which: impl Fn(&LiveWorker) -> bool) -> Option<SessionId> {
        self.lock().iter().find(|(_, live)| which(live)).map(|(session, _)| session.clone())
    }

    fn remember(&self, attachment: &RecordedWorker) {
        let live = LiveWorker {
            worker: attachment.worker.clone(),
            agent: attachment.agent.clone(),
            is_remote: self.remote_agent(&attachment.agent).is_some(),
            started_at: attachment.since,
            pid: None,
        };
        self.lock().insert(attachment.session.clone(), live);
    }

    fn link_options(&self, attachment: &RecordedWorker) -> LinkOptions {
        LinkOptions {
            session: attachment.session.clone(),
            worker: attachment.worker.clone(),
            secret: Secret::default(),
            journalled: attachment.taken,
            reach_timeout: self.reach_timeout,
            software: env!("CARGO_PKG_VERSION").to_owned(),
            start: None,
        }
    }

    /// Every change under the lock is one assignment, so a panic leaves the map whole.
    fn lock(&self) -> MutexGuard<'_, HashMap<SessionId, LiveWorker>> {
        self.live.lock()
    }
}

/// The file that names the process which holds a worker, if the worker has no process of its own.
fn host_file(dir: &Path, worker: &WorkerId) -> PathBuf {
    dir.join(format!("{worker}.at"))
}

/// The processes below a worker, without its keepers and the first processes of their sandboxes.
fn processes_below(worker: u32) -> Vec<qd_protocol::api::ProcessSummary> {
    let all = procfs::descendants(worker).into_iter().filter(|process| {
        !["__keeper", SANDBOX_COMMAND].iter().any(|part| procfs::is_started_as(process.pid, part))
    });
    all.map(|process| qd_protocol::api::ProcessSummary { pid: process.pid, name: process.name }).collect()
}

/// The key that secrets are derived from. Derived secrets are not stored, so none can be lost or left over.
#[derive(Debug, Clone)]
pub(crate) struct WorkerKeys(SecretToken);

impl WorkerKeys {
    pub(crate) fn of_home(home: &DaemonHome) -> Result<Self, HomeError> {
        Ok(Self(home.worker_key()?))
    }

    /// The secret with which a host process and this home authenticate to each other.
    fn secret(&self, host: &str) -> Secret {
        Secret(self.derive("secret", host))
    }

    /// The mark in the environment of everything a worker's agent starts. It names the worker, and only this home can
    /// make it.
    fn mark(&self, worker: &WorkerId) -> String {
        format!("{worker}.{}", self.derive("mark", worker.as_str()))
    }

    /// The worker that a mark names, if the mark is one of ours.
    fn worker_of_mark(&self, mark: &str) -> Option<WorkerId> {
        let worker = WorkerId::parse(mark.rsplit_once('.')?.0).ok()?;
        (self.mark(&worker) == mark).then_some(worker)
    }

    /// A secret for a purpose, from which no other one follows.
    pub(crate) fn derive(&self, purpose: &str, name: &str) -> String {
        let mut mac = Hmac::<Sha256>::new_from_slice(self.0.expose().as_bytes())
            .expect("HMAC takes a key of any length");
        mac.update(purpose.as_bytes());
        mac.update(b":");
        mac.update(name.as_bytes());
        hex::encode(mac.finalize().into_bytes())
    }
}
