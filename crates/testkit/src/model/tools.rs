//! Chooses the agent's tool for a scripted call, and the arguments. Tools are known by the names that agents give
//! them. Other required arguments are filled in from the schema.

use serde_json::{Map, Value, json};

use super::request::ModelTool;
use super::responses::TOOL_SEARCH;

#[derive(Debug, Clone, PartialEq)]
pub(super) struct ModelToolCall {
    pub(super) name: String,
    pub(super) args: Value,
}

/// The name of Quarterdeck's own MCP server.
const OUR_SERVER: &str = "quarterdeck";

/// The names of tools that run a line of shell, the likeliest first.
const SHELL_TOOLS: [&str; 8] = [
    "Bash",
    "bash",
    "run_shell_command",
    "exec_command",
    "shell_command",
    "shell",
    "execute_command",
    "terminal",
];

/// The names of tools that read a file.
const READ_TOOLS: [&str; 5] = ["Read", "read", "read_file", "view", "cat"];

/// The names of tools that write a whole file.
const WRITE_TOOLS: [&str; 4] = ["Write", "write", "write_file", "create"];

/// The names of tools that ask the user a question.
const QUESTION_TOOLS: [&str; 5] =
    ["AskUserQuestion", "request_user_input", "question", "ask_user_question", "ask_user"];

/// The names of tools that write down the agent's whole to-do list.
const TODO_TOOLS: [&str; 5] = ["TodoWrite", "todowrite", "todo_write", "write_todos", "update_plan"];

/// The rights that a shell call asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ShellRights {
    /// More than the sandbox gives, if the tool supports it. This makes Codex ask for approval.
    Escalated,
    Plain,
}

/// Runs a line of shell.
pub(super) fn shell_call(tools: &[ModelTool], command: &str, rights: ShellRights) -> Option<ModelToolCall> {
    let tool = find_tool(tools, &SHELL_TOOLS)?;
    let properties = &tool.schema["properties"];
    let mut args = Map::new();
    let key = if properties.get("cmd").is_some() { "cmd" } else { "command" };
    let is_array = properties[key]["type"] == "array";
    args.insert(key.into(), if is_array { json!(["bash", "-lc", command]) } else { json!(command) });
    if properties.get("description").is_some() {
        args.insert("description".into(), json!("scripted"));
    }
    if rights == ShellRights::Escalated && properties.get("sandbox_permissions").is_some() {
        args.insert("sandbox_permissions".into(), json!("require_escalated"));
        args.insert("justification".into(), json!("the script wants it"));
    }
    Some(tool.call_with(args))
}

/// Reads a file, by the shell if there is no tool for it.
pub(super) fn read_call(tools: &[ModelTool], path: &str) -> Option<ModelToolCall> {
    let Some(tool) = find_tool(tools, &READ_TOOLS) else {
        return shell_call(tools, &format!("cat {path}"), ShellRights::Plain);
    };
    Some(tool.call_with(Map::from_iter([(path_key(tool).to_owned(), json!(path))])))
}

/// The argument of a tool that names a file.
fn path_key(tool: &ModelTool) -> &'static str {
    let keys = ["file_path", "filePath", "absolute_path", "path"];
    keys.into_iter().find(|key| tool.schema["properties"].get(*key).is_some()).unwrap_or("path")
}

/// Writes `hi` to a file, by the shell if there is no tool for it.
pub(super) fn write_call(tools: &[ModelTool], path: &str) -> Option<ModelToolCall> {
    let Some(tool) = find_tool(tools, &WRITE_TOOLS) else {
        return shell_call(tools, &format!("echo hi > {path}"), ShellRights::Escalated);
    };
    let names = ["content", "file_text", "text"];
    let text_key = names.into_iter().find(|name| tool.schema["properties"].get(*name).is_some());
    let text_key = text_key.unwrap_or(names[0]);
    let args = [(path_key(tool).to_owned(), json!(path)), (text_key.to_owned(), json!("hi\n"))];
    Some(tool.call_with(Map::from_iter(args)))
}

/// Asks the user `Which colour?`, with `Red` and `Blue` to choose from.
pub(super) fn question_call(tools: &[ModelTool]) -> Option<ModelToolCall> {
    let tool = find_tool(tools, &QUESTION_TOOLS)?;
    let properties = &tool.schema["properties"];
    let mut args = Map::new();
    if properties.get("questions").is_none() && properties.get("question").is_some() {
        args.insert("question".into(), json!("Which colour?"));
        args.insert("choices".into(), json!(["Red", "Blue"]));
    } else {
        let mut question = minimal_value(&properties["questions"]["items"]);
        question["question"] = json!("Which colour?");
        question["header"] = json!("Colour");
        question["options"] =
            json!([{ "label": "Red", "description": "warm" }, { "label": "Blue", "description": "cold" }]);
        args.insert("questions".into(), json!([question]));
    }
    Some(tool.call_with(args))
}

/// Writes down a to-do list: `read it` is done, `change it` is under way.
pub(super) fn todo_call(tools: &[ModelTool]) -> Option<ModelToolCall> {
    let tool = find_tool(tools, &TODO_TOOLS)?;
    let properties = &tool.schema["properties"];
    let list = if properties.get("plan").is_some() { "plan" } else { "todos" };
    let schema = &properties[list]["items"];
    let names = ["content", "step", "description"];
    let text_key = names.into_iter().find(|name| schema["properties"].get(*name).is_some())?;
    let entry = |text: &str, status: &str| {
        let mut entry = minimal_value(schema);
        entry[text_key] = json!(text);
        entry["status"] = json!(status);
        entry
    };
    let entries = json!([entry("read it", "completed"), entry("change it", "in_progress")]);
    Some(tool.call_with(Map::from_iter([(list.to_owned(), entries)])))
}

/// Calls the tool of this name. `line` is the name, then the arguments as JSON.
pub(super) fn named_call(tools: &[ModelTool], line: &str) -> Option<ModelToolCall> {
    let (name, args) = line.split_once(' ').unwrap_or((line, "{}"));
    let args: Map<String, Value> = serde_json::from_str(args).ok()?;
    Some(find_tool(tools, &[name])?.call_with(args))
}

/// Calls a tool of an MCP server that the agent was given. `line` is the tool's own name, then its arguments as JSON.
pub(super) fn mcp_call(tools: &[ModelTool], line: &str) -> Option<ModelToolCall> {
    let (name, args) = line.split_once(' ').unwrap_or((line, "{}"));
    let args: Value = serde_json::from_str(args).ok()?;
    let matches_name = |tool: &&ModelTool| {
        let server = tool.name.strip_suffix(name).filter(|server| server.ends_with(['_', '/', '-']));
        server.is_some_and(|server| server.starts_with("mcp") || server.starts_with(OUR_SERVER))
    };
    if let Some(tool) = tools.iter().find(matches_name) {
        return Some(ModelToolCall { name: tool.name.clone(), args });
    }
    // Some agents offer such tools only through another tool, or only after a search for them.
    if let Some(proxy) = find_tool(tools, &["tool_call"]) {
        let args = json!({ "name": format!("mcp__{OUR_SERVER}__{name}"), "arguments": args });
        return Some(ModelToolCall { name: proxy.name.clone(), args });
    }
    let search = find_tool(tools, &[TOOL_SEARCH])?;
    Some(ModelToolCall { name: search.name.clone(), args: json!({ "query": name }) })
}

fn find_tool<'a>(tools: &'a [ModelTool], names: &[&str]) -> Option<&'a ModelTool> {
    names.iter().find_map(|name| tools.iter().find(|tool| tool.name == *name))
}

impl ModelTool {
    fn call_with(&self, args: Map<String, Value>) -> ModelToolCall {
        let mut merged = minimal_value(&self.schema);
        for (name, value) in args {
            merged[name] = value;
        }
        ModelToolCall { name: self.name.clone(), args: merged }
    }
}

/// The smallest value that a JSON schema accepts.
pub(super) fn minimal_value(schema: &Value) -> Value {
    if let Some(constant) = schema.get("const") {
        return constant.clone();
    }
    if let Some(choices) = schema["enum"].as_array() {
        // Gemini asks who speaks next; the answer `user` ends the turn.
        let user = choices.iter().find(|choice| **choice == "user");
        return user.or(choices.first()).cloned().unwrap_or_default();
    }
    let kind = match &schema["type"] {
        Value::Array(kinds) => kinds.first().and_then(Value::as_str),
        kind => kind.as_str(),
    };
    match kind.map(str::to_ascii_lowercase).as_deref() {
        Some("string") => json!("scripted"),
        Some("boolean") => json!(false),
        Some("number" | "integer") => schema.get("minimum").cloned().unwrap_or(json!(1)),
        Some("array") => json!([]),
        Some("null") => Value::Null,
        _ => {
            let required = schema["required"].as_array().into_iter().flatten().filter_map(Value::as_str);
            required.map(|name| (name.to_owned(), minimal_value(&schema["properties"][name]))).collect()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tool(name: &str, schema: Value) -> ModelTool {
        ModelTool { name: name.into(), schema }
    }

    #[test]
    fn what_a_tool_requires_is_filled_in() {
        let schema = json!({
            "properties": {
                "command": { "type": "string" }, "is_background": { "type": "boolean" }, "timeout": { "type": "number" }
            },
            "required": ["command", "is_background"],
        });
        let call = shell_call(&[tool("run_shell_command", schema)], "true", ShellRights::Escalated).unwrap();
        assert_eq!(call.args, json!({ "command": "true", "is_background": false }));
    }

    #[test]
    fn codex_is_asked_for_more_rights_only_where_the_script_wants_that() {
        let schema = json!({ "properties": { "cmd": {}, "sandbox_permissions": {} }, "required": ["cmd"] });
        let tools = [tool("exec_command", schema)];
        let call = |rights| shell_call(&tools, "true", rights).unwrap().args;
        assert_eq!(call(ShellRights::Escalated)["sandbox_permissions"], "require_escalated");
        assert_eq!(call(ShellRights::Plain), json!({ "cmd": "true" }));
    }

    #[test]
    fn a_question_has_what_its_schema_requires() {
        let item = json!({
            "properties": { "multiSelect": { "type": "boolean" }, "id": { "type": "string" } },
            "required": ["multiSelect", "id"],
        });
        let schema = json!({ "properties": { "questions": { "type": "array", "items": item } } });
        let call = question_call(&[tool("AskUserQuestion", schema)]).unwrap();
        let question = &call.args["questions"][0];
        assert_eq!((&question["multiSelect"], &question["id"]), (&json!(false), &json!("scripted")));
        assert_eq!(question["options"][1]["label"], "Blue");
    }
}
