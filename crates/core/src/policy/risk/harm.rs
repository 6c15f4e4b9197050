//! Commands that do harm or not as their arguments say.

use super::super::guarded::gives_machine_keys;
use super::super::here::INTERPRETERS;
use super::super::path::{Place, host, is_address};
use super::super::reading::SHELLS;
use super::is_everything;
use super::line::Command;

/// Whether a command that writes is pointed at something beyond the workspace. Removing wants more care than the rest:
/// where nobody can tell what is removed, it is too much.
pub(super) fn writes_outside(command: &Command<'_>) -> bool {
    let removes = matches!(command.program, "rm" | "rmdir" | "unlink");
    let sweeping = command.has("rRf", &["recursive", "force"]);
    let written = written(command);
    if command.program == "rm" && written.is_empty() {
        // It gets its files from elsewhere, as from `xargs`.
        return true;
    }
    written.iter().any(|word| match command.place(word) {
        Place::System | Place::Secret | Place::Outside => true,
        Place::Unclear => removes,
        Place::Inside if command.program == "mv" => {
            !word.ends_with('*') && is_everything(word, command.workspace)
        }
        Place::Inside => removes && sweeping && is_everything(word, command.workspace),
        Place::Nowhere => false,
    })
}

/// The files that a command writes or removes, as far as its arguments name them.
fn written<'c>(command: &'c Command<'_>) -> Vec<&'c str> {
    let operands = || command.operands();
    match command.program {
        "sed" if !command.has("i", &["in-place"]) => Vec::new(),
        "sed" => {
            let scripts: Vec<&str> = command.values_of(&["-e", "--expression", "-f", "--file"]).collect();
            let skipped = usize::from(scripts.is_empty());
            operands().filter(|word| !scripts.contains(word)).skip(skipped).collect()
        }
        // The last is the target, unless it was named before.
        "cp" | "ln" | "install" if !command.has("t", &["target-directory"]) => {
            operands().skip(operands().count().saturating_sub(1)).collect()
        }
        // The first is the mode or the owner.
        "chmod" | "chown" | "chgrp" => operands().skip(1).collect(),
        "tar" => {
            let bundle = command.arguments.first().copied().unwrap_or_default();
            let packs = bundle.trim_start_matches('-').starts_with('c') || command.has("", &["create"]);
            let archive = command.values_of(&["-f", "--file", "-cf", "-czf", "cf", "czf", "-cJf", "-cjf"]);
            let into = command.values_of(&["-C", "--directory"]);
            if packs { archive.collect() } else { into.collect() }
        }
        "curl" => command.values_of(&["-o", "--output", "--output-dir", "-D", "--dump-header"]).collect(),
        "wget" => command.values_of(&["-O", "--output-document", "-P", "--directory-prefix"]).collect(),
        "sort" => command.values_of(&["-o", "--output"]).collect(),
        _ => operands().collect(),
    }
}

/// An interpreter that takes its program from a pipe.
pub(super) fn runs_its_input(command: &Command<'_>) -> bool {
    let gives_code = match command.program {
        "xargs" | "parallel" => return command.arguments.iter().any(|word| SHELLS.contains(word)),
        shell if SHELLS.contains(&shell) => command.has("c", &[]),
        "python" | "python2" | "python3" => command.has("cm", &[]),
        other if INTERPRETERS.contains(&other) => command.has("epr", &["eval", "print"]),
        _ => return false,
    };
    let from_input = command.operands().all(|word| word == "-") || command.has("s", &[]);
    command.piped && !gives_code && from_input
}

/// An interpreter whose program is the output of something: `sh -c "$(…)"`, `eval "$X"`.
pub(super) fn runs_what_is_computed(command: &Command<'_>) -> bool {
    let interprets = SHELLS.contains(&command.program) || INTERPRETERS.contains(&command.program);
    let takes_code = command.program == "eval" || (interprets && command.has("ce", &["eval"]));
    let code = command.operands().next();
    takes_code && code.is_none_or(|code| code.starts_with('$'))
}

/// Harm that depends on the arguments.
pub(super) fn is_harmful(command: &Command<'_>) -> bool {
    let mut words = command.operands();
    match command.program {
        "chmod" => {
            let open = |mode: &str| {
                mode.ends_with("777") || mode.contains("o+w") || mode.contains("a+") || mode.contains("+rwx")
            };
            let digits = |mode: &str| mode.len() == 4 && mode.bytes().all(|b| b.is_ascii_digit());
            let suid = |mode: &str| mode.contains("+s") || (digits(mode) && !mode.starts_with(['0', '1']));
            words.any(|mode| (command.has("R", &["recursive"]) && open(mode)) || suid(mode))
        }
        "chown" | "chgrp" => {
            command.has("R", &["recursive"]) && words.skip(1).any(|file| !command.is_near(file))
        }
        "kill" => {
            let after_signal =
                usize::from(command.arguments.first().is_some_and(|word| word.starts_with('-')));
            command.arguments.iter().skip(after_signal).any(|pid| matches!(*pid, "1" | "-1" | "0"))
        }
        "pkill" => command.has("u", &["uid", "euid"]),
        "crontab" => !command.has("l", &[]),
        "init" => words.any(|level| matches!(level, "0" | "6")),
        "find" => removes_all_it_finds(command),
        "rsync" => words.any(|word| word.contains(':')) || command.has("", &["delete"]),
        "docker" | "podman" => {
            let lends = |word: &str| {
                let source = word.split(':').next().unwrap_or_default();
                word.contains("docker.sock") || is_beyond(command, source)
            };
            command.has("", &["privileged"]) || command.values_of(&["-v", "--volume"]).any(lends)
        }
        "make" | "gmake" => command.values_of(&["-C", "--directory"]).any(|to| is_beyond(command, to)),
        "perl" | "ruby" | "php" => {
            let in_place = command.has("i", &[]) && words.any(|word| is_beyond(command, word));
            in_place || command.arguments.iter().any(|word| word.contains('`'))
        }
        "npm" | "pnpm" | "yarn" => command.has("g", &["global"]) || words.next() == Some("global"),
        "pip" | "pip3" => command.has("", &["break-system-packages", "user", "target"]),
        "gpg" => command.arguments.iter().any(|word| word.starts_with("--export-secret")),
        "gh" => {
            let verbs: Vec<&str> = words.collect();
            let ends = verbs.iter().any(|verb| matches!(*verb, "delete" | "merge" | "archive" | "transfer"));
            ends || (verbs.first() == Some(&"api") && changes_by_http(command))
        }
        "psql" | "mysql" | "mariadb" | "sqlite3" | "mongosh" | "redis-cli" | "clickhouse-client" => {
            let text = command.arguments.join(" ").to_ascii_lowercase();
            ["drop ", "truncate ", "delete ", "flushall", "flushdb", "dropdatabase", "grant "]
                .iter()
                .any(|word| text.contains(word))
        }
        "curl" => {
            let sends = command.has(
                "dFT",
                &["data", "data-raw", "data-binary", "data-urlencode", "form", "json", "upload-file"],
            ) || changes_by_http(command);
            reads_machine_keys(command) || (sends && !only_this_machine(command))
        }
        "wget" => {
            let sends = command.has("", &["post-data", "post-file", "body-data", "body-file", "method"]);
            reads_machine_keys(command) || (sends && !only_this_machine(command))
        }
        _ => false,
    }
}

fn is_beyond(command: &Command<'_>, word: &str) -> bool {
    matches!(command.place(word), Place::Outside | Place::System | Place::Secret)
}

/// `find` with `-delete` or `-exec rm`, unless it looks below one directory inside, or for names of a kind.
fn removes_all_it_finds(command: &Command<'_>) -> bool {
    let runs =
        |two: &[&str]| matches!(two[0], "-exec" | "-execdir") && matches!(two[1], "rm" | "unlink" | "shred");
    if !command.arguments.contains(&"-delete") && !command.arguments.windows(2).any(runs) {
        return false;
    }
    let roots: Vec<&str> =
        command.arguments.iter().take_while(|word| !word.starts_with('-')).copied().collect();
    let names = command.values_of(&["-name", "-iname", "-path", "-wholename"]);
    let chooses = names.filter(|name| !name.trim_matches(['*', '.', '/']).is_empty()).count() > 0;
    let whole = roots.is_empty() || roots.iter().any(|root| is_everything(root, command.workspace));
    roots.iter().any(|root| !command.is_near(root)) || command.strayed || (whole && !chooses)
}

fn changes_by_http(command: &Command<'_>) -> bool {
    let method = |word: &str| matches!(word, "POST" | "PUT" | "DELETE" | "PATCH");
    command.arguments.iter().any(|word| {
        method(word.trim_start_matches("--request=").trim_start_matches("--method="))
            || word.strip_prefix("-X").is_some_and(method)
    })
}

fn addresses<'c>(command: &'c Command<'_>) -> impl Iterator<Item = &'c str> {
    command
        .operands()
        .filter(|word| is_address(word) || word.starts_with("localhost") || word.starts_with("127."))
}

fn only_this_machine(command: &Command<'_>) -> bool {
    let mut any = false;
    addresses(command).all(|address| {
        any = true;
        let host = host(address);
        host == "localhost"
            || host == "::1"
            || (host.starts_with("127.") && host.parse::<std::net::Ipv4Addr>().is_ok())
    }) && any
}

fn reads_machine_keys(command: &Command<'_>) -> bool {
    command.operands().any(|word| gives_machine_keys(host(word)))
}
