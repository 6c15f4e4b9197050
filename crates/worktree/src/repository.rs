//! Finds the repository that a directory belongs to, and its branches and checkouts. Nothing here creates a repository.

use std::fs;
use std::path::{Path, PathBuf};

use crate::error::{WorktreeError, WorktreeResult};
use crate::git::{self, Git, GitDirectories};
use crate::links;
use crate::private_common_dir::PrivateCommonDir;
use crate::process::StopFlag;
use crate::records::GitRecords;

/// A repository, seen from one of its checkouts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Repository {
    /// The top directory of the checkout.
    pub top: PathBuf,
    /// Git's directory of the checkout.
    pub git_dir: PathBuf,
    /// Git's directory that all checkouts share.
    pub common_dir: PathBuf,
    /// The path of the given directory inside the checkout; empty at the top.
    pub prefix: PathBuf,
    pub(crate) private_common_dir: PrivateCommonDir,
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
    pub fn of(dir: &Path, records: &GitRecords, stop: &StopFlag) -> WorktreeResult<Self> {
        path_text(dir)?;
        let args = [
            "rev-parse",
            "--is-inside-work-tree",
            "--path-format=absolute",
            "--show-toplevel",
            "--absolute-git-dir",
            "--git-common-dir",
            "--show-prefix",
        ];
        let output = Git::discovering(dir, stop).run(&args)?;
        let text = String::from_utf8_lossy(&output.stdout);
        // Git fails at the question for the top directory if there is none.
        if text.lines().next() == Some("false") {
            return Err(WorktreeError::BareRepository(dir.to_owned()));
        }
        if !output.status.success() {
            let error_text = git::error_text(&output);
            return Err(match error_text.contains("not a git repository") {
                true => WorktreeError::NotARepository(dir.to_owned()),
                false => git::git_failed(&args, &output),
            });
        }
        let lines: Vec<&str> = text.lines().collect();
        let [_, top, git_dir, common_dir, prefix] = lines[..] else {
            return Err(git::git_failed(&args, &output));
        };
        let resolved = |path: &str| Path::new(path).canonicalize().unwrap_or(PathBuf::from(path));
        let (top, git_dir, common_dir) = (PathBuf::from(top), resolved(git_dir), resolved(common_dir));
        // The configuration can name any directory as the work tree, and we would write there.
        if links::git_dir_of(&top).ok().as_ref() != Some(&git_dir) {
            return Err(WorktreeError::OtherWorkTree { dir: dir.to_owned(), top });
        }
        let private_common_dir = records.private_common_dir(&common_dir, stop)?;
        let prefix = PathBuf::from(prefix.trim_end_matches('/'));
        Ok(Self { top, git_dir, common_dir, prefix, private_common_dir })
    }

    /// Git in the checkout.
    pub(crate) fn git(&self, stop: &StopFlag) -> Git {
        let checkout = Checkout::new(self.top.clone(), self.git_dir.clone());
        checkout.git(&self.common_dir, &self.private_common_dir, stop)
    }

    /// Git in the directory that all checkouts share.
    pub(crate) fn common_git(&self, stop: &StopFlag) -> Git {
        common_git(&self.common_dir, &self.private_common_dir, stop)
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
        match ref_tip(&git, "refs/remotes/", name)? {
            Some(base) => Ok(WorktreeOrigin { repository: self, base, target: None }),
            None => Err(WorktreeError::NoBranch { name: name.to_owned(), repository: self.top }),
        }
    }
}

/// The commit of a local branch, if the branch exists.
pub(crate) fn branch_tip(git: &Git, name: &str) -> WorktreeResult<Option<String>> {
    ref_tip(git, "refs/heads/", name)
}

/// The commit of a ref, if it exists. The name is not interpreted: `main~1` is the name of no branch.
fn ref_tip(git: &Git, prefix: &str, name: &str) -> WorktreeResult<Option<String>> {
    if name.is_empty() || name.starts_with('-') || name.contains(char::is_control) {
        return Ok(None);
    }
    git.optional_text(&["show-ref", "--verify", "--hash", &format!("{prefix}{name}")])
}

/// A checkout of a repository: its files, and git's directory for it. Each leads to the other.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Checkout {
    pub(crate) path: PathBuf,
    pub(crate) git_dir: PathBuf,
}

impl Checkout {
    pub(crate) fn new(path: PathBuf, git_dir: PathBuf) -> Self {
        Self { path, git_dir }
    }

    /// Git in the checkout.
    pub(crate) fn git(&self, common_dir: &Path, private: &PrivateCommonDir, stop: &StopFlag) -> Git {
        let is_main = self.git_dir == common_dir;
        let directories = GitDirectories {
            git_dir: self.git_dir.clone(),
            private_common_dir: private.path.clone(),
            work_tree: Some(self.path.clone()),
            settings: if is_main { private.main_checkout_settings.clone() } else { Vec::new() },
        };
        Git::in_checkout(directories, stop)
    }

    /// The branch that is checked out, as `refs/heads/…`. Absent if the head is detached.
    pub(crate) fn branch(&self, git: &Git) -> WorktreeResult<Option<String>> {
        let head = links::read_regular_file(&self.git_dir.join("HEAD"), 4 << 10).unwrap_or_default();
        let head = String::from_utf8_lossy(&head);
        match head.trim_end().strip_prefix("ref: ") {
            // Git's newer format of refs keeps the head elsewhere.
            Some("refs/heads/.invalid") => git.optional_text(&["symbolic-ref", "--quiet", "HEAD"]),
            branch => Ok(branch.map(str::to_owned)),
        }
    }
}

/// Git in the directory that all checkouts share.
pub(crate) fn common_git(common_dir: &Path, private: &PrivateCommonDir, stop: &StopFlag) -> Git {
    let directories = GitDirectories {
        git_dir: common_dir.to_owned(),
        private_common_dir: private.path.clone(),
        work_tree: None,
        settings: private.main_checkout_settings.clone(),
    };
    Git::in_checkout(directories, stop)
}

/// The checkouts of a repository that exist. `known` is one that need not be found in the usual place. A directory that
/// does not lead back to the repository is not a checkout of it, whatever the repository says.
pub(crate) fn checkouts(common_dir: &Path, private: &PrivateCommonDir, known: &Path) -> Vec<Checkout> {
    let beside = common_dir.parent().filter(|_| !private.is_bare);
    let mut found = Vec::new();
    for path in beside.into_iter().chain([known]) {
        let git_dir = links::git_dir_of(path).ok().filter(|git_dir| git_dir == common_dir);
        let checkout = git_dir.map(|git_dir| Checkout::new(path.to_owned(), git_dir));
        found.extend(checkout.filter(|checkout| !found.contains(checkout)));
    }
    let Ok(entries) = fs::read_dir(common_dir.join("worktrees")) else { return found };
    found.extend(entries.flatten().filter_map(|entry| {
        let git_dir = entry.path().canonicalize().ok()?;
        let path = links::work_tree_of(&git_dir).ok()?;
        let is_linked =
            links::common_dir_of(&git_dir).ok()? == common_dir && links::git_dir_of(&path).ok()? == git_dir;
        is_linked.then(|| Checkout::new(path, git_dir))
    }));
    found
}

/// The path as text, if it can be passed to git, printed on one line and written as JSON.
pub(crate) fn path_text(path: &Path) -> WorktreeResult<&str> {
    let text = path.to_str().filter(|text| !text.contains(['\n', '\r', '\0']));
    text.ok_or_else(|| WorktreeError::BadPath(path.to_owned()))
}
