//! A server by hand: the test writes its every line, and says what it must have been told.

use serde_json::{Value, json};
use tokio::io::DuplexStream;

use crate::drivers::stage::{Far, by_hand};

/// A server by hand, with a thread `t`.
pub(super) struct Hand {
    far: Far,
}

by_hand!(Hand);

impl Hand {
    pub(super) fn new(far: DuplexStream) -> Self {
        Self { far: Far::new(far) }
    }

    /// The next message, which answers this request; gives the answer.
    pub(super) async fn expect_answer(&mut self, id: Value) -> Value {
        let mut message = self.hear().await;
        assert_eq!(message["id"], id, "{message}");
        assert!(message.get("method").is_none(), "{message}");
        match message.get("error") {
            Some(error) => json!({"error": error["code"]}),
            None => message["result"].take(),
        }
    }

    pub(super) async fn tell(&mut self, method: &str, params: Value) {
        self.write(&json!({"method": method, "params": params}).to_string()).await;
    }

    pub(super) async fn ask(&mut self, id: Value, method: &str, params: Value) {
        self.write(&json!({"id": id, "method": method, "params": params}).to_string()).await;
    }

    pub(super) async fn answer(&mut self, id: Value, result: Value) {
        self.write(&json!({"id": id, "result": result}).to_string()).await;
    }

    pub(super) async fn refuse(&mut self, id: Value, message: &str) {
        self.write(&json!({"id": id, "error": {"code": -32600, "message": message}}).to_string()).await;
    }

    /// The handshake, up to where a thread is wanted.
    pub(super) async fn greet(&mut self, config: Value) {
        let (id, hello) = self.expect("initialize").await;
        assert_eq!(hello["clientInfo"]["name"], "quarterdeck");
        assert_eq!(hello["capabilities"]["experimentalApi"], true);
        self.answer(id, json!({"userAgent": "x"})).await;
        self.expect("initialized").await;
        let (id, _) = self.expect("config/read").await;
        self.answer(id, json!({"config": config})).await;
    }

    /// The whole opening; gives what the thread was started with.
    pub(super) async fn open(&mut self) -> Value {
        self.greet(json!({"approval_policy": null})).await;
        let (id, params) = self.expect("thread/start").await;
        self.answer(id, thread("t")).await;
        params
    }

    /// Takes a prompt as a turn of this name; gives its input.
    pub(super) async fn take(&mut self, turn: &str) -> Value {
        let (id, mut params) = self.expect("turn/start").await;
        assert_eq!(params["threadId"], "t");
        self.name(id, turn).await;
        params["input"].take()
    }

    /// Answers that a prompt has become a turn of this name.
    pub(super) async fn name(&mut self, id: Value, turn: &str) {
        self.answer(id, json!({"turn": {"id": turn, "status": "inProgress", "items": []}})).await;
    }

    pub(super) async fn started(&mut self, turn: &str) {
        self.turned("turn/started", "t", turn, "inProgress").await;
    }

    pub(super) async fn completed(&mut self, turn: &str, status: &str) {
        self.turned("turn/completed", "t", turn, status).await;
    }

    pub(super) async fn turned(&mut self, method: &str, thread: &str, turn: &str, status: &str) {
        let turn = json!({"id": turn, "status": status, "error": null, "items": []});
        self.tell(method, json!({"threadId": thread, "turn": turn})).await;
    }

    /// A piece of a message.
    pub(super) async fn say(&mut self, turn: &str, item: &str, delta: &str) {
        let params = json!({"threadId": "t", "turnId": turn, "itemId": item, "delta": delta});
        self.tell("item/agentMessage/delta", params).await;
    }

    /// An item begins or ends.
    pub(super) async fn item(&mut self, method: &str, turn: &str, item: Value) {
        self.tell(method, json!({"threadId": "t", "turnId": turn, "item": item})).await;
    }

    /// Totals and the last call, as input and output.
    pub(super) async fn used(&mut self, thread: &str, turn: &str, total: (u64, u64), last: (u64, u64)) {
        let tokens = |(input, output): (u64, u64)| json!({"inputTokens": input, "outputTokens": output, "cachedInputTokens": 0});
        let usage = json!({"total": tokens(total), "last": tokens(last)});
        let params = json!({"threadId": thread, "turnId": turn, "tokenUsage": usage});
        self.tell("thread/tokenUsage/updated", params).await;
    }

    /// Is told to stop this turn, and to end its commands; gives the ids of both requests.
    pub(super) async fn expect_interrupt(&mut self, turn: &str) -> (Value, Value) {
        let (interrupt, params) = self.expect("turn/interrupt").await;
        assert_eq!(params, json!({"threadId": "t", "turnId": turn}));
        (interrupt, self.expect_clean().await)
    }

    pub(super) async fn expect_clean(&mut self) -> Value {
        let (clean, params) = self.expect("thread/backgroundTerminals/clean").await;
        assert_eq!(params, json!({"threadId": "t"}));
        clean
    }

    /// Ends a turn that was told to stop, and does what is wanted then.
    pub(super) async fn stop(&mut self, turn: &str) {
        self.completed(turn, "interrupted").await;
        let clean = self.expect_clean().await;
        self.answer(clean, json!({})).await;
    }
}

/// The answer to the start of a thread.
pub(super) fn thread(id: &str) -> Value {
    json!({"thread": {"id": id, "turns": []}, "model": "m", "sandbox": {"type": "readOnly"}, "approvalPolicy": "on-request"})
}

/// A command, as an item.
pub(super) fn command(id: &str, status: &str) -> Value {
    json!({"type": "commandExecution", "id": id, "command": "/bin/bash -lc 'make it'", "cwd": "/w", "status": status,
        "aggregatedOutput": null, "exitCode": null, "commandActions": []})
}
