//! A secret as a dump of its bytes: in hexadecimal, octal or decimal numbers or as single characters, with separators
//! between them, and over several lines with an offset before and the text beside them, as `xxd`, `hexdump` and `od`
//! print it.

use super::secret_forms::FormMatch;

/// Separators between two bytes.
const SEPARATORS_MAX: usize = 8;
/// What may follow the last byte of a line: the text beside the numbers.
const LINE_REST_MAX: usize = 112;
/// The digits of an offset at the beginning of a line.
const OFFSET_MIN: usize = 4;
const OFFSET_MAX: usize = 16;
/// A dump is not followed further than this, so that little is held back however it is written.
const DUMP_MAX: usize = 64 << 10;

/// How a dump writes bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum DumpNotation {
    /// `68 75`, `68:75`, `6875`, `0x68, 0x75`.
    Hex,
    /// `7568`: two bytes as one number, the second byte first. The secret begins with the first byte of a number.
    HexWords,
    /// The same, and the secret begins with the second byte of a number.
    HexWordsShifted,
    /// `150 165`.
    Octal,
    /// `072550`: two bytes as one number.
    OctalWords,
    /// The same; the first byte is not looked for, because it shares a number with another.
    OctalWordsShifted,
    /// `104, 117`.
    Decimal,
    /// `h   u`.
    Characters,
}

/// The digits or the character of one number of a dump. A question mark is any digit.
struct DumpToken {
    text: [u8; 6],
    len: usize,
}

impl DumpNotation {
    pub(super) const ALL: [Self; 8] = [
        Self::Hex,
        Self::HexWords,
        Self::HexWordsShifted,
        Self::Octal,
        Self::OctalWords,
        Self::OctalWordsShifted,
        Self::Decimal,
        Self::Characters,
    ];

    fn token_count(self, secret: &[u8]) -> usize {
        match self {
            Self::Hex | Self::Octal | Self::Decimal | Self::Characters => secret.len(),
            Self::HexWords => secret.len().div_ceil(2),
            Self::HexWordsShifted => 1 + (secret.len() - 1).div_ceil(2),
            Self::OctalWords => secret.len() / 2,
            Self::OctalWordsShifted => (secret.len() - 1) / 2,
        }
    }

    fn token(self, secret: &[u8], i: usize) -> DumpToken {
        let word = |at: usize| match (secret.get(at), secret.get(at + 1)) {
            (Some(low), Some(high)) => format!("{high:02x}{low:02x}"),
            (Some(low), None) => format!("??{low:02x}"),
            _ => String::new(),
        };
        let octal_word = |at: usize| format!("{:06o}", u16::from_le_bytes([secret[at], secret[at + 1]]));
        DumpToken::new(&match self {
            Self::Hex => format!("{:02x}", secret[i]),
            Self::HexWords => word(2 * i),
            Self::HexWordsShifted if i == 0 => format!("{:02x}??", secret[0]),
            Self::HexWordsShifted => word(2 * i - 1),
            Self::Octal => format!("{:03o}", secret[i]),
            Self::OctalWords => octal_word(2 * i),
            Self::OctalWordsShifted => octal_word(2 * i + 1),
            Self::Decimal => secret[i].to_string(),
            Self::Characters => match secret[i] {
                b'\n' => "\\n".to_owned(),
                b'\r' => "\\r".to_owned(),
                b'\t' => "\\t".to_owned(),
                byte @ b' '..=b'~' => char::from(byte).to_string(),
                byte => format!("{byte:03o}"),
            },
        })
    }

    /// Whether nothing but a separator says where a byte ends.
    fn needs_separator(self) -> bool {
        matches!(self, Self::Decimal | Self::Characters)
    }

    fn is_case_sensitive(self) -> bool {
        self == Self::Characters
    }
}

impl DumpToken {
    fn new(token: &str) -> Self {
        let mut text = [0; 6];
        let len = token.len().min(text.len());
        text[..len].copy_from_slice(&token.as_bytes()[..len]);
        Self { text, len }
    }

    fn match_start(&self, text: &[u8], case_sensitive: bool) -> FormMatch {
        for (i, wanted) in self.text[..self.len].iter().enumerate() {
            let Some(byte) = text.get(i) else { return FormMatch::Undecided };
            let is_equal = match wanted {
                b'?' if !case_sensitive => byte.is_ascii_hexdigit(),
                _ if case_sensitive => byte == wanted,
                _ => byte.eq_ignore_ascii_case(wanted),
            };
            if !is_equal {
                return FormMatch::Differs;
            }
        }
        FormMatch::Found(self.len)
    }
}

pub(super) fn match_start(notation: DumpNotation, secret: &[u8], text: &[u8], is_whole: bool) -> FormMatch {
    let (mut at, mut has_separators) = (0, false);
    for i in 0..notation.token_count(secret) {
        let token = notation.token(secret, i);
        let found = match i {
            0 => token.match_start(text, notation.is_case_sensitive()),
            _ => match_next(notation, &token, &text[at..]),
        };
        let FormMatch::Found(len) = found else { return found };
        has_separators |= len > token.len;
        at += len;
        if at > DUMP_MAX {
            return FormMatch::Differs;
        }
    }
    if !has_separators {
        return FormMatch::Found(at);
    }
    // The text beside the numbers has the secret once more, in pieces of a line.
    match line_rest(&text[at..], is_whole) {
        None => FormMatch::Undecided,
        Some(rest) => {
            let is_beside = rest.windows(2).any(|pair| pair == b"  ") || rest.contains(&b'|');
            let shares_number =
                matches!(notation, DumpNotation::OctalWords | DumpNotation::OctalWordsShifted);
            FormMatch::Found(if is_beside || shares_number { at + rest.len() } else { at })
        }
    }
}

pub(super) fn first_pairs(notation: DumpNotation, secret: &[u8]) -> Vec<[u8; 2]> {
    let token = notation.token(secret, 0);
    if notation == DumpNotation::Characters && token.len == 1 {
        return [b' ', b'\t', b'\n', b'\r'].map(|blank| [token.text[0], blank]).to_vec();
    }
    let spellings = |digit: u8| [digit.to_ascii_lowercase(), digit.to_ascii_uppercase()];
    match token.len {
        // A number of one digit is no beginning that can be told from others.
        0 | 1 => Vec::new(),
        _ => spellings(token.text[0])
            .iter()
            .flat_map(|first| spellings(token.text[1]).map(|second| [*first, second]))
            .collect(),
    }
}

/// The next number after what may separate it from the last one.
fn match_next(notation: DumpNotation, token: &DumpToken, text: &[u8]) -> FormMatch {
    let token_at = |at: usize| match token.match_start(&text[at..], notation.is_case_sensitive()) {
        FormMatch::Found(len) => FormMatch::Found(at + len),
        other => other,
    };
    let mut places = Vec::with_capacity(4);
    if !notation.needs_separator() {
        places.push(0);
    }
    let separators = text.iter().take(SEPARATORS_MAX).take_while(|byte| is_separator(**byte)).count();
    if separators > 0 {
        places.push(separators);
    }
    let prefixed = separators + number_prefix_len(&text[separators..]);
    if prefixed > separators {
        places.push(prefixed);
    }
    for place in places {
        match token_at(place) {
            FormMatch::Differs => {}
            decided => return decided,
        }
    }
    // A prefix such as `0x` that has only begun.
    if matches!(&text[separators..], b"0" | b"\\") {
        return FormMatch::Undecided;
    }
    let begin = match line_end(notation, text) {
        FormMatch::Found(end) => end + 1,
        other => return other,
    };
    let begin = begin + blanks_len(&text[begin..]);
    match token_at(begin) {
        FormMatch::Differs => {}
        decided => return decided,
    }
    let digits = text[begin..].iter().take(OFFSET_MAX).take_while(|byte| byte.is_ascii_hexdigit()).count();
    let after = begin + digits;
    let blanks = text[after..].iter().take(SEPARATORS_MAX).take_while(|byte| is_separator(**byte)).count();
    match () {
        () if after + blanks == text.len() => FormMatch::Undecided,
        () if digits < OFFSET_MIN || blanks == 0 => FormMatch::Differs,
        () => match token_at(after + blanks) {
            FormMatch::Differs => token_at(after + blanks + number_prefix_len(&text[after + blanks..])),
            decided => decided,
        },
    }
}

/// Where the line ends whose last number is before this text. After a number there are only separators and perhaps the
/// text beside the numbers, which two blanks or a bar set apart; dumps of characters have none. Anything else is no dump,
/// and must not be held back until its line is over.
fn line_end(notation: DumpNotation, text: &[u8]) -> FormMatch {
    let separators = text.iter().take_while(|byte| is_separator(**byte) || **byte == b'\r').count();
    let sets_apart = |between: &[u8]| between.windows(2).any(|pair| pair == b"  ") || between.contains(&b'|');
    let is_beside = notation != DumpNotation::Characters && sets_apart(&text[..separators]);
    if text.get(separators).is_some_and(|byte| *byte != b'\n') && !is_beside {
        return FormMatch::Differs;
    }
    match line_rest(text, false) {
        None => FormMatch::Undecided,
        Some(rest) if text.get(rest.len()) == Some(&b'\n') => FormMatch::Found(rest.len()),
        Some(_) => FormMatch::Differs,
    }
}

fn is_separator(byte: u8) -> bool {
    matches!(byte, b' ' | b'\t' | b':' | b',' | b';' | b'-' | b'_' | b'.' | b'|' | b'"' | b'\'')
}

/// What some dumps write before each number.
fn number_prefix_len(text: &[u8]) -> usize {
    match text {
        [b'0', b'x' | b'X' | b'o', ..] | [b'\\', b'x', ..] => 2,
        [b'\\' | b'%' | b'$', ..] => 1,
        _ => 0,
    }
}

fn blanks_len(text: &[u8]) -> usize {
    text.iter().take(SEPARATORS_MAX).take_while(|byte| matches!(byte, b' ' | b'\t')).count()
}

/// The rest of the line that a text begins in, or nothing of it if it is too long for the text beside a dump. `None` if
/// the text ends before that is known.
fn line_rest(text: &[u8], is_whole: bool) -> Option<&[u8]> {
    match text.iter().take(LINE_REST_MAX).position(|byte| *byte == b'\n') {
        Some(end) => Some(&text[..end]),
        None if text.len() >= LINE_REST_MAX => Some(&[]),
        None if is_whole => Some(text),
        None => None,
    }
}
