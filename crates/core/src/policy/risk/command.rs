//! The table of commands and their risk. Commands whose arguments decide are in `harm`.

use qd_protocol::policy::Risk;

use super::super::here_document::INTERPRETERS;
use super::super::line_analysis::SHELLS;
use super::super::path::PathLocation;
use super::super::sensitive::{expands_secret_variable, is_secret_variable};
use super::harm::{is_harmful, runs_computed_code, runs_its_input, writes_outside};
use super::line::CommandInvocation;
use super::{code, git};

/// Commands that destroy, gain privileges, spend money or reach other machines, whatever their arguments.
const ALWAYS_HIGH: &[&str] = &[
    "sudo",
    "su",
    "doas",
    "pkexec",
    "dd",
    "fdisk",
    "sfdisk",
    "parted",
    "wipefs",
    "shred",
    "shutdown",
    "reboot",
    "halt",
    "poweroff",
    "mount",
    "umount",
    "insmod",
    "rmmod",
    "modprobe",
    "iptables",
    "nft",
    "ufw",
    "useradd",
    "userdel",
    "usermod",
    "passwd",
    "chpasswd",
    "visudo",
    "chroot",
    "nsenter",
    "ssh",
    "scp",
    "sftp",
    "ftp",
    "telnet",
    "nc",
    "ncat",
    "netcat",
    "socat",
    "killall",
    "aws",
    "gcloud",
    "az",
    "gsutil",
    "heroku",
    "fly",
    "flyctl",
    "vercel",
    "netlify",
    "doctl",
    "dropdb",
    "apt",
    "apt-get",
    "dpkg",
    "yum",
    "dnf",
    "pacman",
    "apk",
    "brew",
    "snap",
    "ssh-keygen",
    "ssh-add",
    "pass",
    "op",
    "vault",
    "security",
    "secret-tool",
    "sysctl",
    "ngrok",
    "setfacl",
    "chattr",
    "swapoff",
    "at",
    "batch",
    "systemd-run",
    "osascript",
];

/// Subcommands that publish, spend money, install for everybody, destroy something shared, or print keys.
const HIGH_SUBCOMMANDS: &[(&str, &[&str])] = &[
    ("cargo", &["publish", "yank", "login", "owner", "install", "uninstall"]),
    ("npm", &["publish", "unpublish", "login", "token", "adduser", "deprecate"]),
    ("pnpm", &["publish"]),
    ("yarn", &["publish"]),
    ("gem", &["push", "yank"]),
    ("twine", &["upload"]),
    ("poetry", &["publish"]),
    ("uv", &["publish"]),
    ("docker", &["push", "login", "system", "volume"]),
    ("podman", &["push", "login", "system", "volume"]),
    ("kubectl", &["delete", "apply", "exec", "drain", "replace", "scale", "patch", "edit", "cp", "create"]),
    ("helm", &["install", "uninstall", "upgrade", "rollback"]),
    ("terraform", &["apply", "destroy", "import"]),
    ("tofu", &["apply", "destroy", "import"]),
    ("pulumi", &["up", "destroy"]),
    ("gh", &["secret", "auth", "release", "ssh-key", "gpg-key"]),
    ("systemctl", &["start", "stop", "restart", "enable", "disable", "mask", "kill", "poweroff", "reboot"]),
    ("wrangler", &["deploy", "publish", "delete", "secret"]),
];

/// Commands that only read. Which files they read is checked separately.
const READ_ONLY_COMMANDS: &[&str] = &[
    "ls",
    "cat",
    "head",
    "tail",
    "wc",
    "grep",
    "egrep",
    "fgrep",
    "rg",
    "tree",
    "stat",
    "file",
    "du",
    "cut",
    "diff",
    "cmp",
    "basename",
    "dirname",
    "realpath",
    "readlink",
    "sha256sum",
    "sha1sum",
    "md5sum",
    "cksum",
    "cd",
    "test",
    "[",
    "find",
    "sort",
    "nl",
    "less",
    "more",
    "uniq",
    "comm",
    "paste",
    "column",
    "tac",
    "rev",
    "fold",
    "od",
    "xxd",
    "hexdump",
    "strings",
    "jq",
    "sed",
    "awk",
    "tr",
    "fd",
    "fdfind",
];

/// Commands that read no files, whatever their arguments.
const HARMLESS_COMMANDS: &[&str] = &[
    "echo", "printf", "pwd", "true", "false", "whoami", "id", "uname", "date", "which", "type", "ps", "df",
    "free", "uptime", "nproc", "sleep", "seq", "expr", "groups", "arch", "tty", ":",
];

/// Commands known to change something, or to run something that we cannot see.
const CHANGING_COMMANDS: &[&str] = &[
    "rm",
    "rmdir",
    "unlink",
    "mv",
    "cp",
    "ln",
    "mkdir",
    "touch",
    "tee",
    "sed",
    "install",
    "truncate",
    "chmod",
    "chown",
    "chgrp",
    "tar",
    "unzip",
    "patch",
    "rsync",
    "kill",
    "pkill",
    "curl",
    "wget",
    "git",
    "make",
    "npm",
    "npx",
    "pnpm",
    "yarn",
    "pip",
    "pip3",
    "cargo",
    "docker",
    "podman",
    "xargs",
    "crontab",
    "at",
    "env",
    "printenv",
    "rustc",
    "go",
    "rustup",
    "cmake",
    "gradle",
    "mvn",
    "pytest",
    "tsc",
    "eslint",
    "apply_patch",
    "export",
    "set",
];

/// Commands that write or remove the files in their arguments.
const FILE_WRITING_COMMANDS: &[&str] = &[
    "rm", "rmdir", "unlink", "mv", "cp", "ln", "mkdir", "touch", "tee", "sed", "install", "truncate",
    "chmod", "chown", "chgrp", "patch", "rsync", "unzip", "tar", "curl", "wget", "sort",
];

/// The risk of one command; `None` if the command is not known.
pub(super) fn risk_of_command(command: &CommandInvocation<'_>) -> Option<Risk> {
    let program = command.program;
    if command.arguments.iter().any(|word| expands_secret_variable(word)) {
        return Some(Risk::High);
    }
    if HARMLESS_COMMANDS.contains(&program) {
        let sets_the_clock = program == "date" && command.has_option("s", &["set"]);
        return Some(if sets_the_clock { Risk::High } else { Risk::Low });
    }
    if program == "command" && command.has_option("vV", &[]) {
        return Some(Risk::Low);
    }
    let first = command.operands().next().unwrap_or_default();
    let high_subcommand =
        HIGH_SUBCOMMANDS.iter().any(|(name, verbs)| *name == program && verbs.contains(&first));
    let prints_a_secret = program == "printenv" && command.operands().any(is_secret_variable);
    if ALWAYS_HIGH.contains(&program)
        || program.starts_with("mkfs")
        || high_subcommand
        || prints_a_secret
        || command.possible_files().any(|file| command.location_of(file) == PathLocation::Secret)
        || (FILE_WRITING_COMMANDS.contains(&program) && writes_outside(command))
        || runs_its_input(command)
        || runs_computed_code(command)
        || inline_code(command).any(|program| code::is_harmful(program, command.workspace))
        || is_harmful(command)
    {
        return Some(Risk::High);
    }
    if program == "git" {
        return git::risk_of_git(command);
    }
    if READ_ONLY_COMMANDS.contains(&program) {
        let stays_inside = !command.left_workspace
            && read_targets(command).iter().all(|word| command.is_surely_inside(word));
        if stays_inside && !may_write_or_run(command) {
            return Some(Risk::Low);
        }
    }
    let asks_its_version = matches!(command.arguments[..], ["--version" | "-V" | "version"]);
    if CHANGING_COMMANDS.contains(&program) || is_interpreter(program) {
        return Some(if asks_its_version { Risk::Low } else { Risk::Medium });
    }
    None
}

fn is_interpreter(program: &str) -> bool {
    SHELLS.contains(&program) || INTERPRETERS.contains(&program)
}

/// Programs in other languages among the arguments.
fn inline_code<'c>(command: &'c CommandInvocation<'_>) -> impl Iterator<Item = &'c str> {
    let takes_code = INTERPRETERS.contains(&command.program) || command.program == "awk";
    let inline = command.has_option("cepr", &["eval", "print"]);
    let looks_like_code = move |word: &&str| inline || word.contains(['(', ' ', ';', '`']);
    command.arguments.iter().copied().filter(move |word| takes_code && looks_like_code(word))
}

/// The files that a read-only command reads.
fn read_targets<'c>(command: &'c CommandInvocation<'_>) -> Vec<&'c str> {
    let pattern_by_option = match command.program {
        "find" => {
            let is_link_option = |word: &&&str| matches!(**word, "-L" | "-H" | "-P");
            let roots = command.arguments.iter().skip_while(is_link_option);
            return roots.take_while(|word| !word.starts_with(['-', '(', '!'])).copied().collect();
        }
        "grep" | "egrep" | "fgrep" | "rg" => {
            command.has_option("ef", &["regexp", "file", "files", "type-list"])
        }
        "sed" => command.has_option("ef", &["expression", "file"]),
        "awk" => command.has_option("f", &["file"]),
        "jq" => command.has_option("f", &["from-file"]),
        "tr" => return Vec::new(),
        _ => true,
    };
    // The first operand is the pattern or program, unless an option gave it.
    command.operands().skip(usize::from(!pattern_by_option)).collect()
}

/// Whether a read-only command has options that make it write or run something.
fn may_write_or_run(command: &CommandInvocation<'_>) -> bool {
    match command.program {
        "find" => command.arguments.iter().any(|word| {
            ["-exec", "-ok", "-delete", "-fprint", "-fls"].iter().any(|option| word.starts_with(option))
        }),
        "fd" | "fdfind" => command.has_option("xX", &["exec", "exec-batch"]),
        "rg" => command.has_option("", &["pre", "hostname-bin", "search-zip"]),
        "sort" => {
            command.has_option("oT", &["output", "compress-program"])
                || command.arguments.iter().any(|w| w.starts_with("--co"))
        }
        "less" | "more" => !command.piped,
        "tree" => command.has_option("o", &[]),
        "file" => command.has_option("C", &["compile"]),
        "uniq" => command.operands().count() > 1,
        "xxd" => command.has_option("r", &[]) || command.operands().count() > 1,
        // Only printing lines by number is read-only: `sed -n '1,200p'`.
        "sed" => {
            let prints = |script: &str| {
                script.ends_with('p')
                    && script[..script.len() - 1].chars().all(|c| c.is_ascii_digit() || ",$".contains(c))
            };
            !matches!(command.arguments[..], ["-n", script, ..] if prints(script))
                || command.has_option("iefEsz", &["in-place", "expression", "file"])
        }
        "awk" => {
            let program = command.operands().next().unwrap_or_default();
            command.has_option("fivl", &["file", "include", "load", "assign"])
                || ["system", "|", ">", "getline", "ENVIRON", "@"].iter().any(|word| program.contains(word))
        }
        _ => false,
    }
}
