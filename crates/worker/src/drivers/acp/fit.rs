//! Bounds for what an agent gives as one piece: it becomes one event, and an event has a size. Streamed text is not
//! cut here, since it may take as many events as it likes.

use qd_protocol::limits::{HEAD_MAX, INLINE_MAX};
use qd_protocol::text::{escaped_len, head};
use serde_json::{Map, Value};

/// Room for the note behind something that was cut.
const NOTE_MAX: usize = 64;

/// The value if it fits an event, else as much of its text as does and a note of its size.
pub(super) fn value(value: Value) -> Value {
    match value {
        Value::String(whole) => Value::String(text(whole)),
        other => {
            let json = other.to_string();
            if json.len() <= INLINE_MAX { other } else { Value::String(cut(&json, INLINE_MAX)) }
        }
    }
}

/// The same for text.
pub(super) fn text(text: String) -> String {
    if escaped_len(&text) <= INLINE_MAX { text } else { cut(&text, INLINE_MAX) }
}

/// The same for a name or a title, which should be short.
pub(super) fn name(text: String) -> String {
    if escaped_len(&text) <= HEAD_MAX { text } else { cut(&text, HEAD_MAX) }
}

/// Arguments that nobody gave.
pub(super) fn nothing() -> Value {
    Value::Object(Map::new())
}

fn cut(text: &str, limit: usize) -> String {
    format!("{}\n[cut: {} bytes in all]", head(text, limit - NOTE_MAX), text.len())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn what_does_not_fit_is_cut_with_a_note_of_its_size() {
        assert_eq!(value(json!({"a": 1})), json!({"a": 1}));
        for large in [json!("\"".repeat(INLINE_MAX)), json!(["ä".repeat(INLINE_MAX)])] {
            let Value::String(text) = value(large) else { panic!("it became text") };
            assert!(escaped_len(&text) <= INLINE_MAX);
            assert!(text.ends_with(" bytes in all]"), "{}", &text[text.len() - 40..]);
        }
        assert!(escaped_len(&name("\n".repeat(1 << 20))) <= HEAD_MAX);
    }
}
