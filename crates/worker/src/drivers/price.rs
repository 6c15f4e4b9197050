//! What tokens cost, for agents that tell only how many they used. The prices are the user's, by model.

use std::collections::BTreeMap;

use qd_protocol::manifest::Price;
use qd_protocol::worker::AgentSpec;

/// Tokens that a price is for.
const MILLION: f64 = 1e6;

/// The price of one session's tokens.
#[derive(Debug, Clone, Default)]
pub(crate) struct Pricing {
    prices: BTreeMap<String, Price>,
    now: Option<Price>,
}

impl Pricing {
    /// Of the model that the session was given, if any.
    pub(crate) fn of(spec: &AgentSpec) -> Self {
        let mut pricing = Self { prices: spec.prices.clone(), now: None };
        if let Some(model) = &spec.model {
            pricing.model(model);
        }
        pricing
    }

    /// The agent uses this model. One without a price leaves the price as it was: agents have several names for one.
    pub(crate) fn model(&mut self, model: &str) {
        self.now = self.prices.get(model).copied().or(self.now);
    }

    /// In dollars; nothing where there is no price.
    pub(crate) fn cost(&self, input_tokens: u64, output_tokens: u64) -> f64 {
        let Some(Price { input, output }) = self.now.or_else(|| self.for_all()) else { return 0.0 };
        (input_tokens as f64 * input + output_tokens as f64 * output) / MILLION
    }

    /// A price without a model is for all that have none.
    fn for_all(&self) -> Option<Price> {
        self.prices.get("*").copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use qd_protocol::{SessionId, WorkerId};

    #[test]
    fn the_price_is_that_of_the_model_and_else_the_one_for_all() {
        let mut spec = AgentSpec::new(SessionId::from_random(&[1]), WorkerId::from_random(&[1]), "a", "/");
        assert_eq!(Pricing::of(&spec).cost(1000, 1000), 0.0);
        spec.prices.insert("*".to_owned(), Price { input: 1.0, output: 2.0 });
        spec.prices.insert("big".to_owned(), Price { input: 10.0, output: 20.0 });
        let mut pricing = Pricing::of(&spec);
        assert_eq!(pricing.cost(1_000_000, 500_000), 2.0);
        pricing.model("big");
        assert_eq!(pricing.cost(1_000_000, 500_000), 20.0);
        pricing.model("another name of it");
        assert_eq!(pricing.cost(1_000_000, 500_000), 20.0);
    }
}
