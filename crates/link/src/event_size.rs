//! Limits for updates that an agent sends in one piece: each becomes one event, and an event has a maximum size and
//! depth. They are applied last, on the way to the journal, after redaction: text cut before its secrets are removed
//! may end with the first half of one, and redaction may make text longer. Streamed text may take any number of events
//! and is not cut here.
//!
//! Design: docs/design/redact-then-fit.md

use qd_protocol::event::{PlanEntry, RunError};
use qd_protocol::limits::{HEAD_MAX, INLINE_MAX};
use qd_protocol::link::{AgentExitReason, AgentUpdate, AskRequest, TurnOutcome, TurnStopReason, TurnUpdate};
use qd_protocol::text::{escaped_head, escaped_len};
use serde_json::Value;

/// How deep a value may be nested. JSON parsers stop at 128 levels, and the value itself is nested in a frame.
const DEPTH_MAX: usize = 64;
/// How many bytes the options of one question may take together.
pub const OPTIONS_BYTES: usize = 64 << 10;
/// How many bytes one line of stderr may have.
const STDERR_LINE_MAX: usize = HEAD_MAX / 4;
/// How many lines of stderr an error may have.
const STDERR_LINES_MAX: usize = 64;
/// Space for the note after text that was cut.
const NOTE_MAX: usize = 64;

/// Like [`fit_update`], for an update that another process sent. Our own workers have split streamed text; text of a
/// worker that has not is cut, since an event that is too large to be journalled could never be acknowledged and would
/// be sent for ever.
pub(crate) fn fit_received(mut update: AgentUpdate) -> AgentUpdate {
    self::fit_update(&mut update);
    if let AgentUpdate::Turn {
        update: TurnUpdate::Text { text } | TurnUpdate::Thought { text } | TurnUpdate::ToolOutput { text, .. },
        ..
    } = &mut update
    {
        self::fit_text(text, INLINE_MAX);
    }
    update
}

/// Makes an update fit the events that it will become.
pub fn fit_update(update: &mut AgentUpdate) {
    match update {
        AgentUpdate::Ready { agent_session_id, .. } => {
            // A truncated id would be useless, so it is dropped.
            agent_session_id.take_if(|id| escaped_len(id) > HEAD_MAX);
        }
        AgentUpdate::Confined(report) => {
            if let Some(why) = &mut report.why {
                fit_text(why, HEAD_MAX);
            }
        }
        AgentUpdate::Turn { update: turn_update, .. } => fit_turn_update(turn_update),
        AgentUpdate::Ask { ask, .. } => self::fit_ask(ask),
        AgentUpdate::TurnEnded { outcome, .. } => self::fit_outcome(outcome),
        AgentUpdate::Gone(AgentExitReason::Failed(error) | AgentExitReason::Unreachable(error)) => {
            self::fit_error(error)
        }
        AgentUpdate::AskWithdrawn { .. }
        | AgentUpdate::AskDelivered { .. }
        | AgentUpdate::SteerTaken { .. }
        | AgentUpdate::SteerMissed { .. }
        | AgentUpdate::IdleStopped
        | AgentUpdate::Gone(AgentExitReason::Lost | AgentExitReason::Stopped) => {}
    }
}

fn fit_turn_update(update: &mut TurnUpdate) {
    match update {
        TurnUpdate::ToolStarted { call_id, name, input: value }
        | TurnUpdate::ToolFinished { call_id, name, output: value, .. } => {
            fit_text(call_id, HEAD_MAX);
            fit_text(name, HEAD_MAX);
            self::fit_value(value, INLINE_MAX);
        }
        TurnUpdate::ToolOutput { call_id, .. } => fit_text(call_id, HEAD_MAX),
        TurnUpdate::Plan { entries } => fit_plan(entries),
        TurnUpdate::Notice { text: notice, .. } => fit_text(notice, INLINE_MAX),
        TurnUpdate::Mode { mode } => fit_text(mode, HEAD_MAX),
        TurnUpdate::Text { .. }
        | TurnUpdate::Thought { .. }
        | TurnUpdate::Usage { .. }
        | TurnUpdate::ModelCall
        | TurnUpdate::Context(_)
        | TurnUpdate::Compacted { .. } => {}
    }
}

/// Keeps as many entries as fit.
fn fit_plan(entries: &mut Vec<PlanEntry>) {
    let mut left = INLINE_MAX;
    let fitting = entries.iter().take_while(|entry| {
        let size = serde_json::to_string(entry).map_or(usize::MAX, |json| json.len() + 1);
        let fits = size <= left;
        left = left.saturating_sub(size);
        fits
    });
    entries.truncate(fitting.count());
}

/// Makes an ask fit its event. Options come first, because a cut option cannot be chosen; then the question, then the
/// tool's input.
pub fn fit_ask(ask: &mut AskRequest) {
    let mut left = INLINE_MAX;
    let options: usize = ask.options.iter().map(|option| escaped_len(option) + 3).sum();
    if options > OPTIONS_BYTES {
        ask.options.clear();
    } else {
        left -= options;
    }
    if let Some(tool) = &mut ask.tool {
        fit_text(tool, HEAD_MAX);
        fit_text(&mut ask.prompt, HEAD_MAX);
    }
    fit_text(&mut ask.prompt, left);
    fit_value(&mut ask.input, left.saturating_sub(escaped_len(&ask.prompt)).max(2 * NOTE_MAX));
}

/// The text is not cut, because the daemon keeps a long one as a file.
fn fit_outcome(outcome: &mut TurnOutcome) {
    if let Some(error) = &mut outcome.error {
        self::fit_error(error);
    }
    outcome.transcript.iter_mut().for_each(|message| fit_value(message, INLINE_MAX));
    let size: usize = outcome.transcript.iter().map(|message| message.to_string().len() + 1).sum();
    if size > INLINE_MAX {
        // A truncated conversation cannot be resumed.
        let message = format!("the agent's conversation is too long to suspend: {size} bytes as JSON");
        outcome.transcript.clear();
        outcome.stop = TurnStopReason::Error;
        outcome.error = Some(RunError::new("transcript_too_large", message));
    }
}

fn fit_error(error: &mut RunError) {
    fit_text(&mut error.code, STDERR_LINE_MAX);
    fit_text(&mut error.message, HEAD_MAX);
    error.stderr.truncate(STDERR_LINES_MAX);
    error.stderr.iter_mut().for_each(|line| fit_text(line, STDERR_LINE_MAX));
}

/// Leaves the value if it fits. Otherwise replaces it with the start of its JSON text and a note of its size.
fn fit_value(value: &mut Value, limit: usize) {
    if let Value::String(whole) = value {
        return fit_text(whole, limit);
    }
    let deep = is_deeper_than(value, DEPTH_MAX);
    let json = value.to_string();
    if deep || json.len() > limit {
        let mut json = json;
        fit_text(&mut json, limit);
        *value = Value::String(json);
    }
}

/// Cuts text to `limit` escaped bytes, including a note of its full size.
fn fit_text(text: &mut String, limit: usize) {
    if escaped_len(text) > limit {
        let kept = escaped_head(text, limit.saturating_sub(NOTE_MAX));
        *text = format!("{kept}\n[cut: {} bytes in all]", text.len());
    }
}

fn is_deeper_than(value: &Value, levels: usize) -> bool {
    match value {
        Value::Array(items) => levels == 0 || items.iter().any(|item| is_deeper_than(item, levels - 1)),
        Value::Object(fields) => {
            levels == 0 || fields.values().any(|field| is_deeper_than(field, levels - 1))
        }
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use qd_protocol::event::AskKind;
    use qd_protocol::limits::EVENT_MAX;
    use qd_protocol::{AskId, RunId};
    use serde_json::json;

    use super::*;

    fn fitted(value: Value) -> Value {
        let mut value = value;
        super::fit_value(&mut value, INLINE_MAX);
        value
    }

    #[test]
    fn what_does_not_fit_is_cut_with_a_note_of_its_size() {
        assert_eq!(fitted(json!({"a": 1})), json!({"a": 1}));
        for large in [json!("\"".repeat(INLINE_MAX)), json!(["ä".repeat(INLINE_MAX)])] {
            let Value::String(text) = fitted(large) else { panic!("it became text") };
            assert!(escaped_len(&text) <= INLINE_MAX);
            assert!(text.ends_with(" bytes in all]"), "{}", &text[text.len() - 40..]);
        }
    }

    #[test]
    fn what_is_nested_too_deep_to_be_read_back_becomes_text() {
        let nest = |levels: usize| (0..levels).fold(json!(1), |inner, _| json!([inner]));
        assert!(fitted(nest(DEPTH_MAX)).is_array());
        assert_eq!(fitted(nest(DEPTH_MAX + 1)), json!(nest(DEPTH_MAX + 1).to_string()));
    }

    #[test]
    fn whatever_a_question_brings_it_fits_one_event() {
        let question = |prompt: usize, options: usize, length: usize| {
            let mut ask = AskRequest {
                id: AskId::from_random(&[1; 8]),
                kind: AskKind::Question,
                tool: None,
                input: Value::Null,
                risk: None,
                prompt: "\"".repeat(prompt),
                options: vec!["o".repeat(length); options],
                implicit: false,
            };
            super::fit_ask(&mut ask);
            assert!(serde_json::to_string(&ask).unwrap().len() < EVENT_MAX - HEAD_MAX);
            ask.options.len()
        };
        assert_eq!(question(EVENT_MAX, 128, 400), 128);
        assert_eq!(question(EVENT_MAX, 128, HEAD_MAX), 0, "a free answer is better than half an option");
    }

    #[test]
    fn a_permission_keeps_its_argument_and_has_a_short_title() {
        let mut ask = AskRequest {
            id: AskId::from_random(&[1; 8]),
            kind: AskKind::Permission,
            tool: Some("\n".repeat(EVENT_MAX)),
            input: json!({"content": "x".repeat(EVENT_MAX)}),
            risk: None,
            prompt: "p".repeat(EVENT_MAX),
            options: Vec::new(),
            implicit: false,
        };
        super::fit_ask(&mut ask);
        assert!(escaped_len(&ask.prompt) <= HEAD_MAX);
        assert!(serde_json::to_string(&ask).unwrap().len() < EVENT_MAX - HEAD_MAX);
        assert!(ask.input.as_str().is_some_and(|input| input.starts_with("{\"content\":\"xx")));
    }

    #[test]
    fn an_error_a_name_and_a_conversation_that_are_too_long_are_not_passed_on() {
        let stderr = vec!["e".repeat(EVENT_MAX); 20];
        let mut failed = AgentUpdate::Gone(AgentExitReason::Failed(RunError {
            stderr,
            ..RunError::new("c", "m".repeat(EVENT_MAX))
        }));
        fit_update(&mut failed);
        assert!(serde_json::to_string(&failed).unwrap().len() < EVENT_MAX / 8);
        let mut ready = AgentUpdate::Ready { agent_session_id: Some("i".repeat(EVENT_MAX)), steers: false };
        fit_update(&mut ready);
        assert_eq!(ready, AgentUpdate::Ready { agent_session_id: None, steers: false });
        let outcome = TurnOutcome::suspended(vec![json!("t".repeat(INLINE_MAX / 2)); 3]);
        let mut suspended = AgentUpdate::TurnEnded { run: RunId::parse("r").unwrap(), outcome };
        fit_update(&mut suspended);
        let AgentUpdate::TurnEnded { outcome, .. } = suspended else { panic!("a terminal") };
        assert_eq!((outcome.stop, outcome.transcript.len()), (TurnStopReason::Error, 0));
    }
}
