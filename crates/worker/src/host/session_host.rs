//! One session's place in a host: it owns the keeper and the agent, does what the daemon wants of them, and sees to
//! their end. What the agent says goes past it, from the agent's task through the seat.

use std::path::{Path, PathBuf};
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use qd_keeper::{KeeperHandle, end_orphans};
use qd_link::{
    FileSpool, LifecycleRequest, NumberedUpdate, WorkerEndpoint, WorkerEndpointStatus, host_agent_with_filter,
};
use qd_protocol::RunId;
use qd_protocol::event::RunError;
use qd_protocol::frame::v1;
use qd_protocol::link::{AgentExitReason, AgentUpdate};
use qd_protocol::worker::AgentSpec;
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::WorkerHostState;
use crate::agent::{AgentContext, AgentControl, run_agent};
use crate::agent_kind::{AgentKind, own_program};
use crate::agent_processes::{AgentProcesses, KeeperLostError};
use crate::redact::{Redactor, SecretMatcher};
use crate::terminal_window::TerminalWindow;

/// How long an agent has to end by itself when it is put to rest.
const REST_GRACE: Duration = Duration::from_secs(2);
/// How long all that an agent started has to end by itself when the session is over.
const CLOSE_GRACE: Duration = Duration::from_secs(1);
/// How long an attached daemon has to acknowledge the last words of a worker that ends.
const LAST_ACK_WAIT: Duration = Duration::from_secs(2);
/// How often the spool is looked at for the last word.
const SPOOL_POLL_INTERVAL: Duration = Duration::from_millis(5);

/// One session's place.
#[derive(Debug)]
pub(super) struct SessionHost {
    host: Arc<WorkerHostState>,
    endpoint: WorkerEndpoint,
    spec: Box<AgentSpec>,
    spool_dir: PathBuf,
    agent_processes: Option<Arc<AgentProcesses>>,
    control: Arc<AgentControl>,
    window: Arc<TerminalWindow>,
    /// Nobody wants it any more, or the host ends.
    shutdown: CancellationToken,
}

/// Why a place is given up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum SessionHostExit {
    /// The agent is gone, and the seat has said so.
    AgentGone,
    /// The agent is to be ended: the daemon closes the session, or the host ends.
    Stopped,
    /// The same, because no daemon came for too long: nobody waits for one any longer.
    Abandoned,
    /// The keeper is lost, and with it the knowledge of what the agent started.
    KeeperLost,
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

    /// Holds the place until the daemon knows all of it, or nobody comes for it.
    pub(super) async fn run(self) {
        let (host, seat, spool) = (Arc::clone(&self.host), self.endpoint.clone(), self.spool_dir.clone());
        let (worker, ending) = (self.spec.worker.clone(), self.shutdown.clone());
        // In a task of its own: a panic in one place is the end of that one alone, and its keeper ends all below it.
        let leaving = match tokio::spawn(self.run_session()).await {
            Ok(leaving) => leaving,
            Err(_) => {
                seat.remove_agent().await;
                let message = "the worker failed; please report this with its log";
                seat.send(AgentUpdate::Gone(AgentExitReason::Failed(RunError::new(
                    "worker_panicked",
                    message,
                ))))
                .await;
                SessionHostExit::AgentGone
            }
        };
        let known = match leaving {
            SessionHostExit::Abandoned => false,
            SessionHostExit::AgentGone | SessionHostExit::Stopped | SessionHostExit::KeeperLost => {
                wait_for_last_ack(&host, seat.watch_status(), &ending).await
            }
        };
        let unwanted = ending.is_cancelled() && !host.stopping.is_cancelled();
        if !known && !unwanted {
            wait_for_spooled_end(&spool).await;
        }
        host.remove_session(&worker);
        drop(seat);
        if (known || unwanted)
            && let Err(error) = FileSpool::remove(&spool)
        {
            tracing::warn!(%worker, %error, "a spool could not be removed");
        }
    }

    /// From the agent's start to the end of it and all that it started.
    async fn run_session(mut self) -> SessionHostExit {
        let leaving = match Box::pin(self.start_session()).await {
            Ok(()) => self.serve_endpoint().await,
            Err(error) => {
                self.endpoint.send(AgentUpdate::Gone(AgentExitReason::Failed(error))).await;
                SessionHostExit::AgentGone
            }
        };
        Box::pin(self.end_session(leaving)).await;
        leaving
    }

    async fn start_session(&mut self) -> Result<(), RunError> {
        let kind = AgentKind::from_spec(&self.spec)?;
        if let Some(helpers) = kind.helper_names(&self.spec) {
            let mut keepers = self.host.keepers.lock().await;
            let keeper = KeeperHandle::start(&own_program(), &self.spec.mark).await.map_err(|cause| {
                RunError::new("keeper_failed", format!("the keeper could not be started: {cause}"))
            })?;
            keepers.insert(keeper.pid());
            self.agent_processes =
                Some(Arc::new(AgentProcesses::new(keeper, helpers, Arc::clone(&self.window))));
        }
        self.start_agent(kind);
        Ok(())
    }

    /// Gives the seat an agent.
    fn start_agent(&mut self, kind: AgentKind) {
        self.control = Arc::default();
        let around = AgentContext {
            agent_processes: self.agent_processes.clone(),
            endpoint_status: Some(self.endpoint.watch_status()),
            control: Arc::clone(&self.control),
        };
        let leash = Arc::clone(&self.control);
        self.endpoint.set_model(self.spec.model.clone());
        self.endpoint.set_turn_clock(Box::new(move || leash.run_time()));
        let filter = Redactor::new_filter(SecretMatcher::from_env(&self.spec.env));
        let spec = self.spec.clone();
        self.endpoint.set_agent(host_agent_with_filter(spec.after, Some(filter), |end| {
            run_agent(kind, spec, around, end)
        }));
    }

    /// Does what the daemon wants for as long as there is anything to do it with.
    async fn serve_endpoint(&mut self) -> SessionHostExit {
        let mut state = self.endpoint.watch_status();
        let host = Arc::clone(&self.host);
        let mut abandoned = pin!(wait_until_abandoned(&host, state.clone()));
        loop {
            if state.borrow_and_update().presence == v1::AgentPresence::Gone {
                return SessionHostExit::AgentGone;
            }
            let done = tokio::select! {
                wanted = self.endpoint.next_request() => Box::pin(self.handle_request(wanted)).await,
                () = self.shutdown.cancelled() => Err(SessionHostExit::Stopped),
                () = wait_for_keeper_loss(self.agent_processes.as_ref()) => Err(SessionHostExit::KeeperLost),
                () = self.control.keeper_lost() => Err(SessionHostExit::KeeperLost),
                () = &mut abandoned => Err(SessionHostExit::Abandoned),
                changed = state.changed() => changed.map_err(|_| SessionHostExit::Stopped),
            };
            if let Err(leaving) = done {
                return leaving;
            }
        }
    }

    async fn handle_request(&mut self, wanted: LifecycleRequest) -> Result<(), SessionHostExit> {
        let (seat, in_turn) = {
            let state = self.endpoint.watch_status();
            let now = state.borrow();
            (now.presence, now.run.is_some())
        };
        match (wanted, seat) {
            (LifecycleRequest::Close, _) => Err(SessionHostExit::Stopped),
            (LifecycleRequest::Start(spec), v1::AgentPresence::Resting) => {
                // It stays where it is: a session's directory never changes, and on another machine it has another name.
                // So has its program, and what is started on a machine is for that machine to say.
                let manifest = self.spec.manifest.take().or_else(|| spec.manifest.clone());
                *self.spec = AgentSpec { cwd: self.spec.cwd.clone(), manifest, ..*spec };
                match AgentKind::from_spec(&self.spec) {
                    Ok(kind) => self.start_agent(kind),
                    Err(error) => {
                        tracing::warn!(agent = %self.spec.agent, error = error.message, "it cannot be started")
                    }
                }
                Ok(())
            }
            (LifecycleRequest::Rest, v1::AgentPresence::Starting | v1::AgentPresence::Ready { .. })
                if !in_turn =>
            {
                self.rest_agent().await
            }
            // It was said again after a break, and has been done.
            (LifecycleRequest::Start(_) | LifecycleRequest::Rest, _) => Ok(()),
        }
    }

    /// Stops the agent. What its turns left on purpose stays, and the place with it; without any of that it is given up.
    async fn rest_agent(&mut self) -> Result<(), SessionHostExit> {
        self.control.request_rest(REST_GRACE).await;
        self.endpoint.remove_agent().await;
        let keeps_some = match &self.agent_processes {
            Some(below) => below.sweep_agent(REST_GRACE).await?,
            None => false,
        };
        if !keeps_some {
            return Err(SessionHostExit::Stopped);
        }
        self.endpoint.send(AgentUpdate::Rested).await;
        Ok(())
    }

    /// Ends whatever there is and says so, unless it has been said.
    async fn end_session(mut self, leaving: SessionHostExit) {
        self.endpoint.remove_agent().await;
        let swept = match self.agent_processes.take() {
            Some(below) => self.end_agent_processes(below, leaving).await,
            None => Ok(()),
        };
        if leaving == SessionHostExit::AgentGone {
            return;
        }
        let gone = match swept {
            Ok(()) => AgentExitReason::Stopped,
            Err(gone) => AgentExitReason::Failed(gone.into()),
        };
        self.endpoint.send(AgentUpdate::Gone(gone)).await;
    }

    /// Ends all that the agent started, through the keeper and with it, or in its place.
    async fn end_agent_processes(
        &self,
        below: Arc<AgentProcesses>,
        leaving: SessionHostExit,
    ) -> Result<(), KeeperLostError> {
        let keeper = below.keeper();
        let swept = match leaving {
            SessionHostExit::AgentGone | SessionHostExit::Stopped | SessionHostExit::Abandoned => {
                below.sweep_all(CLOSE_GRACE).await
            }
            SessionHostExit::KeeperLost => Err(KeeperLostError),
        };
        let mut keepers = self.host.keepers.lock().await;
        if swept.is_err() {
            // Only then have its children fallen to us.
            keeper.wait_until_lost().await;
            let others: Vec<u32> = keepers.iter().copied().filter(|other| *other != keeper.pid()).collect();
            end_orphans(&others, CLOSE_GRACE).await;
        }
        keepers.remove(&keeper.pid());
        swept
    }
}

/// Waits until the daemon has acknowledged everything; false if it should not be waited for any longer.
async fn wait_for_last_ack(
    host: &WorkerHostState,
    mut state: watch::Receiver<WorkerEndpointStatus>,
    ending: &CancellationToken,
) -> bool {
    let in_vain = state.clone();
    tokio::select! {
        biased;
        known = state.wait_for(|state| !state.has_unacked) => known.is_ok(),
        () = wait_until_abandoned(host, in_vain.clone()) => false,
        () = wait_for_farewell(ending, in_vain) => false,
    }
}

/// Waits until the last word is in the spool, where whoever comes later finds it. It is there at once, unless the spool
/// was just being synced; one that takes nothing, on a full disk, is not waited for.
async fn wait_for_spooled_end(spool: &Path) {
    let last_word = || {
        let last = FileSpool::read_last(spool).ok().flatten();
        matches!(last, Some(NumberedUpdate { update: AgentUpdate::Gone(_), .. }))
    };
    let looks = async {
        while !last_word() {
            tokio::time::sleep(SPOOL_POLL_INTERVAL).await;
        }
    };
    if tokio::time::timeout(LAST_ACK_WAIT, looks).await.is_err() {
        tracing::warn!(path = %spool.display(), "the last words of an agent could not be kept");
    }
}

/// Waits until no daemon has been attached for too long. An agent that comes out of its turn meanwhile is idle only from
/// then on.
async fn wait_until_abandoned(host: &WorkerHostState, mut state: watch::Receiver<WorkerEndpointStatus>) {
    let mut turn: Option<RunId> = None;
    let mut turned = Instant::now();
    loop {
        let WorkerEndpointStatus { attached, attachment_changed_at: since, run, .. } =
            state.borrow_and_update().clone();
        if run != turn {
            turned = Instant::now();
        }
        let patience = if run.is_some() { host.options.orphan_busy } else { host.options.orphan_idle };
        turn = run;
        tokio::select! {
            () = tokio::time::sleep_until(since.max(turned) + patience), if !attached => return,
            changed = state.changed() => if changed.is_err() { return },
        }
    }
}

/// Waits until the place is to end, and then a little for a daemon that is attached.
async fn wait_for_farewell(ending: &CancellationToken, mut state: watch::Receiver<WorkerEndpointStatus>) {
    ending.cancelled().await;
    let _detached = tokio::time::timeout(LAST_ACK_WAIT, state.wait_for(|state| !state.attached)).await;
}

async fn wait_for_keeper_loss(below: Option<&Arc<AgentProcesses>>) {
    match below {
        Some(below) => below.keeper().wait_until_lost().await,
        None => std::future::pending().await,
    }
}
