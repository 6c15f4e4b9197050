//! Who caused an event. An event that was decided while a command was handled says so in the field `actor` of its
//! data, whatever its kind, so the types of the data do not have that field.

use serde::{Deserialize, Serialize};

use crate::api::TokenRole;
use crate::ids::{FleetId, SessionId};

/// Who caused an event: the field `actor` of its data.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum EventActor {
    /// A program of this machine's user, over the unix socket.
    User {
        uid: u32,
        /// Process id of the program. Absent if it had exited.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pid: Option<u32>,
        /// Command line of the program, cut to a length, without tokens, JSON and values of variables.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        command: Option<String>,
    },
    /// A client over TCP.
    Token {
        /// Name of its token. The token in the file of the home is named `file`.
        name: String,
        role: TokenRole,
        /// The client's address.
        address: String,
    },
    /// The agent of a session, through the tools or by claiming its mail.
    Agent { session_id: SessionId },
    /// The policy of the session.
    Policy {
        /// The rule that decided, in short; the data has all of it. Absent if the policy is a single verdict.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        rule: Option<String>,
    },
    /// A fleet: one of its routes, or its end.
    Fleet { fleet_id: FleetId },
    /// The daemon itself: a limit was reached, a cancel or a close is passed on, or mail was found in a folder.
    Daemon {
        /// The session whose cancel, close or end is passed on.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        session_id: Option<SessionId>,
    },
}

impl EventActor {
    /// The daemon, for no session in particular.
    pub const DAEMON: Self = Self::Daemon { session_id: None };

    /// Adds the field `actor` to the data of an event, which is a JSON object.
    pub(super) fn add_to(&self, data: &mut Vec<u8>) -> Result<(), serde_json::Error> {
        let closing = data.pop();
        debug_assert_eq!(closing, Some(b'}'), "the data of an event is an object");
        if data.len() > 1 {
            data.push(b',');
        }
        data.extend_from_slice(br#""actor":"#);
        serde_json::to_writer(&mut *data, self)?;
        data.push(b'}');
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::event::{EmptyEventData, EventBody, HaltSet};

    #[test]
    fn an_actor_is_one_more_field_of_the_data_which_is_read_as_before() {
        let actor = EventActor::User { uid: 1000, pid: Some(7), command: Some("qd \"halt\"".to_owned()) };
        let expected = json!({ "kind": "user", "uid": 1000, "pid": 7, "command": "qd \"halt\"" });
        let set = HaltSet { reason: Some("x".to_owned()), cancel: true };
        for body in [EventBody::HaltSet(set), EventBody::HaltLifted(EmptyEventData {})] {
            let mut plain: Value = serde_json::from_slice(&body.encode(None).unwrap()).unwrap();
            let data = body.encode(Some(&actor)).unwrap();
            plain["actor"] = expected.clone();
            assert_eq!(serde_json::from_slice::<Value>(&data).unwrap(), plain);
            assert_eq!(EventBody::decode(body.kind(), &data).unwrap(), Some(body));
        }
    }

    #[test]
    fn every_kind_of_actor_has_its_documented_form() {
        let session_id = SessionId::parse("ses_1").unwrap();
        let address = "10.0.0.7:5000".to_owned();
        for (actor, form) in [
            (
                EventActor::Token { name: "ci".to_owned(), role: TokenRole::Approver, address },
                json!({ "kind": "token", "name": "ci", "role": "approver", "address": "10.0.0.7:5000" }),
            ),
            (EventActor::Agent { session_id }, json!({ "kind": "agent", "session_id": "ses_1" })),
            (EventActor::Policy { rule: None }, json!({ "kind": "policy" })),
            (EventActor::DAEMON, json!({ "kind": "daemon" })),
        ] {
            assert_eq!(serde_json::to_value(&actor).unwrap(), form);
            assert_eq!(serde_json::from_value::<EventActor>(form).unwrap(), actor);
        }
    }
}
