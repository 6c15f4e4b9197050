//! The secrets of one agent in all their forms, and how they are found in text. Streams are handled by the parent module;
//! here a search only says where a text may go on as a secret.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use base64::Engine;
use base64::engine::general_purpose::{STANDARD, STANDARD_NO_PAD};
use qd_protocol::text::escaped_head;
use qd_protocol::worker::AgentSpec;

use super::dumped_bytes::DumpNotation;
use super::secret_forms::{FormMatch, SecretForm};
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
    patterns: Vec<SecretPattern>,
    /// The patterns that can begin with two bytes, by position in `patterns`.
    by_first_pair: HashMap<[u8; 2], Vec<usize>>,
    beginnings: PatternBeginnings,
}

#[derive(Debug)]
struct SecretPattern {
    form: SecretForm,
    mark: RedactionMark,
}

/// The bytes and the pairs of bytes that patterns begin with, as sets of bits, so that most of a text is skipped with two
/// loads for each byte. Without patterns there are no bits at all.
#[derive(Debug, Default)]
struct PatternBeginnings {
    first: [u64; 4],
    pairs: Vec<u64>,
}

impl PatternBeginnings {
    fn add(&mut self, pair: [u8; 2]) {
        self.pairs.resize(1 << 10, 0);
        let bit = usize::from(u16::from_be_bytes(pair));
        self.pairs[bit / 64] |= 1 << (bit % 64);
        self.first[usize::from(pair[0]) / 64] |= 1 << (pair[0] % 64);
    }

    fn has_first(&self, byte: u8) -> bool {
        self.first[usize::from(byte) / 64] >> (byte % 64) & 1 == 1
    }

    fn has_pair(&self, pair: [u8; 2]) -> bool {
        let bit = usize::from(u16::from_be_bytes(pair));
        self.pairs[bit / 64] >> (bit % 64) & 1 == 1
    }

    /// The first position of a pair, at or after `from`.
    fn find_pair(&self, bytes: &[u8], from: usize) -> Option<usize> {
        let mut pairs = bytes.get(from..).filter(|_| !self.pairs.is_empty())?.windows(2);
        pairs
            .position(|pair| self.has_first(pair[0]) && self.has_pair([pair[0], pair[1]]))
            .map(|at| from + at)
    }
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
        let mut forms: BTreeMap<SecretForm, &str> = BTreeMap::new();
        for (name, value) in secrets {
            for value in [value.as_str(), value.trim()] {
                if value.len() >= SECRET_MIN {
                    for form in forms_of(value.as_bytes()) {
                        forms.entry(form).or_insert(name);
                    }
                }
            }
            for line in value.lines().map(str::trim).filter(|line| line.len() >= LINE_MIN) {
                forms.entry(SecretForm::Escaped(line.as_bytes().into())).or_insert(name);
            }
        }
        let mut matcher = Self::default();
        for (form, name) in forms {
            for pair in form.first_pairs() {
                matcher.beginnings.add(pair);
                let starting = matcher.by_first_pair.entry(pair).or_default();
                if starting.last() != Some(&matcher.patterns.len()) {
                    starting.push(matcher.patterns.len());
                }
            }
            let mark = format!("[{} redacted]", escaped_head(name, NAME_MAX)).into();
            matcher.patterns.push(SecretPattern { form, mark });
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
        while let Some((start, len, mark)) = self.next_secret(text, done) {
            clean.push_plain(&text[done..start]);
            clean.push_mark(mark);
            done = start + len;
        }
        clean.push_plain(&text[done..]);
        clean.text
    }

    /// Redacts the middle of a text that goes on: everything before a part that may become a secret, or a longer secret
    /// than it already is. `mark` is the mark that the text before it ended with. Whatever follows, the result is the
    /// same as for the whole text: the leftmost and then the longest secret is found.
    pub(crate) fn redact_start(&self, text: &str, mark: Option<RedactionMark>) -> RedactedStart {
        let bytes = text.as_bytes();
        let mut clean = RedactedText::continuing(mark);
        let (mut done, mut at) = (0, 0);
        let undecided_from = loop {
            let Some(start) = self.beginnings.find_pair(bytes, at) else {
                // The last byte may be the first of a pair.
                break match bytes.last() {
                    Some(last) if bytes.len() > at && self.beginnings.has_first(*last) => bytes.len() - 1,
                    _ => bytes.len(),
                };
            };
            match self.secret_at(&bytes[start..], false) {
                SecretAtStart::Undecided => break start,
                SecretAtStart::Found(len, mark) => {
                    clean.push_plain(&text[done..start]);
                    clean.push_mark(mark);
                    done = start + len;
                    at = done;
                }
                SecretAtStart::Absent => at = start + 1,
            }
        };
        clean.push_plain(&text[done..undecided_from]);
        RedactedStart { text: clean.text, undecided_from, mark: clean.mark }
    }

    /// The next secret at or after `from`: its position, its length and its mark.
    fn next_secret(&self, text: &str, from: usize) -> Option<(usize, usize, &RedactionMark)> {
        let mut at = from;
        loop {
            let start = self.beginnings.find_pair(text.as_bytes(), at)?;
            if let SecretAtStart::Found(len, mark) = self.secret_at(&text.as_bytes()[start..], true) {
                return Some((start, len, mark));
            }
            at = start + 1;
        }
    }

    /// The longest secret that a text begins with. It is undecided while another one could be longer.
    fn secret_at(&self, bytes: &[u8], is_whole: bool) -> SecretAtStart<'_> {
        let starting = bytes.first_chunk().and_then(|pair| self.by_first_pair.get(pair));
        let mut longest = SecretAtStart::Absent;
        let mut longest_len = 0;
        for pattern in starting.into_iter().flatten().map(|position| &self.patterns[*position]) {
            match pattern.form.match_start(bytes, is_whole) {
                FormMatch::Differs => {}
                FormMatch::Undecided => return SecretAtStart::Undecided,
                FormMatch::Found(len) if len > longest_len => {
                    longest = SecretAtStart::Found(len, &pattern.mark);
                    longest_len = len;
                }
                FormMatch::Found(_) => {}
            }
        }
        longest
    }
}

/// The secret that a text begins with.
enum SecretAtStart<'a> {
    Absent,
    /// The text ends before it can be said.
    Undecided,
    /// Its length and its mark.
    Found(usize, &'a RedactionMark),
}

/// All forms of a value.
fn forms_of(value: &[u8]) -> Vec<SecretForm> {
    let mut forms = vec![SecretForm::Escaped(value.into())];
    forms.extend(DumpNotation::ALL.map(|notation| SecretForm::Dump(notation, value.into())));
    let mut base64 = vec![STANDARD.encode(value), STANDARD_NO_PAD.encode(value)];
    // Inside a longer base64 text, such as after `user:`, the value may begin in the middle of a group of three bytes.
    base64.extend((0..3).map(|shift| base64_fragment(value, shift)));
    base64.retain(|characters| characters.len() >= SECRET_MIN);
    forms.extend(base64.into_iter().map(|characters| SecretForm::Base64(characters.into_bytes().into())));
    forms
}

/// The base64 characters that depend on the value alone, if `shift` bytes of its first group of three precede it.
fn base64_fragment(value: &[u8], shift: usize) -> String {
    let shifted = [&[0; 2][..shift], value].concat();
    let whole = STANDARD_NO_PAD.encode(&shifted);
    let begin = (shift * 8).div_ceil(6);
    let end = shifted.len() * 8 / 6;
    whole[begin..end].to_owned()
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
