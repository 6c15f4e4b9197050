//! A temporary home and any `qd` command in it, with an isolated environment. Dropping the home kills, by pid, the
//! daemon that still answers on its socket, even one that a command started, and the workers, which would outlive the
//! daemon.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWriteExt};
use tokio::process::{Child, Command};

use crate::within;

/// The binary under test: `QD_BIN`, or else the `qd` that was built beside this test.
pub fn binary() -> PathBuf {
    if let Some(path) = std::env::var_os("QD_BIN") {
        return path.into();
    }
    let test_binary = std::env::current_exe().expect("a process knows its own file");
    let target = test_binary.parent().and_then(Path::parent).expect("tests are built in target/PROFILE/deps");
    target.join("qd")
}

/// A temporary directory that contains a home (not created yet), a project and a user's home.
#[derive(Debug)]
pub struct TestHome {
    dir: tempfile::TempDir,
    /// The test makes a session that nothing would wake.
    expects_stuck_sessions: AtomicBool,
}

/// What a daemon logs when it finds a session that it had forgotten.
const STUCK_SESSION_LOG: &str = "has nothing that will wake it";

impl TestHome {
    /// Always below `/tmp`, whatever `TMPDIR` says, because a socket path may have at most 107 bytes.
    pub fn new() -> Self {
        let dir = tempfile::Builder::new().prefix("qd").tempdir_in("/tmp").expect("/tmp can be written");
        std::fs::create_dir(dir.path().join("work")).expect("a fresh directory takes a directory");
        Self { dir, expects_stuck_sessions: AtomicBool::new(false) }
    }

    /// Allows the daemon to find a session that nothing would wake. Otherwise that fails the test.
    pub fn expect_stuck_sessions(&self) {
        self.expects_stuck_sessions.store(true, Ordering::Relaxed);
    }

    /// The lines in which a daemon reported a session that nothing would have woken.
    pub fn stuck_sessions(&self) -> Vec<String> {
        let logs = std::fs::read_dir(self.path().join("log")).into_iter().flatten().flatten();
        let logs = logs.map(|entry| entry.path()).chain([self.sibling_path("serve.stderr")]);
        let text: String = logs.filter_map(|log| std::fs::read_to_string(log).ok()).collect();
        text.lines().filter(|line| line.contains(STUCK_SESSION_LOG)).map(str::to_owned).collect()
    }

    /// `QD_HOME`. The daemon creates it.
    pub fn path(&self) -> PathBuf {
        self.dir.path().join("home")
    }

    /// Where the daemon listens by default.
    pub fn socket(&self) -> PathBuf {
        self.path().join("qd.sock")
    }

    /// An empty directory, for a workspace.
    pub fn project_dir(&self) -> PathBuf {
        self.dir.path().join("work")
    }

    /// A path beside the home, for anything else a test needs.
    pub fn sibling_path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Writes the home's `config.toml`, for a daemon that starts later.
    pub fn configure(&self, settings: &str) {
        std::fs::create_dir_all(self.path()).expect("the directory can be written");
        std::fs::write(self.path().join("config.toml"), settings).expect("the home can be written");
    }

    /// `program` with an isolated environment, in the project directory.
    pub fn program(&self, program: impl AsRef<std::ffi::OsStr>) -> Command {
        let mut command = Command::new(program);
        command
            .env_clear()
            .env("PATH", std::env::var_os("PATH").unwrap_or_default())
            .env("HOME", self.sibling_path("user"))
            .env("XDG_CONFIG_HOME", self.sibling_path("user/config"))
            .env("XDG_DATA_HOME", self.sibling_path("user/data"))
            .env("QD_HOME", self.path())
            .env("QD", binary())
            .env("RUST_BACKTRACE", "1")
            .current_dir(self.project_dir())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .kill_on_drop(true);
        command
    }

    /// `qd` with these arguments, not started yet.
    pub fn command(&self, args: &[&str]) -> Command {
        let mut command = self.program(binary());
        command.args(args);
        command
    }

    /// Runs `qd` to its end.
    pub async fn qd(&self, args: &[&str]) -> TestCommandOutput {
        self.start(args).wait().await
    }

    /// Runs `qd` to its end, with `input` on its stdin.
    pub async fn qd_with_input(&self, args: &[&str], input: &str) -> TestCommandOutput {
        let mut command = self.command(args);
        command.stdin(Stdio::piped());
        let mut running = TestCommand::spawn(command);
        running.feed(input).await;
        running.wait().await
    }

    /// Runs a line of shell to its end. `$QD` is the binary.
    pub async fn shell(&self, line: &str) -> TestCommandOutput {
        let mut command = self.program("bash");
        command.args(["-c", line]);
        TestCommand::spawn(command).wait().await
    }

    /// Starts `qd` and leaves it running.
    pub fn start(&self, args: &[&str]) -> TestCommand {
        TestCommand::spawn(self.command(args))
    }

    /// The pid of the daemon that currently answers on the socket.
    pub fn daemon_pid(&self) -> Option<u32> {
        let mut socket = UnixStream::connect(self.socket()).ok()?;
        socket.set_read_timeout(Some(Duration::from_secs(10))).ok()?;
        socket.write_all(b"GET /v1/version HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n").ok()?;
        let mut response = String::new();
        let _partial = socket.read_to_string(&mut response);
        let body = response.split_once("\r\n\r\n")?.1;
        let version: serde_json::Value = serde_json::from_str(body).ok()?;
        version["pid"].as_u64().and_then(|pid| u32::try_from(pid).ok())
    }

    /// The pids of the worker processes that have a record in the home and are still running.
    pub fn worker_pids(&self) -> Vec<u32> {
        let Ok(entries) = std::fs::read_dir(self.path().join("workers")) else { return Vec::new() };
        let live = |path: PathBuf| {
            let record = std::fs::read(path).ok()?;
            let record: serde_json::Value = serde_json::from_slice(&record).ok()?;
            let pid = u32::try_from(record["pid"].as_u64()?).ok()?;
            // The pid may have been reused by another process.
            (start_ticks(pid)? == record["start_ticks"].as_u64()?).then_some(pid)
        };
        let records = entries.flatten().map(|entry| entry.path());
        records.filter(|path| path.extension().is_some_and(|ext| ext == "json")).filter_map(live).collect()
    }

    /// Kills every worker with SIGKILL.
    pub fn kill_workers(&self) {
        self.worker_pids().into_iter().for_each(|pid| signal(pid, Signal::KILL));
    }

    /// Every file below the home, with its content.
    pub fn files(&self) -> Vec<(PathBuf, Vec<u8>)> {
        let (mut dirs, mut files) = (vec![self.path()], Vec::new());
        while let Some(dir) = dirs.pop() {
            for entry in std::fs::read_dir(&dir).expect("a directory of the home can be read").flatten() {
                let kind = entry.file_type().expect("an entry has a type");
                if kind.is_dir() {
                    dirs.push(entry.path());
                } else if kind.is_file() {
                    files.push((entry.path(), std::fs::read(entry.path()).unwrap_or_default()));
                }
            }
        }
        files
    }
}

impl Default for TestHome {
    fn default() -> Self {
        Self::new()
    }
}

impl Drop for TestHome {
    fn drop(&mut self) {
        for pid in self.daemon_pid().into_iter().chain(self.worker_pids()) {
            signal(pid, Signal::KILL);
            // It is not our child, so it cannot be waited for. Its files must not reappear while they are removed.
            while Path::new(&format!("/proc/{pid}/fd")).read_dir().is_ok_and(|mut fds| fds.next().is_some()) {
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        // Processes left by a failed test must not outlive it.
        for process in self.processes() {
            signal(process.pid, Signal::KILL);
        }
        if !std::thread::panicking() && !self.expects_stuck_sessions.load(Ordering::Relaxed) {
            assert_eq!(self.stuck_sessions(), [] as [String; 0], "a session was forgotten");
        }
    }
}

/// When a process started, in the kernel's ticks since boot.
pub fn start_ticks(pid: u32) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name may contain spaces and brackets; the fields after it do not.
    stat.rsplit_once(')')?.1.split_whitespace().nth(19)?.parse().ok()
}

/// Sends a signal to a process. Does nothing if the process is gone.
pub fn signal(pid: u32, signal: Signal) {
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw).expect("a pid is a positive number");
    let _already_gone = kill_process(pid, signal);
}

/// The result of a command.
#[derive(Debug)]
pub struct TestCommandOutput {
    /// The exit code, or `None` if a signal ended the command.
    pub code: Option<i32>,
    pub stdout: String,
    pub stderr: String,
}

impl TestCommandOutput {
    /// Stdout. Fails unless the exit code is `code`.
    #[track_caller]
    pub fn expect_exit(self, code: i32) -> String {
        assert_eq!(self.code, Some(code), "{self:#?}");
        self.stdout
    }

    /// Stdout. Fails unless the exit code is 0.
    #[track_caller]
    pub fn ok(self) -> String {
        self.expect_exit(0)
    }

    /// Stdout as one JSON value. Fails unless the exit code is 0.
    #[track_caller]
    pub fn json(self) -> serde_json::Value {
        let text = self.ok();
        serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error} in {text:?}"))
    }

    /// Stdout as one JSON value per line. Fails unless the exit code is 0.
    #[track_caller]
    pub fn json_lines(self) -> Vec<serde_json::Value> {
        let text = self.ok();
        let parse = |line| serde_json::from_str(line).unwrap_or_else(|error| panic!("{error} in {line:?}"));
        text.lines().map(parse).collect()
    }
}

/// A running command. It is killed if it is dropped before its end.
#[derive(Debug)]
pub struct TestCommand {
    child: Child,
    read_stdout: String,
    read_stderr: String,
}

impl TestCommand {
    pub fn spawn(mut command: Command) -> Self {
        let child = command.spawn().unwrap_or_else(|error| panic!("{command:?} does not start: {error}"));
        Self { child, read_stdout: String::new(), read_stderr: String::new() }
    }

    /// The pid, while the command runs.
    pub fn pid(&self) -> u32 {
        self.child.id().expect("it was not waited for yet")
    }

    pub fn signal(&self, signal_to_send: Signal) {
        signal(self.pid(), signal_to_send);
    }

    /// Writes `input` to stdin and closes it.
    pub async fn feed(&mut self, input: &str) {
        let mut stdin = self.child.stdin.take().expect("its stdin is piped");
        // A program that has read enough may close its end first.
        let _closed = stdin.write_all(input.as_bytes()).await;
    }

    /// The stdout that has been read so far.
    pub fn stdout_so_far(&self) -> &str {
        &self.read_stdout
    }

    /// Waits until `text` appears on stdout.
    pub async fn wait_for_stdout(&mut self, text: &str) {
        let Self { child, read_stdout, .. } = self;
        read_until(child.stdout.as_mut().expect("its stdout is piped"), read_stdout, text).await;
    }

    /// Waits until `text` appears on stderr.
    pub async fn wait_for_stderr(&mut self, text: &str) {
        let Self { child, read_stderr, .. } = self;
        read_until(child.stderr.as_mut().expect("its stderr is piped"), read_stderr, text).await;
    }

    /// Waits until the command has exited and its pipes are closed, which includes processes that inherited them.
    pub async fn wait(mut self) -> TestCommandOutput {
        let (mut stdout_pipe, mut stderr_pipe) = (self.child.stdout.take(), self.child.stderr.take());
        let mut stdout = std::mem::take(&mut self.read_stdout).into_bytes();
        let mut stderr = std::mem::take(&mut self.read_stderr).into_bytes();
        let read_and_wait = async {
            let stdout = async {
                if let Some(stdout_pipe) = &mut stdout_pipe {
                    stdout_pipe.read_to_end(&mut stdout).await.expect("a pipe can be read");
                }
            };
            let stderr = async {
                if let Some(stderr_pipe) = &mut stderr_pipe {
                    stderr_pipe.read_to_end(&mut stderr).await.expect("a pipe can be read");
                }
            };
            let ((), (), status) = tokio::join!(stdout, stderr, self.child.wait());
            status.expect("a child can be waited for")
        };
        let ended = tokio::time::timeout(crate::WAIT_LIMIT, read_and_wait).await;
        let (stdout, stderr) =
            (String::from_utf8_lossy(&stdout).into(), String::from_utf8_lossy(&stderr).into());
        match ended {
            Ok(status) => TestCommandOutput { code: status.code(), stdout, stderr },
            Err(_) => panic!("{:?} does not end; stdout {stdout:?}, stderr {stderr:?}", self.child),
        }
    }
}

/// Reads a pipe until `text` has appeared on it.
async fn read_until(pipe: &mut (impl AsyncRead + Unpin), read: &mut String, text: &str) {
    within(&format!("{text:?} on a pipe"), async {
        while !read.contains(text) {
            let mut piece = [0; 4096];
            let n = pipe.read(&mut piece).await.expect("a pipe can be read");
            assert!(n > 0, "the output ended without {text:?}: {read:?}");
            read.push_str(&String::from_utf8_lossy(&piece[..n]));
        }
    })
    .await;
}
