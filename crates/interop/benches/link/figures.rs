//! The measurements, and the table with their results.

use std::time::{Duration, Instant};

use qd_testkit::BenchmarkTable;
use qd_testkit::benchmark_figures::{format_duration, percentile};

use crate::numbered::Session;
use crate::peer::Peer;
use crate::processes::{ESCAPEES, kill_and_reap, kill_ours, start_ours, start_theirs};
use crate::served::{OURS, PRODUCT, Side, THEIRS, Worker};

/// Short runs of one event. The slower side takes a few seconds for this many.
const RUNS: usize = 200;
const WARM_RUNS: usize = 20;
/// Events of one long run.
const EVENTS: u64 = 1_000_000;
const THEIR_EVENTS: u64 = 300_000;
/// Number of long runs. The median counts.
const LONG_RUNS: usize = 5;
const IDLE: usize = 1000;
/// Number of events that a reader leaves unread, and for how long.
const UNREAD_EVENTS: u64 = 2_000_000;
const UNREAD: Duration = Duration::from_secs(5);
/// Number of workers started of each kind.
const STARTS: usize = 50;
/// Number of killed turns.
const KILLS: usize = 100;

pub(crate) async fn measure() {
    let mut table = BenchmarkTable::new(
        "A worker's connection, and that of bamboo-subagent 2026.6.21 (loopback, two processes)",
    );
    let selected: Vec<String> = std::env::args().skip(1).filter(|name| !name.starts_with('-')).collect();
    let is_selected = |name: &str| selected.is_empty() || selected.iter().any(|selected| selected == name);
    if is_selected("latency") {
        latency(&mut table).await;
    }
    if is_selected("throughput") {
        throughput(&mut table).await;
    }
    if is_selected("idle") {
        idle(&mut table).await;
    }
    if is_selected("unread") {
        unread(&mut table).await;
    }
    if is_selected("start") {
        start(&mut table).await;
    }
    if is_selected("kill") {
        kill(&mut table).await;
    }
    println!("{table}");
}

async fn start(table: &mut BenchmarkTable) {
    let [mut echo, mut script, mut theirs]: [Vec<Duration>; 3] = Default::default();
    // Alternate between the kinds, so that other load on the machine affects all of them.
    for _ in 0..STARTS {
        echo.push(start_ours("echo").await);
        script.push(start_ours("script").await);
        theirs.push(start_theirs().await);
    }
    let theirs = percentile(&mut theirs, 50);
    let baseline = "their spawn_worker, until it is found";
    table.add_time(
        "worker started, agent ready (echo), p50",
        percentile(&mut echo, 50),
        theirs,
        "< 10 ms",
        baseline,
    );
    let name = "the same with keeper and agent process (script), p50";
    table.add_time(name, percentile(&mut script, 50), theirs, "-", baseline);
}

async fn kill(table: &mut BenchmarkTable) {
    let [mut ours, mut limit]: [Vec<Duration>; 2] = Default::default();
    for _ in 0..KILLS {
        ours.push(kill_ours().await);
        limit.push(kill_and_reap());
    }
    for (part, aim) in [(50, "-"), (99, "< 50 ms")] {
        let name = format!("a turn of {ESCAPEES} escapees killed, to its terminal, p{part}");
        let limit = percentile(&mut limit, part);
        table.add_time(&name, percentile(&mut ours, part), limit, aim, "SIGKILL to reaped, as many children");
    }
}

async fn latency(table: &mut BenchmarkTable) {
    let (mut ours, mut theirs) = (run_durations(OURS, OURS).await, run_durations(THEIRS, THEIRS).await);
    let mut mixed = run_durations(OURS, THEIRS).await;
    let mut product = run_durations(PRODUCT, PRODUCT).await;
    for (part, aim) in [(50, "< 0.2 ms"), (99, "-")] {
        for (whose, times, aim) in [("", &mut ours, aim), (", their client", &mut mixed, "-")] {
            let name = format!("one-event run to its terminal{whose}, p{part}");
            let (ours, theirs) = (percentile(times, part), percentile(&mut theirs, part));
            let ratio = format!("{:.4} x", ours.as_secs_f64() / theirs.as_secs_f64());
            table.add_row([
                &name,
                &format_duration(ours),
                &format_duration(theirs),
                &ratio,
                aim,
                "their worker and client",
            ]);
        }
        let name = format!("the same of `qd worker --agent echo`, p{part}");
        let (product, ours) = (percentile(&mut product, part), percentile(&mut ours, part));
        table.add_time(&name, product, ours, "-", "our SDK with an executor that only talks");
    }
}

async fn run_durations(worker: Side, client: Side) -> Vec<Duration> {
    let worker = Worker::start(worker);
    let mut peer = Peer::connect(client, &worker.endpoint).await;
    let mut times = Vec::new();
    for _ in 0..WARM_RUNS + RUNS {
        let started_at = Instant::now();
        peer.start(1).await;
        assert_eq!(peer.finish().await, 1);
        times.push(started_at.elapsed());
    }
    times.split_off(WARM_RUNS)
}

async fn throughput(table: &mut BenchmarkTable) {
    let ours = rate(OURS, EVENTS).await;
    let theirs = rate(THEIRS, THEIR_EVENTS).await;
    table.add_rate("events of one run, none lost", ours, theirs, "> 1 M/s", "their worker and client");
    let name = "the same under quarterdeck.v1, numbered, merged, acknowledged";
    table.add_rate(name, numbered_rate().await, theirs, "-", "their worker and client");
}

async fn numbered_rate() -> f64 {
    let worker = Worker::start(OURS);
    let mut session = Session::open(&worker.endpoint).await;
    let mut times = Vec::new();
    for _ in 0..LONG_RUNS {
        times.push(session.run(EVENTS).await);
    }
    EVENTS as f64 / percentile(&mut times, 50).as_secs_f64()
}

/// Events per second of a long run. Every event is counted when it arrives.
async fn rate(side: Side, events: u64) -> f64 {
    let worker = Worker::start(side);
    let mut peer = Peer::connect(side, &worker.endpoint).await;
    let mut times = Vec::new();
    for _ in 0..LONG_RUNS {
        let started_at = Instant::now();
        peer.start(events).await;
        assert_eq!(peer.finish().await, events, "events were lost");
        times.push(started_at.elapsed());
    }
    events as f64 / percentile(&mut times, 50).as_secs_f64()
}

async fn idle(table: &mut BenchmarkTable) {
    let [ours, theirs] = [memory_per_connection(OURS).await, memory_per_connection(THEIRS).await];
    for (name, aim, ours, theirs) in
        [("never ran", "<= 12 KiB", ours.0, theirs.0), ("ran once", "-", ours.1, theirs.1)]
    {
        let name = format!("memory of an idle connection at {IDLE}, {name}");
        let kib = |bytes: f64| format!("{bytes:.1} KiB");
        let ratio = format!("{:.2} x", ours / theirs);
        table.add_row([&name, &kib(ours), &kib(theirs), &ratio, aim, "their worker"]);
    }
}

/// KiB per connection with many connections: before and after each has done a run.
async fn memory_per_connection(side: Side) -> (f64, f64) {
    let worker = Worker::start(side);
    // One-time costs of the first connection are not counted.
    let mut first = Peer::connect(side, &worker.endpoint).await;
    first.start(1).await;
    first.finish().await;
    let before = worker.resident();
    let mut peers = Vec::new();
    for _ in 0..IDLE {
        peers.push(Peer::connect(side, &worker.endpoint).await);
    }
    let per_connection = |resident: u64| resident.saturating_sub(before) as f64 / IDLE as f64;
    let connected = per_connection(worker.resident());
    for peer in &mut peers {
        peer.start(1).await;
    }
    for peer in &mut peers {
        peer.finish().await;
    }
    (connected, per_connection(worker.resident()))
}

async fn unread(table: &mut BenchmarkTable) {
    let (our_size, our_end) = measure_unread(OURS).await;
    let (their_size, their_end) = measure_unread(THEIRS).await;
    let mib = |kib: u64| format!("{:.1} MiB", kib as f64 / 1024.0);
    let ratio = format!("{:.3} x", our_size as f64 / their_size as f64);
    let name = format!("memory behind a reader that stopped, after {}", format_duration(UNREAD));
    table.add_row([&name, &mib(our_size), &mib(their_size), &ratio, "bounded", "their worker"]);
    table.add_time(
        "its cancel, to the terminal when it reads again",
        our_end,
        their_end,
        "-",
        "their worker and client",
    );
}

/// How much the worker grew in KiB, and how long the run took to end after the cancel.
async fn measure_unread(side: Side) -> (u64, Duration) {
    let worker = Worker::start(side);
    let mut peer = Peer::connect(side, &worker.endpoint).await;
    peer.start(1).await;
    peer.finish().await;
    let before = worker.resident();
    peer.start(UNREAD_EVENTS).await;
    tokio::time::sleep(UNREAD).await;
    let grown = worker.resident().saturating_sub(before);
    let started_at = Instant::now();
    peer.cancel().await;
    peer.finish().await;
    (grown, started_at.elapsed())
}
