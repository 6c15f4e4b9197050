//! Where a directory belongs, and what names mean there. A directory outside git stays one: nothing here makes a
//! repository.

use std::path::{Path, PathBuf};

use crate::error::{WorktreeError, WorktreeResult};
use crate::git::{self, Git};
use crate::process::StopFlag;

/// A repository with a checkout.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Repository {
    /// The top of the checkout that was asked from.
    pub top: PathBuf,
    /// What all its checkouts share.
    pub common_dir: PathBuf,
    /// Where in the checkout the directory is that was asked from; empty at the top.
    pub prefix: PathBuf,
}

/// Where a worktree begins.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WorktreeOrigin {
    /// The repository.
    pub repository: Repository,
    /// The commit.
    pub base: String,
    /// The branch that its work is to go into, unless told otherwise; none if it began from no branch.
    pub target: Option<String>,
}

impl Repository {
    /// The repository that holds a directory.
    pub fn of(dir: &Path, stop: &StopFlag) -> WorktreeResult<Self> {
        let git = Git::at(dir, stop);
        path_text(dir)?;
        let args = ["rev-parse", "--is-inside-work-tree"];
        let ended = git.run(&args)?;
        if !ended.status.success() {
            let said = git::error_text(&ended);
            return Err(match said.contains("not a git repository") {
                true => WorktreeError::NotARepository(dir.to_owned()),
                false => git::git_failed(&args, &ended),
            });
        }
        if ended.stdout.trim_ascii() != b"true" {
            return Err(WorktreeError::BareRepository(dir.to_owned()));
        }
        let path =
            |what: &str| git.output_text(&["rev-parse", "--path-format=absolute", what]).map(PathBuf::from);
        let prefix = git.output_text(&["rev-parse", "--show-prefix"])?;
        let prefix = PathBuf::from(prefix.trim_end_matches('/'));
        let common = path("--git-common-dir")?;
        let common = common.canonicalize().unwrap_or(common);
        Ok(Self { top: path("--show-toplevel")?, common_dir: common, prefix })
    }

    /// Git at its top.
    pub fn git(&self, stop: &StopFlag) -> Git {
        Git::at(&self.top, stop)
    }

    /// Where a worktree begins: at a branch, or at whatever is checked out now.
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
        // One that was fetched and never checked out is a fine place to begin, and nothing to merge into.
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

/// The commit of a local branch, if there is one of this name.
pub(crate) fn branch_tip(git: &Git, name: &str) -> WorktreeResult<Option<String>> {
    if !is_branch_name(git, name)? {
        return Ok(None);
    }
    let full = format!("refs/heads/{name}^{{commit}}");
    git.optional_text(&["rev-parse", "--verify", "--quiet", "--end-of-options", &full])
}

/// Whether a branch could have this name.
fn is_branch_name(git: &Git, name: &str) -> WorktreeResult<bool> {
    if name.is_empty() || name.starts_with('-') || name.contains(char::is_control) {
        return Ok(false);
    }
    git.exits_zero(&["check-ref-format", &format!("refs/heads/{name}")])
}

/// A checkout of a repository.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Checkout {
    pub(crate) path: PathBuf,
    /// Its branch, as `refs/heads/…`; none if it is at a commit alone.
    pub(crate) branch: Option<String>,
    /// Whether its directory is gone.
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

/// A path that can be said to git, in a line of an answer, and in JSON.
pub(crate) fn path_text(path: &Path) -> WorktreeResult<&str> {
    let text = path.to_str().filter(|text| !text.contains(['\n', '\r', '\0']));
    text.ok_or_else(|| WorktreeError::BadPath(path.to_owned()))
}
