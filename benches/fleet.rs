//! A fleet of a thousand `echo` sessions: the others routed to at once when the first has ended (a fan-out), and one after
//! the other (a pipeline). How long a routed session takes, how many events come of it, and what a session of a fleet
//! costs the daemon in memory. The limit is a client that does by hand what the fleet does, in the same daemon.
#![expect(clippy::print_stdout, reason = "a benchmark's table is its output")]

use std::fmt::Write;
use std::time::{Duration, Instant};

use qd_testkit::processes::resident_kib;
use qd_testkit::{BenchmarkTable, TestDaemon, TestHome, TestSession, TestWorkspace};
use tokio::task::JoinSet;

const SESSIONS: usize = 1000;
/// How many prompts the client has under way at once, where it need not wait.
const AT_ONCE: usize = 64;
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
        let _infallible = writeln!(text, "    {name}: {{ agent: echo, prompt: go }}");
    }
    let _infallible = writeln!(text, "  start: s0\n  routes:\n{routes}");
    text
}

fn fan_out(count: usize) -> String {
    file(count, &format!("    - {{ when: s0.done, fan_out: {{ to: [{}] }} }}", names(count)[1..].join(", ")))
}

fn pipeline(count: usize) -> String {
    let mut routes = String::new();
    for n in 1..count {
        let _infallible = writeln!(routes, "    - {{ when: s{}.done, route_to: s{n} }}", n - 1);
    }
    file(count, &routes)
}

/// Starts a fleet and waits for its end; gives how long its routed sessions took, and how many events it made.
async fn live(workspace: &TestWorkspace, file: &str) -> (Duration, usize) {
    let mut stream = workspace.client.stream("/v1/events").await.wait_until_ready().await;
    let fleet = workspace.fleet(file).await;
    let (mut begun, mut events) = (None, 0);
    loop {
        let event = stream.next().await;
        events += 1;
        if event.kind == "fleet.routed" && fleet.owns(&event) {
            begun.get_or_insert_with(Instant::now);
        }
        if event.kind == "fleet.finished" && fleet.owns(&event) {
            assert_eq!(event.data["state"], "done");
            return (begun.expect("it routes before it ends").elapsed(), events);
        }
    }
}

/// Prompts as many new sessions and waits for the end of each, so many at once.
async fn by_hand(workspace: &TestWorkspace, at_once: usize) -> Duration {
    let mut sessions: Vec<TestSession> = Vec::new();
    for _ in 1..SESSIONS {
        sessions.push(workspace.session("echo").await);
    }
    let begun = Instant::now();
    let mut under_way = JoinSet::new();
    for session in sessions {
        if under_way.len() == at_once {
            under_way.join_next().await;
        }
        let session = session.clone();
        under_way.spawn(async move {
            let run = session.prompt("go").await;
            session.wait(&run).await;
        });
    }
    under_way.join_all().await;
    begun.elapsed()
}

/// A daemon that has done some of it before: what it keeps whatever happens is filled. Each figure has its own, since agents
/// that idle are processes, and two thousand of them would slow down the third.
async fn daemon() -> (TestDaemon, TestWorkspace) {
    let home = TestHome::new();
    home.configure("idle_s = 86400\nlog = \"warn\"\nmax_agents = 100000\n");
    let daemon = TestDaemon::start_in(home, |_| {}).await;
    let workspace = daemon.workspace().await;
    live(&workspace, &fan_out(SESSIONS / 10)).await;
    (daemon, workspace)
}

async fn measure() {
    let (one, workspace) = daemon().await;
    let before = resident_kib(one.pid());
    let (wide, wide_events) = live(&workspace, &fan_out(SESSIONS)).await;
    let after = resident_kib(one.pid());
    drop(one);
    let (one, workspace) = daemon().await;
    let wide_by_hand = by_hand(&workspace, AT_ONCE).await;
    drop(one);
    let (one, workspace) = daemon().await;
    let (long, long_events) = live(&workspace, &pipeline(SESSIONS)).await;
    drop(one);
    let (_one, workspace) = daemon().await;
    let long_by_hand = by_hand(&workspace, 1).await;

    let each = |time: Duration| time / u32::try_from(SESSIONS - 1).unwrap_or(u32::MAX);
    let rate = |events: usize, time: Duration| format!("{:.0}/s", events as f64 / time.as_secs_f64());
    let mut table = BenchmarkTable::new(format!("A fleet of {SESSIONS} `echo` sessions"));
    table.add_time(
        "time per routed session, fan-out",
        each(wide),
        each(wide_by_hand),
        "-",
        "a client with 64 prompts at once",
    );
    table.add_time(
        "time per routed session, pipeline",
        each(long),
        each(long_by_hand),
        "-",
        "a client, one prompt after the other",
    );
    table.add_plain("events of the fan-out", &rate(wide_events, wide), "-");
    table.add_plain("events of the pipeline", &rate(long_events, long), "-");
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
