//! Promises of the driver, seen from the session's end of a link. At the other end of a pipe in memory is a server whose
//! every line the test writes itself, or one that was recorded. Time stands still: it moves on when everybody waits.

mod asks;
mod cancels;
mod hand;
mod opening;
mod replay;
mod turns;

use std::future::pending;
use std::time::Duration;

use qd_link::{AgentEnd, Closed, FromAgent, SessionEnd, host_with};
use qd_protocol::event::{Answer, Decision, RunError};
use qd_protocol::link::{AskRequest, Down, Gone, Outcome, Reply, Said, Stop, TurnLimits, Up, UpNumber};
use qd_protocol::worker::AgentSpec;
use qd_protocol::{Number, RunId, SessionId, WorkerId};
use tokio::io::{DuplexStream, ReadHalf, WriteHalf};

use self::hand::Hand;
use super::opening::{Opening, Unopened, open};
use super::talk::{Talk, run_error};
use super::wire::Peer;
use crate::redact::{Redactor, Secrets};
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

    /// All that was said of this run, but for what every turn says.
    fn said(&self) -> Vec<Said> {
        let said = self.ups.iter().filter_map(|up| match up {
            Up::Said { what: Said::Turn, .. } => None,
            Up::Said { what, .. } => Some(what.clone()),
            _ => None,
        });
        said.collect()
    }

    /// How often the model was called.
    fn turns(&self) -> usize {
        self.ups.iter().filter(|up| matches!(up, Up::Said { what: Said::Turn, .. })).count()
    }

    fn stop(&self) -> Stop {
        self.outcome.stop
    }
}

impl Stage {
    /// An agent that is ready, and its far end.
    async fn ready() -> (Self, Hand) {
        let (mut stage, mut hand) = Self::with(|_| {});
        hand.open().await;
        assert!(matches!(stage.hear().await, Up::Ready { steers: true, .. }));
        (stage, hand)
    }

    /// One that has a turn, which has begun.
    async fn begun() -> (Self, Hand) {
        let (mut stage, mut hand) = Self::ready().await;
        stage.prompt("a", "x");
        hand.take("u").await;
        hand.started("u").await;
        rest().await;
        (stage, hand)
    }

    /// One that has been started, and nothing more.
    fn with(change: impl FnOnce(&mut AgentSpec)) -> (Self, Hand) {
        let mut spec =
            AgentSpec::new(SessionId::from_random(&[7; 8]), WorkerId::from_random(&[8; 8]), "codex", "/w");
        change(&mut spec);
        let (near, far) = tokio::io::duplex(PIPE);
        let filter = Redactor::filter(Secrets::of(&spec.env));
        let end = host_with(UpNumber(0), Some(filter), |end| live(spec, end, near));
        (Self { end, number: 0, heard: Vec::new() }, Hand::new(far))
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

    async fn until_ask(&mut self) -> AskRequest {
        loop {
            if let Up::Ask { ask, .. } = self.hear().await {
                return ask;
            }
        }
    }
}

fn run(name: &str) -> RunId {
    RunId::parse(name).expect("a good id")
}

fn text(text: &str) -> Said {
    Said::Text { text: text.to_owned() }
}

fn decide(decision: Decision, reason: Option<&str>) -> Reply {
    Reply::Answered(Answer { decision: Some(decision), value: None, reason: reason.map(str::to_owned) })
}

/// Until everybody waits for something.
async fn rest() {
    tokio::time::sleep(Duration::from_millis(1)).await;
}

type Pipe = Talk<ReadHalf<DuplexStream>, WriteHalf<DuplexStream>>;

/// The life of an agent, without a process.
async fn live(spec: AgentSpec, mut end: AgentEnd, near: DuplexStream) -> Gone {
    let (from, to) = tokio::io::split(near);
    let mut peer = Peer::new(from, to, Box::pin(pending()));
    let opened = match open(&mut peer, &Opening::of(&spec)).await {
        Ok(opened) => opened,
        Err(Unopened::HungUp) => return hung_up(),
        Err(Unopened::Refused(told)) => return Gone::Failed(run_error(&told)),
    };
    let mut talk = Talk::new(peer, opened, spec.prices.clone());
    let hello = Up::Ready { agent_session_id: Some(talk.thread().to_owned()), steers: true };
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
