//! The tokens of sessions: what an agent proves with that it speaks for its own. A token names its session, so that it
//! is found without a list, and ends with it; the secret lies beside the session's variables, and nowhere else.

use std::path::PathBuf;

use qd_protocol::SessionId;
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;

use crate::home::{Home, HomeError};

/// The tokens of all sessions of a home.
#[derive(Debug, Clone)]
pub(crate) struct Capabilities {
    home: Home,
}

impl Capabilities {
    pub(crate) fn of(home: &Home) -> Self {
        Self { home: home.clone() }
    }

    /// The token of a session, made on the first call.
    pub(crate) fn token(&self, session: &SessionId) -> Result<String, HomeError> {
        Ok(self.home.session_token(session)?.expose().to_owned())
    }

    /// The file in which it is kept.
    pub(crate) fn file(&self, session: &SessionId) -> PathBuf {
        self.home.token_of(session)
    }

    /// Whether a text has the shape of such a token.
    pub(crate) fn is_one(text: &str) -> bool {
        named(text).is_some()
    }

    /// The session whose token this is.
    pub(crate) fn bearer(&self, text: &str) -> Option<SessionId> {
        let session = named(text)?;
        let known = self.home.known_session_token(&session)?;
        let digest = |text: &str| -> [u8; 32] { Sha256::digest(text.as_bytes()).into() };
        bool::from(digest(known.expose()).ct_eq(&digest(text))).then_some(session)
    }
}

fn named(text: &str) -> Option<SessionId> {
    let session = SessionId::parse(text.split_once('.')?.0).ok()?;
    session.as_str().starts_with(SessionId::PREFIX).then_some(session)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_speaks_for_its_session_and_ends_with_it() {
        let folder = tempfile::tempdir().unwrap();
        let home = Home::resolve(Some(folder.path().join("home")));
        home.prepare().unwrap();
        let all = Capabilities::of(&home);
        let (one, other) = (SessionId::from_random(&[1; 4]), SessionId::from_random(&[2; 4]));
        let token = all.token(&one).unwrap();
        assert_eq!(all.token(&one).unwrap(), token, "it has one");
        assert_eq!(all.bearer(&token), Some(one.clone()));
        let secret = token.split_once('.').unwrap().1;
        let forged = format!("{other}.{secret}");
        assert_eq!(all.bearer(&forged), None, "the other has none yet");
        all.token(&other).unwrap();
        for wrong in [
            forged.as_str(),
            &format!("{one}."),
            &format!("{one}.{secret}0"),
            "..",
            "",
            one.as_str(),
            "../x.y",
        ] {
            assert_eq!(all.bearer(wrong), None, "{wrong}");
        }
        home.drop_env(&one).unwrap();
        assert_eq!(all.bearer(&token), None);
    }
}
