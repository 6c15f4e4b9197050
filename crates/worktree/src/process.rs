//! Runs a subprocess to its end, with a time limit and a limit on the captured output. It can be stopped, together with
//! everything in its process group.

use std::io::{self, Read};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process_group, waitid};

/// The first pause between two checks for its exit. It doubles up to [`POLL_MAX`].
const POLL_MIN: Duration = Duration::from_millis(1);
/// The longest pause between two checks.
const POLL_MAX: Duration = Duration::from_millis(20);
/// How long a subprocess has to clean up after SIGTERM. Git removes its locks.
const TERM_GRACE: Duration = Duration::from_secs(2);
/// How long to wait for the end of its output after it has exited. A process that it left behind may hold the pipe open
/// for ever.
const OUTPUT_GRACE: Duration = Duration::from_secs(2);

/// Tells running operations to stop. Clones share the same flag.
#[derive(Debug, Clone, Default)]
pub struct StopFlag(Arc<AtomicBool>);

impl StopFlag {
    pub fn set(&self) {
        self.0.store(true, Ordering::SeqCst);
    }

    pub fn is_set(&self) -> bool {
        self.0.load(Ordering::SeqCst)
    }
}

/// Which part of a long output is kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OutputLimit {
    /// The first bytes.
    Head(usize),
    /// The last bytes.
    Tail(usize),
}

#[derive(Debug)]
pub struct SubprocessOutput {
    pub status: ExitStatus,
    pub stdout: Vec<u8>,
    pub stderr: Vec<u8>,
    /// Whether some of the output was dropped.
    pub truncated: bool,
}

impl SubprocessOutput {
    /// Describes the exit for people.
    pub fn describe_exit(&self) -> String {
        match (self.status.code(), self.status.signal()) {
            (Some(code), _) => format!("exit status {code}"),
            (None, Some(signal)) => format!("killed by signal {signal}"),
            (None, None) => "unknown exit status".to_owned(),
        }
    }
}

/// Why a subprocess did not run to its end.
#[derive(Debug)]
pub enum SubprocessError {
    NotStarted(io::Error),
    TimedOut,
    Stopped,
}

/// Runs a command to its end. Its standard input is `input`, or empty.
pub fn run(
    mut command: Command,
    input: Option<Vec<u8>>,
    limit: Duration,
    output_limit: OutputLimit,
    stop: &StopFlag,
) -> Result<SubprocessOutput, SubprocessError> {
    if stop.is_set() {
        return Err(SubprocessError::Stopped);
    }
    command.stdin(if input.is_some() { Stdio::piped() } else { Stdio::null() });
    command.stdout(Stdio::piped()).stderr(Stdio::piped()).process_group(0);
    let mut child = command.spawn().map_err(SubprocessError::NotStarted)?;
    let stdout = SubprocessReader::of(child.stdout.take(), output_limit);
    let stderr = SubprocessReader::of(child.stderr.take(), output_limit);
    let writer = input.map(|input| write_input(&mut child, input));
    let group = Pid::from_child(&child);
    // The process id is not reused before the child is reaped, which happens last.
    let signal = |signal| {
        let _result = kill_process_group(group, signal);
    };
    let waited = wait_for_exit(group, limit, stop);
    if waited.is_err() {
        signal(Signal::TERM);
        let _result = wait_for_exit(group, TERM_GRACE, &StopFlag::default());
    }
    // Kill the rest of its group, so that nothing keeps working in a directory that others use now.
    signal(Signal::KILL);
    let status = child.wait();
    drop(writer);
    waited?;
    let status = status.map_err(SubprocessError::NotStarted)?;
    let (stdout, stdout_truncated) = stdout.finish();
    let (stderr, stderr_truncated) = stderr.finish();
    Ok(SubprocessOutput { status, stdout, stderr, truncated: stdout_truncated || stderr_truncated })
}

/// Waits until the process has exited, without reaping it.
fn wait_for_exit(child: Pid, limit: Duration, stop: &StopFlag) -> Result<(), SubprocessError> {
    let until = Instant::now() + limit;
    let mut pause = POLL_MIN;
    loop {
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
        match waitid(WaitId::Pid(child), options) {
            Ok(Some(_)) => return Ok(()),
            Ok(None) if stop.is_set() => return Err(SubprocessError::Stopped),
            Ok(None) if Instant::now() >= until => return Err(SubprocessError::TimedOut),
            Ok(None) => {}
            Err(error) => return Err(SubprocessError::NotStarted(error.into())),
        }
        std::thread::sleep(pause);
        pause = (pause * 2).min(POLL_MAX);
    }
}

/// Writes the input on a thread of its own, so that neither side blocks the other.
fn write_input(child: &mut Child, input: Vec<u8>) -> Option<JoinHandle<()>> {
    use std::io::Write;
    let mut pipe = child.stdin.take()?;
    Some(std::thread::spawn(move || {
        // A program that does not read all of its input reports that by its exit status.
        let _result = pipe.write_all(&input);
    }))
}

/// Reads a pipe to its end and keeps a part of it.
struct SubprocessReader {
    output: Arc<Mutex<(Vec<u8>, bool)>>,
    thread: Option<JoinHandle<()>>,
}

impl SubprocessReader {
    fn of(pipe: Option<impl Read + Send + 'static>, limit: OutputLimit) -> Self {
        let output: Arc<Mutex<(Vec<u8>, bool)>> = Arc::default();
        let thread = pipe.map(|mut pipe| {
            let output = Arc::clone(&output);
            std::thread::spawn(move || {
                let mut buffer = vec![0; 64 << 10];
                while let Ok(read @ 1..) = pipe.read(&mut buffer) {
                    let mut output = output.lock();
                    append_output(&mut output, &buffer[..read], limit);
                }
            })
        });
        Self { output, thread }
    }

    fn finish(self) -> (Vec<u8>, bool) {
        let until = Instant::now() + OUTPUT_GRACE;
        let mut pause = POLL_MIN;
        while self.thread.as_ref().is_some_and(|thread| !thread.is_finished()) && Instant::now() < until {
            std::thread::sleep(pause);
            pause = (pause * 2).min(POLL_MAX);
        }
        std::mem::take(&mut *self.output.lock())
    }
}

fn append_output((output, truncated): &mut (Vec<u8>, bool), more: &[u8], limit: OutputLimit) {
    match limit {
        OutputLimit::Head(max) => {
            let taken = max.saturating_sub(output.len()).min(more.len());
            output.extend_from_slice(&more[..taken]);
            *truncated |= taken < more.len();
        }
        OutputLimit::Tail(max) => {
            output.extend_from_slice(more);
            if output.len() > max {
                output.drain(..output.len() - max);
                *truncated = true;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sh(line: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", line]);
        command
    }

    fn run_within(
        line: &str,
        time_limit: Duration,
        limit: OutputLimit,
    ) -> Result<SubprocessOutput, SubprocessError> {
        run(sh(line), None, time_limit, limit, &StopFlag::default())
    }

    const LONG: Duration = Duration::from_secs(60);

    #[test]
    fn what_is_kept_is_the_beginning_or_the_end() {
        let head = run_within("printf 0123456789", LONG, OutputLimit::Head(4)).unwrap();
        assert_eq!((head.stdout.as_slice(), head.truncated), (&b"0123"[..], true));
        let tail = run_within("printf 0123456789", LONG, OutputLimit::Tail(4)).unwrap();
        assert_eq!((tail.stdout.as_slice(), tail.truncated), (&b"6789"[..], true));
        let all = run_within("printf 0123; exit 3", LONG, OutputLimit::Head(4)).unwrap();
        assert_eq!(
            (all.stdout.as_slice(), all.truncated, all.describe_exit().as_str()),
            (&b"0123"[..], false, "exit status 3")
        );
    }

    #[test]
    fn one_that_takes_too_long_is_stopped() {
        let error = run_within("sleep 1000", Duration::from_millis(20), OutputLimit::Head(9)).unwrap_err();
        assert!(matches!(error, SubprocessError::TimedOut), "{error:?}");
    }

    #[test]
    fn a_stop_ends_it_with_what_it_started() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("pid");
        let line = format!("sleep 1000 & echo $! > {0}.new; mv {0}.new {0}; wait", file.display());
        let stop = StopFlag::default();
        let thread_stop = stop.clone();
        let running =
            std::thread::spawn(move || run(sh(&line), None, LONG, OutputLimit::Head(9), &thread_stop));
        let until = Instant::now() + LONG;
        while !file.exists() {
            assert!(Instant::now() < until, "the command does not start");
            std::thread::yield_now();
        }
        stop.set();
        assert!(matches!(running.join().unwrap(), Err(SubprocessError::Stopped)));
        let pid: i32 = std::fs::read_to_string(file).unwrap().trim().parse().unwrap();
        // A zombie that its new parent has not reaped counts as dead.
        let is_dead = || {
            std::fs::read_to_string(format!("/proc/{pid}/stat")).map_or(true, |stat| stat.contains(") Z "))
        };
        while !is_dead() {
            assert!(Instant::now() < until, "{pid} is still alive");
            std::thread::yield_now();
        }
    }

    #[test]
    fn what_is_written_to_it_is_read() {
        let output =
            run(sh("cat"), Some(b"words".to_vec()), LONG, OutputLimit::Head(9), &StopFlag::default())
                .unwrap();
        assert_eq!(output.stdout, b"words");
    }
}
