//! The session machine alone, on one core: streamed text through `step`; and text from the agent over the link through
//! `step` to JSON, like the actor does it but without the journal. Touches no disk.
#![expect(clippy::print_stdout, reason = "a benchmark's table is its output")]

use std::hint::black_box;
use std::sync::Arc;
use std::time::Instant;

use qd_core::session::{
    AgentAvailability, PromptSubmission, SessionCommand, SessionContext, SessionInput, SessionState, step,
};
use qd_link::{LocalLinkEvent, local_link};
use qd_protocol::event::{EventActor, EventBody, MessageDelta, SessionCreated};
use qd_protocol::link::{AgentUpdate, TurnUpdate, UpdateNumber};
use qd_protocol::{LongText, MessageId, Millis, RunId, SessionId, WorkspaceId};
use qd_testkit::BenchmarkTable;

const EVENTS: u64 = 1_000_000;
const ROUNDS: usize = 3;
/// About as much text as a model sends at a time.
const TEXT: &str = "some twenty letters ";

fn main() {
    let [mut json, mut machine, mut link] = [0.0_f64; 3];
    for _ in 0..ROUNDS {
        json = json.max(json_alone());
        machine = machine.max(machine_alone());
        link = link.max(link_to_json());
    }
    let mut table = BenchmarkTable::new(format!("The machine, one core, text deltas, best of {ROUNDS}"));
    let limit = "the same events to JSON, nothing else";
    table.add_rate("`step`", machine, json, "-", limit);
    table.add_rate("link, `step`, JSON", link, json, "> 1.20 M/s", limit);
    println!("{table}");
}

fn run() -> RunId {
    RunId::from_random(&[7; 16])
}

fn context() -> SessionContext {
    SessionContext {
        now: Millis(1_794_774_645_123).into(),
        halted: false,
        quota_until: None,
        over_budget: false,
        agent: AgentAvailability::Ready { steerable: false },
        slot_available: true,
        sandbox: None,
    }
}

/// A session with a running turn. The last update has the number 1.
fn running_session() -> SessionState {
    let id = SessionId::from_random(&[1; 16]);
    let created = SessionCreated { agent: "echo".to_owned(), ..SessionCreated::default() };
    let mut state = SessionState::new(id, WorkspaceId::from_random(&[2; 16]), created, context().now);
    let prompt = LongText { head: "go".to_owned(), blob: None };
    let accept = PromptSubmission { run: run(), prompt, attachments: Vec::new(), fingerprint: String::new() };
    step(
        &mut state,
        SessionInput::Command {
            actor: Arc::new(EventActor::DAEMON),
            command: SessionCommand::AcceptPrompt(accept),
        },
        &context(),
    );
    let ready = AgentUpdate::Ready { agent_session_id: None, steers: false };
    step(&mut state, SessionInput::Update(UpdateNumber(1), ready), &context());
    assert!(state.active_run().is_some(), "the run has started");
    state
}

fn text_update(run: &RunId) -> AgentUpdate {
    AgentUpdate::Turn { run: run.clone(), update: TurnUpdate::Text { text: TEXT.to_owned() } }
}

fn rate(started: Instant) -> f64 {
    EVENTS as f64 / started.elapsed().as_secs_f64()
}

fn json_alone() -> f64 {
    let message_id = Some(MessageId::assistant(&run()));
    let body = EventBody::TextDelta(MessageDelta { message_id, text: TEXT.to_owned(), after_run: None });
    let started = Instant::now();
    for _ in 0..EVENTS {
        black_box(black_box(&body).encode(None).expect("a delta has a JSON form"));
    }
    rate(started)
}

fn machine_alone() -> f64 {
    let (mut state, run, context) = (running_session(), run(), context());
    let started = Instant::now();
    for number in 2..EVENTS + 2 {
        let step_result =
            step(&mut state, SessionInput::Update(UpdateNumber(number), text_update(&run)), &context);
        assert_eq!(black_box(step_result).events.len(), 1);
    }
    rate(started)
}

/// Alternates texts and thoughts, so that the link cannot merge neighbours and every update becomes an event.
fn link_to_json() -> f64 {
    let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime starts");
    let (agent, mut session) = local_link(UpdateNumber(1));
    let sender = async move {
        let run = run();
        for number in 0..EVENTS {
            let text = TEXT.to_owned();
            let update =
                if number % 2 == 0 { TurnUpdate::Text { text } } else { TurnUpdate::Thought { text } };
            let update = AgentUpdate::Turn { run: run.clone(), update };
            agent.send(update).await.expect("the session reads to the end");
        }
    };
    let receiver = async move {
        let (mut state, mut seen) = (running_session(), 0);
        while seen < EVENTS {
            let LocalLinkEvent::Updates(updates) = session.next_event().await else {
                panic!("the agent left early")
            };
            for numbered in updates {
                let step_result = step(
                    &mut state,
                    SessionInput::Update(numbered.number, numbered.update),
                    &SessionContext { ..context() },
                );
                for event in &step_result.events {
                    black_box(event.body.encode(None).expect("a delta has a JSON form"));
                    seen += 1;
                }
            }
        }
    };
    let started = Instant::now();
    runtime.block_on(async {
        let sender = tokio::spawn(sender);
        receiver.await;
        sender.await.expect("the agent does not panic");
    });
    rate(started)
}
