//! Promises of the driver and of the scripted agent, seen from the session's end of a link. Between the two is a pipe
//! in memory, and time stands still: it moves on when everybody waits for it.

mod profiles;
mod resume;
mod script;
mod strangers;
mod turns;

use std::future::pending;

use qd_catalog::Catalog;
use qd_link::{AgentEnd, Closed, FromAgent, SessionEnd, host_with};
use qd_protocol::event::{Answer, Decision, RunError};
use qd_protocol::link::{AskRequest, Down, Gone, Outcome, Reply, Said, Stop, TurnLimits, Up, UpNumber};
use qd_protocol::worker::AgentSpec;
use qd_protocol::{Number, RunId, SessionId, WorkerId};
use tempfile::TempDir;
use tokio::io::{DuplexStream, ReadHalf, WriteHalf};

use super::opening::{Opening, Unopened, open};
use super::profile::Profile;
use super::service::Service;
use super::talk::{Talk, run_error};
use super::wire::Peer;
use crate::redact::{Redactor, Secrets};
use crate::script::{Setup, serve};
use crate::turn::{Inbox, Prompt, Steer, Turn};

/// What fits into a pipe of the kernel.
const PIPE: usize = 64 << 10;

/// A session's side of one agent.
struct Stage {
    end: SessionEnd,
    /// The last number used downwards.
    number: u64,
    /// Heard and not looked at yet, in reverse.
    heard: Vec<Up>,
    home: TempDir,
}

/// What a turn said, and how it ended.
#[derive(Debug)]
struct Ended {
    ups: Vec<Up>,
    outcome: Outcome,
}

impl Ended {
    fn text(&self) -> String {
        let pieces = self.ups.iter().filter_map(|up| match up {
            Up::Said { what: Said::Text { text }, .. } => Some(text.as_str()),
            _ => None,
        });
        pieces.collect()
    }

    fn said(&self) -> Vec<Said> {
        let said = self.ups.iter().filter_map(|up| match up {
            Up::Said { what, .. } => Some(what.clone()),
            _ => None,
        });
        said.collect()
    }
}

impl Stage {
    /// The scripted agent, ready.
    async fn script() -> Self {
        Self::script_with(Setup::default(), |_| {}).await
    }

    /// The same with what its process was given, and what the session was.
    async fn script_with(setup: Setup, change: impl FnOnce(&mut AgentSpec)) -> Self {
        let mut stage = Self::with(change, async |far| {
            let (from, to) = tokio::io::split(far);
            serve(from, to, setup).await;
        });
        assert!(matches!(stage.hear().await, Up::Ready { .. }));
        stage
    }

    /// Any agent at the far end of a pipe.
    fn with<F, A>(change: impl FnOnce(&mut AgentSpec), far: F) -> Self
    where
        F: FnOnce(DuplexStream) -> A,
        A: Future<Output = ()> + Send + 'static,
    {
        let home = TempDir::new().expect("a temporary folder");
        let mut spec = AgentSpec::new(
            SessionId::from_random(&[7; 8]),
            WorkerId::from_random(&[8; 8]),
            "script",
            home.path().to_owned(),
        );
        change(&mut spec);
        let (near, other) = tokio::io::duplex(PIPE);
        let far = far(other);
        let filter = Redactor::filter(Secrets::of(&spec.env));
        let end = host_with(UpNumber(0), Some(filter), |end| async move {
            let mut agent = tokio::task::JoinSet::new();
            agent.spawn(far);
            live(spec, end, near).await
        });
        Self { end, number: 0, heard: Vec::new(), home }
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

    fn steer(&mut self, name: &str, text: &str) -> Number {
        let number = self.next();
        self.end.send(Down::Steer { number, run: run(name), text: text.to_owned() });
        number
    }

    fn cancel(&mut self, name: &str) {
        let number = self.next();
        self.end.send(Down::Cancel { number, run: run(name) });
    }

    fn answer(&mut self, ask: &AskRequest, answer: Reply) {
        let number = self.next();
        self.end.send(Down::Answer { number, ask: ask.id.clone(), answer });
    }

    async fn hear(&mut self) -> Up {
        while self.heard.is_empty() {
            match self.end.hear().await {
                FromAgent::Said(said) => self.heard.extend(said.into_iter().rev().map(|thing| thing.up)),
                other => panic!("heard {other:?}"),
            }
        }
        self.heard.pop().expect("there was one")
    }

    /// Why the agent is no more.
    async fn gone(&mut self) -> RunError {
        loop {
            match self.end.hear().await {
                FromAgent::Said(_) => {}
                FromAgent::Gone(Gone::Failed(error)) => return error,
                other => panic!("heard {other:?}"),
            }
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

    async fn play(&mut self, name: &str, prompt: &str) -> Ended {
        self.prompt(name, prompt);
        self.ended(name).await
    }

    async fn until_ask(&mut self) -> AskRequest {
        loop {
            if let Up::Ask { ask, .. } = self.hear().await {
                return ask;
            }
        }
    }

    /// Waits for a piece of text, however it was merged.
    async fn until_text(&mut self, wanted: &str) {
        let mut text = String::new();
        while !text.contains(wanted) {
            if let Up::Said { what: Said::Text { text: piece }, .. } = self.hear().await {
                text.push_str(&piece);
            }
        }
    }
}

fn run(name: &str) -> RunId {
    RunId::parse(name).expect("a good id")
}

fn decide(decision: Decision, reason: Option<&str>) -> Reply {
    Reply::Answered(Answer { decision: Some(decision), value: None, reason: reason.map(str::to_owned) })
}

fn assert_well(ended: &Ended) {
    assert_eq!((ended.outcome.stop, &ended.outcome.error), (Stop::EndTurn, &None));
}

type Pipe = Talk<ReadHalf<DuplexStream>, WriteHalf<DuplexStream>>;

/// The life of an agent, without a process.
async fn live(spec: AgentSpec, mut end: AgentEnd, near: DuplexStream) -> Gone {
    let (from, to) = tokio::io::split(near);
    let mut peer = Peer::new(from, to, Box::pin(pending()));
    let manifest = Catalog::built_in().get(&spec.agent).expect("it is built in");
    let opening = Opening::of(&spec, Profile::of(&manifest, &spec), false);
    let opened = match open(&mut peer, &opening).await {
        Ok(opened) => opened,
        Err(Unopened::HungUp) => return hung_up(),
        Err(Unopened::Refused(told)) => return Gone::Failed(run_error(&told)),
    };
    let mut talk = Talk::new(peer, opened, Service::below(&spec.cwd, None));
    let hello = Up::Ready { agent_session_id: Some(talk.session().to_string()), steers: true };
    if end.say(hello).await.is_err() {
        return Gone::Stopped;
    }
    let voice = end.voice();
    loop {
        let down = tokio::select! {
            () = talk.idle(&voice) => return hung_up(),
            down = end.command() => down,
        };
        let Some(down) = down else { return Gone::Stopped };
        if let Down::Prompt { run, prompt, files, messages, limits, .. } = down {
            let prompt = Prompt { run, text: prompt, files, messages, limits };
            match one_turn(&mut end, &mut talk, prompt).await {
                Ok(true) => {}
                Ok(false) => return hung_up(),
                Err(Closed) => return Gone::Stopped,
            }
        }
    }
}

/// False if the agent did not outlive its turn.
async fn one_turn(end: &mut AgentEnd, talk: &mut Pipe, prompt: Prompt) -> Result<bool, Closed> {
    let inbox = Inbox::default();
    let turn = Turn::new(prompt.run.clone(), end.voice(), &inbox);
    let mut work = Box::pin(talk.turn(&turn, &prompt));
    let outcome = loop {
        tokio::select! {
            biased;
            down = end.command() => match down.ok_or(Closed)? {
                Down::Cancel { .. } => inbox.cancel(),
                Down::Steer { number, text, .. } => assert!(inbox.put_steer(Steer { number, text })),
                Down::Answer { ask, answer, .. } => inbox.put_reply(&ask, answer),
                other => panic!("not in these tests: {other:?}"),
            },
            outcome = &mut work => break outcome?,
        }
    };
    drop(work);
    let Some(outcome) = outcome else { return Ok(false) };
    for steer in inbox.missed() {
        end.say(Up::SteerMissed { steer }).await?;
    }
    end.say(Up::Terminal { run: prompt.run, outcome }).await?;
    Ok(true)
}

fn hung_up() -> Gone {
    Gone::Failed(RunError::new("hung_up", "the agent hung up"))
}
