//! Shared by the drivers' tests: a session's end of a link, a driver behind it, and an in-memory pipe to an agent whose
//! lines a test writes itself or plays from a recording. The clock is paused and advances when every task waits.

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

use crate::agent_driver::AgentDriver;
use crate::agent_launcher::AgentLauncher;
use crate::redact::{Redactor, SecretMatcher};
use crate::stdio_agent::StdioConversation;
use crate::turn::{DriverInbox, DriverPrompt, DriverSteer, DriverTurn, DriverTurnEnd};

/// The capacity of a kernel pipe.
const PIPE_SIZE: usize = 64 << 10;

/// A driver that is ready, as its tests see it.
pub(super) trait HarnessDriver: Send + 'static {
    /// Runs one turn; `None` if the agent did not outlive it.
    fn turn(
        &mut self,
        turn: &DriverTurn<'_>,
        prompt: &DriverPrompt,
    ) -> impl Future<Output = Result<Option<TurnOutcome>, LinkClosed>> + Send;

    /// Runs between turns, until the agent has exited.
    fn idle(&mut self, output: &AgentOutput) -> impl Future<Output = ()> + Send;

    /// Reports the agent as ready again if its conversation has another id after a turn.
    fn new_session_id_update(&mut self) -> Option<AgentUpdate> {
        None
    }
}

/// A remote agent, which has no process.
pub(super) struct RemoteTestAgent {
    agent: Box<dyn AgentDriver>,
    spec: AgentSpec,
}

impl RemoteTestAgent {
    /// Starts the agent that the name in the specification describes.
    pub(super) async fn start(mut spec: AgentSpec) -> Result<(Self, AgentUpdate), AgentExitReason> {
        let launcher = AgentLauncher::from_spec(&spec).expect("its name describes it");
        let agent = launcher.start(&spec, None).await.map_err(AgentExitReason::Failed)?;
        let ready = agent.ready_update(&spec);
        if let AgentUpdate::Ready { agent_session_id, .. } = &ready {
            spec.agent_session_id.clone_from(agent_session_id);
        }
        Ok((Self { agent, spec }, ready))
    }
}

impl HarnessDriver for RemoteTestAgent {
    async fn turn(
        &mut self,
        turn: &DriverTurn<'_>,
        prompt: &DriverPrompt,
    ) -> Result<Option<TurnOutcome>, LinkClosed> {
        Ok(match self.agent.turn(turn, prompt).await? {
            DriverTurnEnd::Stopped(outcome) => Some(outcome),
            DriverTurnEnd::AgentExited(error) => panic!("it has no process: {error:?}"),
        })
    }

    async fn idle(&mut self, output: &AgentOutput) {
        self.agent.idle(output).await;
    }

    fn new_session_id_update(&mut self) -> Option<AgentUpdate> {
        let ready = self.agent.ready_update(&self.spec);
        match &ready {
            AgentUpdate::Ready { agent_session_id, .. }
                if *agent_session_id != self.spec.agent_session_id =>
            {
                self.spec.agent_session_id.clone_from(agent_session_id);
                Some(ready)
            }
            _ => None,
        }
    }
}

/// A conversation over a pipe instead of a process.
impl<C: StdioConversation> HarnessDriver for C {
    async fn turn(
        &mut self,
        turn: &DriverTurn<'_>,
        prompt: &DriverPrompt,
    ) -> Result<Option<TurnOutcome>, LinkClosed> {
        StdioConversation::turn(self, turn, prompt).await
    }

    async fn idle(&mut self, output: &AgentOutput) {
        StdioConversation::idle(self, output).await;
    }
}

/// Lets a fake agent use the methods of its [`AgentPipe`].
macro_rules! deref_to_agent_pipe {
    ($fake_agent:ty) => {
        impl std::ops::Deref for $fake_agent {
            type Target = $crate::harness::AgentPipe;

            fn deref(&self) -> &Self::Target {
                &self.far
            }
        }

        impl std::ops::DerefMut for $fake_agent {
            fn deref_mut(&mut self) -> &mut Self::Target {
                &mut self.far
            }
        }
    };
}
pub(super) use deref_to_agent_pipe;

/// The session's side of one agent.
pub(super) struct DriverHarness {
    pub(super) link_end: SessionEndpoint,
    /// The session's directory.
    pub(super) workspace: TempDir,
    /// The number of the last command.
    number: u64,
    /// The mode that prompts are sent with.
    mode: Option<String>,
    /// Updates received but not yet returned, in reverse order.
    unread: Vec<AgentUpdate>,
    /// The agent, if it runs by itself.
    agent_task: JoinSet<()>,
}

/// The updates of a turn, and its outcome.
#[derive(Debug)]
pub(super) struct FinishedTurn {
    pub(super) updates: Vec<AgentUpdate>,
    pub(super) outcome: TurnOutcome,
}

impl FinishedTurn {
    pub(super) fn text(&self) -> String {
        let pieces = self.updates.iter().filter_map(|update| match update {
            AgentUpdate::Turn { update: TurnUpdate::Text { text }, .. } => Some(text.as_str()),
            _ => None,
        });
        pieces.collect()
    }

    /// The turn updates of any run.
    pub(super) fn turn_updates(&self) -> Vec<TurnUpdate> {
        let updates = self.updates.iter().filter_map(|update| match update {
            AgentUpdate::Turn { update: turn_update, .. } => Some(turn_update.clone()),
            _ => None,
        });
        updates.collect()
    }

    pub(super) fn updates_without_model_calls(&self) -> Vec<TurnUpdate> {
        self.turn_updates().into_iter().filter(|update| *update != TurnUpdate::ModelCall).collect()
    }

    /// The sum of all reported usage.
    pub(super) fn usage(&self) -> TokenUsage {
        let mut sum = TokenUsage::default();
        for update in self.turn_updates() {
            if let TurnUpdate::Usage { usage, .. } = update {
                sum += usage;
            }
        }
        sum
    }

    pub(super) fn model_calls(&self) -> usize {
        self.turn_updates().iter().filter(|update| **update == TurnUpdate::ModelCall).count()
    }

    pub(super) fn stop(&self) -> TurnStopReason {
        self.outcome.stop
    }

    /// The tools that ended: name, output, and whether it is an error.
    pub(super) fn finished_tools(&self) -> Vec<(String, Value, bool)> {
        let tools = self.turn_updates().into_iter().filter_map(|update| match update {
            TurnUpdate::ToolFinished { name, output, is_error, .. } => Some((name, output, is_error)),
            _ => None,
        });
        tools.collect()
    }

    pub(super) fn asks(&self) -> Vec<&AskRequest> {
        let asks = self
            .updates
            .iter()
            .filter_map(|update| if let AgentUpdate::Ask { ask, .. } = update { Some(ask) } else { None });
        asks.collect()
    }

    pub(super) fn notices(&self) -> Vec<String> {
        let notices = self.turn_updates().into_iter().filter_map(|update| match update {
            TurnUpdate::Notice { text, .. } => Some(text),
            _ => None,
        });
        notices.collect()
    }
}

impl DriverHarness {
    /// Opens a driver. `change` adjusts the session's specification. Also returns the agent's side of the pipe.
    pub(super) fn new<T, F>(
        agent: &str,
        change: impl FnOnce(&mut AgentSpec),
        open: impl FnOnce(AgentSpec, DuplexStream) -> F,
    ) -> (Self, DuplexStream)
    where
        T: HarnessDriver,
        F: Future<Output = Result<(T, AgentUpdate), AgentExitReason>> + Send + 'static,
    {
        let workspace = TempDir::new().expect("a temporary folder");
        let cwd = workspace.path().to_owned();
        let mut spec =
            AgentSpec::new(SessionId::from_random(&[7; 8]), WorkerId::from_random(&[8; 8]), agent, cwd);
        change(&mut spec);
        let (driver_side, agent_side) = tokio::io::duplex(PIPE_SIZE);
        let filter = Redactor::new_filter(SecretMatcher::of_agent(&spec));
        let opening = open(spec, driver_side);
        let link_end = host_agent_with_filter(UpdateNumber(0), Some(filter), |link_end| {
            run_test_agent(link_end, opening)
        });
        (
            Self {
                link_end,
                workspace,
                number: 0,
                mode: None,
                unread: Vec::new(),
                agent_task: JoinSet::new(),
            },
            agent_side,
        )
    }

    /// A remote agent by its name.
    pub(super) fn remote(name: &str, change: impl FnOnce(&mut AgentSpec)) -> Self {
        let workspace = TempDir::new().expect("a temporary folder");
        let cwd = workspace.path().to_owned();
        let mut spec =
            AgentSpec::new(SessionId::from_random(&[7; 8]), WorkerId::from_random(&[8; 8]), name, cwd);
        change(&mut spec);
        let link_end = host_remote_agent(spec);
        Self { link_end, workspace, number: 0, mode: None, unread: Vec::new(), agent_task: JoinSet::new() }
    }

    /// Lets the agent run by itself in a task.
    pub(super) fn with_agent_task(mut self, agent: impl Future<Output = ()> + Send + 'static) -> Self {
        self.agent_task.spawn(agent);
        self
    }

    pub(super) fn next_number(&mut self) -> EventNumber {
        self.number += 1;
        EventNumber(self.number)
    }

    /// Sends later prompts with this mode.
    pub(super) fn set_mode(&mut self, mode: &str) {
        self.mode = Some(mode.to_owned());
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
        let (run, prompt, mode) = (run_id(name), prompt.to_owned(), self.mode.clone());
        self.link_end.send(AgentCommand::Prompt { number, run, prompt, mode, files, messages, limits });
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
                LocalLinkEvent::Updates(updates) => {
                    self.unread.extend(updates.into_iter().rev().map(|numbered| numbered.update))
                }
                other => panic!("unexpected event: {other:?}"),
            }
        }
        self.unread.pop().expect("there was one")
    }

    /// Waits until the agent has failed, and returns the error.
    pub(super) async fn wait_for_failure(&mut self) -> RunError {
        loop {
            match self.link_end.next_event().await {
                LocalLinkEvent::Updates(_) => {}
                LocalLinkEvent::Gone(AgentExitReason::Failed(error)) => return error,
                other => panic!("unexpected event: {other:?}"),
            }
        }
    }

    /// Collects everything until the terminal of this run.
    pub(super) async fn wait_for_end(&mut self, name: &str) -> FinishedTurn {
        let mut updates = Vec::new();
        loop {
            match self.next_update().await {
                AgentUpdate::TurnEnded { run: ended, outcome } if ended == run_id(name) => {
                    return FinishedTurn { updates, outcome };
                }
                update => updates.push(update),
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

    /// Waits for a text, however its pieces were merged.
    pub(super) async fn wait_for_text(&mut self, expected: &str) {
        let mut text = String::new();
        while !text.contains(expected) {
            if let AgentUpdate::Turn { update: TurnUpdate::Text { text: piece }, .. } =
                self.next_update().await
            {
                text.push_str(&piece);
            }
        }
    }
}

/// The agent's side of the pipe, line by line.
pub(super) struct AgentPipe {
    pub(super) lines: Lines<BufReader<ReadHalf<DuplexStream>>>,
    pub(super) writer: WriteHalf<DuplexStream>,
}

impl AgentPipe {
    pub(super) fn new(agent_side: DuplexStream) -> Self {
        let (from, writer) = tokio::io::split(agent_side);
        Self { lines: BufReader::new(from).lines(), writer }
    }

    /// The next line; `None` if the driver has hung up.
    pub(super) async fn try_next_json(&mut self) -> Option<Value> {
        let line = self.lines.next_line().await.expect("a pipe in memory")?;
        Some(serde_json::from_str(&line).expect("a message"))
    }

    pub(super) async fn next_json(&mut self) -> Value {
        self.try_next_json().await.expect("it is open")
    }

    /// Expects a message with this method next; returns its id and its parameters.
    pub(super) async fn expect_method(&mut self, method: &str) -> (Value, Value) {
        let mut message = self.next_json().await;
        assert_eq!(message["method"], method, "{message}");
        (message["id"].take(), message["params"].take())
    }

    /// Expects that the driver sends nothing unless something else happens.
    pub(super) async fn expect_silence(&mut self) {
        let message = tokio::time::timeout(Duration::from_secs(60), self.next_json()).await;
        assert!(message.is_err(), "{message:?}");
    }

    pub(super) async fn write_line(&mut self, line: &str) {
        self.writer.write_all(line.as_bytes()).await.expect("a pipe in memory");
        self.writer.write_all(b"\n").await.expect("a pipe in memory");
    }

    /// Reads until the driver hangs up.
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

/// Waits until every task waits for something.
pub(super) async fn let_all_wait() {
    tokio::time::sleep(Duration::from_millis(1)).await;
}

/// The exit reason of an agent that has hung up.
pub(super) fn hung_up_error() -> AgentExitReason {
    AgentExitReason::Failed(RunError::new("hung_up", "the agent hung up"))
}

/// Hosts the remote agent that the name in the specification describes.
pub(super) fn host_remote_agent(spec: AgentSpec) -> SessionEndpoint {
    let filter = Redactor::new_filter(SecretMatcher::of_agent(&spec));
    host_agent_with_filter(UpdateNumber(0), Some(filter), |link_end| {
        run_test_agent(link_end, RemoteTestAgent::start(spec))
    })
}

/// Runs a driver like the real agent task, but without a process.
async fn run_test_agent<T: HarnessDriver>(
    mut end: AgentEndpoint,
    opening: impl Future<Output = Result<(T, AgentUpdate), AgentExitReason>> + Send,
) -> AgentExitReason {
    let (mut driver, hello) = match opening.await {
        Ok(opened) => opened,
        Err(gone) => return gone,
    };
    if end.send(hello).await.is_err() {
        return AgentExitReason::Stopped;
    }
    let output = end.output();
    loop {
        let command = tokio::select! {
            () = driver.idle(&output) => return hung_up_error(),
            command = end.next_command() => command,
        };
        let Some(command) = command else { return AgentExitReason::Stopped };
        if let AgentCommand::Prompt { run, prompt, mode, files, messages, limits, .. } = command {
            let prompt = DriverPrompt { run, text: prompt, mode, files, messages, limits };
            match run_one_turn(&mut end, &mut driver, prompt).await {
                Ok(TestTurnEnd::Ready) => {}
                Ok(TestTurnEnd::HungUp) => return hung_up_error(),
                Ok(TestTurnEnd::Killed) | Err(LinkClosed) => return AgentExitReason::Stopped,
            }
            if let Some(ready) = driver.new_session_id_update()
                && end.send(ready).await.is_err()
            {
                return AgentExitReason::Stopped;
            }
        }
    }
}

/// What a turn leaves of its agent.
enum TestTurnEnd {
    Ready,
    HungUp,
    Killed,
}

async fn run_one_turn<T: HarnessDriver>(
    end: &mut AgentEndpoint,
    driver: &mut T,
    prompt: DriverPrompt,
) -> Result<TestTurnEnd, LinkClosed> {
    let inbox = DriverInbox::for_run(prompt.run.clone());
    let turn = DriverTurn::new(prompt.run.clone(), end.output(), &inbox);
    let mut turn_end = Box::pin(driver.turn(&turn, &prompt));
    let outcome = loop {
        tokio::select! {
            biased;
            command = end.next_command() => match command.ok_or(LinkClosed)? {
                AgentCommand::Cancel { run, .. } => inbox.cancel(&run),
                AgentCommand::Steer { number, text, .. } => assert!(inbox.queue_steer(DriverSteer { number, text })),
                AgentCommand::Answer { ask, answer, .. } => inbox.deliver_reply(&ask, answer),
                AgentCommand::Kill { .. } => break None,
                other => panic!("not in these tests: {other:?}"),
            },
            outcome = &mut turn_end => break Some(outcome?),
        }
    };
    drop(turn_end);
    let (outcome, end_of_turn) = match outcome {
        Some(Some(outcome)) => (outcome, TestTurnEnd::Ready),
        Some(None) => return Ok(TestTurnEnd::HungUp),
        None => (TurnOutcome { agent_ends: true, ..TurnOutcome::cancelled() }, TestTurnEnd::Killed),
    };
    for steer in inbox.take_missed_steers() {
        end.send(AgentUpdate::SteerMissed { steer }).await?;
    }
    end.send(AgentUpdate::TurnEnded { run: prompt.run, outcome }).await?;
    Ok(end_of_turn)
}
