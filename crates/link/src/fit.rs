//! What a worker says becomes one event, and an event has a size. Our own workers keep to it; whatever another sends is
//! cut to it here, before a session judges it: an event that cannot be kept could never be acknowledged, and would be
//! sent for ever.

use qd_protocol::event::RunError;
use qd_protocol::limits::INLINE_MAX;
use qd_protocol::link::{AskRequest, Gone, Said, Up};
use serde_json::Value;

/// What a text or a value is cut to if the whole does not fit. Small, because one thing may hold several.
const KEPT: usize = 4 << 10;
/// Entries of a plan and options of a question that are kept then.
const KEPT_ENTRIES: usize = 64;

/// The same, cut if it could not be kept as it is. A turn's result and transcript have ways of their own to be kept.
pub(crate) fn fit(mut up: Up) -> Up {
    if size(&up) <= INLINE_MAX {
        return up;
    }
    match &mut up {
        Up::Said { what, .. } => match what {
            Said::Text { text }
            | Said::Thought { text }
            | Said::ToolOutput { text, .. }
            | Said::Notice { text } => {
                cut(text);
            }
            Said::ToolStarted { call_id, name, input: value } => {
                cut(call_id);
                cut(name);
                cut_value(value);
            }
            Said::ToolFinished { call_id, name, output: value, .. } => {
                cut(call_id);
                cut(name);
                cut_value(value);
            }
            Said::Plan { entries } => {
                entries.truncate(KEPT_ENTRIES);
                for entry in entries {
                    cut(&mut entry.content);
                    cut(&mut entry.status);
                }
            }
            Said::Usage { .. } | Said::Turn => {}
        },
        Up::Ask { ask: AskRequest { tool, input, prompt, options, .. }, .. } => {
            tool.iter_mut().for_each(cut);
            cut_value(input);
            cut(prompt);
            options.truncate(KEPT_ENTRIES);
            options.iter_mut().for_each(cut);
        }
        Up::Ready { agent_session_id, .. } => *agent_session_id = None,
        Up::Terminal { outcome, .. } => outcome.error.iter_mut().for_each(cut_error),
        Up::Gone(Gone::Failed(error)) => cut_error(error),
        Up::AskWithdrawn { .. }
        | Up::AskDelivered { .. }
        | Up::SteerTaken { .. }
        | Up::SteerMissed { .. }
        | Up::Rested
        | Up::Gone(_) => {}
    }
    up
}

fn size(up: &Up) -> usize {
    serde_json::to_vec(up).map_or(usize::MAX, |json| json.len())
}

fn cut_error(error: &mut RunError) {
    cut(&mut error.code);
    cut(&mut error.message);
}

fn cut(text: &mut String) {
    if text.len() > KEPT {
        let all = text.len();
        text.truncate(text.floor_char_boundary(KEPT));
        text.push_str(&format!("\n[cut: {all} bytes]"));
    }
}

fn cut_value(value: &mut Value) {
    let mut json = value.to_string();
    if json.len() > KEPT {
        cut(&mut json);
        *value = Value::String(json);
    }
}

#[cfg(test)]
mod tests {
    use qd_protocol::RunId;
    use qd_protocol::limits::EVENT_MAX;
    use serde_json::json;

    use super::*;

    #[test]
    fn what_fits_is_left_alone_and_what_does_not_is_made_to() {
        let said = |what| Up::Said { run: RunId::parse("r").unwrap(), what };
        let large = "\u{1}".repeat(EVENT_MAX);
        let tool = |input| Said::ToolStarted { call_id: large.clone(), name: large.clone(), input };
        for what in [
            Said::Notice { text: large.clone() },
            tool(json!([[large.clone()]])),
            Said::ToolFinished {
                call_id: String::new(),
                name: String::new(),
                output: json!({ "a": large.clone() }),
                is_error: false,
            },
        ] {
            let kept = fit(said(what));
            assert!(size(&kept) <= INLINE_MAX);
            assert_eq!(fit(kept.clone()), kept);
        }
        let small = said(Said::Text { text: "x".repeat(INLINE_MAX / 2) });
        assert_eq!(fit(small.clone()), small);
    }
}
