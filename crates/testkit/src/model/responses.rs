//! OpenAI's Responses API.

use serde_json::{Value, json};

use super::heard::{Heard, flat, list, parts};
use super::server::{Reply, Voice, sse};
use super::{INPUT_TOKENS, tools::Call};

/// The search for tools that are not offered at once.
pub(super) const SEARCH: &str = "tool_search";

/// Between the name of a namespace and that of a tool in it, neither of which has one.
const IN_SPACE: char = '/';

pub(super) fn hear(body: &Value) -> Heard {
    let mut heard = Heard { stream: body["stream"] == true, ..Heard::default() };
    if let Some(text) = body["input"].as_str() {
        heard.user(text);
    }
    for item in list(&body["input"]) {
        match item["type"].as_str().unwrap_or("message") {
            "message" if item["role"] == "user" => {
                parts(&item["content"]).iter().for_each(|text| heard.user(text));
            }
            kind if kind.ends_with("_call_output") => heard.result(flat(&item["output"])),
            _ => {}
        }
    }
    for tool in list(&body["tools"]).iter().filter(|tool| tool["type"] == "function") {
        heard.tool(&tool["name"], &tool["parameters"]);
    }
    // Tools that were searched for come with what was found, and are offered from then on.
    let found: Vec<&Value> =
        list(&body["input"]).iter().filter(|item| item["type"] == "tool_search_output").collect();
    let found_tools = found.iter().flat_map(|item| list(&item["tools"]));
    for space in list(&body["tools"]).iter().chain(found_tools).filter(|tool| tool["type"] == "namespace") {
        for tool in list(&space["tools"]) {
            let name = space["name"].as_str().zip(tool["name"].as_str());
            let name = name.map(|(space, name)| format!("{space}{IN_SPACE}{name}"));
            heard.tool(&json!(name), &tool["parameters"]);
        }
    }
    if found.is_empty() && list(&body["tools"]).iter().any(|tool| tool["type"] == SEARCH) {
        heard.tool(&json!(SEARCH), &json!({}));
    }
    let format = &body["text"]["format"];
    heard.form = (format["type"] == "json_schema" || format["type"] == "json_object")
        .then(|| format["schema"].clone());
    heard
}

/// One response.
#[derive(Debug)]
pub(super) struct Response {
    pub(super) id: String,
    pub(super) model: String,
    /// The number of the next event.
    pub(super) next: u64,
    /// What has been said, which the end repeats.
    pub(super) text: String,
}

impl Response {
    fn event(&mut self, mut data: Value) -> String {
        data["sequence_number"] = json!(self.next);
        self.next += 1;
        sse(data["type"].as_str(), &data)
    }

    fn with(&self, status: &str, output: Value, usage: Value) -> Value {
        json!({
            "id": format!("resp_{}", self.id), "object": "response", "created_at": 1_700_000_000,
            "model": self.model, "status": status, "output": output, "usage": usage,
        })
    }

    fn message(&self, status: &str, content: Value) -> Value {
        let id = format!("msg_{}", self.id);
        json!({ "type": "message", "id": id, "role": "assistant", "status": status, "content": content })
    }

    fn call(&self, status: &str, call: &Call, arguments: &str) -> Value {
        if call.name == SEARCH {
            return json!({
                "type": "tool_search_call", "id": format!("ts_{}", self.id), "call_id": format!("call_{}", self.id),
                "execution": "client", "arguments": call.args, "status": status,
            });
        }
        let mut item = json!({
            "type": "function_call", "id": format!("fc_{}", self.id), "call_id": format!("call_{}", self.id),
            "name": call.name, "arguments": arguments, "status": status,
        });
        if let Some((space, name)) = call.name.split_once(IN_SPACE) {
            item["namespace"] = json!(space);
            item["name"] = json!(name);
        }
        item
    }

    fn item(&self, reply: &Reply, text: &str) -> Value {
        match reply {
            Reply::Text => self.message("completed", json!([output_text(text)])),
            Reply::Call(call) => self.call("completed", call, &call.args.to_string()),
        }
    }
}

impl Voice for Response {
    fn open(&mut self, reply: &Reply) -> String {
        let response = self.with("in_progress", json!([]), Value::Null);
        let mut out = self.event(json!({ "type": "response.created", "response": response }));
        let item = match reply {
            Reply::Text => self.message("in_progress", json!([])),
            Reply::Call(call) => self.call("in_progress", call, ""),
        };
        out += &self.event(json!({ "type": "response.output_item.added", "output_index": 0, "item": &item }));
        let id = &item["id"];
        out + &match reply {
            Reply::Text => self.event(json!({
                "type": "response.content_part.added", "item_id": id, "output_index": 0, "content_index": 0,
                "part": output_text(""),
            })),
            Reply::Call(call) if call.name == SEARCH => String::new(),
            Reply::Call(call) => {
                let arguments = call.args.to_string();
                let delta = self.event(json!({
                    "type": "response.function_call_arguments.delta", "item_id": id, "output_index": 0,
                    "delta": arguments,
                }));
                delta
                    + &self.event(json!({
                        "type": "response.function_call_arguments.done", "item_id": id, "output_index": 0,
                        "arguments": arguments,
                    }))
            }
        }
    }

    fn token(&mut self, token: &str) -> String {
        self.text.push_str(token);
        let id = format!("msg_{}", self.id);
        self.event(json!({
            "type": "response.output_text.delta", "item_id": id, "output_index": 0, "content_index": 0,
            "delta": token,
        }))
    }

    fn close(&mut self, reply: &Reply, tokens: u64) -> String {
        let text = std::mem::take(&mut self.text);
        let item = self.item(reply, &text);
        let mut out = String::new();
        if let Reply::Text = reply {
            let id = &item["id"];
            out += &self.event(json!({
                "type": "response.output_text.done", "item_id": id, "output_index": 0, "content_index": 0,
                "text": text,
            }));
            out += &self.event(json!({
                "type": "response.content_part.done", "item_id": id, "output_index": 0, "content_index": 0,
                "part": output_text(&text),
            }));
        }
        out += &self.event(json!({ "type": "response.output_item.done", "output_index": 0, "item": &item }));
        let response = self.with("completed", json!([item]), usage(tokens));
        out + &self.event(json!({ "type": "response.completed", "response": response }))
    }

    fn whole(&mut self, reply: &Reply, text: &str, tokens: u64) -> Value {
        self.with("completed", json!([self.item(reply, text)]), usage(tokens))
    }
}

fn output_text(text: &str) -> Value {
    json!({ "type": "output_text", "text": text, "annotations": [] })
}

fn usage(tokens: u64) -> Value {
    json!({
        "input_tokens": INPUT_TOKENS, "input_tokens_details": { "cached_tokens": 0 },
        "output_tokens": tokens, "output_tokens_details": { "reasoning_tokens": 0 },
        "total_tokens": INPUT_TOKENS + tokens,
    })
}
