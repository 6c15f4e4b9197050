//! Git worktrees of sessions: made, looked at, compared, merged and removed. Git is called as a program; everything
//! here blocks, and callers that must not block put it on a thread of its own. Nothing here knows a daemon or a session:
//! a worktree is a directory, a branch, and the commit that it began from.
//!
//! Layout, in reading order:
//! - [`process`]: a program run to its end, within a limit, or stopped.
//! - [`git`]: git as that program, with nothing in its environment that could lead it astray.
//! - [`repository`]: where a directory belongs, and what its names mean.
//! - [`tree`]: a worktree made, made again, and found.
//! - [`standing`]: what would be lost with it, and how large it is.
//! - [`changes`]: what changed in it, down to the lines; [`overlap`]: where two changed the same.
//! - [`merge`]: its work brought into a branch, or nothing at all.
//! - [`remove`]: its end.
//! - [`hooks`], [`bring`]: what a project wants done in a new one, and which files it misses there.
//!
//! The rule above all others: what is not merged is not removed, and what fails leaves everything as it was.

pub mod changes;
mod error;
pub mod git;
pub mod git_worktree;
pub mod hooks;
pub mod ignored_files;
pub mod merge;
pub mod overlap;
pub mod process;
pub mod remove;
pub mod repository;
pub mod summary;

pub use error::{WorktreeError, WorktreeResult};
pub use git_worktree::{GitWorktree, WorktreePlan};
pub use process::StopFlag;
pub use repository::{Repository, WorktreeOrigin};
