//! The open tool calls. Permission requests are judged by what is known here, and commands among the calls may outlive
//! their turn.

use std::collections::{HashMap, VecDeque};

use serde_json::Value;

use super::items::CodexToolUse;
use crate::tool_server::mcp_tool_name;

/// The most calls remembered; beyond that, the oldest is forgotten.
const CALLS_MAX: usize = 1024;
/// Calls that have started and not finished.
#[derive(Debug, Default)]
pub(super) struct CodexToolCalls {
    by_id: HashMap<String, CodexToolCall>,
    /// Call ids in the order of their start. May contain finished ones.
    order: VecDeque<String>,
}

/// An open tool call.
#[derive(Debug)]
pub(super) struct CodexToolCall {
    pub(super) tool: CodexToolUse,
    pub(super) is_command: bool,
    pub(super) turn: String,
}

impl CodexToolCalls {
    /// Adds a call that has started.
    pub(super) fn insert(&mut self, id: &str, call: CodexToolCall) {
        while self.by_id.len() >= CALLS_MAX
            && let Some(oldest) = self.order.pop_front()
        {
            self.by_id.remove(&oldest);
        }
        self.by_id.insert(id.to_owned(), call);
        self.order.push_back(id.to_owned());
    }

    /// Removes a call that has finished.
    pub(super) fn remove(&mut self, id: &str) {
        self.by_id.remove(id);
        if self.order.len() > 2 * CALLS_MAX {
            self.order.retain(|id| self.by_id.contains_key(id));
        }
    }

    pub(super) fn tool_use(&self, id: &str) -> Option<&CodexToolUse> {
        self.by_id.get(id).map(|call| &call.tool)
    }

    /// The open call of a tool of this MCP server with these arguments.
    pub(super) fn find_mcp_call(&self, server: &str, arguments: &Value) -> Option<&CodexToolUse> {
        let prefix = mcp_tool_name(server, "");
        let mut tools = self.by_id.values().map(|call| &call.tool);
        tools.find(|tool| tool.name.starts_with(&prefix) && tool.input == *arguments)
    }

    /// Whether a command of this turn is still running.
    pub(super) fn has_commands(&self, turn: &str) -> bool {
        self.by_id.values().any(|call| call.is_command && call.turn == turn)
    }

    /// Whether a turn other than this one left a command running on purpose.
    pub(super) fn has_earlier_commands(&self, turn: &str) -> bool {
        self.by_id.values().any(|call| call.is_command && call.turn != turn)
    }

    /// Whether this call is a command left running by another turn.
    pub(super) fn is_earlier_command(&self, id: &str, turn: &str) -> bool {
        self.by_id.get(id).is_some_and(|call| call.is_command && call.turn != turn)
    }
}
