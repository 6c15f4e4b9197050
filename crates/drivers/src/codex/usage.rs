//! Counts the usage of a conversation. The server reports totals of each thread after each model call; a session needs
//! the increase and its price. The updates themselves are built in `event_decoder`.

use std::collections::HashMap;

use qd_protocol::event::{ContextUsage, TokenUsage};
use serde::Deserialize;

use crate::pricing::{TOKENS_MAX, TokenPricing, round_cost};

/// The most threads counted separately: ours, and those of the agents that it started.
const THREADS_MAX: usize = 256;

/// The server's usage report on one thread.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct CodexUsageReport {
    total: CodexTokenCounts,
    /// The usage of the last model call.
    last: CodexTokenCounts,
    /// Tokens that the model can read at most.
    #[serde(default)]
    model_context_window: Option<u64>,
}

impl CodexUsageReport {
    /// How full the context is after the last model call, if the server knows how much fits.
    pub(super) fn context(&self) -> Option<ContextUsage> {
        let CodexTokenCounts { input_tokens, output_tokens } = self.last.clamped();
        let size = self.model_context_window.filter(|size| *size > 0)?;
        Some(ContextUsage { used: input_tokens + output_tokens, size })
    }
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
struct CodexTokenCounts {
    /// Includes tokens read from a cache.
    input_tokens: u64,
    /// Includes reasoning tokens.
    output_tokens: u64,
}

/// The usage counted so far, per thread.
#[derive(Debug, Default)]
pub(super) struct CodexUsageCounter {
    pricing: TokenPricing,
    totals: HashMap<String, CodexTokenCounts>,
}

impl CodexUsageCounter {
    /// A counter at zero.
    pub(super) fn new(pricing: TokenPricing) -> Self {
        Self { pricing, totals: HashMap::new() }
    }

    /// Sets the model by which tokens of later reports are priced.
    pub(super) fn set_model(&mut self, model: &str) {
        self.pricing.set_model_by_names([model]);
    }

    /// Returns the increase in a report on a turn of this thread. If the turn is not `live`, the report is part of the
    /// past that a resumed agent repeats, and only sets the base for the next one.
    pub(super) fn count_report(
        &mut self,
        thread: &str,
        live: bool,
        report: CodexUsageReport,
    ) -> Option<TokenUsage> {
        let CodexUsageReport { total, last, .. } = report;
        if self.totals.len() >= THREADS_MAX && !self.totals.contains_key(thread) {
            self.totals.clear();
        }
        let before = self.totals.insert(thread.to_owned(), total);
        if !live {
            return None;
        }
        // An unknown thread may have a past, and a total that fell was reset. In both cases the last call is what is
        // new.
        let new = before.and_then(|before| total.since(before)).unwrap_or(last).clamped();
        let usage = TokenUsage {
            input_tokens: new.input_tokens,
            output_tokens: new.output_tokens,
            cost_usd: round_cost(self.pricing.cost(new.input_tokens as f64, new.output_tokens as f64)),
        };
        (usage != TokenUsage::default()).then_some(usage)
    }
}

impl CodexTokenCounts {
    fn since(self, before: Self) -> Option<Self> {
        Some(Self {
            input_tokens: self.input_tokens.checked_sub(before.input_tokens)?,
            output_tokens: self.output_tokens.checked_sub(before.output_tokens)?,
        })
    }

    fn clamped(self) -> Self {
        Self {
            input_tokens: self.input_tokens.min(TOKENS_MAX),
            output_tokens: self.output_tokens.min(TOKENS_MAX),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use qd_protocol::manifest::TokenPrice;

    use super::*;

    fn report(total: (u64, u64), last: (u64, u64)) -> CodexUsageReport {
        let tokens = |(input_tokens, output_tokens)| CodexTokenCounts { input_tokens, output_tokens };
        CodexUsageReport { total: tokens(total), last: tokens(last), model_context_window: None }
    }

    fn tokens(usage: Option<TokenUsage>) -> Option<(u64, u64)> {
        usage.map(|usage| (usage.input_tokens, usage.output_tokens))
    }

    #[test]
    fn totals_become_increments_and_each_thread_has_its_own() {
        let mut counter = CodexUsageCounter::default();
        assert_eq!(tokens(counter.count_report("t", true, report((100, 7), (100, 7)))), Some((100, 7)));
        assert_eq!(tokens(counter.count_report("t", true, report((200, 17), (100, 10)))), Some((100, 10)));
        assert_eq!(tokens(counter.count_report("child", true, report((50, 5), (50, 5)))), Some((50, 5)));
        assert_eq!(counter.count_report("t", true, report((200, 17), (100, 10))), None);
        // The total was reset.
        assert_eq!(tokens(counter.count_report("t", true, report((30, 3), (30, 3)))), Some((30, 3)));
    }

    #[test]
    fn the_total_of_the_past_only_sets_the_base() {
        let mut counter = CodexUsageCounter::default();
        assert_eq!(counter.count_report("t", false, report((1000, 100), (400, 40))), None);
        assert_eq!(tokens(counter.count_report("t", true, report((1100, 107), (100, 7)))), Some((100, 7)));
        // A thread whose past is not reported still has one.
        let mut silent = CodexUsageCounter::default();
        assert_eq!(tokens(silent.count_report("t", true, report((1100, 107), (100, 7)))), Some((100, 7)));
    }

    #[test]
    fn tokens_cost_what_the_model_does() {
        let prices = BTreeMap::from([("m".to_owned(), TokenPrice { input: 1.25, output: 10.0 })]);
        let mut counter = CodexUsageCounter::new(TokenPricing::new(prices));
        counter.set_model("m");
        let usage = counter.count_report("t", true, report((100, 7), (100, 7))).unwrap();
        assert_eq!(usage.cost_usd, 0.000_195);
        counter.set_model("another");
        assert_eq!(counter.count_report("t", true, report((200, 14), (100, 7))).unwrap().cost_usd, 0.0);
    }
}
