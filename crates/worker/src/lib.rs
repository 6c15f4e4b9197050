//! The worker: the process that holds agents, and the drivers that talk to them. Everything an agent reports leaves
//! through a link. Nothing here touches the journal, and nothing here runs in the daemon's process.
//!
//! Layout, in reading order:
//! - [`host`]: the worker process: its sessions, and how a connection finds its session.
//! - [`join`]: the same on another machine, which dials the daemon instead of listening.
//! - `agent`: one agent from its start to its end; `agent_processes`: the processes it started.
//! - `turn`: what a driver can send and receive during a turn; `meter`: what the turn has used.
//! - `drivers`: one module per way to reach an agent; `agent_kind`: which of them an agent uses.
//! - `redact`: removes secrets before anything is stored or sent; `announcement`: how the daemon finds this process.
//! - `terminal_window`: serves people who watch an agent's terminal.
//! - [`executor()`]: the same agents behind the public worker SDK, for any client.
//! - [`process_log`]: how our processes write their logs.
//! - [`root_certificates`]: the certificates that outgoing TLS connections trust.
//! - [`script`]: the scripted agent, a process of its own; [`tty`]: gives a program its terminal and becomes it.

mod agent;
mod agent_kind;
mod agent_processes;
mod announcement;
mod drivers;
mod executor;
pub mod host;
pub mod join;
mod meter;
pub mod process_log;
mod redact;
pub mod root_certificates;
pub mod script;
mod terminal_window;
pub mod tty;
mod turn;

pub use executor::executor;
