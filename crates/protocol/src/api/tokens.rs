//! Tokens of clients over TCP, with their roles, as the API shows them.

use serde::{Deserialize, Serialize};

use crate::ids::{TokenId, WorkspaceId};
use crate::time::Millis;

/// What the bearer of a token may do. Each role may do everything that the ones before it may.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, utoipa::ToSchema,
)]
#[serde(rename_all = "snake_case")]
pub enum TokenRole {
    /// Reads everything but secrets.
    Viewer,
    /// Also answers asks.
    Approver,
    /// Also sends prompts, and creates, changes, cancels and closes sessions and fleets.
    Operator,
    /// Also creates tokens, and changes and stops the daemon.
    Admin,
}

impl TokenRole {
    /// The name as it appears in JSON.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Viewer => "viewer",
            Self::Approver => "approver",
            Self::Operator => "operator",
            Self::Admin => "admin",
        }
    }
}

/// Body of `POST /v1/tokens`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NewClientToken {
    /// Name, by which events say who caused them: 1 to 64 characters from `A-Za-z0-9.-`. No other token may have it.
    pub name: String,
    pub role: TokenRole,
    /// The only workspace that the bearer may reach. Without it, all of them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub workspace_id: Option<WorkspaceId>,
    /// When the token becomes invalid. Without it, never.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expires_at: Option<Millis>,
}

/// A token with which a client uses the API over TCP. Listed by `GET /v1/tokens`. The token itself is shown only once,
/// in the response that created it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct ClientToken {
    /// Id to use in `DELETE /v1/tokens/{id}`.
    pub id: TokenId,
    pub name: String,
    pub role: TokenRole,
    /// The only workspace that the bearer may reach. Null for all of them.
    pub workspace_id: Option<WorkspaceId>,
    pub created_at: Millis,
    /// When the token becomes invalid. Null for never.
    pub expires_at: Option<Millis>,
    /// When the token was last used, to within a minute.
    pub last_used_at: Option<Millis>,
}

/// Response to the creation of a client's token.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct CreatedClientToken {
    /// Id to use in `DELETE /v1/tokens/{id}`.
    pub id: TokenId,
    pub name: String,
    pub role: TokenRole,
    /// The only workspace that the bearer may reach. Null for all of them.
    pub workspace_id: Option<WorkspaceId>,
    pub created_at: Millis,
    /// When the token becomes invalid. Null for never.
    pub expires_at: Option<Millis>,
    /// The token. It is not shown again.
    pub token: String,
}
