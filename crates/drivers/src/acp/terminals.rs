//! Commands that an agent has its client run. They are processes of the turn and supervised by the keeper, like those
//! that the agent starts itself. Whether a command may run is decided before it gets here.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use agent_client_protocol::v1::schema::{
    CLIENT_METHOD_NAMES as METHODS, CreateTerminalRequest, CreateTerminalResponse, KillTerminalRequest,
    KillTerminalResponse, ReleaseTerminalRequest, ReleaseTerminalResponse, TerminalExitStatus, TerminalId,
    TerminalOutputRequest, TerminalOutputResponse, WaitForTerminalExitResponse,
};
use agent_client_protocol::{Error, ErrorCode, JsonRpcResponse, RawJsonRpcId};
use parking_lot::Mutex;
use qd_keeper::{ChildExit, ExitWatch, KeeperChild, KeeperHandle, LaunchSpec, procfs};
use rustix::process::{Pid, Signal, kill_process_group};
use serde_json::{Value, json};
use tokio::io::{AsyncRead, AsyncReadExt};
use tokio::task::JoinSet;

use super::files::resolve_in_workspace;
use crate::process::process_environment;

/// The most terminals at once, including those whose command has exited but that were not released.
const TERMINALS_MAX: usize = 64;
/// How many bytes of a terminal's output are kept, unless the agent wants fewer. The end is kept.
const OUTPUT_MAX: usize = 1 << 20;

/// An agent's open terminals.
#[derive(Debug)]
pub(super) struct AcpTerminals {
    root: PathBuf,
    /// `None` where nothing can be started.
    keeper: Option<Arc<KeeperHandle>>,
    open: HashMap<TerminalId, AcpTerminal>,
    last_number: u64,
}

#[derive(Debug)]
struct AcpTerminal {
    pid: u32,
    exit: ExitWatch,
    output: Arc<Mutex<AcpTerminalBuffer>>,
    /// The tasks that read the output. They end when this is dropped.
    _readers: JoinSet<()>,
}

#[derive(Debug, Default)]
struct AcpTerminalBuffer {
    bytes: Vec<u8>,
    max_bytes: usize,
    truncated: bool,
}

/// A command that may run and is ready to start.
#[derive(Debug)]
pub(super) struct AcpTerminalCommand {
    keeper: Arc<KeeperHandle>,
    launch: LaunchSpec,
    max_output: usize,
}

impl AcpTerminals {
    pub(super) fn for_workspace(root: &Path, keeper: Option<Arc<KeeperHandle>>) -> Self {
        Self { root: root.to_owned(), keeper, open: HashMap::new(), last_number: 0 }
    }

    /// Whether commands can be run.
    pub(super) fn are_available(&self) -> bool {
        self.keeper.is_some()
    }

    /// The command line as a person would type it. The policy judges it.
    pub(super) fn command_line(request: &CreateTerminalRequest) -> String {
        let quoted = request.args.iter().map(|argument| shell_quote(argument));
        std::iter::once(request.command.clone()).chain(quoted).collect::<Vec<_>>().join(" ")
    }

    /// Prepares a command. Fails without a keeper, or if too many terminals are open.
    pub(super) fn prepare_command(
        &self,
        request: CreateTerminalRequest,
    ) -> Result<AcpTerminalCommand, Error> {
        let keeper = self.keeper.clone().ok_or_else(Error::method_not_found)?;
        if self.open.len() >= TERMINALS_MAX {
            return Err(invalid_params(format!("{TERMINALS_MAX} terminals are open already; release some")));
        }
        let CreateTerminalRequest { command, args, env, cwd, output_byte_limit, .. } = request;
        // Many agents send a whole shell command line as the command.
        let argv = match args.is_empty() {
            true => vec!["/bin/sh".to_owned(), "-c".to_owned(), command],
            false => std::iter::once(command).chain(args).collect(),
        };
        let added: BTreeMap<String, String> = env.into_iter().map(|var| (var.name, var.value)).collect();
        let max_output =
            output_byte_limit.and_then(|limit| usize::try_from(limit).ok()).unwrap_or(OUTPUT_MAX);
        let launch = LaunchSpec {
            argv,
            env: process_environment(added),
            cwd: cwd.unwrap_or_else(|| self.root.clone()),
            arg0: None,
        };
        Ok(AcpTerminalCommand { keeper, launch, max_output: max_output.min(OUTPUT_MAX) })
    }

    /// Answers what this machine calls a process of the agent. In a sandbox, the agent itself cannot know.
    pub(super) fn find_host_pid(&self, params: &Value) -> Result<Value, Error> {
        let keeper = self.keeper.as_ref().ok_or_else(Error::method_not_found)?;
        let inner = params.get("pid").and_then(Value::as_u64).and_then(|pid| u32::try_from(pid).ok());
        let found = inner.and_then(|inner| procfs::find_by_inner_pid(keeper.pid(), inner));
        found
            .map(|pid| json!({ "pid": pid }))
            .ok_or_else(|| invalid_params("no process has this pid".to_owned()))
    }

    /// The directory that commands must stay in.
    pub(super) fn root(&self) -> PathBuf {
        self.root.clone()
    }

    /// Registers a started command as a terminal and returns the response for the agent.
    pub(super) fn register(&mut self, child: KeeperChild, max_output: usize) -> Result<Value, Error> {
        self.last_number += 1;
        let id = TerminalId::new(format!("term_{}", self.last_number));
        let KeeperChild { pid, stdin, stdout, stderr, exit } = child;
        // Terminals take no input.
        drop(stdin);
        let output =
            Arc::new(Mutex::new(AcpTerminalBuffer { max_bytes: max_output, ..AcpTerminalBuffer::default() }));
        let mut readers = JoinSet::new();
        readers.spawn(collect_output(stdout, Arc::clone(&output)));
        readers.spawn(collect_output(stderr, Arc::clone(&output)));
        self.open.insert(id.clone(), AcpTerminal { pid, exit, output, _readers: readers });
        CreateTerminalResponse::new(id).into_json(METHODS.terminal_create)
    }

    /// A terminal's output so far.
    pub(super) fn shown_text(&self, id: &TerminalId) -> Option<String> {
        Some(self.open.get(id)?.text().0)
    }

    pub(super) fn output(&self, request: &TerminalOutputRequest) -> Result<Value, Error> {
        let terminal = self.get(&request.terminal_id)?;
        let (text, truncated) = terminal.text();
        let response = TerminalOutputResponse::new(text, truncated)
            .exit_status(terminal.exit.current().map(exit_status));
        response.into_json(METHODS.terminal_output)
    }

    /// Waits for the exit of the command.
    pub(super) fn wait(
        &self,
        id: &TerminalId,
    ) -> Result<impl Future<Output = Result<Value, Error>> + Send + use<>, Error> {
        let exit = self.get(id)?.exit.clone();
        Ok(async move {
            let response = WaitForTerminalExitResponse::new(exit_status(exit.wait().await));
            response.into_json(METHODS.terminal_wait_for_exit)
        })
    }

    pub(super) fn kill(&self, request: &KillTerminalRequest) -> Result<Value, Error> {
        self.get(&request.terminal_id)?.kill();
        KillTerminalResponse::new().into_json(METHODS.terminal_kill)
    }

    pub(super) fn release(&mut self, request: &ReleaseTerminalRequest) -> Result<Value, Error> {
        self.get(&request.terminal_id)?.kill();
        self.open.remove(&request.terminal_id);
        ReleaseTerminalResponse::new().into_json(METHODS.terminal_release)
    }

    fn get(&self, id: &TerminalId) -> Result<&AcpTerminal, Error> {
        self.open.get(id).ok_or_else(|| invalid_params(format!("there is no terminal {id}")))
    }
}

impl AcpTerminalCommand {
    /// Starts the command, if its working directory is inside the workspace.
    pub(super) async fn start(self, root: PathBuf) -> Result<(KeeperChild, usize), Error> {
        let Self { keeper, mut launch, max_output } = self;
        launch.cwd = resolve_in_workspace(&root, &launch.cwd)
            .await
            .map_err(|cause| invalid_params(format!("cannot work in {}: {cause}", launch.cwd.display())))?;
        match keeper.spawn_in_turn(launch).await {
            Ok(child) => Ok((child, max_output)),
            Err(cause) => Err(invalid_params(format!("cannot start the command: {cause}"))),
        }
    }
}

/// The result of starting a command: its process and the output limit.
pub(super) type AcpTerminalStart = (RawJsonRpcId, Result<(KeeperChild, usize), Error>);

impl AcpTerminal {
    fn text(&self) -> (String, bool) {
        let output = self.output.lock();
        (String::from_utf8_lossy(&output.bytes).into_owned(), output.truncated)
    }

    /// Kills the command and its process group. Processes that left the group belong to the turn and end with it.
    fn kill(&self) {
        if self.exit.current().is_none()
            && let Some(pid) = i32::try_from(self.pid).ok().and_then(Pid::from_raw)
        {
            // The command may have exited meanwhile.
            let _result = kill_process_group(pid, Signal::KILL);
        }
    }
}

async fn collect_output(mut stream: impl AsyncRead + Unpin, output: Arc<Mutex<AcpTerminalBuffer>>) {
    let mut buffer = [0; 8192];
    loop {
        let read = stream.read(&mut buffer).await.unwrap_or_default();
        if read == 0 {
            return;
        }
        let mut output = output.lock();
        output.append(&buffer[..read]);
    }
}

impl AcpTerminalBuffer {
    /// Appends output and drops the oldest bytes over the limit, up to the start of a character.
    fn append(&mut self, output: &[u8]) {
        self.bytes.extend_from_slice(output);
        if self.bytes.len() > self.max_bytes {
            let mut start = self.bytes.len() - self.max_bytes;
            while self.bytes.get(start).is_some_and(|byte| byte & 0xc0 == 0x80) {
                start += 1;
            }
            self.bytes.drain(..start);
            self.truncated = true;
        }
    }
}

fn exit_status(exit: ChildExit) -> TerminalExitStatus {
    let code = exit.status.and_then(|status| u32::try_from(status).ok());
    TerminalExitStatus::new().exit_code(code).signal(exit.signal.map(|signal| signal.to_string()))
}

fn invalid_params(message: String) -> Error {
    Error::new(ErrorCode::INVALID_PARAMS, message)
}

/// Quotes an argument for a shell, if needed.
fn shell_quote(argument: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "_-./=:,@%+".contains(c);
    match !argument.is_empty() && argument.chars().all(plain) {
        true => argument.to_owned(),
        false => format!("'{}'", argument.replace('\'', r"'\''")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_is_judged_as_it_would_be_typed() {
        let request = CreateTerminalRequest::new("s", "git").args(vec![
            "commit".to_owned(),
            "-m".to_owned(),
            "it's done".to_owned(),
            String::new(),
        ]);
        assert_eq!(AcpTerminals::command_line(&request), r"git commit -m 'it'\''s done' ''");
    }

    #[test]
    fn the_end_of_the_output_is_kept_and_no_half_characters() {
        let mut output = AcpTerminalBuffer { max_bytes: 4, ..AcpTerminalBuffer::default() };
        output.append("abc".as_bytes());
        assert!(!output.truncated);
        output.append("dé€".as_bytes());
        assert_eq!((std::str::from_utf8(&output.bytes).unwrap(), output.truncated), ("€", true));
    }
}
