//! Counts tokens and cost of a conversation and reports increments. Tokens are counted call by call while the model
//! streams, with an estimated cost if a price is known, so that a budget can end a turn midway. Each result then adds
//! what its own totals have on top: calls of subagents, which are not streamed, and the true cost.

use qd_protocol::event::TokenUsage;
use qd_protocol::link::TurnUpdate;
use serde_json::Value;

use super::messages::ClaudeTurnResult;
use crate::pricing::{TOKENS_MAX, TokenPricing, clamp_cost, round_cost};

/// Prices of reading from and writing to the model's cache, as shares of the input price. This is the vendor's rule for
/// all its models.
const CACHE_READ_SHARE: f64 = 0.1;
const CACHE_WRITE_SHARE: f64 = 1.25;

/// The usage counters of a conversation.
#[derive(Debug, Default)]
pub(super) struct ClaudeUsageCounter {
    pricing: TokenPricing,
    /// The model as the session names it, which may be an alias of the model that answers.
    model: Option<String>,
    /// The counts of the model call that is being streamed.
    current_call: ClaudeTokenCounts,
    /// The usage emitted since the last result.
    emitted: TokenUsage,
    /// The last total cost, for versions that report only totals. `None` in a resumed conversation until the first
    /// result.
    last_total_cost: Option<f64>,
}

/// The tokens of one model call.
#[derive(Debug, Default, Clone, Copy)]
struct ClaudeTokenCounts {
    input: u64,
    cache_read: u64,
    cache_write: u64,
    output: u64,
}

impl ClaudeUsageCounter {
    /// A counter at zero. A resumed conversation has an unknown earlier cost.
    pub(super) fn new(pricing: TokenPricing, model: Option<String>, resumed: bool) -> Self {
        Self { pricing, model, last_total_cost: (!resumed).then_some(0.0), ..Self::default() }
    }

    /// Counts a new model call, when its message begins or arrives whole.
    pub(super) fn start_call(&mut self, message: &Value) -> Option<TurnUpdate> {
        let names = [message["model"].as_str(), self.model.as_deref()];
        self.pricing.set_model_by_names(names.into_iter().flatten());
        self.current_call = ClaudeTokenCounts::default();
        self.update_call(&message["usage"])
    }

    /// Counts a later report of the same call, which has the call's totals so far.
    pub(super) fn update_call(&mut self, usage: &Value) -> Option<TurnUpdate> {
        let (before, now) = (self.current_call, self.current_call.merged_with(usage));
        self.current_call = now;
        let cost = now.cost(&self.pricing) - before.cost(&self.pricing);
        self.emit(TokenUsage {
            input_tokens: now.total_input() - before.total_input(),
            output_tokens: now.output - before.output,
            cost_usd: round_cost(cost),
        })
    }

    /// All tokens of the current call: those that the model has read and those that it has written.
    pub(super) fn current_call_tokens(&self) -> u64 {
        self.current_call.total_input() + self.current_call.output
    }

    /// The usage in a result beyond what was emitted since the previous one.
    pub(super) fn count_result(&mut self, result: &ClaudeTurnResult) -> Option<TurnUpdate> {
        let before = self.last_total_cost;
        let total = result.total_cost_usd.map(clamp_cost);
        self.last_total_cost = total.or(before);
        let actual = match &result.model_usage_since_last_result {
            Some(by_model) => by_model.values().fold(TokenUsage::default(), |mut sum, model| {
                sum += model_usage(model);
                sum
            }),
            None => {
                let tokens = ClaudeTokenCounts::default().merged_with(&result.usage);
                let cost = match (before, total) {
                    // A total that fell was reset to zero in between.
                    (Some(before), Some(now)) if now < before => now,
                    (Some(before), Some(now)) => now - before,
                    _ => 0.0,
                };
                TokenUsage {
                    input_tokens: tokens.total_input(),
                    output_tokens: tokens.output,
                    cost_usd: cost,
                }
            }
        };
        let emitted = std::mem::take(&mut self.emitted);
        self.current_call = ClaudeTokenCounts::default();
        let missing = TokenUsage {
            input_tokens: actual.input_tokens.saturating_sub(emitted.input_tokens),
            output_tokens: actual.output_tokens.saturating_sub(emitted.output_tokens),
            // An estimate that was too high cannot be taken back.
            cost_usd: round_cost((actual.cost_usd - emitted.cost_usd).max(0.0)),
        };
        (missing != TokenUsage::default()).then_some(TurnUpdate::usage(missing))
    }

    fn emit(&mut self, usage: TokenUsage) -> Option<TurnUpdate> {
        if usage == TokenUsage::default() {
            return None;
        }
        self.emitted += usage;
        Some(TurnUpdate::usage(usage))
    }
}

impl ClaudeTokenCounts {
    /// Merges a report, which may leave out counts that have not changed.
    fn merged_with(self, usage: &Value) -> Self {
        let count = |name: &str, known: u64| token_count(&usage[name]).max(known);
        Self {
            input: count("input_tokens", self.input),
            cache_read: count("cache_read_input_tokens", self.cache_read),
            cache_write: count("cache_creation_input_tokens", self.cache_write),
            output: count("output_tokens", self.output),
        }
    }

    fn total_input(self) -> u64 {
        self.input + self.cache_read + self.cache_write
    }

    #[expect(clippy::cast_precision_loss, reason = "it is an estimate")]
    fn cost(self, pricing: &TokenPricing) -> f64 {
        let input = self.input as f64
            + self.cache_read as f64 * CACHE_READ_SHARE
            + self.cache_write as f64 * CACHE_WRITE_SHARE;
        pricing.cost(input, self.output as f64)
    }
}

fn model_usage(model: &Value) -> TokenUsage {
    let count = |name: &str| token_count(&model[name]);
    TokenUsage {
        input_tokens: count("inputTokens")
            + count("cacheReadInputTokens")
            + count("cacheCreationInputTokens"),
        output_tokens: count("outputTokens"),
        cost_usd: clamp_cost(model["costUSD"].as_f64().unwrap_or_default()),
    }
}

fn token_count(value: &Value) -> u64 {
    value.as_u64().unwrap_or_default().min(TOKENS_MAX)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use qd_protocol::manifest::TokenPrice;
    use serde_json::json;

    use super::*;
    use crate::pricing::COST_MAX;

    /// The cost of `message_with_usage(_, 10)` by `pricing`: 10 tokens at full price, 1000 read at a tenth, 100 written
    /// at five quarters, 1 of output.
    const ESTIMATE: f64 = ((10.0 + 100.0 + 125.0) * 10.0 + 100.0) / 1e6;

    fn pricing(model: &str) -> TokenPricing {
        TokenPricing::new(BTreeMap::from([(model.to_owned(), TokenPrice { input: 10.0, output: 100.0 })]))
    }

    fn usage_update(input_tokens: u64, output_tokens: u64, cost_usd: f64) -> Option<TurnUpdate> {
        Some(TurnUpdate::usage(TokenUsage { input_tokens, output_tokens, cost_usd }))
    }

    fn message_with_usage(model: &str, input: u64) -> Value {
        json!({"model": model, "usage": {"input_tokens": input, "cache_read_input_tokens": 1000,
            "cache_creation_input_tokens": 100, "output_tokens": 1}})
    }

    fn turn_result(value: Value) -> ClaudeTurnResult {
        serde_json::from_value(value).unwrap()
    }

    #[test]
    fn tokens_are_counted_as_the_model_streams_and_never_twice() {
        let mut counter = ClaudeUsageCounter::new(TokenPricing::default(), None, false);
        assert_eq!(counter.start_call(&message_with_usage("m", 10)), usage_update(1110, 1, 0.0));
        assert_eq!(counter.update_call(&json!({"output_tokens": 8})), usage_update(0, 7, 0.0));
        assert_eq!(counter.update_call(&json!({"output_tokens": 8, "input_tokens": 10})), None);
        let same = json!({"m": {"inputTokens": 10, "cacheReadInputTokens": 1000,
            "cacheCreationInputTokens": 100, "outputTokens": 8, "costUSD": 0.5}});
        let ended = turn_result(json!({"model_usage_since_last_result": same, "total_cost_usd": 0.5}));
        assert_eq!(counter.count_result(&ended), usage_update(0, 0, 0.5));
    }

    #[test]
    fn usage_of_subagents_comes_with_the_result() {
        let mut counter = ClaudeUsageCounter::new(TokenPricing::default(), None, false);
        counter.start_call(&json!({"usage": {"input_tokens": 10, "output_tokens": 1}}));
        let both = json!({"m": {"inputTokens": 10, "outputTokens": 1, "costUSD": 0.1},
            "helper": {"inputTokens": 70, "outputTokens": 7, "costUSD": 0.2}});
        let ended = turn_result(json!({"model_usage_since_last_result": both}));
        assert_eq!(counter.count_result(&ended), usage_update(70, 7, 0.3));
    }

    #[test]
    fn a_known_price_makes_an_estimate_and_the_result_adds_only_what_is_missing() {
        let mut counter = ClaudeUsageCounter::new(pricing("opus"), Some("opus".to_owned()), false);
        let estimate = ESTIMATE;
        assert_eq!(
            counter.start_call(&message_with_usage("claude-opus-9", 10)),
            usage_update(1110, 1, round_cost(estimate))
        );
        let cost =
            |cost: f64| turn_result(json!({"model_usage_since_last_result": {"m": {"costUSD": cost}}}));
        assert_eq!(counter.count_result(&cost(estimate + 0.25)), usage_update(0, 0, 0.25));
        counter.start_call(&message_with_usage("claude-opus-9", 10));
        assert_eq!(counter.count_result(&cost(0.0)), None, "it is never negative");
        assert_eq!(
            counter.count_result(&cost(0.5)),
            usage_update(0, 0, 0.5),
            "an estimate that was too high does not count against the next"
        );
    }

    #[test]
    fn a_price_for_all_models_makes_an_estimate_for_one_that_has_none() {
        let mut counter = ClaudeUsageCounter::new(pricing("*"), Some("opus".to_owned()), false);
        assert_eq!(
            counter.start_call(&message_with_usage("claude-opus-9", 10)),
            usage_update(1110, 1, round_cost(ESTIMATE))
        );
        let mut another = ClaudeUsageCounter::new(pricing("sonnet"), Some("opus".to_owned()), false);
        assert_eq!(another.start_call(&message_with_usage("claude-opus-9", 10)), usage_update(1110, 1, 0.0));
    }

    #[test]
    fn a_version_that_reports_only_totals_is_counted_by_their_differences() {
        let total = |cost: f64| turn_result(json!({"total_cost_usd": cost, "usage": {"input_tokens": 5}}));
        let mut fresh = ClaudeUsageCounter::new(TokenPricing::default(), None, false);
        assert_eq!(fresh.count_result(&total(0.1)), usage_update(5, 0, 0.1));
        assert_eq!(fresh.count_result(&total(0.1 + 0.2)), usage_update(5, 0, 0.2));
        assert_eq!(
            fresh.count_result(&total(0.05)),
            usage_update(5, 0, 0.05),
            "a total that fell has begun again"
        );
        let mut resumed = ClaudeUsageCounter::new(TokenPricing::default(), None, true);
        assert_eq!(
            resumed.count_result(&total(7.0)),
            usage_update(5, 0, 0.0),
            "the previous process reported most of it"
        );
        assert_eq!(resumed.count_result(&total(7.5)), usage_update(5, 0, 0.5));
    }

    #[test]
    fn impossible_figures_are_clamped() {
        let mut counter = ClaudeUsageCounter::new(TokenPricing::default(), None, false);
        assert_eq!(
            counter.start_call(&json!({"usage": {"input_tokens": u64::MAX, "output_tokens": -3}})),
            usage_update(TOKENS_MAX, 0, 0.0)
        );
        let absurd = json!({"m": {"costUSD": 1e300}, "n": {"costUSD": -1.0}});
        let ended = turn_result(json!({"model_usage_since_last_result": absurd}));
        assert_eq!(counter.count_result(&ended), usage_update(0, 0, COST_MAX));
    }
}
