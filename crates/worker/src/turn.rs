//! One turn, as a driver sees it: what it may say, and what it can wait for. The task that owns the agent puts the
//! turn's commands into [`Inbox`] while the turn runs; drivers never see a link's commands themselves.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use qd_link::{AgentOutput, LinkClosed};
use qd_protocol::event::{AskAnswer, RunError};
use qd_protocol::limits::QUEUE_MAX;
use qd_protocol::link::{
    AgentUpdate, AskRequest, AskResolution, PromptFile, TurnLimits, TurnOutcome, TurnUpdate,
};
use qd_protocol::{AskId, EventNumber, RunId};
use serde_json::Value;
use tokio::sync::{Notify, oneshot};
use tokio_util::sync::CancellationToken;

use crate::meter::TurnMeter;

/// Steers that may wait in one turn; what comes on top is missed at once and runs later as a prompt.
const STEERS_MAX: usize = QUEUE_MAX;
/// Asks that may be open in one turn; what comes on top counts as withdrawn at once.
const ASKS_MAX: usize = 256;
/// Random bytes in the id of an ask, five bits of each of which count.
const ASK_RANDOM_BYTES: usize = 26;

/// What a turn is to do.
#[derive(Debug)]
pub(crate) struct DriverPrompt {
    /// The run it serves.
    pub(crate) run: RunId,
    /// What to do, the whole of it.
    pub(crate) text: String,
    /// Files that come with it.
    pub(crate) files: Vec<PromptFile>,
    /// The conversation that it goes on with, where the agent does not remember it.
    pub(crate) messages: Vec<Value>,
    /// What is enforced here while no daemon is there to do it.
    pub(crate) limits: TurnLimits,
}

/// How a turn ended by itself.
#[derive(Debug)]
pub(crate) enum DriverTurnEnd {
    /// It stopped, and the agent takes the next.
    Stopped(TurnOutcome),
    /// The whole agent ended in the middle of it: its exit status and its last lines on stderr.
    AgentExited(RunError),
}

/// What a turn can do.
#[derive(Debug)]
pub(crate) struct DriverTurn<'a> {
    /// The run it serves.
    pub(crate) run: RunId,
    output: AgentOutput,
    inbox: &'a DriverInbox,
}

impl<'a> DriverTurn<'a> {
    /// A turn that speaks through this voice and is told things through this inbox.
    pub(crate) fn new(run: RunId, output: AgentOutput, inbox: &'a DriverInbox) -> Self {
        Self { run, output, inbox }
    }

    /// A piece of the answer.
    pub(crate) async fn emit_text(&self, text: impl Into<String>) -> Result<(), LinkClosed> {
        self.emit(TurnUpdate::Text { text: text.into() }).await
    }

    /// Anything that needs no answer. Waits while too much is untaken.
    pub(crate) async fn emit(&self, what: TurnUpdate) -> Result<(), LinkClosed> {
        self.emit_for_run(self.run.clone(), what).await
    }

    /// The same of any run: what an earlier turn left behind may speak in this one. Whatever is used counts here.
    pub(crate) async fn emit_for_run(&self, run: RunId, what: TurnUpdate) -> Result<(), LinkClosed> {
        self.inbox.meter.count_update(&what);
        self.output.send(AgentUpdate::Turn { run, update: what }).await
    }

    /// Asks and waits; `None` if nobody will answer. Any number may wait at once, each by the id of its ask.
    pub(crate) async fn ask(&self, ask: AskRequest) -> Result<Option<AskAnswer>, LinkClosed> {
        let id = ask.id.clone();
        // Before it is asked: the answer may be there at once.
        let Some(reply) = self.inbox.open_ask(&id) else { return Ok(None) };
        // Until the wait is over, however it ends.
        let _waiting = self.inbox.meter.pause_clock();
        self.output.send(AgentUpdate::Ask { run: self.run.clone(), ask }).await?;
        match reply.await {
            Ok(AskResolution::Answered(answer)) => {
                self.output.send(AgentUpdate::AskDelivered { ask: id }).await?;
                Ok(Some(answer))
            }
            // The second is our own withdrawal.
            Ok(AskResolution::Withdrawn) | Err(_) => Ok(None),
        }
    }

    /// The agent no longer waits for this ask, whose [`Turn::ask`] gives `None` if it still runs. Nothing is said of
    /// one that has been answered meanwhile.
    pub(crate) async fn withdraw_ask(&self, ask: &AskId) {
        if self.inbox.close_ask(ask) {
            // If the session has let go, it has withdrawn the ask itself.
            let _heard: Result<(), LinkClosed> =
                self.output.send(AgentUpdate::AskWithdrawn { ask: ask.clone() }).await;
        }
    }

    /// The next steer. Nothing is lost if the wait is given up; one that was given out and of which no more is said
    /// counts as missed when the turn ends.
    pub(crate) async fn next_steer(&self) -> DriverSteer {
        loop {
            if let Some(steer) = self.inbox.take_steer() {
                return steer;
            }
            self.inbox.steer_arrived.notified().await;
        }
    }

    /// The agent took a steer in.
    pub(crate) async fn report_steer_taken(&self, steer: EventNumber) -> Result<(), LinkClosed> {
        self.settle_steer(steer, AgentUpdate::SteerTaken { steer }).await
    }

    /// The agent will not take a steer in; it runs next as a prompt.
    pub(crate) async fn report_steer_missed(&self, steer: EventNumber) -> Result<(), LinkClosed> {
        self.settle_steer(steer, AgentUpdate::SteerMissed { steer }).await
    }

    /// Waits for a polite cancel; there at once if one has come. It stays: a driver can be sure not to miss it.
    pub(crate) async fn cancelled(&self) {
        self.inbox.cancel.cancelled().await;
    }

    /// Whether a polite cancel has come.
    pub(crate) fn is_cancelled(&self) -> bool {
        self.inbox.is_cancelled()
    }

    async fn settle_steer(&self, steer: EventNumber, word: AgentUpdate) -> Result<(), LinkClosed> {
        if self.inbox.settle_steer(steer) { self.output.send(word).await } else { Ok(()) }
    }
}

/// A name for an ask, which nobody can guess.
pub(crate) fn new_ask_id() -> Result<AskId, getrandom::Error> {
    let mut random = [0; ASK_RANDOM_BYTES];
    getrandom::fill(&mut random)?;
    Ok(AskId::from_random(&random))
}

/// Something a turn was told on its way.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct DriverSteer {
    /// Its name.
    pub(crate) number: EventNumber,
    /// The words.
    pub(crate) text: String,
}

/// What has come down for a turn, and what has been counted of it. Both sides are one task; the lock only satisfies
/// the compiler's idea of a task that may move between threads.
#[derive(Debug, Default)]
pub(crate) struct DriverInbox {
    /// What the turn has used so far.
    pub(crate) meter: Arc<TurnMeter>,
    state: Mutex<DriverInboxState>,
    steer_arrived: Notify,
    cancel: CancellationToken,
}

#[derive(Debug, Default)]
struct DriverInboxState {
    /// In order of arrival.
    steers: VecDeque<DriverSteer>,
    /// Given to the driver, which has not said what became of them.
    handed_out: Vec<EventNumber>,
    /// Those that nobody has answered.
    open_asks: BTreeMap<AskId, oneshot::Sender<AskResolution>>,
}

impl DriverInbox {
    /// Asks the turn to stop.
    pub(crate) fn cancel(&self) {
        self.cancel.cancel();
    }

    /// Whether it was asked to.
    pub(crate) fn is_cancelled(&self) -> bool {
        self.cancel.is_cancelled()
    }

    /// Keeps a steer for when the turn wants one; false if too many wait.
    #[must_use]
    pub(crate) fn queue_steer(&self, steer: DriverSteer) -> bool {
        let mut state = self.lock();
        if state.steers.len() + state.handed_out.len() >= STEERS_MAX {
            return false;
        }
        state.steers.push_back(steer);
        drop(state);
        self.steer_arrived.notify_one();
        true
    }

    /// Gives a reply to whoever waits for it. One that nobody waits for is dropped, and so is every one but the first.
    pub(crate) fn deliver_reply(&self, ask: &AskId, reply: AskResolution) {
        if let Some(waiting) = self.lock().open_asks.remove(ask) {
            // The driver may have given the wait up, which needs no word: the answer was not delivered.
            let _taken: Result<(), AskResolution> = waiting.send(reply);
        }
    }

    /// The steers that the turn did not take, by number and in order.
    pub(crate) fn take_missed_steers(&self) -> Vec<EventNumber> {
        let mut state = self.lock();
        let DriverInboxState { steers, handed_out, .. } = &mut *state;
        handed_out.drain(..).chain(steers.drain(..).map(|steer| steer.number)).collect()
    }

    fn open_ask(&self, ask: &AskId) -> Option<oneshot::Receiver<AskResolution>> {
        let mut state = self.lock();
        if state.open_asks.len() >= ASKS_MAX {
            return None;
        }
        let (waiting, reply) = oneshot::channel();
        state.open_asks.insert(ask.clone(), waiting);
        Some(reply)
    }

    /// Whether it was open.
    fn close_ask(&self, ask: &AskId) -> bool {
        self.lock().open_asks.remove(ask).is_some()
    }

    fn take_steer(&self) -> Option<DriverSteer> {
        let mut state = self.lock();
        let steer = state.steers.pop_front()?;
        state.handed_out.push(steer.number);
        Some(steer)
    }

    /// Whether its fate was open.
    fn settle_steer(&self, steer: EventNumber) -> bool {
        let mut state = self.lock();
        let found = state.handed_out.iter().position(|number| *number == steer);
        found.map(|at| state.handed_out.remove(at)).is_some()
    }

    fn lock(&self) -> MutexGuard<'_, DriverInboxState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
