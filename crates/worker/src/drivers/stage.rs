//! What the drivers' tests share: a session's end of a link, a driver behind it, and at the far end of a pipe in memory an
//! agent whose every line a test writes, or one that was recorded. Time stands still: it moves on when everybody waits.

use std::sync::Arc;
use std::time::Duration;

use qd_link::{AgentEnd, Closed, FromAgent, SessionEnd, Voice, host_with};
use qd_protocol::event::{Answer, Decision, RunError, Usage};
use qd_protocol::link::{AskRequest, Down, File, Gone, Outcome, Reply, Said, Stop, TurnLimits, Up, UpNumber};
use qd_protocol::worker::AgentSpec;
use qd_protocol::{Number, RunId, SessionId, WorkerId};
use serde_json::Value;
use tempfile::TempDir;
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, DuplexStream, Lines, ReadHalf, WriteHalf};
use tokio::task::JoinSet;

use crate::agent::{self, Around};
use crate::kinds::Kind;
use crate::redact::{Redactor, Secrets};
use crate::turn::{Inbox, Prompt, Steer, Turn};

/// What fits into a pipe of the kernel.
const PIPE: usize = 64 << 10;

/// A driver that is ready, as its tests see it.
pub(super) trait Talks: Send + 'static {
    /// One turn; `None` if the agent did not outlive it.
    fn turn(
        &mut self,
        turn: &Turn<'_>,
        prompt: &Prompt,
    ) -> impl Future<Output = Result<Option<Outcome>, Closed>> + Send;

    /// The time between turns, until the agent is no more.
    fn idle(&mut self, voice: &Voice) -> impl Future<Output = ()> + Send;
}

/// Makes a test's driver of a conversation. Each driver has a type of its own for that, and all have the same verbs.
macro_rules! talks {
    ($talk:ty) => {
        impl $crate::drivers::stage::Talks for $talk {
            async fn turn(
                &mut self,
                turn: &$crate::turn::Turn<'_>,
                prompt: &$crate::turn::Prompt,
            ) -> Result<Option<qd_protocol::link::Outcome>, qd_link::Closed> {
                <$talk>::turn(self, turn, prompt).await
            }

            async fn idle(&mut self, voice: &qd_link::Voice) {
                <$talk>::idle(self, voice).await;
            }
        }
    };
}
pub(super) use talks;

/// Lets an agent by hand do what any far end does.
macro_rules! by_hand {
    ($hand:ty) => {
        impl std::ops::Deref for $hand {
            type Target = $crate::drivers::stage::Far;

            fn deref(&self) -> &Self::Target {
                &self.far
            }
        }

        impl std::ops::DerefMut for $hand {
            fn deref_mut(&mut self) -> &mut Self::Target {
                &mut self.far
            }
        }
    };
}
pub(super) use by_hand;

/// A session's side of one agent.
pub(super) struct Stage {
    pub(super) end: SessionEnd,
    /// Where the session works.
    pub(super) home: TempDir,
    /// The last number used downwards.
    number: u64,
    /// Heard and not looked at yet, in reverse.
    heard: Vec<Up>,
    /// The agent, where it plays by itself.
    agent: JoinSet<()>,
}

/// What a turn said, and how it ended.
#[derive(Debug)]
pub(super) struct Ended {
    pub(super) ups: Vec<Up>,
    pub(super) outcome: Outcome,
}

impl Ended {
    pub(super) fn text(&self) -> String {
        let pieces = self.ups.iter().filter_map(|up| match up {
            Up::Said { what: Said::Text { text }, .. } => Some(text.as_str()),
            _ => None,
        });
        pieces.collect()
    }

    /// All that was said of any run.
    pub(super) fn said(&self) -> Vec<Said> {
        let said = self.ups.iter().filter_map(|up| match up {
            Up::Said { what, .. } => Some(what.clone()),
            _ => None,
        });
        said.collect()
    }

    /// The same, but for the calls of the model.
    pub(super) fn words(&self) -> Vec<Said> {
        self.said().into_iter().filter(|said| *said != Said::Turn).collect()
    }

    /// What was used, in all.
    pub(super) fn usage(&self) -> Usage {
        let mut sum = Usage::default();
        for said in self.said() {
            if let Said::Usage { usage } = said {
                sum += usage;
            }
        }
        sum
    }

    /// How often the model was called.
    pub(super) fn turns(&self) -> usize {
        self.said().iter().filter(|said| **said == Said::Turn).count()
    }

    pub(super) fn stop(&self) -> Stop {
        self.outcome.stop
    }

    /// The tools that ended: name, output and whether it is an error.
    pub(super) fn tools(&self) -> Vec<(String, Value, bool)> {
        let tools = self.said().into_iter().filter_map(|said| match said {
            Said::ToolFinished { name, output, is_error, .. } => Some((name, output, is_error)),
            _ => None,
        });
        tools.collect()
    }

    /// What was asked.
    pub(super) fn asks(&self) -> Vec<&AskRequest> {
        let asks =
            self.ups.iter().filter_map(|up| if let Up::Ask { ask, .. } = up { Some(ask) } else { None });
        asks.collect()
    }

    /// The notices.
    pub(super) fn notices(&self) -> Vec<String> {
        let notices = self.said().into_iter().filter_map(|said| match said {
            Said::Notice { text } => Some(text),
            _ => None,
        });
        notices.collect()
    }
}

impl Stage {
    /// A driver, from its opening on, with what its session was given; and the far end of its pipe.
    pub(super) fn new<T, F>(
        agent: &str,
        change: impl FnOnce(&mut AgentSpec),
        open: impl FnOnce(AgentSpec, DuplexStream) -> F,
    ) -> (Self, DuplexStream)
    where
        T: Talks,
        F: Future<Output = Result<(T, Up), Gone>> + Send + 'static,
    {
        let home = TempDir::new().expect("a temporary folder");
        let cwd = home.path().to_owned();
        let mut spec =
            AgentSpec::new(SessionId::from_random(&[7; 8]), WorkerId::from_random(&[8; 8]), agent, cwd);
        change(&mut spec);
        let (near, far) = tokio::io::duplex(PIPE);
        let filter = Redactor::filter(Secrets::of(&spec.env));
        let opening = open(spec, near);
        let end = host_with(UpNumber(0), Some(filter), |end| live(end, opening));
        (Self { end, home, number: 0, heard: Vec::new(), agent: JoinSet::new() }, far)
    }

    /// An agent that is elsewhere, by its name, with the life that it really has.
    pub(super) fn remote(name: &str, change: impl FnOnce(&mut AgentSpec)) -> Self {
        let home = TempDir::new().expect("a temporary folder");
        let cwd = home.path().to_owned();
        let mut spec =
            AgentSpec::new(SessionId::from_random(&[7; 8]), WorkerId::from_random(&[8; 8]), name, cwd);
        change(&mut spec);
        let kind = Kind::of(&spec).expect("its name describes it");
        let around = Around { below: None, seat: None, leash: Arc::default() };
        let filter = Redactor::filter(Secrets::of(&spec.env));
        let life = |end| agent::live(kind, Box::new(spec), around, end);
        let end = host_with(UpNumber(0), Some(filter), life);
        Self { end, home, number: 0, heard: Vec::new(), agent: JoinSet::new() }
    }

    /// Has the agent play by itself.
    pub(super) fn played(mut self, agent: impl Future<Output = ()> + Send + 'static) -> Self {
        self.agent.spawn(agent);
        self
    }

    pub(super) fn next(&mut self) -> Number {
        self.number += 1;
        Number(self.number)
    }

    pub(super) fn prompt(&mut self, name: &str, prompt: &str) {
        self.prompt_with(name, prompt, vec![], vec![]);
    }

    pub(super) fn prompt_with(&mut self, name: &str, prompt: &str, files: Vec<File>, messages: Vec<Value>) {
        let (number, limits) = (self.next(), TurnLimits::default());
        let (run, prompt) = (run(name), prompt.to_owned());
        self.end.send(Down::Prompt { number, run, prompt, files, messages, limits });
    }

    pub(super) fn steer(&mut self, name: &str, text: &str) -> Number {
        let number = self.next();
        self.end.send(Down::Steer { number, run: run(name), text: text.to_owned() });
        number
    }

    pub(super) fn cancel(&mut self, name: &str) {
        let number = self.next();
        self.end.send(Down::Cancel { number, run: run(name) });
    }

    pub(super) fn answer(&mut self, ask: &AskRequest, answer: Reply) {
        let number = self.next();
        self.end.send(Down::Answer { number, ask: ask.id.clone(), answer });
    }

    pub(super) async fn hear(&mut self) -> Up {
        while self.heard.is_empty() {
            match self.end.hear().await {
                FromAgent::Said(said) => self.heard.extend(said.into_iter().rev().map(|thing| thing.up)),
                other => panic!("heard {other:?}"),
            }
        }
        self.heard.pop().expect("there was one")
    }

    /// Why the agent is no more.
    pub(super) async fn gone(&mut self) -> RunError {
        loop {
            match self.end.hear().await {
                FromAgent::Said(_) => {}
                FromAgent::Gone(Gone::Failed(error)) => return error,
                other => panic!("heard {other:?}"),
            }
        }
    }

    /// Everything until the terminal of this run.
    pub(super) async fn ended(&mut self, name: &str) -> Ended {
        let mut ups = Vec::new();
        loop {
            match self.hear().await {
                Up::Terminal { run: ended, outcome } if ended == run(name) => return Ended { ups, outcome },
                up => ups.push(up),
            }
        }
    }

    pub(super) async fn play(&mut self, name: &str, prompt: &str) -> Ended {
        self.prompt(name, prompt);
        self.ended(name).await
    }

    pub(super) async fn until_ask(&mut self) -> AskRequest {
        loop {
            if let Up::Ask { ask, .. } = self.hear().await {
                return ask;
            }
        }
    }

    /// Waits for a piece of text, however it was merged.
    pub(super) async fn until_text(&mut self, wanted: &str) {
        let mut text = String::new();
        while !text.contains(wanted) {
            if let Up::Said { what: Said::Text { text: piece }, .. } = self.hear().await {
                text.push_str(&piece);
            }
        }
    }
}

/// The far end of a pipe: an agent's side of it, line by line.
pub(super) struct Far {
    pub(super) lines: Lines<BufReader<ReadHalf<DuplexStream>>>,
    pub(super) to: WriteHalf<DuplexStream>,
}

impl Far {
    pub(super) fn new(far: DuplexStream) -> Self {
        let (from, to) = tokio::io::split(far);
        Self { lines: BufReader::new(from).lines(), to }
    }

    /// The next line; `None` if the other side has hung up.
    pub(super) async fn try_hear(&mut self) -> Option<Value> {
        let line = self.lines.next_line().await.expect("a pipe in memory")?;
        Some(serde_json::from_str(&line).expect("a message"))
    }

    pub(super) async fn hear(&mut self) -> Value {
        self.try_hear().await.expect("it is open")
    }

    /// The next message, which is of this method; gives its id and its parameters.
    pub(super) async fn expect(&mut self, method: &str) -> (Value, Value) {
        let mut message = self.hear().await;
        assert_eq!(message["method"], method, "{message}");
        (message["id"].take(), message["params"].take())
    }

    /// Nothing was told, and nothing will be unless something happens.
    pub(super) async fn expect_silence(&mut self) {
        let heard = tokio::time::timeout(Duration::from_secs(60), self.hear()).await;
        assert!(heard.is_err(), "{heard:?}");
    }

    pub(super) async fn write(&mut self, line: &str) {
        self.to.write_all(line.as_bytes()).await.expect("a pipe in memory");
        self.to.write_all(b"\n").await.expect("a pipe in memory");
    }

    /// Lives until the other side hangs up.
    pub(super) async fn idle(&mut self) {
        while let Ok(Some(_)) = self.lines.next_line().await {}
    }
}

pub(super) fn run(name: &str) -> RunId {
    RunId::parse(name).expect("a good id")
}

pub(super) fn decide(decision: Decision, reason: Option<&str>) -> Reply {
    Reply::Answered(Answer { decision: Some(decision), value: None, reason: reason.map(str::to_owned) })
}

pub(super) fn choose(value: &str) -> Reply {
    Reply::Answered(Answer { value: Some(value.to_owned()), ..Answer::default() })
}

#[track_caller]
pub(super) fn assert_well(ended: &Ended) {
    assert_eq!((ended.outcome.stop, &ended.outcome.error), (Stop::EndTurn, &None));
}

/// Until everybody waits for something.
pub(super) async fn rest() {
    tokio::time::sleep(Duration::from_millis(1)).await;
}

/// Why an agent is no more that has hung up.
pub(super) fn hung_up() -> Gone {
    Gone::Failed(RunError::new("hung_up", "the agent hung up"))
}

/// The life of an agent, without a process.
async fn live<T: Talks>(
    mut end: AgentEnd,
    opening: impl Future<Output = Result<(T, Up), Gone>> + Send,
) -> Gone {
    let (mut talk, hello) = match opening.await {
        Ok(opened) => opened,
        Err(gone) => return gone,
    };
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
async fn one_turn<T: Talks>(end: &mut AgentEnd, talk: &mut T, prompt: Prompt) -> Result<bool, Closed> {
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
