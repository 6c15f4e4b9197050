//! OpenAI's Responses API.

use serde_json::{Value, json};

use super::request::{ModelRequest, flatten_text, items, part_texts};
use super::server::{ModelReply, ModelReplyEncoder, sse};
use super::{INPUT_TOKENS, tools::ModelToolCall};

/// The tool that searches for tools that are not offered at once.
pub(super) const TOOL_SEARCH: &str = "tool_search";
/// The most searches in a conversation, so that the search for a tool that does not exist ends.
const SEARCHES_MAX: usize = 4;

/// Joins the name of a namespace and the name of a tool in it. Neither contains this character.
const NAMESPACE_SEPARATOR: char = '/';

pub(super) fn parse_request(body: &Value) -> ModelRequest {
    let mut request = ModelRequest { stream: body["stream"] == true, ..ModelRequest::default() };
    if let Some(text) = body["input"].as_str() {
        request.add_user_text(text);
    }
    for item in items(&body["input"]) {
        match item["type"].as_str().unwrap_or("message") {
            "message" if item["role"] == "user" => {
                part_texts(&item["content"]).iter().for_each(|text| request.add_user_text(text));
            }
            kind if kind.ends_with("_call_output") => request.add_tool_result(flatten_text(&item["output"])),
            _ => {}
        }
    }
    for tool in items(&body["tools"]).iter().filter(|tool| tool["type"] == "function") {
        request.add_tool(&tool["name"], &tool["parameters"]);
    }
    // Tools that were searched for come with the search results, and are offered from then on.
    let found: Vec<&Value> =
        items(&body["input"]).iter().filter(|item| item["type"] == "tool_search_output").collect();
    let found_tools = found.iter().flat_map(|item| items(&item["tools"]));
    for namespace in
        items(&body["tools"]).iter().chain(found_tools).filter(|tool| tool["type"] == "namespace")
    {
        for tool in items(&namespace["tools"]) {
            let name = namespace["name"].as_str().zip(tool["name"].as_str());
            let name = name.map(|(namespace, name)| format!("{namespace}{NAMESPACE_SEPARATOR}{name}"));
            request.add_tool(&json!(name), &tool["parameters"]);
        }
    }
    if found.len() < SEARCHES_MAX && items(&body["tools"]).iter().any(|tool| tool["type"] == TOOL_SEARCH) {
        request.add_tool(&json!(TOOL_SEARCH), &json!({}));
    }
    let format = &body["text"]["format"];
    request.json_schema = (format["type"] == "json_schema" || format["type"] == "json_object")
        .then(|| format["schema"].clone());
    request
}

/// Encodes one response.
#[derive(Debug)]
pub(super) struct ResponsesEncoder {
    pub(super) id: String,
    pub(super) model: String,
    /// The number of the next event.
    pub(super) next_sequence: u64,
    /// The text sent so far, which the end repeats.
    pub(super) text: String,
}

impl ResponsesEncoder {
    fn event(&mut self, mut data: Value) -> String {
        data["sequence_number"] = json!(self.next_sequence);
        self.next_sequence += 1;
        sse(data["type"].as_str(), &data)
    }

    fn response(&self, status: &str, output: Value, usage: Value) -> Value {
        json!({
            "id": format!("resp_{}", self.id), "object": "response", "created_at": 1_700_000_000,
            "model": self.model, "status": status, "output": output, "usage": usage,
        })
    }

    fn message_item(&self, status: &str, content: Value) -> Value {
        let id = format!("msg_{}", self.id);
        json!({ "type": "message", "id": id, "role": "assistant", "status": status, "content": content })
    }

    fn call_item(&self, status: &str, call: &ModelToolCall, arguments: &str) -> Value {
        if call.name == TOOL_SEARCH {
            return json!({
                "type": "tool_search_call", "id": format!("ts_{}", self.id), "call_id": format!("call_{}", self.id),
                "execution": "client", "arguments": call.args, "status": status,
            });
        }
        let mut item = json!({
            "type": "function_call", "id": format!("fc_{}", self.id), "call_id": format!("call_{}", self.id),
            "name": call.name, "arguments": arguments, "status": status,
        });
        if let Some((namespace, name)) = call.name.split_once(NAMESPACE_SEPARATOR) {
            item["namespace"] = json!(namespace);
            item["name"] = json!(name);
        }
        item
    }

    fn finished_response(&self, reply: &ModelReply, item: Value, tokens: u64) -> Value {
        if !matches!(reply, ModelReply::TruncatedText) {
            return self.response("completed", json!([item]), usage(tokens));
        }
        let mut response = self.response("incomplete", json!([item]), usage(tokens));
        response["incomplete_details"] = json!({ "reason": "max_output_tokens" });
        response
    }

    fn output_item(&self, reply: &ModelReply, text: &str) -> Value {
        match reply {
            ModelReply::Text => self.message_item("completed", json!([output_text(text)])),
            ModelReply::TruncatedText => self.message_item("incomplete", json!([output_text(text)])),
            ModelReply::Call(call) => self.call_item("completed", call, &call.args.to_string()),
        }
    }
}

impl ModelReplyEncoder for ResponsesEncoder {
    fn encode_start(&mut self, reply: &ModelReply) -> String {
        let response = self.response("in_progress", json!([]), Value::Null);
        let mut out = self.event(json!({ "type": "response.created", "response": response }));
        let item = match reply {
            ModelReply::Text | ModelReply::TruncatedText => self.message_item("in_progress", json!([])),
            ModelReply::Call(call) => self.call_item("in_progress", call, ""),
        };
        out += &self.event(json!({ "type": "response.output_item.added", "output_index": 0, "item": &item }));
        let id = &item["id"];
        out + &match reply {
            ModelReply::Text | ModelReply::TruncatedText => self.event(json!({
                "type": "response.content_part.added", "item_id": id, "output_index": 0, "content_index": 0,
                "part": output_text(""),
            })),
            ModelReply::Call(call) if call.name == TOOL_SEARCH => String::new(),
            ModelReply::Call(call) => {
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

    fn encode_token(&mut self, token: &str) -> String {
        self.text.push_str(token);
        let id = format!("msg_{}", self.id);
        self.event(json!({
            "type": "response.output_text.delta", "item_id": id, "output_index": 0, "content_index": 0,
            "delta": token,
        }))
    }

    fn encode_end(&mut self, reply: &ModelReply, tokens: u64) -> String {
        let text = std::mem::take(&mut self.text);
        let item = self.output_item(reply, &text);
        let mut out = String::new();
        if matches!(reply, ModelReply::Text | ModelReply::TruncatedText) {
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
        let response = self.finished_response(reply, item, tokens);
        let kind = format!("response.{}", response["status"].as_str().unwrap_or_default());
        out + &self.event(json!({ "type": kind, "response": response }))
    }

    fn encode_whole(&mut self, reply: &ModelReply, text: &str, tokens: u64) -> Value {
        self.finished_response(reply, self.output_item(reply, text), tokens)
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
