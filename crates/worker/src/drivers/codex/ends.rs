//! How turns end, in the server's words: under their own id, with a status, and with an error if they failed.

use qd_protocol::event::RunError;
use serde::Deserialize;
use serde_json::Value;

/// A turn that has ended.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub(super) struct Ended {
    pub(super) id: String,
    pub(super) status: String,
    #[serde(default)]
    pub(super) error: Option<TurnError>,
}

/// What went wrong, in the server's words.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct TurnError {
    message: String,
    #[serde(default)]
    codex_error_info: Value,
    #[serde(default)]
    additional_details: Option<String>,
}

impl TurnError {
    /// As a run fails with it.
    pub(super) fn run_error(&self) -> RunError {
        let code =
            if self.codex_error_info == "unauthorized" { "agent_not_signed_in" } else { "agent_error" };
        RunError::new(code, self.words())
    }

    /// In one sentence. Of what the model's server answered, only the cause is for people.
    pub(super) fn words(&self) -> String {
        #[derive(Deserialize)]
        struct Answer {
            error: Cause,
        }
        #[derive(Deserialize)]
        struct Cause {
            message: String,
        }
        let cause = serde_json::from_str(&self.message).ok().map(|Answer { error }| error.message);
        let message = cause.unwrap_or_else(|| self.message.clone());
        match &self.additional_details {
            Some(details) if *details != message => format!("{message}: {details}"),
            _ => message,
        }
    }
}
