//! What the model saw: one record for each request, and how it went. Records are only ever added and brought up to
//! date, and whoever waits is told of every change.

use std::time::Instant;

use tokio::sync::watch;

/// Which API a request spoke.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ModelApi {
    /// Anthropic's Messages.
    Messages,
    /// OpenAI's Responses.
    Responses,
    /// OpenAI's Chat Completions.
    Chat,
    /// Google's Gemini.
    Gemini,
    /// None of them: a list of models, or a path that the model does not know.
    Other,
}

/// How a request went.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ModelRequestOutcome {
    /// The answer is still being given.
    Streaming,
    /// It was given to its end.
    Done {
        /// What it cost in output tokens.
        tokens: u64,
    },
    /// The client closed the connection first. So looks a cancel that has reached the model.
    ClientGone {
        /// What had been said by then.
        tokens: u64,
    },
    /// The script cut the stream in its middle.
    Cut {
        /// What had been said by then.
        tokens: u64,
    },
    /// An error was given instead: one of the script's, or 404 and 415 for what the model does not understand.
    Refused {
        /// Its status.
        status: u16,
    },
}

/// One request.
#[derive(Debug, Clone)]
pub struct ModelRequestRecord {
    /// What it spoke.
    pub api: ModelApi,
    /// Its path, with the query.
    pub path: String,
    /// The model that it asked for.
    pub model: String,
    /// What the user said in this conversation, oldest first, without what agents wrap around it.
    pub texts: Vec<String>,
    /// Results of tools since the newest of those texts.
    pub results: usize,
    /// The names of the tools that it offered.
    pub tools: Vec<String>,
    /// Whether it is none of the conversation's turns: a title, a summary, a count of tokens, a choice of models.
    pub is_side_call: bool,
    /// When it came.
    pub received_at: Instant,
    /// When it had its outcome.
    pub ended_at: Option<Instant>,
    /// How it went.
    pub outcome: ModelRequestOutcome,
}

impl ModelRequestRecord {
    /// What the user said last.
    pub fn last_text(&self) -> &str {
        self.texts.last().map_or("", String::as_str)
    }

    /// How often the user spoke.
    pub fn user_count(&self) -> usize {
        self.texts.len()
    }

    /// Whether the client closed the connection before the end.
    pub fn is_client_gone(&self) -> bool {
        matches!(self.outcome, ModelRequestOutcome::ClientGone { .. })
    }
}

/// All that was seen.
#[derive(Debug, Default)]
pub(super) struct ModelLogContents {
    pub(super) requests: Vec<ModelRequestRecord>,
    /// Hosts that somebody wanted to reach through us.
    pub(super) proxied_hosts: Vec<String>,
}

/// Where it is kept. Clones are the same log.
#[derive(Debug, Clone)]
pub(super) struct ModelLog(watch::Sender<ModelLogContents>);

impl ModelLog {
    pub(super) fn new() -> Self {
        Self(watch::Sender::new(ModelLogContents::default()))
    }

    pub(super) fn read<T>(&self, read: impl FnOnce(&ModelLogContents) -> T) -> T {
        read(&self.0.borrow())
    }

    pub(super) fn subscribe(&self) -> watch::Receiver<ModelLogContents> {
        self.0.subscribe()
    }

    pub(super) fn add_proxied_host(&self, host: String) {
        self.0.send_modify(|all| all.proxied_hosts.push(host));
    }

    /// Adds a request. It is open until its record says otherwise.
    pub(super) fn add(&self, seen: ModelRequestRecord) -> ModelLogEntry {
        let mut place = 0;
        self.0.send_modify(|all| {
            place = all.requests.len();
            all.requests.push(seen);
        });
        ModelLogEntry { log: self.clone(), index: place, tokens: 0, is_open: true }
    }
}

/// One request's place in the log. Whoever drops it without an outcome was dropped by the client.
#[derive(Debug)]
pub(super) struct ModelLogEntry {
    log: ModelLog,
    index: usize,
    /// What has been said so far.
    pub(super) tokens: u64,
    is_open: bool,
}

impl ModelLogEntry {
    pub(super) fn finish(mut self) {
        let tokens = self.tokens;
        self.set_outcome(ModelRequestOutcome::Done { tokens });
    }

    pub(super) fn finish_cut(mut self) {
        let tokens = self.tokens;
        self.set_outcome(ModelRequestOutcome::Cut { tokens });
    }

    pub(super) fn finish_refused(mut self, status: u16) {
        self.set_outcome(ModelRequestOutcome::Refused { status });
    }

    fn set_outcome(&mut self, outcome: ModelRequestOutcome) {
        self.is_open = false;
        self.log.0.send_modify(|all| {
            let seen = &mut all.requests[self.index];
            seen.ended_at = Some(Instant::now());
            seen.outcome = outcome;
        });
    }
}

impl Drop for ModelLogEntry {
    fn drop(&mut self) {
        if self.is_open {
            self.set_outcome(ModelRequestOutcome::ClientGone { tokens: self.tokens });
        }
    }
}
