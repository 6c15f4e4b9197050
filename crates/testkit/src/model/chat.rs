//! OpenAI's Chat Completions API.

use serde_json::{Value, json};

use super::request::{ModelRequest, flatten_text, items, part_texts};
use super::server::{ModelReply, ModelReplyEncoder, sse};
use super::{INPUT_TOKENS, tools::ModelToolCall};

pub(super) fn parse_request(body: &Value) -> ModelRequest {
    let mut request = ModelRequest { stream: body["stream"] == true, ..ModelRequest::default() };
    for message in items(&body["messages"]) {
        match message["role"].as_str() {
            Some("user") => {
                part_texts(&message["content"]).iter().for_each(|text| request.add_user_text(text))
            }
            Some("tool") => request.add_tool_result(flatten_text(&message["content"])),
            _ => {}
        }
    }
    for tool in items(&body["tools"]).iter().filter(|tool| tool["type"] == "function") {
        request.add_tool(&tool["function"]["name"], &tool["function"]["parameters"]);
    }
    let format = &body["response_format"];
    request.json_schema = (format["type"] == "json_schema" || format["type"] == "json_object")
        .then(|| format["json_schema"]["schema"].clone());
    request
}

/// Encodes one completion.
#[derive(Debug)]
pub(super) struct ChatEncoder {
    pub(super) id: String,
    pub(super) model: String,
}

impl ChatEncoder {
    fn completion(&self, object: &str, choices: Value) -> Value {
        json!({
            "id": format!("chatcmpl-{}", self.id), "object": object, "created": 1_700_000_000,
            "model": self.model, "choices": choices,
        })
    }

    fn chunk(&self, delta: Value, finish: Value) -> String {
        let choice = json!({ "index": 0, "delta": delta, "finish_reason": finish });
        sse(None, &self.completion("chat.completion.chunk", json!([choice])))
    }

    fn tool_call(&self, call: &ModelToolCall) -> Value {
        json!({
            "index": 0, "id": format!("call_{}", self.id), "type": "function",
            "function": { "name": call.name, "arguments": call.args.to_string() },
        })
    }
}

impl ModelReplyEncoder for ChatEncoder {
    fn encode_start(&mut self, reply: &ModelReply) -> String {
        let mut out = self.chunk(json!({ "role": "assistant", "content": "" }), Value::Null);
        if let ModelReply::Call(call) = reply {
            out += &self.chunk(json!({ "tool_calls": [self.tool_call(call)] }), Value::Null);
        }
        out
    }

    fn encode_token(&mut self, token: &str) -> String {
        self.chunk(json!({ "content": token }), Value::Null)
    }

    fn encode_end(&mut self, reply: &ModelReply, tokens: u64) -> String {
        let end = self.chunk(json!({}), json!(finish_reason(reply)));
        let mut last = self.completion("chat.completion.chunk", json!([]));
        last["usage"] = usage(tokens);
        end + &sse(None, &last) + "data: [DONE]\n\n"
    }

    fn encode_whole(&mut self, reply: &ModelReply, text: &str, tokens: u64) -> Value {
        let message = match reply {
            ModelReply::Text | ModelReply::TruncatedText => json!({ "role": "assistant", "content": text }),
            ModelReply::Call(call) => {
                json!({ "role": "assistant", "content": null, "tool_calls": [self.tool_call(call)] })
            }
        };
        let choice = json!({ "index": 0, "message": message, "finish_reason": finish_reason(reply) });
        let mut whole = self.completion("chat.completion", json!([choice]));
        whole["usage"] = usage(tokens);
        whole
    }
}

fn finish_reason(reply: &ModelReply) -> &'static str {
    match reply {
        ModelReply::Text => "stop",
        ModelReply::TruncatedText => "length",
        ModelReply::Call(_) => "tool_calls",
    }
}

fn usage(tokens: u64) -> Value {
    json!({
        "prompt_tokens": INPUT_TOKENS, "completion_tokens": tokens, "total_tokens": INPUT_TOKENS + tokens,
    })
}
