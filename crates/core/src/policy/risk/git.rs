//! The risk of git commands. Git is used more than any other program and has the most ways to lose work. Only the
//! arguments are checked here; the caller has already looked for files that hold keys.

use qd_protocol::policy::Risk;

use super::line::CommandInvocation;

/// The risk of a `git` command.
pub(super) fn risk_of_git(command: &CommandInvocation<'_>) -> Option<Risk> {
    let arguments = &command.arguments;
    let (mut at, mut is_plain) = (0, !command.left_workspace);
    // Options before the subcommand may select another repository or configuration, and with it programs to run.
    while let Some(word) = arguments.get(at).filter(|word| word.starts_with('-')) {
        let value = arguments.get(at + 1).copied().unwrap_or_default();
        match *word {
            "--no-pager" | "-P" | "--no-optional-locks" | "--literal-pathspecs" => {}
            "-C" if command.is_surely_inside(value) => {}
            "-c" if setting_runs_program(value) => return Some(Risk::High),
            _ => is_plain = false,
        }
        at += if matches!(*word, "-C" | "-c" | "--git-dir" | "--work-tree" | "--namespace") { 2 } else { 1 };
    }
    let Some(verb) = arguments.get(at) else { return Some(Risk::Low).filter(|_| is_plain) };
    let rest = &arguments[at + 1..];
    if loses_work(verb, rest) || rest.iter().any(|word| *verb == "config" && setting_runs_program(word)) {
        return Some(Risk::High);
    }
    if is_plain && is_read_only(command, verb, rest) { Some(Risk::Low) } else { Some(Risk::Medium) }
}

/// Whether the command may lose anyone's work, or change settings beyond the repository.
fn loses_work(verb: &str, rest: &[&str]) -> bool {
    let first = rest.first().copied().unwrap_or_default();
    match verb {
        "push" => {
            has_option(
                rest,
                "fd",
                &["force", "force-with-lease", "force-if-includes", "mirror", "delete", "prune"],
            ) || rest.iter().any(|word| word.starts_with(['+', ':']))
        }
        "reset" => has_option(rest, "", &["hard"]),
        "clean" => has_option(rest, "f", &["force"]) && !has_option(rest, "n", &["dry-run"]),
        "checkout" | "restore" | "switch" => {
            has_option(rest, "f", &["force", "discard-changes"])
                || rest.iter().any(|word| matches!(*word, "." | "*" | ":/"))
        }
        "rm" => has_option(rest, "f", &["force"]),
        "stash" => matches!(first, "drop" | "clear"),
        "reflog" => matches!(first, "expire" | "delete"),
        "filter-branch" | "filter-repo" | "credential" => true,
        "update-ref" => has_option(rest, "d", &["stdin"]),
        "gc" => has_option(rest, "", &["prune"]),
        "worktree" => first == "remove" && has_option(rest, "f", &["force"]),
        "config" => {
            has_option(rest, "", &["global", "system"]) && !has_option(rest, "l", &["get", "get-all", "list"])
        }
        _ => false,
    }
}

/// Whether a setting makes git run a program, now or in a later command.
fn setting_runs_program(setting: &str) -> bool {
    let (name, value) = setting.split_once('=').unwrap_or((setting, ""));
    let name = name.to_ascii_lowercase();
    matches!(name.as_str(), "core.sshcommand" | "core.hookspath" | "core.fsmonitor" | "core.gitproxy")
        || name.starts_with("credential.")
        || name.starts_with("filter.")
        || (name.starts_with("alias.") && (value.is_empty() || value.starts_with('!')))
}

fn is_read_only(command: &CommandInvocation<'_>, verb: &str, rest: &[&str]) -> bool {
    let stays_inside =
        rest.iter().all(|word| word.starts_with('-') || command.is_surely_inside(word) || is_range(word));
    // Git accepts shortened options, so compare their beginnings.
    let runs_program = rest
        .iter()
        .any(|word| ["--ou", "--ext", "--textc", "--op", "-O"].iter().any(|o| word.starts_with(o)));
    if !stays_inside || runs_program {
        return false;
    }
    let only_lists = |options: &[&str]| rest.iter().all(|word| options.contains(word));
    match verb {
        "status" | "log" | "diff" | "show" | "rev-parse" | "rev-list" | "ls-files" | "ls-tree" | "blame"
        | "describe" | "shortlog" | "cat-file" | "name-rev" | "merge-base" | "whatchanged"
        | "count-objects" | "version" | "grep" => true,
        "branch" => {
            only_lists(&["-a", "-r", "-v", "-vv", "-av", "-avv", "--all", "--list", "-l", "--show-current"])
        }
        "tag" => only_lists(&["-l", "--list", "-n"]),
        "remote" => only_lists(&["-v", "--verbose"]),
        "stash" | "worktree" => rest == ["list"],
        _ => false,
    }
}

/// Whether a word is a revision range such as `main..HEAD`, which only looks like a path that goes up.
fn is_range(word: &str) -> bool {
    word.contains("..") && !word.split('/').any(|step| step == "..") && !word.starts_with(['/', '~', '$'])
}

fn has_option(words: &[&str], short: &str, long: &[&str]) -> bool {
    words.iter().take_while(|word| **word != "--").any(|word| match word.strip_prefix("--") {
        // Git accepts any unambiguous beginning of a long option; three letters are enough to be suspicious.
        Some(option) => {
            let option = option.split('=').next().unwrap_or_default();
            option.len() >= 3 && long.iter().any(|name| name.starts_with(option))
        }
        None => word.strip_prefix('-').is_some_and(|bundle| bundle.contains(|c| short.contains(c))),
    })
}
