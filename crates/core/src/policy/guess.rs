//! Guesses the commands of a line that cannot be split reliably: the line is cut wherever a command could begin,
//! without regard to quotes. This finds commands that are none, which is harmless for callers that only deny or ask.

use super::command_line::{CONTROL_WORDS, is_assignment};
use super::line_analysis::{PossibleCommand, SHELLS, program_name};

/// What a line may do, as a guess.
#[derive(Debug, Default)]
pub(super) struct LineGuess {
    pub(super) commands: Vec<PossibleCommand>,
    /// Files that it may write by redirection.
    pub(super) writes: Vec<String>,
    /// The name of a command is computed.
    pub(super) has_computed_name: bool,
}

/// Cuts a line wherever a command could begin, without regard to quotes.
pub(super) fn guess_commands(line: &str, in_text: bool) -> LineGuess {
    let mut found = LineGuess::default();
    let mut words: Vec<String> = Vec::new();
    let mut word = String::new();
    let (mut piped, mut is_target) = (false, false);
    // After `$(…)` a command continues rather than begins, so the next word is not a command name.
    let (mut continues, mut in_ticks) = (false, false);
    // Expand the ways to write a space, or nothing at all, that would hide the name of a command.
    let mut line = line.replace("\\\n", "");
    for (hidden, plain) in [("${IFS}", " "), ("$IFS", " "), ("$'", "'"), ("$\"", "\"")] {
        line = line.replace(hidden, plain);
    }
    // A shell runs the text after `<<<`.
    if line.contains("<<<") && line.split_whitespace().any(|word| SHELLS.contains(&program_name(word))) {
        line = line.replace("<<<", ";");
    }
    for c in line.chars().chain(['\n']) {
        match c {
            '\'' | '"' | '\\' => continue,
            c if c.is_whitespace() || c.is_control() || ";&|(){}`<>".contains(c) => {}
            c => {
                word.push(c);
                continue;
            }
        }
        let substitutes = c == '(' && word == "$" || c == '`' && word.is_empty() && !in_ticks;
        if substitutes && !continues && !is_target && words.iter().all(|word| precedes_a_command(word)) {
            found.has_computed_name = true;
        }
        if !word.is_empty() {
            let word = std::mem::take(&mut word);
            if std::mem::take(&mut is_target) {
                found.writes.push(word);
            } else {
                words.push(word);
            }
        }
        match c {
            '>' => is_target = true,
            '\n' | ';' | '&' | '|' | '(' | ')' | '{' | '}' | '`' => {
                let skipped = |word: &String| {
                    CONTROL_WORDS.contains(&word.as_str()) || is_assignment(word) || word == "$"
                };
                let begin = words.iter().position(|word| !skipped(word)).unwrap_or(words.len());
                let words = std::mem::take(&mut words).split_off(begin);
                if !words.is_empty() {
                    found.has_computed_name |= !continues && c != ')' && is_computed_name(&words[0]);
                    found.commands.push(PossibleCommand { words, piped, in_text });
                    piped = false;
                }
                piped |= c == '|';
                continues = c == ')' || c == '}' || (c == '`' && in_ticks);
                in_ticks ^= c == '`';
            }
            _ => {}
        }
    }
    found
}

/// Whether a command may begin right after this word.
fn precedes_a_command(word: &str) -> bool {
    is_assignment(word)
        || matches!(word, "if" | "then" | "elif" | "else" | "while" | "until" | "do" | "!" | "time")
}

/// Whether the name of a command is a variable or a wildcard: `$X -rf /`, `/bin/r? -rf /`.
fn is_computed_name(word: &str) -> bool {
    let is_path_char = |c: char| c.is_ascii_alphanumeric() || "_./-*?".contains(c);
    let variable = word.starts_with('$') && word.len() > 1 && !word.contains('/');
    variable || (word.contains(['*', '?']) && word.chars().all(is_path_char) && !word.starts_with('*'))
}

/// How many bytes of an expansion are searched for its end.
const EXPANSION_MAX: usize = 256;

/// Whether a command name is hidden in a way that `guess_commands` does not see: letters as escapes, as in
/// `$'\x72m'`, or an expansion where a command begins, as in `${X:-rm}`.
pub(super) fn hides_a_name(line: &str) -> bool {
    let expands = |(at, _): (usize, &str)| {
        let before = line[..at].trim_end_matches([' ', '\t', '"']).chars().next_back();
        let rest = &line[at + 2..line.floor_char_boundary(at + 2 + EXPANSION_MAX)];
        let (inner, after) = rest.split_once('}').unwrap_or((rest, ""));
        let plain = inner.chars().all(|c| c.is_ascii_alphanumeric() || c == '_');
        before.is_none_or(|c| ";&|(\n".contains(c))
            && (!plain || !after.trim_start_matches('"').starts_with('/'))
    };
    line.match_indices("${").any(expands) || hides_letters(line)
}

fn hides_letters(line: &str) -> bool {
    line.split("$'").skip(1).any(|after| {
        let text = after.split('\'').next().unwrap_or_default();
        text.split('\\')
            .skip(1)
            .any(|after| after.starts_with(|c: char| "xuU".contains(c) || c.is_ascii_digit()))
    })
}
