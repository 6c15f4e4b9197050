//! Git worktrees of sessions: creating, inspecting, comparing, merging and removing them. Git runs as a subprocess.
//! Everything here blocks; async callers run it on a thread. Nothing here knows about the daemon or sessions: a
//! worktree is a directory, a branch, and the commit it started from.
//!
//! Layout, in reading order:
//! - [`process`]: a subprocess with a time limit, which can be stopped.
//! - [`git`]: git as such a subprocess, isolated from the caller's environment and the repository's configuration.
//! - [`private_common_dir`]: the directory of ours from which git reads a repository's configuration.
//! - [`links`]: the files that connect a checkout with its repository. [`records`]: what they should say.
//! - [`repository`]: which repository a directory belongs to, and its branches and checkouts.
//! - [`git_worktree`]: creating a worktree, finishing one after a crash, and opening one.
//! - [`summary`]: the work that would be lost with a worktree, and its size.
//! - [`submodules`]: the same for the submodules in it. [`index_copy`]: a copy of its index, to which files are added.
//! - [`changes`]: the changes in a worktree, down to lines. [`overlap`]: where two worktrees changed the same lines.
//! - [`merge`]: merging a worktree's work into a branch, or changing nothing at all.
//! - [`remove`]: removing a worktree.
//! - [`hooks`]: a project's commands for new worktrees. [`ignored_files`]: ignored files to copy into them.
//!
//! The most important rule: unmerged work is removed only by force, and commits not even then. An operation that fails
//! leaves everything as it was.
//!
//! The second: an agent can write whatever is in its worktree and in the repository, and our git acts with the daemon's
//! rights. So no program that they name is run, and nothing that they say about their place is believed.
//!
//! Design: docs/design/git-reads-no-configuration-of-agents.md

pub mod changes;
mod error;
pub mod git;
pub mod git_worktree;
pub mod hooks;
pub mod ignored_files;
mod index_copy;
mod links;
pub mod merge;
pub mod overlap;
mod private_common_dir;
pub mod process;
mod records;
pub mod remove;
pub mod repository;
mod submodules;
pub mod summary;

pub use error::{WorktreeError, WorktreeResult};
pub use git_worktree::{GitWorktree, WorktreePlan};
pub use process::StopFlag;
pub use records::{GitRecords, WorktreeRecord};
pub use repository::{Repository, WorktreeOrigin};
