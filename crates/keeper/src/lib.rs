//! The keeper: a small process between a worker and its agent that supervises everything the agent starts. If a worker
//! is killed, its children would be adopted by pid 1; the keeper survives long enough to end them. Nothing here knows
//! about particular agents, sessions or their protocols.
//!
//! Layout, in reading order:
//! - `handle`: the worker's side, which starts a keeper and sends it commands.
//! - [`keeper_process`]: the keeper itself, a single thread around `poll`.
//! - `ledger`: which process belongs to the agent, to a turn, or was left running by one; pure.
//! - `escalation`: how processes are ended: SIGTERM, a grace period, SIGSTOP, SIGKILL, and another scan.
//! - `orphans`: the same escalation when no keeper is left.
//! - `kinship`: whether a process belongs to an agent.
//! - [`procfs`]: what the kernel reports about processes. `sandbox_support`: how this machine can confine agents.
//! - `tree_usage`: how many processes there are below one, and what memory they use.
//! - `confinement`: the sandbox that children are started in, if they are confined.
//! - `launch`: how a child is started. `wire`: the messages between worker and keeper. [`process_setup`]: what our own
//!   processes do first.

mod confinement;
mod escalation;
mod handle;
pub mod keeper_process;
mod kinship;
mod launch;
mod ledger;
mod orphans;
pub mod process_setup;
pub mod procfs;
mod sandbox_support;
mod tree_usage;
mod wire;

pub use handle::{ExitWatch, KeeperChild, KeeperError, KeeperHandle};
pub use kinship::{descends_from_agent, hosts_agents};
pub use orphans::{become_subreaper, end_orphans};
pub use procfs::ProcessIdentity;
pub use rustix::process::Signal;
pub use sandbox_support::probe_sandbox_support;
pub use tree_usage::{TreeUsage, machine_memory, tree_usage};
pub use wire::{ChildExit, LaunchSpec, SweepRequest, SweepResult, SweepScope};

/// The environment variable that marks everything an agent starts, so that it can be found when worker and keeper are
/// dead.
pub const MARK_VARIABLE: &str = "QD_MARK";
