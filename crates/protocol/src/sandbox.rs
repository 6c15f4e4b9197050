//! How strongly an agent is confined: what was asked for, and what is in force.
use serde::{Deserialize, Serialize};

/// The confinement that a session, a manifest, a fleet or the settings ask for.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum SandboxSetting {
    /// `deck` where the machine can give it, else the strongest level below it.
    #[default]
    Auto,
    Off,
    Deck,
    Workspace,
}

/// The confinement that is in force.
#[derive(
    Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, utoipa::ToSchema,
)]
#[serde(rename_all = "snake_case")]
pub enum SandboxLevel {
    #[default]
    Off,
    Deck,
    Workspace,
}

/// Whether an agent reaches the network.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum NetworkSetting {
    #[default]
    On,
    Off,
}
