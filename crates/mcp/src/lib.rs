//! The tools that Quarterdeck offers to agents and editors, as a Model Context Protocol server. The daemon implements
//! the tools. This crate has their descriptions for models, splits calls into short requests, and formats the
//! results. The same server runs on a process's stdio and at a path of the daemon.
//!
//! - [`tools`]: the tools as a model sees them.
//! - [`server`]: tool calls, carried out by a [`ToolBackend`].

pub mod server;
pub mod tools;

pub use server::{McpToolServer, ToolBackend};
pub use tools::ToolName;
