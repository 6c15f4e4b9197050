//! Exhausted quotas. What an agent reports concerns all sessions of its account, so it is kept here, where every actor
//! reads it before each step. It is stored with the event that reports it, and removed with `quota.released`, which
//! wakes the sessions that waited. So the session that reported it may be purged meanwhile.
//!
//! Design: docs/design/quotas-park-accounts.md

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use parking_lot::Mutex;
use qd_catalog::matches_variable;
use qd_core::quota::{self, ExhaustedQuota};
use qd_core::rows::SessionDoc;
use qd_journal::{Journal, RowChange, SessionRow};
use qd_protocol::api::{AccountQuota, Session};
use qd_protocol::event::{EventActor, EventBody, QuotaReleaseCause, QuotaReleased};
use qd_protocol::{AccountId, ApiError, ErrorCode, Millis};

use crate::actor::encode_failed;
use crate::clock::read_clocks;
use crate::daemon::{Daemon, read_failed};

/// The beginning of the keys of exhausted quotas among the journal's daemon-wide values.
const QUOTA_META_PREFIX: &str = "quota.";

/// The exhausted quotas, by account.
#[derive(Debug, Default)]
pub(crate) struct ExhaustedQuotas {
    by_account: Mutex<BTreeMap<AccountId, ExhaustedQuota>>,
}

impl ExhaustedQuotas {
    pub(crate) fn new(quotas: Vec<ExhaustedQuota>) -> Self {
        let by_account = quotas.into_iter().map(|quota| (quota.account.clone(), quota)).collect();
        Self { by_account: Mutex::new(by_account) }
    }

    /// When the quota of this account resets, if it is exhausted.
    pub(crate) fn until(&self, account: &AccountId) -> Option<Millis> {
        self.by_account.lock().get(account).map(|quota| quota.until)
    }

    /// Adds what an agent has reported. Two agents may name different times; the later one counts.
    pub(crate) fn insert(&self, quota: ExhaustedQuota) {
        let mut by_account = self.by_account.lock();
        if by_account.get(&quota.account).is_none_or(|known| known.until < quota.until) {
            by_account.insert(quota.account.clone(), quota);
        }
    }

    /// All of them, the first to reset first.
    pub(crate) fn list(&self) -> Vec<ExhaustedQuota> {
        let mut quotas: Vec<_> = self.by_account.lock().values().cloned().collect();
        quotas.sort_by_key(|quota| quota.until);
        quotas
    }

    fn get(&self, account: &AccountId) -> Option<ExhaustedQuota> {
        self.by_account.lock().get(account).cloned()
    }

    /// Removes a quota, unless an agent has reported another one meanwhile.
    fn remove(&self, released: &ExhaustedQuota) {
        let mut by_account = self.by_account.lock();
        if by_account.get(&released.account) == Some(released) {
            by_account.remove(&released.account);
        }
    }
}

impl Daemon {
    /// The exhausted quotas that are stored in the journal. One that cannot be read is left out: its account is tried
    /// again.
    pub(crate) async fn read_quotas(journal: &Journal) -> Result<Vec<ExhaustedQuota>, ApiError> {
        let stored = journal.meta_values(QUOTA_META_PREFIX).await.map_err(read_failed)?;
        Ok(stored.iter().filter_map(|bytes| serde_json::from_slice(bytes).ok()).collect())
    }

    /// The account of a session whose variables have a login of their own. `None` if its agent uses its usual login.
    pub(crate) fn account_of_login(
        &self,
        agent: &str,
        project: &Path,
        env: &BTreeMap<String, String>,
    ) -> Result<Option<AccountId>, ApiError> {
        let patterns = self.workers.login_variables(agent, project);
        let is_login = |name: &str| patterns.iter().any(|pattern| matches_variable(pattern, name));
        let login: BTreeMap<&str, &str> = env
            .iter()
            .filter(|(name, _)| is_login(name))
            .map(|(name, value)| (name.as_str(), value.as_str()))
            .collect();
        if login.is_empty() {
            return Ok(None);
        }
        let key = self.home.token().map_err(|error| {
            let message = format!("could not read the daemon's token: {error}");
            ApiError::new(ErrorCode::StorageFailed, message).with_source(error)
        })?;
        Ok(Some(quota::account_with_login(agent, &login, key.expose())))
    }

    /// A session as clients see it now.
    pub(crate) fn view_session(&self, doc: SessionDoc) -> Session {
        let quota_until = self.quotas.until(&doc.account());
        doc.view(self.is_halted(), quota_until)
    }

    /// Whether the runs of this session wait for the reset of a quota.
    pub(crate) fn waits_for_quota(&self, row: &SessionRow) -> bool {
        let doc: Option<SessionDoc> = serde_json::from_slice(&row.doc).ok();
        doc.is_some_and(|doc| self.quotas.until(&doc.account()).is_some())
    }

    /// Releases the accounts whose quota has reset.
    pub(crate) async fn release_reset_quotas(self: &Arc<Self>) {
        let now = read_clocks();
        for quota in self.quotas.list().into_iter().filter(|quota| quota.has_reset(now)) {
            match self.release_quota(&quota.account, QuotaReleaseCause::Reset, &EventActor::DAEMON).await {
                // Somebody else released it just before.
                Err(error) if error.code == ErrorCode::NotFound => {}
                Err(error) => {
                    tracing::warn!(account = %quota.account, %error, "a quota could not be released; trying again");
                }
                Ok(_) => {}
            }
        }
    }

    /// Releases an account, and wakes the sessions that waited for it.
    pub(crate) async fn release_quota(
        self: &Arc<Self>,
        account: &AccountId,
        by: QuotaReleaseCause,
        actor: &EventActor,
    ) -> Result<AccountQuota, ApiError> {
        let _one_at_a_time = self.key_locks.lock(format!("quota {account}")).await;
        let Some(quota) = self.quotas.get(account) else {
            let message =
                format!("the quota of account {account} is not exhausted; `qd quota` lists those that are");
            return Err(ApiError::new(ErrorCode::NotFound, message));
        };
        let released = QuotaReleased { account: account.clone(), agent: quota.agent.clone(), by };
        let body = EventBody::QuotaReleased(released);
        let rows = vec![released_quota_row(account)];
        self.append_daemon_event(&body, actor, Millis::now(), rows, None).await?;
        self.quotas.remove(&quota);
        self.wake_sessions_with_open_work().await?;
        Ok(quota.view())
    }
}

/// An exhausted quota as stored for the next daemon.
pub(crate) fn quota_row(quota: &ExhaustedQuota) -> Result<RowChange, ApiError> {
    let value = serde_json::to_vec(quota).map_err(encode_failed)?;
    Ok(RowChange::Meta { key: meta_key(&quota.account), value: Some(value) })
}

/// Removes what is stored about the quota of an account.
pub(crate) fn released_quota_row(account: &AccountId) -> RowChange {
    RowChange::Meta { key: meta_key(account), value: None }
}

fn meta_key(account: &AccountId) -> std::borrow::Cow<'static, str> {
    format!("{QUOTA_META_PREFIX}{account}").into()
}
