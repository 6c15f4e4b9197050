//! Error responses. All of them have the same shape. A code is stable and always comes with the same HTTP status; the
//! message is for people and says what to do.

use std::error::Error;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

macro_rules! codes {
    ($($(#[$doc:meta])* $name:ident = $text:literal, $status:literal;)*) => {
        /// Stable code of an error response. `docs/api.md` lists all of them.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub enum ErrorCode { $($(#[$doc])* $name,)* }

        impl ErrorCode {
            /// Every code. A test compares this list with `docs/api.md`.
            pub const ALL: &[ErrorCode] = &[$(ErrorCode::$name,)*];

            /// The code as it appears in JSON.
            pub fn as_str(self) -> &'static str {
                match self { $(ErrorCode::$name => $text,)* }
            }

            /// The HTTP status of this code.
            pub fn status(self) -> u16 {
                match self { $(ErrorCode::$name => $status,)* }
            }
        }
    };
}

codes! {
    /// The body is not the JSON that this route takes.
    InvalidRequest = "invalid_request", 400;
    /// A field or parameter has a value that is not allowed.
    InvalidValue = "invalid_value", 400;
    /// The path does not exist or is not a directory.
    PathNotFound = "path_not_found", 400;
    /// No agent has this name.
    UnknownAgent = "unknown_agent", 400;
    /// The agent does not support this setting.
    UnsupportedSetting = "unsupported_setting", 400;
    /// The cursor is ahead of the journal or is not a cursor.
    BadCursor = "bad_cursor", 400;
    /// The answer does not fit the ask. The ask stays open.
    InvalidAnswer = "invalid_answer", 400;
    /// The fleet file is wrong. The details say where.
    InvalidFleet = "invalid_fleet", 400;
    /// The token is missing or wrong.
    Unauthorized = "unauthorized", 401;
    /// The token is no longer valid.
    TokenExpired = "token_expired", 401;
    /// The role or the workspace of the token does not allow this. The details say which role would.
    RoleNotAllowed = "role_not_allowed", 403;
    /// The `Host` header is not a name of this daemon.
    HostNotAllowed = "host_not_allowed", 403;
    /// The request comes from a foreign web page.
    OriginNotAllowed = "origin_not_allowed", 403;
    /// A process of another user connected to the socket.
    PeerNotAllowed = "peer_not_allowed", 403;
    /// A process started by an agent wants more than that agent's session may do.
    AgentNotAllowed = "agent_not_allowed", 403;
    /// A worker token was used for something other than joining as a worker.
    WorkerNotAllowed = "worker_not_allowed", 403;
    /// The session's policy or a person refused this call of a tool.
    ToolDenied = "tool_denied", 403;
    /// Nothing has this id.
    NotFound = "not_found", 404;
    /// The path exists, but not with this method.
    MethodNotAllowed = "method_not_allowed", 405;
    /// The client does not accept what the route answers.
    NotAcceptable = "not_acceptable", 406;
    /// The run did not end in time.
    WaitTimeout = "wait_timeout", 408;
    /// A run is live.
    Busy = "busy", 409;
    /// The session takes no more prompts.
    SessionClosed = "session_closed", 409;
    /// The agent of the session has said as much as it may.
    JournalLimit = "journal_limit", 409;
    /// The run id was already used with another session, prompt or attachments.
    RunIdConflict = "run_id_conflict", 409;
    /// No run is active that could be steered.
    NotRunning = "not_running", 409;
    /// The agent cannot be steered.
    SteerUnsupported = "steer_unsupported", 409;
    /// The run is no longer in the queue.
    NotQueued = "not_queued", 409;
    /// Somebody else answered first. The details have the winning answer.
    AlreadyResolved = "already_resolved", 409;
    /// The agent no longer waits for this answer.
    Withdrawn = "withdrawn", 409;
    /// A person has to decide about this call of a tool. Repeat the request with the same `Idempotency-Key`.
    PermissionPending = "permission_pending", 409;
    /// The input of the ask is not the one that the answer was given to. The ask stays open.
    AskChanged = "ask_changed", 409;
    /// The agent is known but cannot start here.
    AgentUnavailable = "agent_unavailable", 409;
    /// The agent cannot be confined as strongly as was asked for. The details have the level and what is missing.
    SandboxUnavailable = "sandbox_unavailable", 409;
    /// A setting of the agent lets it act without asking, and cannot be overridden. The details name the setting.
    AgentOverridesPolicy = "agent_overrides_policy", 409;
    /// An open session already has the agent's conversation. `details` has its `session_id`.
    ConversationInUse = "conversation_in_use", 409;
    /// The session's agent has no terminal, or is not running.
    NoTerminal = "no_terminal", 409;
    /// The session has no worktree, or it has not been created yet.
    NoWorktree = "no_worktree", 409;
    /// What connects the worktree with its repository was changed since it was created. Nothing was done with it.
    WorktreeChanged = "worktree_changed", 409;
    /// Both sides changed the same files in conflicting ways. Nothing was changed.
    MergeConflict = "merge_conflict", 409;
    /// The worktree holds work that exists nowhere else.
    UnmergedWork = "unmerged_work", 409;
    /// Git cannot do this in the current state. The message says what is in the way.
    GitRefused = "git_refused", 409;
    /// Another token has this name.
    TokenNameTaken = "token_name_taken", 409;
    /// The same `Idempotency-Key` came with another request.
    IdempotencyConflict = "idempotency_conflict", 409;
    /// The mail id was already used for another message.
    MailIdConflict = "mail_id_conflict", 409;
    /// The message is not claimed, or somebody else claimed it.
    NotClaimed = "not_claimed", 409;
    /// The request body is larger than [`BODY_MAX`](crate::limits::BODY_MAX).
    BodyTooLarge = "body_too_large", 413;
    /// Too many prompts are already queued in this session.
    QueueFull = "queue_full", 429;
    /// As many asks of the session are open as may be.
    TooManyAsks = "too_many_asks", 429;
    /// The agent has created as many sessions as it may.
    TooManySessions = "too_many_sessions", 429;
    /// The mailbox already holds too many undelivered messages.
    MailboxFull = "mailbox_full", 429;
    /// Too many requests or connections are waiting.
    Overloaded = "overloaded", 429;
    /// A bug in Quarterdeck. Please report it.
    Internal = "internal", 500;
    /// The daemon is shutting down.
    Stopping = "stopping", 503;
    /// The journal could not be written. Nothing was accepted.
    StorageFailed = "storage_failed", 503;
}

/// An error response, sent as `{"error": …}`.
#[derive(Debug, Clone, thiserror::Error)]
#[error("{message}")]
pub struct ApiError {
    pub code: ErrorCode,
    /// One sentence for people: what happened and what to do.
    pub message: String,
    /// Additional data for programs.
    pub details: Map<String, Value>,
    /// What caused the error, for the daemon's log. It is never sent to a client.
    source: Option<Arc<dyn Error + Send + Sync>>,
}

/// Two errors are equal if a client sees the same.
impl PartialEq for ApiError {
    fn eq(&self, other: &Self) -> bool {
        (self.code, &self.message, &self.details) == (other.code, &other.message, &other.details)
    }
}

impl ApiError {
    /// An error without details.
    pub fn new(code: ErrorCode, message: impl Into<String>) -> Self {
        Self { code, message: message.into(), details: Map::new(), source: None }
    }

    /// An error whose message is that of its cause.
    pub fn caused_by(code: ErrorCode, source: impl Error + Send + Sync + 'static) -> Self {
        Self::new(code, source.to_string()).with_source(source)
    }

    /// Adds the cause, which is logged where the error becomes a response.
    #[must_use]
    pub fn with_source(mut self, source: impl Error + Send + Sync + 'static) -> Self {
        self.source = Some(Arc::new(source));
        self
    }

    /// Adds one detail.
    #[must_use]
    pub fn with_detail(mut self, key: &str, value: impl Into<Value>) -> Self {
        self.details.insert(key.to_owned(), value.into());
        self
    }

    /// A [`NotFound`](ErrorCode::NotFound) error: there is no `kind` with this id.
    pub fn not_found(kind: &str, id: impl std::fmt::Display) -> Self {
        Self::new(ErrorCode::NotFound, format!("there is no {kind} {id}"))
    }
}

/// Body of every error response.
#[derive(Debug, Clone, Serialize, Deserialize, utoipa::ToSchema)]
pub struct ErrorBody {
    pub error: ErrorDoc,
}

/// Code, message and details of an error.
#[derive(Debug, Clone, Serialize, Deserialize, utoipa::ToSchema)]
pub struct ErrorDoc {
    /// Stable code in snake_case. New codes may be added, so a client must accept codes that it does not know.
    pub code: String,
    /// One sentence for people: what happened and what to do. The text may change.
    pub message: String,
    /// Additional data for programs, depending on the code.
    #[serde(default)]
    #[schema(value_type = Object)]
    pub details: Map<String, Value>,
}

impl From<ApiError> for ErrorBody {
    fn from(error: ApiError) -> Self {
        let ApiError { code, message, details, source: _ } = error;
        Self { error: ErrorDoc { code: code.as_str().to_owned(), message, details } }
    }
}
