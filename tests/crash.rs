//! `kill -9` of the daemon at random moments under 64 clients that post, cancel and read. Everything acknowledged
//! must be in the journal exactly once, every stream must equal the journal, and every run must end exactly once.
//! `QD_SEED` repeats a seed.

use std::hash::{Hash, Hasher};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use hyper::Method;
use qd_testkit::{
    SeededRandom, TestClient, TestDaemon, TestEvent, TestSession, journal_rules, script::*, within,
};
use serde_json::{Value, json};
use tokio::task::JoinSet;

const KILLS: usize = 50;
const POSTERS: u64 = 40;
const CANCELLERS: u64 = 8;
const READERS: u64 = 16;
const SESSIONS: usize = 24;
/// Maximum lifetime of a daemon before it is killed.
const LIFE_MS: u64 = 350;

/// State that all clients share.
#[derive(Debug)]
struct CrashTestState {
    sessions: Vec<(TestSession, &'static str)>,
    /// Set at the end: clients start no new work.
    ending: AtomicBool,
    /// The last seq of the journal, or 0 until it is known.
    last: AtomicU64,
}

impl CrashTestState {
    fn ending(&self) -> bool {
        self.ending.load(Ordering::Relaxed)
    }
}

/// One request to a daemon that may be dead or dying. `None` if there was no complete response.
async fn attempt(client: &TestClient, path: &str, body: &Value) -> Option<(u16, Value)> {
    let sent = client.send(Method::POST, path, Some(body.to_string().into()));
    let answer = within(&format!("an answer or a broken connection for {path}"), sent).await.ok()?;
    Some((answer.status, answer.json()))
}

/// A short pause before a retry while no daemon answers.
async fn pause_before_retry() {
    tokio::time::sleep(Duration::from_millis(5)).await;
}

fn prompt(agent: &str, random: &mut SeededRandom) -> String {
    let ms = random.below(25);
    match (agent, random.below(5)) {
        ("echo", _) => format!("__sleep_ms:{ms} a few words"),
        (_, 0) => steps(&[say("a"), sleep(ms), fail("no")]),
        (_, 1) => steps(&[exit(1)]),
        (_, 2) => steps(&[say("a"), ask_bash("make"), say("b")]),
        _ => steps(&[say_times("w ", 5, ms / 5)]),
    }
}

/// Posts runs with its own run ids; returns the receipts of those that were acknowledged.
async fn post(state: Arc<CrashTestState>, name: u64, mut random: SeededRandom) -> Vec<(TestSession, Value)> {
    let mut receipts = Vec::new();
    for n in 0.. {
        if state.ending() {
            break;
        }
        let (session, agent) = random.pick(&state.sessions).clone();
        let run = format!("p{name}.{n}");
        let body = json!({ "session_id": session.id, "prompt": prompt(agent, &mut random), "run_id": run });
        // After a broken connection the client does not know whether the run was accepted, so it repeats the same run
        // id.
        while !state.ending() {
            match attempt(&session.client, &session.workspace_path("/agent"), &body).await {
                Some((202, receipt)) => {
                    assert_eq!(receipt["run_id"], run);
                    receipts.push((session.clone(), receipt));
                    break;
                }
                Some((429 | 503, _)) | None => pause_before_retry().await,
                Some((status, answer)) => panic!("{run}: {status} {answer}"),
            }
        }
        if random.below(2) == 0 {
            let path = session.workspace_path(&format!("/runs/{run}/wait?timeout_s=1"));
            let _may_break = session.client.send(Method::GET, &path, None).await;
        }
    }
    receipts
}

/// Cancels sessions; returns the runs that the responses named as cancelled.
async fn cancel(state: Arc<CrashTestState>, mut random: SeededRandom) -> Vec<String> {
    let mut hit = Vec::new();
    while !state.ending() {
        let (session, _) = random.pick(&state.sessions).clone();
        match attempt(&session.client, &session.agent_path("/cancel"), &json!({})).await {
            Some((200, answer)) => {
                let runs = answer["cancelled"].as_array().unwrap();
                hit.extend(runs.iter().map(|run| run.as_str().unwrap().to_owned()));
            }
            Some((503, _)) | None => {}
            Some((status, answer)) => panic!("cancel: {status} {answer}"),
        }
        tokio::time::sleep(Duration::from_millis(random.below(120))).await;
    }
    hit
}

/// The seq of an event and a hash of its content. Small, because sixteen readers keep every event of the journal.
type EventTrace = (u64, u64);

fn trace(event: &TestEvent) -> EventTrace {
    let mut hasher = std::hash::DefaultHasher::new();
    (&event.ts, &event.kind, &event.session_id, &event.run_id, event.data.to_string()).hash(&mut hasher);
    (event.seq, hasher.finish())
}

/// Reads the stream of all events from the beginning up to the last one, resuming from its cursor whenever it breaks.
async fn read(state: Arc<CrashTestState>, client: TestClient) -> Vec<EventTrace> {
    let mut seen: Vec<EventTrace> = Vec::new();
    loop {
        let cursor = seen.last().map_or(0, |event| event.0);
        if cursor > 0 && cursor == state.last.load(Ordering::Relaxed) {
            return seen;
        }
        let client = client.with_header("last-event-id", &cursor.to_string());
        let Ok(Ok(mut stream)) =
            tokio::time::timeout(Duration::from_secs(5), client.try_stream("/v1/events")).await
        else {
            pause_before_retry().await;
            continue;
        };
        loop {
            let next = tokio::select! {
                next = stream.try_next() => next,
                () = at_end(&state, seen.last().map_or(0, |event| event.0)) => return seen,
            };
            match next {
                Ok(Some(event)) => seen.push(trace(&event)),
                Ok(None) | Err(_) => break,
            }
        }
    }
}

/// Waits until the last seq is known and equals `seq`. Otherwise never returns.
async fn at_end(state: &CrashTestState, seq: u64) {
    while state.last.load(Ordering::Relaxed) != seq || seq == 0 {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn kill_9_at_any_moment_under_64_clients_loses_and_doubles_nothing() {
    let seed = SeededRandom::choose_seed();
    println!("QD_SEED={seed}");
    let mut random = SeededRandom::new(seed);
    let mut daemon = TestDaemon::start().await;
    let mut sessions = Vec::new();
    for n in 0..SESSIONS {
        let agent = if n % 2 == 0 { "echo" } else { "script" };
        sessions.push((daemon.session(agent).await, agent));
    }
    let state =
        Arc::new(CrashTestState { sessions, ending: AtomicBool::new(false), last: AtomicU64::new(0) });
    let (mut posters, mut cancellers, mut readers) = (JoinSet::new(), JoinSet::new(), JoinSet::new());
    for n in 0..POSTERS {
        posters.spawn(post(state.clone(), n, SeededRandom::new(random.next_number())));
    }
    for _ in 0..CANCELLERS {
        cancellers.spawn(cancel(state.clone(), SeededRandom::new(random.next_number())));
    }
    for _ in 0..READERS {
        readers.spawn(read(state.clone(), daemon.client()));
    }
    for _ in 0..KILLS {
        tokio::time::sleep(Duration::from_millis(random.below(LIFE_MS))).await;
        daemon.restart().await;
    }
    state.ending.store(true, Ordering::Relaxed);
    let receipts: Vec<_> = posters.join_all().await.into_iter().flatten().collect();
    let cancelled: Vec<_> = cancellers.join_all().await.into_iter().flatten().collect();

    for (session, _) in &state.sessions {
        session.cancel().await;
        for run in session.runs().await.iter().filter(|run| run["state"] != "finished") {
            session.wait(run["id"].as_str().unwrap()).await;
        }
    }
    daemon.client().post("/v1/halt", &json!({ "reason": "the end" })).await.expect(200);
    let mut stream = daemon.client().stream("/v1/events?after=0").await;
    let journal = stream.until("the halt", |event| event.kind == "halt.set").await;
    state.last.store(journal.last().unwrap().seq, Ordering::Relaxed);
    println!("{} runs acknowledged, {} cancelled, {} events", receipts.len(), cancelled.len(), journal.len());

    journal_rules::check(&journal);
    for (session, receipt) in &receipts {
        let run = receipt["run_id"].as_str().unwrap();
        let found = journal.binary_search_by_key(&receipt["seq"].as_u64().unwrap(), |event| event.seq);
        let accepted = &journal[found.unwrap_or_else(|_| panic!("{run} was acknowledged and is missing"))];
        assert!(accepted.is_of_run(run, "run.accepted"), "{receipt} is not {accepted:?}");
        assert_eq!(accepted.session_id.as_deref(), Some(session.id.as_str()));
    }
    let mut ends = std::collections::BTreeMap::new();
    for event in journal.iter().filter(|event| event.kind == "run.finished") {
        ends.insert(event.run_id.as_deref().unwrap(), event.data["finish_reason"].as_str().unwrap());
    }
    for run in &cancelled {
        assert_eq!(ends[run.as_str()], "cancelled", "{run} was acknowledged as cancelled");
    }
    assert!(journal.iter().any(|event| event.kind == "worker.reattached"), "no worker was reattached");
    for reason in ["end_turn", "cancelled"] {
        assert!(
            ends.values().any(|end| *end == reason),
            "no run ended as {reason}: the test tried too little"
        );
    }
    let journal: Vec<_> = journal.iter().map(trace).collect();
    for seen in within("the readers to come to the end", readers.join_all()).await {
        let differs = seen.iter().zip(&journal).find(|(seen, kept)| seen != kept);
        assert_eq!(differs, None, "a reader saw a gap, a repeat or another event");
        assert_eq!(seen.len(), journal.len());
    }
    for (session, _) in &state.sessions {
        assert_eq!(session.show().await["busy"], false);
    }
}
