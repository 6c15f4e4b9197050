//! Tokens that are kept in a file of the home: those of other machines and those of clients. The file has a hash of each
//! token and what it grants, and never the token itself. What a grant means is decided by its owner.

use std::fmt;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use parking_lot::{Mutex, MutexGuard};
use qd_home::{HomeError, open_private, replace_file};
use qd_protocol::{Millis, TokenId};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;

/// The tokens in one file. Methods that change them block on the disk.
pub(crate) struct TokenStore<G> {
    path: PathBuf,
    tokens: Mutex<Vec<StoredToken<G>>>,
    /// Held while the file is written, so that the file always has the latest change.
    writing: Mutex<()>,
}

/// A token as stored on disk.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct StoredToken<G> {
    pub(crate) id: TokenId,
    pub(crate) name: Option<String>,
    pub(crate) created_at: Millis,
    pub(crate) last_used_at: Option<Millis>,
    sha256: TokenHash,
    /// The digest of the request that created the token, if it had an idempotency key: a repeat of it finds the token, even
    /// if the daemon was killed before it had stored the response.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    request: Option<TokenHash>,
    #[serde(flatten)]
    pub(crate) grant: G,
}

/// A SHA-256 hash, in hexadecimal on disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct TokenHash([u8; 32]);

impl<G: Clone + Serialize + DeserializeOwned> TokenStore<G> {
    /// Loads the tokens of a file. There are none if it does not exist.
    pub(crate) fn open(path: &Path) -> Result<Self, HomeError> {
        let stored = match open_private(path) {
            Ok(mut file) => {
                let mut text = Vec::new();
                let read = file.read_to_end(&mut text);
                read.map_err(|source| HomeError::Io { action: "read", path: path.to_owned(), source })?;
                serde_json::from_slice(&text)
                    .map_err(|source| HomeError::BadTokens { path: path.to_owned(), source })?
            }
            Err(HomeError::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => Vec::new(),
            Err(error) => return Err(error),
        };
        Ok(Self { path: path.to_owned(), tokens: Mutex::new(stored), writing: Mutex::default() })
    }

    /// Adds a token. It is valid once this returns.
    pub(crate) fn add(
        &self,
        id: TokenId,
        name: Option<String>,
        token: &str,
        grant: G,
        request: Option<[u8; 32]>,
    ) -> Result<StoredToken<G>, HomeError> {
        let (sha256, request) = (TokenHash(Sha256::digest(token).into()), request.map(TokenHash));
        let created_at = Millis::now();
        let token = StoredToken { id, name, created_at, last_used_at: None, sha256, request, grant };
        self.update(|tokens| tokens.push(token.clone()))?;
        Ok(token)
    }

    /// All tokens, oldest first.
    pub(crate) fn list(&self) -> Vec<StoredToken<G>> {
        self.lock().clone()
    }

    /// The token with this id, if it still exists.
    pub(crate) fn find(&self, id: &TokenId) -> Option<StoredToken<G>> {
        self.lock().iter().find(|token| token.id == *id).cloned()
    }

    /// The token that was created by this request.
    pub(crate) fn find_by_request(&self, request: Option<[u8; 32]>) -> Option<StoredToken<G>> {
        let request = request.map(TokenHash)?;
        self.lock().iter().find(|token| token.request == Some(request)).cloned()
    }

    /// The token with this hash. All tokens are compared, each in constant time, so the response time reveals nothing.
    pub(crate) fn find_by_hash(&self, sha256: &[u8; 32]) -> Option<StoredToken<G>> {
        let mut found = None;
        for token in self.lock().iter() {
            if bool::from(token.sha256.0.ct_eq(sha256)) {
                found = Some(token.clone());
            }
        }
        found
    }

    /// Removes a token and returns it, if there is one with this id.
    pub(crate) fn remove(&self, id: &TokenId) -> Result<Option<StoredToken<G>>, HomeError> {
        let known = self.find(id);
        if known.is_some() {
            self.update(|tokens| tokens.retain(|token| token.id != *id))?;
        }
        Ok(known)
    }

    /// Records in the file that a token was used now.
    pub(crate) fn mark_used(&self, id: &TokenId) -> Result<(), HomeError> {
        self.note_used(id);
        self.update(|_| ())
    }

    /// Records in memory that a token was used now. The next change of the file stores it too.
    pub(crate) fn note_used(&self, id: &TokenId) {
        if let Some(token) = self.lock().iter_mut().find(|token| token.id == *id) {
            token.last_used_at = Some(Millis::now());
        }
    }

    /// Writes the change to disk first, then applies it in memory.
    fn update(&self, change: impl FnOnce(&mut Vec<StoredToken<G>>)) -> Result<(), HomeError> {
        let _one_at_a_time = self.writing.lock();
        let mut next = self.lock().clone();
        change(&mut next);
        let text = serde_json::to_vec_pretty(&next)
            .map_err(|source| HomeError::BadTokens { path: self.path.clone(), source })?;
        replace_file(&self.path, &text)?;
        *self.lock() = next;
        Ok(())
    }

    /// Every change under the lock is one assignment, so a panic leaves the list whole.
    fn lock(&self) -> MutexGuard<'_, Vec<StoredToken<G>>> {
        self.tokens.lock()
    }
}

impl<G> fmt::Debug for TokenStore<G> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TokenStore").field("path", &self.path).finish_non_exhaustive()
    }
}

impl Serialize for TokenHash {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&hex::encode(self.0))
    }
}

impl<'de> Deserialize<'de> for TokenHash {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        let mut bytes = [0; 32];
        hex::decode_to_slice(text, &mut bytes)
            .map_err(|_| serde::de::Error::custom("a SHA-256 is 64 hexadecimal digits"))?;
        Ok(Self(bytes))
    }
}
