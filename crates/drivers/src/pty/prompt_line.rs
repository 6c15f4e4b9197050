//! A program's prompt, such as a shell's `$ ` or an interpreter's `>>> `, learnt from its screen if no manifest
//! describes it. Only text that looks like a prompt is learnt, and it is found again only right before the cursor:
//! missing a prompt is better than finding one that is not there.

/// The characters that a prompt ends in, before a space and the cursor.
const PROMPT_MARKS: &str = "$#%>:❯»›➜λ";

/// A learnt prompt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct PromptLine {
    text: String,
    /// The text before and after the folder in the prompt, if it seems to contain one.
    around_folder: Option<(String, String)>,
}

/// How well the text before the cursor matches the learnt prompt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum PromptLineMatch {
    Whole,
    /// It ends in the prompt, after this many bytes of something else, such as output without a newline.
    Suffix(usize),
    Different,
}

impl PromptLine {
    /// Learns the prompt from the text before the cursor, if that looks like one.
    pub(super) fn learn(before_cursor: &str) -> Option<Self> {
        let line = before_cursor.trim_end();
        let mark = line.chars().next_back()?;
        let in_brackets = mark == ')' && line.trim_start().starts_with('(');
        let is_percentage = mark == '%' && line.chars().rev().nth(1).is_some_and(|c| c.is_ascii_digit());
        let looks_like_prompt = (PROMPT_MARKS.contains(mark) && !is_percentage) || in_brackets;
        if line.len() == before_cursor.len() || !looks_like_prompt {
            return None;
        }
        Some(Self { text: before_cursor.to_owned(), around_folder: split_around_folder(before_cursor) })
    }

    /// Compares the prompt with the text before the cursor. Numbers in it may count up, and its folder may differ.
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

/// The text before and after the folder in a prompt. There has to be text before the folder: a line that is all folder
/// could be anything.
fn split_around_folder(line: &str) -> Option<(String, String)> {
    let begin = line.find(['~', '/'])?;
    let end = line.trim_end().char_indices().next_back()?.0;
    let (head, tail) = (line.get(..begin)?, line.get(end..)?);
    let folder = line.get(begin..end)?;
    let is_folder = !head.trim().is_empty() && !folder.contains(char::is_whitespace);
    is_folder.then(|| (head.to_owned(), tail.to_owned()))
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
    fn prompts_of_shells_and_interpreters_are_learnt_and_other_text_is_not() {
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
    fn a_prompt_is_found_again_when_it_counts_up_or_its_folder_changes() {
        assert_eq!(match_learnt("In [1]: ", "In [12]: "), PromptLineMatch::Whole);
        assert_eq!(match_learnt("ann@host:~/shop$ ", "ann@host:/tmp$ "), PromptLineMatch::Whole);
        assert_eq!(match_learnt("ann@host:~$ ", "ann@host:~/a/b$ "), PromptLineMatch::Whole);
        assert_eq!(match_learnt("bash-5.2$ ", "bash-5.2$ "), PromptLineMatch::Whole);
    }

    #[test]
    fn similar_text_is_not_the_prompt() {
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
    fn output_without_a_newline_may_precede_the_prompt() {
        assert_eq!(match_learnt("bash-5.2$ ", "hibash-5.2$ "), PromptLineMatch::Suffix(2));
    }
}
