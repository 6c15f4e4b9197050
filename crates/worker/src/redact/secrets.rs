//! The secrets of one agent in every shape that they usually take, and how they are found in text. Nothing of a
//! stream is known here but where a text may go on as a secret.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use base64::Engine;
use base64::engine::general_purpose::{STANDARD, STANDARD_NO_PAD, URL_SAFE, URL_SAFE_NO_PAD};
use qd_protocol::text::escaped_head;

/// A shorter value is no secret: hiding it would hide half of all text.
const SECRET_MIN: usize = 6;
/// A line of a longer value is a secret of its own from here on, as those of a key in PEM are.
const LINE_MIN: usize = 8;
/// What is shown of a variable's name.
const NAME_MAX: usize = 64;

/// What stands in the place of a secret: `[NAME redacted]`.
pub(crate) type RedactionMark = Arc<str>;

/// What is looked for, and what is put in its place.
#[derive(Debug, Default)]
pub(crate) struct SecretMatcher {
    /// By their first two bytes, so that most of a text is passed over with one look; longest first.
    patterns: HashMap<[u8; 2], Vec<SecretPattern>>,
    /// Which bytes a needle can begin with.
    first_bytes: Vec<u8>,
    longest_len: usize,
}

#[derive(Debug)]
struct SecretPattern {
    bytes: Box<[u8]>,
    mark: RedactionMark,
}

/// How a search in a text ended.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct RedactedStart {
    /// The text so far, without secrets.
    pub(crate) text: String,
    /// Where in the searched text something begins that may become a secret; its length if nothing does.
    pub(crate) undecided_from: usize,
    /// The mark that the text ends with, if it does.
    pub(crate) mark: Option<RedactionMark>,
}

/// Text in the making. Neighbouring secrets of one name get one mark, so that a value like `aaaaaa` does not make
/// twice as much of a text as it was.
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
    /// The values of these variables that are long enough.
    pub(crate) fn from_env(env: &BTreeMap<String, String>) -> Self {
        let mut shapes: BTreeMap<Vec<u8>, &str> = BTreeMap::new();
        for (name, value) in env {
            for value in [value.as_str(), value.trim()] {
                if value.len() >= SECRET_MIN {
                    for shape in encodings_of(value) {
                        shapes.entry(shape).or_insert(name);
                    }
                }
            }
            for line in value.lines().map(str::trim).filter(|line| line.len() >= LINE_MIN) {
                for shape in [line.to_owned(), json_escape(line), json_escape(line).replace('/', "\\/")] {
                    shapes.entry(shape.into_bytes()).or_insert(name);
                }
            }
        }
        let mut secrets = Self::default();
        for (bytes, name) in shapes {
            secrets.longest_len = secrets.longest_len.max(bytes.len());
            secrets.first_bytes.push(bytes[0]);
            let instead = format!("[{} redacted]", escaped_head(name, NAME_MAX)).into();
            let needle = SecretPattern { bytes: bytes.into(), mark: instead };
            secrets.patterns.entry([needle.bytes[0], needle.bytes[1]]).or_default().push(needle);
        }
        secrets.first_bytes.dedup();
        for needles in secrets.patterns.values_mut() {
            needles.sort_by_key(|needle| std::cmp::Reverse(needle.bytes.len()));
        }
        secrets
    }

    /// The whole of a text without its secrets; `None` if it has none.
    pub(crate) fn redact_whole(&self, text: &str) -> Option<String> {
        self.next_secret(text, 0)?;
        Some(self.redact_end(text, None))
    }

    /// The end of a text whose beginning ended with this mark, without its secrets.
    pub(crate) fn redact_end(&self, text: &str, mark: Option<RedactionMark>) -> String {
        let mut clean = RedactedText::continuing(mark);
        let mut done = 0;
        while let Some((start, needle)) = self.next_secret(text, done) {
            clean.push_plain(&text[done..start]);
            clean.push_mark(&needle.mark);
            done = start + needle.bytes.len();
        }
        clean.push_plain(&text[done..]);
        clean.text
    }

    /// The middle of a text that goes on, after a beginning that ended with this mark: everything before what may become
    /// a secret, or a longer one than it already is. Whatever follows, the leftmost and then the longest secret is the
    /// one that is found.
    pub(crate) fn redact_start(&self, text: &str, mark: Option<RedactionMark>) -> RedactedStart {
        let bytes = text.as_bytes();
        // Only so near the end can a needle be cut off.
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
                Some(needle) => {
                    clean.push_plain(&text[done..start]);
                    clean.push_mark(&needle.mark);
                    done = start + needle.bytes.len();
                    at = done;
                }
                None => at = start + 1,
            }
        }
        clean.push_plain(&text[done..]);
        RedactedStart { text: clean.text, undecided_from: text.len(), mark: clean.mark }
    }

    /// The next secret from here on, and where it begins.
    fn next_secret(&self, text: &str, from: usize) -> Option<(usize, &SecretPattern)> {
        let mut at = from;
        loop {
            let start = self.next_candidate(text, at)?;
            if let Some(needle) = self.longest_match_at(&text.as_bytes()[start..]) {
                return Some((start, needle));
            }
            at = start + 1;
        }
    }

    /// The next place where two bytes look like the beginning of a needle.
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
        self.patterns.get(bytes.get(..2)?)?.iter().find(|needle| bytes.starts_with(&needle.bytes))
    }

    /// Whether all of this is the beginning of a needle, and not the whole of it.
    fn may_become_secret(&self, bytes: &[u8]) -> bool {
        match bytes {
            [] => false,
            [only] => self.first_bytes.contains(only),
            [one, two, ..] => self.patterns.get(&[*one, *two]).is_some_and(|needles| {
                needles
                    .iter()
                    .take_while(|needle| needle.bytes.len() > bytes.len())
                    .any(|needle| needle.bytes.starts_with(bytes))
            }),
        }
    }
}

/// A value as it is and in the encodings in which programs like to show it.
fn encodings_of(value: &str) -> Vec<Vec<u8>> {
    let bytes = value.as_bytes();
    let mut shapes = vec![
        value.to_owned(),
        STANDARD.encode(bytes),
        STANDARD_NO_PAD.encode(bytes),
        URL_SAFE.encode(bytes),
        URL_SAFE_NO_PAD.encode(bytes),
        hex_encode(bytes, false),
        hex_encode(bytes, true),
        percent_encode(bytes, UNRESERVED_RFC3986, false),
        percent_encode(bytes, UNRESERVED_RFC3986, true),
        percent_encode(bytes, UNRESERVED_JAVASCRIPT, true),
        percent_encode(bytes, UNRESERVED_RFC3986, true).replace("%20", "+"),
        json_escape(value),
        json_escape_ascii(value),
        json_escape(value).replace('/', "\\/"),
    ];
    // Inside a longer text in base64, as after `user:`, it begins in the middle of a group of three.
    for shift in 0..3 {
        shapes.push(base64_fragment(bytes, shift, &STANDARD_NO_PAD));
        shapes.push(base64_fragment(bytes, shift, &URL_SAFE_NO_PAD));
    }
    shapes.retain(|shape| shape.len() >= SECRET_MIN);
    shapes.into_iter().map(String::into_bytes).collect()
}

/// The characters that depend on the value alone, if `shift` other bytes of its group of three come before it.
fn base64_fragment(bytes: &[u8], shift: usize, engine: &impl Engine) -> String {
    let shifted = [&[0; 2][..shift], bytes].concat();
    let whole = engine.encode(&shifted);
    let begin = (shift * 8).div_ceil(6);
    let end = shifted.len() * 8 / 6;
    whole[begin..end].to_owned()
}

fn hex_encode(bytes: &[u8], upper: bool) -> String {
    bytes.iter().map(|byte| if upper { format!("{byte:02X}") } else { format!("{byte:02x}") }).collect()
}

/// What RFC 3986 leaves as it is.
const UNRESERVED_RFC3986: &str = "-._~";
/// What JavaScript's `encodeURIComponent` leaves as it is.
const UNRESERVED_JAVASCRIPT: &str = "-._~!*'()";

fn percent_encode(bytes: &[u8], plain: &str, upper: bool) -> String {
    let mut text = String::new();
    for byte in bytes {
        if byte.is_ascii_alphanumeric() || plain.as_bytes().contains(byte) {
            text.push(char::from(*byte));
        } else if upper {
            text.push_str(&format!("%{byte:02X}"));
        } else {
            text.push_str(&format!("%{byte:02x}"));
        }
    }
    text
}

/// Inside a JSON string.
fn json_escape(value: &str) -> String {
    let quoted = serde_json::Value::from(value).to_string();
    quoted[1..quoted.len() - 1].to_owned()
}

/// Inside a JSON string of a writer that keeps to ASCII.
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
        SecretMatcher::from_env(
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
    fn of_two_secrets_at_one_place_the_longer_is_named() {
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
    fn neighbours_of_one_name_share_a_mark() {
        let secrets = matcher(&[("K", "aaaaaa"), ("L", "bbbbbb")]);
        let text = "a".repeat(600) + "bbbbbb" + &"a".repeat(13);
        assert_eq!(secrets.redact_whole(&text).as_deref(), Some("[K redacted][L redacted][K redacted]a"));
    }
}
