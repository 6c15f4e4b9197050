//! The JSON Schema of a fleet file, for editors. It accepts the same files as the parser.

use serde_json::{Value, json};

use crate::sections::{RETRY_MAX, SESSION_NAME_MAX};

/// The JSON Schema. A copy is checked in as `docs/fleet.schema.json`.
pub fn fleet_json_schema() -> Value {
    json!({
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A fleet of Quarterdeck",
        "type": "object",
        "additionalProperties": false,
        "required": ["fleet"],
        "properties": { "fleet": { "$ref": "#/$defs/fleet" } },
        "$defs": {
            "fleet": fleet_schema(),
            "session": session_schema(),
            "route": route_schema(),
            "permissions": permissions_schema()
        }
    })
}

fn fleet_schema() -> Value {
    json!({
        "type": "object",
        "additionalProperties": false,
        "required": ["sessions", "start"],
        "properties": {
            "task": { "description": "The task; `qd up --task` replaces it.", "type": "string" },
            "base_branch": { "description": "The branch that worktrees start from; not needed outside git.", "type": "string" },
            "permissions": { "$ref": "#/$defs/permissions" },
            "budget_usd": money_schema(),
            "timeout": seconds_schema(),
            "sandbox": sandbox_schema(),
            "network": network_schema(),
            "mentions": { "description": "Whether a last message with a line that begins with @NAME is sent to that session.", "type": "boolean" },
            "mode": { "description": "Accepted for compatibility with CAP.", "const": "static" },
            "sessions": {
                "type": "object",
                "minProperties": 1,
                "additionalProperties": false,
                "patternProperties": { session_name_pattern(): { "$ref": "#/$defs/session" } }
            },
            "start": one_or_more(json!({ "description": "A session that gets the task first.", "type": "string" })),
            "routes": { "type": "array", "items": { "$ref": "#/$defs/route" } }
        }
    })
}

fn session_schema() -> Value {
    json!({
        "type": "object",
        "additionalProperties": false,
        "oneOf": [{ "required": ["agent"] }, { "required": ["driver"] }, { "required": ["manifest"] }],
        "properties": {
            "agent": { "description": "A known agent, or acp:CMD, pty:CMD, exec:CMD, a2a:URL, worker:URL.", "type": "string" },
            "driver": { "description": "The same as agent.", "type": "string" },
            "manifest": { "description": "A file that describes the agent.", "type": "string" },
            "model": { "type": "string" },
            "mode": { "description": "A mode of the agent, such as plan.", "type": "string" },
            "system_prompt": { "type": "string" },
            "role": { "description": "The role of the session.", "type": "string" },
            "permissions": { "$ref": "#/$defs/permissions" },
            "max_turns": { "type": "integer", "minimum": 1 },
            "timeout": seconds_schema(),
            "budget_usd": money_schema(),
            "worktree": { "description": "Whether it works in a git worktree of its own; true by default if base_branch is given.", "type": "boolean" },
            "retry": { "description": "How many times a failed prompt is retried.", "type": "integer", "minimum": 0, "maximum": RETRY_MAX },
            "prompt": template_schema(),
            "mail": { "description": "How mail reaches it: as a prompt, or as a steer of the running turn.", "enum": ["prompt", "steer"] },
            "sandbox": sandbox_schema(),
            "network": network_schema()
        }
    })
}

fn route_schema() -> Value {
    json!({
        "type": "object",
        "additionalProperties": false,
        "required": ["when"],
        "oneOf": [{ "required": ["route_to"] }, { "required": ["fan_out"] }, { "required": ["collect"] }],
        "properties": {
            "when": one_or_more(json!({
                "description": "The end of a run: NAME.done, NAME.failed or NAME.cancelled. A list waits for all of them.",
                "type": "string",
                "pattern": "^.+\\.(done|failed|cancelled)$"
            })),
            "match": { "description": "A regular expression that the last message must match.", "type": "string" },
            "max": { "description": "How many times the route may fire; a cycle of routes needs it.", "type": "integer", "minimum": 1 },
            "prompt": template_schema(),
            "route_to": { "type": "string" },
            "fan_out": {
                "type": "object",
                "additionalProperties": false,
                "required": ["to"],
                "properties": {
                    "to": one_or_more(json!({ "type": "string" })),
                    "split": { "enum": ["broadcast", "by_subtask"] }
                }
            },
            "collect": { "const": "human" }
        }
    })
}

fn permissions_schema() -> Value {
    json!({
        "anyOf": [
            { "enum": ["ask", "allow", "deny", "bypass"] },
            {
                "type": "array",
                "items": {
                    "type": "object",
                    "additionalProperties": false,
                    "required": ["decision"],
                    "properties": {
                        "tool": { "type": "string" },
                        "match": { "type": "string" },
                        "decision": { "enum": ["ask", "allow", "deny"] },
                        "risk": { "enum": ["low", "medium", "high"] }
                    }
                }
            }
        ]
    })
}

fn sandbox_schema() -> Value {
    json!({
        "description": "How strongly agents are confined; a session's own level counts before the fleet's.",
        "enum": ["auto", "off", "deck", "workspace", false]
    })
}

/// An editor that follows YAML 1.1 means booleans by `on` and `off`.
fn network_schema() -> Value {
    json!({ "description": "Whether agents reach the network.", "enum": ["on", "off", true, false] })
}

fn seconds_schema() -> Value {
    json!({
        "description": "Seconds, or a number with s, m or h.",
        "anyOf": [{ "type": "number", "exclusiveMinimum": 0 }, { "type": "string", "pattern": "^[0-9.]+ *[smh]?$" }]
    })
}

fn money_schema() -> Value {
    json!({ "description": "US dollars.", "type": "number", "minimum": 0 })
}

fn template_schema() -> Value {
    json!({
        "description": "The prompt of a session. {{task}}, {{subtask}}, {{role}}, {{session}}, {{round}}, {{from.text}} and {{from.NAME.text}} are replaced by their values.",
        "type": "string"
    })
}

/// One item, or a list of different ones.
fn one_or_more(item: Value) -> Value {
    json!({ "anyOf": [item, { "type": "array", "items": item, "minItems": 1, "uniqueItems": true }] })
}

fn session_name_pattern() -> String {
    format!("^[A-Za-z0-9_][A-Za-z0-9_-]{{0,{}}}$", SESSION_NAME_MAX - 1)
}
