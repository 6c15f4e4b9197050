//! Ids and event positions. An id from outside is checked here once, so an id type never holds an invalid id.

use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Deserializer, Serialize};

/// Position of an event in the journal: the `seq` of the API. It increases over all sessions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Seq(pub u64);

/// Position of an event within its session: 1, 2, 3… A command to the agent carries the number of the event that caused
/// it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct EventNumber(pub u64);

impl fmt::Display for Seq {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Maximum length of an id from outside.
pub const ID_MAX: usize = 128;

/// The text is not an id: it is empty, too long, or has a character that is not allowed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("an id has 1 to 128 characters from A-Za-z0-9_.:- and starts with a letter or digit")]
pub struct IdParseError;

/// Whether a client may name an agent's conversation by this id. The id may become an argument of the agent's program or
/// part of a path, so it must not look like a flag and has no slash.
pub fn is_agent_session_id(text: &str) -> bool {
    is_valid_id(text)
}

fn is_valid_id(text: &str) -> bool {
    text.len() <= ID_MAX
        && text.starts_with(|c: char| c.is_ascii_alphanumeric())
        && text.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'.' | b':' | b'-'))
}

/// Letters and digits without those that are easily confused: no i, l, o and u.
const ALPHABET: &[u8; 32] = b"0123456789abcdefghjkmnpqrstvwxyz";

fn random_id(prefix: &str, random: &[u8]) -> Arc<str> {
    let mut id = String::with_capacity(prefix.len() + random.len());
    id.push_str(prefix);
    id.extend(random.iter().map(|b| char::from(ALPHABET[usize::from(b & 31)])));
    id.into()
}

macro_rules! id {
    ($(#[$doc:meta])* $name:ident, $prefix:literal) => {
        $(#[$doc])*
        #[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, utoipa::ToSchema)]
        #[serde(transparent)]
        #[schema(value_type = String)]
        pub struct $name(Arc<str>);

        impl $name {
            /// Prefix of the ids that Quarterdeck creates. Ids from outside need not have it.
            pub const PREFIX: &'static str = $prefix;

            /// Checks an id from outside.
            pub fn parse(text: &str) -> Result<Self, IdParseError> {
                if is_valid_id(text) { Ok(Self(text.into())) } else { Err(IdParseError) }
            }

            /// Creates an id from the caller's random bytes. Each byte gives one character, of five bits.
            pub fn from_random(random: &[u8]) -> Self {
                Self(random_id($prefix, random))
            }

            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }

        impl AsRef<str> for $name {
            fn as_ref(&self) -> &str {
                &self.0
            }
        }

        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                let text = std::borrow::Cow::<'de, str>::deserialize(deserializer)?;
                Self::parse(&text).map_err(serde::de::Error::custom)
            }
        }
    };
}

id!(
    /// Id of a workspace: a project directory.
    WorkspaceId, "ws_"
);
id!(
    /// Id of a session: a conversation with one agent.
    SessionId, "ses_"
);
id!(
    /// Id of a fleet: several sessions and the routes between them.
    FleetId, "flt_"
);
id!(
    /// Id of a run: one accepted prompt. Clients may choose it.
    RunId, "run_"
);
id!(
    /// Id of an ask: a permission request or question of an agent. It is random enough that it cannot be guessed.
    AskId, "ask_"
);
id!(
    /// Id of a worker: the process that holds a live agent.
    WorkerId, "wrk_"
);
id!(
    /// Id of an account: an agent with the login that it uses. It is derived from both, so sessions with the same login
    /// have the same id, and it reveals nothing about the login.
    AccountId, "acc_"
);
id!(
    /// Id of a worker token, with which a worker on another machine joins. It is not the token itself.
    TokenId, "tok_"
);
id!(
    /// Id of a message in a session's conversation. It is derived from the run, so every part of the code computes the
    /// same id.
    MessageId, "msg_"
);

id!(
    /// Id of a mail message between sessions. Senders may choose it.
    MailId, "mail_"
);

impl MailId {
    /// The mail message with which a fleet starts this run. The id is derived, so a repeat after a crash is the same
    /// message.
    pub fn of_run(run: &RunId) -> Self {
        Self(format!("mail_{}", run.as_str().trim_start_matches(RunId::PREFIX)).into())
    }
}

impl MessageId {
    /// Id of the user message of a run.
    pub fn user(run: &RunId) -> Self {
        Self(format!("msg_u_{run}").into())
    }

    /// Id of the assistant message of a run.
    pub fn assistant(run: &RunId) -> Self {
        Self(format!("msg_a_{run}").into())
    }
}

impl WorkerId {
    /// The worker that a session gets through its event with this number. The id is derived, so a repeat after a crash
    /// means the same worker, and an older worker can be told apart.
    pub fn of_session(session: &SessionId, number: EventNumber) -> Self {
        Self(format!("wrk_{}_{}", session.as_str().trim_start_matches(SessionId::PREFIX), number.0).into())
    }

    /// The session that the worker was started for, if the id is derived from one.
    pub fn session(&self) -> Option<SessionId> {
        let (session, _) = self.as_str().strip_prefix(Self::PREFIX)?.rsplit_once('_')?;
        SessionId::parse(&format!("{}{session}", SessionId::PREFIX)).ok()
    }
}

impl RunId {
    /// The run that a missed steer becomes. The id is derived, so a repeat after a crash is the same run.
    pub fn of_missed_steer(session: &SessionId, steer: EventNumber) -> Self {
        Self(
            format!("run_steer_{}_{}", session.as_str().trim_start_matches(SessionId::PREFIX), steer.0)
                .into(),
        )
    }

    /// The run that a mail message becomes, by the number of its `mail.sent`. The id is derived, so a repeat after a
    /// crash is the same run.
    pub fn of_mail(session: &SessionId, sent: EventNumber) -> Self {
        Self(format!("run_mail_{}_{}", session.as_str().trim_start_matches(SessionId::PREFIX), sent.0).into())
    }

    /// A run that a fleet starts. `cause` is `start`, or a route with the number of times that it has fired; `nth`
    /// counts the runs of one session for the same cause; `attempt` counts retries. The id is derived, so a repeat
    /// after a crash is the same run.
    pub fn of_fleet(fleet: &FleetId, cause: &str, session: &str, nth: usize, attempt: u32) -> Self {
        let fleet = fleet.as_str().trim_start_matches(FleetId::PREFIX);
        Self(format!("run_flt_{fleet}.{cause}.{session}.{nth}.{attempt}").into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_from_outside_is_checked() {
        for good in ["a", "7", "run_1", "A.b:c-d_e", &"x".repeat(128)] {
            assert!(RunId::parse(good).is_ok(), "{good}");
        }
        for bad in ["", "_a", "-a", ".a", "a b", "a/b", "ä", "a\n", &"x".repeat(129)] {
            assert_eq!(RunId::parse(bad), Err(IdParseError), "{bad}");
        }
        assert!(serde_json::from_str::<RunId>("\"../x\"").is_err());
    }

    #[test]
    fn an_id_that_we_make_passes_our_own_check() {
        let id = SessionId::from_random(&[0, 31, 32, 255, 7]);
        assert_eq!(id.as_str(), "ses_0z0z7");
        assert_eq!(SessionId::parse(id.as_str()), Ok(id));
    }
}
