//! Drives the session machine by hand, one input at a time, in a context that the test controls.

use std::sync::Arc;

use qd_core::session::{
    AgentAvailability, PromptSubmission, SessionCommand, SessionContext, SessionEvent, SessionInput,
    SessionState, SessionStep, deadline, step,
};
use qd_protocol::event::{AskKind, EventActor, EventBody, RunError, RunStopCause, SessionCreated};
use qd_protocol::link::{AgentUpdate, AskRequest, TurnOutcome, TurnStopReason, UpdateNumber};
use qd_protocol::policy::Risk;
use qd_protocol::{
    AskId, ClockReading, EventNumber, FinishReason, MachineUptime, Millis, RunId, SessionId, WorkerId,
    WorkspaceId,
};

/// What the clocks of a machine show that was started at the beginning of the epoch and never suspended.
pub(crate) fn clocks_at(ms: u64) -> ClockReading {
    let uptime = i64::try_from(ms).unwrap();
    ClockReading {
        wall: Millis(ms),
        uptime: Some(MachineUptime { boot: 1, awake_ms: uptime, total_ms: uptime }),
    }
}

/// The input for a command that this user sends.
pub(crate) fn command_input(command: SessionCommand) -> SessionInput {
    let actor = Arc::new(EventActor::User { uid: 1000, pid: Some(1), command: Some("qd".to_owned()) });
    SessionInput::Command { actor, command }
}

/// A session with a ready agent.
pub(crate) struct SessionHarness {
    pub(crate) state: SessionState,
    pub(crate) context: SessionContext,
    update_count: u64,
}

impl SessionHarness {
    pub(crate) fn new() -> Self {
        let created = SessionCreated { agent: "script".to_owned(), ..SessionCreated::default() };
        let id = SessionId::parse("s").unwrap();
        let mut state = SessionState::new(id, WorkspaceId::parse("w").unwrap(), created, clocks_at(0));
        state.worker = Some(WorkerId::of_session(&state.id, EventNumber(1)));
        let link = AgentAvailability::Ready { steerable: true };
        let context = SessionContext {
            now: clocks_at(0),
            halted: false,
            quota_until: None,
            over_budget: false,
            slot_available: true,
            agent: link,
            sandbox: None,
        };
        Self { state, context, update_count: 0 }
    }

    /// A session without a worker.
    pub(crate) fn without_worker() -> Self {
        let mut harness = Self::new();
        harness.state.worker = None;
        harness.context.agent = AgentAvailability::Absent;
        harness
    }

    /// The milliseconds until the next deadline.
    pub(crate) fn deadline(&self) -> Option<u64> {
        deadline(&self.state, self.context.agent, self.context.now)
    }

    pub(crate) fn input(&mut self, input: SessionInput) -> SessionStep {
        step(&mut self.state, input, &self.context)
    }

    pub(crate) fn command(&mut self, command: SessionCommand) -> SessionStep {
        self.input(command_input(command))
    }

    pub(crate) fn prompt(&mut self, run: &str) -> SessionStep {
        let run = RunId::parse(run).unwrap();
        let accept = PromptSubmission {
            prompt: "p".into(),
            fingerprint: run.to_string(),
            attachments: Vec::new(),
            run,
        };
        self.command(SessionCommand::AcceptPrompt(accept))
    }

    pub(crate) fn cancel(&mut self) -> SessionStep {
        self.command(SessionCommand::Cancel { run: None, by: RunStopCause::User, reason: None })
    }

    pub(crate) fn receive(&mut self, update: AgentUpdate) -> SessionStep {
        self.update_count += 1;
        self.input(SessionInput::Update(UpdateNumber(self.update_count), update))
    }

    pub(crate) fn end(&mut self, run: &str, stop: TurnStopReason) -> SessionStep {
        let run = RunId::parse(run).unwrap();
        let error =
            (stop == TurnStopReason::Error).then(|| RunError::new("agent_error", format!("{run} failed")));
        let outcome = TurnOutcome { error, ..TurnOutcome::of(stop) };
        self.receive(AgentUpdate::TurnEnded { run, outcome })
    }

    pub(crate) fn ask(&mut self, run: &str, id: &str, kind: AskKind) -> SessionStep {
        let ask = AskRequest {
            id: AskId::parse(id).unwrap(),
            kind,
            tool: (kind == AskKind::Permission).then(|| "Demo".to_owned()),
            input: serde_json::Value::Null,
            risk: Some(Risk::High),
            prompt: "?".to_owned(),
            options: Vec::new(),
            implicit: false,
        };
        self.receive(AgentUpdate::Ask { run: RunId::parse(run).unwrap(), ask })
    }
}

pub(crate) fn finishes(step: &SessionStep) -> Vec<(String, FinishReason)> {
    let finish = |event: &SessionEvent| match &event.body {
        EventBody::RunFinished(finished) => Some((event.run.as_ref()?.to_string(), finished.finish_reason)),
        _ => None,
    };
    step.events.iter().filter_map(finish).collect()
}

pub(crate) fn started(step: &SessionStep) -> Option<String> {
    let start = |event: &SessionEvent| {
        matches!(event.body, EventBody::RunStarted(_)).then(|| event.run.clone()).flatten()
    };
    step.events.iter().find_map(start).map(|run| run.to_string())
}

/// The kinds of a step's events, in order.
pub(crate) fn kinds(step: &SessionStep) -> Vec<&'static str> {
    step.events.iter().map(|event| event.body.kind()).collect()
}

/// The error that a run ended with.
pub(crate) fn error(step: &SessionStep) -> Option<RunError> {
    step.events.iter().find_map(|event| match &event.body {
        EventBody::RunFinished(finished) => finished.error.clone(),
        _ => None,
    })
}
