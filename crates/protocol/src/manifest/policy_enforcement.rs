//! `[policy]` of a manifest: what makes an agent ask before it acts, and the settings that would keep it from asking.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// What makes the agent ask before it acts, whatever the user's own settings of the agent allow, so that the session's
/// policy decides.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PolicyEnforcement {
    /// Arguments at the end of the command. `{file}` stands for the path of `file`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub args: Vec<String>,
    /// Environment variables that no other variable overrides. `{file}` stands for the path of `file`.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub env: BTreeMap<String, String>,
    /// Settings for the agent as JSON. In `args`, `env` and `session_meta`, `{settings}` stands for them.
    #[serde(default, skip_serializing_if = "Map::is_empty")]
    pub settings: Map<String, Value>,
    /// What the user's own settings of the agent allow, which is to be asked instead.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub allowed_by_settings: Option<AllowedBySettings>,
    /// Text of a file that is written for the agent before it starts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub file: Option<String>,
    /// Fields for the `_meta` of the requests that open a session. Only used for agents that speak the Agent Client
    /// Protocol.
    #[serde(default, skip_serializing_if = "Map::is_empty")]
    pub session_meta: Map<String, Value>,
    /// Options of the agent's session, by their ids, that must have these values. They are set when the session is
    /// opened, and again whenever the agent reports another value. Only used for agents that speak the Agent Client
    /// Protocol.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub session_options: BTreeMap<String, String>,
    /// Settings that nothing here can override. With one of them in force, the agent is not started.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub overridden_by: Vec<OverridingSetting>,
}

/// Where the user's own settings of an agent list what it may do without asking. These rules are added to what the agent
/// must ask for, in a form of settings in which that counts more.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AllowedBySettings {
    /// Paths of JSON files, in the form of [`OverridingSetting::file`].
    pub files: Vec<String>,
    /// JSON pointer to the list of allowed rules in such a file.
    pub allow: String,
    /// JSON pointer to the list in `settings` that the rules are added to.
    pub ask: String,
    /// Settings that may allow more by themselves, such as hooks, and the rules that are added if one is there.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub asked_with: Vec<RulesWithSetting>,
}

/// Rules for what an agent must ask if a setting is there: at a place in the user's settings, or on a line of another file.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RulesWithSetting {
    /// JSON pointer to the setting in the `files` of [`AllowedBySettings`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub at: Option<String>,
    /// Paths of other files, in the form of [`OverridingSetting::file`].
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub files: Vec<String>,
    /// Pattern of a line that is the setting in one of these other files.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub line: Option<String>,
    pub rules: Vec<String>,
}

/// A setting of an agent that lets it act without asking, and that cannot be overridden.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OverridingSetting {
    /// Path of the file that has the setting; `~` is the home directory, and `*` in a part matches any name. `$NAME` at
    /// the beginning is replaced by that variable, and `${NAME:-~/folder}` by that folder if the variable is not set. A
    /// relative path is looked up in the working directory, in those above it, and in the repository of a worktree.
    pub file: String,
    /// JSON pointer to the setting in the file, in which `*` matches any key and `one|other` either of two. Without this,
    /// `line` and `passage`, the file itself is the setting.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub at: Option<String>,
    /// Keys that the `*` of `at` does not match.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub except: Vec<String>,
    /// Pattern of a line that is the setting, in a file that is not JSON.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub line: Option<String>,
    /// Pattern of a passage that is the setting, which may span several lines.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub passage: Option<String>,
    /// Pattern of what makes such a passage harmless.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unless: Option<String>,
    /// The values that let the agent act without asking. If there are none, every value does.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub values: Vec<Value>,
}
