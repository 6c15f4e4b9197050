//! What is open in one turn: the messages that the agent was given and has not settled, the asks that wait, what is being
//! said, and whether the agent was asked to stop. It keeps; the loop in `talk` decides.

use qd_protocol::EventNumber;
use qd_protocol::event::RunError;
use qd_protocol::link::{TurnOutcome, TurnStopReason};
use serde_json::Value;

use super::messages::{ClaudeCommandState, ClaudeTurnResult};
use crate::drivers::turn_state::TurnState;
use crate::turn::DriverTurn;

/// What is open in one turn.
pub(super) struct ClaudeTurn<'t> {
    pub(super) state: TurnState<'t, String, (), Value>,
    /// The messages that are not settled: the turn's prompt and its steers. When there is none, the turn is over.
    open_messages: Vec<ClaudeSentMessage>,
    /// Whether the prompt is being worked on. What is said before belongs to something else.
    pub(super) prompt_started: bool,
    pub(super) cancelled: bool,
    /// What the last result made of the turn, or the first that told of a failure.
    outcome: Option<TurnOutcome>,
}

/// A message of ours.
#[derive(Debug)]
struct ClaudeSentMessage {
    uuid: String,
    /// The steer that it is; `None` for the prompt.
    steer: Option<EventNumber>,
    started: bool,
    /// Whether the agent has done with it; the result that says how is still to come.
    completed: bool,
}

/// What became of a steer.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum ClaudeSteerOutcome {
    Taken(EventNumber),
    Missed(EventNumber),
}

impl<'t> ClaudeTurn<'t> {
    /// Nothing is open yet but its prompt.
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
            outcome: None,
        }
    }

    /// A steer was sent.
    pub(super) fn add_steer(&mut self, uuid: String, steer: EventNumber) {
        self.open_messages.push(ClaudeSentMessage {
            uuid,
            steer: Some(steer),
            started: false,
            completed: false,
        });
    }

    /// Whether another steer could still be part of this turn.
    pub(super) fn takes_steers(&self) -> bool {
        self.prompt_started && !self.cancelled && !self.has_failed()
    }

    /// Whether one of its results told of a failure.
    pub(super) fn has_failed(&self) -> bool {
        self.outcome.as_ref().is_some_and(|outcome| outcome.stop == TurnStopReason::Error)
    }

    /// The steers that the agent has not begun with.
    pub(super) fn waiting_steers(&self) -> Vec<String> {
        let waits = |sent: &&ClaudeSentMessage| sent.steer.is_some() && !sent.started && !sent.completed;
        self.open_messages.iter().filter(waits).map(|sent| sent.uuid.clone()).collect()
    }

    /// Whether one of its messages bears this name.
    pub(super) fn is_own_message(&self, uuid: &str) -> bool {
        self.open_messages.iter().any(|sent| sent.uuid == uuid)
    }

    /// What has become of a message, and what that makes of a steer.
    pub(super) fn update_message(
        &mut self,
        uuid: &str,
        fate: ClaudeCommandState,
    ) -> Option<ClaudeSteerOutcome> {
        let at = self.open_messages.iter().position(|sent| sent.uuid == uuid)?;
        let sent = &mut self.open_messages[at];
        let was_started = sent.started;
        match fate {
            ClaudeCommandState::Queued => None,
            ClaudeCommandState::Started => {
                sent.started = true;
                self.prompt_started |= sent.steer.is_none();
                sent.steer.filter(|_| !was_started).map(ClaudeSteerOutcome::Taken)
            }
            // A result names what it is the end of, and comes before this or after: it is what counts.
            ClaudeCommandState::Completed => {
                sent.completed = true;
                sent.started = true;
                self.prompt_started |= sent.steer.is_none();
                sent.steer.filter(|_| !was_started).map(ClaudeSteerOutcome::Taken)
            }
            // What was dropped before it was begun with has no result.
            ClaudeCommandState::Cancelled if !was_started || self.cancelled => {
                let steer = self.open_messages.remove(at).steer;
                steer.filter(|_| !was_started).map(ClaudeSteerOutcome::Missed)
            }
            ClaudeCommandState::Cancelled => {
                sent.completed = true;
                None
            }
        }
    }

    /// Whether a result is the end of one of its messages. One that names none is the end of a turn that the agent began
    /// by itself, unless the agent has never told what becomes of messages.
    pub(super) fn is_ended_by(&self, result: &ClaudeTurnResult, tells_fates: bool) -> bool {
        match &result.user_message_uuids[..] {
            [] => !tells_fates || self.open_messages.iter().any(|sent| sent.completed),
            named => named.iter().any(|uuid| self.is_own_message(uuid)),
        }
    }

    /// One of its results: settles what it names and what the agent had done with; gives the steers that it took.
    pub(super) fn apply_result(
        &mut self,
        result: &ClaudeTurnResult,
        tells_fates: bool,
    ) -> Vec<ClaudeSteerOutcome> {
        if !self.has_failed() {
            self.outcome = Some(result_outcome(result));
        }
        let all = result.user_message_uuids.is_empty() && !tells_fates;
        let is_over = |sent: &ClaudeSentMessage| {
            all || sent.completed || result.user_message_uuids.contains(&sent.uuid)
        };
        let over: Vec<_> = self.open_messages.extract_if(.., |sent| is_over(sent)).collect();
        let taken = over.into_iter().filter(|sent| !sent.started).filter_map(|sent| sent.steer);
        taken.map(ClaudeSteerOutcome::Taken).collect()
    }

    /// What came of the turn, if it is over.
    pub(super) fn take_outcome(&mut self) -> Option<TurnOutcome> {
        if !self.open_messages.is_empty() {
            return None;
        }
        Some(match self.outcome.take() {
            Some(outcome) => outcome,
            None if self.cancelled => TurnOutcome::cancelled(),
            None => TurnOutcome::failed(RunError::new("agent_error", "the agent dropped the prompt")),
        })
    }
}

/// What a result makes of a turn. Whether it is an error is said by `is_error` alone: a failed call of the model has the
/// subtype `success`.
fn result_outcome(result: &ClaudeTurnResult) -> TurnOutcome {
    let stopped_by = result.terminal_reason.as_deref().unwrap_or_default();
    if result.is_error && stopped_by.starts_with("aborted") {
        return TurnOutcome::cancelled();
    }
    let text = result.result.clone();
    let of = |stop| TurnOutcome { text: text.clone(), ..TurnOutcome::of(stop) };
    match (result.is_error, result.subtype.as_str(), result.stop_reason.as_deref()) {
        (true, "error_max_turns", _) => of(TurnStopReason::MaxTurns),
        (_, _, Some("max_tokens")) => of(TurnStopReason::MaxTokens),
        (_, _, Some("refusal")) => of(TurnStopReason::Refused),
        (true, subtype, _) => {
            let told = result.errors.iter().map(String::as_str).chain(text.as_deref());
            let mut message = told.filter(|words| !words.is_empty()).collect::<Vec<_>>().join("; ");
            if message.is_empty() {
                message = format!("the agent's turn failed: {subtype}");
            }
            let code =
                if result.api_error_status == Some(401) { "agent_not_signed_in" } else { "agent_error" };
            TurnOutcome::failed(RunError::new(code, message))
        }
        (false, ..) => of(TurnStopReason::EndTurn),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn an_error_is_what_the_result_calls_one_whatever_its_subtype() {
        let of = |result: Value| result_outcome(&serde_json::from_value(result).unwrap());
        let api = of(json!({"subtype": "success", "is_error": true, "terminal_reason": "api_error",
            "result": "API Error: 400", "stop_reason": "stop_sequence", "api_error_status": 400}));
        let error = api.error.unwrap();
        assert_eq!(
            (api.stop, error.code.as_str(), error.message.as_str()),
            (TurnStopReason::Error, "agent_error", "API Error: 400")
        );
        let login =
            of(json!({"subtype": "success", "is_error": true, "result": "no", "api_error_status": 401}));
        assert_eq!(login.error.unwrap().code, "agent_not_signed_in");
        let turns = json!({"subtype": "error_max_turns", "is_error": true, "errors": ["Reached 1"], "stop_reason": "tool_use"});
        assert_eq!(of(turns).stop, TurnStopReason::MaxTurns);
        let broken = of(json!({"subtype": "error_during_execution", "is_error": true}));
        assert!(broken.error.unwrap().message.contains("error_during_execution"));
        let well =
            of(json!({"subtype": "success", "is_error": false, "result": "fine", "stop_reason": "end_turn"}));
        assert_eq!((well.stop, well.text.as_deref()), (TurnStopReason::EndTurn, Some("fine")));
        let of_stop = |why: &str| of(json!({"subtype": "success", "stop_reason": why})).stop;
        assert_eq!(
            (of_stop("max_tokens"), of_stop("refusal")),
            (TurnStopReason::MaxTokens, TurnStopReason::Refused)
        );
        let aborted = json!({"subtype": "error_during_execution", "is_error": true, "terminal_reason": "aborted_tools"});
        assert_eq!(of(aborted).stop, TurnStopReason::Cancelled);
    }
}
