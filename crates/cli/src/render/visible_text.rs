//! What others wrote, made safe to look at: every character that a terminal would obey, hide or draw as something else
//! is shown as what it is. `output.rs` passes everything that it renders through [`show_rendered`], so no verb can
//! forget it; renderers call the stricter functions here for commands, paths and names.

use super::style;

/// The columns between two tab stops of a terminal.
const TAB_COLUMNS: usize = 8;
/// The columns between two tab stops in the content of a file, where a tab is drawn as an arrow.
const CONTENT_TAB_COLUMNS: usize = 4;

/// Shows every hidden character of a command, a path or a name: control characters as `^[`, all others as `\u{202e}`.
/// Newlines stay.
pub(crate) fn show_hidden(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '\n' => out.push(c),
            _ => push_visible(&mut out, c),
        }
    }
    out
}

/// Shows every hidden character of a line of a file. A tab is an arrow that reaches to the next tab stop, so indented
/// code stays readable and a tab cannot be taken for spaces.
pub(crate) fn show_content_line(line: &str) -> String {
    let mut out = String::with_capacity(line.len());
    let mut column = 0;
    for c in line.chars() {
        if c == '\t' {
            let blanks = CONTENT_TAB_COLUMNS - 1 - column % CONTENT_TAB_COLUMNS;
            out.push('→');
            out.extend(std::iter::repeat_n(' ', blanks));
            column += blanks + 1;
        } else {
            push_visible(&mut out, c);
            column += 1;
        }
    }
    out
}

/// Shows every hidden character of a patch or a file: see [`show_content_line`].
pub(crate) fn show_content(text: &str) -> String {
    text.split('\n').map(show_content_line).collect::<Vec<_>>().join("\n")
}

/// Shows every hidden character of a command, a path or a name on one line: newlines become spaces.
pub(crate) fn show_on_one_line(text: &str) -> String {
    show_hidden(&text.replace('\n', " "))
}

/// Shows prose of an agent: see [`ProseStream`].
pub(crate) fn show_prose(text: &str) -> String {
    let mut prose = ProseStream::default();
    let mut out = String::with_capacity(text.len());
    prose.push(text, &mut out);
    prose.finish(&mut out);
    out
}

/// Shows prose of an agent on one line: newlines and tabs become spaces.
pub(crate) fn show_prose_line(text: &str) -> String {
    show_prose(&text.replace(['\n', '\t'], " "))
}

/// Shows text that was rendered for a terminal or a file. The colours of [`style::TextStyle`] stay colours.
pub(crate) fn show_rendered(text: &str) -> String {
    let mut prose = ProseStream::continuing();
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find('\x1b') {
        let (before, sequence) = rest.split_at(at);
        prose.push(before, &mut out);
        let len = style::sequence_len(sequence);
        match len {
            0 => prose.push("\x1b", &mut out),
            _ => out.push_str(&sequence[..len]),
        }
        rest = &sequence[len.max(1)..];
    }
    prose.push(rest, &mut out);
    prose.finish(&mut out);
    out
}

/// Shows prose that arrives in pieces. It is less strict than [`show_hidden`], because people read it and run nothing of
/// it: tabs become spaces, a line may end with CR and LF, other kinds of spaces stay, and so do the invisible characters
/// that emoji and scripts such as Persian need, where they belong.
#[derive(Debug, Default)]
pub(crate) struct ProseStream {
    neighbour: Neighbour,
    /// The last character, if what follows decides how it is shown: a carriage return or a joiner.
    held: Option<char>,
    /// The column of the next character, as far as it matters for tabs.
    column: usize,
}

/// The last character that was shown.
#[derive(Debug, Default, Clone, Copy)]
enum Neighbour {
    /// There is none, or it is invisible.
    #[default]
    Nothing,
    /// It was printed earlier, by somebody who knew it.
    Unknown,
    Visible(char),
    /// A variation selector after this character.
    Varied(char),
}

impl ProseStream {
    /// Prose that goes on after something that is not known here.
    fn continuing() -> Self {
        Self { neighbour: Neighbour::Unknown, ..Self::default() }
    }

    /// Appends what one more piece adds.
    pub(crate) fn push(&mut self, piece: &str, out: &mut String) {
        for c in piece.chars() {
            self.release_held(c, out);
            match c {
                '\r' | '\u{200c}' | '\u{200d}' => self.held = Some(c),
                '\n' => {
                    out.push(c);
                    (self.neighbour, self.column) = (Neighbour::Nothing, 0);
                }
                '\t' => {
                    let blanks = TAB_COLUMNS - self.column % TAB_COLUMNS;
                    out.extend(std::iter::repeat_n(' ', blanks));
                    (self.neighbour, self.column) = (Neighbour::Nothing, self.column + blanks);
                }
                '\u{fe0e}' | '\u{fe0f}' if self.takes_variation() => {
                    out.push(c);
                    if let Neighbour::Visible(base) = self.neighbour {
                        self.neighbour = Neighbour::Varied(base);
                    }
                }
                _ => self.push_character(c, out),
            }
        }
    }

    /// Ends the prose. A character that waited for the next one is shown by itself.
    pub(crate) fn finish(&mut self, out: &mut String) {
        if let Some(held) = self.held.take() {
            push_visible(out, held);
        }
        *self = Self::default();
    }

    fn release_held(&mut self, next: char, out: &mut String) {
        match self.held.take() {
            None => {}
            Some('\r') if next == '\n' => {}
            Some(joiner) if joiner != '\r' && self.is_joined_to(next) => out.push(joiner),
            Some(held) => {
                push_visible(out, held);
                self.neighbour = Neighbour::Nothing;
            }
        }
    }

    fn push_character(&mut self, c: char, out: &mut String) {
        let is_prose_space = c.is_whitespace() && !c.is_control() && !matches!(c, '\u{2028}' | '\u{2029}');
        if is_prose_space || !is_hidden(c) {
            out.push(c);
            self.neighbour = Neighbour::Visible(c);
        } else {
            push_visible(out, c);
            self.neighbour = Neighbour::Nothing;
        }
        self.column += 1;
    }

    /// Whether a variation selector belongs to the character before it.
    fn takes_variation(&self) -> bool {
        match self.neighbour {
            Neighbour::Unknown => true,
            Neighbour::Visible(base) => {
                matches!(base, '0'..='9' | '#' | '*' | '©' | '®' | '\u{203c}'..='\u{3299}') || is_emoji(base)
            }
            Neighbour::Nothing | Neighbour::Varied(_) => false,
        }
    }

    /// Whether a joiner belongs between the character before it and `next`.
    fn is_joined_to(&self, next: char) -> bool {
        let pair = |base| (is_emoji(base) && is_emoji(next)) || (needs_joiners(base) && needs_joiners(next));
        match self.neighbour {
            Neighbour::Unknown => is_emoji(next) || needs_joiners(next),
            Neighbour::Visible(base) | Neighbour::Varied(base) => pair(base),
            Neighbour::Nothing => false,
        }
    }
}

fn is_emoji(c: char) -> bool {
    matches!(c, '\u{2190}'..='\u{21ff}' | '\u{2600}'..='\u{27bf}' | '\u{2b00}'..='\u{2bff}' | '\u{1f000}'..='\u{1faff}')
}

/// Whether a character is of a script that is written with joiners: Arabic and its relatives, and those of India.
fn needs_joiners(c: char) -> bool {
    matches!(c, '\u{620}'..='\u{dff}') && !is_hidden(c)
}

/// Appends a character as it is, or visibly if it is hidden or obeyed.
fn push_visible(out: &mut String, c: char) {
    match c {
        '\0'..='\x1f' => out.extend(['^', char::from(c as u8 + b'@')]),
        '\x7f' => out.push_str("^?"),
        _ if is_hidden(c) => out.extend(c.escape_unicode()),
        _ => out.push(c),
    }
}

/// Whether a character beyond ASCII is invisible, changes the order of others, or looks like a space.
fn is_hidden(c: char) -> bool {
    c.is_control()
        || (c.is_whitespace() && !c.is_ascii())
        || matches!(c,
            // Hangul and Mongolian fillers, combining joiners and other characters without a shape.
            '\u{ad}' | '\u{34f}' | '\u{61c}' | '\u{115f}' | '\u{1160}' | '\u{17b4}' | '\u{17b5}'
            | '\u{180b}'..='\u{180f}' | '\u{2800}' | '\u{3164}' | '\u{feff}' | '\u{ffa0}'
            // Zero-width characters, bidirectional marks, overrides and isolates, invisible operators.
            | '\u{200b}'..='\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2060}'..='\u{206f}'
            // Variation selectors, annotations, invisible musical symbols, tags.
            | '\u{fe00}'..='\u{fe0f}' | '\u{fff0}'..='\u{fffb}' | '\u{1bca0}'..='\u{1bca3}'
            | '\u{1d173}'..='\u{1d17a}' | '\u{e0000}'..='\u{e0fff}')
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::render::style::TextStyle;

    #[test]
    fn what_a_terminal_would_hide_or_obey_is_shown_in_a_command() {
        assert_eq!(show_hidden("a\x1b[2Kb\r\x07c\n\td\x7f\0"), "a^[[2Kb^M^Gc\n^Id^?^@");
        assert_eq!(show_hidden("\u{202e}txt\u{2066}\u{200b}"), "\\u{202e}txt\\u{2066}\\u{200b}");
        assert_eq!(
            show_hidden("rm\u{a0}-rf\u{9b}2K\u{feff}\u{e0041}"),
            "rm\\u{a0}-rf\\u{9b}2K\\u{feff}\\u{e0041}"
        );
        assert_eq!(show_hidden("naïve 日本 ✓ Ω"), "naïve 日本 ✓ Ω");
        for c in ('\0'..=char::MAX).filter(|c| c.is_control() && *c != '\n') {
            assert!(!show_hidden(&c.to_string()).contains(c), "{c:?}");
            assert!(!show_prose(&c.to_string()).contains(c), "{c:?}");
        }
    }

    #[test]
    fn prose_keeps_what_people_write_and_shows_what_hides() {
        assert_eq!(show_prose("one\r\ntwo\rthree\r"), "one\ntwo^Mthree^M");
        assert_eq!(show_prose("a\tb\n\tc"), "a       b\n        c");
        assert_eq!(show_prose("\u{a0}« oui »\u{202f}!"), "\u{a0}« oui »\u{202f}!");
        for emoji in ["⚠\u{fe0f}", "1\u{fe0f}\u{20e3}", "👩\u{200d}👩\u{200d}👧", "❤\u{fe0f}\u{200d}🔥"]
        {
            assert_eq!(show_prose(emoji), emoji);
        }
        let persian = "می\u{200c}خواهم";
        assert_eq!(show_prose(persian), persian);
        assert_eq!(show_prose("rm\u{200d}x"), "rm\\u{200d}x");
        assert_eq!(show_prose("a\u{fe0f}⚠\u{fe0f}\u{fe0f}"), "a\\u{fe0f}⚠\u{fe0f}\\u{fe0f}");
        assert_eq!(show_prose("x\u{202e}y\u{200b}"), "x\\u{202e}y\\u{200b}");
        assert_eq!(show_prose("a\u{2028}b"), "a\\u{2028}b");
    }

    #[test]
    fn a_tab_in_a_file_is_an_arrow() {
        assert_eq!(show_content_line("\tif x {\ty"), "→   if x {→ y");
        assert_eq!(show_content_line("a\r"), "a^M");
    }

    #[test]
    fn rendered_text_keeps_our_colours_and_no_other_sequence() {
        let style = TextStyle::new(true);
        let ours = format!("{} {}\n", style.red("a"), style.dim("b"));
        assert_eq!(show_rendered(&ours), ours);
        assert_eq!(show_rendered("\x1b]0;title\x07\x1b[8mhidden"), "^[]0;title^G^[[8mhidden");
        assert_eq!(show_rendered("\x1b[2J\x1b"), "^[[2J^[");
    }

    proptest! {
        #[test]
        fn however_prose_is_cut_it_is_shown_as_the_whole_and_printed_unchanged(
            whole in "(\r|\n|\t|a|\u{200d}|\u{200c}|\u{fe0f}|👩|⚠|ی|\x1b\\[31m|\u{202e}|\u{a0}|1){0,16}",
            cuts in proptest::collection::vec(any::<prop::sample::Index>(), 0..6),
        ) {
            let mut borders: Vec<usize> =
                cuts.iter().map(|cut| whole.floor_char_boundary(cut.index(whole.len() + 1))).collect();
            borders.extend([0, whole.len()]);
            borders.sort_unstable();
            let mut prose = ProseStream::default();
            let (mut shown, mut printed) = (String::new(), String::new());
            for pair in borders.windows(2) {
                let mut piece = String::new();
                prose.push(&whole[pair[0]..pair[1]], &mut piece);
                printed.push_str(&show_rendered(&piece));
                shown.push_str(&piece);
            }
            let mut last = String::new();
            prose.finish(&mut last);
            printed.push_str(&last);
            shown.push_str(&last);
            prop_assert_eq!(&shown, &show_prose(&whole));
            prop_assert_eq!(&printed, &shown);
            let is_obeyed = |c| matches!(c, '\x1b' | '\r' | '\t' | '\u{202e}');
            prop_assert!(!shown.contains(is_obeyed));
        }
    }
}
