//! Who did what, and when: the response of `GET /v1/audit`. The docs of these types are the descriptions in
//! `openapi.json`, so they are written for users of the API.

use serde::{Deserialize, Serialize};

use crate::event::EventActor;
use crate::ids::{RunId, Seq, SessionId, WorkspaceId};
use crate::search::IndexProgress;
use crate::time::Millis;

/// Response of `GET /v1/audit`.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, utoipa::ToSchema)]
pub struct AuditPage {
    /// The oldest first, or with `before` the newest first.
    pub entries: Vec<AuditEntry>,
    /// The `after`, or with `before` the `before`, of the next page. Null if there is no more.
    pub next: Option<String>,
    /// Whether everything is covered that was in the journal when the request came. If not, the index is still being
    /// built, and `index` says how far it is.
    pub complete: bool,
    pub index: IndexProgress,
}

/// Something that somebody did: one event that has an actor.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct AuditEntry {
    /// The event.
    #[schema(value_type = u64)]
    pub seq: Seq,
    pub at: Millis,
    /// Who did it.
    pub actor: EventActor,
    pub action: AuditAction,
    /// Kind of the event.
    pub kind: String,
    pub workspace_id: Option<WorkspaceId>,
    pub session_id: Option<SessionId>,
    pub run_id: Option<RunId>,
    /// What it was done to, if that is not the session or the run: the id of an ask, a fleet, a message or a token.
    #[serde(default)]
    pub object: Option<String>,
    /// More about it on one line: the decision and its tool, the beginning of a prompt, the changed settings, a reason.
    #[serde(default)]
    pub detail: Option<String>,
}

macro_rules! actions {
    ($($(#[$doc:meta])* $name:ident = $text:literal;)*) => {
        /// What somebody did.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, utoipa::ToSchema)]
        #[serde(rename_all = "snake_case")]
        pub enum AuditAction { $($(#[$doc])* $name,)* }

        impl AuditAction {
            /// The name as it appears in JSON.
            pub fn as_str(self) -> &'static str {
                match self { $(Self::$name => $text,)* }
            }
        }
    };
}

actions! {
    /// A workspace was added.
    AddWorkspace = "add_workspace";
    /// A workspace was removed.
    RemoveWorkspace = "remove_workspace";
    /// A session was created.
    CreateSession = "create_session";
    /// The settings of a session were changed.
    ChangeSession = "change_session";
    /// A session was closed.
    CloseSession = "close_session";
    /// A prompt was sent.
    Prompt = "prompt";
    /// A turn was steered.
    Steer = "steer";
    /// A run was cancelled.
    Cancel = "cancel";
    /// An agent was killed because it did not stop.
    Kill = "kill";
    /// A queued run was moved.
    MoveRun = "move_run";
    /// A question was asked through a tool.
    Ask = "ask";
    /// An ask was answered.
    Answer = "answer";
    /// An ask was withdrawn.
    Withdraw = "withdraw";
    /// Mail was sent.
    SendMail = "send_mail";
    /// Mail was claimed.
    ClaimMail = "claim_mail";
    /// Claimed mail was acknowledged.
    AcknowledgeMail = "acknowledge_mail";
    /// A fleet was started.
    StartFleet = "start_fleet";
    /// A fleet was stopped.
    StopFleet = "stop_fleet";
    /// A route of a fleet fired.
    Route = "route";
    /// A token was created.
    CreateToken = "create_token";
    /// A token was revoked.
    RevokeToken = "revoke_token";
    /// A halt was set.
    Halt = "halt";
    /// The halt was lifted.
    LiftHalt = "lift_halt";
    /// An account was released before its quota reset, or by the reset.
    ReleaseQuota = "release_quota";
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_action_has_one_name() {
        for action in [AuditAction::AddWorkspace, AuditAction::LiftHalt, AuditAction::MoveRun] {
            assert_eq!(serde_json::to_value(action).unwrap(), action.as_str());
        }
    }
}
