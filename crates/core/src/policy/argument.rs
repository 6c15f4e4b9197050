//! Which of a tool's arguments say what it is about to do. Agents name them differently; the names known to us are
//! all here. Nothing is judged in this room.

use std::borrow::Cow;

use serde_json::{Value, json};

use super::command_line;
use super::patch;
use super::path;
use super::tool::{ToolPurpose, tool_purpose};

/// What an argument is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ArgumentKind {
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
pub(super) struct ToolArgument<'i> {
    pub(super) kind: ArgumentKind,
    pub(super) text: Cow<'i, str>,
}

/// All telling arguments, the main one first.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ToolArguments<'i> {
    pub(super) list: Vec<ToolArgument<'i>>,
    /// Whether one is there that we cannot read, such as a path that is not text.
    pub(super) unreadable: bool,
    /// Whether that one is a command.
    pub(super) unreadable_command: bool,
    /// Where a command is to be run, if the call says so.
    pub(super) directory: Option<&'i str>,
}

/// The argument that rules are tried on: the command, else the path, else the address, else what is looked for. A
/// command given as a list of words is shown as the line that gives a shell these words.
pub fn main_argument<'i>(tool: &str, input: &'i Value) -> Option<Cow<'i, str>> {
    find_arguments(tool, input).list.into_iter().next().map(|argument| argument.text)
}

/// The arguments of a call of which only the main one is known, so that they are judged as the whole call would be;
/// `None` if nothing is known of the tool, and so of its arguments either.
pub fn input_from_main_argument(tool: &str, text: &str) -> Option<Value> {
    Some(match tool_purpose(tool)? {
        ToolPurpose::RunCommand => json!({ "command": text }),
        ToolPurpose::TypeInput => json!({ "chars": text }),
        ToolPurpose::FetchNetwork if path::is_address(text) => json!({ "url": text }),
        ToolPurpose::FetchNetwork => json!({ "query": text }),
        ToolPurpose::ReadFiles
        | ToolPurpose::WriteFiles
        | ToolPurpose::RemoveFiles
        | ToolPurpose::ApplyPatch
        | ToolPurpose::EditFiles => json!({ "path": text }),
        // What they are told is no path and no command, or they are not known at all.
        ToolPurpose::AgentInternal | ToolPurpose::OtherAction | ToolPurpose::UnverifiedRead => return None,
    })
}

const COMMAND_KEYS: &[&str] = &["command", "cmd"];
/// Further names of the command, which count only where the tool's name says that it runs one.
const SHELL_KEYS: &[&str] = &["command_line", "commandLine", "script"];
/// What is typed into a command that runs.
const TYPED_KEYS: &[&str] = &["chars", "input", "text", "data"];
const DIRECTORY_KEYS: &[&str] =
    &["cwd", "workdir", "working_directory", "workingDirectory", "directory", "dir_path"];
const PATH_KEYS: &[&str] = &[
    "path",
    "file_path",
    "filePath",
    "filepath",
    "absolute_path",
    "absolutePath",
    "relative_path",
    "notebook_path",
    "target_file",
    "directory",
    "dir_path",
    "file",
    "filename",
    "paths",
    "file_paths",
    "files",
];
/// Both ends of a move.
const MOVE_KEYS: &[&str] =
    &["source", "destination", "from", "to", "src", "dst", "old_path", "new_path", "oldPath", "newPath"];
const PATCH_KEYS: &[&str] = &["patch", "patchText", "patch_text", "input", "diff"];
const ADDRESS_KEYS: &[&str] = &["url", "uri", "urls"];
const OTHER_KEYS: &[&str] = &["pattern", "query"];
/// What an editor's `command` may be; anything else there is a command after all.
const EDITOR_COMMANDS: &[&str] = &["view", "create", "str_replace", "insert", "undo_edit", "edit"];

/// The telling arguments of a call.
///
/// A call may bring several, and a tool reads those it knows: a `command` beside a `path` must not stand in for the
/// path. So all of them are given, and whoever allows something has to look at every one. A tool that is known to run
/// commands looks at nothing but the command.
pub(super) fn find_arguments<'i>(tool: &str, input: &'i Value) -> ToolArguments<'i> {
    let purpose = tool_purpose(tool);
    let mut found =
        ToolArguments { list: Vec::new(), unreadable: false, unreadable_command: false, directory: None };
    if let Value::String(text) = input {
        let kind = match purpose {
            Some(ToolPurpose::RunCommand | ToolPurpose::TypeInput) => ArgumentKind::Command,
            Some(ToolPurpose::ApplyPatch) => {
                found.push_patched_files(text);
                return found;
            }
            _ if path::is_address(text) => ArgumentKind::Address,
            _ => ArgumentKind::Other,
        };
        found.list.push(ToolArgument { kind, text: Cow::Borrowed(text) });
        return found;
    }
    if editor_command(purpose, input).is_none() {
        found.collect(input, COMMAND_KEYS, ArgumentKind::Command);
    }
    match purpose {
        Some(ToolPurpose::RunCommand) => {
            found.collect(input, SHELL_KEYS, ArgumentKind::Command);
            found.directory = DIRECTORY_KEYS.iter().find_map(|key| input.get(key)?.as_str());
            return found;
        }
        Some(ToolPurpose::TypeInput) => {
            found.collect(input, TYPED_KEYS, ArgumentKind::Command);
            return found;
        }
        Some(ToolPurpose::ApplyPatch) => found.collect_patches(input),
        Some(ToolPurpose::RemoveFiles) => found.collect(input, MOVE_KEYS, ArgumentKind::Path),
        _ => {}
    }
    found.collect(input, PATH_KEYS, ArgumentKind::Path);
    found.collect(input, ADDRESS_KEYS, ArgumentKind::Address);
    if purpose == Some(ToolPurpose::FetchNetwork) && found.list.is_empty() {
        found.collect_prompt_addresses(input);
    }
    if found.list.is_empty() && !found.unreadable {
        found.collect(input, OTHER_KEYS, ArgumentKind::Other);
    }
    found
}

/// What an editor with several verbs is told to do.
pub(super) fn editor_command(purpose: Option<ToolPurpose>, input: &Value) -> Option<&str> {
    let word = input.get("command")?.as_str()?;
    (purpose == Some(ToolPurpose::EditFiles) && EDITOR_COMMANDS.contains(&word)).then_some(word)
}

impl<'i> ToolArguments<'i> {
    fn collect(&mut self, input: &'i Value, keys: &[&str], kind: ArgumentKind) {
        for value in keys.iter().filter_map(|key| input.get(key)) {
            match (kind, value) {
                (_, Value::Null) => {}
                (ArgumentKind::Command, Value::Array(words)) => match as_texts(words) {
                    Some(words) => {
                        let text = Cow::Owned(command_line::join(&words));
                        self.list.push(ToolArgument { kind, text });
                    }
                    None => self.mark_unreadable(kind),
                },
                (ArgumentKind::Path | ArgumentKind::Address, Value::Array(items)) => match as_texts(items) {
                    Some(items) => items.into_iter().for_each(|text| self.push(kind, text)),
                    None => self.mark_unreadable(kind),
                },
                (kind, Value::String(text)) => self.push(kind, text),
                _ => self.mark_unreadable(kind),
            }
        }
    }

    fn push(&mut self, kind: ArgumentKind, text: &'i str) {
        let kind =
            if kind == ArgumentKind::Path && path::is_address(text) { ArgumentKind::Address } else { kind };
        self.list.push(ToolArgument { kind, text: Cow::Borrowed(text) });
    }

    /// The files of a patch, or of a list of changes.
    fn collect_patches(&mut self, input: &'i Value) {
        for value in PATCH_KEYS.iter().filter_map(|key| input.get(key)) {
            match value {
                Value::Null => {}
                Value::String(text) => self.push_patched_files(text),
                _ => self.mark_unreadable(ArgumentKind::Path),
            }
        }
        match input.get("changes") {
            None | Some(Value::Null) => {}
            // By path, or each with its path.
            Some(Value::Object(changes)) => {
                for (file, change) in changes {
                    self.push(ArgumentKind::Path, file);
                    self.collect(change, &["move_path", "movePath"], ArgumentKind::Path);
                }
            }
            Some(Value::Array(changes)) => {
                for change in changes {
                    if change.get("path").is_none() {
                        self.mark_unreadable(ArgumentKind::Path);
                    }
                    self.collect(change, &["path", "move_path", "movePath"], ArgumentKind::Path);
                }
            }
            Some(_) => self.mark_unreadable(ArgumentKind::Path),
        }
    }

    fn push_patched_files(&mut self, text: &'i str) {
        let files = patch::patched_files(text);
        if files.is_empty() {
            self.mark_unreadable(ArgumentKind::Path);
        }
        files.into_iter().for_each(|file| self.push(ArgumentKind::Path, file));
    }

    /// Addresses in a prompt, for tools that take them so.
    fn collect_prompt_addresses(&mut self, input: &'i Value) {
        let Some(prompt) = input.get("prompt").and_then(Value::as_str) else { return };
        let edges: &[char] = &['(', ')', '<', '>', '"', '\'', '`', ',', ';', '.'];
        let words = prompt.split_whitespace().map(|word| word.trim_matches(edges));
        words.filter(|word| path::is_address(word)).for_each(|word| self.push(ArgumentKind::Address, word));
    }
}

impl ToolArguments<'_> {
    fn mark_unreadable(&mut self, kind: ArgumentKind) {
        self.unreadable = true;
        self.unreadable_command |= kind == ArgumentKind::Command;
    }
}

fn as_texts(values: &[Value]) -> Option<Vec<&str>> {
    values.iter().map(Value::as_str).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn what_is_made_of_a_main_argument_has_it_as_its_main_argument() {
        for (tool, text) in [
            ("Bash", "rm -rf /"),
            ("write_stdin", "ls\n"),
            ("Write", "/etc/passwd"),
            ("apply_patch", "a.rs"),
            ("str_replace_editor", "a.rs"),
            ("Delete", "."),
            ("Grep", "src"),
            ("WebFetch", "https://x.org"),
            ("WebSearch", "weather"),
        ] {
            let input = input_from_main_argument(tool, text).unwrap();
            assert_eq!(main_argument(tool, &input).as_deref(), Some(text), "{tool}");
        }
        assert_eq!(input_from_main_argument("Deploy", "prod"), None);
    }

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
            ("write_stdin", json!({"session_id": 1, "chars": "ls\n"}), Some("ls\n")),
            ("str_replace_editor", json!({"command": "view", "path": "a"}), Some("a")),
            ("str_replace_editor", json!({"command": "rm x", "path": "a"}), Some("rm x")),
            ("apply_patch", json!({"input": "*** Add File: a\n+x"}), Some("a")),
            ("apply_patch", json!("*** Add File: a\n+x"), Some("a")),
            ("fileChange", json!({"changes": [{"path": "a", "kind": "add"}]}), Some("a")),
            ("fileChange", json!({"changes": {"a": {"type": "delete"}}}), Some("a")),
            ("read_many_files", json!({"paths": ["a", "b"]}), Some("a")),
            ("Move", json!({"source": "a", "destination": "b"}), Some("a")),
            ("web_fetch", json!({"prompt": "read (https://x.org/a)."}), Some("https://x.org/a")),
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
