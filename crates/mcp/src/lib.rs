//! The tools that Quarterdeck gives to agents and editors, as a server of the Model Context Protocol. What a tool does
//! is the daemon's business: here is what a model is told of each, how long its call may last, and how the answer is
//! put. The same server stands on a process's stdio and at a path of the daemon.
//!
//! - [`tools`]: the tools, as a model sees them.
//! - [`server`]: calls of them, carried out by a [`Deck`].

pub mod server;
pub mod tools;

pub use server::{McpToolServer, ToolBackend};
pub use tools::ToolName;
