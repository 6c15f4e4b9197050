//! Tokens that were created and revoked. The tokens themselves are never in an event.

use serde::{Deserialize, Serialize};

use crate::api::TokenRole;
use crate::ids::{TokenId, WorkspaceId};
use crate::time::Millis;

/// Data of `token.created`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TokenCreated {
    pub token_id: TokenId,
    pub name: Option<String>,
    /// The role of a client's token. Absent for a worker token.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub role: Option<TokenRole>,
    /// The only workspace that a client may reach. Absent for all of them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub workspace_id: Option<WorkspaceId>,
    /// When a client's token becomes invalid. Absent for never.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expires_at: Option<Millis>,
    /// Labels that a worker may join with. Absent for a client's token.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub labels: Option<Vec<String>>,
    /// Agents that a worker may offer. Absent for any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub agents: Option<Vec<String>>,
}

impl TokenCreated {
    /// A token that grants nothing yet.
    pub fn new(token_id: TokenId, name: Option<String>) -> Self {
        Self { token_id, name, role: None, workspace_id: None, expires_at: None, labels: None, agents: None }
    }
}

/// Data of `token.revoked`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TokenRevoked {
    pub token_id: TokenId,
    pub name: Option<String>,
}
