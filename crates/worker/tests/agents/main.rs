//! Promises of the built-in agents, seen from the session's end of their link. Time stands still in these tests: it
//! moves on when everybody waits for it.

mod echo;
mod life;
mod script;

use std::collections::BTreeMap;

use qd_link::{AgentSpec, Heard, Launcher, SessionEnd};
use qd_protocol::event::{Answer, Decision};
use qd_protocol::link::{AskRequest, Down, Gone, Outcome, Reply, Said, Stop, Up, UpNumber};
use qd_protocol::text::Blob;
use qd_protocol::{Number, RunId, SessionId};
use qd_worker::InProcess;
use tempfile::TempDir;

/// A session's side of one agent.
struct Agent {
    end: SessionEnd,
    /// The last number used downwards.
    number: u64,
    /// Heard and not looked at yet, in reverse.
    heard: Vec<Up>,
    home: TempDir,
}

/// What a turn said, and how it ended.
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

fn spec(agent: &str, home: &TempDir) -> AgentSpec {
    AgentSpec {
        session: SessionId::from_random(&[7; 8]),
        agent: agent.to_owned(),
        cwd: home.path().to_owned(),
        model: None,
        system_prompt: None,
        env: BTreeMap::new(),
        agent_session_id: None,
        after: UpNumber(0),
        blobs: home.path().to_owned(),
    }
}

fn run(name: &str) -> RunId {
    RunId::parse(name).expect("a good id")
}

impl Agent {
    fn launch(agent: &str) -> Self {
        Self::launch_with(agent, |_| {})
    }

    fn launch_with(agent: &str, change: impl FnOnce(&mut AgentSpec)) -> Self {
        let home = TempDir::new().expect("a temporary folder");
        let mut spec = spec(agent, &home);
        change(&mut spec);
        Self { end: InProcess.launch(spec), number: 0, heard: Vec::new(), home }
    }

    async fn ready(agent: &str) -> Self {
        let mut agent = Self::launch(agent);
        assert!(matches!(agent.hear().await, Up::Ready { .. }));
        agent
    }

    fn next(&mut self) -> Number {
        self.number += 1;
        Number(self.number)
    }

    fn prompt(&mut self, name: &str, prompt: &str) {
        self.prompt_with(name, prompt, None);
    }

    fn prompt_with(&mut self, name: &str, prompt: &str, blob: Option<Blob>) {
        let number = self.next();
        self.end.send(Down::Prompt {
            number,
            run: run(name),
            prompt: prompt.to_owned(),
            blob,
            attachments: vec![],
        });
    }

    fn steer(&mut self, name: &str, text: &str) -> Number {
        let number = self.next();
        self.end.send(Down::Steer { number, run: run(name), text: text.to_owned(), blob: None });
        number
    }

    fn cancel(&mut self, name: &str) {
        let number = self.next();
        self.end.send(Down::Cancel { number, run: run(name) });
    }

    fn kill(&mut self, name: &str) {
        self.end.send(Down::Kill { number: Number(self.number), run: run(name) });
    }

    fn answer(&mut self, ask: &AskRequest, answer: Reply) {
        let number = self.next();
        self.end.send(Down::Answer { number, ask: ask.id.clone(), answer });
    }

    async fn hear(&mut self) -> Up {
        while self.heard.is_empty() {
            match self.end.hear().await {
                Heard::Said(said) => self.heard.extend(said.into_iter().rev().map(|thing| thing.up)),
                other => panic!("heard {other:?}"),
            }
        }
        self.heard.pop().expect("there was one")
    }

    async fn gone(&mut self) -> (Vec<Up>, Gone) {
        let mut ups = std::mem::take(&mut self.heard);
        ups.reverse();
        loop {
            match self.end.hear().await {
                Heard::Said(said) => ups.extend(said.into_iter().map(|thing| thing.up)),
                Heard::Gone(gone) => return (ups, gone),
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

fn decide(decision: Decision, reason: Option<&str>) -> Reply {
    Reply::Answered(Answer { decision: Some(decision), value: None, reason: reason.map(str::to_owned) })
}

fn assert_well(ended: &Ended) {
    assert_eq!((ended.outcome.stop, &ended.outcome.error), (Stop::EndTurn, &None));
}
