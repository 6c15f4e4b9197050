//! Ids and numbers. An id from outside is checked here once; past this point it cannot be wrong.

use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Deserializer, Serialize};

/// Position of an event in the journal, increasing over everything. The `seq` of the contract.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Seq(pub u64);

/// Position of an event within its session: 1, 2, 3… A command to the agent bears the number of its cause.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct EventNumber(pub u64);

impl fmt::Display for Seq {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// The longest id we take from outside.
pub const ID_MAX: usize = 128;

/// An id that is not one: empty, too long, or with a character that ids do not have.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("an id is 1 to 128 of A-Za-z0-9_.:- and begins with a letter or digit")]
pub struct IdParseError;

fn well_formed(text: &str) -> bool {
    text.len() <= ID_MAX
        && text.starts_with(|c: char| c.is_ascii_alphanumeric())
        && text.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'.' | b':' | b'-'))
}

/// Letters and digits that are not mistaken for each other when read aloud.
const ALPHABET: &[u8; 32] = b"0123456789abcdefghjkmnpqrstvwxyz";

fn encode(prefix: &str, random: &[u8]) -> Arc<str> {
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
            /// What ids of this type begin with when we make them.
            pub const PREFIX: &'static str = $prefix;

            /// An id from outside.
            pub fn parse(text: &str) -> Result<Self, IdParseError> {
                if well_formed(text) { Ok(Self(text.into())) } else { Err(IdParseError) }
            }

            /// A new id out of the caller's random bytes, five bits of each of which are used.
            pub fn from_random(random: &[u8]) -> Self {
                Self(encode($prefix, random))
            }

            /// The id as text.
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
    /// One project directory.
    WorkspaceId, "ws_"
);
id!(
    /// One conversation with one agent.
    SessionId, "ses_"
);
id!(
    /// Several sessions and the routes between them.
    FleetId, "flt_"
);
id!(
    /// One accepted prompt; clients may choose it themselves.
    RunId, "run_"
);
id!(
    /// Something an agent waits for. Made of enough randomness that it cannot be guessed.
    AskId, "ask_"
);
id!(
    /// The process that holds a live agent.
    WorkerId, "wrk_"
);
id!(
    /// What a process on another machine joins with; the name of it, never the token.
    TokenId, "tok_"
);
id!(
    /// A message of a session; derived from its run, so that no two places can disagree about it.
    MessageId, "msg_"
);

id!(
    /// A message between sessions; senders may choose it themselves.
    MailId, "mail_"
);

impl MailId {
    /// The message that a fleet gives this run as. Derived, so that a repeat after a crash is the same message.
    pub fn of_run(run: &RunId) -> Self {
        Self(format!("mail_{}", run.as_str().trim_start_matches(RunId::PREFIX)).into())
    }
}

impl MessageId {
    /// The user's message of a run.
    pub fn user(run: &RunId) -> Self {
        Self(format!("msg_u_{run}").into())
    }

    /// The assistant's message of a run.
    pub fn assistant(run: &RunId) -> Self {
        Self(format!("msg_a_{run}").into())
    }
}

impl WorkerId {
    /// The worker that a session gets by the event of this number. Derived from its cause, so that a repeat after a
    /// crash is the same worker and an older one can be told.
    pub fn of_session(session: &SessionId, number: EventNumber) -> Self {
        Self(format!("wrk_{}_{}", session.as_str().trim_start_matches(SessionId::PREFIX), number.0).into())
    }

    /// The session that it was made for, if it was made for one.
    pub fn session(&self) -> Option<SessionId> {
        let (session, _) = self.as_str().strip_prefix(Self::PREFIX)?.rsplit_once('_')?;
        SessionId::parse(&format!("{}{session}", SessionId::PREFIX)).ok()
    }
}

impl RunId {
    /// The run that a missed steer becomes. Derived from its cause, so that a repeat after a crash is the same run.
    pub fn of_missed_steer(session: &SessionId, steer: EventNumber) -> Self {
        Self(
            format!("run_steer_{}_{}", session.as_str().trim_start_matches(SessionId::PREFIX), steer.0)
                .into(),
        )
    }

    /// The run that a message becomes. Derived from its cause, so that a repeat after a crash is the same run.
    pub fn of_mail(session: &SessionId, sent: EventNumber) -> Self {
        Self(format!("run_mail_{}_{}", session.as_str().trim_start_matches(SessionId::PREFIX), sent.0).into())
    }

    /// A run that a fleet starts: its cause (`start`, or a route and how often it has fired), the session's name, which
    /// of several, and which attempt. Derived, so that a repeat after a crash is the same run.
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
