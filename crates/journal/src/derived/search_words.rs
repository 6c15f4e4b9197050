//! Turns what a person typed into a query of SQLite's full-text index. Every word is quoted, so nothing that is typed
//! can be an operator or a syntax error there.

use qd_protocol::limits::SEARCH_QUERY_MAX;

/// Words and phrases in one search. Beyond it the query would only be slower, not narrower.
const TERMS_MAX: usize = 64;

/// The words of a search: each must be in a text that is found. A word that ends with `*` stands for all words that
/// begin so, and words between double quotes must follow each other.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SearchWords {
    query: String,
}

/// Why a text cannot be searched for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum BadSearchWords {
    #[error("there is nothing to search for: give at least one word with a letter or digit in it")]
    NoWord,
    #[error("the words are too long: at most {SEARCH_QUERY_MAX} bytes can be searched for")]
    TooLong,
    #[error("there are too many words: at most {TERMS_MAX} can be searched for at once")]
    TooMany,
}

impl SearchWords {
    pub fn parse(text: &str) -> Result<Self, BadSearchWords> {
        if text.len() > SEARCH_QUERY_MAX {
            return Err(BadSearchWords::TooLong);
        }
        let mut terms = Vec::new();
        let mut rest = text;
        loop {
            rest = rest.trim_start();
            let Some(first) = rest.chars().next() else { break };
            let (term, after) = if first == '"' {
                // A phrase that is not closed goes to the end.
                rest[1..].split_once('"').unwrap_or((&rest[1..], ""))
            } else {
                let end = rest.find(|c: char| c.is_whitespace() || c == '"').unwrap_or(rest.len());
                rest.split_at(end)
            };
            // `"two wor"*` and `wor*` both match longer last words.
            let (after, starred_phrase) = match (first == '"').then(|| after.strip_prefix('*')).flatten() {
                Some(after) => (after, true),
                None => (after, false),
            };
            let is_prefix = starred_phrase || (first != '"' && term.ends_with('*'));
            terms.extend(quoted(term, is_prefix));
            rest = after;
        }
        match terms.len() {
            0 => Err(BadSearchWords::NoWord),
            1..=TERMS_MAX => Ok(Self { query: terms.join(" ") }),
            _ => Err(BadSearchWords::TooMany),
        }
    }

    /// The query for SQLite.
    pub(super) fn query(&self) -> &str {
        &self.query
    }
}

/// A term as a string of the query language; nothing if it has no letter or digit, because it would match no word.
fn quoted(term: &str, is_prefix: bool) -> Option<String> {
    // The query language ends at a zero byte, and no text has control characters in a word.
    let term: String = term.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    if !term.contains(char::is_alphanumeric) {
        return None;
    }
    let star = if is_prefix { " *" } else { "" };
    Some(format!("\"{}\"{star}", term.replace('"', "\"\"")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn query(text: &str) -> String {
        SearchWords::parse(text).unwrap().query
    }

    #[test]
    fn words_phrases_and_prefixes_are_quoted() {
        assert_eq!(query("  fix the  tests "), r#""fix" "the" "tests""#);
        assert_eq!(query(r#"say "hello there" now"#), r#""say" "hello there" "now""#);
        assert_eq!(query("pars*"), r#""pars*" *"#);
        assert_eq!(query(r#""two wor"* x"#), r#""two wor" * "x""#);
        assert_eq!(query(r#""not closed"#), r#""not closed""#);
        assert_eq!(query(r#"a"b c"d"#), r#""a" "b c" "d""#);
    }

    #[test]
    fn operators_are_words_like_others() {
        assert_eq!(
            query("a AND NOT (b OR c) NEAR text:d ^e -f"),
            r#""a" "AND" "NOT" "(b" "OR" "c)" "NEAR" "text:d" "^e" "-f""#
        );
        assert_eq!(query("a\0b"), r#""a b""#);
    }

    #[test]
    fn what_has_no_word_is_refused_with_its_reason() {
        for text in ["", "   ", "***", "\"\"", "-- ; '", "\0"] {
            assert_eq!(SearchWords::parse(text), Err(BadSearchWords::NoWord), "{text:?}");
        }
        assert_eq!(SearchWords::parse(&"x".repeat(SEARCH_QUERY_MAX + 1)), Err(BadSearchWords::TooLong));
        assert_eq!(SearchWords::parse(&"x ".repeat(TERMS_MAX + 1)), Err(BadSearchWords::TooMany));
        assert_eq!(query("-- x"), r#""x""#, "a term without a word is left out");
    }
}
