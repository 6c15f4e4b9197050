//! A model for real agents that does what the prompt says. It serves Anthropic's Messages, OpenAI's Responses and Chat
//! Completions, and Gemini, all on one loopback port. It records every request, and refuses to act as a proxy.
//!
//! A marker in the user's last message decides the answer:
//!
//! | marker | what the model does |
//! | --- | --- |
//! | none | answers `ECHO[text] users=N results=K`, and ` last="..."` with the newest result |
//! | `RECALL` | answers `RECALL[one \| two]` with all earlier messages of the user, to prove its memory |
//! | `TOOL:run:LINE` | calls the agent's shell with the rest of the line, asking for more rights if possible |
//! | `TOOL:plain:LINE` | the same without asking for more rights |
//! | `TOOL:write:PATH` | uses the shell to write `hi` to a file |
//! | `TOOL:two:PATH` | uses the shell to append to a file, in two calls one after another |
//! | `TOOL:sleep:SECONDS` | uses the shell to sleep in a process named [`sleeper_name`] |
//! | `TOOL:create:PATH` | calls the agent's tool for writing files, which writes `hi` to a file |
//! | `TOOL:read:PATH` | calls the agent's tool for reading files |
//! | `TOOL:ask` | calls the agent's tool for asking the user: `Which colour?`, `Red` or `Blue` |
//! | `TOOL:todo` | calls the agent's tool for its to-do list: `read it` is done, `change it` is under way |
//! | `TOOL:call:NAME JSON` | calls the agent's tool of this name, with these arguments |
//! | `TOOL:mcp:NAME JSON` | calls a tool of an MCP server that the agent was given, with these arguments |
//! | `SLOW:SECONDS` | streams `tok0 tok1 ...`, five per second, and `SLOWEND` |
//! | `BURST:N` | streams `b0 b1 ...`, N tokens, as fast as they are read |
//! | `ERR:STATUS`, `ERRONCE:STATUS` | answers with that status: always, or only for the first request with this text |
//! | `QUOTA:SECONDS` | answers with status 429: the account's quota is exhausted, and resets in so many seconds |
//! | `ERRAFTER:STATUS` | answers with that status once it has the result of a tool |
//! | `DROP`, `DROPONCE` | streams three tokens and cuts the connection: always, or only the first time |
//! | `EMPTY-BODY` | answers with status 200 and nothing else |
//! | `GARBLED` | streams events whose data is no JSON |
//! | `OUT-OF-TOKENS` | streams a few words and ends because the answer has reached its limit of tokens |
//! | `HANG` | accepts the request and never answers |
//! | `STALL` | streams `tok0` and never goes on |
//!
//! A request without a key is refused with status 401, and one for the model `no-such-model` with 404.
//!
//! After its tools' results, the model answers as it does without a marker. Every answer costs [`INPUT_TOKENS`] of
//! input, and one token of output per word, or [`CALL_TOKENS`] for a call. A request that offers no tools or wants
//! JSON is a side call (a title, a summary, who speaks next): it gets a harmless answer and never follows a marker.
//!
//! - [`request_log`]: what is recorded of a request.
//! - `request`: a request in a form that is independent of the API.
//! - `script`, `tools`: what the markers mean, and which of an agent's tools they use.
//! - `quota`: how each API says that a quota is exhausted.
//! - `messages`, `responses`, `chat`, `gemini`: parsing and encoding for one API each.
//! - `server`: HTTP.

mod chat;
mod gemini;
mod messages;
mod quota;
mod request;
pub mod request_log;
mod responses;
mod script;
mod server;
#[cfg(test)]
mod tests;
mod tools;

use std::net::SocketAddr;
use std::thread::JoinHandle;

use tokio::sync::oneshot;

pub use request_log::{ModelApi, ModelRequestOutcome, ModelRequestRecord};
pub use script::sleeper_name;

use crate::WAIT_LIMIT;
use request_log::ModelLog;

/// The input tokens that every answer costs.
pub const INPUT_TOKENS: u64 = 100;

/// The output tokens that a tool call costs. Text costs one token per word.
pub const CALL_TOKENS: u64 = 10;

/// A model that listens on loopback. Dropping it ends the server.
///
/// It runs on a thread of its own, so that a test that blocks its runtime does not look like a model that thinks.
#[derive(Debug)]
pub struct FakeModel {
    address: SocketAddr,
    log: ModelLog,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl FakeModel {
    /// Starts on a free port.
    pub fn start() -> Self {
        Self::start_at(0)
    }

    /// Starts on this port.
    pub fn start_at(port: u16) -> Self {
        let listener = std::net::TcpListener::bind(("127.0.0.1", port))
            .unwrap_or_else(|error| panic!("failed to bind port {port} on loopback: {error}"));
        let address = listener.local_addr().expect("it is bound");
        let (log, (stop, stopped)) = (ModelLog::new(), oneshot::channel::<()>());
        let server_log = log.clone();
        let thread = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            runtime.expect("a runtime can be built").block_on(async move {
                listener.set_nonblocking(true).expect("a socket can be set not to block");
                let listener = tokio::net::TcpListener::from_std(listener).expect("it listens");
                tokio::select! {
                    () = server::serve(listener, server_log) => {}
                    _ = stopped => {}
                }
            });
        });
        Self { address, log, stop: Some(stop), thread: Some(thread) }
    }

    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The address as a URL without a path; some APIs need `/v1` appended.
    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Every request so far, including side calls.
    pub fn requests(&self) -> Vec<ModelRequestRecord> {
        self.log.read(|contents| contents.requests.clone())
    }

    /// The requests so far that are turns of a conversation.
    pub fn turns(&self) -> Vec<ModelRequestRecord> {
        self.log.read(|contents| {
            contents.requests.iter().filter(|record| !record.is_side_call).cloned().collect()
        })
    }

    pub fn turn_count(&self) -> usize {
        self.log.read(|contents| contents.requests.iter().filter(|record| !record.is_side_call).count())
    }

    /// The hosts that a client tried to reach by using the model as a proxy.
    pub fn proxied_hosts(&self) -> Vec<String> {
        self.log.read(|contents| contents.proxied_hosts.clone())
    }

    /// Waits for the first turn that matches `wanted`. It may have arrived before, and its outcome may still change.
    pub async fn wait_for(
        &self,
        what: &str,
        wanted: impl Fn(&ModelRequestRecord) -> bool,
    ) -> ModelRequestRecord {
        let mut changes = self.log.subscribe();
        let find = |contents: &request_log::ModelLogContents| {
            contents.requests.iter().find(|record| !record.is_side_call && wanted(record)).cloned()
        };
        let found =
            tokio::time::timeout(WAIT_LIMIT, changes.wait_for(|contents| find(contents).is_some())).await;
        match found {
            Ok(contents) => {
                find(&contents.expect("the log lives as long as the model")).expect("it was just there")
            }
            Err(_) => {
                panic!(
                    "timed out after {WAIT_LIMIT:?} waiting for {what}; the model received {:#?}",
                    self.requests()
                )
            }
        }
    }

    /// Follows all requests: everything so far, and then every change.
    pub fn follow(&self) -> ModelRequestWatch {
        let mut changes = self.log.subscribe();
        changes.mark_changed();
        ModelRequestWatch(changes)
    }
}

/// Follows the requests that the model receives.
#[derive(Debug)]
pub struct ModelRequestWatch(tokio::sync::watch::Receiver<request_log::ModelLogContents>);

impl ModelRequestWatch {
    /// Waits for a change, and returns all requests, including side calls. `None` once the model has ended.
    pub async fn next(&mut self) -> Option<Vec<ModelRequestRecord>> {
        self.0.changed().await.ok()?;
        Some(self.0.borrow_and_update().requests.clone())
    }
}

impl Drop for FakeModel {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            // A panic of the thread needs no report here: its requests have failed already.
            let _ended = thread.join();
        }
    }
}
