//! What an agent has used. Agents tell totals of a conversation, of a turn, or of one call of the model; a session wants
//! increments, and the price of those where the agent does not tell it.

use agent_client_protocol::v1::schema::{Meta, Usage as TurnUsage, UsageUpdate};
use qd_protocol::event::Usage;
use qd_protocol::link::Said;
use qd_protocol::manifest::TokensOf;
use serde::Deserialize;
use serde_json::Value;

use super::ear::ours;
use super::profile::Profile;
use crate::drivers::price::{TOKENS_MAX, believed, rounded};

/// What has been counted of a conversation.
#[derive(Debug, Default)]
pub(super) struct Counter {
    totals: Totals,
    /// Whether the turn has used any.
    used: bool,
}

#[derive(Debug, Default, Clone, Copy)]
struct Totals {
    input_tokens: u64,
    output_tokens: u64,
    cost_usd: f64,
}

/// Tokens as agents write them in a `_meta`, in either spelling.
#[derive(Deserialize)]
struct Tokens {
    #[serde(alias = "inputTokens")]
    input_tokens: u64,
    #[serde(alias = "outputTokens")]
    output_tokens: u64,
}

impl Counter {
    /// Another turn begins.
    pub(super) fn begin_turn(&mut self) {
        self.used = false;
    }

    /// Whether anything was used since.
    pub(super) fn has_used(&self) -> bool {
        self.used
    }

    /// An update about the conversation: our own agent tells its tokens, others the cost.
    pub(super) fn update(&mut self, update: &UsageUpdate) -> Option<Said> {
        let mut totals = self.totals;
        if let Some(Tokens { input_tokens, output_tokens }) = ours(update.meta.as_ref()) {
            totals = Totals { input_tokens, output_tokens, ..totals };
        }
        if let Some(cost) = update.cost.as_ref().filter(|cost| cost.currency.eq_ignore_ascii_case("USD")) {
            totals.cost_usd = cost.amount;
        }
        self.count(totals, None)
    }

    /// What stands beside a piece of text: the tokens of the call of the model that made it.
    pub(super) fn beside(&mut self, meta: Option<&Meta>, profile: &Profile) -> Option<Said> {
        let Tokens { input_tokens, output_tokens } = Tokens::deserialize(meta?.get("usage")?).ok()?;
        self.add(input_tokens, output_tokens, profile)
    }

    /// What the answer to a prompt tells.
    pub(super) fn answer(
        &mut self,
        usage: Option<&TurnUsage>,
        meta: Option<&Meta>,
        profile: &Profile,
    ) -> Option<Said> {
        let (input, output) = match usage {
            // Some count what was cached among the input and some beside it; the total is the same.
            Some(usage) => {
                let read = usage.total_tokens.saturating_sub(usage.output_tokens);
                (read.max(usage.input_tokens), usage.output_tokens)
            }
            None => {
                let told: &Value = meta?.get("quota")?.get("token_count")?;
                let Tokens { input_tokens, output_tokens } = Tokens::deserialize(told).ok()?;
                (input_tokens, output_tokens)
            }
        };
        match profile.tokens_of {
            TokensOf::Turn => self.add(input, output, profile),
            TokensOf::Session => {
                let cost_usd = self.totals.cost_usd;
                self.count(Totals { input_tokens: input, output_tokens: output, cost_usd }, Some(profile))
            }
        }
    }

    fn add(&mut self, input: u64, output: u64, profile: &Profile) -> Option<Said> {
        let Totals { input_tokens, output_tokens, cost_usd } = self.totals;
        let (input_tokens, output_tokens) =
            (input_tokens.saturating_add(input), output_tokens.saturating_add(output));
        self.count(Totals { input_tokens, output_tokens, cost_usd }, Some(profile))
    }

    /// What was used since the last report. A total that fell has been counted anew from nothing; one that no agent can
    /// have used counts as the most that one could.
    fn count(&mut self, now: Totals, profile: Option<&Profile>) -> Option<Said> {
        let now = Totals {
            input_tokens: now.input_tokens.min(TOKENS_MAX),
            output_tokens: now.output_tokens.min(TOKENS_MAX),
            cost_usd: believed(now.cost_usd),
        };
        let tokens = |now: u64, before: u64| now.checked_sub(before).unwrap_or(now);
        let before = std::mem::replace(&mut self.totals, now);
        let more = if now.cost_usd < before.cost_usd { now.cost_usd } else { now.cost_usd - before.cost_usd };
        let input_tokens = tokens(now.input_tokens, before.input_tokens);
        let output_tokens = tokens(now.output_tokens, before.output_tokens);
        // An agent that tells what it cost knows better than the settings.
        let pricing = profile.map(|profile| &profile.pricing).filter(|_| now.cost_usd == 0.0);
        let priced = pricing.map_or(0.0, |pricing| pricing.cost(input_tokens as f64, output_tokens as f64));
        let usage = Usage { input_tokens, output_tokens, cost_usd: rounded(more + priced) };
        if usage == Usage::default() {
            return None;
        }
        self.used = true;
        Some(Said::Usage { usage })
    }
}

#[cfg(test)]
mod tests {
    use agent_client_protocol::v1::schema::Cost;
    use serde_json::json;

    use super::super::ear::OURS;
    use super::*;
    use crate::drivers::price::COST_MAX;

    fn said(input_tokens: u64, output_tokens: u64, cost_usd: f64) -> Option<Said> {
        Some(Said::Usage { usage: Usage { input_tokens, output_tokens, cost_usd } })
    }

    #[test]
    fn totals_become_increments_without_the_dust_of_floating_point() {
        let mut counter = Counter::default();
        let mut report = |input: u64, cost: f64| {
            let meta = json!({OURS: {"input_tokens": input, "output_tokens": 1}});
            let update = UsageUpdate::new(0, 0).cost(Cost::new(cost, "USD"));
            counter.update(&update.meta(meta.as_object().cloned()))
        };
        assert_eq!(report(10, 0.1), said(10, 1, 0.1));
        assert_eq!(report(30, 0.1 + 0.2), said(20, 0, 0.2));
        assert_eq!(report(30, 0.1 + 0.2), None);
        assert_eq!(report(5, 0.05), said(5, 0, 0.05), "a total that fell has begun again");
    }

    #[test]
    fn a_cost_in_another_currency_is_no_dollars() {
        let update = UsageUpdate::new(0, 0).cost(Cost::new(3.0, "credits"));
        assert_eq!(Counter::default().update(&update), None);
    }

    #[test]
    fn a_cost_that_nobody_can_have_is_finite_and_so_are_the_tokens() {
        let mut counter = Counter::default();
        let mut report = |tokens: u64, cost: f64| {
            let meta = json!({OURS: {"input_tokens": tokens, "output_tokens": 0}});
            let update = UsageUpdate::new(0, 0).cost(Cost::new(cost, "USD"));
            match counter.update(&update.meta(meta.as_object().cloned())) {
                Some(Said::Usage { usage }) => Some((usage.input_tokens, usage.cost_usd)),
                _ => None,
            }
        };
        assert_eq!(report(u64::MAX, 1e300), Some((TOKENS_MAX, COST_MAX)));
        assert_eq!(report(u64::MAX, f64::INFINITY), None);
        assert_eq!(report(u64::MAX, f64::NAN), None);
        assert_eq!(report(u64::MAX, -1e300), None);
    }

    #[test]
    fn tokens_of_a_turn_are_added_and_those_of_a_conversation_are_not() {
        let (per_turn, whole) =
            (Profile::default(), Profile { tokens_of: TokensOf::Session, ..Profile::default() });
        let usage = |input, output| TurnUsage::new(input + output, input, output);
        let mut counter = Counter::default();
        assert_eq!(counter.answer(Some(&usage(100, 7)), None, &per_turn), said(100, 7, 0.0));
        assert!(counter.has_used());
        counter.begin_turn();
        assert!(!counter.has_used());
        assert_eq!(counter.answer(Some(&usage(100, 7)), None, &per_turn), said(100, 7, 0.0));
        let mut counter = Counter::default();
        assert_eq!(counter.answer(Some(&usage(100, 7)), None, &whole), said(100, 7, 0.0));
        assert_eq!(counter.answer(Some(&usage(200, 14)), None, &whole), said(100, 7, 0.0));
        assert_eq!(counter.answer(Some(&usage(200, 14)), None, &whole), None);
    }

    #[test]
    fn tokens_are_found_where_agents_put_them() {
        let profile = Profile::default();
        let mut counter = Counter::default();
        let beside = json!({"usage": {"inputTokens": 100, "outputTokens": 7, "totalTokens": 107}});
        assert_eq!(counter.beside(beside.as_object(), &profile), said(100, 7, 0.0));
        assert_eq!(counter.beside(beside.as_object(), &profile), said(100, 7, 0.0), "each call is another");
        let quota = json!({"quota": {"token_count": {"input_tokens": 10, "output_tokens": 2}}});
        assert_eq!(counter.answer(None, quota.as_object(), &profile), said(10, 2, 0.0));
        assert_eq!(counter.answer(None, json!({"quota": {"token_count": null}}).as_object(), &profile), None);
    }
}
