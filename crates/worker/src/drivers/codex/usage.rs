//! What a conversation has used. The server tells totals, of each thread and after each call of the model; a session
//! wants what is new, and its price. Nothing is said here: the words are made in `words`.

use std::collections::HashMap;

use qd_protocol::event::Usage;
use serde::Deserialize;

use crate::drivers::price::{Pricing, TOKENS_MAX, rounded};

/// Threads that are told apart at once: ours, and those of the agents that it started.
const THREADS_MAX: usize = 256;

/// The server's report on one thread.
#[derive(Debug, Deserialize)]
pub(super) struct Report {
    total: Tokens,
    /// What the last call of the model used.
    last: Tokens,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Tokens {
    /// Those that were read from a cache too.
    input_tokens: u64,
    /// Those of its thoughts too.
    output_tokens: u64,
}

/// The count.
#[derive(Debug, Default)]
pub(super) struct Meter {
    pricing: Pricing,
    totals: HashMap<String, Tokens>,
}

impl Meter {
    /// Nothing is counted yet.
    pub(super) fn new(pricing: Pricing) -> Self {
        Self { pricing, totals: HashMap::new() }
    }

    /// Tokens of later reports are this model's.
    pub(super) fn set_model(&mut self, model: &str) {
        self.pricing.model_of([model]);
    }

    /// What is new in a report on a turn of this thread. One on a turn that is not `live` tells of the past, which a
    /// resumed agent repeats: it is only what the next are counted from.
    pub(super) fn count(&mut self, thread: &str, live: bool, report: Report) -> Option<Usage> {
        let Report { total, last } = report;
        if self.totals.len() >= THREADS_MAX && !self.totals.contains_key(thread) {
            self.totals.clear();
        }
        let before = self.totals.insert(thread.to_owned(), total);
        if !live {
            return None;
        }
        // A thread that was never heard of may have a past; a total that fell was counted anew from somewhere.
        let new = before.and_then(|before| total.since(before)).unwrap_or(last).believed();
        let usage = Usage {
            input_tokens: new.input_tokens,
            output_tokens: new.output_tokens,
            cost_usd: rounded(self.pricing.cost(new.input_tokens as f64, new.output_tokens as f64)),
        };
        (usage != Usage::default()).then_some(usage)
    }
}

impl Tokens {
    fn since(self, before: Self) -> Option<Self> {
        Some(Self {
            input_tokens: self.input_tokens.checked_sub(before.input_tokens)?,
            output_tokens: self.output_tokens.checked_sub(before.output_tokens)?,
        })
    }

    fn believed(self) -> Self {
        Self {
            input_tokens: self.input_tokens.min(TOKENS_MAX),
            output_tokens: self.output_tokens.min(TOKENS_MAX),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use qd_protocol::manifest::Price;

    use super::*;

    fn report(total: (u64, u64), last: (u64, u64)) -> Report {
        let tokens = |(input_tokens, output_tokens)| Tokens { input_tokens, output_tokens };
        Report { total: tokens(total), last: tokens(last) }
    }

    fn tokens(usage: Option<Usage>) -> Option<(u64, u64)> {
        usage.map(|usage| (usage.input_tokens, usage.output_tokens))
    }

    #[test]
    fn totals_become_increments_and_each_thread_has_its_own() {
        let mut meter = Meter::default();
        assert_eq!(tokens(meter.count("t", true, report((100, 7), (100, 7)))), Some((100, 7)));
        assert_eq!(tokens(meter.count("t", true, report((200, 17), (100, 10)))), Some((100, 10)));
        assert_eq!(tokens(meter.count("child", true, report((50, 5), (50, 5)))), Some((50, 5)));
        assert_eq!(meter.count("t", true, report((200, 17), (100, 10))), None);
        // Counted anew.
        assert_eq!(tokens(meter.count("t", true, report((30, 3), (30, 3)))), Some((30, 3)));
    }

    #[test]
    fn the_total_of_the_past_is_only_what_the_next_is_counted_from() {
        let mut told = Meter::default();
        assert_eq!(told.count("t", false, report((1000, 100), (400, 40))), None);
        assert_eq!(tokens(told.count("t", true, report((1100, 107), (100, 7)))), Some((100, 7)));
        // One that tells nothing of its past still has one.
        let mut silent = Meter::default();
        assert_eq!(tokens(silent.count("t", true, report((1100, 107), (100, 7)))), Some((100, 7)));
    }

    #[test]
    fn tokens_cost_what_the_model_does() {
        let prices = BTreeMap::from([("m".to_owned(), Price { input: 1.25, output: 10.0 })]);
        let mut meter = Meter::new(Pricing::new(prices));
        meter.set_model("m");
        let usage = meter.count("t", true, report((100, 7), (100, 7))).unwrap();
        assert_eq!(usage.cost_usd, 0.000_195);
        meter.set_model("another");
        assert_eq!(meter.count("t", true, report((200, 14), (100, 7))).unwrap().cost_usd, 0.0);
    }
}
