//! Compares the keeper with the bare kernel in the same run. A sweep of ten processes that ignore SIGTERM, until they
//! are gone and reaped, is compared with SIGKILL to one and to ten children and their reaping. The start of a keeper,
//! until the output of its first child, is compared with starting that child directly. Prints a table; a number as
//! argument sets the rounds.
#![expect(clippy::print_stdout, reason = "a benchmark's table is its output")]
#![expect(clippy::unwrap_used, reason = "a benchmark that fails should stop where it does")]

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use qd_keeper::{KeeperHandle, LaunchSpec, SweepRequest, SweepScope};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, BufReader};

const PROGRAM: &str = env!("CARGO_BIN_EXE_keeper-under-test");
/// How many processes are ended at once.
const STUBBORN: u32 = 10;
/// An agent that starts them.
const AGENT: &str =
    "trap '' TERM; for i in 1 2 3 4 5 6 7 8 9 10; do sleep 1000 & done; echo ready; read -r line";

#[tokio::main(flavor = "current_thread")]
async fn main() {
    let rounds = std::env::args().filter_map(|arg| arg.parse().ok()).next().unwrap_or(100);
    let mut times: [Vec<Duration>; 5] = Default::default();
    // Alternating, so that other load on the machine affects all of them.
    for round in 0..=rounds {
        let round_times =
            [kill_and_reap(1), kill_and_reap(STUBBORN), sweep().await, start_alone(), start().await];
        // The first round warms the caches.
        if round > 0 {
            times.iter_mut().zip(round_times).for_each(|(times, time)| times.push(time));
        }
    }
    let [one, ten, swept, alone, through_keeper] = times;
    println!("{:<52}{:>10}{:>10}", "", "p50 ms", "p99 ms");
    print("SIGKILL to reaped, one, by its parent", one);
    print("SIGKILL to reaped, ten, by their parent", ten);
    print("sweep of ten stubborn processes, no grace", swept);
    print("a child's output", alone);
    print("the same through a keeper, its start included", through_keeper);
}

/// The time that the kernel itself needs.
fn kill_and_reap(count: u32) -> Duration {
    let start = |_| Command::new("sleep").arg("1000").stdin(Stdio::null()).spawn().unwrap();
    let mut children: Vec<_> = (0..count).map(start).collect();
    let started = Instant::now();
    children.iter_mut().for_each(|child| child.kill().unwrap());
    for child in &mut children {
        child.wait().unwrap();
    }
    started.elapsed()
}

async fn sweep() -> Duration {
    let keeper = KeeperHandle::start(Path::new(PROGRAM), "bench").await.unwrap();
    keeper.begin_turn().await.unwrap();
    let mut child = keeper.spawn(launch(&["sh", "-c", AGENT])).await.unwrap();
    let mut lines = BufReader::new(&mut child.stdout).lines();
    while lines.next_line().await.unwrap().is_some_and(|line| line != "ready") {}
    let sweep = SweepRequest { scope: SweepScope::Turn, grace: Duration::ZERO, spare: Vec::new() };
    let started = Instant::now();
    let swept = keeper.sweep(sweep).await.unwrap();
    let elapsed = started.elapsed();
    assert_eq!((swept.killed, swept.survivors.len()), (STUBBORN, 0));
    keeper.close().await;
    elapsed
}

fn start_alone() -> Duration {
    let started = Instant::now();
    Command::new("echo").arg("ready").stdin(Stdio::null()).output().unwrap();
    started.elapsed()
}

async fn start() -> Duration {
    let started = Instant::now();
    let keeper = KeeperHandle::start(Path::new(PROGRAM), "bench").await.unwrap();
    let mut child = keeper.spawn(launch(&["echo", "ready"])).await.unwrap();
    let mut output = String::new();
    child.stdout.read_to_string(&mut output).await.unwrap();
    let elapsed = started.elapsed();
    keeper.close().await;
    elapsed
}

fn launch(argv: &[&str]) -> LaunchSpec {
    let env = [("PATH".to_owned(), std::env::var("PATH").unwrap())].into();
    LaunchSpec { argv: argv.iter().map(|&word| word.to_owned()).collect(), env, cwd: "/".into(), arg0: None }
}

fn print(label: &str, mut times: Vec<Duration>) {
    times.sort_unstable();
    let at = |share: f64| times[((times.len() - 1) as f64 * share).round() as usize].as_secs_f64() * 1e3;
    println!("{label:<52}{:>10.2}{:>10.2}", at(0.5), at(0.99));
}
