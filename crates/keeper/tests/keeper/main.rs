//! The keeper from the worker's side, with real processes: everything it promises about ending them, and about not
//! ending the others. Each test has a mark of its own, and what bears it in the end is what escaped.
#![expect(clippy::unwrap_used, reason = "every function here serves a test")]

mod children;
mod escapees;
mod loss;
mod sweeps;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use qd_keeper::{
    KeeperChild, KeeperHandle, LaunchSpec, ProcessIdentity, SweepRequest, SweepResult, SweepScope, procfs,
};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, BufReader};

/// The program that can be a keeper.
const PROGRAM: &str = env!("CARGO_BIN_EXE_keeper-under-test");
/// The agent that makes escapees.
const ESCAPEES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/keeper/escapees.py");
/// So long that a test which waits for it does not end.
const FOR_EVER: Duration = Duration::from_secs(24 * 3600);

/// A mark that nobody else has.
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

/// A shell's lines up to one that says `ready`.
async fn until_ready(kept: &mut KeeperChild) -> Vec<String> {
    let mut lines = BufReader::new(&mut kept.stdout).lines();
    let mut said = Vec::new();
    while let Some(line) = lines.next_line().await.unwrap() {
        if line == "ready" {
            return said;
        }
        said.push(line);
    }
    panic!("it ended before it was ready; it had said {said:?}");
}

/// The processes whose pids it says before it is ready.
async fn processes_of(kept: &mut KeeperChild) -> Vec<ProcessIdentity> {
    let said = until_ready(kept).await;
    said.iter().map(|pid| ProcessIdentity::find(pid.parse().unwrap()).unwrap()).collect()
}

/// Whether nothing has been told of its end.
async fn has_not_ended(kept: &KeeperChild) -> bool {
    tokio::time::timeout(Duration::ZERO, kept.exit.wait()).await.is_err()
}

/// All that a child says until it ends.
async fn output(mut kept: KeeperChild) -> String {
    let mut text = String::new();
    kept.stdout.read_to_string(&mut text).await.unwrap();
    kept.exit.wait().await;
    text
}

async fn sweep(keeper: &KeeperHandle, what: SweepScope, grace: Duration) -> SweepResult {
    keeper.sweep(SweepRequest { scope: what, grace, spare: Vec::new() }).await.unwrap()
}

/// Nothing of this mark lives, nor does anything, dead or alive, hang on the keeper.
#[track_caller]
fn assert_nothing_below(keeper: &KeeperHandle, mark: &str) {
    assert_eq!(procfs::children(keeper.pid()), [0; 0]);
    assert_eq!(procfs::find_marked(mark), []);
}
