//! Commands whose arguments decide whether they do harm.

use super::super::here_document::INTERPRETERS;
use super::super::line_analysis::SHELLS;
use super::super::path::{PathLocation, address_host, is_address};
use super::super::sensitive::is_metadata_host;
use super::is_whole_workspace;
use super::line::CommandInvocation;

/// Whether a command that writes files would write outside the workspace. Removing is judged more strictly: it counts
/// as outside even if the location is unclear.
pub(super) fn writes_outside(command: &CommandInvocation<'_>) -> bool {
    let removes = matches!(command.program, "rm" | "rmdir" | "unlink");
    let is_recursive_or_forced = command.has_option("rRf", &["recursive", "force"]);
    let written = written_files(command);
    if command.program == "rm" && written.is_empty() {
        // The files come from elsewhere, for example from `xargs`.
        return true;
    }
    written.iter().any(|word| match command.location_of(word) {
        PathLocation::System | PathLocation::Secret | PathLocation::Outside => true,
        PathLocation::Unclear => removes,
        PathLocation::Inside if command.program == "mv" => {
            !word.ends_with('*') && is_whole_workspace(word, command.workspace)
        }
        PathLocation::Inside => {
            removes && is_recursive_or_forced && is_whole_workspace(word, command.workspace)
        }
        PathLocation::NullDevice => false,
    })
}

/// The files that a command writes or removes, as far as its arguments name them.
fn written_files<'c>(command: &'c CommandInvocation<'_>) -> Vec<&'c str> {
    let operands = || command.operands();
    match command.program {
        "sed" if !command.has_option("i", &["in-place"]) => Vec::new(),
        "sed" => {
            let scripts: Vec<&str> = command.option_values(&["-e", "--expression", "-f", "--file"]).collect();
            let skipped = usize::from(scripts.is_empty());
            operands().filter(|word| !scripts.contains(word)).skip(skipped).collect()
        }
        // The last operand is the target, unless an option names it.
        "cp" | "ln" | "install" if !command.has_option("t", &["target-directory"]) => {
            operands().skip(operands().count().saturating_sub(1)).collect()
        }
        // The first operand is the mode or the owner.
        "chmod" | "chown" | "chgrp" => operands().skip(1).collect(),
        "tar" => {
            let bundle = command.arguments.first().copied().unwrap_or_default();
            let creates =
                bundle.trim_start_matches('-').starts_with('c') || command.has_option("", &["create"]);
            let archive =
                command.option_values(&["-f", "--file", "-cf", "-czf", "cf", "czf", "-cJf", "-cjf"]);
            let target = command.option_values(&["-C", "--directory"]);
            if creates { archive.collect() } else { target.collect() }
        }
        "curl" => command.option_values(&["-o", "--output", "--output-dir", "-D", "--dump-header"]).collect(),
        "wget" => command.option_values(&["-O", "--output-document", "-P", "--directory-prefix"]).collect(),
        "sort" => command.option_values(&["-o", "--output"]).collect(),
        _ => operands().collect(),
    }
}

/// Whether an interpreter reads its program from a pipe.
pub(super) fn runs_its_input(command: &CommandInvocation<'_>) -> bool {
    let gives_code = match command.program {
        "xargs" | "parallel" => return command.arguments.iter().any(|word| SHELLS.contains(word)),
        shell if SHELLS.contains(&shell) => command.has_option("c", &[]),
        "python" | "python2" | "python3" => command.has_option("cm", &[]),
        other if INTERPRETERS.contains(&other) => command.has_option("epr", &["eval", "print"]),
        _ => return false,
    };
    let from_input = command.operands().all(|word| word == "-") || command.has_option("s", &[]);
    command.piped && !gives_code && from_input
}

/// Whether an interpreter runs the output of something: `sh -c "$(…)"`, `eval "$X"`.
pub(super) fn runs_computed_code(command: &CommandInvocation<'_>) -> bool {
    let interprets = SHELLS.contains(&command.program) || INTERPRETERS.contains(&command.program);
    let takes_code = command.program == "eval" || (interprets && command.has_option("ce", &["eval"]));
    let code = command.operands().next();
    takes_code && code.is_none_or(|code| code.starts_with('$'))
}

/// Whether a command does harm because of its arguments.
pub(super) fn is_harmful(command: &CommandInvocation<'_>) -> bool {
    let mut words = command.operands();
    match command.program {
        "chmod" => {
            let is_permissive = |mode: &str| {
                mode.ends_with("777") || mode.contains("o+w") || mode.contains("a+") || mode.contains("+rwx")
            };
            let digits = |mode: &str| mode.len() == 4 && mode.bytes().all(|b| b.is_ascii_digit());
            let suid = |mode: &str| mode.contains("+s") || (digits(mode) && !mode.starts_with(['0', '1']));
            words.any(|mode| (command.has_option("R", &["recursive"]) && is_permissive(mode)) || suid(mode))
        }
        "chown" | "chgrp" => {
            command.has_option("R", &["recursive"])
                && words.skip(1).any(|file| !command.is_surely_inside(file))
        }
        "kill" => {
            let after_signal =
                usize::from(command.arguments.first().is_some_and(|word| word.starts_with('-')));
            command.arguments.iter().skip(after_signal).any(|pid| matches!(*pid, "1" | "-1" | "0"))
        }
        "pkill" => command.has_option("u", &["uid", "euid"]),
        "crontab" => !command.has_option("l", &[]),
        "init" => words.any(|level| matches!(level, "0" | "6")),
        "find" => removes_all_it_finds(command),
        "rsync" => words.any(|word| word.contains(':')) || command.has_option("", &["delete"]),
        "docker" | "podman" => {
            let exposes_host = |word: &str| {
                let source = word.split(':').next().unwrap_or_default();
                word.contains("docker.sock") || is_outside(command, source)
            };
            command.has_option("", &["privileged"])
                || command.option_values(&["-v", "--volume"]).any(exposes_host)
        }
        "make" | "gmake" => {
            command.option_values(&["-C", "--directory"]).any(|directory| is_outside(command, directory))
        }
        "perl" | "ruby" | "php" => {
            let in_place = command.has_option("i", &[]) && words.any(|word| is_outside(command, word));
            in_place || command.arguments.iter().any(|word| word.contains('`'))
        }
        "npm" | "pnpm" | "yarn" => command.has_option("g", &["global"]) || words.next() == Some("global"),
        "pip" | "pip3" => command.has_option("", &["break-system-packages", "user", "target"]),
        "gpg" => command.arguments.iter().any(|word| word.starts_with("--export-secret")),
        "gh" => {
            let verbs: Vec<&str> = words.collect();
            let is_irreversible =
                verbs.iter().any(|verb| matches!(*verb, "delete" | "merge" | "archive" | "transfer"));
            is_irreversible || (verbs.first() == Some(&"api") && changes_by_http(command))
        }
        "psql" | "mysql" | "mariadb" | "sqlite3" | "mongosh" | "redis-cli" | "clickhouse-client" => {
            let text = command.arguments.join(" ").to_ascii_lowercase();
            ["drop ", "truncate ", "delete ", "flushall", "flushdb", "dropdatabase", "grant "]
                .iter()
                .any(|word| text.contains(word))
        }
        "curl" => {
            let sends = command.has_option(
                "dFT",
                &["data", "data-raw", "data-binary", "data-urlencode", "form", "json", "upload-file"],
            ) || changes_by_http(command);
            contacts_metadata_host(command) || (sends && !is_local_only(command))
        }
        "wget" => {
            let sends =
                command.has_option("", &["post-data", "post-file", "body-data", "body-file", "method"]);
            contacts_metadata_host(command) || (sends && !is_local_only(command))
        }
        _ => false,
    }
}

fn is_outside(command: &CommandInvocation<'_>, word: &str) -> bool {
    matches!(command.location_of(word), PathLocation::Outside | PathLocation::System | PathLocation::Secret)
}

/// Whether `find` removes everything that it finds, with `-delete` or `-exec rm`. It does not count if it searches
/// one directory inside the workspace, or only for names of a certain kind.
fn removes_all_it_finds(command: &CommandInvocation<'_>) -> bool {
    let removes = |pair: &[&str]| {
        matches!(pair[0], "-exec" | "-execdir") && matches!(pair[1], "rm" | "unlink" | "shred")
    };
    if !command.arguments.contains(&"-delete") && !command.arguments.windows(2).any(removes) {
        return false;
    }
    let roots: Vec<&str> =
        command.arguments.iter().take_while(|word| !word.starts_with('-')).copied().collect();
    let names = command.option_values(&["-name", "-iname", "-path", "-wholename"]);
    let is_selective = names.filter(|name| !name.trim_matches(['*', '.', '/']).is_empty()).count() > 0;
    let whole_workspace =
        roots.is_empty() || roots.iter().any(|root| is_whole_workspace(root, command.workspace));
    roots.iter().any(|root| !command.is_surely_inside(root))
        || command.left_workspace
        || (whole_workspace && !is_selective)
}

fn changes_by_http(command: &CommandInvocation<'_>) -> bool {
    let method = |word: &str| matches!(word, "POST" | "PUT" | "DELETE" | "PATCH");
    command.arguments.iter().any(|word| {
        method(word.trim_start_matches("--request=").trim_start_matches("--method="))
            || word.strip_prefix("-X").is_some_and(method)
    })
}

fn contacted_addresses<'c>(command: &'c CommandInvocation<'_>) -> impl Iterator<Item = &'c str> {
    command
        .operands()
        .filter(|word| is_address(word) || word.starts_with("localhost") || word.starts_with("127."))
}

fn is_local_only(command: &CommandInvocation<'_>) -> bool {
    let mut any = false;
    contacted_addresses(command).all(|address| {
        any = true;
        let host = address_host(address);
        host == "localhost"
            || host == "::1"
            || (host.starts_with("127.") && host.parse::<std::net::Ipv4Addr>().is_ok())
    }) && any
}

fn contacts_metadata_host(command: &CommandInvocation<'_>) -> bool {
    command.operands().any(|word| is_metadata_host(address_host(word)))
}
