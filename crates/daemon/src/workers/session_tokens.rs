//! The tokens of sessions: what an agent proves with that it speaks for its own. A token names its session, so that it
//! is found without a list, and ends with it; the secret lies beside the session's variables, and nowhere else.

use std::path::PathBuf;

use qd_protocol::SessionId;
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;

use crate::home::{DaemonHome, HomeError};

/// The tokens of all sessions of a home.
#[derive(Debug, Clone)]
pub(crate) struct SessionTokens {
    home: DaemonHome,
}

impl SessionTokens {
    pub(crate) fn of(home: &DaemonHome) -> Self {
        Self { home: home.clone() }
    }

    /// The token of a session, made on the first call.
    pub(crate) fn token(&self, session: &SessionId) -> Result<String, HomeError> {
        Ok(self.home.session_token(session)?.expose().to_owned())
    }

    /// The file in which it is kept.
    pub(crate) fn token_file(&self, session: &SessionId) -> PathBuf {
        self.home.session_token_file(session)
    }

    /// Whether a text has the shape of such a token.
    pub(crate) fn is_session_token(text: &str) -> bool {
        session_named_in(text).is_some()
    }

    /// The session whose token this is.
    pub(crate) fn session_of_token(&self, text: &str) -> Option<SessionId> {
        let session = session_named_in(text)?;
        let known = self.home.existing_session_token(&session)?;
        let digest = |text: &str| -> [u8; 32] { Sha256::digest(text.as_bytes()).into() };
        bool::from(digest(known.expose()).ct_eq(&digest(text))).then_some(session)
    }
}

fn session_named_in(text: &str) -> Option<SessionId> {
    let session = SessionId::parse(text.split_once('.')?.0).ok()?;
    session.as_str().starts_with(SessionId::PREFIX).then_some(session)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_speaks_for_its_session_and_ends_with_it() {
        let folder = tempfile::tempdir().unwrap();
        let home = DaemonHome::resolve(Some(folder.path().join("home")));
        home.prepare().unwrap();
        let all = SessionTokens::of(&home);
        let (one, other) = (SessionId::from_random(&[1; 4]), SessionId::from_random(&[2; 4]));
        let token = all.token(&one).unwrap();
        assert_eq!(all.token(&one).unwrap(), token, "it has one");
        assert_eq!(all.session_of_token(&token), Some(one.clone()));
        let secret = token.split_once('.').unwrap().1;
        let forged = format!("{other}.{secret}");
        assert_eq!(all.session_of_token(&forged), None, "the other has none yet");
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
            assert_eq!(all.session_of_token(wrong), None, "{wrong}");
        }
        home.remove_session_secrets(&one).unwrap();
        assert_eq!(all.session_of_token(&token), None);
    }
}
