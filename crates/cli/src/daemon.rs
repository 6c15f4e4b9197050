//! Finds the daemon, or starts one in the background. Nothing here knows what a daemon does: only where it listens,
//! how it is started, and that nothing of the caller's may stay open in it.

use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, SeekFrom};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::Context as _;
use qd_daemon::home::DaemonHome;
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags};
use tokio::time::{Instant, sleep};

use crate::client::DaemonClient;
use crate::client::host::DaemonHost;
use crate::failure::{CliFailure, Result};
use crate::output::CliOutput;

/// How long a daemon may take to answer after its start, an old one's ending included.
const START_TIMEOUT: Duration = Duration::from_secs(20);
/// Between two looks at a daemon that starts.
const PROBE_INTERVAL: Duration = Duration::from_millis(2);
/// Between two starts while an old daemon lets go of the home.
const RESTART_INTERVAL: Duration = Duration::from_millis(100);
/// Bytes of a failed start's output that are shown.
const OUTPUT_TAIL_BYTES: u64 = 4096;

/// Which daemon, and whether one may be started.
#[derive(Debug, Clone)]
pub(crate) struct DaemonLocator {
    /// Where its files are, if it is ours.
    pub(crate) home: DaemonHome,
    /// Said by the caller; then nothing is started.
    pub(crate) explicit_host: Option<DaemonHost>,
}

impl DaemonLocator {
    /// Whether workers of a daemon that is gone may be at work in the home.
    pub(crate) fn has_workers(&self) -> bool {
        let records = std::fs::read_dir(self.home.workers());
        let is_record = |path: std::path::PathBuf| path.extension().is_some_and(|ext| ext == "json");
        self.explicit_host.is_none()
            && records.is_ok_and(|all| all.flatten().any(|entry| is_record(entry.path())))
    }

    /// Where the command line named no daemon, `QD_HOST` may.
    pub(crate) fn apply_environment(&mut self) -> Result<()> {
        let said = std::env::var("QD_HOST").ok().filter(|host| !host.is_empty());
        if let (None, Some(host)) = (&self.explicit_host, said) {
            let host =
                host.parse().map_err(|forms| CliFailure::Usage(format!("QD_HOST is {host}, but {forms}")))?;
            self.explicit_host = Some(host);
        }
        Ok(())
    }

    /// A client of the daemon that is there, or of one that is started for it; and of the next one, should it die.
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

    /// A client of the daemon that is there; none is started.
    pub(crate) async fn connect(&self, out: &CliOutput) -> Result<DaemonClient> {
        let client = self.client()?;
        let version = match client.probe().await {
            // One that is going down counts as gone.
            Err(CliFailure::Refused(refusal)) if refusal.status == 503 => {
                return Err(CliFailure::Unreachable(refusal.error.message));
            }
            other => other?,
        };
        let ours = env!("CARGO_PKG_VERSION");
        if let Some(theirs) = version.filter(|theirs| theirs != ours) {
            out.print_note(&format!("the daemon is version {theirs}, this qd is {ours}; `qd stop` ends it, the next verb starts yours"));
        }
        Ok(client)
    }

    /// A client that speaks for a session with its token. Nothing is started for it: whoever has one has a daemon.
    pub(crate) fn session_client(&self, token: String) -> DaemonClient {
        let host = self.explicit_host.clone().unwrap_or_else(|| DaemonHost::Unix(self.home.socket()));
        DaemonClient::new(host, Some(token))
    }

    /// A client that has not asked anything yet.
    fn client(&self) -> Result<DaemonClient> {
        let host = self.explicit_host.clone().unwrap_or_else(|| DaemonHost::Unix(self.home.socket()));
        let token = match &host {
            DaemonHost::Unix(_) => None,
            DaemonHost::Tcp { .. } => read_token(&self.home),
        };
        Ok(DaemonClient::new(host, token))
    }

    /// Starts a daemon, unless somebody else just did.
    async fn start_daemon(&self, out: &CliOutput) -> Result<DaemonClient> {
        self.home.prepare().context("the daemon has no home")?;
        let _turn = acquire_start_lock(&self.home.path().join("start.lock")).await?;
        let deadline = Instant::now() + START_TIMEOUT;
        loop {
            if let Ok(client) = self.connect(out).await {
                return Ok(client);
            }
            let (child, output, before) = spawn_daemon(&self.home)?;
            if let Some(client) = self.wait_until_answering(out, child, deadline).await {
                return Ok(client);
            }
            // An old daemon that is ending still holds the home; its place is free in a moment.
            if !is_home_locked(&self.home) || Instant::now() > deadline {
                return Err(CliFailure::Unreachable(format!(
                    "the daemon did not start\n{}",
                    read_output_tail(output, before)
                )));
            }
            sleep(RESTART_INTERVAL).await;
        }
    }

    /// Waits until a started daemon answers; none if it ended first.
    async fn wait_until_answering(
        &self,
        out: &CliOutput,
        mut child: Child,
        deadline: Instant,
    ) -> Option<DaemonClient> {
        loop {
            let ended = !matches!(child.try_wait(), Ok(None));
            match self.connect(out).await {
                Ok(client) => return Some(client),
                Err(_) if ended || Instant::now() > deadline => return None,
                Err(_) => sleep(PROBE_INTERVAL).await,
            }
        }
    }
}

/// Puts a daemon in the place of one that has died under a verb that is still at work.
#[derive(Debug)]
pub(crate) struct DaemonRestarter {
    locator: DaemonLocator,
    out: CliOutput,
}

impl DaemonRestarter {
    /// Sees to it that a daemon answers, and says so if it had to be started.
    pub(crate) async fn ensure_running(&self) -> Result<()> {
        let Self { locator: whereabouts, out } = self;
        match whereabouts.connect(out).await {
            Err(CliFailure::Unreachable(_)) => {}
            found => return found.map(drop),
        }
        whereabouts.start_daemon(out).await?;
        out.print_note("the daemon was gone; another one has been started");
        Ok(())
    }

    /// Says that the daemon was stopped on purpose.
    pub(crate) fn note_stopped(&self, patience: Duration) {
        let seconds = patience.as_secs();
        self.out.print_note(&format!(
            "the daemon was stopped; waiting {seconds} s for the next (any `qd` verb starts one)"
        ));
    }
}

/// Leaves the caller's terminal and session and lets go of every descriptor that it left open in us, so that a pipe
/// of the caller closes when the caller ends. The first thing that `qd serve --background` does.
pub(crate) fn detach_from_caller() {
    // It fails only for a leader of its group, who has nobody to leave.
    let _ = rustix::process::setsid();
    let Ok(descriptors) = std::fs::read_dir("/proc/self/fd") else { return };
    let numbers = descriptors.flatten().filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    let listed: Vec<i32> = numbers.filter(|&number| number > 2).collect();
    // The folder itself was among them while it was read.
    let is_open = |number: &i32| std::fs::symlink_metadata(format!("/proc/self/fd/{number}")).is_ok();
    for number in listed.into_iter().filter(is_open) {
        #[expect(unsafe_code, reason = "no safe call closes a descriptor that somebody else opened")]
        // SAFETY: nothing of ours is open: this runs before the runtime, its threads or any file of ours exists.
        unsafe {
            rustix::io::close(number);
        }
    }
}

/// Waits until a process of this machine has ended, however its parent treats it.
pub(crate) fn wait_for_exit(pid: u32, patience: Duration) -> bool {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let Some(pid) = i32::try_from(pid).ok().and_then(Pid::from_raw) else { return true };
    let Ok(process) = rustix::process::pidfd_open(pid, PidfdFlags::empty()) else { return true };
    let patience = Timespec::try_from(patience).unwrap_or(Timespec { tv_sec: 1, tv_nsec: 0 });
    poll(&mut [PollFd::new(&process, PollFlags::IN)], Some(&patience)).is_ok_and(|ready| ready > 0)
}

/// The token for TCP: said by the caller, else the one that our home keeps.
fn read_token(home: &DaemonHome) -> Option<String> {
    let said = std::env::var("QD_TOKEN").ok().filter(|token| !token.is_empty());
    said.or_else(|| std::fs::read_to_string(home.token_file()).ok().map(|text| text.trim().to_owned()))
}

/// Waits for our turn to start a daemon, which is over when the file is dropped. Another task of this process may have
/// its turn, so the thread must not be kept from it.
async fn acquire_start_lock(path: &Path) -> Result<File> {
    let lock = open_private_file(path)?;
    loop {
        match flock(&lock, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(lock),
            Err(Errno::WOULDBLOCK | Errno::INTR) => sleep(PROBE_INTERVAL).await,
            Err(error) => {
                return Err(anyhow::Error::from(error).context("the start cannot be locked").into());
            }
        }
    }
}

/// Starts our own executable as a daemon, and gives where its output begins.
fn spawn_daemon(home: &DaemonHome) -> Result<(Child, File, u64)> {
    let exe = std::env::current_exe().context("this program's own file is not known")?;
    let output = open_private_file(&home.log().join("daemon.out"))?;
    let before = output.metadata().context("the daemon's output has no size")?.len();
    let mut command = Command::new(&exe);
    command
        .args(["serve", "--background", "--home"])
        .arg(home.path())
        .env_remove("QD_HOST")
        .env_remove("QD_TOKEN")
        .current_dir(home.path())
        .stdin(Stdio::null())
        .stdout(output.try_clone().context("the daemon's output cannot be shared")?)
        .stderr(output.try_clone().context("the daemon's output cannot be shared")?);
    let child = command.spawn().with_context(|| format!("{} does not start", exe.display()))?;
    Ok((child, output, before))
}

/// Whether a living process holds the home, as its lock file says.
fn is_home_locked(home: &DaemonHome) -> bool {
    let holder = std::fs::read_to_string(home.path().join("lock")).unwrap_or_default();
    let pid = holder.trim().parse().ok().and_then(Pid::from_raw);
    pid.is_some_and(|pid| rustix::process::test_kill_process(pid).is_ok())
}

fn open_private_file(path: &Path) -> Result<File> {
    let file = OpenOptions::new().read(true).append(true).create(true).mode(0o600).open(path);
    Ok(file.with_context(|| format!("{} cannot be opened", path.display()))?)
}

/// The end of what a failed daemon wrote.
fn read_output_tail(mut output: File, before: u64) -> String {
    let end = output.metadata().map_or(before, |meta| meta.len());
    let from = before.max(end.saturating_sub(OUTPUT_TAIL_BYTES));
    let mut bytes = Vec::new();
    let read = output.seek(SeekFrom::Start(from)).and_then(|_| output.read_to_end(&mut bytes));
    match read {
        Ok(0) => "it said nothing".to_owned(),
        Ok(_) => String::from_utf8_lossy(&bytes).trim_end().to_owned(),
        Err(error) => format!("and its output cannot be read: {error}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_this_start_said_is_shown() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("daemon.out");
        std::fs::write(&path, "old words\n").unwrap();
        let file = open_private_file(&path).unwrap();
        let before = file.metadata().unwrap().len();
        assert_eq!(read_output_tail(open_private_file(&path).unwrap(), before), "it said nothing");
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
        assert!(wait_for_exit(u32::MAX, Duration::ZERO), "what is no process has ended");
    }
}
