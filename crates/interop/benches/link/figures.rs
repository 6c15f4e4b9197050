//! What is measured, and the table.

use std::time::{Duration, Instant};

use qd_testkit::BenchmarkTable;
use qd_testkit::benchmark_figures::{format_duration, percentile};

use crate::numbered::Session;
use crate::peer::Peer;
use crate::processes::{STUBBORN, kill_and_reap, kill_ours, start_ours, start_theirs};
use crate::served::{OURS, Side, THEIRS, Worker};

/// Runs of one event: as many as the slower side does in some seconds.
const RUNS: usize = 200;
const WARM_RUNS: usize = 20;
/// Events of one long run.
const EVENTS: u64 = 1_000_000;
const THEIR_EVENTS: u64 = 300_000;
/// Long runs, of which the middle one counts.
const LONG_RUNS: usize = 5;
const IDLE: usize = 1000;
/// What a reader leaves unread, and for how long.
const UNREAD_EVENTS: u64 = 2_000_000;
const UNREAD: Duration = Duration::from_secs(5);
/// Workers started of each kind.
const STARTS: usize = 50;
/// Turns killed.
const KILLS: usize = 100;

pub(crate) async fn measure() {
    let mut table = BenchmarkTable::new(
        "A worker's connection, and that of bamboo-subagent 2026.6.21 (loopback, two processes)",
    );
    let chosen: Vec<String> = std::env::args().skip(1).filter(|name| !name.starts_with('-')).collect();
    let wanted = |name: &str| chosen.is_empty() || chosen.iter().any(|chosen| chosen == name);
    if wanted("latency") {
        latency(&mut table).await;
    }
    if wanted("throughput") {
        throughput(&mut table).await;
    }
    if wanted("idle") {
        idle(&mut table).await;
    }
    if wanted("unread") {
        unread(&mut table).await;
    }
    if wanted("start") {
        start(&mut table).await;
    }
    if wanted("kill") {
        kill(&mut table).await;
    }
    println!("{table}");
}

async fn start(table: &mut BenchmarkTable) {
    let [mut echo, mut script, mut theirs]: [Vec<Duration>; 3] = Default::default();
    // In turns, so that what else the machine does hits all of them.
    for _ in 0..STARTS {
        echo.push(start_ours("echo").await);
        script.push(start_ours("script").await);
        theirs.push(start_theirs().await);
    }
    let theirs = percentile(&mut theirs, 50);
    let is = "their spawn_worker, until it is found";
    table.add_time(
        "worker started, agent ready (echo), p50",
        percentile(&mut echo, 50),
        theirs,
        "< 10 ms",
        is,
    );
    let name = "the same with keeper and agent process (script), p50";
    table.add_time(name, percentile(&mut script, 50), theirs, "-", is);
}

async fn kill(table: &mut BenchmarkTable) {
    let [mut ours, mut limit]: [Vec<Duration>; 2] = Default::default();
    for _ in 0..KILLS {
        ours.push(kill_ours().await);
        limit.push(kill_and_reap());
    }
    for (part, aim) in [(50, "-"), (99, "< 50 ms")] {
        let name = format!("a turn of {STUBBORN} escapees killed, to its terminal, p{part}");
        let limit = percentile(&mut limit, part);
        table.add_time(&name, percentile(&mut ours, part), limit, aim, "SIGKILL to reaped, as many children");
    }
}

async fn latency(table: &mut BenchmarkTable) {
    let (mut ours, mut theirs) = (terminals(OURS, OURS).await, terminals(THEIRS, THEIRS).await);
    let mut mixed = terminals(OURS, THEIRS).await;
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
    }
}

async fn terminals(worker: Side, client: Side) -> Vec<Duration> {
    let worker = Worker::start(worker);
    let mut peer = Peer::connect(client, &worker.endpoint).await;
    let mut times = Vec::new();
    for _ in 0..WARM_RUNS + RUNS {
        let begun = Instant::now();
        peer.start(1).await;
        assert_eq!(peer.finish().await, 1);
        times.push(begun.elapsed());
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

/// Every word is counted on arrival.
async fn rate(side: Side, events: u64) -> f64 {
    let worker = Worker::start(side);
    let mut peer = Peer::connect(side, &worker.endpoint).await;
    let mut times = Vec::new();
    for _ in 0..LONG_RUNS {
        let begun = Instant::now();
        peer.start(events).await;
        assert_eq!(peer.finish().await, events, "events were lost");
        times.push(begun.elapsed());
    }
    events as f64 / percentile(&mut times, 50).as_secs_f64()
}

async fn idle(table: &mut BenchmarkTable) {
    let [ours, theirs] = [crowd(OURS).await, crowd(THEIRS).await];
    for (name, aim, ours, theirs) in
        [("never ran", "<= 12 KiB", ours.0, theirs.0), ("ran once", "-", ours.1, theirs.1)]
    {
        let name = format!("memory of an idle connection at {IDLE}, {name}");
        let kib = |bytes: f64| format!("{bytes:.1} KiB");
        let ratio = format!("{:.2} x", ours / theirs);
        table.add_row([&name, &kib(ours), &kib(theirs), &ratio, aim, "their worker"]);
    }
}

/// KiB for each of many connections: before each has run something, and after.
async fn crowd(side: Side) -> (f64, f64) {
    let worker = Worker::start(side);
    // What the first connection costs is not theirs.
    let mut first = Peer::connect(side, &worker.endpoint).await;
    first.start(1).await;
    first.finish().await;
    let before = worker.resident();
    let mut peers = Vec::new();
    for _ in 0..IDLE {
        peers.push(Peer::connect(side, &worker.endpoint).await);
    }
    let each = |now: u64| now.saturating_sub(before) as f64 / IDLE as f64;
    let connected = each(worker.resident());
    for peer in &mut peers {
        peer.start(1).await;
    }
    for peer in &mut peers {
        peer.finish().await;
    }
    (connected, each(worker.resident()))
}

async fn unread(table: &mut BenchmarkTable) {
    let (our_size, our_end) = leave_unread(OURS).await;
    let (their_size, their_end) = leave_unread(THEIRS).await;
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

/// How much the worker grew, in KiB, and how long the end took after the cancel.
async fn leave_unread(side: Side) -> (u64, Duration) {
    let worker = Worker::start(side);
    let mut peer = Peer::connect(side, &worker.endpoint).await;
    peer.start(1).await;
    peer.finish().await;
    let before = worker.resident();
    peer.start(UNREAD_EVENTS).await;
    tokio::time::sleep(UNREAD).await;
    let grown = worker.resident().saturating_sub(before);
    let begun = Instant::now();
    peer.cancel().await;
    peer.finish().await;
    (grown, begun.elapsed())
}
