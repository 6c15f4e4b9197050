//! The machine alone, on one core: streamed words through `step`, and from the agent's mouth over the link through
//! `step` to JSON, as the actor does it but without the journal. Touches no disk.
#![expect(clippy::print_stdout, reason = "a benchmark's table is its output")]

use std::hint::black_box;
use std::time::Instant;

use qd_core::session::{
    AgentAvailability, PromptSubmission, SessionCommand, SessionContext, SessionInput, SessionState, step,
};
use qd_link::{LocalLinkEvent, local_link};
use qd_protocol::event::{EventBody, MessageDelta, SessionCreated};
use qd_protocol::link::{AgentUpdate, TurnUpdate, UpdateNumber};
use qd_protocol::{LongText, MessageId, Millis, RunId, SessionId, WorkspaceId};
use qd_testkit::BenchmarkTable;

const EVENTS: u64 = 1_000_000;
const ROUNDS: usize = 3;
/// What a model says at a time, more or less.
const WORDS: &str = "some twenty letters ";

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

fn world() -> SessionContext {
    SessionContext {
        now: Millis(1_794_774_645_123),
        halted: false,
        over_budget: false,
        agent: AgentAvailability::Ready { steerable: false },
        slot_available: true,
    }
}

/// A session whose agent works on a prompt. The last thing heard was 1.
fn running() -> SessionState {
    let id = SessionId::from_random(&[1; 16]);
    let created = SessionCreated { agent: "echo".to_owned(), ..SessionCreated::default() };
    let mut state = SessionState::new(id, WorkspaceId::from_random(&[2; 16]), created, world().now);
    let prompt = LongText { head: "go".to_owned(), blob: None };
    let accept = PromptSubmission { run: run(), prompt, attachments: Vec::new(), fingerprint: String::new() };
    step(&mut state, SessionInput::Command(SessionCommand::AcceptPrompt(accept)), &world());
    let ready = AgentUpdate::Ready { agent_session_id: None, steers: false };
    step(&mut state, SessionInput::LinkMessage(UpdateNumber(1), ready), &world());
    assert!(state.active_run().is_some(), "the run has started");
    state
}

fn words(run: &RunId) -> AgentUpdate {
    AgentUpdate::Turn { run: run.clone(), update: TurnUpdate::Text { text: WORDS.to_owned() } }
}

fn rate(begun: Instant) -> f64 {
    EVENTS as f64 / begun.elapsed().as_secs_f64()
}

fn json_alone() -> f64 {
    let message_id = Some(MessageId::assistant(&run()));
    let body = EventBody::TextDelta(MessageDelta { message_id, text: WORDS.to_owned(), after_run: None });
    let begun = Instant::now();
    for _ in 0..EVENTS {
        black_box(black_box(&body).encode().expect("a delta has a JSON form"));
    }
    rate(begun)
}

fn machine_alone() -> f64 {
    let (mut state, run, world) = (running(), run(), world());
    let begun = Instant::now();
    for number in 2..EVENTS + 2 {
        let decided = step(&mut state, SessionInput::LinkMessage(UpdateNumber(number), words(&run)), &world);
        assert_eq!(black_box(decided).events.len(), 1);
    }
    rate(begun)
}

/// Thoughts between the words, so that the link cannot merge neighbours and what is said is what is counted.
fn link_to_json() -> f64 {
    let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime starts");
    let (agent, mut session) = local_link(UpdateNumber(1));
    let speaker = async move {
        let run = run();
        for number in 0..EVENTS {
            let text = WORDS.to_owned();
            let what = if number % 2 == 0 { TurnUpdate::Text { text } } else { TurnUpdate::Thought { text } };
            let up = AgentUpdate::Turn { run: run.clone(), update: what };
            agent.send(up).await.expect("the session listens to the end");
        }
    };
    let listener = async move {
        let (mut state, mut seen) = (running(), 0);
        while seen < EVENTS {
            let LocalLinkEvent::Updates(said) = session.next_event().await else {
                panic!("the agent left early")
            };
            for thing in said {
                let decided = step(
                    &mut state,
                    SessionInput::LinkMessage(thing.number, thing.update),
                    &SessionContext { ..world() },
                );
                for event in &decided.events {
                    black_box(event.body.encode().expect("a delta has a JSON form"));
                    seen += 1;
                }
            }
        }
    };
    let begun = Instant::now();
    runtime.block_on(async {
        let speaker = tokio::spawn(speaker);
        listener.await;
        speaker.await.expect("the agent does not panic");
    });
    rate(begun)
}
