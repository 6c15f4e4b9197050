//! Operations on one worktree: diff, merge, remove. The session's own work comes first: a worktree is merged only
//! while its session is idle, and removed only once its session is closed.

use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::Arc;

use qd_catalog::project::ProjectFileStatus;
use qd_protocol::api::{Session, SessionStatus};
use qd_protocol::worktree::{MergeRequest, MergeResult, RemovedWorktree, WorktreeDiff};
use qd_protocol::{ApiError, ErrorCode, SessionId};
use qd_worktree::hooks::{self, HookEnvironment};
use qd_worktree::merge::MergeOptions;
use qd_worktree::{GitRecords, GitWorktree, StopFlag, WorktreeError, remove};

use super::{hook_env, repository_key, worktree_key, worktree_refused};
use crate::daemon::Daemon;
use crate::workers::SandboxRequest;

/// The folder in which merges are tried, beside the worktrees. No session id equals it.
const SCRATCH_DIR: &str = "scratch";

impl Daemon {
    /// The changes of a session.
    pub(crate) async fn worktree_diff(
        &self,
        session: &Session,
        patch: bool,
    ) -> Result<WorktreeDiff, ApiError> {
        let (path, records) = (worktree_path(session)?, self.git_records());
        let diff = move |stop: &StopFlag| GitWorktree::open(&path, &records, stop)?.diff(patch);
        self.run_blocking(StopFlag::default(), diff).await?.map_err(worktree_refused)
    }

    /// Merges a session's work into a branch, or changes nothing.
    pub(crate) async fn merge_worktree(
        self: &Arc<Self>,
        session: &Session,
        request: MergeRequest,
    ) -> Result<MergeResult, ApiError> {
        let path = worktree_path(session)?;
        let _one_at_a_time = self.key_locks.lock(worktree_key(&session.id)).await;
        if self.is_session_busy(session).await {
            let message = "a run of this session is live; wait for it or cancel it, then merge";
            return Err(
                ApiError::new(ErrorCode::Busy, message).with_detail("session_id", session.id.as_str())
            );
        }
        let overlaps = self.overlaps_of(&session.id).await?;
        let records = self.git_records();
        let open = {
            let (path, records) = (path.clone(), records.clone());
            move |stop: &StopFlag| GitWorktree::open(&path, &records, stop)
        };
        let tree = self.run_blocking(StopFlag::default(), open).await?.map_err(worktree_refused)?;
        let _one_at_a_time = self.key_locks.lock(repository_key(&tree.record.common_dir)).await;
        let message = match &request.message {
            Some(message) if message.trim().is_empty() || message.contains('\0') => {
                return Err(ApiError::new(
                    ErrorCode::InvalidValue,
                    "`message` must be text that is not empty",
                ));
            }
            Some(message) => message.clone(),
            None => merge_message(session),
        };
        let scratch = self.home.worktrees().join(SCRATCH_DIR).join(session.id.as_str());
        let work = move |stop: &StopFlag| {
            let into = request.into.as_deref();
            let merge = MergeOptions { into, squash: request.squash, message: &message, scratch: &scratch };
            GitWorktree::open(&path, &records, stop)?.merge(&merge)
        };
        let merged = self.run_blocking(StopFlag::default(), work).await?.map_err(worktree_refused)?;
        Ok(MergeResult {
            into: merged.into,
            commit: merged.commit,
            moved: merged.has_moved,
            committed: merged.committed,
            checkout: merged.checkout.map(|path| path.display().to_string()),
            overlaps,
        })
    }

    /// Removes a worktree; one with unmerged work only with `force`.
    pub(crate) async fn remove_worktree(
        self: &Arc<Self>,
        id: &SessionId,
        force: bool,
    ) -> Result<RemovedWorktree, ApiError> {
        let _one_at_a_time = self.key_locks.lock(worktree_key(id)).await;
        let session = self.session_of_worktree(id).await?;
        if session.as_ref().is_some_and(|session| session.state != SessionStatus::Closed) {
            let message = format!("session {id} is still open; close it first with `qd rm {id}`");
            return Err(ApiError::new(ErrorCode::Busy, message).with_detail("session_id", id.as_str()));
        }
        let path = self.home.worktrees().join(id.as_str());
        let project = session.as_ref().and_then(|session| self.workspaces.get(&session.workspace_id).ok());
        let project_file = match &project {
            Some(workspace) => self.workers.agents().project_setup(&workspace.path),
            None => ProjectFileStatus::Absent,
        };
        let hooks = match (&session, &project, project_file) {
            (Some(session), Some(project), ProjectFileStatus::Trusted(settings)) => {
                let sandbox = session.sandbox.as_ref();
                let sandbox = SandboxRequest {
                    level: sandbox.map(|sandbox| sandbox.asked),
                    network: sandbox.map(|sandbox| sandbox.network),
                };
                match self.confine_hooks(&session.agent, sandbox, &project.path, &path) {
                    Ok(confined_by) => Some(TeardownHooks { lines: settings.worktree.teardown, confined_by }),
                    Err(error) if !force => return Err(error),
                    Err(error) => {
                        tracing::warn!(session = %id, %error, "the project's teardown is left out");
                        None
                    }
                }
            }
            _ => None,
        };
        let (name, records) = (id.clone(), self.git_records());
        let work = move |stop: &StopFlag| remove_checked(path, &records, &name, hooks.as_ref(), force, stop);
        let (path, kept_branch) =
            self.run_blocking(StopFlag::default(), work).await?.map_err(worktree_refused)?;
        Ok(RemovedWorktree { session_id: id.clone(), path: path.display().to_string(), kept_branch })
    }

    async fn is_session_busy(&self, session: &Session) -> bool {
        match self.probe_session(&session.id).await {
            Some(probe) => probe.busy,
            None => session.busy,
        }
    }
}

/// What a project runs before one of its worktrees is removed.
struct TeardownHooks {
    lines: Vec<String>,
    /// What comes before each line and confines it.
    confined_by: Vec<OsString>,
}

fn remove_checked(
    path: PathBuf,
    records: &GitRecords,
    id: &SessionId,
    hooks: Option<&TeardownHooks>,
    force: bool,
    stop: &StopFlag,
) -> qd_worktree::WorktreeResult<(PathBuf, Option<String>)> {
    if path.symlink_metadata().is_err() {
        return Err(WorktreeError::NoWorktree(path));
    }
    let path = path.canonicalize().unwrap_or(path);
    let opened = match force {
        true => GitWorktree::open_recorded(&path, records, stop),
        false => GitWorktree::open(&path, records, stop),
    };
    let tree = match opened {
        Ok(tree) => tree,
        Err(WorktreeError::NoWorktree(_)) => {
            remove::remove_unknown(&path, records, force)?;
            return Ok((path, None));
        }
        Err(error) => return Err(error),
    };
    if !force {
        tree.check_removal()?;
    }
    if let Some(TeardownHooks { lines, confined_by }) = hooks {
        let repository = tree.repository_top().display().to_string();
        let worktree = path.display().to_string();
        let env = hook_env(id.as_str(), &worktree, &repository);
        let environment = HookEnvironment { directory: &path, variables: &env, confined_by };
        match hooks::run(lines, &environment, stop) {
            Err(error) if !force => return Err(error),
            Err(error) => {
                tracing::warn!(session = %id, %error, "the project's teardown failed; the worktree is removed anyway")
            }
            Ok(_) => {}
        }
    }
    Ok((path, tree.remove(force)?))
}

fn worktree_path(session: &Session) -> Result<PathBuf, ApiError> {
    session.worktree.as_deref().map(PathBuf::from).ok_or_else(|| {
        let message = format!(
            "session {} works in its workspace and has no worktree of its own; a session that is started with \
             `qd run --worktree` has one",
            session.id
        );
        ApiError::new(ErrorCode::NoWorktree, message)
    })
}

/// The commit message of a merge.
fn merge_message(session: &Session) -> String {
    match &session.title {
        Some(title) => format!("{title}\n\nSession {} ({})", session.id, session.agent),
        None => format!("Work of session {} ({})", session.id, session.agent),
    }
}
