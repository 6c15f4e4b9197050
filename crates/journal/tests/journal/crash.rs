//! Kills a process that appends with `kill -9`, again and again in the same home. Every acknowledged event must be in
//! the journal, in order, and none twice. Another process is killed while it creates journals: each home must have a
//! whole journal or none. The processes are this test binary, run again.

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use qd_journal::{EventFilter, EventTopic, SessionKey};
use qd_protocol::Seq;

use crate::fixture::*;

const SESSIONS: i64 = 8;
const KILLS: u64 = 12;
const CREATION_KILLS: u32 = 40;

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
    let mut child = run_again("crash::what_was_acknowledged_survives_kill_9", home);
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

/// Runs one test of this binary as a child, which finds the home in its environment.
fn run_again(test: &str, home: &Path) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", test, "--nocapture"])
        .env("CRASH_HOME", home)
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap()
}

#[tokio::test]
async fn a_journal_killed_while_it_is_created_is_absent_or_whole() {
    if let Some(homes) = std::env::var_os("CRASH_HOME") {
        return create_until_killed(Path::new(&homes)).await;
    }
    let homes = tempfile::tempdir().unwrap();
    let (mut took, mut absent) = (Duration::from_millis(20), 0);
    for kill in 0..CREATION_KILLS {
        let round = homes.path().join(kill.to_string());
        std::fs::create_dir(&round).unwrap();
        let mut child = run_again("crash::a_journal_killed_while_it_is_created_is_absent_or_whole", &round);
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        // The first creation shows how long one takes, so that the kills hit the second one everywhere.
        wait_for_line(&mut lines, "creating 0");
        let started = Instant::now();
        wait_for_line(&mut lines, "creating 1");
        took = started.elapsed().min(took);
        std::thread::sleep(took * kill / CREATION_KILLS);
        child.kill().unwrap();
        child.wait().unwrap();
        for home in std::fs::read_dir(&round).unwrap().map(|entry| entry.unwrap().path()) {
            match std::fs::read(home.join("journal.db")) {
                Ok(content) => {
                    assert!(content.len() > 4096, "kill {kill} left {} bytes", content.len());
                    assert_eq!(content[68..72], *b"qdjl", "kill {kill} left a journal without its schema");
                }
                Err(_) => absent += 1,
            }
            let journal = open(&home);
            append(&journal, &scope(1), 1).await.unwrap();
            assert_eq!(journal.quick_check().await.unwrap(), Vec::<String>::new());
            journal.close().await;
            let names = std::fs::read_dir(&home).unwrap().map(|entry| entry.unwrap().file_name());
            let leftover = names.into_iter().find(|name| name.to_string_lossy().starts_with("journal.db."));
            assert_eq!(leftover, None);
        }
    }
    assert!(absent > 0, "no kill came before the end of a creation");
}

fn wait_for_line(lines: &mut impl Iterator<Item = std::io::Result<String>>, wanted: &str) {
    lines.find(|line| line.as_ref().is_ok_and(|line| line.ends_with(wanted))).unwrap().unwrap();
}

/// Creates one journal after the other, each in a home of its own.
async fn create_until_killed(homes: &Path) {
    for number in 0..1000 {
        let home = homes.join(number.to_string());
        std::fs::create_dir(&home).unwrap();
        std::io::stdout().lock().write_all(format!("creating {number}\n").as_bytes()).unwrap();
        open(&home).close().await;
    }
}
