//! What the drivers share about asks: permission requests and questions as the session gets them, and forms, whose
//! fields are described by a JSON Schema. No agent's protocol is known here; each driver has its own `asks` for that.

use qd_link::LinkClosed;
use qd_link::event_size::OPTIONS_BYTES;
use qd_protocol::event::AskKind;
use qd_protocol::link::{AskRequest, TurnUpdate};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::turn::{DriverTurn, new_ask_id};

/// The most questions in one request, and the most fields in one form.
pub(crate) const QUESTIONS_MAX: usize = 32;
/// The most options offered for one question.
const OPTIONS_MAX: usize = 128;

/// A permission request for a tool. Without a prompt, or with an empty one, it asks whether the tool may be used.
pub(crate) fn permission_request(
    tool: String,
    input: Value,
    prompt: Option<String>,
) -> Result<AskRequest, getrandom::Error> {
    let prompt = prompt.filter(|prompt| !prompt.trim().is_empty());
    Ok(AskRequest {
        id: new_ask_id()?,
        kind: AskKind::Permission,
        prompt: prompt.unwrap_or_else(|| format!("May the agent use {tool}?")),
        tool: Some(tool),
        input,
        risk: None,
        options: Vec::new(),
        implicit: false,
    })
}

/// A question. Without options, any answer is allowed.
pub(crate) fn question_request(prompt: String, options: Vec<String>) -> Result<AskRequest, getrandom::Error> {
    Ok(AskRequest {
        id: new_ask_id()?,
        kind: AskKind::Question,
        prompt,
        tool: None,
        input: Value::Null,
        risk: None,
        options,
        implicit: false,
    })
}

/// What people are told if an agent offers no way to allow a tool just once.
pub(crate) fn once_not_offered_notice(tool: &str) -> TurnUpdate {
    let text = format!(
        "the agent asked to use {tool} but offered no way to allow it just once; the request was refused"
    );
    TurnUpdate::notice(text)
}

/// The options to show: all of them, or none if they are too many.
pub(crate) fn listable_options(labels: Vec<String>) -> Vec<String> {
    let bytes: usize = labels.iter().map(String::len).sum();
    if labels.len() <= OPTIONS_MAX && bytes <= OPTIONS_BYTES { labels } else { Vec::new() }
}

/// One field of a form. It knows its options and how to turn an answer into the value that the agent expects.
#[derive(Debug)]
pub(crate) struct FormField {
    pub(crate) name: String,
    field_type: FormFieldType,
}

#[derive(Debug)]
enum FormFieldType {
    Text,
    Integer,
    Number,
    Boolean,
    /// Pairs of the label that people see and the value. If `many`, an answer is a list of labels separated by commas.
    Choice {
        choices: Vec<(String, String)>,
        many: bool,
    },
}

/// Why a form cannot be put to people.
#[derive(Debug, thiserror::Error)]
pub(crate) enum FormError {
    #[error("a form has 1 to {QUESTIONS_MAX} fields")]
    FieldCount,
    #[error("the field `{0}` is of an unknown type")]
    UnknownFieldType(String),
}

/// The outcome of a form.
pub(crate) enum FormOutcome {
    /// The value of each field, by its name.
    Completed(Map<String, Value>),
    /// A question was refused, or its answer does not fit the field.
    Declined,
    /// A question was withdrawn before anybody answered.
    Withdrawn,
}

/// The fields of a form with this JSON Schema, each with its label.
pub(crate) fn form_fields(schema: &Value) -> Result<Vec<(String, FormField)>, FormError> {
    let properties = schema["properties"].as_object().cloned().unwrap_or_else(Map::new);
    if !(1..=QUESTIONS_MAX).contains(&properties.len()) {
        return Err(FormError::FieldCount);
    }
    properties.into_iter().map(|(name, schema)| FormField::from_schema(name, &schema)).collect()
}

/// Asks the questions of a form one after the other, until one is declined or withdrawn.
pub(crate) async fn ask_form(
    questions: Vec<(AskRequest, FormField)>,
    turn: &DriverTurn<'_>,
) -> Result<FormOutcome, LinkClosed> {
    let mut content = Map::new();
    for (ask, field) in questions {
        let Some(answer) = turn.ask(ask).await? else { return Ok(FormOutcome::Withdrawn) };
        match answer.value.as_deref().and_then(|value| field.parse_answer(value)) {
            Some(value) => content.insert(field.name, value),
            None => return Ok(FormOutcome::Declined),
        };
    }
    Ok(FormOutcome::Completed(content))
}

/// The JSON Schema of a field, as far as it is read.
#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct FormFieldSchema {
    r#type: String,
    title: Option<String>,
    description: Option<String>,
    r#enum: Option<Vec<String>>,
    enum_names: Option<Vec<String>>,
    one_of: Option<Vec<TitledFormOption>>,
    any_of: Option<Vec<TitledFormOption>>,
    items: Option<Box<FormFieldSchema>>,
}

#[derive(Deserialize)]
struct TitledFormOption {
    r#const: String,
    title: String,
}

impl FormFieldSchema {
    /// Pairs of label and value; `None` if any value is allowed.
    fn into_choices(self) -> Option<Vec<(String, String)>> {
        if let Some(titled) = self.one_of.or(self.any_of) {
            return Some(titled.into_iter().map(|option| (option.title, option.r#const)).collect());
        }
        let values = self.r#enum?;
        let names = self.enum_names.filter(|names| names.len() == values.len());
        let names = names.unwrap_or_else(|| values.clone());
        Some(names.into_iter().zip(values).collect())
    }
}

impl FormField {
    /// A choice between these labels, or a text if there are none.
    pub(crate) fn from_labels(name: String, labels: Vec<String>, many: bool) -> Self {
        let choices: Vec<_> = labels.into_iter().map(|label| (label.clone(), label)).collect();
        let is_text = choices.is_empty();
        let field_type = if is_text { FormFieldType::Text } else { FormFieldType::Choice { choices, many } };
        Self { name, field_type }
    }

    /// Returns the label of the field and the field.
    fn from_schema(name: String, schema: &Value) -> Result<(String, Self), FormError> {
        let unknown = || FormError::UnknownFieldType(name.clone());
        let mut schema = FormFieldSchema::deserialize(schema).map_err(|_| unknown())?;
        let label = schema.description.take().or(schema.title.take()).unwrap_or_else(|| name.clone());
        let field_type = match schema.r#type.as_str() {
            "string" => schema
                .into_choices()
                .map_or(FormFieldType::Text, |choices| FormFieldType::Choice { choices, many: false }),
            "integer" => FormFieldType::Integer,
            "number" => FormFieldType::Number,
            "boolean" => FormFieldType::Boolean,
            "array" => {
                let choices = schema.items.and_then(|items| items.into_choices()).ok_or_else(unknown)?;
                FormFieldType::Choice { choices, many: true }
            }
            _ => return Err(unknown()),
        };
        Ok((label, Self { name, field_type }))
    }

    pub(crate) fn is_text(&self) -> bool {
        matches!(self.field_type, FormFieldType::Text)
    }

    pub(crate) fn is_choice(&self) -> bool {
        matches!(self.field_type, FormFieldType::Choice { .. })
    }

    /// The allowed answers. Empty if any answer may do, or if they are too many to list.
    pub(crate) fn options(&self) -> Vec<String> {
        match &self.field_type {
            FormFieldType::Boolean => vec!["yes".to_owned(), "no".to_owned()],
            FormFieldType::Choice { choices, many: false } => {
                listable_options(choices.iter().map(|(label, _)| label.clone()).collect())
            }
            _ => Vec::new(),
        }
    }

    /// The value that the agent gets for an answer. `None` if the answer does not fit the field.
    pub(crate) fn parse_answer(&self, value: &str) -> Option<Value> {
        Some(match &self.field_type {
            FormFieldType::Text => json!(value),
            FormFieldType::Integer => json!(value.trim().parse::<i64>().ok()?),
            FormFieldType::Number => {
                json!(value.trim().parse::<f64>().ok().filter(|number| number.is_finite())?)
            }
            FormFieldType::Boolean => json!(value == "yes"),
            FormFieldType::Choice { choices, many } => {
                let value_of = |label: &str| {
                    choices.iter().find(|(known, _)| known == label).map(|(_, value)| value.clone())
                };
                if *many {
                    json!(value.split(',').map(|label| value_of(label.trim())).collect::<Option<Vec<_>>>()?)
                } else {
                    json!(value_of(value)?)
                }
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_form_becomes_questions_and_answers_become_its_values() {
        let schema = json!({"type": "object", "properties": {
            "a": {"type": "string", "title": "Name"},
            "b": {"type": "integer"},
            "c": {"type": "boolean", "description": "Sure?"},
            "d": {"type": "string", "enum": ["r", "b"], "enumNames": ["Red", "Blue"]},
            "e": {"type": "array", "items": {"anyOf": [{"const": "x", "title": "X"}, {"const": "y", "title": "Y"}]}},
            "f": {"type": "number"},
        }});
        let form = form_fields(&schema).unwrap();
        let labels: Vec<&str> = form.iter().map(|(label, _)| label.as_str()).collect();
        assert_eq!(labels, ["Name", "b", "Sure?", "d", "e", "f"]);
        let options: Vec<Vec<String>> = form.iter().map(|(_, field)| field.options()).collect();
        assert_eq!(
            (&options[2][..], &options[3][..]),
            (&["yes".into(), "no".into()][..], &["Red".into(), "Blue".into()][..])
        );
        let parse = |at: usize, value: &str| form[at].1.parse_answer(value);
        assert_eq!(parse(0, "x"), Some(json!("x")));
        assert_eq!((parse(1, " 7 "), parse(1, "many")), (Some(json!(7)), None));
        assert_eq!(parse(2, "no"), Some(json!(false)));
        assert_eq!((parse(3, "Blue"), parse(3, "b")), (Some(json!("b")), None));
        assert_eq!(parse(4, "X, Y"), Some(json!(["x", "y"])));
        assert_eq!((parse(5, "1.5"), parse(5, "NaN")), (Some(json!(1.5)), None));
        assert!(form_fields(&json!({"properties": {}})).is_err());
        assert!(form_fields(&json!({"properties": {"o": {"type": "object"}}})).is_err());
    }
}
