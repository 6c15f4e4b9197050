//! `[sandbox]` of a manifest: how strongly the agent is confined, and what it needs although it is.

use serde::{Deserialize, Serialize};

use crate::sandbox::{NetworkSetting, SandboxSetting};

/// How strongly the agent is confined unless the session says otherwise, and what it needs at each level.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct SandboxRules {
    /// The level. In a trusted project's manifest, sessions can only ask for a stricter one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub level: Option<SandboxSetting>,
    /// Whether the agent reaches the network.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub network: Option<NetworkSetting>,
    /// Where the agent keeps its own state, which it may write at `workspace`; `~` is the home directory.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub writable: Vec<String>,
    /// The hosts of the agent's model, reachable even if the network is off: `HOST` (at port 443), `HOST:PORT`, or `$NAME`
    /// for the host of the URL in an environment variable.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub hosts: Vec<String>,
}
