//! What a tool call would do, line by line: the whole command, the difference that an edit makes, the whole content of
//! a new file, and every other argument. Nothing is left out. Colours and the width of the screen are not known here.

use serde_json::{Map, Value};
use similar::{ChangeTag, TextDiff};

/// Arguments that hold a command line.
const COMMAND_KEYS: [&str; 3] = ["command", "cmd", "script"];
/// Arguments that say where something happens. They come first.
const PLACE_KEYS: [&str; 6] = ["file_path", "path", "notebook_path", "cwd", "url", "uri"];
/// Arguments that replace one text by another.
const REPLACEMENT_KEYS: [(&str, &str); 4] =
    [("old_string", "new_string"), ("old_str", "new_str"), ("old_text", "new_text"), ("oldText", "newText")];
/// Arguments that hold the whole content of a file.
const CONTENT_KEYS: [&str; 4] = ["content", "contents", "file_text", "new_source"];
/// Arguments that hold a patch.
const PATCH_KEYS: [&str; 3] = ["diff", "unified_diff", "patch"];
/// Arguments that hold several changes, each with arguments like those of a call.
const CHANGES_KEYS: [&str; 2] = ["edits", "changes"];
/// How a patch begins in the format of `apply_patch`.
const PATCH_START: &str = "*** Begin Patch";

/// How a line is to be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AskLineKind {
    /// An argument with its name.
    Argument,
    /// A line of a command or another text.
    Verbatim,
    /// A line that would be removed.
    Removed,
    /// A line that would be added.
    Added,
    /// A line that would stay.
    Unchanged,
}

/// One line of what a tool call would do. The text may hold any characters except newlines.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct AskInputLine {
    pub(crate) kind: AskLineKind,
    pub(crate) text: String,
}

/// All lines of an input.
pub(crate) fn describe_input(input: &Value) -> Vec<AskInputLine> {
    let mut lines = Vec::new();
    match input {
        Value::Null => {}
        Value::String(text) => push_text(&mut lines, text),
        Value::Object(map) => push_arguments(&mut lines, map),
        other => push(&mut lines, AskLineKind::Verbatim, other.to_string()),
    }
    lines
}

/// The command of an input as one text. The parts of an array are quoted as a shell would need them.
pub(crate) fn command_text(value: &Value) -> Option<String> {
    match value {
        Value::String(command) => Some(command.clone()),
        Value::Array(parts) if !parts.is_empty() => {
            let words: Option<Vec<String>> = parts.iter().map(|part| part.as_str().map(quote_word)).collect();
            words.map(|words| words.join(" "))
        }
        _ => None,
    }
}

fn push_arguments(lines: &mut Vec<AskInputLine>, map: &Map<String, Value>) {
    let mut shown: Vec<&str> = Vec::new();
    for key in PLACE_KEYS {
        if let Some(value) = map.get(key) {
            push_argument(lines, key, value);
            shown.push(key);
        }
    }
    for key in COMMAND_KEYS {
        if let Some(command) = map.get(key).and_then(command_text) {
            push_text(lines, &command);
            shown.push(key);
        }
    }
    for (old, new) in REPLACEMENT_KEYS {
        if let (Some(before), Some(Value::String(after))) = (map.get(old).map(text_or_nothing), map.get(new))
            && let Some(before) = before
        {
            push_difference(lines, before, after);
            shown.extend([old, new]);
        }
    }
    for (key, value) in map.iter().filter(|(key, _)| !shown.contains(&key.as_str())) {
        push_argument(lines, key, value);
    }
}

/// A text, or nothing instead of null. `None` if it is something else.
fn text_or_nothing(value: &Value) -> Option<&str> {
    match value {
        Value::Null => Some(""),
        Value::String(text) => Some(text),
        _ => None,
    }
}

fn push_argument(lines: &mut Vec<AskInputLine>, key: &str, value: &Value) {
    match value {
        Value::String(text) if CONTENT_KEYS.contains(&key) && !text.is_empty() => {
            push_difference(lines, "", text)
        }
        Value::String(text) if PATCH_KEYS.contains(&key) || text.starts_with(PATCH_START) => {
            push(lines, AskLineKind::Argument, format!("{key}:"));
            push_patch(lines, text);
        }
        Value::String(text) if text.contains('\n') => {
            push(lines, AskLineKind::Argument, format!("{key}:"));
            push_text(lines, text);
        }
        Value::String(text) => push(lines, AskLineKind::Argument, format!("{key}: {text}")),
        Value::Array(changes) if CHANGES_KEYS.contains(&key) => {
            for (i, change) in changes.iter().enumerate() {
                let number = format!("{key} ({} of {}):", i + 1, changes.len());
                push(lines, AskLineKind::Argument, number);
                lines.extend(describe_input(change));
            }
        }
        Value::Object(changes) if CHANGES_KEYS.contains(&key) => {
            for (path, change) in changes {
                push(lines, AskLineKind::Argument, format!("{key} of {}:", one_line(path)));
                lines.extend(describe_input(change));
            }
        }
        // A change of a file in the format of codex: `{"add": {"content": …}}`, `{"update": {"unified_diff": …}}`.
        Value::Object(change) if matches!(key, "add" | "update" | "delete") => {
            push(lines, AskLineKind::Argument, format!("{key}:"));
            push_arguments(lines, change);
        }
        other => push(lines, AskLineKind::Argument, format!("{key}: {other}")),
    }
}

fn push(lines: &mut Vec<AskInputLine>, kind: AskLineKind, text: String) {
    // A key could hold a newline.
    lines.push(AskInputLine { kind, text: one_line(&text) });
}

/// The text with its newlines made visible, so it stays one line.
fn one_line(text: &str) -> String {
    text.replace('\n', "\\n")
}

fn push_text(lines: &mut Vec<AskInputLine>, text: &str) {
    for line in split_lines(text) {
        push(lines, AskLineKind::Verbatim, line.to_owned());
    }
}

/// Lines without their newlines. Unlike [`str::lines`] it keeps carriage returns, which must be seen.
fn split_lines(text: &str) -> impl Iterator<Item = &str> {
    text.strip_suffix('\n').unwrap_or(text).split('\n')
}

fn push_difference(lines: &mut Vec<AskInputLine>, old: &str, new: &str) {
    let (old, new): (Vec<&str>, Vec<&str>) = (changed_lines(old), changed_lines(new));
    for change in TextDiff::from_slices(&old, &new).iter_all_changes() {
        let kind = match change.tag() {
            ChangeTag::Delete => AskLineKind::Removed,
            ChangeTag::Insert => AskLineKind::Added,
            ChangeTag::Equal => AskLineKind::Unchanged,
        };
        push(lines, kind, change.value().to_owned());
    }
}

/// The lines of one side of a difference. An empty text has none.
fn changed_lines(text: &str) -> Vec<&str> {
    if text.is_empty() { Vec::new() } else { split_lines(text).collect() }
}

fn push_patch(lines: &mut Vec<AskInputLine>, patch: &str) {
    for line in split_lines(patch) {
        let (kind, text) = match line.as_bytes() {
            [b'+', b'+', b'+', ..] | [b'-', b'-', b'-', ..] => (AskLineKind::Verbatim, line),
            [b'+', ..] => (AskLineKind::Added, &line[1..]),
            [b'-', ..] => (AskLineKind::Removed, &line[1..]),
            [b' ', ..] => (AskLineKind::Unchanged, &line[1..]),
            _ => (AskLineKind::Verbatim, line),
        };
        push(lines, kind, text.to_owned());
    }
}

/// The word as it would be typed in a shell.
fn quote_word(word: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "_-./:=@%+,".contains(c);
    if !word.is_empty() && word.chars().all(is_plain) {
        return word.to_owned();
    }
    format!("'{}'", word.replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    /// The lines with a character for their kind.
    fn shown(input: Value) -> String {
        let marked = |line: &AskInputLine| {
            let mark = match line.kind {
                AskLineKind::Argument => ':',
                AskLineKind::Verbatim => '|',
                AskLineKind::Removed => '-',
                AskLineKind::Added => '+',
                AskLineKind::Unchanged => ' ',
            };
            format!("{mark}{}\n", line.text)
        };
        describe_input(&input).iter().map(marked).collect()
    }

    #[test]
    fn every_line_of_a_command_and_every_other_argument_is_shown() {
        assert_eq!(
            shown(json!({"command": "cd /\n\nrm -rf x\n", "description": "Tidies up", "timeout": 3})),
            "|cd /\n|\n|rm -rf x\n:description: Tidies up\n:timeout: 3\n"
        );
        assert_eq!(shown(json!({"cmd": ["rm", "-rf", "a b", ""]})), "|rm -rf 'a b' ''\n");
        assert_eq!(shown(json!({"cmd": ["rm", 7]})), ":cmd: [\"rm\",7]\n");
        assert_eq!(shown(json!("a\r\nb")), "|a\r\n|b\n");
        assert_eq!(
            (shown(Value::Null), shown(json!({})), shown(json!([1]))),
            (String::new(), String::new(), "|[1]\n".to_owned())
        );
    }

    #[test]
    fn an_edit_shows_the_lines_that_it_removes_and_adds() {
        let edit = json!({"file_path": "a.rs", "old_string": "one\ntwo\nthree", "new_string": "one\n2\nthree",
            "replace_all": true});
        assert_eq!(shown(edit), ":file_path: a.rs\n one\n-two\n+2\n three\n:replace_all: true\n");
        let edits = json!({"path": "a", "edits": [
            {"old_string": "x", "new_string": ""},
            {"old_string": "", "new_string": "y"},
        ]});
        assert_eq!(shown(edits), ":path: a\n:edits (1 of 2):\n-x\n:edits (2 of 2):\n+y\n");
        let new_file = json!({"path": "a", "old_text": null, "new_text": "x\n"});
        assert_eq!(shown(new_file), ":path: a\n+x\n");
        let line_ends = json!({"old_string": "x\r\n", "new_string": "x\n"});
        assert_eq!(shown(line_ends), "-x\r\n+x\n");
    }

    #[test]
    fn a_new_file_is_shown_whole() {
        let content: String = (1..=500).map(|n| format!("line {n}\n")).collect();
        let lines = describe_input(&json!({"file_path": "a", "content": content}));
        assert_eq!(lines.len(), 501);
        assert!(lines[1..].iter().all(|line| line.kind == AskLineKind::Added));
        assert_eq!(shown(json!({"file_path": "a", "content": ""})), ":file_path: a\n:content: \n");
    }

    #[test]
    fn patches_are_shown_line_by_line() {
        let patch = "*** Begin Patch\n*** Update File: a\n@@\n-x\n+y\n z\n*** End Patch";
        assert_eq!(
            shown(json!({"input": patch})),
            ":input:\n|*** Begin Patch\n|*** Update File: a\n|@@\n-x\n+y\n z\n|*** End Patch\n"
        );
        let changes = json!({"path": "a", "changes": [{"diff": "@@ -1 +1 @@\n-x\n+y\n", "kind": "update", "path": "a"}]});
        assert_eq!(
            shown(changes),
            ":path: a\n:changes (1 of 1):\n:path: a\n:diff:\n|@@ -1 +1 @@\n-x\n+y\n:kind: update\n"
        );
        let older = json!({"changes": {"/w/a": {"add": {"content": "x\n"}}}});
        assert_eq!(shown(older), ":changes of /w/a:\n:add:\n+x\n");
    }
}
