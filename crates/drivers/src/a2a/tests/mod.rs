//! Tests of the driver, seen from the session's end of a link. At the other end is a server on loopback whose every
//! response the test gives itself, in both wire formats.

mod cancels;
mod reconnects;
mod server;
mod starts;
mod turns;

use std::time::Duration;

use qd_link::{LocalLinkEvent, SessionEndpoint};
use qd_protocol::event::{AskAnswer, RunError};
use qd_protocol::link::{
    AgentCommand, AgentExitReason, AgentUpdate, AskRequest, AskResolution, TurnLimits, TurnOutcome,
    TurnStopReason, TurnUpdate,
};
use qd_protocol::worker::AgentSpec;
use qd_protocol::{EventNumber, RunId, SessionId, WorkerId};
use serde_json::{Value, json};

use self::server::FakeA2aServer;
use super::card::A2aVersion;
use crate::harness::host_remote_agent;

/// How long a test waits for anything: a safety net, not an expectation.
const LIMIT: Duration = Duration::from_secs(30);

async fn with_timeout<F: Future>(what: &str, future: F) -> F::Output {
    match tokio::time::timeout(LIMIT, future).await {
        Ok(value) => value,
        Err(_) => panic!("waited {LIMIT:?} in vain for {what}"),
    }
}

/// The session's side of one agent.
struct A2aDriverHarness {
    link_end: SessionEndpoint,
    /// The number of the last command sent to the agent.
    number: u64,
    /// Received updates that were not returned yet, in reverse order.
    unread: Vec<AgentUpdate>,
}

/// The updates of a turn and its outcome.
#[derive(Debug)]
struct A2aFinishedTurn {
    updates: Vec<AgentUpdate>,
    outcome: TurnOutcome,
}

impl A2aFinishedTurn {
    fn text(&self) -> String {
        self.joined_texts(|update| match update {
            TurnUpdate::Text { text } => Some(text),
            _ => None,
        })
    }

    fn thoughts(&self) -> String {
        self.joined_texts(|update| match update {
            TurnUpdate::Thought { text } => Some(text),
            _ => None,
        })
    }

    fn notices(&self) -> String {
        self.joined_texts(|update| match update {
            TurnUpdate::Notice { text, .. } => Some(text),
            _ => None,
        })
    }

    fn joined_texts(&self, text_of: impl Fn(&TurnUpdate) -> Option<&String>) -> String {
        let texts = self.updates.iter().filter_map(|up| match up {
            AgentUpdate::Turn { update: turn_update, .. } => text_of(turn_update),
            _ => None,
        });
        texts.map(String::as_str).collect()
    }

    fn stop(&self) -> TurnStopReason {
        self.outcome.stop
    }

    fn error(&self) -> &RunError {
        self.outcome.error.as_ref().expect("it failed")
    }
}

impl A2aDriverHarness {
    /// An agent that is ready behind this card, and its server.
    async fn ready(card: impl FnOnce(&FakeA2aServer) -> Value) -> (Self, FakeA2aServer) {
        let server = FakeA2aServer::start().await;
        server.set_card(&card(&server));
        let mut harness = Self::start(&server.url(""), |_| {});
        assert_eq!(harness.next_update().await, AgentUpdate::Ready { agent_session_id: None, steers: false });
        (harness, server)
    }

    /// An agent that was started, before it is ready.
    fn start(url: &str, change: impl FnOnce(&mut AgentSpec)) -> Self {
        let name = format!("a2a:{url}");
        let mut spec =
            AgentSpec::new(SessionId::from_random(&[7; 8]), WorkerId::from_random(&[8; 8]), &name, "/w");
        change(&mut spec);
        Self { link_end: host_remote_agent(spec), number: 0, unread: Vec::new() }
    }

    fn next_number(&mut self) -> EventNumber {
        self.number += 1;
        EventNumber(self.number)
    }

    fn prompt(&mut self, name: &str, prompt: &str) {
        let number = self.next_number();
        self.link_end.send(AgentCommand::Prompt {
            number,
            run: run_id(name),
            prompt: prompt.to_owned(),
            mode: None,
            files: vec![],
            messages: vec![],
            limits: TurnLimits::default(),
        });
    }

    fn cancel(&mut self, name: &str) {
        let number = self.next_number();
        self.link_end.send(AgentCommand::Cancel { number, run: run_id(name) });
    }

    fn kill(&mut self, name: &str) {
        let number = self.next_number();
        self.link_end.send(AgentCommand::Kill { number, run: run_id(name) });
    }

    fn answer(&mut self, ask: &AskRequest, answer: AskAnswer) {
        let number = self.next_number();
        self.link_end.send(AgentCommand::Answer {
            number,
            ask: ask.id.clone(),
            answer: AskResolution::Answered(answer),
        });
    }

    fn answer_value(&mut self, ask: &AskRequest, value: &str) {
        self.answer(ask, AskAnswer { value: Some(value.to_owned()), ..AskAnswer::default() });
    }

    async fn next_update(&mut self) -> AgentUpdate {
        while self.unread.is_empty() {
            match with_timeout("an update of the agent", self.link_end.next_event()).await {
                LocalLinkEvent::Updates(updates) => {
                    self.unread.extend(updates.into_iter().rev().map(|update| update.update))
                }
                other => panic!("received {other:?}"),
            }
        }
        self.unread.pop().expect("there was one")
    }

    /// Waits until the agent has exited and returns why.
    async fn wait_for_exit(&mut self) -> AgentExitReason {
        loop {
            match with_timeout("the end of the agent", self.link_end.next_event()).await {
                LocalLinkEvent::Updates(_) => {}
                LocalLinkEvent::Gone(reason) => return reason,
            }
        }
    }

    async fn wait_for_failure(&mut self) -> RunError {
        match self.wait_for_exit().await {
            AgentExitReason::Failed(error) => error,
            other => panic!("it is {other:?}"),
        }
    }

    /// Everything until the end of this run.
    async fn wait_for_end(&mut self, name: &str) -> A2aFinishedTurn {
        let mut updates = Vec::new();
        loop {
            match self.next_update().await {
                AgentUpdate::TurnEnded { run: ended, outcome } if ended == run_id(name) => {
                    return A2aFinishedTurn { updates, outcome };
                }
                update => updates.push(update),
            }
        }
    }

    async fn wait_for_ask(&mut self) -> AskRequest {
        loop {
            if let AgentUpdate::Ask { ask, .. } = self.next_update().await {
                return ask;
            }
        }
    }

    /// Waits until this text was emitted.
    async fn wait_for_text(&mut self, wanted: &str) {
        loop {
            if let AgentUpdate::Turn {
                update: TurnUpdate::Text { text } | TurnUpdate::Thought { text }, ..
            } = self.next_update().await
                && text.contains(wanted)
            {
                return;
            }
        }
    }
}

/// A ready agent with streams, in this format, that has been sent the prompt `x` of the run `a`.
async fn start_turn(version: A2aVersion) -> (A2aTestFormat, A2aDriverHarness, FakeA2aServer) {
    let (mut harness, server) = A2aDriverHarness::ready(card(version, true)).await;
    harness.prompt("a", "x");
    (A2aTestFormat(version), harness, server)
}

fn run_id(name: &str) -> RunId {
    RunId::parse(name).expect("a good id")
}

fn card(version: A2aVersion, streams: bool) -> impl FnOnce(&FakeA2aServer) -> Value {
    move |server| {
        let url = server.url("/rpc");
        match version {
            A2aVersion::V1_0 => json!({"name": "x", "capabilities": {"streaming": streams},
                "supportedInterfaces": [{"url": "/rpc", "protocolBinding": "JSONRPC", "protocolVersion": "1.0"}]}),
            A2aVersion::V0_3 => {
                json!({"name": "x", "url": url, "protocolVersion": "0.3.0", "capabilities": {"streaming": streams}})
            }
        }
    }
}

/// Messages in the format of one version, about a task `t` in a conversation `c`.
#[derive(Clone, Copy)]
struct A2aTestFormat(A2aVersion);

impl A2aTestFormat {
    fn method(self, name: &'static str) -> &'static str {
        match (self.0, name) {
            (A2aVersion::V1_0, name) => name,
            (A2aVersion::V0_3, "SendMessage") => "message/send",
            (A2aVersion::V0_3, "SendStreamingMessage") => "message/stream",
            (A2aVersion::V0_3, "GetTask") => "tasks/get",
            (A2aVersion::V0_3, "CancelTask") => "tasks/cancel",
            (A2aVersion::V0_3, "SubscribeToTask") => "tasks/resubscribe",
            (_, other) => panic!("there is no {other}"),
        }
    }

    fn part(self, text: &str) -> Value {
        super::messages::text_part(self.0, text)
    }

    fn message(self, id: &str, text: &str) -> Value {
        let parts = [self.part(text)];
        match self.0 {
            A2aVersion::V1_0 => {
                json!({"messageId": id, "role": "ROLE_AGENT", "contextId": "c", "parts": parts})
            }
            A2aVersion::V0_3 => {
                json!({"kind": "message", "messageId": id, "role": "agent", "contextId": "c", "parts": parts})
            }
        }
    }

    /// The status of the task, with the id and text of a message.
    fn task_status(self, state: &str, message: Option<(&str, &str)>) -> Value {
        let state = match self.0 {
            A2aVersion::V1_0 => format!("TASK_STATE_{}", state.to_uppercase().replace('-', "_")),
            A2aVersion::V0_3 => state.to_owned(),
        };
        match message {
            Some((id, text)) => json!({"state": state, "message": self.message(id, text)}),
            None => json!({ "state": state }),
        }
    }

    fn status(self, state: &str, message: Option<(&str, &str)>) -> Value {
        let status = self.task_status(state, message);
        match self.0 {
            A2aVersion::V1_0 => json!({"statusUpdate": {"taskId": "t", "contextId": "c", "status": status}}),
            A2aVersion::V0_3 => {
                json!({"kind": "status-update", "taskId": "t", "contextId": "c", "status": status, "final": false})
            }
        }
    }

    fn artifact(self, id: &str, text: &str, append: bool) -> Value {
        let artifact = json!({"artifactId": id, "parts": [self.part(text)]});
        match self.0 {
            A2aVersion::V1_0 => json!({"artifactUpdate":
                {"taskId": "t", "contextId": "c", "artifact": artifact, "append": append}}),
            A2aVersion::V0_3 => {
                json!({"kind": "artifact-update", "taskId": "t", "contextId": "c", "artifact": artifact, "append": append})
            }
        }
    }

    /// The task as a call returns it, with its artifacts so far.
    fn task(self, state: &str, message: Option<(&str, &str)>, artifacts: &[(&str, &str)]) -> Value {
        let artifacts: Vec<Value> = artifacts
            .iter()
            .map(|(id, text)| json!({"artifactId": id, "parts": [self.part(text)]}))
            .collect();
        let mut task = json!({"id": "t", "contextId": "c", "status": self.task_status(state, message), "artifacts": artifacts});
        if self.0 == A2aVersion::V0_3 {
            task["kind"] = json!("task");
        }
        task
    }

    /// The task as an event, or as the response to a message.
    fn task_event(self, state: &str, message: Option<(&str, &str)>, artifacts: &[(&str, &str)]) -> Value {
        let task = self.task(state, message, artifacts);
        match self.0 {
            A2aVersion::V1_0 => json!({ "task": task }),
            A2aVersion::V0_3 => task,
        }
    }
}

const ALL_VERSIONS: [A2aVersion; 2] = [A2aVersion::V1_0, A2aVersion::V0_3];
