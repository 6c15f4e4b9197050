//! The state that all parts of the daemon share: the journal, the awake actors, the halt flag, the spent budgets and
//! quotas. Requests reach their session's actor through here. Nothing here decides a transition.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use qd_core::session::SessionCommand;
use qd_home::{DaemonConfig, DaemonHome, SettingOrigin};
use qd_journal::{
    AppendError, AppendRequest, BlobError, EventScope, IdempotencyRecord, Journal, JournalReadError,
    NewEvent, RowChange, SessionFilter, SessionKey, SessionRow, WorkspaceKey,
};
use qd_protocol::event::{EventActor, EventBody};
use qd_protocol::limits::{MAILBOX_MAX, STOP_S};
use qd_protocol::policy::Policy;
use qd_protocol::{ApiError, ErrorCode, FleetId, Millis, SessionId, WorkspaceId, api};
use tokio::sync::{oneshot, watch};
use tokio::task::JoinSet;

use crate::actor::{
    self, ActorMessage, ChildCreation, CommandCompletion, CommandRequest, IdempotencyKey, SessionActivity,
    encode_failed,
};
use crate::agents::IdleSetting;
use crate::budget::SpentBudgets;
use crate::client_tokens::ClientTokenStore;
use crate::derived_data::DerivedData;
use crate::descriptors::DescriptorShares;
use crate::fleets::FleetActorMessage;
use crate::journal_check::JournalChecks;
use crate::keyed_locks::KeyedLocks;
use crate::metrics::DaemonMetrics;
use crate::quotas::ExhaustedQuotas;
use crate::registry::{ActorMailbox, ActorRegistry, MailboxRejection};
use crate::workers::{AgentSlotLimits, AgentSlots, SlotChanges, Workers};
use crate::workspaces::WorkspaceRegistry;

/// The pause between two runs of the supervisor.
const SUPERVISE_INTERVAL: Duration = Duration::from_secs(1);
/// The supervisor looks for stray workers once per this many runs.
const STRAY_CHECK_TICKS: u32 = 60;
/// The supervisor checks that no run is forgotten once per this many runs.
const LIVENESS_CHECK_TICKS: u32 = 5;

/// The shared state of the daemon.
pub(crate) struct Daemon {
    /// The source of truth.
    pub(crate) journal: Journal,
    /// All other files on disk.
    pub(crate) home: DaemonHome,
    pub(crate) workers: Workers,
    /// The tokens of clients over TCP.
    pub(crate) client_tokens: Arc<ClientTokenStore>,
    /// How many agents may live at once.
    pub(crate) agent_slots: AgentSlots,
    /// All workspaces, in memory: they are few.
    pub(crate) workspaces: WorkspaceRegistry,
    /// Serializes requests with the same `Idempotency-Key`, run id or path.
    pub(crate) key_locks: KeyedLocks,
    /// Which sessions and fleets have spent their budget.
    pub(crate) budgets: SpentBudgets,
    pub(crate) quotas: ExhaustedQuotas,
    pub(crate) metrics: DaemonMetrics,
    /// What the checks of the journal have found.
    pub(crate) journal_checks: JournalChecks,
    /// What searches and usage reports are answered from.
    pub(crate) derived: DerivedData,
    pub(crate) idle: IdleSetting,
    /// How old streamed text must be before it is merged; zero means never.
    pub(crate) merge_after: Duration,
    /// The policy of sessions that do not set one.
    pub(crate) default_policy: Policy,
    /// Whether agents get the tools of `qd mcp` if the session does not say.
    pub(crate) default_mcp: bool,
    pub(crate) started_at: Millis,
    registry: ActorRegistry<SessionId, ActorMessage>,
    /// The mailboxes of the awake fleets.
    pub(crate) fleets: ActorRegistry<FleetId, FleetActorMessage>,
    /// Read by every step. Set before `halt.set` is journalled, cleared after `halt.lifted` is.
    halted: AtomicBool,
    /// Set once, when the workers are to end together with the daemon.
    ending_workers: AtomicBool,
    /// The halt as the API shows it. Changed only under the key lock `halt`.
    halt_status: Mutex<api::HaltStatus>,
    /// Turns true once, when the daemon begins to stop.
    stopping: watch::Sender<bool>,
    /// Owns every actor and every background task.
    tasks: Mutex<JoinSet<()>>,
}

/// An existing session, with the keys needed to reach it.
#[derive(Debug)]
pub(crate) struct SessionAddress {
    pub(crate) id: SessionId,
    /// The session's key in the journal.
    pub(crate) key: SessionKey,
    pub(crate) workspace: WorkspaceId,
    /// The workspace's key in the journal.
    pub(crate) workspace_key: WorkspaceKey,
    /// The scope of all the session's events.
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

/// What held runs back when the last daemon ended, and still does.
pub(crate) struct RestoredHolds {
    pub(crate) halt: api::HaltStatus,
    pub(crate) quotas: ExhaustedQuotas,
}

impl Daemon {
    pub(crate) fn new(
        journal: Journal,
        home: DaemonHome,
        workers: Workers,
        client_tokens: Arc<ClientTokenStore>,
        config: &DaemonConfig,
        shares: DescriptorShares,
        holds: RestoredHolds,
    ) -> Arc<Self> {
        let RestoredHolds { halt, quotas } = holds;
        let derived = DerivedData::new(&home);
        Arc::new(Self {
            journal,
            home,
            workers,
            client_tokens,
            agent_slots: AgentSlots::new(AgentSlotLimits {
                agents: config.max_agents.value,
                workers: shares.workers,
                min_free_bytes: config.min_free_mb.value << 20,
            }),
            workspaces: WorkspaceRegistry::default(),
            key_locks: KeyedLocks::default(),
            budgets: SpentBudgets::default(),
            quotas,
            metrics: DaemonMetrics::default(),
            journal_checks: JournalChecks::default(),
            derived,
            idle: IdleSetting {
                timeout: Duration::from_secs(config.idle_s.value),
                is_configured: config.idle_s.origin != SettingOrigin::Default,
            },
            merge_after: Duration::from_secs(config.merge_after_s.value),
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

    /// Sends a command to a session and waits until its result is in the journal. Its events say that `actor` caused
    /// them.
    pub(crate) async fn send_command(
        self: &Arc<Self>,
        session: &Arc<SessionAddress>,
        actor: &Arc<EventActor>,
        command: SessionCommand,
        key: Option<IdempotencyKey>,
    ) -> Result<CommandCompletion, ApiError> {
        self.send_command_with_child(session, actor, command, key, None).await
    }

    /// Like [`Self::send_command`], with a child session that is created in the same transaction.
    pub(crate) async fn send_command_with_child(
        self: &Arc<Self>,
        session: &Arc<SessionAddress>,
        actor: &Arc<EventActor>,
        command: SessionCommand,
        key: Option<IdempotencyKey>,
        child: Option<Box<ChildCreation>>,
    ) -> Result<CommandCompletion, ApiError> {
        if self.is_stopping() {
            return Err(stopping_error());
        }
        let (reply, answer) = oneshot::channel();
        let actor = Arc::clone(actor);
        let request = CommandRequest { actor, command, key, child, reply };
        self.send_message(session, ActorMessage::Request(Box::new(request)))?;
        answer.await.unwrap_or_else(|_| Err(stopping_error()))
    }

    /// Puts a message into a session's mailbox, and wakes the session if it sleeps.
    pub(crate) fn send_message(
        self: &Arc<Self>,
        session: &Arc<SessionAddress>,
        message: ActorMessage,
    ) -> Result<(), ApiError> {
        let wake = |mailbox: Arc<ActorMailbox<ActorMessage>>| self.spawn_actor(Arc::clone(session), mailbox);
        self.registry.send(&session.id, message, wake).map_err(|_| overloaded_error())
    }

    fn spawn_actor(self: &Arc<Self>, session: Arc<SessionAddress>, mailbox: Arc<ActorMailbox<ActorMessage>>) {
        let daemon = Arc::clone(self);
        self.spawn(async move { actor::run_actor(daemon, session, mailbox).await });
    }

    /// Spawns a task that the daemon owns: shutdown waits for it.
    pub(crate) fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) -> tokio::task::AbortHandle {
        let mut tasks = self.tasks.lock();
        while let Some(ended) = tasks.try_join_next() {
            report_panic(ended);
        }
        tasks.spawn(task)
    }

    /// Reports what an awake session is doing, once everything before is committed. `None` if it sleeps or its mailbox
    /// is full.
    pub(crate) async fn probe_session(&self, session: &SessionId) -> Option<SessionActivity> {
        let (reply, answer) = oneshot::channel();
        match self.registry.send_if_awake(session, ActorMessage::Probe(reply)) {
            Ok(()) => answer.await.ok(),
            Err(MailboxRejection::Full(_) | MailboxRejection::Asleep(_)) => None,
        }
    }

    /// Applies a change to the agent slots, and notifies the sessions it affects. Only awake sessions wait for a slot.
    pub(crate) fn update_slots(&self, change: impl FnOnce(&AgentSlots) -> SlotChanges) {
        let SlotChanges { wake, session_to_stop } = change(&self.agent_slots);
        for session in wake {
            // A session that has ended or has a full mailbox checks for itself at its next step.
            let _sent = self.registry.send_if_awake(&session, ActorMessage::Wake);
        }
        if let Some(session) = session_to_stop {
            let _sent = self.registry.send_if_awake(&session, ActorMessage::StopIfIdle);
        }
    }

    /// Has every awake session check whether its runs may start.
    pub(crate) fn wake_awake_sessions(&self) {
        for session in self.registry.awake_keys() {
            // One with a full mailbox checks for itself at its next step.
            let _sent = self.registry.send_if_awake(&session, ActorMessage::Wake);
        }
    }

    /// Rechecks the agent slots while a session waits for one, releases quotas that have reset, and looks for stray
    /// workers. Runs until the daemon stops.
    pub(crate) async fn supervise(self: Arc<Self>) {
        let mut stopping = self.stop_signal();
        let mut ticks = 0_u32;
        let mut sleeping_before = HashSet::new();
        loop {
            tokio::select! {
                _ = stopping.wait_for(|stop| *stop) => return,
                () = tokio::time::sleep(SUPERVISE_INTERVAL) => {}
            }
            if self.agent_slots.has_waiters() {
                self.update_slots(AgentSlots::recheck);
            }
            self.release_reset_quotas().await;
            // Soon after the start, for workers of a daemon that died while it started them; then rarely.
            if ticks.is_multiple_of(STRAY_CHECK_TICKS) {
                self.end_stray_workers().await;
            }
            if ticks.is_multiple_of(LIVENESS_CHECK_TICKS) {
                sleeping_before = self.check_liveness(sleeping_before).await;
            }
            ticks = ticks.wrapping_add(1);
        }
    }

    /// Has every awake session check that something will make it go on, and wakes those that sleep with unfinished
    /// runs although neither a halt nor a quota holds them: an actor that panicked leaves one. Returns the latter; a session is only
    /// reported if it was among them at the last check too, because it may be about to finish or to fall asleep.
    async fn check_liveness(self: &Arc<Self>, sleeping_before: HashSet<SessionId>) -> HashSet<SessionId> {
        for session in self.registry.awake_keys() {
            // One with a full mailbox is awake and working.
            let _sent = self.registry.send_if_awake(&session, ActorMessage::CheckLiveness);
        }
        let live = SessionFilter { live_only: true, ..SessionFilter::default() };
        let Ok(rows) = self.journal.sessions(live, None, usize::MAX).await else { return sleeping_before };
        let awake: HashSet<SessionId> = self.registry.awake_keys().into_iter().collect();
        let mut sleeping = HashSet::new();
        let is_forgotten =
            |row: &SessionRow| !self.is_halted() && !awake.contains(&row.id) && !self.waits_for_quota(row);
        for row in rows.into_iter().filter(is_forgotten) {
            if sleeping_before.contains(&row.id)
                && let Ok(session) = self.session_address(&row)
            {
                self.metrics.count_stuck_session();
                tracing::error!(
                    session = %row.id,
                    "a session with unfinished runs has nothing that will wake it: it sleeps; it is woken now"
                );
                // With a full mailbox it is awake.
                let _sent = self.send_message(&session, ActorMessage::Wake);
            }
            sleeping.insert(row.id);
        }
        sleeping
    }

    async fn end_stray_workers(&self) {
        let with_obligations = SessionFilter { open_work_only: true, ..SessionFilter::default() };
        match self.journal.sessions(with_obligations, None, usize::MAX).await {
            Ok(rows) => self.workers.end_strays(&rows.into_iter().map(|row| row.id).collect()).await,
            Err(error) => tracing::warn!(%error, "could not look for stray workers"),
        }
    }

    /// Whether the workers are being ended together with the daemon.
    pub(crate) fn is_ending_workers(&self) -> bool {
        self.ending_workers.load(Ordering::SeqCst)
    }

    /// Ends every worker, and waits until their ends are journalled or the time limit has passed.
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

    /// Appends an event that belongs to no workspace, session or fleet, together with the rows that change with it. A
    /// full disk does not prevent it.
    pub(crate) async fn append_daemon_event(
        &self,
        body: &EventBody,
        actor: &EventActor,
        ts: Millis,
        rows: Vec<RowChange>,
        idempotency: Option<IdempotencyRecord>,
    ) -> Result<(), ApiError> {
        let event = NewEvent {
            scope: Arc::new(EventScope::default()),
            number: None,
            ts: ts.into(),
            run: None,
            kind: body.kind(),
            data: body.encode(Some(actor)).map_err(encode_failed)?,
            update_number: None,
        };
        let append = AppendRequest { events: vec![event], rows, idempotency, may_use_reserve: true };
        self.journal.append(append).await.map(drop).map_err(append_failed)
    }

    /// Waits until every awake session has committed what it had already decided.
    pub(crate) async fn wait_for_commits(&self) {
        let mut answers = Vec::new();
        for session in self.registry.awake_keys() {
            let (reply, answer) = oneshot::channel();
            if self.registry.send_if_awake(&session, ActorMessage::Probe(reply)).is_ok() {
                answers.push(answer);
            }
        }
        for answer in answers {
            // An actor that ended meanwhile has nothing uncommitted either.
            let _probe: Result<SessionActivity, oneshot::error::RecvError> = answer.await;
        }
    }

    /// Lets an actor sleep unless a message has arrived; see [`ActorRegistry::try_sleep`].
    pub(crate) fn try_sleep_actor(
        &self,
        session: &SessionId,
        mailbox: &Arc<ActorMailbox<ActorMessage>>,
    ) -> bool {
        self.registry.try_sleep(session, mailbox)
    }

    /// Removes an actor that ended without going to sleep: its session was purged, or it panicked. Its slot is given
    /// back first, while no other actor of this session can exist; the next one reports its standing anew.
    pub(crate) fn remove_dead_actor(&self, session: &SessionId, mailbox: &Arc<ActorMailbox<ActorMessage>>) {
        if self.registry.is_registered(session, mailbox) {
            self.update_slots(|slots| slots.remove(session));
        }
        self.registry.remove_dead(session, mailbox);
    }

    pub(crate) fn awake_count(&self) -> usize {
        self.registry.len()
    }

    pub(crate) fn is_halted(&self) -> bool {
        self.halted.load(Ordering::SeqCst)
    }

    /// The halt as the API shows it.
    pub(crate) fn halt_status(&self) -> api::HaltStatus {
        self.halt_status.lock().clone()
    }

    /// Sets the flag that every step reads.
    pub(crate) fn set_halted(&self, halted: bool) {
        self.halted.store(halted, Ordering::SeqCst);
    }

    /// Sets the halt as the API shows it.
    pub(crate) fn set_halt_status(&self, halt: api::HaltStatus) {
        *self.halt_status.lock() = halt;
    }

    /// Begins the shutdown: no new work is accepted, streams end, actors finish what they have begun.
    pub(crate) fn stop(&self) {
        self.stopping.send_replace(true);
    }

    /// Whether the shutdown has begun.
    pub(crate) fn is_stopping(&self) -> bool {
        *self.stopping.borrow()
    }

    /// Turns true when the shutdown begins.
    pub(crate) fn stop_signal(&self) -> watch::Receiver<bool> {
        self.stopping.subscribe()
    }

    /// Stops every actor once it has committed what it had begun, and waits for all actors and background tasks.
    pub(crate) async fn end_tasks(&self) {
        for session in self.registry.awake_keys() {
            // An actor that has ended needs no message. One with a full mailbox does not get it: the caller's timeout
            // cuts it off.
            let _sent = self.registry.send_if_awake(&session, ActorMessage::Stop);
        }
        for fleet in self.fleets.awake_keys() {
            let _sent = self.fleets.send_if_awake(&fleet, FleetActorMessage::Stop);
        }
        loop {
            // A task that ends may have spawned another.
            let mut tasks = std::mem::take(&mut *self.tasks.lock());
            if tasks.is_empty() {
                return;
            }
            while let Some(ended) = tasks.join_next().await {
                report_panic(ended);
            }
        }
    }

    /// The session with this id; `not_found` if it belongs to another workspace.
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

    /// The session with this id, in any workspace.
    pub(crate) async fn find_session(&self, id: &SessionId) -> Result<Arc<SessionAddress>, ApiError> {
        let row = self.journal.session(id).await.map_err(read_failed)?;
        let row = row.ok_or_else(|| ApiError::not_found("session", id))?;
        self.session_address(&row)
    }

    pub(crate) fn session_address(&self, row: &SessionRow) -> Result<Arc<SessionAddress>, ApiError> {
        let workspace =
            self.workspaces.by_key(row.workspace).ok_or_else(|| ApiError::not_found("session", &row.id))?;
        Ok(Arc::new(SessionAddress::new(row.key, row.id.clone(), workspace.key, workspace.id.clone())))
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
        tracing::error!(
            %error,
            "a task of the daemon panicked; if it was a session's actor, the next message loads the session again"
        );
    }
}

pub(crate) fn stopping_error() -> ApiError {
    ApiError::new(ErrorCode::Stopping, "the daemon is stopping; start it again and retry")
}

fn overloaded_error() -> ApiError {
    ApiError::new(ErrorCode::Overloaded, "too many requests wait for this session; retry in a moment")
}

/// The client's error when the journal rejected an append.
pub(crate) fn append_failed(error: AppendError) -> ApiError {
    match error {
        AppendError::Stopped => stopping_error(),
        error => {
            let reason = error.code();
            ApiError::caused_by(ErrorCode::StorageFailed, error).with_detail("reason", reason)
        }
    }
}

/// The client's error when a blob could not be written.
pub(crate) fn blob_failed(error: BlobError) -> ApiError {
    let reason = error.code();
    ApiError::caused_by(ErrorCode::StorageFailed, error).with_detail("reason", reason)
}

/// The client's error when the journal could not be read.
pub(crate) fn read_failed(error: JournalReadError) -> ApiError {
    match error {
        JournalReadError::Stopped => stopping_error(),
        JournalReadError::Cursor(_) => ApiError::new(ErrorCode::BadCursor, error.to_string()),
        JournalReadError::Io(_) => ApiError::caused_by(ErrorCode::StorageFailed, error),
    }
}
