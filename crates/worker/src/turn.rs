//! One turn, as a driver sees it: what it may say, and what it can wait for. The task that owns the agent puts the
//! turn's commands into [`Inbox`] while the turn runs; drivers never see a link's commands themselves.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use qd_link::{Closed, Voice};
use qd_protocol::event::{Answer, RunError};
use qd_protocol::limits::QUEUE_MAX;
use qd_protocol::link::{AskRequest, File, Outcome, Reply, Said, TurnLimits, Up};
use qd_protocol::{AskId, Number, RunId};
use serde_json::Value;
use tokio::sync::{Notify, oneshot};
use tokio_util::sync::CancellationToken;

use crate::meter::Meter;

/// Steers that may wait in one turn; what comes on top is missed at once and runs later as a prompt.
const STEERS_MAX: usize = QUEUE_MAX;
/// Asks that may be open in one turn; what comes on top counts as withdrawn at once.
const ASKS_MAX: usize = 256;
/// Random bytes in the id of an ask, five bits of each of which count.
const ASK_RANDOM: usize = 26;

/// What a turn is to do.
#[derive(Debug)]
pub(crate) struct Prompt {
    /// The run it serves.
    pub(crate) run: RunId,
    /// What to do, the whole of it.
    pub(crate) text: String,
    /// Files that come with it.
    pub(crate) files: Vec<File>,
    /// The conversation that it goes on with, where the agent does not remember it.
    pub(crate) messages: Vec<Value>,
    /// What is enforced here while no daemon is there to do it.
    pub(crate) limits: TurnLimits,
}

/// How a turn ended by itself.
#[derive(Debug)]
pub(crate) enum End {
    /// It stopped, and the agent takes the next.
    Stopped(Outcome),
    /// The whole agent ended in the middle of it: its exit status and its last lines on stderr.
    Exited(RunError),
}

/// What a turn can do.
#[derive(Debug)]
pub(crate) struct Turn<'a> {
    /// The run it serves.
    pub(crate) run: RunId,
    voice: Voice,
    inbox: &'a Inbox,
}

impl<'a> Turn<'a> {
    /// A turn that speaks through this voice and is told things through this inbox.
    pub(crate) fn new(run: RunId, voice: Voice, inbox: &'a Inbox) -> Self {
        Self { run, voice, inbox }
    }

    /// A piece of the answer.
    pub(crate) async fn say(&self, text: impl Into<String>) -> Result<(), Closed> {
        self.tell(Said::Text { text: text.into() }).await
    }

    /// Anything that needs no answer. Waits while too much is untaken.
    pub(crate) async fn tell(&self, what: Said) -> Result<(), Closed> {
        self.tell_of(self.run.clone(), what).await
    }

    /// The same of any run: what an earlier turn left behind may speak in this one. Whatever is used counts here.
    pub(crate) async fn tell_of(&self, run: RunId, what: Said) -> Result<(), Closed> {
        self.inbox.meter.note(&what);
        self.voice.say(Up::Said { run, what }).await
    }

    /// Asks and waits; `None` if nobody will answer. Any number may wait at once, each by the id of its ask.
    pub(crate) async fn ask(&self, ask: AskRequest) -> Result<Option<Answer>, Closed> {
        let id = ask.id.clone();
        // Before it is asked: the answer may be there at once.
        let Some(reply) = self.inbox.open_ask(&id) else { return Ok(None) };
        // Until the wait is over, however it ends.
        let _waiting = self.inbox.meter.wait();
        self.voice.say(Up::Ask { run: self.run.clone(), ask }).await?;
        match reply.await {
            Ok(Reply::Answered(answer)) => {
                self.voice.say(Up::AskDelivered { ask: id }).await?;
                Ok(Some(answer))
            }
            // The second is our own withdrawal.
            Ok(Reply::Withdrawn) | Err(_) => Ok(None),
        }
    }

    /// The agent no longer waits for this ask, whose [`Turn::ask`] gives `None` if it still runs. Nothing is said of
    /// one that has been answered meanwhile.
    pub(crate) async fn withdraw(&self, ask: &AskId) {
        if self.inbox.close_ask(ask) {
            // If the session has let go, it has withdrawn the ask itself.
            let _heard: Result<(), Closed> = self.voice.say(Up::AskWithdrawn { ask: ask.clone() }).await;
        }
    }

    /// The next steer. Nothing is lost if the wait is given up; one that was given out and of which no more is said
    /// counts as missed when the turn ends.
    pub(crate) async fn next_steer(&self) -> Steer {
        loop {
            if let Some(steer) = self.inbox.hand_out() {
                return steer;
            }
            self.inbox.steered.notified().await;
        }
    }

    /// The agent took a steer in.
    pub(crate) async fn steer_taken(&self, steer: Number) -> Result<(), Closed> {
        self.settle(steer, Up::SteerTaken { steer }).await
    }

    /// The agent will not take a steer in; it runs next as a prompt.
    pub(crate) async fn steer_missed(&self, steer: Number) -> Result<(), Closed> {
        self.settle(steer, Up::SteerMissed { steer }).await
    }

    /// Waits for a polite cancel; there at once if one has come. It stays: a driver can be sure not to miss it.
    pub(crate) async fn cancelled(&self) {
        self.inbox.cancel.cancelled().await;
    }

    /// Whether a polite cancel has come.
    pub(crate) fn is_cancelled(&self) -> bool {
        self.inbox.is_cancelled()
    }

    async fn settle(&self, steer: Number, word: Up) -> Result<(), Closed> {
        if self.inbox.settle(steer) { self.voice.say(word).await } else { Ok(()) }
    }
}

/// A name for an ask, which nobody can guess.
pub(crate) fn ask_id() -> Result<AskId, getrandom::Error> {
    let mut random = [0; ASK_RANDOM];
    getrandom::fill(&mut random)?;
    Ok(AskId::from_random(&random))
}

/// Something a turn was told on its way.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Steer {
    /// Its name.
    pub(crate) number: Number,
    /// The words.
    pub(crate) text: String,
}

/// What has come down for a turn, and what has been counted of it. Both sides are one task; the lock only satisfies
/// the compiler's idea of a task that may move between threads.
#[derive(Debug, Default)]
pub(crate) struct Inbox {
    /// What the turn has used so far.
    pub(crate) meter: Arc<Meter>,
    state: Mutex<State>,
    steered: Notify,
    cancel: CancellationToken,
}

#[derive(Debug, Default)]
struct State {
    /// In order of arrival.
    steers: VecDeque<Steer>,
    /// Given to the driver, which has not said what became of them.
    handed_out: Vec<Number>,
    /// Those that nobody has answered.
    asks: BTreeMap<AskId, oneshot::Sender<Reply>>,
}

impl Inbox {
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
    pub(crate) fn put_steer(&self, steer: Steer) -> bool {
        let mut state = self.lock();
        if state.steers.len() + state.handed_out.len() >= STEERS_MAX {
            return false;
        }
        state.steers.push_back(steer);
        drop(state);
        self.steered.notify_one();
        true
    }

    /// Gives a reply to whoever waits for it. One that nobody waits for is dropped, and so is every one but the first.
    pub(crate) fn put_reply(&self, ask: &AskId, reply: Reply) {
        if let Some(waiting) = self.lock().asks.remove(ask) {
            // The driver may have given the wait up, which needs no word: the answer was not delivered.
            let _taken: Result<(), Reply> = waiting.send(reply);
        }
    }

    /// The steers that the turn did not take, by number and in order.
    pub(crate) fn missed(&self) -> Vec<Number> {
        let mut state = self.lock();
        let State { steers, handed_out, .. } = &mut *state;
        handed_out.drain(..).chain(steers.drain(..).map(|steer| steer.number)).collect()
    }

    fn open_ask(&self, ask: &AskId) -> Option<oneshot::Receiver<Reply>> {
        let mut state = self.lock();
        if state.asks.len() >= ASKS_MAX {
            return None;
        }
        let (waiting, reply) = oneshot::channel();
        state.asks.insert(ask.clone(), waiting);
        Some(reply)
    }

    /// Whether it was open.
    fn close_ask(&self, ask: &AskId) -> bool {
        self.lock().asks.remove(ask).is_some()
    }

    fn hand_out(&self) -> Option<Steer> {
        let mut state = self.lock();
        let steer = state.steers.pop_front()?;
        state.handed_out.push(steer.number);
        Some(steer)
    }

    /// Whether its fate was open.
    fn settle(&self, steer: Number) -> bool {
        let mut state = self.lock();
        let found = state.handed_out.iter().position(|number| *number == steer);
        found.map(|at| state.handed_out.remove(at)).is_some()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
