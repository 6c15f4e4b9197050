//! Which files a tool call changes, as far as its name and input say. For search, not for judging: a command may change
//! any file, and none of those are listed here.

use serde_json::Value;

use super::argument::{ArgumentKind, editor_command, find_arguments};
use super::tool::{ToolPurpose, tool_purpose};

/// The files that a call of a tool for writing, editing, moving, removing or patching names. Empty for all other tools.
pub fn changed_paths(tool: &str, input: &Value) -> Vec<String> {
    let purpose = tool_purpose(tool);
    let changes = match purpose {
        Some(ToolPurpose::WriteFiles | ToolPurpose::RemoveFiles | ToolPurpose::ApplyPatch) => true,
        Some(ToolPurpose::EditFiles) => editor_command(purpose, input) != Some("view"),
        _ => false,
    };
    if !changes {
        return Vec::new();
    }
    let paths = find_arguments(tool, input).list.into_iter();
    paths
        .filter(|argument| argument.kind == ArgumentKind::Path)
        .map(|argument| argument.text.into_owned())
        .collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn tools_that_change_files_name_them_and_others_name_none() {
        for (tool, input, expected) in [
            ("Write", json!({ "file_path": "src/a.rs", "content": "x" }), vec!["src/a.rs"]),
            ("move_file", json!({ "source": "a", "destination": "b" }), vec!["a", "b"]),
            ("apply_patch", json!({ "input": "*** Update File: c.rs\n@@\n" }), vec!["c.rs"]),
            ("str_replace_editor", json!({ "command": "create", "path": "d" }), vec!["d"]),
            ("str_replace_editor", json!({ "command": "view", "path": "d" }), vec![]),
            ("Read", json!({ "file_path": "src/a.rs" }), vec![]),
            ("Bash", json!({ "command": "touch e" }), vec![]),
            ("frobnicate", json!({ "path": "f" }), vec![]),
        ] {
            assert_eq!(changed_paths(tool, &input), expected, "{tool} {input}");
        }
    }
}
