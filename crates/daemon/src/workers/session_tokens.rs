//! Session tokens: with one, an agent proves that it acts for its session. A token contains its session's id, so no
//! list is needed to find it, and it ends with the session. The secret is stored in the session's tool directory only.

use std::path::PathBuf;

use qd_home::{DaemonHome, HomeError};
use qd_protocol::SessionId;
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;

/// The session tokens of a home.
#[derive(Debug, Clone)]
pub(crate) struct SessionTokens {
    home: DaemonHome,
}

impl SessionTokens {
    pub(crate) fn of(home: &DaemonHome) -> Self {
        Self { home: home.clone() }
    }

    /// The token of a session, created on the first call.
    pub(crate) fn token(&self, session: &SessionId) -> Result<String, HomeError> {
        Ok(self.home.session_token(session)?.expose().to_owned())
    }

    /// Makes the token of a session worthless. The next call of [`Self::token`] creates another.
    pub(crate) fn revoke(&self, session: &SessionId) -> Result<(), HomeError> {
        self.home.remove_session_token(session)
    }

    /// The file that holds a session's token.
    pub(crate) fn token_file(&self, session: &SessionId) -> PathBuf {
        self.home.session_token_file(session)
    }

    /// The folder of the token and the socket of a session, created on the first call.
    pub(crate) fn prepare_directory(&self, session: &SessionId) -> Result<PathBuf, HomeError> {
        self.home.prepare_tool_directory(session)
    }

    /// Whether the session has its folder.
    pub(crate) fn has_directory(&self, session: &SessionId) -> bool {
        self.home.tool_directory(session).is_dir()
    }

    /// Whether a text has the form of a session token.
    pub(crate) fn is_session_token(text: &str) -> bool {
        session_named_in(text).is_some()
    }

    /// The session that this token belongs to, if the token is valid.
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
    use crate::temporary_home::temporary_home;

    #[test]
    fn a_token_speaks_for_its_session_and_ends_with_it() {
        let (_folder, home) = temporary_home();
        let all = SessionTokens::of(&home);
        let (session, other) = (SessionId::from_random(&[1; 4]), SessionId::from_random(&[2; 4]));
        let token = all.token(&session).unwrap();
        assert_eq!(all.token(&session).unwrap(), token, "there is a single token");
        assert_eq!(all.session_of_token(&token), Some(session.clone()));
        let secret = token.split_once('.').unwrap().1;
        let forged = format!("{other}.{secret}");
        assert_eq!(all.session_of_token(&forged), None, "the other has none yet");
        all.token(&other).unwrap();
        for wrong in [
            forged.as_str(),
            &format!("{session}."),
            &format!("{session}.{secret}0"),
            "..",
            "",
            session.as_str(),
            "../x.y",
        ] {
            assert_eq!(all.session_of_token(wrong), None, "{wrong}");
        }
        all.revoke(&session).unwrap();
        assert_eq!(all.session_of_token(&token), None);
        let token = all.token(&session).unwrap();
        assert_eq!(all.session_of_token(&token), Some(session.clone()), "the next one is valid");
        home.remove_session_secrets(&session).unwrap();
        assert_eq!(all.session_of_token(&token), None);
    }
}
