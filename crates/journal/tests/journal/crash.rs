//! Kills a process that appends with `kill -9`, again and again in the same home. Every acknowledged event must be in
//! the journal, in order, and none twice. The process is this test binary, run again.

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Command, Stdio};

use qd_journal::{EventFilter, EventTopic, SessionKey};
use qd_protocol::Seq;

use crate::fixture::*;

const SESSIONS: i64 = 8;
const KILLS: u64 = 12;

#[tokio::test]
async fn what_was_acknowledged_survives_kill_9() {
    if let Some(home) = std::env::var_os("CRASH_HOME") {
        return append_until_killed(Path::new(&home)).await;
    }
    let home = tempfile::tempdir().unwrap();
    let mut acknowledged = vec![0; SESSIONS as usize + 1];
    for kill in 1..=KILLS {
        // A different moment each time: after this many acknowledgements, which come in bursts.
        kill_while_appending(home.path(), kill * 37, &mut acknowledged);
        let journal = open(home.path());
        let mut total = 0;
        for session in 1..=SESSIONS {
            let topic = EventTopic::Session(SessionKey(session));
            let events = all(&journal, &EventFilter::of(topic)).await;
            let count = events.len() as u64;
            let expected = acknowledged[session as usize];
            assert!(
                count >= expected,
                "session {session} has {count} of {expected} events after kill {kill}"
            );
            let loaded = journal.load(SessionKey(session)).await.unwrap();
            let numbers: Vec<u64> = loaded.events.iter().map(|event| event.number.unwrap().0).collect();
            assert_eq!(numbers, (1..=count).collect::<Vec<_>>(), "no gap and no repeat");
            total += count;
        }
        let everything = all(&journal, &everything()).await;
        assert_eq!(seqs(&everything), (1..=total).collect::<Vec<_>>());
        assert_eq!(journal.head(), Seq(total));
        assert_eq!(journal.quick_check().await.unwrap(), Vec::<String>::new());
        journal.close().await;
    }
}

/// Lets a child append until it has reported this many acknowledgements, and kills it.
fn kill_while_appending(home: &Path, after: u64, acknowledged: &mut [u64]) {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "crash::what_was_acknowledged_survives_kill_9", "--nocapture"])
        .env("CRASH_HOME", home)
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let mut seen = 0;
    for line in lines {
        let Ok(line) = line else { break };
        // All other lines come from the test harness.
        let Some((session, number)) = line.strip_prefix("acked ").and_then(|rest| rest.split_once(' '))
        else {
            continue;
        };
        let (Ok(session), Ok(number)) = (session.parse::<usize>(), number.parse::<u64>()) else { continue };
        acknowledged[session] = acknowledged[session].max(number);
        seen += 1;
        if seen == after {
            child.kill().unwrap();
        }
    }
    child.wait().unwrap();
    assert!(seen >= after, "the child exited on its own after {seen} acknowledgements");
}

/// What this test does when it is run as the child that is killed.
async fn append_until_killed(home: &Path) {
    let journal = open(home);
    let mut writers = tokio::task::JoinSet::new();
    for session in 1..=SESSIONS {
        let journal = journal.clone();
        writers.spawn(async move {
            let loaded = journal.load(SessionKey(session)).await.unwrap();
            let mut number = loaded.events.last().map_or(0, |event| event.number.unwrap().0);
            loop {
                number += 1;
                append(&journal, &scope(session), number).await.unwrap();
                let report = format!("acked {session} {number}\n");
                std::io::stdout().lock().write_all(report.as_bytes()).unwrap();
            }
        });
    }
    writers.join_next().await;
}
