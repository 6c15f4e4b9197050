//! Tests of the keeper from the worker's side, with real processes: which processes it ends, and which it leaves alone.
//! Each test has its own mark; anything that still carries it at the end has escaped.
#![expect(clippy::unwrap_used, reason = "every function here serves a test")]

mod children;
mod confined;
mod escapees;
mod loss;
mod stopped;
mod sweeps;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use qd_keeper::{
    KeeperChild, KeeperHandle, LaunchSpec, ProcessIdentity, SweepRequest, SweepResult, SweepScope, procfs,
};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, BufReader};

/// The program that runs as the keeper.
const PROGRAM: &str = env!("CARGO_BIN_EXE_keeper-under-test");
/// The agent that starts processes which are hard to end.
const ESCAPEES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/keeper/escapees.py");
/// So long that a test which waits for it never ends.
const FOR_EVER: Duration = Duration::from_secs(24 * 3600);

/// A mark that no other test has.
fn new_mark() -> String {
    static LAST: AtomicU32 = AtomicU32::new(0);
    format!("{}-{}", std::process::id(), LAST.fetch_add(1, Ordering::Relaxed))
}

async fn start(mark: &str) -> KeeperHandle {
    KeeperHandle::start(Path::new(PROGRAM), mark).await.unwrap()
}

fn command(argv: &[&str]) -> LaunchSpec {
    let env = BTreeMap::from([("PATH".to_owned(), std::env::var("PATH").unwrap())]);
    LaunchSpec { argv: argv.iter().map(|&word| word.to_owned()).collect(), env, cwd: "/".into(), arg0: None }
}

fn shell(script: &str) -> LaunchSpec {
    command(&["sh", "-c", script])
}

/// The lines that a child prints before `ready`.
async fn until_ready(child: &mut KeeperChild) -> Vec<String> {
    let mut lines = BufReader::new(&mut child.stdout).lines();
    let mut printed = Vec::new();
    while let Some(line) = lines.next_line().await.unwrap() {
        if line == "ready" {
            return printed;
        }
        printed.push(line);
    }
    panic!("it exited before it was ready; it printed {printed:?}");
}

/// The processes whose pids a child prints before it is ready.
async fn processes_of(child: &mut KeeperChild) -> Vec<ProcessIdentity> {
    let pids = until_ready(child).await;
    pids.iter().map(|pid| ProcessIdentity::find(pid.parse().unwrap()).unwrap()).collect()
}

/// Whether no exit of the child has been reported.
async fn has_not_ended(child: &KeeperChild) -> bool {
    tokio::time::timeout(Duration::ZERO, child.exit.wait()).await.is_err()
}

/// Everything that a child prints until it exits.
async fn output(mut child: KeeperChild) -> String {
    let mut text = String::new();
    child.stdout.read_to_string(&mut text).await.unwrap();
    child.exit.wait().await;
    text
}

async fn sweep(keeper: &KeeperHandle, scope: SweepScope, grace: Duration) -> SweepResult {
    keeper.sweep(SweepRequest { scope, grace, spare: Vec::new() }).await.unwrap()
}

/// No process with this mark is alive, and the keeper has no child, dead or alive.
#[track_caller]
fn assert_nothing_below(keeper: &KeeperHandle, mark: &str) {
    assert_eq!(procfs::children(keeper.pid()), [0; 0]);
    assert_eq!(procfs::find_marked(mark), []);
}
