//! Git worktrees of sessions. What git does is in `qd-worktree`; here it gets threads that may block, one at a time per
//! worktree and per repository, and an end when the daemon ends.
//!
//! - `list`: those that there are, how they stand, and which of them changed the same lines.
//! - `deeds`: what changed in one, and its merge and its end.

mod deeds;
mod list;

use std::path::{Path, PathBuf};

use qd_catalog::project::{Found, Worktrees};
use qd_keeper::MARK;
use qd_protocol::event::{RunError, SessionWorktree};
use qd_protocol::{ApiError, Code, SessionId};
use qd_worktree::{Error, Origin, Plan, Repository, Stop, Tree, bring, hooks};

use crate::daemon::{Daemon, stopping};
use crate::places::{Place, path_not_found};

/// The branch of a session's worktree begins with this; its id follows.
const BRANCHES: &str = qd_worktree::standing::BRANCHES;
/// Names of files that a notice lists.
const NAMES_MAX: usize = 20;

/// Where the worktrees of a workspace's sessions begin, and where they go.
#[derive(Debug, Clone)]
pub(crate) struct Ground {
    origin: Origin,
    root: PathBuf,
}

impl Ground {
    /// The worktree of a session, and the directory in it that stands for the workspace's. Its names come from the
    /// session's id alone, so it is the same whoever asks and whenever.
    pub(crate) fn worktree(&self, session: &SessionId) -> (SessionWorktree, String) {
        let path = self.root.join(session.as_str());
        let text = |path: &Path| path.display().to_string();
        let directory = text(&path.join(&self.origin.repository.prefix));
        let worktree = SessionWorktree {
            path: text(&path),
            branch: format!("{BRANCHES}{session}"),
            base: self.origin.base.clone(),
            target: self.origin.target.clone(),
            repository: text(&self.origin.repository.top),
        };
        (worktree, directory.trim_end_matches('/').to_owned())
    }
}

/// A worktree that is to be made ready for a session's agent.
#[derive(Debug)]
pub(crate) struct Order {
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
    pub(crate) async fn ground(&self, place: &Place, base_branch: Option<&str>) -> Result<Ground, ApiError> {
        let (dir, base) = (place.path.clone(), base_branch.map(str::to_owned));
        let root = self.home.worktrees();
        let look = move |stop: &Stop| {
            if !dir.is_dir() {
                return Err(path_not_found(&dir));
            }
            let origin = Repository::of(&dir, stop).and_then(|found| found.origin(base.as_deref(), stop));
            let origin = origin.map_err(refused)?;
            let root = root.canonicalize().map_err(|error| {
                ApiError::new(Code::StorageFailed, format!("could not resolve {}: {error}", root.display()))
            })?;
            match (root.to_str(), origin.repository.top.to_str()) {
                (Some(_), Some(_)) => Ok(Ground { origin, root }),
                _ => Err(refused(Error::BadPath(root))),
            }
        };
        self.blocking(Stop::default(), look).await?
    }

    /// Makes a session's worktree, or what is missing of it, and does there what its project wants done. Gives what a
    /// person should see of that.
    pub(crate) async fn prepare_worktree(&self, order: Order, stop: Stop) -> Result<Vec<String>, RunError> {
        let _one_at_a_time = self.keys.lock(worktree_key(&order.session)).await;
        let failed = |error: &dyn std::fmt::Display| RunError::new("worktree_failed", error.to_string());
        let plan = plan(&order.worktree);
        let mark = order.mark.clone();
        let top = plan.repository.clone();
        let found = self.blocking(stop.clone(), move |stop| Repository::of(&top, stop)).await;
        let found = found.map_err(|error| failed(&error))?.map_err(|error| failed(&error))?;
        let made = {
            let _one_at_a_time = self.keys.lock(repository_key(&found.common)).await;
            let make = move |stop: &Stop| plan.make(Some((MARK, &mark)), stop);
            self.blocking(stop.clone(), make).await.map_err(|error| failed(&error))?
        };
        let tree = made.map_err(|error| failed(&error))?;
        if tree.note.set_up {
            return self
                .blocking(stop, move |_| make_directory(&order))
                .await
                .map_err(|error| failed(&error))?;
        }
        let found = self.workers.agents().project(&order.project);
        let set_up = move |stop: &Stop| set_up(tree, &order, found, stop);
        self.blocking(stop, set_up).await.map_err(|error| failed(&error))?
    }

    /// Runs what blocks on a thread of its own. It is stopped when the daemon ends.
    async fn blocking<T: Send + 'static>(
        &self,
        stop: Stop,
        work: impl FnOnce(&Stop) -> T + Send + 'static,
    ) -> Result<T, ApiError> {
        let mut ending = self.stop_signal();
        let until = stop.clone();
        // Whoever asked and went away does not need it any more.
        let mut wanted = Wanted(Some(stop.clone()));
        let mut task = tokio::task::spawn_blocking(move || work(&until));
        let ended = async { drop(ending.wait_for(|stop| *stop).await) };
        let done = tokio::select! {
            done = &mut task => Some(done),
            () = ended => None,
        };
        let done = match done {
            Some(done) => done,
            None => {
                stop.now();
                task.await
            }
        };
        wanted.0 = None;
        done.map_err(|error| {
            tracing::error!(%error, "work on a worktree failed");
            stopping()
        })
    }
}

/// Stops what nobody waits for.
struct Wanted(Option<Stop>);

impl Drop for Wanted {
    fn drop(&mut self) {
        if let Some(stop) = &self.0 {
            stop.now();
        }
    }
}

fn plan(worktree: &SessionWorktree) -> Plan {
    Plan {
        repository: PathBuf::from(&worktree.repository),
        path: PathBuf::from(&worktree.path),
        branch: worktree.branch.clone(),
        base: worktree.base.clone(),
        target: worktree.target.clone(),
    }
}

/// What is done in a worktree before anybody works there. Done again from the beginning if it did not come to its end.
fn set_up(mut tree: Tree, order: &Order, found: Found, stop: &Stop) -> Result<Vec<String>, RunError> {
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
        Found::Nothing => Worktrees::default(),
        Found::Counts(project) => project.worktree,
        Found::Untrusted => {
            let project = order.project.display();
            notices.push(format!(
                "the project's set-up of worktrees was left out; after `qd trust {project}` it counts"
            ));
            Worktrees::default()
        }
        Found::Bad(why) => return Err(failed("setup_failed", &why)),
    };
    let brought = bring::bring(&wanted.bring, Path::new(repository), &tree.path, stop)
        .map_err(|error| failed("setup_failed", &error))?;
    if !brought.files.is_empty() {
        notices.push(format!("brought along: {}", listed(&brought.files, ", ")));
    }
    if !brought.left.is_empty() {
        notices.push(format!("not brought along: {}", listed(&brought.left, "; ")));
    }
    let env = hook_env(order.session.as_str(), path, repository);
    let mut env: Vec<(&str, &str)> = env.to_vec();
    env.push((MARK, &order.mark));
    for line in &wanted.setup {
        let told = hooks::run(std::slice::from_ref(line), &tree.path, &env, stop)
            .map_err(|error| failed("setup_failed", &error))?;
        notices.extend(told.into_iter().map(|told| match told.output.is_empty() {
            true => format!("set-up: {}", told.line),
            false => format!("set-up: {}\n{}", told.line, told.output),
        }));
    }
    tree.is_set_up().map_err(|error| failed("worktree_failed", &error))?;
    Ok(notices)
}

/// What a line of a project's file is told of where it runs.
fn hook_env<'a>(session: &'a str, path: &'a str, repository: &'a str) -> [(&'a str, &'a str); 3] {
    [("QD_SESSION", session), ("QD_WORKTREE", path), ("QD_REPOSITORY", repository)]
}

/// The directory in it that stands for the workspace may hold nothing that git knows, and so not be there.
fn make_directory(order: &Order) -> Result<Vec<String>, RunError> {
    let made = std::fs::create_dir_all(&order.directory);
    made.map(|()| Vec::new()).map_err(|error| {
        let message = format!("could not make {}: {error}", order.directory.display());
        RunError::new("worktree_failed", message)
    })
}

fn listed(names: &[String], joint: &str) -> String {
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
fn refused(error: Error) -> ApiError {
    let message = error.to_string();
    let code = match &error {
        Error::NotARepository(_) | Error::Bare(_) | Error::NoCommit(_) => Code::UnsupportedSetting,
        Error::NoBranch { .. } | Error::NoTarget | Error::BadPath(_) | Error::Pattern { .. } => {
            Code::InvalidValue
        }
        Error::Missing(_) => Code::NoWorktree,
        Error::Conflicts { .. } => Code::MergeConflict,
        Error::Unmerged { .. } => Code::UnmergedWork,
        Error::Stopped => return stopping(),
        Error::NoGit(_)
        | Error::InTheWay { .. }
        | Error::InUse { .. }
        | Error::NoIdentity
        | Error::Embedded(_)
        | Error::Unfinished { .. }
        | Error::CheckoutDirty { .. }
        | Error::Moved { .. }
        | Error::Hook { .. }
        | Error::TimedOut { .. }
        | Error::Git { .. }
        | Error::Io { .. } => Code::GitRefused,
    };
    let refused = ApiError::new(code, message);
    match error {
        Error::NotARepository(_) | Error::Bare(_) | Error::NoCommit(_) => refused.with("setting", "worktree"),
        Error::Conflicts { into, conflicts } => {
            let conflicts = serde_json::to_value(conflicts).unwrap_or_default();
            refused.with("into", into).with("conflicts", conflicts)
        }
        Error::Unmerged { state, changed_files, ahead, .. } => {
            refused.with("state", state.as_str()).with("changed_files", changed_files).with("ahead", ahead)
        }
        _ => refused,
    }
}
