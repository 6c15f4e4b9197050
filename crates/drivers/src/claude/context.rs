//! How full the model's context is: the tokens of its last call. How many it can read at most is only in the results, so
//! nothing is reported before the first of them.

use qd_protocol::event::ContextUsage;

use super::messages::ClaudeTurnResult;

/// Follows the context of the main model. Subagents have contexts of their own.
#[derive(Debug, Default)]
pub(super) struct ClaudeContextMeter {
    /// The model that answered last, by the name under which results have it.
    model: String,
    /// Tokens of its last call.
    used: u64,
    /// Tokens that it can read, if a result has told.
    size: Option<u64>,
    reported: Option<ContextUsage>,
}

impl ClaudeContextMeter {
    /// Sets the model of the current call.
    pub(super) fn set_model(&mut self, model: &str) {
        if self.model != model {
            model.clone_into(&mut self.model);
            self.size = None;
        }
    }

    /// Records the tokens of the current call.
    pub(super) fn record_used(&mut self, tokens: u64) -> Option<ContextUsage> {
        self.used = tokens;
        self.report()
    }

    /// Takes the size of the context from a result.
    pub(super) fn apply_result(&mut self, result: &ClaudeTurnResult) -> Option<ContextUsage> {
        let size = result.model_usage.get(&self.model).and_then(|model| model["contextWindow"].as_u64());
        self.size = size.filter(|size| *size > 0).or(self.size);
        self.report()
    }

    /// The context, if it differs from the last report.
    fn report(&mut self) -> Option<ContextUsage> {
        let context = ContextUsage { used: self.used, size: self.size? };
        let is_new = self.used > 0 && self.reported.replace(context) != Some(context);
        is_new.then_some(context)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn the_context_is_reported_once_its_size_is_known_and_only_if_it_changed() {
        let result = |size: u64| -> ClaudeTurnResult {
            let usage: Value = json!({"opus": {"contextWindow": size}, "helper": {"contextWindow": 7}});
            serde_json::from_value(json!({ "modelUsage": usage })).unwrap()
        };
        let mut meter = ClaudeContextMeter::default();
        meter.set_model("opus");
        assert_eq!(meter.record_used(100), None, "its size is not known");
        assert_eq!(meter.apply_result(&result(1000)), Some(ContextUsage { used: 100, size: 1000 }));
        assert_eq!(meter.record_used(150), Some(ContextUsage { used: 150, size: 1000 }));
        assert_eq!(meter.apply_result(&result(1000)), None);
        meter.set_model("other");
        assert_eq!(meter.record_used(160), None);
        assert_eq!(meter.apply_result(&result(1000)), None);
    }
}
