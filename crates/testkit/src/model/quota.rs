//! How the provider of each API says that an account's quota is exhausted, and when it resets.

use std::time::{SystemTime, UNIX_EPOCH};

use serde_json::{Value, json};

use super::request_log::ModelApi;

/// A refusal with status 429.
#[derive(Debug, PartialEq)]
pub(super) struct QuotaRefusal {
    pub(super) headers: Vec<(&'static str, String)>,
    pub(super) body: Value,
}

/// The refusal of an account whose quota resets in so many seconds.
pub(super) fn quota_refusal(api: ModelApi, seconds: u64) -> QuotaRefusal {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    let resets_at = now + seconds;
    // Google says so in the body alone.
    let retry_after = (api != ModelApi::Gemini).then(|| ("retry-after", seconds.to_string()));
    let mut headers: Vec<_> = retry_after.into_iter().collect();
    let body = match api {
        ModelApi::Messages => {
            headers.extend([
                ("anthropic-ratelimit-unified-status", "rejected".to_owned()),
                ("anthropic-ratelimit-unified-reset", resets_at.to_string()),
                ("anthropic-ratelimit-unified-representative-claim", "five_hour".to_owned()),
                ("anthropic-ratelimit-unified-5h-status", "rejected".to_owned()),
                ("anthropic-ratelimit-unified-5h-reset", resets_at.to_string()),
                ("anthropic-ratelimit-unified-5h-utilization", "1".to_owned()),
            ]);
            let message = "This request would exceed your account's rate limit. Please try again later.";
            json!({ "type": "error", "error": { "type": "rate_limit_error", "message": message } })
        }
        ModelApi::Responses => {
            headers.extend([
                ("x-codex-primary-used-percent", "100".to_owned()),
                ("x-codex-primary-window-minutes", "300".to_owned()),
                ("x-codex-primary-reset-at", resets_at.to_string()),
            ]);
            json!({ "error": {
                "type": "usage_limit_reached", "message": "The usage limit has been reached", "plan_type": "plus",
                "resets_at": resets_at, "resets_in_seconds": seconds,
            } })
        }
        ModelApi::Gemini => {
            let message = format!(
                "You exceeded your current quota, please check your plan. Please retry in {seconds}s."
            );
            let violation = json!({
                "quotaMetric": "generativelanguage.googleapis.com/generate_content_paid_tier_requests",
                "quotaId": "GenerateRequestsPerProjectPerModel",
            });
            let failure = json!({
                "@type": "type.googleapis.com/google.rpc.QuotaFailure", "violations": [violation],
            });
            let retry = json!({
                "@type": "type.googleapis.com/google.rpc.RetryInfo", "retryDelay": format!("{seconds}s"),
            });
            json!({ "error": {
                "code": 429, "message": message, "status": "RESOURCE_EXHAUSTED", "details": [failure, retry],
            } })
        }
        ModelApi::Chat | ModelApi::Other => {
            let message = format!("Rate limit reached for requests. Please try again in {seconds}s.");
            json!({ "error": { "message": message, "type": "requests", "code": "rate_limit_exceeded" } })
        }
    };
    QuotaRefusal { headers, body }
}
