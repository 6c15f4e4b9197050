//! The time from a prompt to its 202, with one client on one connection, next to one write and fdatasync on the same
//! disk. Each prompt waits for the end of the previous run, so that no other commit interferes. Then come a sync and a
//! request that touches no disk, at the same pace: a disk that was just idle takes longer than a busy one.

use std::time::{Duration, Instant};

use qd_testkit::benchmark_figures::percentile;
use qd_testkit::{BenchmarkTable, BlockingConnection, RawLog, TestDaemon};
use serde_json::json;

const TIMES: usize = 1000;
/// About the size of a prompt's events on disk.
const RECORD: usize = 324;

pub(crate) async fn measure() -> BenchmarkTable {
    let daemon = TestDaemon::start().await;
    let session = daemon.session("echo").await;
    let socket = daemon.home.socket();
    let raw = RawLog::create(&daemon.home.sibling_path("raw.log"));
    let body = json!({ "session_id": session.id, "prompt": "hello" }).to_string();
    let (path, runs) = (session.workspace_path("/agent"), session.workspace_path("/runs"));
    let (mut accepts, mut syncs, mut reads) = (Vec::new(), Vec::new(), Vec::new());
    let mut connection = BlockingConnection::open(&socket);
    for _ in 0..TIMES {
        syncs.push(raw.sync_one(&[b'y'; RECORD]));
        let started = Instant::now();
        let receipt = connection.request_ok("POST", &path, &body);
        accepts.push(started.elapsed());
        let run = receipt["run_id"].as_str().expect("a receipt names its run");
        connection.request_ok("GET", &format!("{runs}/{run}/wait?timeout_s=20"), "");
        let started = Instant::now();
        connection.request_ok("GET", "/healthz", "");
        reads.push(started.elapsed());
    }
    let mut table =
        BenchmarkTable::new(format!("A prompt accepted, one client on the socket, {TIMES} times"));
    let limit = "one write and fdatasync";
    let percentile_of = |times: &mut Vec<Duration>, percent| percentile(times, percent);
    for (name, percent, aim) in [("accept to 202, p50", 50, "< 2 x"), ("accept to 202, p99", 99, "-")] {
        table.add_time(
            name,
            percentile_of(&mut accepts, percent),
            percentile_of(&mut syncs, percent),
            aim,
            limit,
        );
    }
    table.add_time(
        "for scale: GET /healthz, p50",
        percentile_of(&mut reads, 50),
        percentile_of(&mut syncs, 50),
        "-",
        limit,
    );
    let metrics = daemon.client().get("/metrics").await;
    let metrics = String::from_utf8_lossy(&metrics.body);
    let metric = |name: &str| {
        let line = metrics.lines().find_map(|line| line.strip_prefix(name));
        line.and_then(|value| value.trim().parse::<f64>().ok()).expect("the metric is there")
    };
    let mean = metric("quarterdeck_commit_seconds_sum ") / metric("quarterdeck_commit_seconds_count ");
    let sync: Duration = syncs.iter().sum::<Duration>() / u32::try_from(syncs.len()).expect("there are few");
    let name = "for scale: a commit of the journal, mean";
    table.add_time(name, Duration::from_secs_f64(mean), sync, "-", "the mean of those");
    table
}
