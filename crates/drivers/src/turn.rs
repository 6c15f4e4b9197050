//! One turn as a driver sees it: the updates it can send, and the commands it can wait for. The task that owns the
//! agent puts the turn's commands into the [`DriverInbox`]; drivers never see the link's commands themselves.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};
use qd_link::{AgentOutput, LinkClosed};
use qd_protocol::event::{AskAnswer, RunError};
use qd_protocol::limits::{ASKS_MADE_MAX, ASKS_OPEN_MAX, QUEUE_MAX};
use qd_protocol::link::{
    AgentUpdate, AskRequest, AskResolution, PromptFile, TurnLimits, TurnOutcome, TurnUpdate,
};
use qd_protocol::{AskId, EventNumber, RunId};
use serde_json::Value;
use tokio::sync::{Notify, Semaphore, SemaphorePermit, oneshot};
use tokio_util::sync::CancellationToken;

use crate::meter::TurnMeter;

/// The most steers that may wait in one turn. Further steers are missed at once and run later as prompts.
const STEERS_MAX: usize = QUEUE_MAX;
/// Random bytes in the id of an ask. Five bits of each are used.
const ASK_RANDOM_BYTES: usize = 26;

/// The prompt that a turn serves.
#[derive(Debug)]
pub struct DriverPrompt {
    pub run: RunId,
    pub text: String,
    /// The mode that the agent must be in. `None` leaves it in the mode in which it is.
    pub mode: Option<String>,
    pub files: Vec<PromptFile>,
    /// The earlier messages of the conversation, for an agent that does not remember them.
    pub messages: Vec<Value>,
    /// The limits that the worker enforces while no daemon is attached.
    pub limits: TurnLimits,
}

/// How a turn ended by itself.
#[derive(Debug)]
pub enum DriverTurnEnd {
    /// The turn is over, and the agent can take the next one.
    Stopped(TurnOutcome),
    /// The agent exited during the turn. The error has its exit status and its last lines on stderr.
    AgentExited(RunError),
}

/// The operations that a driver has during a turn.
#[derive(Debug)]
pub struct DriverTurn<'a> {
    pub run: RunId,
    output: AgentOutput,
    inbox: &'a DriverInbox,
}

impl<'a> DriverTurn<'a> {
    pub fn new(run: RunId, output: AgentOutput, inbox: &'a DriverInbox) -> Self {
        Self { run, output, inbox }
    }

    /// Sends a piece of the agent's answer.
    pub async fn emit_text(&self, text: impl Into<String>) -> Result<(), LinkClosed> {
        self.emit(TurnUpdate::Text { text: text.into() }).await
    }

    /// Sends an update that needs no reply. Waits while too many updates are queued.
    pub async fn emit(&self, update: TurnUpdate) -> Result<(), LinkClosed> {
        self.emit_for_run(self.run.clone(), update).await
    }

    /// Sends an update for any run: processes of an earlier turn may report during this one. Usage counts for this
    /// turn.
    pub async fn emit_for_run(&self, run: RunId, update: TurnUpdate) -> Result<(), LinkClosed> {
        self.inbox.meter.count_update(&update);
        let _sending = self.inbox.meter.pause_silence();
        self.output.send(AgentUpdate::Turn { run, update }).await
    }

    /// Asks and waits for the answer; `None` if nobody will answer. Many asks may wait at the same time. While as many are
    /// open as may be, the next ones wait here in their order, and nobody is asked yet.
    pub async fn ask(&self, ask: AskRequest) -> Result<Option<AskAnswer>, LinkClosed> {
        let id = ask.id.clone();
        // Opened before the ask is sent, because the answer may come at once.
        let Some(mut reply) = self.inbox.open_ask(&id) else { return Ok(None) };
        // Pauses the clock until the wait is over, however it ends.
        let _waiting = self.inbox.meter.pause_clock();
        let Some(_open) = self.inbox.wait_for_ask_slot(&mut reply).await else { return Ok(None) };
        self.output.send(AgentUpdate::Ask { run: self.run.clone(), ask }).await?;
        match reply.await {
            Ok(AskResolution::Answered(answer)) => {
                self.output.send(AgentUpdate::AskDelivered { ask: id }).await?;
                Ok(Some(answer))
            }
            // The channel is closed when we withdraw the ask ourselves.
            Ok(AskResolution::Withdrawn) | Err(_) => Ok(None),
        }
    }

    /// Withdraws an ask that the agent no longer waits for. A [`DriverTurn::ask`] that still waits for it returns
    /// `None`. Does nothing if the ask has been answered meanwhile.
    pub async fn withdraw_ask(&self, ask: &AskId) {
        if self.inbox.close_ask(ask) {
            // If the link is closed, the session has withdrawn the ask itself.
            let _sent: Result<(), LinkClosed> =
                self.output.send(AgentUpdate::AskWithdrawn { ask: ask.clone() }).await;
        }
    }

    /// Waits for the next steer. Dropping the wait loses nothing. A steer whose fate the driver never reports counts as
    /// missed when the turn ends.
    pub async fn next_steer(&self) -> DriverSteer {
        loop {
            if let Some(steer) = self.inbox.take_steer() {
                return steer;
            }
            self.inbox.steer_arrived.notified().await;
        }
    }

    /// Reports that the agent took a steer in.
    pub async fn report_steer_taken(&self, steer: EventNumber) -> Result<(), LinkClosed> {
        self.settle_steer(steer, AgentUpdate::SteerTaken { steer }).await
    }

    /// Reports that the agent will not take a steer in. It then runs as the next prompt.
    pub async fn report_steer_missed(&self, steer: EventNumber) -> Result<(), LinkClosed> {
        self.settle_steer(steer, AgentUpdate::SteerMissed { steer }).await
    }

    /// Waits for a cancel; resolves at once if one has come. The cancel stays set, so a driver cannot miss it.
    pub async fn cancelled(&self) {
        self.inbox.cancel.cancelled().await;
    }

    pub fn is_cancelled(&self) -> bool {
        self.inbox.is_cancelled()
    }

    async fn settle_steer(&self, steer: EventNumber, update: AgentUpdate) -> Result<(), LinkClosed> {
        if self.inbox.settle_steer(steer) { self.output.send(update).await } else { Ok(()) }
    }
}

/// A random id for an ask, which nobody can guess.
pub fn new_ask_id() -> Result<AskId, getrandom::Error> {
    let mut random = [0; ASK_RANDOM_BYTES];
    getrandom::fill(&mut random)?;
    Ok(AskId::from_random(&random))
}

/// Text that a user sends into a running turn.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DriverSteer {
    pub number: EventNumber,
    pub text: String,
}

/// The commands that have arrived for a turn, and its meter. Both sides run in the same task; the lock is only there
/// because the task may move between threads.
#[derive(Debug)]
pub struct DriverInbox {
    /// The run of the turn. A stop of any other run changes nothing here.
    run: RunId,
    pub meter: Arc<TurnMeter>,
    state: Mutex<DriverInboxState>,
    steer_arrived: Notify,
    /// One permit for each ask that may be open.
    ask_slots: Semaphore,
    cancel: CancellationToken,
}

#[derive(Debug, Default)]
struct DriverInboxState {
    /// In order of arrival.
    steers: VecDeque<DriverSteer>,
    /// Steers that the driver has taken without reporting their fate.
    handed_out: Vec<EventNumber>,
    /// The asks that have no answer yet, or that wait until they may be opened.
    open_asks: BTreeMap<AskId, oneshot::Sender<AskResolution>>,
}

impl DriverInbox {
    /// An inbox for one turn of this run. Nothing of it outlives the turn.
    pub fn for_run(run: RunId) -> Self {
        Self {
            run,
            meter: Arc::default(),
            state: Mutex::default(),
            steer_arrived: Notify::new(),
            ask_slots: Semaphore::new(ASKS_OPEN_MAX),
            cancel: CancellationToken::new(),
        }
    }

    /// Cancels the turn if it is one of this run. A stop that comes late, for an earlier run, must not end this one.
    pub fn cancel(&self, run: &RunId) {
        if *run == self.run {
            self.cancel.cancel();
        }
    }

    pub fn is_cancelled(&self) -> bool {
        self.cancel.is_cancelled()
    }

    /// Queues a steer for the turn. Returns false if too many are waiting.
    #[must_use]
    pub fn queue_steer(&self, steer: DriverSteer) -> bool {
        let mut state = self.lock();
        if state.steers.len() + state.handed_out.len() >= STEERS_MAX {
            return false;
        }
        state.steers.push_back(steer);
        drop(state);
        self.steer_arrived.notify_one();
        true
    }

    /// Delivers a reply to the ask that waits for it. A reply without a waiting ask is dropped, and so is a second one.
    pub fn deliver_reply(&self, ask: &AskId, reply: AskResolution) {
        if let Some(sender) = self.lock().open_asks.remove(ask) {
            // The driver may have dropped the wait. Then the answer was not delivered, and nothing needs to be
            // reported.
            let _taken: Result<(), AskResolution> = sender.send(reply);
        }
    }

    /// The numbers of the steers that the turn did not take, in order.
    pub fn take_missed_steers(&self) -> Vec<EventNumber> {
        let mut state = self.lock();
        let DriverInboxState { steers, handed_out, .. } = &mut *state;
        handed_out.drain(..).chain(steers.drain(..).map(|steer| steer.number)).collect()
    }

    fn open_ask(&self, ask: &AskId) -> Option<oneshot::Receiver<AskResolution>> {
        let mut state = self.lock();
        if state.open_asks.len() >= ASKS_MADE_MAX {
            return None;
        }
        let (sender, reply) = oneshot::channel();
        state.open_asks.insert(ask.clone(), sender);
        Some(reply)
    }

    /// Waits until one more ask may be open; `None` if the ask is withdrawn before.
    async fn wait_for_ask_slot(
        &self,
        reply: &mut oneshot::Receiver<AskResolution>,
    ) -> Option<SemaphorePermit<'_>> {
        tokio::select! {
            biased;
            // Nobody can answer an ask that was not sent, so the channel has been closed.
            _ = reply => None,
            permit = self.ask_slots.acquire() => permit.ok(),
        }
    }

    /// Returns whether the ask was open.
    fn close_ask(&self, ask: &AskId) -> bool {
        self.lock().open_asks.remove(ask).is_some()
    }

    fn take_steer(&self) -> Option<DriverSteer> {
        let mut state = self.lock();
        let steer = state.steers.pop_front()?;
        state.handed_out.push(steer.number);
        Some(steer)
    }

    /// Returns whether the fate of the steer was still open.
    fn settle_steer(&self, steer: EventNumber) -> bool {
        let mut state = self.lock();
        let found = state.handed_out.iter().position(|number| *number == steer);
        found.map(|at| state.handed_out.remove(at)).is_some()
    }

    fn lock(&self) -> MutexGuard<'_, DriverInboxState> {
        self.state.lock()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stop_of_another_run_does_not_cancel_the_turn() {
        let run = |name: &str| RunId::parse(name).unwrap();
        let inbox = DriverInbox::for_run(run("second"));
        inbox.cancel(&run("first"));
        assert!(!inbox.is_cancelled());
        inbox.cancel(&run("second"));
        assert!(inbox.is_cancelled());
    }
}
