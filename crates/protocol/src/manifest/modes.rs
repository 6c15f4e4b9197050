//! `[modes]` of a manifest: the modes of an agent that a session can choose, and those that it must not be in.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// The modes of an agent, such as one in which it only plans. A mode that is not offered is never set, and an agent that
/// switches to one by itself is switched back: it might act without asking there, and no policy could hold.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct AgentModes {
    /// The modes that a session can have, each with the agent's own name for it. In all of them the agent asks before it
    /// acts.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub offered: BTreeMap<String, String>,
    /// Modes in which the agent acts without asking, for the message that refuses them.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub unasked: Vec<String>,
    /// The offered mode that the agent is switched back to, unless the session has chosen another. Required if any mode
    /// is offered.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fallback: Option<String>,
    /// Tools with which the agent switches its mode by itself, each with the agent's own name of the mode after it. For
    /// agents that do not report their mode otherwise.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub switched_by: BTreeMap<String, String>,
    /// Id of the session's option that is the mode, if it is not the mode of the Agent Client Protocol.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub option: Option<String>,
}

impl AgentModes {
    /// The session's name for a mode that the agent calls so; `None` if the mode is not offered.
    pub fn name_of(&self, agent_mode: &str) -> Option<&str> {
        self.offered.iter().find(|(_, id)| *id == agent_mode).map(|(name, _)| name.as_str())
    }
}
