//! A link inside one process: two ends over one small shared state, and the task that holds the agent. The rules of
//! what is merged, bounded, overtaken and repeated are in `up` and `down`; here are only the waking and the ending.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

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

/// What is heard of an agent at the other end of a local link.
#[derive(Debug, Clone, PartialEq)]
pub enum FromAgent {
    /// All that waited, in order.
    Said(Vec<Numbered>),
    /// The agent is no more, and all that it said has been heard.
    Gone(Gone),
}

/// What stands between an agent and everybody who hears it: before anything is numbered, kept or sent. It sees all
/// that the agent's voices say in one order, and last an [`Up::Gone`] with the agent's end.
pub trait Filter: Send + 'static {
    /// What may be said of this. Text that may be the beginning of something else is held back, and let go before
    /// anything that does not continue it.
    fn pass(&mut self, up: Up, out: &mut Vec<Up>);
}

/// Two ends with nothing between them. What is said is numbered after `after`, since numbers never restart within a
/// session.
pub fn local(after: UpNumber) -> (AgentEnd, SessionEnd) {
    local_with(after, None)
}

fn local_with(after: UpNumber, filter: Option<Box<dyn Filter>>) -> (AgentEnd, SessionEnd) {
    let shared = Arc::new(Shared {
        state: Mutex::new(State {
            untaken: Untaken::after(after),
            filter: Sieve(filter),
            commands: Commands::default(),
            let_go: false,
            over: false,
        }),
        spoken: Notify::new(),
        commanded: Notify::new(),
        room: Notify::new(),
    });
    let agent = AgentEnd { voice: Voice { shared: Arc::clone(&shared) } };
    (agent, SessionEnd { shared, task: None, gone: None })
}

/// Runs an agent in a task of its own, which the session's end owns: it is ended with it. What the task returns, or
/// that it panicked, is the last thing heard.
pub fn host<A, F>(after: UpNumber, agent: A) -> SessionEnd
where
    A: FnOnce(AgentEnd) -> F,
    F: Future<Output = Gone> + Send + 'static,
{
    host_with(after, None, agent)
}

/// See [`host`]; what the agent says passes the filter first.
pub fn host_with<A, F>(after: UpNumber, filter: Option<Box<dyn Filter>>, agent: A) -> SessionEnd
where
    A: FnOnce(AgentEnd) -> F,
    F: Future<Output = Gone> + Send + 'static,
{
    let (agent_end, mut session_end) = local_with(after, filter);
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
    task: Option<JoinHandle<Gone>>,
    /// Kept, since a task tells its end only once.
    gone: Option<Gone>,
}

impl SessionEnd {
    /// Waits for the agent to say something and takes all of it, or tells that the agent is gone, as often as asked.
    /// Nothing is lost if the wait is given up.
    pub async fn hear(&mut self) -> FromAgent {
        loop {
            let over = {
                let mut state = self.shared.lock();
                let said = state.untaken.take();
                if !said.is_empty() {
                    drop(state);
                    self.shared.room.notify_waiters();
                    return FromAgent::Said(said);
                }
                state.over
            };
            if !over {
                self.shared.spoken.notified().await;
            } else if let Some(gone) = &self.gone {
                return FromAgent::Gone(gone.clone());
            } else {
                let gone = self.ended().await;
                // What the filter held back comes out now, and is heard before the end is.
                self.gone = Some(self.shared.lock().last_word(gone));
            }
        }
    }

    /// Tells the agent something; never waits, and a repeat does nothing.
    pub fn send(&self, down: Down) {
        self.orders().send(down);
    }

    /// Something that can command the agent while this end waits to hear it.
    pub(crate) fn orders(&self) -> Orders {
        Orders { shared: Arc::clone(&self.shared) }
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

    async fn ended(&mut self) -> Gone {
        let gone = match &mut self.task {
            Some(task) => task.await.unwrap_or_else(|error| Gone::Failed(panicked(error))),
            None => Gone::Failed(RunError::new("agent_ended", "the agent ended without a word")),
        };
        self.task = None;
        gone
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

/// See [`SessionEnd::orders`]. Of no use once its end is gone.
#[derive(Debug, Clone)]
pub(crate) struct Orders {
    shared: Arc<Shared>,
}

impl Orders {
    pub(crate) fn send(&self, down: Down) {
        self.shared.lock().commands.put(down);
        self.shared.commanded.notify_one();
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
    filter: Sieve,
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
        let back = state.offer(piece);
        drop(state);
        if first {
            self.spoken.notify_one();
        }
        Ok(back)
    }
}

impl State {
    /// The window judges what the agent says; what the filter makes of it, perhaps with what it held back before, is
    /// then taken whatever the window says.
    fn offer(&mut self, piece: Up) -> Option<Up> {
        let Some(filter) = &mut self.filter.0 else { return self.untaken.offer(piece) };
        if !self.untaken.takes(&piece) {
            return Some(piece);
        }
        let mut passed = Vec::new();
        filter.pass(piece, &mut passed);
        passed.into_iter().flat_map(pieces).for_each(|piece| self.untaken.add(piece));
        None
    }

    /// Lets out what the filter held back, and gives the end as the filter leaves it.
    fn last_word(&mut self, gone: Gone) -> Gone {
        let Some(filter) = &mut self.filter.0 else { return gone };
        let mut passed = Vec::new();
        filter.pass(Up::Gone(gone.clone()), &mut passed);
        let mut last = gone;
        for up in passed {
            match up {
                Up::Gone(gone) => last = gone,
                up => pieces(up).for_each(|piece| self.untaken.add(piece)),
            }
        }
        last
    }
}

/// A filter, or none.
struct Sieve(Option<Box<dyn Filter>>);

impl fmt::Debug for Sieve {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Sieve").field(&self.0.is_some()).finish()
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
