//! Recorded exchanges with real agents, played again without them: the agent's lines are said again, the session does
//! again what it did, and the driver must say what it said then. The recordings, and how they are made, are in
//! `tests/recorded`.

use std::path::Path;
use std::time::Duration;

use qd_protocol::event::{PermissionDecision, RunError};
use qd_protocol::link::{AgentUpdate, AskRequest};
use qd_protocol::worker::AgentSpec;
use serde::Deserialize;
use serde_json::Value;
use tokio::io::DuplexStream;

use super::harness::{AgentPipe, DriverHarness, FinishedTurn, decision_reply, let_all_wait, value_reply};

/// How long something is waited for that must come. The clock of these tests moves on by itself when everybody waits.
const WAIT_MAX: Duration = Duration::from_secs(60);
/// What the folder of the session is called in recordings.
const RECORDED_FOLDER: &str = "/w";

/// One process of an agent, line by line.
#[derive(Debug)]
pub(super) struct AgentRecording {
    name: String,
    pub(super) header: RecordingHeader,
    lines: Vec<RecordingLine>,
}

/// The first line: whose exchange it is.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RecordingHeader {
    pub(super) agent: String,
    /// That of the agent.
    pub(super) version: String,
    /// The model that the session was given.
    #[serde(default)]
    pub(super) model: Option<String>,
    #[serde(default)]
    pub(super) system_prompt: Option<String>,
    /// The agent's name for the conversation that it was to go on with.
    #[serde(default)]
    pub(super) resume: Option<String>,
}

/// A line.
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

/// What the session did.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
enum RecordedAction {
    Prompt(String),
    Steer(String),
    Cancel(RecordedTrue),
    Allow(RecordedTrue),
    /// With the reason.
    Deny(String),
    /// The answer to a question.
    Choose(String),
}

/// Stands where there is nothing to say.
#[derive(Debug, Deserialize)]
#[serde(try_from = "bool")]
struct RecordedTrue;

/// What came of a recording.
#[derive(Debug)]
pub(super) struct ReplayResult {
    /// What was told of the agent before its first turn.
    pub(super) ready: AgentUpdate,
    pub(super) runs: Vec<FinishedTurn>,
}

impl ReplayResult {
    /// The only run.
    #[track_caller]
    pub(super) fn only_run(self) -> FinishedTurn {
        let [only] = self.into_runs();
        only
    }

    /// So many runs.
    #[track_caller]
    pub(super) fn into_runs<const N: usize>(self) -> [FinishedTurn; N] {
        let count = self.runs.len();
        self.runs.try_into().unwrap_or_else(|_| panic!("there are {count} runs in it"))
    }
}

impl AgentRecording {
    /// Reads one.
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

    /// Gives the session what it had.
    pub(super) fn apply_to_spec(&self, spec: &mut AgentSpec) {
        spec.cwd = RECORDED_FOLDER.into();
        spec.model.clone_from(&self.header.model);
        spec.system_prompt.clone_from(&self.header.system_prompt);
        spec.agent_session_id.clone_from(&self.header.resume);
    }

    /// Whether the agent says this in it.
    pub(super) fn agent_says(&self, words: &str) -> bool {
        self.lines
            .iter()
            .any(|line| matches!(line, RecordingLine::FromAgent(said) if said.to_string().contains(words)))
    }

    /// Whether the agent is told this in it.
    pub(super) fn agent_is_sent(&self, words: &str) -> bool {
        self.count_sent_lines(words) > 0
    }

    /// In how many lines it is.
    pub(super) fn count_sent_lines(&self, words: &str) -> usize {
        let tells = |line: &&RecordingLine| matches!(line, RecordingLine::ToAgent(said) if said.to_string().contains(words));
        self.lines.iter().filter(tells).count()
    }

    /// Plays it to its end. The driver is silent then.
    pub(super) async fn play(self, stage: DriverHarness, far: DuplexStream) -> ReplayResult {
        let mut player = RecordingPlayer::new(&self, stage, far);
        player.play_lines(&self.lines).await;
        let silence = tokio::time::timeout(WAIT_MAX, player.agent.next_json()).await;
        assert!(silence.is_err(), "{}: the driver says more than it did: {silence:?}", self.name);
        player.wait_for_run_end().await;
        ReplayResult { ready: player.ready.expect("it was ready"), runs: player.finished }
    }

    /// Plays one whose agent is never ready; gives why.
    pub(super) async fn play_refused(self, stage: DriverHarness, far: DuplexStream) -> RunError {
        let mut player = RecordingPlayer::new(&self, stage, far);
        player.play_lines(&self.lines).await;
        player.stage.wait_for_failure().await
    }
}

/// A recording being played.
struct RecordingPlayer<'a> {
    name: &'a str,
    stage: DriverHarness,
    agent: AgentPipe,
    ready: Option<AgentUpdate>,
    /// How many prompts there were, each a run of its number.
    prompts: usize,
    /// What was heard of the run under way.
    updates: Vec<AgentUpdate>,
    finished: Vec<FinishedTurn>,
    /// What had another name then: the messages whose names we draw.
    renamed_ids: Vec<(String, String)>,
}

impl<'a> RecordingPlayer<'a> {
    fn new(recording: &'a AgentRecording, stage: DriverHarness, far: DuplexStream) -> Self {
        Self {
            name: &recording.name,
            stage,
            agent: AgentPipe::new(far),
            ready: None,
            prompts: 0,
            updates: Vec::new(),
            finished: Vec::new(),
            renamed_ids: Vec::new(),
        }
    }

    async fn play_lines(&mut self, lines: &[RecordingLine]) {
        // The first line of the file is not among them.
        for (number, line) in (2..).zip(lines) {
            match line {
                RecordingLine::Header(_) => panic!("{} says twice whose it is", self.name),
                RecordingLine::FromAgent(said) => self.agent.write_line(&self.with_current_ids(said)).await,
                RecordingLine::ToAgent(said) => self.expect_from_driver(said, number).await,
                RecordingLine::Action(deed) => {
                    // Each has all of its effect before the next line.
                    let_all_wait().await;
                    self.perform(deed).await;
                    let_all_wait().await;
                }
            }
        }
    }

    /// The driver must say this now.
    async fn expect_from_driver(&mut self, wanted: &Value, number: u32) {
        let place = format!("{}:{number}", self.name);
        let heard = tokio::time::timeout(WAIT_MAX, self.agent.try_next_json()).await;
        let Ok(heard) = heard else {
            panic!("{place}: the driver says nothing, and said then\n  {wanted}");
        };
        let mut heard =
            heard.unwrap_or_else(|| panic!("{place}: the driver hung up, and said then\n  {wanted}"));
        if let (Some(then), Some(now)) = (wanted["uuid"].as_str(), heard["uuid"].as_str()) {
            self.renamed_ids.push((then.to_owned(), now.to_owned()));
        }
        let mut wanted: Value = serde_json::from_str(&self.with_current_ids(wanted)).expect("JSON");
        // Ours, which moves on while recordings stay.
        for said in [&mut heard, &mut wanted] {
            if let Some(version) = said.pointer_mut("/params/clientInfo/version") {
                *version = Value::Null;
            }
        }
        assert!(heard == wanted, "{place}: the driver says\n  {heard}\nand said then\n  {wanted}");
    }

    /// With the names of today.
    fn with_current_ids(&self, said: &Value) -> String {
        self.renamed_ids.iter().fold(said.to_string(), |text, (then, now)| text.replace(then, now))
    }

    /// Does what the session did.
    async fn perform(&mut self, deed: &RecordedAction) {
        let run = self.prompts.to_string();
        match deed {
            RecordedAction::Prompt(words) => {
                self.wait_for_run_end().await;
                self.prompts += 1;
                self.stage.prompt(&self.prompts.to_string(), words);
            }
            RecordedAction::Cancel(RecordedTrue) => self.stage.cancel(&run),
            RecordedAction::Steer(words) => drop(self.stage.steer(&run, words)),
            RecordedAction::Allow(RecordedTrue) => {
                let ask = self.wait_for_ask().await;
                self.stage.answer(&ask, decision_reply(PermissionDecision::AllowOnce, None));
            }
            RecordedAction::Deny(reason) => {
                let ask = self.wait_for_ask().await;
                self.stage.answer(&ask, decision_reply(PermissionDecision::Deny, Some(reason)));
            }
            RecordedAction::Choose(value) => {
                let ask = self.wait_for_ask().await;
                self.stage.answer(&ask, value_reply(value));
            }
        }
    }

    async fn wait_for_ask(&mut self) -> AskRequest {
        loop {
            let heard = tokio::time::timeout(WAIT_MAX, self.stage.next_update()).await;
            let up = heard.unwrap_or_else(|_| panic!("{}: the driver asks nothing", self.name));
            self.updates.push(up.clone());
            if let AgentUpdate::Ask { ask, .. } = up {
                return ask;
            }
        }
    }

    /// Waits for the end of what is under way, if anything is.
    async fn wait_for_run_end(&mut self) {
        if self.prompts == 0 {
            let ready = tokio::time::timeout(WAIT_MAX, self.stage.next_update()).await;
            let ready = ready.unwrap_or_else(|_| panic!("{}: the agent is not ready", self.name));
            assert!(matches!(ready, AgentUpdate::Ready { .. }), "{}: {ready:?}", self.name);
            self.ready = Some(ready);
        } else if self.finished.len() < self.prompts {
            let run = self.prompts.to_string();
            let ended = tokio::time::timeout(WAIT_MAX, self.stage.wait_for_end(&run)).await;
            let FinishedTurn { updates: ups, outcome } =
                ended.unwrap_or_else(|_| panic!("{}: run {run} does not end", self.name));
            let ups = self.updates.drain(..).chain(ups).collect();
            self.finished.push(FinishedTurn { updates: ups, outcome });
        }
    }
}

impl TryFrom<bool> for RecordedTrue {
    type Error = &'static str;

    fn try_from(is: bool) -> Result<Self, Self::Error> {
        is.then_some(Self).ok_or("it is true or not there")
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

    /// A driver that is silent, and holds its end of the pipe.
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

    /// A recording in which we say `hello`, played with a driver that says this.
    async fn play_hello(says: &'static [u8]) -> ReplayResult {
        let text = "{\"#\":{\"agent\":\"a\",\"version\":\"1\"}}\n{\">\":\"hello\"}\n";
        let opened = |_, mut near: DuplexStream| async move {
            near.write_all(says).await.expect("a pipe in memory");
            Ok((SilentDriver(near), AgentUpdate::Ready { agent_session_id: None, steers: false }))
        };
        let (stage, far) = DriverHarness::new("a", |_| {}, opened);
        AgentRecording::parse("a/scene.jsonl".to_owned(), text).play(stage, far).await
    }

    #[tokio::test(start_paused = true)]
    async fn a_driver_that_says_what_it_said_is_heard_to_the_end() {
        assert_eq!(play_hello(b"\"hello\"\n").await.runs.len(), 0);
    }

    #[tokio::test(start_paused = true)]
    #[should_panic(expected = "a/scene.jsonl:2: the driver says\n  \"hullo\"\nand said then\n  \"hello\"")]
    async fn a_driver_that_says_something_else_is_told_where() {
        play_hello(b"\"hullo\"\n").await;
    }

    #[tokio::test(start_paused = true)]
    #[should_panic(expected = "a/scene.jsonl:2: the driver says nothing")]
    async fn a_driver_that_says_nothing_is_told_what_is_missing() {
        play_hello(b"").await;
    }

    #[tokio::test(start_paused = true)]
    #[should_panic(expected = "a/scene.jsonl: the driver says more than it did")]
    async fn a_driver_that_says_more_is_told_so() {
        play_hello(b"\"hello\"\n\"and more\"\n").await;
    }
}
