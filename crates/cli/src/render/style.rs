//! Colour, or none. A style is asked for by meaning and decides by itself whether to emit an escape sequence.

/// Ends a colour.
pub(crate) const RESET: &str = "\x1b[0m";

/// Whether and how to colour one stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct TextStyle {
    colour: bool,
}

impl TextStyle {
    /// With colour or without.
    pub(crate) fn new(colour: bool) -> Self {
        Self { colour }
    }

    /// What matters less.
    pub(crate) fn dim(self, text: &str) -> String {
        self.paint("2", text)
    }

    /// What matters more.
    pub(crate) fn bold(self, text: &str) -> String {
        self.paint("1", text)
    }

    /// What went wrong.
    pub(crate) fn red(self, text: &str) -> String {
        self.paint("31", text)
    }

    /// What went well.
    pub(crate) fn green(self, text: &str) -> String {
        self.paint("32", text)
    }

    /// What needs a person.
    pub(crate) fn yellow(self, text: &str) -> String {
        self.paint("33", text)
    }

    /// The person who speaks.
    pub(crate) fn cyan(self, text: &str) -> String {
        self.paint("36", text)
    }

    fn paint(self, code: &str, text: &str) -> String {
        if self.colour && !text.is_empty() { format!("\x1b[{code}m{text}{RESET}") } else { text.to_owned() }
    }
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
}
