//! An agent by hand: Claude's side of the protocol, as far as these tests need it.

use serde_json::{Value, json};
use tokio::io::DuplexStream;

use crate::drivers::stage::{Far, by_hand};

/// An agent whose every line a test writes.
pub(super) struct Hand {
    far: Far,
    messages: u32,
    /// What it says that the conversation has cost.
    pub(super) total: f64,
}

by_hand!(Hand);

impl Hand {
    pub(super) fn new(far: DuplexStream) -> Self {
        Self { far: Far::new(far), messages: 0, total: 0.0 }
    }

    pub(super) async fn send(&mut self, message: Value) {
        self.write(&message.to_string()).await;
    }

    /// The handshake.
    pub(super) async fn open(&mut self) {
        let hello = self.wanted("initialize").await;
        self.grant(&hello, json!({"commands": [], "pid": 1})).await;
    }

    /// The next line, which is a request of this subtype; gives its id.
    pub(super) async fn wanted(&mut self, subtype: &str) -> String {
        let line = self.hear().await;
        assert_eq!(line["request"]["subtype"], subtype, "{line}");
        line["request_id"].as_str().expect("an id").to_owned()
    }

    pub(super) async fn grant(&mut self, id: &str, answer: Value) {
        let response = json!({"subtype": "success", "request_id": id, "response": answer});
        self.send(json!({"type": "control_response", "response": response})).await;
    }

    /// An interrupt that drops what waits, and its receipt.
    pub(super) async fn interrupted(&mut self) {
        let line = self.hear().await;
        assert_eq!(line["request"], json!({"subtype": "interrupt", "cancel_queued": true}), "{line}");
        let id = line["request_id"].as_str().expect("an id").to_owned();
        self.grant(&id, json!({"still_queued": [], "cancelled": []})).await;
    }

    /// Takes a message; gives its name and its text.
    pub(super) async fn told(&mut self) -> (String, String) {
        let line = self.hear().await;
        assert_eq!(line["type"], "user", "{line}");
        let text = line["message"]["content"][0]["text"].as_str().expect("text").to_owned();
        (line["uuid"].as_str().expect("a name").to_owned(), text)
    }

    /// Takes a prompt and begins with it.
    pub(super) async fn begin(&mut self) -> String {
        let (uuid, _) = self.told().await;
        self.fate(&uuid, "queued").await;
        self.fate(&uuid, "started").await;
        self.send(json!({"type": "system", "subtype": "init", "session_id": "s"})).await;
        uuid
    }

    pub(super) async fn fate(&mut self, uuid: &str, state: &str) {
        self.send(json!({"type": "command_lifecycle", "command_uuid": uuid, "state": state})).await;
    }

    /// Text, streamed and then whole, as the real one does.
    pub(super) async fn say(&mut self, text: &str) {
        self.messages += 1;
        let id = format!("msg_{}", self.messages);
        let usage = json!({"input_tokens": 10, "cache_read_input_tokens": 5, "output_tokens": 1});
        let message = json!({"id": id, "model": "m", "usage": usage});
        self.event(json!({"type": "message_start", "message": message})).await;
        for piece in text.split_inclusive(' ') {
            let delta = json!({"type": "text_delta", "text": piece});
            self.event(json!({"type": "content_block_delta", "index": 0, "delta": delta})).await;
        }
        self.message(&id, json!({"type": "text", "text": text})).await;
        self.event(json!({"type": "message_delta", "usage": {"output_tokens": 7}})).await;
    }

    pub(super) async fn event(&mut self, event: Value) {
        self.send(json!({"type": "stream_event", "event": event, "parent_tool_use_id": null})).await;
    }

    pub(super) async fn message(&mut self, id: &str, block: Value) {
        let message = json!({"id": id, "model": "m", "content": [block]});
        self.send(json!({"type": "assistant", "message": message, "parent_tool_use_id": null})).await;
    }

    /// Wants to use a tool.
    pub(super) async fn ask(&mut self, id: &str, tool: &str, input: Value) {
        let suggestions = json!([{"type": "addRules", "behavior": "allow"}]);
        let request = json!({"subtype": "can_use_tool", "tool_name": tool, "input": input,
            "permission_suggestions": suggestions, "requires_user_interaction": tool == "AskUserQuestion"});
        self.send(json!({"type": "control_request", "request_id": id, "request": request})).await;
    }

    /// The answer to what it wanted.
    pub(super) async fn answered(&mut self, id: &str) -> Value {
        let mut line = self.hear().await;
        assert_eq!(line["response"]["request_id"], id, "{line}");
        line["response"].take()
    }

    /// The end of a turn that was about these messages, without a word on their fates.
    pub(super) async fn result(&mut self, uuids: &[&str], result: Value) {
        self.total += 0.5;
        let mut line = json!({"is_error": false, "subtype": "success", "stop_reason": "end_turn",
            "terminal_reason": "completed", "total_cost_usd": self.total});
        if !uuids.is_empty() {
            line["user_message_uuids"] = json!(uuids);
        }
        for (name, value) in result.as_object().expect("fields") {
            line[name] = value.clone();
        }
        // Not the first of its fields, as in the real one.
        line["type"] = json!("result");
        self.send(line).await;
    }

    /// The end of a turn, as the real one tells it.
    pub(super) async fn end(&mut self, uuid: &str, text: &str) {
        self.result(&[uuid], json!({"result": text})).await;
        self.fate(uuid, "completed").await;
    }

    /// The end of a turn that was interrupted.
    pub(super) async fn abort(&mut self, uuid: &str) {
        let aborted = json!({"is_error": true, "subtype": "error_during_execution", "stop_reason": null,
            "terminal_reason": "aborted_streaming", "errors": ["[diagnostic]"]});
        self.result(&[uuid], aborted).await;
        self.fate(uuid, "cancelled").await;
    }
}
