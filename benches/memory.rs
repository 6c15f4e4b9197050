//! The daemon's memory per session: asleep, awake, and awake with an idle agent. The resident memory is read from
//! `/proc`. A session is woken by a cancel that has nothing to cancel, and gets its agent by one prompt.
#![expect(clippy::print_stdout, reason = "a benchmark's table is its output")]

use std::path::Path;

use qd_testkit::processes::resident_kib;
use qd_testkit::{BenchmarkTable, BlockingConnection, TestDaemon, TestHome};
use serde_json::{Value, json};

const SESSIONS: usize = 10_000;
/// Runs of one session before anything is measured.
const WARM: usize = 5000;
/// An idle timeout longer than the benchmark, so that no session falls asleep meanwhile.
const AWAKE: &str = "idle_s = 86400\nlog = \"warn\"\n";

fn main() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
    runtime.expect("a runtime starts").block_on(measure());
}

async fn measure() {
    let home = TestHome::new();
    std::fs::create_dir_all(home.path()).expect("a fresh home can be created");
    std::fs::write(home.path().join("config.toml"), AWAKE).expect("a fresh home is writable");
    let mut daemon = TestDaemon::start_in(home, |_| {}).await;
    let fresh = resident_kib(daemon.pid());
    let workspace = daemon.workspace().await.id;
    let socket = daemon.home.socket();
    let sessions = create(&socket, &workspace, SESSIONS);
    let created = resident_kib(daemon.pid());

    daemon.terminate().await;
    daemon.start_again().await;
    let asleep = resident_kib(daemon.pid());
    // First fill what the daemon keeps in any case, such as its ring of events and SQLite's caches.
    let warm_up = create(&socket, &workspace, 1);
    for _ in 0..WARM {
        visit(&socket, &workspace, &warm_up, Some("hello"));
    }
    let warm = resident_kib(daemon.pid());
    visit(&socket, &workspace, &sessions, None);
    let awake = resident_kib(daemon.pid());
    visit(&socket, &workspace, &sessions, Some("hello"));
    let with_agent = resident_kib(daemon.pid());

    let per_session =
        |more: u64, less: u64| format!("{:.2} KiB", more.saturating_sub(less) as f64 / SESSIONS as f64);
    let mut table =
        BenchmarkTable::new(format!("Memory of the daemon per session, {SESSIONS} of them (VmRSS)"));
    table.add_plain("asleep, after a restart", &per_session(asleep, fresh), "0");
    table.add_row([
        "awake and idle",
        &per_session(awake, warm),
        "8 KiB",
        "",
        "< 3 KiB",
        "CAP's idle session actor",
    ]);
    table.add_plain("awake, with its idle agent in the daemon", &per_session(with_agent, warm), "-");
    for (name, size) in [
        ("the daemon in a fresh home", fresh),
        ("the daemon that created them all, nobody awake", created),
        ("the daemon after a restart and 5000 runs of one session", warm),
    ] {
        table.add_plain(name, &format!("{size} KiB"), "-");
    }
    println!("{table}");
}

fn create(socket: &Path, workspace: &str, count: usize) -> Vec<String> {
    let mut connection = BlockingConnection::open(socket);
    let path = format!("/v1/workspaces/{workspace}/sessions");
    let body = json!({ "agent": "echo" }).to_string();
    let id = |session: Value| session["id"].as_str().expect("a session has an id").to_owned();
    (0..count).map(|_| id(connection.request_ok("POST", &path, &body))).collect()
}

/// Sends each session a cancel that has no effect, or prompts each and waits for the end.
fn visit(socket: &Path, workspace: &str, sessions: &[String], prompt: Option<&str>) {
    let mut connection = BlockingConnection::open(socket);
    for session in sessions {
        match prompt {
            None => {
                let path = format!("/v1/workspaces/{workspace}/agent/sessions/{session}/cancel");
                connection.request_ok("POST", &path, "{}");
            }
            Some(prompt) => {
                let body = json!({ "session_id": session, "prompt": prompt }).to_string();
                let receipt =
                    connection.request_ok("POST", &format!("/v1/workspaces/{workspace}/agent"), &body);
                let run = receipt["run_id"].as_str().expect("a receipt names its run");
                connection.request_ok(
                    "GET",
                    &format!("/v1/workspaces/{workspace}/runs/{run}/wait?timeout_s=20"),
                    "",
                );
            }
        }
    }
}
