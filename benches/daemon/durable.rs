//! Durable events per second: 64 `script` sessions through everything the daemon has, the journal alone with 64
//! appenders, and the raw log on the same disk. All three in turns, so that a disk in a bad mood is one for all.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use qd_journal::{AppendRequest, EventScope, Journal, JournalOptions, NewEvent, SessionKey, WorkspaceKey};
use qd_protocol::{EventNumber, Millis, RunId, SessionId, WorkspaceId};
use qd_testkit::script::{plan, steps};
use qd_testkit::{BenchmarkTable, RawLog, TestDaemon, TestSession, within};
use serde_json::Value;

const SESSIONS: usize = 64;
const ROUNDS: usize = 3;
/// What an event's data takes.
const DATA: usize = 300;
/// What a raw record has before it: seq, time, session.
const HEADER: usize = 24;
/// Steps of one script: as many as keep its prompt below the size from which it would be a file.
const STEPS: usize = 3000;
const TIME: Duration = Duration::from_secs(2);

pub(crate) async fn measure() -> BenchmarkTable {
    let daemon = TestDaemon::start().await;
    let raw = Arc::new(RawLog::create(&daemon.home.sibling_path("raw.log")));
    let mut sessions = Vec::new();
    let workspace = daemon.workspace().await;
    for _ in 0..SESSIONS {
        sessions.push(workspace.session("script").await);
    }
    let [mut best_raw, mut best_journal, mut best_daemon] = [0.0_f64; 3];
    for round in 0..ROUNDS {
        best_raw = best_raw.max(raw.measure_throughput(SESSIONS, HEADER + DATA, TIME).await);
        let home = daemon.home.sibling_path(&format!("journal{round}"));
        best_journal = best_journal.max(journal_alone(&home).await);
        best_daemon = best_daemon.max(whole_daemon(&daemon, &sessions).await);
    }
    let metrics = daemon.client().get("/metrics").await;
    let metrics = String::from_utf8_lossy(&metrics.body).into_owned();
    let together =
        sum(&metrics, "quarterdeck_events_total") / sum(&metrics, "quarterdeck_commits_total").max(1.0);
    let mut table = BenchmarkTable::new(format!(
        "Durable events of {DATA} bytes, {SESSIONS} at once, best of {ROUNDS} (daemon: {together:.0} events per commit)"
    ));
    let is = "raw preallocated log, fdatasync, group commit";
    table.add_rate("the whole daemon, 64 `script` sessions", best_daemon, best_raw, ">= 45 %", is);
    table.add_rate("the journal alone, 64 appenders of one event", best_journal, best_raw, ">= 45 %", is);
    table
}

fn sum(metrics: &str, name: &str) -> f64 {
    let value = |line: &str| line.strip_prefix(name)?.rsplit(' ').next()?.parse::<f64>().ok();
    metrics.lines().filter_map(value).sum()
}

/// Seqs over time, from when the last of the runs has started to when the first has ended: all of them speak then.
async fn whole_daemon(daemon: &TestDaemon, sessions: &[TestSession]) -> f64 {
    let content = "x".repeat(
        DATA - r#"{"message_id":"msg_a_run_0123456789abcdef","entries":[{"content":"","status":"x"}]}"#.len(),
    );
    let script: Vec<Value> = (0..STEPS).map(|_| plan(&content, "x")).collect();
    let prompt = steps(&script);
    let mut news =
        daemon.client().stream("/v1/events?kinds=run.started,run.finished").await.wait_until_ready().await;
    let prompts: Vec<_> = sessions
        .iter()
        .map(|session| {
            let (session, prompt) = (session.clone(), prompt.clone());
            tokio::spawn(async move { session.prompt(&prompt).await })
        })
        .collect();
    let (mut started, mut ended, mut from, mut rate) = (0, 0, (0, Instant::now()), 0.0);
    while ended < sessions.len() {
        let event =
            within("the runs", news.try_next()).await.expect("the stream lives").expect("and goes on");
        if event.kind == "run.started" {
            started += 1;
            from = (event.seq, Instant::now());
        } else {
            assert_eq!(started, sessions.len(), "the runs are too short to overlap: make the script longer");
            if ended == 0 {
                rate = (event.seq - from.0) as f64 / from.1.elapsed().as_secs_f64();
            }
            ended += 1;
        }
    }
    for prompt in prompts {
        prompt.await.expect("a prompt is accepted");
    }
    rate
}

async fn journal_alone(home: &Path) -> f64 {
    let journal = Journal::open(home, JournalOptions::default()).expect("a fresh journal opens");
    let begun = Instant::now();
    let tasks: Vec<_> = (1..=SESSIONS)
        .map(|session| {
            let journal = journal.clone();
            tokio::spawn(async move {
                let scope = scope(session);
                let mut number = 0;
                while begun.elapsed() < TIME {
                    number += 1;
                    journal.append(event(&scope, number)).await.expect("the journal takes events");
                }
                number
            })
        })
        .collect();
    let mut events = 0;
    for task in tasks {
        events += task.await.expect("an appender does not panic");
    }
    let rate = events as f64 / begun.elapsed().as_secs_f64();
    journal.close().await;
    rate
}

fn scope(session: usize) -> Arc<EventScope> {
    let byte = u8::try_from(session).expect("there are few sessions");
    Arc::new(EventScope {
        workspace: Some((WorkspaceKey(1), WorkspaceId::from_random(&[1; 16]))),
        session: Some((SessionKey(i64::from(byte)), SessionId::from_random(&[byte, byte / 32, 3, 4]))),
        fleet: None,
    })
}

fn event(scope: &Arc<EventScope>, number: u64) -> AppendRequest {
    let text = "x".repeat(DATA - r#"{"text":""}"#.len());
    let event = NewEvent {
        scope: Arc::clone(scope),
        number: Some(EventNumber(number)),
        ts: Millis::now(),
        run: Some(RunId::from_random(&[5; 16])),
        kind: "text.delta",
        data: format!(r#"{{"text":"{text}"}}"#).into_bytes(),
        update_number: None,
    };
    AppendRequest { events: vec![event], ..AppendRequest::default() }
}
