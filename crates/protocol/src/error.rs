//! The one shape of every refusal. A code is stable and belongs to one HTTP status; the message says what to do.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

macro_rules! codes {
    ($($(#[$doc:meta])* $name:ident = $text:literal, $status:literal;)*) => {
        /// Why something was refused.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub enum ErrorCode { $($(#[$doc])* $name,)* }

        impl ErrorCode {
            /// All of them, for the documentation's sake.
            pub const ALL: &[ErrorCode] = &[$(ErrorCode::$name,)*];

            /// The code as it stands on the wire.
            pub fn as_str(self) -> &'static str {
                match self { $(ErrorCode::$name => $text,)* }
            }

            /// The HTTP status it comes with.
            pub fn status(self) -> u16 {
                match self { $(ErrorCode::$name => $status,)* }
            }
        }
    };
}

codes! {
    /// The body is not the JSON that this route takes.
    InvalidRequest = "invalid_request", 400;
    /// A field has a value that it cannot have.
    InvalidValue = "invalid_value", 400;
    /// The directory does not exist or is not one.
    PathNotFound = "path_not_found", 400;
    /// No agent has this name.
    UnknownAgent = "unknown_agent", 400;
    /// The agent cannot take this setting.
    UnsupportedSetting = "unsupported_setting", 400;
    /// The cursor is ahead of the journal or is not one.
    BadCursor = "bad_cursor", 400;
    /// The answer does not fit its ask, which stays open.
    InvalidAnswer = "invalid_answer", 400;
    /// A fleet's file is wrong; the details say where.
    InvalidFleet = "invalid_fleet", 400;
    /// No token, or a wrong one.
    Unauthorized = "unauthorized", 401;
    /// The `Host` header names somebody else.
    HostNotAllowed = "host_not_allowed", 403;
    /// The request comes from a web page that is not ours.
    OriginNotAllowed = "origin_not_allowed", 403;
    /// Another user's process.
    PeerNotAllowed = "peer_not_allowed", 403;
    /// A process that an agent started wants more than that agent's session may.
    AgentNotAllowed = "agent_not_allowed", 403;
    /// A worker token can do nothing but work.
    WorkerNotAllowed = "worker_not_allowed", 403;
    /// Nothing has this id.
    NotFound = "not_found", 404;
    /// The path exists, but not with this method.
    MethodNotAllowed = "method_not_allowed", 405;
    /// It had not ended in time.
    WaitTimeout = "wait_timeout", 408;
    /// A run is live.
    Busy = "busy", 409;
    /// The session takes no more prompts.
    SessionClosed = "session_closed", 409;
    /// The run id is known, with other words.
    RunIdConflict = "run_id_conflict", 409;
    /// Nothing is running that could be steered.
    NotRunning = "not_running", 409;
    /// The agent cannot be steered.
    SteerUnsupported = "steer_unsupported", 409;
    /// The run is no longer in the queue.
    NotQueued = "not_queued", 409;
    /// Somebody answered first.
    AlreadyResolved = "already_resolved", 409;
    /// The agent no longer waits for this.
    Withdrawn = "withdrawn", 409;
    /// The agent is known but cannot start here.
    AgentUnavailable = "agent_unavailable", 409;
    /// The session has no terminal to look at.
    NoTerminal = "no_terminal", 409;
    /// The session has no worktree, or it was not made yet.
    NoWorktree = "no_worktree", 409;
    /// Two sides changed the same; nothing was merged.
    MergeConflict = "merge_conflict", 409;
    /// The worktree holds work that is nowhere else.
    UnmergedWork = "unmerged_work", 409;
    /// Git cannot do it as things are; the message says what stands in the way.
    GitRefused = "git_refused", 409;
    /// The same `Idempotency-Key` came with another request.
    IdempotencyConflict = "idempotency_conflict", 409;
    /// The mail id is known, with other words.
    MailIdConflict = "mail_id_conflict", 409;
    /// Nobody, or somebody else, has claimed the message.
    NotClaimed = "not_claimed", 409;
    /// Too large a body.
    BodyTooLarge = "body_too_large", 413;
    /// Too many prompts wait.
    QueueFull = "queue_full", 429;
    /// An agent has made as many sessions as it may.
    TooManySessions = "too_many_sessions", 429;
    /// Too many messages lie in the mailbox.
    MailboxFull = "mailbox_full", 429;
    /// Too many requests wait.
    Overloaded = "overloaded", 429;
    /// A fault of ours. Please report it.
    Internal = "internal", 500;
    /// The daemon is going down.
    Stopping = "stopping", 503;
    /// The journal could not be written; nothing was accepted.
    StorageFailed = "storage_failed", 503;
}

/// A refusal, as it goes over the wire inside `{"error": …}`.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[error("{message}")]
pub struct ApiError {
    /// Which refusal.
    pub code: ErrorCode,
    /// One sentence: what happened and what to do.
    pub message: String,
    /// What a program may want to know.
    pub details: Map<String, Value>,
}

impl ApiError {
    /// A refusal with nothing more to say.
    pub fn new(code: ErrorCode, message: impl Into<String>) -> Self {
        Self { code, message: message.into(), details: Map::new() }
    }

    /// The same with one more detail.
    #[must_use]
    pub fn with_detail(mut self, key: &str, value: impl Into<Value>) -> Self {
        self.details.insert(key.to_owned(), value.into());
        self
    }

    /// Nothing of this kind has this id.
    pub fn not_found(what: &str, id: impl std::fmt::Display) -> Self {
        Self::new(ErrorCode::NotFound, format!("there is no {what} {id}"))
    }
}

/// The body of every refusal.
#[derive(Debug, Clone, Serialize, Deserialize, utoipa::ToSchema)]
pub struct ErrorBody {
    /// The refusal.
    pub error: ErrorDoc,
}

/// The refusal inside an [`ErrorBody`]. The code is text here, so that an older client reads a newer daemon's.
#[derive(Debug, Clone, Serialize, Deserialize, utoipa::ToSchema)]
pub struct ErrorDoc {
    /// A stable snake_case word.
    pub code: String,
    /// One sentence: what happened and what to do.
    pub message: String,
    /// What a program may want to know.
    #[serde(default)]
    #[schema(value_type = Object)]
    pub details: Map<String, Value>,
}

impl From<ApiError> for ErrorBody {
    fn from(error: ApiError) -> Self {
        let ApiError { code, message, details } = error;
        Self { error: ErrorDoc { code: code.as_str().to_owned(), message, details } }
    }
}
