//! What is open in one turn: the messages that the agent was given and has not settled, the asks that wait, what is being
//! said, and whether the agent was asked to stop. It keeps; the loop in `talk` decides.

use qd_protocol::Number;
use qd_protocol::event::RunError;
use qd_protocol::link::{Outcome, Stop};
use serde_json::Value;

use super::words::{Fate, TurnResult};
use crate::drivers::floor::Floor;
use crate::turn::Turn;

/// What is open in one turn.
pub(super) struct Round<'t> {
    pub(super) floor: Floor<'t, String, (), Value>,
    /// The messages that are not settled: the turn's prompt and its steers. When there is none, the turn is over.
    sent: Vec<Sent>,
    /// Whether the prompt is being worked on. What is said before belongs to something else.
    pub(super) begun: bool,
    pub(super) cancelled: bool,
    /// What the last result made of the turn, or the first that told of a failure.
    outcome: Option<Outcome>,
}

/// A message of ours.
#[derive(Debug)]
struct Sent {
    uuid: String,
    /// The steer that it is; `None` for the prompt.
    steer: Option<Number>,
    started: bool,
    /// Whether the agent has done with it; the result that says how is still to come.
    ended: bool,
}

/// What became of a steer.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Settled {
    Taken(Number),
    Missed(Number),
}

impl<'t> Round<'t> {
    /// Nothing is open yet but its prompt.
    pub(super) fn new(turn: &'t Turn<'t>, prompt: String) -> Self {
        Self {
            floor: Floor::new(turn),
            sent: vec![Sent { uuid: prompt, steer: None, started: false, ended: false }],
            begun: false,
            cancelled: false,
            outcome: None,
        }
    }

    /// A steer was sent.
    pub(super) fn steered(&mut self, uuid: String, steer: Number) {
        self.sent.push(Sent { uuid, steer: Some(steer), started: false, ended: false });
    }

    /// Whether another steer could still be part of this turn.
    pub(super) fn takes_steers(&self) -> bool {
        self.begun && !self.cancelled && !self.has_failed()
    }

    /// Whether one of its results told of a failure.
    pub(super) fn has_failed(&self) -> bool {
        self.outcome.as_ref().is_some_and(|outcome| outcome.stop == Stop::Error)
    }

    /// The steers that the agent has not begun with.
    pub(super) fn waiting_steers(&self) -> Vec<String> {
        let waits = |sent: &&Sent| sent.steer.is_some() && !sent.started && !sent.ended;
        self.sent.iter().filter(waits).map(|sent| sent.uuid.clone()).collect()
    }

    /// Whether one of its messages bears this name.
    pub(super) fn sent(&self, uuid: &str) -> bool {
        self.sent.iter().any(|sent| sent.uuid == uuid)
    }

    /// What has become of a message, and what that makes of a steer.
    pub(super) fn fate(&mut self, uuid: &str, fate: Fate) -> Option<Settled> {
        let at = self.sent.iter().position(|sent| sent.uuid == uuid)?;
        let sent = &mut self.sent[at];
        let was_started = sent.started;
        match fate {
            Fate::Queued => None,
            Fate::Started => {
                sent.started = true;
                self.begun |= sent.steer.is_none();
                sent.steer.filter(|_| !was_started).map(Settled::Taken)
            }
            // A result names what it is the end of, and comes before this or after: it is what counts.
            Fate::Completed => {
                sent.ended = true;
                sent.started = true;
                self.begun |= sent.steer.is_none();
                sent.steer.filter(|_| !was_started).map(Settled::Taken)
            }
            // What was dropped before it was begun with has no result.
            Fate::Cancelled if !was_started || self.cancelled => {
                let steer = self.sent.remove(at).steer;
                steer.filter(|_| !was_started).map(Settled::Missed)
            }
            Fate::Cancelled => {
                sent.ended = true;
                None
            }
        }
    }

    /// Whether a result is the end of one of its messages. One that names none is the end of a turn that the agent began
    /// by itself, unless the agent has never told what becomes of messages.
    pub(super) fn is_ended_by(&self, result: &TurnResult, tells_fates: bool) -> bool {
        match &result.user_message_uuids[..] {
            [] => !tells_fates || self.sent.iter().any(|sent| sent.ended),
            named => named.iter().any(|uuid| self.sent(uuid)),
        }
    }

    /// One of its results: settles what it names and what the agent had done with; gives the steers that it took.
    pub(super) fn ended(&mut self, result: &TurnResult, tells_fates: bool) -> Vec<Settled> {
        if !self.has_failed() {
            self.outcome = Some(outcome(result));
        }
        let all = result.user_message_uuids.is_empty() && !tells_fates;
        let is_over = |sent: &Sent| all || sent.ended || result.user_message_uuids.contains(&sent.uuid);
        let over: Vec<_> = self.sent.extract_if(.., |sent| is_over(sent)).collect();
        let taken = over.into_iter().filter(|sent| !sent.started).filter_map(|sent| sent.steer);
        taken.map(Settled::Taken).collect()
    }

    /// What came of the turn, if it is over.
    pub(super) fn outcome(&mut self) -> Option<Outcome> {
        if !self.sent.is_empty() {
            return None;
        }
        Some(match self.outcome.take() {
            Some(outcome) => outcome,
            None if self.cancelled => Outcome::cancelled(),
            None => Outcome::failed(RunError::new("agent_error", "the agent dropped the prompt")),
        })
    }
}

/// What a result makes of a turn. Whether it is an error is said by `is_error` alone: a failed call of the model has the
/// subtype `success`.
fn outcome(result: &TurnResult) -> Outcome {
    let stopped_by = result.terminal_reason.as_deref().unwrap_or_default();
    if result.is_error && stopped_by.starts_with("aborted") {
        return Outcome::cancelled();
    }
    let text = result.result.clone();
    let of = |stop| Outcome { text: text.clone(), ..Outcome::of(stop) };
    match (result.is_error, result.subtype.as_str(), result.stop_reason.as_deref()) {
        (true, "error_max_turns", _) => of(Stop::MaxTurns),
        (_, _, Some("max_tokens")) => of(Stop::MaxTokens),
        (_, _, Some("refusal")) => of(Stop::Refused),
        (true, subtype, _) => {
            let told = result.errors.iter().map(String::as_str).chain(text.as_deref());
            let mut message = told.filter(|words| !words.is_empty()).collect::<Vec<_>>().join("; ");
            if message.is_empty() {
                message = format!("the agent's turn failed: {subtype}");
            }
            let code =
                if result.api_error_status == Some(401) { "agent_not_signed_in" } else { "agent_error" };
            Outcome::failed(RunError::new(code, message))
        }
        (false, ..) => of(Stop::EndTurn),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn an_error_is_what_the_result_calls_one_whatever_its_subtype() {
        let of = |result: Value| outcome(&serde_json::from_value(result).unwrap());
        let api = of(json!({"subtype": "success", "is_error": true, "terminal_reason": "api_error",
            "result": "API Error: 400", "stop_reason": "stop_sequence", "api_error_status": 400}));
        let error = api.error.unwrap();
        assert_eq!(
            (api.stop, error.code.as_str(), error.message.as_str()),
            (Stop::Error, "agent_error", "API Error: 400")
        );
        let login =
            of(json!({"subtype": "success", "is_error": true, "result": "no", "api_error_status": 401}));
        assert_eq!(login.error.unwrap().code, "agent_not_signed_in");
        let turns = json!({"subtype": "error_max_turns", "is_error": true, "errors": ["Reached 1"], "stop_reason": "tool_use"});
        assert_eq!(of(turns).stop, Stop::MaxTurns);
        let broken = of(json!({"subtype": "error_during_execution", "is_error": true}));
        assert!(broken.error.unwrap().message.contains("error_during_execution"));
        let well =
            of(json!({"subtype": "success", "is_error": false, "result": "fine", "stop_reason": "end_turn"}));
        assert_eq!((well.stop, well.text.as_deref()), (Stop::EndTurn, Some("fine")));
        let of_stop = |why: &str| of(json!({"subtype": "success", "stop_reason": why})).stop;
        assert_eq!((of_stop("max_tokens"), of_stop("refusal")), (Stop::MaxTokens, Stop::Refused));
        let aborted = json!({"subtype": "error_during_execution", "is_error": true, "terminal_reason": "aborted_tools"});
        assert_eq!(of(aborted).stop, Stop::Cancelled);
    }
}
