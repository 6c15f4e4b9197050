//! The risk of a command line: that of the worst command in it, and a little more where the line as a whole is worse
//! than its parts.

use qd_protocol::policy::Risk;

use super::super::here_document::INTERPRETERS;
use super::super::line_analysis::{LineAnalysis, PossibleCommand, SHELLS, analyse_line, program_name};
use super::super::path::{PathLocation, locate_path};
use super::command::risk_of_command;
use super::{code, worst_risk};

/// Our opinion on a line that is run in the workspace, or in the directory that the call names.
pub(super) fn risk_of_line(line: &str, workspace: Option<&str>, directory: Option<&str>) -> Option<Risk> {
    let readings = analyse_line(line);
    let run = || readings.commands.iter().filter(|reading| !reading.in_text);
    let starts_elsewhere = directory.is_some_and(|directory| is_outside_workspace(directory, workspace));
    let strayed = starts_elsewhere || run().any(|reading| leaves_workspace(reading, workspace));
    if readings.too_complex
        || readings.has_computed_name
        || is_fork_bomb(line)
        || writes_outside(&readings, workspace)
        || downloads_into_a_shell(&readings)
        || runs_what_it_fetched(&readings)
        || HIJACK_VARIABLES.iter().any(|variable| line.contains(variable))
        || readings.code_snippets.iter().any(|program| code::is_harmful(program, workspace))
    {
        return Some(Risk::High);
    }
    let commands = run().map(|reading| risk_of_command(&CommandInvocation::new(reading, workspace, strayed)));
    let commands = worst_risk(commands).flatten();
    // What cannot be split may do more than was seen.
    if readings.fully_parsed { commands } else { commands.max(Some(Risk::Medium)) }
}

/// Variables by which every command that follows runs something else too.
const HIJACK_VARIABLES: &[&str] =
    &["LD_PRELOAD=", "DYLD_INSERT_LIBRARIES=", "BASH_ENV=", "PROMPT_COMMAND=", "GIT_SSH_COMMAND="];

/// Whether a command leaves the workspace, so that plain names after it mean other files.
fn leaves_workspace(reading: &PossibleCommand, workspace: Option<&str>) -> bool {
    matches!(reading.program(), "cd" | "pushd" | "chdir")
        && reading.words.get(1).is_none_or(|to| is_outside_workspace(to, workspace))
}

fn is_outside_workspace(directory: &str, workspace: Option<&str>) -> bool {
    // Where the workspace is not known, an absolute path is most likely to be it.
    directory == "-"
        || !matches!(locate_path(directory, workspace), PathLocation::Inside | PathLocation::Unclear)
}

fn writes_outside(readings: &LineAnalysis, workspace: Option<&str>) -> bool {
    readings.writes.iter().any(|file| {
        matches!(
            locate_path(file, workspace),
            PathLocation::Secret | PathLocation::System | PathLocation::Outside
        )
    })
}

/// `sh -c "$(curl …)"`, `bash <(curl …)`: in such a line nobody can tell what goes where, so meeting is enough.
fn downloads_into_a_shell(readings: &LineAnalysis) -> bool {
    let run = || readings.commands.iter().filter(|reading| !reading.in_text);
    let any = |names: &[&str]| run().any(|command| names.contains(&command.program()));
    let bare = || run().any(|command| INTERPRETERS.contains(&command.program()) && command.words.len() == 1);
    !readings.fully_parsed
        && any(FETCHERS)
        && (any(SHELLS) || any(&["eval", "source", ".", "exec"]) || bare())
}

const FETCHERS: &[&str] = &["curl", "wget"];

/// `curl -o x.sh …; sh x.sh`: what is run was fetched by the same line.
fn runs_what_it_fetched(readings: &LineAnalysis) -> bool {
    let (fetches, others): (Vec<&PossibleCommand>, Vec<&PossibleCommand>) = readings
        .commands
        .iter()
        .filter(|reading| !reading.in_text)
        .partition(|reading| FETCHERS.contains(&reading.program()));
    let fetched: Vec<&str> =
        fetches.iter().flat_map(|fetch| &fetch.words[1..]).map(|word| program_name(word)).collect();
    let is_fetched = |word: &String| !word.starts_with('-') && fetched.contains(&program_name(word));
    others.iter().any(|reading| {
        let program = reading.program();
        let interprets = SHELLS.contains(&program) || INTERPRETERS.contains(&program);
        let takes_a_file = interprets || matches!(program, "source" | ".");
        (takes_a_file && reading.words.get(1).is_some_and(is_fetched))
            || (reading.words[0].contains('/') && is_fetched(&reading.words[0]))
    })
}

/// Functions that one line may have.
const FUNCTIONS_MAX: usize = 64;

/// A function that runs itself twice, whatever it is called: `:(){ :|:& };:`.
fn is_fork_bomb(line: &str) -> bool {
    let line: String = line.split_whitespace().collect();
    let functions = line.match_indices("(){");
    // Nobody writes so many in good faith, and looking through them takes its time.
    if functions.clone().count() > FUNCTIONS_MAX {
        return true;
    }
    functions.into_iter().any(|(at, _)| {
        let before = &line[..at];
        let begin = before.rfind([';', '&', '|', '\n', '{', '}', '(', ')']).map_or(0, |at| at + 1);
        let name = before[begin..].trim_start_matches("function");
        !name.is_empty() && line[at..].contains(&format!("{name}|{name}"))
    })
}

/// A command with its arguments told apart.
pub(super) struct CommandInvocation<'r> {
    pub(super) program: &'r str,
    /// All words after the program.
    pub(super) arguments: Vec<&'r str>,
    pub(super) piped: bool,
    pub(super) workspace: Option<&'r str>,
    /// Whether the line has left the workspace.
    pub(super) left_workspace: bool,
}

impl<'r> CommandInvocation<'r> {
    fn new(reading: &'r PossibleCommand, workspace: Option<&'r str>, left_workspace: bool) -> Self {
        let arguments = reading.words[1..].iter().map(String::as_str).collect();
        Self { program: reading.program(), arguments, piped: reading.piped, workspace, left_workspace }
    }

    /// Arguments that are no options. The value of an option that is a word of its own is among them.
    pub(super) fn operands(&self) -> impl Iterator<Item = &'r str> {
        let mut only_operands = false;
        self.arguments.iter().copied().filter(move |word| {
            let option = !only_operands && word.starts_with('-') && word.len() > 1;
            only_operands |= *word == "--";
            !option
        })
    }

    /// Whether one of these is given: a long option (also with `=value`), or a letter within a bundle of short ones.
    pub(super) fn has_option(&self, short: &str, long: &[&str]) -> bool {
        self.arguments.iter().take_while(|word| **word != "--").any(|word| match word.strip_prefix("--") {
            Some(option) => long.contains(&option.split('=').next().unwrap_or_default()),
            None => word.strip_prefix('-').is_some_and(|bundle| bundle.contains(|c| short.contains(c))),
        })
    }

    /// What follows an option, as the next word or after `=`.
    pub(super) fn option_values(&self, options: &[&str]) -> impl Iterator<Item = &'r str> {
        self.arguments.iter().enumerate().filter_map(move |(at, word)| {
            if options.contains(word) {
                return self.arguments.get(at + 1).copied();
            }
            word.split_once('=').filter(|(option, _)| options.contains(option)).map(|(_, value)| value)
        })
    }

    /// Where an argument leads, seen from where the line has gone.
    pub(super) fn location_of(&self, word: &str) -> PathLocation {
        match locate_path(word, self.workspace) {
            PathLocation::Inside if self.left_workspace && !word.starts_with('/') => PathLocation::Outside,
            place => place,
        }
    }

    /// Whether it is certain that an argument names nothing outside.
    pub(super) fn is_surely_inside(&self, word: &str) -> bool {
        matches!(self.location_of(word), PathLocation::Inside | PathLocation::NullDevice)
    }

    /// Every text in the arguments that may name a file: also after `=` and `@`.
    pub(super) fn possible_files(&self) -> impl Iterator<Item = &'r str> {
        self.arguments.iter().flat_map(|word| {
            let value = word.rsplit_once('=').map(|(_, value)| value);
            [Some(*word), value, word.rsplit_once('@').map(|(_, file)| file)].into_iter().flatten()
        })
    }
}
