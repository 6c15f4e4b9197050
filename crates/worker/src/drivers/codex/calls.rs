//! The tool calls that are open: what is asked about them is judged by what is known here, and commands among them may
//! outlive their turn.

use std::collections::{HashMap, VecDeque};

use serde_json::Value;

use super::items::{Tool, mcp_tool};

/// Calls that are remembered at once; when there are more, the oldest is forgotten.
const CALLS_MAX: usize = 1024;
/// Calls that have begun and not ended.
#[derive(Debug, Default)]
pub(super) struct Calls {
    list: HashMap<String, Call>,
    /// In the order in which they began; may name some that have ended.
    order: VecDeque<String>,
}

/// One of them.
#[derive(Debug)]
pub(super) struct Call {
    pub(super) tool: Tool,
    /// Whether it is a command, which may outlive its turn.
    pub(super) is_command: bool,
    pub(super) turn: String,
}

impl Calls {
    /// One has begun.
    pub(super) fn open(&mut self, id: &str, call: Call) {
        while self.list.len() >= CALLS_MAX
            && let Some(oldest) = self.order.pop_front()
        {
            self.list.remove(&oldest);
        }
        self.list.insert(id.to_owned(), call);
        self.order.push_back(id.to_owned());
    }

    /// One has ended.
    pub(super) fn close(&mut self, id: &str) {
        self.list.remove(id);
        if self.order.len() > 2 * CALLS_MAX {
            self.order.retain(|id| self.list.contains_key(id));
        }
    }

    /// The tool and its arguments.
    pub(super) fn get(&self, id: &str) -> Option<&Tool> {
        self.list.get(id).map(|call| &call.tool)
    }

    /// The call of a server's tool with these arguments.
    pub(super) fn of_server(&self, server: &str, arguments: &Value) -> Option<&Tool> {
        let prefix = mcp_tool(server, "");
        let mut tools = self.list.values().map(|call| &call.tool);
        tools.find(|tool| tool.name.starts_with(&prefix) && tool.input == *arguments)
    }

    /// Whether a command of this turn goes on.
    pub(super) fn has_commands(&self, turn: &str) -> bool {
        self.list.values().any(|call| call.is_command && call.turn == turn)
    }

    /// Whether another turn than this one has left a command running, on purpose.
    pub(super) fn has_left(&self, turn: &str) -> bool {
        self.list.values().any(|call| call.is_command && call.turn != turn)
    }

    /// Whether this is such a command.
    pub(super) fn was_left(&self, id: &str, turn: &str) -> bool {
        self.list.get(id).is_some_and(|call| call.is_command && call.turn != turn)
    }
}
