//! The risk of a command line: the highest risk of its commands, raised where the line as a whole is worse than its
//! parts.

use qd_protocol::policy::Risk;

use super::super::here_document::INTERPRETERS;
use super::super::line_analysis::{LineAnalysis, PossibleCommand, SHELLS, analyse_line, program_name};
use super::super::path::{PathLocation, locate_path};
use super::command::risk_of_command;
use super::{code, worst_risk};

/// The risk of a line that runs in the workspace, or in the directory that the call names.
pub(super) fn risk_of_line(line: &str, workspace: Option<&str>, directory: Option<&str>) -> Option<Risk> {
    let analysis = analyse_line(line);
    let run_commands = || analysis.commands.iter().filter(|command| !command.in_text);
    let starts_elsewhere = directory.is_some_and(|directory| is_outside_workspace(directory, workspace));
    let left_workspace =
        starts_elsewhere || run_commands().any(|command| leaves_workspace(command, workspace));
    if analysis.too_complex
        || analysis.has_computed_name
        || is_fork_bomb(line)
        || writes_outside(&analysis, workspace)
        || downloads_into_a_shell(&analysis)
        || runs_what_it_fetched(&analysis)
        || HIJACK_VARIABLES.iter().any(|variable| line.contains(variable))
        || analysis.code_snippets.iter().any(|program| code::is_harmful(program, workspace))
    {
        return Some(Risk::High);
    }
    let commands = run_commands()
        .map(|command| risk_of_command(&CommandInvocation::new(command, workspace, left_workspace)));
    let commands = worst_risk(commands).flatten();
    // A line that cannot be split may do more than was found.
    if analysis.fully_parsed { commands } else { commands.max(Some(Risk::Medium)) }
}

/// Variables that make every following command run something else as well.
const HIJACK_VARIABLES: &[&str] =
    &["LD_PRELOAD=", "DYLD_INSERT_LIBRARIES=", "BASH_ENV=", "PROMPT_COMMAND=", "GIT_SSH_COMMAND="];

/// Whether a command changes to a directory outside the workspace, so that relative paths after it mean other files.
fn leaves_workspace(command: &PossibleCommand, workspace: Option<&str>) -> bool {
    matches!(command.program(), "cd" | "pushd" | "chdir")
        && command.words.get(1).is_none_or(|directory| is_outside_workspace(directory, workspace))
}

fn is_outside_workspace(directory: &str, workspace: Option<&str>) -> bool {
    // If the workspace is not known, an absolute path is most likely the workspace.
    directory == "-"
        || !matches!(locate_path(directory, workspace), PathLocation::Inside | PathLocation::Unclear)
}

fn writes_outside(analysis: &LineAnalysis, workspace: Option<&str>) -> bool {
    analysis.writes.iter().any(|file| {
        matches!(
            locate_path(file, workspace),
            PathLocation::Secret | PathLocation::System | PathLocation::Outside
        )
    })
}

/// `sh -c "$(curl …)"`, `bash <(curl …)`. In such a line it is unclear what goes where, so a download and a shell in
/// the same line are enough.
fn downloads_into_a_shell(analysis: &LineAnalysis) -> bool {
    let run_commands = || analysis.commands.iter().filter(|command| !command.in_text);
    let any = |names: &[&str]| run_commands().any(|command| names.contains(&command.program()));
    let bare_interpreter = || {
        run_commands().any(|command| INTERPRETERS.contains(&command.program()) && command.words.len() == 1)
    };
    !analysis.fully_parsed
        && any(FETCHERS)
        && (any(SHELLS) || any(&["eval", "source", ".", "exec"]) || bare_interpreter())
}

const FETCHERS: &[&str] = &["curl", "wget"];

/// `curl -o x.sh …; sh x.sh`: the line runs a file that it downloaded.
fn runs_what_it_fetched(analysis: &LineAnalysis) -> bool {
    let (fetches, others): (Vec<&PossibleCommand>, Vec<&PossibleCommand>) = analysis
        .commands
        .iter()
        .filter(|command| !command.in_text)
        .partition(|command| FETCHERS.contains(&command.program()));
    let fetched: Vec<&str> =
        fetches.iter().flat_map(|fetch| &fetch.words[1..]).map(|word| program_name(word)).collect();
    let is_fetched = |word: &String| !word.starts_with('-') && fetched.contains(&program_name(word));
    others.iter().any(|command| {
        let program = command.program();
        let interprets = SHELLS.contains(&program) || INTERPRETERS.contains(&program);
        let takes_a_file = interprets || matches!(program, "source" | ".");
        (takes_a_file && command.words.get(1).is_some_and(is_fetched))
            || (command.words[0].contains('/') && is_fetched(&command.words[0]))
    })
}

/// A line with more functions than this counts as a fork bomb.
const FUNCTIONS_MAX: usize = 64;

/// Whether the line has a function that runs itself twice, under any name: `:(){ :|:& };:`.
fn is_fork_bomb(line: &str) -> bool {
    let line: String = line.split_whitespace().collect();
    let functions = line.match_indices("(){");
    // So many functions have no honest use, and searching them all would take long.
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

/// A command with its arguments.
pub(super) struct CommandInvocation<'r> {
    pub(super) program: &'r str,
    pub(super) arguments: Vec<&'r str>,
    pub(super) piped: bool,
    pub(super) workspace: Option<&'r str>,
    /// The line has changed to a directory outside the workspace.
    pub(super) left_workspace: bool,
}

impl<'r> CommandInvocation<'r> {
    fn new(command: &'r PossibleCommand, workspace: Option<&'r str>, left_workspace: bool) -> Self {
        let arguments = command.words[1..].iter().map(String::as_str).collect();
        Self { program: command.program(), arguments, piped: command.piped, workspace, left_workspace }
    }

    /// Arguments that are not options. A value given as a separate word after an option is included.
    pub(super) fn operands(&self) -> impl Iterator<Item = &'r str> {
        let mut only_operands = false;
        self.arguments.iter().copied().filter(move |word| {
            let option = !only_operands && word.starts_with('-') && word.len() > 1;
            only_operands |= *word == "--";
            !option
        })
    }

    /// Whether one of these options is given: a long option (also as `--option=value`), or a letter in a bundle of
    /// short ones.
    pub(super) fn has_option(&self, short: &str, long: &[&str]) -> bool {
        self.arguments.iter().take_while(|word| **word != "--").any(|word| match word.strip_prefix("--") {
            Some(option) => long.contains(&option.split('=').next().unwrap_or_default()),
            None => word.strip_prefix('-').is_some_and(|bundle| bundle.contains(|c| short.contains(c))),
        })
    }

    /// The values of these options, as the next word or after `=`.
    pub(super) fn option_values(&self, options: &[&str]) -> impl Iterator<Item = &'r str> {
        self.arguments.iter().enumerate().filter_map(move |(at, word)| {
            if options.contains(word) {
                return self.arguments.get(at + 1).copied();
            }
            word.split_once('=').filter(|(option, _)| options.contains(option)).map(|(_, value)| value)
        })
    }

    /// The location of an argument, taking into account that the line may have left the workspace.
    pub(super) fn location_of(&self, word: &str) -> PathLocation {
        match locate_path(word, self.workspace) {
            PathLocation::Inside if self.left_workspace && !word.starts_with('/') => PathLocation::Outside,
            location => location,
        }
    }

    /// Whether an argument certainly names nothing outside the workspace.
    pub(super) fn is_surely_inside(&self, word: &str) -> bool {
        matches!(self.location_of(word), PathLocation::Inside | PathLocation::NullDevice)
    }

    /// Every text in the arguments that may name a file, also after `=` and `@`.
    pub(super) fn possible_files(&self) -> impl Iterator<Item = &'r str> {
        self.arguments.iter().flat_map(|word| {
            let value = word.rsplit_once('=').map(|(_, value)| value);
            [Some(*word), value, word.rsplit_once('@').map(|(_, file)| file)].into_iter().flatten()
        })
    }
}
