//! Start times of the command line and the daemon, in a fresh home and in a home with 100,000 sessions and a million
//! events. Everything is the real binary, timed from outside by an otherwise idle process.
#![expect(clippy::print_stdout, reason = "a benchmark's table is its output")]

mod big;

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use qd_testkit::benchmark_figures::{format_duration, percentile};
use qd_testkit::home::{binary, signal};
use qd_testkit::{BenchmarkTable, BlockingConnection, TestHome};
use rustix::process::Signal;

/// How often a command is started.
const TIMES: usize = 50;
/// How often a daemon is started.
const STARTS: usize = 10;
/// How often a daemon with a long journal is started.
const RESTARTS: usize = 5;

fn main() {
    println!("{}", small());
    println!("{}", large());
}

fn small() -> BenchmarkTable {
    let mut table =
        BenchmarkTable::new(format!("Starting, in a small home (p50 of {TIMES}, of the daemon {STARTS})"));
    let mut fresh = Vec::new();
    let home = TestHome::new();
    for _ in 0..STARTS {
        let home = TestHome::new();
        fresh.push(RunningDaemon::start(&home).start_time);
    }
    let mut used = Vec::new();
    for _ in 0..STARTS {
        used.push(RunningDaemon::start(&home).start_time);
    }
    let _daemon = RunningDaemon::start(&home);
    let (ps, baseline) = command_and_true(&home);
    let limit = "/bin/true";
    table.add_time("`qd ps`, start to exit", ps, baseline, "< 10 ms", limit);
    table.add_time(
        "daemon in a fresh home, start to `listening on`",
        percentile(&mut fresh, 50),
        baseline,
        "-",
        limit,
    );
    table.add_time(
        "daemon in a used home, start to `listening on`",
        percentile(&mut used, 50),
        baseline,
        "< 30 ms",
        limit,
    );
    table
}

fn large() -> BenchmarkTable {
    let home = TestHome::new();
    let started = Instant::now();
    let built = big::build(&home);
    let title = format!(
        "With {} events and {} sessions (built in {})",
        built.events,
        built.sessions,
        format_duration(started.elapsed())
    );
    let mut table = BenchmarkTable::new(title);
    let (mut listening, mut listed) = (Vec::new(), Vec::new());
    for _ in 0..RESTARTS {
        let started = Instant::now();
        let daemon = RunningDaemon::start(&home);
        let mut connection = BlockingConnection::open(&home.socket());
        let page = connection.request_ok("GET", "/v1/sessions", "");
        listed.push(started.elapsed());
        assert_eq!(page.as_array().map(Vec::len), Some(1000));
        listening.push(daemon.start_time);
    }
    let killed = {
        RunningDaemon::start(&home).kill();
        RunningDaemon::start(&home).start_time
    };
    let _daemon = RunningDaemon::start(&home);
    let mut pages = Vec::new();
    let mut connection = BlockingConnection::open(&home.socket());
    for _ in 0..TIMES {
        let started = Instant::now();
        let (status, _) = connection.request("GET", "/v1/sessions?open=true&limit=1000", "");
        pages.push(started.elapsed());
        assert_eq!(status, 200);
    }
    let (ps, baseline) = command_and_true(&home);
    table.add_plain(
        "start to `listening on`, p50",
        &format_duration(percentile(&mut listening, 50)),
        "< 1 s",
    );
    table.add_plain("start to `listening on` after kill -9", &format_duration(killed), "< 1 s");
    table.add_plain(
        "start to the first GET /v1/sessions answered, p50",
        &format_duration(percentile(&mut listed, 50)),
        "< 1 s",
    );
    table.add_plain(
        "GET /v1/sessions?open=true&limit=1000, p50",
        &format_duration(percentile(&mut pages, 50)),
        "-",
    );
    table.add_time("`qd ps`, start to exit, p50", ps, baseline, "-", "/bin/true");
    table
}

/// The medians of `qd ps` and of `/bin/true`, measured alternately.
fn command_and_true(home: &TestHome) -> (Duration, Duration) {
    let (mut ps, mut baseline) = (Vec::new(), Vec::new());
    for _ in 0..TIMES {
        ps.push(timed(command(home, binary()).arg("ps")));
        baseline.push(timed(&mut command(home, "/bin/true".into())));
    }
    (percentile(&mut ps, 50), percentile(&mut baseline, 50))
}

fn timed(command: &mut Command) -> Duration {
    let started = Instant::now();
    let status = command.stdout(Stdio::null()).status().expect("the command starts");
    let elapsed = started.elapsed();
    assert!(status.success(), "{command:?} ended with {status}");
    elapsed
}

/// A program with only the home's environment.
fn command(home: &TestHome, program: std::path::PathBuf) -> Command {
    let mut command = Command::new(program);
    command
        .env_clear()
        .env("HOME", home.sibling_path("user"))
        .env("QD_HOME", home.path())
        .current_dir(home.project_dir())
        .stdin(Stdio::null());
    command
}

/// A daemon and the time until it listened. It is stopped when this value is dropped.
struct RunningDaemon {
    child: Child,
    start_time: Duration,
}

impl RunningDaemon {
    fn start(home: &TestHome) -> Self {
        let started = Instant::now();
        let mut command = command(home, binary());
        let mut child = command.arg("serve").stdout(Stdio::piped()).spawn().expect("the daemon starts");
        let mut line = String::new();
        let stdout = child.stdout.as_mut().expect("its stdout is piped");
        BufReader::new(stdout).read_line(&mut line).expect("a pipe can be read");
        assert!(line.starts_with("listening on "), "{line:?}");
        Self { child, start_time: started.elapsed() }
    }

    fn kill(&mut self) {
        self.child.kill().expect("the daemon is running");
        self.child.wait().expect("a child can be waited for");
    }
}

impl Drop for RunningDaemon {
    fn drop(&mut self) {
        if let Ok(None) = self.child.try_wait() {
            signal(self.child.id(), Signal::TERM);
            let _status = self.child.wait();
        }
    }
}
