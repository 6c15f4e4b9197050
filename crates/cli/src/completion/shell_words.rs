//! The words of a command line as a shell passes them for completion. Bash breaks words at `=` and `:`; here they are
//! whole again. Nothing here asks a daemon.

/// The characters at which bash breaks words.
const BASH_BREAKS: [char; 2] = ['=', ':'];

/// A command line that is being typed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct TypedWords {
    /// The words, the first of which is the program.
    pub(super) words: Vec<String>,
    /// The word to complete. It is always there, and empty if nothing of it was typed.
    pub(super) index: usize,
    /// The part of that word before its last break. The shell keeps it, so candidates must not repeat it.
    pub(super) before_break: String,
}

impl TypedWords {
    /// The words up to the one to complete, which has this index among `words`.
    pub(super) fn new(shell: &str, words: &[String], index: usize) -> Self {
        let mut typed: Vec<String> = words.iter().take(index + 1).cloned().collect();
        if typed.len() <= index {
            typed.push(String::new());
        }
        let mut before_break = String::new();
        if shell == "bash" {
            (typed, before_break) = join_broken_words(typed);
        }
        Self { index: typed.len() - 1, words: typed, before_break }
    }

    /// The word to complete, as far as it was typed.
    pub(super) fn current(&self) -> &str {
        self.words.get(self.index).map_or("", String::as_str)
    }

    /// The value that a flag has before the word to complete.
    pub(super) fn value_of(&self, flag: &str) -> Option<&str> {
        let mut before = self.words.iter().take(self.index);
        while let Some(word) = before.next() {
            match word.strip_prefix(flag) {
                Some("") => return before.next().map(String::as_str),
                Some(rest) if rest.starts_with('=') => return rest.get(1..),
                _ => {}
            }
        }
        None
    }

    /// The first word after the verb that is neither a flag nor the value of one of these flags.
    pub(super) fn first_argument_of(&self, verb: &str, flags_with_value: &[&str]) -> Option<&str> {
        let start = self.words.iter().position(|word| word == verb)? + 1;
        let mut is_value = false;
        for word in self.words.get(start..self.index)? {
            let was_value = std::mem::replace(&mut is_value, flags_with_value.contains(&word.as_str()));
            if !was_value && !word.starts_with('-') {
                return Some(word);
            }
        }
        None
    }
}

/// Joins the words that bash broke, and returns the part of the last word that bash keeps as it is.
fn join_broken_words(words: Vec<String>) -> (Vec<String>, String) {
    let is_break = |word: &str| !word.is_empty() && word.chars().all(|c| BASH_BREAKS.contains(&c));
    let mut joined: Vec<String> = Vec::new();
    let mut after_break = false;
    let mut before_break = String::new();
    for word in words {
        let breaks = is_break(&word);
        match joined.last_mut() {
            Some(last) if breaks || after_break => {
                before_break = if breaks { format!("{last}{word}") } else { last.clone() };
                last.push_str(&word);
            }
            _ => {
                before_break.clear();
                joined.push(word);
            }
        }
        after_break = breaks;
    }
    (joined, before_break)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn typed(shell: &str, line: &[&str], index: usize) -> TypedWords {
        let words: Vec<String> = line.iter().map(|word| (*word).to_owned()).collect();
        TypedWords::new(shell, &words, index)
    }

    #[test]
    fn words_that_bash_broke_are_whole_again_and_candidates_begin_after_the_break() {
        let broken =
            typed("bash", &["qd", "--host", "=", "unix", ":", "/run/q", "queue", "--move", "=", "ru"], 9);
        assert_eq!(broken.words, ["qd", "--host=unix:/run/q", "queue", "--move=ru"]);
        assert_eq!((broken.current(), broken.before_break.as_str()), ("--move=ru", "--move="));
        assert_eq!(broken.value_of("--host"), Some("unix:/run/q"));
        let at_break = typed("bash", &["qd", "queue", "--move", "="], 3);
        assert_eq!((at_break.current(), at_break.before_break.as_str()), ("--move=", "--move="));
        let whole = typed("zsh", &["qd", "run", "a=b"], 2);
        assert_eq!((whole.current(), whole.before_break.as_str()), ("a=b", ""));
    }

    #[test]
    fn words_after_the_cursor_do_not_count_and_an_untyped_word_is_empty() {
        assert_eq!(typed("bash", &["qd", "attach", "ses_4", "--raw"], 2).current(), "ses_4");
        assert_eq!(typed("fish", &["qd", "attach"], 2).current(), "");
        assert_eq!(typed("fish", &[], 7).words, [""]);
        assert_eq!(
            typed("zsh", &["qd", "attach", "--home"], 2).value_of("--home"),
            None,
            "it is being typed"
        );
    }

    #[test]
    fn the_session_of_a_queue_is_found_among_flags() {
        let line = ["qd", "--home", "/q", "queue", "--json", "--remove", "run_1", "nightly", "--move", ""];
        let words = typed("zsh", &line, 9);
        assert_eq!(words.first_argument_of("queue", &["--remove", "--move", "--to"]), Some("nightly"));
        assert_eq!(words.value_of("--home"), Some("/q"));
        assert_eq!(typed("zsh", &["qd", "queue", ""], 2).first_argument_of("queue", &[]), None);
    }
}
