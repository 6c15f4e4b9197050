//! The tools as a model sees them that knows nothing about Quarterdeck: name, purpose, arguments, and when to use
//! another tool. Nothing here performs a call.

use std::sync::Arc;

use qd_protocol::limits::{
    CHILDREN_MAX, DEPTH_MAX, TOOL_TEXT_MAX, TOOL_WAIT_S, TREE_SESSIONS_MAX, WAIT_MAX_S, WAITED_FOR_MAX,
};
use rmcp::model::{JsonObject, MetaObject, Tool, ToolAnnotations};
use serde_json::{Value, json};

/// The description of the whole server for models.
pub const INSTRUCTIONS: &str = "Quarterdeck runs AI coding agents side by side, each in a session of its own. With these \
tools you can start other agents on parts of your work, talk to them, wait for what they found, and ask a person. \
Start one with spawn_agent, go on with your own work, and collect the results with wait. `list` shows which agents \
there are.";

/// Metadata that tells Claude to load a tool at the start.
const ALWAYS_LOAD: &str = "anthropic/alwaysLoad";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ToolName {
    /// Starts an agent in a new session.
    SpawnAgent,
    /// Sends a message to a session.
    SendMessage,
    /// Waits for sessions to finish.
    Wait,
    /// Shows the state of a session.
    Status,
    /// Stops a session and all its descendants.
    Cancel,
    /// Asks a person a question.
    AskHuman,
    /// Lists the agents and the sessions.
    List,
}

impl ToolName {
    /// All tools, in the order in which they are listed.
    pub const ALL: [Self; 7] = [
        Self::SpawnAgent,
        Self::SendMessage,
        Self::Wait,
        Self::Status,
        Self::Cancel,
        Self::AskHuman,
        Self::List,
    ];

    pub fn as_str(self) -> &'static str {
        match self {
            Self::SpawnAgent => "spawn_agent",
            Self::SendMessage => "send_message",
            Self::Wait => "wait",
            Self::Status => "status",
            Self::Cancel => "cancel",
            Self::AskHuman => "ask_human",
            Self::List => "list",
        }
    }

    pub fn parse(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|tool| tool.as_str() == name)
    }

    /// Whether the tool changes nothing.
    pub fn is_read_only(self) -> bool {
        matches!(self, Self::Wait | Self::Status | Self::List)
    }

    /// The full description of the tool for models.
    pub fn describe(self) -> Tool {
        let tool = Tool::new(self.as_str(), self.description(), Arc::new(self.input_schema()));
        // Claude hides the tools of most servers behind a search. These are few, and a model that cannot see them
        // will not use them.
        let tool = tool.with_meta(MetaObject(JsonObject::from_iter([(ALWAYS_LOAD.to_owned(), json!(true))])));
        let hints = ToolAnnotations::with_title(self.title()).open_world(false);
        tool.with_annotations(match self {
            _ if self.is_read_only() => hints.read_only(true),
            Self::Cancel => hints.read_only(false).destructive(true).idempotent(true),
            _ => hints.read_only(false).destructive(false).idempotent(false),
        })
    }

    fn title(self) -> &'static str {
        match self {
            Self::SpawnAgent => "Start another agent",
            Self::SendMessage => "Message an agent",
            Self::Wait => "Wait for agents",
            Self::Status => "Look at an agent",
            Self::Cancel => "Stop an agent",
            Self::AskHuman => "Ask a person",
            Self::List => "List agents and sessions",
        }
    }

    fn description(self) -> String {
        match self {
            Self::SpawnAgent => format!(
                "Starts another AI agent on a task of its own and returns its session id at once; it works beside you. \
                 Use it to split work into parts that do not depend on each other, or to have something reviewed by \
                 fresh eyes. The agent knows nothing of your conversation: put everything it needs into `prompt`. \
                 Collect its result with `wait`, or pass \"wait\": true to get it in this call. It works in the same \
                 project directory as you, so two agents should not edit the same files at once unless they have \
                 worktrees. A session may have {CHILDREN_MAX} open sessions below it, a tree {TREE_SESSIONS_MAX}, and \
                 be {DEPTH_MAX} deep; what they cost counts against your budget. To go on with one that has finished, \
                 use send_message instead."
            ),
            Self::SendMessage => "Says something to an agent that you started. If it is idle, your message is its next \
                 task; if it is busy, it gets it when its turn has ended, or in the middle of the turn with \
                 \"steer\": true. Returns at once; collect what comes of it with `wait`."
                .to_owned(),
            Self::Wait => format!(
                "Waits until the given sessions have finished all they were asked, and returns their results: the last \
                 answer of each (at most {TOOL_TEXT_MAX} bytes), why it ended and what it cost. If that takes longer \
                 than `timeout_s`, it returns what there is so far with \"finished\": false; call it again then. Do not \
                 poll with `status` instead."
            ),
            Self::Status => "Shows one session: what it is doing, its last answer so far, what it asks of people, what \
                 it and the sessions below it have cost. Without `session`: your own session and your limits."
                .to_owned(),
            Self::Cancel => "Stops whatever an agent that you started is doing, and every agent below it, and drops what \
                 waits in their queues. The sessions stay open: send_message gives them something new."
                .to_owned(),
            Self::AskHuman => "Asks a person a question and waits for the answer. Use it when you cannot go on without a \
                 decision that is not yours to make: it interrupts somebody, and may take hours. With `options` the \
                 answer is one of them."
                .to_owned(),
            Self::List => "Lists the agents that spawn_agent can start, and the sessions that you can reach with their \
                 state."
                .to_owned(),
        }
    }

    fn input_schema(self) -> JsonObject {
        let session = |description: &str| json!({ "type": "string", "description": description });
        match self {
            Self::SpawnAgent => object_schema(
                json!({
                    "agent": session("Which agent: a name that `list` shows, such as \"claude\" or \"codex\"."),
                    "prompt": session("The task, complete in itself: the agent sees nothing of your conversation."),
                    "title": session("A short name for the session, by which it can be called later."),
                    "model": session("Which model, in the agent's own words. Leave out for its default."),
                    "policy": {
                        "type": "string", "enum": ["ask", "allow", "deny"],
                        "description": "What it may do without asking a person. Leave out for your own; it cannot be \
                            laxer than yours."
                    },
                    "worktree": {
                        "type": "boolean",
                        "description": "Whether it gets a git worktree and branch of its own, so that its edits do not \
                            meet yours."
                    },
                    "budget_usd": {
                        "type": "number", "minimum": 0,
                        "description": "Dollars that it and all below it may cost before they are stopped."
                    },
                    "sandbox": {
                        "type": "string", "enum": ["deck", "workspace"],
                        "description": "How strictly it is confined: `deck` keeps it from other processes and from \
                            Quarterdeck's own files, `workspace` also from writing outside the project. It is always \
                            confined at least as strictly as you."
                    },
                    "network": {
                        "type": "string", "enum": ["off"],
                        "description": "\"off\" leaves it without network."
                    },
                    "directory": session("The project directory, absolute. Only for callers outside any session; an \
                        agent's own project is its directory."),
                    "wait": {
                        "type": "boolean",
                        "description": "Whether to wait for the result in this call instead of returning at once."
                    },
                    "timeout_s": timeout_schema()
                }),
                &["agent", "prompt"],
            ),
            Self::SendMessage => object_schema(
                json!({
                    "to": session("The session: its id or its title."),
                    "text": session("What to say."),
                    "steer": {
                        "type": "boolean",
                        "description": "Whether a busy agent is to hear it in the middle of its turn. Not every agent \
                            can; then it is refused."
                    }
                }),
                &["to", "text"],
            ),
            Self::Wait => object_schema(
                json!({
                    "sessions": {
                        "type": "array", "minItems": 1, "maxItems": WAITED_FOR_MAX,
                        "items": session("A session: its id or its title.")
                    },
                    "timeout_s": timeout_schema()
                }),
                &["sessions"],
            ),
            Self::Status => {
                object_schema(json!({ "session": session("The session: its id or its title.") }), &[])
            }
            Self::Cancel => object_schema(
                json!({ "session": session("The session: its id or its title.") }),
                &["session"],
            ),
            Self::AskHuman => object_schema(
                json!({
                    "question": session("The question, with all that somebody needs who has not followed your work."),
                    "options": {
                        "type": "array", "maxItems": 100,
                        "items": { "type": "string" },
                        "description": "Answers to choose from. Leave out for an answer in the person's own words."
                    },
                    "ask_id": session("Only to go on waiting for a question that was asked before and not answered in \
                        time.")
                }),
                &["question"],
            ),
            Self::List => object_schema(json!({}), &[]),
        }
    }
}

fn timeout_schema() -> Value {
    json!({
        "type": "number", "minimum": 0, "maximum": WAIT_MAX_S,
        "description": format!("Seconds to wait at most; {TOOL_WAIT_S} unless given.")
    })
}

fn object_schema(properties: Value, required: &[&str]) -> JsonObject {
    let schema = json!({
        "type": "object", "properties": properties, "required": required, "additionalProperties": false
    });
    match schema {
        Value::Object(schema) => schema,
        _ => JsonObject::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_tool_is_found_by_its_name_and_says_what_it_takes() {
        for tool in ToolName::ALL {
            assert_eq!(ToolName::parse(tool.as_str()), Some(tool));
            let shown = tool.describe();
            assert!(shown.description.as_ref().is_some_and(|text| text.len() > 60), "{tool:?}");
            let properties = shown.input_schema["properties"].as_object().unwrap();
            for required in shown.input_schema["required"].as_array().unwrap() {
                assert!(properties.contains_key(required.as_str().unwrap()), "{tool:?} {required}");
            }
        }
        assert_eq!(ToolName::parse("rm"), None);
    }
}
