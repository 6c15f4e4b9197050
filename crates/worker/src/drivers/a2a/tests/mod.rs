//! Promises of the driver, seen from the session's end of a link. At the other end is a server on loopback whose every
//! answer the test gives itself, in both wire forms.

mod cancels;
mod reconnects;
mod server;
mod starts;
mod turns;

use std::sync::Arc;
use std::time::Duration;

use qd_link::{LocalLinkEvent, SessionEndpoint, host_agent_with_filter};
use qd_protocol::event::{AskAnswer, RunError};
use qd_protocol::link::{
    AgentCommand, AgentExitReason, AgentUpdate, AskRequest, AskResolution, TurnLimits, TurnOutcome,
    TurnStopReason, TurnUpdate, UpdateNumber,
};
use qd_protocol::worker::AgentSpec;
use qd_protocol::{EventNumber, RunId, SessionId, WorkerId};
use serde_json::{Value, json};

use self::server::FakeA2aServer;
use super::card::A2aVersion;
use crate::agent::{AgentContext, run_agent};
use crate::agent_kind::AgentKind;
use crate::redact::{Redactor, SecretMatcher};

/// How long a test waits for anything. It is a net and not an expectation.
const LIMIT: Duration = Duration::from_secs(30);

async fn with_timeout<F: Future>(what: &str, future: F) -> F::Output {
    match tokio::time::timeout(LIMIT, future).await {
        Ok(value) => value,
        Err(_) => panic!("waited {LIMIT:?} in vain for {what}"),
    }
}

/// A session's side of one agent.
struct A2aDriverHarness {
    link_end: SessionEndpoint,
    /// The last number used downwards.
    number: u64,
    /// Heard and not looked at yet, in reverse.
    unread: Vec<AgentUpdate>,
}

/// What a turn said, and how it ended.
#[derive(Debug)]
struct A2aFinishedTurn {
    updates: Vec<AgentUpdate>,
    outcome: TurnOutcome,
}

impl A2aFinishedTurn {
    fn text(&self) -> String {
        self.joined_texts(|said| match said {
            TurnUpdate::Text { text } => Some(text),
            _ => None,
        })
    }

    fn thoughts(&self) -> String {
        self.joined_texts(|said| match said {
            TurnUpdate::Thought { text } => Some(text),
            _ => None,
        })
    }

    fn notices(&self) -> String {
        self.joined_texts(|said| match said {
            TurnUpdate::Notice { text } => Some(text),
            _ => None,
        })
    }

    fn joined_texts(&self, wanted: impl Fn(&TurnUpdate) -> Option<&String>) -> String {
        let said = self.updates.iter().filter_map(|up| match up {
            AgentUpdate::Turn { update: what, .. } => wanted(what),
            _ => None,
        });
        said.map(String::as_str).collect()
    }

    fn stop(&self) -> TurnStopReason {
        self.outcome.stop
    }

    fn error(&self) -> &RunError {
        self.outcome.error.as_ref().expect("it failed")
    }
}

impl A2aDriverHarness {
    /// An agent that is ready behind this card, and its far end.
    async fn ready(card: impl FnOnce(&FakeA2aServer) -> Value) -> (Self, FakeA2aServer) {
        let server = FakeA2aServer::start().await;
        server.set_card(&card(&server));
        let mut stage = Self::start(&server.url(""), |_| {});
        assert_eq!(stage.next_update().await, AgentUpdate::Ready { agent_session_id: None, steers: false });
        (stage, server)
    }

    /// One that has been started, and nothing more.
    fn start(url: &str, change: impl FnOnce(&mut AgentSpec)) -> Self {
        let name = format!("a2a:{url}");
        let mut spec =
            AgentSpec::new(SessionId::from_random(&[7; 8]), WorkerId::from_random(&[8; 8]), &name, "/w");
        change(&mut spec);
        let kind = AgentKind::from_spec(&spec).expect("its name describes it");
        let around = AgentContext { agent_processes: None, endpoint_status: None, control: Arc::default() };
        let filter = Redactor::new_filter(SecretMatcher::from_env(&spec.env));
        let link_end = host_agent_with_filter(UpdateNumber(0), Some(filter), |end| {
            run_agent(kind, Box::new(spec), around, end)
        });
        Self { link_end, number: 0, unread: Vec::new() }
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

    async fn next_update(&mut self) -> AgentUpdate {
        while self.unread.is_empty() {
            match with_timeout("a word of the agent", self.link_end.next_event()).await {
                LocalLinkEvent::Updates(said) => {
                    self.unread.extend(said.into_iter().rev().map(|thing| thing.update))
                }
                other => panic!("heard {other:?}"),
            }
        }
        self.unread.pop().expect("there was one")
    }

    /// Why the agent is no more.
    async fn wait_for_exit(&mut self) -> AgentExitReason {
        loop {
            match with_timeout("the end of the agent", self.link_end.next_event()).await {
                LocalLinkEvent::Updates(_) => {}
                LocalLinkEvent::Gone(gone) => return gone,
            }
        }
    }

    async fn wait_for_failure(&mut self) -> RunError {
        match self.wait_for_exit().await {
            AgentExitReason::Failed(error) => error,
            other => panic!("it is {other:?}"),
        }
    }

    /// Everything until the terminal of this run.
    async fn wait_for_end(&mut self, name: &str) -> A2aFinishedTurn {
        let mut ups = Vec::new();
        loop {
            match self.next_update().await {
                AgentUpdate::Terminal { run: ended, outcome } if ended == run_id(name) => {
                    return A2aFinishedTurn { updates: ups, outcome };
                }
                up => ups.push(up),
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

    /// Waits until some text has been said.
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

fn run_id(name: &str) -> RunId {
    RunId::parse(name).expect("a good id")
}

/// A card of this version.
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

/// The words of one version, about a task `t` in a conversation `c`.
#[derive(Clone, Copy)]
struct A2aTestFormat(A2aVersion);

impl A2aTestFormat {
    fn method(self, one: &'static str) -> &'static str {
        match (self.0, one) {
            (A2aVersion::V1_0, one) => one,
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

    /// How the task stands; the words are the message's id and its text.
    fn task_status(self, state: &str, words: Option<(&str, &str)>) -> Value {
        let state = match self.0 {
            A2aVersion::V1_0 => format!("TASK_STATE_{}", state.to_uppercase().replace('-', "_")),
            A2aVersion::V0_3 => state.to_owned(),
        };
        match words {
            Some((id, text)) => json!({"state": state, "message": self.message(id, text)}),
            None => json!({ "state": state }),
        }
    }

    fn status(self, state: &str, words: Option<(&str, &str)>) -> Value {
        let status = self.task_status(state, words);
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

    /// The task as a call answers with it, with what it made so far.
    fn task(self, state: &str, words: Option<(&str, &str)>, made: &[(&str, &str)]) -> Value {
        let artifacts: Vec<Value> =
            made.iter().map(|(id, text)| json!({"artifactId": id, "parts": [self.part(text)]})).collect();
        let mut task = json!({"id": "t", "contextId": "c", "status": self.task_status(state, words), "artifacts": artifacts});
        if self.0 == A2aVersion::V0_3 {
            task["kind"] = json!("task");
        }
        task
    }

    /// The same as an event, or as the answer to what was told.
    fn task_event(self, state: &str, words: Option<(&str, &str)>, made: &[(&str, &str)]) -> Value {
        let task = self.task(state, words, made);
        match self.0 {
            A2aVersion::V1_0 => json!({ "task": task }),
            A2aVersion::V0_3 => task,
        }
    }
}

const ALL_VERSIONS: [A2aVersion; 2] = [A2aVersion::V1_0, A2aVersion::V0_3];
