//! What a run says, as events `{"type":KIND,…}` and back. Text is `token` and the last event `complete`; the other
//! names are ours, and streamed words are always in `content`.

use qd_protocol::Usage;
use qd_protocol::event::PlanEntry;
use qd_protocol::link::Said;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::borrow::Cow;

/// Reads an event of any worker; `None` for one that means nothing to us, `complete` among them.
pub fn said(event: Map<String, Value>) -> Option<Said> {
    match serde_json::from_value(Value::Object(event)).ok()? {
        Event::Token { content } => Some(Said::Text { text: content.into_owned() }),
        Event::Thought { content } => Some(Said::Thought { text: content.into_owned() }),
        Event::ToolStarted { call_id, name, input } => Some(Said::ToolStarted {
            call_id: call_id.into_owned(),
            name: name.into_owned(),
            input: input.into_owned(),
        }),
        Event::ToolOutput { call_id, content } => {
            Some(Said::ToolOutput { call_id: call_id.into_owned(), text: content.into_owned() })
        }
        Event::ToolFinished { call_id, name, output, is_error } => Some(Said::ToolFinished {
            call_id: call_id.into_owned(),
            name: name.into_owned(),
            output: output.into_owned(),
            is_error,
        }),
        Event::Plan { entries } => Some(Said::Plan { entries: entries.into_owned() }),
        Event::Notice { content } => Some(Said::Notice { text: content.into_owned() }),
        Event::Usage(usage) => Some(Said::Usage { usage }),
        Event::Turn => Some(Said::Turn),
        Event::Complete => None,
    }
}

/// An event, as it travels.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(super) enum Event<'a> {
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
    Usage(Usage),
    Turn,
    Complete,
}

impl<'a> From<&'a Said> for Event<'a> {
    fn from(said: &'a Said) -> Self {
        match said {
            Said::Text { text } => Self::Token { content: text.into() },
            Said::Thought { text } => Self::Thought { content: text.into() },
            Said::ToolStarted { call_id, name, input } => {
                Self::ToolStarted { call_id: call_id.into(), name: name.into(), input: Cow::Borrowed(input) }
            }
            Said::ToolOutput { call_id, text } => {
                Self::ToolOutput { call_id: call_id.into(), content: text.into() }
            }
            Said::ToolFinished { call_id, name, output, is_error } => Self::ToolFinished {
                call_id: call_id.into(),
                name: name.into(),
                output: Cow::Borrowed(output),
                is_error: *is_error,
            },
            Said::Plan { entries } => Self::Plan { entries: entries.into() },
            Said::Notice { text } => Self::Notice { content: text.into() },
            Said::Usage { usage } => Self::Usage(*usage),
            Said::Turn => Self::Turn,
        }
    }
}

/// A frame with an event, which is not first made into a map.
#[derive(Debug, Serialize)]
#[serde(tag = "kind", rename = "event")]
pub(super) struct EventFrame<'a> {
    pub(super) event: Event<'a>,
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn everything_a_run_can_say_comes_back_as_it_was() {
        for what in [
            Said::Text { text: "a\n\"b\"".to_owned() },
            Said::Thought { text: "hm".to_owned() },
            Said::ToolStarted { call_id: "1".to_owned(), name: "ls".to_owned(), input: json!({"p": [1]}) },
            Said::ToolOutput { call_id: "1".to_owned(), text: "x".to_owned() },
            Said::ToolFinished {
                call_id: "1".to_owned(),
                name: "ls".to_owned(),
                output: json!("x"),
                is_error: true,
            },
            Said::Plan {
                entries: vec![PlanEntry { content: "do".to_owned(), status: "pending".to_owned() }],
            },
            Said::Notice { text: "look".to_owned() },
            Said::Usage { usage: Usage { input_tokens: 1, output_tokens: 2, cost_usd: 0.5 } },
            Said::Turn,
        ] {
            let Value::Object(event) = serde_json::to_value(Event::from(&what)).unwrap() else {
                panic!("an event is an object")
            };
            assert_eq!(said(event), Some(what));
        }
    }

    #[test]
    fn text_is_a_token_and_stands_in_its_frame() {
        let text = Said::Text { text: "hello ".to_owned() };
        let frame = serde_json::to_value(EventFrame { event: Event::from(&text) }).unwrap();
        assert_eq!(frame, json!({"kind": "event", "event": {"type": "token", "content": "hello "}}));
        let frame = serde_json::to_value(EventFrame { event: Event::Complete }).unwrap();
        assert_eq!(frame, json!({"kind": "event", "event": {"type": "complete"}}));
    }

    #[test]
    fn an_event_that_nobody_knows_means_nothing() {
        for event in [json!({"type": "complete"}), json!({"type": "news"}), json!({}), json!({"type": 7})] {
            let Value::Object(event) = event else { panic!("an event is an object") };
            assert_eq!(said(event), None);
        }
    }
}
