//! The tokens with which processes on other machines join. The home stores a hash of each and never the token itself.
//! The guard decides what a token may do; the caller that revokes one also ends its connections.

use std::fmt;
use std::io::{self, Read};
use std::path::PathBuf;

use parking_lot::{Mutex, MutexGuard};
use qd_home::{DaemonHome, HomeError, open_private, replace_file};
use qd_protocol::api::WorkerToken;
use qd_protocol::{Millis, TokenId};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;

use super::WorkerKeys;
use crate::random;

/// The prefix of worker tokens, by which people and secret scanners recognize one.
const PREFIX: &str = "qdw_";

/// The address at which a worker on another machine reaches this daemon.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct JoinAddress {
    /// `http://HOST:PORT` or `https://HOST:PORT`.
    pub(crate) url: String,
    /// The fingerprint of the certificate to accept, if no authority has signed it.
    pub(crate) fingerprint: Option<String>,
}

/// All worker tokens of a home. Methods that change them block on the disk.
pub(crate) struct WorkerTokenStore {
    path: PathBuf,
    keys: WorkerKeys,
    tokens: Mutex<Vec<StoredWorkerToken>>,
    /// Held while the file is written, so that the file always has the latest change.
    writing: Mutex<()>,
}

/// A token as stored on disk.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct StoredWorkerToken {
    id: TokenId,
    name: Option<String>,
    created_at: Millis,
    last_used_at: Option<Millis>,
    sha256: WorkerTokenHash,
}

impl StoredWorkerToken {
    /// The fields that may be shown.
    fn view(&self) -> WorkerToken {
        let Self { id, name, created_at, last_used_at, .. } = self.clone();
        WorkerToken { id, name, created_at, last_used_at }
    }
}

/// A SHA-256 hash, in hexadecimal on disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct WorkerTokenHash([u8; 32]);

impl WorkerTokenStore {
    /// Loads the tokens of the home.
    pub(super) fn open(home: &DaemonHome, keys: WorkerKeys) -> Result<Self, HomeError> {
        let path = home.worker_tokens();
        let stored = match open_private(&path) {
            Ok(mut file) => {
                let mut text = Vec::new();
                let read = file.read_to_end(&mut text);
                read.map_err(|source| HomeError::Io { action: "read", path: path.clone(), source })?;
                serde_json::from_slice(&text)
                    .map_err(|source| HomeError::BadTokens { path: path.clone(), source })?
            }
            Err(HomeError::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => Vec::new(),
            Err(error) => return Err(error),
        };
        Ok(Self { path, keys, tokens: Mutex::new(stored), writing: Mutex::default() })
    }

    /// Creates a token. It is valid once this returns.
    pub(crate) fn create(&self, name: Option<String>) -> Result<WorkerToken, HomeError> {
        let id = TokenId::from_random(&random::bytes::<16>());
        let sha256 = WorkerTokenHash(Sha256::digest(self.derive_token(&id)).into());
        let token = StoredWorkerToken { id, name, created_at: Millis::now(), last_used_at: None, sha256 };
        let view = token.view();
        self.update(|tokens| tokens.push(token))?;
        Ok(view)
    }

    /// The token with this id, for the one response that shows it. It is derived and never stored: a repeat of the
    /// request that created it gets the same token.
    pub(crate) fn derive_token(&self, id: &TokenId) -> String {
        format!("{PREFIX}{}", self.keys.derive("worker token", id.as_str()))
    }

    /// All tokens, oldest first.
    pub(crate) fn list(&self) -> Vec<WorkerToken> {
        self.lock().iter().map(StoredWorkerToken::view).collect()
    }

    /// Revokes a token. Returns false if there is none with this id.
    pub(crate) fn revoke(&self, id: &TokenId) -> Result<bool, HomeError> {
        self.update(|tokens| {
            let before = tokens.len();
            tokens.retain(|token| token.id != *id);
            tokens.len() < before
        })
    }

    /// Records that a worker joined with this token.
    pub(crate) fn mark_used(&self, id: &TokenId) -> Result<(), HomeError> {
        self.update(|tokens| {
            if let Some(token) = tokens.iter_mut().find(|token| token.id == *id) {
                token.last_used_at = Some(Millis::now());
            }
        })
    }

    /// Whether this token still exists.
    pub(crate) fn is_valid(&self, id: &TokenId) -> bool {
        self.lock().iter().any(|token| token.id == *id)
    }

    /// The token with this hash. All tokens are compared, each in constant time, so the response time reveals nothing.
    pub(crate) fn token_of_hash(&self, sha256: &[u8; 32]) -> Option<TokenId> {
        let mut found = None;
        for token in self.lock().iter() {
            if bool::from(token.sha256.0.ct_eq(sha256)) {
                found = Some(token.id.clone());
            }
        }
        found
    }

    /// Writes the change to disk first, then applies it in memory.
    fn update<T>(&self, change: impl FnOnce(&mut Vec<StoredWorkerToken>) -> T) -> Result<T, HomeError> {
        let _one_at_a_time = self.writing.lock();
        let mut next = self.lock().clone();
        let result = change(&mut next);
        let text = serde_json::to_vec_pretty(&next)
            .map_err(|source| HomeError::BadTokens { path: self.path.clone(), source })?;
        replace_file(&self.path, &text)?;
        *self.lock() = next;
        Ok(result)
    }

    /// Every change under the lock is one assignment, so a panic leaves the list whole.
    fn lock(&self) -> MutexGuard<'_, Vec<StoredWorkerToken>> {
        self.tokens.lock()
    }
}

impl fmt::Debug for WorkerTokenStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tokens").field("path", &self.path).finish_non_exhaustive()
    }
}

impl Serialize for WorkerTokenHash {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&hex::encode(self.0))
    }
}

impl<'de> Deserialize<'de> for WorkerTokenHash {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        let mut bytes = [0; 32];
        hex::decode_to_slice(text, &mut bytes)
            .map_err(|_| serde::de::Error::custom("a SHA-256 is 64 hexadecimal digits"))?;
        Ok(Self(bytes))
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;
    use crate::temporary_home::temporary_home;

    fn open(home: &DaemonHome) -> WorkerTokenStore {
        WorkerTokenStore::open(home, WorkerKeys(home.worker_key().unwrap())).unwrap()
    }

    fn bearer(tokens: &WorkerTokenStore, text: &str) -> Option<TokenId> {
        tokens.token_of_hash(&Sha256::digest(text).into())
    }

    #[test]
    fn a_token_is_known_by_its_hash_alone_and_the_next_daemon_knows_it_too() {
        let (_folder, home) = temporary_home();
        let tokens = open(&home);
        let token = tokens.create(Some("box".to_owned())).unwrap();
        let other = tokens.create(None).unwrap();
        let text = tokens.derive_token(&token.id);
        assert!(text.starts_with(PREFIX) && text != tokens.derive_token(&other.id));
        assert_eq!(bearer(&tokens, &text), Some(token.id.clone()));
        assert_eq!(bearer(&tokens, &format!("{text}x")), None);
        let file = std::fs::read_to_string(home.worker_tokens()).unwrap();
        assert!(!file.contains(&text) && file.contains("box"), "{file}");
        assert_eq!(std::fs::metadata(home.worker_tokens()).unwrap().permissions().mode() & 0o7777, 0o600);
        let reopened = open(&home);
        assert_eq!(reopened.list(), [token.clone(), other]);
        assert_eq!(bearer(&reopened, &text), Some(token.id));
    }

    #[test]
    fn a_revoked_token_is_known_to_nobody_any_more() {
        let (_folder, home) = temporary_home();
        let tokens = open(&home);
        let token = tokens.create(None).unwrap();
        tokens.mark_used(&token.id).unwrap();
        assert!(tokens.list()[0].last_used_at.is_some());
        assert!(tokens.revoke(&token.id).unwrap());
        assert!(!tokens.revoke(&token.id).unwrap() && !tokens.is_valid(&token.id));
        assert_eq!(bearer(&tokens, &tokens.derive_token(&token.id)), None);
        assert!(open(&home).list().is_empty());
    }

    #[test]
    fn a_file_that_holds_no_tokens_is_an_error_and_not_silence() {
        let (_folder, home) = temporary_home();
        for text in [
            "{",
            "[{\"id\":\"tok_1\",\"name\":null,\"created_at\":\"2026-01-01T00:00:00Z\",\"sha256\":\"00\"}]",
        ] {
            std::fs::write(home.worker_tokens(), text).unwrap();
            let error = WorkerTokenStore::open(&home, WorkerKeys(home.worker_key().unwrap())).unwrap_err();
            assert!(matches!(error, HomeError::BadTokens { .. }), "{error}");
        }
    }
}
