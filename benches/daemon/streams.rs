//! One session's events to many readers: the deliveries per second when the agent sends as fast as it can, and the age
//! of events on arrival at a moderate rate. The bare server does the same in the same run.

use std::collections::HashMap;
use std::path::PathBuf;
use std::process::Stdio;
use std::time::{Duration, Instant};

use qd_testkit::benchmark_figures::percentile;
use qd_testkit::{BenchmarkTable, RawLog, TestDaemon, TestSession};
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::Child;

use crate::readers::{self, Age, Reader};
use crate::{bare, stamp};

const ROUNDS: usize = 3;
/// How many syncs are measured.
const SYNCS: usize = 300;
/// Numbers of readers, and the events they are flooded with.
const FLOODS: [(usize, usize); 3] = [(1, 50_000), (100, 10_000), (1000, 2000)];
/// Numbers of readers, numbers of events, and the interval between events.
const PACES: [(usize, usize, Duration); 3] = [
    (1, 1000, Duration::from_millis(2)),
    (100, 400, Duration::from_millis(5)),
    (1000, 100, Duration::from_millis(40)),
];

pub(crate) async fn to_many_readers() -> BenchmarkTable {
    let ours = DaemonServer::start().await;
    let bare = BareServer::start(&ours).await;
    let sync = one_sync(&ours);
    let mut table =
        BenchmarkTable::new(format!("One session's events to many readers (flood: best of {ROUNDS})"));
    for (readers, events) in FLOODS {
        let [mut best_ours, mut best_bare] = [0.0_f64; 2];
        for _ in 0..ROUNDS {
            best_bare = best_bare.max(flood(&bare, readers, events).await);
            best_ours = best_ours.max(flood(&ours, readers, events).await);
        }
        let aim = if readers == 1000 { "> 0.80 M/s" } else { "-" };
        table.add_rate(
            &format!("flood to {}, deliveries", reader_count(readers)),
            best_ours,
            best_bare,
            aim,
            BARE,
        );
    }
    for (readers, events, every) in PACES {
        let limit = pace(&bare, readers, events, every).await;
        let measured = pace(&ours, readers, events, every).await;
        for percent in [50, 99] {
            let name = format!(
                "{} events/s to {}, agent to reader p{percent}",
                per_second(every),
                reader_count(readers)
            );
            table.add_time(&name, measured.at(percent), limit.at(percent) + sync, "-", BARE_AND_SYNC);
        }
        if readers > 1 {
            let name = format!(
                "{} events/s to {}, first reader to last p50",
                per_second(every),
                reader_count(readers)
            );
            table.add_time(&name, measured.spread(), limit.spread(), "-", BARE);
        }
    }
    table
}

pub(crate) async fn agent_to_client() -> BenchmarkTable {
    let ours = DaemonServer::start().await;
    let bare = BareServer::start(&ours).await;
    let every = Duration::from_millis(1);
    let limit = pace(&bare, 10, 3000, every).await;
    let measured = pace(&ours, 10, 3000, every).await;
    let sync = one_sync(&ours);
    let mut table =
        BenchmarkTable::new("Agent to SSE client, 1000 events/s, 10 readers, every event synced on the way");
    for (percent, aim) in [(50, "< 500 us"), (99, "-")] {
        table.add_time(
            &format!("p{percent}"),
            measured.at(percent),
            limit.at(percent) + sync,
            aim,
            BARE_AND_SYNC,
        );
    }
    table.add_time("for scale: one fdatasync, p50", sync, limit.at(50), "-", "bare hyper server, p50");
    table
}

const BARE: &str = "bare hyper server, nothing journalled";
const BARE_AND_SYNC: &str = "bare hyper server and one fdatasync (p50)";

/// The median time of one write and fdatasync on the daemon's disk.
fn one_sync(ours: &DaemonServer) -> Duration {
    let log = RawLog::create(&ours.daemon.home.sibling_path("raw.log"));
    percentile(&mut (0..SYNCS).map(|_| log.sync_one(&[b'y'; 324])).collect::<Vec<_>>(), 50)
}

fn reader_count(readers: usize) -> String {
    format!("{readers} {}", if readers == 1 { "reader" } else { "readers" })
}

fn per_second(every: Duration) -> u128 {
    1_000_000 / every.as_micros()
}

async fn flood(server: &impl EventServer, readers: usize, events: usize) -> f64 {
    let tasks = readers::count(server.attach(readers).await, events);
    let started = Instant::now();
    server.emit(events, Duration::ZERO).await;
    for reader in tasks {
        reader.await.expect("a reader sees every event");
    }
    (readers * events) as f64 / started.elapsed().as_secs_f64()
}

async fn pace(server: &impl EventServer, readers: usize, events: usize, every: Duration) -> EventAges {
    let tasks = readers::ages(server.attach(readers).await, events);
    server.emit(events, every).await;
    let mut ages = Vec::with_capacity(readers * events);
    for reader in tasks {
        ages.extend(reader.await.expect("a reader sees every event"));
    }
    EventAges::new(&ages)
}

/// The ages of events on arrival.
struct EventAges {
    ages: Vec<u64>,
    /// For each event, the time between its first and its last reader.
    spreads: Vec<u64>,
}

impl EventAges {
    fn new(ages: &[Age]) -> Self {
        let mut events: HashMap<u64, (u64, u64)> = HashMap::new();
        for (sent, age) in ages {
            let (first, last) = events.entry(*sent).or_insert((*age, *age));
            (*first, *last) = ((*first).min(*age), (*last).max(*age));
        }
        let spreads = events.values().map(|(first, last)| last - first).collect();
        Self { ages: ages.iter().map(|(_, age)| *age).collect(), spreads }
    }

    fn at(&self, percent: usize) -> Duration {
        Duration::from_nanos(percentile(&mut self.ages.clone(), percent))
    }

    fn spread(&self) -> Duration {
        Duration::from_nanos(percentile(&mut self.spreads.clone(), 50).max(1))
    }
}

/// A server with a stream of timestamped lines.
trait EventServer {
    async fn attach(&self, readers: usize) -> Vec<Reader>;
    async fn emit(&self, count: usize, every: Duration);
}

/// The daemon with the stamping agent.
struct DaemonServer {
    daemon: TestDaemon,
    session: TestSession,
}

impl DaemonServer {
    async fn start() -> Self {
        let program = std::env::current_exe().expect("a process knows its own file");
        let program = program.to_str().expect("cargo's paths are text");
        let daemon = TestDaemon::start_with(|options| {
            options.wrapped_in(&[program, stamp::ROLE]);
        })
        .await;
        let session = daemon.session(stamp::AGENT).await;
        Self { daemon, session }
    }
}

impl EventServer for DaemonServer {
    async fn attach(&self, readers: usize) -> Vec<Reader> {
        let path =
            self.session.workspace_path(&format!("/events?session={}&kinds=notice.shown", self.session.id));
        readers::open(&self.daemon.home.socket(), &path, readers).await
    }

    async fn emit(&self, count: usize, every: Duration) {
        self.session.prompt(&stamp::prompt(count, every)).await;
    }
}

/// The bare server. It is killed when this value is dropped.
struct BareServer {
    _child: Child,
    socket: PathBuf,
}

impl BareServer {
    async fn start(daemon_server: &DaemonServer) -> Self {
        let socket = daemon_server.daemon.home.sibling_path("bare.sock");
        let program = std::env::current_exe().expect("a process knows its own file");
        let mut command = tokio::process::Command::new(program);
        command.arg(bare::ROLE).arg(&socket).stdout(Stdio::piped()).kill_on_drop(true);
        let mut child = command.spawn().expect("this program starts again");
        let mut lines = BufReader::new(child.stdout.take().expect("its stdout is piped")).lines();
        let line = lines.next_line().await.expect("a pipe can be read");
        assert!(line.is_some_and(|line| line.starts_with("listening on ")), "the bare server starts");
        Self { _child: child, socket }
    }
}

impl EventServer for BareServer {
    async fn attach(&self, readers: usize) -> Vec<Reader> {
        readers::open(&self.socket, bare::EVENTS, readers).await
    }

    async fn emit(&self, count: usize, every: Duration) {
        let prompt = stamp::prompt(count, every).replace(' ', "+");
        let client = qd_testkit::TestClient::unix(&self.socket);
        assert_eq!(client.get(&format!("{}{prompt}", bare::GO)).await.status, 200);
    }
}
