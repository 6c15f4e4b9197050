//! The cost of tokens, for agents that report only how many they used, and the limits on figures that agents report:
//! implausible values are clamped, and costs are rounded. The prices come from the user's settings, by model.

use std::collections::BTreeMap;

use qd_protocol::manifest::TokenPrice;
use qd_protocol::worker::AgentSpec;

/// The most tokens that are believed. JSON readers that use floating point still count them exactly.
pub(crate) const TOKENS_MAX: u64 = 1 << 50;
/// The highest cost that is believed, in dollars.
pub(crate) const COST_MAX: f64 = 1e9;
/// Costs are rounded to billionths of a dollar, so that sums and differences of them stay readable.
const COST_UNIT: f64 = 1e9;
/// A price is for this many tokens.
const MILLION: f64 = 1e6;
/// The name of the price for all models that have none of their own.
const ANY_MODEL: &str = "*";

/// The token prices of one session.
#[derive(Debug, Clone, Default)]
pub(crate) struct TokenPricing {
    prices: BTreeMap<String, TokenPrice>,
    current: Option<TokenPrice>,
}

impl TokenPricing {
    /// Uses these prices, with no model set yet.
    pub(crate) fn new(prices: BTreeMap<String, TokenPrice>) -> Self {
        Self { prices, current: None }
    }

    /// Uses the prices of the specification, and its model if it has one.
    pub(crate) fn from_spec(spec: &AgentSpec) -> Self {
        let mut pricing = Self::new(spec.prices.clone());
        if let Some(model) = &spec.model {
            pricing.set_model(model);
        }
        pricing
    }

    /// Sets the model in use. A model without a price keeps the current price, because agents have several names for
    /// one model.
    pub(crate) fn set_model(&mut self, model: &str) {
        self.current = self.prices.get(model).copied().or(self.current);
    }

    /// Sets the model in use by all its names. If none of them has a price, the model has none.
    pub(crate) fn set_model_by_names<'a>(&mut self, names: impl IntoIterator<Item = &'a str>) {
        self.current = names.into_iter().find_map(|name| self.prices.get(name)).copied();
    }

    /// The cost in dollars; zero if there is no price. For discounted tokens, callers pass a smaller count.
    pub(crate) fn cost(&self, input_tokens: f64, output_tokens: f64) -> f64 {
        let price = self.current.or_else(|| self.prices.get(ANY_MODEL).copied());
        let Some(TokenPrice { input, output }) = price else { return 0.0 };
        (input_tokens * input + output_tokens * output) / MILLION
    }
}

/// Rounds a cost to [`COST_UNIT`].
pub(crate) fn round_cost(cost: f64) -> f64 {
    (cost * COST_UNIT).round() / COST_UNIT
}

/// Limits a cost that an agent reports to plausible values.
pub(crate) fn clamp_cost(cost: f64) -> f64 {
    if cost.is_nan() { 0.0 } else { cost.clamp(0.0, COST_MAX) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use qd_protocol::{SessionId, WorkerId};

    #[test]
    fn the_price_is_the_models_own_or_else_the_default() {
        let mut spec = AgentSpec::new(SessionId::from_random(&[1]), WorkerId::from_random(&[1]), "a", "/");
        assert_eq!(TokenPricing::from_spec(&spec).cost(1e3, 1e3), 0.0);
        spec.prices.insert("*".to_owned(), TokenPrice { input: 1.0, output: 2.0 });
        spec.prices.insert("big".to_owned(), TokenPrice { input: 10.0, output: 20.0 });
        let mut pricing = TokenPricing::from_spec(&spec);
        assert_eq!(pricing.cost(1e6, 5e5), 2.0);
        pricing.set_model("big");
        assert_eq!(pricing.cost(1e6, 5e5), 20.0);
        pricing.set_model("another name of it");
        assert_eq!(pricing.cost(1e6, 5e5), 20.0);
        pricing.set_model_by_names(["another model", "an alias"]);
        assert_eq!(pricing.cost(1e6, 5e5), 2.0);
        pricing.set_model_by_names(["another model", "big"]);
        assert_eq!(pricing.cost(1e6, 5e5), 20.0);
    }

    #[test]
    fn costs_are_rounded_and_clamped() {
        assert_eq!(round_cost(0.1 + 0.2), 0.3);
        assert_eq!((clamp_cost(f64::NAN), clamp_cost(-1.0), clamp_cost(f64::INFINITY)), (0.0, 0.0, COST_MAX));
    }
}
