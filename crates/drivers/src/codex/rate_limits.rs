//! The quotas of the account, which the server reports when they change: how much of a window is used, and when it
//! resets.

use qd_protocol::Millis;
use serde::Deserialize;

use super::connection::CodexParams;

/// A window of which this share is used is exhausted.
const EXHAUSTED_PERCENT: f64 = 100.0;

/// The quotas of an account. Each counts over a window of its own.
#[derive(Debug, Clone, PartialEq, Default, Deserialize)]
#[serde(default)]
pub(super) struct CodexRateLimits {
    primary: Option<CodexQuotaWindow>,
    secondary: Option<CodexQuotaWindow>,
}

#[derive(Debug, Clone, PartialEq, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct CodexQuotaWindow {
    used_percent: f64,
    /// Seconds since the epoch.
    resets_at: Option<u64>,
}

impl CodexRateLimits {
    pub(super) fn read(params: &CodexParams) -> Option<Self> {
        #[derive(Deserialize)]
        #[serde(rename_all = "camelCase")]
        struct CodexRateLimitParams {
            rate_limits: CodexRateLimits,
        }
        params.read().map(|CodexRateLimitParams { rate_limits }| rate_limits)
    }

    /// When the last of the exhausted windows resets.
    pub(super) fn resets_at(&self) -> Option<Millis> {
        let windows = [&self.primary, &self.secondary].into_iter().flatten();
        let exhausted = windows.filter(|window| window.used_percent >= EXHAUSTED_PERCENT);
        let seconds = exhausted.filter_map(|window| window.resets_at).max()?;
        Some(Millis(seconds.saturating_mul(1000)))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_last_exhausted_window_decides() {
        let reset = |limits: serde_json::Value| {
            serde_json::from_value::<CodexRateLimits>(limits).expect("rate limits").resets_at()
        };
        let window = |percent: f64, at: u64| json!({"usedPercent": percent, "windowDurationMins": 300, "resetsAt": at});
        assert_eq!(reset(json!({"primary": window(99.5, 7), "secondary": null})), None);
        assert_eq!(
            reset(json!({"primary": window(100.0, 7), "secondary": window(40.0, 9)})),
            Some(Millis(7000))
        );
        assert_eq!(
            reset(json!({"primary": window(100.0, 7), "secondary": window(100.0, 9)})),
            Some(Millis(9000))
        );
        assert_eq!(reset(json!({"primary": {"usedPercent": 100, "resetsAt": null}})), None);
    }
}
