//! Git worktrees of sessions. What git does is in `qd-worktree`; here it gets threads that may block, one at a time per
//! worktree and per repository, and an end when the daemon ends.
//!
//! - `list`: those that there are, how they stand, and which of them changed the same lines.
//! - `deeds`: what changed in one, and its merge and its end.

mod list;
mod operations;

use std::path::{Path, PathBuf};

use qd_catalog::project::{ProjectFileStatus, WorktreeSettings};
use qd_keeper::MARK_VARIABLE;
use qd_protocol::event::{RunError, SessionWorktree};
use qd_protocol::{ApiError, ErrorCode, SessionId};
use qd_worktree::{
    GitWorktree, Repository, StopFlag, WorktreeError, WorktreeOrigin, WorktreePlan, hooks, ignored_files,
};

use crate::daemon::{Daemon, stopping_error};
use crate::workspaces::{WorkspaceEntry, path_not_found};

/// The branch of a session's worktree begins with this; its id follows.
const BRANCH_PREFIX: &str = qd_worktree::summary::BRANCH_PREFIX;
/// Names of files that a notice lists.
const NAMES_MAX: usize = 20;

/// Where the worktrees of a workspace's sessions begin, and where they go.
#[derive(Debug, Clone)]
pub(crate) struct WorktreeLayout {
    origin: WorktreeOrigin,
    root: PathBuf,
}

impl WorktreeLayout {
    /// The worktree of a session, and the directory in it that stands for the workspace's. Its names come from the
    /// session's id alone, so it is the same whoever asks and whenever.
    pub(crate) fn worktree(&self, session: &SessionId) -> (SessionWorktree, String) {
        let path = self.root.join(session.as_str());
        let text = |path: &Path| path.display().to_string();
        let directory = text(&path.join(&self.origin.repository.prefix));
        let worktree = SessionWorktree {
            path: text(&path),
            branch: format!("{BRANCH_PREFIX}{session}"),
            base: self.origin.base.clone(),
            target: self.origin.target.clone(),
            repository: text(&self.origin.repository.top),
        };
        (worktree, directory.trim_end_matches('/').to_owned())
    }
}

/// A worktree that is to be made ready for a session's agent.
#[derive(Debug)]
pub(crate) struct WorktreeSetupRequest {
    pub(crate) session: SessionId,
    pub(crate) worktree: SessionWorktree,
    /// Where in it the agent works.
    pub(crate) directory: PathBuf,
    /// The workspace, whose file may say what is to be done.
    pub(crate) project: PathBuf,
    /// What the processes of the session's worker bear.
    pub(crate) mark: String,
}

impl Daemon {
    /// Where the worktrees of a workspace's sessions begin: at a branch, or at what is checked out there now.
    pub(crate) async fn worktree_layout(
        &self,
        place: &WorkspaceEntry,
        base_branch: Option<&str>,
    ) -> Result<WorktreeLayout, ApiError> {
        let (dir, base) = (place.path.clone(), base_branch.map(str::to_owned));
        let root = self.home.worktrees();
        let look = move |stop: &StopFlag| {
            if !dir.is_dir() {
                return Err(path_not_found(&dir));
            }
            let origin =
                Repository::of(&dir, stop).and_then(|found| found.worktree_origin(base.as_deref(), stop));
            let origin = origin.map_err(worktree_refused)?;
            let root = root.canonicalize().map_err(|error| {
                ApiError::new(
                    ErrorCode::StorageFailed,
                    format!("could not resolve {}: {error}", root.display()),
                )
            })?;
            match (root.to_str(), origin.repository.top.to_str()) {
                (Some(_), Some(_)) => Ok(WorktreeLayout { origin, root }),
                _ => Err(worktree_refused(WorktreeError::BadPath(root))),
            }
        };
        self.run_blocking(StopFlag::default(), look).await?
    }

    /// Makes a session's worktree, or what is missing of it, and does there what its project wants done. Gives what a
    /// person should see of that.
    pub(crate) async fn prepare_worktree(
        &self,
        order: WorktreeSetupRequest,
        stop: StopFlag,
    ) -> Result<Vec<String>, RunError> {
        let _one_at_a_time = self.key_locks.lock(worktree_key(&order.session)).await;
        let failed = |error: &dyn std::fmt::Display| RunError::new("worktree_failed", error.to_string());
        let plan = worktree_plan(&order.worktree);
        let mark = order.mark.clone();
        let top = plan.repository.clone();
        let found = self.run_blocking(stop.clone(), move |stop| Repository::of(&top, stop)).await;
        let found = found.map_err(|error| failed(&error))?.map_err(|error| failed(&error))?;
        let made = {
            let _one_at_a_time = self.key_locks.lock(repository_key(&found.common_dir)).await;
            let make = move |stop: &StopFlag| plan.create(Some((MARK_VARIABLE, &mark)), stop);
            self.run_blocking(stop.clone(), make).await.map_err(|error| failed(&error))?
        };
        let tree = made.map_err(|error| failed(&error))?;
        if tree.record.set_up {
            return self
                .run_blocking(stop, move |_| make_directory(&order))
                .await
                .map_err(|error| failed(&error))?;
        }
        let found = self.workers.agents().project_setup(&order.project);
        let set_up = move |stop: &StopFlag| set_up(tree, &order, found, stop);
        self.run_blocking(stop, set_up).await.map_err(|error| failed(&error))?
    }

    /// Runs what blocks on a thread of its own. It is stopped when the daemon ends.
    async fn run_blocking<T: Send + 'static>(
        &self,
        stop: StopFlag,
        work: impl FnOnce(&StopFlag) -> T + Send + 'static,
    ) -> Result<T, ApiError> {
        let mut ending = self.stop_signal();
        let until = stop.clone();
        // Whoever asked and went away does not need it any more.
        let mut wanted = StopOnDrop(Some(stop.clone()));
        let mut task = tokio::task::spawn_blocking(move || work(&until));
        let ended = async { drop(ending.wait_for(|stop| *stop).await) };
        let done = tokio::select! {
            done = &mut task => Some(done),
            () = ended => None,
        };
        let done = match done {
            Some(done) => done,
            None => {
                stop.set();
                task.await
            }
        };
        wanted.0 = None;
        done.map_err(|error| {
            tracing::error!(%error, "work on a worktree failed");
            stopping_error()
        })
    }
}

/// Stops what nobody waits for.
struct StopOnDrop(Option<StopFlag>);

impl Drop for StopOnDrop {
    fn drop(&mut self) {
        if let Some(stop) = &self.0 {
            stop.set();
        }
    }
}

fn worktree_plan(worktree: &SessionWorktree) -> WorktreePlan {
    WorktreePlan {
        repository: PathBuf::from(&worktree.repository),
        path: PathBuf::from(&worktree.path),
        branch: worktree.branch.clone(),
        base: worktree.base.clone(),
        target: worktree.target.clone(),
    }
}

/// What is done in a worktree before anybody works there. Done again from the beginning if it did not come to its end.
fn set_up(
    mut tree: GitWorktree,
    order: &WorktreeSetupRequest,
    found: ProjectFileStatus,
    stop: &StopFlag,
) -> Result<Vec<String>, RunError> {
    let failed = |code: &str, error: &dyn std::fmt::Display| RunError::new(code, error.to_string());
    let SessionWorktree { path, branch, base, target, repository } = &order.worktree;
    let from = target.as_deref().unwrap_or("a commit");
    let short = base.get(..12).unwrap_or(base);
    let mut notices = vec![format!("works in {path} on branch {branch}, from {from} ({short})")];
    notices.extend(make_directory(order)?);
    if tree.has_submodules() {
        let text = "submodules are not checked out in this worktree; `setup = [\"git submodule update --init\"]` in \
                    .quarterdeck/project.toml would do it";
        notices.push(text.to_owned());
    }
    let wanted = match found {
        ProjectFileStatus::Absent => WorktreeSettings::default(),
        ProjectFileStatus::Trusted(project) => project.worktree,
        ProjectFileStatus::Untrusted => {
            let project = order.project.display();
            notices.push(format!(
                "the project's set-up of worktrees was left out; after `qd trust {project}` it counts"
            ));
            WorktreeSettings::default()
        }
        ProjectFileStatus::Invalid(why) => return Err(failed("setup_failed", &why)),
    };
    let brought = ignored_files::copy_ignored_files(&wanted.bring, Path::new(repository), &tree.path, stop)
        .map_err(|error| failed("setup_failed", &error))?;
    if !brought.files.is_empty() {
        notices.push(format!("brought along: {}", joined_names(&brought.files, ", ")));
    }
    if !brought.skipped.is_empty() {
        notices.push(format!("not brought along: {}", joined_names(&brought.skipped, "; ")));
    }
    let env = hook_env(order.session.as_str(), path, repository);
    let mut env: Vec<(&str, &str)> = env.to_vec();
    env.push((MARK_VARIABLE, &order.mark));
    for line in &wanted.setup {
        let told = hooks::run(std::slice::from_ref(line), &tree.path, &env, stop)
            .map_err(|error| failed("setup_failed", &error))?;
        notices.extend(told.into_iter().map(|told| match told.output.is_empty() {
            true => format!("set-up: {}", told.line),
            false => format!("set-up: {}\n{}", told.line, told.output),
        }));
    }
    tree.mark_set_up().map_err(|error| failed("worktree_failed", &error))?;
    Ok(notices)
}

/// What a line of a project's file is told of where it runs.
fn hook_env<'a>(session: &'a str, path: &'a str, repository: &'a str) -> [(&'a str, &'a str); 3] {
    [("QD_SESSION", session), ("QD_WORKTREE", path), ("QD_REPOSITORY", repository)]
}

/// The directory in it that stands for the workspace may hold nothing that git knows, and so not be there.
fn make_directory(order: &WorktreeSetupRequest) -> Result<Vec<String>, RunError> {
    let made = std::fs::create_dir_all(&order.directory);
    made.map(|()| Vec::new()).map_err(|error| {
        let message = format!("could not make {}: {error}", order.directory.display());
        RunError::new("worktree_failed", message)
    })
}

fn joined_names(names: &[String], joint: &str) -> String {
    let more = names.len().saturating_sub(NAMES_MAX);
    let shown = names[..names.len() - more].join(joint);
    if more == 0 { shown } else { format!("{shown}{joint}and {more} more") }
}

/// One at a time: who makes, merges or removes a worktree.
fn worktree_key(session: &SessionId) -> String {
    format!("worktree {session}")
}

/// One at a time: who changes the branches and worktrees of a repository, known by what its checkouts share.
fn repository_key(common: &Path) -> String {
    format!("repository {}", common.display())
}

/// What a client is told when git stands in the way.
fn worktree_refused(error: WorktreeError) -> ApiError {
    let message = error.to_string();
    let code = match &error {
        WorktreeError::NotARepository(_) | WorktreeError::BareRepository(_) | WorktreeError::NoCommit(_) => {
            ErrorCode::UnsupportedSetting
        }
        WorktreeError::NoBranch { .. }
        | WorktreeError::NoTarget
        | WorktreeError::BadPath(_)
        | WorktreeError::BadPattern { .. } => ErrorCode::InvalidValue,
        WorktreeError::NoWorktree(_) => ErrorCode::NoWorktree,
        WorktreeError::Conflicts { .. } => ErrorCode::MergeConflict,
        WorktreeError::Unmerged { .. } => ErrorCode::UnmergedWork,
        WorktreeError::Stopped => return stopping_error(),
        WorktreeError::NoGit(_)
        | WorktreeError::PathOccupied { .. }
        | WorktreeError::BranchInUse { .. }
        | WorktreeError::NoIdentity
        | WorktreeError::EmbeddedRepository(_)
        | WorktreeError::Unfinished { .. }
        | WorktreeError::CheckoutDirty { .. }
        | WorktreeError::BranchMoved { .. }
        | WorktreeError::HookFailed { .. }
        | WorktreeError::TimedOut { .. }
        | WorktreeError::GitFailed { .. }
        | WorktreeError::Io { .. } => ErrorCode::GitRefused,
    };
    let refused = ApiError::new(code, message);
    match error {
        WorktreeError::NotARepository(_) | WorktreeError::BareRepository(_) | WorktreeError::NoCommit(_) => {
            refused.with_detail("setting", "worktree")
        }
        WorktreeError::Conflicts { into, conflicts } => {
            let conflicts = serde_json::to_value(conflicts).unwrap_or_default();
            refused.with_detail("into", into).with_detail("conflicts", conflicts)
        }
        WorktreeError::Unmerged { state, changed_files, ahead, .. } => refused
            .with_detail("state", state.as_str())
            .with_detail("changed_files", changed_files)
            .with_detail("ahead", ahead),
        _ => refused,
    }
}
