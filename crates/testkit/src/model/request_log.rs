//! The requests that the model received: one record per request, with its outcome. Records are only added and updated,
//! and subscribers are notified of every change.

use std::time::Instant;

use tokio::sync::watch;

/// The API of a request.
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
    /// None of them: a list of models, or an unknown path.
    Other,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ModelRequestOutcome {
    /// The answer is being sent.
    Streaming,
    /// The answer was sent completely.
    Done {
        /// The output tokens that it cost.
        tokens: u64,
    },
    /// The client closed the connection first, as it does when a cancel has reached the model.
    ClientGone {
        /// The tokens sent by then.
        tokens: u64,
    },
    /// The script cut the stream.
    Cut {
        /// The tokens sent by then.
        tokens: u64,
    },
    /// An error was sent instead: one of the script's, or 404 and 415 for requests that the model does not understand.
    Refused { status: u16 },
}

#[derive(Debug, Clone)]
pub struct ModelRequestRecord {
    pub api: ModelApi,
    /// The path with the query.
    pub path: String,
    /// The requested model.
    pub model: String,
    /// The user's messages in this conversation, oldest first, without what agents wrap around them.
    pub texts: Vec<String>,
    /// Tool results since the last of those messages.
    pub results: usize,
    /// The names of the offered tools.
    pub tools: Vec<String>,
    /// All that the model is told, as JSON: the agent's own instructions too, but not the offered tools.
    pub told: String,
    /// Whether this is not a turn of the conversation but a title, a summary, a token count or a model list.
    pub is_side_call: bool,
    pub received_at: Instant,
    /// When the outcome was known.
    pub ended_at: Option<Instant>,
    pub outcome: ModelRequestOutcome,
}

impl ModelRequestRecord {
    /// The user's last message.
    pub fn last_text(&self) -> &str {
        self.texts.last().map_or("", String::as_str)
    }

    /// How many messages the user has sent.
    pub fn user_count(&self) -> usize {
        self.texts.len()
    }

    /// Whether the client closed the connection before the end.
    pub fn is_client_gone(&self) -> bool {
        matches!(self.outcome, ModelRequestOutcome::ClientGone { .. })
    }
}

#[derive(Debug, Default)]
pub(super) struct ModelLogContents {
    pub(super) requests: Vec<ModelRequestRecord>,
    /// Hosts that a client tried to reach through us.
    pub(super) proxied_hosts: Vec<String>,
}

/// The shared log. Clones are the same log.
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
        self.0.send_modify(|contents| contents.proxied_hosts.push(host));
    }

    /// Adds a request as streaming. The returned entry sets its outcome.
    pub(super) fn add(&self, record: ModelRequestRecord) -> ModelLogEntry {
        let mut index = 0;
        self.0.send_modify(|contents| {
            index = contents.requests.len();
            contents.requests.push(record);
        });
        ModelLogEntry { log: self.clone(), index, tokens: 0, is_open: true }
    }
}

/// One request's entry in the log. Dropping it without an outcome means that the client is gone.
#[derive(Debug)]
pub(super) struct ModelLogEntry {
    log: ModelLog,
    index: usize,
    /// The tokens sent so far.
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
        self.log.0.send_modify(|contents| {
            let record = &mut contents.requests[self.index];
            record.ended_at = Some(Instant::now());
            record.outcome = outcome;
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
