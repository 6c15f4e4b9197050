//! The tokens with which processes on other machines join. Each is bound to labels and perhaps to agents. The guard
//! decides what a token may do; the caller that revokes one also ends its connections.

use qd_home::{DaemonHome, HomeError};
use qd_protocol::TokenId;
use qd_protocol::api::{NewWorkerToken, WorkerToken};
use serde::{Deserialize, Serialize};

use super::WorkerKeys;
use super::joined_workers::{LABEL_CHARS_MAX, is_label_char};
use crate::random;
use crate::token_store::{StoredToken, TokenStore};

/// The prefix of worker tokens, by which people and secret scanners recognize one.
const PREFIX: &str = "qdw_";
/// The characters of a token's id in the label of a machine whose token has no usable name.
const SHORT_ID_CHARS: usize = 6;

/// The address at which a worker on another machine reaches this daemon.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct JoinAddress {
    /// `http://HOST:PORT` or `https://HOST:PORT`.
    pub(crate) url: String,
    /// The fingerprint of the certificate to accept, if no authority has signed it.
    pub(crate) fingerprint: Option<String>,
}

/// All worker tokens of a home. Methods that change them block on the disk.
#[derive(Debug)]
pub(crate) struct WorkerTokenStore {
    keys: WorkerKeys,
    tokens: TokenStore<WorkerGrant>,
}

/// What the process that holds a worker token may be, as stored on disk.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct WorkerGrant {
    /// Absent in a token of an earlier release, which allows any label.
    #[serde(default)]
    labels: Option<Vec<String>>,
    /// Absent if the token allows any agent.
    #[serde(default)]
    agents: Option<Vec<String>>,
}

/// The fields that may be shown.
fn view(token: StoredToken<WorkerGrant>) -> WorkerToken {
    let StoredToken { id, name, created_at, last_used_at, grant: WorkerGrant { labels, agents }, .. } = token;
    WorkerToken { id, name, created_at, last_used_at, labels, agents }
}

impl WorkerTokenStore {
    /// Loads the tokens of the home.
    pub(super) fn open(home: &DaemonHome, keys: WorkerKeys) -> Result<Self, HomeError> {
        Ok(Self { keys, tokens: TokenStore::open(&home.worker_tokens())? })
    }

    /// Creates a token, or finds the one that the same request created. It is valid once this returns. Without labels it is
    /// bound to one that is made from its name.
    pub(crate) fn create(
        &self,
        new: NewWorkerToken,
        request: Option<[u8; 32]>,
    ) -> Result<WorkerToken, HomeError> {
        if let Some(known) = self.tokens.find_by_request(request) {
            return Ok(view(known));
        }
        let id = TokenId::from_random(&random::bytes::<16>());
        let NewWorkerToken { name, mut labels, agents } = new;
        if labels.is_empty() {
            labels.push(label_of(name.as_deref(), &id));
        }
        let agents = Some(agents).filter(|agents| !agents.is_empty());
        let grant = WorkerGrant { labels: Some(labels), agents };
        let token = self.derive_token(&id);
        self.tokens.add(id, name, &token, grant, request).map(view)
    }

    /// The token with this id, for the one response that shows it. It is derived and never stored: a repeat of the
    /// request that created it gets the same token.
    pub(crate) fn derive_token(&self, id: &TokenId) -> String {
        format!("{PREFIX}{}", self.keys.derive("worker token", id.as_str()))
    }

    /// All tokens, oldest first.
    pub(crate) fn list(&self) -> Vec<WorkerToken> {
        self.tokens.list().into_iter().map(view).collect()
    }

    /// Revokes a token and returns it, if there is one with this id.
    pub(crate) fn revoke(&self, id: &TokenId) -> Result<Option<WorkerToken>, HomeError> {
        Ok(self.tokens.remove(id)?.map(view))
    }

    /// Records that a worker joined with this token.
    pub(crate) fn mark_used(&self, id: &TokenId) -> Result<(), HomeError> {
        self.tokens.mark_used(id)
    }

    /// The token with this id, if it still exists.
    pub(crate) fn find(&self, id: &TokenId) -> Option<WorkerToken> {
        self.tokens.find(id).map(view)
    }

    /// The token with this hash.
    pub(crate) fn token_of_hash(&self, sha256: &[u8; 32]) -> Option<TokenId> {
        self.tokens.find_by_hash(sha256).map(|token| token.id)
    }
}

/// The label for the machine of a token: its name with unsuitable characters replaced, else the start of its id.
fn label_of(name: Option<&str>, id: &TokenId) -> String {
    let fit = |c: char| if is_label_char(c) { c } else { '-' };
    let label: String = name.unwrap_or_default().trim().chars().map(fit).take(LABEL_CHARS_MAX).collect();
    if label.chars().any(|c| c.is_ascii_alphanumeric()) {
        return label;
    }
    id.as_str().trim_start_matches(TokenId::PREFIX).chars().take(SHORT_ID_CHARS).collect()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use sha2::{Digest, Sha256};

    use super::*;
    use crate::temporary_home::temporary_home;

    fn open(home: &DaemonHome) -> WorkerTokenStore {
        WorkerTokenStore::open(home, WorkerKeys(home.worker_key().unwrap())).unwrap()
    }

    fn bearer(tokens: &WorkerTokenStore, text: &str) -> Option<TokenId> {
        tokens.token_of_hash(&Sha256::digest(text).into())
    }

    fn named(name: Option<&str>) -> NewWorkerToken {
        NewWorkerToken { name: name.map(str::to_owned), ..NewWorkerToken::default() }
    }

    #[test]
    fn a_token_is_bound_to_its_labels_else_to_one_made_from_its_name_or_id() {
        let (_folder, home) = temporary_home();
        let tokens = open(&home);
        let labels = |new: NewWorkerToken| tokens.create(new, None).unwrap().labels.unwrap();
        assert_eq!(labels(named(Some("box_1.lan"))), ["box_1.lan"]);
        assert_eq!(labels(named(Some("my big box"))), ["my-big-box"]);
        let gpu = NewWorkerToken { labels: vec!["gpu".to_owned()], ..named(Some("box")) };
        assert_eq!(labels(gpu), ["gpu"]);
        for name in [None, Some("  "), Some("\u{2026}")] {
            let token = tokens.create(named(name), None).unwrap();
            let start = token.id.as_str().trim_start_matches(TokenId::PREFIX)[..SHORT_ID_CHARS].to_owned();
            assert_eq!(token.labels, Some(vec![start]), "{name:?}");
        }
    }

    #[test]
    fn a_token_of_an_earlier_release_allows_any_label() {
        let (_folder, home) = temporary_home();
        let token = open(&home).create(named(Some("box")), None).unwrap();
        let text = std::fs::read_to_string(home.worker_tokens()).unwrap();
        let mut stored: serde_json::Value = serde_json::from_str(&text).unwrap();
        let fields = stored[0].as_object_mut().unwrap();
        fields.remove("labels");
        fields.remove("agents");
        std::fs::write(home.worker_tokens(), stored.to_string()).unwrap();
        assert_eq!(open(&home).list(), [WorkerToken { labels: None, ..token }]);
    }

    #[test]
    fn a_token_is_known_by_its_hash_alone_and_the_next_daemon_knows_it_too() {
        let (_folder, home) = temporary_home();
        let tokens = open(&home);
        let token = tokens.create(named(Some("box")), None).unwrap();
        let other = tokens.create(named(None), None).unwrap();
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
        let token = tokens.create(named(None), None).unwrap();
        tokens.mark_used(&token.id).unwrap();
        assert!(tokens.list()[0].last_used_at.is_some());
        assert!(tokens.revoke(&token.id).unwrap().is_some());
        assert!(tokens.revoke(&token.id).unwrap().is_none() && tokens.find(&token.id).is_none());
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
