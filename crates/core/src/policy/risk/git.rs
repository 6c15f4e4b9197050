//! The part of the table of risks that is about git, which is used more than all else and has the most ways to lose
//! work. It sees the arguments only; files that hold keys have been looked for before.

use qd_protocol::policy::Risk;

use super::line::CommandInvocation;

/// Our opinion on a `git` command.
pub(super) fn risk_of_git(command: &CommandInvocation<'_>) -> Option<Risk> {
    let arguments = &command.arguments;
    let (mut at, mut plain) = (0, !command.left_workspace);
    // Options before the subcommand may bring another repository or another configuration, and with it programs to run.
    while let Some(word) = arguments.get(at).filter(|word| word.starts_with('-')) {
        let value = arguments.get(at + 1).copied().unwrap_or_default();
        match *word {
            "--no-pager" | "-P" | "--no-optional-locks" | "--literal-pathspecs" => {}
            "-C" if command.is_surely_inside(value) => {}
            "-c" if setting_runs_program(value) => return Some(Risk::High),
            _ => plain = false,
        }
        at += if matches!(*word, "-C" | "-c" | "--git-dir" | "--work-tree" | "--namespace") { 2 } else { 1 };
    }
    let Some(verb) = arguments.get(at) else { return Some(Risk::Low).filter(|_| plain) };
    let rest = &arguments[at + 1..];
    if loses_work(verb, rest) || rest.iter().any(|word| *verb == "config" && setting_runs_program(word)) {
        return Some(Risk::High);
    }
    if plain && is_read_only(command, verb, rest) { Some(Risk::Low) } else { Some(Risk::Medium) }
}

/// Whether work of this person or of others may be gone afterwards, or settings beyond the repository changed.
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

/// Whether a setting makes git run something, now or with one of the next commands.
fn setting_runs_program(setting: &str) -> bool {
    let (name, value) = setting.split_once('=').unwrap_or((setting, ""));
    let name = name.to_ascii_lowercase();
    matches!(name.as_str(), "core.sshcommand" | "core.hookspath" | "core.fsmonitor" | "core.gitproxy")
        || name.starts_with("credential.")
        || name.starts_with("filter.")
        || (name.starts_with("alias.") && (value.is_empty() || value.starts_with('!')))
}

fn is_read_only(command: &CommandInvocation<'_>, verb: &str, rest: &[&str]) -> bool {
    let near =
        rest.iter().all(|word| word.starts_with('-') || command.is_surely_inside(word) || is_range(word));
    // Options may be shortened, so their beginnings count.
    let runs = rest
        .iter()
        .any(|word| ["--ou", "--ext", "--textc", "--op", "-O"].iter().any(|o| word.starts_with(o)));
    if !near || runs {
        return false;
    }
    let listing = |options: &[&str]| rest.iter().all(|word| options.contains(word));
    match verb {
        "status" | "log" | "diff" | "show" | "rev-parse" | "rev-list" | "ls-files" | "ls-tree" | "blame"
        | "describe" | "shortlog" | "cat-file" | "name-rev" | "merge-base" | "whatchanged"
        | "count-objects" | "version" | "grep" => true,
        "branch" => {
            listing(&["-a", "-r", "-v", "-vv", "-av", "-avv", "--all", "--list", "-l", "--show-current"])
        }
        "tag" => listing(&["-l", "--list", "-n"]),
        "remote" => listing(&["-v", "--verbose"]),
        "stash" | "worktree" => rest == ["list"],
        _ => false,
    }
}

/// `main..HEAD` is no way up, whatever it looks like.
fn is_range(word: &str) -> bool {
    word.contains("..") && !word.split('/').any(|step| step == "..") && !word.starts_with(['/', '~', '$'])
}

fn has_option(words: &[&str], short: &str, long: &[&str]) -> bool {
    words.iter().take_while(|word| **word != "--").any(|word| match word.strip_prefix("--") {
        // Git takes any beginning of a long option that is unambiguous; three letters are enough to be suspicious.
        Some(option) => {
            let option = option.split('=').next().unwrap_or_default();
            option.len() >= 3 && long.iter().any(|name| name.starts_with(option))
        }
        None => word.strip_prefix('-').is_some_and(|bundle| bundle.contains(|c| short.contains(c))),
    })
}
