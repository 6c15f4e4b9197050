//! `qd serve` in a home: started, watched, killed, stopped and restarted. Dropping it kills the process. If the test
//! is panicking, the drop also prints the end of the daemon's stderr.

use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use rustix::process::Signal;
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::Child;
use tokio::task::JoinHandle;

use crate::client::TestClient;
use crate::home::{TestCommandOutput, TestHome, binary, signal};
use crate::ordinary_user::OrdinaryUser;
use crate::session::{TestSession, TestWorkspace};
use crate::within;

#[derive(Debug, Clone, Default)]
pub struct TestDaemonOptions {
    /// Also listen on TCP, on loopback.
    pub tcp: bool,
    /// Additional arguments of `serve`.
    pub args: Vec<String>,
    /// Additional environment variables.
    pub env: Vec<(String, String)>,
    /// A program that starts the daemon, with its arguments, such as `env --ignore-signal=XFSZ`.
    pub wrapper: Vec<String>,
    /// The ordinary user who runs the daemon, if it is not who runs the tests.
    pub user: Option<OrdinaryUser>,
}

impl TestDaemonOptions {
    /// Also listens on loopback TCP.
    pub fn tcp(&mut self) -> &mut Self {
        self.tcp = true;
        self
    }

    /// Adds an argument of `serve`.
    pub fn arg(&mut self, arg: &str) -> &mut Self {
        self.args.push(arg.to_owned());
        self
    }

    /// Adds an environment variable.
    pub fn env(&mut self, name: &str, value: &str) -> &mut Self {
        self.env.push((name.to_owned(), value.to_owned()));
        self
    }

    /// Starts the daemon through another program.
    pub fn wrapped_in(&mut self, program: &[&str]) -> &mut Self {
        self.wrapper = program.iter().map(|&arg| arg.to_owned()).collect();
        self
    }

    /// Has an ordinary user run the daemon. It also listens on TCP, because its socket serves nobody but this user.
    pub fn run_by(&mut self, user: OrdinaryUser) -> &mut Self {
        self.user = Some(user).filter(OrdinaryUser::is_other);
        self.tcp |= self.user.is_some();
        self
    }
}

/// A daemon in the foreground.
#[derive(Debug)]
pub struct TestDaemon {
    child: Child,
    /// Reads the daemon's stdout to the end, so that it never blocks on the pipe.
    drain: JoinHandle<()>,
    listening: Vec<String>,
    options: TestDaemonOptions,
    /// The home. Dropped last.
    pub home: TestHome,
}

impl TestDaemon {
    /// Starts in a new home, listening on its socket only.
    pub async fn start() -> Self {
        Self::start_with(|_| {}).await
    }

    /// Starts in a new home with these options.
    pub async fn start_with(configure: impl FnOnce(&mut TestDaemonOptions)) -> Self {
        Self::start_in(TestHome::new(), configure).await
    }

    /// Starts in a new home with these lines in its configuration.
    pub async fn start_with_settings(settings: &str) -> Self {
        let home = TestHome::new();
        home.configure(settings);
        Self::start_in(home, |_| {}).await
    }

    /// Starts in an existing home.
    pub async fn start_in(home: TestHome, configure: impl FnOnce(&mut TestDaemonOptions)) -> Self {
        let mut options = TestDaemonOptions::default();
        configure(&mut options);
        if let Some(user) = &options.user {
            options.wrapper = user.prepare_daemon(&home);
        }
        let (child, drain, listening) = spawn(&home, &options).await;
        Self { child, drain, listening, options, home }
    }

    pub fn pid(&self) -> u32 {
        self.child.id().expect("it lives")
    }

    /// The lines in which the daemon announced its addresses.
    pub fn listening(&self) -> &[String] {
        &self.listening
    }

    /// A client on the socket, or on TCP if another user runs the daemon.
    pub fn client(&self) -> TestClient {
        match self.options.user {
            Some(_) => self.tcp(),
            None => TestClient::unix(self.home.socket()),
        }
    }

    /// Gives a path and everything below it to the user who runs the daemon.
    pub fn give_to_user(&self, path: &Path) {
        if let Some(user) = &self.options.user {
            user.give(path);
        }
    }

    /// A client on TCP with the token.
    pub fn tcp(&self) -> TestClient {
        self.tcp_without_token().with_token(&self.token())
    }

    /// A client on TCP without the token.
    pub fn tcp_without_token(&self) -> TestClient {
        let address = self.listening.iter().find_map(|line| line.strip_prefix("listening on http://"));
        TestClient::tcp(
            address.expect("it was told to listen on TCP").parse().expect("an address and a port"),
        )
    }

    /// The token for TCP.
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

    /// Runs a `qd` command against this daemon to its end.
    pub async fn qd(&self, args: &[&str]) -> TestCommandOutput {
        self.home.qd(args).await
    }

    /// Kills the daemon with SIGKILL.
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

    /// Sends SIGTERM, and returns the exit code.
    pub async fn terminate(&mut self) -> Option<i32> {
        signal(self.pid(), Signal::TERM);
        self.wait_for_exit().await
    }

    /// Waits for the daemon to exit, and returns the exit code.
    pub async fn wait_for_exit(&mut self) -> Option<i32> {
        within("the end of the daemon", self.child.wait()).await.expect("a child can be waited for").code()
    }

    /// Kills the daemon and starts another in the same home.
    pub async fn restart(&mut self) {
        self.kill9().await;
        self.start_again().await;
    }

    /// Whether the daemon has died of SIGKILL. Any other exit fails the test.
    pub fn is_killed(&mut self) -> bool {
        let status = self.child.try_wait().expect("a child can be waited for");
        if let Some(status) = status {
            assert_eq!(status.signal(), Some(Signal::KILL.as_raw()), "{status}; {}", self.stderr());
        }
        status.is_some()
    }

    /// How the daemon has ended, if it has.
    pub fn exit_status(&mut self) -> Option<std::process::ExitStatus> {
        self.child.try_wait().expect("a child can be waited for")
    }

    /// Removes this variable from the next start on.
    pub fn unset(&mut self, name: &str) {
        self.options.env.retain(|(variable, _)| variable != name);
    }

    /// Starts another daemon in the same home, after this one has ended.
    pub async fn start_again(&mut self) {
        self.drain.abort();
        (self.child, self.drain, self.listening) = spawn(&self.home, &self.options).await;
    }

    /// Everything the daemon wrote to stderr.
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

#[expect(clippy::print_stderr, reason = "a failed test shows the daemon's stderr")]
fn print_stderr_tail(stderr: &str) {
    let tail: Vec<_> = stderr.lines().rev().take(40).collect();
    let tail: Vec<_> = tail.into_iter().rev().collect();
    eprintln!("--- the last lines of the daemon's stderr\n{}\n---", tail.join("\n"));
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
                let stderr = std::fs::read_to_string(stderr_path(home)).unwrap_or_default();
                panic!("the daemon ended before it listened: {stderr}");
            }
        }
    }
    let drain = tokio::spawn(async move { while let Ok(Some(_)) = lines.next_line().await {} });
    (child, drain, listening)
}
