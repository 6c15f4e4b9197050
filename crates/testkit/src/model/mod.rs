//! A model that does as it is told by the prompt, for real agents to talk to: Anthropic's Messages, OpenAI's Responses
//! and Chat Completions, and Gemini, all on one port of loopback. It records what it saw, and refuses to be a way out.
//!
//! A marker in what the user said last decides the answer:
//!
//! | marker | what the model does |
//! | --- | --- |
//! | none | says `ECHO[text] users=N results=K`, and ` last="..."` of the newest result |
//! | `RECALL` | says `RECALL[one \| two]`: everything that the user said before, so that memory can be proved |
//! | `TOOL:run:LINE` | calls the agent's shell with the rest of the line, with more rights where a tool can ask for them |
//! | `TOOL:plain:LINE` | the same without asking for more rights |
//! | `TOOL:write:PATH` | has the shell write `hi` to a file |
//! | `TOOL:two:PATH` | has the shell append to a file, in two calls one after another |
//! | `TOOL:sleep:SECONDS` | has the shell sleep in a process called [`sleeper`] |
//! | `TOOL:read:PATH` | calls the agent's tool for reading files |
//! | `TOOL:ask` | calls the agent's tool for asking the user: `Which colour?`, `Red` or `Blue` |
//! | `SLOW:SECONDS` | says `tok0 tok1 ...`, five in a second, and `SLOWEND` |
//! | `BURST:N` | says `b0 b1 ...`, N of them, as fast as they are read |
//! | `ERR:STATUS`, `ERRONCE:STATUS` | answers with that status: always, or only to the first request with this text |
//! | `DROP`, `DROPONCE` | says three tokens and cuts the connection: always, or only the first time |
//!
//! After the results of its tools it says what it says to a plain text. Every answer costs [`INPUT_TOKENS`] of input,
//! and one token of output for each word, or [`CALL_TOKENS`] for a call. A request that offers no tools or wants JSON
//! is a side call (a title, a summary, who speaks next): it gets something harmless and never follows a marker.
//!
//! - [`seen`]: what is recorded of a request.
//! - `heard`: a request as it was meant, whichever API it came by.
//! - `script`, `tools`: what the markers mean, and which of an agent's tools is meant.
//! - `messages`, `responses`, `chat`, `gemini`: one API each, read and spoken.
//! - `server`: HTTP.

mod chat;
mod gemini;
mod messages;
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

/// What every answer costs in input tokens.
pub const INPUT_TOKENS: u64 = 100;

/// What the call of a tool costs in output tokens. A text costs one for each word.
pub const CALL_TOKENS: u64 = 10;

/// A model that listens. It ends with its value.
///
/// It lives on a thread of its own: a test that blocks its runtime must not look like a model that thinks.
#[derive(Debug)]
pub struct FakeModel {
    address: SocketAddr,
    log: ModelLog,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl FakeModel {
    /// One on any free port.
    pub fn start() -> Self {
        Self::start_at(0)
    }

    /// One on this port.
    pub fn start_at(port: u16) -> Self {
        let listener = std::net::TcpListener::bind(("127.0.0.1", port))
            .unwrap_or_else(|error| panic!("port {port} of loopback cannot be had: {error}"));
        let address = listener.local_addr().expect("it is bound");
        let (log, (stop, stopped)) = (ModelLog::new(), oneshot::channel::<()>());
        let serving = log.clone();
        let thread = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            runtime.expect("a runtime can be built").block_on(async move {
                listener.set_nonblocking(true).expect("a socket can be set not to block");
                let listener = tokio::net::TcpListener::from_std(listener).expect("it listens");
                tokio::select! {
                    () = server::serve(listener, serving) => {}
                    _ = stopped => {}
                }
            });
        });
        Self { address, log, stop: Some(stop), thread: Some(thread) }
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The same as a URL, without a path: some APIs want `/v1` after it.
    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Every request so far, the side calls too.
    pub fn requests(&self) -> Vec<ModelRequestRecord> {
        self.log.read(|all| all.requests.clone())
    }

    /// The requests so far that are turns of a conversation.
    pub fn turns(&self) -> Vec<ModelRequestRecord> {
        self.log.read(|all| all.requests.iter().filter(|seen| !seen.is_side_call).cloned().collect())
    }

    /// How many turns there were so far.
    pub fn turn_count(&self) -> usize {
        self.log.read(|all| all.requests.iter().filter(|seen| !seen.is_side_call).count())
    }

    /// The hosts that somebody wanted to reach through the model, taking it for a proxy.
    pub fn proxied_hosts(&self) -> Vec<String> {
        self.log.read(|all| all.proxied_hosts.clone())
    }

    /// Waits for the first turn that is as wanted. It may have come before, and may become so only by its outcome.
    pub async fn wait_for(
        &self,
        what: &str,
        wanted: impl Fn(&ModelRequestRecord) -> bool,
    ) -> ModelRequestRecord {
        let mut changes = self.log.subscribe();
        let find = |all: &request_log::ModelLogContents| {
            all.requests.iter().find(|seen| !seen.is_side_call && wanted(seen)).cloned()
        };
        let found = tokio::time::timeout(WAIT_LIMIT, changes.wait_for(|all| find(all).is_some())).await;
        match found {
            Ok(all) => find(&all.expect("the log lives as long as the model")).expect("it was just there"),
            Err(_) => {
                panic!("the model waited {WAIT_LIMIT:?} in vain for {what}; it saw {:#?}", self.requests())
            }
        }
    }

    /// Everything so far, and then every change.
    pub fn follow(&self) -> ModelRequestWatch {
        let mut changes = self.log.subscribe();
        changes.mark_changed();
        ModelRequestWatch(changes)
    }
}

/// Whoever follows what the model sees.
#[derive(Debug)]
pub struct ModelRequestWatch(tokio::sync::watch::Receiver<request_log::ModelLogContents>);

impl ModelRequestWatch {
    /// Waits until there is something new, and gives all requests, the side calls too; none once the model has ended.
    pub async fn next(&mut self) -> Option<Vec<ModelRequestRecord>> {
        self.0.changed().await.ok()?;
        Some(self.0.borrow_and_update().requests.clone())
    }
}

impl Drop for FakeModel {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            // It has nothing more to say, not even that it panicked: requests without an answer have said so.
            let _ended = thread.join();
        }
    }
}
