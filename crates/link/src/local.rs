//! A link inside one process: two ends over one small shared state, and the task that holds the agent. The rules of
//! what is merged, bounded, overtaken and repeated are in `up` and `down`; here are only the waking and the ending.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use qd_protocol::Number;
use qd_protocol::event::RunError;
use qd_protocol::link::{Down, Gone, Up, UpNumber};
use tokio::sync::Notify;
use tokio::task::{JoinError, JoinHandle};

use crate::down::Commands;
use crate::up::{Numbered, Untaken, pieces};

/// The session has let go of its agent: nobody hears it any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the session has let go of its agent")]
pub struct Closed;

/// What a session hears.
#[derive(Debug, Clone, PartialEq)]
pub enum Heard {
    /// All that waited, in order.
    Said(Vec<Numbered>),
    /// The connection broke; the agent may go on. Never on a local link.
    Lost,
    /// The connection is there again. Never on a local link.
    Back {
        /// The last command that the agent's side has applied.
        applied: Number,
    },
    /// The agent is no more, and all that it said has been heard.
    Gone(Gone),
}

/// Two ends with nothing between them. What is said is numbered after `after`, since numbers never restart within a
/// session.
pub fn local(after: UpNumber) -> (AgentEnd, SessionEnd) {
    let shared = Arc::new(Shared {
        state: Mutex::new(State {
            untaken: Untaken::after(after),
            commands: Commands::default(),
            let_go: false,
            over: false,
        }),
        spoken: Notify::new(),
        commanded: Notify::new(),
        room: Notify::new(),
    });
    let agent = AgentEnd { voice: Voice { shared: Arc::clone(&shared) } };
    (agent, SessionEnd { shared, unacked: VecDeque::new(), task: None, gone: None })
}

/// Runs an agent in a task of its own, which the session's end owns: it is ended with it. What the task returns, or
/// that it panicked, is the last thing heard.
pub fn host<A, F>(after: UpNumber, agent: A) -> SessionEnd
where
    A: FnOnce(AgentEnd) -> F,
    F: Future<Output = Gone> + Send + 'static,
{
    let (agent_end, mut session_end) = local(after);
    session_end.task = Some(tokio::spawn(agent(agent_end)));
    session_end
}

/// The agent's end. When it is dropped, the agent is over.
#[derive(Debug)]
pub struct AgentEnd {
    voice: Voice,
}

impl AgentEnd {
    /// See [`Voice::say`].
    pub async fn say(&self, up: Up) -> Result<(), Closed> {
        self.voice.say(up).await
    }

    /// Something that can speak while this end waits for commands.
    pub fn voice(&self) -> Voice {
        self.voice.clone()
    }

    /// The next command, each once; `None` when the session has let go. Nothing is lost if the wait is given up.
    pub async fn command(&mut self) -> Option<Down> {
        let shared = &self.voice.shared;
        loop {
            {
                let mut state = shared.lock();
                if state.let_go {
                    return None;
                }
                if let Some(down) = state.commands.take() {
                    return Some(down);
                }
            }
            shared.commanded.notified().await;
        }
    }
}

impl Drop for AgentEnd {
    fn drop(&mut self) {
        self.voice.shared.lock().over = true;
        self.voice.shared.spoken.notify_one();
        self.voice.shared.room.notify_waiters();
    }
}

/// The mouth of an agent: cheap to clone, and of no use once its [`AgentEnd`] is gone.
#[derive(Debug, Clone)]
pub struct Voice {
    shared: Arc<Shared>,
}

impl Voice {
    /// Says something, waiting while too much is untaken: that is how a slow journal slows the agent down. What
    /// answers a command (a terminal, a steer taken or missed, an ask delivered) never waits. If the wait is given up,
    /// the rest is not said. Two voices keep no order between them.
    pub async fn say(&self, up: Up) -> Result<(), Closed> {
        for piece in pieces(up) {
            self.say_piece(piece).await?;
        }
        // An agent that never waits would otherwise keep its own task from seeing a cancel.
        tokio::task::coop::consume_budget().await;
        Ok(())
    }

    async fn say_piece(&self, piece: Up) -> Result<(), Closed> {
        let Some(mut piece) = self.shared.offer(piece)? else { return Ok(()) };
        loop {
            // Made before the next try: room that appears in between wakes it.
            let room = self.shared.room.notified();
            match self.shared.offer(piece)? {
                None => return Ok(()),
                Some(back) => piece = back,
            }
            room.await;
        }
    }
}

/// The session's end. When it is dropped, the agent's task is ended.
#[derive(Debug)]
pub struct SessionEnd {
    shared: Arc<Shared>,
    /// Handed out, and not known to be in the journal.
    unacked: VecDeque<Numbered>,
    task: Option<JoinHandle<Gone>>,
    /// Kept, since a task tells its end only once.
    gone: Option<Gone>,
}

impl SessionEnd {
    /// Waits for the agent to say something and takes all of it, or tells that the agent is gone, as often as asked.
    /// Nothing is lost if the wait is given up.
    pub async fn hear(&mut self) -> Heard {
        loop {
            let over = {
                let mut state = self.shared.lock();
                let said = state.untaken.take();
                if !said.is_empty() {
                    drop(state);
                    self.shared.room.notify_waiters();
                    self.unacked.extend(said.iter().cloned());
                    return Heard::Said(said);
                }
                state.over
            };
            if over {
                return Heard::Gone(self.gone().await);
            }
            self.shared.spoken.notified().await;
        }
    }

    /// Everything up to here is in the journal and need not be kept.
    pub fn ack(&mut self, upto: UpNumber) {
        let known = self.unacked.partition_point(|thing| thing.number <= upto);
        self.unacked.drain(..known);
        if self.unacked.is_empty() {
            self.unacked = VecDeque::new();
        }
    }

    /// What was handed out and never acknowledged, for a session that has to begin again from its journal.
    pub fn unacked(&self) -> impl Iterator<Item = &Numbered> {
        self.unacked.iter()
    }

    /// Tells the agent something; never waits, and a repeat does nothing.
    pub fn send(&self, down: Down) {
        self.shared.lock().commands.put(down);
        self.shared.commanded.notify_one();
    }

    /// Ends the agent's task and waits for its end. What it was about to say is not said.
    pub async fn stop(mut self) {
        self.let_go();
        if let Some(task) = self.task.take() {
            task.abort();
            // Its last word has nobody to hear it: whoever stops an agent knows that it is stopped.
            let _ended: Result<Gone, JoinError> = task.await;
        }
    }

    async fn gone(&mut self) -> Gone {
        if let Some(gone) = &self.gone {
            return gone.clone();
        }
        let gone = match &mut self.task {
            Some(task) => task.await.unwrap_or_else(|error| Gone::Failed(panicked(error))),
            None => Gone::Failed(RunError::new("agent_ended", "the agent ended without a word")),
        };
        self.task = None;
        self.gone.insert(gone).clone()
    }

    fn let_go(&self) {
        self.shared.lock().let_go = true;
        self.shared.commanded.notify_one();
        self.shared.room.notify_waiters();
    }
}

impl Drop for SessionEnd {
    fn drop(&mut self) {
        self.let_go();
        if let Some(task) = &self.task {
            task.abort();
        }
    }
}

/// What the two ends share.
#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    /// Wakes the session: something waits for it, or the agent is over.
    spoken: Notify,
    /// Wakes the agent: a command waits for it, or the session has let go.
    commanded: Notify,
    /// Wakes voices that wait for the window.
    room: Notify,
}

#[derive(Debug)]
struct State {
    untaken: Untaken,
    commands: Commands,
    /// The session wants nothing more of the agent.
    let_go: bool,
    /// The agent's end is gone.
    over: bool,
}

impl Shared {
    /// Nothing that runs under the lock can leave the state half changed, so a panic elsewhere does not spoil it.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Says a piece, or gives it back if there is no room.
    fn offer(&self, piece: Up) -> Result<Option<Up>, Closed> {
        let mut state = self.lock();
        if state.let_go || state.over {
            return Err(Closed);
        }
        let first = state.untaken.is_empty();
        let back = state.untaken.offer(piece);
        drop(state);
        if first {
            self.spoken.notify_one();
        }
        Ok(back)
    }
}

fn panicked(error: JoinError) -> RunError {
    let Ok(panic) = error.try_into_panic() else {
        return RunError::new("agent_ended", "the agent's task was ended from outside");
    };
    let words =
        panic.downcast_ref::<&str>().copied().or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    RunError::new("agent_panicked", format!("the agent panicked: {}", words.unwrap_or("without a word")))
}
