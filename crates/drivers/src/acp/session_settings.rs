//! The settings of a session as the agent reports them when it opens the session. Nothing is sent here.

use serde::Deserialize;
use serde_json::Value;

/// The settings of a session that a client may change, with their current values.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct AcpSessionSettings {
    pub(super) modes: Option<AcpModes>,
    pub(super) models: Option<AcpModels>,
    pub(super) config_options: Option<Vec<AcpConfigOption>>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct AcpModes {
    pub(super) current_mode_id: String,
    #[serde(default)]
    pub(super) available_modes: Vec<AcpMode>,
}

#[derive(Debug, Deserialize)]
pub(super) struct AcpMode {
    pub(super) id: String,
}

/// The older way to choose a model, no longer among the protocol's types. Several agents know only this one.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct AcpModels {
    pub(super) current_model_id: Option<String>,
    #[serde(default)]
    available_models: Vec<AcpModelInfo>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct AcpModelInfo {
    model_id: String,
    #[serde(rename = "_meta")]
    meta: Option<AcpModelMeta>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct AcpModelMeta {
    context_limit: Option<u64>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct AcpConfigOption {
    pub(super) id: String,
    category: Option<String>,
    pub(super) current_value: Option<Value>,
    #[serde(default)]
    options: Vec<Value>,
}

impl AcpConfigOption {
    /// The current value, if it is text.
    pub(super) fn current_text(&self) -> Option<&str> {
        self.current_value.as_ref()?.as_str()
    }

    pub(super) fn offers_value(&self, value: &str) -> bool {
        let matches = |option: &Value| option["value"] == value;
        let grouped =
            |option: &Value| option["options"].as_array().is_some_and(|group| group.iter().any(matches));
        self.options.iter().any(|option| matches(option) || grouped(option))
    }
}

impl AcpSessionSettings {
    /// If the response has another shape, nothing can be set.
    pub(super) fn parse(response: Value) -> Self {
        serde_json::from_value(response).unwrap_or_default()
    }

    /// Tokens that the current model can read, for agents that report them with their models.
    pub(super) fn context_size(&self) -> Option<u64> {
        let AcpModels { current_model_id, available_models } = self.models.as_ref()?;
        let current =
            available_models.iter().find(|model| Some(&model.model_id) == current_model_id.as_ref())?;
        current.meta.as_ref()?.context_limit.filter(|size| *size > 0)
    }

    /// The option with this id.
    pub(super) fn option_with_id(&self, id: &str) -> Option<&AcpConfigOption> {
        self.config_options.as_deref()?.iter().find(|option| option.id == id)
    }

    pub(super) fn option_in_category(&self, category: &str) -> Option<&AcpConfigOption> {
        self.config_options.as_deref()?.iter().find(|option| option.category.as_deref() == Some(category))
    }
}
