//! Why something could not be done with a worktree. A message says what stands in the way and what to do about it; where
//! git said something, its words are in it.

use std::io;
use std::path::{Path, PathBuf};

use qd_protocol::worktree::{MergeConflict, WorktreeStatus};

/// What may go wrong.
pub type WorktreeResult<T> = std::result::Result<T, WorktreeError>;

/// Why something could not be done.
#[derive(Debug, thiserror::Error)]
pub enum WorktreeError {
    /// There is no git.
    #[error("git could not be started ({0}); install it, or put it on the PATH of the daemon")]
    NoGit(io::Error),
    /// No repository holds this directory. None is made: that is not ours to decide.
    #[error(
        "{0} is not in a git repository, so it has no worktrees; leave `worktree` out, or run `git init` there \
         and commit something"
    )]
    NotARepository(PathBuf),
    /// There is a repository, but no checkout.
    #[error("{0} belongs to a git repository without a checkout; use a directory that is checked out")]
    BareRepository(PathBuf),
    /// Nothing was ever committed.
    #[error("the repository at {0} has no commit to begin a worktree from; commit something first")]
    NoCommit(PathBuf),
    /// No branch has this name.
    #[error("there is no branch `{name}` in {repository}; `git branch --list` shows those that are there")]
    NoBranch {
        /// The name.
        name: String,
        /// Where it was looked for.
        repository: PathBuf,
    },
    /// A worktree began from no branch, so there is none to merge into.
    #[error("the worktree began from no branch, so say which one to merge into")]
    NoTarget,
    /// A path that cannot be said in JSON or to git.
    #[error("{0} has a name that cannot be used for a worktree; it is to be UTF-8 on one line")]
    BadPath(PathBuf),
    /// Something else is where the worktree belongs.
    #[error("{path} is in the way: {why}; look at it and move it away")]
    PathOccupied {
        /// The place.
        path: PathBuf,
        /// What it is.
        why: String,
    },
    /// The session's branch is checked out somewhere else.
    #[error("the branch {branch} is checked out at {path}; check out another one there")]
    BranchInUse {
        /// The branch.
        branch: String,
        /// Where.
        path: PathBuf,
    },
    /// There is no worktree there.
    #[error("there is no worktree at {0}; it is made when its session's agent is first started")]
    NoWorktree(PathBuf),
    /// Nobody to commit in the name of.
    #[error(
        "git does not know in whose name to commit; say it with `git config --global user.name NAME` and \
         `git config --global user.email ADDRESS`"
    )]
    NoIdentity,
    /// A repository inside the worktree, whose files a commit would not hold.
    #[error(
        "{0} in the session's worktree is a git repository of its own, and a commit would not hold its files; \
         remove its `.git`, or commit it as a submodule"
    )]
    EmbeddedRepository(String),
    /// The worktree is in the middle of something.
    #[error("{path} is in the middle of {what}; finish it there or abort it")]
    Unfinished {
        /// The worktree or checkout.
        path: PathBuf,
        /// What.
        what: &'static str,
    },
    /// The branch is checked out where something is not committed.
    #[error(
        "`{branch}` is checked out at {path}, where {count} files have changes that are not committed; commit or \
         stash them, or merge into another branch"
    )]
    CheckoutDirty {
        /// The branch.
        branch: String,
        /// Where.
        path: PathBuf,
        /// How many.
        count: usize,
    },
    /// The branch moved while we worked.
    #[error("`{branch}` has moved meanwhile, or cannot be moved: {said}; nothing was merged, try again")]
    BranchMoved {
        /// The branch.
        branch: String,
        /// In git's words.
        said: String,
    },
    /// Two sides changed the same.
    #[error("{}; nothing was changed", in_conflict(.into, .conflicts))]
    Conflicts {
        /// The branch.
        into: String,
        /// The files.
        conflicts: Vec<MergeConflict>,
    },
    /// It holds work that is nowhere else.
    #[error("{}", unmerged(.path, *.state, *.changed_files, *.ahead))]
    Unmerged {
        /// The worktree.
        path: PathBuf,
        /// How it stands.
        state: WorktreeStatus,
        /// Files that are not committed.
        changed_files: u64,
        /// Commits that are not merged.
        ahead: u64,
    },
    /// A line of a project's file failed.
    #[error("`{line}` failed in {}: {said}", path.display())]
    HookFailed {
        /// The line.
        line: String,
        /// Where it ran.
        path: PathBuf,
        /// How it ended, and its last words.
        said: String,
    },
    /// A pattern of files to bring along cannot be used.
    #[error("`{pattern}` cannot be brought along: {why}")]
    BadPattern {
        /// The pattern.
        pattern: String,
        /// Why not.
        why: String,
    },
    /// It took too long.
    #[error("`{what}` had not ended after {seconds} s and was stopped")]
    TimedOut {
        /// The command.
        what: String,
        /// The limit.
        seconds: u64,
    },
    /// Whoever wanted it does not want it any more.
    #[error("it was stopped before it was done")]
    Stopped,
    /// Git did not do it.
    #[error("`git {what}` failed: {said}")]
    GitFailed {
        /// The command's name and first words.
        what: String,
        /// In git's words.
        said: String,
    },
    /// The disk said no.
    #[error("could not {action} {path}: {source}")]
    Io {
        /// What was tried.
        action: &'static str,
        /// On what.
        path: PathBuf,
        /// Why it failed.
        source: io::Error,
    },
}

/// What the disk said of a path.
pub(crate) fn io_error_at(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> WorktreeError {
    move |source| WorktreeError::Io { action, path: path.to_owned(), source }
}

fn in_conflict(into: &str, conflicts: &[MergeConflict]) -> String {
    let names: Vec<&str> = conflicts.iter().map(|one| one.path.as_str()).take(5).collect();
    let more = conflicts.len().saturating_sub(names.len());
    let more = if more == 0 { String::new() } else { format!(" and {more} more") };
    format!("it conflicts with `{into}` in {}{more}", names.join(", "))
}

fn unmerged(path: &Path, state: WorktreeStatus, changed: u64, ahead: u64) -> String {
    let path = path.display();
    match state {
        WorktreeStatus::Dirty => format!("{path} has {changed} files with changes that are not committed"),
        WorktreeStatus::Ahead => format!("{path} has {ahead} commits that are not merged"),
        _ => format!("nobody can tell whether {path} holds work, because its repository does not answer"),
    }
}
