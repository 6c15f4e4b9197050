//! Confines an agent and everything that it starts, by namespaces of the Linux kernel. Inside, there are no other
//! processes, the daemon's home shows only what belongs to the agent's session, and nothing leads to the user's own
//! session. Nothing here knows agents or sessions.
//!
//! Layout, in reading order:
//! - `plan`: what is hidden and what stays, at each level.
//! - `launcher`: makes a sandbox and starts programs in it.
//! - `init`: the first process inside, which `qd __sandbox` runs; `mounts`: the files that it arranges.
//! - `confined_run`: one program in a sandbox of its own, for callers that cannot make one.
//! - `descriptor_passing`: open descriptors for another process.
//! - `id_map`: users and groups inside. `namespace`: which namespaces a process is in.
//! - `keyrings`: keys that the kernel holds. `probe`: what this machine can do. `error`: why it cannot. `kernel`: system calls.
//!
//! Design: docs/design/agents-are-confined.md

mod confined_run;
mod descriptor_passing;
mod error;
mod id_map;
mod init;
mod kernel;
mod keyrings;
mod launcher;
mod mounts;
mod namespace;
mod plan;
mod probe;

pub use confined_run::confined_command;
pub use descriptor_passing::{receive_with_descriptors, send_with_descriptors};
pub use error::SandboxError;
pub use init::{SANDBOX_COMMAND, main};
pub use launcher::{ConfinedProgram, Sandbox, restrict_own_scope};
pub use namespace::{PidNamespaceId, pid_namespaces_below_ours};
pub use plan::SandboxPlan;
pub use probe::probe_sandbox;
