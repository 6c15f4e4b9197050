//! A session on a bench: its machine driven by hand, one input at a time, with a world that the test sets as it likes.

#![allow(dead_code, clippy::allow_attributes, reason = "each suite uses its own part of this")]

use qd_core::session::{Accept, Command, Input, Link, Recorded, State, Step, World, step};
use qd_protocol::event::{AskKind, Body, RunError, SessionCreated, StopCause};
use qd_protocol::link::{AskRequest, Outcome, Stop, Up, UpNumber};
use qd_protocol::policy::Risk;
use qd_protocol::{AskId, FinishReason, Millis, Number, RunId, SessionId, WorkerId, WorkspaceId};

/// A session with a ready agent, driven by hand.
pub(crate) struct Bench {
    pub(crate) state: State,
    pub(crate) world: World,
    heard: u64,
}

impl Bench {
    pub(crate) fn new() -> Self {
        let created = SessionCreated { agent: "script".to_owned(), ..SessionCreated::default() };
        let id = SessionId::parse("s").unwrap();
        let mut state = State::new(id, WorkspaceId::parse("w").unwrap(), created, Millis(0));
        state.worker = Some(WorkerId::of_session(&state.id, Number(1)));
        let link = Link::Ready { steers: true };
        let world = World { now: Millis(0), halted: false, over_budget: false, room: true, link };
        Self { state, world, heard: 0 }
    }

    /// One that has no worker yet.
    pub(crate) fn without_worker() -> Self {
        let mut bench = Self::new();
        bench.state.worker = None;
        bench.world.link = Link::Absent;
        bench
    }

    pub(crate) fn input(&mut self, input: Input) -> Step {
        step(&mut self.state, input, &self.world)
    }

    pub(crate) fn command(&mut self, command: Command) -> Step {
        self.input(Input::Command(command))
    }

    pub(crate) fn prompt(&mut self, run: &str) -> Step {
        let run = RunId::parse(run).unwrap();
        let accept =
            Accept { prompt: "p".into(), fingerprint: run.to_string(), attachments: Vec::new(), run };
        self.command(Command::Accept(accept))
    }

    pub(crate) fn cancel(&mut self) -> Step {
        self.command(Command::Cancel { run: None, by: StopCause::User, reason: None })
    }

    pub(crate) fn hear(&mut self, up: Up) -> Step {
        self.heard += 1;
        self.input(Input::Heard(UpNumber(self.heard), up))
    }

    pub(crate) fn end(&mut self, run: &str, stop: Stop) -> Step {
        let run = RunId::parse(run).unwrap();
        let error = (stop == Stop::Error).then(|| RunError::new("agent_error", format!("{run} failed")));
        let outcome = Outcome { error, ..Outcome::of(stop) };
        self.hear(Up::Terminal { run, outcome })
    }

    pub(crate) fn ask(&mut self, run: &str, id: &str, kind: AskKind) -> Step {
        let ask = AskRequest {
            id: AskId::parse(id).unwrap(),
            kind,
            tool: (kind == AskKind::Permission).then(|| "Demo".to_owned()),
            input: serde_json::Value::Null,
            risk: Some(Risk::High),
            prompt: "?".to_owned(),
            options: Vec::new(),
            unasked: false,
        };
        self.hear(Up::Ask { run: RunId::parse(run).unwrap(), ask })
    }
}

pub(crate) fn finishes(step: &Step) -> Vec<(String, FinishReason)> {
    let finish = |event: &Recorded| match &event.body {
        Body::RunFinished(finished) => Some((event.run.as_ref()?.to_string(), finished.finish_reason)),
        _ => None,
    };
    step.events.iter().filter_map(finish).collect()
}

pub(crate) fn started(step: &Step) -> Option<String> {
    let start =
        |event: &Recorded| matches!(event.body, Body::RunStarted(_)).then(|| event.run.clone()).flatten();
    step.events.iter().find_map(start).map(|run| run.to_string())
}

/// The kinds of a step's events, in order.
pub(crate) fn kinds(step: &Step) -> Vec<&'static str> {
    step.events.iter().map(|event| event.body.kind()).collect()
}

/// The error that a run ended with.
pub(crate) fn error(step: &Step) -> Option<RunError> {
    step.events.iter().find_map(|event| match &event.body {
        Body::RunFinished(finished) => finished.error.clone(),
        _ => None,
    })
}
