//! Promises of the driver, seen from the session's end of a link. At the other end is an agent whose every line a test
//! writes, or one that was recorded; between the two is a pipe in memory, and time stands still.

mod cancels;
mod hand;
mod recorded;
mod steers;
mod turns;

use std::collections::BTreeMap;
use std::future::pending;

use qd_link::{AgentEnd, Closed, FromAgent, SessionEnd, host_with};
use qd_protocol::event::{Answer, Decision, RunError, Usage};
use qd_protocol::link::{AskRequest, Down, File, Gone, Outcome, Reply, Said, Stop, TurnLimits, Up, UpNumber};
use qd_protocol::manifest::Price;
use qd_protocol::{Number, RunId};
use serde_json::Value;
use tokio::io::{DuplexStream, ReadHalf, WriteHalf};

use self::hand::Hand;
use super::ear::Ear;
use super::opening::{Unopened, open};
use super::talk::Talk;
use super::tally::Tally;
use crate::drivers::lines::Lines;
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

/// What the driver is given besides the agent.
#[derive(Default)]
struct Given {
    prices: BTreeMap<String, Price>,
    resumed: bool,
    forgot: Option<String>,
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

    fn usage(&self) -> Usage {
        let mut sum = Usage::default();
        for said in self.said() {
            if let Said::Usage { usage } = said {
                sum += usage;
            }
        }
        sum
    }

    fn turns(&self) -> usize {
        self.said().iter().filter(|said| **said == Said::Turn).count()
    }
}

impl Stage {
    /// An agent whose lines the test writes, after its handshake.
    async fn with<F, A>(play: F) -> Self
    where
        F: FnOnce(Hand) -> A + Send + 'static,
        A: Future<Output = ()> + Send + 'static,
    {
        let mut stage = Self::given(Given::default(), |far| async move {
            let mut hand = Hand::new(far);
            hand.open().await;
            play(hand).await;
        });
        assert!(matches!(stage.hear().await, Up::Ready { steers: true, .. }));
        stage
    }

    /// Any agent at the far end of a pipe.
    fn given<F, A>(given: Given, far: F) -> Self
    where
        F: FnOnce(DuplexStream) -> A,
        A: Future<Output = ()> + Send + 'static,
    {
        let (near, other) = tokio::io::duplex(PIPE);
        let far = far(other);
        let end = host_with(UpNumber(0), None, |end| async move {
            let mut agent = tokio::task::JoinSet::new();
            agent.spawn(far);
            live(given, end, near).await
        });
        Self { end, number: 0, heard: Vec::new() }
    }

    fn next(&mut self) -> Number {
        self.number += 1;
        Number(self.number)
    }

    fn prompt(&mut self, name: &str, prompt: &str) {
        self.prompt_with(name, prompt, vec![], vec![]);
    }

    fn prompt_with(&mut self, name: &str, prompt: &str, files: Vec<File>, messages: Vec<Value>) {
        let (number, limits) = (self.next(), TurnLimits::default());
        self.end.send(Down::Prompt {
            number,
            run: run(name),
            prompt: prompt.to_owned(),
            files,
            messages,
            limits,
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

fn choose(value: &str) -> Reply {
    Reply::Answered(Answer { value: Some(value.to_owned()), ..Answer::default() })
}

fn assert_well(ended: &Ended) {
    assert_eq!((ended.outcome.stop, &ended.outcome.error), (Stop::EndTurn, &None));
}

type Pipe = Talk<ReadHalf<DuplexStream>, WriteHalf<DuplexStream>>;

/// The life of an agent, without a process.
async fn live(given: Given, mut end: AgentEnd, near: DuplexStream) -> Gone {
    let (from, to) = tokio::io::split(near);
    let mut lines = Lines::new(from, to, Box::pin(pending()));
    match open(&mut lines).await {
        Ok(()) => {}
        Err(Unopened::HungUp) => return hung_up(),
        Err(Unopened::Refused(why)) => return Gone::Failed(RunError::new("refused", why)),
    }
    let ear = Ear::new(Tally::new(given.prices, None, given.resumed));
    let mut talk = Talk::new(lines, "s".to_owned(), ear, true, given.forgot);
    let hello = Up::Ready { agent_session_id: Some(talk.session().to_owned()), steers: true };
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
