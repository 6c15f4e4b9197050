//! Compares the journal with a raw log on the same disk in the same run: durable appends by 64 producers and by one,
//! reading back, and opening a long journal. The two sides alternate, so that other load on the machine affects both.
//! Prints a table. A number as argument sets the rounds; `many`, `one` or `read` selects a part. Uses only a temporary
//! directory below `$BENCH_DIR`, or below the target directory.
#![expect(clippy::print_stdout, reason = "a benchmark's table is its output")]
#![expect(clippy::unwrap_used, reason = "a benchmark that fails should stop where it does")]

use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use qd_journal::{
    AppendRequest, EventFilter, EventScope, EventTopic, Journal, JournalOptions, NewEvent, SessionKey,
    WorkspaceKey,
};
use qd_protocol::{EventNumber, Millis, RunId, Seq, SessionId, WorkspaceId};
use tokio::sync::oneshot;

const PRODUCERS: usize = 64;
const ROUND: Duration = Duration::from_millis(500);
/// The size of an event's data, and of a raw log record after its header.
const DATA: usize = 300;
const HEADER: usize = 24;
const RAW_BYTES: u64 = 256 << 20;

fn main() {
    let rounds = std::env::args().filter_map(|arg| arg.parse().ok()).next().unwrap_or(9);
    let parent_dir = std::env::var("BENCH_DIR").unwrap_or_else(|_| env!("CARGO_TARGET_TMPDIR").to_owned());
    let dir = tempfile::tempdir_in(parent_dir).unwrap();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let raw_file = preallocated(&dir.path().join("raw.log"));
    println!("{:<46}{:>14}{:>14}{:>9}", "", "raw log", "journal", "ratio");
    let parts = ["many", "one", "read"];
    let parts_given = std::env::args().any(|arg| parts.contains(&arg.as_str()));
    let is_selected = |part: &str| !parts_given || std::env::args().any(|arg| arg == part);
    if is_selected("many") {
        runtime.block_on(many(dir.path(), &raw_file, rounds));
    }
    if is_selected("one") {
        runtime.block_on(one(dir.path(), &raw_file, rounds));
    }
    if is_selected("read") {
        runtime.block_on(read(dir.path()));
    }
}

/// 64 producers. Each waits until an event is durable before it appends the next.
async fn many(dir: &Path, raw_file: &Arc<File>, rounds: usize) {
    let journal = Journal::open(&dir.join("many"), JournalOptions::default()).unwrap();
    let mut numbers = vec![0; PRODUCERS];
    let mut pairs = Vec::new();
    for _ in 0..rounds {
        let raw = raw_round(raw_file).await;
        let ours = journal_round(&journal, &mut numbers).await;
        pairs.push((raw, ours));
    }
    let mut ratios: Vec<f64> = pairs.iter().map(|(raw, ours)| ours / raw).collect();
    let median = |values: &mut Vec<f64>| {
        values.sort_by(f64::total_cmp);
        values[values.len() / 2]
    };
    for (round, (raw, ours)) in pairs.iter().enumerate() {
        let name = format!("64 producers, durable events/s, round {}", round + 1);
        println!("{name:<46}{raw:>14.0}{ours:>14.0}{:>8.1}%", 100.0 * ours / raw);
    }
    let raw = median(&mut pairs.iter().map(|pair| pair.0).collect());
    let ours = median(&mut pairs.iter().map(|pair| pair.1).collect());
    let ratio = 100.0 * median(&mut ratios);
    println!("{:<46}{raw:>14.0}{ours:>14.0}{ratio:>8.1}%", "64 producers, median");
    let stats = journal.stats();
    let (events, commits) = (stats.events.load(Relaxed), stats.commits.load(Relaxed).max(1));
    let commit_us = stats.commit_us.sum() / commits;
    println!("  ({} events per commit, {commit_us} us per commit)", events / commits);
    journal.close().await;
}

async fn raw_round(file: &Arc<File>) -> f64 {
    let log = RawLog::start(file.clone());
    let stop = Arc::new(AtomicBool::new(false));
    let done = Arc::new(AtomicU64::new(0));
    let started = Instant::now();
    let tasks: Vec<_> = (0..PRODUCERS)
        .map(|_| {
            let (log, stop, done) = (log.clone(), stop.clone(), done.clone());
            tokio::spawn(async move {
                while !stop.load(Relaxed) {
                    log.append(vec![b'x'; HEADER + DATA]).await;
                    done.fetch_add(1, Relaxed);
                }
            })
        })
        .collect();
    finish(tasks, &stop).await;
    let rate = done.load(Relaxed) as f64 / started.elapsed().as_secs_f64();
    log.stop();
    rate
}

async fn journal_round(journal: &Journal, numbers: &mut [u64]) -> f64 {
    let stop = Arc::new(AtomicBool::new(false));
    let before: u64 = numbers.iter().sum();
    let started = Instant::now();
    let tasks: Vec<_> = numbers
        .iter()
        .enumerate()
        .map(|(producer, number)| {
            let (journal, stop, mut number) = (journal.clone(), stop.clone(), *number);
            let scope = scope(producer as i64 + 1);
            tokio::spawn(async move {
                while !stop.load(Relaxed) {
                    number += 1;
                    journal.append(event(&scope, number)).await.unwrap();
                }
                number
            })
        })
        .collect();
    for (number, last) in numbers.iter_mut().zip(finish(tasks, &stop).await) {
        *number = last;
    }
    (numbers.iter().sum::<u64>() - before) as f64 / started.elapsed().as_secs_f64()
}

async fn finish<T>(tasks: Vec<tokio::task::JoinHandle<T>>, stop: &AtomicBool) -> Vec<T> {
    tokio::time::sleep(ROUND).await;
    stop.store(true, Relaxed);
    let mut results = Vec::new();
    for task in tasks {
        results.push(task.await.unwrap());
    }
    results
}

/// One producer: the time until an event is durable, compared with one write and fdatasync.
async fn one(dir: &Path, raw_file: &Arc<File>, rounds: usize) {
    let journal = Journal::open(&dir.join("one"), JournalOptions::default()).unwrap();
    let scope = scope(1);
    let (mut raw, mut ours, mut number) = (Vec::new(), Vec::new(), 0);
    for round in 0..rounds {
        let file = raw_file.clone();
        raw.extend(
            tokio::task::spawn_blocking(move || {
                let record = vec![b'y'; HEADER + DATA];
                let times = (0..400).map(|at| {
                    let started = Instant::now();
                    file.write_all_at(&record, (round * 400 + at) as u64 * record.len() as u64).unwrap();
                    file.sync_data().unwrap();
                    started.elapsed()
                });
                times.collect::<Vec<_>>()
            })
            .await
            .unwrap(),
        );
        for _ in 0..400 {
            number += 1;
            let started = Instant::now();
            journal.append(event(&scope, number)).await.unwrap();
            ours.push(started.elapsed());
        }
    }
    for (name, percent) in [("p50", 50), ("p99", 99)] {
        let percentile = |times: &mut Vec<Duration>| {
            times.sort();
            times[(times.len() - 1) * percent / 100].as_secs_f64() * 1e6
        };
        let (raw, ours) = (percentile(&mut raw), percentile(&mut ours));
        let name = format!("1 producer, {name} until durable, us");
        println!("{name:<46}{raw:>14.0}{ours:>14.0}{:>8.2}x", ours / raw);
    }
    journal.close().await;
}

/// A million events: how fast they are read, and how long it takes to open the journal.
async fn read(dir: &Path) {
    const EVENTS: u64 = 1_000_000;
    const SESSIONS: u64 = 100;
    const PER_APPEND: u64 = 500;
    let home = dir.join("many-events");
    let journal = Journal::open(&home, JournalOptions::default()).unwrap();
    let started = Instant::now();
    for batch in 0..EVENTS / PER_APPEND {
        let scope = scope((batch % SESSIONS) as i64 + 1);
        let first = batch / SESSIONS * PER_APPEND;
        let events = (1..=PER_APPEND).flat_map(|n| event(&scope, first + n).events).collect();
        journal.append(AppendRequest { events, ..AppendRequest::default() }).await.unwrap();
    }
    let rate = EVENTS as f64 / started.elapsed().as_secs_f64();
    println!("{:<46}{:>14}{rate:>14.0}", "1 M events in appends of 500, events/s", "");
    for (name, topic) in
        [("everything", EventTopic::All), ("one session of 100", EventTopic::Session(SessionKey(7)))]
    {
        let started = Instant::now();
        let (mut after, mut seen, mut end) = (Seq(0), 0, false);
        while !end {
            let page = journal.page(&EventFilter::of(topic), after, 1000).await.unwrap();
            seen += page.events.len();
            (after, end) = (page.scanned_through, page.end);
        }
        let rate = seen as f64 / started.elapsed().as_secs_f64();
        let name = format!("page of 1000, {name}, events/s");
        println!("{name:<46}{:>14}{rate:>14.0}", "");
    }
    journal.close().await;
    drop(journal);
    let started = Instant::now();
    let journal = Journal::open(&home, JournalOptions::default()).unwrap();
    let opened = started.elapsed().as_secs_f64() * 1e3;
    println!("{:<46}{:>14}{opened:>14.1}", "open with 1 M events, ms", "");
    journal.close().await;
}

fn scope(session: i64) -> Arc<EventScope> {
    Arc::new(EventScope {
        workspace: Some((WorkspaceKey(1), WorkspaceId::parse("ws_bench").unwrap())),
        session: Some((SessionKey(session), SessionId::parse(&format!("ses_bench{session:021}")).unwrap())),
        fleet: None,
    })
}

fn event(scope: &Arc<EventScope>, number: u64) -> AppendRequest {
    let text = "x".repeat(DATA - r#"{"text":""}"#.len());
    let event = NewEvent {
        scope: scope.clone(),
        number: Some(EventNumber(number)),
        ts: Millis(1_794_774_645_123).into(),
        run: Some(RunId::parse("run_0123456789abcdefghjkmnpq").unwrap()),
        kind: "text.delta",
        data: format!(r#"{{"text":"{text}"}}"#).into_bytes(),
        update_number: None,
    };
    AppendRequest { events: vec![event], ..AppendRequest::default() }
}

/// A file whose blocks are all allocated and written, so that a sync only writes data.
fn preallocated(path: &Path) -> Arc<File> {
    let file = OpenOptions::new().create_new(true).read(true).write(true).open(path).unwrap();
    let zeros = vec![0; 1 << 20];
    for at in (0..RAW_BYTES).step_by(zeros.len()) {
        file.write_all_at(&zeros, at).unwrap();
    }
    file.sync_all().unwrap();
    Arc::new(file)
}

/// The minimal group commit: take all waiting records, write them, sync, answer.
struct RawLog {
    /// The waiting records, and whether the log is stopped.
    waiting: Mutex<(Vec<Record>, bool)>,
    filled: Condvar,
}

type Record = (Vec<u8>, oneshot::Sender<()>);

impl RawLog {
    fn start(file: Arc<File>) -> Arc<Self> {
        let log = Arc::new(Self { waiting: Mutex::default(), filled: Condvar::new() });
        let writer = log.clone();
        std::thread::spawn(move || writer.run(&file));
        log
    }

    async fn append(&self, record: Vec<u8>) {
        let (reply, synced) = oneshot::channel();
        self.waiting.lock().unwrap().0.push((record, reply));
        self.filled.notify_one();
        synced.await.unwrap();
    }

    fn stop(&self) {
        self.waiting.lock().unwrap().1 = true;
        self.filled.notify_one();
    }

    fn run(&self, file: &File) {
        let (mut at, mut bytes) = (0, Vec::new());
        loop {
            let batch = {
                let mut waiting = self.waiting.lock().unwrap();
                while waiting.0.is_empty() {
                    if waiting.1 {
                        return;
                    }
                    waiting = self.filled.wait(waiting).unwrap();
                }
                std::mem::take(&mut waiting.0)
            };
            bytes.clear();
            for (record, _) in &batch {
                bytes.extend_from_slice(record);
            }
            if at + bytes.len() as u64 > RAW_BYTES {
                at = 0;
            }
            file.write_all_at(&bytes, at).unwrap();
            file.sync_data().unwrap();
            at += bytes.len() as u64;
            for (_, reply) in batch {
                let _ = reply.send(());
            }
        }
    }
}
