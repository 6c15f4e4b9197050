//! Promises of the driver, seen from the session's end of a link. At the other end is a server on loopback whose every
//! answer the test gives itself, in both wire forms.

mod breaks;
mod cancels;
mod server;
mod starts;
mod turns;

use std::sync::Arc;
use std::time::Duration;

use qd_link::{FromAgent, SessionEnd, host_with};
use qd_protocol::event::{Answer, RunError};
use qd_protocol::link::{AskRequest, Down, Gone, Outcome, Reply, Said, Stop, TurnLimits, Up, UpNumber};
use qd_protocol::worker::AgentSpec;
use qd_protocol::{Number, RunId, SessionId, WorkerId};
use serde_json::{Value, json};

use self::server::Server;
use super::card::Version;
use crate::agent::{Around, live};
use crate::kinds::Kind;
use crate::redact::{Redactor, Secrets};

/// How long a test waits for anything. It is a net and not an expectation.
const LIMIT: Duration = Duration::from_secs(30);

async fn within<F: Future>(what: &str, future: F) -> F::Output {
    match tokio::time::timeout(LIMIT, future).await {
        Ok(value) => value,
        Err(_) => panic!("waited {LIMIT:?} in vain for {what}"),
    }
}

/// A session's side of one agent.
struct Stage {
    end: SessionEnd,
    /// The last number used downwards.
    number: u64,
    /// Heard and not looked at yet, in reverse.
    heard: Vec<Up>,
}

/// What a turn said, and how it ended.
#[derive(Debug)]
struct Ended {
    ups: Vec<Up>,
    outcome: Outcome,
}

impl Ended {
    fn text(&self) -> String {
        self.pieces(|said| match said {
            Said::Text { text } => Some(text),
            _ => None,
        })
    }

    fn thoughts(&self) -> String {
        self.pieces(|said| match said {
            Said::Thought { text } => Some(text),
            _ => None,
        })
    }

    fn notices(&self) -> String {
        self.pieces(|said| match said {
            Said::Notice { text } => Some(text),
            _ => None,
        })
    }

    fn pieces(&self, wanted: impl Fn(&Said) -> Option<&String>) -> String {
        let said = self.ups.iter().filter_map(|up| match up {
            Up::Said { what, .. } => wanted(what),
            _ => None,
        });
        said.map(String::as_str).collect()
    }

    fn stop(&self) -> Stop {
        self.outcome.stop
    }

    fn error(&self) -> &RunError {
        self.outcome.error.as_ref().expect("it failed")
    }
}

impl Stage {
    /// An agent that is ready behind this card, and its far end.
    async fn ready(card: impl FnOnce(&Server) -> Value) -> (Self, Server) {
        let server = Server::start().await;
        server.card(&card(&server));
        let mut stage = Self::with(&server.url(""), |_| {});
        assert_eq!(stage.hear().await, Up::Ready { agent_session_id: None, steers: false });
        (stage, server)
    }

    /// One that has been started, and nothing more.
    fn with(url: &str, change: impl FnOnce(&mut AgentSpec)) -> Self {
        let name = format!("a2a:{url}");
        let mut spec =
            AgentSpec::new(SessionId::from_random(&[7; 8]), WorkerId::from_random(&[8; 8]), &name, "/w");
        change(&mut spec);
        let kind = Kind::of(&spec).expect("its name describes it");
        let around = Around { below: None, seat: None, leash: Arc::default() };
        let filter = Redactor::filter(Secrets::of(&spec.env));
        let end = host_with(UpNumber(0), Some(filter), |end| live(kind, Box::new(spec), around, end));
        Self { end, number: 0, heard: Vec::new() }
    }

    fn next(&mut self) -> Number {
        self.number += 1;
        Number(self.number)
    }

    fn prompt(&mut self, name: &str, prompt: &str) {
        let number = self.next();
        self.end.send(Down::Prompt {
            number,
            run: run(name),
            prompt: prompt.to_owned(),
            files: vec![],
            messages: vec![],
            limits: TurnLimits::default(),
        });
    }

    fn cancel(&mut self, name: &str) {
        let number = self.next();
        self.end.send(Down::Cancel { number, run: run(name) });
    }

    fn kill(&mut self, name: &str) {
        let number = self.next();
        self.end.send(Down::Kill { number, run: run(name) });
    }

    fn answer(&mut self, ask: &AskRequest, answer: Answer) {
        let number = self.next();
        self.end.send(Down::Answer { number, ask: ask.id.clone(), answer: Reply::Answered(answer) });
    }

    async fn hear(&mut self) -> Up {
        while self.heard.is_empty() {
            match within("a word of the agent", self.end.hear()).await {
                FromAgent::Said(said) => self.heard.extend(said.into_iter().rev().map(|thing| thing.up)),
                other => panic!("heard {other:?}"),
            }
        }
        self.heard.pop().expect("there was one")
    }

    /// Why the agent is no more.
    async fn gone(&mut self) -> Gone {
        loop {
            match within("the end of the agent", self.end.hear()).await {
                FromAgent::Said(_) => {}
                FromAgent::Gone(gone) => return gone,
            }
        }
    }

    async fn failed(&mut self) -> RunError {
        match self.gone().await {
            Gone::Failed(error) => error,
            other => panic!("it is {other:?}"),
        }
    }

    /// Everything until the terminal of this run.
    async fn ended(&mut self, name: &str) -> Ended {
        let mut ups = Vec::new();
        loop {
            match self.hear().await {
                Up::Terminal { run: ended, outcome } if ended == run(name) => return Ended { ups, outcome },
                up => ups.push(up),
            }
        }
    }

    async fn until_ask(&mut self) -> AskRequest {
        loop {
            if let Up::Ask { ask, .. } = self.hear().await {
                return ask;
            }
        }
    }

    /// Waits until some text has been said.
    async fn until_text(&mut self, wanted: &str) {
        loop {
            if let Up::Said { what: Said::Text { text } | Said::Thought { text }, .. } = self.hear().await
                && text.contains(wanted)
            {
                return;
            }
        }
    }
}

fn run(name: &str) -> RunId {
    RunId::parse(name).expect("a good id")
}

/// A card of this version.
fn card(version: Version, streams: bool) -> impl FnOnce(&Server) -> Value {
    move |server| {
        let url = server.url("/rpc");
        match version {
            Version::One => json!({"name": "x", "capabilities": {"streaming": streams},
                "supportedInterfaces": [{"url": "/rpc", "protocolBinding": "JSONRPC", "protocolVersion": "1.0"}]}),
            Version::Old => {
                json!({"name": "x", "url": url, "protocolVersion": "0.3.0", "capabilities": {"streaming": streams}})
            }
        }
    }
}

/// The words of one version, about a task `t` in a conversation `c`.
#[derive(Clone, Copy)]
struct Form(Version);

impl Form {
    fn method(self, one: &'static str) -> &'static str {
        match (self.0, one) {
            (Version::One, one) => one,
            (Version::Old, "SendMessage") => "message/send",
            (Version::Old, "SendStreamingMessage") => "message/stream",
            (Version::Old, "GetTask") => "tasks/get",
            (Version::Old, "CancelTask") => "tasks/cancel",
            (Version::Old, "SubscribeToTask") => "tasks/resubscribe",
            (_, other) => panic!("there is no {other}"),
        }
    }

    fn part(self, text: &str) -> Value {
        super::words::text(self.0, text)
    }

    fn message(self, id: &str, text: &str) -> Value {
        let parts = [self.part(text)];
        match self.0 {
            Version::One => json!({"messageId": id, "role": "ROLE_AGENT", "contextId": "c", "parts": parts}),
            Version::Old => {
                json!({"kind": "message", "messageId": id, "role": "agent", "contextId": "c", "parts": parts})
            }
        }
    }

    /// How the task stands; the words are the message's id and its text.
    fn standing(self, state: &str, words: Option<(&str, &str)>) -> Value {
        let state = match self.0 {
            Version::One => format!("TASK_STATE_{}", state.to_uppercase().replace('-', "_")),
            Version::Old => state.to_owned(),
        };
        match words {
            Some((id, text)) => json!({"state": state, "message": self.message(id, text)}),
            None => json!({ "state": state }),
        }
    }

    fn status(self, state: &str, words: Option<(&str, &str)>) -> Value {
        let status = self.standing(state, words);
        match self.0 {
            Version::One => json!({"statusUpdate": {"taskId": "t", "contextId": "c", "status": status}}),
            Version::Old => {
                json!({"kind": "status-update", "taskId": "t", "contextId": "c", "status": status, "final": false})
            }
        }
    }

    fn artifact(self, id: &str, text: &str, append: bool) -> Value {
        let artifact = json!({"artifactId": id, "parts": [self.part(text)]});
        match self.0 {
            Version::One => json!({"artifactUpdate":
                {"taskId": "t", "contextId": "c", "artifact": artifact, "append": append}}),
            Version::Old => {
                json!({"kind": "artifact-update", "taskId": "t", "contextId": "c", "artifact": artifact, "append": append})
            }
        }
    }

    /// The task as a call answers with it, with what it made so far.
    fn task(self, state: &str, words: Option<(&str, &str)>, made: &[(&str, &str)]) -> Value {
        let artifacts: Vec<Value> =
            made.iter().map(|(id, text)| json!({"artifactId": id, "parts": [self.part(text)]})).collect();
        let mut task = json!({"id": "t", "contextId": "c", "status": self.standing(state, words), "artifacts": artifacts});
        if self.0 == Version::Old {
            task["kind"] = json!("task");
        }
        task
    }

    /// The same as an event, or as the answer to what was told.
    fn told_task(self, state: &str, words: Option<(&str, &str)>, made: &[(&str, &str)]) -> Value {
        let task = self.task(state, words, made);
        match self.0 {
            Version::One => json!({ "task": task }),
            Version::Old => task,
        }
    }
}

const BOTH: [Version; 2] = [Version::One, Version::Old];
