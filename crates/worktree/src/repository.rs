//! Finds the repository that a directory belongs to, and its branches and checkouts. Nothing here creates a repository.

use std::path::{Path, PathBuf};

use crate::error::{WorktreeError, WorktreeResult};
use crate::git::{self, Git};
use crate::process::StopFlag;

/// A repository, seen from one of its checkouts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Repository {
    /// The top directory of the checkout.
    pub top: PathBuf,
    /// Git's directory that all checkouts share.
    pub common_dir: PathBuf,
    /// The path of the given directory inside the checkout; empty at the top.
    pub prefix: PathBuf,
}

/// The starting point of a worktree.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WorktreeOrigin {
    pub repository: Repository,
    /// The commit to start from.
    pub base: String,
    /// The branch that its work is merged into by default. Absent if the worktree does not start from a local branch.
    pub target: Option<String>,
}

impl Repository {
    /// Finds the repository that contains a directory.
    pub fn of(dir: &Path, stop: &StopFlag) -> WorktreeResult<Self> {
        let git = Git::at(dir, stop);
        path_text(dir)?;
        let args = ["rev-parse", "--is-inside-work-tree"];
        let output = git.run(&args)?;
        if !output.status.success() {
            let error_text = git::error_text(&output);
            return Err(match error_text.contains("not a git repository") {
                true => WorktreeError::NotARepository(dir.to_owned()),
                false => git::git_failed(&args, &output),
            });
        }
        if output.stdout.trim_ascii() != b"true" {
            return Err(WorktreeError::BareRepository(dir.to_owned()));
        }
        let path = |option: &str| {
            git.output_text(&["rev-parse", "--path-format=absolute", option]).map(PathBuf::from)
        };
        let prefix = git.output_text(&["rev-parse", "--show-prefix"])?;
        let prefix = PathBuf::from(prefix.trim_end_matches('/'));
        let common_dir = path("--git-common-dir")?;
        let common_dir = common_dir.canonicalize().unwrap_or(common_dir);
        Ok(Self { top: path("--show-toplevel")?, common_dir, prefix })
    }

    /// Git in the top directory of the checkout.
    pub fn git(&self, stop: &StopFlag) -> Git {
        Git::at(&self.top, stop)
    }

    /// Resolves where a worktree starts: at the named branch, or at what is checked out now.
    pub fn worktree_origin(
        self,
        base_branch: Option<&str>,
        stop: &StopFlag,
    ) -> WorktreeResult<WorktreeOrigin> {
        let git = self.git(stop);
        let Some(name) = base_branch else {
            let base = git.optional_text(&["rev-parse", "--verify", "--quiet", "HEAD^{commit}"])?;
            let base = base.ok_or_else(|| WorktreeError::NoCommit(self.top.clone()))?;
            let target = git.optional_text(&["symbolic-ref", "--quiet", "--short", "HEAD"])?;
            return Ok(WorktreeOrigin { repository: self, base, target });
        };
        if let Some(base) = branch_tip(&git, name)? {
            return Ok(WorktreeOrigin { repository: self, base, target: Some(name.to_owned()) });
        }
        // A remote branch that was never checked out is a valid start, but cannot be merged into.
        let remote = match is_branch_name(&git, name)? {
            true => {
                let full = format!("refs/remotes/{name}^{{commit}}");
                git.optional_text(&["rev-parse", "--verify", "--quiet", "--end-of-options", &full])?
            }
            false => None,
        };
        match remote {
            Some(base) => Ok(WorktreeOrigin { repository: self, base, target: None }),
            None => Err(WorktreeError::NoBranch { name: name.to_owned(), repository: self.top }),
        }
    }
}

/// The commit of a local branch, if the branch exists.
pub(crate) fn branch_tip(git: &Git, name: &str) -> WorktreeResult<Option<String>> {
    if !is_branch_name(git, name)? {
        return Ok(None);
    }
    let full = format!("refs/heads/{name}^{{commit}}");
    git.optional_text(&["rev-parse", "--verify", "--quiet", "--end-of-options", &full])
}

/// Whether this is a valid branch name.
fn is_branch_name(git: &Git, name: &str) -> WorktreeResult<bool> {
    if name.is_empty() || name.starts_with('-') || name.contains(char::is_control) {
        return Ok(false);
    }
    git.exits_zero(&["check-ref-format", &format!("refs/heads/{name}")])
}

#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Checkout {
    pub(crate) path: PathBuf,
    /// The branch as `refs/heads/…`. Absent if the head is detached.
    pub(crate) branch: Option<String>,
    /// Whether the directory no longer exists.
    pub(crate) is_gone: bool,
}

/// All checkouts of a repository.
pub(crate) fn checkouts(git: &Git) -> WorktreeResult<Vec<Checkout>> {
    let list = git.output(&["worktree", "list", "--porcelain", "-z"])?;
    let list = String::from_utf8_lossy(&list);
    let mut found: Vec<Checkout> = Vec::new();
    for line in list.split('\0') {
        match (line.split_once(' ').unwrap_or((line, "")), found.last_mut()) {
            (("worktree", path), _) => {
                let is_gone = !Path::new(path).exists();
                found.push(Checkout { path: PathBuf::from(path), branch: None, is_gone });
            }
            (("branch", branch), Some(last)) => last.branch = Some(branch.to_owned()),
            _ => {}
        }
    }
    Ok(found)
}

/// The path as text, if it can be passed to git, printed on one line and written as JSON.
pub(crate) fn path_text(path: &Path) -> WorktreeResult<&str> {
    let text = path.to_str().filter(|text| !text.contains(['\n', '\r', '\0']));
    text.ok_or_else(|| WorktreeError::BadPath(path.to_owned()))
}
