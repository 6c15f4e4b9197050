//! Anthropic's Messages API.

use serde_json::{Value, json};

use super::request::{ModelRequest, flatten_text, items};
use super::server::{ModelReply, ModelReplyEncoder, sse};
use super::{INPUT_TOKENS, tools::ModelToolCall};

pub(super) fn parse_request(body: &Value) -> ModelRequest {
    let mut request = ModelRequest { stream: body["stream"] == true, ..ModelRequest::default() };
    for message in items(&body["messages"]) {
        let content = &message["content"];
        match message["role"].as_str() {
            Some("user") => match content {
                Value::Array(parts) => parts.iter().for_each(|part| parse_part(&mut request, part)),
                text => request.add_user_text(&flatten_text(text)),
            },
            // Claude Code adds the user's messages during a turn in this form.
            Some("system") => {
                const STEER: &str = "The user sent a new message while you were working:\n";
                if let Some((_, steer)) = flatten_text(content).split_once(STEER) {
                    request.add_user_text(steer.split("\n\n").next().unwrap_or_default());
                }
            }
            _ => {}
        }
    }
    for tool in items(&body["tools"]) {
        request.add_tool(&tool["name"], &tool["input_schema"]);
    }
    let format =
        [&body["output_config"]["format"], &body["output_format"]].into_iter().find(|f| f.is_object());
    request.json_schema = format.map(|format| format["schema"].clone());
    request
}

fn parse_part(request: &mut ModelRequest, part: &Value) {
    match part["type"].as_str() {
        Some("tool_result") => request.add_tool_result(flatten_text(&part["content"])),
        Some("text") => request.add_user_text(&flatten_text(part)),
        _ => {}
    }
}

/// Encodes one message.
#[derive(Debug)]
pub(super) struct MessagesEncoder {
    pub(super) id: String,
    pub(super) model: String,
}

impl MessagesEncoder {
    fn message(&self, content: Value, stop: Value, tokens: u64) -> Value {
        json!({
            "id": format!("msg_{}", self.id), "type": "message", "role": "assistant", "model": self.model,
            "content": content, "stop_reason": stop, "stop_sequence": null,
            "usage": {
                "input_tokens": INPUT_TOKENS, "output_tokens": tokens,
                "cache_creation_input_tokens": 0, "cache_read_input_tokens": 0,
            },
        })
    }

    fn tool_use(&self, call: &ModelToolCall, input: &Value) -> Value {
        json!({ "type": "tool_use", "id": format!("toolu_{}", self.id), "name": call.name, "input": input })
    }
}

impl ModelReplyEncoder for MessagesEncoder {
    fn encode_start(&mut self, reply: &ModelReply) -> String {
        let block = match reply {
            ModelReply::Text | ModelReply::TruncatedText => json!({ "type": "text", "text": "" }),
            ModelReply::Call(call) => self.tool_use(call, &json!({})),
        };
        let mut out = sse_event(
            &json!({ "type": "message_start", "message": self.message(json!([]), Value::Null, 1) }),
        );
        out += &sse_event(&json!({ "type": "content_block_start", "index": 0, "content_block": block }));
        if let ModelReply::Call(call) = reply {
            let delta = json!({ "type": "input_json_delta", "partial_json": call.args.to_string() });
            out += &sse_event(&json!({ "type": "content_block_delta", "index": 0, "delta": delta }));
        }
        out
    }

    fn encode_token(&mut self, token: &str) -> String {
        let delta = json!({ "type": "text_delta", "text": token });
        sse_event(&json!({ "type": "content_block_delta", "index": 0, "delta": delta }))
    }

    fn encode_end(&mut self, reply: &ModelReply, tokens: u64) -> String {
        let delta = json!({ "stop_reason": stop_reason(reply), "stop_sequence": null });
        sse_event(&json!({ "type": "content_block_stop", "index": 0 }))
            + &sse_event(
                &json!({ "type": "message_delta", "delta": delta, "usage": { "output_tokens": tokens } }),
            )
            + &sse_event(&json!({ "type": "message_stop" }))
    }

    fn encode_whole(&mut self, reply: &ModelReply, text: &str, tokens: u64) -> Value {
        let block = match reply {
            ModelReply::Text | ModelReply::TruncatedText => json!({ "type": "text", "text": text }),
            ModelReply::Call(call) => self.tool_use(call, &call.args),
        };
        self.message(json!([block]), json!(stop_reason(reply)), tokens)
    }
}

fn stop_reason(reply: &ModelReply) -> &'static str {
    match reply {
        ModelReply::Text => "end_turn",
        ModelReply::TruncatedText => "max_tokens",
        ModelReply::Call(_) => "tool_use",
    }
}

fn sse_event(data: &Value) -> String {
    sse(data["type"].as_str(), data)
}
