//! The keeper: a small process between a worker and its agent, in whose hands is everything that the agent starts. A
//! worker that is killed would lose its children to pid 1; the keeper outlives it for as long as it takes to end them.
//! Nothing here knows an agent, a session or a protocol of theirs.
//!
//! Layout, in reading order:
//! - `handle`: the worker's side, with which a keeper is started and told what to do.
//! - `process`: the keeper itself, a single thread around `poll`.
//! - `ledger`: which process belongs to the agent, to a turn, or was left by one; pure.
//! - `ladder`: how processes are ended: asked, given time, frozen, killed, looked for again.
//! - `orphans`: the same ladder where there is no keeper any more.
//! - `proc`: what the kernel says about processes.
//! - `launch`: how a child is started. `wire`: what worker and keeper say to each other. `own`: how our own processes
//!   begin.

mod escalation;
mod handle;
pub mod keeper_process;
mod launch;
mod ledger;
mod orphans;
pub mod process_setup;
pub mod procfs;
mod wire;

pub use handle::{ExitWatch, KeeperChild, KeeperError, KeeperHandle};
pub use orphans::{become_subreaper, end_orphans};
pub use procfs::ProcessIdentity;
pub use rustix::process::Signal;
pub use wire::{ChildExit, LaunchSpec, SweepRequest, SweepResult, SweepScope};

/// The variable in the environment of everything that an agent starts, by which it is found when worker and keeper are
/// dead.
pub const MARK_VARIABLE: &str = "QD_MARK";
