//! A request in a form that is independent of the API: the conversation, the offered tools, and the wanted form of the
//! answer. Agents wrap the user's text in much text of their own; it is unwrapped here.

use serde_json::Value;

#[derive(Debug, Default)]
pub(super) struct ModelRequest {
    pub(super) model: String,
    /// The conversation, oldest first, without the model's own messages.
    pub(super) messages: Vec<ModelMessage>,
    /// The tools that the model may call.
    pub(super) tools: Vec<ModelTool>,
    /// Whether the answer is to be streamed.
    pub(super) stream: bool,
    /// The request as JSON, without the tools.
    pub(super) told: String,
    /// The schema of the JSON that is wanted instead of text; null if any JSON will do.
    pub(super) json_schema: Option<Value>,
}

#[derive(Debug, PartialEq)]
pub(super) enum ModelMessage {
    User(String),
    ToolResult(String),
}

/// A tool, with the JSON schema of its arguments.
#[derive(Debug)]
pub(super) struct ModelTool {
    pub(super) name: String,
    pub(super) schema: Value,
}

impl ModelRequest {
    /// Adds a text in the user's role, unless it is the agent's own.
    pub(super) fn add_user_text(&mut self, text: &str) {
        if let Some(text) = unwrap_user_text(text) {
            self.messages.push(ModelMessage::User(text));
        }
    }

    pub(super) fn add_tool_result(&mut self, text: String) {
        self.messages.push(ModelMessage::ToolResult(text));
    }

    pub(super) fn add_tool(&mut self, name: &Value, schema: &Value) {
        if let Some(name) = name.as_str() {
            self.tools.push(ModelTool { name: name.to_owned(), schema: schema.clone() });
        }
    }

    /// The user's messages, oldest first.
    pub(super) fn user_texts(&self) -> Vec<String> {
        let text = |message: &ModelMessage| match message {
            ModelMessage::User(text) => Some(text.clone()),
            ModelMessage::ToolResult(_) => None,
        };
        self.messages.iter().filter_map(text).collect()
    }

    /// The tool results since the user's last message.
    pub(super) fn latest_results(&self) -> Vec<&str> {
        fn result(message: &ModelMessage) -> Option<&str> {
            match message {
                ModelMessage::ToolResult(text) => Some(text),
                ModelMessage::User(_) => None,
            }
        }
        let mut results: Vec<&str> = self.messages.iter().rev().map_while(result).collect();
        results.reverse();
        results
    }

    /// A turn of a conversation always offers tools and never wants JSON. Some side calls offer the tools of the
    /// conversation that they refer to; those are recognized by how they begin.
    pub(super) fn is_side_call(&self) -> bool {
        let newest = self.messages.iter().rev().find_map(|message| match message {
            ModelMessage::User(text) => Some(text),
            ModelMessage::ToolResult(_) => None,
        });
        let has_side_call_prefix =
            newest.is_some_and(|text| SIDE_CALL_PREFIXES.iter().any(|start| text.starts_with(start)));
        self.tools.is_empty() || self.json_schema.is_some() || has_side_call_prefix
    }
}

/// The text of a content that may be a string, a part or a list of parts.
pub(super) fn flatten_text(content: &Value) -> String {
    match content {
        Value::String(text) => text.clone(),
        Value::Array(parts) => parts.iter().map(flatten_text).collect::<Vec<_>>().join("\n"),
        Value::Object(part) => {
            let text = ["text", "content", "output"].iter().find_map(|key| part.get(*key));
            text.map(flatten_text).unwrap_or_default()
        }
        _ => String::new(),
    }
}

/// The parts of a content, each as text.
pub(super) fn part_texts(content: &Value) -> Vec<String> {
    match content {
        Value::Array(parts) => parts.iter().map(flatten_text).collect(),
        other => vec![flatten_text(other)],
    }
}

/// The items of a list; empty if the value is not a list.
pub(super) fn items(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

/// How agents begin messages of their own that they send in the user's role.
const AGENT_PREFIXES: [&str; 7] = [
    "<",
    "# AGENTS",
    "SYSTEM:",
    "This is the Gemini CLI",
    "This is the Qwen Code",
    // Claude's note that it was cancelled.
    "[Request interrupted",
    // Qwen's request for the rest of a stream that was cut.
    "The connection dropped mid-response",
];

/// How Claude and Qwen begin when they ask what the user may type next.
const SIDE_CALL_PREFIXES: [&str; 1] = ["[SUGGESTION MODE"];

/// Tags in which agents put text of their own, before or after the user's.
const WRAPPERS: [&str; 3] = ["<system-reminder>", "<reminder>", "<current_datetime>"];

fn unwrap_user_text(text: &str) -> Option<String> {
    let is_wrapped = text.trim_start().starts_with('<') || WRAPPERS.iter().any(|tag| text.contains(tag));
    let text = if is_wrapped { without_elements(text) } else { text.to_owned() };
    let text = text.trim();
    let is_user_text = !text.is_empty() && !AGENT_PREFIXES.iter().any(|start| text.starts_with(start));
    is_user_text.then(|| text.to_owned())
}

/// `text` without any `<name ...>...</name>` element.
fn without_elements(text: &str) -> String {
    let (mut kept, mut rest) = (String::new(), text);
    while let Some(start) = rest.find('<') {
        let (before, from) = rest.split_at(start);
        kept.push_str(before);
        let name: String =
            from[1..].chars().take_while(|c| c.is_ascii_alphanumeric() || "-_".contains(*c)).collect();
        let close = format!("</{name}>");
        match from.find(&close) {
            Some(end) if !name.is_empty() => rest = &from[end + close.len()..],
            _ => {
                kept.push('<');
                rest = &from[1..];
            }
        }
    }
    kept + rest
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_users_words_are_found_in_what_agents_wrap_around_them() {
        let user = |text| unwrap_user_text(text).unwrap_or_default();
        assert_eq!(user("hello"), "hello");
        assert_eq!(user("a < b and <b>c</b>"), "a < b and <b>c</b>");
        assert_eq!(user("<system-reminder>be good</system-reminder>\nhello"), "hello");
        assert_eq!(
            user("<current_datetime>now</current_datetime>\n\nhello\n\n<reminder>x</reminder>"),
            "hello"
        );
        assert_eq!(user("<environment_context><cwd>/</cwd></environment_context>"), "");
        assert_eq!(user("# AGENTS.md instructions"), "");
        assert_eq!(user("[Request interrupted by user]"), "");
    }

    #[test]
    fn what_looks_back_on_a_conversation_is_no_turn_of_it() {
        let mut request = ModelRequest::default();
        request.add_tool(&"Bash".into(), &Value::Null);
        request.add_user_text("hello");
        assert!(!request.is_side_call());
        request.add_user_text("[SUGGESTION MODE: Suggest what the user might naturally type next.]");
        assert!(request.is_side_call());
    }

    #[test]
    fn only_results_after_the_users_last_words_count() {
        let mut request = ModelRequest::default();
        request.add_user_text("one");
        request.add_tool_result("a".into());
        request.add_user_text("two");
        request.add_tool_result("b".into());
        request.add_tool_result("c".into());
        assert_eq!(request.latest_results(), ["b", "c"]);
        assert_eq!(request.user_texts(), ["one", "two"]);
    }
}
