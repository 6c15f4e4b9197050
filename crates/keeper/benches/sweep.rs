//! The keeper against the kernel, in the same run: from the order to end ten processes that ignore SIGTERM to the answer
//! that they are gone and reaped, beside one SIGKILL to one child and its reaping. And what a keeper costs at the start:
//! from nothing to a first child that runs. Prints a table; a number as argument is how many rounds.
#![expect(clippy::print_stdout, reason = "a benchmark's table is its output")]
#![expect(clippy::unwrap_used, reason = "a benchmark that fails should stop where it does")]

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use qd_keeper::{Keeper, Launch, Sweep, What};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, BufReader};

const PROGRAM: &str = env!("CARGO_BIN_EXE_keeper-under-test");
const ESCAPEES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/keeper/escapees.py");
/// How many are ended at once.
const STUBBORN: &str = "10";

#[tokio::main(flavor = "current_thread")]
async fn main() {
    let rounds = std::env::args().filter_map(|arg| arg.parse().ok()).next().unwrap_or(100);
    let (mut raw, mut swept, mut first) = (Vec::new(), Vec::new(), Vec::new());
    // In turns, so that what else the machine does hits all of them.
    for round in 0..=rounds {
        let times = (kill_and_reap(), cancel().await, start().await);
        // The first round is for the caches.
        if round > 0 {
            raw.push(times.0);
            swept.push(times.1);
            first.push(times.2);
        }
    }
    println!("{:<52}{:>10}{:>10}", "", "p50 ms", "p99 ms");
    print("one SIGKILL to reaped, by the parent", raw);
    print("sweep of 10 stubborn processes, no grace", swept);
    print("keeper started, and a first child with its output", first);
}

/// What the kernel itself takes.
fn kill_and_reap() -> Duration {
    let mut child = Command::new("sleep").arg("1000").stdin(Stdio::null()).spawn().unwrap();
    let begun = Instant::now();
    child.kill().unwrap();
    child.wait().unwrap();
    begun.elapsed()
}

async fn cancel() -> Duration {
    let keeper = Keeper::start(Path::new(PROGRAM), "bench").await.unwrap();
    keeper.begin_turn().await.unwrap();
    let launch = launch(&["python3", ESCAPEES, "stubborn", STUBBORN]);
    let mut kept = keeper.spawn(launch).await.unwrap();
    let mut lines = BufReader::new(&mut kept.stdout).lines();
    while lines.next_line().await.unwrap().is_some_and(|line| line != "ready") {}
    let sweep = Sweep { what: What::Turn, grace: Duration::ZERO, spare: Vec::new() };
    let begun = Instant::now();
    let swept = keeper.sweep(sweep).await.unwrap();
    let took = begun.elapsed();
    assert_eq!((swept.killed, swept.survivors.len()), (10, 0));
    keeper.close().await;
    took
}

async fn start() -> Duration {
    let begun = Instant::now();
    let keeper = Keeper::start(Path::new(PROGRAM), "bench").await.unwrap();
    let mut kept = keeper.spawn(launch(&["echo", "ready"])).await.unwrap();
    let mut said = String::new();
    kept.stdout.read_to_string(&mut said).await.unwrap();
    let took = begun.elapsed();
    keeper.close().await;
    took
}

fn launch(argv: &[&str]) -> Launch {
    let env = [("PATH".to_owned(), std::env::var("PATH").unwrap())].into();
    Launch { argv: argv.iter().map(|&word| word.to_owned()).collect(), env, cwd: "/".into() }
}

fn print(what: &str, mut times: Vec<Duration>) {
    times.sort_unstable();
    let at = |share: f64| times[((times.len() - 1) as f64 * share).round() as usize].as_secs_f64() * 1e3;
    println!("{what:<52}{:>10.2}{:>10.2}", at(0.5), at(0.99));
}
