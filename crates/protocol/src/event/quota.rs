//! Events about the quotas of accounts. An account is an agent with the login that it uses.

use serde::{Deserialize, Serialize};

use crate::ids::AccountId;
use crate::time::Millis;

/// Data of `quota.reached`. The event is one of the session whose agent reported it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct QuotaReached {
    pub account: AccountId,
    /// Name of the agent.
    pub agent: String,
    /// When the quota resets.
    pub until: Millis,
}

/// Data of `quota.released`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct QuotaReleased {
    pub account: AccountId,
    /// Name of the agent.
    pub agent: String,
    pub by: QuotaReleaseCause,
}

/// Why runs of an account may start again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum QuotaReleaseCause {
    /// The quota has reset.
    Reset,
    /// A person released the account.
    User,
}
