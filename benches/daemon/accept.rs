//! From a prompt to its 202, one client on one connection, beside one write and fdatasync on the same disk. Each
//! prompt waits for the end of the run before it, so that nobody else's commit is in the way; then comes a sync, and
//! a request that touches no disk, in the same rhythm: a disk that has just slept takes longer than one kept awake.

use std::time::{Duration, Instant};

use qd_testkit::benchmark_figures::percentile;
use qd_testkit::{BenchmarkTable, BlockingConnection, RawLog, TestDaemon};
use serde_json::json;

const TIMES: usize = 1000;
/// About what a prompt's events take on the disk.
const RECORD: usize = 324;

pub(crate) async fn measure() -> BenchmarkTable {
    let daemon = TestDaemon::start().await;
    let session = daemon.session("echo").await;
    let socket = daemon.home.socket();
    let raw = RawLog::create(&daemon.home.sibling_path("raw.log"));
    let body = json!({ "session_id": session.id, "prompt": "hello" }).to_string();
    let (path, runs) = (session.workspace_path("/agent"), session.workspace_path("/runs"));
    let (mut accepts, mut syncs, mut reads) = (Vec::new(), Vec::new(), Vec::new());
    let mut wire = BlockingConnection::open(&socket);
    for _ in 0..TIMES {
        syncs.push(raw.sync_one(&[b'y'; RECORD]));
        let begun = Instant::now();
        let receipt = wire.request_ok("POST", &path, &body);
        accepts.push(begun.elapsed());
        let run = receipt["run_id"].as_str().expect("a receipt names its run");
        wire.request_ok("GET", &format!("{runs}/{run}/wait?timeout_s=20"), "");
        let begun = Instant::now();
        wire.request_ok("GET", "/healthz", "");
        reads.push(begun.elapsed());
    }
    let mut table =
        BenchmarkTable::new(format!("A prompt accepted, one client on the socket, {TIMES} times"));
    let limit = "one write and fdatasync";
    let at = |times: &mut Vec<Duration>, part| percentile(times, part);
    for (name, part, aim) in [("accept to 202, p50", 50, "< 2 x"), ("accept to 202, p99", 99, "-")] {
        table.add_time(name, at(&mut accepts, part), at(&mut syncs, part), aim, limit);
    }
    table.add_time("for scale: GET /healthz, p50", at(&mut reads, 50), at(&mut syncs, 50), "-", limit);
    let metrics = daemon.client().get("/metrics").await;
    let metrics = String::from_utf8_lossy(&metrics.body);
    let of = |name: &str| {
        let line = metrics.lines().find_map(|line| line.strip_prefix(name));
        line.and_then(|value| value.trim().parse::<f64>().ok()).expect("the metric is there")
    };
    let mean = of("quarterdeck_commit_seconds_sum ") / of("quarterdeck_commit_seconds_count ");
    let sync: Duration = syncs.iter().sum::<Duration>() / u32::try_from(syncs.len()).expect("there are few");
    let name = "for scale: a commit of the journal, mean";
    table.add_time(name, Duration::from_secs_f64(mean), sync, "-", "the mean of those");
    table
}
