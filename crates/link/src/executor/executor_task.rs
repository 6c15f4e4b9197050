//! An executor at work on one job, in a task of its own: how it ends, whatever it does. A panic is a failure, a cancel
//! that is not obeyed ends with the grace, and dropping this ends the work.

use std::sync::Arc;
use std::time::Duration;

use qd_protocol::event::RunError;
use qd_protocol::limits::CANCEL_GRACE_S;
use qd_protocol::link::TurnOutcome;
use tokio::task::{JoinError, JoinSet};
use tokio::time::Instant;

use super::{Executor, RunAssignment, RunHandle};

/// How long an executor may take to end after a cancel, unless its session says otherwise.
pub(crate) const CANCEL_GRACE: Duration = Duration::from_secs(CANCEL_GRACE_S);

/// See the module.
#[derive(Debug)]
pub(crate) struct ExecutorTask {
    /// Holds one task, and aborts it when dropped.
    task: JoinSet<TurnOutcome>,
    turn: RunHandle,
    grace: Duration,
    /// When a cancel that was not obeyed is enforced.
    kill_at: Option<Instant>,
}

impl ExecutorTask {
    pub(crate) fn start<E: Executor>(
        executor: &Arc<E>,
        job: RunAssignment,
        turn: RunHandle,
        grace: Duration,
    ) -> Self {
        let mut task = JoinSet::new();
        let (executor, theirs) = (Arc::clone(executor), turn.clone());
        task.spawn(async move { executor.run(job, theirs).await });
        Self { task, turn, grace, kill_at: None }
    }

    pub(crate) fn turn(&self) -> &RunHandle {
        &self.turn
    }

    /// Asks for the end. A repeat gives no more time.
    pub(crate) fn cancel(&mut self) {
        self.turn.cancel();
        self.kill_at.get_or_insert_with(|| Instant::now() + self.grace);
    }

    /// Ends it where it stands; [`Running::ended`] tells at once.
    pub(crate) fn kill(&mut self) {
        self.turn.cancel();
        self.kill_at = Some(Instant::now());
    }

    /// Waits for the end; to be asked once more only if the wait was given up. What was cancelled has been cancelled,
    /// whatever the executor says of it.
    pub(crate) async fn wait_for_outcome(&mut self) -> TurnOutcome {
        let end = self.task.join_next();
        let end = match self.kill_at {
            Some(at) => tokio::time::timeout_at(at, end).await.unwrap_or_default(),
            None => end.await,
        };
        match end {
            Some(Ok(outcome)) if self.turn.is_cancelled() => {
                TurnOutcome { processes: outcome.processes, ..TurnOutcome::cancelled() }
            }
            Some(Ok(outcome)) => outcome,
            Some(Err(error)) if !self.turn.is_cancelled() => TurnOutcome::failed(panic_error(error)),
            Some(Err(_)) | None => {
                self.task.abort_all();
                TurnOutcome::cancelled()
            }
        }
    }
}

fn panic_error(error: JoinError) -> RunError {
    let panic = error.try_into_panic().ok();
    let words = panic.as_ref().and_then(|panic| {
        panic.downcast_ref::<&str>().copied().or_else(|| panic.downcast_ref::<String>().map(String::as_str))
    });
    RunError::new("worker_panicked", format!("the worker panicked: {}", words.unwrap_or("without a word")))
}
