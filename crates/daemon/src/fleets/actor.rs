//! The async shell around one fleet's state machine, like a session's: it takes messages, lets the machine judge
//! them, appends the result, and only then replies and performs the effects. If the append fails, it loads its state
//! again; the work is still open there, and is found at the next wake.

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
use qd_protocol::event::{Ask, AskStatus, EventActor, EventBody};
use qd_protocol::fleet::RouteAction;
use qd_protocol::{ApiError, AskId, ErrorCode, Millis, RunId};
use tokio::sync::oneshot;

use super::{FleetAddress, delivery, fleet_row};
use crate::actor::{ask_changed, encode_failed};
use crate::clock::read_clocks;
use crate::daemon::{Daemon, append_failed, read_failed};
use crate::http::unreadable_row;
use crate::random;
use crate::registry::ActorMailbox;

/// The most messages that are taken at once.
const BATCH_MAX: usize = 256;
/// The delay before something that a session or the journal did not take is tried again.
const RETRY_DELAY: Duration = Duration::from_millis(250);

/// A message in a fleet's mailbox.
pub(crate) enum FleetActorMessage {
    /// A command whose sender waits for the reply.
    Request {
        /// Who sent it.
        actor: Arc<EventActor>,
        command: FleetCommand,
        reply: oneshot::Sender<Result<FleetActorReply, ApiError>>,
    },
    /// A run of a member session has ended.
    RunEnded(RunId),
    /// Check what is still to be done.
    Wake,
    /// The daemon stops.
    Stop,
}

/// The result of a command.
#[derive(Debug)]
pub(crate) enum FleetActorReply {
    /// These runs are being cancelled.
    Cancelled(Vec<RunId>),
    /// The ask was resolved by this answer.
    Answered(Box<Ask>),
}

/// Runs a fleet's actor until the fleet has ended or the daemon stops.
pub(super) async fn run_fleet_actor(
    daemon: Arc<Daemon>,
    fleet: Arc<FleetAddress>,
    mailbox: Arc<ActorMailbox<FleetActorMessage>>,
) {
    let _guard = FleetActorGuard {
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
        Err(error) => tracing::error!(fleet = %fleet.id, %error, "could not load a fleet from the journal"),
    }
}

/// Removes the actor when dropped, on a panic too: the next message must wake a new actor, not wait for a dead one.
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

/// Loads a fleet from the journal.
async fn load(daemon: &Daemon, fleet: &FleetAddress) -> Result<FleetState, ApiError> {
    let unreadable = |error| unreadable_row("fleet", &fleet.id)(error);
    let loaded = daemon.journal.load(fleet.key).await.map_err(read_failed)?;
    let mut state: Option<FleetState> = None;
    for stored in &loaded.events {
        let number = stored.number.unwrap_or_default();
        match (&mut state, EventBody::decode(&stored.kind, &stored.data).map_err(unreadable)?) {
            (Some(state), Some(body)) => {
                evolve(state, &FleetEvent { number, ts: stored.ts, actor: None, body })
            }
            // An event kind of a later version still advances the number.
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
    /// Shared only with deliveries under way, so that a change does not copy it.
    pub(super) state: Arc<FleetState>,
    /// Open runs that their sessions have accepted.
    pub(super) delivered: HashSet<RunId>,
    /// Ended runs that are still to be judged.
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
        let due = deadline(&self.state, read_clocks()).map(Duration::from_millis);
        let delay = if self.needs_retry {
            due.unwrap_or(RETRY_DELAY).min(RETRY_DELAY)
        } else {
            due.unwrap_or(Duration::MAX)
        };
        let mut messages = Vec::new();
        {
            let mailbox = &self.mailbox;
            let mailbox_ready =
                std::future::poll_fn(|context| mailbox.poll_take(context, &mut messages, BATCH_MAX));
            tokio::select! {
                biased;
                () = mailbox_ready => {}
                () = tokio::time::sleep(delay), if delay != Duration::MAX => {}
            }
        }
        if messages.is_empty() {
            let input =
                if std::mem::take(&mut self.needs_retry) { FleetInput::Wake } else { FleetInput::Tick };
            self.step_machine(input, None).await;
            self.step_machine(FleetInput::Tick, None).await;
        }
        for message in messages {
            match message {
                FleetActorMessage::Request { actor, command, reply } => {
                    self.step_machine(FleetInput::Command { actor, command }, Some(reply)).await
                }
                FleetActorMessage::RunEnded(run) => self.handle_run_end(&run).await,
                FleetActorMessage::Wake => self.step_machine(FleetInput::Wake, None).await,
                FleetActorMessage::Stop => return ControlFlow::Break(()),
            }
        }
        ControlFlow::Continue(())
    }

    /// Judges the end of a run, which is read from its row.
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
                tracing::warn!(fleet = %self.fleet.id, %run, %error, "could not read the end of a run");
                self.needs_retry = true;
            }
        }
    }

    /// Judges one input, journals the result, replies and performs the effects.
    pub(super) async fn step_machine(
        &mut self,
        input: FleetInput,
        waiter: Option<oneshot::Sender<Result<FleetActorReply, ApiError>>>,
    ) {
        let questions = self.state.spec.routes.iter().filter(|route| route.then == RouteAction::CollectHuman);
        let ask_ids = questions.map(|_| AskId::from_random(&random::bytes::<26>())).collect();
        let FleetStep { events, effects, reply } =
            step(Arc::make_mut(&mut self.state), input, FleetContext { now: read_clocks(), ask_ids });
        if let Err(error) = self.append(&events).await {
            tracing::warn!(fleet = %self.fleet.id, %error, "an append failed; the fleet is loaded again");
            self.reload().await;
            if let Some(waiter) = waiter {
                // A client that has disconnected does not need the answer.
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
        let mut new_events = Vec::with_capacity(events.len());
        for FleetEvent { number, ts, actor, body } in events {
            new_events.push(NewEvent {
                scope: Arc::clone(&self.fleet.scope),
                number: Some(*number),
                ts: *ts,
                run: None,
                kind: body.kind(),
                data: body.encode(actor.as_deref()).map_err(encode_failed)?,
                update_number: None,
            });
            rows.extend(ask_row(&self.fleet, body, ts.wall)?);
        }
        let append = AppendRequest {
            events: new_events,
            rows,
            idempotency: None,
            may_use_reserve: self.state.stopping.is_some(),
        };
        self.daemon.journal.append(append).await.map(drop).map_err(append_failed)
    }

    /// Discards decisions that could not be journalled, by loading the state again.
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
                    tracing::warn!(fleet = %self.fleet.id, %error, "could not load a fleet; trying again");
                    tokio::time::sleep(RETRY_DELAY).await;
                }
            }
        }
    }
}

fn to_fleet_reply(reply: Option<FleetReply>) -> Result<FleetActorReply, ApiError> {
    match reply {
        Some(FleetReply::Cancelled(runs)) => Ok(FleetActorReply::Cancelled(runs)),
        Some(FleetReply::Answered(ask)) => Ok(FleetActorReply::Answered(ask)),
        Some(FleetReply::InvalidAnswer(reason)) => Err(ApiError::new(ErrorCode::InvalidAnswer, reason)),
        Some(FleetReply::AskChanged) => Err(ask_changed()),
        Some(FleetReply::AskNotOpen) | None => {
            Err(ApiError::new(ErrorCode::NotFound, "no open ask has this id"))
        }
    }
}

/// The row of an ask, if an event changes it.
pub(crate) fn ask_row(
    fleet: &FleetAddress,
    body: &EventBody,
    at: Millis,
) -> Result<Option<RowChange>, ApiError> {
    let doc = match body {
        EventBody::AskOpened(opened) => AskDoc::opened(opened.ask.clone()),
        EventBody::AskResolved(resolved) => AskDoc::resolved(resolved, at),
        _ => return Ok(None),
    };
    Ok(Some(RowChange::Ask(AskRow {
        id: doc.ask.id.clone(),
        session: fleet.key,
        pending: doc.ask.state == AskStatus::Pending,
        doc: serde_json::to_vec(&doc).map_err(encode_failed)?,
    })))
}
