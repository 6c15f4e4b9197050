//! The machine alone, on one core: streamed words through `step`, and from the agent's mouth over the link through
//! `step` to JSON, as the actor does it but without the journal. Touches no disk.
#![expect(clippy::print_stdout, reason = "a benchmark's table is its output")]

use std::hint::black_box;
use std::time::Instant;

use qd_core::session::{Accept, Command, Input, Link, State, World, step};
use qd_link::{FromAgent, local};
use qd_protocol::event::{Body, Delta, SessionCreated};
use qd_protocol::link::{Said, Up, UpNumber};
use qd_protocol::{MessageId, Millis, RunId, SessionId, Text, WorkspaceId};
use qd_testkit::Table;

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
    let mut table = Table::new(format!("The machine, one core, text deltas, best of {ROUNDS}"));
    let limit = "the same events to JSON, nothing else";
    table.rate("`step`", machine, json, "-", limit);
    table.rate("link, `step`, JSON", link, json, "> 1.20 M/s", limit);
    println!("{table}");
}

fn run() -> RunId {
    RunId::from_random(&[7; 16])
}

fn world() -> World {
    World {
        now: Millis(1_794_774_645_123),
        halted: false,
        over_budget: false,
        link: Link::Ready { steers: false },
        room: true,
    }
}

/// A session whose agent works on a prompt. The last thing heard was 1.
fn running() -> State {
    let id = SessionId::from_random(&[1; 16]);
    let created = SessionCreated { agent: "echo".to_owned(), ..SessionCreated::default() };
    let mut state = State::new(id, WorkspaceId::from_random(&[2; 16]), created, world().now);
    let prompt = Text { head: "go".to_owned(), blob: None };
    let accept = Accept { run: run(), prompt, attachments: Vec::new(), fingerprint: String::new() };
    step(&mut state, Input::Command(Command::Accept(accept)), &world());
    let ready = Up::Ready { agent_session_id: None, steers: false };
    step(&mut state, Input::Heard(UpNumber(1), ready), &world());
    assert!(state.active().is_some(), "the run has started");
    state
}

fn words(run: &RunId) -> Up {
    Up::Said { run: run.clone(), what: Said::Text { text: WORDS.to_owned() } }
}

fn rate(begun: Instant) -> f64 {
    EVENTS as f64 / begun.elapsed().as_secs_f64()
}

fn json_alone() -> f64 {
    let message_id = Some(MessageId::assistant(&run()));
    let body = Body::TextDelta(Delta { message_id, text: WORDS.to_owned(), after_run: None });
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
        let decided = step(&mut state, Input::Heard(UpNumber(number), words(&run)), &world);
        assert_eq!(black_box(decided).events.len(), 1);
    }
    rate(begun)
}

/// Thoughts between the words, so that the link cannot merge neighbours and what is said is what is counted.
fn link_to_json() -> f64 {
    let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime starts");
    let (agent, mut session) = local(UpNumber(1));
    let speaker = async move {
        let run = run();
        for number in 0..EVENTS {
            let text = WORDS.to_owned();
            let what = if number % 2 == 0 { Said::Text { text } } else { Said::Thought { text } };
            let up = Up::Said { run: run.clone(), what };
            agent.say(up).await.expect("the session listens to the end");
        }
    };
    let listener = async move {
        let (mut state, mut seen) = (running(), 0);
        while seen < EVENTS {
            let FromAgent::Said(said) = session.hear().await else { panic!("the agent left early") };
            for thing in said {
                let decided = step(&mut state, Input::Heard(thing.number, thing.up), &World { ..world() });
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
