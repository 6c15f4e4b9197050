//! The messages of the protocol: one JSON object per line, in both directions. Only the fields that the driver needs
//! are read; unknown fields and lines of an unknown type are ignored.

use qd_protocol::Millis;
use serde::Deserialize;
use serde_json::{Value, json};

/// A message from the agent.
#[derive(Debug)]
pub(super) enum ClaudeMessage {
    /// An event from the model's streaming API.
    StreamEvent { event: Value, by_subagent: bool },
    /// A whole message of the model, or one block of it.
    Assistant { line: Value, by_subagent: bool },
    /// The content of a user message, which includes tool results.
    User { content: Value },
    /// A message from the program itself.
    System { subtype: String, line: Value },
    /// The quota of the account is exhausted.
    QuotaExhausted { resets_at: Option<Millis> },
    /// The end of a turn.
    Result(Box<ClaudeTurnResult>),
    /// A report on a message that we sent.
    Lifecycle { uuid: String, state: ClaudeCommandState },
    /// A request that needs a response from us.
    ControlRequest { id: String, request: Value },
    /// The agent no longer waits for the response to its request.
    ControlCancelled { id: String },
    /// The response to a control request of ours.
    ControlResponse { id: String, answer: Result<Value, String> },
    /// A message that the driver does not need.
    Other,
}

/// The state of a message that we sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ClaudeCommandState {
    Queued,
    /// The agent works on it, in a turn of its own or as part of a running one.
    Started,
    Completed,
    /// The message was dropped, or its turn was interrupted.
    Cancelled,
}

/// The result with which the agent ends a turn.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct ClaudeTurnResult {
    pub(super) subtype: String,
    pub(super) is_error: bool,
    pub(super) result: Option<String>,
    pub(super) errors: Vec<String>,
    pub(super) stop_reason: Option<String>,
    pub(super) terminal_reason: Option<String>,
    pub(super) api_error_status: Option<u16>,
    /// The messages that this result ends. Empty in older versions, and for a turn that the agent started on its own.
    pub(super) user_message_uuids: Vec<String>,
    /// The total of the conversation. A resumed conversation starts with the total that the previous process saved, if
    /// it could.
    pub(super) total_cost_usd: Option<f64>,
    pub(super) usage: Value,
    /// Per model, since the process started.
    #[serde(rename = "modelUsage")]
    pub(super) model_usage: serde_json::Map<String, Value>,
    /// Per model, since the previous result. Correct in a resumed conversation, too.
    pub(super) model_usage_since_last_result: Option<serde_json::Map<String, Value>>,
}

impl ClaudeMessage {
    /// Parses a line. `None` if it is not a message at all.
    pub(super) fn parse(line: &[u8]) -> Option<Self> {
        let mut line: Value = serde_json::from_slice(line).ok()?;
        let kind = line.get("type")?.as_str()?.to_owned();
        let by_subagent = line["parent_tool_use_id"].is_string();
        Some(match kind.as_str() {
            "stream_event" => Self::StreamEvent { event: line["event"].take(), by_subagent },
            "assistant" => Self::Assistant { line, by_subagent },
            "user" => Self::User { content: line["message"]["content"].take() },
            "system" => {
                let subtype = line["subtype"].as_str().unwrap_or_default().to_owned();
                Self::System { subtype, line }
            }
            // Every model call is followed by one. Only a rejected call says that nothing more will be answered.
            "rate_limit_event" if line["rate_limit_info"]["status"] == "rejected" => {
                let seconds = line["rate_limit_info"]["resetsAt"].as_u64();
                Self::QuotaExhausted {
                    resets_at: seconds.map(|seconds| Millis(seconds.saturating_mul(1000))),
                }
            }
            // A result that cannot be parsed still ends its turn.
            "result" => Self::Result(Box::new(parse_result(line))),
            "command_lifecycle" => {
                let state = match line["state"].as_str() {
                    Some("queued") => ClaudeCommandState::Queued,
                    Some("started") => ClaudeCommandState::Started,
                    Some("completed") => ClaudeCommandState::Completed,
                    Some("cancelled") => ClaudeCommandState::Cancelled,
                    _ => return Some(Self::Other),
                };
                Self::Lifecycle { uuid: owned_text(&line["command_uuid"])?, state }
            }
            "control_request" => {
                Self::ControlRequest { id: owned_text(&line["request_id"])?, request: line["request"].take() }
            }
            "control_cancel_request" => Self::ControlCancelled { id: owned_text(&line["request_id"])? },
            "control_response" => {
                let mut response = line["response"].take();
                let answer = match response["subtype"].as_str() {
                    Some("success") => Ok(response["response"].take()),
                    _ => {
                        Err(owned_text(&response["error"]).unwrap_or_else(|| "it gave no reason".to_owned()))
                    }
                };
                Self::ControlResponse { id: owned_text(&response["request_id"])?, answer }
            }
            _ => Self::Other,
        })
    }
}

fn parse_result(line: Value) -> ClaudeTurnResult {
    let is_error = line["is_error"].as_bool();
    let uuids = line["user_message_uuids"].clone();
    serde_json::from_value(line).unwrap_or_else(|cause| ClaudeTurnResult {
        is_error: is_error.unwrap_or(true),
        errors: vec![format!("the agent's result cannot be read: {cause}")],
        user_message_uuids: serde_json::from_value(uuids).unwrap_or_default(),
        ..ClaudeTurnResult::default()
    })
}

fn owned_text(value: &Value) -> Option<String> {
    value.as_str().map(str::to_owned)
}

/// A control request to the agent.
pub(super) fn control_request(id: &str, request: Value) -> Value {
    json!({"type": "control_request", "request_id": id, "request": request})
}

/// The response to a control request of the agent.
pub(super) fn control_response(id: &str, answer: Value) -> Value {
    json!({"type": "control_response", "response": {"subtype": "success", "request_id": id, "response": answer}})
}

/// The refusal of a control request of the agent.
pub(super) fn control_error(id: &str, why: &str) -> Value {
    json!({"type": "control_response", "response": {"subtype": "error", "request_id": id, "error": why}})
}

/// A user message. The agent reports what becomes of it under `uuid`.
pub(super) fn user_message(uuid: &str, content: Vec<Value>) -> Value {
    json!({"type": "user", "uuid": uuid, "message": {"role": "user", "content": content}})
}

pub(super) fn text_block(text: &str) -> Value {
    json!({"type": "text", "text": text})
}

/// A random UUID (version 4).
pub(super) fn random_uuid() -> Result<String, getrandom::Error> {
    let mut random = [0_u8; 16];
    getrandom::fill(&mut random)?;
    // The version and variant bits.
    random[6] = random[6] & 0x0f | 0x40;
    random[8] = random[8] & 0x3f | 0x80;
    let digits = hex::encode(random);
    Ok([&digits[..8], &digits[8..12], &digits[12..16], &digits[16..20], &digits[20..]].join("-"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_random_uuids() {
        let (one, another) = (random_uuid().unwrap(), random_uuid().unwrap());
        assert_ne!(one, another);
        let dashes: Vec<_> = one.match_indices('-').map(|(at, _)| at).collect();
        assert_eq!((one.len(), dashes), (36, vec![8, 13, 18, 23]), "{one}");
        assert_eq!(&one[14..15], "4");
        assert!(["8", "9", "a", "b"].contains(&&one[19..20]), "{one}");
    }

    #[test]
    fn the_type_may_come_anywhere_and_unknown_types_are_ignored() {
        let parse = |line: &str| ClaudeMessage::parse(line.as_bytes());
        let line = r#"{"is_error":false,"result":"x","subtype":"success","type":"result"}"#;
        assert!(
            matches!(parse(line), Some(ClaudeMessage::Result(result)) if result.result.as_deref() == Some("x"))
        );
        assert!(matches!(parse(r#"{"type":"rate_limit_event"}"#), Some(ClaudeMessage::Other)));
        let limit = |status: &str| {
            let info = json!({"status": status, "resetsAt": 1_795_014_000, "rateLimitType": "five_hour"});
            parse(&json!({"type": "rate_limit_event", "rate_limit_info": info}).to_string())
        };
        assert!(matches!(limit("allowed_warning"), Some(ClaudeMessage::Other)));
        let resets_at = Some(Millis(1_795_014_000_000));
        assert!(
            matches!(limit("rejected"), Some(ClaudeMessage::QuotaExhausted { resets_at: at }) if at == resets_at)
        );
        assert!(matches!(
            parse(r#"{"type":"command_lifecycle","state":"dreaming"}"#),
            Some(ClaudeMessage::Other)
        ));
        for line in ["", "hello", "[]", "7", r#"{"type":7}"#, r#"{"type":"control_request"}"#] {
            assert!(parse(line).is_none(), "{line}");
        }
    }

    #[test]
    fn a_result_of_another_shape_still_ends_the_turn_that_it_names() {
        let line = br#"{"type":"result","is_error":false,"errors":"no list","user_message_uuids":["u"]}"#;
        let Some(ClaudeMessage::Result(result)) = ClaudeMessage::parse(line) else { panic!("a result") };
        assert_eq!(result.user_message_uuids, ["u"]);
        assert!(!result.is_error && result.errors[0].contains("cannot be read"));
    }
}
