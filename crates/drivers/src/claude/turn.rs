//! The state of one turn: messages that the agent has not settled, open asks, pending output, and whether the agent was
//! asked to stop. This module only keeps state; the loop in `conversation` makes the decisions.

use qd_protocol::event::RunError;
use qd_protocol::link::{TurnOutcome, TurnStopReason};
use qd_protocol::{EventNumber, Millis};
use serde_json::Value;

use super::messages::{ClaudeCommandState, ClaudeTurnResult};
use crate::agent_launcher::NOT_SIGNED_IN;
use crate::turn::DriverTurn;
use crate::turn_state::TurnState;

/// The state of one turn.
pub(super) struct ClaudeTurn<'t> {
    pub(super) state: TurnState<'t, String, (), Value>,
    /// Messages that are not settled: the prompt and the steers. The turn is over when none is left.
    open_messages: Vec<ClaudeSentMessage>,
    /// Whether the agent has started on the prompt. Earlier output belongs to something else.
    pub(super) prompt_started: bool,
    pub(super) cancelled: bool,
    /// The prompt, as long as the agent is being put into the mode of the turn.
    pub(super) prompt_after_mode: Option<ClaudePendingPrompt>,
    /// Why the turn is stopped: the agent no longer asks before it acts.
    pub(super) policy_error: Option<RunError>,
    /// When the quota of the account resets, if the agent has said in this turn that it is exhausted.
    pub(super) quota_resets_at: Option<Millis>,
    /// The outcome of the last result, or of the first one that reported a failure.
    outcome: Option<TurnOutcome>,
}

/// A prompt that is sent when the agent has answered a request for its mode.
#[derive(Debug)]
pub(super) struct ClaudePendingPrompt {
    pub(super) request_id: String,
    pub(super) mode: String,
    pub(super) message: Value,
}

/// A message that we sent, or that waits for the agent's mode.
#[derive(Debug)]
struct ClaudeSentMessage {
    uuid: String,
    /// The number of the steer; `None` for the prompt.
    steer: Option<EventNumber>,
    started: bool,
    /// Whether the agent has completed it. The result that says how may still be to come.
    completed: bool,
}

/// The outcome of a steer.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum ClaudeSteerOutcome {
    Taken(EventNumber),
    Missed(EventNumber),
}

impl<'t> ClaudeTurn<'t> {
    /// A turn in which only the prompt is open.
    pub(super) fn new(turn: &'t DriverTurn<'t>, prompt: String) -> Self {
        Self {
            state: TurnState::new(turn),
            open_messages: vec![ClaudeSentMessage {
                uuid: prompt,
                steer: None,
                started: false,
                completed: false,
            }],
            prompt_started: false,
            cancelled: false,
            prompt_after_mode: None,
            policy_error: None,
            quota_resets_at: None,
            outcome: None,
        }
    }

    /// Whether the prompt waits for the response with this id.
    pub(super) fn awaits_mode(&self, request_id: &str) -> bool {
        self.prompt_after_mode.as_ref().is_some_and(|pending| pending.request_id == request_id)
    }

    /// Ends a turn whose prompt was not sent.
    pub(super) fn fail_unsent(&mut self, error: RunError) {
        self.open_messages.clear();
        self.outcome = Some(TurnOutcome::failed(error));
    }

    /// Records that a steer was sent.
    pub(super) fn add_steer(&mut self, uuid: String, steer: EventNumber) {
        self.open_messages.push(ClaudeSentMessage {
            uuid,
            steer: Some(steer),
            started: false,
            completed: false,
        });
    }

    pub(super) fn takes_steers(&self) -> bool {
        self.prompt_started && !self.cancelled && !self.has_failed()
    }

    /// Whether one of the turn's results reported a failure.
    pub(super) fn has_failed(&self) -> bool {
        self.outcome.as_ref().is_some_and(|outcome| outcome.stop == TurnStopReason::Error)
    }

    /// The UUIDs of steers that the agent has not started on.
    pub(super) fn waiting_steers(&self) -> Vec<String> {
        let waits =
            |message: &&ClaudeSentMessage| message.steer.is_some() && !message.started && !message.completed;
        self.open_messages.iter().filter(waits).map(|message| message.uuid.clone()).collect()
    }

    /// Whether an open message of this turn has this UUID.
    pub(super) fn is_own_message(&self, uuid: &str) -> bool {
        self.open_messages.iter().any(|message| message.uuid == uuid)
    }

    /// Applies a lifecycle report of a message, and returns the outcome if it was a steer.
    pub(super) fn update_message(
        &mut self,
        uuid: &str,
        state: ClaudeCommandState,
    ) -> Option<ClaudeSteerOutcome> {
        let at = self.open_messages.iter().position(|message| message.uuid == uuid)?;
        let message = &mut self.open_messages[at];
        let was_started = message.started;
        match state {
            ClaudeCommandState::Queued => None,
            ClaudeCommandState::Started => {
                message.started = true;
                self.prompt_started |= message.steer.is_none();
                message.steer.filter(|_| !was_started).map(ClaudeSteerOutcome::Taken)
            }
            // The result decides. It names the messages that it ends, and comes before or after this report.
            ClaudeCommandState::Completed => {
                message.completed = true;
                message.started = true;
                self.prompt_started |= message.steer.is_none();
                message.steer.filter(|_| !was_started).map(ClaudeSteerOutcome::Taken)
            }
            // A message that was dropped before it was started has no result.
            ClaudeCommandState::Cancelled if !was_started || self.cancelled => {
                let steer = self.open_messages.remove(at).steer;
                steer.filter(|_| !was_started).map(ClaudeSteerOutcome::Missed)
            }
            ClaudeCommandState::Cancelled => {
                message.completed = true;
                None
            }
        }
    }

    /// Whether a result ends one of this turn's messages. A result that names no message ends a turn that the agent
    /// started on its own, unless this agent never reports what becomes of messages.
    pub(super) fn is_ended_by(&self, result: &ClaudeTurnResult, reports_lifecycle: bool) -> bool {
        match &result.user_message_uuids[..] {
            [] => !reports_lifecycle || self.open_messages.iter().any(|message| message.completed),
            named => named.iter().any(|uuid| self.is_own_message(uuid)),
        }
    }

    /// Applies a result of this turn: settles the messages that it names and those already completed. Returns the
    /// steers that were taken.
    pub(super) fn apply_result(
        &mut self,
        result: &ClaudeTurnResult,
        reports_lifecycle: bool,
    ) -> Vec<ClaudeSteerOutcome> {
        if !self.has_failed() {
            self.outcome = Some(result_outcome(result, self.quota_resets_at));
        }
        let all = result.user_message_uuids.is_empty() && !reports_lifecycle;
        let is_over = |message: &ClaudeSentMessage| {
            all || message.completed || result.user_message_uuids.contains(&message.uuid)
        };
        let over: Vec<_> = self.open_messages.extract_if(.., |message| is_over(message)).collect();
        let taken = over.into_iter().filter(|message| !message.started).filter_map(|message| message.steer);
        taken.map(ClaudeSteerOutcome::Taken).collect()
    }

    /// The outcome of the turn, if it is over.
    pub(super) fn take_outcome(&mut self) -> Option<TurnOutcome> {
        if !self.open_messages.is_empty() {
            return None;
        }
        if let Some(error) = self.policy_error.take() {
            return Some(TurnOutcome::failed(error));
        }
        Some(match self.outcome.take() {
            Some(outcome) => outcome,
            None if self.cancelled => TurnOutcome::cancelled(),
            None => TurnOutcome::failed(RunError::new("agent_error", "the agent dropped the prompt")),
        })
    }
}

/// The outcome that a result stands for. Only `is_error` tells whether it is an error: a failed model call has the
/// subtype `success`. `quota_resets_at` is set if the account's quota was exhausted during the turn; one that ends well
/// all the same went on with paid usage.
fn result_outcome(result: &ClaudeTurnResult, quota_resets_at: Option<Millis>) -> TurnOutcome {
    let stopped_by = result.terminal_reason.as_deref().unwrap_or_default();
    if result.is_error && stopped_by.starts_with("aborted") {
        return TurnOutcome::cancelled();
    }
    let text = result.result.clone();
    let with_text = |stop| TurnOutcome { text: text.clone(), ..TurnOutcome::of(stop) };
    match (result.is_error, result.subtype.as_str(), result.stop_reason.as_deref()) {
        (true, "error_max_turns", _) => with_text(TurnStopReason::MaxTurns),
        (_, _, Some("max_tokens")) => with_text(TurnStopReason::MaxTokens),
        (_, _, Some("refusal")) => with_text(TurnStopReason::Refused),
        (true, subtype, _) => {
            let texts = result.errors.iter().map(String::as_str).chain(text.as_deref());
            let mut message = texts.filter(|text| !text.is_empty()).collect::<Vec<_>>().join("; ");
            if message.is_empty() {
                message = format!("the agent's turn failed: {subtype}");
            }
            TurnOutcome::failed(match (result.api_error_status, quota_resets_at) {
                (Some(401), _) => RunError::new(NOT_SIGNED_IN, message),
                (_, Some(resets_at)) => RunError::quota_exhausted(message, Some(resets_at)),
                _ => RunError::new("agent_error", message),
            })
        }
        (false, ..) => with_text(TurnStopReason::EndTurn),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn is_error_decides_whether_a_turn_failed_whatever_the_subtype() {
        let outcome_of = |result: Value| result_outcome(&serde_json::from_value(result).unwrap(), None);
        let api = outcome_of(json!({"subtype": "success", "is_error": true, "terminal_reason": "api_error",
            "result": "API Error: 400", "stop_reason": "stop_sequence", "api_error_status": 400}));
        let error = api.error.unwrap();
        assert_eq!(
            (api.stop, error.code.as_str(), error.message.as_str()),
            (TurnStopReason::Error, "agent_error", "API Error: 400")
        );
        let login = outcome_of(
            json!({"subtype": "success", "is_error": true, "result": "no", "api_error_status": 401}),
        );
        assert_eq!(login.error.unwrap().code, "agent_not_signed_in");
        let turns = json!({"subtype": "error_max_turns", "is_error": true, "errors": ["Reached 1"], "stop_reason": "tool_use"});
        assert_eq!(outcome_of(turns).stop, TurnStopReason::MaxTurns);
        let broken = outcome_of(json!({"subtype": "error_during_execution", "is_error": true}));
        assert!(broken.error.unwrap().message.contains("error_during_execution"));
        let well = outcome_of(
            json!({"subtype": "success", "is_error": false, "result": "fine", "stop_reason": "end_turn"}),
        );
        assert_eq!((well.stop, well.text.as_deref()), (TurnStopReason::EndTurn, Some("fine")));
        let stop_for = |reason: &str| outcome_of(json!({"subtype": "success", "stop_reason": reason})).stop;
        assert_eq!(
            (stop_for("max_tokens"), stop_for("refusal")),
            (TurnStopReason::MaxTokens, TurnStopReason::Refused)
        );
        let limit =
            json!({"subtype": "success", "is_error": true, "result": "limit", "api_error_status": 429});
        let limit = result_outcome(&serde_json::from_value(limit).unwrap(), Some(Millis(7))).error.unwrap();
        assert_eq!((limit.code.as_str(), limit.resets_at), ("quota_exhausted", Some(Millis(7))));
        let paid = json!({"subtype": "success", "result": "fine", "stop_reason": "end_turn"});
        let paid = result_outcome(&serde_json::from_value(paid).unwrap(), Some(Millis(7)));
        assert_eq!((paid.stop, paid.error), (TurnStopReason::EndTurn, None), "the turn went on");
        let aborted = json!({"subtype": "error_during_execution", "is_error": true, "terminal_reason": "aborted_tools"});
        assert_eq!(outcome_of(aborted).stop, TurnStopReason::Cancelled);
    }
}
