//! The shell around one session's machine: dull on purpose. It takes what has come, lets the machine judge it,
//! appends once, waits, and only then answers and acts. If the append fails it forgets its state, reads it again
//! and says so; nobody has seen anything.

mod agent;
mod batch;
mod children;
mod effects;
mod load;
mod preparation;
mod reply;

use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use qd_core::session::{
    AgentAvailability, SessionCommand, SessionContext, SessionInput, SessionPhase, SessionState, deadline,
    step,
};
use qd_journal::SessionKey;
use qd_link::{LinkEvent, NumberedUpdate};
use qd_protocol::frame::v1::AgentPresence;
use qd_protocol::link::{AgentExitReason, AgentUpdate, UpdateNumber};
use qd_protocol::{ApiError, EventBody, Millis, RunId};
use sha2::{Digest, Sha256};
use tokio::sync::oneshot;
use tokio::time::Instant;

pub(crate) use reply::{ActorReply, CommandCompletion, run_id_conflict};

use crate::daemon::{Daemon, SessionAddress};
use crate::registry::ActorMailbox;
use crate::workers::{SlotUse, WorkerAttachment};
use agent::SessionAgent;
use batch::{ActorBatch, PromptCache};
pub(crate) use batch::{ChildCreation, FirstEventIndex, encode_failed, row_change, session_row};
pub(crate) use load::{encode_snapshot, full_text, recorded_event};
use preparation::{PreparationResult, WorktreePreparation};

/// How many things are judged before the next append.
const BATCH_MAX: usize = 256;
/// How long a session without a worker stays awake.
const SLEEP_AFTER: Duration = Duration::from_secs(10);
/// How long to wait before what the agent said is tried again on a journal that did not take it.
const RETRY_DELAY: Duration = Duration::from_millis(250);

/// What can be in a session's mailbox.
pub(crate) enum ActorMessage {
    /// Somebody wants something and waits for the answer.
    Request(Box<CommandRequest>),
    /// Something has changed for the better: see what can go on.
    Wake,
    /// Somebody else needs the room: an agent that has nothing to do is put to rest.
    RestIfIdle,
    /// The workers end with the daemon.
    EndAgent,
    /// Somebody wants to know what it does, after everything before is committed.
    Probe(oneshot::Sender<SessionActivity>),
    /// The daemon ends.
    Stop,
}

/// A command with whoever waits for its answer.
pub(crate) struct CommandRequest {
    pub(crate) command: SessionCommand,
    /// The client's name for it, remembered with its answer.
    pub(crate) key: Option<IdempotencyKey>,
    /// A session below that is created with it.
    pub(crate) child: Option<Box<ChildCreation>>,
    pub(crate) reply: oneshot::Sender<Result<CommandCompletion, ApiError>>,
}

/// An `Idempotency-Key` and what came with it.
#[derive(Debug, Clone)]
pub(crate) struct IdempotencyKey {
    pub(crate) key: String,
    pub(crate) fingerprint: [u8; 32],
}

impl IdempotencyKey {
    /// What makes an id of it, for a request that has a key and no id: the same request is the same thing by either name.
    pub(crate) fn digest(&self) -> [u8; 32] {
        Sha256::new().chain_update(self.fingerprint).chain_update(&self.key).finalize().into()
    }
}

/// What a session does.
#[derive(Debug, Clone, Default)]
pub(crate) struct SessionActivity {
    /// Whether a run has not ended.
    pub(crate) busy: bool,
    /// Runs that wait, with their places from 1.
    pub(crate) queued: Vec<(u32, RunId)>,
}

/// Lives until the session sleeps, the daemon ends or the journal is gone.
pub(crate) async fn run_actor(
    daemon: Arc<Daemon>,
    session: Arc<SessionAddress>,
    mailbox: Arc<ActorMailbox<ActorMessage>>,
) {
    // Also if it panics: the next message must wake a new actor, not wait for a dead one.
    let _grave = ActorGuard {
        daemon: Arc::clone(&daemon),
        session: Arc::clone(&session),
        mailbox: Arc::clone(&mailbox),
    };
    match Box::pin(load::load(&daemon, &session)).await {
        Ok((state, line)) => {
            let prompts = PromptCache::default();
            let agent = SessionAgent::default();
            let mut actor = SessionActor {
                daemon,
                session,
                mailbox,
                state,
                lineage: line,
                agent,
                preparation: None,
                idle_timeout: None,
                prompts,
                retry_inputs: None,
                purged: false,
            };
            actor.run().await;
        }
        Err(error) => {
            tracing::error!(session = %session.id, %error, "a session could not be read");
            fail_all_requests(&mailbox, error);
        }
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

/// Answers everybody who waits for a session that could not be read.
fn fail_all_requests(mailbox: &ActorMailbox<ActorMessage>, error: ApiError) {
    let mut context = std::task::Context::from_waker(std::task::Waker::noop());
    let mut mail = Vec::new();
    while mailbox.poll_take(&mut context, &mut mail, BATCH_MAX) == Poll::Ready(()) {}
    for letter in mail {
        if let ActorMessage::Request(request) = letter {
            // Whoever has gone away does not need the answer.
            let _gone = request.reply.send(Err(error.clone()));
        }
    }
}

struct SessionActor {
    daemon: Arc<Daemon>,
    session: Arc<SessionAddress>,
    mailbox: Arc<ActorMailbox<ActorMessage>>,
    state: Box<SessionState>,
    /// Its own key and those of the sessions above it: whose budgets count.
    lineage: Vec<SessionKey>,
    agent: SessionAgent,
    /// What is being made ready for an agent that is on its way.
    preparation: Option<Box<WorktreePreparation>>,
    /// After how long it is put to rest when it has nothing to do; `None` if its memory would be lost.
    idle_timeout: Option<Duration>,
    /// Prompts that were accepted and not given to the agent, as far as they are small.
    prompts: PromptCache,
    /// What the agent said and the journal did not take.
    retry_inputs: Option<Box<RetryInputs>>,
    /// Whether its events are deleted.
    purged: bool,
}

/// What must be judged again before anything else is heard.
#[derive(Default)]
struct RetryInputs {
    messages: Vec<NumberedUpdate>,
    attached: Option<SessionInput>,
    gone: Option<AgentExitReason>,
    wake: bool,
}

/// What an actor has to deal with next.
enum ActorWakeup {
    Messages(Vec<ActorMessage>),
    LinkEvent(LinkEvent),
    Prepared(PreparationResult),
    Retry,
    Tick,
    /// A worker that was told to end has not.
    KillDeadline,
    Idle,
}

impl SessionActor {
    async fn run(&mut self) {
        let mut redo = RetryInputs { wake: true, ..RetryInputs::default() };
        if let Some(had) = self.recorded_worker() {
            self.idle_timeout = self.agent_idle_timeout();
            self.agent.set_existing_link(self.daemon.workers.attach(had));
        } else if self.state.active_run().is_some() {
            // Of a daemon that kept its agents inside itself: they died with it.
            redo.gone = Some(AgentExitReason::Lost);
        }
        self.retry_inputs = Some(Box::new(redo));
        Box::pin(self.retry_failed()).await;
        loop {
            match self.next_wakeup().await {
                ActorWakeup::Messages(mail) => {
                    if Box::pin(self.handle_messages(mail)).await.is_break() {
                        return;
                    }
                }
                ActorWakeup::LinkEvent(heard) => Box::pin(self.handle_link_event(heard)).await,
                ActorWakeup::Prepared(readied) => Box::pin(self.finish_preparation(readied)).await,
                ActorWakeup::Retry => Box::pin(self.retry_failed()).await,
                ActorWakeup::Tick => {
                    let mut batch = ActorBatch::default();
                    self.step_machine(&mut batch, SessionInput::Tick);
                    Box::pin(self.commit(batch)).await;
                }
                ActorWakeup::KillDeadline => {
                    self.daemon.workers.kill(&self.session.id);
                    self.agent.extend_kill_deadline();
                }
                ActorWakeup::Idle if self.can_rest_agent() => {
                    self.agent.rest();
                    self.update_slot();
                }
                ActorWakeup::Idle => {
                    if self.daemon.try_sleep_actor(&self.session.id, &self.mailbox) {
                        return;
                    }
                }
            }
            // Whoever always finds something to do lets others have their turn.
            tokio::task::coop::consume_budget().await;
            if self.purged {
                // Whoever looked it up just before is told that it is gone; a purged session must not write again.
                fail_all_requests(&self.mailbox, ApiError::not_found("session", &self.session.id));
                return;
            }
        }
    }

    /// Waits for whatever comes first. Mail before the agent: a cancel overtakes what it cancels.
    async fn next_wakeup(&mut self) -> ActorWakeup {
        let mut mail = Vec::new();
        let mailbox = &self.mailbox;
        let letters = std::future::poll_fn(|context| mailbox.poll_take(context, &mut mail, BATCH_MAX));
        let left = |until: Instant| until.saturating_duration_since(Instant::now());
        let unheard = self.agent.catch_up_deadline().map(left).unwrap_or_default();
        let due = deadline(&self.state, self.link_state());
        let due = due.map(|at| Duration::from_millis(at.since(Millis::now())).max(unheard));
        let patience = self.agent.kill_deadline().map(left);
        let (pause, after) = match (due, patience) {
            _ if self.retry_inputs.is_some() => (RETRY_DELAY, ActorWakeup::Retry),
            (due, Some(patience)) if due.is_none_or(|due| patience < due) => {
                (patience, ActorWakeup::KillDeadline)
            }
            // A claim on its mail may be due much later than its agent's rest.
            (Some(due), _) if !self.rests_agent_before(due) => (due, ActorWakeup::Tick),
            // What its turns left running keeps a session awake: somebody has to hold its worker.
            _ if self.can_rest_agent() => (self.idle_timeout.unwrap_or(Duration::MAX), ActorWakeup::Idle),
            _ if self.is_quiet() && !self.agent.has_worker() => {
                (self.daemon.idle_timeout.min(SLEEP_AFTER), ActorWakeup::Idle)
            }
            _ => (Duration::MAX, ActorWakeup::Tick),
        };
        let listens = self.retry_inputs.is_none();
        let preparing = &mut self.preparation;
        let readied = async {
            match preparing {
                Some(preparing) => preparing.wait().await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            biased;
            () = letters => {}
            heard = self.agent.next_link_event(), if listens => return ActorWakeup::LinkEvent(heard),
            readied = readied, if listens => return ActorWakeup::Prepared(readied),
            () = tokio::time::sleep(pause), if pause != Duration::MAX => return after,
        }
        ActorWakeup::Messages(mail)
    }

    /// Nothing runs, nothing is about to, and nothing is owed.
    fn is_quiet(&self) -> bool {
        let waits = !self.state.is_busy() || (self.daemon.is_halted() && self.state.active_run().is_none());
        self.retry_inputs.is_none() && waits && self.preparation.is_none() && !self.agent.is_changing()
    }

    /// Whether there is an agent to talk to. One that something is being made ready for is on its way.
    fn link_state(&self) -> AgentAvailability {
        if self.preparation.is_some() { AgentAvailability::Starting } else { self.agent.link_state() }
    }

    /// Whether there is an agent that has nothing to do, between runs or while its run waits for other sessions, and
    /// that loses nothing by being put to rest.
    fn can_rest_agent(&self) -> bool {
        let waits =
            self.state.suspension().is_some() && self.retry_inputs.is_none() && !self.agent.is_changing();
        self.idle_timeout.is_some() && self.agent.is_idle() && (waits || self.is_quiet())
    }

    /// Whether there is an agent to be put to rest before a time is over.
    fn rests_agent_before(&self, due: Duration) -> bool {
        self.can_rest_agent() && self.idle_timeout.is_some_and(|rest| rest < due)
    }

    /// What the agent's manifest and the settings say of its rest.
    fn agent_idle_timeout(&self) -> Option<Duration> {
        let project = self.daemon.workspaces.get(&self.session.workspace).map(|place| place.path.clone());
        let project = project.unwrap_or_default();
        self.daemon.workers.idle_timeout(&self.state.settings.agent, &project, self.daemon.idle_timeout)
    }

    fn session_context(&self) -> SessionContext {
        SessionContext {
            now: Millis::now(),
            // Whoever is about to end with its workers starts none any more.
            halted: self.daemon.is_halted() || self.daemon.is_ending_workers(),
            over_budget: self.daemon.budgets.any_spent(&self.lineage),
            agent: self.link_state(),
            slot_available: self.daemon.agent_slots.may_start(&self.session.id),
        }
    }

    /// The worker that the journal says we have.
    fn recorded_worker(&self) -> Option<WorkerAttachment> {
        Some(WorkerAttachment {
            session: self.state.id.clone(),
            worker: self.state.worker.clone()?,
            agent: self.state.settings.agent.clone(),
            since: self.state.worker_since,
            taken: self.state.last_link_number,
        })
    }

    /// Says what our agent is to the limit on them, or that we wait for room. Who waits for a person or for other
    /// sessions does not count.
    fn update_slot(&self) {
        match self.state.phase() {
            // Who may not start anyway holds up nobody.
            SessionPhase::Queued if !self.daemon.is_halted() => {
                self.daemon.update_slots(|room| room.enqueue(&self.session.id))
            }
            _ => self.daemon.update_slots(|room| room.dequeue(&self.session.id)),
        }
        let need = match self.state.phase() {
            _ if self.preparation.is_some() => SlotUse::Busy,
            _ if !self.agent.is_live() => SlotUse::NotCounted,
            _ if self.can_rest_agent() => SlotUse::Idle,
            SessionPhase::Waiting => SlotUse::NotCounted,
            _ => SlotUse::Busy,
        };
        self.daemon.update_slots(|room| room.set_use(&self.session.id, need));
    }

    fn step_machine(&mut self, batch: &mut ActorBatch, input: SessionInput) {
        let world = self.session_context();
        let decided = step(&mut self.state, input, &world);
        batch.add(decided, &self.state);
    }

    /// Judges mail. A keyed request ends its batch, since an append remembers one answer.
    async fn handle_messages(&mut self, mail: Vec<ActorMessage>) -> std::ops::ControlFlow<()> {
        let mut batch = ActorBatch::default();
        let mut probes = Vec::new();
        for letter in mail {
            match letter {
                ActorMessage::Request(request) => {
                    let CommandRequest { command, key, child: birth, reply } = *request;
                    self.note_command(&command);
                    let has_key = key.is_some();
                    self.step_machine(&mut batch, SessionInput::Command(command));
                    batch.attach_waiter(reply, key, birth);
                    if has_key {
                        self.commit(std::mem::take(&mut batch)).await;
                    }
                }
                ActorMessage::Wake => self.step_machine(&mut batch, SessionInput::Wake),
                ActorMessage::Probe(reply) => probes.push(reply),
                ActorMessage::RestIfIdle if self.can_rest_agent() => self.agent.rest(),
                ActorMessage::RestIfIdle => {}
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
            let halted = self.daemon.is_halted();
            let waiting =
                self.state.queued_runs(halted).map(|(place, run)| (place, run.id.clone())).collect();
            // Whoever has gone away does not need the answer.
            let _gone = reply.send(SessionActivity { busy: self.state.is_busy(), queued: waiting });
        }
        std::ops::ControlFlow::Continue(())
    }

    /// Keeps in mind what a command brings that the state does not hold.
    fn note_command(&mut self, command: &SessionCommand) {
        match command {
            SessionCommand::AcceptPrompt(prompt) => self.prompts.insert(prompt),
            SessionCommand::UpdateSettings(change)
                if change.model.is_some() && self.state.closing.is_none() =>
            {
                self.agent.mark_outdated()
            }
            _ => {}
        }
    }

    async fn handle_link_event(&mut self, heard: LinkEvent) {
        let mut batch = ActorBatch::default();
        match heard {
            LinkEvent::Updates(said) => {
                for thing in said {
                    self.handle_agent_message(&mut batch, thing);
                }
            }
            LinkEvent::Disconnected => {
                self.agent.mark_lost();
                self.step_machine(&mut batch, SessionInput::LinkLost);
            }
            LinkEvent::Attached { applied, presence: seat, pid, run_time_ms, model, reattached: again } => {
                self.daemon.workers.set_pid(&self.session.id, pid);
                let again = self.agent.mark_attached(seat, again);
                // It may have been changed by a daemon that did not live to see it through.
                if again && matches!(seat, AgentPresence::Ready { .. }) && model != self.state.settings.model
                {
                    self.agent.mark_outdated();
                }
                let attached = SessionInput::WorkerAttached { applied, reattached: again, run_time_ms };
                self.step_machine(&mut batch, attached.clone());
                batch.attached = Some(attached);
            }
            LinkEvent::Gone(gone) => {
                // One that a daemon died before it could start is no crash of anybody's.
                let never_was = self.agent.was_never_reached() && self.state.current_turn().is_none();
                let gone = if never_was { AgentExitReason::Stopped } else { gone };
                self.agent.clear_link();
                // It was for this worker, and the next one begins anew.
                self.preparation = None;
                batch.gone = Some(gone.clone());
                self.step_machine(&mut batch, SessionInput::WorkerGone(gone));
            }
        }
        self.commit(batch).await;
    }

    fn handle_agent_message(&mut self, batch: &mut ActorBatch, thing: NumberedUpdate) {
        let NumberedUpdate { number, update: up } = thing;
        match &up {
            AgentUpdate::Ready { steers, .. } => self.agent.mark_ready(*steers),
            AgentUpdate::Rested => self.agent.mark_resting(),
            AgentUpdate::Terminal { outcome, .. } if outcome.agent_ends => self.agent.mark_stopping(),
            AgentUpdate::Gone(_) => self.agent.mark_ended(),
            _ => {}
        }
        let rested = matches!(up, AgentUpdate::Rested);
        self.step_machine(batch, SessionInput::LinkMessage(number, up));
        if rested {
            // A prompt may have met the stopping, and waits.
            self.step_machine(batch, SessionInput::Wake);
        }
    }

    /// Judges again what a failed append had decided and nobody has seen.
    async fn retry_failed(&mut self) {
        let Some(redo) = self.retry_inputs.take() else { return };
        let mut batch = ActorBatch::default();
        for thing in redo.messages {
            self.handle_agent_message(&mut batch, thing);
        }
        if let Some(attached) = redo.attached {
            batch.attached = Some(attached.clone());
            self.step_machine(&mut batch, attached);
        }
        if let Some(gone) = redo.gone {
            batch.gone = Some(gone.clone());
            self.step_machine(&mut batch, SessionInput::WorkerGone(gone));
        }
        if redo.wake {
            batch.wake = true;
            self.step_machine(&mut batch, SessionInput::Wake);
        }
        self.commit(batch).await;
    }

    /// Appends what was decided. Then, and only then, answers and acts.
    async fn commit(&mut self, mut batch: ActorBatch) {
        let line = &self.lineage;
        match batch.append(&self.daemon, &self.session, &self.state, line).await {
            Ok(first) => {
                // Only what made an event: the number of what did not is nowhere in the journal, and a daemon that
                // came after us would ask for it.
                // What a closed session hears makes none any more, and nobody comes after it.
                let taken =
                    if self.state.closed { UpdateNumber(u64::MAX) } else { self.state.last_link_number };
                self.agent.acknowledge(taken);
                self.release_worker(batch.gone.is_some());
                self.daemon.stats.count_events(&self.state.settings.agent, batch.event_bodies());
                if batch.event_bodies().any(|body| matches!(body, EventBody::SessionClosed(_))) {
                    self.forget_env();
                    crate::maildir::remove_empty_folders(&self.daemon.home, &self.session.id);
                }
                let limits = batch.attached.is_some()
                    || batch.event_bodies().any(|body| matches!(body, EventBody::SessionUpdated(_)));
                for outcome in batch.into_outcomes(first) {
                    self.perform_outcome(outcome).await;
                }
                if limits {
                    self.send_limits().await;
                }
                self.prompts.forget_ended(&self.state);
                self.agent.rest_if_outdated(&self.state);
                self.update_slot();
            }
            Err(error) => self.roll_back(batch, error).await,
        }
    }

    /// Lets go of a worker whose end is in the journal.
    fn release_worker(&mut self, is_lost: bool) {
        let over = self.agent.take_ended_link();
        if is_lost {
            // One that cannot be understood may still be there.
            self.daemon.workers.kill(&self.session.id);
        }
        if is_lost || over.is_some() {
            self.daemon.workers.forget(&self.session.id);
        }
        if let Some(link) = over {
            // It waits for our last word before it goes.
            self.daemon.spawn(async move { link.detach().await });
        }
    }

    /// Nothing of the batch is true: who waits is told, the state is read again, and what cannot be asked for again
    /// is kept to be judged again.
    async fn roll_back(&mut self, batch: ActorBatch, error: ApiError) {
        tracing::warn!(session = %self.session.id, %error, "an append failed; the session is read again");
        let earlier = self.retry_inputs.take().unwrap_or_default();
        let redo = RetryInputs {
            messages: self.agent.unacknowledged(),
            attached: batch.attached.clone().or(earlier.attached),
            gone: batch.gone.clone().or(earlier.gone),
            // Whatever it was that woke us has to be looked at again.
            wake: true,
        };
        batch.fail_waiters(error);
        loop {
            match load::load(&self.daemon, &self.session).await {
                Ok((state, _)) => {
                    self.state = state;
                    break;
                }
                Err(_) if self.daemon.is_stopping() => return,
                Err(_) => tokio::time::sleep(RETRY_DELAY).await,
            }
        }
        // Also if it is empty: it holds back a tick whose deadline has passed until the journal had a moment.
        self.retry_inputs = Some(Box::new(redo));
    }
}
