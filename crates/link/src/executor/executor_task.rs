//! An executor at work on one run, in a task of its own. This guarantees that the run ends: a panic is a failure, a
//! cancel that is not obeyed is enforced after the grace, and dropping the task ends the work.

use std::sync::Arc;
use std::time::Duration;

use qd_protocol::event::RunError;
use qd_protocol::limits::CANCEL_GRACE_S;
use qd_protocol::link::TurnOutcome;
use tokio::task::{JoinError, JoinSet};
use tokio::time::Instant;

use super::{Executor, RunAssignment, RunHandle};
use crate::task_watch::panic_message;

/// How long an executor may take to end after a cancel, unless its session sets another grace.
pub(crate) const CANCEL_GRACE: Duration = Duration::from_secs(CANCEL_GRACE_S);

#[derive(Debug)]
pub(crate) struct ExecutorTask {
    /// Holds one task, and aborts it when dropped.
    task: JoinSet<TurnOutcome>,
    handle: RunHandle,
    grace: Duration,
    /// When a cancel that was not obeyed is enforced.
    kill_at: Option<Instant>,
}

impl ExecutorTask {
    pub(crate) fn start<E: Executor>(
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
    pub(crate) fn cancel(&mut self) {
        self.handle.cancel();
        self.kill_at.get_or_insert_with(|| Instant::now() + self.grace);
    }

    /// Ends the executor at once; [`ExecutorTask::wait_for_outcome`] returns immediately.
    pub(crate) fn kill(&mut self) {
        self.handle.cancel();
        self.kill_at = Some(Instant::now());
    }

    /// Waits for the outcome. Call it again only if the wait was cancelled. A cancelled run counts as cancelled,
    /// whatever the executor returns.
    pub(crate) async fn wait_for_outcome(&mut self) -> TurnOutcome {
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
