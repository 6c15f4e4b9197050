//! Preparing the worktree that an agent is to work in, with the project's setup steps. This may take long, so it runs
//! beside the actor: a cancel or a close is handled at once, and a close stops the preparation.

use std::path::PathBuf;
use std::sync::Arc;

use qd_core::session::SessionInput;
use qd_protocol::WorkerId;
use qd_protocol::event::{RunError, SessionWorktree};
use qd_worktree::StopFlag;
use tokio::sync::oneshot;

use super::SessionActor;
use super::batch::ActorBatch;
use crate::workers::SandboxRequest;
use crate::worktrees::WorktreeSetupRequest;

/// Notices for the person, or the reason why there is no agent.
pub(super) type PreparationResult = Result<Vec<String>, RunError>;

/// A preparation under way. Dropping it stops it.
pub(super) struct WorktreePreparation {
    worker: WorkerId,
    new_worker: bool,
    stop: StopFlag,
    result: oneshot::Receiver<PreparationResult>,
}

impl WorktreePreparation {
    pub(super) async fn wait(&mut self) -> PreparationResult {
        let aborted =
            || RunError::new("worktree_failed", "the worktree was not made, because the daemon stops");
        (&mut self.result).await.unwrap_or_else(|_| Err(aborted()))
    }
}

impl Drop for WorktreePreparation {
    fn drop(&mut self) {
        self.stop.set();
    }
}

impl SessionActor {
    /// Begins to prepare a worktree for an agent.
    pub(super) fn begin_preparation(
        &mut self,
        worktree: SessionWorktree,
        worker: WorkerId,
        new_worker: bool,
    ) {
        let Ok(workspace) = self.daemon.workspaces.get(&self.session.workspace) else {
            return self.fail_agent(RunError::new("worktree_failed", "its workspace was forgotten"));
        };
        let directory = self.state.settings.directory.as_deref().unwrap_or(&worktree.path);
        let request = WorktreeSetupRequest {
            session: self.session.id.clone(),
            agent: self.state.settings.agent.clone(),
            sandbox: SandboxRequest::of_session(&self.state.settings),
            directory: PathBuf::from(directory),
            worktree,
            project: workspace.path.clone(),
            mark: self.daemon.workers.mark(&worker),
        };
        let (sender, result) = oneshot::channel();
        let stop = StopFlag::default();
        let (daemon, stop_flag) = (Arc::clone(&self.daemon), stop.clone());
        self.daemon.spawn(async move {
            // If nobody waits any more, the preparation was stopped.
            let _gone = sender.send(daemon.prepare_worktree(request, stop_flag).await);
        });
        self.preparation = Some(Box::new(WorktreePreparation { worker, new_worker, stop, result }));
    }

    /// Starts the agent in the prepared worktree, or reports why it cannot start.
    pub(super) async fn finish_preparation(&mut self, result: PreparationResult) {
        let Some(preparation) = self.preparation.take() else { return };
        let (worker, new_worker) = (preparation.worker.clone(), preparation.new_worker);
        match result {
            Err(error) => self.fail_agent(error),
            Ok(notices) => {
                // The slot that the agent takes is not given away while the notices are committed.
                self.launch_decided = true;
                let mut batch = ActorBatch::default();
                for text in notices {
                    self.step_machine(&mut batch, SessionInput::Notice { text });
                }
                self.commit(batch).await;
                self.start_agent(worker, new_worker).await;
                self.launch_decided = false;
                self.update_slot();
            }
        }
    }
}
