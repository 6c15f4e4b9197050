//! The shell around one fleet's machine, as dull as a session's: it takes what has come, lets the machine judge it,
//! appends, and only then answers and acts. If the append fails it reads its state again; what was to be done is still
//! open there, and is found when it looks next.

use std::collections::{HashSet, VecDeque};
use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::Duration;

use qd_core::fleet::{Command, Effect, Input, Recorded, Reply, State, Step, World, deadline, evolve, step};
use qd_core::rows::AskDoc;
use qd_journal::{Append, AskRow, NewEvent, RowChange};
use qd_protocol::event::{Ask, AskState, Body};
use qd_protocol::fleet::Action;
use qd_protocol::{ApiError, AskId, Code, Millis, RunId};
use tokio::sync::oneshot;

use super::{FleetRef, give, row};
use crate::actor::unwritable;
use crate::daemon::{Daemon, append_failed, read_failed};
use crate::random;
use crate::registry::Mailbox;

/// How many things are judged before others have their turn.
const BATCH_MAX: usize = 256;
/// How long to wait before what a session or the journal did not take is tried again.
const RETRY: Duration = Duration::from_millis(250);

/// What can be in a fleet's mailbox.
pub(crate) enum FleetMail {
    /// Somebody wants something and waits for the answer.
    Request { command: Command, reply: oneshot::Sender<Result<Answer, ApiError>> },
    /// A run of one of its sessions has ended.
    Ended(RunId),
    /// See what is owed.
    Wake,
    /// The daemon ends.
    Stop,
}

/// What came of a request.
#[derive(Debug)]
pub(crate) enum Answer {
    /// These runs are being stopped.
    Cancelled(Vec<RunId>),
    /// An answer won.
    Answered(Box<Ask>),
}

/// Lives until the fleet has ended or the daemon does.
pub(super) async fn live(daemon: Arc<Daemon>, fleet: Arc<FleetRef>, mailbox: Arc<Mailbox<FleetMail>>) {
    let _grave =
        Grave { daemon: Arc::clone(&daemon), fleet: Arc::clone(&fleet), mailbox: Arc::clone(&mailbox) };
    match load(&daemon, &fleet).await {
        Ok(state) => {
            let mut actor = FleetActor {
                daemon,
                fleet,
                mailbox,
                state: Arc::new(state),
                given: HashSet::new(),
                told: VecDeque::new(),
                again: false,
            };
            actor.run().await;
        }
        Err(error) => tracing::error!(fleet = %fleet.id, %error, "a fleet could not be read"),
    }
}

/// Also if it panics: the next message must wake a new actor, not wait for a dead one.
struct Grave {
    daemon: Arc<Daemon>,
    fleet: Arc<FleetRef>,
    mailbox: Arc<Mailbox<FleetMail>>,
}

impl Drop for Grave {
    fn drop(&mut self) {
        self.daemon.fleets.bury(&self.fleet.id, &self.mailbox);
    }
}

/// A fleet read from the journal.
async fn load(daemon: &Daemon, fleet: &FleetRef) -> Result<State, ApiError> {
    let unreadable = |error: serde_json::Error| {
        let message =
            format!("fleet {} could not be read from the journal: {error}; see `qd doctor`", fleet.id);
        ApiError::new(Code::Internal, message)
    };
    let loaded = daemon.journal.load(fleet.key).await.map_err(read_failed)?;
    let mut state: Option<State> = None;
    for stored in &loaded.events {
        let number = stored.number.unwrap_or_default();
        match (&mut state, Body::decode(&stored.kind, &stored.data).map_err(unreadable)?) {
            (Some(state), Some(body)) => evolve(state, &Recorded { number, ts: stored.ts, body }),
            // A kind that a later version writes still counts.
            (Some(state), None) => state.number = number,
            (None, Some(Body::FleetStarted(started))) => {
                state = Some(State::new(fleet.workspace.clone(), started, stored.ts));
            }
            (None, _) => {}
        }
    }
    state.ok_or_else(|| ApiError::not_found("fleet", &fleet.id))
}

pub(super) struct FleetActor {
    pub(super) daemon: Arc<Daemon>,
    pub(super) fleet: Arc<FleetRef>,
    mailbox: Arc<Mailbox<FleetMail>>,
    /// Shared with what is on its way to sessions, and with nobody else: it is not copied when it changes.
    pub(super) state: Arc<State>,
    /// Open runs that their sessions have.
    pub(super) given: HashSet<RunId>,
    /// Ends that are still to be judged.
    pub(super) told: VecDeque<RunId>,
    /// Whether something has to be tried again.
    pub(super) again: bool,
}

impl FleetActor {
    async fn run(&mut self) {
        self.judge(Input::Wake, None).await;
        loop {
            while let Some(run) = self.told.pop_front() {
                self.hear(&run).await;
            }
            if self.state.finished.is_some() && self.daemon.fleets.sleep(&self.fleet.id, &self.mailbox) {
                return;
            }
            if self.next().await.is_break() {
                return;
            }
            tokio::task::coop::consume_budget().await;
        }
    }

    async fn next(&mut self) -> ControlFlow<()> {
        let due = deadline(&self.state).map(|at| Duration::from_millis(at.since(Millis::now())));
        let pause = if self.again { due.unwrap_or(RETRY).min(RETRY) } else { due.unwrap_or(Duration::MAX) };
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
            let input = if std::mem::take(&mut self.again) { Input::Wake } else { Input::Tick };
            self.judge(input, None).await;
            self.judge(Input::Tick, None).await;
        }
        for letter in mail {
            match letter {
                FleetMail::Request { command, reply } => {
                    self.judge(Input::Command(command), Some(reply)).await
                }
                FleetMail::Ended(run) => self.hear(&run).await,
                FleetMail::Wake => self.judge(Input::Wake, None).await,
                FleetMail::Stop => return ControlFlow::Break(()),
            }
        }
        ControlFlow::Continue(())
    }

    /// A run has ended: what it came to is in its row.
    async fn hear(&mut self, run: &RunId) {
        if !self.state.open_runs().any(|open| open.run == *run) {
            return;
        }
        match give::ended(&self.daemon, &self.state, run).await {
            Ok(Some(input)) => {
                self.given.remove(run);
                self.judge(input, None).await;
            }
            Ok(None) => {}
            Err(error) => {
                tracing::warn!(fleet = %self.fleet.id, %run, %error, "the end of a run could not be read");
                self.again = true;
            }
        }
    }

    /// Judges one input, journals what came of it, answers and acts.
    pub(super) async fn judge(
        &mut self,
        input: Input,
        waiter: Option<oneshot::Sender<Result<Answer, ApiError>>>,
    ) {
        let questions = self.state.spec.routes.iter().filter(|route| route.then == Action::CollectHuman);
        let asks = questions.map(|_| AskId::from_random(&random::bytes::<26>())).collect();
        let Step { events, effects, reply } =
            step(Arc::make_mut(&mut self.state), input, World { now: Millis::now(), asks });
        if let Err(error) = self.append(&events).await {
            tracing::warn!(fleet = %self.fleet.id, %error, "a fleet's events were not taken; it is read again");
            self.read_again().await;
            if let Some(waiter) = waiter {
                // Whoever has gone away does not need the answer.
                let _gone = waiter.send(Err(error));
            }
            return;
        }
        if let Some(waiter) = waiter {
            let _gone = waiter.send(answer(reply));
        }
        for effect in effects {
            match effect {
                Effect::Give => self.give().await,
                Effect::Stop => self.stop().await,
            }
        }
    }

    async fn append(&self, events: &[Recorded]) -> Result<(), ApiError> {
        if events.is_empty() {
            return Ok(());
        }
        let mut rows = vec![row(&self.fleet, &self.state)?];
        let mut drafts = Vec::with_capacity(events.len());
        for Recorded { number, ts, body } in events {
            drafts.push(NewEvent {
                scope: Arc::clone(&self.fleet.scope),
                number: Some(*number),
                ts: *ts,
                run: None,
                kind: body.kind(),
                data: body.encode().map_err(unwritable)?,
                up: None,
            });
            rows.extend(ask_row(&self.fleet, body)?);
        }
        let append = Append { events: drafts, rows, remember: None, reserve: self.state.stopping.is_some() };
        self.daemon.journal.append(append).await.map(drop).map_err(append_failed)
    }

    /// Forgets what it decided and could not write down.
    async fn read_again(&mut self) {
        self.again = true;
        // The journal may be in trouble for longer; nothing is decided meanwhile.
        while !self.daemon.is_stopping() {
            match load(&self.daemon, &self.fleet).await {
                Ok(state) => {
                    self.state = Arc::new(state);
                    return;
                }
                Err(error) => {
                    tracing::warn!(fleet = %self.fleet.id, %error, "a fleet could not be read again");
                    tokio::time::sleep(RETRY).await;
                }
            }
        }
    }
}

fn answer(reply: Option<Reply>) -> Result<Answer, ApiError> {
    match reply {
        Some(Reply::Cancelled(hit)) => Ok(Answer::Cancelled(hit)),
        Some(Reply::Answered(ask)) => Ok(Answer::Answered(ask)),
        Some(Reply::InvalidAnswer(why)) => Err(ApiError::new(Code::InvalidAnswer, why)),
        Some(Reply::AskNotOpen) | None => Err(ApiError::new(Code::NotFound, "no open ask has this id")),
    }
}

/// The row of a question, where an event changes it.
pub(crate) fn ask_row(fleet: &FleetRef, body: &Body) -> Result<Option<RowChange>, ApiError> {
    let doc = match body {
        Body::AskOpened(opened) => AskDoc { ask: opened.ask.clone(), by: None, rule: None, granted: false },
        Body::AskResolved(resolved) => AskDoc::from(resolved),
        _ => return Ok(None),
    };
    Ok(Some(RowChange::Ask(AskRow {
        id: doc.ask.id.clone(),
        session: fleet.key,
        pending: doc.ask.state == AskState::Pending,
        doc: serde_json::to_vec(&doc).map_err(unwritable)?,
    })))
}
