//! A program run to its end: within a limit of time, with an end to what is kept of its output, and stopped with all that
//! it started in its process group when nobody wants it any more.

use std::io::{self, Read};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process_group, waitid};

/// The first pause between two looks whether it has ended; doubled up to [`PAUSE_MAX`].
const POLL_MIN: Duration = Duration::from_millis(1);
/// The longest pause between two looks.
const POLL_MAX: Duration = Duration::from_millis(20);
/// How long it is given to tidy up after itself when it is to stop; git removes its locks.
const TERM_GRACE: Duration = Duration::from_secs(2);
/// How long its output is waited for after its end: somebody it left behind may hold the pipe for ever.
const OUTPUT_GRACE: Duration = Duration::from_secs(2);

/// Says to whatever runs with it that nobody wants it any more. Clones are the same one.
#[derive(Debug, Clone, Default)]
pub struct StopFlag(Arc<AtomicBool>);

impl StopFlag {
    /// From now on nothing goes on.
    pub fn set(&self) {
        self.0.store(true, Ordering::SeqCst);
    }

    /// Whether it is to stop.
    pub fn is_set(&self) -> bool {
        self.0.load(Ordering::SeqCst)
    }
}

/// What part of an output is kept when it is too long.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OutputLimit {
    /// Its beginning, so many bytes.
    Head(usize),
    /// Its end, so many bytes.
    Tail(usize),
}

/// How it ended, and what it said.
#[derive(Debug)]
pub struct SubprocessOutput {
    /// Its status.
    pub status: ExitStatus,
    /// Its standard output.
    pub stdout: Vec<u8>,
    /// Its standard error.
    pub stderr: Vec<u8>,
    /// Whether some of the output is not here.
    pub truncated: bool,
}

impl SubprocessOutput {
    /// How it ended, for people.
    pub fn describe_exit(&self) -> String {
        match (self.status.code(), self.status.signal()) {
            (Some(code), _) => format!("exit status {code}"),
            (None, Some(signal)) => format!("killed by signal {signal}"),
            (None, None) => "an unknown end".to_owned(),
        }
    }
}

/// Why it has no end of its own.
#[derive(Debug)]
pub enum SubprocessError {
    /// It did not start.
    NotStarted(io::Error),
    /// It took too long.
    TimedOut,
    /// It was stopped.
    Stopped,
}

/// Runs a command to its end. Its standard input is `input`, or nothing.
pub fn run(
    mut command: Command,
    input: Option<Vec<u8>>,
    limit: Duration,
    keep: OutputLimit,
    stop: &StopFlag,
) -> Result<SubprocessOutput, SubprocessError> {
    if stop.is_set() {
        return Err(SubprocessError::Stopped);
    }
    command.stdin(if input.is_some() { Stdio::piped() } else { Stdio::null() });
    command.stdout(Stdio::piped()).stderr(Stdio::piped()).process_group(0);
    let mut child = command.spawn().map_err(SubprocessError::NotStarted)?;
    let out = SubprocessReader::of(child.stdout.take(), keep);
    let err = SubprocessReader::of(child.stderr.take(), keep);
    let writer = input.map(|input| write_input(&mut child, input));
    let group = Pid::from_child(&child);
    // Its number is nobody else's until it is reaped, which comes last.
    let signal = |signal| {
        let _nobody_left = kill_process_group(group, signal);
    };
    let waited = wait_for_exit(group, limit, stop);
    if waited.is_err() {
        signal(Signal::TERM);
        let _tidied = wait_for_exit(group, TERM_GRACE, &StopFlag::default());
    }
    // What it left in its group goes with it, so that nothing of it works on in a directory that others now use.
    signal(Signal::KILL);
    let status = child.wait();
    drop(writer);
    waited?;
    let status = status.map_err(SubprocessError::NotStarted)?;
    let (out, out_cut) = out.finish();
    let (err, err_cut) = err.finish();
    Ok(SubprocessOutput { status, stdout: out, stderr: err, truncated: out_cut || err_cut })
}

/// Waits until it has ended, and leaves it to be reaped.
fn wait_for_exit(child: Pid, limit: Duration, stop: &StopFlag) -> Result<(), SubprocessError> {
    let until = Instant::now() + limit;
    let mut pause = POLL_MIN;
    loop {
        let look = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
        match waitid(WaitId::Pid(child), look) {
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

/// Writes beside the waiting, since neither side may wait for the other.
fn write_input(child: &mut Child, input: Vec<u8>) -> Option<JoinHandle<()>> {
    use std::io::Write;
    let mut pipe = child.stdin.take()?;
    Some(std::thread::spawn(move || {
        // One that does not want to read all of it says so by its status.
        let _unread = pipe.write_all(&input);
    }))
}

/// Reads a pipe to its end, and keeps a part.
struct SubprocessReader {
    output: Arc<Mutex<(Vec<u8>, bool)>>,
    thread: Option<JoinHandle<()>>,
}

impl SubprocessReader {
    fn of(pipe: Option<impl Read + Send + 'static>, keep: OutputLimit) -> Self {
        let output: Arc<Mutex<(Vec<u8>, bool)>> = Arc::default();
        let thread = pipe.map(|mut pipe| {
            let kept = Arc::clone(&output);
            std::thread::spawn(move || {
                let mut buffer = vec![0; 64 << 10];
                while let Ok(read @ 1..) = pipe.read(&mut buffer) {
                    let mut kept = kept.lock().unwrap_or_else(PoisonError::into_inner);
                    append_output(&mut kept, &buffer[..read], keep);
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
        std::mem::take(&mut *self.output.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

fn append_output((kept, cut): &mut (Vec<u8>, bool), more: &[u8], keep: OutputLimit) {
    match keep {
        OutputLimit::Head(most) => {
            let room = most.saturating_sub(kept.len()).min(more.len());
            kept.extend_from_slice(&more[..room]);
            *cut |= room < more.len();
        }
        OutputLimit::Tail(most) => {
            kept.extend_from_slice(more);
            if kept.len() > most {
                kept.drain(..kept.len() - most);
                *cut = true;
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
        limit: Duration,
        keep: OutputLimit,
    ) -> Result<SubprocessOutput, SubprocessError> {
        run(sh(line), None, limit, keep, &StopFlag::default())
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
        let broken = run_within("sleep 1000", Duration::from_millis(20), OutputLimit::Head(9)).unwrap_err();
        assert!(matches!(broken, SubprocessError::TimedOut), "{broken:?}");
    }

    #[test]
    fn a_stop_ends_it_with_what_it_started() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("pid");
        let line = format!("sleep 1000 & echo $! > {0}.new; mv {0}.new {0}; wait", file.display());
        let stop = StopFlag::default();
        let other = stop.clone();
        let running = std::thread::spawn(move || run(sh(&line), None, LONG, OutputLimit::Head(9), &other));
        let until = Instant::now() + LONG;
        while !file.exists() {
            assert!(Instant::now() < until, "it does not start");
            std::thread::yield_now();
        }
        stop.set();
        assert!(matches!(running.join().unwrap(), Err(SubprocessError::Stopped)));
        let pid: i32 = std::fs::read_to_string(file).unwrap().trim().parse().unwrap();
        // Dead and not reaped by whoever it fell to counts as dead.
        let gone = || {
            std::fs::read_to_string(format!("/proc/{pid}/stat")).map_or(true, |stat| stat.contains(") Z "))
        };
        while !gone() {
            assert!(Instant::now() < until, "{pid} lives on");
            std::thread::yield_now();
        }
    }

    #[test]
    fn what_is_written_to_it_is_read() {
        let ended = run(sh("cat"), Some(b"words".to_vec()), LONG, OutputLimit::Head(9), &StopFlag::default())
            .unwrap();
        assert_eq!(ended.stdout, b"words");
    }
}
