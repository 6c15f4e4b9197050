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
use qd_keeper::Keeper;
use serde_json::{Value, json};

use super::files::{Files, Served};
use super::terminals::{Started, Terminals};

/// What is done for an agent.
pub(super) struct Service {
    files: Files,
    terminals: Terminals,
    starting: FuturesUnordered<BoxFuture<'static, Started>>,
    waits: FuturesUnordered<BoxFuture<'static, Served>>,
}

/// Something that somebody has to allow first.
#[derive(Debug)]
pub(super) enum Wish {
    Read(ReadTextFileRequest),
    Write(WriteTextFileRequest),
    Run(CreateTerminalRequest),
}

/// What a request is.
#[derive(Debug)]
pub(super) enum Request {
    /// Not one for us.
    Other,
    /// A wish.
    Wish(Wish),
    /// Answered at once.
    Answer(Result<Value, Error>),
    /// Answered later.
    UnderWay,
}

impl Wish {
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
            Self::Run(request) => Terminals::line(request),
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
    pub(super) fn looks(&self) -> bool {
        matches!(self, Self::Read(_))
    }
}

impl Service {
    /// For an agent that works below `root`; without a keeper no command can be run.
    pub(super) fn below(root: &Path, keeper: Option<Arc<Keeper>>) -> Self {
        Self {
            files: Files::below(root),
            terminals: Terminals::below(root, keeper),
            starting: FuturesUnordered::new(),
            waits: FuturesUnordered::new(),
        }
    }

    /// Whether commands can be run.
    pub(super) fn runs_commands(&self) -> bool {
        self.terminals.are_served()
    }

    /// Where the agent works.
    pub(super) fn root(&self) -> &Path {
        self.files.root()
    }

    /// What a terminal has shown so far.
    pub(super) fn shown(&self, terminal: &TerminalId) -> Option<String> {
        self.terminals.shown(terminal)
    }

    /// Takes a request that is one of these, and does what needs nobody's leave.
    pub(super) fn take(&mut self, id: &RawJsonRpcId, method: &str, params: &Value) -> Request {
        if ReadTextFileRequest::matches_method(method) {
            wish(method, params, Wish::Read)
        } else if WriteTextFileRequest::matches_method(method) {
            wish(method, params, Wish::Write)
        } else if !self.terminals.are_served() {
            Request::Other
        } else if CreateTerminalRequest::matches_method(method) {
            wish(method, params, Wish::Run)
        } else if TerminalOutputRequest::matches_method(method) {
            answer(method, params, |request| self.terminals.output(&request))
        } else if WaitForTerminalExitRequest::matches_method(method) {
            let wait = WaitForTerminalExitRequest::parse_message(method, params)
                .and_then(|request| self.terminals.wait(&request.terminal_id));
            match wait {
                Ok(wait) => {
                    let id = id.clone();
                    self.waits.push(Box::pin(async move { (id, wait.await) }));
                    Request::UnderWay
                }
                Err(error) => Request::Answer(Err(error)),
            }
        } else if KillTerminalRequest::matches_method(method) {
            answer(method, params, |request| self.terminals.kill(&request))
        } else if ReleaseTerminalRequest::matches_method(method) {
            answer(method, params, |request| self.terminals.release(&request))
        } else {
            Request::Other
        }
    }

    /// Does what has been allowed. It is answered by [`Service::next`].
    pub(super) fn grant(&mut self, id: RawJsonRpcId, wish: Wish) {
        match wish {
            Wish::Read(request) => self.files.read(id, request),
            Wish::Write(request) => self.files.write(id, request),
            Wish::Run(request) => {
                let (command, root) = (self.terminals.command(request), self.terminals.root());
                self.starting.push(Box::pin(async move {
                    match command {
                        Ok(command) => (id, command.start(root).await),
                        Err(error) => (id, Err(error)),
                    }
                }));
            }
        }
    }

    /// The next answer; waits for ever if there is none to come. Nothing is lost if the wait is given up.
    pub(super) async fn next(&mut self) -> Served {
        tokio::select! {
            served = self.files.next() => served,
            Some(served) = self.waits.next() => served,
            Some((id, started)) = self.starting.next() => {
                (id, started.and_then(|(kept, most)| self.terminals.opened(kept, most)))
            }
            else => std::future::pending().await,
        }
    }
}

fn wish<T: JsonRpcMessage>(method: &str, params: &Value, wish: impl FnOnce(T) -> Wish) -> Request {
    match T::parse_message(method, params) {
        Ok(request) => Request::Wish(wish(request)),
        Err(error) => Request::Answer(Err(error)),
    }
}

fn answer<T: JsonRpcMessage>(
    method: &str,
    params: &Value,
    act: impl FnOnce(T) -> Result<Value, Error>,
) -> Request {
    Request::Answer(T::parse_message(method, params).and_then(act))
}
