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
const PAUSE: Duration = Duration::from_millis(1);
/// The longest pause between two looks.
const PAUSE_MAX: Duration = Duration::from_millis(20);
/// How long it is given to tidy up after itself when it is to stop; git removes its locks.
const TIDY: Duration = Duration::from_secs(2);
/// How long its output is waited for after its end: somebody it left behind may hold the pipe for ever.
const LAST_WORDS: Duration = Duration::from_secs(2);

/// Says to whatever runs with it that nobody wants it any more. Clones are the same one.
#[derive(Debug, Clone, Default)]
pub struct Stop(Arc<AtomicBool>);

impl Stop {
    /// From now on nothing goes on.
    pub fn now(&self) {
        self.0.store(true, Ordering::SeqCst);
    }

    /// Whether it is to stop.
    pub fn is_set(&self) -> bool {
        self.0.load(Ordering::SeqCst)
    }
}

/// What part of an output is kept when it is too long.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Keep {
    /// Its beginning, so many bytes.
    Head(usize),
    /// Its end, so many bytes.
    Tail(usize),
}

/// How it ended, and what it said.
#[derive(Debug)]
pub struct Ended {
    /// Its status.
    pub status: ExitStatus,
    /// Its standard output.
    pub out: Vec<u8>,
    /// Its standard error.
    pub err: Vec<u8>,
    /// Whether some of the output is not here.
    pub cut: bool,
}

impl Ended {
    /// How it ended, for people.
    pub fn how(&self) -> String {
        match (self.status.code(), self.status.signal()) {
            (Some(code), _) => format!("exit status {code}"),
            (None, Some(signal)) => format!("killed by signal {signal}"),
            (None, None) => "an unknown end".to_owned(),
        }
    }
}

/// Why it has no end of its own.
#[derive(Debug)]
pub enum Broken {
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
    keep: Keep,
    stop: &Stop,
) -> Result<Ended, Broken> {
    if stop.is_set() {
        return Err(Broken::Stopped);
    }
    command.stdin(if input.is_some() { Stdio::piped() } else { Stdio::null() });
    command.stdout(Stdio::piped()).stderr(Stdio::piped()).process_group(0);
    let mut child = command.spawn().map_err(Broken::NotStarted)?;
    let out = Reader::of(child.stdout.take(), keep);
    let err = Reader::of(child.stderr.take(), keep);
    let writer = input.map(|input| feed(&mut child, input));
    let group = Pid::from_child(&child);
    // Its number is nobody else's until it is reaped, which comes last.
    let signal = |signal| {
        let _nobody_left = kill_process_group(group, signal);
    };
    let waited = wait(group, limit, stop);
    if waited.is_err() {
        signal(Signal::TERM);
        let _tidied = wait(group, TIDY, &Stop::default());
    }
    // What it left in its group goes with it, so that nothing of it works on in a directory that others now use.
    signal(Signal::KILL);
    let status = child.wait();
    drop(writer);
    waited?;
    let status = status.map_err(Broken::NotStarted)?;
    let (out, out_cut) = out.done();
    let (err, err_cut) = err.done();
    Ok(Ended { status, out, err, cut: out_cut || err_cut })
}

/// Waits until it has ended, and leaves it to be reaped.
fn wait(child: Pid, limit: Duration, stop: &Stop) -> Result<(), Broken> {
    let until = Instant::now() + limit;
    let mut pause = PAUSE;
    loop {
        let look = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
        match waitid(WaitId::Pid(child), look) {
            Ok(Some(_)) => return Ok(()),
            Ok(None) if stop.is_set() => return Err(Broken::Stopped),
            Ok(None) if Instant::now() >= until => return Err(Broken::TimedOut),
            Ok(None) => {}
            Err(error) => return Err(Broken::NotStarted(error.into())),
        }
        std::thread::sleep(pause);
        pause = (pause * 2).min(PAUSE_MAX);
    }
}

/// Writes beside the waiting, since neither side may wait for the other.
fn feed(child: &mut Child, input: Vec<u8>) -> Option<JoinHandle<()>> {
    use std::io::Write;
    let mut pipe = child.stdin.take()?;
    Some(std::thread::spawn(move || {
        // One that does not want to read all of it says so by its status.
        let _unread = pipe.write_all(&input);
    }))
}

/// Reads a pipe to its end, and keeps a part.
struct Reader {
    kept: Arc<Mutex<(Vec<u8>, bool)>>,
    thread: Option<JoinHandle<()>>,
}

impl Reader {
    fn of(pipe: Option<impl Read + Send + 'static>, keep: Keep) -> Self {
        let kept: Arc<Mutex<(Vec<u8>, bool)>> = Arc::default();
        let thread = pipe.map(|mut pipe| {
            let kept = Arc::clone(&kept);
            std::thread::spawn(move || {
                let mut buffer = vec![0; 64 << 10];
                while let Ok(read @ 1..) = pipe.read(&mut buffer) {
                    let mut kept = kept.lock().unwrap_or_else(PoisonError::into_inner);
                    add(&mut kept, &buffer[..read], keep);
                }
            })
        });
        Self { kept, thread }
    }

    fn done(self) -> (Vec<u8>, bool) {
        let until = Instant::now() + LAST_WORDS;
        let mut pause = PAUSE;
        while self.thread.as_ref().is_some_and(|thread| !thread.is_finished()) && Instant::now() < until {
            std::thread::sleep(pause);
            pause = (pause * 2).min(PAUSE_MAX);
        }
        std::mem::take(&mut *self.kept.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

fn add((kept, cut): &mut (Vec<u8>, bool), more: &[u8], keep: Keep) {
    match keep {
        Keep::Head(most) => {
            let room = most.saturating_sub(kept.len()).min(more.len());
            kept.extend_from_slice(&more[..room]);
            *cut |= room < more.len();
        }
        Keep::Tail(most) => {
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

    fn within(line: &str, limit: Duration, keep: Keep) -> Result<Ended, Broken> {
        run(sh(line), None, limit, keep, &Stop::default())
    }

    const LONG: Duration = Duration::from_secs(60);

    #[test]
    fn what_is_kept_is_the_beginning_or_the_end() {
        let head = within("printf 0123456789", LONG, Keep::Head(4)).unwrap();
        assert_eq!((head.out.as_slice(), head.cut), (&b"0123"[..], true));
        let tail = within("printf 0123456789", LONG, Keep::Tail(4)).unwrap();
        assert_eq!((tail.out.as_slice(), tail.cut), (&b"6789"[..], true));
        let all = within("printf 0123; exit 3", LONG, Keep::Head(4)).unwrap();
        assert_eq!((all.out.as_slice(), all.cut, all.how().as_str()), (&b"0123"[..], false, "exit status 3"));
    }

    #[test]
    fn one_that_takes_too_long_is_stopped() {
        let broken = within("sleep 1000", Duration::from_millis(20), Keep::Head(9)).unwrap_err();
        assert!(matches!(broken, Broken::TimedOut), "{broken:?}");
    }

    #[test]
    fn a_stop_ends_it_with_what_it_started() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("pid");
        let line = format!("sleep 1000 & echo $! > {0}.new; mv {0}.new {0}; wait", file.display());
        let stop = Stop::default();
        let other = stop.clone();
        let running = std::thread::spawn(move || run(sh(&line), None, LONG, Keep::Head(9), &other));
        let until = Instant::now() + LONG;
        while !file.exists() {
            assert!(Instant::now() < until, "it does not start");
            std::thread::yield_now();
        }
        stop.now();
        assert!(matches!(running.join().unwrap(), Err(Broken::Stopped)));
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
        let ended = run(sh("cat"), Some(b"words".to_vec()), LONG, Keep::Head(9), &Stop::default()).unwrap();
        assert_eq!(ended.out, b"words");
    }
}
