//! What the worker itself says about a turn: why it stopped the turn, that its agent is silent, and that it ended without
//! an answer or as cancelled by nobody. Pure; the task in `agent` acts on it.

use std::time::Duration;

use qd_protocol::event::RunError;
use qd_protocol::link::{TurnOutcome, TurnStopReason};

use super::tree_limits::ExceededTreeLimit;

/// Why the worker itself stops a turn.
#[derive(Debug, Clone, Copy)]
pub(super) enum WorkerStop {
    /// The turn exceeded a limit while no daemon was attached.
    Limit(TurnStopReason),
    /// Nothing came from the agent for this long.
    Silence(Duration),
    /// What the agent has started uses more than it may.
    Tree(ExceededTreeLimit),
}

impl WorkerStop {
    /// The outcome of a turn that was stopped for this reason.
    pub(super) fn apply_to(self, outcome: TurnOutcome) -> TurnOutcome {
        match self {
            Self::Limit(stop) => TurnOutcome { stop, ..outcome },
            Self::Silence(silence) => {
                let message = format!(
                    "no word from the model for {} s, so the turn was ended; `silence_timeout_s` in config.toml sets \
                     after how long",
                    silence.as_secs()
                );
                let error = Some(RunError::new("agent_silent", message));
                TurnOutcome { stop: TurnStopReason::Error, error, ..outcome }
            }
            Self::Tree(exceeded) => {
                TurnOutcome { stop: TurnStopReason::Error, error: Some(exceeded.error()), ..outcome }
            }
        }
    }
}

/// The notice about a turn in which nothing has come for this long.
pub(super) fn silence_notice(silence: Duration) -> String {
    format!("no word from the model for {} s; the agent may be retrying", silence.as_secs())
}

/// The error of a turn that ended without the answer that it should have had.
pub(super) fn missing_answer_error() -> RunError {
    let message =
        "the agent ended its turn without text, a tool call or usage; its call of the model may have failed";
    RunError::new("agent_error", message)
}

/// The error of a turn that the agent reports as cancelled, though nobody cancelled it.
pub(super) fn unrequested_cancel_error() -> RunError {
    let message = "the agent reported that its turn was cancelled, but nobody cancelled it";
    RunError::new("agent_error", message)
}
