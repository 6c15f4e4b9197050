//! Durable events per second: 64 `script` sessions through the whole daemon, the journal alone with 64 appenders, and a
//! raw log on the same disk. All three alternate, so that a slow phase of the disk affects all of them.

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
/// The size of an event's data.
const DATA: usize = 300;
/// The size of a raw record's header: seq, time, session.
const HEADER: usize = 24;
/// Steps of one script. More would make the prompt so large that it becomes a file.
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
    let events_per_commit =
        sum(&metrics, "quarterdeck_events_total") / sum(&metrics, "quarterdeck_commits_total").max(1.0);
    let mut table = BenchmarkTable::new(format!(
        "Durable events of {DATA} bytes, {SESSIONS} at once, best of {ROUNDS} \
         (daemon: {events_per_commit:.0} events per commit)"
    ));
    let limit = "raw preallocated log, fdatasync, group commit";
    table.add_rate("the whole daemon, 64 `script` sessions", best_daemon, best_raw, ">= 45 %", limit);
    table.add_rate("the journal alone, 64 appenders of one event", best_journal, best_raw, ">= 45 %", limit);
    table
}

fn sum(metrics: &str, name: &str) -> f64 {
    let value = |line: &str| line.strip_prefix(name)?.rsplit(' ').next()?.parse::<f64>().ok();
    metrics.lines().filter_map(value).sum()
}

/// Events per second between the start of the last run and the end of the first, while all of them produce events.
async fn whole_daemon(daemon: &TestDaemon, sessions: &[TestSession]) -> f64 {
    let content = "x".repeat(
        DATA - r#"{"message_id":"msg_a_run_0123456789abcdef","entries":[{"content":"","status":"x"}]}"#.len(),
    );
    let script: Vec<Value> = (0..STEPS).map(|_| plan(&content, "x")).collect();
    let prompt = steps(&script);
    let mut stream =
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
        let event = within("the runs", stream.try_next())
            .await
            .expect("the stream is readable")
            .expect("the stream goes on");
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
    let started = Instant::now();
    let tasks: Vec<_> = (1..=SESSIONS)
        .map(|session| {
            let journal = journal.clone();
            tokio::spawn(async move {
                let scope = scope(session);
                let mut number = 0;
                while started.elapsed() < TIME {
                    number += 1;
                    journal.append(event(&scope, number)).await.expect("the journal accepts events");
                }
                number
            })
        })
        .collect();
    let mut events = 0;
    for task in tasks {
        events += task.await.expect("an appender does not panic");
    }
    let rate = events as f64 / started.elapsed().as_secs_f64();
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
        ts: Millis::now().into(),
        run: Some(RunId::from_random(&[5; 16])),
        kind: "text.delta",
        data: format!(r#"{{"text":"{text}"}}"#).into_bytes(),
        update_number: None,
    };
    AppendRequest { events: vec![event], ..AppendRequest::default() }
}
