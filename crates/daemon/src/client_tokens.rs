//! The tokens of clients over TCP, each with a role and perhaps one workspace and an end. The guard looks tokens up
//! here; what a role allows is in `http/route_access.rs`. A token that is revoked or expires also ends the streams that
//! were opened with it.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use qd_home::{DaemonHome, HomeError};
use qd_protocol::api::{ClientToken, NewClientToken, TokenRole};
use qd_protocol::{ApiError, ErrorCode, Millis, TokenId, WorkspaceId};
use serde::{Deserialize, Serialize};
use tokio_util::sync::CancellationToken;

use crate::random;
use crate::token_store::{StoredToken, TokenStore};
use crate::workers::WorkerKeys;

/// The prefix of clients' tokens, by which people and secret scanners recognize one. The token's name follows.
const PREFIX: &str = "qdt_";
/// The longest name.
pub(crate) const NAME_CHARS_MAX: usize = 64;
/// The name that events use for the token in the file of the home.
const FILE_TOKEN_NAME: &str = "file";
/// The time of the last use is known to within this time, so that not every request writes the file.
const USE_STORED_EVERY: Duration = Duration::from_secs(60);
/// A timer cannot wait longer; a token that is valid for longer is looked at again then.
const TIMER_MAX: Duration = Duration::from_secs(86_400);

/// All clients' tokens of a home. Methods that change them block on the disk.
#[derive(Debug)]
pub(crate) struct ClientTokenStore {
    keys: WorkerKeys,
    tokens: TokenStore<ClientGrant>,
    /// Cancelled when the token is revoked.
    revocations: Mutex<HashMap<TokenId, CancellationToken>>,
}

/// What the bearer of a token may do, as stored on disk.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct ClientGrant {
    role: TokenRole,
    workspace_id: Option<WorkspaceId>,
    expires_at: Option<Millis>,
}

/// The client whose token a request carries; a request extension.
#[derive(Debug, Clone)]
pub(crate) struct ClientBearer {
    /// `None` for the token in the file of the home.
    pub(crate) id: Option<TokenId>,
    pub(crate) name: String,
    pub(crate) role: TokenRole,
    /// The only workspace that it may reach.
    pub(crate) workspace: Option<WorkspaceId>,
    expires_at: Option<Millis>,
    revoked: CancellationToken,
}

impl ClientBearer {
    /// The bearer of the token in the file of the home, who owns the daemon.
    pub(crate) fn of_file() -> Self {
        Self {
            id: None,
            name: FILE_TOKEN_NAME.to_owned(),
            role: TokenRole::Admin,
            workspace: None,
            expires_at: None,
            revoked: CancellationToken::new(),
        }
    }

    pub(crate) fn is_expired(&self) -> bool {
        self.expires_at.is_some_and(|end| end <= Millis::now())
    }

    /// The refusal of a request whose token has ended.
    pub(crate) fn ended_error(&self) -> ApiError {
        if self.is_expired() {
            let message = format!("the token {} has expired; `qd tokens create` makes another", self.name);
            return ApiError::new(ErrorCode::TokenExpired, message);
        }
        ApiError::new(ErrorCode::Unauthorized, format!("the token {} was revoked", self.name))
    }

    /// Waits until the token is revoked or expires.
    pub(crate) async fn wait_for_end(self) {
        let expired = async {
            while !self.is_expired() {
                let left = self.expires_at.map_or(u64::MAX, |end| end.0.saturating_sub(Millis::now().0));
                tokio::time::sleep(Duration::from_millis(left).min(TIMER_MAX)).await;
            }
        };
        tokio::select! {
            () = self.revoked.cancelled() => {}
            () = expired => {}
        }
    }
}

impl ClientTokenStore {
    /// Loads the tokens of the home.
    pub(crate) fn open(home: &DaemonHome) -> Result<Self, HomeError> {
        let (keys, tokens) = (WorkerKeys::of_home(home)?, TokenStore::open(&home.client_tokens())?);
        Ok(Self { keys, tokens, revocations: Mutex::default() })
    }

    /// Creates a token, or finds the one that the same request created. It is valid once this returns. `None` if another
    /// token has its name.
    pub(crate) fn create(
        &self,
        new: NewClientToken,
        request: Option<[u8; 32]>,
    ) -> Result<Option<ClientToken>, HomeError> {
        if let Some(known) = self.tokens.find_by_request(request) {
            return Ok(Some(view(known)));
        }
        let NewClientToken { name, role, workspace_id, expires_at } = new;
        if name == FILE_TOKEN_NAME || self.list().iter().any(|token| token.name == name) {
            return Ok(None);
        }
        let id = TokenId::from_random(&random::bytes::<16>());
        let token = self.derive_token(&id, &name);
        let grant = ClientGrant { role, workspace_id, expires_at };
        Ok(Some(view(self.tokens.add(id, Some(name), &token, grant, request)?)))
    }

    /// The token with this id, for the one response that shows it. It is derived and never stored: a repeat of the
    /// request that created it gets the same token.
    pub(crate) fn derive_token(&self, id: &TokenId, name: &str) -> String {
        format!("{PREFIX}{name}_{}", self.keys.derive("client token", id.as_str()))
    }

    /// Whether a text has the form of a client's token.
    pub(crate) fn is_client_token(text: &str) -> bool {
        text.starts_with(PREFIX)
    }

    /// All tokens, oldest first.
    pub(crate) fn list(&self) -> Vec<ClientToken> {
        self.tokens.list().into_iter().map(view).collect()
    }

    /// Revokes a token and returns it, if there is one with this id. What was opened with it ends.
    pub(crate) fn revoke(&self, id: &TokenId) -> Result<Option<ClientToken>, HomeError> {
        let revoked = self.tokens.remove(id)?;
        if let Some(open) = self.revocations.lock().remove(id) {
            open.cancel();
        }
        Ok(revoked.map(view))
    }

    /// The bearer of the token with this hash, even if the token has expired.
    pub(crate) fn bearer_of_hash(&self, sha256: &[u8; 32]) -> Option<ClientBearer> {
        let mut revocations = self.revocations.lock();
        // Looked up under the lock, so that a token cannot be revoked between this and the entry below.
        let StoredToken { id, name, grant, .. } = self.tokens.find_by_hash(sha256)?;
        let revoked = revocations.entry(id.clone()).or_default().clone();
        let ClientGrant { role, workspace_id: workspace, expires_at } = grant;
        Some(ClientBearer {
            id: Some(id),
            name: name.unwrap_or_default(),
            role,
            workspace,
            expires_at,
            revoked,
        })
    }

    /// Records that a token is used. The file is written only now and then, on a thread that may block.
    pub(crate) fn note_used(self: &Arc<Self>, id: &TokenId) {
        let Some(StoredToken { last_used_at, .. }) = self.tokens.find(id) else { return };
        let is_old = last_used_at
            .is_none_or(|last| Millis::now().0.saturating_sub(last.0) >= USE_STORED_EVERY.as_millis() as u64);
        if !is_old {
            return;
        }
        // At once in memory, so that the next request does not write as well.
        self.tokens.note_used(id);
        let (store, id) = (Arc::clone(self), id.clone());
        tokio::task::spawn_blocking(move || {
            if let Err(error) = store.tokens.mark_used(&id) {
                tracing::warn!(%error, "could not store when a token was last used");
            }
        });
    }
}

/// The fields that may be shown.
fn view(token: StoredToken<ClientGrant>) -> ClientToken {
    let StoredToken { id, name, created_at, last_used_at, grant, .. } = token;
    let ClientGrant { role, workspace_id, expires_at } = grant;
    ClientToken {
        id,
        name: name.unwrap_or_default(),
        role,
        workspace_id,
        created_at,
        expires_at,
        last_used_at,
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use sha2::{Digest, Sha256};

    use super::*;
    use crate::temporary_home::temporary_home;

    fn new(name: &str) -> NewClientToken {
        NewClientToken {
            name: name.to_owned(),
            role: TokenRole::Approver,
            workspace_id: None,
            expires_at: None,
        }
    }

    fn bearer(tokens: &ClientTokenStore, text: &str) -> Option<ClientBearer> {
        tokens.bearer_of_hash(&Sha256::digest(text).into())
    }

    #[test]
    fn a_repeat_of_the_request_finds_its_token_also_in_the_next_daemon() {
        let (_folder, home) = temporary_home();
        let request = Some([7; 32]);
        let first = ClientTokenStore::open(&home).unwrap().create(new("ops"), request).unwrap();
        let next = ClientTokenStore::open(&home).unwrap();
        assert_eq!(next.create(new("ops"), request).unwrap(), first);
        assert_eq!(next.create(new("ops"), Some([8; 32])).unwrap(), None, "another request is another token");
        let id = first.unwrap().id;
        next.revoke(&id).unwrap();
        assert_ne!(
            next.create(new("ops"), request).unwrap().unwrap().id,
            id,
            "a revoked token stays revoked"
        );
    }

    #[test]
    fn a_token_names_itself_and_the_home_has_only_its_hash() {
        let (_folder, home) = temporary_home();
        let tokens = ClientTokenStore::open(&home).unwrap();
        let created = tokens.create(new("ops"), None).unwrap().unwrap();
        let text = tokens.derive_token(&created.id, &created.name);
        assert!(text.starts_with("qdt_ops_") && ClientTokenStore::is_client_token(&text), "{text}");
        assert_eq!(tokens.create(new("ops"), None).unwrap(), None, "a name is used once");
        assert_eq!(
            tokens.create(new("file"), None).unwrap(),
            None,
            "events use it for the token in the home"
        );
        let file = std::fs::read_to_string(home.client_tokens()).unwrap();
        assert!(file.contains("ops") && !file.contains(&text), "{file}");
        assert_eq!(std::fs::metadata(home.client_tokens()).unwrap().permissions().mode() & 0o7777, 0o600);
        let reopened = ClientTokenStore::open(&home).unwrap();
        let found = bearer(&reopened, &text).unwrap();
        assert_eq!((found.name.as_str(), found.role), ("ops", TokenRole::Approver));
        assert!(bearer(&reopened, &format!("{text}0")).is_none());
    }

    #[tokio::test]
    async fn whoever_waits_for_the_end_of_a_token_learns_that_it_was_revoked() {
        let (_folder, home) = temporary_home();
        let tokens = ClientTokenStore::open(&home).unwrap();
        let created = tokens.create(new("ops"), None).unwrap().unwrap();
        let text = tokens.derive_token(&created.id, &created.name);
        let open = bearer(&tokens, &text).unwrap();
        let ended = tokio::spawn(open.wait_for_end());
        tokens.revoke(&created.id).unwrap().unwrap();
        ended.await.unwrap();
        assert!(bearer(&tokens, &text).is_none() && tokens.revoke(&created.id).unwrap().is_none());
    }

    #[tokio::test]
    async fn a_token_ends_when_it_expires() {
        let (_folder, home) = temporary_home();
        let tokens = ClientTokenStore::open(&home).unwrap();
        let soon = NewClientToken { expires_at: Some(Millis(Millis::now().0 + 20)), ..new("soon") };
        let created = tokens.create(soon, None).unwrap().unwrap();
        let open = bearer(&tokens, &tokens.derive_token(&created.id, &created.name)).unwrap();
        open.clone().wait_for_end().await;
        assert!(open.is_expired());
    }
}
