//! What tokens cost, for agents that tell only how many they used, and how such figures are told: what nobody can have
//! used is not believed, and what is told of money is a figure that people know. The prices are the user's, by model.

use std::collections::BTreeMap;

use qd_protocol::manifest::TokenPrice;
use qd_protocol::worker::AgentSpec;

/// The most tokens that are believed; whoever reads JSON as floating point can still count them.
pub(crate) const TOKENS_MAX: u64 = 1 << 50;
/// The greatest cost that is believed, in dollars.
pub(crate) const COST_MAX: f64 = 1e9;
/// Costs are told in billionths of a dollar, so that sums and differences of them are figures that people know.
const COST_UNIT: f64 = 1e9;
/// Tokens that a price is for.
const MILLION: f64 = 1e6;
/// The name under which there is a price for all models that have none.
const ANY_MODEL: &str = "*";

/// The price of one session's tokens.
#[derive(Debug, Clone, Default)]
pub(crate) struct TokenPricing {
    prices: BTreeMap<String, TokenPrice>,
    current: Option<TokenPrice>,
}

impl TokenPricing {
    /// By these prices, of no model yet.
    pub(crate) fn new(prices: BTreeMap<String, TokenPrice>) -> Self {
        Self { prices, current: None }
    }

    /// Of the model that the session was given, if any.
    pub(crate) fn from_spec(spec: &AgentSpec) -> Self {
        let mut pricing = Self::new(spec.prices.clone());
        if let Some(model) = &spec.model {
            pricing.set_model(model);
        }
        pricing
    }

    /// The agent uses this model. One without a price leaves the price as it was: agents have several names for one.
    pub(crate) fn set_model(&mut self, model: &str) {
        self.current = self.prices.get(model).copied().or(self.current);
    }

    /// The agent uses the model that has these names, and no other one's price will do.
    pub(crate) fn set_model_by_names<'a>(&mut self, names: impl IntoIterator<Item = &'a str>) {
        self.current = names.into_iter().find_map(|name| self.prices.get(name)).copied();
    }

    /// In dollars; nothing where there is no price. Tokens that cost less than others are fewer.
    pub(crate) fn cost(&self, input_tokens: f64, output_tokens: f64) -> f64 {
        let price = self.current.or_else(|| self.prices.get(ANY_MODEL).copied());
        let Some(TokenPrice { input, output }) = price else { return 0.0 };
        (input_tokens * input + output_tokens * output) / MILLION
    }
}

/// A cost, as it is told.
pub(crate) fn round_cost(cost: f64) -> f64 {
    (cost * COST_UNIT).round() / COST_UNIT
}

/// A cost that an agent tells, as far as it is believed.
pub(crate) fn clamp_cost(cost: f64) -> f64 {
    if cost.is_nan() { 0.0 } else { cost.clamp(0.0, COST_MAX) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use qd_protocol::{SessionId, WorkerId};

    #[test]
    fn the_price_is_that_of_the_model_and_else_the_one_for_all() {
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
    fn costs_are_told_without_dust_and_believed_within_reason() {
        assert_eq!(round_cost(0.1 + 0.2), 0.3);
        assert_eq!((clamp_cost(f64::NAN), clamp_cost(-1.0), clamp_cost(f64::INFINITY)), (0.0, 0.0, COST_MAX));
    }
}
