//! A link inside one process: two endpoints over a small shared state, and the task that runs the agent. Merging and
//! bounds are in `update_window`, the order of commands is in `command_queue`; this file does the waking and the
//! shutdown.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};
use qd_protocol::event::RunError;
use qd_protocol::limits::SMALL_EVENT_BYTES;
use qd_protocol::link::{AgentCommand, AgentExitReason, AgentUpdate, TurnUpdate, UpdateNumber};
use qd_worker_sdk::executor::panic_message;
use tokio::sync::Notify;
use tokio::task::{JoinError, JoinHandle};
use tokio::time::Instant;

use crate::command_queue::CommandQueue;
use crate::output_rate::{OutputRate, RateWait};
use crate::update_window::{NumberedUpdate, UpdateWindow, approximate_bytes, split_update};

/// The session has released its agent and reads no more updates.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the session has released its agent")]
pub struct LinkClosed;

/// What the session's end of a local link receives.
#[derive(Debug, Clone, PartialEq)]
pub enum LocalLinkEvent {
    /// All updates that were waiting, in order.
    Updates(Vec<NumberedUpdate>),
    /// The agent has ended, and all of its updates have been received.
    Gone(AgentExitReason),
}

/// Filters an agent's updates before they are numbered, spooled or sent. It sees the updates of all [`AgentOutput`]
/// clones in one order, and last an [`AgentUpdate::Gone`].
pub trait AgentOutputFilter: Send + 'static {
    /// Appends to `out` what may pass of this update. Text that may be the start of a secret is held back until
    /// more of its stream arrives or the stream is over, whatever comes in between.
    fn filter_update(&mut self, update: AgentUpdate, out: &mut Vec<AgentUpdate>);
}

/// A link without a task. The agent's updates are numbered after `after`, since numbers never restart within a
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
            rate: None,
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

/// Runs an agent in a task of its own. The returned endpoint owns the task: dropping the endpoint ends it. The task's
/// result, or its panic, is the last event.
pub fn host_agent<A, F>(after: UpdateNumber, agent: A) -> SessionEndpoint
where
    A: FnOnce(AgentEndpoint) -> F,
    F: Future<Output = AgentExitReason> + Send + 'static,
{
    host_agent_with_filter(after, None, agent)
}

/// Like [`host_agent`], with a filter for the agent's updates.
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

/// The agent's end of the link. Dropping it ends the agent for the session.
#[derive(Debug)]
pub struct AgentEndpoint {
    output: AgentOutput,
}

impl AgentEndpoint {
    /// See [`AgentOutput::send`].
    pub async fn send(&self, update: AgentUpdate) -> Result<(), LinkClosed> {
        self.output.send(update).await
    }

    /// Limits what the agent may report in a minute. Beyond it, [`AgentOutput::send`] waits.
    pub fn limit_output(&self, bytes_per_minute: u64) {
        let rate = OutputRate::new(bytes_per_minute, Instant::now());
        self.output.shared.lock().rate = Some(Box::new(rate));
    }

    /// A handle that can send updates while this end waits for commands.
    pub fn output(&self) -> AgentOutput {
        self.output.clone()
    }

    /// The next command, each once; `None` when the session has released the agent. Cancelling the wait loses nothing.
    pub async fn next_command(&mut self) -> Option<AgentCommand> {
        let shared = &self.output.shared;
        loop {
            {
                let mut state = shared.lock();
                if state.session_released {
                    return None;
                }
                if let Some(command) = state.commands.pop() {
                    return Some(command);
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

/// Sends an agent's updates. Cheap to clone, and closed once its [`AgentEndpoint`] is dropped.
#[derive(Debug, Clone)]
pub struct AgentOutput {
    shared: Arc<LocalLinkShared>,
}

impl AgentOutput {
    /// Sends an update. It waits while the window is full, which is how a slow journal slows the agent down, and while
    /// the agent has reported more than it may in a minute. Replies
    /// to a command (a terminal, a steer taken or missed, an ask delivered) never wait. If the wait is cancelled, the
    /// rest of a long text is not sent. Two clones keep no order between each other.
    pub async fn send(&self, update: AgentUpdate) -> Result<(), LinkClosed> {
        for piece in split_update(update) {
            if let Some(wait) = self.shared.count_output(&piece) {
                // In a box, because few agents ever wait, and each would hold the space for it.
                Box::pin(tokio::time::sleep(wait)).await;
            }
            self.send_piece(piece).await?;
        }
        // Without this, an agent that never waits would keep its own task from seeing a cancel.
        tokio::task::coop::consume_budget().await;
        Ok(())
    }

    async fn send_piece(&self, piece: AgentUpdate) -> Result<(), LinkClosed> {
        let Some(mut piece) = self.shared.try_push(piece)? else { return Ok(()) };
        loop {
            // Registered before the next try, so that space freed in between is not missed.
            let space_freed = self.shared.space_freed.notified();
            match self.shared.try_push(piece)? {
                None => return Ok(()),
                Some(rejected) => piece = rejected,
            }
            space_freed.await;
        }
    }
}

/// The session's end of the link. Dropping it ends the agent's task.
#[derive(Debug)]
pub struct SessionEndpoint {
    shared: Arc<LocalLinkShared>,
    task: Option<JoinHandle<AgentExitReason>>,
    /// Kept, because a task returns its result only once.
    gone: Option<AgentExitReason>,
}

impl SessionEndpoint {
    /// Waits for updates and takes all of them. Once the agent is gone, every call returns `Gone`. Cancelling the wait
    /// loses nothing.
    pub async fn next_event(&mut self) -> LocalLinkEvent {
        loop {
            let agent_ended = {
                let mut state = self.shared.lock();
                let updates = state.window.take();
                if !updates.is_empty() {
                    drop(state);
                    self.shared.space_freed.notify_waiters();
                    return LocalLinkEvent::Updates(updates);
                }
                state.agent_ended
            };
            if !agent_ended {
                self.shared.output_ready.notified().await;
            } else if let Some(gone) = &self.gone {
                return LocalLinkEvent::Gone(gone.clone());
            } else {
                let gone = self.wait_for_task().await;
                // The filter now releases what it held back. Those updates are delivered before the end.
                self.gone = Some(self.shared.lock().flush_filter(gone));
            }
        }
    }

    /// Sends a command to the agent. Never waits; a repeated command is ignored.
    pub fn send(&self, command: AgentCommand) {
        self.command_sender().send(command);
    }

    /// A handle that can send commands while this end waits for updates.
    pub(crate) fn command_sender(&self) -> AgentCommandSender {
        AgentCommandSender { shared: Arc::clone(&self.shared) }
    }

    /// Aborts the agent's task and waits until it has ended. Updates that it was about to send are dropped.
    pub async fn stop(mut self) {
        self.release_agent();
        if let Some(task) = self.task.take() {
            task.abort();
            // The reason is not needed: the caller knows that the agent was stopped.
            let _ended: Result<AgentExitReason, JoinError> = task.await;
        }
    }

    async fn wait_for_task(&mut self) -> AgentExitReason {
        let gone = match &mut self.task {
            Some(task) => task.await.unwrap_or_else(|error| AgentExitReason::Failed(panic_error(error))),
            None => AgentExitReason::Failed(RunError::new(
                "agent_ended",
                "the agent ended without giving a reason",
            )),
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

/// See [`SessionEndpoint::command_sender`]. Commands sent after the endpoint is dropped are lost.
#[derive(Debug, Clone)]
pub(crate) struct AgentCommandSender {
    shared: Arc<LocalLinkShared>,
}

impl AgentCommandSender {
    pub(crate) fn send(&self, command: AgentCommand) {
        self.shared.lock().commands.push(command);
        self.shared.command_ready.notify_one();
    }
}

#[derive(Debug)]
struct LocalLinkShared {
    state: Mutex<LocalLinkState>,
    /// Wakes the session: updates are ready, or the agent has ended.
    output_ready: Notify,
    /// Wakes the agent: a command is ready, or the session has released it.
    command_ready: Notify,
    /// Wakes senders that wait for space in the window.
    space_freed: Notify,
}

#[derive(Debug)]
struct LocalLinkState {
    window: UpdateWindow,
    filter: OptionalOutputFilter,
    commands: CommandQueue,
    /// How fast the agent may report, if that is limited.
    rate: Option<Box<OutputRate>>,
    session_released: bool,
    /// The [`AgentEndpoint`] is dropped.
    agent_ended: bool,
}

impl LocalLinkShared {
    /// Nothing that runs under the lock can leave the state half changed, not even by a panic.
    fn lock(&self) -> MutexGuard<'_, LocalLinkState> {
        self.state.lock()
    }

    /// Counts output of the agent, and returns how long it has to wait. When it first has to, a notice says so.
    fn count_output(&self, piece: &AgentUpdate) -> Option<Duration> {
        let AgentUpdate::Turn { run, .. } = piece else { return None };
        let mut state = self.lock();
        // What is merged with the text before it becomes no event of its own.
        let own_event = if state.window.merges_with_last(piece) { 0 } else { SMALL_EVENT_BYTES };
        let bytes = own_event.saturating_add(approximate_bytes(piece) as u64);
        let RateWait { wait, is_news } = state.rate.as_mut()?.count(bytes, Instant::now())?;
        if is_news {
            let text = "the agent says more than it may in a minute; it is slowed down, and nothing is lost";
            let notice = TurnUpdate::limit_notice("AGENT_OUTPUT_MB_PER_MIN", text);
            state.window.push(AgentUpdate::Turn { run: run.clone(), update: notice });
            drop(state);
            self.output_ready.notify_one();
        }
        Some(wait)
    }

    /// Takes a piece, or gives it back if the window is full.
    fn try_push(&self, piece: AgentUpdate) -> Result<Option<AgentUpdate>, LinkClosed> {
        let mut state = self.lock();
        if state.session_released || state.agent_ended {
            return Err(LinkClosed);
        }
        let was_empty = state.window.is_empty();
        let rejected = state.try_push(piece);
        drop(state);
        if was_empty {
            self.output_ready.notify_one();
        }
        Ok(rejected)
    }
}

impl LocalLinkState {
    /// The window decides about the piece as the agent sent it. The filter's output, which may include text held back
    /// before, is then accepted even if the window is full.
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

    /// Releases what the filter held back, and returns the exit reason as the filter leaves it.
    fn flush_filter(&mut self, gone: AgentExitReason) -> AgentExitReason {
        let Some(filter) = &mut self.filter.0 else { return gone };
        let mut passed = Vec::new();
        filter.filter_update(AgentUpdate::Gone(gone.clone()), &mut passed);
        let mut last = gone;
        for update in passed {
            match update {
                AgentUpdate::Gone(gone) => last = gone,
                update => split_update(update).for_each(|piece| self.window.push(piece)),
            }
        }
        last
    }
}

/// Wraps the filter for `Debug`.
struct OptionalOutputFilter(Option<Box<dyn AgentOutputFilter>>);

impl fmt::Debug for OptionalOutputFilter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("OptionalOutputFilter").field(&self.0.is_some()).finish()
    }
}

fn panic_error(error: JoinError) -> RunError {
    let Ok(panic) = error.try_into_panic() else {
        return RunError::new("agent_ended", "the agent's task was aborted");
    };
    RunError::new("agent_panicked", format!("the agent panicked: {}", panic_message(panic.as_ref())))
}
