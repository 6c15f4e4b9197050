//! What a person would type for a prompt: text made safe for a terminal, in one piece or line by line.

use std::collections::VecDeque;

use qd_protocol::manifest::TerminalRules;

/// What ^C is.
pub(super) const INTERRUPT: &[u8] = b"\x03";
const PASTE_MARKERS: (&str, &str) = ("\x1b[200~", "\x1b[201~");

/// What is to be typed, piece by piece: after each the program has time to show that it took it.
pub(super) type KeystrokeQueue = VecDeque<Vec<u8>>;

/// The lines of a text as they can be typed. A terminal takes control characters for commands, and the end of a paste
/// among them would end ours: none is left. What is indented by tabs is indented by spaces, since a tab completes.
pub(super) fn typeable_lines(text: &str) -> Vec<String> {
    let text = text.replace("\r\n", "\n").replace('\r', "\n").replace('\t', "    ");
    let plain = |line: &str| line.chars().filter(|c| !c.is_control()).collect();
    // A text that ends in a break has no line after it; one that ends in two has an empty one.
    text.strip_suffix('\n').unwrap_or(&text).split('\n').map(plain).collect()
}

/// A prompt. It is pasted in one piece if the program takes that, and it has several lines or its manifest says so; if
/// not, each line is sent off by itself.
pub(super) fn prompt_keystrokes(lines: &[String], takes_paste: bool, pty: &TerminalRules) -> KeystrokeQueue {
    let submit = pty.submit.as_bytes().to_vec();
    if takes_paste && (pty.bracketed_paste || lines.len() > 1) {
        // A terminal gives the breaks of a paste as its Enter key.
        let pasted = format!("{}{}{}", PASTE_MARKERS.0, lines.join("\r"), PASTE_MARKERS.1);
        return [pasted.into_bytes(), submit].into();
    }
    lines.iter().map(|line| [line.as_bytes(), &submit].concat()).collect()
}

/// One line, sent off.
pub(super) fn line_keystrokes(text: &str, pty: &TerminalRules) -> Vec<u8> {
    format!("{}{}", typeable_lines(text).join(" "), pty.submit).into_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_in_a_prompt_is_a_key_of_its_own() {
        assert_eq!(typeable_lines("a\x03b\x1b[201~c\r\n\td\n\n"), ["ab[201~c", "    d", ""]);
        assert_eq!(typeable_lines(""), [""]);
    }

    #[test]
    fn a_prompt_is_pasted_where_that_is_taken_and_typed_where_it_is_not() {
        let typed = |text: &str, takes_paste, pty: &TerminalRules| -> Vec<String> {
            let pieces = prompt_keystrokes(&typeable_lines(text), takes_paste, pty);
            pieces.into_iter().map(|piece| String::from_utf8(piece).unwrap()).collect()
        };
        let plain = TerminalRules::default();
        let pasting = TerminalRules { bracketed_paste: true, ..TerminalRules::default() };
        assert_eq!(typed("one", true, &plain), ["one\r"]);
        assert_eq!(typed("one\ntwo", false, &pasting), ["one\r", "two\r"]);
        assert_eq!(typed("one\ntwo", true, &plain), ["\x1b[200~one\rtwo\x1b[201~", "\r"]);
        assert_eq!(typed("one", true, &pasting), ["\x1b[200~one\x1b[201~", "\r"]);
        assert_eq!(line_keystrokes("a\nb", &plain), b"a b\r");
    }
}
