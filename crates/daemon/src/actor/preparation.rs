//! What has to be there before an agent can be started: its worktree, with what the project wants done in it. That takes
//! as long as it takes, so the actor goes on meanwhile: a cancel or a close is heard at once, and a close ends it.

use std::path::PathBuf;
use std::sync::Arc;

use qd_core::session::SessionInput;
use qd_protocol::WorkerId;
use qd_protocol::event::{RunError, SessionWorktree};
use qd_worktree::StopFlag;
use tokio::sync::oneshot;

use super::SessionActor;
use super::batch::ActorBatch;
use crate::worktrees::WorktreeSetupRequest;

/// What came of it: what a person should see, or why there is no agent.
pub(super) type PreparationResult = Result<Vec<String>, RunError>;

/// Something that is being made ready. It is stopped when this is dropped.
pub(super) struct WorktreePreparation {
    worker: WorkerId,
    fresh: bool,
    stop: StopFlag,
    result: oneshot::Receiver<PreparationResult>,
}

impl WorktreePreparation {
    /// Waits for its end.
    pub(super) async fn wait(&mut self) -> PreparationResult {
        let lost = || RunError::new("worktree_failed", "the worktree was not made, because the daemon stops");
        (&mut self.result).await.unwrap_or_else(|_| Err(lost()))
    }
}

impl Drop for WorktreePreparation {
    fn drop(&mut self) {
        self.stop.set();
    }
}

impl SessionActor {
    /// Begins to make a worktree ready for an agent.
    pub(super) fn begin_preparation(&mut self, worktree: SessionWorktree, worker: WorkerId, fresh: bool) {
        let Ok(place) = self.daemon.workspaces.get(&self.session.workspace) else {
            return self.fail_agent(RunError::new("worktree_failed", "its workspace was forgotten"));
        };
        let directory = self.state.settings.directory.as_deref().unwrap_or(&worktree.path);
        let order = WorktreeSetupRequest {
            session: self.session.id.clone(),
            directory: PathBuf::from(directory),
            worktree,
            project: place.path.clone(),
            mark: self.daemon.workers.mark(&worker),
        };
        let (tell, done) = oneshot::channel();
        let stop = StopFlag::default();
        let (daemon, until) = (Arc::clone(&self.daemon), stop.clone());
        self.daemon.spawn(async move {
            // Whoever does not wait any more has stopped it.
            let _gone = tell.send(daemon.prepare_worktree(order, until).await);
        });
        self.preparation = Some(Box::new(WorktreePreparation { worker, fresh, stop, result: done }));
    }

    /// It is ready, or will not be.
    pub(super) async fn finish_preparation(&mut self, readied: PreparationResult) {
        let Some(preparing) = self.preparation.take() else { return };
        let (worker, fresh) = (preparing.worker.clone(), preparing.fresh);
        match readied {
            Err(error) => self.fail_agent(error),
            Ok(notices) => {
                let mut batch = ActorBatch::default();
                for text in notices {
                    self.step_machine(&mut batch, SessionInput::Notice { text });
                }
                self.commit(batch).await;
                self.start_agent(worker, fresh).await;
                self.update_slot();
            }
        }
    }
}
