//! Which of a tool's arguments say what it is about to do. Agents name them differently; the names known to us are
//! all here. Nothing is judged in this room.

use std::borrow::Cow;

use serde_json::Value;

use super::command_line;
use super::path;

/// What an argument is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// A line for a shell.
    Command,
    /// A file or directory.
    Path,
    /// An address.
    Address,
    /// A pattern to look for, or a text that we cannot name.
    Other,
}

/// One telling argument of a tool call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Argument<'i> {
    pub(super) kind: Kind,
    pub(super) text: Cow<'i, str>,
}

/// All telling arguments, the main one first.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Arguments<'i> {
    pub(super) list: Vec<Argument<'i>>,
    /// Whether one is there that we cannot read, such as a path that is not text.
    pub(super) unreadable: bool,
    /// Whether that one is a command.
    pub(super) unreadable_line: bool,
}

/// The argument that rules are tried on: the command, else the path, else the address, else what is looked for. A
/// command given as a list of words is shown as the line that gives a shell these words.
pub fn main_argument<'i>(tool: &str, input: &'i Value) -> Option<Cow<'i, str>> {
    arguments(tool, input).list.into_iter().next().map(|argument| argument.text)
}

const COMMAND_KEYS: &[&str] = &["command", "cmd"];
/// Further names of the command, which count only where the tool's name says that it runs one.
const SHELL_KEYS: &[&str] = &["command_line", "commandLine", "script"];
const PATH_KEYS: &[&str] = &[
    "path",
    "file_path",
    "filePath",
    "filepath",
    "absolute_path",
    "notebook_path",
    "target_file",
    "directory",
    "dir_path",
];
const ADDRESS_KEYS: &[&str] = &["url", "uri"];
const OTHER_KEYS: &[&str] = &["pattern", "query"];

/// The telling arguments of a call.
///
/// A call may bring several, and a tool reads those it knows: a `command` beside a `path` must not stand in for the
/// path. So all of them are given, and whoever allows something has to look at every one. A tool that is known to run
/// commands looks at nothing but the command.
pub(super) fn arguments<'i>(tool: &str, input: &'i Value) -> Arguments<'i> {
    let shell = runs_commands(tool);
    let mut found = Arguments { list: Vec::new(), unreadable: false, unreadable_line: false };
    if let Value::String(text) = input {
        let kind = match text {
            _ if shell => Kind::Command,
            text if path::is_address(text) => Kind::Address,
            _ => Kind::Other,
        };
        found.list.push(Argument { kind, text: Cow::Borrowed(text) });
        return found;
    }
    found.collect(input, COMMAND_KEYS, Kind::Command);
    if shell {
        found.collect(input, SHELL_KEYS, Kind::Command);
        return found;
    }
    found.collect(input, PATH_KEYS, Kind::Path);
    found.collect(input, ADDRESS_KEYS, Kind::Address);
    if found.list.is_empty() && !found.unreadable {
        found.collect(input, OTHER_KEYS, Kind::Other);
    }
    found
}

impl<'i> Arguments<'i> {
    fn collect(&mut self, input: &'i Value, keys: &[&str], kind: Kind) {
        for value in keys.iter().filter_map(|key| input.get(key)) {
            match (kind, value) {
                (_, Value::Null) => {}
                (Kind::Path, Value::String(text)) if path::is_address(text) => {
                    self.list.push(Argument { kind: Kind::Address, text: Cow::Borrowed(text) });
                }
                (kind, Value::String(text)) => self.list.push(Argument { kind, text: Cow::Borrowed(text) }),
                // A patch of several files: each of them counts.
                (Kind::Path, Value::Array(paths))
                    if !paths.is_empty() && paths.iter().all(Value::is_string) =>
                {
                    let paths = paths.iter().filter_map(Value::as_str).map(Cow::Borrowed);
                    self.list.extend(paths.map(|text| Argument { kind, text }));
                }
                (Kind::Command, Value::Array(words)) => {
                    let words: Option<Vec<&str>> = words.iter().map(Value::as_str).collect();
                    match words {
                        Some(words) => {
                            let text = Cow::Owned(command_line::join(&words));
                            self.list.push(Argument { kind, text });
                        }
                        None => self.skip(kind),
                    }
                }
                _ => self.skip(kind),
            }
        }
    }
}

impl Arguments<'_> {
    fn skip(&mut self, kind: Kind) {
        self.unreadable = true;
        self.unreadable_line |= kind == Kind::Command;
    }
}

/// Whether the tool's name says that it runs command lines.
fn runs_commands(tool: &str) -> bool {
    const NAMES: &[&str] = &[
        "bash",
        "shell",
        "sh",
        "zsh",
        "terminal",
        "execute",
        "exec",
        "run_command",
        "execute_command",
        "run_shell_command",
        "run_terminal_cmd",
        "local_shell",
    ];
    NAMES.iter().any(|name| tool.eq_ignore_ascii_case(name))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_main_argument_is_the_command_then_the_path_then_the_address_then_the_pattern() {
        for (tool, input, expected) in [
            ("Bash", json!({"command": "ls"}), Some("ls")),
            ("exec", json!({"cmd": "ls", "path": "x"}), Some("ls")),
            (
                "shell",
                json!({"command": ["git", "commit", "-m", "it's done"]}),
                Some(r"git commit -m 'it'\''s done'"),
            ),
            ("Bash", json!("ls -l"), Some("ls -l")),
            ("Anything", json!({"command": "ls", "path": "x"}), Some("ls")),
            ("Read", json!({"file_path": "a", "pattern": "b"}), Some("a")),
            ("read", json!({"filePath": "a"}), Some("a")),
            ("Grep", json!({"pattern": "b"}), Some("b")),
            ("WebFetch", json!({"url": "https://x.org", "prompt": "p"}), Some("https://x.org")),
            ("WebFetch", json!({"uri": "https://x.org"}), Some("https://x.org")),
            ("Edit", json!({"path": ["a", "b"]}), Some("a")),
            ("Edit", json!({"path": ["a", 7]}), None),
            ("Edit", json!({"path": []}), None),
            ("Demo", json!({"x": 1}), None),
            ("Demo", json!(null), None),
            ("Demo", json!([1, 2]), None),
            ("Bash", json!({"command": 7}), None),
            ("Bash", json!({"command": ["ls", 7]}), None),
        ] {
            assert_eq!(main_argument(tool, &input).as_deref(), expected, "{tool} {input}");
        }
    }
}
