//! What the conversation has cost, as increments. Tokens are counted call by call while the model streams, with an
//! estimate of their price where one is known, so that a budget can end a turn in its middle; each result then adds what
//! its own figures have on top: calls of helpers, which are not streamed, and the true price.

use qd_protocol::event::Usage;
use qd_protocol::link::Said;
use serde_json::Value;

use super::words::TurnResult;
use crate::drivers::price::{Pricing, TOKENS_MAX, believed, rounded};

/// What reading from the model's cache costs, as a share of the price of its input; writing to it costs more.
/// Both are the vendor's rule for all its models.
const CACHE_READ: f64 = 0.1;
const CACHE_WRITE: f64 = 1.25;

/// The counters of a conversation.
#[derive(Debug, Default)]
pub(super) struct Tally {
    pricing: Pricing,
    /// The model in the session's words, which may be an alias of the one that answers.
    model: Option<String>,
    /// The call that is being streamed.
    call: Tokens,
    /// What has been told since the last result.
    told: Usage,
    /// The last total of a version that tells nothing better; not known yet in a resumed conversation.
    total: Option<f64>,
}

/// Tokens of one call.
#[derive(Debug, Default, Clone, Copy)]
struct Tokens {
    input: u64,
    cache_read: u64,
    cache_write: u64,
    output: u64,
}

impl Tally {
    /// Nothing is counted yet; a resumed conversation has cost something already.
    pub(super) fn new(pricing: Pricing, model: Option<String>, resumed: bool) -> Self {
        Self { pricing, model, total: (!resumed).then_some(0.0), ..Self::default() }
    }

    /// The model was called: its message begins, or is all there.
    pub(super) fn call(&mut self, message: &Value) -> Option<Said> {
        let names = [message["model"].as_str(), self.model.as_deref()];
        self.pricing.model_of(names.into_iter().flatten());
        self.call = Tokens::default();
        self.more(&message["usage"])
    }

    /// More of the same call: its totals so far.
    pub(super) fn more(&mut self, usage: &Value) -> Option<Said> {
        let (before, now) = (self.call, self.call.at_least(usage));
        self.call = now;
        let cost = now.cost(&self.pricing) - before.cost(&self.pricing);
        self.tell(Usage {
            input_tokens: now.all_input() - before.all_input(),
            output_tokens: now.output - before.output,
            cost_usd: rounded(cost),
        })
    }

    /// What a result has on top of what was told since the one before.
    pub(super) fn settle(&mut self, result: &TurnResult) -> Option<Said> {
        let before = self.total;
        let total = result.total_cost_usd.map(believed);
        self.total = total.or(before);
        let truth = match &result.model_usage_since_last_result {
            Some(by_model) => by_model.values().fold(Usage::default(), |mut sum, model| {
                sum += of_model(model);
                sum
            }),
            None => {
                let tokens = Tokens::default().at_least(&result.usage);
                let cost = match (before, total) {
                    // A total that fell has been counted anew from nothing.
                    (Some(before), Some(now)) if now < before => now,
                    (Some(before), Some(now)) => now - before,
                    _ => 0.0,
                };
                Usage { input_tokens: tokens.all_input(), output_tokens: tokens.output, cost_usd: cost }
            }
        };
        let told = std::mem::take(&mut self.told);
        self.call = Tokens::default();
        let more = Usage {
            input_tokens: truth.input_tokens.saturating_sub(told.input_tokens),
            output_tokens: truth.output_tokens.saturating_sub(told.output_tokens),
            // An estimate that was too high cannot be taken back.
            cost_usd: rounded((truth.cost_usd - told.cost_usd).max(0.0)),
        };
        (more != Usage::default()).then_some(Said::Usage { usage: more })
    }

    fn tell(&mut self, usage: Usage) -> Option<Said> {
        if usage == Usage::default() {
            return None;
        }
        self.told += usage;
        Some(Said::Usage { usage })
    }
}

impl Tokens {
    /// With what a report names; it may leave out what has not changed.
    fn at_least(self, usage: &Value) -> Self {
        let count = |name: &str, known: u64| tokens(&usage[name]).max(known);
        Self {
            input: count("input_tokens", self.input),
            cache_read: count("cache_read_input_tokens", self.cache_read),
            cache_write: count("cache_creation_input_tokens", self.cache_write),
            output: count("output_tokens", self.output),
        }
    }

    fn all_input(self) -> u64 {
        self.input + self.cache_read + self.cache_write
    }

    #[expect(clippy::cast_precision_loss, reason = "it is an estimate")]
    fn cost(self, pricing: &Pricing) -> f64 {
        let input =
            self.input as f64 + self.cache_read as f64 * CACHE_READ + self.cache_write as f64 * CACHE_WRITE;
        pricing.cost(input, self.output as f64)
    }
}

fn of_model(model: &Value) -> Usage {
    let count = |name: &str| tokens(&model[name]);
    Usage {
        input_tokens: count("inputTokens")
            + count("cacheReadInputTokens")
            + count("cacheCreationInputTokens"),
        output_tokens: count("outputTokens"),
        cost_usd: believed(model["costUSD"].as_f64().unwrap_or_default()),
    }
}

fn tokens(value: &Value) -> u64 {
    value.as_u64().unwrap_or_default().min(TOKENS_MAX)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use qd_protocol::manifest::Price;
    use serde_json::json;

    use super::*;
    use crate::drivers::price::COST_MAX;

    /// What `begins` costs by `pricing`: 10 at full price, 1000 read at a tenth, 100 written at five quarters, 1 of output.
    const ESTIMATE: f64 = ((10.0 + 100.0 + 125.0) * 10.0 + 100.0) / 1e6;

    fn pricing(model: &str) -> Pricing {
        Pricing::new(BTreeMap::from([(model.to_owned(), Price { input: 10.0, output: 100.0 })]))
    }

    fn said(input_tokens: u64, output_tokens: u64, cost_usd: f64) -> Option<Said> {
        Some(Said::Usage { usage: Usage { input_tokens, output_tokens, cost_usd } })
    }

    fn begins(model: &str, input: u64) -> Value {
        json!({"model": model, "usage": {"input_tokens": input, "cache_read_input_tokens": 1000,
            "cache_creation_input_tokens": 100, "output_tokens": 1}})
    }

    fn result(value: Value) -> TurnResult {
        serde_json::from_value(value).unwrap()
    }

    #[test]
    fn tokens_are_counted_as_the_model_streams_and_never_twice() {
        let mut tally = Tally::new(Pricing::default(), None, false);
        assert_eq!(tally.call(&begins("m", 10)), said(1110, 1, 0.0));
        assert_eq!(tally.more(&json!({"output_tokens": 8})), said(0, 7, 0.0));
        assert_eq!(tally.more(&json!({"output_tokens": 8, "input_tokens": 10})), None);
        let same = json!({"m": {"inputTokens": 10, "cacheReadInputTokens": 1000,
            "cacheCreationInputTokens": 100, "outputTokens": 8, "costUSD": 0.5}});
        let ended = result(json!({"model_usage_since_last_result": same, "total_cost_usd": 0.5}));
        assert_eq!(tally.settle(&ended), said(0, 0, 0.5));
    }

    #[test]
    fn what_helpers_used_comes_with_the_result() {
        let mut tally = Tally::new(Pricing::default(), None, false);
        tally.call(&json!({"usage": {"input_tokens": 10, "output_tokens": 1}}));
        let both = json!({"m": {"inputTokens": 10, "outputTokens": 1, "costUSD": 0.1},
            "helper": {"inputTokens": 70, "outputTokens": 7, "costUSD": 0.2}});
        let ended = result(json!({"model_usage_since_last_result": both}));
        assert_eq!(tally.settle(&ended), said(70, 7, 0.3));
    }

    #[test]
    fn a_known_price_makes_an_estimate_and_the_result_adds_only_what_is_missing() {
        let mut tally = Tally::new(pricing("opus"), Some("opus".to_owned()), false);
        let estimate = ESTIMATE;
        assert_eq!(tally.call(&begins("claude-opus-9", 10)), said(1110, 1, rounded(estimate)));
        let cost = |cost: f64| result(json!({"model_usage_since_last_result": {"m": {"costUSD": cost}}}));
        assert_eq!(tally.settle(&cost(estimate + 0.25)), said(0, 0, 0.25));
        tally.call(&begins("claude-opus-9", 10));
        assert_eq!(tally.settle(&cost(0.0)), None, "it is never negative");
        assert_eq!(
            tally.settle(&cost(0.5)),
            said(0, 0, 0.5),
            "and what was too much is not held against the next"
        );
    }

    #[test]
    fn a_price_for_all_models_makes_an_estimate_for_one_that_has_none() {
        let mut tally = Tally::new(pricing("*"), Some("opus".to_owned()), false);
        assert_eq!(tally.call(&begins("claude-opus-9", 10)), said(1110, 1, rounded(ESTIMATE)));
        let mut another = Tally::new(pricing("sonnet"), Some("opus".to_owned()), false);
        assert_eq!(another.call(&begins("claude-opus-9", 10)), said(1110, 1, 0.0));
    }

    #[test]
    fn a_version_that_tells_totals_only_is_counted_by_their_differences() {
        let total = |cost: f64| result(json!({"total_cost_usd": cost, "usage": {"input_tokens": 5}}));
        let mut fresh = Tally::new(Pricing::default(), None, false);
        assert_eq!(fresh.settle(&total(0.1)), said(5, 0, 0.1));
        assert_eq!(fresh.settle(&total(0.1 + 0.2)), said(5, 0, 0.2));
        assert_eq!(fresh.settle(&total(0.05)), said(5, 0, 0.05), "a total that fell has begun again");
        let mut resumed = Tally::new(Pricing::default(), None, true);
        assert_eq!(
            resumed.settle(&total(7.0)),
            said(5, 0, 0.0),
            "most of that was told by the process before"
        );
        assert_eq!(resumed.settle(&total(7.5)), said(5, 0, 0.5));
    }

    #[test]
    fn figures_that_nobody_can_have_are_finite() {
        let mut tally = Tally::new(Pricing::default(), None, false);
        assert_eq!(
            tally.call(&json!({"usage": {"input_tokens": u64::MAX, "output_tokens": -3}})),
            said(TOKENS_MAX, 0, 0.0)
        );
        let absurd = json!({"m": {"costUSD": 1e300}, "n": {"costUSD": -1.0}});
        let ended = result(json!({"model_usage_since_last_result": absurd}));
        assert_eq!(tally.settle(&ended), said(0, 0, COST_MAX));
    }
}
