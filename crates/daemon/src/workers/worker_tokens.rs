//! The tokens with which processes on other machines join. The home keeps a hash of each and never the token itself;
//! what one may do is the guard's business, and that a revoked one ends its connections is said by whoever revokes it.

use std::fmt;
use std::io::{self, Read};
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};

use qd_protocol::api::WorkerToken;
use qd_protocol::{Millis, TokenId};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;

use super::WorkerKeys;
use crate::home::{DaemonHome, HomeError, open_private, replace_file};
use crate::random;

/// What a worker token begins with, so that people and scanners know one when they see it.
const PREFIX: &str = "qdw_";

/// Where a worker on another machine finds this daemon.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct JoinAddress {
    /// `http://HOST:PORT` or `https://HOST:PORT`.
    pub(crate) url: String,
    /// The certificate to accept there, if nobody else vouches for it.
    pub(crate) fingerprint: Option<String>,
}

/// All worker tokens of a home. Whatever changes them blocks for the disk.
pub(crate) struct WorkerTokenStore {
    path: PathBuf,
    keys: WorkerKeys,
    tokens: Mutex<Vec<StoredWorkerToken>>,
    /// Held while the file is written, so that what is on disk is what came last.
    writing: Mutex<()>,
}

/// One token, as it is on disk.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct StoredWorkerToken {
    id: TokenId,
    name: Option<String>,
    created_at: Millis,
    last_used_at: Option<Millis>,
    sha256: WorkerTokenHash,
}

impl StoredWorkerToken {
    /// What of it may be shown.
    fn view(&self) -> WorkerToken {
        let Self { id, name, created_at, last_used_at, .. } = self.clone();
        WorkerToken { id, name, created_at, last_used_at }
    }
}

/// A SHA-256, in hexadecimal on disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct WorkerTokenHash([u8; 32]);

impl WorkerTokenStore {
    /// Those that the home knows.
    pub(super) fn open(home: &DaemonHome, keys: WorkerKeys) -> Result<Self, HomeError> {
        let path = home.worker_tokens();
        let kept = match open_private(&path) {
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
        Ok(Self { path, keys, tokens: Mutex::new(kept), writing: Mutex::default() })
    }

    /// Makes one. It counts once this returns.
    pub(crate) fn create(&self, name: Option<String>) -> Result<WorkerToken, HomeError> {
        let id = TokenId::from_random(&random::bytes::<16>());
        let sha256 = WorkerTokenHash(Sha256::digest(self.derive_token(&id)).into());
        let made = StoredWorkerToken { id, name, created_at: Millis::now(), last_used_at: None, sha256 };
        let shown = made.view();
        self.update(|kept| kept.push(made))?;
        Ok(shown)
    }

    /// The token of this name, for the one answer that shows it. It is derived and not kept: a repeat of the request
    /// that made it gets the same, and no file and no journal holds it.
    pub(crate) fn derive_token(&self, id: &TokenId) -> String {
        format!("{PREFIX}{}", self.keys.derive("worker token", id.as_str()))
    }

    /// All of them, oldest first.
    pub(crate) fn list(&self) -> Vec<WorkerToken> {
        self.lock().iter().map(StoredWorkerToken::view).collect()
    }

    /// Forgets one; false if there is none of this name.
    pub(crate) fn revoke(&self, id: &TokenId) -> Result<bool, HomeError> {
        self.update(|kept| {
            let before = kept.len();
            kept.retain(|kept| kept.id != *id);
            kept.len() < before
        })
    }

    /// Notes that somebody joined with it.
    pub(crate) fn mark_used(&self, id: &TokenId) -> Result<(), HomeError> {
        self.update(|kept| {
            if let Some(kept) = kept.iter_mut().find(|kept| kept.id == *id) {
                kept.last_used_at = Some(Millis::now());
            }
        })
    }

    /// Whether it still counts.
    pub(crate) fn is_valid(&self, id: &TokenId) -> bool {
        self.lock().iter().any(|kept| kept.id == *id)
    }

    /// The token with this hash. All are compared, and each in the same time, so that the answer's time tells nothing.
    pub(crate) fn token_of_hash(&self, sha256: &[u8; 32]) -> Option<TokenId> {
        let mut found = None;
        for kept in self.lock().iter() {
            if bool::from(kept.sha256.0.ct_eq(sha256)) {
                found = Some(kept.id.clone());
            }
        }
        found
    }

    /// On disk first, then in force.
    fn update<T>(&self, how: impl FnOnce(&mut Vec<StoredWorkerToken>) -> T) -> Result<T, HomeError> {
        let _one_at_a_time = self.writing.lock().unwrap_or_else(PoisonError::into_inner);
        let mut next = self.lock().clone();
        let result = how(&mut next);
        let text = serde_json::to_vec_pretty(&next)
            .map_err(|source| HomeError::BadTokens { path: self.path.clone(), source })?;
        replace_file(&self.path, &text)?;
        *self.lock() = next;
        Ok(result)
    }

    /// Every change under the lock is one assignment: a panic elsewhere leaves it whole.
    fn lock(&self) -> MutexGuard<'_, Vec<StoredWorkerToken>> {
        self.tokens.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for WorkerTokenStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tokens").field("path", &self.path).finish_non_exhaustive()
    }
}

impl Serialize for WorkerTokenHash {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let text: String = self.0.iter().map(|byte| format!("{byte:02x}")).collect();
        serializer.serialize_str(&text)
    }
}

impl<'de> Deserialize<'de> for WorkerTokenHash {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        let bad = || serde::de::Error::custom("a SHA-256 is 64 hexadecimal digits");
        if text.len() != 64 || !text.bytes().all(|byte| byte.is_ascii_hexdigit()) {
            return Err(bad());
        }
        let mut bytes = [0; 32];
        for (at, byte) in bytes.iter_mut().enumerate() {
            *byte = u8::from_str_radix(&text[2 * at..2 * at + 2], 16).map_err(|_| bad())?;
        }
        Ok(Self(bytes))
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn home() -> (tempfile::TempDir, DaemonHome) {
        let folder = tempfile::tempdir().unwrap();
        let home = DaemonHome::resolve(Some(folder.path().join("home")));
        home.prepare().unwrap();
        (folder, home)
    }

    fn open(home: &DaemonHome) -> WorkerTokenStore {
        WorkerTokenStore::open(home, WorkerKeys(home.worker_key().unwrap())).unwrap()
    }

    fn bearer(tokens: &WorkerTokenStore, text: &str) -> Option<TokenId> {
        tokens.token_of_hash(&Sha256::digest(text).into())
    }

    #[test]
    fn a_token_is_known_by_its_hash_alone_and_the_next_daemon_knows_it_too() {
        let (_folder, home) = home();
        let tokens = open(&home);
        let made = tokens.create(Some("box".to_owned())).unwrap();
        let other = tokens.create(None).unwrap();
        let text = tokens.derive_token(&made.id);
        assert!(text.starts_with(PREFIX) && text != tokens.derive_token(&other.id));
        assert_eq!(bearer(&tokens, &text), Some(made.id.clone()));
        assert_eq!(bearer(&tokens, &format!("{text}x")), None);
        let file = std::fs::read_to_string(home.worker_tokens()).unwrap();
        assert!(!file.contains(&text) && file.contains("box"), "{file}");
        assert_eq!(std::fs::metadata(home.worker_tokens()).unwrap().permissions().mode() & 0o7777, 0o600);
        let again = open(&home);
        assert_eq!(again.list(), [made.clone(), other]);
        assert_eq!(bearer(&again, &text), Some(made.id));
    }

    #[test]
    fn a_revoked_token_is_known_to_nobody_any_more() {
        let (_folder, home) = home();
        let tokens = open(&home);
        let made = tokens.create(None).unwrap();
        tokens.mark_used(&made.id).unwrap();
        assert!(tokens.list()[0].last_used_at.is_some());
        assert!(tokens.revoke(&made.id).unwrap());
        assert!(!tokens.revoke(&made.id).unwrap() && !tokens.is_valid(&made.id));
        assert_eq!(bearer(&tokens, &tokens.derive_token(&made.id)), None);
        assert!(open(&home).list().is_empty());
    }

    #[test]
    fn a_file_that_holds_no_tokens_is_an_error_and_not_silence() {
        let (_folder, home) = home();
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
