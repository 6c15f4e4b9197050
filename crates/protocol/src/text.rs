//! Text of any length. A text that is too large for an event is stored as a file named by its hash, and events carry
//! only its beginning. The file is synced before the event that refers to it is written.

use serde::{Deserialize, Serialize};

/// Reference to a stored file with the whole of a large text or attachment. `GET /v1/blobs/{sha256}` returns it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[schema(as = Blob)]
pub struct BlobRef {
    /// SHA-256 of the content in lower-case hex. It is also the name of the file below `blobs/` in the home.
    pub sha256: String,
    /// Size of the content in bytes.
    pub size: u64,
}

/// A text, or the beginning of a text with a reference to the stored file.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct LongText {
    /// The whole text, or as much as fits into an event.
    pub head: String,
    /// The stored file with the whole text, if it did not fit.
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

/// Number of bytes that `text` takes as a JSON string, without the quotes. This counts towards the size of an event.
pub fn escaped_len(text: &str) -> usize {
    text.bytes()
        .map(|b| match b {
            b'"' | b'\\' | b'\n' | b'\r' | b'\t' | 0x08 | 0x0c => 2,
            0..=0x1f => 6,
            _ => 1,
        })
        .sum()
}

/// The longest prefix of `text` whose escaped form takes at most `limit` bytes.
pub fn escaped_head(text: &str, limit: usize) -> &str {
    if text.len() <= limit / 6 {
        return text;
    }
    let mut remaining = limit;
    for (position, c) in text.char_indices() {
        let cost = escaped_len(&text[position..position + c.len_utf8()]);
        if cost > remaining {
            return &text[..position];
        }
        remaining -= cost;
    }
    text
}

/// Splits a text into words, each with the white space after it. White space before the first word belongs to it.
pub fn split_words(text: &str) -> impl Iterator<Item = &str> {
    let mut rest = text;
    std::iter::from_fn(move || {
        let word = rest.find(|c: char| !c.is_whitespace()).unwrap_or(rest.len());
        let space = rest[word..].find(char::is_whitespace).map_or(rest.len(), |at| word + at);
        let next = rest[space..].find(|c: char| !c.is_whitespace()).map_or(rest.len(), |at| space + at);
        let (piece, remaining) = rest.split_at(next);
        rest = remaining;
        (!piece.is_empty()).then_some(piece)
    })
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

    #[test]
    fn words_keep_their_white_space_exactly() {
        for (text, expected) in [
            ("", vec![]),
            ("one", vec!["one"]),
            ("one two", vec!["one ", "two"]),
            ("  one \t\n two\u{a0}drei ", vec!["  one \t\n ", "two\u{a0}", "drei "]),
            (" \n", vec![" \n"]),
        ] {
            assert_eq!(split_words(text).collect::<Vec<_>>(), expected);
            assert_eq!(split_words(text).collect::<String>(), text);
        }
    }
}
