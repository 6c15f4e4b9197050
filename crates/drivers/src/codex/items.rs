//! Translates the server's items: tools by the names that policy rules know, their arguments and their results. Nothing
//! is remembered here.

use std::path::Path;

use qd_catalog::split_plain_words;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::tool_server::mcp_tool_name;

/// An item: its kind, and the fields of all kinds together, of which each has some.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct CodexItem {
    pub(super) id: String,
    #[serde(rename = "type")]
    pub(super) kind: String,
    text: Option<String>,
    summary: Vec<String>,
    content: Value,
    status: Option<String>,
    command: Option<String>,
    cwd: Option<String>,
    aggregated_output: Option<String>,
    exit_code: Option<i64>,
    changes: Vec<CodexFileChange>,
    server: Option<String>,
    tool: Option<String>,
    arguments: Value,
    result: Value,
    error: Value,
    content_items: Value,
    success: Option<bool>,
    query: Option<String>,
    action: Value,
    results: Value,
    path: Option<String>,
    prompt: Option<String>,
    receiver_thread_ids: Vec<String>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
struct CodexFileChange {
    path: String,
    kind: CodexChangeKind,
    diff: String,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
struct CodexChangeKind {
    #[serde(rename = "type")]
    name: String,
    move_path: Option<String>,
}

/// A tool and its arguments.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct CodexToolUse {
    pub(super) name: String,
    pub(super) input: Value,
}

/// How a tool call ended.
#[derive(Debug, PartialEq)]
pub(super) struct CodexToolResult {
    pub(super) output: Value,
    pub(super) is_error: bool,
}

impl CodexItem {
    /// The text of a message or a plan.
    pub(super) fn text(&self) -> Option<&str> {
        matches!(self.kind.as_str(), "agentMessage" | "plan").then_some(self.text.as_deref()?)
    }

    /// The text of a thought: its summary, or the whole if there is none.
    pub(super) fn reasoning_text(&self) -> Option<String> {
        if self.kind != "reasoning" {
            return None;
        }
        let whole = || Vec::<String>::deserialize(&self.content).unwrap_or_default();
        let parts = if self.summary.is_empty() { whole() } else { self.summary.clone() };
        Some(parts.join("\n\n")).filter(|thought| !thought.is_empty())
    }

    /// Whether the item is a command, which may outlive its turn.
    pub(super) fn is_command(&self) -> bool {
        self.kind == "commandExecution"
    }

    /// Whether the model is called again with the item's result. That holds for tools that Codex itself runs, and not
    /// for those of the model's API.
    pub(super) fn result_returns_to_model(&self) -> bool {
        !matches!(self.kind.as_str(), "webSearch" | "imageGeneration") && self.tool_use().is_some()
    }

    /// The tool and its arguments, if the item is a tool call.
    pub(super) fn tool_use(&self) -> Option<CodexToolUse> {
        let item = self;
        let (name, input) = match self.kind.as_str() {
            "commandExecution" => {
                (BASH.to_owned(), json!({"command": unwrap_shell(item.command.as_deref()?), "cwd": item.cwd}))
            }
            "fileChange" => (EDIT.to_owned(), self.edit_input()),
            "mcpToolCall" => {
                (mcp_tool_name(item.server.as_deref()?, item.tool.as_deref()?), item.arguments.clone())
            }
            "dynamicToolCall" => (item.tool.clone()?, item.arguments.clone()),
            "webSearch" => ("WebSearch".to_owned(), json!({"query": item.query, "action": item.action})),
            "imageView" => ("Read".to_owned(), json!({"path": item.path})),
            "imageGeneration" => ("ImageGeneration".to_owned(), json!({})),
            "collabAgentToolCall" => (
                "Agent".to_owned(),
                json!({"action": item.tool, "prompt": item.prompt, "agents": item.receiver_thread_ids}),
            ),
            _ => return None,
        };
        Some(CodexToolUse { name, input })
    }

    /// The result of the tool call.
    pub(super) fn tool_result(&self) -> CodexToolResult {
        let item = self;
        let status = item.status.as_deref().unwrap_or("completed");
        let output = match self.kind.as_str() {
            // The streamed pieces may lack the first of them; this has all.
            "commandExecution" => {
                json!({"status": status, "exit_code": item.exit_code, "output": item.aggregated_output})
            }
            "mcpToolCall" if !item.error.is_null() => item.error.clone(),
            "mcpToolCall" => item.result.clone(),
            "dynamicToolCall" => item.content_items.clone(),
            "webSearch" => json!({"action": item.action, "results": item.results}),
            _ => json!({"status": status}),
        };
        let is_error = matches!(status, "failed" | "declined" | "interrupted") || item.success == Some(false);
        CodexToolResult { output, is_error }
    }

    /// The input of a patch: the paths that it touches, which the policy judges, and the change to each.
    fn edit_input(&self) -> Value {
        let changes = &self.changes;
        let paths = changes.iter().flat_map(|change| [Some(&change.path), change.kind.move_path.as_ref()]);
        let paths: Vec<&String> = paths.flatten().collect();
        let path = match &paths[..] {
            [only] => json!(only),
            several => json!(several),
        };
        let changes: Vec<Value> = changes.iter().map(CodexFileChange::to_json).collect();
        json!({"path": path, "changes": changes})
    }
}

impl CodexFileChange {
    fn to_json(&self) -> Value {
        let mut change = json!({"path": self.path, "kind": self.kind.name, "diff": self.diff});
        if let Some(to) = &self.kind.move_path {
            change["move_to"] = json!(to);
        }
        change
    }
}

/// The name by which policy rules know commands.
pub(super) const BASH: &str = "Bash";
/// The name by which policy rules know changes of files.
pub(super) const EDIT: &str = "Edit";

/// Unwraps a command from its shell. Codex runs every command through a shell and shows the whole line, such as
/// `/bin/bash -lc 'git status'`, but policy rules are written for the inner command.
pub(super) fn unwrap_shell(command: &str) -> String {
    let is_shell = |word: &str| {
        let name = Path::new(word).file_name().and_then(|name| name.to_str());
        matches!(name, Some("bash" | "sh" | "zsh"))
    };
    match split_plain_words(command).as_deref() {
        Some([program, flag, script]) if is_shell(program) && matches!(flag.as_str(), "-lc" | "-c") => {
            script.clone()
        }
        _ => command.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn item(value: Value) -> CodexItem {
        serde_json::from_value(value).unwrap()
    }

    #[test]
    fn only_a_plain_shell_wrapper_is_removed_from_a_command() {
        for (line, script) in [
            ("/bin/bash -lc 'git status'", "git status"),
            (r#"/bin/bash -lc 'python3 -c "x"'"#, r#"python3 -c "x""#),
            (r#"bash -c "echo 'a' \"b\" \$c""#, r#"echo 'a' "b" $c"#),
            (r"/usr/bin/zsh -lc 'it'\''s'", "it's"),
            ("/bin/bash -lc ls", "ls"),
        ] {
            assert_eq!(unwrap_shell(line), script);
        }
        for line in [
            "git status",
            "/bin/bash -lc 'a' b",
            "/bin/bash -xc 'a'",
            "env /bin/bash -lc a",
            "bash -lc 'a'; rm x",
            r#"bash -lc "$(rm x)""#,
            "bash -lc 'open",
        ] {
            assert_eq!(unwrap_shell(line), line);
        }
    }

    #[test]
    fn a_patch_shows_every_path_that_it_touches() {
        let one = json!({"path": "/w/a", "kind": {"type": "add"}, "diff": "x\n"});
        let patch = |changes: Value| item(json!({"id": "c", "type": "fileChange", "changes": changes}));
        let tool = patch(json!([one])).tool_use().unwrap();
        assert_eq!((tool.name.as_str(), &tool.input["path"]), ("Edit", &json!("/w/a")));
        assert_eq!(tool.input["changes"][0], json!({"path": "/w/a", "kind": "add", "diff": "x\n"}));
        let moved = json!({"path": "/w/b", "kind": {"type": "update", "move_path": "/w/c"}, "diff": ""});
        let tool = patch(json!([one, moved])).tool_use().unwrap();
        assert_eq!(tool.input["path"], json!(["/w/a", "/w/b", "/w/c"]));
        assert_eq!(tool.input["changes"][1]["move_to"], "/w/c");
    }

    #[test]
    fn the_status_of_a_call_decides_how_it_ended_and_not_its_output() {
        let result_of = |kind: &str, fields: Value| {
            let mut value = json!({"id": "c", "type": kind});
            value.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
            item(value).tool_result()
        };
        let failed = json!({"status": "failed", "exitCode": 1, "aggregatedOutput": "fine"});
        let result = result_of("commandExecution", failed);
        assert_eq!(result.output, json!({"status": "failed", "exit_code": 1, "output": "fine"}));
        assert!(result.is_error);
        assert!(result_of("commandExecution", json!({"status": "declined"})).is_error);
        assert!(!result_of("commandExecution", json!({"status": "completed", "exitCode": 0})).is_error);
        assert!(!result_of("fileChange", json!({"status": "completed"})).is_error);
        let refused = result_of("mcpToolCall", json!({"status": "failed", "error": {"message": "no"}}));
        assert_eq!(refused, CodexToolResult { output: json!({"message": "no"}), is_error: true });
    }

    #[test]
    fn mcp_tools_searches_and_agents_have_names_and_thoughts_have_text() {
        let name = |value: Value| item(value).tool_use().map(|tool| tool.name);
        let call =
            json!({"id": "c", "type": "mcpToolCall", "server": "s", "tool": "t", "arguments": {"x": 1}});
        assert_eq!(name(call.clone()).as_deref(), Some("mcp__s__t"));
        assert_eq!(item(call).tool_use().unwrap().input, json!({"x": 1}));
        assert_eq!(name(json!({"id": "c", "type": "webSearch", "query": "q"})).as_deref(), Some("WebSearch"));
        let agent = json!({"id": "c", "type": "collabAgentToolCall", "tool": "spawnAgent", "prompt": "p"});
        assert_eq!(name(agent).as_deref(), Some("Agent"));
        assert_eq!(name(json!({"id": "c", "type": "sleep", "durationMs": 3})), None);
        let thought = json!({"id": "r", "type": "reasoning", "summary": ["a", "b"], "content": []});
        assert_eq!(item(thought).reasoning_text().as_deref(), Some("a\n\nb"));
        let raw = json!({"id": "r", "type": "reasoning", "summary": [], "content": ["c"]});
        assert_eq!(item(raw).reasoning_text().as_deref(), Some("c"));
    }
}
