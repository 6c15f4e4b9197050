//! The words of the protocol: one JSON object a line, both ways. What is read here is what the driver understands of
//! them; fields that it does not know are left alone, and so are lines of a type that it has never heard of.

use serde::Deserialize;
use serde_json::{Value, json};

/// What a line says.
#[derive(Debug)]
pub(super) enum ClaudeMessage {
    /// An event of the model's own stream.
    StreamEvent { event: Value, by_subagent: bool },
    /// A whole message of the model, or a part of one with a single block.
    Assistant { line: Value, by_subagent: bool },
    /// What a tool gave, among other things that the model is told.
    User { content: Value },
    /// Something that the program itself tells.
    System { subtype: String, line: Value },
    /// A turn has come to its end.
    Result(Box<ClaudeTurnResult>),
    /// What has become of a message of ours.
    Lifecycle { uuid: String, state: ClaudeCommandState },
    /// The agent wants something of us.
    ControlRequest { id: String, request: Value },
    /// It no longer does.
    ControlCancelled { id: String },
    /// The answer to something that we wanted.
    ControlResponse { id: String, answer: Result<Value, String> },
    /// Nothing that matters here.
    Other,
}

/// What becomes of a message of ours.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ClaudeCommandState {
    /// It waits.
    Queued,
    /// It is being worked on, alone or as part of a turn that runs.
    Started,
    /// It has been.
    Completed,
    /// It will not be, or no longer.
    Cancelled,
}

/// The end of a turn, in the agent's words.
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
    /// The messages that it is the end of; older versions name none, and no turn that the agent began by itself does.
    pub(super) user_message_uuids: Vec<String>,
    /// Of the conversation so far. A resumed one begins with what the process before it has written down, if it could.
    pub(super) total_cost_usd: Option<f64>,
    pub(super) usage: Value,
    /// By model, and only since the result before: right in a resumed conversation, too.
    pub(super) model_usage_since_last_result: Option<serde_json::Map<String, Value>>,
}

impl ClaudeMessage {
    /// Reads a line; `None` if it is no message at all.
    pub(super) fn parse(line: &[u8]) -> Option<Self> {
        let mut line: Value = serde_json::from_slice(line).ok()?;
        let kind = line.get("type")?.as_str()?.to_owned();
        let by_helper = line["parent_tool_use_id"].is_string();
        Some(match kind.as_str() {
            "stream_event" => Self::StreamEvent { event: line["event"].take(), by_subagent: by_helper },
            "assistant" => Self::Assistant { line, by_subagent: by_helper },
            "user" => Self::User { content: line["message"]["content"].take() },
            "system" => {
                let subtype = line["subtype"].as_str().unwrap_or_default().to_owned();
                Self::System { subtype, line }
            }
            // A result that cannot be read still ends a turn.
            "result" => Self::Result(Box::new(parse_result(line))),
            "command_lifecycle" => {
                let fate = match line["state"].as_str() {
                    Some("queued") => ClaudeCommandState::Queued,
                    Some("started") => ClaudeCommandState::Started,
                    Some("completed") => ClaudeCommandState::Completed,
                    Some("cancelled") => ClaudeCommandState::Cancelled,
                    _ => return Some(Self::Other),
                };
                Self::Lifecycle { uuid: owned_text(&line["command_uuid"])?, state: fate }
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

/// Something that we want of the agent.
pub(super) fn control_request(id: &str, request: Value) -> Value {
    json!({"type": "control_request", "request_id": id, "request": request})
}

/// The answer to what the agent wanted.
pub(super) fn control_response(id: &str, answer: Value) -> Value {
    json!({"type": "control_response", "response": {"subtype": "success", "request_id": id, "response": answer}})
}

/// That it cannot have what it wanted.
pub(super) fn control_error(id: &str, why: &str) -> Value {
    json!({"type": "control_response", "response": {"subtype": "error", "request_id": id, "error": why}})
}

/// A message, by a name of ours under which the agent tells what becomes of it.
pub(super) fn user_message(uuid: &str, content: Vec<Value>) -> Value {
    json!({"type": "user", "uuid": uuid, "message": {"role": "user", "content": content}})
}

/// A block of text.
pub(super) fn text_block(words: &str) -> Value {
    json!({"type": "text", "text": words})
}

/// A name that nobody else has: a random UUID.
pub(super) fn random_uuid() -> Result<String, getrandom::Error> {
    let mut random = [0_u8; 16];
    getrandom::fill(&mut random)?;
    // The bits that say that it is a random one.
    random[6] = random[6] & 0x0f | 0x40;
    random[8] = random[8] & 0x3f | 0x80;
    let mut name = String::with_capacity(36);
    for (at, byte) in random.iter().enumerate() {
        if [4, 6, 8, 10].contains(&at) {
            name.push('-');
        }
        name.push_str(&format!("{byte:02x}"));
    }
    Ok(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_random_uuids() {
        let (one, other) = (random_uuid().unwrap(), random_uuid().unwrap());
        assert_ne!(one, other);
        let dashes: Vec<_> = one.match_indices('-').map(|(at, _)| at).collect();
        assert_eq!((one.len(), dashes), (36, vec![8, 13, 18, 23]), "{one}");
        assert_eq!(&one[14..15], "4");
        assert!(["8", "9", "a", "b"].contains(&&one[19..20]), "{one}");
    }

    #[test]
    fn the_type_may_stand_anywhere_and_a_stranger_says_nothing() {
        let read = |line: &str| ClaudeMessage::parse(line.as_bytes());
        let line = r#"{"is_error":false,"result":"x","subtype":"success","type":"result"}"#;
        assert!(
            matches!(read(line), Some(ClaudeMessage::Result(result)) if result.result.as_deref() == Some("x"))
        );
        assert!(matches!(read(r#"{"type":"rate_limit_event"}"#), Some(ClaudeMessage::Other)));
        assert!(matches!(
            read(r#"{"type":"command_lifecycle","state":"dreaming"}"#),
            Some(ClaudeMessage::Other)
        ));
        for line in ["", "hello", "[]", "7", r#"{"type":7}"#, r#"{"type":"control_request"}"#] {
            assert!(read(line).is_none(), "{line}");
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
