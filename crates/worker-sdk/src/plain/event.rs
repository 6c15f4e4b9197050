//! The updates of a run as JSON events `{"type":KIND,…}`, and back. Text is `token`, and the last event is `complete`;
//! the other names are ours. Streamed text is always in `content`.

use qd_protocol::TokenUsage;
use qd_protocol::event::{ContextUsage, PlanEntry};
use qd_protocol::link::TurnUpdate;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::borrow::Cow;

/// Parses an event of any worker. Returns `None` for events without a meaning for us, such as `complete`.
pub fn parse_event(event: Map<String, Value>) -> Option<TurnUpdate> {
    match serde_json::from_value(Value::Object(event)).ok()? {
        PlainEvent::Token { content } => Some(TurnUpdate::Text { text: content.into_owned() }),
        PlainEvent::Thought { content } => Some(TurnUpdate::Thought { text: content.into_owned() }),
        PlainEvent::ToolStarted { call_id, name, input } => Some(TurnUpdate::ToolStarted {
            call_id: call_id.into_owned(),
            name: name.into_owned(),
            input: input.into_owned(),
        }),
        PlainEvent::ToolOutput { call_id, content } => {
            Some(TurnUpdate::ToolOutput { call_id: call_id.into_owned(), text: content.into_owned() })
        }
        PlainEvent::ToolFinished { call_id, name, output, is_error } => Some(TurnUpdate::ToolFinished {
            call_id: call_id.into_owned(),
            name: name.into_owned(),
            output: output.into_owned(),
            is_error,
        }),
        PlainEvent::Plan { entries } => Some(TurnUpdate::Plan { entries: entries.into_owned() }),
        PlainEvent::Notice { content } => Some(TurnUpdate::notice(content.into_owned())),
        PlainEvent::Usage(usage) => Some(TurnUpdate::usage(usage)),
        PlainEvent::Turn => Some(TurnUpdate::ModelCall),
        PlainEvent::Mode { mode } => Some(TurnUpdate::Mode { mode: mode.into_owned() }),
        PlainEvent::Context(context) => Some(TurnUpdate::Context(context)),
        PlainEvent::Compacted { used_before } => Some(TurnUpdate::Compacted { used_before }),
        PlainEvent::Complete => None,
    }
}

/// An event as it is sent.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(super) enum PlainEvent<'a> {
    Token {
        content: Cow<'a, str>,
    },
    #[serde(alias = "reasoning_token")]
    Thought {
        content: Cow<'a, str>,
    },
    ToolStarted {
        call_id: Cow<'a, str>,
        #[serde(default)]
        name: Cow<'a, str>,
        #[serde(default)]
        input: Cow<'a, Value>,
    },
    ToolOutput {
        call_id: Cow<'a, str>,
        content: Cow<'a, str>,
    },
    ToolFinished {
        call_id: Cow<'a, str>,
        #[serde(default)]
        name: Cow<'a, str>,
        #[serde(default)]
        output: Cow<'a, Value>,
        #[serde(default)]
        is_error: bool,
    },
    Plan {
        entries: Cow<'a, [PlanEntry]>,
    },
    Notice {
        content: Cow<'a, str>,
    },
    Usage(TokenUsage),
    Turn,
    Mode {
        mode: Cow<'a, str>,
    },
    Context(ContextUsage),
    Compacted {
        #[serde(default, skip_serializing_if = "Option::is_none")]
        used_before: Option<u64>,
    },
    Complete,
}

impl<'a> From<&'a TurnUpdate> for PlainEvent<'a> {
    fn from(update: &'a TurnUpdate) -> Self {
        match update {
            TurnUpdate::Text { text } => Self::Token { content: text.into() },
            TurnUpdate::Thought { text } => Self::Thought { content: text.into() },
            TurnUpdate::ToolStarted { call_id, name, input } => {
                Self::ToolStarted { call_id: call_id.into(), name: name.into(), input: Cow::Borrowed(input) }
            }
            TurnUpdate::ToolOutput { call_id, text } => {
                Self::ToolOutput { call_id: call_id.into(), content: text.into() }
            }
            TurnUpdate::ToolFinished { call_id, name, output, is_error } => Self::ToolFinished {
                call_id: call_id.into(),
                name: name.into(),
                output: Cow::Borrowed(output),
                is_error: *is_error,
            },
            TurnUpdate::Plan { entries } => Self::Plan { entries: entries.into() },
            TurnUpdate::Notice { text, .. } => Self::Notice { content: text.into() },
            TurnUpdate::Usage { usage, .. } => Self::Usage(*usage),
            TurnUpdate::ModelCall => Self::Turn,
            TurnUpdate::Mode { mode } => Self::Mode { mode: mode.into() },
            TurnUpdate::Context(context) => Self::Context(*context),
            TurnUpdate::Compacted { used_before } => Self::Compacted { used_before: *used_before },
        }
    }
}

/// A frame with an event. It is serialized directly, without building a map first.
#[derive(Debug, Serialize)]
#[serde(tag = "kind", rename = "event")]
pub(super) struct PlainEventFrame<'a> {
    pub(super) event: PlainEvent<'a>,
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn everything_a_run_can_say_comes_back_as_it_was() {
        for update in [
            TurnUpdate::Text { text: "a\n\"b\"".to_owned() },
            TurnUpdate::Thought { text: "hm".to_owned() },
            TurnUpdate::ToolStarted {
                call_id: "1".to_owned(),
                name: "ls".to_owned(),
                input: json!({"p": [1]}),
            },
            TurnUpdate::ToolOutput { call_id: "1".to_owned(), text: "x".to_owned() },
            TurnUpdate::ToolFinished {
                call_id: "1".to_owned(),
                name: "ls".to_owned(),
                output: json!("x"),
                is_error: true,
            },
            TurnUpdate::Plan {
                entries: vec![PlanEntry { content: "do".to_owned(), status: "pending".to_owned() }],
            },
            TurnUpdate::notice("look".to_owned()),
            TurnUpdate::usage(TokenUsage { input_tokens: 1, output_tokens: 2, cost_usd: 0.5 }),
            TurnUpdate::ModelCall,
            TurnUpdate::Mode { mode: "plan".to_owned() },
            TurnUpdate::Context(ContextUsage { used: 1, size: 2 }),
            TurnUpdate::Compacted { used_before: Some(1) },
        ] {
            let Value::Object(event) = serde_json::to_value(PlainEvent::from(&update)).unwrap() else {
                panic!("an event is an object")
            };
            assert_eq!(parse_event(event), Some(update));
        }
    }

    #[test]
    fn text_is_a_token_and_stands_in_its_frame() {
        let text = TurnUpdate::Text { text: "hello ".to_owned() };
        let frame = serde_json::to_value(PlainEventFrame { event: PlainEvent::from(&text) }).unwrap();
        assert_eq!(frame, json!({"kind": "event", "event": {"type": "token", "content": "hello "}}));
        let frame = serde_json::to_value(PlainEventFrame { event: PlainEvent::Complete }).unwrap();
        assert_eq!(frame, json!({"kind": "event", "event": {"type": "complete"}}));
    }

    #[test]
    fn an_event_that_nobody_knows_means_nothing() {
        for event in [json!({"type": "complete"}), json!({"type": "news"}), json!({}), json!({"type": 7})] {
            let Value::Object(event) = event else { panic!("an event is an object") };
            assert_eq!(parse_event(event), None);
        }
    }
}
