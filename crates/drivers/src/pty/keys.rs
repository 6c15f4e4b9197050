//! The keystrokes for a prompt: text made safe for a terminal, in one piece or line by line.

use std::collections::VecDeque;

use qd_protocol::manifest::TerminalRules;

/// ^C.
pub(super) const INTERRUPT: &[u8] = b"\x03";
const PASTE_MARKERS: (&str, &str) = ("\x1b[200~", "\x1b[201~");

/// Keystrokes to type piece by piece. After each piece the program has time to show that it took it.
pub(super) type KeystrokeQueue = VecDeque<Vec<u8>>;

/// The lines of a text as they can be typed. Control characters are removed, because a terminal takes them for commands
/// and an end-of-paste marker among them would end our paste. Tabs become spaces, because a tab completes.
pub(super) fn typeable_lines(text: &str) -> Vec<String> {
    let text = text.replace("\r\n", "\n").replace('\r', "\n").replace('\t', "    ");
    let plain = |line: &str| line.chars().filter(|c| !c.is_control()).collect();
    // A text that ends in one newline has no line after it; a text that ends in two has an empty line.
    text.strip_suffix('\n').unwrap_or(&text).split('\n').map(plain).collect()
}

/// The keystrokes of a prompt. It is pasted in one piece if the program supports that and the prompt has several lines
/// or the manifest asks for it. Otherwise each line is submitted by itself.
pub(super) fn prompt_keystrokes(lines: &[String], takes_paste: bool, pty: &TerminalRules) -> KeystrokeQueue {
    let submit = pty.submit.as_bytes().to_vec();
    if takes_paste && (pty.bracketed_paste || lines.len() > 1) {
        // Terminals send newlines in a paste as the Enter key.
        let pasted = format!("{}{}{}", PASTE_MARKERS.0, lines.join("\r"), PASTE_MARKERS.1);
        return [pasted.into_bytes(), submit].into();
    }
    lines.iter().map(|line| [line.as_bytes(), &submit].concat()).collect()
}

/// The keystrokes of one line, including the submit key.
pub(super) fn line_keystrokes(text: &str, pty: &TerminalRules) -> Vec<u8> {
    format!("{}{}", typeable_lines(text).join(" "), pty.submit).into_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prompt_contains_no_control_keys() {
        assert_eq!(typeable_lines("a\x03b\x1b[201~c\r\n\td\n\n"), ["ab[201~c", "    d", ""]);
        assert_eq!(typeable_lines(""), [""]);
    }

    #[test]
    fn a_prompt_is_pasted_if_the_program_supports_it_and_typed_if_not() {
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
