//! A fake agent for tests: Claude Code's side of the protocol, as far as these tests need it.

use serde_json::{Value, json};
use tokio::io::DuplexStream;

use crate::harness::{AgentPipe, deref_to_agent_pipe};

pub(super) struct FakeClaudeAgent {
    far: AgentPipe,
    message_count: u32,
    /// The total cost that the agent reports.
    pub(super) total_cost: f64,
}

deref_to_agent_pipe!(FakeClaudeAgent);

impl FakeClaudeAgent {
    pub(super) fn new(pipe: DuplexStream) -> Self {
        Self { far: AgentPipe::new(pipe), message_count: 0, total_cost: 0.0 }
    }

    pub(super) async fn send(&mut self, message: Value) {
        self.write_line(&message.to_string()).await;
    }

    /// Completes the handshake.
    pub(super) async fn handshake(&mut self) {
        let hello = self.expect_control_request("initialize").await;
        self.answer_request(&hello, json!({"commands": [], "pid": 1})).await;
    }

    /// Expects a control request of this subtype and returns its id.
    pub(super) async fn expect_control_request(&mut self, subtype: &str) -> String {
        let line = self.next_json().await;
        assert_eq!(line["request"]["subtype"], subtype, "{line}");
        line["request_id"].as_str().expect("an id").to_owned()
    }

    pub(super) async fn answer_request(&mut self, id: &str, answer: Value) {
        let response = json!({"subtype": "success", "request_id": id, "response": answer});
        self.send(json!({"type": "control_response", "response": response})).await;
    }

    /// Expects an interrupt that also cancels queued messages, and acknowledges it.
    pub(super) async fn expect_interrupt(&mut self) {
        let line = self.next_json().await;
        assert_eq!(line["request"], json!({"subtype": "interrupt", "cancel_queued": true}), "{line}");
        let id = line["request_id"].as_str().expect("an id").to_owned();
        self.answer_request(&id, json!({"still_queued": [], "cancelled": []})).await;
    }

    /// Expects a user message and returns its UUID and text.
    pub(super) async fn expect_user_message(&mut self) -> (String, String) {
        let line = self.next_json().await;
        assert_eq!(line["type"], "user", "{line}");
        let text = line["message"]["content"][0]["text"].as_str().expect("text").to_owned();
        (line["uuid"].as_str().expect("a UUID").to_owned(), text)
    }

    /// Expects a prompt and starts on it. Returns its UUID.
    pub(super) async fn start_prompt(&mut self) -> String {
        let (uuid, _) = self.expect_user_message().await;
        self.send_lifecycle(&uuid, "queued").await;
        self.send_lifecycle(&uuid, "started").await;
        self.send(json!({"type": "system", "subtype": "init", "session_id": "s"})).await;
        uuid
    }

    pub(super) async fn send_lifecycle(&mut self, uuid: &str, state: &str) {
        self.send(json!({"type": "command_lifecycle", "command_uuid": uuid, "state": state})).await;
    }

    /// Sends text in pieces and then whole, as the real program does.
    pub(super) async fn send_text(&mut self, text: &str) {
        self.message_count += 1;
        let id = format!("msg_{}", self.message_count);
        let usage = json!({"input_tokens": 10, "cache_read_input_tokens": 5, "output_tokens": 1});
        let message = json!({"id": id, "model": "m", "usage": usage});
        self.send_stream_event(json!({"type": "message_start", "message": message})).await;
        for piece in text.split_inclusive(' ') {
            let delta = json!({"type": "text_delta", "text": piece});
            self.send_stream_event(json!({"type": "content_block_delta", "index": 0, "delta": delta})).await;
        }
        self.send_assistant_message(&id, json!({"type": "text", "text": text})).await;
        self.send_stream_event(json!({"type": "message_delta", "usage": {"output_tokens": 7}})).await;
    }

    pub(super) async fn send_stream_event(&mut self, event: Value) {
        self.send(json!({"type": "stream_event", "event": event, "parent_tool_use_id": null})).await;
    }

    pub(super) async fn send_assistant_message(&mut self, id: &str, block: Value) {
        let message = json!({"id": id, "model": "m", "content": [block]});
        self.send(json!({"type": "assistant", "message": message, "parent_tool_use_id": null})).await;
    }

    pub(super) async fn request_permission(&mut self, id: &str, tool: &str, input: Value) {
        let suggestions = json!([{"type": "addRules", "behavior": "allow"}]);
        let request = json!({"subtype": "can_use_tool", "tool_name": tool, "input": input,
            "permission_suggestions": suggestions, "requires_user_interaction": tool == "AskUserQuestion"});
        self.send(json!({"type": "control_request", "request_id": id, "request": request})).await;
    }

    /// Expects the response to the request with this id.
    pub(super) async fn expect_answer(&mut self, id: &str) -> Value {
        let mut line = self.next_json().await;
        assert_eq!(line["response"]["request_id"], id, "{line}");
        line["response"].take()
    }

    /// Ends the turn of these messages with a result, without lifecycle reports.
    pub(super) async fn send_result(&mut self, uuids: &[&str], result: Value) {
        self.total_cost += 0.5;
        let mut line = json!({"is_error": false, "subtype": "success", "stop_reason": "end_turn",
            "terminal_reason": "completed", "total_cost_usd": self.total_cost});
        if !uuids.is_empty() {
            line["user_message_uuids"] = json!(uuids);
        }
        for (name, value) in result.as_object().expect("fields") {
            line[name] = value.clone();
        }
        // The type is not the first field, as in the real program.
        line["type"] = json!("result");
        self.send(line).await;
    }

    /// Ends a turn as the real program does.
    pub(super) async fn end_turn(&mut self, uuid: &str, text: &str) {
        self.send_result(&[uuid], json!({"result": text})).await;
        self.send_lifecycle(uuid, "completed").await;
    }

    /// Ends a turn that was interrupted.
    pub(super) async fn abort_turn(&mut self, uuid: &str) {
        let aborted = json!({"is_error": true, "subtype": "error_during_execution", "stop_reason": null,
            "terminal_reason": "aborted_streaming", "errors": ["[diagnostic]"]});
        self.send_result(&[uuid], aborted).await;
        self.send_lifecycle(uuid, "cancelled").await;
    }
}
