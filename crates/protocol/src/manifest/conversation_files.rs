//! `[conversations]` of a manifest: where an agent keeps its conversations on disk, for `qd adopt`.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;

/// Where an agent keeps its conversations on disk, and how to read them. Each conversation is one file with a JSON value
/// on every line. Without `files`, conversations that were begun in the agent's own program cannot be adopted.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ConversationFiles {
    /// Folders with the agent's data, of which the first one that can be resolved is used. `$NAME` at the beginning is
    /// an environment variable, `~` the home directory.
    pub roots: Vec<String>,
    /// Path of the files below the root. In each part, one `*` or `{id}` stands for any text; `{id}` is the agent's id of
    /// the conversation.
    pub files: String,
    /// JSON pointer to the agent's id of the conversation, if it is not in the path.
    pub id: Option<String>,
    /// JSON pointer to the directory in which the agent works. The first line that has it counts.
    pub directory: Option<String>,
    /// File that contains the directory, as a path relative to the folder of the conversation's file.
    pub directory_file: Option<String>,
    /// JSON pointers to the agent's own title, the best one first. The last line that has it counts.
    pub titles: Vec<String>,
    /// How to recognise a prompt of the user. The first prompt is the title of a conversation without one.
    pub prompts: Vec<PromptLineRule>,
}

/// How to recognise a line that contains a prompt of the user.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PromptLineRule {
    /// Values that the line must have, by JSON pointer.
    pub r#where: BTreeMap<String, Value>,
    /// JSON pointer to the prompt: a text, or a list of parts with a `text`.
    pub text: String,
}
