//! An executor at work on one run, in a task of its own. This guarantees that the run ends: a panic is a failure, a
//! cancel that is not obeyed is enforced after the grace, and dropping the task ends the work.

use std::any::Any;
use std::sync::Arc;
use std::time::Duration;

use qd_protocol::event::RunError;
use qd_protocol::limits::CANCEL_GRACE_S;
use qd_protocol::link::TurnOutcome;
use qd_protocol::{AskId, EventNumber};
use tokio::task::{JoinError, JoinSet};
use tokio::time::Instant;

use super::{Executor, RunAssignment, RunHandle, RunOutput, RunSteer, RunTransport};

/// How long an executor may take to end after a cancel, unless its session sets another grace.
pub(crate) const CANCEL_GRACE: Duration = Duration::from_secs(CANCEL_GRACE_S);

/// An executor at work on one run, for serving it over a protocol of your own. A
/// [`WorkerServer`](crate::WorkerServer) does this for the plain frames.
#[derive(Debug)]
pub struct ExecutorTask {
    /// Holds one task, and aborts it when dropped.
    task: JoinSet<TurnOutcome>,
    handle: RunHandle,
    grace: Duration,
    /// When a cancel that was not obeyed is enforced.
    kill_at: Option<Instant>,
}

impl ExecutorTask {
    /// Starts a run. Without a `grace`, a cancelled run has five seconds to end.
    pub fn start<E: Executor>(
        executor: &Arc<E>,
        assignment: RunAssignment,
        transport: impl RunTransport,
        grace: Option<Duration>,
    ) -> Self {
        let handle = RunHandle::new(RunOutput::Other(Box::new(transport)));
        Self::start_with_handle(executor, assignment, handle, grace.unwrap_or(CANCEL_GRACE))
    }

    /// Like [`ExecutorTask::start`], for a run whose handle exists already.
    pub(crate) fn start_with_handle<E: Executor>(
        executor: &Arc<E>,
        assignment: RunAssignment,
        handle: RunHandle,
        grace: Duration,
    ) -> Self {
        let mut task = JoinSet::new();
        let (executor, task_handle) = (Arc::clone(executor), handle.clone());
        task.spawn(async move { executor.run(assignment, task_handle).await });
        Self { task, handle, grace, kill_at: None }
    }

    pub(crate) fn handle(&self) -> &RunHandle {
        &self.handle
    }

    /// Asks the executor to end. A repeated cancel does not extend the grace.
    pub fn cancel(&mut self) {
        self.handle.cancel();
        self.kill_at.get_or_insert_with(|| Instant::now() + self.grace);
    }

    /// Ends the executor at once; [`ExecutorTask::wait_for_outcome`] returns immediately.
    pub fn kill(&mut self) {
        self.handle.cancel();
        self.kill_at = Some(Instant::now());
    }

    /// Keeps a steer until the run takes it, and returns false if too much waits already. A steer with a number is
    /// confirmed when it is taken.
    #[must_use]
    pub fn push_steer(&self, text: String, number: Option<EventNumber>) -> bool {
        self.handle.inbox().push_steer(RunSteer { text, number })
    }

    /// The numbers of the steers that the run did not take.
    pub fn take_missed_steers(&self) -> Vec<EventNumber> {
        self.handle.inbox().take_missed_steers()
    }

    /// Delivers an answer to the request that waits for it, or `None` if there will be no answer. Only the first answer
    /// counts.
    pub fn resolve_ask(&self, ask: &AskId, allowed: Option<bool>) {
        self.handle.inbox().resolve_ask(ask, allowed);
    }

    /// Waits for the outcome. Call it again only if the wait was cancelled. A cancelled run counts as cancelled,
    /// whatever the executor returns.
    pub async fn wait_for_outcome(&mut self) -> TurnOutcome {
        let join = self.task.join_next();
        let result = match self.kill_at {
            Some(at) => tokio::time::timeout_at(at, join).await.unwrap_or_default(),
            None => join.await,
        };
        match result {
            Some(Ok(outcome)) if self.handle.is_cancelled() => {
                TurnOutcome { processes: outcome.processes, ..TurnOutcome::cancelled() }
            }
            Some(Ok(outcome)) => outcome,
            Some(Err(error)) if !self.handle.is_cancelled() => TurnOutcome::failed(panic_error(error)),
            Some(Err(_)) | None => {
                self.task.abort_all();
                TurnOutcome::cancelled()
            }
        }
    }
}

fn panic_error(error: JoinError) -> RunError {
    let panic = error.try_into_panic().ok();
    let message = panic.as_ref().map_or("no message", |panic| panic_message(panic.as_ref()));
    RunError::new("worker_panicked", format!("the worker panicked: {message}"))
}

/// What a panic said.
pub fn panic_message(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("no message")
}
