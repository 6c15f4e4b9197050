//! A secret in base64: in the standard alphabet or the one for addresses, broken into lines anywhere, and indented.

use super::secret_forms::FormMatch;

/// The blanks before a line.
const INDENT_MAX: usize = 64;

/// `characters` are in the standard alphabet.
pub(super) fn match_start(characters: &[u8], text: &[u8]) -> FormMatch {
    let mut at = 0;
    for (i, wanted) in characters.iter().enumerate() {
        let Some(&byte) = text.get(at) else { return FormMatch::Undecided };
        if standard_character(byte) != *wanted {
            match line_break_len(&text[at..]) {
                FormMatch::Found(len) if i > 0 => at += len,
                FormMatch::Undecided if i > 0 => return FormMatch::Undecided,
                _ => return FormMatch::Differs,
            }
            match text.get(at) {
                None => return FormMatch::Undecided,
                Some(byte) if standard_character(*byte) != *wanted => return FormMatch::Differs,
                Some(_) => {}
            }
        }
        at += 1;
    }
    FormMatch::Found(at)
}

pub(super) fn first_pairs(characters: &[u8]) -> Vec<[u8; 2]> {
    let mut pairs = Vec::new();
    for first in spellings(characters[0]) {
        pairs.extend(spellings(characters[1]).map(|second| [first, second]));
        pairs.extend([b'\n', b'\r', b'\\'].map(|line_break| [first, line_break]));
    }
    pairs
}

fn standard_character(byte: u8) -> u8 {
    match byte {
        b'-' => b'+',
        b'_' => b'/',
        other => other,
    }
}

/// A character in both alphabets.
fn spellings(character: u8) -> [u8; 2] {
    match character {
        b'+' => *b"+-",
        b'/' => *b"/_",
        other => [other; 2],
    }
}

/// The length of the line break at the beginning of a text, which may be written as an escape, and of the blanks after it.
fn line_break_len(text: &[u8]) -> FormMatch {
    let mut at = 0;
    for line_break in [&b"\r"[..], b"\\r", b"\n", b"\\n"] {
        let rest = &text[at..];
        if rest.starts_with(line_break) {
            at += line_break.len();
        } else if line_break.starts_with(rest) {
            return FormMatch::Undecided;
        }
    }
    if at == 0 {
        return FormMatch::Differs;
    }
    let blanks = text[at..].iter().take(INDENT_MAX).take_while(|byte| matches!(byte, b' ' | b'\t')).count();
    FormMatch::Found(at + blanks)
}
