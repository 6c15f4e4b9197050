//! The agent's process: started through the keeper and watched for its exit. The last lines of its stderr are kept to
//! explain failures. Ending the processes it leaves behind is up to the keeper.

use std::collections::{BTreeMap, VecDeque};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use qd_catalog::programs::SELF_PROGRAM;
use qd_keeper::{ChildExit, ExitWatch, KeeperChild, KeeperHandle, LaunchSpec};
use qd_protocol::event::RunError;
use qd_protocol::manifest::Manifest;
use qd_protocol::sandbox_spec::MODEL_PROXY_PORT;
use qd_protocol::worker::AgentSpec;
use tokio::io::{AsyncRead, AsyncReadExt};
use tokio::net::unix::pipe;
use tokio::task::JoinHandle;

use super::line_transport::ExitFuture;
use crate::redact::SecretMatcher;

/// The number of stderr lines that are kept.
const LINES_MAX: usize = 20;
/// The bytes kept of each line. An error later shows less of it.
const LINE_BYTES_MAX: usize = 64 << 10;
/// How long an agent that has closed its stdout may take to exit before its exit status is given up.
const EXIT_WAIT: Duration = Duration::from_secs(2);
/// How long an agent whose stdin was closed may take to exit by itself.
const LEAVE_GRACE: Duration = Duration::from_secs(2);
/// How long to wait for the last lines of a dead agent, whose stderr another process may hold open.
const STDERR_WAIT: Duration = Duration::from_millis(100);
/// The variables that every agent inherits from the worker's environment. All others come with the session, so that no
/// secret of the worker reaches an agent by accident.
const INHERITED_VARS: [&str; 13] = [
    "PATH",
    "HOME",
    "USER",
    "LOGNAME",
    "SHELL",
    "LANG",
    "LC_ALL",
    "LC_CTYPE",
    "TZ",
    "TERM",
    "TMPDIR",
    "XDG_CONFIG_HOME",
    "XDG_RUNTIME_DIR",
];

/// The program of an agent: its manifest, plus what the session adds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct AgentProgram {
    pub(crate) argv: Vec<String>,
    /// The name among processes, if it differs from the program's name.
    pub(crate) process_name: Option<String>,
    /// Variables besides those that every agent inherits.
    pub(crate) env: BTreeMap<String, String>,
}

impl AgentProgram {
    /// Passes the model, the system prompt and the directory as arguments if the manifest has flags for them. A driver
    /// may pass them in other ways. What makes the agent ask overrides everything else.
    pub(crate) fn from_manifest(manifest: &Manifest, spec: &AgentSpec) -> Self {
        let mut argv = manifest.command();
        let mut process_name = None;
        if argv.first().is_some_and(|program| program == SELF_PROGRAM) {
            argv[0] = own_program().to_string_lossy().into_owned();
            process_name = Some(qd_keeper::process_setup::PROGRAM_NAME.to_owned());
        }
        let startup = &manifest.startup;
        let cwd = spec.cwd.to_string_lossy();
        let flags = [
            (&startup.model_arg, spec.model.as_deref()),
            (&startup.system_prompt_arg, spec.system_prompt.as_deref()),
            (&startup.cwd_arg, Some(cwd.as_ref())),
        ];
        for (flag, value) in flags {
            if let (Some(flag), Some(value)) = (flag, value) {
                argv.extend([flag.clone(), value.to_owned()]);
            }
        }
        let mut env = startup.env.clone();
        if let Some(name) = &startup.session_id_env {
            env.insert(name.clone(), spec.session.to_string());
        }
        // The session's variables take precedence over the manifest's.
        env.extend(spec.env.clone());
        env.extend(manifest.policy.env.clone());
        argv.extend(manifest.policy.args.iter().cloned());
        Self { argv, process_name, env }
    }
}

/// A running agent's process, without its stdin and stdout.
#[derive(Debug)]
pub(crate) struct AgentProcess {
    exit: ExitWatch,
    stderr: StderrTail,
}

impl AgentProcess {
    /// Starts the process, and returns it with its stdin and stdout.
    pub(crate) async fn start(
        keeper: &KeeperHandle,
        spec: &AgentSpec,
        program: AgentProgram,
    ) -> Result<(Self, pipe::Sender, pipe::Receiver), RunError> {
        Self::launch(keeper, spec, program, false).await
    }

    /// Like [`Self::start`], for a process that lives no longer than its turn.
    pub(crate) async fn start_in_turn(
        keeper: &KeeperHandle,
        spec: &AgentSpec,
        program: AgentProgram,
    ) -> Result<(Self, pipe::Sender, pipe::Receiver), RunError> {
        Self::launch(keeper, spec, program, true).await
    }

    async fn launch(
        keeper: &KeeperHandle,
        spec: &AgentSpec,
        program: AgentProgram,
        in_turn: bool,
    ) -> Result<(Self, pipe::Sender, pipe::Receiver), RunError> {
        let name = program.argv.first().cloned().unwrap_or_default();
        let mut env = process_environment(program.env);
        env.extend(proxy_variables(spec, &env));
        let launch =
            LaunchSpec { argv: program.argv, env, cwd: spec.cwd.clone(), arg0: program.process_name };
        let spawned = if in_turn { keeper.spawn_in_turn(launch).await } else { keeper.spawn(launch).await };
        let KeeperChild { stdin, stdout, stderr, exit, .. } = spawned.map_err(|cause| {
            RunError::new("agent_failed_to_start", format!("cannot start {name}: {cause}"))
        })?;
        Ok((Self { exit, stderr: StderrTail::start(stderr, SecretMatcher::of_agent(spec)) }, stdin, stdout))
    }

    /// Resolves when the process has exited.
    pub(crate) fn exited(&self) -> ExitFuture {
        let exit = self.exit.clone();
        Box::pin(async move {
            exit.wait().await;
        })
    }

    /// Waits a little for the exit of a process whose stdin was closed. If it stays, the keeper ends it.
    pub(crate) async fn drain_and_wait(self, mut stdout: impl AsyncRead + Unpin) {
        // The process may write more before it exits, and must not block on a full pipe.
        let drain = async {
            // The end of stdout does not matter; only the exit counts.
            let _copied = tokio::io::copy(&mut stdout, &mut tokio::io::sink()).await;
            std::future::pending().await
        };
        tokio::select! {
            () = self.exited() => {}
            () = drain => {}
            // The keeper ends the process.
            () = tokio::time::sleep(LEAVE_GRACE) => {}
        }
    }

    /// The exit status, once there is one; `None` if the process was killed or its keeper is lost.
    pub(crate) async fn exit_status(&self) -> Option<i32> {
        self.exit.wait().await.status
    }

    /// Explains why the process is gone. Called when its stdout is closed.
    pub(crate) async fn exit_error(&mut self, when: &str) -> RunError {
        let exit = tokio::time::timeout(EXIT_WAIT, self.exit.wait()).await.ok();
        let message = match exit {
            Some(ChildExit { status: Some(status), .. }) => {
                format!("the agent exited with status {status} {when}")
            }
            Some(ChildExit { signal: Some(signal), .. }) => {
                format!("the agent was killed by signal {signal} {when}")
            }
            Some(_) => format!("the agent ended {when}"),
            None => format!("the agent closed its stdout {when}"),
        };
        let exit_status = exit.and_then(|exit| exit.status);
        RunError { exit_status, ..self.with_stderr(RunError::new("agent_exited", message)).await }
    }

    /// Forgets the lines of stderr so far.
    pub(crate) fn forget_stderr(&mut self) {
        self.stderr.lines.lock().clear();
    }

    /// Adds the last lines of stderr to an error, since they may say more.
    pub(crate) async fn with_stderr(&mut self, error: RunError) -> RunError {
        RunError { stderr: self.stderr.lines().await, ..error }
    }
}

/// The environment of an agent's process: the inherited variables and `added`.
pub(crate) fn process_environment(added: BTreeMap<String, String>) -> BTreeMap<String, String> {
    let inherited =
        INHERITED_VARS.iter().filter_map(|name| Some(((*name).to_owned(), std::env::var(name).ok()?)));
    inherited.chain(added).collect()
}

/// What leads an agent without network to the proxy through which it reaches its model. It overrides the user's own proxy,
/// which the agent cannot reach; ours uses it. `env` is what the agent is started with otherwise.
fn proxy_variables(spec: &AgentSpec, env: &BTreeMap<String, String>) -> BTreeMap<String, String> {
    let Some(sandbox) = spec.sandbox.as_deref().filter(|sandbox| sandbox.has_model_proxy()) else {
        return BTreeMap::new();
    };
    // The agent's own servers are inside. A model on this machine is not.
    let models = sandbox.resolve_model_hosts(|name| env.get(name).cloned());
    let is_inside = |name: &&str| models.iter().all(|model| model.name != *name);
    let inside: Vec<&str> = ["localhost", "127.0.0.1", "::1"].into_iter().filter(is_inside).collect();
    let proxy = format!("http://127.0.0.1:{MODEL_PROXY_PORT}");
    let variables = [("HTTP_PROXY", proxy.clone()), ("HTTPS_PROXY", proxy), ("NO_PROXY", inside.join(","))];
    // Programs disagree about the case.
    let both = |(name, value): (&str, String)| {
        [(name.to_owned(), value.clone()), (name.to_ascii_lowercase(), value)]
    };
    variables.into_iter().flat_map(both).collect()
}

/// The path of this very program, even if its file has been replaced by another version.
pub fn own_program() -> PathBuf {
    let link = Path::new("/proc/self/exe");
    match link.exists() {
        true => link.to_owned(),
        false => std::env::current_exe().unwrap_or_else(|_| PathBuf::from("qd")),
    }
}

/// The last lines of stderr, collected by a task that ends with the stream.
#[derive(Debug)]
struct StderrTail {
    lines: Arc<Mutex<VecDeque<String>>>,
    task: JoinHandle<()>,
}

impl StderrTail {
    fn start(stream: impl AsyncRead + Unpin + Send + 'static, secrets: SecretMatcher) -> Self {
        let lines = Arc::new(Mutex::new(VecDeque::new()));
        let task = tokio::spawn(collect_last_lines(stream, secrets, Arc::clone(&lines)));
        Self { lines, task }
    }

    /// The collected lines. The stream should be closed by now.
    async fn lines(&mut self) -> Vec<String> {
        // If the stream is still open, the lines so far have to do.
        let _done = tokio::time::timeout(STDERR_WAIT, &mut self.task).await;
        self.lines.lock().iter().cloned().collect()
    }
}

impl Drop for StderrTail {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn collect_last_lines(
    mut stream: impl AsyncRead + Unpin,
    secrets: SecretMatcher,
    lines: Arc<Mutex<VecDeque<String>>>,
) {
    let mut line = Vec::new();
    let mut buffer = [0; 4096];
    loop {
        let read = stream.read(&mut buffer).await.unwrap_or_default();
        for byte in &buffer[..read] {
            match byte {
                b'\n' => push_line(&lines, &secrets, &mut line),
                // One byte more than the limit shows that the line was cut.
                _ if line.len() <= LINE_BYTES_MAX => line.push(*byte),
                _ => {}
            }
        }
        if read == 0 {
            push_line(&lines, &secrets, &mut line);
            return;
        }
    }
}

fn push_line(lines: &Mutex<VecDeque<String>>, secrets: &SecretMatcher, line: &mut Vec<u8>) {
    let mut text = strip_escape_codes(line).trim_end().to_owned();
    if line.len() > LINE_BYTES_MAX {
        // The cut may go through a secret, whose beginning would not be recognised later.
        text = secrets.redact_start(&text, None).text;
    }
    line.clear();
    if text.is_empty() {
        return;
    }
    let mut lines = lines.lock();
    if lines.len() == LINES_MAX {
        lines.pop_front();
    }
    lines.push_back(text);
}

/// The text of a line without escape codes, such as those for colours.
fn strip_escape_codes(line: &[u8]) -> String {
    #[derive(Default)]
    struct PlainText(String);
    impl vte::Perform for PlainText {
        fn print(&mut self, c: char) {
            self.0.push(c);
        }
        fn execute(&mut self, byte: u8) {
            if byte == b'\t' {
                self.0.push('\t');
            }
        }
    }
    let mut text = PlainText::default();
    vte::Parser::new().advance(&mut text, line);
    text.0
}

#[cfg(test)]
mod tests {
    use std::io::Cursor;

    use qd_protocol::sandbox::NetworkSetting;
    use qd_protocol::sandbox_spec::SandboxSpec;
    use qd_protocol::{SessionId, WorkerId};

    use super::*;

    #[tokio::test]
    async fn the_last_lines_are_kept_within_limits_and_without_half_a_secret() {
        let secrets = SecretMatcher::new(&BTreeMap::from([("KEY".to_owned(), "hunter2hunter2".to_owned())]));
        let mut text: String = (0..50).map(|n| format!("line {n}\n")).collect();
        text.push_str(&"x".repeat(LINE_BYTES_MAX - 5));
        text.push_str("hunter2hunter2");
        text.push_str(&"y".repeat(LINE_BYTES_MAX));
        let mut tail = StderrTail::start(Cursor::new(text.into_bytes()), secrets);
        let lines = tail.lines().await;
        assert_eq!(lines.len(), LINES_MAX);
        assert_eq!(lines[0], "line 31");
        assert_eq!(lines[LINES_MAX - 1], "x".repeat(LINE_BYTES_MAX - 5));
    }

    #[test]
    fn an_agent_without_network_is_led_to_the_proxy_and_to_its_own_servers_directly() {
        let mut spec =
            AgentSpec::new(SessionId::from_random(&[1; 16]), WorkerId::from_random(&[1; 16]), "x", "/w");
        let env = BTreeMap::from([("BASE_URL".to_owned(), "http://localhost:4000/v1".to_owned())]);
        let sandbox = SandboxSpec {
            network: NetworkSetting::Off,
            model_hosts: vec!["api.example.com".to_owned(), "$BASE_URL".to_owned()],
            ..SandboxSpec::default()
        };
        spec.sandbox = Some(Box::new(sandbox));
        let variables = proxy_variables(&spec, &env);
        for name in ["HTTP_PROXY", "https_proxy"] {
            assert_eq!(variables[name], "http://127.0.0.1:3128");
        }
        assert_eq!(variables["NO_PROXY"], "127.0.0.1,::1", "the model is outside");
        assert_eq!(proxy_variables(&spec, &BTreeMap::new())["no_proxy"], "localhost,127.0.0.1,::1");
        spec.sandbox.as_mut().unwrap().network = NetworkSetting::On;
        assert_eq!(proxy_variables(&spec, &env), BTreeMap::new());
    }

    #[test]
    fn escape_codes_are_no_part_of_a_line() {
        let line = b"\x1b[1;31mError:\x1b[0m no\tkey \x1b]8;;https://e.x\x07here\x1b]8;;\x07 \xc3\xa4\r";
        assert_eq!(strip_escape_codes(line), "Error: no\tkey here \u{e4}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_stream_that_never_ends_does_not_hold_up_its_lines() {
        let (mut writer, reader) = tokio::io::duplex(64);
        let mut tail = StderrTail::start(reader, SecretMatcher::default());
        tokio::io::AsyncWriteExt::write_all(&mut writer, b"why\n").await.unwrap();
        assert_eq!(tail.lines().await, ["why"]);
    }
}
