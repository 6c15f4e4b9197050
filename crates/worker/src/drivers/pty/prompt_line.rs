//! The line in which a program waits for its next command, learnt from its screen when nobody has described it: a
//! shell's `$ `, an interpreter's `>>> `. What is learnt has to look like such a line, and is found again only where it
//! stands before the cursor: rather is it not found than found where it is not.

/// What such a line ends in, before a space and the cursor.
const PROMPT_MARKS: &str = "$#%>:❯»›➜λ";

/// A learnt line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct PromptLine {
    text: String,
    /// What stands around the folder in it, if it seems to name one.
    around_folder: Option<(String, String)>,
}

/// How well what stands before the cursor is the learnt line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum PromptLineMatch {
    /// It is.
    Whole,
    /// It ends in it, after so many bytes of something else: words without a line's end, perhaps.
    Suffix(usize),
    /// It is not.
    Different,
}

impl PromptLine {
    /// Learns the line from what stands before the cursor, if that looks like one.
    pub(super) fn learn(before_cursor: &str) -> Option<Self> {
        let line = before_cursor.trim_end();
        let mark = line.chars().next_back()?;
        let in_brackets = mark == ')' && line.trim_start().starts_with('(');
        let counts = mark == '%' && line.chars().rev().nth(1).is_some_and(|c| c.is_ascii_digit());
        let looks_like_one = (PROMPT_MARKS.contains(mark) && !counts) || in_brackets;
        if line.len() == before_cursor.len() || !looks_like_one {
            return None;
        }
        Some(Self { text: before_cursor.to_owned(), around_folder: split_around_folder(before_cursor) })
    }

    /// Compares it with what stands before the cursor. Numbers in it may count on, and its folder may be another.
    pub(super) fn match_line(&self, before_cursor: &str) -> PromptLineMatch {
        if without_numbers(before_cursor) == without_numbers(&self.text)
            || self.differs_only_in_folder(before_cursor)
        {
            return PromptLineMatch::Whole;
        }
        match before_cursor.strip_suffix(&self.text) {
            Some(head) => PromptLineMatch::Suffix(head.len()),
            None => PromptLineMatch::Different,
        }
    }

    /// The line as it was learnt.
    pub(super) fn text(&self) -> &str {
        &self.text
    }

    fn differs_only_in_folder(&self, before_cursor: &str) -> bool {
        let Some((head, tail)) = &self.around_folder else { return false };
        let folder =
            before_cursor.strip_prefix(head.as_str()).and_then(|rest| rest.strip_suffix(tail.as_str()));
        folder.is_some_and(|folder| !folder.is_empty() && !folder.contains(char::is_whitespace))
    }
}

/// What stands before and after the folder that a line seems to name. There has to be something before it: a line that
/// is all folder could be anything.
fn split_around_folder(line: &str) -> Option<(String, String)> {
    let begin = line.find(['~', '/'])?;
    let end = line.trim_end().char_indices().next_back()?.0;
    let (head, tail) = (line.get(..begin)?, line.get(end..)?);
    let folder = line.get(begin..end)?;
    let is_one = !head.trim().is_empty() && !folder.contains(char::is_whitespace);
    is_one.then(|| (head.to_owned(), tail.to_owned()))
}

fn without_numbers(line: &str) -> String {
    let mut plain = String::with_capacity(line.len());
    for c in line.chars() {
        match c.is_ascii_digit() {
            true if plain.ends_with('0') => {}
            true => plain.push('0'),
            false => plain.push(c),
        }
    }
    plain
}

#[cfg(test)]
mod tests {
    use super::*;

    fn match_learnt(learnt: &str, line: &str) -> PromptLineMatch {
        PromptLine::learn(learnt).unwrap_or_else(|| panic!("{learnt} is learnt")).match_line(line)
    }

    #[test]
    fn lines_of_shells_and_interpreters_are_learnt_and_other_words_are_not() {
        for line in
            ["$ ", "bash-5.2$ ", "root@h:/tmp# ", ">>> ", "sqlite> ", "In [1]: ", "(gdb) ", "zsh% ", "~/x ❯ "]
        {
            assert!(PromptLine::learn(line).is_some(), "{line:?}");
        }
        for line in ["", "  ", "Loading... ", "50% ", "Done (in 3 s) ", "bash-5.2$", "ready", "x = 1; "] {
            assert_eq!(PromptLine::learn(line), None, "{line:?}");
        }
    }

    #[test]
    fn a_line_is_found_again_when_it_counts_on_or_names_another_folder() {
        assert_eq!(match_learnt("In [1]: ", "In [12]: "), PromptLineMatch::Whole);
        assert_eq!(match_learnt("ann@host:~/shop$ ", "ann@host:/tmp$ "), PromptLineMatch::Whole);
        assert_eq!(match_learnt("ann@host:~$ ", "ann@host:~/a/b$ "), PromptLineMatch::Whole);
        assert_eq!(match_learnt("bash-5.2$ ", "bash-5.2$ "), PromptLineMatch::Whole);
    }

    #[test]
    fn what_only_looks_similar_is_not_the_line() {
        for (learnt, line) in [
            ("bash-5.2$ ", "bash-5.2$ ls"),
            ("bash-5.2$ ", "bash-5.2# "),
            (">>> ", "... "),
            ("ann@host:~/shop$ ", "ann@host:two words$ "),
            ("ann@host:~/shop$ ", "ann@host:$ "),
            ("ann@host:~/shop$ ", "bob@host:~/shop$ "),
            ("~/shop ❯ ", "/tmp ❯ "),
            ("$ ", ""),
        ] {
            assert_eq!(match_learnt(learnt, line), PromptLineMatch::Different, "{learnt:?} {line:?}");
        }
    }

    #[test]
    fn words_without_a_lines_end_may_stand_before_it() {
        assert_eq!(match_learnt("bash-5.2$ ", "hibash-5.2$ "), PromptLineMatch::Suffix(2));
    }
}
