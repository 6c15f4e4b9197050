//! The keeper against the kernel, in the same run: from the order to end ten processes that ignore SIGTERM to the answer
//! that they are gone and reaped, beside a SIGKILL to one and to ten children and their reaping. And what a keeper costs
//! at the start: from nothing to the output of a first child, beside that child alone. Prints a table; a number as
//! argument is how many rounds.
#![expect(clippy::print_stdout, reason = "a benchmark's table is its output")]
#![expect(clippy::unwrap_used, reason = "a benchmark that fails should stop where it does")]

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use qd_keeper::{KeeperHandle, LaunchSpec, SweepRequest, SweepScope};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, BufReader};

const PROGRAM: &str = env!("CARGO_BIN_EXE_keeper-under-test");
/// How many are ended at once.
const STUBBORN: u32 = 10;
/// An agent that starts them.
const AGENT: &str =
    "trap '' TERM; for i in 1 2 3 4 5 6 7 8 9 10; do sleep 1000 & done; echo ready; read -r line";

#[tokio::main(flavor = "current_thread")]
async fn main() {
    let rounds = std::env::args().filter_map(|arg| arg.parse().ok()).next().unwrap_or(100);
    let mut times: [Vec<Duration>; 5] = Default::default();
    // In turns, so that what else the machine does hits all of them.
    for round in 0..=rounds {
        let round_times =
            [kill_and_reap(1), kill_and_reap(STUBBORN), sweep().await, start_alone(), start().await];
        // The first round is for the caches.
        if round > 0 {
            times.iter_mut().zip(round_times).for_each(|(times, time)| times.push(time));
        }
    }
    let [one, ten, swept, alone, kept] = times;
    println!("{:<52}{:>10}{:>10}", "", "p50 ms", "p99 ms");
    print("SIGKILL to reaped, one, by its parent", one);
    print("SIGKILL to reaped, ten, by their parent", ten);
    print("sweep of ten stubborn processes, no grace", swept);
    print("a child's output", alone);
    print("the same through a keeper, its start included", kept);
}

/// What the kernel itself takes.
fn kill_and_reap(count: u32) -> Duration {
    let start = |_| Command::new("sleep").arg("1000").stdin(Stdio::null()).spawn().unwrap();
    let mut children: Vec<_> = (0..count).map(start).collect();
    let begun = Instant::now();
    children.iter_mut().for_each(|child| child.kill().unwrap());
    for child in &mut children {
        child.wait().unwrap();
    }
    begun.elapsed()
}

async fn sweep() -> Duration {
    let keeper = KeeperHandle::start(Path::new(PROGRAM), "bench").await.unwrap();
    keeper.begin_turn().await.unwrap();
    let mut kept = keeper.spawn(launch(&["sh", "-c", AGENT])).await.unwrap();
    let mut lines = BufReader::new(&mut kept.stdout).lines();
    while lines.next_line().await.unwrap().is_some_and(|line| line != "ready") {}
    let sweep = SweepRequest { scope: SweepScope::Turn, grace: Duration::ZERO, spare: Vec::new() };
    let begun = Instant::now();
    let swept = keeper.sweep(sweep).await.unwrap();
    let took = begun.elapsed();
    assert_eq!((swept.killed, swept.survivors.len()), (STUBBORN, 0));
    keeper.close().await;
    took
}

fn start_alone() -> Duration {
    let begun = Instant::now();
    Command::new("echo").arg("ready").stdin(Stdio::null()).output().unwrap();
    begun.elapsed()
}

async fn start() -> Duration {
    let begun = Instant::now();
    let keeper = KeeperHandle::start(Path::new(PROGRAM), "bench").await.unwrap();
    let mut kept = keeper.spawn(launch(&["echo", "ready"])).await.unwrap();
    let mut said = String::new();
    kept.stdout.read_to_string(&mut said).await.unwrap();
    let took = begun.elapsed();
    keeper.close().await;
    took
}

fn launch(argv: &[&str]) -> LaunchSpec {
    let env = [("PATH".to_owned(), std::env::var("PATH").unwrap())].into();
    LaunchSpec { argv: argv.iter().map(|&word| word.to_owned()).collect(), env, cwd: "/".into(), arg0: None }
}

fn print(what: &str, mut times: Vec<Duration>) {
    times.sort_unstable();
    let at = |share: f64| times[((times.len() - 1) as f64 * share).round() as usize].as_secs_f64() * 1e3;
    println!("{what:<52}{:>10.2}{:>10.2}", at(0.5), at(0.99));
}
