//! A soak: many agents that talk all the time, many readers of which some are slow, and nothing that breaks. Memory and
//! descriptors of the daemon and its workers are sampled; neither may grow with time.
//!
//! The criterion: the first quarter of the samples is warm-up. After it, the median of the last third must not have more
//! descriptors than the median of the first third plus [`DESCRIPTORS_SPARE`], and not more memory than that median plus a
//! quarter plus [`MEMORY_SPARE_KIB`]. Medians, because one sample may catch a checkpoint or a burst.

use std::fmt;
use std::time::{Duration, Instant};

use qd_testkit::{ObservedProcess, TestClient, TestDaemon, TestHome, TestSession, processes, script::*};
use tokio::task::JoinSet;

const READERS: usize = 10;
const SLOW_READERS: usize = 2;
/// 20 events per second.
const EVERY_MS: u64 = 50;
const SAMPLE_EVERY: Duration = Duration::from_secs(2);
const DESCRIPTORS_SPARE: f64 = 8.0;
const MEMORY_SPARE_KIB: f64 = 8192.0;

/// One look at the processes.
#[derive(Debug, Clone, Copy, Default)]
struct SoakSample {
    seconds: f64,
    daemon_kib: f64,
    daemon_descriptors: f64,
    workers_kib: f64,
}

/// What was measured, and what grew.
#[derive(Debug)]
pub(crate) struct SoakReport {
    samples: Vec<SoakSample>,
    agents: usize,
    events: u64,
    pub(crate) problems: Vec<String>,
}

pub(crate) async fn run_soak(agents: usize, duration: Duration) -> SoakReport {
    let home = TestHome::new();
    home.configure("max_agents = 1000\nmin_free_mb = 0\n");
    let daemon = TestDaemon::start_in(home, |_| {}).await;
    let mut tasks = JoinSet::new();
    for number in 0..READERS {
        tasks.spawn(read(daemon.client(), number < SLOW_READERS));
    }
    for _ in 0..agents {
        let session = daemon.session("script").await;
        tasks.spawn(talk(session));
    }
    let (began, mut samples) = (Instant::now(), Vec::new());
    while began.elapsed() < duration {
        tokio::time::sleep(SAMPLE_EVERY).await;
        samples.push(sample(&daemon, began));
    }
    tasks.abort_all();
    let events = last_seq(&daemon.client()).await;
    let problems = find_growth(&samples);
    SoakReport { samples, agents, events, problems }
}

/// Prompts a session again and again; each turn talks for some seconds.
async fn talk(session: TestSession) {
    const WORDS_PER_TURN: u64 = 200;
    loop {
        let run = session.prompt_script(&[say_times("a few words ", WORDS_PER_TURN, EVERY_MS)]).await;
        session.wait(&run).await;
    }
}

async fn read(client: TestClient, slow: bool) {
    let mut stream = client.stream("/v1/events").await;
    while let Ok(Some(_)) = stream.try_next().await {
        if slow {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
}

fn sample(daemon: &TestDaemon, began: Instant) -> SoakSample {
    let process = ObservedProcess::find(daemon.pid()).expect("the daemon lives");
    let workers = daemon.home.processes_with_role("__worker");
    let workers_kib: u64 = workers.iter().map(|worker| proportional_kib(worker.pid)).sum();
    SoakSample {
        seconds: began.elapsed().as_secs_f64(),
        daemon_kib: kib(processes::resident_kib(process.pid)),
        daemon_descriptors: kib(process.open_descriptors() as u64),
        workers_kib: kib(workers_kib),
    }
}

fn kib(number: u64) -> f64 {
    u32::try_from(number).map_or(f64::MAX, f64::from)
}

/// The memory of a process, with shared pages divided among those that share them. 0 if it has ended.
fn proportional_kib(pid: u32) -> u64 {
    let rollup = std::fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).unwrap_or_default();
    let line = rollup.lines().find_map(|line| line.strip_prefix("Pss:"));
    line.and_then(|line| line.trim().trim_end_matches(" kB").parse().ok()).unwrap_or_default()
}

async fn last_seq(client: &TestClient) -> u64 {
    let halt = client.post("/v1/halt", &serde_json::json!({ "reason": "the end" })).await;
    assert_eq!(halt.status, 200, "{halt}");
    let mut stream = client.stream("/v1/events?after=0&kinds=halt.set").await;
    stream.next().await.seq
}

fn median(samples: &[SoakSample], of: impl Fn(&SoakSample) -> f64) -> f64 {
    let mut values: Vec<f64> = samples.iter().map(of).collect();
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or_default()
}

/// The medians of the first and the last third after the warm-up.
fn begin_and_end(samples: &[SoakSample], of: impl Fn(&SoakSample) -> f64) -> (f64, f64) {
    let warm = &samples[samples.len() / 4..];
    let third = (warm.len() / 3).max(1).min(warm.len());
    (median(&warm[..third], &of), median(&warm[warm.len() - third..], &of))
}

fn find_growth(samples: &[SoakSample]) -> Vec<String> {
    let mut problems = Vec::new();
    if samples.len() < 8 {
        return vec![format!("{} samples are too few for a verdict", samples.len())];
    }
    let (begin, end) = begin_and_end(samples, |sample| sample.daemon_descriptors);
    if end > begin + DESCRIPTORS_SPARE {
        problems.push(format!("the daemon's descriptors grew from {begin} to {end}"));
    }
    type Field = fn(&SoakSample) -> f64;
    let memory: [(&str, Field); 2] =
        [("daemon", |sample| sample.daemon_kib), ("workers", |sample| sample.workers_kib)];
    for (name, of) in memory {
        let (begin, end) = begin_and_end(samples, of);
        if end > begin * 1.25 + MEMORY_SPARE_KIB {
            problems.push(format!("the memory of {name} grew from {begin} to {end} KiB"));
        }
    }
    problems
}

/// Growth per minute, by least squares, after the warm-up.
fn slope(samples: &[SoakSample], of: impl Fn(&SoakSample) -> f64) -> f64 {
    let warm = &samples[samples.len() / 4..];
    let count = kib(warm.len() as u64).max(1.0);
    let mean_x = warm.iter().map(|sample| sample.seconds).sum::<f64>() / count;
    let mean_y = warm.iter().map(&of).sum::<f64>() / count;
    let over = warm.iter().map(|sample| (sample.seconds - mean_x) * (of(sample) - mean_y)).sum::<f64>();
    let under = warm.iter().map(|sample| (sample.seconds - mean_x).powi(2)).sum::<f64>();
    if under > 0.0 { 60.0 * over / under } else { 0.0 }
}

impl fmt::Display for SoakReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        type Field = fn(&SoakSample) -> f64;
        let (first, last) = (self.samples.first().copied(), self.samples.last().copied());
        let (first, last) = (first.unwrap_or_default(), last.unwrap_or_default());
        writeln!(
            f,
            "soak: {} agents, {READERS} readers ({SLOW_READERS} slow), {:.0} s, {} events, {} problems",
            self.agents,
            last.seconds,
            self.events,
            self.problems.len()
        )?;
        let rows: [(&str, Field); 3] = [
            ("daemon RSS, KiB", |sample| sample.daemon_kib),
            ("daemon descriptors", |sample| sample.daemon_descriptors),
            ("workers PSS, KiB", |sample| sample.workers_kib),
        ];
        for (name, of) in rows {
            let per_minute = slope(&self.samples, of);
            writeln!(
                f,
                "  {name}: first {:.0}, last {:.0}, {per_minute:+.0} per minute",
                of(&first),
                of(&last)
            )?;
        }
        for problem in &self.problems {
            writeln!(f, "- {problem}")?;
        }
        Ok(())
    }
}
