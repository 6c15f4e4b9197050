//! Lists every command that a line may run, for callers that must err on the side of caution: deny rules, ask rules
//! and the risk table. It looks into `sudo`, `sh -c` and the like, and guesses where a line cannot be split. It finds
//! too many commands rather than too few, so nothing may be allowed because of it.

use std::collections::HashSet;

use super::command_line::{COMMANDS_MAX, LINE_MAX, ShellCommand, is_assignment, split};
use super::guess::{guess_commands, hides_a_name};
use super::here_document::{self, HereDocumentUse};
use super::patch;

/// How many nested lines (`sh -c`) are analysed.
const NESTED_LINES_MAX: usize = 64;
/// How many words after a command like `sudo` are tried as the beginning of the inner command.
const INNER_COMMANDS_MAX: usize = 16;
/// Limit on the bytes of all commands together. Every rule is matched against each of them, so this bounds the cost.
const TEXT_MAX: usize = 2 * LINE_MAX;

/// One command that a line may run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct PossibleCommand {
    /// The command and its arguments, without quotes. Never empty.
    pub(super) words: Vec<String>,
    /// It reads the output of another command.
    pub(super) piped: bool,
    /// It only occurs in a text that a command is given, so nothing visible runs it.
    pub(super) in_text: bool,
}

impl PossibleCommand {
    /// The command's name without its directory.
    pub(super) fn program(&self) -> &str {
        program_name(&self.words[0])
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct LineAnalysis {
    pub(super) commands: Vec<PossibleCommand>,
    /// Files that it may write by redirection, or with a patch that it contains.
    pub(super) writes: Vec<String>,
    /// Programs in other languages that it contains.
    pub(super) code_snippets: Vec<String>,
    /// The name of a command is computed, so it is not known.
    pub(super) has_computed_name: bool,
    /// Every line could be split, so no command is a guess.
    pub(super) fully_parsed: bool,
    /// The line exceeds a limit and was not analysed completely.
    pub(super) too_complex: bool,
}

/// Analyses a line and the lines nested in it. Only the beginning of an overlong line is analysed.
pub(super) fn analyse_line(line: &str) -> LineAnalysis {
    let mut found =
        LineAnalysis { fully_parsed: true, too_complex: line.len() > LINE_MAX, ..LineAnalysis::default() };
    let line = &line[..line.floor_char_boundary(LINE_MAX)];
    let mut seen = HashSet::from([line.to_owned()]);
    let mut lines = vec![(line.to_owned(), false)];
    let mut remaining = TEXT_MAX;
    while let Some((line, in_text)) = lines.pop() {
        for command in found.extract_commands(&line, in_text) {
            let before = found.commands.len();
            let in_text = command.in_text;
            for line in found.unwrap_command(command) {
                if seen.len() >= NESTED_LINES_MAX {
                    found.too_complex = true;
                } else if seen.insert(line.clone()) {
                    lines.push((line, in_text));
                }
            }
            let used: usize =
                found.commands[before..].iter().flat_map(|c| &c.words).map(|word| word.len() + 1).sum();
            remaining = remaining.saturating_sub(used);
            if remaining == 0 || found.commands.len() > COMMANDS_MAX {
                found.too_complex = true;
                return found;
            }
        }
    }
    found
}

impl LineAnalysis {
    /// The commands of one line, guessed if necessary.
    fn extract_commands(&mut self, line: &str, in_text: bool) -> Vec<PossibleCommand> {
        if let Some(commands) = split(line) {
            let values = |command: ShellCommand| command.words.into_iter().map(|word| word.value).collect();
            let to_possible = |command: ShellCommand| PossibleCommand {
                piped: command.piped,
                words: values(command),
                in_text,
            };
            return commands.into_iter().map(to_possible).collect();
        }
        self.fully_parsed &= in_text;
        let mut commands = Vec::new();
        let rest = match here_document::extract_here_documents(line) {
            Some((mut rest, documents)) => {
                for document in documents {
                    match document.used_as {
                        HereDocumentUse::Shell => rest.push_str(&document.body),
                        HereDocumentUse::Code => self.code_snippets.push(document.body.clone()),
                        HereDocumentUse::Patch => {
                            self.writes
                                .extend(patch::patched_files(&document.body).into_iter().map(str::to_owned));
                        }
                        HereDocumentUse::Data => {}
                    }
                    if document.used_as != HereDocumentUse::Shell {
                        commands.extend(guess_commands(&document.body, true).commands);
                    }
                }
                rest
            }
            None => line.to_owned(),
        };
        let guessed = guess_commands(&rest, in_text);
        if !in_text {
            self.writes.extend(guessed.writes);
            self.has_computed_name |= guessed.has_computed_name || hides_a_name(&rest);
        }
        commands.extend(guessed.commands);
        // `rm {-rf,/}` is `rm -rf /`.
        if rest.contains('{') && rest.contains(',') {
            commands
                .extend(guess_commands(&rest.replace(['{', '}'], "").replace(',', " "), in_text).commands);
        }
        commands
    }

    /// Records a command and the commands in its arguments, and returns the lines that it passes to a shell.
    fn unwrap_command(&mut self, command: PossibleCommand) -> Vec<String> {
        let mut lines = Vec::new();
        let starts = inner_command_starts(&command.words);
        if starts.len() > INNER_COMMANDS_MAX {
            self.too_complex = true;
        }
        // Every later start is listed here once and need not be unwrapped again, so repeated `sudo sudo sudo` stays
        // linear.
        for start in starts.into_iter().take(INNER_COMMANDS_MAX) {
            let inner = PossibleCommand { words: command.words[start..].to_vec(), ..command.clone() };
            lines.extend(shell_line_of(&inner));
            self.commands.push(inner);
        }
        if is_wrapper(command.program()) {
            lines.extend(command.words[1..].iter().filter_map(|word| line_in_word(word)));
        }
        lines.extend(shell_line_of(&command));
        self.commands.push(command);
        lines
    }
}

/// Commands whose arguments are a command. Their options are too diverse to parse, so any word may be its beginning.
const WRAPPERS: &[&str] = &[
    "sudo",
    "doas",
    "su",
    "pkexec",
    "env",
    "nohup",
    "setsid",
    "time",
    "nice",
    "ionice",
    "chrt",
    "stdbuf",
    "timeout",
    "xargs",
    "parallel",
    "watch",
    "strace",
    "ltrace",
    "command",
    "builtin",
    "exec",
    "flock",
    "busybox",
    "unshare",
    "nsenter",
    "chroot",
    "script",
    "entr",
    "caffeinate",
];

pub(super) const SHELLS: &[&str] = &["sh", "bash", "zsh", "dash", "ksh", "ash", "fish"];

fn is_wrapper(program: &str) -> bool {
    WRAPPERS.contains(&program)
}

/// The words after the first at which another command may begin.
fn inner_command_starts(words: &[String]) -> Vec<usize> {
    let program = program_name(&words[0]);
    // `command -v` only prints where the command is.
    if program == "command" && words.get(1).is_some_and(|word| matches!(word.as_str(), "-v" | "-V")) {
        return Vec::new();
    }
    if is_wrapper(program) {
        let begins = |word: &String| !word.is_empty() && !word.starts_with('-') && !is_assignment(word);
        return (1..words.len()).filter(|&at| begins(&words[at])).collect();
    }
    let after: &[&str] = match program {
        "find" => &["-exec", "-execdir", "-ok", "-okdir"],
        "fd" | "fdfind" => &["-x", "-X", "--exec", "--exec-batch"],
        _ => return Vec::new(),
    };
    (2..words.len()).filter(|&at| after.contains(&words[at - 1].as_str())).collect()
}

/// A word that may itself be a line, as in `watch 'rm -r x'` or `env -S'rm -r x'`.
fn line_in_word(word: &str) -> Option<String> {
    if !word.contains(char::is_whitespace) {
        return None;
    }
    let line = match word.strip_prefix('-') {
        None => word,
        Some(option) => match option.split_once('=') {
            Some((_, value)) => value,
            None => option.get(1..).unwrap_or_default(),
        },
    };
    Some(line.to_owned())
}

/// The line in `sh -c LINE`, `eval LINE` and the like, or in a git command that runs one.
fn shell_line_of(command: &PossibleCommand) -> Option<String> {
    let program = command.program();
    match program {
        "eval" => return Some(command.words[1..].join(" ")),
        // These run the line later: on a signal or at exit, or under another name.
        "trap" => return command.words.get(1).cloned(),
        "alias" => return command.words.get(1)?.split_once('=').map(|(_, line)| line.to_owned()),
        _ => {}
    }
    if program == "git" {
        let runs = |pair: &[String]| {
            let (verb, word) = (pair[0].as_str(), pair[1].as_str());
            matches!((verb, word), ("submodule", "foreach") | ("bisect", "run"))
                || (matches!(word, "-x" | "--exec") && command.words[1] == "rebase")
        };
        let at = command.words.windows(2).position(runs)?;
        return Some(command.words[at + 2..].join(" ")).filter(|line| !line.is_empty());
    }
    if !SHELLS.contains(&program) {
        return None;
    }
    let mut is_line = false;
    let mut words = command.words[1..].iter();
    while let Some(word) = words.next() {
        match word.strip_prefix(['-', '+']) {
            Some(option) => {
                is_line |= !option.starts_with('-') && option.contains('c');
                // `-o pipefail`: the next word belongs to the option.
                if !option.starts_with('-') && option.ends_with(['o', 'O']) {
                    words.next();
                }
            }
            None => return is_line.then(|| word.clone()),
        }
    }
    None
}

/// A command's name without its directory.
pub(super) fn program_name(word: &str) -> &str {
    word.trim_end_matches('/').rsplit('/').next().unwrap_or(word)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts_of_commands(line: &str) -> Vec<String> {
        analyse_line(line).commands.iter().map(|command| command.words.join(" ")).collect()
    }

    #[test]
    fn a_command_within_a_command_is_seen() {
        for (line, inner) in [
            ("sudo -u root rm -r x", "rm -r x"),
            ("env -i A=1 timeout 5 rm x", "rm x"),
            ("xargs -n 1 rm -f", "rm -f"),
            ("bash -c 'ls; rm x'", "rm x"),
            ("bash -euo pipefail -c 'rm x'", "rm x"),
            ("/usr/bin/env bash -lc \"rm x\"", "rm x"),
            ("bash -c \"bash -c 'rm x'\"", "rm x"),
            ("find . -name '*.o' -exec rm {} +", "rm {} +"),
            ("watch 'rm x'", "rm x"),
            ("env -S'rm x'", "rm x"),
            ("eval 'rm x'", "rm x"),
            ("echo $(rm x)", "rm x"),
            ("if true; then rm x; fi", "rm x"),
            ("A=1 B=2 rm x", "rm x"),
            ("f() { rm x; }", "rm x"),
            ("echo `rm x`", "rm x"),
            ("cat <(rm x)", "rm x"),
            ("echo 'unbalanced; rm x", "rm x"),
            ("bash <<< 'rm x'", "rm x"),
            ("git submodule foreach rm x", "rm x"),
            ("git rebase -i main --exec 'rm x'", "rm x"),
            ("cat <<'EOF'\nrm x\nEOF", "rm x"),
        ] {
            assert!(
                texts_of_commands(line).iter().any(|text| text == inner),
                "{line:?} gives {:?}",
                texts_of_commands(line)
            );
        }
    }

    #[test]
    fn text_given_to_a_command_is_told_apart_from_what_is_run() {
        for (line, in_text) in
            [("cat <<'EOF'\nsudo rm x\nEOF", true), ("bash <<'EOF'\nsudo rm x\nEOF", false)]
        {
            let found = analyse_line(line);
            let removals = found.commands.iter().filter(|command| command.program() == "rm");
            assert!(
                removals.clone().count() > 0 && removals.clone().all(|rm| rm.in_text == in_text),
                "{line:?}"
            );
        }
        assert_eq!(analyse_line("apply_patch <<'EOF'\n*** Add File: ../x\nEOF").writes, ["../x"]);
        assert_eq!(analyse_line("python3 - <<'EOF'\nprint(1)\nEOF").code_snippets, ["print(1)\n"]);
    }

    #[test]
    fn a_computed_command_name_is_noticed_and_a_computed_argument_is_not() {
        for line in [
            "$(echo rm) -rf /",
            "A=1 `echo rm` x",
            "X=rm; $X -rf /",
            "if $(x); then y; fi",
            "/bin/r? -rf /",
            "${X} -rf /",
            "ls; ${X:-rm} -rf /",
            "$'\\x72m' x",
        ] {
            assert!(analyse_line(line).has_computed_name, "{line:?}");
        }
        for line in [
            "echo $(date) $USER",
            "git log $(git merge-base a b)..$BRANCH --oneline",
            "A=$(date) ls",
            "for f in $(ls); do echo $f; done",
            "$HOME/bin/x y",
            "${HOME}/bin/x y",
            "echo ${X:-rm}",
            "echo `date` $X",
            "grep $'\\t' x",
            "python3 - <<'EOF'\n$x = a[*]\nEOF",
        ] {
            assert!(!analyse_line(line).has_computed_name, "{line:?}");
        }
    }

    #[test]
    fn a_line_that_folds_into_itself_comes_to_an_end() {
        let nested = |prefix: &str| {
            (0..6).fold("ls".to_owned(), |line, _| {
                format!("{} {}", prefix.repeat(30), super::super::command_line::join(&[line]))
            })
        };
        for prefix in ["sudo ", "bash -o ", "sudo bash -c "] {
            assert!(analyse_line(&nested(prefix)).commands.len() < 10_000);
        }
        assert!(analyse_line(&"sudo a ".repeat(100)).too_complex);
        assert!(analyse_line(&"x ".repeat(LINE_MAX)).too_complex);
    }
}
