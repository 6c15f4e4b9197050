//! What a conversation has used. The server tells totals, of each thread and after each call of the model; a session
//! wants what is new, and its price. Nothing is said here: the words are made in `words`.

use std::collections::HashMap;

use qd_protocol::event::TokenUsage;
use serde::Deserialize;

use crate::drivers::pricing::{TOKENS_MAX, TokenPricing, round_cost};

/// Threads that are told apart at once: ours, and those of the agents that it started.
const THREADS_MAX: usize = 256;

/// The server's report on one thread.
#[derive(Debug, Deserialize)]
pub(super) struct CodexUsageReport {
    total: CodexTokenCounts,
    /// What the last call of the model used.
    last: CodexTokenCounts,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
struct CodexTokenCounts {
    /// Those that were read from a cache too.
    input_tokens: u64,
    /// Those of its thoughts too.
    output_tokens: u64,
}

/// The count.
#[derive(Debug, Default)]
pub(super) struct CodexUsageCounter {
    pricing: TokenPricing,
    totals: HashMap<String, CodexTokenCounts>,
}

impl CodexUsageCounter {
    /// Nothing is counted yet.
    pub(super) fn new(pricing: TokenPricing) -> Self {
        Self { pricing, totals: HashMap::new() }
    }

    /// Tokens of later reports are this model's.
    pub(super) fn set_model(&mut self, model: &str) {
        self.pricing.set_model_by_names([model]);
    }

    /// What is new in a report on a turn of this thread. One on a turn that is not `live` tells of the past, which a
    /// resumed agent repeats: it is only what the next are counted from.
    pub(super) fn count_report(
        &mut self,
        thread: &str,
        live: bool,
        report: CodexUsageReport,
    ) -> Option<TokenUsage> {
        let CodexUsageReport { total, last } = report;
        if self.totals.len() >= THREADS_MAX && !self.totals.contains_key(thread) {
            self.totals.clear();
        }
        let before = self.totals.insert(thread.to_owned(), total);
        if !live {
            return None;
        }
        // A thread that was never heard of may have a past; a total that fell was counted anew from somewhere.
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
        CodexUsageReport { total: tokens(total), last: tokens(last) }
    }

    fn tokens(usage: Option<TokenUsage>) -> Option<(u64, u64)> {
        usage.map(|usage| (usage.input_tokens, usage.output_tokens))
    }

    #[test]
    fn totals_become_increments_and_each_thread_has_its_own() {
        let mut meter = CodexUsageCounter::default();
        assert_eq!(tokens(meter.count_report("t", true, report((100, 7), (100, 7)))), Some((100, 7)));
        assert_eq!(tokens(meter.count_report("t", true, report((200, 17), (100, 10)))), Some((100, 10)));
        assert_eq!(tokens(meter.count_report("child", true, report((50, 5), (50, 5)))), Some((50, 5)));
        assert_eq!(meter.count_report("t", true, report((200, 17), (100, 10))), None);
        // Counted anew.
        assert_eq!(tokens(meter.count_report("t", true, report((30, 3), (30, 3)))), Some((30, 3)));
    }

    #[test]
    fn the_total_of_the_past_is_only_what_the_next_is_counted_from() {
        let mut told = CodexUsageCounter::default();
        assert_eq!(told.count_report("t", false, report((1000, 100), (400, 40))), None);
        assert_eq!(tokens(told.count_report("t", true, report((1100, 107), (100, 7)))), Some((100, 7)));
        // One that tells nothing of its past still has one.
        let mut silent = CodexUsageCounter::default();
        assert_eq!(tokens(silent.count_report("t", true, report((1100, 107), (100, 7)))), Some((100, 7)));
    }

    #[test]
    fn tokens_cost_what_the_model_does() {
        let prices = BTreeMap::from([("m".to_owned(), TokenPrice { input: 1.25, output: 10.0 })]);
        let mut meter = CodexUsageCounter::new(TokenPricing::new(prices));
        meter.set_model("m");
        let usage = meter.count_report("t", true, report((100, 7), (100, 7))).unwrap();
        assert_eq!(usage.cost_usd, 0.000_195);
        meter.set_model("another");
        assert_eq!(meter.count_report("t", true, report((200, 14), (100, 7))).unwrap().cost_usd, 0.0);
    }
}
