//! A fleet of a thousand `echo` sessions: routed all at once when the first has ended (a fan-out), and one after the
//! other (a pipeline). Measures the time per routed session, the number of events, and the daemon's memory per session
//! of a fleet. The limit is a client that does by hand what the fleet does, in the same daemon.
#![expect(clippy::print_stdout, reason = "a benchmark's table is its output")]

use std::fmt::Write;
use std::time::{Duration, Instant};

use qd_testkit::processes::resident_kib;
use qd_testkit::{BenchmarkTable, TestDaemon, TestHome, TestSession, TestWorkspace};
use tokio::task::JoinSet;

const SESSIONS: usize = 1000;
/// The prompts that the client runs at the same time, where it need not wait.
const CONCURRENT_PROMPTS: usize = 64;

fn main() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
    runtime.expect("a runtime starts").block_on(measure());
}

fn names(count: usize) -> Vec<String> {
    (0..count).map(|n| format!("s{n}")).collect()
}

fn file(count: usize, routes: &str) -> String {
    let mut text = String::from("fleet:\n  task: hello\n  sessions:\n");
    for name in names(count) {
        let _result = writeln!(text, "    {name}: {{ agent: echo, prompt: go }}");
    }
    let _result = writeln!(text, "  start: s0\n  routes:\n{routes}");
    text
}

fn fan_out(count: usize) -> String {
    file(count, &format!("    - {{ when: s0.done, fan_out: {{ to: [{}] }} }}", names(count)[1..].join(", ")))
}

fn pipeline(count: usize) -> String {
    let mut routes = String::new();
    for n in 1..count {
        let _result = writeln!(routes, "    - {{ when: s{}.done, route_to: s{n} }}", n - 1);
    }
    file(count, &routes)
}

/// Starts a fleet and waits for its end. Returns the time from its first route to its end, and the number of events.
async fn run_fleet(workspace: &TestWorkspace, file: &str) -> (Duration, usize) {
    let mut stream = workspace.client.stream("/v1/events").await.wait_until_ready().await;
    let fleet = workspace.fleet(file).await;
    let (mut routed_at, mut events) = (None, 0);
    loop {
        let event = stream.next().await;
        events += 1;
        if event.kind == "fleet.routed" && fleet.owns(&event) {
            routed_at.get_or_insert_with(Instant::now);
        }
        if event.kind == "fleet.finished" && fleet.owns(&event) {
            assert_eq!(event.data["state"], "done");
            return (routed_at.expect("it routes before it ends").elapsed(), events);
        }
    }
}

/// Prompts equally many new sessions and waits for the end of each, with this many at the same time.
async fn by_hand(workspace: &TestWorkspace, concurrent: usize) -> Duration {
    let mut sessions: Vec<TestSession> = Vec::new();
    for _ in 1..SESSIONS {
        sessions.push(workspace.session("echo").await);
    }
    let started = Instant::now();
    let mut running = JoinSet::new();
    for session in sessions {
        if running.len() == concurrent {
            running.join_next().await;
        }
        let session = session.clone();
        running.spawn(async move {
            let run = session.prompt("go").await;
            session.wait(&run).await;
        });
    }
    running.join_all().await;
    started.elapsed()
}

/// A daemon that has already run a small fleet, so that its caches are filled. Each figure uses its own daemon, because
/// idle agents are processes, and two thousand of them would slow down the third figure.
async fn daemon() -> (TestDaemon, TestWorkspace) {
    let home = TestHome::new();
    home.configure("idle_s = 86400\nlog = \"warn\"\nmax_agents = 100000\n");
    let daemon = TestDaemon::start_in(home, |_| {}).await;
    let workspace = daemon.workspace().await;
    run_fleet(&workspace, &fan_out(SESSIONS / 10)).await;
    (daemon, workspace)
}

async fn measure() {
    let (test_daemon, workspace) = daemon().await;
    let before = resident_kib(test_daemon.pid());
    let (fan_out_time, fan_out_events) = run_fleet(&workspace, &fan_out(SESSIONS)).await;
    let after = resident_kib(test_daemon.pid());
    drop(test_daemon);
    let (test_daemon, workspace) = daemon().await;
    let fan_out_by_hand = by_hand(&workspace, CONCURRENT_PROMPTS).await;
    drop(test_daemon);
    let (test_daemon, workspace) = daemon().await;
    let (pipeline_time, pipeline_events) = run_fleet(&workspace, &pipeline(SESSIONS)).await;
    drop(test_daemon);
    let (_test_daemon, workspace) = daemon().await;
    let pipeline_by_hand = by_hand(&workspace, 1).await;

    let per_session = |time: Duration| time / u32::try_from(SESSIONS - 1).unwrap_or(u32::MAX);
    let rate = |events: usize, time: Duration| format!("{:.0}/s", events as f64 / time.as_secs_f64());
    let mut table = BenchmarkTable::new(format!("A fleet of {SESSIONS} `echo` sessions"));
    table.add_time(
        "time per routed session, fan-out",
        per_session(fan_out_time),
        per_session(fan_out_by_hand),
        "-",
        "a client with 64 prompts at once",
    );
    table.add_time(
        "time per routed session, pipeline",
        per_session(pipeline_time),
        per_session(pipeline_by_hand),
        "-",
        "a client, one prompt after the other",
    );
    table.add_plain("events of the fan-out", &rate(fan_out_events, fan_out_time), "-");
    table.add_plain("events of the pipeline", &rate(pipeline_events, pipeline_time), "-");
    let size = after.saturating_sub(before) as f64 / SESSIONS as f64;
    table.add_row([
        "memory per session, with its agent",
        &format!("{size:.1} KiB"),
        "",
        "",
        "-",
        "of the daemon, VmRSS",
    ]);
    println!("{table}");
}
