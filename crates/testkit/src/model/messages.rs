//! Anthropic's Messages API.

use serde_json::{Value, json};

use super::heard::{Heard, flat, list};
use super::server::{Reply, Voice, sse};
use super::{INPUT_TOKENS, tools::Call};

pub(super) fn hear(body: &Value) -> Heard {
    let mut heard = Heard { stream: body["stream"] == true, ..Heard::default() };
    for message in list(&body["messages"]) {
        let content = &message["content"];
        match message["role"].as_str() {
            Some("user") => match content {
                Value::Array(parts) => parts.iter().for_each(|part| hear_part(&mut heard, part)),
                text => heard.user(&flat(text)),
            },
            // So Claude Code puts in what the user said while a turn was under way.
            Some("system") => {
                const STEER: &str = "The user sent a new message while you were working:\n";
                if let Some((_, said)) = flat(content).split_once(STEER) {
                    heard.user(said.split("\n\n").next().unwrap_or_default());
                }
            }
            _ => {}
        }
    }
    for tool in list(&body["tools"]) {
        heard.tool(&tool["name"], &tool["input_schema"]);
    }
    let format =
        [&body["output_config"]["format"], &body["output_format"]].into_iter().find(|f| f.is_object());
    heard.form = format.map(|format| format["schema"].clone());
    heard
}

fn hear_part(heard: &mut Heard, part: &Value) {
    match part["type"].as_str() {
        Some("tool_result") => heard.result(flat(&part["content"])),
        Some("text") => heard.user(&flat(part)),
        _ => {}
    }
}

/// One message.
#[derive(Debug)]
pub(super) struct Message {
    pub(super) id: String,
    pub(super) model: String,
}

impl Message {
    fn with(&self, content: Value, stop: Value, tokens: u64) -> Value {
        json!({
            "id": format!("msg_{}", self.id), "type": "message", "role": "assistant", "model": self.model,
            "content": content, "stop_reason": stop, "stop_sequence": null,
            "usage": {
                "input_tokens": INPUT_TOKENS, "output_tokens": tokens,
                "cache_creation_input_tokens": 0, "cache_read_input_tokens": 0,
            },
        })
    }

    fn tool_use(&self, call: &Call, input: &Value) -> Value {
        json!({ "type": "tool_use", "id": format!("toolu_{}", self.id), "name": call.name, "input": input })
    }
}

impl Voice for Message {
    fn open(&mut self, reply: &Reply) -> String {
        let block = match reply {
            Reply::Text => json!({ "type": "text", "text": "" }),
            Reply::Call(call) => self.tool_use(call, &json!({})),
        };
        let mut out =
            event(&json!({ "type": "message_start", "message": self.with(json!([]), Value::Null, 1) }));
        out += &event(&json!({ "type": "content_block_start", "index": 0, "content_block": block }));
        if let Reply::Call(call) = reply {
            let delta = json!({ "type": "input_json_delta", "partial_json": call.args.to_string() });
            out += &event(&json!({ "type": "content_block_delta", "index": 0, "delta": delta }));
        }
        out
    }

    fn token(&mut self, token: &str) -> String {
        let delta = json!({ "type": "text_delta", "text": token });
        event(&json!({ "type": "content_block_delta", "index": 0, "delta": delta }))
    }

    fn close(&mut self, reply: &Reply, tokens: u64) -> String {
        let delta = json!({ "stop_reason": stop(reply), "stop_sequence": null });
        event(&json!({ "type": "content_block_stop", "index": 0 }))
            + &event(
                &json!({ "type": "message_delta", "delta": delta, "usage": { "output_tokens": tokens } }),
            )
            + &event(&json!({ "type": "message_stop" }))
    }

    fn whole(&mut self, reply: &Reply, text: &str, tokens: u64) -> Value {
        let block = match reply {
            Reply::Text => json!({ "type": "text", "text": text }),
            Reply::Call(call) => self.tool_use(call, &call.args),
        };
        self.with(json!([block]), json!(stop(reply)), tokens)
    }
}

fn stop(reply: &Reply) -> &'static str {
    if matches!(reply, Reply::Text) { "end_turn" } else { "tool_use" }
}

fn event(data: &Value) -> String {
    sse(data["type"].as_str(), data)
}
