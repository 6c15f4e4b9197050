//! A fake server: the test writes its every line and states which messages it must get.

use serde_json::{Value, json};
use tokio::io::DuplexStream;

use crate::harness::{AgentPipe, deref_to_agent_pipe};

/// A fake server with the thread `t`.
pub(super) struct FakeCodexAgent {
    far: AgentPipe,
}

deref_to_agent_pipe!(FakeCodexAgent);

impl FakeCodexAgent {
    pub(super) fn new(pipe: DuplexStream) -> Self {
        Self { far: AgentPipe::new(pipe) }
    }

    /// Expects the response to this request and returns its result.
    pub(super) async fn expect_answer(&mut self, id: Value) -> Value {
        let mut message = self.next_json().await;
        assert_eq!(message["id"], id, "{message}");
        assert!(message.get("method").is_none(), "{message}");
        match message.get("error") {
            Some(error) => json!({"error": error["code"]}),
            None => message["result"].take(),
        }
    }

    pub(super) async fn notify(&mut self, method: &str, params: Value) {
        self.write_line(&json!({"method": method, "params": params}).to_string()).await;
    }

    pub(super) async fn send_request(&mut self, id: Value, method: &str, params: Value) {
        self.write_line(&json!({"id": id, "method": method, "params": params}).to_string()).await;
    }

    pub(super) async fn send_response(&mut self, id: Value, result: Value) {
        self.write_line(&json!({"id": id, "result": result}).to_string()).await;
    }

    pub(super) async fn send_error(&mut self, id: Value, message: &str) {
        self.write_line(&json!({"id": id, "error": {"code": -32600, "message": message}}).to_string()).await;
    }

    /// The handshake up to the point where a thread is opened.
    pub(super) async fn initialize(&mut self, config: Value) {
        let (id, hello) = self.expect_method("initialize").await;
        assert_eq!(hello["clientInfo"]["name"], "quarterdeck");
        assert_eq!(hello["capabilities"]["experimentalApi"], true);
        self.send_response(id, json!({"userAgent": "x"})).await;
        self.expect_method("initialized").await;
        let (id, _) = self.expect_method("config/read").await;
        self.send_response(id, json!({"config": config})).await;
    }

    /// The whole handshake. Returns the parameters that the thread was started with.
    pub(super) async fn handshake(&mut self) -> Value {
        self.initialize(json!({"approval_policy": null})).await;
        let (id, params) = self.expect_method("thread/start").await;
        self.send_response(id, thread_response("t")).await;
        params
    }

    /// Accepts a prompt as a turn with this id, and returns its input.
    pub(super) async fn accept_prompt(&mut self, turn: &str) -> Value {
        let (id, mut params) = self.expect_method("turn/start").await;
        assert_eq!(params["threadId"], "t");
        self.name_turn(id, turn).await;
        params["input"].take()
    }

    /// Answers a prompt with the id of its turn.
    pub(super) async fn name_turn(&mut self, id: Value, turn: &str) {
        self.send_response(id, json!({"turn": {"id": turn, "status": "inProgress", "items": []}})).await;
    }

    pub(super) async fn start_turn(&mut self, turn: &str) {
        self.send_turn_event("turn/started", "t", turn, "inProgress").await;
    }

    pub(super) async fn complete_turn(&mut self, turn: &str, status: &str) {
        self.send_turn_event("turn/completed", "t", turn, status).await;
    }

    pub(super) async fn send_turn_event(&mut self, method: &str, thread: &str, turn: &str, status: &str) {
        let turn = json!({"id": turn, "status": status, "error": null, "items": []});
        self.notify(method, json!({"threadId": thread, "turn": turn})).await;
    }

    /// Sends a piece of a message.
    pub(super) async fn send_text(&mut self, turn: &str, item: &str, delta: &str) {
        let params = json!({"threadId": "t", "turnId": turn, "itemId": item, "delta": delta});
        self.notify("item/agentMessage/delta", params).await;
    }

    /// Sends the start or the end of an item.
    pub(super) async fn send_item(&mut self, method: &str, turn: &str, item: Value) {
        self.notify(method, json!({"threadId": "t", "turnId": turn, "item": item})).await;
    }

    /// Sends a usage report. Both pairs are input and output tokens.
    pub(super) async fn send_usage(&mut self, thread: &str, turn: &str, total: (u64, u64), last: (u64, u64)) {
        let tokens = |(input, output): (u64, u64)| json!({"inputTokens": input, "outputTokens": output, "cachedInputTokens": 0});
        let usage = json!({"total": tokens(total), "last": tokens(last)});
        let params = json!({"threadId": thread, "turnId": turn, "tokenUsage": usage});
        self.notify("thread/tokenUsage/updated", params).await;
    }

    /// Expects an interrupt of this turn and the request to end its commands. Returns the ids of both requests.
    pub(super) async fn expect_interrupt(&mut self, turn: &str) -> (Value, Value) {
        let (interrupt, params) = self.expect_method("turn/interrupt").await;
        assert_eq!(params, json!({"threadId": "t", "turnId": turn}));
        (interrupt, self.expect_clean().await)
    }

    pub(super) async fn expect_clean(&mut self) -> Value {
        let (clean, params) = self.expect_method("thread/backgroundTerminals/clean").await;
        assert_eq!(params, json!({"threadId": "t"}));
        clean
    }

    /// Ends an interrupted turn and answers the request to end its commands.
    pub(super) async fn stop_turn(&mut self, turn: &str) {
        self.complete_turn(turn, "interrupted").await;
        let clean = self.expect_clean().await;
        self.send_response(clean, json!({})).await;
    }
}

/// The response to the start of a thread.
pub(super) fn thread_response(id: &str) -> Value {
    json!({"thread": {"id": id, "turns": []}, "model": "m", "sandbox": {"type": "readOnly"}, "approvalPolicy": "on-request"})
}

/// A command item.
pub(super) fn command_item(id: &str, status: &str) -> Value {
    json!({"type": "commandExecution", "id": id, "command": "/bin/bash -lc 'make it'", "cwd": "/w", "status": status,
        "aggregatedOutput": null, "exitCode": null, "commandActions": []})
}
