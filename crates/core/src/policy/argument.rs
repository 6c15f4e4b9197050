//! Finds the arguments of a tool call that show what it is about to do. Agents name them differently; all names known
//! to us are listed here. Nothing is judged in this module.

use std::borrow::Cow;

use serde_json::{Value, json};

use super::command_line;
use super::patch;
use super::path;
use super::tool::{ToolPurpose, tool_purpose};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ArgumentKind {
    /// A command line for a shell.
    Command,
    /// A file or directory.
    Path,
    /// A URL.
    Address,
    /// A search pattern, or a text of unknown meaning.
    Other,
}

/// One argument that matters for the judgement.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ToolArgument<'i> {
    pub(super) kind: ArgumentKind,
    pub(super) text: Cow<'i, str>,
}

/// All arguments that matter for the judgement, the main one first.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ToolArguments<'i> {
    pub(super) list: Vec<ToolArgument<'i>>,
    /// One of them has a type that we cannot read, such as a path that is not a string.
    pub(super) unreadable: bool,
    /// The unreadable argument is a command.
    pub(super) unreadable_command: bool,
    /// The directory that the command would run in, if the call names one.
    pub(super) directory: Option<&'i str>,
}

/// The argument that rules are matched against: the command, otherwise the path, the address or the search pattern. A
/// command given as a list of words is returned as the equivalent command line.
pub fn main_argument<'i>(tool: &str, input: &'i Value) -> Option<Cow<'i, str>> {
    find_arguments(tool, input).list.into_iter().next().map(|argument| argument.text)
}

/// The input of a call of which only the main argument is known, built so that it is judged like the whole call.
/// `None` if the tool is not known, since then its argument names are not known either.
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
        // Their main argument is neither a path nor a command, or the tool is not known.
        ToolPurpose::AgentInternal | ToolPurpose::OtherAction | ToolPurpose::UnverifiedRead => return None,
    })
}

const COMMAND_KEYS: &[&str] = &["command", "cmd"];
/// More names for the command, which only count if the tool's name says that it runs commands.
const SHELL_KEYS: &[&str] = &["command_line", "commandLine", "script"];
/// Text typed into a running command.
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
    "fileName",
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
/// Values of an editor's `command`; any other value is treated as a command line.
const EDITOR_COMMANDS: &[&str] = &["view", "create", "str_replace", "insert", "undo_edit", "edit"];

/// The arguments of a call that matter for the judgement.
///
/// A call may bring several of them, and the tool uses those that it knows: an ignored `command` must not hide the
/// `path` that is used. So all of them are returned, and a rule that allows the call has to match every one. For a
/// tool known to run commands, only the command counts.
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

/// The operation that an editor tool with several operations is told to perform.
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

    /// Collects the files of a patch or of a list of changes.
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
            // Either an object keyed by path, or a list of changes that each have a path.
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

    /// Collects addresses in a prompt, for tools that take them that way.
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
    fn an_input_made_from_a_main_argument_has_it_as_its_main_argument() {
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
            ("Edit", json!({"fileName": "a", "diff": "+b"}), Some("a")),
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
