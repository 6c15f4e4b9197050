//! Text colours. A [`TextStyle`] knows whether its stream takes colour and emits escape sequences only then.

/// The escape sequence that ends a colour.
pub(crate) const RESET: &str = "\x1b[0m";

/// Colours for one output stream, or none.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct TextStyle {
    colour: bool,
}

/// The colours that a cell of a table can have, by what they mean.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CellColour {
    Failure,
    Success,
    NeedsAttention,
    Active,
    Secondary,
}

impl TextStyle {
    pub(crate) fn new(colour: bool) -> Self {
        Self { colour }
    }

    /// Whether anything is coloured at all.
    pub(crate) fn has_colour(self) -> bool {
        self.colour
    }

    /// For secondary text.
    pub(crate) fn dim(self, text: &str) -> String {
        self.paint("2", text)
    }

    /// For headings and names.
    pub(crate) fn bold(self, text: &str) -> String {
        self.paint("1", text)
    }

    /// For failures.
    pub(crate) fn red(self, text: &str) -> String {
        self.paint("31", text)
    }

    /// For success.
    pub(crate) fn green(self, text: &str) -> String {
        self.paint("32", text)
    }

    /// For what needs the user's attention.
    pub(crate) fn yellow(self, text: &str) -> String {
        self.paint("33", text)
    }

    /// For the user's own text, and for active work.
    pub(crate) fn cyan(self, text: &str) -> String {
        self.paint("36", text)
    }

    pub(crate) fn coloured(self, colour: CellColour, text: &str) -> String {
        match colour {
            CellColour::Failure => self.red(text),
            CellColour::Success => self.green(text),
            CellColour::NeedsAttention => self.yellow(text),
            CellColour::Active => self.cyan(text),
            CellColour::Secondary => self.dim(text),
        }
    }

    fn paint(self, code: &str, text: &str) -> String {
        if self.colour && !text.is_empty() { format!("\x1b[{code}m{text}{RESET}") } else { text.to_owned() }
    }
}

/// The length of the sequence that a text begins with, if it is one that a [`TextStyle`] emits; else 0.
pub(crate) fn sequence_len(text: &str) -> usize {
    let len = text.find('m').map_or(0, |end| end + 1);
    match text.get(..len) {
        Some("\x1b[0m" | "\x1b[1m" | "\x1b[2m" | "\x1b[31m" | "\x1b[32m" | "\x1b[33m" | "\x1b[36m") => len,
        _ => 0,
    }
}

/// The columns that a styled text takes on a terminal.
pub(crate) fn visible_width(styled: &str) -> usize {
    let mut width = 0;
    for (i, part) in styled.split('\x1b').enumerate() {
        // After the first part, each begins with the rest of a colour sequence, which ends with `m`.
        let text = if i == 0 { part } else { part.split_once('m').map_or("", |(_, text)| text) };
        width += super::text::display_width(text);
    }
    width
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_colour_a_style_changes_nothing() {
        assert_eq!(TextStyle::new(false).red("x"), "x");
        assert_eq!(TextStyle::new(true).red("x"), "\x1b[31mx\x1b[0m");
        assert_eq!(TextStyle::new(true).red(""), "");
    }

    #[test]
    fn colours_take_no_columns() {
        let style = TextStyle::new(true);
        assert_eq!(visible_width(&format!("a{} {}m", style.red("修"), style.dim("me"))), 7);
        assert_eq!(visible_width("plain"), 5);
    }
}
