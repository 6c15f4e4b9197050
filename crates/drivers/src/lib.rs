//! The drivers: one module per way to reach an agent. A driver turns one prompt into updates from its agent; when the
//! turn is stopped from outside, its future is dropped. Peculiarities of an agent are in its manifest: no driver knows
//! an agent by name. Nothing here knows a host or a spool, or of its session's link more than the output.
//!
//! Layout, in reading order:
//! - [`agent_driver`]: what every driver does; [`agent_launcher`]: which driver an agent has.
//! - [`turn`]: what a driver can send and receive during a turn; [`meter`]: what the turn has used.
//! - A module per driver: `echo`, `exec`, `acp`, `claude`, `codex`, `pty`, `a2a`, `peer`.
//! - Shared by drivers: `stdio_agent` (an agent that talks on its stdin and stdout), `process` (its process below the
//!   keeper), `line_transport` (its lines), `emit` (sends updates while the loop goes on), `turn_state` (updates and
//!   asks of one turn), `asks` (permission requests, questions and forms), `prompt_content` (the parts of a
//!   prompt), `mode_guard` (the mode that an agent must be in), `pricing` (the cost of tokens), `tool_server` (the tools of `qd mcp`), `dialer` (connections to remote
//!   agents).
//! - [`redact`]: removes secrets from what agents say, before anything is stored or sent.
//! - [`terminal_window`]: where an agent shows its terminal; [`tty`]: gives a program its terminal and becomes it.
//! - [`root_certificates`]: the certificates that outgoing TLS connections trust.
//! - Shared by the drivers' tests: `harness` and `recording`; `example_driver` is a template for a new driver.

mod a2a;
mod acp;
pub mod agent_driver;
pub mod agent_launcher;
mod asks;
mod claude;
mod codex;
mod dialer;
mod echo;
mod emit;
#[cfg(test)]
mod example_driver;
mod exec;
#[cfg(test)]
mod harness;
mod line_transport;
pub mod meter;
mod mode_guard;
mod peer;
mod policy_enforcement;
mod pricing;
mod process;
mod prompt_content;
mod pty;
mod quota_lines;
#[cfg(test)]
mod recording;
pub mod redact;
pub mod root_certificates;
pub mod silence;
mod stdio_agent;
pub mod terminal_window;
mod tool_gateway;
mod tool_server;
pub mod tty;
pub mod turn;
mod turn_state;

pub use self::process::own_program;
pub use self::pty::screen::TerminalSize;
pub use self::pty::shared_screen::{ScreenViewer, TerminalInput};
pub use self::tool_server::own_program_path;
