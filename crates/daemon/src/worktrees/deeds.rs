//! What is done with one worktree: shown, merged, removed. Whoever works in it comes first: it is merged only while its
//! session has nothing to do, and removed only once that is closed.

use std::path::PathBuf;
use std::sync::Arc;

use qd_catalog::project::Found;
use qd_protocol::api::{Session, SessionState};
use qd_protocol::worktree::{Diff, MergeRequest, Merged, RemovedWorktree};
use qd_protocol::{ApiError, Code, SessionId};
use qd_worktree::merge::Merge;
use qd_worktree::{Error, Stop, Tree, hooks, remove};

use super::{hook_env, refused, repository_key, worktree_key};
use crate::daemon::Daemon;

/// Where merges are tried, beside the worktrees; no session has such a name.
const SCRATCH: &str = "scratch";

impl Daemon {
    /// What a session changed.
    pub(crate) async fn worktree_diff(&self, session: &Session, patch: bool) -> Result<Diff, ApiError> {
        let path = path_of(session)?;
        let look = move |stop: &Stop| Tree::open(&path, stop)?.diff(patch);
        self.blocking(Stop::default(), look).await?.map_err(refused)
    }

    /// Merges what a session did into a branch, or changes nothing.
    pub(crate) async fn merge_worktree(
        self: &Arc<Self>,
        session: &Session,
        request: MergeRequest,
    ) -> Result<Merged, ApiError> {
        let path = path_of(session)?;
        let _one_at_a_time = self.keys.lock(worktree_key(&session.id)).await;
        if self.is_at_work(session).await {
            let message = "a run of this session is live; wait for it or cancel it, then merge";
            return Err(ApiError::new(Code::Busy, message).with("session_id", session.id.as_str()));
        }
        let overlaps = self.overlaps_of(&session.id).await?;
        let open = path.clone();
        let tree = self.blocking(Stop::default(), move |stop| Tree::open(&open, stop)).await?;
        let tree = tree.map_err(refused)?;
        let _one_at_a_time = self.keys.lock(repository_key(&tree.common)).await;
        let message = message(session);
        let scratch = self.home.worktrees().join(SCRATCH).join(session.id.as_str());
        let work = move |stop: &Stop| {
            let into = request.into.as_deref();
            let merge = Merge { into, squash: request.squash, message: &message, scratch: &scratch };
            Tree::open(&path, stop)?.merge(&merge)
        };
        let done = self.blocking(Stop::default(), work).await?.map_err(refused)?;
        Ok(Merged {
            into: done.into,
            commit: done.commit,
            moved: done.moved,
            committed: done.committed,
            checkout: done.checkout.map(|path| path.display().to_string()),
            overlaps,
        })
    }

    /// Removes a worktree; one that holds work only with `force`.
    pub(crate) async fn remove_worktree(
        self: &Arc<Self>,
        id: &SessionId,
        force: bool,
    ) -> Result<RemovedWorktree, ApiError> {
        let _one_at_a_time = self.keys.lock(worktree_key(id)).await;
        let session = self.session_of_worktree(id).await?;
        if session.as_ref().is_some_and(|session| session.state != SessionState::Closed) {
            let message =
                format!("session {id} is open and may go on there; close it first with `qd rm {id}`");
            return Err(ApiError::new(Code::Busy, message).with("session_id", id.as_str()));
        }
        let path = self.home.worktrees().join(id.as_str());
        let project = session.as_ref().and_then(|session| self.places.get(&session.workspace_id).ok());
        let found = match project {
            Some(place) => self.workers.agents().project(&place.path),
            None => Found::Nothing,
        };
        let name = id.clone();
        let work = move |stop: &Stop| remove_one(path, &name, &found, force, stop);
        let (path, kept_branch) = self.blocking(Stop::default(), work).await?.map_err(refused)?;
        Ok(RemovedWorktree { session_id: id.clone(), path: path.display().to_string(), kept_branch })
    }

    async fn is_at_work(&self, session: &Session) -> bool {
        match self.probe(&session.id).await {
            Some(probe) => probe.busy,
            None => session.busy,
        }
    }
}

fn remove_one(
    path: PathBuf,
    id: &SessionId,
    found: &Found,
    force: bool,
    stop: &Stop,
) -> qd_worktree::Result<(PathBuf, Option<String>)> {
    if path.symlink_metadata().is_err() {
        return Err(Error::Missing(path));
    }
    let path = path.canonicalize().unwrap_or(path);
    let tree = match Tree::open(&path, stop) {
        Ok(tree) => tree,
        Err(Error::Missing(_)) => {
            remove::remove_unknown(&path, force)?;
            return Ok((path, None));
        }
        Err(error) => return Err(error),
    };
    tree.check_removal(force)?;
    if let Found::Counts(project) = found {
        let repository = remove::repository_of(&path, stop).unwrap_or_default();
        let (at, repository) = (path.display().to_string(), repository.display().to_string());
        let env = hook_env(id.as_str(), &at, &repository);
        match hooks::run(&project.worktree.teardown, &path, &env, stop) {
            Err(error) if !force => return Err(error),
            Err(error) => {
                tracing::warn!(session = %id, %error, "a tear-down failed; the worktree goes all the same")
            }
            Ok(_) => {}
        }
    }
    Ok((path, tree.remove(force)?))
}

fn path_of(session: &Session) -> Result<PathBuf, ApiError> {
    session.worktree.as_deref().map(PathBuf::from).ok_or_else(|| {
        let message = format!("session {} works in its workspace and has no worktree of its own", session.id);
        ApiError::new(Code::NoWorktree, message)
    })
}

/// What the commits of a merge say.
fn message(session: &Session) -> String {
    match &session.title {
        Some(title) => format!("{title}\n\nSession {} ({})", session.id, session.agent),
        None => format!("Work of session {} ({})", session.id, session.agent),
    }
}
