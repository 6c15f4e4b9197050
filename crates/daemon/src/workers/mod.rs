//! The workers, as the daemon knows them: which agents there are, how a session gets one, how it finds the one it had,
//! and who lives below which. What a session makes of its worker's words is the actor's business.

mod agent_slots;
mod joined_workers;
mod local;
mod session_tokens;
mod worker_tokens;

use std::collections::{HashMap, HashSet};
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use hmac::{Hmac, KeyInit, Mac};
use qd_catalog::AgentNameError;
use qd_keeper::procfs;
use qd_link::socket::{ByteStream, Socket, SocketError};
use qd_link::terminal_handshake::TerminalRequestError;
use qd_link::{AgentLink, LinkOptions};
use qd_protocol::api::{Agent, Worker};
use qd_protocol::event::RunError;
use qd_protocol::limits::LEASE_S;
use qd_protocol::link::UpdateNumber;
use qd_protocol::manifest::DriverKind;
use qd_protocol::worker::{AgentSpec, McpAccess, SESSION_TOKEN_VAR, Secret};
use qd_protocol::{ApiError, ErrorCode, Millis, SessionId, WorkerId};
use sha2::Sha256;

use crate::agents::LocalAgents;
use crate::home::{DaemonHome, HomeError, SecretToken};
pub(crate) use agent_slots::{AgentSlots, SlotChanges, SlotUse};
pub(crate) use joined_workers::JoinedWorkers;
use joined_workers::RemoteAgentName;
use local::LocalHosts;
pub(crate) use session_tokens::SessionTokens;
pub(crate) use worker_tokens::{JoinAddress, WorkerTokenStore};

/// How long who waits for whom.
#[derive(Debug, Clone, Copy)]
pub(crate) struct WorkerTimeouts {
    /// The daemon for a worker on another machine that is silent.
    pub(crate) lease: Duration,
    /// A worker for a daemon, with an agent in mid-turn.
    pub(crate) orphan_busy: Duration,
    /// A worker for a daemon, with an agent that has no turn.
    pub(crate) orphan_idle: Duration,
}

/// How many processes are remembered as strangers.
const UNRELATED_MAX: usize = 4096;

/// All workers of this daemon.
#[derive(Debug)]
pub(crate) struct Workers {
    agents: LocalAgents,
    hosts: LocalHosts,
    joined: Arc<JoinedWorkers>,
    tokens: Arc<WorkerTokenStore>,
    /// Where others join, once it is known.
    join_address: OnceLock<JoinAddress>,
    /// Where agents of this machine find us, once it is known.
    daemon_address: OnceLock<String>,
    session_tokens: SessionTokens,
    keys: WorkerKeys,
    live: Mutex<HashMap<SessionId, LiveWorker>>,
    /// Processes that are known not to descend from an agent, by pid and start.
    unrelated: Mutex<HashSet<(u32, u64)>>,
}

/// A worker that a session has.
#[derive(Debug, Clone)]
struct LiveWorker {
    worker: WorkerId,
    agent: String,
    /// Whether it is on another machine, whose pids mean nothing here.
    is_remote: bool,
    started_at: Millis,
    /// Known once it has been talked to.
    pid: Option<u32>,
}

/// Which worker a session has, and how far it was heard.
#[derive(Debug, Clone)]
pub(crate) struct WorkerAttachment {
    pub(crate) session: SessionId,
    pub(crate) worker: WorkerId,
    pub(crate) agent: String,
    pub(crate) since: Millis,
    pub(crate) taken: UpdateNumber,
}

/// Who a process on our socket is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum CallerAncestry {
    /// Nobody of ours.
    Unrelated,
    /// It descends from the agent of this session.
    Agent(SessionId),
    /// It descends from an agent that we do not know, or it is gone and nobody can tell.
    Unknown,
}

impl Workers {
    /// Those of a home, which are this binary executed again as `exe __worker`.
    pub(crate) fn new(
        home: &DaemonHome,
        exe: PathBuf,
        agents: LocalAgents,
        waits: WorkerTimeouts,
    ) -> Result<Self, HomeError> {
        let keys = WorkerKeys(home.worker_key()?);
        let hosts = LocalHosts::new(home, exe, keys.clone(), waits);
        let tokens = Arc::new(WorkerTokenStore::open(home, keys.clone())?);
        let joined =
            Arc::new(JoinedWorkers::new(home.workers(), keys.clone(), Arc::clone(&tokens), waits.lease));
        let door = OnceLock::new();
        Ok(Self {
            agents,
            hosts,
            joined,
            tokens,
            join_address: door,
            daemon_address: OnceLock::new(),
            session_tokens: SessionTokens::of(home),
            keys,
            live: Mutex::default(),
            unrelated: Mutex::default(),
        })
    }

    /// Those that have joined from other machines.
    pub(crate) fn joined(&self) -> &Arc<JoinedWorkers> {
        &self.joined
    }

    /// What they join with.
    pub(crate) fn worker_tokens(&self) -> &Arc<WorkerTokenStore> {
        &self.tokens
    }

    /// Where they join; none if nothing but sockets is listened on.
    pub(crate) fn join_address(&self) -> Option<&JoinAddress> {
        self.join_address.get()
    }

    /// Says where they join, once.
    pub(crate) fn set_join_address(&self, door: JoinAddress) {
        // Only the first counts, and there is only one.
        let _second = self.join_address.set(door);
    }

    /// The agents of this machine.
    pub(crate) fn agents(&self) -> &LocalAgents {
        &self.agents
    }

    /// The agent that a session of a project is to have: one of this machine, or `NAME@LABEL` of one that has joined.
    pub(crate) fn agent(&self, name: &str, project: &Path) -> Result<Agent, ApiError> {
        let Some(wanted) = self.remote_agent(name) else {
            return self.agents.find(name, Some(project)).ok_or_else(|| self.unknown_agent(name, project));
        };
        self.joined.find_agent(&wanted).ok_or_else(|| {
            let RemoteAgentName { agent, label } = wanted;
            let how = format!("qd worker join URL --token TOKEN --label {label}");
            let message = format!(
                "no worker with the label `{label}` that offers {agent} has joined; on the machine that is to have it \
                 run `{how}`, with what `qd workers token` prints here"
            );
            ApiError::new(ErrorCode::AgentUnavailable, message).with_detail("install", how)
        })
    }

    fn unknown_agent(&self, name: &str, project: &Path) -> ApiError {
        let message = match qd_catalog::manifest_from_name_in(name, project) {
            Err(error) if error != AgentNameError::Plain => format!("{name} describes no agent: {error}"),
            _ => {
                let list = self.agents.list(Some(project));
                let names: Vec<&str> = list.iter().map(|agent| agent.name.as_str()).collect();
                let problems = self.agents.manifest_problems(Some(project));
                let problems = problems
                    .iter()
                    .map(|problem| format!("; {}: {}", problem.path.display(), problem.message));
                format!(
                    "there is no agent {name}; known are: {}{}",
                    names.join(", "),
                    problems.collect::<String>()
                )
            }
        };
        ApiError::new(ErrorCode::UnknownAgent, message)
    }

    /// Whether an agent of this name lives on this machine.
    pub(crate) fn is_local(&self, name: &str) -> bool {
        self.remote_agent(name).is_none()
    }

    /// What an agent's name says of another machine. A command may have an `@` of its own.
    fn remote_agent(&self, name: &str) -> Option<RemoteAgentName> {
        RemoteAgentName::parse(name).filter(|_| !qd_catalog::is_self_describing(name))
    }

    /// After how long an idle agent of a session is put to rest; `None` if it never is, because nobody could go on with
    /// its conversation.
    pub(crate) fn idle_timeout(&self, name: &str, project: &Path, usual: Duration) -> Option<Duration> {
        match self.remote_agent(name) {
            None => self.agents.idle_timeout(name, project, usual),
            // What is told of agents elsewhere is less. A command for each prompt has nothing to remember.
            Some(wanted) => match self.joined.find_agent(&wanted) {
                Some(agent) if !agent.resumes && agent.driver != DriverKind::Exec.name() => None,
                _ => Some(usual),
            },
        }
    }

    /// A new worker for a session, which has it since then. It starts its agent at once.
    pub(crate) async fn launch(
        &self,
        spec: AgentSpec,
        tools: bool,
        since: Millis,
    ) -> Result<AgentLink, RunError> {
        let had = WorkerAttachment {
            session: spec.session.clone(),
            worker: spec.worker.clone(),
            agent: spec.agent.clone(),
            since,
            taken: spec.after,
        };
        self.remember(&had);
        let wanted = self.remote_agent(&spec.agent);
        let (spec, options) = (*self.complete_spec(spec, tools), self.link_options(&had));
        match wanted {
            Some(wanted) => Ok(self.joined.launch(spec, wanted, options)),
            None => {
                let opened = self.hosts.launch(spec, options).await;
                opened.inspect_err(|_| self.forget(&had.session))
            }
        }
    }

    /// The link to the worker that a session had, wherever it is by now.
    pub(crate) fn attach(&self, had: WorkerAttachment) -> AgentLink {
        self.remember(&had);
        match self.remote_agent(&had.agent) {
            Some(wanted) => self.joined.attach(&had, wanted, self.link_options(&had)),
            None => self.hosts.attach(&had, self.link_options(&had)),
        }
    }

    /// What an agent is started with again in the worker that its session has; with the tools of `qd mcp`, if it may
    /// have them and can take them.
    pub(crate) fn complete_spec(&self, mut spec: AgentSpec, tools: bool) -> Box<AgentSpec> {
        spec.mark = self.keys.mark(&spec.worker);
        spec.prices = self.agents.prices().clone();
        match self.remote_agent(&spec.agent) {
            // How it is started there is not ours to say.
            Some(RemoteAgentName { agent, .. }) => spec.agent = agent,
            // One that works beside its project was found there.
            None if spec.manifest.is_some() => {}
            None => spec.manifest = self.agents.launch_manifest(&spec.agent, &spec.cwd).map(Box::new),
        }
        if tools && spec.manifest.as_ref().is_some_and(|manifest| manifest.capabilities.mcp) {
            self.add_mcp_tools(&mut spec);
        }
        Box::new(spec)
    }

    /// What the processes of a worker bear, by which whoever comes after us finds and ends them.
    pub(crate) fn mark(&self, worker: &WorkerId) -> String {
        self.keys.mark(worker)
    }

    /// An agent without them is better than none.
    fn add_mcp_tools(&self, spec: &mut AgentSpec) {
        let Some(host) = self.daemon_address.get() else { return };
        match self.session_tokens.token(&spec.session) {
            Ok(token) => {
                spec.env.insert(SESSION_TOKEN_VAR.to_owned(), token);
                let token_file = self.session_tokens.token_file(&spec.session);
                spec.tools = Some(Box::new(McpAccess { host: host.clone(), token_file }));
            }
            Err(error) => {
                tracing::warn!(session = %spec.session, %error, "an agent is not given the tools of `qd mcp`");
            }
        }
    }

    /// What sessions prove themselves with.
    pub(crate) fn session_tokens(&self) -> &SessionTokens {
        &self.session_tokens
    }

    /// Says where we are to be found from this machine, once.
    pub(crate) fn set_daemon_address(&self, host: String) {
        // Only the first counts, and there is only one.
        let _second = self.daemon_address.set(host);
    }

    /// A session's worker was talked to.
    pub(crate) fn set_pid(&self, session: &SessionId, pid: u32) {
        if let Some(live) = self.lock().get_mut(session) {
            live.pid = Some(pid);
        }
    }

    /// A session has no worker any more.
    pub(crate) fn forget(&self, session: &SessionId) {
        let gone = self.lock().remove(session);
        if let Some(live) = gone {
            self.hosts.remove_files(&live.worker);
            self.joined.forget(&live.worker);
        }
    }

    /// Ends the process of a session's worker, which does not do it itself.
    pub(crate) fn kill(&self, session: &SessionId) {
        let live = self.lock().get(session).cloned();
        match live {
            Some(live) if live.is_remote => self.joined.abandon(&live.worker),
            Some(live) => self.hosts.kill(&live.worker),
            None => {}
        }
    }

    /// Ends the processes that agents shared; there are none any more.
    pub(crate) fn end_shared(&self) {
        self.hosts.end_shared();
    }

    /// Ends what runs on this machine for no session: see [`Hosts::end_strays`]. A session that has a worker, as the
    /// journal says, keeps it also if it could not be read.
    pub(crate) async fn end_strays(&self, owing: &HashSet<SessionId>) {
        let is_stray = |worker: &WorkerId| {
            let Some(session) = worker.session() else { return true };
            match self.lock().get(&session) {
                Some(live) => live.worker != *worker,
                None => !owing.contains(&session),
            }
        };
        self.joined.forget_strays(is_stray);
        self.hosts.end_strays(is_stray).await;
    }

    /// A connection to the terminal of a session's agent, for one person.
    pub(crate) async fn connect_terminal(
        &self,
        session: &SessionId,
    ) -> Result<Socket<Box<dyn ByteStream>>, ApiError> {
        let none = |why: &str| {
            let message = format!("there is no terminal of {session} to look at: {why}");
            Err(ApiError::new(ErrorCode::NoTerminal, message))
        };
        let live = self.lock().get(session).cloned();
        let looked = match live {
            None => return none("its agent does not run; a prompt starts it"),
            Some(live) if live.is_remote => return none("its agent is on another machine"),
            Some(live) => self.hosts.connect_terminal(session, &live.worker).await,
        };
        match looked {
            Ok(socket) => Ok(socket),
            Err(TerminalRequestError::Refused { message, .. }) => none(&message),
            Err(TerminalRequestError::Socket(SocketError::Refused { status: 400, .. })) => {
                none("its worker is of an earlier version")
            }
            Err(error) => none(&format!("its worker cannot be asked for it: {error}")),
        }
    }

    /// The live ones, oldest first, with what their turns left running.
    pub(crate) fn list(&self) -> Vec<Worker> {
        let local = Duration::from_secs(LEASE_S);
        let mut list: Vec<Worker> = self
            .lock()
            .iter()
            .filter_map(|(session, live)| {
                let holder = self.joined.holder(&live.worker).filter(|_| live.is_remote);
                let (host, lease) = holder.map_or((None, local), |(name, lease)| (Some(name), lease));
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

    /// How many agents live.
    pub(crate) fn count(&self) -> usize {
        self.lock().len()
    }

    /// Whether a process, by its pid and start, descends from an agent. A process that has ended meanwhile may have been
    /// one's: nobody can tell any more, and whoever needs no rights loses nothing by that.
    pub(crate) fn caller_ancestry(&self, pid: u32, start: u64) -> CallerAncestry {
        if procfs::start_ticks(pid) != Some(start) {
            return CallerAncestry::Unknown;
        }
        let mut known = self.unrelated.lock().unwrap_or_else(PoisonError::into_inner);
        if known.contains(&(pid, start)) {
            return CallerAncestry::Unrelated;
        }
        let kin = self.trace_ancestry(pid);
        // Who is a stranger stays one: nothing is ever adopted by an agent. It must be the same process still.
        if kin == CallerAncestry::Unrelated && procfs::start_ticks(pid) == Some(start) {
            if known.len() >= UNRELATED_MAX {
                known.clear();
            }
            known.insert((pid, start));
        }
        kin
    }

    fn trace_ancestry(&self, pid: u32) -> CallerAncestry {
        let mut kin = CallerAncestry::Unrelated;
        for ancestor in procfs::ancestry(pid) {
            let Some(ancestor) = ancestor else { return CallerAncestry::Unknown };
            let found =
                self.session_of(|live| live.pid == Some(ancestor) && !live.is_remote && ancestor != pid);
            if let Some(session) = found {
                return CallerAncestry::Agent(session);
            }
            if let Some(worker) = procfs::mark_of(ancestor).and_then(|mark| self.keys.worker_of_mark(&mark)) {
                return self
                    .session_of(|live| live.worker == worker)
                    .map_or(CallerAncestry::Unknown, CallerAncestry::Agent);
            }
            // Of a worker that was not talked to yet, or is dead and its keeper is not.
            if ["__keeper", "__worker"].iter().any(|part| procfs::is_started_as(ancestor, part)) {
                kin = CallerAncestry::Unknown;
            }
        }
        kin
    }

    fn session_of(&self, which: impl Fn(&LiveWorker) -> bool) -> Option<SessionId> {
        self.lock().iter().find(|(_, live)| which(live)).map(|(session, _)| session.clone())
    }

    fn remember(&self, had: &WorkerAttachment) {
        let live = LiveWorker {
            worker: had.worker.clone(),
            agent: had.agent.clone(),
            is_remote: self.remote_agent(&had.agent).is_some(),
            started_at: had.since,
            pid: None,
        };
        self.lock().insert(had.session.clone(), live);
    }

    fn link_options(&self, had: &WorkerAttachment) -> LinkOptions {
        LinkOptions {
            session: had.session.clone(),
            worker: had.worker.clone(),
            secret: Secret::default(),
            journalled: had.taken,
            software: env!("CARGO_PKG_VERSION").to_owned(),
            start: None,
        }
    }

    /// Every change under the lock is one assignment: a panic elsewhere leaves it whole.
    fn lock(&self) -> MutexGuard<'_, HashMap<SessionId, LiveWorker>> {
        self.live.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Where it is written which process holds a worker that has none of its own.
fn holder_file(dir: &Path, worker: &WorkerId) -> PathBuf {
    dir.join(format!("{worker}.at"))
}

/// What runs below a worker, without the keeper that it has for it.
fn processes_below(worker: u32) -> Vec<qd_protocol::api::ProcessSummary> {
    let all = procfs::descendants(worker)
        .into_iter()
        .filter(|process| !procfs::is_started_as(process.pid, "__keeper"));
    all.map(|process| qd_protocol::api::ProcessSummary { pid: process.pid, name: process.name }).collect()
}

/// What secrets are made of. They are derived and not kept, so that none can be lost or left over.
#[derive(Debug, Clone)]
struct WorkerKeys(SecretToken);

impl WorkerKeys {
    /// What a host process and this home prove themselves to each other with.
    fn secret(&self, host: &str) -> Secret {
        Secret(self.derive("secret", host))
    }

    /// The word in the environment of all that a worker's agent starts. It names the worker, and only we can have
    /// made it.
    fn mark(&self, worker: &WorkerId) -> String {
        format!("{worker}.{}", self.derive("mark", worker.as_str()))
    }

    /// The worker whose mark this is, if it is one of ours.
    fn worker_of_mark(&self, mark: &str) -> Option<WorkerId> {
        let worker = WorkerId::parse(mark.rsplit_once('.')?.0).ok()?;
        (self.mark(&worker) == mark).then_some(worker)
    }

    fn derive(&self, purpose: &str, name: &str) -> String {
        let mut mac = Hmac::<Sha256>::new_from_slice(self.0.expose().as_bytes())
            .expect("HMAC takes a key of any length");
        mac.update(purpose.as_bytes());
        mac.update(b":");
        mac.update(name.as_bytes());
        mac.finalize().into_bytes().iter().fold(String::new(), |mut text, byte| {
            write!(text, "{byte:02x}").expect("a string takes what it is given");
            text
        })
    }
}
