//! The arguments of tool calls. Some agents report them as such; others only show people a title, a change or a file,
//! from which they are derived here.

use agent_client_protocol::v1::schema::{ContentBlock, ToolCallContent, ToolCallLocation};
use serde_json::{Map, Value, json};

/// What an agent shows people of a call.
#[derive(Debug, Clone, Copy)]
pub(super) struct AcpCallDisplay<'a> {
    pub(super) title: Option<&'a str>,
    pub(super) content: Option<&'a [ToolCallContent]>,
    pub(super) locations: Option<&'a [ToolCallLocation]>,
}

impl AcpCallDisplay<'_> {
    /// Derives the arguments of a call of this tool. A change of files is included as a whole: a person must see what
    /// an edit does before allowing it.
    pub(super) fn derive_input(self, tool: &str) -> Option<Value> {
        let content = self.content.unwrap_or_default();
        if tool.starts_with("mcp__") {
            return content.iter().find_map(json_arguments);
        }
        let changes = content.iter().filter_map(|content| match content {
            ToolCallContent::Diff(diff) => {
                Some(json!({ "path": diff.path, "old_text": diff.old_text, "new_text": diff.new_text }))
            }
            _ => None,
        });
        let mut changes: Vec<Value> = changes.collect();
        let location = || self.locations?.first().map(|location| location.path.clone());
        match (tool, self.title, changes.len()) {
            ("Bash", Some(title), _) => Some(json!({ "command": title })),
            ("WebFetch", Some(title), _) => Some(json!({ "url": title })),
            (_, _, 0) => location().map(|path| json!({ "path": path })),
            (_, _, 1) => changes.pop(),
            _ => {
                let paths: Vec<&Value> = changes.iter().map(|change| &change["path"]).collect();
                Some(json!({ "path": paths, "changes": changes }))
            }
        }
    }
}

/// Arguments that are shown as JSON text.
fn json_arguments(content: &ToolCallContent) -> Option<Value> {
    let ToolCallContent::Content(content) = content else { return None };
    let ContentBlock::Text(text) = &content.content else { return None };
    serde_json::from_str(&text.text).ok().filter(Value::is_object)
}

/// The arguments of a call whose agent gave none.
pub(super) fn empty_input() -> Value {
    Value::Object(Map::new())
}

pub(super) fn is_empty(input: &Value) -> bool {
    input.is_null() || input.as_object().is_some_and(serde_json::Map::is_empty)
}
