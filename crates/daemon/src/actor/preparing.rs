//! What has to be there before an agent can be started: its worktree, with what the project wants done in it. That takes
//! as long as it takes, so the actor goes on meanwhile: a cancel or a close is heard at once, and a close ends it.

use std::path::PathBuf;
use std::sync::Arc;

use qd_core::session::Input;
use qd_protocol::WorkerId;
use qd_protocol::event::{RunError, SessionWorktree};
use qd_worktree::Stop;
use tokio::sync::oneshot;

use super::Actor;
use super::batch::Batch;
use crate::worktrees::Order;

/// What came of it: what a person should see, or why there is no agent.
pub(super) type Readied = Result<Vec<String>, RunError>;

/// Something that is being made ready. It is stopped when this is dropped.
pub(super) struct Preparing {
    worker: WorkerId,
    fresh: bool,
    stop: Stop,
    done: oneshot::Receiver<Readied>,
}

impl Preparing {
    /// Waits for its end.
    pub(super) async fn done(&mut self) -> Readied {
        let lost = || RunError::new("worktree_failed", "the worktree was not made, because the daemon stops");
        (&mut self.done).await.unwrap_or_else(|_| Err(lost()))
    }
}

impl Drop for Preparing {
    fn drop(&mut self) {
        self.stop.now();
    }
}

impl Actor {
    /// Begins to make a worktree ready for an agent.
    pub(super) fn prepare(&mut self, worktree: SessionWorktree, worker: WorkerId, fresh: bool) {
        let Ok(place) = self.daemon.places.get(&self.session.workspace) else {
            return self.fail(RunError::new("worktree_failed", "its workspace was forgotten"));
        };
        let directory = self.state.settings.directory.as_deref().unwrap_or(&worktree.path);
        let order = Order {
            session: self.session.id.clone(),
            directory: PathBuf::from(directory),
            worktree,
            project: place.path.clone(),
            mark: self.daemon.workers.mark(&worker),
        };
        let (tell, done) = oneshot::channel();
        let stop = Stop::default();
        let (daemon, until) = (Arc::clone(&self.daemon), stop.clone());
        self.daemon.spawn(async move {
            // Whoever does not wait any more has stopped it.
            let _gone = tell.send(daemon.prepare_worktree(order, until).await);
        });
        self.preparing = Some(Box::new(Preparing { worker, fresh, stop, done }));
    }

    /// It is ready, or will not be.
    pub(super) async fn prepared(&mut self, readied: Readied) {
        let Some(preparing) = self.preparing.take() else { return };
        let (worker, fresh) = (preparing.worker.clone(), preparing.fresh);
        match readied {
            Err(error) => self.fail(error),
            Ok(notices) => {
                let mut batch = Batch::default();
                for text in notices {
                    self.judge(&mut batch, Input::Noticed { text });
                }
                self.commit(batch).await;
                self.start(worker, fresh).await;
                self.tell_need();
            }
        }
    }
}
