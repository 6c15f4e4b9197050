//! The secrets of one agent in the encodings they usually appear in, and how they are found in text. Streams are
//! handled by the parent module; here a search only says where a text may go on as a secret.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use base64::Engine;
use base64::engine::general_purpose::{STANDARD, STANDARD_NO_PAD, URL_SAFE, URL_SAFE_NO_PAD};
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use qd_protocol::text::escaped_head;
use qd_protocol::worker::AgentSpec;

use super::secret_variables::secrets_of;

/// Shorter values are not redacted: hiding them would hide half of all text.
const SECRET_MIN: usize = 6;
/// From this length on, each line of a value is a secret of its own, such as the lines of a PEM key.
const LINE_MIN: usize = 8;
/// The most bytes shown of a variable's name.
const NAME_MAX: usize = 64;

/// Replaces a secret in the text: `[NAME redacted]`.
pub(crate) type RedactionMark = Arc<str>;

/// Finds secrets and replaces them with their marks.
#[derive(Debug, Default)]
pub struct SecretMatcher {
    /// Grouped by their first two bytes, so that most of a text is skipped with one lookup. Longest first.
    patterns: HashMap<[u8; 2], Vec<SecretPattern>>,
    /// The bytes that a pattern can begin with.
    first_bytes: Vec<u8>,
    longest_len: usize,
}

#[derive(Debug)]
struct SecretPattern {
    bytes: Box<[u8]>,
    mark: RedactionMark,
}

/// The result of redacting a text that may go on.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct RedactedStart {
    /// The text up to `undecided_from`, without secrets.
    pub(crate) text: String,
    /// Where in the input something begins that may become a secret; the input's length if nothing does.
    pub(crate) undecided_from: usize,
    /// The mark that `text` ends with, if it does.
    pub(crate) mark: Option<RedactionMark>,
}

/// Builds the redacted text. Adjacent secrets of the same name share one mark, so that a value like `aaaaaa` does not
/// double the length of a text.
#[derive(Debug, Default)]
struct RedactedText {
    text: String,
    mark: Option<RedactionMark>,
}

impl RedactedText {
    fn continuing(mark: Option<RedactionMark>) -> Self {
        Self { text: String::new(), mark }
    }

    fn push_plain(&mut self, text: &str) {
        if !text.is_empty() {
            self.text.push_str(text);
            self.mark = None;
        }
    }

    fn push_mark(&mut self, mark: &RedactionMark) {
        if self.mark.as_ref() != Some(mark) {
            self.text.push_str(mark);
            self.mark = Some(Arc::clone(mark));
        }
    }
}

impl SecretMatcher {
    /// Matches what is secret of an agent's variables.
    pub fn of_agent(spec: &AgentSpec) -> Self {
        Self::new(&secrets_of(spec))
    }

    /// Matches these secrets, by name, as far as they are long enough.
    pub(crate) fn new(secrets: &BTreeMap<String, String>) -> Self {
        let mut encodings: BTreeMap<Vec<u8>, &str> = BTreeMap::new();
        for (name, value) in secrets {
            for value in [value.as_str(), value.trim()] {
                if value.len() >= SECRET_MIN {
                    for encoding in encodings_of(value) {
                        encodings.entry(encoding).or_insert(name);
                    }
                }
            }
            for line in value.lines().map(str::trim).filter(|line| line.len() >= LINE_MIN) {
                for encoding in [line.to_owned(), json_escape(line), json_escape(line).replace('/', "\\/")] {
                    encodings.entry(encoding.into_bytes()).or_insert(name);
                }
            }
        }
        let mut matcher = Self::default();
        for (bytes, name) in encodings {
            matcher.longest_len = matcher.longest_len.max(bytes.len());
            matcher.first_bytes.push(bytes[0]);
            let mark = format!("[{} redacted]", escaped_head(name, NAME_MAX)).into();
            let pattern = SecretPattern { bytes: bytes.into(), mark };
            matcher.patterns.entry([pattern.bytes[0], pattern.bytes[1]]).or_default().push(pattern);
        }
        matcher.first_bytes.dedup();
        for patterns in matcher.patterns.values_mut() {
            patterns.sort_by_key(|pattern| std::cmp::Reverse(pattern.bytes.len()));
        }
        matcher
    }

    /// Redacts a whole text; `None` if it has no secrets.
    pub(crate) fn redact_whole(&self, text: &str) -> Option<String> {
        self.next_secret(text, 0)?;
        Some(self.redact_end(text, None))
    }

    /// Redacts the end of a text. `mark` is the mark that the text before it ended with.
    pub(crate) fn redact_end(&self, text: &str, mark: Option<RedactionMark>) -> String {
        let mut clean = RedactedText::continuing(mark);
        let mut done = 0;
        while let Some((start, pattern)) = self.next_secret(text, done) {
            clean.push_plain(&text[done..start]);
            clean.push_mark(&pattern.mark);
            done = start + pattern.bytes.len();
        }
        clean.push_plain(&text[done..]);
        clean.text
    }

    /// Redacts the middle of a text that goes on: everything before a part that may become a secret, or a longer secret
    /// than it already is. `mark` is the mark that the text before it ended with. Whatever follows, the result is the
    /// same as for the whole text: the leftmost and then the longest secret is found.
    pub(crate) fn redact_start(&self, text: &str, mark: Option<RedactionMark>) -> RedactedStart {
        let bytes = text.as_bytes();
        // A pattern can be cut off only this close to the end.
        let open = text.len().saturating_sub(self.longest_len.saturating_sub(1));
        let mut clean = RedactedText::continuing(mark);
        let (mut done, mut at) = (0, 0);
        while at < bytes.len() {
            let candidate = self.next_candidate(text, at);
            let cut_off = (at.max(open)..candidate.map_or(bytes.len(), |start| start + 1))
                .find(|start| self.may_become_secret(&bytes[*start..]));
            if let Some(start) = cut_off {
                clean.push_plain(&text[done..start]);
                return RedactedStart { text: clean.text, undecided_from: start, mark: clean.mark };
            }
            let Some(start) = candidate else { break };
            match self.longest_match_at(&bytes[start..]) {
                Some(pattern) => {
                    clean.push_plain(&text[done..start]);
                    clean.push_mark(&pattern.mark);
                    done = start + pattern.bytes.len();
                    at = done;
                }
                None => at = start + 1,
            }
        }
        clean.push_plain(&text[done..]);
        RedactedStart { text: clean.text, undecided_from: text.len(), mark: clean.mark }
    }

    /// The next secret at or after `from`, with its position.
    fn next_secret(&self, text: &str, from: usize) -> Option<(usize, &SecretPattern)> {
        let mut at = from;
        loop {
            let start = self.next_candidate(text, at)?;
            if let Some(pattern) = self.longest_match_at(&text.as_bytes()[start..]) {
                return Some((start, pattern));
            }
            at = start + 1;
        }
    }

    /// The next position where two bytes match the beginning of a pattern.
    fn next_candidate(&self, text: &str, from: usize) -> Option<usize> {
        if self.patterns.is_empty() {
            return None;
        }
        let pairs = text.as_bytes().get(from..)?.windows(2);
        pairs
            .enumerate()
            .find(|(_, pair)| self.first_bytes.contains(&pair[0]) && self.patterns.contains_key(*pair))
            .map(|(at, _)| from + at)
    }

    fn longest_match_at(&self, bytes: &[u8]) -> Option<&SecretPattern> {
        self.patterns.get(bytes.get(..2)?)?.iter().find(|pattern| bytes.starts_with(&pattern.bytes))
    }

    /// Whether `bytes` is a proper prefix of a pattern.
    fn may_become_secret(&self, bytes: &[u8]) -> bool {
        match bytes {
            [] => false,
            [only] => self.first_bytes.contains(only),
            [first, second, ..] => self.patterns.get(&[*first, *second]).is_some_and(|patterns| {
                patterns
                    .iter()
                    .take_while(|pattern| pattern.bytes.len() > bytes.len())
                    .any(|pattern| pattern.bytes.starts_with(bytes))
            }),
        }
    }
}

/// The value itself and its usual encodings.
fn encodings_of(value: &str) -> Vec<Vec<u8>> {
    let bytes = value.as_bytes();
    let mut encodings = vec![
        value.to_owned(),
        STANDARD.encode(bytes),
        STANDARD_NO_PAD.encode(bytes),
        URL_SAFE.encode(bytes),
        URL_SAFE_NO_PAD.encode(bytes),
        hex::encode(bytes),
        hex::encode_upper(bytes),
        percent_encode_lower(value, ESCAPED_RFC3986),
        utf8_percent_encode(value, ESCAPED_RFC3986).to_string(),
        utf8_percent_encode(value, ESCAPED_JAVASCRIPT).to_string(),
        utf8_percent_encode(value, ESCAPED_RFC3986).to_string().replace("%20", "+"),
        json_escape(value),
        json_escape_ascii(value),
        json_escape(value).replace('/', "\\/"),
    ];
    // Inside a longer base64 text, such as after `user:`, the value may begin in the middle of a group of three bytes.
    for shift in 0..3 {
        encodings.push(base64_fragment(bytes, shift, &STANDARD_NO_PAD));
        encodings.push(base64_fragment(bytes, shift, &URL_SAFE_NO_PAD));
    }
    encodings.retain(|encoding| encoding.len() >= SECRET_MIN);
    encodings.into_iter().map(String::into_bytes).collect()
}

/// The base64 characters that depend on the value alone, if `shift` bytes of its first group of three precede it.
fn base64_fragment(bytes: &[u8], shift: usize, engine: &impl Engine) -> String {
    let shifted = [&[0; 2][..shift], bytes].concat();
    let whole = engine.encode(&shifted);
    let begin = (shift * 8).div_ceil(6);
    let end = shifted.len() * 8 / 6;
    whole[begin..end].to_owned()
}

/// The characters that RFC 3986 wants escaped.
const ESCAPED_RFC3986: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'~');
/// The characters that JavaScript's `encodeURIComponent` escapes: fewer than RFC 3986 does.
const ESCAPED_JAVASCRIPT: &AsciiSet =
    &ESCAPED_RFC3986.remove(b'!').remove(b'*').remove(b'\'').remove(b'(').remove(b')');

/// Percent-encodes with the digits a to f in lower case. The encoder gives each escape as a piece of its own, and no other
/// piece has a percent sign.
fn percent_encode_lower(value: &str, escaped: &'static AsciiSet) -> String {
    utf8_percent_encode(value, escaped)
        .map(|piece| if piece.starts_with('%') { piece.to_ascii_lowercase() } else { piece.to_owned() })
        .collect()
}

/// Escapes as inside a JSON string.
fn json_escape(value: &str) -> String {
    let quoted = serde_json::Value::from(value).to_string();
    quoted[1..quoted.len() - 1].to_owned()
}

/// Escapes as inside a JSON string that is limited to ASCII.
fn json_escape_ascii(value: &str) -> String {
    let mut text = String::new();
    for character in json_escape(value).chars() {
        if character.is_ascii() {
            text.push(character);
        } else {
            let mut units = [0; 2];
            text.extend(character.encode_utf16(&mut units).iter().map(|unit| format!("\\u{unit:04x}")));
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn matcher(values: &[(&str, &str)]) -> SecretMatcher {
        SecretMatcher::new(
            &values.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect(),
        )
    }

    #[test]
    fn every_usual_encoding_of_a_secret_is_found() {
        let secret = "p\"ä/ß s?3>cret";
        let secrets = matcher(&[("KEY", secret)]);
        for shape in [
            secret,
            "cCLDpC/DnyBzPzM+Y3JldA==",
            "cCLDpC_DnyBzPzM-Y3JldA",
            "p%22%C3%A4%2F%C3%9F%20s%3F3%3Ecret",
            "p%22%c3%a4%2f%c3%9f%20s%3f3%3ecret",
            "p%22%C3%A4%2F%C3%9F+s%3F3%3Ecret",
            "p\\\"ä/ß s?3>cret",
            "p\\\"\\u00e4/\\u00df s?3>cret",
            "p\\\"ä\\/ß s?3>cret",
            "7022c3a42fc39f20733f333e63726574",
            "7022C3A42FC39F20733F333E63726574",
        ] {
            assert_eq!(
                secrets.redact_whole(&format!("<{shape}>")).as_deref(),
                Some("<[KEY redacted]>"),
                "{shape}"
            );
        }
    }

    #[test]
    fn a_secret_is_found_inside_a_longer_text_in_base64() {
        let secrets = matcher(&[("KEY", "hunter2hunter2")]);
        for before in ["", "u", "us", "user:", "user1:", "user12:"] {
            for after in ["", "x", "xy", "xyz"] {
                let encoded = STANDARD.encode(format!("{before}hunter2hunter2{after}"));
                let clean = secrets.redact_whole(&encoded).unwrap_or(encoded);
                assert!(clean.contains("[KEY redacted]"), "{before} {after}: {clean}");
            }
        }
    }

    #[test]
    fn short_values_are_no_secrets_and_white_space_around_one_does_not_hide_it() {
        assert!(matcher(&[("A", "12345"), ("B", "")]).patterns.is_empty());
        let secrets = matcher(&[("TOKEN", "hunter2\n")]);
        assert_eq!(secrets.redact_whole("hunter2!").as_deref(), Some("[TOKEN redacted]!"));
        assert_eq!(secrets.redact_whole("hunter"), None);
    }

    #[test]
    fn if_two_secrets_begin_at_the_same_byte_the_longer_one_is_named() {
        let secrets = matcher(&[("LONG", "abcdefgh"), ("SHORT", "abcdef")]);
        assert_eq!(
            secrets.redact_whole("abcdefgh abcdefg").as_deref(),
            Some("[LONG redacted] [SHORT redacted]g")
        );
    }
    #[test]
    fn each_line_of_a_key_is_found_by_itself() {
        let key = "-----BEGIN KEY-----\nMIIEvQIBADANBgkqhkiG\r\n9w0BAQEF/ASCBKcw\nshort\n-----END KEY-----\n";
        let secrets = matcher(&[("PEM", key)]);
        assert_eq!(
            secrets.redact_whole("line 2: MIIEvQIBADANBgkqhkiG.").as_deref(),
            Some("line 2: [PEM redacted].")
        );
        assert_eq!(secrets.redact_whole("9w0BAQEF\\/ASCBKcw").as_deref(), Some("[PEM redacted]"));
        assert_eq!(secrets.redact_whole("a short line"), None);
        assert_eq!(secrets.redact_whole(key.trim()).as_deref(), Some("[PEM redacted]"));
    }

    #[test]
    fn adjacent_secrets_of_one_name_share_a_mark() {
        let secrets = matcher(&[("K", "aaaaaa"), ("L", "bbbbbb")]);
        let text = "a".repeat(600) + "bbbbbb" + &"a".repeat(13);
        assert_eq!(secrets.redact_whole(&text).as_deref(), Some("[K redacted][L redacted][K redacted]a"));
    }
}
