//! How the server reports the end of a turn: with the turn's id, a status, and an error if it failed.

use qd_protocol::Millis;
use qd_protocol::event::RunError;
use serde::Deserialize;
use serde_json::Value;

use crate::agent_launcher::NOT_SIGNED_IN;

/// The end of a turn.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub(super) struct CodexTurnEnd {
    pub(super) id: String,
    pub(super) status: String,
    #[serde(default)]
    pub(super) error: Option<CodexTurnError>,
}

/// The error of a failed turn.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct CodexTurnError {
    message: String,
    #[serde(default)]
    codex_error_info: Value,
    #[serde(default)]
    additional_details: Option<String>,
}

impl CodexTurnError {
    /// The error that the run fails with. `quota_resets_at` is known if the account's quota is exhausted.
    pub(super) fn run_error(&self, quota_resets_at: Option<Millis>) -> RunError {
        let message = self.message_text();
        match self.codex_error_info.as_str() {
            Some("unauthorized") => RunError::new(NOT_SIGNED_IN, message),
            Some("usageLimitExceeded") => RunError::quota_exhausted(message, quota_resets_at),
            _ => RunError::new("agent_error", message),
        }
    }

    /// The error as one line of text. If the message is the JSON body of a model API error, only its cause is shown.
    pub(super) fn message_text(&self) -> String {
        #[derive(Deserialize)]
        struct CodexErrorBody {
            error: CodexErrorCause,
        }
        #[derive(Deserialize)]
        struct CodexErrorCause {
            message: String,
        }
        let cause = serde_json::from_str(&self.message).ok().map(|CodexErrorBody { error }| error.message);
        let message = cause.unwrap_or_else(|| self.message.clone());
        match &self.additional_details {
            Some(details) if *details != message => format!("{message}: {details}"),
            _ => message,
        }
    }
}
