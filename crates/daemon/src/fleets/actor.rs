//! The shell around one fleet's machine, as dull as a session's: it takes what has come, lets the machine judge it,
//! appends, and only then answers and acts. If the append fails it reads its state again; what was to be done is still
//! open there, and is found when it looks next.

use std::collections::{HashSet, VecDeque};
use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::Duration;

use qd_core::fleet::{
    FleetCommand, FleetContext, FleetEffect, FleetEvent, FleetInput, FleetReply, FleetState, FleetStep,
    deadline, evolve, step,
};
use qd_core::rows::AskDoc;
use qd_journal::{AppendRequest, AskRow, NewEvent, RowChange};
use qd_protocol::event::{Ask, AskStatus, EventBody};
use qd_protocol::fleet::RouteAction;
use qd_protocol::{ApiError, AskId, ErrorCode, Millis, RunId};
use tokio::sync::oneshot;

use super::{FleetAddress, delivery, fleet_row};
use crate::actor::encode_failed;
use crate::daemon::{Daemon, append_failed, read_failed};
use crate::random;
use crate::registry::ActorMailbox;

/// How many things are judged before others have their turn.
const BATCH_MAX: usize = 256;
/// How long to wait before what a session or the journal did not take is tried again.
const RETRY_DELAY: Duration = Duration::from_millis(250);

/// What can be in a fleet's mailbox.
pub(crate) enum FleetActorMessage {
    /// Somebody wants something and waits for the answer.
    Request { command: FleetCommand, reply: oneshot::Sender<Result<FleetActorReply, ApiError>> },
    /// A run of one of its sessions has ended.
    RunEnded(RunId),
    /// See what is owed.
    Wake,
    /// The daemon ends.
    Stop,
}

/// What came of a request.
#[derive(Debug)]
pub(crate) enum FleetActorReply {
    /// These runs are being stopped.
    Cancelled(Vec<RunId>),
    /// An answer won.
    Answered(Box<Ask>),
}

/// Lives until the fleet has ended or the daemon does.
pub(super) async fn run_fleet_actor(
    daemon: Arc<Daemon>,
    fleet: Arc<FleetAddress>,
    mailbox: Arc<ActorMailbox<FleetActorMessage>>,
) {
    let _grave = FleetActorGuard {
        daemon: Arc::clone(&daemon),
        fleet: Arc::clone(&fleet),
        mailbox: Arc::clone(&mailbox),
    };
    match load(&daemon, &fleet).await {
        Ok(state) => {
            let mut actor = FleetActor {
                daemon,
                fleet,
                mailbox,
                state: Arc::new(state),
                delivered: HashSet::new(),
                ended_runs: VecDeque::new(),
                needs_retry: false,
            };
            actor.run().await;
        }
        Err(error) => tracing::error!(fleet = %fleet.id, %error, "a fleet could not be read"),
    }
}

/// Also if it panics: the next message must wake a new actor, not wait for a dead one.
struct FleetActorGuard {
    daemon: Arc<Daemon>,
    fleet: Arc<FleetAddress>,
    mailbox: Arc<ActorMailbox<FleetActorMessage>>,
}

impl Drop for FleetActorGuard {
    fn drop(&mut self) {
        self.daemon.fleets.remove_dead(&self.fleet.id, &self.mailbox);
    }
}

/// A fleet read from the journal.
async fn load(daemon: &Daemon, fleet: &FleetAddress) -> Result<FleetState, ApiError> {
    let unreadable = |error: serde_json::Error| {
        let message =
            format!("fleet {} could not be read from the journal: {error}; see `qd doctor`", fleet.id);
        ApiError::new(ErrorCode::Internal, message)
    };
    let loaded = daemon.journal.load(fleet.key).await.map_err(read_failed)?;
    let mut state: Option<FleetState> = None;
    for stored in &loaded.events {
        let number = stored.number.unwrap_or_default();
        match (&mut state, EventBody::decode(&stored.kind, &stored.data).map_err(unreadable)?) {
            (Some(state), Some(body)) => evolve(state, &FleetEvent { number, ts: stored.ts, body }),
            // A kind that a later version writes still counts.
            (Some(state), None) => state.number = number,
            (None, Some(EventBody::FleetStarted(started))) => {
                state = Some(FleetState::new(fleet.workspace.clone(), started, stored.ts));
            }
            (None, _) => {}
        }
    }
    state.ok_or_else(|| ApiError::not_found("fleet", &fleet.id))
}

pub(super) struct FleetActor {
    pub(super) daemon: Arc<Daemon>,
    pub(super) fleet: Arc<FleetAddress>,
    mailbox: Arc<ActorMailbox<FleetActorMessage>>,
    /// Shared with what is on its way to sessions, and with nobody else: it is not copied when it changes.
    pub(super) state: Arc<FleetState>,
    /// Open runs that their sessions have.
    pub(super) delivered: HashSet<RunId>,
    /// Ends that are still to be judged.
    pub(super) ended_runs: VecDeque<RunId>,
    /// Whether something has to be tried again.
    pub(super) needs_retry: bool,
}

impl FleetActor {
    async fn run(&mut self) {
        self.step_machine(FleetInput::Wake, None).await;
        loop {
            while let Some(run) = self.ended_runs.pop_front() {
                self.handle_run_end(&run).await;
            }
            if self.state.finished.is_some() && self.daemon.fleets.try_sleep(&self.fleet.id, &self.mailbox) {
                return;
            }
            if self.handle_next().await.is_break() {
                return;
            }
            tokio::task::coop::consume_budget().await;
        }
    }

    async fn handle_next(&mut self) -> ControlFlow<()> {
        let due = deadline(&self.state).map(|at| Duration::from_millis(at.since(Millis::now())));
        let pause = if self.needs_retry {
            due.unwrap_or(RETRY_DELAY).min(RETRY_DELAY)
        } else {
            due.unwrap_or(Duration::MAX)
        };
        let mut mail = Vec::new();
        {
            let mailbox = &self.mailbox;
            let letters = std::future::poll_fn(|context| mailbox.poll_take(context, &mut mail, BATCH_MAX));
            tokio::select! {
                biased;
                () = letters => {}
                () = tokio::time::sleep(pause), if pause != Duration::MAX => {}
            }
        }
        if mail.is_empty() {
            let input =
                if std::mem::take(&mut self.needs_retry) { FleetInput::Wake } else { FleetInput::Tick };
            self.step_machine(input, None).await;
            self.step_machine(FleetInput::Tick, None).await;
        }
        for letter in mail {
            match letter {
                FleetActorMessage::Request { command, reply } => {
                    self.step_machine(FleetInput::Command(command), Some(reply)).await
                }
                FleetActorMessage::RunEnded(run) => self.handle_run_end(&run).await,
                FleetActorMessage::Wake => self.step_machine(FleetInput::Wake, None).await,
                FleetActorMessage::Stop => return ControlFlow::Break(()),
            }
        }
        ControlFlow::Continue(())
    }

    /// A run has ended: what it came to is in its row.
    async fn handle_run_end(&mut self, run: &RunId) {
        if !self.state.open_runs().any(|open| open.run == *run) {
            return;
        }
        match delivery::run_end_input(&self.daemon, &self.state, run).await {
            Ok(Some(input)) => {
                self.delivered.remove(run);
                self.step_machine(input, None).await;
            }
            Ok(None) => {}
            Err(error) => {
                tracing::warn!(fleet = %self.fleet.id, %run, %error, "the end of a run could not be read");
                self.needs_retry = true;
            }
        }
    }

    /// Judges one input, journals what came of it, answers and acts.
    pub(super) async fn step_machine(
        &mut self,
        input: FleetInput,
        waiter: Option<oneshot::Sender<Result<FleetActorReply, ApiError>>>,
    ) {
        let questions = self.state.spec.routes.iter().filter(|route| route.then == RouteAction::CollectHuman);
        let asks = questions.map(|_| AskId::from_random(&random::bytes::<26>())).collect();
        let FleetStep { events, effects, reply } =
            step(Arc::make_mut(&mut self.state), input, FleetContext { now: Millis::now(), ask_ids: asks });
        if let Err(error) = self.append(&events).await {
            tracing::warn!(fleet = %self.fleet.id, %error, "a fleet's events were not taken; it is read again");
            self.reload().await;
            if let Some(waiter) = waiter {
                // Whoever has gone away does not need the answer.
                let _gone = waiter.send(Err(error));
            }
            return;
        }
        if let Some(waiter) = waiter {
            let _gone = waiter.send(to_fleet_reply(reply));
        }
        for effect in effects {
            match effect {
                FleetEffect::DispatchRuns => self.deliver_open_runs().await,
                FleetEffect::CancelRuns => self.cancel_open_runs().await,
            }
        }
    }

    async fn append(&self, events: &[FleetEvent]) -> Result<(), ApiError> {
        if events.is_empty() {
            return Ok(());
        }
        let mut rows = vec![fleet_row(&self.fleet, &self.state)?];
        let mut drafts = Vec::with_capacity(events.len());
        for FleetEvent { number, ts, body } in events {
            drafts.push(NewEvent {
                scope: Arc::clone(&self.fleet.scope),
                number: Some(*number),
                ts: *ts,
                run: None,
                kind: body.kind(),
                data: body.encode().map_err(encode_failed)?,
                update_number: None,
            });
            rows.extend(ask_row(&self.fleet, body)?);
        }
        let append = AppendRequest {
            events: drafts,
            rows,
            idempotency: None,
            may_use_reserve: self.state.stopping.is_some(),
        };
        self.daemon.journal.append(append).await.map(drop).map_err(append_failed)
    }

    /// Forgets what it decided and could not write down.
    async fn reload(&mut self) {
        self.needs_retry = true;
        // The journal may be in trouble for longer; nothing is decided meanwhile.
        while !self.daemon.is_stopping() {
            match load(&self.daemon, &self.fleet).await {
                Ok(state) => {
                    self.state = Arc::new(state);
                    return;
                }
                Err(error) => {
                    tracing::warn!(fleet = %self.fleet.id, %error, "a fleet could not be read again");
                    tokio::time::sleep(RETRY_DELAY).await;
                }
            }
        }
    }
}

fn to_fleet_reply(reply: Option<FleetReply>) -> Result<FleetActorReply, ApiError> {
    match reply {
        Some(FleetReply::Cancelled(hit)) => Ok(FleetActorReply::Cancelled(hit)),
        Some(FleetReply::Answered(ask)) => Ok(FleetActorReply::Answered(ask)),
        Some(FleetReply::InvalidAnswer(why)) => Err(ApiError::new(ErrorCode::InvalidAnswer, why)),
        Some(FleetReply::AskNotOpen) | None => {
            Err(ApiError::new(ErrorCode::NotFound, "no open ask has this id"))
        }
    }
}

/// The row of a question, where an event changes it.
pub(crate) fn ask_row(fleet: &FleetAddress, body: &EventBody) -> Result<Option<RowChange>, ApiError> {
    let doc = match body {
        EventBody::AskOpened(opened) => {
            AskDoc { ask: opened.ask.clone(), by: None, rule: None, granted: false }
        }
        EventBody::AskResolved(resolved) => AskDoc::from(resolved),
        _ => return Ok(None),
    };
    Ok(Some(RowChange::Ask(AskRow {
        id: doc.ask.id.clone(),
        session: fleet.key,
        pending: doc.ask.state == AskStatus::Pending,
        doc: serde_json::to_vec(&doc).map_err(encode_failed)?,
    })))
}
