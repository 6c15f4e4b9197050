//! Text of any length. What is too large for an event is kept as a file named by its hash, and only its head
//! travels in events; the file is synced before the event that names it.

use serde::{Deserialize, Serialize};

/// The file that holds the whole of a large text.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[schema(as = Blob)]
pub struct BlobRef {
    /// Lower-case hexadecimal SHA-256 of the content, and its name below `blobs/` in the home.
    pub sha256: String,
    /// Bytes of the whole.
    pub size: u64,
}

/// A text, or the head of one with the file that holds the rest.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct LongText {
    /// All of it, or as much as fits an event.
    pub head: String,
    /// Where the whole is, if it did not fit.
    pub blob: Option<BlobRef>,
}

impl From<String> for LongText {
    fn from(head: String) -> Self {
        Self { head, blob: None }
    }
}

impl From<&str> for LongText {
    fn from(head: &str) -> Self {
        Self::from(head.to_owned())
    }
}

/// How many bytes `text` takes as a JSON string, quotes left out: what counts against the size of an event.
pub fn escaped_len(text: &str) -> usize {
    text.bytes()
        .map(|b| match b {
            b'"' | b'\\' | b'\n' | b'\r' | b'\t' | 0x08 | 0x0c => 2,
            0..=0x1f => 6,
            _ => 1,
        })
        .sum()
}

/// The longest beginning of `text` whose escaped form takes at most `limit` bytes.
pub fn escaped_head(text: &str, limit: usize) -> &str {
    if text.len() <= limit / 6 {
        return text;
    }
    let mut room = limit;
    for (at, c) in text.char_indices() {
        let cost = escaped_len(&text[at..at + c.len_utf8()]);
        if cost > room {
            return &text[..at];
        }
        room -= cost;
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_head_fits_its_limit_and_ends_on_a_character() {
        assert_eq!(escaped_head("abc", 100), "abc");
        assert_eq!(escaped_head("äöü", 3), "ä");
        assert_eq!(escaped_head("\u{1}\u{1}", 11), "\u{1}");
        assert_eq!(escaped_head("\"\"", 3), "\"");
        for text in ["plain", "q\"\\\n\t\u{1}\u{8}\u{c}", "äöü€😀"] {
            let json = serde_json::to_string(text).unwrap();
            assert_eq!(escaped_len(text), json.len() - 2, "{text:?}");
        }
    }
}
