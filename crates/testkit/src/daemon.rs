//! `qd serve` in a home: started and heard, killed, ended and started again. It dies with its value, also when the
//! test panics, and then says what it wrote to stderr.

use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::Stdio;

use rustix::process::Signal;
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::Child;
use tokio::task::JoinHandle;

use crate::client::TestClient;
use crate::home::{TestCommandOutput, TestHome, binary, signal};
use crate::session::{TestSession, TestWorkspace};
use crate::within;

/// How a daemon is started.
#[derive(Debug, Clone, Default)]
pub struct TestDaemonOptions {
    /// Whether it also listens on TCP, on loopback.
    pub tcp: bool,
    /// More arguments of `serve`.
    pub args: Vec<String>,
    /// More environment.
    pub env: Vec<(String, String)>,
    /// A program that starts it, with its arguments: `env --ignore-signal=XFSZ`.
    pub wrapper: Vec<String>,
}

impl TestDaemonOptions {
    /// Listens on loopback TCP too.
    pub fn tcp(&mut self) -> &mut Self {
        self.tcp = true;
        self
    }

    /// One more argument of `serve`.
    pub fn arg(&mut self, arg: &str) -> &mut Self {
        self.args.push(arg.to_owned());
        self
    }

    /// One more variable.
    pub fn env(&mut self, name: &str, value: &str) -> &mut Self {
        self.env.push((name.to_owned(), value.to_owned()));
        self
    }

    /// Started by another program.
    pub fn wrapped_in(&mut self, program: &[&str]) -> &mut Self {
        self.wrapper = program.iter().map(|&word| word.to_owned()).collect();
        self
    }
}

/// A daemon in the foreground.
#[derive(Debug)]
pub struct TestDaemon {
    child: Child,
    /// Reads its stdout to the end, so that it never waits for us.
    drain: JoinHandle<()>,
    listening: Vec<String>,
    options: TestDaemonOptions,
    /// Where it lives. Dropped last.
    pub home: TestHome,
}

impl TestDaemon {
    /// In a new home, on its socket alone.
    pub async fn start() -> Self {
        Self::start_with(|_| {}).await
    }

    /// In a new home, as told.
    pub async fn start_with(tell: impl FnOnce(&mut TestDaemonOptions)) -> Self {
        Self::start_in(TestHome::new(), tell).await
    }

    /// In a home that may have been lived in.
    pub async fn start_in(home: TestHome, tell: impl FnOnce(&mut TestDaemonOptions)) -> Self {
        let mut options = TestDaemonOptions::default();
        tell(&mut options);
        let (child, drain, listening) = spawn(&home, &options).await;
        Self { child, drain, listening, options, home }
    }

    /// Its pid.
    pub fn pid(&self) -> u32 {
        self.child.id().expect("it lives")
    }

    /// What it said it listens on, line by line.
    pub fn listening(&self) -> &[String] {
        &self.listening
    }

    /// A client on the socket.
    pub fn client(&self) -> TestClient {
        TestClient::unix(self.home.socket())
    }

    /// A client on TCP that knows the token.
    pub fn tcp(&self) -> TestClient {
        self.tcp_without_token().with_token(&self.token())
    }

    /// A client on TCP that does not.
    pub fn tcp_without_token(&self) -> TestClient {
        let address = self.listening.iter().find_map(|line| line.strip_prefix("listening on http://"));
        TestClient::tcp(
            address.expect("it was told to listen on TCP").parse().expect("an address and a port"),
        )
    }

    /// The token of TCP.
    pub fn token(&self) -> String {
        let text = std::fs::read_to_string(self.home.path().join("token")).expect("there is a token");
        text.trim().to_owned()
    }

    /// The workspace of the home's project directory.
    pub async fn workspace(&self) -> TestWorkspace {
        self.client().workspace(&self.home.project_dir()).await
    }

    /// A new session in that workspace.
    pub async fn session(&self, agent: &str) -> TestSession {
        self.workspace().await.session(agent).await
    }

    /// A new session in that workspace, with settings.
    pub async fn session_with(&self, settings: serde_json::Value) -> TestSession {
        self.workspace().await.session_with(settings).await
    }

    /// A `qd` command against this daemon, to its end.
    pub async fn qd(&self, args: &[&str]) -> TestCommandOutput {
        self.home.qd(args).await
    }

    /// Kills it without a word.
    pub async fn kill9(&mut self) {
        self.child.start_kill().expect("it was not waited for yet");
        let status =
            within("the death of the daemon", self.child.wait()).await.expect("a child can be waited for");
        assert_eq!(
            status.signal(),
            Some(Signal::KILL.as_raw()),
            "it was dead before: {status}; {}",
            self.stderr()
        );
    }

    /// Asks it to end, and gives its exit code.
    pub async fn terminate(&mut self) -> Option<i32> {
        signal(self.pid(), Signal::TERM);
        self.wait_for_exit().await
    }

    /// Waits for its end, and gives its exit code.
    pub async fn wait_for_exit(&mut self) -> Option<i32> {
        within("the end of the daemon", self.child.wait()).await.expect("a child can be waited for").code()
    }

    /// Kills it and starts another in the same home.
    pub async fn restart(&mut self) {
        self.kill9().await;
        self.start_again().await;
    }

    /// Whether it has died of `kill -9`. Any other end is a failure.
    pub fn is_killed(&mut self) -> bool {
        let ended = self.child.try_wait().expect("a child can be waited for");
        if let Some(status) = ended {
            assert_eq!(status.signal(), Some(Signal::KILL.as_raw()), "{status}; {}", self.stderr());
        }
        ended.is_some()
    }

    /// From the next start on without this variable.
    pub fn unset(&mut self, name: &str) {
        self.options.env.retain(|(set, _)| set != name);
    }

    /// Starts another in the same home, after the end of this one.
    pub async fn start_again(&mut self) {
        self.drain.abort();
        (self.child, self.drain, self.listening) = spawn(&self.home, &self.options).await;
    }

    /// What it wrote to stderr.
    pub fn stderr(&self) -> String {
        std::fs::read_to_string(stderr_path(&self.home)).unwrap_or_default()
    }
}

impl Drop for TestDaemon {
    fn drop(&mut self) {
        self.drain.abort();
        let _already_dead = self.child.start_kill();
        while let Ok(None) = self.child.try_wait() {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        if std::thread::panicking() {
            print_stderr_tail(&self.stderr());
        }
    }
}

#[expect(clippy::print_stderr, reason = "a failed test shows what the daemon had to say")]
fn print_stderr_tail(complaints: &str) {
    let tail: Vec<_> = complaints.lines().rev().take(40).collect();
    let tail: Vec<_> = tail.into_iter().rev().collect();
    eprintln!("--- the daemon's stderr, its last lines\n{}\n---", tail.join("\n"));
}

fn stderr_path(home: &TestHome) -> PathBuf {
    home.sibling_path("serve.stderr")
}

async fn spawn(home: &TestHome, options: &TestDaemonOptions) -> (Child, JoinHandle<()>, Vec<String>) {
    let mut command = match options.wrapper.split_first() {
        None => home.program(binary()),
        Some((program, args)) => {
            let mut command = home.program(program);
            command.args(args).arg(binary());
            command
        }
    };
    command.arg("serve");
    if options.tcp {
        command.arg("--listen").arg(format!("unix:{}", home.socket().display()));
        command.args(["--listen", "127.0.0.1:0"]);
    }
    let stderr = std::fs::OpenOptions::new().create(true).append(true).open(stderr_path(home));
    command.args(&options.args).envs(options.env.clone());
    command.stderr(Stdio::from(stderr.expect("the directory can be written")));
    let mut child = command.spawn().unwrap_or_else(|error| panic!("{command:?} does not start: {error}"));
    let mut lines = BufReader::new(child.stdout.take().expect("its stdout is piped")).lines();
    let expected = 1 + usize::from(options.tcp);
    let mut listening = Vec::new();
    while listening.len() < expected {
        let line = within("the daemon to listen", lines.next_line()).await.expect("a pipe can be read");
        match line {
            Some(line) if line.starts_with("listening on ") => listening.push(line),
            Some(_) => {}
            None => {
                let complaints = std::fs::read_to_string(stderr_path(home)).unwrap_or_default();
                panic!("the daemon ended before it listened: {complaints}");
            }
        }
    }
    let drain = tokio::spawn(async move { while let Ok(Some(_)) = lines.next_line().await {} });
    (child, drain, listening)
}
