//! Git worktrees of sessions. The git operations are in `qd-worktree`; here they get threads that may block, run one
//! at a time per worktree and per repository, and are stopped when the daemon stops.
//!
//! - `list`: the existing worktrees, their states, and which of them changed the same lines.
//! - `operations`: the diff, merge and removal of one worktree.

mod list;
mod operations;

pub(crate) use self::list::WorktreeInspection;

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use qd_catalog::project::{ProjectFileStatus, WorktreeSettings};
use qd_keeper::MARK_VARIABLE;
use qd_protocol::event::{RunError, SessionWorktree};
use qd_protocol::{ApiError, ErrorCode, SessionId};
use qd_sandbox::confined_command;
use qd_worktree::hooks::{self, HookEnvironment};
use qd_worktree::{
    GitRecords, GitWorktree, Repository, StopFlag, WorktreeError, WorktreeOrigin, WorktreePlan, ignored_files,
};

use crate::daemon::{Daemon, stopping_error};
use crate::workers::SandboxRequest;
use crate::workspaces::{WorkspaceEntry, path_not_found};

/// The prefix of a session's branch, followed by the session's id.
const BRANCH_PREFIX: &str = qd_worktree::summary::BRANCH_PREFIX;
/// This very program, even if its file has been replaced.
const OWN_PROGRAM: &str = "/proc/self/exe";
/// The most file names that a notice lists.
const NAMES_MAX: usize = 20;

/// Where the worktrees of a workspace's sessions start from, and where they are created.
#[derive(Debug, Clone)]
pub(crate) struct WorktreeLayout {
    origin: WorktreeOrigin,
    root: PathBuf,
}

impl WorktreeLayout {
    /// The worktree of a session, and the directory in it that corresponds to the workspace. Names are derived from
    /// the session's id alone, so the result is always the same.
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

/// A worktree to be prepared for a session's agent.
#[derive(Debug)]
pub(crate) struct WorktreeSetupRequest {
    pub(crate) session: SessionId,
    pub(crate) agent: String,
    /// How the session's agent is confined, and with it what the project's setup steps start.
    pub(crate) sandbox: SandboxRequest,
    pub(crate) worktree: SessionWorktree,
    /// The directory in the worktree that the agent works in.
    pub(crate) directory: PathBuf,
    /// The workspace, whose project file may have setup steps.
    pub(crate) project: PathBuf,
    /// The mark of the session's worker.
    pub(crate) mark: String,
}

impl Daemon {
    /// Our records about worktrees and their repositories.
    fn git_records(&self) -> GitRecords {
        let folder = self.home.git();
        // Git does not run in our working directory, so the path must be absolute.
        GitRecords::in_folder(&folder.canonicalize().unwrap_or(folder))
    }

    /// Where the worktrees of a workspace's sessions start from: a branch, or the commit that is checked out now.
    pub(crate) async fn worktree_layout(
        &self,
        workspace: &WorkspaceEntry,
        base_branch: Option<&str>,
    ) -> Result<WorktreeLayout, ApiError> {
        let (dir, base) = (workspace.path.clone(), base_branch.map(str::to_owned));
        let (root, records) = (self.home.worktrees(), self.git_records());
        let inspect = move |stop: &StopFlag| {
            if !dir.is_dir() {
                return Err(path_not_found(&dir));
            }
            let origin = Repository::of(&dir, &records, stop)
                .and_then(|repository| repository.worktree_origin(base.as_deref(), stop));
            let origin = origin.map_err(worktree_refused)?;
            let root = root.canonicalize().map_err(|error| {
                let message = format!("could not resolve {}: {error}", root.display());
                ApiError::new(ErrorCode::StorageFailed, message).with_source(error)
            })?;
            match (root.to_str(), origin.repository.top.to_str()) {
                (Some(_), Some(_)) => Ok(WorktreeLayout { origin, root }),
                _ => Err(worktree_refused(WorktreeError::BadPath(root))),
            }
        };
        self.run_blocking(StopFlag::default(), inspect).await?
    }

    /// Creates a session's worktree, or what is missing of it, and runs the project's setup steps. Returns notices
    /// for the person.
    pub(crate) async fn prepare_worktree(
        &self,
        request: WorktreeSetupRequest,
        stop: StopFlag,
    ) -> Result<Vec<String>, RunError> {
        let _one_at_a_time = self.key_locks.lock(worktree_key(&request.session)).await;
        let failed = |error: &dyn std::fmt::Display| RunError::new("worktree_failed", error.to_string());
        let plan = worktree_plan(&request.worktree);
        let mark = request.mark.clone();
        let (top, records) = (plan.repository.clone(), self.git_records());
        let find_repository = {
            let records = records.clone();
            move |stop: &StopFlag| Repository::of(&top, &records, stop)
        };
        let repository = self.run_blocking(stop.clone(), find_repository).await;
        let repository = repository.map_err(|error| failed(&error))?.map_err(|error| failed(&error))?;
        let created = {
            let _one_at_a_time = self.key_locks.lock(repository_key(&repository.common_dir)).await;
            let create = move |stop: &StopFlag| plan.create(&records, Some((MARK_VARIABLE, &mark)), stop);
            self.run_blocking(stop.clone(), create).await.map_err(|error| failed(&error))?
        };
        let tree = created.map_err(|error| failed(&error))?;
        if tree.record.set_up {
            return self
                .run_blocking(stop, move |_| make_directory(&request))
                .await
                .map_err(|error| failed(&error))?;
        }
        let project = self.workers.agents().project_setup(&request.project);
        let confined_by = self.confine_hooks(&request.agent, request.sandbox, &request.project, &tree.path);
        let confined_by = confined_by.map_err(|error| RunError::new(error.code.as_str(), error.message))?;
        let set_up = move |stop: &StopFlag| set_up(tree, &request, &repository, project, &confined_by, stop);
        self.run_blocking(stop, set_up).await.map_err(|error| failed(&error))?
    }

    /// What comes before the commands of a project's hooks, so that they are confined like the session's agent.
    fn confine_hooks(
        &self,
        agent: &str,
        session: SandboxRequest,
        project: &Path,
        worktree: &Path,
    ) -> Result<Vec<OsString>, ApiError> {
        let plan = self.workers.plan_hook_sandbox(agent, session, project, worktree);
        match plan? {
            Some(plan) => confined_command(Path::new(OWN_PROGRAM), &plan).map_err(|error| {
                let message = format!("the project's hooks cannot be confined: {error}");
                ApiError::new(ErrorCode::SandboxUnavailable, message)
            }),
            None => Ok(Vec::new()),
        }
    }

    /// Runs blocking work on a thread of its own, which is told to stop when the daemon stops or the caller is
    /// dropped.
    async fn run_blocking<T: Send + 'static>(
        &self,
        stop: StopFlag,
        work: impl FnOnce(&StopFlag) -> T + Send + 'static,
    ) -> Result<T, ApiError> {
        let mut daemon_stop = self.stop_signal();
        let work_stop = stop.clone();
        // A caller that is dropped does not need the result any more.
        let mut stop_on_drop = StopOnDrop(Some(stop.clone()));
        let mut task = tokio::task::spawn_blocking(move || work(&work_stop));
        let daemon_stopping = async { drop(daemon_stop.wait_for(|stop| *stop).await) };
        let result = tokio::select! {
            result = &mut task => Some(result),
            () = daemon_stopping => None,
        };
        let result = match result {
            Some(result) => result,
            None => {
                stop.set();
                task.await
            }
        };
        stop_on_drop.0 = None;
        result.map_err(|error| {
            tracing::error!(%error, "work on a worktree failed");
            stopping_error()
        })
    }
}

/// Stops the work when dropped, unless disarmed.
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

/// Prepares a new worktree: the project's ignored files and setup steps. If interrupted, it starts again from the
/// beginning.
fn set_up(
    mut tree: GitWorktree,
    request: &WorktreeSetupRequest,
    checkout: &Repository,
    project_file: ProjectFileStatus,
    confined_by: &[OsString],
    stop: &StopFlag,
) -> Result<Vec<String>, RunError> {
    let failed = |code: &str, error: &dyn std::fmt::Display| RunError::new(code, error.to_string());
    let SessionWorktree { path, branch, base, target, repository } = &request.worktree;
    let from = target.as_deref().unwrap_or("a commit");
    let short = base.get(..12).unwrap_or(base);
    let mut notices = vec![format!("works in {path} on branch {branch}, from {from} ({short})")];
    notices.extend(make_directory(request)?);
    if tree.has_submodules() {
        let text = "submodules are not checked out in this worktree; `setup = [\"git submodule update --init\"]` in \
                    .quarterdeck/project.toml would do it";
        notices.push(text.to_owned());
    }
    let settings = match project_file {
        ProjectFileStatus::Absent => WorktreeSettings::default(),
        ProjectFileStatus::Trusted(project) => project.worktree,
        ProjectFileStatus::Untrusted => {
            let project = request.project.display();
            notices.push(format!(
                "skipped the project's worktree set-up, which is not trusted; to trust it, run `qd trust {project}`"
            ));
            WorktreeSettings::default()
        }
        ProjectFileStatus::Invalid(reason) => return Err(failed("setup_failed", &reason)),
    };
    let copied = ignored_files::copy_ignored_files(&settings.bring, checkout, &tree.path, stop)
        .map_err(|error| failed("setup_failed", &error))?;
    if !copied.files.is_empty() {
        notices.push(format!("copied ignored files: {}", joined_names(&copied.files, ", ")));
    }
    if !copied.skipped.is_empty() {
        notices.push(format!("ignored files not copied: {}", joined_names(&copied.skipped, "; ")));
    }
    let env = hook_env(request.session.as_str(), path, repository);
    let mut env: Vec<(&str, &str)> = env.to_vec();
    env.push((MARK_VARIABLE, &request.mark));
    let environment = HookEnvironment { directory: &tree.path, variables: &env, confined_by };
    for line in &settings.setup {
        let outputs = hooks::run(std::slice::from_ref(line), &environment, stop)
            .map_err(|error| failed("setup_failed", &error))?;
        notices.extend(outputs.into_iter().map(|hook| match hook.output.is_empty() {
            true => format!("set-up: {}", hook.line),
            false => format!("set-up: {}\n{}", hook.line, hook.output),
        }));
    }
    tree.mark_set_up().map_err(|error| failed("worktree_failed", &error))?;
    Ok(notices)
}

/// The environment variables of the project's setup and teardown commands.
fn hook_env<'a>(session: &'a str, path: &'a str, repository: &'a str) -> [(&'a str, &'a str); 3] {
    [("QD_SESSION", session), ("QD_WORKTREE", path), ("QD_REPOSITORY", repository)]
}

/// Creates the directory that corresponds to the workspace: git does not create it if it has no tracked files.
fn make_directory(request: &WorktreeSetupRequest) -> Result<Vec<String>, RunError> {
    let created = std::fs::create_dir_all(&request.directory);
    created.map(|()| Vec::new()).map_err(|error| {
        let message = format!("could not create {}: {error}", request.directory.display());
        RunError::new("worktree_failed", message)
    })
}

fn joined_names(names: &[String], separator: &str) -> String {
    let more = names.len().saturating_sub(NAMES_MAX);
    let shown = names[..names.len() - more].join(separator);
    if more == 0 { shown } else { format!("{shown}{separator}and {more} more") }
}

/// The lock key for creating, merging or removing a worktree.
fn worktree_key(session: &SessionId) -> String {
    format!("worktree {session}")
}

/// The lock key for changing a repository's branches and worktrees. All checkouts of a repository share it.
fn repository_key(common: &Path) -> String {
    format!("repository {}", common.display())
}

/// The client's error when a git operation was refused.
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
        WorktreeError::Changed { .. } | WorktreeError::IndexLeadsOut { .. } => ErrorCode::WorktreeChanged,
        WorktreeError::Conflicts { .. } => ErrorCode::MergeConflict,
        WorktreeError::Unmerged { .. } => ErrorCode::UnmergedWork,
        WorktreeError::Stopped => return stopping_error(),
        WorktreeError::NoGit(_)
        | WorktreeError::OtherWorkTree { .. }
        | WorktreeError::UnknownExtension { .. }
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
    let api_error = ApiError::new(code, message);
    match error {
        WorktreeError::NotARepository(_) | WorktreeError::BareRepository(_) | WorktreeError::NoCommit(_) => {
            api_error.with_detail("setting", "worktree")
        }
        WorktreeError::Conflicts { into, conflicts } => {
            let conflicts = serde_json::to_value(conflicts).unwrap_or_default();
            api_error.with_detail("into", into).with_detail("conflicts", conflicts)
        }
        WorktreeError::Unmerged { state, changed_files, ahead, .. } => api_error
            .with_detail("state", state.as_str())
            .with_detail("changed_files", changed_files)
            .with_detail("ahead", ahead),
        WorktreeError::Changed { file, found, expected, .. } => api_error
            .with_detail("file", file.display().to_string())
            .with_detail("found", found)
            .with_detail("expected", expected.display().to_string()),
        _ => api_error,
    }
}
