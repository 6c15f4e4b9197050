//! Cancel races: a cancel 0 to 30 ms after the 202, many times over concurrent sessions. No cancel may be lost, and
//! every run must end as the cancel's receipt says.

use std::sync::Arc;
use std::time::Duration;

use qd_testkit::{ObservedProcess, SeededRandom, TestDaemon, TestSession, journal_rules, script::*};
use serde_json::{Value, json};

const SESSIONS: u64 = 16;
const TRIES: u64 = 40;

/// A prompt whose run ends by itself after 0 to 60 ms, so the cancel comes before, at or after its end.
fn prompt(agent: &str, random: &mut SeededRandom) -> String {
    let ms = random.below(61);
    match (agent, random.below(5)) {
        ("echo", 0) => "__sleep_ms:600000 never".to_owned(),
        ("echo", _) => format!("__sleep_ms:{ms} a few words"),
        (_, 0) => steps(&[sleep_forever()]),
        (_, 1) => steps(&[say_times("w ", ms, 1)]),
        (_, 2) => steps(&[sleep(ms), say("done")]),
        (_, 3) => steps(&[sleep(ms), fail("no")]),
        _ => steps(&[ignore_cancel(), sleep(ms), say("deaf")]),
    }
}

/// Prompts and cancels repeatedly; returns how many cancels hit.
async fn fire(session: TestSession, agent: &'static str, mut random: SeededRandom) -> usize {
    let mut hits = 0;
    for _ in 0..TRIES {
        let mut runs = vec![session.prompt(&prompt(agent, &mut random)).await];
        if random.below(3) == 0 {
            runs.push(session.prompt(&prompt(agent, &mut random)).await);
        }
        tokio::time::sleep(Duration::from_millis(random.below(31))).await;
        let answer = session.cancel().await;
        let hit: Vec<_> =
            answer["cancelled"].as_array().unwrap().iter().map(|run| run.as_str().unwrap()).collect();
        assert_eq!(answer["idle"], hit.is_empty(), "{answer}");
        for run in &runs {
            let ended = session.wait(run).await;
            if hit.contains(&run.as_str()) {
                hits += 1;
                assert_eq!(ended["finish_reason"], "cancelled", "{run} was hit: {ended}");
            } else {
                assert_ne!(ended["finish_reason"], "cancelled", "{run} was not hit: {ended}");
                let requested = session.events_of(run).await.iter().any(|e| e.kind == "run.cancel_requested");
                assert!(!requested, "{run} was not hit, but has run.cancel_requested");
            }
        }
    }
    journal_rules::check(&session.events().await);
    hits
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_cancel_fired_0_to_30_ms_after_the_202_is_lost() {
    let seed = SeededRandom::choose_seed();
    println!("QD_SEED={seed}");
    let daemon = TestDaemon::start().await;
    let mut sessions = tokio::task::JoinSet::new();
    for n in 0..SESSIONS {
        let agent = if n % 2 == 0 { "echo" } else { "script" };
        let session = daemon.session(agent).await;
        sessions.spawn(fire(session, agent, SeededRandom::new(seed ^ n)));
    }
    let hits: usize = sessions.join_all().await.into_iter().sum();
    println!("{hits} runs were hit in {} tries", SESSIONS * TRIES);
    assert!(hits > 100, "too few cancels hit for a useful test");
}

/// How a turn starts a process that stays: as its child, in another session, without a parent, deaf to SIGTERM.
fn start_leftover(kind: u64, name: &str) -> Value {
    match kind {
        0 => spawn(&["sleep", name]),
        1 => spawn_detached(&["sleep", name]),
        2 => spawn(&["sh", "-c", &format!("(setsid sleep {name} & ) & exit")]),
        _ => spawn_detached(&["sh", "-c", &format!("trap '' TERM; sleep {name} & wait; sleep {name}")]),
    }
}

/// The living processes below agents that were started under this name.
fn named(daemon: &TestDaemon, name: &str) -> Vec<ObservedProcess> {
    let has_name = |one: &ObservedProcess| one.args.iter().any(|arg| arg.contains(name));
    daemon.home.agent_processes().into_iter().filter(|one| has_name(one) && one.is_alive()).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cancel_that_meets_the_end_of_a_turn_leaves_no_process_of_it() {
    let seed = SeededRandom::choose_seed();
    println!("QD_SEED={seed}");
    let daemon = Arc::new(TestDaemon::start().await);
    let mut sessions = tokio::task::JoinSet::new();
    for n in 0..4 {
        let (daemon, mut random) = (Arc::clone(&daemon), SeededRandom::new(seed ^ n));
        sessions.spawn(async move {
            let session = daemon.session("script").await;
            session.run_script(&[say("ready")]).await;
            let mut hits = 0;
            for attempt in 0..40 {
                // The number tells the processes of one run apart.
                let name = format!("100{n}{attempt:03}");
                let run = session.prompt_script(&[start_leftover(random.below(4), &name)]).await;
                session.wait_for_run_event(&run, "text.delta").await;
                tokio::time::sleep(Duration::from_micros(random.below(4000))).await;
                let hit = session.cancel().await["idle"] == false;
                let finished = session.wait_for_run_event(&run, "run.finished").await.data;
                if hit {
                    let left = named(&daemon, &name);
                    assert_eq!(finished["finish_reason"], "cancelled");
                    assert_eq!(finished["processes"]["survivors"], 0, "{finished}");
                    assert_eq!(left, [], "attempt {attempt}: {finished} is not true");
                    hits += 1;
                } else {
                    assert_eq!(finished["finish_reason"], "end_turn", "{finished}");
                }
            }
            session.close().await;
            session.wait_for_event("its end", |event| event.kind == "session.closed").await;
            journal_rules::check(&session.events().await);
            hits
        });
    }
    let hits: usize = sessions.join_all().await.into_iter().sum();
    println!("{hits} runs were hit in 160 tries");
    assert_eq!(daemon.home.agent_processes(), [], "what turns left ends with their sessions");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_prompt_and_a_cancel_sent_at_once_have_one_order() {
    let daemon = TestDaemon::start().await;
    let mut sessions = tokio::task::JoinSet::new();
    for _ in 0..8 {
        let session = daemon.session("script").await;
        sessions.spawn(async move {
            for n in 0..25 {
                let name = format!("{}:{n}", session.id);
                let words = steps(&[sleep(1), say("x")]);
                let (receipt, answer) = tokio::join!(session.try_prompt_as(&name, &words), session.cancel());
                receipt.expect(202);
                let hit = answer["cancelled"].as_array().unwrap().contains(&json!(name));
                let expected = if hit { "cancelled" } else { "end_turn" };
                assert_eq!(session.wait(&name).await["finish_reason"], expected);
            }
            journal_rules::check(&session.events().await);
        });
    }
    sessions.join_all().await;
}
