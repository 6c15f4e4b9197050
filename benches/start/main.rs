//! Starting: the command line and the daemon in a fresh home, and both with 100,000 sessions and a million events
//! behind them. Everything is the real binary, timed from outside by a process that has nothing else to do.
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
/// How often a daemon is.
const STARTS: usize = 10;
/// The same with a long journal.
const RESTARTS: usize = 5;

fn main() {
    println!("{}", small());
    println!("{}", large());
}

fn small() -> BenchmarkTable {
    let mut table =
        BenchmarkTable::new(format!("Starting, in a small home (p50 of {TIMES}, of the daemon {STARTS})"));
    let mut empty = Vec::new();
    let home = TestHome::new();
    for _ in 0..STARTS {
        let home = TestHome::new();
        empty.push(Serving::start(&home).after);
    }
    let mut again = Vec::new();
    for _ in 0..STARTS {
        again.push(Serving::start(&home).after);
    }
    let _serving = Serving::start(&home);
    let (ps, nothing) = command_and_true(&home);
    let is = "/bin/true";
    table.add_time("`qd ps`, start to exit", ps, nothing, "< 10 ms", is);
    table.add_time(
        "daemon in a fresh home, start to `listening on`",
        percentile(&mut empty, 50),
        nothing,
        "-",
        is,
    );
    table.add_time(
        "daemon in a used home, start to `listening on`",
        percentile(&mut again, 50),
        nothing,
        "< 30 ms",
        is,
    );
    table
}

fn large() -> BenchmarkTable {
    let home = TestHome::new();
    let begun = Instant::now();
    let built = big::build(&home);
    let title = format!(
        "With {} events and {} sessions (built in {})",
        built.events,
        built.sessions,
        format_duration(begun.elapsed())
    );
    let mut table = BenchmarkTable::new(title);
    let (mut listening, mut listed) = (Vec::new(), Vec::new());
    for _ in 0..RESTARTS {
        let begun = Instant::now();
        let serving = Serving::start(&home);
        let mut wire = BlockingConnection::open(&home.socket());
        let page = wire.request_ok("GET", "/v1/sessions", "");
        listed.push(begun.elapsed());
        assert_eq!(page.as_array().map(Vec::len), Some(1000));
        listening.push(serving.after);
    }
    let killed = {
        Serving::start(&home).kill();
        Serving::start(&home).after
    };
    let _serving = Serving::start(&home);
    let mut pages = Vec::new();
    let mut wire = BlockingConnection::open(&home.socket());
    for _ in 0..TIMES {
        let begun = Instant::now();
        let (status, _) = wire.request("GET", "/v1/sessions?open=true&limit=1000", "");
        pages.push(begun.elapsed());
        assert_eq!(status, 200);
    }
    let (ps, nothing) = command_and_true(&home);
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
    table.add_time("`qd ps`, start to exit, p50", ps, nothing, "-", "/bin/true");
    table
}

/// The medians of `qd ps` and of `/bin/true`, in turns.
fn command_and_true(home: &TestHome) -> (Duration, Duration) {
    let (mut ps, mut nothing) = (Vec::new(), Vec::new());
    for _ in 0..TIMES {
        ps.push(timed(command(home, binary()).arg("ps")));
        nothing.push(timed(&mut command(home, "/bin/true".into())));
    }
    (percentile(&mut ps, 50), percentile(&mut nothing, 50))
}

fn timed(command: &mut Command) -> Duration {
    let begun = Instant::now();
    let status = command.stdout(Stdio::null()).status().expect("the command starts");
    let took = begun.elapsed();
    assert!(status.success(), "{command:?} ended with {status}");
    took
}

/// A program with the home's environment and nothing else.
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

/// A daemon, and how long it took to listen. It is ended with its value.
struct Serving {
    child: Child,
    after: Duration,
}

impl Serving {
    fn start(home: &TestHome) -> Self {
        let begun = Instant::now();
        let mut command = command(home, binary());
        let mut child = command.arg("serve").stdout(Stdio::piped()).spawn().expect("the daemon starts");
        let mut line = String::new();
        let stdout = child.stdout.as_mut().expect("its stdout is piped");
        BufReader::new(stdout).read_line(&mut line).expect("a pipe can be read");
        assert!(line.starts_with("listening on "), "{line:?}");
        Self { child, after: begun.elapsed() }
    }

    fn kill(&mut self) {
        self.child.kill().expect("it lives");
        self.child.wait().expect("a child can be waited for");
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        if let Ok(None) = self.child.try_wait() {
            signal(self.child.id(), Signal::TERM);
            let _status = self.child.wait();
        }
    }
}
