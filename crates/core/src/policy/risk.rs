//! How much harm a tool call could do, by our own table: what is known to destroy or to reach out is high, what is
//! known only to look is low, and of the rest we have no opinion unless we know that it changes something. The table
//! is text against text; it knows neither the disk nor the workspace, and nothing here decides what may happen.

use qd_protocol::policy::Risk;
use serde_json::Value;

use super::argument::{Argument, Kind, arguments};
use super::path::{Place, host, is_address, place};
use super::reading::{Reading, Readings, SHELLS, read};

/// The risk of a call: the larger of our opinion and the agent's word, and medium where there is neither.
pub fn assess(tool: &str, input: &Value, claimed: Option<Risk>) -> Risk {
    opinion(tool, input).max(claimed).unwrap_or(Risk::Medium)
}

fn opinion(tool: &str, input: &Value) -> Option<Risk> {
    let found = arguments(tool, input);
    let own = of_tool(tool);
    let lines = found.list.iter().filter(|argument| argument.kind == Kind::Command);
    let others = found.list.iter().filter(|argument| argument.kind != Kind::Command);
    let lines = all(lines.map(|line| of_line(&line.text)));
    let others = others.filter_map(|argument| of_argument(own, argument)).max();
    match (lines, found.unreadable) {
        (None, false) => own.max(others),
        (lines, true) => lines.flatten().max(own).max(others).max(Some(Risk::Medium)),
        // A tool that is known to look does not vouch for a command that is not known.
        (Some(None), false) => own.max(others).filter(|risk| *risk > Risk::Low),
        (Some(lines), false) => lines.max(own).max(others),
    }
}

/// The opinion on several things together: as bad as the worst, and low only if all are. The outer `None`: there were
/// no things.
fn all(opinions: impl Iterator<Item = Option<Risk>>) -> Option<Option<Risk>> {
    opinions.reduce(|one, other| match (one, other) {
        (Some(Risk::High), _) | (_, Some(Risk::High)) => Some(Risk::High),
        (Some(Risk::Medium), _) | (_, Some(Risk::Medium)) => Some(Risk::Medium),
        (None, _) | (_, None) => None,
        (Some(Risk::Low), Some(Risk::Low)) => Some(Risk::Low),
    })
}

/// What the tool's name tells.
fn of_tool(tool: &str) -> Option<Risk> {
    let plain: String = tool.chars().filter(|c| c.is_alphanumeric()).flat_map(char::to_lowercase).collect();
    match plain.as_str() {
        "read" | "readfile" | "view" | "viewfile" | "notebookread" | "ls" | "list" | "listdir"
        | "listdirectory" | "glob" | "grep" | "todoread" | "todowrite" | "think" => Some(Risk::Low),
        "write" | "writefile" | "edit" | "editfile" | "multiedit" | "notebookedit" | "strreplace"
        | "applypatch" | "create" | "createfile" | "delete" | "deletefile" | "move" | "webfetch"
        | "websearch" | "fetch" => Some(Risk::Medium),
        _ => None,
    }
}

/// What a path or an address adds to the tool's own opinion.
fn of_argument(own: Option<Risk>, argument: &Argument<'_>) -> Option<Risk> {
    let text = argument.text.as_ref();
    match argument.kind {
        Kind::Address => match text.strip_prefix("file://") {
            Some(file) => Some(if place(file) == Place::Secret { Risk::High } else { Risk::Medium }),
            // Where clouds hand out the machine's own keys.
            None if matches!(host(text), "169.254.169.254" | "metadata.google.internal") => Some(Risk::High),
            None => Some(Risk::Medium),
        },
        Kind::Path => match (place(text), own) {
            (Place::Secret, _) => Some(Risk::High),
            (Place::System | Place::Outside, Some(Risk::Low)) => Some(Risk::Medium),
            (Place::System | Place::Outside, Some(_)) => Some(Risk::High),
            _ => None,
        },
        Kind::Command | Kind::Other => None,
    }
}

fn of_line(line: &str) -> Option<Risk> {
    let readings = read(line);
    let strayed = readings.commands.iter().any(strays);
    let bomb = || line.split_whitespace().collect::<String>().contains("(){:|:");
    if readings.tangled || writes_a_guarded_file(&readings) || downloads_into_a_shell(&readings) || bomb() {
        return Some(Risk::High);
    }
    let commands = readings.commands.iter().map(|reading| of_command(&Command::new(reading, strayed)));
    let commands = all(commands).flatten();
    // What cannot be split may do more than was seen.
    if readings.clear { commands } else { commands.max(Some(Risk::Medium)) }
}

/// Whether a command leaves the working directory, so that plain names after it mean other files.
fn strays(reading: &Reading) -> bool {
    let to = reading.words.get(1).map(String::as_str);
    matches!(reading.program(), "cd" | "pushd" | "chdir")
        && to.is_none_or(|to| to == "-" || !matches!(place(to), Place::Inside | Place::Absolute) || to == "/")
}

fn writes_a_guarded_file(readings: &Readings) -> bool {
    readings.writes.iter().any(|file| matches!(place(file), Place::Secret | Place::System))
}

/// `sh -c "$(curl …)"`, `bash <(curl …)`: in such a line nobody can tell what goes where, so meeting is enough.
fn downloads_into_a_shell(readings: &Readings) -> bool {
    let any = |names: &[&str]| readings.commands.iter().any(|command| names.contains(&command.program()));
    !readings.clear && any(&["curl", "wget"]) && (any(SHELLS) || any(&["eval", "source", ".", "exec"]))
}

/// Commands that destroy, take power, or reach other machines, whatever their arguments.
const ALWAYS_HIGH: &[&str] = &[
    "sudo", "su", "doas", "pkexec", "dd", "fdisk", "sfdisk", "parted", "wipefs", "shred", "shutdown",
    "reboot", "halt", "poweroff", "mount", "umount", "insmod", "rmmod", "modprobe", "iptables", "nft",
    "useradd", "userdel", "usermod", "passwd", "chpasswd", "visudo", "chroot", "nsenter", "ssh", "scp",
    "sftp", "ftp", "telnet", "nc", "ncat", "netcat", "socat", "killall", "aws", "gcloud", "az",
];

/// Subcommands that publish, spend, destroy for others, or print keys.
const HIGH_SUBCOMMANDS: &[(&str, &[&str])] = &[
    ("cargo", &["publish", "yank", "login", "owner"]),
    ("npm", &["publish", "unpublish", "login", "token", "adduser"]),
    ("pnpm", &["publish"]),
    ("yarn", &["publish"]),
    ("gem", &["push", "yank"]),
    ("twine", &["upload"]),
    ("docker", &["push", "login", "system", "volume"]),
    ("podman", &["push", "login", "system", "volume"]),
    ("kubectl", &["delete", "apply", "exec", "drain", "replace", "scale"]),
    ("helm", &["install", "uninstall", "upgrade", "rollback"]),
    ("terraform", &["apply", "destroy", "import"]),
    ("gh", &["secret", "auth", "release", "ssh-key", "gpg-key"]),
    ("systemctl", &["start", "stop", "restart", "enable", "disable", "mask", "kill", "poweroff", "reboot"]),
];

/// Commands that only look. Where they look is checked besides.
const LOOKS: &[&str] = &[
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
    "md5sum",
    "cd",
    "test",
    "[",
    "find",
    "sort",
    "nl",
    "less",
    "more",
];

/// Commands whose arguments name nothing that is read.
const SAYS: &[&str] =
    &["echo", "printf", "pwd", "true", "false", "whoami", "id", "uname", "date", "which", "type"];

/// Commands known to change something, or to run what we cannot see.
const CHANGES: &[&str] = &[
    "rm", "rmdir", "mv", "cp", "ln", "mkdir", "touch", "tee", "sed", "install", "truncate", "chmod", "chown",
    "chgrp", "tar", "unzip", "patch", "rsync", "kill", "pkill", "curl", "wget", "git", "make", "npm", "npx",
    "pnpm", "yarn", "pip", "pip3", "cargo", "docker", "podman", "python", "python3", "node", "perl", "ruby",
    "php", "xargs", "crontab", "at", "env", "printenv",
];

/// Commands whose file arguments are written or removed.
const WRITES: &[&str] = &[
    "rm", "rmdir", "mv", "cp", "ln", "mkdir", "touch", "tee", "sed", "install", "truncate", "chmod", "chown",
    "chgrp", "patch", "rsync", "unzip",
];

/// A command with its arguments told apart.
struct Command<'r> {
    program: &'r str,
    /// All words after the program.
    arguments: Vec<&'r str>,
    piped: bool,
    strayed: bool,
}

impl<'r> Command<'r> {
    fn new(reading: &'r Reading, strayed: bool) -> Self {
        let arguments = reading.words[1..].iter().map(String::as_str).collect();
        Self { program: reading.program(), arguments, piped: reading.piped, strayed }
    }

    fn operands(&self) -> impl Iterator<Item = &'r str> {
        let mut only_operands = false;
        self.arguments.iter().copied().filter(move |word| {
            let option = !only_operands && word.starts_with('-') && word.len() > 1;
            only_operands |= *word == "--";
            !option
        })
    }

    /// Whether one of these is given: a long option (also with `=value`), or a letter within a bundle of short ones.
    fn has(&self, short: &str, long: &[&str]) -> bool {
        self.arguments.iter().take_while(|word| **word != "--").any(|word| match word.strip_prefix("--") {
            Some(option) => long.contains(&option.split('=').next().unwrap_or_default()),
            None => word.strip_prefix('-').is_some_and(|bundle| bundle.contains(|c| short.contains(c))),
        })
    }

    /// Where an argument leads, seen from where the line has gone.
    fn place(&self, word: &str) -> Place {
        match place(word) {
            Place::Inside if self.strayed => Place::Outside,
            place => place,
        }
    }

    /// Every text in the arguments that may name a file: also after `=` and `@`.
    fn files(&self) -> impl Iterator<Item = &'r str> {
        self.arguments.iter().flat_map(|word| {
            let value = word.rsplit_once('=').map(|(_, value)| value);
            [Some(*word), value, word.rsplit_once('@').map(|(_, file)| file)].into_iter().flatten()
        })
    }
}

fn of_command(command: &Command<'_>) -> Option<Risk> {
    let program = command.program;
    if SAYS.contains(&program) {
        let sets_the_clock = program == "date" && command.has("s", &["set"]);
        return Some(if sets_the_clock { Risk::High } else { Risk::Low });
    }
    let first = command.operands().next().unwrap_or_default();
    let high_subcommand =
        HIGH_SUBCOMMANDS.iter().any(|(name, verbs)| *name == program && verbs.contains(&first));
    if ALWAYS_HIGH.contains(&program)
        || program.starts_with("mkfs")
        || high_subcommand
        || command.files().any(|file| place(file) == Place::Secret)
        || (WRITES.contains(&program) && writes_outside(command))
        || runs_its_input(command)
        || is_harmful(command)
    {
        return Some(Risk::High);
    }
    if program == "git" {
        return super::risk_git::of_git(&command.arguments, command.strayed);
    }
    if LOOKS.contains(&program) {
        let near = command.operands().all(|word| command.place(word) == Place::Inside);
        return (near && !does_more_than_look(command)).then_some(Risk::Low);
    }
    (CHANGES.contains(&program) || SHELLS.contains(&program)).then_some(Risk::Medium)
}

/// Whether a command that writes is pointed at something beyond the workspace. Removing wants more care than the rest:
/// an absolute path may be inside, but then it can be written shorter.
fn writes_outside(command: &Command<'_>) -> bool {
    let removes = command.program == "rm";
    let sweeping = command.has("rRf", &["recursive", "force"]);
    if removes && sweeping && command.operands().next().is_none() {
        return true;
    }
    let sources = match command.program {
        "sed" if !command.has("i", &["in-place"]) => return false,
        // The last is the target, unless it was named before.
        "cp" | "ln" | "install" if !command.has("t", &["target-directory"]) => {
            command.operands().count().saturating_sub(1)
        }
        _ => 0,
    };
    command.operands().skip(sources).any(|word| {
        let everything = matches!(super::path::normalise(word).as_str(), "." | "*" | ".git" | ".*");
        match command.place(word) {
            Place::System | Place::Secret => true,
            Place::Outside | Place::Absolute if removes => true,
            _ => removes && sweeping && everything,
        }
    })
}

/// An interpreter that takes its program from a pipe.
fn runs_its_input(command: &Command<'_>) -> bool {
    let gives_code = match command.program {
        shell if SHELLS.contains(&shell) => command.has("c", &[]),
        "python" | "python3" => command.has("cm", &[]),
        "perl" | "ruby" | "node" | "php" => command.has("epr", &["eval", "print"]),
        _ => return false,
    };
    let from_input = command.operands().all(|word| word == "-") || command.has("s", &[]);
    command.piped && !gives_code && from_input
}

/// Harm that depends on the arguments.
fn is_harmful(command: &Command<'_>) -> bool {
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
            command.has("R", &["recursive"]) && words.skip(1).any(|file| command.place(file) != Place::Inside)
        }
        "kill" => {
            let after_signal =
                usize::from(command.arguments.first().is_some_and(|word| word.starts_with('-')));
            command.arguments.iter().skip(after_signal).any(|pid| matches!(*pid, "1" | "-1" | "0"))
        }
        "pkill" => command.has("u", &["uid", "euid"]),
        "crontab" => !command.has("l", &[]),
        "init" => words.any(|level| matches!(level, "0" | "6")),
        "find" | "fd" => {
            command.arguments.contains(&"-delete")
                && words.next().is_some_and(|root| command.place(root) != Place::Inside)
        }
        "rsync" => words.any(|word| word.contains(':')) || command.has("", &["delete"]),
        "docker" | "podman" => {
            let whole_disk = |word: &&str| word.starts_with("/:") || word.contains("docker.sock");
            command.has("", &["privileged"]) || command.arguments.iter().any(whole_disk)
        }
        "curl" => {
            let method = |word: &&str| matches!(*word, "POST" | "PUT" | "DELETE" | "PATCH");
            let sends =
                command.has(
                    "dFT",
                    &["data", "data-raw", "data-binary", "data-urlencode", "form", "json", "upload-file"],
                ) || command.arguments.iter().any(|word| word.starts_with("-X") && method(&&word[2..]))
                    || command.arguments.iter().any(|word| method(&word.trim_start_matches("--request=")));
            reads_machine_keys(command) || (sends && !only_this_machine(command))
        }
        "wget" => {
            let sends = command.has("", &["post-data", "post-file", "body-data", "body-file", "method"]);
            reads_machine_keys(command) || (sends && !only_this_machine(command))
        }
        _ => false,
    }
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
    command.operands().any(|word| matches!(host(word), "169.254.169.254" | "metadata.google.internal"))
}

/// Options by which a command that looks can also write or run something.
fn does_more_than_look(command: &Command<'_>) -> bool {
    match command.program {
        "find" => command.arguments.iter().any(|word| {
            ["-exec", "-ok", "-delete", "-fprint", "-fls"].iter().any(|option| word.starts_with(option))
        }),
        "rg" => command.has("", &["pre", "hostname-bin", "search-zip"]),
        "sort" => {
            command.has("oT", &["output", "compress-program"])
                || command.arguments.iter().any(|w| w.starts_with("--co"))
        }
        "less" | "more" => !command.piped,
        "tree" => command.has("o", &[]),
        "file" => command.has("C", &["compile"]),
        _ => false,
    }
}
