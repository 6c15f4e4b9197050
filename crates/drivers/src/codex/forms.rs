//! Forms of MCP servers, whose fields are described by a JSON Schema. Builds the questions and parses the answers.

use qd_link::event_size::OPTIONS_BYTES;
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::connection::CodexRpcError;

/// The most fields in one form.
const FIELDS_MAX: usize = 32;
/// The most options offered for one question.
const OPTIONS_MAX: usize = 128;

#[derive(Debug)]
pub(super) struct CodexFormField {
    pub(super) name: String,
    field_type: CodexFieldType,
}

#[derive(Debug)]
enum CodexFieldType {
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

/// The fields of a form, each with its label.
pub(super) fn form_fields(schema: &Value) -> Result<Vec<(String, CodexFormField)>, CodexRpcError> {
    let properties = schema["properties"].as_object().cloned().unwrap_or_else(Map::new);
    if properties.is_empty() || properties.len() > FIELDS_MAX {
        return Err(CodexRpcError::invalid_params(format!("a form has 1 to {FIELDS_MAX} fields")));
    }
    properties.into_iter().map(|(name, schema)| CodexFormField::from_schema(name, &schema)).collect()
}

/// The options to show: all of them, or none if they are too many.
pub(super) fn listable_options(labels: Vec<String>) -> Vec<String> {
    let bytes: usize = labels.iter().map(String::len).sum();
    if labels.len() <= OPTIONS_MAX && bytes <= OPTIONS_BYTES { labels } else { Vec::new() }
}

impl CodexFormField {
    /// A field that only asks for confirmation that something was done elsewhere.
    pub(super) fn confirmation() -> Self {
        let choices = vec![("done".to_owned(), "done".to_owned())];
        Self { name: "done".to_owned(), field_type: CodexFieldType::Choice { choices, many: false } }
    }

    /// The allowed answers. Empty if any answer may do, or if they are too many to list.
    pub(super) fn options(&self) -> Vec<String> {
        match &self.field_type {
            CodexFieldType::Boolean => vec!["yes".to_owned(), "no".to_owned()],
            CodexFieldType::Choice { choices, many: false } => {
                listable_options(choices.iter().map(|(label, _)| label.clone()).collect())
            }
            _ => Vec::new(),
        }
    }

    /// The value that the server gets for an answer. `None` if the answer does not fit the field.
    pub(super) fn parse_answer(&self, value: &str) -> Option<Value> {
        Some(match &self.field_type {
            CodexFieldType::Text => json!(value),
            CodexFieldType::Integer => json!(value.trim().parse::<i64>().ok()?),
            CodexFieldType::Number => {
                json!(value.trim().parse::<f64>().ok().filter(|number| number.is_finite())?)
            }
            CodexFieldType::Boolean => json!(value == "yes"),
            CodexFieldType::Choice { choices, many } => {
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

    fn from_schema(name: String, schema: &Value) -> Result<(String, Self), CodexRpcError> {
        #[derive(Default, Deserialize)]
        #[serde(rename_all = "camelCase", default)]
        struct CodexFieldSchema {
            r#type: String,
            title: Option<String>,
            description: Option<String>,
            r#enum: Option<Vec<String>>,
            enum_names: Option<Vec<String>>,
            one_of: Option<Vec<CodexTitledOption>>,
            any_of: Option<Vec<CodexTitledOption>>,
            items: Option<Box<CodexFieldSchema>>,
        }
        #[derive(Deserialize)]
        struct CodexTitledOption {
            r#const: String,
            title: String,
        }
        fn schema_choices(schema: CodexFieldSchema) -> Option<Vec<(String, String)>> {
            let titled = schema.one_of.or(schema.any_of);
            if let Some(titled) = titled {
                return Some(titled.into_iter().map(|option| (option.title, option.r#const)).collect());
            }
            let values = schema.r#enum?;
            let names = schema.enum_names.filter(|names| names.len() == values.len());
            let names = names.unwrap_or_else(|| values.clone());
            Some(names.into_iter().zip(values).collect())
        }
        let unknown = || CodexRpcError::invalid_params(format!("the field `{name}` is of an unknown type"));
        let mut schema = CodexFieldSchema::deserialize(schema).map_err(|_| unknown())?;
        let label = schema.description.take().or(schema.title.take()).unwrap_or_else(|| name.clone());
        let field_type = match schema.r#type.as_str() {
            "string" => schema_choices(schema)
                .map_or(CodexFieldType::Text, |choices| CodexFieldType::Choice { choices, many: false }),
            "integer" => CodexFieldType::Integer,
            "number" => CodexFieldType::Number,
            "boolean" => CodexFieldType::Boolean,
            "array" => {
                let choices = schema.items.and_then(|items| schema_choices(*items)).ok_or_else(unknown)?;
                CodexFieldType::Choice { choices, many: true }
            }
            _ => return Err(unknown()),
        };
        Ok((label, Self { name, field_type }))
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
