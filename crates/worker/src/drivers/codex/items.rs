//! What the server's items are to a session: tools by the names that rules know, their arguments, and what they gave.
//! Nothing is remembered here.

use std::path::Path;

use qd_catalog::split_plain_words;
use serde::Deserialize;
use serde_json::{Value, json};

/// An item, as far as somebody wants to know: its kind, and the fields of all kinds together, of which each has some.
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

/// A change of one file.
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
    /// The words of a message or a plan.
    pub(super) fn text(&self) -> Option<&str> {
        matches!(self.kind.as_str(), "agentMessage" | "plan").then_some(self.text.as_deref()?)
    }

    /// The words of a thought: its summary, or else all of it.
    pub(super) fn thought(&self) -> Option<String> {
        if self.kind != "reasoning" {
            return None;
        }
        let whole = || Vec::<String>::deserialize(&self.content).unwrap_or_default();
        let parts = if self.summary.is_empty() { whole() } else { self.summary.clone() };
        Some(parts.join("\n\n")).filter(|thought| !thought.is_empty())
    }

    /// Whether it is a command, which may outlive its turn.
    pub(super) fn is_command(&self) -> bool {
        self.kind == "commandExecution"
    }

    /// Whether the model is called again with what comes of it: Codex itself does it, and not the model's server.
    pub(super) fn result_returns_to_model(&self) -> bool {
        !matches!(self.kind.as_str(), "webSearch" | "imageGeneration") && self.tool_use().is_some()
    }

    /// The tool, if it is a call of one.
    pub(super) fn tool_use(&self) -> Option<CodexToolUse> {
        let f = self;
        let (name, input) = match self.kind.as_str() {
            "commandExecution" => {
                (BASH.to_owned(), json!({"command": unwrap_shell(f.command.as_deref()?), "cwd": f.cwd}))
            }
            "fileChange" => (EDIT.to_owned(), self.edit_input()),
            "mcpToolCall" => (mcp_tool_name(f.server.as_deref()?, f.tool.as_deref()?), f.arguments.clone()),
            "dynamicToolCall" => (f.tool.clone()?, f.arguments.clone()),
            "webSearch" => ("WebSearch".to_owned(), json!({"query": f.query, "action": f.action})),
            "imageView" => ("Read".to_owned(), json!({"path": f.path})),
            "imageGeneration" => ("ImageGeneration".to_owned(), json!({})),
            "collabAgentToolCall" => (
                "Agent".to_owned(),
                json!({"action": f.tool, "prompt": f.prompt, "agents": f.receiver_thread_ids}),
            ),
            _ => return None,
        };
        Some(CodexToolUse { name, input })
    }

    /// How its call ended.
    pub(super) fn tool_result(&self) -> CodexToolResult {
        let f = self;
        let status = f.status.as_deref().unwrap_or("completed");
        let output = match self.kind.as_str() {
            // The pieces that were told on the way may lack the first of them; this has all.
            "commandExecution" => {
                json!({"status": status, "exit_code": f.exit_code, "output": f.aggregated_output})
            }
            "mcpToolCall" if !f.error.is_null() => f.error.clone(),
            "mcpToolCall" => f.result.clone(),
            "dynamicToolCall" => f.content_items.clone(),
            "webSearch" => json!({"action": f.action, "results": f.results}),
            _ => json!({"status": status}),
        };
        let is_error = matches!(status, "failed" | "declined" | "interrupted") || f.success == Some(false);
        CodexToolResult { output, is_error }
    }

    /// A patch: the paths that it touches, which rules are tried on, and what it does to each.
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
        let mut shown = json!({"path": self.path, "kind": self.kind.name, "diff": self.diff});
        if let Some(to) = &self.kind.move_path {
            shown["move_to"] = json!(to);
        }
        shown
    }
}

/// The name under which rules know commands.
pub(super) const BASH: &str = "Bash";
/// The name under which rules know changes of files.
pub(super) const EDIT: &str = "Edit";

/// The name under which rules know a tool of a server.
pub(super) fn mcp_tool_name(server: &str, tool: &str) -> String {
    format!("mcp__{server}__{tool}")
}

/// What is run: Codex hands every command to a shell and shows the whole of that, `/bin/bash -lc 'git status'`. Rules
/// are written for what the shell is to do.
pub(super) fn unwrap_shell(command: &str) -> String {
    let shell = |word: &str| {
        let name = Path::new(word).file_name().and_then(|name| name.to_str());
        matches!(name, Some("bash" | "sh" | "zsh"))
    };
    match split_plain_words(command).as_deref() {
        Some([program, flag, script]) if shell(program) && matches!(flag.as_str(), "-lc" | "-c") => {
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
    fn a_command_is_what_its_shell_is_to_do_and_nothing_else_is_taken_off() {
        for (shown, script_of_it) in [
            ("/bin/bash -lc 'git status'", "git status"),
            (r#"/bin/bash -lc 'python3 -c "x"'"#, r#"python3 -c "x""#),
            (r#"bash -c "echo 'a' \"b\" \$c""#, r#"echo 'a' "b" $c"#),
            (r"/usr/bin/zsh -lc 'it'\''s'", "it's"),
            ("/bin/bash -lc ls", "ls"),
        ] {
            assert_eq!(unwrap_shell(shown), script_of_it);
        }
        for whole in [
            "git status",
            "/bin/bash -lc 'a' b",
            "/bin/bash -xc 'a'",
            "env /bin/bash -lc a",
            "bash -lc 'a'; rm x",
            r#"bash -lc "$(rm x)""#,
            "bash -lc 'open",
        ] {
            assert_eq!(unwrap_shell(whole), whole);
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
    fn a_call_ends_as_its_status_says_and_never_as_its_words_do() {
        let ended = |kind: &str, more: Value| {
            let mut value = json!({"id": "c", "type": kind});
            value.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            item(value).tool_result()
        };
        let failed = json!({"status": "failed", "exitCode": 1, "aggregatedOutput": "fine"});
        let ending = ended("commandExecution", failed);
        assert_eq!(ending.output, json!({"status": "failed", "exit_code": 1, "output": "fine"}));
        assert!(ending.is_error);
        assert!(ended("commandExecution", json!({"status": "declined"})).is_error);
        assert!(!ended("commandExecution", json!({"status": "completed", "exitCode": 0})).is_error);
        assert!(!ended("fileChange", json!({"status": "completed"})).is_error);
        let refused = ended("mcpToolCall", json!({"status": "failed", "error": {"message": "no"}}));
        assert_eq!(refused, CodexToolResult { output: json!({"message": "no"}), is_error: true });
    }

    #[test]
    fn tools_of_servers_searches_and_agents_have_names_and_thoughts_have_words() {
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
        assert_eq!(item(thought).thought().as_deref(), Some("a\n\nb"));
        let raw = json!({"id": "r", "type": "reasoning", "summary": [], "content": ["c"]});
        assert_eq!(item(raw).thought().as_deref(), Some("c"));
    }
}
