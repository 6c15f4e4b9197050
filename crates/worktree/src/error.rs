//! Errors of worktree operations. A message says what prevents the operation and what to do about it, and includes
//! git's own error text where there is one.

use std::io;
use std::path::{Path, PathBuf};

use qd_protocol::worktree::{MergeConflict, WorktreeStatus};

pub type WorktreeResult<T> = std::result::Result<T, WorktreeError>;

#[derive(Debug, thiserror::Error)]
pub enum WorktreeError {
    #[error("git could not be started ({0}); install it, or add it to the daemon's PATH")]
    NoGit(io::Error),
    /// The directory is in no repository. We do not create one: that is the user's decision.
    #[error(
        "{0} is not in a git repository, so sessions there cannot have worktrees; leave `worktree` out, or run \
         `git init` there and commit something"
    )]
    NotARepository(PathBuf),
    /// The directory belongs to a repository without a checkout.
    #[error("{0} belongs to a bare git repository; use a directory of a checkout")]
    BareRepository(PathBuf),
    /// The repository has no commits.
    #[error("the repository at {0} has no commit to start a worktree from; commit something first")]
    NoCommit(PathBuf),
    #[error("there is no branch `{name}` in {repository}; `git branch --list` shows the existing ones")]
    NoBranch { name: String, repository: PathBuf },
    /// The worktree did not start from a branch, so there is no default branch to merge into.
    #[error("the worktree did not start from a branch; name the branch to merge into")]
    NoTarget,
    /// The path cannot be passed to git or written as JSON.
    #[error("{0} cannot be the path of a worktree; it must be UTF-8 without line breaks")]
    BadPath(PathBuf),
    /// Something else is at the path of the worktree.
    #[error("{path} is in the way: {reason}; check its content and move it away")]
    PathOccupied {
        path: PathBuf,
        /// What is there.
        reason: String,
    },
    /// The session's branch is checked out elsewhere.
    #[error("the branch {branch} is checked out at {path}; check out another branch there")]
    BranchInUse {
        branch: String,
        /// The other checkout.
        path: PathBuf,
    },
    #[error("there is no worktree at {0}; it is created when the session's agent first starts")]
    NoWorktree(PathBuf),
    /// What connects a worktree with its repository is no longer as we made it.
    #[error(
        "{file} was changed: it {found}, and should lead to {expected}; nothing was done with the worktree. If the work in \
         it is yours, write `{expected_text}` into {file}"
    )]
    Changed {
        /// The file that was changed.
        file: PathBuf,
        /// What is there now; fits after "it".
        found: String,
        /// Where the file should lead.
        expected: PathBuf,
        /// The content that the file should have.
        expected_text: String,
    },
    /// A repository's configuration names another directory as its work tree.
    #[error(
        "git takes {top} for the work tree of {dir}, but {top}/.git does not lead to its repository; check `core.worktree` \
         there"
    )]
    OtherWorkTree { dir: PathBuf, top: PathBuf },
    /// The index of a worktree names files outside it.
    #[error(
        "the index of {worktree} names `{path}`, which is not a file of the worktree; run `git reset` there, or remove \
         the worktree"
    )]
    IndexLeadsOut { worktree: PathBuf, path: String },
    /// The repository has a format that could change what our commands do.
    #[error("the repository at {repository} has the extension `{extension}`, which is not supported")]
    UnknownExtension { repository: PathBuf, extension: String },
    /// Git has no name or email address to commit with.
    #[error(
        "git has no identity to commit with; set it with `git config --global user.name NAME` and \
         `git config --global user.email ADDRESS`"
    )]
    NoIdentity,
    /// The worktree contains another repository, whose files a commit would not include.
    #[error(
        "{0} in the session's worktree is a separate git repository, and a commit would not include its files; \
         remove its `.git`, or commit it as a submodule"
    )]
    EmbeddedRepository(String),
    /// A worktree or checkout has an unfinished operation, such as a merge.
    #[error("{path} is in the middle of {operation}; finish or abort it there")]
    Unfinished {
        path: PathBuf,
        /// The operation, such as "a rebase".
        operation: &'static str,
    },
    /// The target branch is checked out with uncommitted changes.
    #[error(
        "`{branch}` is checked out at {path}, which has uncommitted changes in {}; commit or stash \
         them, or merge into another branch",
        count_files(*.count)
    )]
    CheckoutDirty {
        branch: String,
        path: PathBuf,
        /// The number of files with changes.
        count: usize,
    },
    /// The branch moved during the merge, or git refused to move it.
    #[error(
        "`{branch}` was changed meanwhile or could not be moved: {detail}; nothing was merged, try again"
    )]
    BranchMoved {
        branch: String,
        /// Git's error text.
        detail: String,
    },
    /// The worktree and the branch changed the same lines.
    #[error("{}; nothing was changed", in_conflict(.into, .conflicts))]
    Conflicts { into: String, conflicts: Vec<MergeConflict> },
    /// The worktree contains work that is nowhere else.
    #[error("{}", unmerged(.path, *.state, *.changed_files, *.ahead))]
    Unmerged {
        path: PathBuf,
        state: WorktreeStatus,
        /// Files with uncommitted changes.
        changed_files: u64,
        /// Commits that are not merged.
        ahead: u64,
    },
    /// A hook of the project failed.
    #[error("`{line}` failed in {}: {detail}", path.display())]
    HookFailed {
        /// The hook's command line.
        line: String,
        /// The directory in which it ran.
        path: PathBuf,
        /// The exit status and the end of the output.
        detail: String,
    },
    /// A pattern of ignored files to copy is not valid.
    #[error("the `bring` pattern `{pattern}` cannot be used: {reason}")]
    BadPattern { pattern: String, reason: String },
    #[error("`{command}` was stopped because it did not finish within {seconds} s")]
    TimedOut {
        /// The command.
        command: String,
        seconds: u64,
    },
    /// The caller cancelled the operation.
    #[error("the operation was cancelled")]
    Stopped,
    /// A git command failed.
    #[error("`git {command}` failed: {detail}")]
    GitFailed {
        /// The subcommand and its first argument.
        command: String,
        /// Git's error text.
        detail: String,
    },
    #[error("could not {action} {path}: {source}")]
    Io {
        /// The attempted action; fits after "could not" and before the path.
        action: &'static str,
        path: PathBuf,
        source: io::Error,
    },
}

/// Converts an I/O error on a path.
pub(crate) fn io_error_at(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> WorktreeError {
    move |source| WorktreeError::Io { action, path: path.to_owned(), source }
}

fn in_conflict(into: &str, conflicts: &[MergeConflict]) -> String {
    let names: Vec<&str> = conflicts.iter().map(|conflict| conflict.path.as_str()).take(5).collect();
    let more = conflicts.len().saturating_sub(names.len());
    let more = if more == 0 { String::new() } else { format!(" and {more} more") };
    format!("the merge conflicts with `{into}` in {}{more}", names.join(", "))
}

/// `1 file`, `2 files`.
fn count_files(count: usize) -> String {
    match count {
        1 => "1 file".to_owned(),
        count => format!("{count} files"),
    }
}

fn unmerged(path: &Path, state: WorktreeStatus, changed: u64, ahead: u64) -> String {
    let path = path.display();
    match state {
        WorktreeStatus::Dirty => {
            let files = count_files(usize::try_from(changed).unwrap_or(usize::MAX));
            format!("{path} has uncommitted changes in {files}")
        }
        WorktreeStatus::Ahead if ahead == 1 => format!("{path} has 1 commit that is not merged"),
        WorktreeStatus::Ahead => format!("{path} has {ahead} commits that are not merged"),
        _ => format!("{path} may contain unmerged work: its repository is missing or does not respond"),
    }
}
