//! How much of a journal an agent has filled: the size of what it said, counted from the events, so that a replay counts
//! the same.

use qd_protocol::event::{Ask, EventBody, ToolCallEvent};
use qd_protocol::limits::{JOURNAL_MB_MAX, SMALL_EVENT_BYTES};
use serde_json::Value;

use super::SessionState;

impl SessionState {
    /// Whether the agent has said as much as it may in this session.
    pub fn is_at_journal_limit(&self) -> bool {
        self.output_bytes >= self.journal_limit_mb() << 20
    }

    /// How many MiB the agent may say in this session.
    pub fn journal_limit_mb(&self) -> u64 {
        self.settings.limits.max_journal_mb.unwrap_or(JOURNAL_MB_MAX)
    }
}

/// The approximate size of an event that an agent caused; 0 for any other.
pub(super) fn agent_event_bytes(body: &EventBody) -> u64 {
    let bytes = match body {
        EventBody::TextDelta(delta) | EventBody::ThoughtDelta(delta) => delta.text.len(),
        EventBody::ToolStarted(call) | EventBody::ToolOutput(call) | EventBody::ToolFinished(call) => {
            tool_call_bytes(call)
        }
        EventBody::PlanUpdated(plan) => {
            plan.entries.iter().map(|entry| entry.content.len() + entry.status.len()).sum()
        }
        EventBody::NoticeShown(notice) => notice.text.len(),
        EventBody::AskOpened(opened) => ask_bytes(&opened.ask),
        EventBody::AskResolved(resolved) => ask_bytes(&resolved.ask),
        EventBody::UsageReported(_) | EventBody::TurnStarted(_) => 0,
        _ => return 0,
    };
    SMALL_EVENT_BYTES + bytes as u64
}

fn tool_call_bytes(call: &ToolCallEvent) -> usize {
    let values = call.input.iter().chain(&call.output).map(value_bytes).sum::<usize>();
    values + call.text.as_ref().map_or(0, String::len)
}

fn ask_bytes(ask: &Ask) -> usize {
    ask.prompt.len() + value_bytes(&ask.input) + ask.options.iter().map(String::len).sum::<usize>()
}

fn value_bytes(value: &Value) -> usize {
    match value {
        Value::String(text) => text.len(),
        Value::Array(items) => items.iter().map(|item| 1 + value_bytes(item)).sum(),
        Value::Object(fields) => fields.iter().map(|(key, field)| 4 + key.len() + value_bytes(field)).sum(),
        Value::Null | Value::Bool(_) | Value::Number(_) => size_of::<u64>(),
    }
}
