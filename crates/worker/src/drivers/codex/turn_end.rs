//! How turns end, in the server's words: under their own id, with a status, and with an error if they failed.

use qd_protocol::event::RunError;
use serde::Deserialize;
use serde_json::Value;

/// A turn that has ended.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub(super) struct CodexTurnEnd {
    pub(super) id: String,
    pub(super) status: String,
    #[serde(default)]
    pub(super) error: Option<CodexTurnError>,
}

/// What went wrong, in the server's words.
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
    /// As a run fails with it.
    pub(super) fn run_error(&self) -> RunError {
        let code =
            if self.codex_error_info == "unauthorized" { "agent_not_signed_in" } else { "agent_error" };
        RunError::new(code, self.message_text())
    }

    /// In one sentence. Of what the model's server answered, only the cause is for people.
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
