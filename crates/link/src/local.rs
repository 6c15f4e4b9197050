//! A link inside one process: two ends over one small shared state, and the task that holds the agent. The rules of
//! what is merged, bounded, overtaken and repeated are in `up` and `down`; here are only the waking and the ending.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use qd_protocol::event::RunError;
use qd_protocol::link::{AgentCommand, AgentExitReason, AgentUpdate, UpdateNumber};
use tokio::sync::Notify;
use tokio::task::{JoinError, JoinHandle};

use crate::command_queue::CommandQueue;
use crate::update_window::{NumberedUpdate, UpdateWindow, split_update};

/// The session has let go of its agent: nobody hears it any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the session has let go of its agent")]
pub struct LinkClosed;

/// What is heard of an agent at the other end of a local link.
#[derive(Debug, Clone, PartialEq)]
pub enum LocalLinkEvent {
    /// All that waited, in order.
    Updates(Vec<NumberedUpdate>),
    /// The agent is no more, and all that it said has been heard.
    Gone(AgentExitReason),
}

/// What stands between an agent and everybody who hears it: before anything is numbered, kept or sent. It sees all
/// that the agent's voices say in one order, and last an [`Up::Gone`] with the agent's end.
pub trait AgentOutputFilter: Send + 'static {
    /// What may be said of this. Text that may be the beginning of something else is held back, and let go before
    /// anything that does not continue it.
    fn filter_update(&mut self, up: AgentUpdate, out: &mut Vec<AgentUpdate>);
}

/// Two ends with nothing between them. What is said is numbered after `after`, since numbers never restart within a
/// session.
pub fn local_link(after: UpdateNumber) -> (AgentEndpoint, SessionEndpoint) {
    local_link_with_filter(after, None)
}

fn local_link_with_filter(
    after: UpdateNumber,
    filter: Option<Box<dyn AgentOutputFilter>>,
) -> (AgentEndpoint, SessionEndpoint) {
    let shared = Arc::new(LocalLinkShared {
        state: Mutex::new(LocalLinkState {
            window: UpdateWindow::starting_after(after),
            filter: OptionalOutputFilter(filter),
            commands: CommandQueue::default(),
            session_released: false,
            agent_ended: false,
        }),
        output_ready: Notify::new(),
        command_ready: Notify::new(),
        space_freed: Notify::new(),
    });
    let agent = AgentEndpoint { output: AgentOutput { shared: Arc::clone(&shared) } };
    (agent, SessionEndpoint { shared, task: None, gone: None })
}

/// Runs an agent in a task of its own, which the session's end owns: it is ended with it. What the task returns, or
/// that it panicked, is the last thing heard.
pub fn host_agent<A, F>(after: UpdateNumber, agent: A) -> SessionEndpoint
where
    A: FnOnce(AgentEndpoint) -> F,
    F: Future<Output = AgentExitReason> + Send + 'static,
{
    host_agent_with_filter(after, None, agent)
}

/// See [`host`]; what the agent says passes the filter first.
pub fn host_agent_with_filter<A, F>(
    after: UpdateNumber,
    filter: Option<Box<dyn AgentOutputFilter>>,
    agent: A,
) -> SessionEndpoint
where
    A: FnOnce(AgentEndpoint) -> F,
    F: Future<Output = AgentExitReason> + Send + 'static,
{
    let (agent_end, mut session_end) = local_link_with_filter(after, filter);
    session_end.task = Some(tokio::spawn(agent(agent_end)));
    session_end
}

/// The agent's end. When it is dropped, the agent is over.
#[derive(Debug)]
pub struct AgentEndpoint {
    output: AgentOutput,
}

impl AgentEndpoint {
    /// See [`Voice::say`].
    pub async fn send(&self, up: AgentUpdate) -> Result<(), LinkClosed> {
        self.output.send(up).await
    }

    /// Something that can speak while this end waits for commands.
    pub fn output(&self) -> AgentOutput {
        self.output.clone()
    }

    /// The next command, each once; `None` when the session has let go. Nothing is lost if the wait is given up.
    pub async fn next_command(&mut self) -> Option<AgentCommand> {
        let shared = &self.output.shared;
        loop {
            {
                let mut state = shared.lock();
                if state.session_released {
                    return None;
                }
                if let Some(down) = state.commands.pop() {
                    return Some(down);
                }
            }
            shared.command_ready.notified().await;
        }
    }
}

impl Drop for AgentEndpoint {
    fn drop(&mut self) {
        self.output.shared.lock().agent_ended = true;
        self.output.shared.output_ready.notify_one();
        self.output.shared.space_freed.notify_waiters();
    }
}

/// The mouth of an agent: cheap to clone, and of no use once its [`AgentEnd`] is gone.
#[derive(Debug, Clone)]
pub struct AgentOutput {
    shared: Arc<LocalLinkShared>,
}

impl AgentOutput {
    /// Says something, waiting while too much is untaken: that is how a slow journal slows the agent down. What
    /// answers a command (a terminal, a steer taken or missed, an ask delivered) never waits. If the wait is given up,
    /// the rest is not said. Two voices keep no order between them.
    pub async fn send(&self, up: AgentUpdate) -> Result<(), LinkClosed> {
        for piece in split_update(up) {
            self.send_piece(piece).await?;
        }
        // An agent that never waits would otherwise keep its own task from seeing a cancel.
        tokio::task::coop::consume_budget().await;
        Ok(())
    }

    async fn send_piece(&self, piece: AgentUpdate) -> Result<(), LinkClosed> {
        let Some(mut piece) = self.shared.try_push(piece)? else { return Ok(()) };
        loop {
            // Made before the next try: room that appears in between wakes it.
            let room = self.shared.space_freed.notified();
            match self.shared.try_push(piece)? {
                None => return Ok(()),
                Some(back) => piece = back,
            }
            room.await;
        }
    }
}

/// The session's end. When it is dropped, the agent's task is ended.
#[derive(Debug)]
pub struct SessionEndpoint {
    shared: Arc<LocalLinkShared>,
    task: Option<JoinHandle<AgentExitReason>>,
    /// Kept, since a task tells its end only once.
    gone: Option<AgentExitReason>,
}

impl SessionEndpoint {
    /// Waits for the agent to say something and takes all of it, or tells that the agent is gone, as often as asked.
    /// Nothing is lost if the wait is given up.
    pub async fn next_event(&mut self) -> LocalLinkEvent {
        loop {
            let over = {
                let mut state = self.shared.lock();
                let said = state.window.take();
                if !said.is_empty() {
                    drop(state);
                    self.shared.space_freed.notify_waiters();
                    return LocalLinkEvent::Updates(said);
                }
                state.agent_ended
            };
            if !over {
                self.shared.output_ready.notified().await;
            } else if let Some(gone) = &self.gone {
                return LocalLinkEvent::Gone(gone.clone());
            } else {
                let gone = self.wait_for_task().await;
                // What the filter held back comes out now, and is heard before the end is.
                self.gone = Some(self.shared.lock().flush_filter(gone));
            }
        }
    }

    /// Tells the agent something; never waits, and a repeat does nothing.
    pub fn send(&self, down: AgentCommand) {
        self.command_sender().send(down);
    }

    /// Something that can command the agent while this end waits to hear it.
    pub(crate) fn command_sender(&self) -> AgentCommandSender {
        AgentCommandSender { shared: Arc::clone(&self.shared) }
    }

    /// Ends the agent's task and waits for its end. What it was about to say is not said.
    pub async fn stop(mut self) {
        self.release_agent();
        if let Some(task) = self.task.take() {
            task.abort();
            // Its last word has nobody to hear it: whoever stops an agent knows that it is stopped.
            let _ended: Result<AgentExitReason, JoinError> = task.await;
        }
    }

    async fn wait_for_task(&mut self) -> AgentExitReason {
        let gone = match &mut self.task {
            Some(task) => task.await.unwrap_or_else(|error| AgentExitReason::Failed(panic_error(error))),
            None => AgentExitReason::Failed(RunError::new("agent_ended", "the agent ended without a word")),
        };
        self.task = None;
        gone
    }

    fn release_agent(&self) {
        self.shared.lock().session_released = true;
        self.shared.command_ready.notify_one();
        self.shared.space_freed.notify_waiters();
    }
}

impl Drop for SessionEndpoint {
    fn drop(&mut self) {
        self.release_agent();
        if let Some(task) = &self.task {
            task.abort();
        }
    }
}

/// See [`SessionEnd::orders`]. Of no use once its end is gone.
#[derive(Debug, Clone)]
pub(crate) struct AgentCommandSender {
    shared: Arc<LocalLinkShared>,
}

impl AgentCommandSender {
    pub(crate) fn send(&self, down: AgentCommand) {
        self.shared.lock().commands.push(down);
        self.shared.command_ready.notify_one();
    }
}

/// What the two ends share.
#[derive(Debug)]
struct LocalLinkShared {
    state: Mutex<LocalLinkState>,
    /// Wakes the session: something waits for it, or the agent is over.
    output_ready: Notify,
    /// Wakes the agent: a command waits for it, or the session has let go.
    command_ready: Notify,
    /// Wakes voices that wait for the window.
    space_freed: Notify,
}

#[derive(Debug)]
struct LocalLinkState {
    window: UpdateWindow,
    filter: OptionalOutputFilter,
    commands: CommandQueue,
    /// The session wants nothing more of the agent.
    session_released: bool,
    /// The agent's end is gone.
    agent_ended: bool,
}

impl LocalLinkShared {
    /// Nothing that runs under the lock can leave the state half changed, so a panic elsewhere does not spoil it.
    fn lock(&self) -> MutexGuard<'_, LocalLinkState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Says a piece, or gives it back if there is no room.
    fn try_push(&self, piece: AgentUpdate) -> Result<Option<AgentUpdate>, LinkClosed> {
        let mut state = self.lock();
        if state.session_released || state.agent_ended {
            return Err(LinkClosed);
        }
        let first = state.window.is_empty();
        let back = state.try_push(piece);
        drop(state);
        if first {
            self.output_ready.notify_one();
        }
        Ok(back)
    }
}

impl LocalLinkState {
    /// The window judges what the agent says; what the filter makes of it, perhaps with what it held back before, is
    /// then taken whatever the window says.
    fn try_push(&mut self, piece: AgentUpdate) -> Option<AgentUpdate> {
        let Some(filter) = &mut self.filter.0 else { return self.window.try_push(piece) };
        if !self.window.accepts(&piece) {
            return Some(piece);
        }
        let mut passed = Vec::new();
        filter.filter_update(piece, &mut passed);
        passed.into_iter().flat_map(split_update).for_each(|piece| self.window.push(piece));
        None
    }

    /// Lets out what the filter held back, and gives the end as the filter leaves it.
    fn flush_filter(&mut self, gone: AgentExitReason) -> AgentExitReason {
        let Some(filter) = &mut self.filter.0 else { return gone };
        let mut passed = Vec::new();
        filter.filter_update(AgentUpdate::Gone(gone.clone()), &mut passed);
        let mut last = gone;
        for up in passed {
            match up {
                AgentUpdate::Gone(gone) => last = gone,
                up => split_update(up).for_each(|piece| self.window.push(piece)),
            }
        }
        last
    }
}

/// A filter, or none.
struct OptionalOutputFilter(Option<Box<dyn AgentOutputFilter>>);

impl fmt::Debug for OptionalOutputFilter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Sieve").field(&self.0.is_some()).finish()
    }
}

fn panic_error(error: JoinError) -> RunError {
    let Ok(panic) = error.try_into_panic() else {
        return RunError::new("agent_ended", "the agent's task was ended from outside");
    };
    let words =
        panic.downcast_ref::<&str>().copied().or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    RunError::new("agent_panicked", format!("the agent panicked: {}", words.unwrap_or("without a word")))
}
