//! Recorded exchanges with real agents, played again without them: the agent's lines are said again, the session does
//! again what it did, and the driver must say what it said then. The recordings, and how they are made, are in
//! `tests/recorded`.

use std::path::Path;
use std::time::Duration;

use qd_protocol::event::{Decision, RunError};
use qd_protocol::link::{AskRequest, Up};
use qd_protocol::worker::AgentSpec;
use serde::Deserialize;
use serde_json::Value;
use tokio::io::DuplexStream;

use super::stage::{Ended, Far, Stage, choose, decide, rest};

/// How long something is waited for that must come. The clock of these tests moves on by itself when everybody waits.
const WAIT: Duration = Duration::from_secs(60);
/// What the folder of the session is called in recordings.
const FOLDER: &str = "/w";

/// One process of an agent, line by line.
#[derive(Debug)]
pub(super) struct Recording {
    name: String,
    pub(super) about: About,
    lines: Vec<Line>,
}

/// The first line: whose exchange it is.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct About {
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
enum Line {
    #[serde(rename = "#")]
    About(About),
    #[serde(rename = "!")]
    Did(Deed),
    #[serde(rename = ">")]
    Ours(Value),
    #[serde(rename = "<")]
    Theirs(Value),
}

/// What the session did.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Deed {
    Prompt(String),
    Steer(String),
    Cancel(True),
    Allow(True),
    /// With the reason.
    Deny(String),
    /// The answer to a question.
    Choose(String),
}

/// Stands where there is nothing to say.
#[derive(Debug, Deserialize)]
#[serde(try_from = "bool")]
struct True;

/// What came of a recording.
#[derive(Debug)]
pub(super) struct Played {
    /// What was told of the agent before its first turn.
    pub(super) ready: Up,
    pub(super) runs: Vec<Ended>,
}

impl Played {
    /// The only run.
    #[track_caller]
    pub(super) fn only(self) -> Ended {
        let [only] = self.runs();
        only
    }

    /// So many runs.
    #[track_caller]
    pub(super) fn runs<const N: usize>(self) -> [Ended; N] {
        let count = self.runs.len();
        self.runs.try_into().unwrap_or_else(|_| panic!("there are {count} runs in it"))
    }
}

impl Recording {
    /// Reads one.
    pub(super) fn read(agent: &str, scene: &str) -> Self {
        let name = format!("{agent}/{scene}.jsonl");
        let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/recorded").join(&name);
        let text = std::fs::read_to_string(&file).unwrap_or_else(|error| panic!("{name}: {error}"));
        let recording = Self::parse(name, &text);
        assert_eq!(recording.about.agent, agent, "{}", recording.name);
        recording
    }

    fn parse(name: String, text: &str) -> Self {
        let parse = |(at, line): (usize, &str)| {
            serde_json::from_str(line).unwrap_or_else(|error| panic!("{name}:{}: {error}", at + 1))
        };
        let mut lines = text.lines().enumerate().map(parse);
        let Some(Line::About(about)) = lines.next() else { panic!("{name} does not say whose it is") };
        Self { about, lines: lines.collect(), name }
    }

    /// Gives the session what it had.
    pub(super) fn give(&self, spec: &mut AgentSpec) {
        spec.cwd = FOLDER.into();
        spec.model.clone_from(&self.about.model);
        spec.system_prompt.clone_from(&self.about.system_prompt);
        spec.agent_session_id.clone_from(&self.about.resume);
    }

    /// Whether the agent says this in it.
    pub(super) fn says(&self, words: &str) -> bool {
        self.lines.iter().any(|line| matches!(line, Line::Theirs(said) if said.to_string().contains(words)))
    }

    /// Whether the agent is told this in it.
    pub(super) fn is_told(&self, words: &str) -> bool {
        self.times_told(words) > 0
    }

    /// In how many lines it is.
    pub(super) fn times_told(&self, words: &str) -> usize {
        let tells = |line: &&Line| matches!(line, Line::Ours(said) if said.to_string().contains(words));
        self.lines.iter().filter(tells).count()
    }

    /// Plays it to its end. The driver is silent then.
    pub(super) async fn play(self, stage: Stage, far: DuplexStream) -> Played {
        let mut player = Player::new(&self, stage, far);
        player.lines(&self.lines).await;
        let silence = tokio::time::timeout(WAIT, player.far.hear()).await;
        assert!(silence.is_err(), "{}: the driver says more than it did: {silence:?}", self.name);
        player.end().await;
        Played { ready: player.ready.expect("it was ready"), runs: player.ended }
    }

    /// Plays one whose agent is never ready; gives why.
    pub(super) async fn refused(self, stage: Stage, far: DuplexStream) -> RunError {
        let mut player = Player::new(&self, stage, far);
        player.lines(&self.lines).await;
        player.stage.gone().await
    }
}

/// A recording being played.
struct Player<'a> {
    name: &'a str,
    stage: Stage,
    far: Far,
    ready: Option<Up>,
    /// How many prompts there were, each a run of its number.
    prompts: usize,
    /// What was heard of the run under way.
    ups: Vec<Up>,
    ended: Vec<Ended>,
    /// What had another name then: the messages whose names we draw.
    names: Vec<(String, String)>,
}

impl<'a> Player<'a> {
    fn new(recording: &'a Recording, stage: Stage, far: DuplexStream) -> Self {
        Self {
            name: &recording.name,
            stage,
            far: Far::new(far),
            ready: None,
            prompts: 0,
            ups: Vec::new(),
            ended: Vec::new(),
            names: Vec::new(),
        }
    }

    async fn lines(&mut self, lines: &[Line]) {
        // The first line of the file is not among them.
        for (number, line) in (2..).zip(lines) {
            match line {
                Line::About(_) => panic!("{} says twice whose it is", self.name),
                Line::Theirs(said) => self.far.write(&self.renamed(said)).await,
                Line::Ours(said) => self.hear(said, number).await,
                Line::Did(deed) => {
                    // Each has all of its effect before the next line.
                    rest().await;
                    self.act(deed).await;
                    rest().await;
                }
            }
        }
    }

    /// The driver must say this now.
    async fn hear(&mut self, wanted: &Value, number: u32) {
        let place = format!("{}:{number}", self.name);
        let heard = tokio::time::timeout(WAIT, self.far.try_hear()).await;
        let Ok(heard) = heard else {
            panic!("{place}: the driver says nothing, and said then\n  {wanted}");
        };
        let mut heard =
            heard.unwrap_or_else(|| panic!("{place}: the driver hung up, and said then\n  {wanted}"));
        if let (Some(then), Some(now)) = (wanted["uuid"].as_str(), heard["uuid"].as_str()) {
            self.names.push((then.to_owned(), now.to_owned()));
        }
        let mut wanted: Value = serde_json::from_str(&self.renamed(wanted)).expect("JSON");
        // Ours, which moves on while recordings stay.
        for said in [&mut heard, &mut wanted] {
            if let Some(version) = said.pointer_mut("/params/clientInfo/version") {
                *version = Value::Null;
            }
        }
        assert!(heard == wanted, "{place}: the driver says\n  {heard}\nand said then\n  {wanted}");
    }

    /// With the names of today.
    fn renamed(&self, said: &Value) -> String {
        self.names.iter().fold(said.to_string(), |text, (then, now)| text.replace(then, now))
    }

    /// Does what the session did.
    async fn act(&mut self, deed: &Deed) {
        let run = self.prompts.to_string();
        match deed {
            Deed::Prompt(words) => {
                self.end().await;
                self.prompts += 1;
                self.stage.prompt(&self.prompts.to_string(), words);
            }
            Deed::Cancel(True) => self.stage.cancel(&run),
            Deed::Steer(words) => drop(self.stage.steer(&run, words)),
            Deed::Allow(True) => {
                let ask = self.ask().await;
                self.stage.answer(&ask, decide(Decision::AllowOnce, None));
            }
            Deed::Deny(reason) => {
                let ask = self.ask().await;
                self.stage.answer(&ask, decide(Decision::Deny, Some(reason)));
            }
            Deed::Choose(value) => {
                let ask = self.ask().await;
                self.stage.answer(&ask, choose(value));
            }
        }
    }

    async fn ask(&mut self) -> AskRequest {
        loop {
            let heard = tokio::time::timeout(WAIT, self.stage.hear()).await;
            let up = heard.unwrap_or_else(|_| panic!("{}: the driver asks nothing", self.name));
            self.ups.push(up.clone());
            if let Up::Ask { ask, .. } = up {
                return ask;
            }
        }
    }

    /// Waits for the end of what is under way, if anything is.
    async fn end(&mut self) {
        if self.prompts == 0 {
            let ready = tokio::time::timeout(WAIT, self.stage.hear()).await;
            let ready = ready.unwrap_or_else(|_| panic!("{}: the agent is not ready", self.name));
            assert!(matches!(ready, Up::Ready { .. }), "{}: {ready:?}", self.name);
            self.ready = Some(ready);
        } else if self.ended.len() < self.prompts {
            let run = self.prompts.to_string();
            let ended = tokio::time::timeout(WAIT, self.stage.ended(&run)).await;
            let Ended { ups, outcome } =
                ended.unwrap_or_else(|_| panic!("{}: run {run} does not end", self.name));
            let ups = self.ups.drain(..).chain(ups).collect();
            self.ended.push(Ended { ups, outcome });
        }
    }
}

impl TryFrom<bool> for True {
    type Error = &'static str;

    fn try_from(is: bool) -> Result<Self, Self::Error> {
        is.then_some(Self).ok_or("it is true or not there")
    }
}

#[cfg(test)]
mod tests {
    use qd_link::{Closed, Voice};
    use qd_protocol::link::Outcome;
    use tokio::io::AsyncWriteExt;

    use super::super::stage::Talks;
    use super::*;
    use crate::turn::{Prompt, Turn};

    /// A driver that is silent, and holds its end of the pipe.
    struct Silent(DuplexStream);

    impl Talks for Silent {
        async fn turn(&mut self, _: &Turn<'_>, _: &Prompt) -> Result<Option<Outcome>, Closed> {
            Ok(None)
        }

        async fn idle(&mut self, _: &Voice) {
            let _held = &self.0;
            std::future::pending().await
        }
    }

    /// A recording in which we say `hello`, played with a driver that says this.
    async fn played(says: &'static [u8]) -> Played {
        let text = "{\"#\":{\"agent\":\"a\",\"version\":\"1\"}}\n{\">\":\"hello\"}\n";
        let opened = |_, mut near: DuplexStream| async move {
            near.write_all(says).await.expect("a pipe in memory");
            Ok((Silent(near), Up::Ready { agent_session_id: None, steers: false }))
        };
        let (stage, far) = Stage::new("a", |_| {}, opened);
        Recording::parse("a/scene.jsonl".to_owned(), text).play(stage, far).await
    }

    #[tokio::test(start_paused = true)]
    async fn a_driver_that_says_what_it_said_is_heard_to_the_end() {
        assert_eq!(played(b"\"hello\"\n").await.runs.len(), 0);
    }

    #[tokio::test(start_paused = true)]
    #[should_panic(expected = "a/scene.jsonl:2: the driver says\n  \"hullo\"\nand said then\n  \"hello\"")]
    async fn a_driver_that_says_something_else_is_told_where() {
        played(b"\"hullo\"\n").await;
    }

    #[tokio::test(start_paused = true)]
    #[should_panic(expected = "a/scene.jsonl:2: the driver says nothing")]
    async fn a_driver_that_says_nothing_is_told_what_is_missing() {
        played(b"").await;
    }

    #[tokio::test(start_paused = true)]
    #[should_panic(expected = "a/scene.jsonl: the driver says more than it did")]
    async fn a_driver_that_says_more_is_told_so() {
        played(b"\"hello\"\n\"and more\"\n").await;
    }
}
