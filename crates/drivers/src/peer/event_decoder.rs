//! What the events of a foreign worker mean. `qd-link` knows the event names of our contract; workers of the crate
//! `bamboo-subagent`, where these frames come from, have different names for tools and tokens. Unknown events are shown
//! as they are.

use std::collections::BTreeMap;

use qd_link::plain;
use qd_protocol::event::TokenUsage;
use qd_protocol::link::TurnUpdate;
use qd_protocol::text::escaped_head;
use serde::Deserialize;
use serde_json::{Map, Value, json};

/// The most unknown event kinds without text that are shown in a turn, each once: a worker may send one for every
/// internal step.
const UNKNOWN_KINDS_MAX: usize = 16;
/// The most bytes shown of an unknown event.
const UNKNOWN_SHOWN_MAX: usize = 300;
/// The most running tools whose names are remembered, for workers that do not repeat the name at the end.
const CALLS_MAX: usize = 256;

/// Decodes the events of one turn.
#[derive(Debug, Default)]
pub(super) struct PeerEventDecoder {
    /// Whether any text has arrived.
    pub(super) has_text: bool,
    /// Names of running tools, by call id.
    tool_names: BTreeMap<String, String>,
    /// Unknown event kinds that have been shown.
    shown_unknown_kinds: Vec<String>,
}

impl PeerEventDecoder {
    /// Decodes an event; `None` if there is nothing to show.
    pub(super) fn decode(&mut self, event: Map<String, Value>) -> Option<TurnUpdate> {
        let update = match ForeignPeerEvent::deserialize(&event) {
            Ok(foreign) => foreign.into_update()?,
            Err(_) => match plain::parse_event(event.clone()) {
                Some(update) => update,
                None => self.decode_unknown(event)?,
            },
        };
        Some(match update {
            TurnUpdate::ToolStarted { call_id, name, input } => {
                if self.tool_names.len() < CALLS_MAX {
                    self.tool_names.insert(call_id.clone(), name.clone());
                }
                TurnUpdate::ToolStarted { call_id, name, input }
            }
            TurnUpdate::ToolFinished { call_id, name, output, is_error } => {
                let known = self.tool_names.remove(&call_id).unwrap_or_default();
                let name = if name.is_empty() { known } else { name };
                TurnUpdate::ToolFinished { call_id, name, output, is_error }
            }
            TurnUpdate::Text { text } => {
                self.has_text |= !text.is_empty();
                TurnUpdate::Text { text }
            }
            other => other,
        })
    }

    /// An unknown event: its text if it has any, else the whole event, once per kind.
    fn decode_unknown(&mut self, mut event: Map<String, Value>) -> Option<TurnUpdate> {
        let kind = match event.remove("type") {
            Some(Value::String(kind)) => kind,
            _ => "event".to_owned(),
        };
        let text = ["content", "message", "text"].iter().find_map(|key| event.get(*key)?.as_str());
        if let Some(text) = text.filter(|text| !text.trim().is_empty()) {
            return Some(TurnUpdate::notice(format!("{kind}: {text}")));
        }
        if self.shown_unknown_kinds.len() >= UNKNOWN_KINDS_MAX || self.shown_unknown_kinds.contains(&kind) {
            return None;
        }
        let text = format!("{kind}: {}", Value::Object(event));
        self.shown_unknown_kinds.push(kind);
        Some(TurnUpdate::notice(escaped_head(&text, UNKNOWN_SHOWN_MAX).to_owned()))
    }
}

/// Events that workers of `bamboo-subagent` send under other names.
#[derive(Debug, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum ForeignPeerEvent {
    ToolStart {
        tool_call_id: String,
        tool_name: String,
        #[serde(default)]
        arguments: Value,
    },
    ToolToken {
        tool_call_id: String,
        content: String,
    },
    ToolComplete {
        tool_call_id: String,
        result: PeerToolResult,
    },
    ToolError {
        tool_call_id: String,
        error: String,
    },
    Complete {
        #[serde(default)]
        usage: Option<PeerTokenUsage>,
    },
}

#[derive(Debug, Deserialize)]
struct PeerToolResult {
    #[serde(default)]
    result: Value,
    #[serde(default = "default_true")]
    success: bool,
}

#[derive(Debug, Deserialize)]
struct PeerTokenUsage {
    #[serde(default)]
    prompt_tokens: u64,
    #[serde(default)]
    completion_tokens: u64,
}

impl From<PeerTokenUsage> for TokenUsage {
    fn from(tokens: PeerTokenUsage) -> Self {
        Self { input_tokens: tokens.prompt_tokens, output_tokens: tokens.completion_tokens, cost_usd: 0.0 }
    }
}

impl ForeignPeerEvent {
    fn into_update(self) -> Option<TurnUpdate> {
        Some(match self {
            Self::ToolStart { tool_call_id, tool_name, arguments } => {
                TurnUpdate::ToolStarted { call_id: tool_call_id, name: tool_name, input: arguments }
            }
            Self::ToolToken { tool_call_id, content } => {
                TurnUpdate::ToolOutput { call_id: tool_call_id, text: content }
            }
            Self::ToolComplete { tool_call_id, result: PeerToolResult { result, success } } => {
                TurnUpdate::ToolFinished {
                    call_id: tool_call_id,
                    name: String::new(),
                    output: result,
                    is_error: !success,
                }
            }
            Self::ToolError { tool_call_id, error } => TurnUpdate::ToolFinished {
                call_id: tool_call_id,
                name: String::new(),
                output: json!(error),
                is_error: true,
            },
            Self::Complete { usage } => TurnUpdate::usage(usage?.into()),
        })
    }
}

fn default_true() -> bool {
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decode(decoder: &mut PeerEventDecoder, event: Value) -> Option<TurnUpdate> {
        let Value::Object(event) = event else { panic!("an event is an object") };
        decoder.decode(event)
    }

    #[test]
    fn the_other_names_for_tools_are_known() {
        let mut decoder = PeerEventDecoder::default();
        for (event, expected) in [
            (
                json!({"type": "tool_start", "tool_call_id": "c", "tool_name": "Bash", "arguments": {"command": "ls"}}),
                TurnUpdate::ToolStarted {
                    call_id: "c".to_owned(),
                    name: "Bash".to_owned(),
                    input: json!({"command": "ls"}),
                },
            ),
            (
                json!({"type": "tool_token", "tool_call_id": "c", "content": "x"}),
                TurnUpdate::ToolOutput { call_id: "c".to_owned(), text: "x".to_owned() },
            ),
            (
                json!({"type": "tool_complete", "tool_call_id": "c", "result": {"success": true, "result": "x"}}),
                TurnUpdate::ToolFinished {
                    call_id: "c".to_owned(),
                    name: "Bash".to_owned(),
                    output: json!("x"),
                    is_error: false,
                },
            ),
            (
                json!({"type": "tool_error", "tool_call_id": "d", "error": "no"}),
                TurnUpdate::ToolFinished {
                    call_id: "d".to_owned(),
                    name: String::new(),
                    output: json!("no"),
                    is_error: true,
                },
            ),
            (
                json!({"type": "reasoning_token", "content": "hm"}),
                TurnUpdate::Thought { text: "hm".to_owned() },
            ),
        ] {
            assert_eq!(decode(&mut decoder, event), Some(expected));
        }
        assert!(!decoder.has_text);
    }

    #[test]
    fn the_last_event_reports_only_usage() {
        let mut decoder = PeerEventDecoder::default();
        assert_eq!(decode(&mut decoder, json!({"type": "complete"})), None);
        let usage = json!({"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7});
        let expected = TokenUsage { input_tokens: 3, output_tokens: 4, cost_usd: 0.0 };
        assert_eq!(
            decode(&mut decoder, json!({"type": "complete", "usage": usage})),
            Some(TurnUpdate::usage(expected))
        );
    }

    #[test]
    fn unknown_events_are_shown_and_those_without_text_only_once() {
        let mut decoder = PeerEventDecoder::default();
        let notice = |text: &str| Some(TurnUpdate::notice(text.to_owned()));
        for _ in 0..2 {
            let event = json!({"type": "warning", "message": "disk full"});
            assert_eq!(decode(&mut decoder, event), notice("warning: disk full"));
        }
        let beat = json!({"type": "heartbeat", "n": 1});
        assert_eq!(decode(&mut decoder, beat.clone()), notice(r#"heartbeat: {"n":1}"#));
        assert_eq!(decode(&mut decoder, beat), None);
        assert_eq!(decode(&mut decoder, json!({"type": 7})), notice("event: {}"));
        for n in 0..2 * UNKNOWN_KINDS_MAX {
            let update = decode(&mut decoder, json!({"type": format!("kind{n}"), "x": "y".repeat(1000)}));
            if let Some(TurnUpdate::Notice { text, .. }) = update {
                assert!(text.len() <= UNKNOWN_SHOWN_MAX);
            }
        }
        assert_eq!(decoder.shown_unknown_kinds.len(), UNKNOWN_KINDS_MAX);
    }

    #[test]
    fn text_is_noticed() {
        let mut decoder = PeerEventDecoder::default();
        assert_eq!(
            decode(&mut decoder, json!({"type": "token", "content": ""})),
            Some(TurnUpdate::Text { text: String::new() })
        );
        assert!(!decoder.has_text);
        decode(&mut decoder, json!({"type": "token", "content": "x"}));
        assert!(decoder.has_text);
    }
}
