//! Agents, and the process that holds them. Everything an agent says leaves through a link; nothing here touches the
//! journal, and nothing here is part of the daemon's process.
//!
//! Layout, in reading order:
//! - [`host`]: the worker process: its sessions, and the way from a connection to one of them.
//! - [`join`]: the same on another machine, which dials the daemon instead.
//! - `agent`: the life of one agent, from its start to its end; `below`: what it started.
//! - `turn`: what a turn may say and hear, and the commands that wait for it; `meter`: what it has used.
//! - `drivers`: one room per way to reach an agent; `kinds`: which of them an agent is reached by.
//! - `redact`: secrets are taken out before anything is kept; `record`: how the process
//!   is found.
//! - `window`: where people look at an agent's terminal.
//! - `executor`: the same agents behind a worker that anybody may talk to.
//! - [`roots`]: whom a connection out of here by TLS trusts.
//! - [`script`]: the scripted agent, a process of its own; [`tty`]: the step before a program that wants a terminal.

mod agent;
mod agent_kind;
mod agent_processes;
mod announcement;
mod drivers;
mod executor;
pub mod host;
pub mod join;
mod meter;
mod redact;
pub mod root_certificates;
pub mod script;
mod terminal_window;
pub mod tty;
mod turn;

pub use executor::executor;
