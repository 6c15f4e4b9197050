//! What all parts of the daemon share: the journal, who is awake, what is halted, what is spent. Requests come in
//! through here and find their session's actor; nothing here decides a transition.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use qd_core::session::Command;
use qd_journal::{
    AppendError, BlobError, Journal, ReadError, Scope, SessionFilter, SessionKey, SessionRow, WorkspaceKey,
};
use qd_protocol::limits::{MAILBOX_MAX, STOP_S};
use qd_protocol::policy::Policy;
use qd_protocol::{ApiError, Code, FleetId, Millis, SessionId, WorkspaceId, api};
use tokio::sync::{oneshot, watch};
use tokio::task::JoinSet;

use crate::actor::{self, Birth, Done, IdempotencyKey, Mail, Probe, Request};
use crate::budget::Budgets;
use crate::config::Config;
use crate::fleets::FleetMail;
use crate::home::Home;
use crate::keyed::Keyed;
use crate::metrics::Stats;
use crate::places::Places;
use crate::registry::{Mailbox, NotTaken, Registry};
use crate::workers::{Room, Told, Workers};

/// How often the supervisor looks.
const LOOK: Duration = Duration::from_secs(1);
/// Every so many looks, workers that nobody knows are looked for.
const STRAYS: u32 = 60;

/// The daemon, as seen by its parts.
pub(crate) struct Daemon {
    /// The truth.
    pub(crate) journal: Journal,
    /// Everything else that is on disk.
    pub(crate) home: Home,
    /// The agents, and the processes that hold them.
    pub(crate) workers: Workers,
    /// How many of them may live.
    pub(crate) room: Room,
    /// The workspaces, which are few.
    pub(crate) places: Places,
    /// One at a time per `Idempotency-Key`, run id or path.
    pub(crate) keys: Keyed,
    /// Whose money is spent.
    pub(crate) budgets: Budgets,
    /// What an operator would like to know.
    pub(crate) stats: Stats,
    /// How long an idle agent is kept.
    pub(crate) idle: Duration,
    /// What a session's agent may do if the session does not say.
    pub(crate) policy: Policy,
    /// Whether agents are given the tools of `qd mcp` if the session does not say.
    pub(crate) mcp: bool,
    /// Since when.
    pub(crate) started_at: Millis,
    registry: Registry<SessionId, Mail>,
    /// The fleets that are awake.
    pub(crate) fleets: Registry<FleetId, FleetMail>,
    /// Read by every step; set before, and lifted after, the journal says so.
    halted: AtomicBool,
    /// Set once, when the workers end with the daemon.
    ending: AtomicBool,
    /// The halt for people. Changed only under the key `halt`.
    halt: Mutex<api::Halt>,
    /// Turns true once, when the daemon is to end.
    stopping: watch::Sender<bool>,
    /// Owns every actor and every errand between them.
    tasks: Mutex<JoinSet<()>>,
}

/// A session that exists, with what is needed to reach it.
#[derive(Debug)]
pub(crate) struct SessionRef {
    /// Its id.
    pub(crate) id: SessionId,
    /// Its key in the journal.
    pub(crate) key: SessionKey,
    /// Its project.
    pub(crate) workspace: WorkspaceId,
    /// Its project's key in the journal.
    pub(crate) workspace_key: WorkspaceKey,
    /// What its events bear.
    pub(crate) scope: Arc<Scope>,
}

impl SessionRef {
    pub(crate) fn new(
        key: SessionKey,
        id: SessionId,
        workspace_key: WorkspaceKey,
        workspace: WorkspaceId,
    ) -> Self {
        let scope = Arc::new(Scope {
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
        home: Home,
        workers: Workers,
        config: &Config,
        halt: api::Halt,
    ) -> Arc<Self> {
        Arc::new(Self {
            journal,
            home,
            workers,
            room: Room::new(config.max_agents.value, config.min_free_mb.value << 20),
            places: Places::default(),
            keys: Keyed::default(),
            budgets: Budgets::default(),
            stats: Stats::default(),
            idle: Duration::from_secs(config.idle_s.value),
            policy: config.policy.value.clone(),
            mcp: config.mcp.value,
            started_at: Millis::now(),
            registry: Registry::new(MAILBOX_MAX),
            fleets: Registry::new(MAILBOX_MAX),
            halted: AtomicBool::new(halt.halted),
            ending: AtomicBool::new(false),
            halt: Mutex::new(halt),
            stopping: watch::Sender::new(false),
            tasks: Mutex::new(JoinSet::new()),
        })
    }

    /// Sends a command to a session and waits until what came of it is in the journal.
    pub(crate) async fn command(
        self: &Arc<Self>,
        session: &Arc<SessionRef>,
        command: Command,
        key: Option<IdempotencyKey>,
    ) -> Result<Done, ApiError> {
        self.request(session, command, key, None).await
    }

    /// The same with a session below that is created in the same transaction.
    pub(crate) async fn request(
        self: &Arc<Self>,
        session: &Arc<SessionRef>,
        command: Command,
        key: Option<IdempotencyKey>,
        birth: Option<Box<Birth>>,
    ) -> Result<Done, ApiError> {
        if self.is_stopping() {
            return Err(stopping());
        }
        let (reply, answer) = oneshot::channel();
        self.send(session, Mail::Request(Box::new(Request { command, key, birth, reply })))?;
        answer.await.unwrap_or_else(|_| Err(stopping()))
    }

    /// Puts something into a session's mailbox, and wakes it if it sleeps.
    pub(crate) fn send(self: &Arc<Self>, session: &Arc<SessionRef>, mail: Mail) -> Result<(), ApiError> {
        let wake = |mailbox: Arc<Mailbox<Mail>>| self.wake(Arc::clone(session), mailbox);
        self.registry.send(&session.id, mail, wake).map_err(|_| overloaded())
    }

    fn wake(self: &Arc<Self>, session: Arc<SessionRef>, mailbox: Arc<Mailbox<Mail>>) {
        let daemon = Arc::clone(self);
        self.spawn(async move { actor::live(daemon, session, mailbox).await });
    }

    /// Runs an errand that the daemon owns: it is waited for when the daemon ends.
    pub(crate) fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        let mut tasks = self.tasks.lock().unwrap_or_else(PoisonError::into_inner);
        while let Some(ended) = tasks.try_join_next() {
            report(ended);
        }
        tasks.spawn(task);
    }

    /// What an awake session does, once everything that came before has been committed; `None` if it sleeps.
    pub(crate) async fn probe(&self, session: &SessionId) -> Option<Probe> {
        let (reply, answer) = oneshot::channel();
        match self.registry.send_if_awake(session, Mail::Probe(reply)) {
            Ok(()) => answer.await.ok(),
            Err(NotTaken::Full(_) | NotTaken::Asleep(_)) => None,
        }
    }

    /// Changes who may have an agent, and tells those whom that concerns. Whoever sleeps is not in line.
    pub(crate) fn make_room(&self, change: impl FnOnce(&Room) -> Told) {
        let Told { wake, rest } = change(&self.room);
        for session in wake {
            // One that is gone or full looks for itself.
            let _sent = self.registry.send_if_awake(&session, Mail::Wake);
        }
        if let Some(session) = rest {
            let _sent = self.registry.send_if_awake(&session, Mail::GiveWay);
        }
    }

    /// Looks again and again whether there is room, while somebody waits for it, and for workers that nobody knows.
    pub(crate) async fn supervise(self: Arc<Self>) {
        let mut stopping = self.stop_signal();
        let mut ticks = 0_u32;
        loop {
            tokio::select! {
                _ = stopping.wait_for(|stop| *stop) => return,
                () = tokio::time::sleep(LOOK) => {}
            }
            if self.room.is_waited_for() {
                self.make_room(Room::look);
            }
            // Soon after the start, for those that a daemon left which died while it started them; then rarely.
            if ticks.is_multiple_of(STRAYS) {
                self.end_strays().await;
            }
            ticks = ticks.wrapping_add(1);
        }
    }

    async fn end_strays(&self) {
        let owing = SessionFilter { owes_only: true, ..SessionFilter::default() };
        match self.journal.sessions(owing, None, usize::MAX).await {
            Ok(rows) => self.workers.end_strays(&rows.into_iter().map(|row| row.id).collect()).await,
            Err(error) => tracing::warn!(%error, "workers that no session knows could not be looked for"),
        }
    }

    /// Whether the workers are being ended, and the daemon with them.
    pub(crate) fn is_ending(&self) -> bool {
        self.ending.load(Ordering::SeqCst)
    }

    /// Ends every worker, and waits until that is in the journal or the time is over.
    pub(crate) async fn end_workers(&self) {
        self.ending.store(true, Ordering::SeqCst);
        for session in self.registry.awake() {
            let _gone = self.registry.send_if_awake(&session, Mail::EndAgent);
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
    pub(crate) async fn barrier(&self) {
        let mut answers = Vec::new();
        for session in self.registry.awake() {
            let (reply, answer) = oneshot::channel();
            if self.registry.send_if_awake(&session, Mail::Probe(reply)).is_ok() {
                answers.push(answer);
            }
        }
        for answer in answers {
            // One that ended meanwhile has nothing unfinished either.
            let _probe: Result<Probe, oneshot::error::RecvError> = answer.await;
        }
    }

    /// Lets an actor sleep unless mail has come; see [`Registry::sleep`].
    pub(crate) fn let_sleep(&self, session: &SessionId, mailbox: &Arc<Mailbox<Mail>>) -> bool {
        self.registry.sleep(session, mailbox)
    }

    /// Takes an actor out of the register that ended without sleeping.
    pub(crate) fn bury(&self, session: &SessionId, mailbox: &Arc<Mailbox<Mail>>) {
        self.registry.bury(session, mailbox);
    }

    /// How many sessions are awake.
    pub(crate) fn awake(&self) -> usize {
        self.registry.len()
    }

    /// Whether nothing may start.
    pub(crate) fn halted(&self) -> bool {
        self.halted.load(Ordering::SeqCst)
    }

    /// The halt for people.
    pub(crate) fn halt(&self) -> api::Halt {
        self.halt.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Sets the flag that every step reads.
    pub(crate) fn set_halted(&self, halted: bool) {
        self.halted.store(halted, Ordering::SeqCst);
    }

    /// Sets what people see of it.
    pub(crate) fn set_halt(&self, halt: api::Halt) {
        *self.halt.lock().unwrap_or_else(PoisonError::into_inner) = halt;
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
        for session in self.registry.awake() {
            // One that is gone or full ends by the stop signal all the same.
            let _sent = self.registry.send_if_awake(&session, Mail::Stop);
        }
        for fleet in self.fleets.awake() {
            let _sent = self.fleets.send_if_awake(&fleet, FleetMail::Stop);
        }
        loop {
            // What ends may have begun something else.
            let mut tasks = std::mem::take(&mut *self.tasks.lock().unwrap_or_else(PoisonError::into_inner));
            if tasks.is_empty() {
                return;
            }
            while let Some(ended) = tasks.join_next().await {
                report(ended);
            }
        }
    }

    /// The session of this id in this workspace.
    pub(crate) async fn session(
        &self,
        workspace: &WorkspaceId,
        id: &SessionId,
    ) -> Result<Arc<SessionRef>, ApiError> {
        let found = self.find_session(id).await?;
        if found.workspace != *workspace {
            return Err(ApiError::not_found("session", id));
        }
        Ok(found)
    }

    /// The session of this id, wherever it is.
    pub(crate) async fn find_session(&self, id: &SessionId) -> Result<Arc<SessionRef>, ApiError> {
        let row = self.journal.session(id).await.map_err(read_failed)?;
        let row = row.ok_or_else(|| ApiError::not_found("session", id))?;
        self.session_ref(&row)
    }

    /// The session of this row.
    pub(crate) fn session_ref(&self, row: &SessionRow) -> Result<Arc<SessionRef>, ApiError> {
        let place =
            self.places.by_key(row.workspace).ok_or_else(|| ApiError::not_found("session", &row.id))?;
        Ok(Arc::new(SessionRef::new(row.key, row.id.clone(), place.key, place.id.clone())))
    }
}

impl std::fmt::Debug for Daemon {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Daemon")
            .field("home", &self.home.path())
            .field("awake", &self.awake())
            .finish_non_exhaustive()
    }
}

fn report(ended: Result<(), tokio::task::JoinError>) {
    if let Err(error) = ended
        && error.is_panic()
    {
        tracing::error!(%error, "a task of the daemon panicked; its session is read again from the journal");
    }
}

/// The daemon is going down.
pub(crate) fn stopping() -> ApiError {
    ApiError::new(Code::Stopping, "the daemon is stopping; start it again and retry")
}

/// Too much waits for one session.
fn overloaded() -> ApiError {
    ApiError::new(Code::Overloaded, "too many requests wait for this session; retry in a moment")
}

/// What a client is told when the journal did not take something.
pub(crate) fn append_failed(error: AppendError) -> ApiError {
    match error {
        AppendError::Stopped => stopping(),
        error => ApiError::new(Code::StorageFailed, error.to_string()).with("reason", error.code()),
    }
}

/// What a client is told when a file beside the journal could not be written.
pub(crate) fn blob_failed(error: BlobError) -> ApiError {
    ApiError::new(Code::StorageFailed, error.to_string()).with("reason", error.code())
}

/// What a client is told when the journal could not be read.
pub(crate) fn read_failed(error: ReadError) -> ApiError {
    match error {
        ReadError::Stopped => stopping(),
        ReadError::Cursor(_) => ApiError::new(Code::BadCursor, error.to_string()),
        ReadError::Io(_) => ApiError::new(Code::StorageFailed, error.to_string()),
    }
}
