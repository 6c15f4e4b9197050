//! Finds the daemon, or starts one in the background. This file knows only where a daemon listens and how it is started
//! without inheriting the caller's descriptors.

use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, SeekFrom};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::Context as _;
use qd_home::DaemonHome;
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags};
use tokio::time::{Instant, sleep};

use crate::client::DaemonClient;
use crate::client::host::DaemonHost;
use crate::client::liveness::{describe_silent_process, is_process_stopped};
use crate::failure::{CliFailure, Result};
use crate::output::CliOutput;

/// How long a started daemon may take to answer, including the time an old daemon needs to exit.
const START_TIMEOUT: Duration = Duration::from_secs(20);
/// How long to wait for other commands that start the daemon: longer than one of them may take.
const START_LOCK_TIMEOUT: Duration = Duration::from_secs(40);
/// Between two probes of a daemon that is starting.
const PROBE_INTERVAL: Duration = Duration::from_millis(2);
/// Between two attempts to start a daemon while an old one still holds the home.
const RESTART_INTERVAL: Duration = Duration::from_millis(100);
/// How much of a failed daemon's output is shown.
const OUTPUT_TAIL_BYTES: u64 = 4096;

/// Which daemon to talk to, and whether one may be started.
#[derive(Debug, Clone)]
pub(crate) struct DaemonLocator {
    pub(crate) home: DaemonHome,
    /// From `--host` or `QD_HOST`. If set, no daemon is ever started.
    pub(crate) explicit_host: Option<DaemonHost>,
}

impl DaemonLocator {
    /// Whether the home has records of workers that may have outlived their daemon.
    pub(crate) fn has_workers(&self) -> bool {
        let records = std::fs::read_dir(self.home.workers());
        let is_record = |path: std::path::PathBuf| path.extension().is_some_and(|ext| ext == "json");
        self.explicit_host.is_none()
            && records.is_ok_and(|all| all.flatten().any(|entry| is_record(entry.path())))
    }

    /// Uses `QD_HOST` if there was no `--host`.
    pub(crate) fn apply_environment(&mut self) -> Result<()> {
        let variable = std::env::var("QD_HOST").ok().filter(|host| !host.is_empty());
        if let (None, Some(host)) = (&self.explicit_host, variable) {
            let host =
                host.parse().map_err(|forms| CliFailure::Usage(format!("QD_HOST is {host}, but {forms}")))?;
            self.explicit_host = Some(host);
        }
        Ok(())
    }

    /// A client of the running daemon. Starts a daemon if none answers, and again if it dies while the verb runs.
    pub(crate) async fn connect_or_start(&self, out: &CliOutput) -> Result<DaemonClient> {
        if self.explicit_host.is_some() {
            return self.connect(out).await;
        }
        let client = match self.connect(out).await {
            Err(CliFailure::Unreachable(_)) => self.start_daemon(out).await?,
            found => found?,
        };
        Ok(client.with_restarter(DaemonRestarter { locator: self.clone(), out: out.clone() }))
    }

    /// A client of the running daemon. Fails with `Unreachable` if there is none, and with `Unresponsive` if there is one
    /// that does not answer.
    pub(crate) async fn connect(&self, out: &CliOutput) -> Result<DaemonClient> {
        self.check_connection(self.client()?.with_notes(out), out).await
    }

    async fn check_connection(&self, client: DaemonClient, out: &CliOutput) -> Result<DaemonClient> {
        let version = match client.probe().await {
            // A daemon that is shutting down counts as gone.
            Err(CliFailure::Refused(refusal)) if refusal.status == 503 => {
                return Err(CliFailure::Unreachable(refusal.error.message));
            }
            other => other?,
        };
        let ours = env!("CARGO_PKG_VERSION");
        if let Some(theirs) = version.filter(|theirs| theirs != ours) {
            out.print_note(&format!(
                "the daemon is version {theirs}, but this qd is {ours}; after `qd stop` the next command starts {ours}"
            ));
        }
        Ok(client)
    }

    /// A client that acts for a session with the session's token. Never starts a daemon: the token came from one.
    pub(crate) fn session_client(&self, token: String) -> DaemonClient {
        let host = self.explicit_host.clone().unwrap_or_else(|| DaemonHost::Unix(self.home.socket()));
        DaemonClient::new(host, Some(token))
    }

    /// A client that has not connected yet. It starts no daemon and prints nothing.
    pub(crate) fn client(&self) -> Result<DaemonClient> {
        let host = self.explicit_host.clone().unwrap_or_else(|| DaemonHost::Unix(self.home.socket()));
        let token = match &host {
            DaemonHost::Unix(_) => None,
            DaemonHost::Tcp { .. } => read_token(&self.home),
        };
        Ok(DaemonClient::new(host, token))
    }

    /// Starts a daemon, unless another process has just done so. Fails below an agent, which may not start one.
    async fn start_daemon(&self, out: &CliOutput) -> Result<DaemonClient> {
        if qd_keeper::descends_from_agent(std::process::id()) {
            return Err(CliFailure::Unreachable(
                "no daemon is running, and an agent may not start one; start it from a shell of your own"
                    .to_owned(),
            ));
        }
        self.home.prepare().context("cannot prepare the daemon's home")?;
        let _lock = acquire_start_lock(&self.home.path().join("start.lock")).await?;
        let deadline = Instant::now() + START_TIMEOUT;
        loop {
            match self.connect(out).await {
                // Only if nobody listens: a daemon that does not answer still holds the home.
                Err(CliFailure::Unreachable(_)) => {}
                found => return found,
            }
            if let Some(pid) = lock_holder(&self.home).filter(|&pid| is_process_stopped(pid)) {
                return Err(CliFailure::Unresponsive(describe_silent_process(pid)));
            }
            let (child, output, before) = spawn_daemon(&self.home)?;
            if let Some(client) = self.wait_until_answering(out, child, deadline).await {
                return Ok(client);
            }
            // An old daemon that is exiting still holds the home. Try again in a moment.
            if lock_holder(&self.home).is_none() || Instant::now() > deadline {
                return Err(CliFailure::Unreachable(format!(
                    "the daemon did not start\n{}",
                    read_output_tail(output, before)
                )));
            }
            sleep(RESTART_INTERVAL).await;
        }
    }

    /// Waits until a started daemon answers. `None` if it exits first or the deadline passes.
    async fn wait_until_answering(
        &self,
        out: &CliOutput,
        mut child: Child,
        deadline: Instant,
    ) -> Option<DaemonClient> {
        loop {
            let exited = !matches!(child.try_wait(), Ok(None));
            // Without notes: a daemon that is starting listens a little earlier than it answers.
            match self.check_connection(self.client().ok()?, out).await {
                Ok(client) => return Some(client.with_notes(out)),
                Err(_) if exited || Instant::now() > deadline => return None,
                Err(_) => sleep(PROBE_INTERVAL).await,
            }
        }
    }
}

/// Starts a new daemon when the old one dies while a verb is still running.
#[derive(Debug)]
pub(crate) struct DaemonRestarter {
    locator: DaemonLocator,
    out: CliOutput,
}

impl DaemonRestarter {
    /// Makes sure that a daemon answers, and prints a note if one had to be started.
    pub(crate) async fn ensure_running(&self) -> Result<()> {
        let Self { locator, out } = self;
        match locator.connect(out).await {
            Err(CliFailure::Unreachable(_)) => {}
            found => return found.map(drop),
        }
        locator.start_daemon(out).await?;
        out.print_note("the daemon was gone; another one has been started");
        Ok(())
    }

    /// Prints that the daemon was stopped on purpose.
    pub(crate) fn note_stopped(&self, timeout: Duration) {
        let seconds = timeout.as_secs();
        self.out.print_note(&format!(
            "the daemon was stopped; waiting {seconds} s for a new one (any `qd` command starts it)"
        ));
    }
}

/// Leaves the caller's terminal and process session and closes every inherited descriptor, so a pipe of the caller
/// closes when the caller exits. `qd serve --background` calls this first.
pub(crate) fn detach_from_caller() {
    // Fails only for the leader of a process group, which is harmless.
    let _ = rustix::process::setsid();
    let Ok(descriptors) = std::fs::read_dir("/proc/self/fd") else { return };
    let numbers = descriptors.flatten().filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    let listed: Vec<i32> = numbers.filter(|&number| number > 2).collect();
    // The list includes the descriptor of the directory itself, which is closed by now.
    let is_open = |number: &i32| std::fs::symlink_metadata(format!("/proc/self/fd/{number}")).is_ok();
    for number in listed.into_iter().filter(is_open) {
        #[expect(unsafe_code, reason = "no safe call closes a descriptor that was inherited")]
        // SAFETY: none of these descriptors is owned by this program: the runtime, threads and files do not exist yet.
        unsafe {
            rustix::io::close(number);
        }
    }
}

/// Waits until a local process has exited, even if its parent has not reaped it. False after `timeout`.
pub(crate) fn wait_for_exit(pid: u32, timeout: Duration) -> bool {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let Some(pid) = i32::try_from(pid).ok().and_then(Pid::from_raw) else { return true };
    let Ok(process) = rustix::process::pidfd_open(pid, PidfdFlags::empty()) else { return true };
    let timeout = Timespec::try_from(timeout).unwrap_or(Timespec { tv_sec: 1, tv_nsec: 0 });
    poll(&mut [PollFd::new(&process, PollFlags::IN)], Some(&timeout)).is_ok_and(|ready| ready > 0)
}

/// The token for TCP connections: from `QD_TOKEN`, else from the file in the home.
fn read_token(home: &DaemonHome) -> Option<String> {
    let variable = std::env::var("QD_TOKEN").ok().filter(|token| !token.is_empty());
    variable.or_else(|| std::fs::read_to_string(home.token_file()).ok().map(|text| text.trim().to_owned()))
}

/// Acquires the lock for starting a daemon; dropping the file releases it. Polls instead of blocking, because another
/// task on this thread may hold the lock.
async fn acquire_start_lock(path: &Path) -> Result<File> {
    let lock = open_private_file(path)?;
    let deadline = Instant::now() + START_LOCK_TIMEOUT;
    loop {
        match flock(&lock, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(lock),
            Err(Errno::WOULDBLOCK) if Instant::now() > deadline => {
                return Err(CliFailure::Unresponsive(format!(
                    "another qd command is starting the daemon and has not finished within {} s; `fuser {}` names it",
                    START_LOCK_TIMEOUT.as_secs(),
                    path.display()
                )));
            }
            Err(Errno::WOULDBLOCK | Errno::INTR) => sleep(PROBE_INTERVAL).await,
            Err(error) => {
                let context = format!("cannot lock {}", path.display());
                return Err(anyhow::Error::from(error).context(context).into());
            }
        }
    }
}

/// Starts this executable as a daemon. Returns its output file and the offset at which its output begins.
fn spawn_daemon(home: &DaemonHome) -> Result<(Child, File, u64)> {
    let exe = std::env::current_exe().context("cannot find the path of the qd executable")?;
    let output = open_private_file(&home.log().join("daemon.out"))?;
    let before = output.metadata().context("cannot read the size of daemon.out")?.len();
    let mut command = Command::new(&exe);
    command
        .args(["serve", "--background", "--home"])
        .arg(home.path())
        .env_remove("QD_HOST")
        .env_remove("QD_TOKEN")
        .current_dir(home.path())
        .stdin(Stdio::null())
        .stdout(output.try_clone().context("cannot duplicate the descriptor of daemon.out")?)
        .stderr(output.try_clone().context("cannot duplicate the descriptor of daemon.out")?);
    let child = command.spawn().with_context(|| format!("cannot start {}", exe.display()))?;
    Ok((child, output, before))
}

/// The process named in the home's lock file, if it is alive.
fn lock_holder(home: &DaemonHome) -> Option<u32> {
    let holder = std::fs::read_to_string(home.path().join("lock")).ok()?;
    let pid = holder.trim().parse().ok().and_then(Pid::from_raw)?;
    rustix::process::test_kill_process(pid).ok()?;
    u32::try_from(pid.as_raw_nonzero().get()).ok()
}

fn open_private_file(path: &Path) -> Result<File> {
    let file = OpenOptions::new().read(true).append(true).create(true).mode(0o600).open(path);
    Ok(file.with_context(|| format!("cannot open {}", path.display()))?)
}

/// The end of a failed daemon's output, from the offset `before` on.
fn read_output_tail(mut output: File, before: u64) -> String {
    let end = output.metadata().map_or(before, |meta| meta.len());
    let from = before.max(end.saturating_sub(OUTPUT_TAIL_BYTES));
    let mut bytes = Vec::new();
    let read = output.seek(SeekFrom::Start(from)).and_then(|_| output.read_to_end(&mut bytes));
    match read {
        Ok(0) => "it printed nothing".to_owned(),
        Ok(_) => String::from_utf8_lossy(&bytes).trim_end().to_owned(),
        Err(error) => format!("its output cannot be read: {error}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_output_of_this_start_is_shown() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("daemon.out");
        std::fs::write(&path, "old words\n").unwrap();
        let file = open_private_file(&path).unwrap();
        let before = file.metadata().unwrap().len();
        assert_eq!(read_output_tail(open_private_file(&path).unwrap(), before), "it printed nothing");
        std::io::Write::write_all(&mut &file, b"the port is taken\n").unwrap();
        assert_eq!(read_output_tail(file, before), "the port is taken");
    }

    #[tokio::test]
    async fn two_tasks_of_one_thread_start_a_daemon_one_after_the_other() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("start.lock");
        let first = acquire_start_lock(&path).await.unwrap();
        let second = tokio::spawn(async move { acquire_start_lock(&path).await.map(drop) });
        tokio::task::yield_now().await;
        assert!(!second.is_finished());
        drop(first);
        second.await.unwrap().unwrap();
    }

    #[test]
    fn the_end_of_a_process_is_seen_although_nobody_reaped_it() {
        let mut child = Command::new("/bin/true").spawn().unwrap();
        assert!(wait_for_exit(child.id(), Duration::from_secs(20)));
        child.wait().unwrap();
        assert!(wait_for_exit(u32::MAX, Duration::ZERO), "a pid without a process counts as exited");
    }
}
