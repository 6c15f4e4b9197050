//! What an agent would rather have its client do: read and write files, and run commands, all of it inside the workspace.
//! It does what it is told; whether a wish is granted is the turn's business. What is under way outlives a turn, since
//! every request is answered.

use std::path::Path;
use std::sync::Arc;

use agent_client_protocol::v1::schema::{
    CreateTerminalRequest, KillTerminalRequest, ReadTextFileRequest, ReleaseTerminalRequest, TerminalId,
    TerminalOutputRequest, WaitForTerminalExitRequest, WriteTextFileRequest,
};
use agent_client_protocol::{Error, JsonRpcMessage, RawJsonRpcId};
use futures_util::StreamExt;
use futures_util::future::BoxFuture;
use futures_util::stream::FuturesUnordered;
use qd_keeper::KeeperHandle;
use serde_json::{Value, json};

use super::files::{AcpFileService, AcpServiceResponse};
use super::terminals::{AcpTerminalStart, AcpTerminals};

/// What is done for an agent.
pub(super) struct AcpClientService {
    files: AcpFileService,
    terminals: AcpTerminals,
    starting_terminals: FuturesUnordered<BoxFuture<'static, AcpTerminalStart>>,
    exit_waits: FuturesUnordered<BoxFuture<'static, AcpServiceResponse>>,
}

/// Something that somebody has to allow first.
#[derive(Debug)]
pub(super) enum AcpClientOperation {
    Read(ReadTextFileRequest),
    Write(WriteTextFileRequest),
    Run(CreateTerminalRequest),
}

/// What a request is.
#[derive(Debug)]
pub(super) enum AcpRequestHandling {
    /// Not one for us.
    NotHandled,
    /// A wish.
    NeedsApproval(AcpClientOperation),
    /// Answered at once.
    Responded(Result<Value, Error>),
    /// Answered later.
    Pending,
}

impl AcpClientOperation {
    /// The tool that would do it, by the name that rules know.
    pub(super) fn tool(&self) -> &'static str {
        match self {
            Self::Read(_) => "Read",
            Self::Write(_) => "Write",
            Self::Run(_) => "Bash",
        }
    }

    /// What it is judged by.
    pub(super) fn argument(&self) -> String {
        match self {
            Self::Read(request) => request.path.display().to_string(),
            Self::Write(request) => request.path.display().to_string(),
            Self::Run(request) => AcpTerminals::command_line(request),
        }
    }

    /// The same as a tool's arguments.
    pub(super) fn input(&self) -> Value {
        match self {
            Self::Read(_) | Self::Write(_) => json!({ "path": self.argument() }),
            Self::Run(request) => json!({ "command": self.argument(), "cwd": request.cwd }),
        }
    }

    /// Whether it only looks.
    pub(super) fn is_read_only(&self) -> bool {
        matches!(self, Self::Read(_))
    }
}

impl AcpClientService {
    /// For an agent that works below `root`; without a keeper no command can be run.
    pub(super) fn for_workspace(root: &Path, keeper: Option<Arc<KeeperHandle>>) -> Self {
        Self {
            files: AcpFileService::for_workspace(root),
            terminals: AcpTerminals::for_workspace(root, keeper),
            starting_terminals: FuturesUnordered::new(),
            exit_waits: FuturesUnordered::new(),
        }
    }

    /// Whether commands can be run.
    pub(super) fn runs_commands(&self) -> bool {
        self.terminals.are_available()
    }

    /// Where the agent works.
    pub(super) fn root(&self) -> &Path {
        self.files.root()
    }

    /// What a terminal has shown so far.
    pub(super) fn terminal_output(&self, terminal: &TerminalId) -> Option<String> {
        self.terminals.shown_text(terminal)
    }

    /// Takes a request that is one of these, and does what needs nobody's leave.
    pub(super) fn handle_request(
        &mut self,
        id: &RawJsonRpcId,
        method: &str,
        params: &Value,
    ) -> AcpRequestHandling {
        if ReadTextFileRequest::matches_method(method) {
            parse_operation(method, params, AcpClientOperation::Read)
        } else if WriteTextFileRequest::matches_method(method) {
            parse_operation(method, params, AcpClientOperation::Write)
        } else if !self.terminals.are_available() {
            AcpRequestHandling::NotHandled
        } else if CreateTerminalRequest::matches_method(method) {
            parse_operation(method, params, AcpClientOperation::Run)
        } else if TerminalOutputRequest::matches_method(method) {
            parse_and_respond(method, params, |request| self.terminals.output(&request))
        } else if WaitForTerminalExitRequest::matches_method(method) {
            let wait = WaitForTerminalExitRequest::parse_message(method, params)
                .and_then(|request| self.terminals.wait(&request.terminal_id));
            match wait {
                Ok(wait) => {
                    let id = id.clone();
                    self.exit_waits.push(Box::pin(async move { (id, wait.await) }));
                    AcpRequestHandling::Pending
                }
                Err(error) => AcpRequestHandling::Responded(Err(error)),
            }
        } else if KillTerminalRequest::matches_method(method) {
            parse_and_respond(method, params, |request| self.terminals.kill(&request))
        } else if ReleaseTerminalRequest::matches_method(method) {
            parse_and_respond(method, params, |request| self.terminals.release(&request))
        } else {
            AcpRequestHandling::NotHandled
        }
    }

    /// Does what has been allowed. It is answered by [`Service::next`].
    pub(super) fn perform_operation(&mut self, id: RawJsonRpcId, wish: AcpClientOperation) {
        match wish {
            AcpClientOperation::Read(request) => self.files.read(id, request),
            AcpClientOperation::Write(request) => self.files.write(id, request),
            AcpClientOperation::Run(request) => {
                let (command, root) = (self.terminals.prepare_command(request), self.terminals.root());
                self.starting_terminals.push(Box::pin(async move {
                    match command {
                        Ok(command) => (id, command.start(root).await),
                        Err(error) => (id, Err(error)),
                    }
                }));
            }
        }
    }

    /// The next answer; waits for ever if there is none to come. Nothing is lost if the wait is given up.
    pub(super) async fn next(&mut self) -> AcpServiceResponse {
        tokio::select! {
            served = self.files.next() => served,
            Some(served) = self.exit_waits.next() => served,
            Some((id, started)) = self.starting_terminals.next() => {
                (id, started.and_then(|(kept, most)| self.terminals.register(kept, most)))
            }
            else => std::future::pending().await,
        }
    }
}

fn parse_operation<T: JsonRpcMessage>(
    method: &str,
    params: &Value,
    wish: impl FnOnce(T) -> AcpClientOperation,
) -> AcpRequestHandling {
    match T::parse_message(method, params) {
        Ok(request) => AcpRequestHandling::NeedsApproval(wish(request)),
        Err(error) => AcpRequestHandling::Responded(Err(error)),
    }
}

fn parse_and_respond<T: JsonRpcMessage>(
    method: &str,
    params: &Value,
    act: impl FnOnce(T) -> Result<Value, Error>,
) -> AcpRequestHandling {
    AcpRequestHandling::Responded(T::parse_message(method, params).and_then(act))
}
