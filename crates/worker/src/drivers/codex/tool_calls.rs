//! The tool calls that are open: what is asked about them is judged by what is known here, and commands among them may
//! outlive their turn.

use std::collections::{HashMap, VecDeque};

use serde_json::Value;

use super::items::{CodexToolUse, mcp_tool_name};

/// Calls that are remembered at once; when there are more, the oldest is forgotten.
const CALLS_MAX: usize = 1024;
/// Calls that have begun and not ended.
#[derive(Debug, Default)]
pub(super) struct CodexToolCalls {
    by_id: HashMap<String, CodexToolCall>,
    /// In the order in which they began; may name some that have ended.
    order: VecDeque<String>,
}

/// One of them.
#[derive(Debug)]
pub(super) struct CodexToolCall {
    pub(super) tool: CodexToolUse,
    /// Whether it is a command, which may outlive its turn.
    pub(super) is_command: bool,
    pub(super) turn: String,
}

impl CodexToolCalls {
    /// One has begun.
    pub(super) fn insert(&mut self, id: &str, call: CodexToolCall) {
        while self.by_id.len() >= CALLS_MAX
            && let Some(oldest) = self.order.pop_front()
        {
            self.by_id.remove(&oldest);
        }
        self.by_id.insert(id.to_owned(), call);
        self.order.push_back(id.to_owned());
    }

    /// One has ended.
    pub(super) fn remove(&mut self, id: &str) {
        self.by_id.remove(id);
        if self.order.len() > 2 * CALLS_MAX {
            self.order.retain(|id| self.by_id.contains_key(id));
        }
    }

    /// The tool and its arguments.
    pub(super) fn tool_use(&self, id: &str) -> Option<&CodexToolUse> {
        self.by_id.get(id).map(|call| &call.tool)
    }

    /// The call of a server's tool with these arguments.
    pub(super) fn find_mcp_call(&self, server: &str, arguments: &Value) -> Option<&CodexToolUse> {
        let prefix = mcp_tool_name(server, "");
        let mut tools = self.by_id.values().map(|call| &call.tool);
        tools.find(|tool| tool.name.starts_with(&prefix) && tool.input == *arguments)
    }

    /// Whether a command of this turn goes on.
    pub(super) fn has_commands(&self, turn: &str) -> bool {
        self.by_id.values().any(|call| call.is_command && call.turn == turn)
    }

    /// Whether another turn than this one has left a command running, on purpose.
    pub(super) fn has_earlier_commands(&self, turn: &str) -> bool {
        self.by_id.values().any(|call| call.is_command && call.turn != turn)
    }

    /// Whether this is such a command.
    pub(super) fn is_earlier_command(&self, id: &str, turn: &str) -> bool {
        self.by_id.get(id).is_some_and(|call| call.is_command && call.turn != turn)
    }
}
