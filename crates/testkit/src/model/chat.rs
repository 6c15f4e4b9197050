//! OpenAI's Chat Completions API.

use serde_json::{Value, json};

use super::heard::{Heard, flat, list, parts};
use super::server::{Reply, Voice, sse};
use super::{INPUT_TOKENS, tools::Call};

pub(super) fn hear(body: &Value) -> Heard {
    let mut heard = Heard { stream: body["stream"] == true, ..Heard::default() };
    for message in list(&body["messages"]) {
        match message["role"].as_str() {
            Some("user") => parts(&message["content"]).iter().for_each(|text| heard.user(text)),
            Some("tool") => heard.result(flat(&message["content"])),
            _ => {}
        }
    }
    for tool in list(&body["tools"]).iter().filter(|tool| tool["type"] == "function") {
        heard.tool(&tool["function"]["name"], &tool["function"]["parameters"]);
    }
    let format = &body["response_format"];
    heard.form = (format["type"] == "json_schema" || format["type"] == "json_object")
        .then(|| format["json_schema"]["schema"].clone());
    heard
}

/// One completion.
#[derive(Debug)]
pub(super) struct Completion {
    pub(super) id: String,
    pub(super) model: String,
}

impl Completion {
    fn with(&self, object: &str, choices: Value) -> Value {
        json!({
            "id": format!("chatcmpl-{}", self.id), "object": object, "created": 1_700_000_000,
            "model": self.model, "choices": choices,
        })
    }

    fn chunk(&self, delta: Value, finish: Value) -> String {
        let choice = json!({ "index": 0, "delta": delta, "finish_reason": finish });
        sse(None, &self.with("chat.completion.chunk", json!([choice])))
    }

    fn call(&self, call: &Call) -> Value {
        json!({
            "index": 0, "id": format!("call_{}", self.id), "type": "function",
            "function": { "name": call.name, "arguments": call.args.to_string() },
        })
    }
}

impl Voice for Completion {
    fn open(&mut self, reply: &Reply) -> String {
        let mut out = self.chunk(json!({ "role": "assistant", "content": "" }), Value::Null);
        if let Reply::Call(call) = reply {
            out += &self.chunk(json!({ "tool_calls": [self.call(call)] }), Value::Null);
        }
        out
    }

    fn token(&mut self, token: &str) -> String {
        self.chunk(json!({ "content": token }), Value::Null)
    }

    fn close(&mut self, reply: &Reply, tokens: u64) -> String {
        let end = self.chunk(json!({}), json!(finish(reply)));
        let mut last = self.with("chat.completion.chunk", json!([]));
        last["usage"] = usage(tokens);
        end + &sse(None, &last) + "data: [DONE]\n\n"
    }

    fn whole(&mut self, reply: &Reply, text: &str, tokens: u64) -> Value {
        let message = match reply {
            Reply::Text => json!({ "role": "assistant", "content": text }),
            Reply::Call(call) => {
                json!({ "role": "assistant", "content": null, "tool_calls": [self.call(call)] })
            }
        };
        let choice = json!({ "index": 0, "message": message, "finish_reason": finish(reply) });
        let mut whole = self.with("chat.completion", json!([choice]));
        whole["usage"] = usage(tokens);
        whole
    }
}

fn finish(reply: &Reply) -> &'static str {
    if matches!(reply, Reply::Text) { "stop" } else { "tool_calls" }
}

fn usage(tokens: u64) -> Value {
    json!({
        "prompt_tokens": INPUT_TOKENS, "completion_tokens": tokens, "total_tokens": INPUT_TOKENS + tokens,
    })
}
