//! A secret whose characters are written as they are or escaped: percent-encoding, the escapes of JSON, C, shells and
//! Unicode, and HTML entities, also mixed.

use super::secret_forms::FormMatch;

/// Backslashes before one escape, as in JSON inside JSON.
const BACKSLASHES_MAX: usize = 8;
/// Bytes of the longest HTML entity that is known here.
const ENTITY_MAX: usize = 10;
/// Escapes of one letter, and what they stand for.
const LETTER_ESCAPES: &[(u8, u8)] = &[
    (b'n', b'\n'),
    (b't', b'\t'),
    (b'r', b'\r'),
    (b'b', 8),
    (b'f', 12),
    (b'v', 11),
    (b'a', 7),
    (b'e', 27),
    (b'"', b'"'),
    (b'\'', b'\''),
    (b'/', b'/'),
    (b'\\', b'\\'),
];
const NAMED_ENTITIES: &[(&[u8], u8)] =
    &[(b"amp", b'&'), (b"lt", b'<'), (b"gt", b'>'), (b"quot", b'"'), (b"apos", b'\'')];

/// What an escape at the beginning of a text stands for.
enum EscapeMatch {
    /// There is no escape.
    Absent,
    /// The text ends within what may be one.
    Undecided,
    Found {
        bytes: [u8; 4],
        bytes_len: usize,
        /// The bytes of the text that the escape takes.
        text_len: usize,
    },
}

pub(super) fn match_start(secret: &[u8], text: &[u8], is_whole: bool) -> FormMatch {
    if text.len() < secret.len() && secret.starts_with(text) {
        return FormMatch::Undecided;
    }
    match match_escaped(secret, text) {
        FormMatch::Undecided if !is_whole => FormMatch::Undecided,
        FormMatch::Differs | FormMatch::Undecided if text.starts_with(secret) => {
            FormMatch::Found(secret.len())
        }
        FormMatch::Found(len) if text.starts_with(secret) => FormMatch::Found(len.max(secret.len())),
        escaped => escaped,
    }
}

/// Compares character by character, each of which may be escaped.
fn match_escaped(secret: &[u8], text: &[u8]) -> FormMatch {
    let (mut at, mut matched) = (0, 0);
    while matched < secret.len() {
        let (rest, wanted) = (&text[at..], &secret[matched..]);
        let Some(&first) = rest.first() else { return FormMatch::Undecided };
        match find_escape(rest) {
            EscapeMatch::Undecided => return FormMatch::Undecided,
            EscapeMatch::Found { bytes, bytes_len, text_len } if wanted.starts_with(&bytes[..bytes_len]) => {
                at += text_len;
                matched += bytes_len;
            }
            // An escaped backslash before something that only looks like an escape.
            _ if wanted[0] == b'\\' && rest.starts_with(b"\\\\") => {
                at += 2;
                matched += 1;
            }
            // In the query of an address, a space is a plus sign.
            _ if first == wanted[0] || (first == b'+' && wanted[0] == b' ') => {
                at += 1;
                matched += 1;
            }
            _ => return FormMatch::Differs,
        }
    }
    FormMatch::Found(at)
}

pub(super) fn first_pairs(secret: &[u8]) -> Vec<[u8; 2]> {
    let (first, second) = (secret[0], secret[1]);
    let mut pairs = vec![[first, second], [first, b'%'], [first, b'\\'], [first, b'&'], [first, b'+']];
    let hex = hex::encode([first]);
    pairs.extend([[b'%', hex.as_bytes()[0]], [b'%', hex.as_bytes()[0].to_ascii_uppercase()]]);
    pairs.extend([b"\\u", b"\\U", b"\\x", b"\\\\", b"&#"]);
    pairs.extend([first / 64, first / 8, first].map(|digit| [b'\\', b'0' + digit % 8]));
    pairs.push(*b"\\0");
    for (letter, meaning) in LETTER_ESCAPES {
        if *meaning == first {
            pairs.push([b'\\', *letter]);
        }
    }
    for (name, meaning) in NAMED_ENTITIES {
        if *meaning == first {
            pairs.push([b'&', name[0]]);
        }
    }
    if first == b' ' {
        pairs.extend([[b'+', second], [b'+', b'%'], [b'+', b'\\'], [b'+', b'&']]);
    }
    pairs
}

fn find_escape(text: &[u8]) -> EscapeMatch {
    match text[0] {
        b'%' => numeric_escape(text, 1, 2, 2, 16),
        b'\\' => backslash_escape(text),
        b'&' => entity(text),
        _ => EscapeMatch::Absent,
    }
}

fn backslash_escape(text: &[u8]) -> EscapeMatch {
    let backslashes = text.iter().take(BACKSLASHES_MAX).take_while(|byte| **byte == b'\\').count();
    let Some(&letter) = text.get(backslashes) else { return EscapeMatch::Undecided };
    match letter {
        b'u' if text.get(backslashes + 1) == Some(&b'{') => braced_escape(text, backslashes + 2),
        b'u' => utf16_escape(text, backslashes),
        b'U' => match digits_at(text, backslashes + 1, 8, 8, 16) {
            DigitRun::Found(code, end) => character(code, end),
            DigitRun::Undecided => EscapeMatch::Undecided,
            DigitRun::Absent => EscapeMatch::Absent,
        },
        b'x' => numeric_escape(text, backslashes + 1, 1, 2, 16),
        b'0'..=b'7' => numeric_escape(text, backslashes, 1, 3, 8),
        _ if backslashes > 1 => byte_escape(b'\\', 2),
        _ => match LETTER_ESCAPES.iter().find(|(known, _)| *known == letter) {
            Some((_, meaning)) => byte_escape(*meaning, 2),
            None => EscapeMatch::Absent,
        },
    }
}

/// A number that stands for one byte.
fn numeric_escape(text: &[u8], from: usize, min: usize, max: usize, radix: u32) -> EscapeMatch {
    match digits_at(text, from, min, max, radix) {
        DigitRun::Found(code, end) => match u8::try_from(code) {
            Ok(byte) => byte_escape(byte, end),
            Err(_) => EscapeMatch::Absent,
        },
        DigitRun::Undecided => EscapeMatch::Undecided,
        DigitRun::Absent => EscapeMatch::Absent,
    }
}

/// `\u{61}`, whose digits begin at `from`.
fn braced_escape(text: &[u8], from: usize) -> EscapeMatch {
    match digits_at(text, from, 1, 6, 16) {
        DigitRun::Found(code, end) if text.get(end) == Some(&b'}') => character(code, end + 1),
        DigitRun::Undecided => EscapeMatch::Undecided,
        DigitRun::Found(_, end) if end == text.len() => EscapeMatch::Undecided,
        _ => EscapeMatch::Absent,
    }
}

/// `\u0061`, or two of them for a character beyond the first 65536.
fn utf16_escape(text: &[u8], backslashes: usize) -> EscapeMatch {
    let unit = |at: usize| digits_at(text, at + backslashes + 1, 4, 4, 16);
    let (first, end) = match unit(0) {
        DigitRun::Found(first, end) => (first, end),
        DigitRun::Undecided => return EscapeMatch::Undecided,
        DigitRun::Absent => return EscapeMatch::Absent,
    };
    if !(0xd800..0xdc00).contains(&first) {
        return character(first, end);
    }
    let next = &text[end..];
    let lead = [&text[..backslashes], b"u"].concat();
    if next.len() < lead.len() && lead.starts_with(next) {
        return EscapeMatch::Undecided;
    }
    if !next.starts_with(&lead) {
        return EscapeMatch::Absent;
    }
    match unit(end) {
        DigitRun::Found(second, end) if (0xdc00..0xe000).contains(&second) => {
            character(0x10000 + ((first - 0xd800) << 10) + (second - 0xdc00), end)
        }
        DigitRun::Undecided => EscapeMatch::Undecided,
        _ => EscapeMatch::Absent,
    }
}

fn entity(text: &[u8]) -> EscapeMatch {
    let inner = &text[1..text.len().min(ENTITY_MAX)];
    let Some(len) = inner.iter().position(|byte| *byte == b';') else {
        let may_go_on =
            text.len() < ENTITY_MAX && inner.iter().all(|byte| byte.is_ascii_alphanumeric() || *byte == b'#');
        return if may_go_on { EscapeMatch::Undecided } else { EscapeMatch::Absent };
    };
    let name = &inner[..len];
    let code = match name {
        [b'#', b'x' | b'X', digits @ ..] => parse_digits(digits, 16),
        [b'#', digits @ ..] => parse_digits(digits, 10),
        _ => NAMED_ENTITIES.iter().find(|(known, _)| *known == name).map(|(_, meaning)| u32::from(*meaning)),
    };
    code.map_or(EscapeMatch::Absent, |code| character(code, len + 2))
}

fn byte_escape(byte: u8, text_len: usize) -> EscapeMatch {
    EscapeMatch::Found { bytes: [byte, 0, 0, 0], bytes_len: 1, text_len }
}

fn character(code: u32, text_len: usize) -> EscapeMatch {
    let Some(character) = char::from_u32(code) else { return EscapeMatch::Absent };
    let mut bytes = [0; 4];
    let bytes_len = character.encode_utf8(&mut bytes).len();
    EscapeMatch::Found { bytes, bytes_len, text_len }
}

/// The digits at a position of a text.
enum DigitRun {
    Absent,
    Undecided,
    /// Their value, and where they end.
    Found(u32, usize),
}

/// Reads `min` to `max` digits at `from`. It is undecided while there may be more of them.
fn digits_at(text: &[u8], from: usize, min: usize, max: usize, radix: u32) -> DigitRun {
    let rest = text.get(from..).unwrap_or_default();
    let len = rest.iter().take(max).take_while(|byte| char::from(**byte).is_digit(radix)).count();
    if len < max && len == rest.len() {
        return DigitRun::Undecided;
    }
    match parse_digits(&rest[..len], radix) {
        Some(value) if len >= min => DigitRun::Found(value, from + len),
        _ => DigitRun::Absent,
    }
}

fn parse_digits(digits: &[u8], radix: u32) -> Option<u32> {
    u32::from_str_radix(std::str::from_utf8(digits).ok()?, radix).ok()
}
