//! What a shell offers when the user presses Tab: verbs, flags and values from the definition of the command line, and
//! ids from the daemon. The scripts of `qd completions` run `qd __complete` for each Tab. It starts no daemon, prints no
//! error, and offers no ids if the daemon does not answer within [`ANSWER_TIMEOUT`].

mod id_candidates;
mod shell_words;

use std::ffi::OsString;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use clap::{Command, CommandFactory};
use clap_complete::engine::{ArgValueCandidates, CompletionCandidate, complete};
use qd_home::DaemonHome;

use self::id_candidates::{IdCandidate, IdCompletion, fetch_candidates};
use self::shell_words::TypedWords;
use crate::args::CommandLine;
use crate::daemon::DaemonLocator;
use crate::output::CliOutput;
use crate::render::text;

/// The hidden verb that the scripts call: `qd __complete SHELL INDEX WORD…`, with the words of the command line and the
/// index of the one to complete.
pub(crate) const COMPLETE_COMMAND: &str = "__complete";
/// How long a Tab waits for the daemon. `qd completions --help` says so too.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(1);
/// Descriptions are cut to this many columns. Shells cut them further.
const DESCRIPTION_CHARS: usize = 60;

/// The arguments that take an id: the verb, the argument's name in [`CommandLine`], and what it takes.
const ID_ARGUMENTS: &[(&[&str], &str, IdCompletion)] = &[
    (&["run"], "session", IdCompletion::Session),
    (&["attach"], "id", IdCompletion::SessionOrFleet),
    (&["send"], "id", IdCompletion::Session),
    (&["set"], "id", IdCompletion::Session),
    (&["queue"], "id", IdCompletion::Session),
    (&["queue"], "remove", IdCompletion::QueuedRun),
    (&["queue"], "moved_run", IdCompletion::QueuedRun),
    (&["logs"], "id", IdCompletion::SessionOrFleet),
    (&["wait"], "ids", IdCompletion::SessionOrFleet),
    (&["cancel"], "ids", IdCompletion::Session),
    (&["rm"], "ids", IdCompletion::Session),
    (&["diff"], "id", IdCompletion::Session),
    (&["merge"], "id", IdCompletion::Session),
    (&["worktrees", "rm"], "ids", IdCompletion::Session),
    (&["mail"], "session", IdCompletion::Session),
    (&["mail", "send"], "id", IdCompletion::Session),
    (&["policy", "test"], "session", IdCompletion::Session),
    (&["ps"], "fleet", IdCompletion::Fleet),
    (&["down"], "ids", IdCompletion::RunningFleet),
    (&["asks"], "ask", IdCompletion::Ask),
    (&["allow"], "asks", IdCompletion::PermissionRequest),
    (&["deny"], "ask", IdCompletion::PermissionRequest),
    (&["answer"], "ask", IdCompletion::Question),
];

/// `qd __complete`. Whatever goes wrong, nothing is offered.
pub(crate) fn main() -> ExitCode {
    let arguments: Vec<String> =
        std::env::args_os().skip(2).map(|argument| argument.to_string_lossy().into_owned()).collect();
    if let [shell, index, words @ ..] = arguments.as_slice()
        && let Ok(index) = index.parse()
    {
        let typed = TypedWords::new(shell, words, index);
        // A shell that is gone needs no answer.
        let _printed = CliOutput::new(false).print_exact(&offer(&typed));
    }
    ExitCode::SUCCESS
}

/// One line for each candidate: the value, and after a tab its description.
fn offer(typed: &TypedWords) -> String {
    let Some(locator) = locate_daemon(typed) else { return String::new() };
    let mut command = with_id_candidates(CommandLine::command(), locator, typed);
    let words = typed.words.iter().map(OsString::from).collect();
    let current_dir = std::env::current_dir().ok();
    let mut candidates =
        complete(&mut command, words, typed.index, current_dir.as_deref()).unwrap_or_default();
    let is_flag = |candidate: &CompletionCandidate| candidate.get_value().to_string_lossy().starts_with('-');
    // Flags are offered to whoever begins one, or if there is nothing else.
    if !typed.current().starts_with('-') && !candidates.iter().all(is_flag) {
        candidates.retain(|candidate| !is_flag(candidate));
    }
    candidates.iter().filter_map(|candidate| candidate_line(candidate, typed)).collect()
}

fn candidate_line(candidate: &CompletionCandidate, typed: &TypedWords) -> Option<String> {
    let value = candidate.get_value().to_str()?;
    let value = value.strip_prefix(&typed.before_break)?;
    let help = candidate.get_help().map(ToString::to_string).unwrap_or_default();
    let help = text::first_line(&help, DESCRIPTION_CHARS);
    // A line break in a file name would look like two candidates.
    (!value.contains(['\t', '\n'])).then(|| format!("{value}\t{help}\n"))
}

/// The daemon that the command line names with `--home` or `--host`, or the default one.
fn locate_daemon(typed: &TypedWords) -> Option<DaemonLocator> {
    let home = DaemonHome::resolve(typed.value_of("--home").map(Into::into));
    let explicit_host = match typed.value_of("--host") {
        Some(host) => Some(host.parse().ok()?),
        None => None,
    };
    let mut locator = DaemonLocator { home, explicit_host };
    locator.apply_environment().ok()?;
    Some(locator)
}

/// The command line, with candidates for all arguments that take an id.
fn with_id_candidates(command: Command, locator: DaemonLocator, typed: &TypedWords) -> Command {
    let (locator, typed) = (Arc::new(locator), Arc::new(typed.clone()));
    add_candidates(command, &[], &|completion| {
        let (locator, typed) = (Arc::clone(&locator), Arc::clone(&typed));
        ArgValueCandidates::new(move || find_candidates(&locator, &typed, completion))
    })
}

/// Adds candidates to the arguments of a verb and of the verbs below it. All are visited in order, because changing a
/// single positional argument would make it the last one.
fn add_candidates(
    command: Command,
    verb: &[String],
    candidates: &dyn Fn(IdCompletion) -> ArgValueCandidates,
) -> Command {
    let command = command.mut_args(|arg| match id_completion(verb, arg.get_id().as_str()) {
        Some(completion) => arg.add(candidates(completion)),
        None => arg,
    });
    command.mut_subcommands(|below| {
        let verb = [verb, &[below.get_name().to_owned()]].concat();
        add_candidates(below, &verb, candidates)
    })
}

fn id_completion(verb: &[String], argument: &str) -> Option<IdCompletion> {
    let found = ID_ARGUMENTS.iter().find(|(known, name, _)| verb == *known && argument == *name);
    found.map(|(_, _, completion)| *completion)
}

/// Asks the daemon, for a limited time.
fn find_candidates(
    locator: &DaemonLocator,
    typed: &TypedWords,
    completion: IdCompletion,
) -> Vec<CompletionCandidate> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let (Ok(runtime), Ok(client)) = (runtime, locator.client()) else { return Vec::new() };
    let fetch = fetch_candidates(&client, typed, completion);
    let fetched = runtime.block_on(async { tokio::time::timeout(ANSWER_TIMEOUT, fetch).await });
    runtime.shutdown_background();
    let found = fetched.map_err(drop).and_then(|found| found.map_err(drop)).unwrap_or_default();
    found.into_iter().map(IdCandidate::into_engine_candidate).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn offered(words: &[&str]) -> String {
        let words: Vec<String> = words.iter().map(|word| (*word).to_owned()).collect();
        offer(&TypedWords::new("fish", &words, words.len() - 1))
    }

    #[test]
    fn every_argument_that_takes_an_id_exists() {
        let command = CommandLine::command();
        for (verb, argument, _) in ID_ARGUMENTS {
            let verb = verb.iter().try_fold(&command, |above, name| above.find_subcommand(name));
            let exists =
                verb.is_some_and(|verb| verb.get_arguments().any(|known| known.get_id() == *argument));
            assert!(exists, "{argument}");
        }
    }

    #[test]
    fn the_command_line_with_candidates_is_well_formed() {
        let words = [String::from("qd")];
        let typed = TypedWords::new("fish", &words, 0);
        let locator = locate_daemon(&typed).unwrap();
        with_id_candidates(CommandLine::command(), locator, &typed).debug_assert();
    }

    #[test]
    fn verbs_flags_and_values_are_offered_without_a_daemon() {
        let home = "/nonexistent/home";
        assert!(offered(&["qd", "--home", home, "at"]).starts_with("attach\tShow a session so far"));
        assert_eq!(offered(&["qd", "attach", "--ra"]).lines().count(), 1);
        let values = offered(&["qd", "wait", "--on-ask", ""]);
        assert!(values.starts_with("wait\t") && values.contains("\nfail\t"), "{values}");
        let verbs = offered(&["qd", ""]);
        assert!(verbs.contains("\nqueue\tList a session") && !verbs.contains("--json"), "{verbs}");
        assert_eq!(offered(&["qd", "--host", "nonsense", ""]), "");
    }

    #[test]
    fn only_flags_are_left_where_no_daemon_names_an_id() {
        let shown = offered(&["qd", "--home", "/nonexistent/home", "attach", ""]);
        assert!(shown.lines().all(|line| line.starts_with('-')), "{shown}");
    }
}
