//! What the drivers' tests share: a session's end of a link, a driver behind it, and at the far end of a pipe in memory an
//! agent whose every line a test writes, or one that was recorded. Time stands still: it moves on when everybody waits.

use std::sync::Arc;
use std::time::Duration;

use qd_link::{
    AgentEndpoint, AgentOutput, LinkClosed, LocalLinkEvent, SessionEndpoint, host_agent_with_filter,
};
use qd_protocol::event::{AskAnswer, PermissionDecision, RunError, TokenUsage};
use qd_protocol::link::{
    AgentCommand, AgentExitReason, AgentUpdate, AskRequest, AskResolution, PromptFile, TurnLimits,
    TurnOutcome, TurnStopReason, TurnUpdate, UpdateNumber,
};
use qd_protocol::worker::AgentSpec;
use qd_protocol::{EventNumber, RunId, SessionId, WorkerId};
use serde_json::Value;
use tempfile::TempDir;
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, DuplexStream, Lines, ReadHalf, WriteHalf};
use tokio::task::JoinSet;

use crate::agent::{self, AgentContext};
use crate::agent_kind::AgentKind;
use crate::redact::{Redactor, SecretMatcher};
use crate::turn::{DriverInbox, DriverPrompt, DriverSteer, DriverTurn};

/// What fits into a pipe of the kernel.
const PIPE_SIZE: usize = 64 << 10;

/// A driver that is ready, as its tests see it.
pub(super) trait HarnessDriver: Send + 'static {
    /// One turn; `None` if the agent did not outlive it.
    fn turn(
        &mut self,
        turn: &DriverTurn<'_>,
        prompt: &DriverPrompt,
    ) -> impl Future<Output = Result<Option<TurnOutcome>, LinkClosed>> + Send;

    /// The time between turns, until the agent is no more.
    fn idle(&mut self, voice: &AgentOutput) -> impl Future<Output = ()> + Send;
}

/// Makes a test's driver of a conversation. Each driver has a type of its own for that, and all have the same verbs.
macro_rules! impl_harness_driver {
    ($talk:ty) => {
        impl $crate::drivers::harness::HarnessDriver for $talk {
            async fn turn(
                &mut self,
                turn: &$crate::turn::DriverTurn<'_>,
                prompt: &$crate::turn::DriverPrompt,
            ) -> Result<Option<qd_protocol::link::TurnOutcome>, qd_link::LinkClosed> {
                <$talk>::turn(self, turn, prompt).await
            }

            async fn idle(&mut self, voice: &qd_link::AgentOutput) {
                <$talk>::idle(self, voice).await;
            }
        }
    };
}
pub(super) use impl_harness_driver;

/// Lets an agent by hand do what any far end does.
macro_rules! deref_to_agent_pipe {
    ($hand:ty) => {
        impl std::ops::Deref for $hand {
            type Target = $crate::drivers::harness::AgentPipe;

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
pub(super) use deref_to_agent_pipe;

/// A session's side of one agent.
pub(super) struct DriverHarness {
    pub(super) link_end: SessionEndpoint,
    /// Where the session works.
    pub(super) workspace: TempDir,
    /// The last number used downwards.
    number: u64,
    /// Heard and not looked at yet, in reverse.
    unread: Vec<AgentUpdate>,
    /// The agent, where it plays by itself.
    agent_task: JoinSet<()>,
}

/// What a turn said, and how it ended.
#[derive(Debug)]
pub(super) struct FinishedTurn {
    pub(super) updates: Vec<AgentUpdate>,
    pub(super) outcome: TurnOutcome,
}

impl FinishedTurn {
    pub(super) fn text(&self) -> String {
        let pieces = self.updates.iter().filter_map(|up| match up {
            AgentUpdate::Turn { update: TurnUpdate::Text { text }, .. } => Some(text.as_str()),
            _ => None,
        });
        pieces.collect()
    }

    /// All that was said of any run.
    pub(super) fn turn_updates(&self) -> Vec<TurnUpdate> {
        let said = self.updates.iter().filter_map(|up| match up {
            AgentUpdate::Turn { update: what, .. } => Some(what.clone()),
            _ => None,
        });
        said.collect()
    }

    /// The same, but for the calls of the model.
    pub(super) fn updates_without_model_calls(&self) -> Vec<TurnUpdate> {
        self.turn_updates().into_iter().filter(|said| *said != TurnUpdate::ModelCall).collect()
    }

    /// What was used, in all.
    pub(super) fn usage(&self) -> TokenUsage {
        let mut sum = TokenUsage::default();
        for said in self.turn_updates() {
            if let TurnUpdate::Usage { usage } = said {
                sum += usage;
            }
        }
        sum
    }

    /// How often the model was called.
    pub(super) fn model_calls(&self) -> usize {
        self.turn_updates().iter().filter(|said| **said == TurnUpdate::ModelCall).count()
    }

    pub(super) fn stop(&self) -> TurnStopReason {
        self.outcome.stop
    }

    /// The tools that ended: name, output and whether it is an error.
    pub(super) fn finished_tools(&self) -> Vec<(String, Value, bool)> {
        let tools = self.turn_updates().into_iter().filter_map(|said| match said {
            TurnUpdate::ToolFinished { name, output, is_error, .. } => Some((name, output, is_error)),
            _ => None,
        });
        tools.collect()
    }

    /// What was asked.
    pub(super) fn asks(&self) -> Vec<&AskRequest> {
        let asks = self
            .updates
            .iter()
            .filter_map(|up| if let AgentUpdate::Ask { ask, .. } = up { Some(ask) } else { None });
        asks.collect()
    }

    /// The notices.
    pub(super) fn notices(&self) -> Vec<String> {
        let notices = self.turn_updates().into_iter().filter_map(|said| match said {
            TurnUpdate::Notice { text } => Some(text),
            _ => None,
        });
        notices.collect()
    }
}

impl DriverHarness {
    /// A driver, from its opening on, with what its session was given; and the far end of its pipe.
    pub(super) fn new<T, F>(
        agent: &str,
        change: impl FnOnce(&mut AgentSpec),
        open: impl FnOnce(AgentSpec, DuplexStream) -> F,
    ) -> (Self, DuplexStream)
    where
        T: HarnessDriver,
        F: Future<Output = Result<(T, AgentUpdate), AgentExitReason>> + Send + 'static,
    {
        let home = TempDir::new().expect("a temporary folder");
        let cwd = home.path().to_owned();
        let mut spec =
            AgentSpec::new(SessionId::from_random(&[7; 8]), WorkerId::from_random(&[8; 8]), agent, cwd);
        change(&mut spec);
        let (near, far) = tokio::io::duplex(PIPE_SIZE);
        let filter = Redactor::new_filter(SecretMatcher::from_env(&spec.env));
        let opening = open(spec, near);
        let end = host_agent_with_filter(UpdateNumber(0), Some(filter), |end| run_test_agent(end, opening));
        (
            Self {
                link_end: end,
                workspace: home,
                number: 0,
                unread: Vec::new(),
                agent_task: JoinSet::new(),
            },
            far,
        )
    }

    /// An agent that is elsewhere, by its name, with the life that it really has.
    pub(super) fn remote(name: &str, change: impl FnOnce(&mut AgentSpec)) -> Self {
        let workspace = TempDir::new().expect("a temporary folder");
        let cwd = workspace.path().to_owned();
        let mut spec =
            AgentSpec::new(SessionId::from_random(&[7; 8]), WorkerId::from_random(&[8; 8]), name, cwd);
        change(&mut spec);
        let kind = AgentKind::from_spec(&spec).expect("its name describes it");
        let around = AgentContext { agent_processes: None, endpoint_status: None, control: Arc::default() };
        let filter = Redactor::new_filter(SecretMatcher::from_env(&spec.env));
        let life = |end| agent::run_agent(kind, Box::new(spec), around, end);
        let link_end = host_agent_with_filter(UpdateNumber(0), Some(filter), life);
        Self { link_end, workspace, number: 0, unread: Vec::new(), agent_task: JoinSet::new() }
    }

    /// Has the agent play by itself.
    pub(super) fn with_agent_task(mut self, agent: impl Future<Output = ()> + Send + 'static) -> Self {
        self.agent_task.spawn(agent);
        self
    }

    pub(super) fn next_number(&mut self) -> EventNumber {
        self.number += 1;
        EventNumber(self.number)
    }

    pub(super) fn prompt(&mut self, name: &str, prompt: &str) {
        self.prompt_with(name, prompt, vec![], vec![]);
    }

    pub(super) fn prompt_with(
        &mut self,
        name: &str,
        prompt: &str,
        files: Vec<PromptFile>,
        messages: Vec<Value>,
    ) {
        let (number, limits) = (self.next_number(), TurnLimits::default());
        let (run, prompt) = (run_id(name), prompt.to_owned());
        self.link_end.send(AgentCommand::Prompt { number, run, prompt, files, messages, limits });
    }

    pub(super) fn steer(&mut self, name: &str, text: &str) -> EventNumber {
        let number = self.next_number();
        self.link_end.send(AgentCommand::Steer { number, run: run_id(name), text: text.to_owned() });
        number
    }

    pub(super) fn cancel(&mut self, name: &str) {
        let number = self.next_number();
        self.link_end.send(AgentCommand::Cancel { number, run: run_id(name) });
    }

    pub(super) fn answer(&mut self, ask: &AskRequest, answer: AskResolution) {
        let number = self.next_number();
        self.link_end.send(AgentCommand::Answer { number, ask: ask.id.clone(), answer });
    }

    pub(super) async fn next_update(&mut self) -> AgentUpdate {
        while self.unread.is_empty() {
            match self.link_end.next_event().await {
                LocalLinkEvent::Updates(said) => {
                    self.unread.extend(said.into_iter().rev().map(|thing| thing.update))
                }
                other => panic!("heard {other:?}"),
            }
        }
        self.unread.pop().expect("there was one")
    }

    /// Why the agent is no more.
    pub(super) async fn wait_for_failure(&mut self) -> RunError {
        loop {
            match self.link_end.next_event().await {
                LocalLinkEvent::Updates(_) => {}
                LocalLinkEvent::Gone(AgentExitReason::Failed(error)) => return error,
                other => panic!("heard {other:?}"),
            }
        }
    }

    /// Everything until the terminal of this run.
    pub(super) async fn wait_for_end(&mut self, name: &str) -> FinishedTurn {
        let mut ups = Vec::new();
        loop {
            match self.next_update().await {
                AgentUpdate::Terminal { run: ended, outcome } if ended == run_id(name) => {
                    return FinishedTurn { updates: ups, outcome };
                }
                up => ups.push(up),
            }
        }
    }

    pub(super) async fn run_turn(&mut self, name: &str, prompt: &str) -> FinishedTurn {
        self.prompt(name, prompt);
        self.wait_for_end(name).await
    }

    pub(super) async fn wait_for_ask(&mut self) -> AskRequest {
        loop {
            if let AgentUpdate::Ask { ask, .. } = self.next_update().await {
                return ask;
            }
        }
    }

    /// Waits for a piece of text, however it was merged.
    pub(super) async fn wait_for_text(&mut self, wanted: &str) {
        let mut text = String::new();
        while !text.contains(wanted) {
            if let AgentUpdate::Turn { update: TurnUpdate::Text { text: piece }, .. } =
                self.next_update().await
            {
                text.push_str(&piece);
            }
        }
    }
}

/// The far end of a pipe: an agent's side of it, line by line.
pub(super) struct AgentPipe {
    pub(super) lines: Lines<BufReader<ReadHalf<DuplexStream>>>,
    pub(super) writer: WriteHalf<DuplexStream>,
}

impl AgentPipe {
    pub(super) fn new(far: DuplexStream) -> Self {
        let (from, writer) = tokio::io::split(far);
        Self { lines: BufReader::new(from).lines(), writer }
    }

    /// The next line; `None` if the other side has hung up.
    pub(super) async fn try_next_json(&mut self) -> Option<Value> {
        let line = self.lines.next_line().await.expect("a pipe in memory")?;
        Some(serde_json::from_str(&line).expect("a message"))
    }

    pub(super) async fn next_json(&mut self) -> Value {
        self.try_next_json().await.expect("it is open")
    }

    /// The next message, which is of this method; gives its id and its parameters.
    pub(super) async fn expect_method(&mut self, method: &str) -> (Value, Value) {
        let mut message = self.next_json().await;
        assert_eq!(message["method"], method, "{message}");
        (message["id"].take(), message["params"].take())
    }

    /// Nothing was told, and nothing will be unless something happens.
    pub(super) async fn expect_silence(&mut self) {
        let heard = tokio::time::timeout(Duration::from_secs(60), self.next_json()).await;
        assert!(heard.is_err(), "{heard:?}");
    }

    pub(super) async fn write_line(&mut self, line: &str) {
        self.writer.write_all(line.as_bytes()).await.expect("a pipe in memory");
        self.writer.write_all(b"\n").await.expect("a pipe in memory");
    }

    /// Lives until the other side hangs up.
    pub(super) async fn wait_for_hang_up(&mut self) {
        while let Ok(Some(_)) = self.lines.next_line().await {}
    }
}

pub(super) fn run_id(name: &str) -> RunId {
    RunId::parse(name).expect("a good id")
}

pub(super) fn decision_reply(decision: PermissionDecision, reason: Option<&str>) -> AskResolution {
    AskResolution::Answered(AskAnswer {
        decision: Some(decision),
        value: None,
        reason: reason.map(str::to_owned),
    })
}

pub(super) fn value_reply(value: &str) -> AskResolution {
    AskResolution::Answered(AskAnswer { value: Some(value.to_owned()), ..AskAnswer::default() })
}

#[track_caller]
pub(super) fn assert_ended_well(ended: &FinishedTurn) {
    assert_eq!((ended.outcome.stop, &ended.outcome.error), (TurnStopReason::EndTurn, &None));
}

/// Until everybody waits for something.
pub(super) async fn let_all_wait() {
    tokio::time::sleep(Duration::from_millis(1)).await;
}

/// Why an agent is no more that has hung up.
pub(super) fn hung_up_error() -> AgentExitReason {
    AgentExitReason::Failed(RunError::new("hung_up", "the agent hung up"))
}

/// The life of an agent, without a process.
async fn run_test_agent<T: HarnessDriver>(
    mut end: AgentEndpoint,
    opening: impl Future<Output = Result<(T, AgentUpdate), AgentExitReason>> + Send,
) -> AgentExitReason {
    let (mut talk, hello) = match opening.await {
        Ok(opened) => opened,
        Err(gone) => return gone,
    };
    if end.send(hello).await.is_err() {
        return AgentExitReason::Stopped;
    }
    let voice = end.output();
    loop {
        let down = tokio::select! {
            () = talk.idle(&voice) => return hung_up_error(),
            down = end.next_command() => down,
        };
        let Some(down) = down else { return AgentExitReason::Stopped };
        if let AgentCommand::Prompt { run, prompt, files, messages, limits, .. } = down {
            let prompt = DriverPrompt { run, text: prompt, files, messages, limits };
            match run_one_turn(&mut end, &mut talk, prompt).await {
                Ok(true) => {}
                Ok(false) => return hung_up_error(),
                Err(LinkClosed) => return AgentExitReason::Stopped,
            }
        }
    }
}

/// False if the agent did not outlive its turn.
async fn run_one_turn<T: HarnessDriver>(
    end: &mut AgentEndpoint,
    talk: &mut T,
    prompt: DriverPrompt,
) -> Result<bool, LinkClosed> {
    let inbox = DriverInbox::default();
    let turn = DriverTurn::new(prompt.run.clone(), end.output(), &inbox);
    let mut work = Box::pin(talk.turn(&turn, &prompt));
    let outcome = loop {
        tokio::select! {
            biased;
            down = end.next_command() => match down.ok_or(LinkClosed)? {
                AgentCommand::Cancel { .. } => inbox.cancel(),
                AgentCommand::Steer { number, text, .. } => assert!(inbox.queue_steer(DriverSteer { number, text })),
                AgentCommand::Answer { ask, answer, .. } => inbox.deliver_reply(&ask, answer),
                other => panic!("not in these tests: {other:?}"),
            },
            outcome = &mut work => break outcome?,
        }
    };
    drop(work);
    let Some(outcome) = outcome else { return Ok(false) };
    for steer in inbox.take_missed_steers() {
        end.send(AgentUpdate::SteerMissed { steer }).await?;
    }
    end.send(AgentUpdate::Terminal { run: prompt.run, outcome }).await?;
    Ok(true)
}
