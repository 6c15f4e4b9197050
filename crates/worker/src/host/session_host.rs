//! One session in a worker: owns the keeper and the agent, carries out the daemon's lifecycle requests, and ends both.
//! The agent's updates do not pass through here; they go from the agent's task to the session's endpoint.
//!
//! Design: docs/design/worker-stops-idle-agents.md

use qd_drivers::agent_launcher::AgentLauncher;
use qd_drivers::redact::{Redactor, SecretMatcher};
use qd_drivers::terminal_window::TerminalWindow;
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use qd_keeper::{SweepResult, end_orphans};
use qd_link::{
    FileSpool, LifecycleRequest, NumberedUpdate, WorkerEndpoint, WorkerEndpointStatus, host_agent_with_filter,
};
use qd_protocol::RunId;
use qd_protocol::event::RunError;
use qd_protocol::frame::v1;
use qd_protocol::link::{AgentExitReason, AgentUpdate, TurnOutcome};
use qd_protocol::sandbox_spec::SandboxSelection;
use qd_protocol::worker::AgentSpec;
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::WorkerHostState;
use crate::agent::{AgentContext, AgentControl, run_agent};
use crate::agent_processes::{AgentProcesses, KeeperLostError, process_cleanup};
use crate::confined_keeper::start_keeper;

/// How long an idle agent has to exit by itself when it is stopped.
const IDLE_STOP_GRACE: Duration = Duration::from_secs(2);
/// How long the agent's processes have to exit by themselves when the session is over.
const CLOSE_GRACE: Duration = Duration::from_secs(1);
/// How long an attached daemon has to acknowledge the last updates of a worker that exits.
const LAST_ACK_WAIT: Duration = Duration::from_secs(2);
/// How long a daemon has to acknowledge the last updates of a worker that has lost a task. Then the worker exits.
const DEAD_TASK_ACK_WAIT: Duration = Duration::from_secs(10);
/// The pause between two checks of the spool for the agent's last update.
const SPOOL_POLL_INTERVAL: Duration = Duration::from_millis(5);
/// The pause between two checks whether the spool was removed.
const SPOOL_CHECK_INTERVAL: Duration = Duration::from_secs(1);

#[derive(Debug)]
pub(super) struct SessionHost {
    host: Arc<WorkerHostState>,
    endpoint: WorkerEndpoint,
    spec: Box<AgentSpec>,
    spool_dir: PathBuf,
    agent_processes: Option<Arc<AgentProcesses>>,
    control: Arc<AgentControl>,
    window: Arc<TerminalWindow>,
    /// Cancelled when the daemon no longer wants the session, or when the host stops.
    shutdown: CancellationToken,
}

/// Why a session leaves the worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum SessionHostExit {
    /// The agent has exited, and the endpoint has reported it.
    AgentGone,
    /// The agent is to be ended: the daemon closes the session, or the host stops.
    Stopped,
    /// Like `Stopped`, but no daemon attached for too long, so no acknowledgement is awaited.
    Abandoned,
    /// The keeper has died, so nobody knows any more which processes the agent started.
    KeeperLost,
    /// A task of the endpoint has died, so the agent's updates no longer reach the daemon.
    TaskDied,
}

impl From<KeeperLostError> for SessionHostExit {
    fn from(KeeperLostError: KeeperLostError) -> Self {
        Self::KeeperLost
    }
}

impl SessionHost {
    pub(super) fn new(
        host: Arc<WorkerHostState>,
        endpoint: WorkerEndpoint,
        spec: Box<AgentSpec>,
        spool_dir: PathBuf,
        window: Arc<TerminalWindow>,
        shutdown: CancellationToken,
    ) -> Self {
        Self {
            host,
            endpoint,
            spec,
            spool_dir,
            agent_processes: None,
            control: Arc::default(),
            window,
            shutdown,
        }
    }

    /// Runs the session until the daemon has acknowledged all of it, or no daemon comes for it. A daemon that removes the
    /// spool has given the session up: it ends like one that is closed.
    pub(super) async fn run(self) {
        let (status, spool_dir) = (self.endpoint.watch_status(), self.spool_dir.clone());
        let (worker, shutdown) = (self.spec.worker.clone(), self.shutdown.clone());
        let end_if_given_up = async {
            wait_for_spool_removal(&spool_dir, status).await;
            tracing::info!(%worker, "the spool was removed, so the session ends");
            shutdown.cancel();
            std::future::pending::<()>().await;
        };
        tokio::select! {
            () = self.run_until_acknowledged() => {}
            () = end_if_given_up => {}
        }
    }

    async fn run_until_acknowledged(self) {
        let (host, endpoint, spool_dir) =
            (Arc::clone(&self.host), self.endpoint.clone(), self.spool_dir.clone());
        let (worker, shutdown) = (self.spec.worker.clone(), self.shutdown.clone());
        // A separate task, so that a panic ends only this session. Its keeper ends the agent's processes.
        let exit = match tokio::spawn(self.run_session()).await {
            Ok(exit) => exit,
            Err(_) => {
                endpoint.remove_agent().await;
                let message = "the worker failed; please report this with its log";
                endpoint
                    .send(AgentUpdate::Gone(AgentExitReason::Failed(RunError::new(
                        "worker_panicked",
                        message,
                    ))))
                    .await;
                SessionHostExit::AgentGone
            }
        };
        let acknowledged = match exit {
            SessionHostExit::Abandoned => false,
            SessionHostExit::AgentGone | SessionHostExit::Stopped | SessionHostExit::KeeperLost => {
                wait_for_last_ack(&host, &endpoint, &shutdown).await
            }
            // Nobody knows what still works of this endpoint. Its end must come, one way or the other.
            SessionHostExit::TaskDied => {
                let last_ack = wait_for_last_ack(&host, &endpoint, &shutdown);
                tokio::time::timeout(DEAD_TASK_ACK_WAIT, last_ack).await.unwrap_or(false)
            }
        };
        let unwanted = shutdown.is_cancelled() && !host.stopping.is_cancelled();
        if !acknowledged && !unwanted {
            wait_for_spooled_end(&spool_dir).await;
        }
        host.remove_session(&worker);
        drop(endpoint);
        if (acknowledged || unwanted)
            && let Err(error) = FileSpool::remove(&spool_dir)
        {
            tracing::warn!(%worker, %error, "failed to remove the spool of an ended session");
        }
    }

    /// Runs the session from the start of the agent to the end of all its processes.
    async fn run_session(mut self) -> SessionHostExit {
        let exit = match Box::pin(self.start_session()).await {
            Ok(()) => self.serve_endpoint().await,
            Err(error) => {
                self.endpoint.send(AgentUpdate::Gone(AgentExitReason::Failed(error))).await;
                SessionHostExit::AgentGone
            }
        };
        Box::pin(self.end_session(exit)).await;
        exit
    }

    async fn start_session(&mut self) -> Result<(), RunError> {
        let launcher = AgentLauncher::from_spec(&self.spec)?;
        if let Some(helpers) = launcher.helper_names(&self.spec) {
            let mut keepers = self.host.keepers.lock().await;
            let keeper = start_keeper(&self.spec).await?;
            keepers.insert(keeper.pid());
            self.agent_processes =
                Some(Arc::new(AgentProcesses::new(keeper, helpers, Arc::clone(&self.window))));
        }
        self.start_agent(launcher);
        Ok(())
    }

    fn start_agent(&mut self, launcher: AgentLauncher) {
        self.control = Arc::default();
        let context = AgentContext {
            agent_processes: self.agent_processes.clone(),
            endpoint_status: Some(self.endpoint.watch_status()),
            control: Arc::clone(&self.control),
        };
        let control = Arc::clone(&self.control);
        self.endpoint.set_start_settings(self.spec.model.clone(), sandbox_selection(&self.spec));
        self.endpoint.set_turn_clock(Box::new(move || control.run_time()));
        let filter = Redactor::new_filter(SecretMatcher::of_agent(&self.spec));
        let spec = self.spec.clone();
        self.endpoint.set_agent(host_agent_with_filter(spec.after, Some(filter), |end| {
            run_agent(launcher, spec, context, end)
        }));
    }

    /// Handles lifecycle requests until the agent has exited or the session has to end.
    async fn serve_endpoint(&mut self) -> SessionHostExit {
        let mut state = self.endpoint.watch_status();
        let mut task_deaths = self.endpoint.watch_task_deaths();
        let host = Arc::clone(&self.host);
        let mut abandoned = pin!(wait_until_abandoned(&host, state.clone()));
        loop {
            if state.borrow_and_update().presence == v1::AgentPresence::Gone {
                return SessionHostExit::AgentGone;
            }
            let handled = tokio::select! {
                request = self.endpoint.next_request() => Box::pin(self.handle_request(request)).await,
                () = self.shutdown.cancelled() => Err(SessionHostExit::Stopped),
                () = wait_for_keeper_loss(self.agent_processes.as_ref()) => Err(SessionHostExit::KeeperLost),
                () = self.control.keeper_lost() => Err(SessionHostExit::KeeperLost),
                () = &mut abandoned => Err(SessionHostExit::Abandoned),
                () = wait_for_task_death(&mut task_deaths) => Err(SessionHostExit::TaskDied),
                changed = state.changed() => changed.map_err(|_| SessionHostExit::Stopped),
            };
            if let Err(exit) = handled {
                return exit;
            }
        }
    }

    async fn handle_request(&mut self, request: LifecycleRequest) -> Result<(), SessionHostExit> {
        let (presence, in_turn) = {
            let state = self.endpoint.watch_status();
            let status = state.borrow();
            (status.presence, status.run.is_some())
        };
        match (request, presence) {
            (LifecycleRequest::Close, _) => Err(SessionHostExit::Stopped),
            // The sandbox below the keeper cannot change. Another one needs another worker, and what earlier turns left
            // ends with this one.
            (LifecycleRequest::Start(spec), v1::AgentPresence::IdleStopped)
                if sandbox_selection(&spec) != sandbox_selection(&self.spec) =>
            {
                Err(SessionHostExit::Stopped)
            }
            (LifecycleRequest::Start(spec), v1::AgentPresence::IdleStopped) => {
                // The working directory stays: a session's directory never changes, and on another machine it has
                // a different path than the daemon knows. The manifest stays as well, because each machine decides
                // for itself which program it starts and what it is confined with.
                let manifest = self.spec.manifest.take().or_else(|| spec.manifest.clone());
                let sandbox = self.spec.sandbox.take();
                *self.spec = AgentSpec { cwd: self.spec.cwd.clone(), manifest, sandbox, ..*spec };
                match AgentLauncher::from_spec(&self.spec) {
                    Ok(launcher) => self.start_agent(launcher),
                    Err(error) => {
                        tracing::warn!(agent = %self.spec.agent, error = error.message, "the agent cannot be started")
                    }
                }
                Ok(())
            }
            (
                LifecycleRequest::StopIdleAgent,
                v1::AgentPresence::Starting | v1::AgentPresence::Ready { .. },
            ) if !in_turn => self.stop_idle_agent().await,
            // The request was repeated after a reconnect and has already been carried out.
            (LifecycleRequest::Start(_) | LifecycleRequest::StopIdleAgent, _) => Ok(()),
        }
    }

    /// Stops an idle agent. If earlier turns left processes running on purpose, the session stays to hold them;
    /// otherwise it ends.
    async fn stop_idle_agent(&mut self) -> Result<(), SessionHostExit> {
        self.control.request_idle_stop(IDLE_STOP_GRACE).await;
        self.endpoint.remove_agent().await;
        let processes_left = match &self.agent_processes {
            Some(processes) => processes.sweep_agent(IDLE_STOP_GRACE).await?,
            None => false,
        };
        if !processes_left {
            return Err(SessionHostExit::Stopped);
        }
        self.endpoint.send(AgentUpdate::IdleStopped).await;
        Ok(())
    }

    /// Ends the agent and its processes, and reports `Gone` unless that was reported before.
    async fn end_session(mut self, exit: SessionHostExit) {
        self.endpoint.remove_agent().await;
        let lost = match self.agent_processes.take() {
            Some(processes) => self.end_agent_processes(processes, exit).await,
            None => None,
        };
        if exit == SessionHostExit::AgentGone {
            return;
        }
        let task_death = self.endpoint.watch_task_deaths().borrow().clone();
        let gone = match (lost, task_death) {
            (_, Some(error)) => AgentExitReason::Failed(error),
            (None, None) => AgentExitReason::Stopped,
            (Some(swept), None) => self.report_lost_keeper(swept).await,
        };
        self.endpoint.send(AgentUpdate::Gone(gone)).await;
    }

    /// Why the agent is gone if its keeper was lost. If processes of a turn survived, its end is reported apart, because
    /// `Gone` could not name them; the error then belongs to that turn alone.
    async fn report_lost_keeper(&self, swept: SweepResult) -> AgentExitReason {
        let error = RunError::from(KeeperLostError);
        let run = self.endpoint.watch_status().borrow().run.clone();
        match run {
            Some(run) if !swept.survivors.is_empty() => {
                let outcome = TurnOutcome {
                    processes: process_cleanup(swept),
                    agent_ends: true,
                    ..TurnOutcome::failed(error)
                };
                self.endpoint.send(AgentUpdate::TurnEnded { run, outcome }).await;
                AgentExitReason::Lost
            }
            _ => AgentExitReason::Failed(error),
        }
    }

    /// Ends the agent's processes through the keeper. If the keeper is lost, ends them directly and returns the result.
    async fn end_agent_processes(
        &self,
        processes: Arc<AgentProcesses>,
        exit: SessionHostExit,
    ) -> Option<SweepResult> {
        let keeper = processes.keeper();
        let swept = match exit {
            SessionHostExit::AgentGone
            | SessionHostExit::Stopped
            | SessionHostExit::Abandoned
            | SessionHostExit::TaskDied => processes.sweep_all(CLOSE_GRACE).await,
            SessionHostExit::KeeperLost => Err(KeeperLostError),
        };
        let mut keepers = self.host.keepers.lock().await;
        let mut lost = None;
        if swept.is_err() {
            // The kernel hands the keeper's children to us only once the keeper is dead.
            keeper.wait_until_lost().await;
            let others: Vec<u32> = keepers.iter().copied().filter(|other| *other != keeper.pid()).collect();
            lost = Some(end_orphans(&others, CLOSE_GRACE).await);
        }
        keepers.remove(&keeper.pid());
        lost
    }
}

/// How strongly the daemon asked to confine an agent.
fn sandbox_selection(spec: &AgentSpec) -> Option<SandboxSelection> {
    spec.sandbox.as_ref().map(|sandbox| sandbox.selection_by_daemon())
}

/// Waits until the daemon has acknowledged everything. Returns false if waiting any longer makes no sense.
async fn wait_for_last_ack(
    host: &WorkerHostState,
    endpoint: &WorkerEndpoint,
    shutdown: &CancellationToken,
) -> bool {
    let mut state = endpoint.watch_status();
    let status = state.clone();
    let mut task_deaths = endpoint.watch_task_deaths();
    tokio::select! {
        biased;
        acknowledged = state.wait_for(|state| !state.has_unacked) => acknowledged.is_ok(),
        () = wait_until_abandoned(host, status.clone()) => false,
        () = wait_for_last_detach(shutdown, status) => false,
        // Another one: the endpoint cannot even send its last updates. They may be in the spool.
        _died = task_deaths.changed() => false,
    }
}

/// Waits until the agent's last update is in the spool, where a later daemon finds it. It is usually there at once,
/// unless the spool is being synced. After [`LAST_ACK_WAIT`] this gives up, since a full disk accepts nothing.
async fn wait_for_spooled_end(spool_dir: &Path) {
    let has_end = || {
        let last = FileSpool::read_last(spool_dir).ok().flatten();
        matches!(last, Some(NumberedUpdate { update: AgentUpdate::Gone(_), .. }))
    };
    let poll = async {
        while !has_end() {
            tokio::time::sleep(SPOOL_POLL_INTERVAL).await;
        }
    };
    if tokio::time::timeout(LAST_ACK_WAIT, poll).await.is_err() {
        tracing::warn!(path = %spool_dir.display(), "failed to store the last updates of an agent in its spool");
    }
}

/// Waits until the daemon has removed the spool while it is not attached. An attached daemon tells us itself what it
/// wants. If the folder of all workers is gone as well, somebody else removed it, and the daemon finds out what became of
/// us. Two checks must agree, because such a removal begins with the spools.
async fn wait_for_spool_removal(spool_dir: &Path, mut state: watch::Receiver<WorkerEndpointStatus>) {
    let is_removed = || {
        let is_missing = |path: &Path| matches!(path.try_exists(), Ok(false));
        // The folder of the spools goes with the last of them.
        let workers_dir = spool_dir.ancestors().nth(2);
        is_missing(spool_dir) && workers_dir.is_some_and(|dir| !is_missing(dir))
    };
    let mut was_removed = false;
    loop {
        if state.wait_for(|state| !state.attached).await.is_err() {
            return std::future::pending().await;
        }
        let removed = is_removed();
        if removed && was_removed {
            return;
        }
        was_removed = removed;
        tokio::time::sleep(SPOOL_CHECK_INTERVAL).await;
    }
}

/// Waits until no daemon has been attached for too long. When a turn ends meanwhile, the idle period starts only then.
async fn wait_until_abandoned(host: &WorkerHostState, mut state: watch::Receiver<WorkerEndpointStatus>) {
    let mut current_run: Option<RunId> = None;
    let mut run_changed_at = Instant::now();
    loop {
        let WorkerEndpointStatus { attached, attachment_changed_at: since, run, .. } =
            state.borrow_and_update().clone();
        if run != current_run {
            run_changed_at = Instant::now();
        }
        let patience = if run.is_some() { host.options.orphan_busy } else { host.options.orphan_idle };
        current_run = run;
        tokio::select! {
            () = tokio::time::sleep_until(since.max(run_changed_at) + patience), if !attached => return,
            changed = state.changed() => if changed.is_err() { return },
        }
    }
}

/// Waits until the session is to end, then gives an attached daemon [`LAST_ACK_WAIT`] to detach.
async fn wait_for_last_detach(
    shutdown: &CancellationToken,
    mut state: watch::Receiver<WorkerEndpointStatus>,
) {
    shutdown.cancelled().await;
    let _detached = tokio::time::timeout(LAST_ACK_WAIT, state.wait_for(|state| !state.attached)).await;
}

async fn wait_for_task_death(deaths: &mut watch::Receiver<Option<RunError>>) {
    // Fails only if the endpoint is gone, and its tasks with it.
    let _died = deaths.wait_for(Option::is_some).await;
}

async fn wait_for_keeper_loss(processes: Option<&Arc<AgentProcesses>>) {
    match processes {
        Some(processes) => processes.keeper().wait_until_lost().await,
        None => std::future::pending().await,
    }
}
