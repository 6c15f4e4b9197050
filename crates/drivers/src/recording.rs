//! Replays recorded exchanges with real agents, without the agents: the agent's lines are sent again, the session's
//! actions are done again, and the driver must send exactly what it sent when recorded. The recordings, and how they
//! are made, are in `tests/recorded`.

use std::path::Path;
use std::time::Duration;

use qd_protocol::event::{PermissionDecision, RunError};
use qd_protocol::link::{AgentUpdate, AskRequest};
use qd_protocol::worker::AgentSpec;
use serde::Deserialize;
use serde_json::Value;
use tokio::io::DuplexStream;

use super::harness::{AgentPipe, DriverHarness, FinishedTurn, decision_reply, let_all_wait, value_reply};

/// How long to wait for something that must come. The clock of these tests advances when every task waits.
const WAIT_MAX: Duration = Duration::from_secs(60);
/// The session's directory in recordings.
const RECORDED_FOLDER: &str = "/w";

/// The exchange with one process of an agent.
#[derive(Debug)]
pub(super) struct AgentRecording {
    name: String,
    pub(super) header: RecordingHeader,
    lines: Vec<RecordingLine>,
}

/// The first line of a recording: the agent and what its session was given.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RecordingHeader {
    pub(super) agent: String,
    /// The agent's version.
    pub(super) version: String,
    #[serde(default)]
    pub(super) model: Option<String>,
    #[serde(default)]
    pub(super) system_prompt: Option<String>,
    /// The agent's id of the conversation that it resumes.
    #[serde(default)]
    pub(super) resume: Option<String>,
}

#[derive(Debug, Deserialize)]
enum RecordingLine {
    #[serde(rename = "#")]
    Header(RecordingHeader),
    #[serde(rename = "!")]
    Action(RecordedAction),
    #[serde(rename = ">")]
    ToAgent(Value),
    #[serde(rename = "<")]
    FromAgent(Value),
}

/// An action of the session.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
enum RecordedAction {
    /// Later prompts have this mode.
    Mode(String),
    Prompt(String),
    Steer(String),
    Cancel(RecordedTrue),
    Allow(RecordedTrue),
    /// Denies with this reason.
    Deny(String),
    /// Answers a question.
    Choose(String),
}

/// The value `true`, for actions without arguments.
#[derive(Debug, Deserialize)]
#[serde(try_from = "bool")]
struct RecordedTrue;

/// The result of a replay.
#[derive(Debug)]
pub(super) struct ReplayResult {
    /// The first update, which reports the agent as ready.
    pub(super) ready: AgentUpdate,
    pub(super) runs: Vec<FinishedTurn>,
}

impl ReplayResult {
    /// Expects exactly one run.
    #[track_caller]
    pub(super) fn only_run(self) -> FinishedTurn {
        let [only] = self.into_runs();
        only
    }

    /// Expects exactly `N` runs.
    #[track_caller]
    pub(super) fn into_runs<const N: usize>(self) -> [FinishedTurn; N] {
        let count = self.runs.len();
        self.runs.try_into().unwrap_or_else(|_| panic!("there are {count} runs in it"))
    }
}

impl AgentRecording {
    /// Reads the recording of this agent and scene.
    pub(super) fn read(agent: &str, scene: &str) -> Self {
        let name = format!("{agent}/{scene}.jsonl");
        let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/recorded").join(&name);
        let text = std::fs::read_to_string(&file).unwrap_or_else(|error| panic!("{name}: {error}"));
        let recording = Self::parse(name, &text);
        assert_eq!(recording.header.agent, agent, "{}", recording.name);
        recording
    }

    fn parse(name: String, text: &str) -> Self {
        let parse = |(at, line): (usize, &str)| {
            serde_json::from_str(line).unwrap_or_else(|error| panic!("{name}:{}: {error}", at + 1))
        };
        let mut lines = text.lines().enumerate().map(parse);
        let Some(RecordingLine::Header(header)) = lines.next() else {
            panic!("{name} does not say whose it is")
        };
        Self { header, lines: lines.collect(), name }
    }

    /// Gives the session what it had when recorded.
    pub(super) fn apply_to_spec(&self, spec: &mut AgentSpec) {
        spec.cwd = RECORDED_FOLDER.into();
        spec.model.clone_from(&self.header.model);
        spec.system_prompt.clone_from(&self.header.system_prompt);
        spec.agent_session_id.clone_from(&self.header.resume);
    }

    /// Whether a line of the agent contains this text.
    pub(super) fn agent_says(&self, text: &str) -> bool {
        self.lines.iter().any(
            |line| matches!(line, RecordingLine::FromAgent(message) if message.to_string().contains(text)),
        )
    }

    /// Whether a line to the agent contains this text.
    pub(super) fn agent_is_sent(&self, text: &str) -> bool {
        self.count_sent_lines(text) > 0
    }

    /// The number of lines to the agent that contain this text.
    pub(super) fn count_sent_lines(&self, text: &str) -> usize {
        let contains = |line: &&RecordingLine| matches!(line, RecordingLine::ToAgent(message) if message.to_string().contains(text));
        self.lines.iter().filter(contains).count()
    }

    /// Plays the recording to its end, after which the driver must send nothing.
    pub(super) async fn play(self, harness: DriverHarness, agent_side: DuplexStream) -> ReplayResult {
        let mut player = RecordingPlayer::new(&self, harness, agent_side);
        player.play_lines(&self.lines).await;
        let silence = tokio::time::timeout(WAIT_MAX, player.agent.next_json()).await;
        assert!(silence.is_err(), "{}: the driver says more than it did: {silence:?}", self.name);
        player.wait_for_run_end().await;
        ReplayResult { ready: player.ready.expect("it was ready"), runs: player.finished }
    }

    /// Plays a recording whose agent never becomes ready; returns the error.
    pub(super) async fn play_refused(self, harness: DriverHarness, agent_side: DuplexStream) -> RunError {
        let mut player = RecordingPlayer::new(&self, harness, agent_side);
        player.play_lines(&self.lines).await;
        player.harness.wait_for_failure().await
    }
}

/// Plays a recording.
struct RecordingPlayer<'a> {
    name: &'a str,
    harness: DriverHarness,
    agent: AgentPipe,
    ready: Option<AgentUpdate>,
    /// The number of prompts so far. Each starts a run with that number as its id.
    prompts: usize,
    /// The updates of the running run.
    updates: Vec<AgentUpdate>,
    finished: Vec<FinishedTurn>,
    /// Recorded message ids that we generated, each with the id generated now.
    renamed_ids: Vec<(String, String)>,
}

impl<'a> RecordingPlayer<'a> {
    fn new(recording: &'a AgentRecording, harness: DriverHarness, agent_side: DuplexStream) -> Self {
        Self {
            name: &recording.name,
            harness,
            agent: AgentPipe::new(agent_side),
            ready: None,
            prompts: 0,
            updates: Vec::new(),
            finished: Vec::new(),
            renamed_ids: Vec::new(),
        }
    }

    async fn play_lines(&mut self, lines: &[RecordingLine]) {
        // Line 1 is the header.
        for (number, line) in (2..).zip(lines) {
            match line {
                RecordingLine::Header(_) => panic!("{} says twice whose it is", self.name),
                RecordingLine::FromAgent(message) => {
                    self.agent.write_line(&self.with_current_ids(message)).await
                }
                RecordingLine::ToAgent(message) => self.expect_from_driver(message, number).await,
                RecordingLine::Action(action) => {
                    // Each action takes full effect before the next line.
                    let_all_wait().await;
                    self.perform(action).await;
                    let_all_wait().await;
                }
            }
        }
    }

    /// Expects that the driver sends this line next.
    async fn expect_from_driver(&mut self, expected: &Value, number: u32) {
        let place = format!("{}:{number}", self.name);
        let actual = tokio::time::timeout(WAIT_MAX, self.agent.try_next_json()).await;
        let Ok(actual) = actual else {
            panic!("{place}: the driver says nothing, and said then\n  {expected}");
        };
        let mut actual =
            actual.unwrap_or_else(|| panic!("{place}: the driver hung up, and said then\n  {expected}"));
        if let (Some(old), Some(new)) = (expected["uuid"].as_str(), actual["uuid"].as_str()) {
            self.renamed_ids.push((old.to_owned(), new.to_owned()));
        }
        let mut expected: Value = serde_json::from_str(&self.with_current_ids(expected)).expect("JSON");
        // Our own version, which changes while recordings do not.
        for message in [&mut actual, &mut expected] {
            if let Some(version) = message.pointer_mut("/params/clientInfo/version") {
                *version = Value::Null;
            }
        }
        assert!(actual == expected, "{place}: the driver says\n  {actual}\nand said then\n  {expected}");
    }

    /// The line with recorded ids replaced by the current ones.
    fn with_current_ids(&self, message: &Value) -> String {
        self.renamed_ids.iter().fold(message.to_string(), |text, (old, new)| text.replace(old, new))
    }

    /// Does what the session did.
    async fn perform(&mut self, action: &RecordedAction) {
        let run = self.prompts.to_string();
        match action {
            RecordedAction::Prompt(text) => {
                self.wait_for_run_end().await;
                self.prompts += 1;
                self.harness.prompt(&self.prompts.to_string(), text);
            }
            RecordedAction::Mode(mode) => self.harness.set_mode(mode),
            RecordedAction::Cancel(RecordedTrue) => self.harness.cancel(&run),
            RecordedAction::Steer(text) => drop(self.harness.steer(&run, text)),
            RecordedAction::Allow(RecordedTrue) => {
                let ask = self.wait_for_ask().await;
                self.harness.answer(&ask, decision_reply(PermissionDecision::AllowOnce, None));
            }
            RecordedAction::Deny(reason) => {
                let ask = self.wait_for_ask().await;
                self.harness.answer(&ask, decision_reply(PermissionDecision::Deny, Some(reason)));
            }
            RecordedAction::Choose(value) => {
                let ask = self.wait_for_ask().await;
                self.harness.answer(&ask, value_reply(value));
            }
        }
    }

    async fn wait_for_ask(&mut self) -> AskRequest {
        loop {
            let received = tokio::time::timeout(WAIT_MAX, self.harness.next_update()).await;
            let update = received.unwrap_or_else(|_| panic!("{}: the driver asks nothing", self.name));
            self.updates.push(update.clone());
            if let AgentUpdate::Ask { ask, .. } = update {
                return ask;
            }
        }
    }

    /// Waits for the agent to become ready, or for the running run to end, if there is one.
    async fn wait_for_run_end(&mut self) {
        if self.prompts == 0 {
            let ready = tokio::time::timeout(WAIT_MAX, self.harness.next_update()).await;
            let ready = ready.unwrap_or_else(|_| panic!("{}: the agent is not ready", self.name));
            assert!(matches!(ready, AgentUpdate::Ready { .. }), "{}: {ready:?}", self.name);
            self.ready = Some(ready);
        } else if self.finished.len() < self.prompts {
            let run = self.prompts.to_string();
            let ended = tokio::time::timeout(WAIT_MAX, self.harness.wait_for_end(&run)).await;
            let FinishedTurn { updates, outcome } =
                ended.unwrap_or_else(|_| panic!("{}: run {run} does not end", self.name));
            let updates = self.updates.drain(..).chain(updates).collect();
            self.finished.push(FinishedTurn { updates, outcome });
        }
    }
}

impl TryFrom<bool> for RecordedTrue {
    type Error = &'static str;

    fn try_from(value: bool) -> Result<Self, Self::Error> {
        value.then_some(Self).ok_or("must be `true` or absent")
    }
}

#[cfg(test)]
mod tests {
    use qd_link::{AgentOutput, LinkClosed};
    use qd_protocol::link::TurnOutcome;
    use tokio::io::AsyncWriteExt;

    use super::super::harness::HarnessDriver;
    use super::*;
    use crate::turn::{DriverPrompt, DriverTurn};

    /// A driver that sends nothing and holds its end of the pipe open.
    struct SilentDriver(DuplexStream);

    impl HarnessDriver for SilentDriver {
        async fn turn(
            &mut self,
            _: &DriverTurn<'_>,
            _: &DriverPrompt,
        ) -> Result<Option<TurnOutcome>, LinkClosed> {
            Ok(None)
        }

        async fn idle(&mut self, _: &AgentOutput) {
            let _held = &self.0;
            std::future::pending().await
        }
    }

    /// Plays a recording in which the driver sends `hello`, with a driver that sends `says`.
    async fn play_hello(says: &'static [u8]) -> ReplayResult {
        let text = "{\"#\":{\"agent\":\"a\",\"version\":\"1\"}}\n{\">\":\"hello\"}\n";
        let opened = |_, mut driver_side: DuplexStream| async move {
            driver_side.write_all(says).await.expect("a pipe in memory");
            Ok((SilentDriver(driver_side), AgentUpdate::Ready { agent_session_id: None, steers: false }))
        };
        let (harness, agent_side) = DriverHarness::new("a", |_| {}, opened);
        AgentRecording::parse("a/scene.jsonl".to_owned(), text).play(harness, agent_side).await
    }

    #[tokio::test(start_paused = true)]
    async fn a_driver_that_sends_what_was_recorded_passes() {
        assert_eq!(play_hello(b"\"hello\"\n").await.runs.len(), 0);
    }

    #[tokio::test(start_paused = true)]
    #[should_panic(expected = "a/scene.jsonl:2: the driver says\n  \"hullo\"\nand said then\n  \"hello\"")]
    async fn a_driver_that_sends_something_else_fails_with_the_line() {
        play_hello(b"\"hullo\"\n").await;
    }

    #[tokio::test(start_paused = true)]
    #[should_panic(expected = "a/scene.jsonl:2: the driver says nothing")]
    async fn a_driver_that_sends_nothing_fails_with_the_missing_message() {
        play_hello(b"").await;
    }

    #[tokio::test(start_paused = true)]
    #[should_panic(expected = "a/scene.jsonl: the driver says more than it did")]
    async fn a_driver_that_sends_more_fails() {
        play_hello(b"\"hello\"\n\"and more\"\n").await;
    }
}
