//! The worker: the process that holds agents. The drivers that talk to them are in `qd-drivers`. Everything an agent
//! reports leaves through a link. Nothing here touches the journal, and nothing here runs in the daemon's process.
//!
//! Layout, in reading order:
//! - [`host`]: the worker process: its sessions, and how a connection finds its session.
//! - [`join`]: the same on another machine, which dials the daemon instead of listening.
//! - `agent`: one agent from its start to its end; `agent_processes`: the processes it started; `confined_keeper`: the
//!   sandbox that they are started in; `model_proxy`: the way to the model for an agent without network.
//! - `announcement`: how the daemon finds this process.
//! - `terminal_viewer`: serves people who watch an agent's terminal.
//! - [`executor()`]: the same agents behind the public worker SDK, for any client.
//! - [`process_log`]: how our processes write their logs.
//! - [`script`], [`tty`] and [`root_certificates`]: parts of the crates below, for the program that starts workers.

mod agent;
mod agent_processes;
mod agent_sandbox;
mod announcement;
mod confined_keeper;
mod executor;
pub mod host;
pub mod join;
mod model_proxy;
pub mod process_log;
mod terminal_viewer;

pub use executor::executor;
pub use qd_drivers::{root_certificates, tty};
pub use qd_script as script;
