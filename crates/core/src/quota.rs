//! Exhausted quotas. An account is an agent with the login that it uses; its sessions share one quota. When an agent
//! reports that the quota is exhausted and when it resets, no run of the account starts before then.
//!
//! Design: docs/design/quotas-park-accounts.md

use std::collections::BTreeMap;

use qd_protocol::api::AccountQuota;
use qd_protocol::limits::QUOTA_WAIT_MAX_S;
use qd_protocol::{AccountId, ClockReading, Millis, SessionId};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

/// Bytes of a digest that become an account's id, of which each gives five bits.
const ACCOUNT_BYTES: usize = 16;

/// The account of an agent that uses its usual login.
pub fn usual_account(agent: &str) -> AccountId {
    account_of_digest(Sha256::new().chain_update(agent))
}

/// The account of an agent whose login is in these variables. The digest has a secret `key`, so that nobody can guess
/// the values from the id.
pub fn account_with_login(agent: &str, login: &BTreeMap<&str, &str>, key: &str) -> AccountId {
    let digest = Sha256::new().chain_update(key).chain_update([0]).chain_update(agent);
    let add = |digest: Sha256, (name, value): (&&str, &&str)| {
        digest.chain_update([0]).chain_update(name).chain_update([0]).chain_update(value)
    };
    account_of_digest(login.iter().fold(digest, add))
}

fn account_of_digest(digest: Sha256) -> AccountId {
    AccountId::from_random(&digest.finalize()[..ACCOUNT_BYTES])
}

/// Whether it is plausible that a quota resets at this time: it is ahead, and not too far.
pub fn is_plausible_reset(at: Millis, now: Millis) -> bool {
    at > now && at.since(now) <= QUOTA_WAIT_MAX_S * 1000
}

/// The exhausted quota of an account, as stored in its row.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExhaustedQuota {
    pub account: AccountId,
    pub agent: String,
    /// The session whose agent reported it.
    pub session: SessionId,
    pub until: Millis,
    /// When it was reported.
    pub since: ClockReading,
}

impl ExhaustedQuota {
    /// Whether the quota has reset. The reset is a moment on the wall clock. If somebody sets that clock back, the
    /// quota still resets once the time that was left when it was reported has passed, with the time in which the
    /// machine was suspended or off.
    pub fn has_reset(&self, now: ClockReading) -> bool {
        now.wall >= self.until || now.lease_time_since(self.since) >= self.until.since(self.since.wall)
    }

    /// The quota as the API shows it.
    pub fn view(&self) -> AccountQuota {
        AccountQuota {
            account: self.account.clone(),
            agent: self.agent.clone(),
            until: self.until,
            since: self.since.wall,
            session_id: self.session.clone(),
        }
    }
}

#[cfg(test)]
mod tests {
    use qd_protocol::MachineUptime;

    use super::*;

    fn reading(wall: u64, boot: u32, total_ms: i64) -> ClockReading {
        ClockReading {
            wall: Millis(wall),
            uptime: Some(MachineUptime { boot, awake_ms: total_ms, total_ms }),
        }
    }

    fn quota() -> ExhaustedQuota {
        ExhaustedQuota {
            account: usual_account("claude"),
            agent: "claude".to_owned(),
            session: SessionId::from_random(&[1]),
            until: Millis(1_000_000 + 60_000),
            since: reading(1_000_000, 1, 500_000),
        }
    }

    #[test]
    fn a_quota_resets_at_its_time_of_the_wall_clock() {
        assert!(!quota().has_reset(reading(1_059_999, 1, 559_999)));
        assert!(quota().has_reset(reading(1_060_000, 1, 560_000)));
        assert!(quota().has_reset(reading(2_000_000, 1, 510_000)), "the clock was set to the right time");
    }

    #[test]
    fn a_clock_that_is_set_back_and_a_reboot_delay_no_reset() {
        assert!(!quota().has_reset(reading(10, 1, 559_999)));
        assert!(quota().has_reset(reading(10, 1, 560_000)), "the clock was set back");
        assert!(!quota().has_reset(reading(10, 2, 59_999)));
        assert!(quota().has_reset(reading(10, 2, 60_000)), "after a reboot, with a wrong clock");
        assert!(quota().has_reset(reading(1_060_000, 2, 5)), "after a reboot, with the right clock");
    }

    #[test]
    fn a_reset_that_has_passed_or_is_far_away_is_not_plausible() {
        let now = Millis(1_000_000);
        let longest = QUOTA_WAIT_MAX_S * 1000;
        assert!(is_plausible_reset(now.plus(1), now) && is_plausible_reset(now.plus(longest), now));
        for absurd in [Millis(0), now, now.plus(longest + 1), Millis(u64::MAX)] {
            assert!(!is_plausible_reset(absurd, now), "{absurd:?}");
        }
    }

    #[test]
    fn an_account_is_an_agent_with_its_login() {
        let with =
            |agent: &str, value: &str| account_with_login(agent, &BTreeMap::from([("KEY", value)]), "k");
        assert_eq!(with("claude", "a"), with("claude", "a"));
        let different = [
            usual_account("claude"),
            usual_account("codex"),
            with("claude", "a"),
            with("claude", "b"),
            with("codex", "a"),
        ];
        let distinct: std::collections::BTreeSet<_> = different.iter().collect();
        assert_eq!(distinct.len(), different.len());
        assert_ne!(
            with("claude", "a"),
            account_with_login("claude", &BTreeMap::from([("KEY", "a")]), "another key")
        );
    }
}
