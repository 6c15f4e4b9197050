//! What all parts of the daemon share: the journal, who is awake, what is halted, what is spent. Requests come in
//! through here and find their session's actor; nothing here decides a transition.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use qd_core::session::SessionCommand;
use qd_journal::{
    AppendError, BlobError, EventScope, Journal, JournalReadError, SessionFilter, SessionKey, SessionRow,
    WorkspaceKey,
};
use qd_protocol::limits::{MAILBOX_MAX, STOP_S};
use qd_protocol::policy::Policy;
use qd_protocol::{ApiError, ErrorCode, FleetId, Millis, SessionId, WorkspaceId, api};
use tokio::sync::{oneshot, watch};
use tokio::task::JoinSet;

use crate::actor::{
    self, ActorMessage, ChildCreation, CommandCompletion, CommandRequest, IdempotencyKey, SessionActivity,
};
use crate::budget::SpentBudgets;
use crate::config::DaemonConfig;
use crate::fleets::FleetActorMessage;
use crate::home::DaemonHome;
use crate::keyed_locks::KeyedLocks;
use crate::metrics::DaemonMetrics;
use crate::registry::{ActorMailbox, ActorRegistry, MailboxRejection};
use crate::workers::{AgentSlots, SlotChanges, Workers};
use crate::workspaces::WorkspaceRegistry;

/// How often the supervisor looks.
const SUPERVISE_INTERVAL: Duration = Duration::from_secs(1);
/// Every so many looks, workers that nobody knows are looked for.
const STRAY_CHECK_TICKS: u32 = 60;

/// The daemon, as seen by its parts.
pub(crate) struct Daemon {
    /// The truth.
    pub(crate) journal: Journal,
    /// Everything else that is on disk.
    pub(crate) home: DaemonHome,
    /// The agents, and the processes that hold them.
    pub(crate) workers: Workers,
    /// How many of them may live.
    pub(crate) agent_slots: AgentSlots,
    /// The workspaces, which are few.
    pub(crate) workspaces: WorkspaceRegistry,
    /// One at a time per `Idempotency-Key`, run id or path.
    pub(crate) key_locks: KeyedLocks,
    /// Whose money is spent.
    pub(crate) budgets: SpentBudgets,
    /// What an operator would like to know.
    pub(crate) stats: DaemonMetrics,
    /// How long an idle agent is kept.
    pub(crate) idle_timeout: Duration,
    /// What a session's agent may do if the session does not say.
    pub(crate) default_policy: Policy,
    /// Whether agents are given the tools of `qd mcp` if the session does not say.
    pub(crate) default_mcp: bool,
    /// Since when.
    pub(crate) started_at: Millis,
    registry: ActorRegistry<SessionId, ActorMessage>,
    /// The fleets that are awake.
    pub(crate) fleets: ActorRegistry<FleetId, FleetActorMessage>,
    /// Read by every step; set before, and lifted after, the journal says so.
    halted: AtomicBool,
    /// Set once, when the workers end with the daemon.
    ending_workers: AtomicBool,
    /// The halt for people. Changed only under the key `halt`.
    halt_status: Mutex<api::HaltStatus>,
    /// Turns true once, when the daemon is to end.
    stopping: watch::Sender<bool>,
    /// Owns every actor and every errand between them.
    tasks: Mutex<JoinSet<()>>,
}

/// A session that exists, with what is needed to reach it.
#[derive(Debug)]
pub(crate) struct SessionAddress {
    /// Its id.
    pub(crate) id: SessionId,
    /// Its key in the journal.
    pub(crate) key: SessionKey,
    /// Its project.
    pub(crate) workspace: WorkspaceId,
    /// Its project's key in the journal.
    pub(crate) workspace_key: WorkspaceKey,
    /// What its events bear.
    pub(crate) scope: Arc<EventScope>,
}

impl SessionAddress {
    pub(crate) fn new(
        key: SessionKey,
        id: SessionId,
        workspace_key: WorkspaceKey,
        workspace: WorkspaceId,
    ) -> Self {
        let scope = Arc::new(EventScope {
            workspace: Some((workspace_key, workspace.clone())),
            session: Some((key, id.clone())),
            fleet: None,
        });
        Self { id, key, workspace, workspace_key, scope }
    }
}

impl Daemon {
    pub(crate) fn new(
        journal: Journal,
        home: DaemonHome,
        workers: Workers,
        config: &DaemonConfig,
        halt: api::HaltStatus,
    ) -> Arc<Self> {
        Arc::new(Self {
            journal,
            home,
            workers,
            agent_slots: AgentSlots::new(config.max_agents.value, config.min_free_mb.value << 20),
            workspaces: WorkspaceRegistry::default(),
            key_locks: KeyedLocks::default(),
            budgets: SpentBudgets::default(),
            stats: DaemonMetrics::default(),
            idle_timeout: Duration::from_secs(config.idle_s.value),
            default_policy: config.policy.value.clone(),
            default_mcp: config.mcp.value,
            started_at: Millis::now(),
            registry: ActorRegistry::new(MAILBOX_MAX),
            fleets: ActorRegistry::new(MAILBOX_MAX),
            halted: AtomicBool::new(halt.halted),
            ending_workers: AtomicBool::new(false),
            halt_status: Mutex::new(halt),
            stopping: watch::Sender::new(false),
            tasks: Mutex::new(JoinSet::new()),
        })
    }

    /// Sends a command to a session and waits until what came of it is in the journal.
    pub(crate) async fn send_command(
        self: &Arc<Self>,
        session: &Arc<SessionAddress>,
        command: SessionCommand,
        key: Option<IdempotencyKey>,
    ) -> Result<CommandCompletion, ApiError> {
        self.send_command_with_child(session, command, key, None).await
    }

    /// The same with a session below that is created in the same transaction.
    pub(crate) async fn send_command_with_child(
        self: &Arc<Self>,
        session: &Arc<SessionAddress>,
        command: SessionCommand,
        key: Option<IdempotencyKey>,
        birth: Option<Box<ChildCreation>>,
    ) -> Result<CommandCompletion, ApiError> {
        if self.is_stopping() {
            return Err(stopping_error());
        }
        let (reply, answer) = oneshot::channel();
        self.send_message(
            session,
            ActorMessage::Request(Box::new(CommandRequest { command, key, child: birth, reply })),
        )?;
        answer.await.unwrap_or_else(|_| Err(stopping_error()))
    }

    /// Puts something into a session's mailbox, and wakes it if it sleeps.
    pub(crate) fn send_message(
        self: &Arc<Self>,
        session: &Arc<SessionAddress>,
        mail: ActorMessage,
    ) -> Result<(), ApiError> {
        let wake = |mailbox: Arc<ActorMailbox<ActorMessage>>| self.spawn_actor(Arc::clone(session), mailbox);
        self.registry.send(&session.id, mail, wake).map_err(|_| overloaded_error())
    }

    fn spawn_actor(self: &Arc<Self>, session: Arc<SessionAddress>, mailbox: Arc<ActorMailbox<ActorMessage>>) {
        let daemon = Arc::clone(self);
        self.spawn(async move { actor::run_actor(daemon, session, mailbox).await });
    }

    /// Runs an errand that the daemon owns: it is waited for when the daemon ends.
    pub(crate) fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        let mut tasks = self.tasks.lock().unwrap_or_else(PoisonError::into_inner);
        while let Some(ended) = tasks.try_join_next() {
            report_panic(ended);
        }
        tasks.spawn(task);
    }

    /// What an awake session does, once everything that came before has been committed; `None` if it sleeps.
    pub(crate) async fn probe_session(&self, session: &SessionId) -> Option<SessionActivity> {
        let (reply, answer) = oneshot::channel();
        match self.registry.send_if_awake(session, ActorMessage::Probe(reply)) {
            Ok(()) => answer.await.ok(),
            Err(MailboxRejection::Full(_) | MailboxRejection::Asleep(_)) => None,
        }
    }

    /// Changes who may have an agent, and tells those whom that concerns. Whoever sleeps is not in line.
    pub(crate) fn update_slots(&self, change: impl FnOnce(&AgentSlots) -> SlotChanges) {
        let SlotChanges { wake, rest } = change(&self.agent_slots);
        for session in wake {
            // One that is gone or full looks for itself.
            let _sent = self.registry.send_if_awake(&session, ActorMessage::Wake);
        }
        if let Some(session) = rest {
            let _sent = self.registry.send_if_awake(&session, ActorMessage::RestIfIdle);
        }
    }

    /// Looks again and again whether there is room, while somebody waits for it, and for workers that nobody knows.
    pub(crate) async fn supervise(self: Arc<Self>) {
        let mut stopping = self.stop_signal();
        let mut ticks = 0_u32;
        loop {
            tokio::select! {
                _ = stopping.wait_for(|stop| *stop) => return,
                () = tokio::time::sleep(SUPERVISE_INTERVAL) => {}
            }
            if self.agent_slots.has_waiters() {
                self.update_slots(AgentSlots::recheck);
            }
            // Soon after the start, for those that a daemon left which died while it started them; then rarely.
            if ticks.is_multiple_of(STRAY_CHECK_TICKS) {
                self.end_stray_workers().await;
            }
            ticks = ticks.wrapping_add(1);
        }
    }

    async fn end_stray_workers(&self) {
        let owing = SessionFilter { obligations_only: true, ..SessionFilter::default() };
        match self.journal.sessions(owing, None, usize::MAX).await {
            Ok(rows) => self.workers.end_strays(&rows.into_iter().map(|row| row.id).collect()).await,
            Err(error) => tracing::warn!(%error, "workers that no session knows could not be looked for"),
        }
    }

    /// Whether the workers are being ended, and the daemon with them.
    pub(crate) fn is_ending_workers(&self) -> bool {
        self.ending_workers.load(Ordering::SeqCst)
    }

    /// Ends every worker, and waits until that is in the journal or the time is over.
    pub(crate) async fn end_workers(&self) {
        self.ending_workers.store(true, Ordering::SeqCst);
        for session in self.registry.awake_keys() {
            let _gone = self.registry.send_if_awake(&session, ActorMessage::EndAgent);
        }
        let ended = async {
            while self.workers.count() > 0 {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        if tokio::time::timeout(Duration::from_secs(STOP_S), ended).await.is_err() {
            tracing::warn!("some workers did not end in time");
        }
        self.workers.end_shared();
    }

    /// Waits until every awake session has finished what it had begun: whatever was decided before is committed.
    pub(crate) async fn wait_for_commits(&self) {
        let mut answers = Vec::new();
        for session in self.registry.awake_keys() {
            let (reply, answer) = oneshot::channel();
            if self.registry.send_if_awake(&session, ActorMessage::Probe(reply)).is_ok() {
                answers.push(answer);
            }
        }
        for answer in answers {
            // One that ended meanwhile has nothing unfinished either.
            let _probe: Result<SessionActivity, oneshot::error::RecvError> = answer.await;
        }
    }

    /// Lets an actor sleep unless mail has come; see [`Registry::sleep`].
    pub(crate) fn try_sleep_actor(
        &self,
        session: &SessionId,
        mailbox: &Arc<ActorMailbox<ActorMessage>>,
    ) -> bool {
        self.registry.try_sleep(session, mailbox)
    }

    /// Takes an actor out of the register that ended without sleeping.
    pub(crate) fn remove_dead_actor(&self, session: &SessionId, mailbox: &Arc<ActorMailbox<ActorMessage>>) {
        self.registry.remove_dead(session, mailbox);
    }

    /// How many sessions are awake.
    pub(crate) fn awake_count(&self) -> usize {
        self.registry.len()
    }

    /// Whether nothing may start.
    pub(crate) fn is_halted(&self) -> bool {
        self.halted.load(Ordering::SeqCst)
    }

    /// The halt for people.
    pub(crate) fn halt_status(&self) -> api::HaltStatus {
        self.halt_status.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Sets the flag that every step reads.
    pub(crate) fn set_halted(&self, halted: bool) {
        self.halted.store(halted, Ordering::SeqCst);
    }

    /// Sets what people see of it.
    pub(crate) fn set_halt_status(&self, halt: api::HaltStatus) {
        *self.halt_status.lock().unwrap_or_else(PoisonError::into_inner) = halt;
    }

    /// Begins the end: no more work is taken, streams end, actors finish what they have begun.
    pub(crate) fn stop(&self) {
        self.stopping.send_replace(true);
    }

    /// Whether the end has begun.
    pub(crate) fn is_stopping(&self) -> bool {
        *self.stopping.borrow()
    }

    /// Told when the end begins.
    pub(crate) fn stop_signal(&self) -> watch::Receiver<bool> {
        self.stopping.subscribe()
    }

    /// Ends every actor at its next quiet moment and waits for all of them and their errands.
    pub(crate) async fn end_tasks(&self) {
        for session in self.registry.awake_keys() {
            // One that is gone or full ends by the stop signal all the same.
            let _sent = self.registry.send_if_awake(&session, ActorMessage::Stop);
        }
        for fleet in self.fleets.awake_keys() {
            let _sent = self.fleets.send_if_awake(&fleet, FleetActorMessage::Stop);
        }
        loop {
            // What ends may have begun something else.
            let mut tasks = std::mem::take(&mut *self.tasks.lock().unwrap_or_else(PoisonError::into_inner));
            if tasks.is_empty() {
                return;
            }
            while let Some(ended) = tasks.join_next().await {
                report_panic(ended);
            }
        }
    }

    /// The session of this id in this workspace.
    pub(crate) async fn session_in_workspace(
        &self,
        workspace: &WorkspaceId,
        id: &SessionId,
    ) -> Result<Arc<SessionAddress>, ApiError> {
        let found = self.find_session(id).await?;
        if found.workspace != *workspace {
            return Err(ApiError::not_found("session", id));
        }
        Ok(found)
    }

    /// The session of this id, wherever it is.
    pub(crate) async fn find_session(&self, id: &SessionId) -> Result<Arc<SessionAddress>, ApiError> {
        let row = self.journal.session(id).await.map_err(read_failed)?;
        let row = row.ok_or_else(|| ApiError::not_found("session", id))?;
        self.session_address(&row)
    }

    /// The session of this row.
    pub(crate) fn session_address(&self, row: &SessionRow) -> Result<Arc<SessionAddress>, ApiError> {
        let place =
            self.workspaces.by_key(row.workspace).ok_or_else(|| ApiError::not_found("session", &row.id))?;
        Ok(Arc::new(SessionAddress::new(row.key, row.id.clone(), place.key, place.id.clone())))
    }
}

impl std::fmt::Debug for Daemon {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Daemon")
            .field("home", &self.home.path())
            .field("awake", &self.awake_count())
            .finish_non_exhaustive()
    }
}

fn report_panic(ended: Result<(), tokio::task::JoinError>) {
    if let Err(error) = ended
        && error.is_panic()
    {
        tracing::error!(%error, "a task of the daemon panicked; its session is read again from the journal");
    }
}

/// The daemon is going down.
pub(crate) fn stopping_error() -> ApiError {
    ApiError::new(ErrorCode::Stopping, "the daemon is stopping; start it again and retry")
}

/// Too much waits for one session.
fn overloaded_error() -> ApiError {
    ApiError::new(ErrorCode::Overloaded, "too many requests wait for this session; retry in a moment")
}

/// What a client is told when the journal did not take something.
pub(crate) fn append_failed(error: AppendError) -> ApiError {
    match error {
        AppendError::Stopped => stopping_error(),
        error => {
            ApiError::new(ErrorCode::StorageFailed, error.to_string()).with_detail("reason", error.code())
        }
    }
}

/// What a client is told when a file beside the journal could not be written.
pub(crate) fn blob_failed(error: BlobError) -> ApiError {
    ApiError::new(ErrorCode::StorageFailed, error.to_string()).with_detail("reason", error.code())
}

/// What a client is told when the journal could not be read.
pub(crate) fn read_failed(error: JournalReadError) -> ApiError {
    match error {
        JournalReadError::Stopped => stopping_error(),
        JournalReadError::Cursor(_) => ApiError::new(ErrorCode::BadCursor, error.to_string()),
        JournalReadError::Io(_) => ApiError::new(ErrorCode::StorageFailed, error.to_string()),
    }
}
