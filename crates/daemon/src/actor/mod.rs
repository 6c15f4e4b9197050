//! The async shell around one session's state machine. The actor drains its mailbox, lets the machine judge the input,
//! appends the result once, waits for the commit, and only then replies and performs the effects. If the append fails,
//! the actor discards its state, loads it again and fails the waiting requests; nobody has seen the discarded events.

mod agent;
mod batch;
mod children;
mod effects;
mod liveness;
mod load;
mod preparation;
mod reply;
mod retry;

use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use futures_util::FutureExt as _;
use qd_core::rows::UpdatedRow;
use qd_core::session::{
    AgentAvailability, SessionCommand, SessionContext, SessionEffect, SessionInput, SessionPhase,
    SessionState, deadline, may_start_worker, step,
};
use qd_journal::{IdempotencyRecord, SessionKey};
use qd_link::{LinkEvent, NumberedUpdate};
use qd_protocol::event::EventActor;
use qd_protocol::frame::v1::AgentPresence;
use qd_protocol::link::{AgentExitReason, AgentUpdate, UpdateNumber};
use qd_protocol::sandbox_spec::{SandboxReport, SandboxSelection};
use qd_protocol::{AccountId, ApiError, ErrorCode, EventBody, EventNumber, RunId};
use serde::Serialize;
use sha2::{Digest, Sha256};
use tokio::sync::oneshot;
use tokio::time::Instant;

pub(crate) use reply::{ActorReply, CommandCompletion, ask_changed, run_id_conflict};

use crate::clock::read_clocks;
use crate::daemon::{Daemon, SessionAddress};
use crate::registry::ActorMailbox;
use crate::workers::{RecordedWorker, SandboxRequest, SlotStanding};
use agent::SessionAgent;
use batch::{ActorBatch, PromptCache};
pub(crate) use batch::{ChildCreation, FirstEventIndex, encode_failed, row_change, session_row};
use children::ChildCancelTask;
pub(crate) use children::retry_delivery;
pub(crate) use load::{encode_snapshot, full_text, recorded_event};
use preparation::{PreparationResult, WorktreePreparation};
use retry::UnjournalledInputs;

/// The most messages that are judged before the next append.
const BATCH_MAX: usize = 256;
/// How long a session without a worker stays awake at most; a shorter `idle_s` shortens it.
const SLEEP_AFTER: Duration = Duration::from_secs(10);
/// After this many batches of messages in a row, the agent and the deadlines get a turn. A session that is flooded with
/// requests still hears its agent.
const MAILBOX_TURNS_MAX: u8 = 16;

/// A message in a session's mailbox.
pub(crate) enum ActorMessage {
    /// A command whose sender waits for the reply.
    Request(Box<CommandRequest>),
    /// Conditions have changed (a slot, a lifted halt, a budget, a quota): check whether anything can proceed.
    Wake,
    /// Check that something will make the session go on.
    CheckLiveness,
    /// Another session needs an agent slot: stop the agent if it is idle.
    StopIfIdle,
    /// End the agent: the workers end together with the daemon.
    EndAgent,
    /// Report the session's activity, once everything before is committed.
    Probe(oneshot::Sender<SessionActivity>),
    /// The daemon stops.
    Stop,
}

/// A command, with the channel for its reply.
pub(crate) struct CommandRequest {
    /// Who sent it.
    pub(crate) actor: Arc<EventActor>,
    pub(crate) command: SessionCommand,
    /// The client's `Idempotency-Key`, stored with the reply.
    pub(crate) key: Option<IdempotencyKey>,
    /// A child session that is created in the same transaction.
    pub(crate) child: Option<Box<ChildCreation>>,
    pub(crate) reply: oneshot::Sender<Result<CommandCompletion, ApiError>>,
}

/// An `Idempotency-Key` and the fingerprint of the request that came with it.
#[derive(Debug, Clone)]
pub(crate) struct IdempotencyKey {
    pub(crate) key: String,
    pub(crate) fingerprint: [u8; 32],
}

impl IdempotencyKey {
    /// Bytes for deriving an id when a request has a key but no id, so that the same request always gets the same id.
    pub(crate) fn digest(&self) -> [u8; 32] {
        Sha256::new().chain_update(self.fingerprint).chain_update(&self.key).finalize().into()
    }

    /// What an append stores, so that a repeat of the request gets this response.
    pub(crate) fn into_record(self, response: &impl Serialize) -> Result<IdempotencyRecord, ApiError> {
        let bytes = serde_json::to_vec(response).map_err(encode_failed)?;
        let Self { key, fingerprint } = self;
        Ok(IdempotencyRecord { key, fingerprint, make_response: Box::new(move |_| bytes.clone()) })
    }
}

/// What a session is doing.
#[derive(Debug, Clone, Default)]
pub(crate) struct SessionActivity {
    /// Whether any run is unfinished.
    pub(crate) busy: bool,
    /// Queued runs with their positions, counted from 1.
    pub(crate) queued: Vec<(u32, RunId)>,
}

/// Runs a session's actor until the session sleeps or is purged, or the daemon stops. If the session cannot be loaded,
/// the requests in its mailbox fail.
pub(crate) async fn run_actor(
    daemon: Arc<Daemon>,
    session: Arc<SessionAddress>,
    mailbox: Arc<ActorMailbox<ActorMessage>>,
) {
    // Dropped on a panic too: the next message must wake a new actor, not wait for a dead one.
    let _guard = ActorGuard {
        daemon: Arc::clone(&daemon),
        session: Arc::clone(&session),
        mailbox: Arc::clone(&mailbox),
    };
    match Box::pin(load::load(&daemon, &session)).await {
        Ok((state, lineage)) => {
            let prompts = PromptCache::default();
            let agent = SessionAgent::default();
            let account = state.account();
            let mut actor = SessionActor {
                daemon,
                session,
                mailbox,
                state,
                lineage,
                account,
                agent,
                launch_decided: false,
                preparation: None,
                child_cancel: None,
                child_close: None,
                stuck_at: None,
                checks_suspended: 0,
                mailbox_turns: 0,
                idle_timeout: None,
                prompts,
                unreported_exit: None,
                unjournalled: None,
                purged: false,
            };
            actor.run().await;
        }
        Err(error) => {
            // A message that was sent just before a purge finds no session, which is nothing to worry about.
            if error.code != ErrorCode::NotFound {
                tracing::error!(session = %session.id, %error, "could not load the session from the journal");
            }
            fail_all_requests(&mailbox, error);
        }
    }
}

/// Waits; for ever if the time is [`Duration::MAX`], and not at all if it is zero.
async fn pause(time: Duration) {
    match time {
        Duration::ZERO => {}
        Duration::MAX => std::future::pending().await,
        time => tokio::time::sleep(time).await,
    }
}

struct ActorGuard {
    daemon: Arc<Daemon>,
    session: Arc<SessionAddress>,
    mailbox: Arc<ActorMailbox<ActorMessage>>,
}

impl Drop for ActorGuard {
    fn drop(&mut self) {
        self.daemon.remove_dead_actor(&self.session.id, &self.mailbox);
    }
}

/// Fails every request in the mailbox.
fn fail_all_requests(mailbox: &ActorMailbox<ActorMessage>, error: ApiError) {
    let mut context = std::task::Context::from_waker(std::task::Waker::noop());
    let mut messages = Vec::new();
    while mailbox.poll_take(&mut context, &mut messages, BATCH_MAX) == Poll::Ready(()) {}
    for message in messages {
        if let ActorMessage::Request(request) = message {
            // A client that has disconnected does not need the answer.
            let _gone = request.reply.send(Err(error.clone()));
        }
    }
}

struct SessionActor {
    daemon: Arc<Daemon>,
    session: Arc<SessionAddress>,
    mailbox: Arc<ActorMailbox<ActorMessage>>,
    state: Box<SessionState>,
    /// The session's own key, then its parent's and so on up, then its fleet's: the budgets that apply.
    lineage: Vec<SessionKey>,
    /// The account that its agent uses, which never changes.
    account: AccountId,
    agent: SessionAgent,
    /// The machine has decided to launch an agent, and that is not carried out yet.
    launch_decided: bool,
    /// The worktree that is being prepared for an agent that is about to start.
    preparation: Option<Box<WorktreePreparation>>,
    /// The cancel that is being passed on to the child sessions, or was last.
    child_cancel: Option<ChildCancelTask>,
    /// The task that closes the child sessions.
    child_close: Option<tokio::task::AbortHandle>,
    /// The number of the last event when the last check found nothing that will make the session go on.
    stuck_at: Option<EventNumber>,
    /// How many checks in a row found a run that is suspended for child sessions.
    checks_suspended: u8,
    /// How many batches of messages were taken since anything else had a turn.
    mailbox_turns: u8,
    /// How long the agent may be idle before it is stopped; `None` if stopping it would lose its conversation.
    idle_timeout: Option<Duration>,
    /// Small prompts that were accepted and have not been sent to the agent.
    prompts: PromptCache,
    /// The end of an agent that no link reports: it could not be started, or there was none to stop. The machine is told
    /// at once.
    unreported_exit: Option<AgentExitReason>,
    /// The inputs whose events the journal did not take.
    unjournalled: Option<Box<UnjournalledInputs>>,
    /// Whether the session's events have been deleted.
    purged: bool,
}

/// What wakes the actor.
enum ActorWakeup {
    Messages(Vec<ActorMessage>),
    LinkEvent(LinkEvent),
    Prepared(PreparationResult),
    /// The machine has not been told of the end of an agent.
    UnreportedExit,
    /// Inputs that the journal did not take are judged again.
    Retry,
    Tick,
    /// A worker that was told to end has not ended in time.
    KillDeadline,
    Idle,
}

impl SessionActor {
    async fn run(&mut self) {
        let mut batch = ActorBatch::default();
        if let Some(recorded) = self.recorded_worker() {
            self.idle_timeout = self.agent_idle_timeout();
            self.agent.set_existing_link(self.daemon.workers.attach(recorded));
        } else if self.state.active_run().is_some() {
            // A daemon of an earlier version held its agents in its own process: they died with it.
            self.step_worker_gone(&mut batch, AgentExitReason::Lost);
        }
        self.step_machine(&mut batch, SessionInput::Wake);
        Box::pin(self.commit(batch)).await;
        loop {
            match self.next_wakeup().await {
                ActorWakeup::Messages(messages) => {
                    if Box::pin(self.handle_messages(messages)).await.is_break() {
                        return;
                    }
                }
                ActorWakeup::LinkEvent(event) => Box::pin(self.handle_link_event(event)).await,
                ActorWakeup::Prepared(result) => Box::pin(self.finish_preparation(result)).await,
                ActorWakeup::UnreportedExit => {
                    let mut batch = ActorBatch::default();
                    if let Some(exit) = self.unreported_exit.take() {
                        self.step_worker_gone(&mut batch, exit);
                    }
                    Box::pin(self.commit(batch)).await;
                }
                ActorWakeup::Retry => Box::pin(self.retry_unjournalled()).await,
                ActorWakeup::Tick => {
                    let mut batch = ActorBatch::default();
                    self.step_machine(&mut batch, SessionInput::Tick);
                    Box::pin(self.commit(batch)).await;
                }
                ActorWakeup::KillDeadline => {
                    self.daemon.workers.kill(&self.session.id);
                    self.agent.extend_kill_deadline();
                }
                ActorWakeup::Idle if self.can_stop_idle_agent() => {
                    self.agent.stop_idle();
                    self.update_slot();
                }
                ActorWakeup::Idle => {
                    if self.daemon.try_sleep_actor(&self.session.id, &self.mailbox) {
                        return;
                    }
                }
            }
            // A busy actor yields to the other tasks.
            tokio::task::coop::consume_budget().await;
            if self.purged {
                // A request that looked the session up just before gets `not_found`: a purged session must not write
                // again.
                fail_all_requests(&self.mailbox, ApiError::not_found("session", &self.session.id));
                return;
            }
        }
    }

    /// Waits for the next event. The mailbox comes before the agent, so that a cancel overtakes what it cancels.
    async fn next_wakeup(&mut self) -> ActorWakeup {
        let mut messages = Vec::new();
        let mailbox = &self.mailbox;
        let mailbox_ready =
            std::future::poll_fn(|context| mailbox.poll_take(context, &mut messages, BATCH_MAX));
        let remaining = |until: Instant| until.saturating_duration_since(Instant::now());
        let catch_up = self.agent.catch_up_deadline().map(remaining).unwrap_or_default();
        let due = deadline(&self.state, self.agent_availability(), read_clocks());
        let due = due.map(|remaining| Duration::from_millis(remaining).max(catch_up));
        let kill_due = self.agent.kill_deadline().map(remaining);
        let retry_due = self.unjournalled.as_ref().map(|inputs| remaining(inputs.retry_at));
        let (delay, wakeup) = match (due, kill_due) {
            _ if let Some(retry_due) = retry_due => (retry_due, ActorWakeup::Retry),
            _ if self.unreported_exit.is_some() => (Duration::ZERO, ActorWakeup::UnreportedExit),
            (due, Some(kill_due)) if due.is_none_or(|due| kill_due < due) => {
                (kill_due, ActorWakeup::KillDeadline)
            }
            // A claim on the session's mail may expire much later than the agent's idle timeout.
            (Some(due), _) if !self.stops_idle_agent_before(due) => (due, ActorWakeup::Tick),
            _ if self.can_stop_idle_agent() => {
                (self.idle_timeout.unwrap_or(Duration::MAX), ActorWakeup::Idle)
            }
            // Processes that earlier turns left running keep a session awake: its worker needs a session attached.
            _ if self.is_quiet() && !self.agent.has_worker() => {
                (self.daemon.idle.timeout.min(SLEEP_AFTER), ActorWakeup::Idle)
            }
            _ => (Duration::MAX, ActorWakeup::Tick),
        };
        let accepts_events = !self.has_unjudged_inputs();
        let preparation = &mut self.preparation;
        let prepared = async {
            match preparation {
                Some(preparation) => preparation.wait().await,
                None => std::future::pending().await,
            }
        };
        let agent = &mut self.agent;
        let others = async {
            tokio::select! {
                biased;
                event = agent.next_link_event(), if accepts_events => ActorWakeup::LinkEvent(event),
                prepared = prepared, if accepts_events => ActorWakeup::Prepared(prepared),
                () = pause(delay) => wakeup,
            }
        };
        let mut others = std::pin::pin!(others);
        if self.mailbox_turns >= MAILBOX_TURNS_MAX {
            self.mailbox_turns = 0;
            if let Some(wakeup) = others.as_mut().now_or_never() {
                return wakeup;
            }
        }
        tokio::select! {
            biased;
            () = mailbox_ready => {
                self.mailbox_turns += 1;
                ActorWakeup::Messages(messages)
            }
            wakeup = others => {
                self.mailbox_turns = 0;
                wakeup
            }
        }
    }

    /// Whether there are inputs that must be judged before any new update of the agent is.
    fn has_unjudged_inputs(&self) -> bool {
        self.unreported_exit.is_some() || self.unjournalled.is_some()
    }

    /// No run is active or about to start, and no input waits to be judged again.
    fn is_quiet(&self) -> bool {
        let nothing_runs = !self.state.is_busy() || (self.holds_runs() && self.state.active_run().is_none());
        !self.has_unjudged_inputs() && nothing_runs && self.preparation.is_none() && !self.agent.is_changing()
    }

    /// Whether an agent is available. It counts as starting from the moment its launch is decided, also while its
    /// worktree is being prepared; and if it could not be started, until the machine has been told.
    fn agent_availability(&self) -> AgentAvailability {
        let exit_unjudged = self.unreported_exit.is_some()
            || self.unjournalled.as_ref().is_some_and(|inputs| inputs.gone.is_some());
        match self.agent.availability() {
            _ if self.launch_decided || self.preparation.is_some() || exit_unjudged => {
                AgentAvailability::Starting
            }
            availability => availability,
        }
    }

    /// Whether the agent is idle, between runs or while its run is suspended, and loses nothing by being stopped.
    fn can_stop_idle_agent(&self) -> bool {
        let suspended =
            self.state.suspension().is_some() && !self.has_unjudged_inputs() && !self.agent.is_changing();
        self.idle_timeout.is_some() && self.agent.is_idle() && (suspended || self.is_quiet())
    }

    /// Whether the idle agent is to be stopped before `due` has passed.
    fn stops_idle_agent_before(&self, due: Duration) -> bool {
        self.can_stop_idle_agent() && self.idle_timeout.is_some_and(|timeout| timeout < due)
    }

    /// The idle timeout from the agent's manifest and the settings.
    fn agent_idle_timeout(&self) -> Option<Duration> {
        let project =
            self.daemon.workspaces.get(&self.session.workspace).map(|workspace| workspace.path.clone());
        let project = project.unwrap_or_default();
        self.daemon.workers.idle_timeout(&self.state.settings.agent, &project, self.daemon.idle)
    }

    /// No run may start, because of a halt or a quota.
    fn holds_runs(&self) -> bool {
        self.daemon.is_halted() || self.daemon.quotas.until(&self.account).is_some()
    }

    fn session_context(&self) -> SessionContext {
        SessionContext {
            now: read_clocks(),
            // A daemon that is ending its workers starts no new ones.
            halted: self.daemon.is_halted() || self.daemon.is_ending_workers(),
            quota_until: self.daemon.quotas.until(&self.account),
            over_budget: self.daemon.budgets.any_spent(&self.lineage),
            agent: self.agent_availability(),
            slot_available: self.daemon.agent_slots.may_start(&self.session.id),
            // Only a step that may start a worker needs it: see `step_machine`.
            sandbox: None,
        }
    }

    /// How an agent that is started now would be confined. Reads manifests.
    fn expected_sandbox(&self) -> Option<SandboxReport> {
        let workspace = self.daemon.workspaces.get(&self.session.workspace).ok()?;
        let settings = &self.state.settings;
        let request = SandboxRequest::of_session(settings);
        self.daemon.workers.plan_sandbox(&settings.agent, &workspace.path, request).ok()?
    }

    /// Whether the agent was started, or is about to be, with the confinement that now counts for the session. `at_start`
    /// is what its worker says of that. Reads manifests.
    fn is_confined_as_asked(&self, at_start: Option<SandboxSelection>) -> bool {
        let Ok(workspace) = self.daemon.workspaces.get(&self.session.workspace) else { return true };
        let settings = &self.state.settings;
        let request = SandboxRequest::of_session(settings);
        let (level, network) =
            self.daemon.workers.sandbox_settings(&settings.agent, &workspace.path, request);
        let asked = SandboxSelection { level, network };
        // A worker of an earlier release does not say it. On this machine, what it reported when it started says the
        // same; another machine may have confined its agent more strictly than was asked for.
        let at_start = at_start.or_else(|| {
            let report =
                self.state.sandbox.as_ref().filter(|_| self.daemon.workers.is_local(&settings.agent))?;
            Some(SandboxSelection { level: report.asked, network: report.network })
        });
        at_start.is_none_or(|at_start| at_start == asked)
    }

    /// The worker that the journal says this session has.
    fn recorded_worker(&self) -> Option<RecordedWorker> {
        Some(RecordedWorker {
            session: self.state.id.clone(),
            worker: self.state.worker.clone()?,
            agent: self.state.settings.agent.clone(),
            since: self.state.worker_since,
            taken: self.state.last_update_number,
        })
    }

    /// Reports to the agent slots whether this session waits for one and how its agent uses one. An agent whose run
    /// waits for a person or for other sessions does not count, nor does an idle one that would lose its conversation
    /// by being stopped.
    fn update_slot(&self) {
        let standing = match self.state.phase() {
            _ if self.launch_decided || self.preparation.is_some() => SlotStanding::Busy,
            _ if !self.agent.is_live() => match self.state.waits_for_slot() {
                // A session that may not start because of a halt or a quota must not block the line.
                true if !self.holds_runs() => SlotStanding::Waiting,
                _ => SlotStanding::NotCounted,
            },
            _ if self.can_stop_idle_agent() => SlotStanding::Idle,
            // It cannot make way, so it must not hold up those who wait.
            _ if self.agent.is_idle() && self.is_quiet() => SlotStanding::NotCounted,
            SessionPhase::Waiting => SlotStanding::NotCounted,
            _ => SlotStanding::Busy,
        };
        let has_worker = self.agent.has_worker();
        self.daemon.update_slots(|slots| slots.set_standing(&self.session.id, standing, has_worker));
    }

    fn step_machine(&mut self, batch: &mut ActorBatch, input: SessionInput) {
        let mut context = self.session_context();
        if may_start_worker(&self.state, &input, &context) {
            context.sandbox = self.expected_sandbox();
        }
        let result = step(&mut self.state, input, &context);
        let launches = |effect: &SessionEffect| matches!(effect, SessionEffect::LaunchAgent { .. });
        self.launch_decided |= result.effects.iter().any(launches);
        // Counts from the moment it is decided, so that no later step of the batch starts a run.
        for row in &result.rows {
            if let UpdatedRow::Quota(quota) = row {
                self.daemon.quotas.insert(quota.clone());
            }
        }
        batch.add(result, &self.state);
    }

    /// Has the machine judge that the worker no longer exists. The batch remembers it until it is journalled.
    fn step_worker_gone(&mut self, batch: &mut ActorBatch, exit: AgentExitReason) {
        batch.gone = Some(exit.clone());
        self.step_machine(batch, SessionInput::WorkerGone(exit));
    }

    /// Judges messages. A request with an idempotency key ends its batch, because an append stores at most one reply.
    async fn handle_messages(&mut self, messages: Vec<ActorMessage>) -> std::ops::ControlFlow<()> {
        let mut batch = ActorBatch::default();
        let mut probes = Vec::new();
        for message in messages {
            match message {
                ActorMessage::Request(request) => {
                    let CommandRequest { actor, command, key, child, reply } = *request;
                    self.note_command(&command);
                    let has_key = key.is_some();
                    self.step_machine(&mut batch, SessionInput::Command { actor, command });
                    batch.attach_waiter(reply, key, child);
                    if has_key {
                        self.commit(std::mem::take(&mut batch)).await;
                    }
                }
                ActorMessage::Wake => self.step_machine(&mut batch, SessionInput::Wake),
                ActorMessage::CheckLiveness => self.check_liveness(&mut batch),
                ActorMessage::Probe(reply) => probes.push(reply),
                ActorMessage::StopIfIdle if self.can_stop_idle_agent() => self.agent.stop_idle(),
                ActorMessage::StopIfIdle => {}
                ActorMessage::EndAgent if self.preparation.is_some() => {
                    self.end_agent(AgentExitReason::Stopped)
                }
                ActorMessage::EndAgent => self.agent.close(),
                ActorMessage::Stop => {
                    self.commit(batch).await;
                    self.agent.detach();
                    return std::ops::ControlFlow::Break(());
                }
            }
        }
        self.commit(batch).await;
        for reply in probes {
            let held = self.holds_runs();
            let queued =
                self.state.queued_runs(held).map(|(position, run)| (position, run.id.clone())).collect();
            // A client that has disconnected does not need the answer.
            let _gone = reply.send(SessionActivity { busy: self.state.is_busy(), queued });
        }
        std::ops::ControlFlow::Continue(())
    }

    /// Records what a command carries that the state does not hold.
    fn note_command(&mut self, command: &SessionCommand) {
        match command {
            SessionCommand::AcceptPrompt(prompt) => self.prompts.insert(prompt),
            SessionCommand::UpdateSettings(change)
                if self.state.closing.is_none()
                    && (change.model.is_some() || change.sandbox.is_some() || change.network.is_some()) =>
            {
                self.agent.mark_outdated()
            }
            _ => {}
        }
    }

    async fn handle_link_event(&mut self, event: LinkEvent) {
        let mut batch = ActorBatch::default();
        match event {
            LinkEvent::Updates(updates) => {
                for update in updates {
                    self.handle_update(&mut batch, update);
                }
            }
            LinkEvent::Disconnected => self.agent.mark_lost(),
            LinkEvent::Attached { applied, presence, pid, run_time_ms, model, sandbox, reattached } => {
                self.daemon.workers.set_pid(&self.session.id, pid);
                let reattached = self.agent.mark_attached(presence, reattached);
                // A previous daemon may have changed settings and died before it restarted the agent.
                let has_agent = matches!(presence, AgentPresence::Starting | AgentPresence::Ready { .. });
                let is_current = || model == self.state.settings.model && self.is_confined_as_asked(sandbox);
                if reattached && has_agent && !is_current() {
                    self.agent.mark_outdated();
                }
                let attached = SessionInput::WorkerAttached { applied, reattached, run_time_ms };
                self.step_machine(&mut batch, attached.clone());
                batch.attached = Some(attached);
            }
            LinkEvent::Gone(gone) => {
                // A worker that a previous daemon wanted but never started did not crash.
                let never_started = self.agent.was_never_reached() && self.state.current_turn().is_none();
                let gone = match gone {
                    AgentExitReason::Lost if never_started => AgentExitReason::Stopped,
                    // Another worker would not fare better, and the run would wait for one after the other.
                    AgentExitReason::Unreachable(error) if self.agent.is_starting() => {
                        AgentExitReason::Failed(error)
                    }
                    gone => gone,
                };
                if let AgentExitReason::Unreachable(_) = &gone {
                    self.daemon.workers.revoke_session_token(&self.session.id);
                }
                self.agent.clear_link();
                // The preparation was for this worker; the next worker starts a new one.
                self.preparation = None;
                self.step_worker_gone(&mut batch, gone);
            }
        }
        self.commit(batch).await;
    }

    fn handle_update(&mut self, batch: &mut ActorBatch, update: NumberedUpdate) {
        let NumberedUpdate { number, update: agent_update } = update;
        match &agent_update {
            AgentUpdate::Ready { steers, .. } => self.agent.mark_ready(*steers),
            AgentUpdate::IdleStopped => self.agent.mark_idle_stopped(),
            AgentUpdate::TurnEnded { outcome, .. } if outcome.agent_ends => self.agent.mark_stopping(),
            AgentUpdate::Gone(_) => self.agent.mark_ended(),
            _ => {}
        }
        let idle_stopped = matches!(agent_update, AgentUpdate::IdleStopped);
        self.step_machine(batch, SessionInput::Update(number, agent_update));
        if idle_stopped {
            // A prompt may have arrived while the agent was stopping, and waits.
            self.step_machine(batch, SessionInput::Wake);
        }
    }

    /// Appends the decisions of a batch. Only once they are committed does it reply and perform the effects.
    async fn commit(&mut self, mut batch: ActorBatch) {
        let lineage = &self.lineage;
        match batch.append(&self.daemon, &self.session, &self.state, lineage).await {
            Ok(first) => {
                // Only updates that made an event are acknowledged: the number of any other is not in the journal,
                // and the next daemon would ask for it again. A closed session makes no events and gets no next
                // daemon, so it acknowledges everything.
                let acknowledged =
                    if self.state.closed { UpdateNumber(u64::MAX) } else { self.state.last_update_number };
                self.agent.acknowledge(acknowledged);
                self.release_worker(batch.gone.is_some());
                self.daemon.metrics.count_events(&self.state.settings.agent, batch.event_bodies());
                if batch.event_bodies().any(|body| matches!(body, EventBody::SessionClosed(_))) {
                    self.remove_session_secrets();
                    crate::maildir::remove_empty_folders(&self.daemon.home, &self.session.id);
                }
                let limits_may_differ = batch.attached.is_some()
                    || batch.event_bodies().any(|body| matches!(body, EventBody::SessionUpdated(_)));
                for outcome in batch.into_outcomes(first) {
                    self.perform_outcome(outcome).await;
                }
                if limits_may_differ {
                    self.send_limits().await;
                }
                self.prompts.forget_ended(&self.state);
                self.agent.stop_if_outdated(&self.state);
                self.update_slot();
            }
            Err(error) => self.roll_back(batch, error).await,
        }
    }

    /// Releases a worker whose end is in the journal.
    fn release_worker(&mut self, is_lost: bool) {
        if self.unjournalled.is_some() {
            // The agent's end may be among the updates that the journal did not take.
            return;
        }
        let ended = self.agent.take_ended_link();
        if is_lost {
            // A worker that the link cannot talk to may still be running.
            self.daemon.workers.kill(&self.session.id);
        }
        if is_lost || ended.is_some() {
            self.daemon.workers.forget(&self.session.id);
        }
        if let Some(link) = ended {
            // The worker waits for our last acknowledgement before it exits.
            self.daemon.spawn(async move { link.detach().await });
        }
    }
}
