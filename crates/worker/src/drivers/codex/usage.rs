//! What a conversation has used. The server tells totals, of each thread and after each call of the model; a session
//! wants what is new, and its price. Nothing is said here: the words are made in `words`.

use std::collections::HashMap;

use qd_protocol::event::Usage;
use qd_protocol::manifest::Price;
use serde::Deserialize;

/// Threads that are told apart at once: ours, and those of the agents that it started.
const THREADS_MAX: usize = 256;
/// The greatest total that is believed; whoever reads JSON as floating point can still count it.
const TOKENS_MAX: u64 = 1 << 50;
/// Costs are told in billionths of a dollar, so that their sums are figures that people know.
const COST_UNIT: f64 = 1e9;
/// How many tokens a price is for.
const PRICED: f64 = 1e6;

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
    price: Option<Price>,
    totals: HashMap<String, Tokens>,
}

impl Meter {
    /// Tokens of later reports cost this.
    pub(super) fn set_price(&mut self, price: Option<Price>) {
        self.price = price;
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
            cost_usd: self.price.map_or(0.0, |price| cost(new, price)),
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

fn cost(tokens: Tokens, price: Price) -> f64 {
    let dollars =
        (tokens.input_tokens as f64 * price.input + tokens.output_tokens as f64 * price.output) / PRICED;
    (dollars * COST_UNIT).round() / COST_UNIT
}

#[cfg(test)]
mod tests {
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
        let mut meter = Meter::default();
        meter.set_price(Some(Price { input: 1.25, output: 10.0 }));
        let usage = meter.count("t", true, report((100, 7), (100, 7))).unwrap();
        assert_eq!(usage.cost_usd, 0.000_195);
        meter.set_price(None);
        assert_eq!(meter.count("t", true, report((200, 14), (100, 7))).unwrap().cost_usd, 0.0);
    }
}
