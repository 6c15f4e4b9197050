//! Notices when a task of a worker dies. A task that panics, or that ends although it should run for ever, would leave
//! its session waiting without end while its worker lives on. Whatever the tasks of an endpoint do is therefore spawned
//! here, and the owner of the endpoint ends the session when one of them has died.

use std::convert::Infallible;
use std::panic::AssertUnwindSafe;

use futures_util::FutureExt;
use qd_protocol::event::RunError;
use qd_worker_sdk::executor::panic_message;
use tokio::sync::watch;
use tokio::task::JoinHandle;

/// Spawns the tasks of one endpoint and publishes the last death of one of them.
#[derive(Debug, Clone)]
pub(crate) struct TaskWatch {
    last_death: watch::Sender<Option<RunError>>,
}

/// Why a task that should run for ever cannot go on.
#[derive(Debug)]
pub(crate) struct TaskStuck(pub(crate) &'static str);

impl TaskWatch {
    pub(crate) fn new() -> Self {
        Self { last_death: watch::Sender::new(None) }
    }

    /// Spawns a task that may end, but not by a panic.
    pub(crate) fn spawn(
        &self,
        name: &'static str,
        task: impl Future<Output = ()> + Send + 'static,
    ) -> JoinHandle<()> {
        let watch = self.clone();
        tokio::spawn(async move {
            watch.run(name, task).await;
        })
    }

    /// Spawns a task that runs until it is aborted.
    pub(crate) fn spawn_endless(
        &self,
        name: &'static str,
        task: impl Future<Output = Result<Infallible, TaskStuck>> + Send + 'static,
    ) -> JoinHandle<()> {
        let watch = self.clone();
        tokio::spawn(async move {
            if let Some(Err(TaskStuck(reason))) = watch.run(name, task).await {
                watch.report_death(name, reason);
            }
        })
    }

    /// Runs a part of a task that somebody else has spawned. `None` if it panicked, which is published.
    pub(crate) async fn run<T>(&self, name: &'static str, part: impl Future<Output = T>) -> Option<T> {
        match AssertUnwindSafe(part).catch_unwind().await {
            Ok(output) => Some(output),
            Err(panic) => {
                self.report_death(name, panic_message(panic.as_ref()));
                None
            }
        }
    }

    /// The last death of a task; `None` if none has died.
    pub(crate) fn subscribe(&self) -> watch::Receiver<Option<RunError>> {
        self.last_death.subscribe()
    }

    fn report_death(&self, name: &'static str, reason: &str) {
        // Published first: the log is only for people.
        self.last_death.send_replace(Some(worker_panicked(name, reason)));
        tracing::error!(task = name, reason, "a task of the worker has died; its session ends");
    }
}

/// The error of a session whose worker has lost one of its tasks.
fn worker_panicked(name: &str, reason: &str) -> RunError {
    let message =
        format!("the worker failed in its task `{name}`: {reason}; please report this with its log");
    RunError::new("worker_panicked", message)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn last_message(watch: &TaskWatch) -> Option<String> {
        watch.subscribe().borrow().as_ref().map(|error| error.message.clone())
    }

    #[tokio::test]
    async fn a_task_that_panics_or_ends_too_early_is_noticed_and_one_that_ends_is_not() {
        let watch = TaskWatch::new();
        watch.spawn("done", async {}).await.unwrap();
        let aborted = watch.spawn("aborted", std::future::pending());
        aborted.abort();
        aborted.await.unwrap_err();
        assert_eq!(last_message(&watch), None);
        watch.spawn("reader", async { panic!("no {}", "space") }).await.unwrap();
        assert!(last_message(&watch).is_some_and(|text| text.contains("`reader`: no space")));
        watch.spawn_endless("syncer", async { Err(TaskStuck("it lost its spool")) }).await.unwrap();
        assert!(last_message(&watch).is_some_and(|text| text.contains("`syncer`: it lost its spool")));
        let panicked: Option<()> = watch.run("part", async { panic!("again") }).await;
        assert_eq!(panicked, None);
        assert!(last_message(&watch).is_some_and(|text| text.contains("`part`: again")));
        assert_eq!(watch.run("part", async { 7 }).await, Some(7));
    }
}
