//! What a request says, whichever API it came by: who said what, which tools are offered, and in which form the answer
//! is wanted. Agents wrap what the user says in much of their own; here it is unwrapped.

use serde_json::Value;

/// One request, read.
#[derive(Debug, Default)]
pub(super) struct ModelRequest {
    /// The model that is asked for.
    pub(super) model: String,
    /// The conversation, oldest first. What the model itself said is left out.
    pub(super) messages: Vec<ModelMessage>,
    /// What it may call.
    pub(super) tools: Vec<ModelTool>,
    /// Whether the answer is wanted piece by piece.
    pub(super) stream: bool,
    /// The schema of the JSON that is wanted instead of text; null where any JSON will do.
    pub(super) json_schema: Option<Value>,
}

/// One part of a conversation.
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
    /// Adds what came in the place of the user's words, if a user can have said it.
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

    /// What the user said, oldest first.
    pub(super) fn user_texts(&self) -> Vec<String> {
        let text = |said: &ModelMessage| match said {
            ModelMessage::User(text) => Some(text.clone()),
            ModelMessage::ToolResult(_) => None,
        };
        self.messages.iter().filter_map(text).collect()
    }

    /// The results since the user spoke last.
    pub(super) fn latest_results(&self) -> Vec<&str> {
        fn result(said: &ModelMessage) -> Option<&str> {
            match said {
                ModelMessage::ToolResult(text) => Some(text),
                ModelMessage::User(_) => None,
            }
        }
        let mut results: Vec<&str> = self.messages.iter().rev().map_while(result).collect();
        results.reverse();
        results
    }

    /// No turn of a conversation goes without tools, and none wants JSON. Some side calls do offer the tools of the
    /// conversation that they look back on: those are known by how they begin.
    pub(super) fn is_side_call(&self) -> bool {
        let newest = self.messages.iter().rev().find_map(|said| match said {
            ModelMessage::User(text) => Some(text),
            ModelMessage::ToolResult(_) => None,
        });
        let is_aside =
            newest.is_some_and(|text| SIDE_CALL_PREFIXES.iter().any(|start| text.starts_with(start)));
        self.tools.is_empty() || self.json_schema.is_some() || is_aside
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

/// The items of a list, or none.
pub(super) fn items(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

/// What agents begin their own messages with, where a user would speak.
const AGENT_PREFIXES: [&str; 7] = [
    "<",
    "# AGENTS",
    "SYSTEM:",
    "This is the Gemini CLI",
    "This is the Qwen Code",
    // So Claude remembers that it was cancelled.
    "[Request interrupted",
    // So Qwen asks for the rest of a stream that was cut.
    "The connection dropped mid-response",
];

/// What Claude and Qwen begin with when they want to know what the user may say next.
const SIDE_CALL_PREFIXES: [&str; 1] = ["[SUGGESTION MODE"];

/// What agents put between tags beside the user's words, before or after them.
const WRAPPERS: [&str; 3] = ["<system-reminder>", "<reminder>", "<current_datetime>"];

fn unwrap_user_text(text: &str) -> Option<String> {
    let is_wrapped = text.trim_start().starts_with('<') || WRAPPERS.iter().any(|tag| text.contains(tag));
    let text = if is_wrapped { without_elements(text) } else { text.to_owned() };
    let text = text.trim();
    let is_the_user = !text.is_empty() && !AGENT_PREFIXES.iter().any(|start| text.starts_with(start));
    is_the_user.then(|| text.to_owned())
}

/// `text` without every `<name ...>...</name>` in it.
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
        let mut heard = ModelRequest::default();
        heard.add_tool(&"Bash".into(), &Value::Null);
        heard.add_user_text("hello");
        assert!(!heard.is_side_call());
        heard.add_user_text("[SUGGESTION MODE: Suggest what the user might naturally type next.]");
        assert!(heard.is_side_call());
    }

    #[test]
    fn only_results_after_the_users_last_words_count() {
        let mut heard = ModelRequest::default();
        heard.add_user_text("one");
        heard.add_tool_result("a".into());
        heard.add_user_text("two");
        heard.add_tool_result("b".into());
        heard.add_tool_result("c".into());
        assert_eq!(heard.latest_results(), ["b", "c"]);
        assert_eq!(heard.user_texts(), ["one", "two"]);
    }
}
