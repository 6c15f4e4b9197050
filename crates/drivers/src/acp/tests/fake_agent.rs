//! A fake agent for tests: the agent's side of the protocol, as far as these tests need it.

use serde_json::{Value, json};
use tokio::io::DuplexStream;

use crate::harness::{AgentPipe, deref_to_agent_pipe};

pub(super) struct FakeAcpAgent {
    pub(super) far: AgentPipe,
}

deref_to_agent_pipe!(FakeAcpAgent);

impl FakeAcpAgent {
    pub(super) fn new(pipe: DuplexStream) -> Self {
        Self { far: AgentPipe::new(pipe) }
    }

    pub(super) async fn send(&mut self, mut message: Value) {
        message["jsonrpc"] = json!("2.0");
        self.write_line(&message.to_string()).await;
    }

    pub(super) async fn send_response(&mut self, id: Value, result: Value) {
        self.send(json!({"id": id, "result": result})).await;
    }

    pub(super) async fn send_text(&mut self, text: &str) {
        let content = json!({"type": "text", "text": text});
        self.send_update(json!({"sessionUpdate": "agent_message_chunk", "content": content})).await;
    }

    pub(super) async fn send_update(&mut self, update: Value) {
        self.send(json!({"method": "session/update", "params": {"sessionId": "s", "update": update}})).await;
    }

    pub(super) async fn request_permission(&mut self, id: Value, tool: &str) {
        let options = json!([
            {"optionId": "for-ever", "name": "Always", "kind": "allow_always"},
            {"optionId": "once", "name": "Once", "kind": "allow_once"},
            {"optionId": "never", "name": "No", "kind": "reject_once"},
        ]);
        let call = json!({"toolCallId": tool, "title": tool, "rawInput": {"command": tool}});
        self.request_permission_for(id, call, options).await;
    }

    /// Requests permission with any tool call and options.
    pub(super) async fn request_permission_for(&mut self, id: Value, call: Value, options: Value) {
        let params = json!({"sessionId": "s", "toolCall": call, "options": options});
        self.send(json!({"id": id, "method": "session/request_permission", "params": params})).await;
    }

    /// Completes the handshake.
    pub(super) async fn handshake(&mut self) {
        self.handshake_with(json!({"sessionId": "s"})).await;
    }

    /// Completes the handshake with this response to `session/new`.
    pub(super) async fn handshake_with(&mut self, session: Value) {
        self.initialize(json!({})).await;
        let (id, _) = self.expect_method("session/new").await;
        self.send_response(id, session).await;
    }

    /// The first half of the handshake: announces the capabilities.
    pub(super) async fn initialize(&mut self, capabilities: Value) {
        let (id, hello) = self.expect_method("initialize").await;
        assert_eq!(hello["protocolVersion"], 1);
        self.send_response(id, json!({"protocolVersion": 1, "agentCapabilities": capabilities})).await;
    }

    /// Waits for a prompt and returns its request id, with which its turn is ended.
    pub(super) async fn expect_prompt(&mut self) -> Value {
        self.expect_method("session/prompt").await.0
    }

    pub(super) async fn end_turn(&mut self, prompt: Value, reason: &str) {
        self.send_response(prompt, json!({"stopReason": reason})).await;
    }

    /// Ends the turn successfully and waits until the driver hangs up.
    pub(super) async fn finish_turn(&mut self, prompt: Value) {
        self.end_turn(prompt, "end_turn").await;
        self.wait_for_hang_up().await;
    }
}
