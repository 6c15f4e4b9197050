//! Requests that an agent leaves to its client: reading and writing files and running commands, all inside the
//! workspace. This module performs operations; whether one is allowed is decided in the turn. Pending requests outlive
//! a turn, since every request must be answered.

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
use qd_protocol::worker::{AgentSpec, HOST_PID_METHOD};
use serde_json::{Value, json};

use super::files::{AcpFileService, AcpServiceResponse};
use super::terminals::{AcpTerminalStart, AcpTerminals};

/// Serves the agent's file and terminal requests.
pub(super) struct AcpClientService {
    files: AcpFileService,
    terminals: AcpTerminals,
    starting_terminals: FuturesUnordered<BoxFuture<'static, AcpTerminalStart>>,
    exit_waits: FuturesUnordered<BoxFuture<'static, AcpServiceResponse>>,
}

/// An operation that needs approval before we perform it.
#[derive(Debug)]
pub(super) enum AcpClientOperation {
    Read(ReadTextFileRequest),
    Write(WriteTextFileRequest),
    Run(CreateTerminalRequest),
}

/// How a request was handled.
#[derive(Debug)]
pub(super) enum AcpRequestHandling {
    /// The method is not served here.
    NotHandled,
    /// The request must be approved first.
    NeedsApproval(AcpClientOperation),
    /// The response is ready.
    Responded(Result<Value, Error>),
    /// The response will come from [`AcpClientService::next`].
    Pending,
}

impl AcpClientOperation {
    /// The name by which policy rules know the equivalent tool.
    pub(super) fn tool(&self) -> &'static str {
        match self {
            Self::Read(_) => "Read",
            Self::Write(_) => "Write",
            Self::Run(_) => "Bash",
        }
    }

    /// The argument that the policy judges: a path or a command line.
    pub(super) fn argument(&self) -> String {
        match self {
            Self::Read(request) => request.path.display().to_string(),
            Self::Write(request) => request.path.display().to_string(),
            Self::Run(request) => AcpTerminals::command_line(request),
        }
    }

    /// The operation's arguments in the form of a tool input.
    pub(super) fn input(&self) -> Value {
        match self {
            Self::Read(_) | Self::Write(_) => json!({ "path": self.argument() }),
            Self::Run(request) => json!({ "command": self.argument(), "cwd": request.cwd }),
        }
    }

    /// Whether the operation changes nothing.
    pub(super) fn is_read_only(&self) -> bool {
        matches!(self, Self::Read(_))
    }
}

impl AcpClientService {
    /// A service for an agent, below its directory. Without a keeper no command can be run.
    pub(super) fn for_agent(spec: &AgentSpec, keeper: Option<Arc<KeeperHandle>>) -> Self {
        Self {
            files: AcpFileService::for_agent(spec),
            terminals: AcpTerminals::for_workspace(&spec.cwd, keeper),
            starting_terminals: FuturesUnordered::new(),
            exit_waits: FuturesUnordered::new(),
        }
    }

    pub(super) fn runs_commands(&self) -> bool {
        self.terminals.are_available()
    }

    /// The agent's working directory.
    pub(super) fn root(&self) -> &Path {
        self.files.root()
    }

    /// A terminal's output so far.
    pub(super) fn terminal_output(&self, terminal: &TerminalId) -> Option<String> {
        self.terminals.shown_text(terminal)
    }

    /// Handles a request if its method is served here. Performs at once what needs no approval.
    pub(super) fn handle_request(
        &mut self,
        id: &RawJsonRpcId,
        method: &str,
        params: &Value,
    ) -> AcpRequestHandling {
        if method == HOST_PID_METHOD {
            AcpRequestHandling::Responded(self.terminals.find_host_pid(params))
        } else if ReadTextFileRequest::matches_method(method) {
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

    /// Performs an operation that was allowed. The response comes from [`Self::next`].
    pub(super) fn perform_operation(&mut self, id: RawJsonRpcId, operation: AcpClientOperation) {
        match operation {
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

    /// Returns the next response, and waits for ever if none is pending. Cancel safe.
    pub(super) async fn next(&mut self) -> AcpServiceResponse {
        tokio::select! {
            response = self.files.next() => response,
            Some(response) = self.exit_waits.next() => response,
            Some((id, child)) = self.starting_terminals.next() => {
                (id, child.and_then(|(child, max_output)| self.terminals.register(child, max_output)))
            }
            else => std::future::pending().await,
        }
    }
}

fn parse_operation<T: JsonRpcMessage>(
    method: &str,
    params: &Value,
    operation: impl FnOnce(T) -> AcpClientOperation,
) -> AcpRequestHandling {
    match T::parse_message(method, params) {
        Ok(request) => AcpRequestHandling::NeedsApproval(operation(request)),
        Err(error) => AcpRequestHandling::Responded(Err(error)),
    }
}

fn parse_and_respond<T: JsonRpcMessage>(
    method: &str,
    params: &Value,
    handle: impl FnOnce(T) -> Result<Value, Error>,
) -> AcpRequestHandling {
    AcpRequestHandling::Responded(T::parse_message(method, params).and_then(handle))
}
