//! What an agent asks in the protocol's words, and the answers to that: permissions and forms. Nothing is sent here;
//! an [`Asked`] is what a turn asks its session, and knows what the agent is to be told then.

use std::collections::BTreeMap;

use agent_client_protocol::Error;
use agent_client_protocol::v1::schema::{
    CreateElicitationRequest, CreateElicitationResponse, ElicitationAcceptAction, ElicitationAction,
    ElicitationContentValue, ElicitationMode, ElicitationPropertySchema, EnumOption, Meta, MultiSelectItems,
    PermissionOption, PermissionOptionId, PermissionOptionKind, RequestPermissionOutcome,
    RequestPermissionRequest, RequestPermissionResponse, SelectedPermissionOutcome,
};
use qd_link::Closed;
use qd_protocol::AskId;
use qd_protocol::event::{Answer, AskKind, Decision};
use qd_protocol::link::{AskRequest, Said};
use qd_protocol::policy::Risk;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::ear::{OURS, ours};
use crate::turn::Turn;
use qd_link::fit::OPTIONS_BYTES;

/// Random bytes in the id of an ask, five bits of each of which count.
const ASK_RANDOM: usize = 26;
/// Questions that one form may have.
const FIELDS_MAX: usize = 32;
/// Options that one question may have.
const OPTIONS_MAX: usize = 128;

/// What the agent wants of a person or a policy.
pub(super) enum Wanted {
    Permission(Box<RequestPermissionRequest>),
    Form(Box<CreateElicitationRequest>),
}

impl Wanted {
    /// What the agent is told when nobody can be asked, or its turn is stopped before anybody has answered.
    pub(super) fn cancelled(&self) -> Value {
        match self {
            Self::Permission(_) => permission_answer(None, None),
            Self::Form(_) => form_answer(ElicitationAction::Cancel),
        }
    }
}

/// Something that an agent waits for.
#[derive(Debug)]
pub(super) enum Asked {
    /// May this tool be used?
    Permission {
        ask: AskRequest,
        /// The agent's names for a yes and a no that hold this once.
        allow: PermissionOptionId,
        deny: Option<PermissionOptionId>,
    },
    /// The same of an agent that would take no yes that holds this once.
    Refused { tool: String, deny: Option<PermissionOptionId> },
    /// A form: one question after the other, each with the name of its field.
    Form(Vec<(AskRequest, Field)>),
}

impl Asked {
    /// A permission for a tool whose name and arguments are known.
    pub(super) fn permission(
        tool: String,
        title: Option<String>,
        input: Value,
        options: &[PermissionOption],
        meta: Option<&Meta>,
    ) -> Result<Self, Error> {
        #[derive(Deserialize)]
        struct Word {
            risk: Risk,
        }
        let prompt = title.filter(|title| *title != tool);
        let ask = AskRequest {
            id: ask_id()?,
            kind: AskKind::Permission,
            prompt: prompt.unwrap_or_else(|| format!("May the agent use {tool}?")),
            tool: Some(tool),
            input,
            risk: ours(meta).map(|Word { risk }| risk),
            options: Vec::new(),
        };
        // By kind only: names and order differ from agent to agent. A no for ever is better than none.
        let named =
            |kind| options.iter().find(|option| option.kind == kind).map(|option| option.option_id.clone());
        let deny =
            named(PermissionOptionKind::RejectOnce).or_else(|| named(PermissionOptionKind::RejectAlways));
        Ok(match named(PermissionOptionKind::AllowOnce) {
            Some(allow) => Self::Permission { ask, allow, deny },
            // A yes for ever is never given, whatever is decided: the agent would not ask again, and so get around
            // every later rule and every high risk. Nobody is asked for a yes that could not be passed on.
            None => Self::Refused { tool: ask.tool.unwrap_or_default(), deny },
        })
    }

    /// A form to be filled in.
    pub(super) fn form(request: CreateElicitationRequest) -> Result<Self, Error> {
        let ElicitationMode::Form(form) = request.mode else {
            return Err(Error::invalid_params().data(json!("only forms are supported")));
        };
        let fields = form.requested_schema.properties;
        if fields.is_empty() || fields.len() > FIELDS_MAX {
            return Err(Error::invalid_params().data(json!(format!("a form has 1 to {FIELDS_MAX} fields"))));
        }
        let alone = fields.len() == 1;
        let question = |(name, schema)| {
            let (label, field) = Field::read(name, schema)?;
            let prompt = if alone { request.message.clone() } else { format!("{} {label}", request.message) };
            let ask = AskRequest {
                id: ask_id()?,
                kind: AskKind::Question,
                tool: None,
                input: Value::Null,
                risk: None,
                prompt,
                options: field.options(),
            };
            Ok((ask, field))
        };
        fields.into_iter().map(question).collect::<Result<_, _>>().map(Self::Form)
    }

    /// The ids by which it is withdrawn.
    pub(super) fn ids(&self) -> Vec<AskId> {
        match self {
            Self::Permission { ask, .. } => vec![ask.id.clone()],
            Self::Refused { .. } => Vec::new(),
            Self::Form(questions) => questions.iter().map(|(ask, _)| ask.id.clone()).collect(),
        }
    }

    /// Asks, waits, and gives what the agent is to be told.
    pub(super) async fn put(self, turn: &Turn<'_>) -> Result<Value, Closed> {
        match self {
            Self::Permission { ask, allow, deny } => {
                let Some(answer) = turn.ask(ask).await? else { return Ok(permission_answer(None, None)) };
                Ok(match answer.decision {
                    Some(Decision::AllowOnce | Decision::AllowAlways) => permission_answer(Some(allow), None),
                    Some(Decision::Deny) | None => permission_answer(deny, answer.reason),
                })
            }
            Self::Refused { tool, deny } => {
                let text = format!(
                    "the agent asked to use {tool} and would only take a yes for ever, which is not given; it was refused"
                );
                turn.tell(Said::Notice { text }).await?;
                Ok(permission_answer(deny, Some("a yes must hold for once only".to_owned())))
            }
            Self::Form(questions) => {
                let mut content = BTreeMap::new();
                for (ask, field) in questions {
                    let action = match turn.ask(ask).await? {
                        None => Some(ElicitationAction::Cancel),
                        Some(answer) => match field.fill(&answer) {
                            Some(value) => {
                                content.insert(field.name, value);
                                None
                            }
                            None => Some(ElicitationAction::Decline),
                        },
                    };
                    if let Some(action) = action {
                        return Ok(form_answer(action));
                    }
                }
                Ok(form_answer(ElicitationAction::Accept(ElicitationAcceptAction::new().content(content))))
            }
        }
    }
}

/// One field of a form: what it takes, and what the words of an answer stand for.
#[derive(Debug)]
pub(super) struct Field {
    name: String,
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

impl Field {
    /// The field, and what people call it.
    fn read(name: String, schema: ElicitationPropertySchema) -> Result<(String, Self), Error> {
        let titled =
            |options: Vec<EnumOption>| options.into_iter().map(|one| (one.title, one.value)).collect();
        let plain = |values: Vec<String>| values.into_iter().map(|one| (one.clone(), one)).collect();
        let (label, takes) = match schema {
            ElicitationPropertySchema::String(text) => {
                let choices: Option<Vec<_>> = text.one_of.map(titled).or_else(|| text.enum_values.map(plain));
                let takes = choices.map_or(Takes::Text, |choices| Takes::Choice { choices, many: false });
                (text.description.or(text.title), takes)
            }
            ElicitationPropertySchema::Integer(number) => {
                (number.description.or(number.title), Takes::Integer)
            }
            ElicitationPropertySchema::Number(number) => (number.description.or(number.title), Takes::Number),
            ElicitationPropertySchema::Boolean(truth) => (truth.description.or(truth.title), Takes::Truth),
            ElicitationPropertySchema::Array(list) => {
                let choices = match list.items {
                    MultiSelectItems::String(items) => plain(items.values),
                    MultiSelectItems::Titled(items) => titled(items.options),
                    _ => return Err(unknown(&name)),
                };
                (list.description.or(list.title), Takes::Choice { choices, many: true })
            }
            _ => return Err(unknown(&name)),
        };
        Ok((label.unwrap_or_else(|| name.clone()), Self { name, takes }))
    }

    /// What may be answered; anything if that cannot be listed.
    fn options(&self) -> Vec<String> {
        match &self.takes {
            Takes::Truth => vec!["yes".to_owned(), "no".to_owned()],
            Takes::Choice { choices, many: false }
                if choices.len() <= OPTIONS_MAX && bytes(choices) <= OPTIONS_BYTES =>
            {
                choices.iter().map(|(word, _)| word.clone()).collect()
            }
            _ => Vec::new(),
        }
    }

    /// What the agent gets for an answer; `None` if it is none.
    fn fill(&self, answer: &Answer) -> Option<ElicitationContentValue> {
        let value = answer.value.as_deref()?;
        Some(match &self.takes {
            Takes::Text => ElicitationContentValue::String(value.to_owned()),
            Takes::Integer => ElicitationContentValue::Integer(value.trim().parse().ok()?),
            Takes::Number => ElicitationContentValue::Number(value.trim().parse().ok()?),
            Takes::Truth => ElicitationContentValue::Boolean(value == "yes"),
            Takes::Choice { choices, many } => {
                let chosen = |word: &str| {
                    choices.iter().find(|(shown, _)| shown == word).map(|(_, value)| value.clone())
                };
                if *many {
                    let all = value.split(',').map(|word| chosen(word.trim())).collect::<Option<_>>()?;
                    ElicitationContentValue::StringArray(all)
                } else {
                    ElicitationContentValue::String(chosen(value)?)
                }
            }
        })
    }
}

fn bytes(choices: &[(String, String)]) -> usize {
    choices.iter().map(|(word, _)| word.len()).sum()
}

fn unknown(field: &str) -> Error {
    Error::invalid_params().data(json!(format!("the field `{field}` is of an unknown type")))
}

fn permission_answer(option: Option<PermissionOptionId>, reason: Option<String>) -> Value {
    let outcome = match option {
        Some(option) => RequestPermissionOutcome::Selected(SelectedPermissionOutcome::new(option)),
        None => RequestPermissionOutcome::Cancelled,
    };
    let meta = reason.map(|reason| Meta::from_iter([(OURS.to_owned(), json!({"reason": reason}))]));
    as_json(&RequestPermissionResponse::new(outcome).meta(meta))
}

fn form_answer(action: ElicitationAction) -> Value {
    as_json(&CreateElicitationResponse::new(action))
}

fn as_json<T: Serialize>(answer: &T) -> Value {
    serde_json::to_value(answer).expect("the protocol's own types are JSON")
}

fn ask_id() -> Result<AskId, Error> {
    let mut random = [0; ASK_RANDOM];
    getrandom::fill(&mut random).map_err(Error::into_internal_error)?;
    Ok(AskId::from_random(&random))
}

#[cfg(test)]
mod tests {
    use agent_client_protocol::v1::schema::{
        ElicitationFormMode, ElicitationSchema, ElicitationSessionScope, StringPropertySchema,
    };

    use super::*;

    fn option(id: &'static str, kind: PermissionOptionKind) -> PermissionOption {
        PermissionOption::new(id, id, kind)
    }

    #[test]
    fn options_are_chosen_by_kind_and_a_yes_for_ever_is_never_given() {
        use PermissionOptionKind::{AllowAlways, AllowOnce, RejectAlways, RejectOnce};
        let permission = |options: &[PermissionOption]| {
            let asked = Asked::permission("Bash".to_owned(), None, json!({}), options, None).unwrap();
            let (allow, deny) = match asked {
                Asked::Permission { allow, deny, .. } => (Some(allow), deny),
                Asked::Refused { deny, .. } => (None, deny),
                Asked::Form(_) => panic!("a permission"),
            };
            (allow.map(|id| id.to_string()), deny.map(|id| id.to_string()))
        };
        let all = [
            option("a", AllowAlways),
            option("b", RejectAlways),
            option("c", AllowOnce),
            option("d", RejectOnce),
        ];
        assert_eq!(permission(&all), (Some("c".to_owned()), Some("d".to_owned())));
        assert_eq!(permission(&all[..2]), (None, Some("b".to_owned())));
        assert_eq!(permission(&[]), (None, None));
    }

    #[test]
    fn the_agents_word_on_the_risk_is_passed_on_and_nonsense_is_not() {
        let risk = |meta: Value| {
            let options = [option("a", PermissionOptionKind::AllowOnce)];
            let asked =
                Asked::permission("T".to_owned(), None, json!({}), &options, meta.as_object()).unwrap();
            let Asked::Permission { ask, .. } = asked else { panic!("a permission") };
            ask.risk
        };
        assert_eq!(risk(json!({OURS: {"risk": "high"}})), Some(Risk::High));
        assert_eq!(risk(json!({OURS: {"risk": "enormous"}})), None);
        assert_eq!(risk(json!({})), None);
    }

    #[test]
    fn a_form_is_one_question_for_each_of_its_fields() {
        let colour = StringPropertySchema::new()
            .description("Which colour?".to_owned())
            .one_of(vec![EnumOption::new("r", "Red"), EnumOption::new("b", "Blue")]);
        let schema = ElicitationSchema::new().property("colour", colour, true).integer("count", 0, 9, true);
        let form = ElicitationFormMode::new(ElicitationSessionScope::new("s"), schema);
        let Asked::Form(mut questions) = Asked::form(CreateElicitationRequest::new(form, "Please:")).unwrap()
        else {
            panic!("a form")
        };
        let (count, colour) = (questions.pop().unwrap(), questions.pop().unwrap());
        assert_eq!(
            (colour.0.prompt.as_str(), colour.0.options),
            ("Please: Which colour?", vec!["Red".to_owned(), "Blue".to_owned()])
        );
        let says = |value: &str| Answer { value: Some(value.to_owned()), ..Answer::default() };
        assert_eq!(colour.1.fill(&says("Blue")), Some(ElicitationContentValue::String("b".to_owned())));
        assert_eq!(count.0.prompt, "Please: count");
        assert_eq!(count.1.fill(&says(" 7 ")), Some(ElicitationContentValue::Integer(7)));
        assert_eq!(count.1.fill(&says("many")), None);
    }
}
