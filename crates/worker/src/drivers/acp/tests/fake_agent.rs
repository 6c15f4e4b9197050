//! An agent by hand: its side of the protocol, as far as these tests need it.

use serde_json::{Value, json};
use tokio::io::DuplexStream;

use crate::drivers::harness::{AgentPipe, deref_to_agent_pipe};

/// An agent by hand.
pub(super) struct FakeAcpAgent {
    pub(super) far: AgentPipe,
}

deref_to_agent_pipe!(FakeAcpAgent);

impl FakeAcpAgent {
    pub(super) fn new(far: DuplexStream) -> Self {
        Self { far: AgentPipe::new(far) }
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

    /// Asks for permission.
    pub(super) async fn request_permission(&mut self, id: Value, tool: &str) {
        let options = json!([
            {"optionId": "for-ever", "name": "Always", "kind": "allow_always"},
            {"optionId": "once", "name": "Once", "kind": "allow_once"},
            {"optionId": "never", "name": "No", "kind": "reject_once"},
        ]);
        let call = json!({"toolCallId": tool, "title": tool, "rawInput": {"command": tool}});
        self.request_permission_for(id, call, options).await;
    }

    /// The same in any words.
    pub(super) async fn request_permission_for(&mut self, id: Value, call: Value, options: Value) {
        let params = json!({"sessionId": "s", "toolCall": call, "options": options});
        self.send(json!({"id": id, "method": "session/request_permission", "params": params})).await;
    }

    /// The handshake.
    pub(super) async fn handshake(&mut self) {
        self.handshake_with(json!({"sessionId": "s"})).await;
    }

    /// The handshake, with what it lets its client choose.
    pub(super) async fn handshake_with(&mut self, session: Value) {
        self.initialize(json!({})).await;
        let (id, _) = self.expect_method("session/new").await;
        self.send_response(id, session).await;
    }

    /// The first half of it: what it can do.
    pub(super) async fn initialize(&mut self, can: Value) {
        let (id, hello) = self.expect_method("initialize").await;
        assert_eq!(hello["protocolVersion"], 1);
        self.send_response(id, json!({"protocolVersion": 1, "agentCapabilities": can})).await;
    }

    /// Takes a prompt; gives the id by which its turn is ended.
    pub(super) async fn expect_prompt(&mut self) -> Value {
        self.expect_method("session/prompt").await.0
    }

    pub(super) async fn end_turn(&mut self, prompt: Value, reason: &str) {
        self.send_response(prompt, json!({"stopReason": reason})).await;
    }
    /// Ends its turn well, and lives until the other side hangs up.
    pub(super) async fn finish_turn(&mut self, prompt: Value) {
        self.end_turn(prompt, "end_turn").await;
        self.wait_for_hang_up().await;
    }
}
