//! Compares processes, files and logs with what the daemon says: nothing runs that belongs to no session, nothing is
//! left after the last session was closed, and nobody complained without a reason.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use hyper::Method;
use qd_testkit::{ObservedProcess, processes};
use serde_json::Value;

use super::StormFaultLevel;
use super::deck::StormDeck;
use super::file_checks::leftover_spools;
use super::prompts::sleeper_argument;
use super::settle::list;

/// How long processes may take to end after their session has. The daemon looks for what was left every minute.
const END_LIMIT: Duration = Duration::from_secs(75);

/// Polls until `find` finds nothing wrong any more. What is still wrong then is a violation.
async fn must_become_empty(deck: &StormDeck, mut find: impl AsyncFnMut() -> Vec<String>) {
    let began = Instant::now();
    loop {
        let wrong = find().await;
        if wrong.is_empty() {
            return;
        }
        if began.elapsed() > END_LIMIT {
            wrong.into_iter().for_each(|what| deck.violation(None, what));
            return;
        }
        tokio::time::sleep(Duration::from_millis(300)).await;
    }
}

fn describe(process: &ObservedProcess) -> String {
    format!("process {} ({}, {})", process.pid, process.args.join(" "), process.state)
}

/// Every keeper and agent descends from a process that the daemon lists as a worker, or from another machine.
pub(crate) async fn check_workers_have_sessions(deck: &StormDeck) {
    must_become_empty(deck, async || {
        let Some(workers) = list(deck, "/v1/workers").await else {
            return vec!["no list of workers".to_owned()];
        };
        let mut known: BTreeSet<u32> =
            workers.iter().filter_map(|worker| u32::try_from(worker["pid"].as_u64()?).ok()).collect();
        let machines = deck.machines.lock().await;
        known.extend(machines.iter().filter_map(super::deck::OtherMachine::pid));
        drop(machines);
        let processes = deck.daemon.lock().await.home.processes();
        let parents: BTreeMap<u32, u32> =
            processes::all_processes().iter().map(|process| (process.pid, process.parent)).collect();
        let belongs = |process: &ObservedProcess| {
            let mut next = Some(&process.pid);
            while let Some(pid) = next {
                if known.contains(pid) {
                    return true;
                }
                next = parents.get(pid);
            }
            false
        };
        let supervised =
            |process: &&ObservedProcess| !process.has_role("serve") && !process.has_role("__worker");
        let strays = processes.iter().filter(supervised).filter(|process| !belongs(process));
        strays.map(|process| format!("{} belongs to no worker that is listed", describe(process))).collect()
    })
    .await;
}

/// What agents have left ends with their sessions.
pub(crate) async fn check_closed_sessions_left_nothing(deck: &StormDeck) {
    let markers = deck.record(|record| record.markers.clone());
    let owners: BTreeMap<String, String> =
        markers.into_iter().map(|(number, session)| (sleeper_argument(number), session)).collect();
    must_become_empty(deck, async || {
        let Some(open) = list(deck, "/v1/sessions?open=true").await else {
            return vec!["no list of sessions".to_owned()];
        };
        let open: BTreeSet<&str> = open.iter().map(|session| text(&session["id"])).collect();
        let left = processes::all_processes().into_iter().filter_map(|process| {
            let owner = owners.get(process.args.get(1)?).filter(|owner| !open.contains(owner.as_str()))?;
            let is_left = process.is_alive();
            is_left.then(|| format!("{} is left of {owner}, which is closed", describe(&process)))
        });
        left.collect()
    })
    .await;
}

/// Closes every session, and waits until all are closed.
pub(crate) async fn close_everything(deck: &StormDeck) {
    let open = async || list(deck, "/v1/sessions?open=true").await.unwrap_or_default();
    for session in open().await {
        let (workspace, id) = (text(&session["workspace_id"]), text(&session["id"]));
        let path = format!("/v1/workspaces/{workspace}/sessions/{id}");
        deck.request(&deck.unix, Method::DELETE, &path, None, &[200, 404]).await;
    }
    must_become_empty(deck, async || {
        let open = open().await;
        open.iter()
            .map(|session| format!("{} is not closed: {}", text(&session["id"]), session["state"]))
            .collect()
    })
    .await;
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

/// No agent, keeper or worker of a session is left, and no spool.
pub(crate) async fn check_nothing_is_left(deck: &StormDeck) {
    let machines: Vec<u32> =
        deck.machines.lock().await.iter().filter_map(super::deck::OtherMachine::pid).collect();
    must_become_empty(deck, async || {
        let mut wrong = Vec::new();
        for process in deck.daemon.lock().await.home.processes() {
            // The host that `echo` sessions share ends later, and holds nothing.
            let may_live =
                process.has_role("serve") || process.has_role("__worker") || machines.contains(&process.pid);
            if !may_live {
                wrong.push(format!("{} is left after every session was closed", describe(&process)));
            }
        }
        for worker in list(deck, "/v1/workers").await.unwrap_or_default() {
            wrong.push(format!("the worker {} is listed after every session was closed", worker["id"]));
        }
        wrong.extend(leftover_spools(deck));
        wrong
    })
    .await;
}

/// A line of a worker whose daemon was killed before it had told the worker what to do.
const UNBORN_WORKER: &str = "the worker's specification cannot be understood: EOF";

/// Lines that only our own faults cause.
const EXPLAINED: [&str; 13] = [
    "a journal commit failed",
    "journal transaction could not be rolled back",
    "failed to append to the spool",
    "failed to sync the spool",
    "a snapshot could not be written",
    "connecting to its socket failed: No such file or directory",
    "could not read the spool of a lost worker",
    "could not prepare its SQL statements",
    "No space left on device",
    "Input/output error",
    "disk I/O error",
    "database or disk is full",
    "Broken pipe",
];

/// No panic, and no error that our faults do not explain.
pub(crate) async fn check_logs(deck: &StormDeck) {
    let mut files = vec![deck.home.with_file_name("serve.stderr")];
    let logs = std::fs::read_dir(deck.home.join("log")).into_iter().flatten().flatten();
    files.extend(logs.map(|entry| entry.path()));
    for file in files {
        let content = std::fs::read(&file).unwrap_or_default();
        for line in String::from_utf8_lossy(&content).lines() {
            let is_explained = match deck.options.faults {
                StormFaultLevel::None => false,
                StormFaultLevel::Daemon => line.contains(UNBORN_WORKER),
                StormFaultLevel::All => {
                    line.contains(UNBORN_WORKER) || EXPLAINED.iter().any(|explained| line.contains(explained))
                }
            };
            let is_bad = line.contains("panicked")
                || line.contains(" ERROR ")
                || line.contains("has nothing that will wake it");
            if is_bad && !is_explained {
                let line: String = line.chars().take(400).collect();
                let name = file.file_name().unwrap_or_default().to_string_lossy().into_owned();
                let session =
                    line.split(|c: char| !c.is_alphanumeric() && c != '_').find(|w| w.starts_with("ses_"));
                deck.violation(session, format!("{name}: {line}"));
            }
        }
    }
}
