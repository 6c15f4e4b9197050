//! Counts an agent's usage. Agents report totals of a conversation, of a turn, or of one model call. A session needs
//! increments, and their price where the agent does not report it.

use agent_client_protocol::v1::schema::{Meta, Usage as TurnUsage, UsageUpdate};
use qd_protocol::event::TokenUsage;
use qd_protocol::link::TurnUpdate;
use qd_protocol::manifest::TokenScope;
use serde::Deserialize;
use serde_json::Value;

use super::event_decoder::quarterdeck_meta;
use super::profile::AcpProfile;
use crate::pricing::{TOKENS_MAX, clamp_cost, round_cost};

/// The usage counted so far in a conversation.
#[derive(Debug, Default)]
pub(super) struct AcpUsageCounter {
    totals: AcpUsageTotals,
    /// Whether the agent has reported a cost.
    reports_cost: bool,
    /// Whether nobody knows what the conversation had cost when it was resumed. Then the agent's first total shows it.
    earlier_cost_unknown: bool,
    /// Whether the current turn used any tokens or money.
    used_in_turn: bool,
    /// Whether the agent has reported the tokens of a model call of the current turn right after the call.
    reports_calls: bool,
}

#[derive(Debug, Default, Clone, Copy)]
struct AcpUsageTotals {
    input_tokens: u64,
    output_tokens: u64,
    cost_usd: f64,
}

/// Token counts as agents write them in a `_meta`, in either spelling.
#[derive(Deserialize)]
struct AcpTokenCounts {
    #[serde(alias = "inputTokens")]
    input_tokens: u64,
    #[serde(alias = "outputTokens")]
    output_tokens: u64,
}

impl AcpUsageCounter {
    /// Counts a conversation that is resumed. Agents continue their total of its cost, also in another process; their
    /// token counts begin again.
    pub(super) fn resumed(earlier_cost_usd: Option<f64>) -> Self {
        let cost_usd = clamp_cost(earlier_cost_usd.unwrap_or(0.0));
        Self {
            totals: AcpUsageTotals { cost_usd, ..AcpUsageTotals::default() },
            earlier_cost_unknown: earlier_cost_usd.is_none(),
            ..Self::default()
        }
    }

    pub(super) fn begin_turn(&mut self) {
        self.used_in_turn = false;
        self.reports_calls = false;
    }

    /// Whether anything was used since the turn began.
    pub(super) fn has_used(&self) -> bool {
        self.used_in_turn
    }

    /// Counts a usage update, which has totals of the conversation. Our own scripted agent reports tokens, others a
    /// cost.
    pub(super) fn count_update(&mut self, update: &UsageUpdate) -> Option<TurnUpdate> {
        let mut totals = self.totals;
        if let Some(AcpTokenCounts { input_tokens, output_tokens }) = quarterdeck_meta(update.meta.as_ref()) {
            totals = AcpUsageTotals { input_tokens, output_tokens, ..totals };
        }
        if let Some(cost) = update.cost.as_ref().filter(|cost| cost.currency.eq_ignore_ascii_case("USD")) {
            totals.cost_usd = cost.amount;
            self.reports_cost = true;
            if std::mem::take(&mut self.earlier_cost_unknown) {
                self.totals.cost_usd = clamp_cost(cost.amount);
            }
        }
        self.report_increase(totals, None)
    }

    /// Counts the tokens in the `_meta` of a text chunk: those of the model call that produced it.
    pub(super) fn count_chunk(&mut self, meta: Option<&Meta>, profile: &AcpProfile) -> Option<TurnUpdate> {
        let AcpTokenCounts { input_tokens, output_tokens } =
            AcpTokenCounts::deserialize(meta?.get("usage")?).ok()?;
        self.reports_calls = true;
        self.add_tokens(input_tokens, output_tokens, profile)
    }

    /// Counts the tokens in the response to a prompt. `has_output`: the turn had any output.
    pub(super) fn count_response(
        &mut self,
        usage: Option<&TurnUsage>,
        meta: Option<&Meta>,
        has_output: bool,
        profile: &AcpProfile,
    ) -> Option<TurnUpdate> {
        let (input, output) = match usage {
            // Some agents count cached tokens as part of the input and some do not; the total is the same.
            Some(usage) => {
                let input = usage.total_tokens.saturating_sub(usage.output_tokens);
                (input.max(usage.input_tokens), usage.output_tokens)
            }
            None => {
                let counts: &Value = meta?.get("quota")?.get("token_count")?;
                let AcpTokenCounts { input_tokens, output_tokens } =
                    AcpTokenCounts::deserialize(counts).ok()?;
                (input_tokens, output_tokens)
            }
        };
        match profile.tokens_of {
            // Without output there was no call in this turn, and the last call is one of an earlier turn.
            TokenScope::Call if !has_output || self.reports_calls => None,
            TokenScope::Turn | TokenScope::Call => self.add_tokens(input, output, profile),
            TokenScope::Session => {
                let cost_usd = self.totals.cost_usd;
                self.report_increase(
                    AcpUsageTotals { input_tokens: input, output_tokens: output, cost_usd },
                    Some(profile),
                )
            }
        }
    }

    fn add_tokens(&mut self, input: u64, output: u64, profile: &AcpProfile) -> Option<TurnUpdate> {
        let AcpUsageTotals { input_tokens, output_tokens, cost_usd } = self.totals;
        let (input_tokens, output_tokens) =
            (input_tokens.saturating_add(input), output_tokens.saturating_add(output));
        self.report_increase(AcpUsageTotals { input_tokens, output_tokens, cost_usd }, Some(profile))
    }

    /// The increase since the last report. A total that fell was reset to zero in between, unless it fell by less than
    /// the smallest cost that we count. Implausible totals are clamped to the maximum.
    fn report_increase(&mut self, now: AcpUsageTotals, profile: Option<&AcpProfile>) -> Option<TurnUpdate> {
        let now = AcpUsageTotals {
            input_tokens: now.input_tokens.min(TOKENS_MAX),
            output_tokens: now.output_tokens.min(TOKENS_MAX),
            cost_usd: clamp_cost(now.cost_usd),
        };
        let increase = |now: u64, before: u64| now.checked_sub(before).unwrap_or(now);
        let before = std::mem::replace(&mut self.totals, now);
        let was_reset = round_cost(now.cost_usd) < round_cost(before.cost_usd);
        let added_cost = if was_reset { now.cost_usd } else { now.cost_usd - before.cost_usd };
        let input_tokens = increase(now.input_tokens, before.input_tokens);
        let output_tokens = increase(now.output_tokens, before.output_tokens);
        // A cost reported by the agent takes precedence over our prices.
        let pricing = profile.map(|profile| &profile.pricing).filter(|_| now.cost_usd == 0.0);
        let priced = pricing.map_or(0.0, |pricing| pricing.cost(input_tokens as f64, output_tokens as f64));
        let usage = TokenUsage { input_tokens, output_tokens, cost_usd: round_cost(added_cost + priced) };
        if usage == TokenUsage::default() {
            return None;
        }
        self.used_in_turn = true;
        let conversation_cost_usd = self.reports_cost.then_some(round_cost(now.cost_usd));
        Some(TurnUpdate::Usage { usage, conversation_cost_usd })
    }
}

#[cfg(test)]
mod tests {
    use agent_client_protocol::v1::schema::Cost;
    use serde_json::json;

    use super::*;
    use crate::pricing::COST_MAX;
    use qd_protocol::worker::META_KEY;

    fn usage_update(input_tokens: u64, output_tokens: u64, cost_usd: f64) -> Option<TurnUpdate> {
        Some(TurnUpdate::usage(TokenUsage { input_tokens, output_tokens, cost_usd }))
    }

    /// The increments of a list of totals of the cost, and the last total that is remembered.
    fn count_costs(counter: &mut AcpUsageCounter, totals: &[f64]) -> (Vec<f64>, Option<f64>) {
        let mut remembered = None;
        let count = |total: &f64| {
            let update = UsageUpdate::new(0, 0).cost(Cost::new(*total, "USD"));
            match counter.count_update(&update) {
                Some(TurnUpdate::Usage { usage, conversation_cost_usd }) => {
                    remembered = conversation_cost_usd;
                    usage.cost_usd
                }
                _ => 0.0,
            }
        };
        (totals.iter().map(count).collect(), remembered)
    }

    #[test]
    fn a_resumed_conversation_goes_on_from_its_last_total() {
        let (first, total) = count_costs(&mut AcpUsageCounter::default(), &[0.1, 0.3]);
        assert_eq!((first, total), (vec![0.1, 0.2], Some(0.3)));
        let (resumed, total) = count_costs(&mut AcpUsageCounter::resumed(total), &[0.3, 0.35]);
        assert_eq!((resumed, total), (vec![0.0, 0.05], Some(0.35)));
        let (again, _) = count_costs(&mut AcpUsageCounter::resumed(Some(0.35)), &[0.02, 0.03]);
        assert_eq!(again, [0.02, 0.01], "an agent that counts from zero again is believed");
        let (adopted, total) = count_costs(&mut AcpUsageCounter::resumed(None), &[7.0, 7.5]);
        assert_eq!(
            (adopted, total),
            (vec![0.0, 0.5], Some(7.5)),
            "what it cost elsewhere is not billed here"
        );
    }

    #[test]
    fn a_turn_without_output_does_not_repeat_the_last_call_of_an_earlier_turn() {
        let profile = AcpProfile { tokens_of: TokenScope::Call, ..AcpProfile::default() };
        let usage = TurnUsage::new(107, 100, 7);
        let mut counter = AcpUsageCounter::default();
        let mut count = |has_output| counter.count_response(Some(&usage), None, has_output, &profile);
        assert_eq!(count(true), usage_update(100, 7, 0.0));
        assert_eq!(count(false), None);
        assert_eq!(count(true), usage_update(100, 7, 0.0));
    }

    #[test]
    fn the_last_call_is_not_counted_again_if_every_call_was_reported() {
        let profile = AcpProfile { tokens_of: TokenScope::Call, ..AcpProfile::default() };
        let (last, meta) =
            (TurnUsage::new(107, 100, 7), json!({"usage": {"inputTokens": 100, "outputTokens": 7}}));
        let mut counter = AcpUsageCounter::default();
        for _ in 0..2 {
            assert_eq!(counter.count_chunk(meta.as_object(), &profile), usage_update(100, 7, 0.0));
        }
        assert_eq!(counter.count_response(Some(&last), None, true, &profile), None);
        counter.begin_turn();
        assert_eq!(counter.count_response(Some(&last), None, true, &profile), usage_update(100, 7, 0.0));
    }

    #[test]
    fn totals_become_increments_without_the_dust_of_floating_point() {
        let mut counter = AcpUsageCounter::default();
        let mut report = |input: u64, cost: f64| {
            let meta = json!({META_KEY: {"input_tokens": input, "output_tokens": 1}});
            let update = UsageUpdate::new(0, 0).cost(Cost::new(cost, "USD"));
            counter.count_update(&update.meta(meta.as_object().cloned()))
        };
        let totalled = |input_tokens, output_tokens, cost_usd, total| {
            let usage = TokenUsage { input_tokens, output_tokens, cost_usd };
            Some(TurnUpdate::Usage { usage, conversation_cost_usd: Some(total) })
        };
        assert_eq!(report(10, 0.1), totalled(10, 1, 0.1, 0.1));
        assert_eq!(report(30, 0.1 + 0.2), totalled(20, 0, 0.2, 0.3));
        assert_eq!(report(30, 0.1 + 0.2), None);
        assert_eq!(report(30, 0.3), None, "the same sum in another order");
        assert_eq!(report(5, 0.05), totalled(5, 0, 0.05, 0.05), "a total that fell has begun again");
    }

    #[test]
    fn a_cost_in_another_currency_is_no_dollars() {
        let update = UsageUpdate::new(0, 0).cost(Cost::new(3.0, "credits"));
        assert_eq!(AcpUsageCounter::default().count_update(&update), None);
    }

    #[test]
    fn a_cost_that_nobody_can_have_is_finite_and_so_are_the_tokens() {
        let mut counter = AcpUsageCounter::default();
        let mut report = |tokens: u64, cost: f64| {
            let meta = json!({META_KEY: {"input_tokens": tokens, "output_tokens": 0}});
            let update = UsageUpdate::new(0, 0).cost(Cost::new(cost, "USD"));
            match counter.count_update(&update.meta(meta.as_object().cloned())) {
                Some(TurnUpdate::Usage { usage, .. }) => Some((usage.input_tokens, usage.cost_usd)),
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
            (AcpProfile::default(), AcpProfile { tokens_of: TokenScope::Session, ..AcpProfile::default() });
        let usage = |input, output| TurnUsage::new(input + output, input, output);
        let mut counter = AcpUsageCounter::default();
        assert_eq!(
            counter.count_response(Some(&usage(100, 7)), None, true, &per_turn),
            usage_update(100, 7, 0.0)
        );
        assert!(counter.has_used());
        counter.begin_turn();
        assert!(!counter.has_used());
        assert_eq!(
            counter.count_response(Some(&usage(100, 7)), None, true, &per_turn),
            usage_update(100, 7, 0.0)
        );
        let mut counter = AcpUsageCounter::default();
        assert_eq!(
            counter.count_response(Some(&usage(100, 7)), None, true, &whole),
            usage_update(100, 7, 0.0)
        );
        assert_eq!(
            counter.count_response(Some(&usage(200, 14)), None, true, &whole),
            usage_update(100, 7, 0.0)
        );
        assert_eq!(counter.count_response(Some(&usage(200, 14)), None, true, &whole), None);
    }

    #[test]
    fn tokens_are_found_where_agents_put_them() {
        let profile = AcpProfile::default();
        let mut counter = AcpUsageCounter::default();
        let chunk_meta = json!({"usage": {"inputTokens": 100, "outputTokens": 7, "totalTokens": 107}});
        assert_eq!(counter.count_chunk(chunk_meta.as_object(), &profile), usage_update(100, 7, 0.0));
        assert_eq!(
            counter.count_chunk(chunk_meta.as_object(), &profile),
            usage_update(100, 7, 0.0),
            "each call is another"
        );
        let quota = json!({"quota": {"token_count": {"input_tokens": 10, "output_tokens": 2}}});
        assert_eq!(counter.count_response(None, quota.as_object(), true, &profile), usage_update(10, 2, 0.0));
        assert_eq!(
            counter.count_response(None, json!({"quota": {"token_count": null}}).as_object(), true, &profile),
            None
        );
    }
}
