//! The secrets of a home: its own token, the key of its workers, and the variables and tokens of sessions. A secret is
//! created once, with its final mode, and a link in its place is not followed. What they open is decided elsewhere.

use std::collections::BTreeMap;
use std::fmt;
use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use qd_protocol::SessionId;

use crate::home::DaemonHome;
use crate::private_files::{
    HomeError, create_file_if_absent, io_error, open_private, prepare_private_folder, remove_file_if_present,
    replace_file,
};

/// Bytes of randomness in a token.
const TOKEN_BYTES: usize = 32;
/// A token that a person wrote to the file must have at least this length, or it could be guessed.
pub(crate) const TOKEN_CHARS_MIN: usize = 32;
/// The longest token; a larger file is not a token file.
const TOKEN_CHARS_MAX: usize = 1024;

/// A bearer token. It cannot leak into a log, because its debug form hides it.
#[derive(Clone, PartialEq, Eq)]
pub struct SecretToken(String);

impl SecretToken {
    /// The token itself, for the header or comparison that needs it.
    pub fn expose(&self) -> &str {
        &self.0
    }

    fn parse(text: &str) -> Option<Self> {
        let text = text.trim();
        let valid_length = (TOKEN_CHARS_MIN..=TOKEN_CHARS_MAX).contains(&text.len());
        (valid_length && text.bytes().all(|b| b.is_ascii_graphic())).then(|| Self(text.to_owned()))
    }
}

impl fmt::Debug for SecretToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(hidden)")
    }
}

impl DaemonHome {
    /// The bearer token, created on the first call.
    pub fn token(&self) -> Result<SecretToken, HomeError> {
        Self::load_or_create_secret(&self.token_file(), "")
    }

    /// The key that the workers' secrets are derived from, created on the first call.
    pub fn worker_key(&self) -> Result<SecretToken, HomeError> {
        Self::load_or_create_secret(&self.workers().join("key"), "")
    }

    /// Writes the key of the running daemon again if somebody has removed it, or the folder that it is in. Otherwise
    /// the next daemon would make another key, and could not reach the workers of this one.
    pub fn restore_worker_key(&self, key: &SecretToken) -> Result<(), HomeError> {
        let path = self.workers().join("key");
        if fs::exists(&path).unwrap_or(false) {
            return Ok(());
        }
        prepare_private_folder(&self.workers())?;
        match create_file_if_absent(&path, key.expose().as_bytes()) {
            Err(HomeError::Io { source, .. }) if source.kind() == io::ErrorKind::AlreadyExists => Ok(()),
            written => written,
        }
    }

    fn load_or_create_secret(path: &Path, prefix: &str) -> Result<SecretToken, HomeError> {
        loop {
            match open_private(path) {
                Ok(file) => return read_token(path, file),
                Err(HomeError::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(error),
            }
            let mut random = [0; TOKEN_BYTES];
            getrandom::fill(&mut random).map_err(|error| {
                io_error(path, "draw a random token for", io::Error::other(error.to_string()))
            })?;
            let text = format!("{prefix}{}", hex::encode(random));
            match create_file_if_absent(path, text.as_bytes()) {
                // Another process was faster, and its token is the one.
                Err(HomeError::Io { source, .. }) if source.kind() == io::ErrorKind::AlreadyExists => {}
                Err(error) => return Err(error),
                Ok(()) => return Ok(SecretToken(text)),
            }
        }
    }

    /// Stores the values of a session's variables with mode 0600, synced before it returns.
    pub fn store_session_env(
        &self,
        session: &SessionId,
        env: &BTreeMap<String, String>,
    ) -> Result<(), HomeError> {
        let path = self.session_env_file(session);
        if env.is_empty() {
            return remove_file_if_present(&path);
        }
        let text =
            serde_json::to_vec(env).map_err(|source| HomeError::BadEnv { path: path.clone(), source })?;
        replace_file(&path, &text)
    }

    /// The values of a session's variables; empty if it has none.
    pub fn session_env(&self, session: &SessionId) -> Result<BTreeMap<String, String>, HomeError> {
        let path = self.session_env_file(session);
        let mut text = Vec::new();
        match open_private(&path) {
            Ok(mut file) => file.read_to_end(&mut text).map_err(|source| io_error(&path, "read", source))?,
            Err(HomeError::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => {
                return Ok(BTreeMap::new());
            }
            Err(error) => return Err(error),
        };
        serde_json::from_slice(&text).map_err(|source| HomeError::BadEnv { path, source })
    }

    /// Removes the values of a session's variables, and its tool directory with its token.
    pub fn remove_session_secrets(&self, session: &SessionId) -> Result<(), HomeError> {
        remove_file_if_present(&self.session_env_file(session))?;
        self.remove_session_token(session)?;
        let directory = self.tool_directory(session);
        match fs::remove_dir_all(&directory) {
            Err(source) if source.kind() != io::ErrorKind::NotFound => {
                Err(io_error(&directory, "remove", source))
            }
            _ => Ok(()),
        }
    }

    /// Creates the tool directory of a session, or tightens the mode of the one that it has.
    pub fn prepare_tool_directory(&self, session: &SessionId) -> Result<PathBuf, HomeError> {
        prepare_private_folder(&self.tools())?;
        let directory = self.tool_directory(session);
        prepare_private_folder(&directory)?;
        Ok(directory)
    }

    /// Removes the token of a session, so that the next call of [`Self::session_token`] creates another.
    pub fn remove_session_token(&self, session: &SessionId) -> Result<(), HomeError> {
        remove_file_if_present(&self.session_token_file(session))?;
        remove_file_if_present(&self.earlier_session_token_file(session))
    }

    /// The token of a session, which begins with its id and a dot; created on the first call, or taken over from an
    /// earlier release.
    pub fn session_token(&self, session: &SessionId) -> Result<SecretToken, HomeError> {
        self.prepare_tool_directory(session)?;
        let path = self.session_token_file(session);
        let earlier = existing_token(&self.earlier_session_token_file(session));
        if let Some(token) = earlier.filter(|_| !path.exists()) {
            replace_file(&path, token.expose().as_bytes())?;
        }
        Self::load_or_create_secret(&path, &format!("{session}."))
    }

    /// The token of a session, if it has one.
    pub fn existing_session_token(&self, session: &SessionId) -> Option<SecretToken> {
        existing_token(&self.session_token_file(session))
            .or_else(|| existing_token(&self.earlier_session_token_file(session)))
    }

    pub fn session_token_file(&self, session: &SessionId) -> PathBuf {
        self.tool_directory(session).join("token")
    }

    /// Where earlier releases stored the token. Their agents may still run, and name this file.
    fn earlier_session_token_file(&self, session: &SessionId) -> PathBuf {
        self.secrets().join(format!("{session}.token"))
    }

    /// A session id begins with a letter or digit and contains no slash, so the path cannot leave the folder.
    fn session_env_file(&self, session: &SessionId) -> PathBuf {
        self.secrets().join(format!("{session}.json"))
    }
}

fn existing_token(path: &Path) -> Option<SecretToken> {
    read_token(path, open_private(path).ok()?).ok()
}

fn read_token(path: &Path, file: File) -> Result<SecretToken, HomeError> {
    let mut text = String::new();
    let limit = u64::try_from(TOKEN_CHARS_MAX).expect("a small number") + 2;
    match file.take(limit).read_to_string(&mut text) {
        Ok(_) => SecretToken::parse(&text).ok_or_else(|| HomeError::BadToken { path: path.to_owned() }),
        Err(source) if source.kind() == io::ErrorKind::InvalidData => {
            Err(HomeError::BadToken { path: path.to_owned() })
        }
        Err(source) => Err(io_error(path, "read", source)),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;
    use crate::test_home::{mode, prepared_home};

    #[test]
    fn a_token_is_made_once_and_kept_private() {
        let (_folder, home) = prepared_home();
        let token = home.token().unwrap();
        assert_eq!(token.expose().len(), 64);
        assert!(token.expose().bytes().all(|b| b.is_ascii_hexdigit()));
        assert_eq!(mode(home.token_file()), 0o600);
        fs::set_permissions(home.token_file(), fs::Permissions::from_mode(0o644)).unwrap();
        assert_eq!(home.token().unwrap(), token);
        assert_eq!(mode(home.token_file()), 0o600, "a looser mode is tightened");
        assert!(!format!("{token:?}").contains(token.expose()));
        let files = fs::read_dir(home.path()).unwrap().map(|entry| entry.unwrap().path());
        let files: Vec<_> = files.filter(|path| path.is_file()).collect();
        assert_eq!(files, [home.token_file()], "no draft is left behind");
    }

    #[test]
    fn many_first_starts_at_once_agree_on_one_token() {
        let (_folder, home) = prepared_home();
        let tokens: Vec<SecretToken> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..8).map(|_| scope.spawn(|| home.token().unwrap())).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert!(tokens.iter().all(|token| *token == tokens[0]));
    }

    #[test]
    fn a_token_file_that_holds_no_token_is_an_error_and_a_link_is_not_followed() {
        let (folder, home) = prepared_home();
        for text in ["", "short", "with a space in the middle of it, and long enough", &"x".repeat(5000)] {
            fs::write(home.token_file(), text).unwrap();
            assert!(matches!(home.token(), Err(HomeError::BadToken { .. })), "{text}");
        }
        fs::remove_file(home.token_file()).unwrap();
        let elsewhere = folder.path().join("elsewhere");
        fs::write(&elsewhere, "a".repeat(64)).unwrap();
        symlink(&elsewhere, home.token_file()).unwrap();
        assert!(home.token().is_err());
    }

    #[test]
    fn variables_of_a_session_are_kept_apart_and_forgotten_on_demand() {
        let (_folder, home) = prepared_home();
        let session = SessionId::parse("ses_1").unwrap();
        assert!(home.session_env(&session).unwrap().is_empty());
        let env = BTreeMap::from([("KEY".to_owned(), "canary\n\"ä".to_owned())]);
        home.store_session_env(&session, &env).unwrap();
        assert_eq!(home.session_env(&session).unwrap(), env);
        assert_eq!(mode(home.secrets().join("ses_1.json")), 0o600);
        let other = BTreeMap::from([("KEY".to_owned(), "other".to_owned())]);
        home.store_session_env(&session, &other).unwrap();
        assert_eq!(home.session_env(&session).unwrap(), other);
        home.remove_session_secrets(&session).unwrap();
        home.remove_session_secrets(&session).unwrap();
        assert!(home.session_env(&session).unwrap().is_empty());
        assert_eq!(fs::read_dir(home.secrets()).unwrap().count(), 0);
    }

    #[test]
    fn a_token_of_a_session_is_in_its_private_tool_directory_and_goes_with_it() {
        let (_folder, home) = prepared_home();
        let session = SessionId::parse("ses_1").unwrap();
        assert!(home.existing_session_token(&session).is_none());
        let directory = home.prepare_tool_directory(&session).unwrap();
        let token = home.session_token(&session).unwrap();
        assert_eq!(home.existing_session_token(&session), Some(token.clone()));
        assert_eq!((mode(&directory), mode(directory.join("token"))), (0o700, 0o600));
        home.remove_session_token(&session).unwrap();
        assert!(home.existing_session_token(&session).is_none() && directory.exists());
        assert_ne!(home.session_token(&session).unwrap(), token, "the next one is another");
        home.remove_session_secrets(&session).unwrap();
        assert_eq!(fs::read_dir(home.tools()).unwrap().count(), 0);
    }

    #[test]
    fn a_token_that_an_earlier_release_stored_stays_valid() {
        let (_folder, home) = prepared_home();
        let session = SessionId::parse("ses_1").unwrap();
        let earlier = format!("ses_1.{}", "0".repeat(64));
        fs::write(home.secrets().join("ses_1.token"), &earlier).unwrap();
        assert_eq!(home.existing_session_token(&session).unwrap().expose(), earlier);
        assert_eq!(home.session_token(&session).unwrap().expose(), earlier, "its agent may still use it");
        home.remove_session_token(&session).unwrap();
        assert!(home.existing_session_token(&session).is_none());
    }
}
