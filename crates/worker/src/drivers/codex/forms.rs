//! Forms of MCP servers, as JSON Schema describes their fields: what each takes, and what the words of an answer stand
//! for.

use qd_link::fit::OPTIONS_BYTES;
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::wire::Refusal;

/// Questions that one form may have.
const FIELDS_MAX: usize = 32;
/// Options that one question may have.
const OPTIONS_MAX: usize = 128;

/// One field of a form.
#[derive(Debug)]
pub(super) struct Field {
    pub(super) name: String,
    takes: Takes,
}

#[derive(Debug)]
enum Takes {
    Text,
    Integer,
    Number,
    Truth,
    /// One of these, by the word that people see; several of them in one list if `many`.
    Choice {
        choices: Vec<(String, String)>,
        many: bool,
    },
}

/// The fields of a form, each with what people call it.
pub(super) fn fields(schema: &Value) -> Result<Vec<(String, Field)>, Refusal> {
    let properties = schema["properties"].as_object().cloned().unwrap_or_else(Map::new);
    if properties.is_empty() || properties.len() > FIELDS_MAX {
        return Err(Refusal::invalid(format!("a form has 1 to {FIELDS_MAX} fields")));
    }
    properties.into_iter().map(|(name, schema)| Field::read(name, &schema)).collect()
}

/// Options that people are shown: all of them, or none if they are too many.
pub(super) fn listed(words: Vec<String>) -> Vec<String> {
    let bytes: usize = words.iter().map(String::len).sum();
    if words.len() <= OPTIONS_MAX && bytes <= OPTIONS_BYTES { words } else { Vec::new() }
}

impl Field {
    /// One that only wants to hear that something was done elsewhere.
    pub(super) fn done() -> Self {
        let choices = vec![("done".to_owned(), "done".to_owned())];
        Self { name: "done".to_owned(), takes: Takes::Choice { choices, many: false } }
    }

    /// What may be answered; anything if that cannot be listed.
    pub(super) fn options(&self) -> Vec<String> {
        match &self.takes {
            Takes::Truth => vec!["yes".to_owned(), "no".to_owned()],
            Takes::Choice { choices, many: false } => {
                listed(choices.iter().map(|(word, _)| word.clone()).collect())
            }
            _ => Vec::new(),
        }
    }

    /// What the server gets for an answer; `None` if it is none.
    pub(super) fn fill(&self, value: &str) -> Option<Value> {
        Some(match &self.takes {
            Takes::Text => json!(value),
            Takes::Integer => json!(value.trim().parse::<i64>().ok()?),
            Takes::Number => json!(value.trim().parse::<f64>().ok().filter(|number| number.is_finite())?),
            Takes::Truth => json!(value == "yes"),
            Takes::Choice { choices, many } => {
                let chosen = |word: &str| {
                    choices.iter().find(|(shown, _)| shown == word).map(|(_, value)| value.clone())
                };
                if *many {
                    json!(value.split(',').map(|word| chosen(word.trim())).collect::<Option<Vec<_>>>()?)
                } else {
                    json!(chosen(value)?)
                }
            }
        })
    }

    fn read(name: String, schema: &Value) -> Result<(String, Self), Refusal> {
        #[derive(Default, Deserialize)]
        #[serde(rename_all = "camelCase", default)]
        struct Schema {
            r#type: String,
            title: Option<String>,
            description: Option<String>,
            r#enum: Option<Vec<String>>,
            enum_names: Option<Vec<String>>,
            one_of: Option<Vec<Titled>>,
            any_of: Option<Vec<Titled>>,
            items: Option<Box<Schema>>,
        }
        #[derive(Deserialize)]
        struct Titled {
            r#const: String,
            title: String,
        }
        fn choices(schema: Schema) -> Option<Vec<(String, String)>> {
            let titled = schema.one_of.or(schema.any_of);
            if let Some(titled) = titled {
                return Some(titled.into_iter().map(|one| (one.title, one.r#const)).collect());
            }
            let values = schema.r#enum?;
            let names = schema.enum_names.filter(|names| names.len() == values.len());
            let names = names.unwrap_or_else(|| values.clone());
            Some(names.into_iter().zip(values).collect())
        }
        let unknown = || Refusal::invalid(format!("the field `{name}` is of an unknown type"));
        let mut schema = Schema::deserialize(schema).map_err(|_| unknown())?;
        let label = schema.description.take().or(schema.title.take()).unwrap_or_else(|| name.clone());
        let takes = match schema.r#type.as_str() {
            "string" => choices(schema).map_or(Takes::Text, |choices| Takes::Choice { choices, many: false }),
            "integer" => Takes::Integer,
            "number" => Takes::Number,
            "boolean" => Takes::Truth,
            "array" => {
                let choices = schema.items.and_then(|items| choices(*items)).ok_or_else(unknown)?;
                Takes::Choice { choices, many: true }
            }
            _ => return Err(unknown()),
        };
        Ok((label, Self { name, takes }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_form_becomes_questions_and_answers_become_what_it_asked_for() {
        let schema = json!({"type": "object", "properties": {
            "a": {"type": "string", "title": "Name"},
            "b": {"type": "integer"},
            "c": {"type": "boolean", "description": "Sure?"},
            "d": {"type": "string", "enum": ["r", "b"], "enumNames": ["Red", "Blue"]},
            "e": {"type": "array", "items": {"anyOf": [{"const": "x", "title": "X"}, {"const": "y", "title": "Y"}]}},
            "f": {"type": "number"},
        }});
        let form = fields(&schema).unwrap();
        let labels: Vec<&str> = form.iter().map(|(label, _)| label.as_str()).collect();
        assert_eq!(labels, ["Name", "b", "Sure?", "d", "e", "f"]);
        let options: Vec<Vec<String>> = form.iter().map(|(_, field)| field.options()).collect();
        assert_eq!(
            (&options[2][..], &options[3][..]),
            (&["yes".into(), "no".into()][..], &["Red".into(), "Blue".into()][..])
        );
        let fill = |at: usize, value: &str| form[at].1.fill(value);
        assert_eq!(fill(0, "x"), Some(json!("x")));
        assert_eq!((fill(1, " 7 "), fill(1, "many")), (Some(json!(7)), None));
        assert_eq!(fill(2, "no"), Some(json!(false)));
        assert_eq!((fill(3, "Blue"), fill(3, "b")), (Some(json!("b")), None));
        assert_eq!(fill(4, "X, Y"), Some(json!(["x", "y"])));
        assert_eq!((fill(5, "1.5"), fill(5, "NaN")), (Some(json!(1.5)), None));
        assert!(fields(&json!({"properties": {}})).is_err());
        assert!(fields(&json!({"properties": {"o": {"type": "object"}}})).is_err());
    }
}
