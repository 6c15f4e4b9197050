//! An agent by hand: its side of the protocol, as far as these tests need it.

use serde_json::{Value, json};
use tokio::io::DuplexStream;

use crate::drivers::stage::{Far, by_hand};

/// An agent by hand.
pub(super) struct Hand {
    pub(super) far: Far,
}

by_hand!(Hand);

impl Hand {
    pub(super) fn new(far: DuplexStream) -> Self {
        Self { far: Far::new(far) }
    }

    pub(super) async fn send(&mut self, mut message: Value) {
        message["jsonrpc"] = json!("2.0");
        self.write(&message.to_string()).await;
    }

    pub(super) async fn answer(&mut self, id: Value, result: Value) {
        self.send(json!({"id": id, "result": result})).await;
    }

    pub(super) async fn say(&mut self, text: &str) {
        let content = json!({"type": "text", "text": text});
        self.update(json!({"sessionUpdate": "agent_message_chunk", "content": content})).await;
    }

    pub(super) async fn update(&mut self, update: Value) {
        self.send(json!({"method": "session/update", "params": {"sessionId": "s", "update": update}})).await;
    }

    /// Asks for permission.
    pub(super) async fn ask(&mut self, id: Value, tool: &str) {
        let options = json!([
            {"optionId": "for-ever", "name": "Always", "kind": "allow_always"},
            {"optionId": "once", "name": "Once", "kind": "allow_once"},
            {"optionId": "never", "name": "No", "kind": "reject_once"},
        ]);
        let call = json!({"toolCallId": tool, "title": tool, "rawInput": {"command": tool}});
        self.ask_about(id, call, options).await;
    }

    /// The same in any words.
    pub(super) async fn ask_about(&mut self, id: Value, call: Value, options: Value) {
        let params = json!({"sessionId": "s", "toolCall": call, "options": options});
        self.send(json!({"id": id, "method": "session/request_permission", "params": params})).await;
    }

    /// The handshake.
    pub(super) async fn open(&mut self) {
        self.open_with(json!({"sessionId": "s"})).await;
    }

    /// The handshake, with what it lets its client choose.
    pub(super) async fn open_with(&mut self, session: Value) {
        self.greet(json!({})).await;
        let (id, _) = self.expect("session/new").await;
        self.answer(id, session).await;
    }

    /// The first half of it: what it can do.
    pub(super) async fn greet(&mut self, can: Value) {
        let (id, hello) = self.expect("initialize").await;
        assert_eq!(hello["protocolVersion"], 1);
        self.answer(id, json!({"protocolVersion": 1, "agentCapabilities": can})).await;
    }

    /// Takes a prompt; gives the id by which its turn is ended.
    pub(super) async fn prompted(&mut self) -> Value {
        self.expect("session/prompt").await.0
    }

    pub(super) async fn end(&mut self, prompt: Value, reason: &str) {
        self.answer(prompt, json!({"stopReason": reason})).await;
    }
    /// Ends its turn well, and lives until the other side hangs up.
    pub(super) async fn finish(&mut self, prompt: Value) {
        self.end(prompt, "end_turn").await;
        self.idle().await;
    }
}
