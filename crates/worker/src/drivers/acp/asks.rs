//! What an agent asks in the protocol's words, and the answers to that: permissions and forms. Nothing is sent here;
//! an [`Asked`] is what a turn asks its session, and knows what the agent is to be told then.

use std::borrow::Cow;
use std::collections::BTreeMap;

use agent_client_protocol::v1::schema::{
    CreateElicitationRequest, CreateElicitationResponse, ElicitationAcceptAction, ElicitationAction,
    ElicitationContentValue, ElicitationMode, ElicitationPropertySchema, EnumOption, Meta, MultiSelectItems,
    PermissionOption, PermissionOptionId, PermissionOptionKind, RequestPermissionOutcome,
    RequestPermissionRequest, RequestPermissionResponse, SelectedPermissionOutcome,
};
use agent_client_protocol::{Error, ErrorCode};
use qd_core::policy::main_argument;
use qd_link::Closed;
use qd_protocol::AskId;
use qd_protocol::event::{Answer, AskKind, Decision};
use qd_protocol::link::{AskRequest, Said};
use qd_protocol::policy::Risk;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::ear::{OURS, ours};
use super::service::Wish;
use crate::turn::{Turn, ask_id};
use qd_link::fit::OPTIONS_BYTES;

/// Questions that one form may have.
const FIELDS_MAX: usize = 32;
/// Options that one question may have.
const OPTIONS_MAX: usize = 128;

/// What the agent wants of a person or a policy.
pub(super) enum Wanted {
    Permission(Box<RequestPermissionRequest>),
    Form(Box<CreateElicitationRequest>),
    Wish(Wish),
}

/// What came of an ask.
#[derive(Debug)]
pub(super) enum Settled {
    /// What the agent is told.
    Answer(Value),
    /// A tool may be used, and so what it was judged by.
    Allowed { answer: Value, argument: String },
    /// It may not, and perhaps why.
    Refused { answer: Value, tool: String, reason: Option<String> },
    /// A wish is to be done.
    Granted(Wish),
    /// Or not.
    Denied(Error),
}

impl Wanted {
    /// What the agent is told when nobody can be asked, or its turn is stopped before anybody has answered.
    pub(super) fn cancelled(&self) -> Result<Value, Error> {
        match self {
            Self::Permission(_) => Ok(permission_answer(None, None)),
            Self::Form(_) => Ok(form_answer(ElicitationAction::Cancel)),
            Self::Wish(_) => Err(Error::request_cancelled()),
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
    /// Questions of an agent that asks them as if it wanted permission: its names for a yes and a no.
    Questions {
        questions: Vec<(AskRequest, Field)>,
        allow: PermissionOptionId,
        deny: Option<PermissionOptionId>,
    },
    /// May we do this for the agent?
    Wish { ask: AskRequest, wish: Wish },
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
            id: new_id()?,
            kind: AskKind::Permission,
            prompt: prompt.unwrap_or_else(|| format!("May the agent use {tool}?")),
            tool: Some(tool),
            input,
            risk: ours(meta).map(|Word { risk }| risk),
            options: Vec::new(),
            unasked: false,
        };
        let (allow, deny) = choices(options);
        Ok(match allow {
            Some(allow) => Self::Permission { ask, allow, deny },
            // A yes for ever is never given, whatever is decided: the agent would not ask again, and so get around
            // every later rule and every high risk. Nobody is asked for a yes that could not be passed on.
            None => Self::Refused { tool: ask.tool.unwrap_or_default(), deny },
        })
    }

    /// Questions that come as a permission for a tool whose arguments they are; `None` if these are not any.
    pub(super) fn questions(input: &Value, options: &[PermissionOption]) -> Option<Result<Self, Error>> {
        #[derive(Deserialize)]
        struct Arguments {
            questions: Vec<Question>,
        }
        #[derive(Deserialize)]
        #[serde(rename_all = "camelCase")]
        struct Question {
            question: String,
            #[serde(default)]
            options: Vec<Choice>,
            #[serde(default)]
            multi_select: bool,
        }
        #[derive(Deserialize)]
        struct Choice {
            label: String,
        }
        let Arguments { questions } = Arguments::deserialize(input).ok()?;
        let (allow, deny) = choices(options);
        let (allow, in_bounds) = (allow?, (1..=FIELDS_MAX).contains(&questions.len()));
        if !in_bounds {
            return Some(Err(Error::invalid_params().data(json!(format!("1 to {FIELDS_MAX} questions")))));
        }
        let question = |(number, question): (usize, Question)| {
            let words = question.options.into_iter().map(|choice| (choice.label.clone(), choice.label));
            let choices: Vec<_> = words.collect();
            let takes = match choices.is_empty() {
                true => Takes::Text,
                false => Takes::Choice { choices, many: question.multi_select },
            };
            let field = Field { name: number.to_string(), takes };
            Ok((asks(question.question, field.options())?, field))
        };
        let questions = questions.into_iter().enumerate().map(question).collect::<Result<_, _>>();
        Some(questions.map(|questions| Self::Questions { questions, allow, deny }))
    }

    /// Something to be done for the agent.
    pub(super) fn wish(wish: Wish) -> Result<Self, Error> {
        let prompt = match &wish {
            Wish::Read(_) => format!("May the agent read {}?", wish.argument()),
            Wish::Write(_) => format!("May the agent write {}?", wish.argument()),
            Wish::Run(_) => wish.argument(),
        };
        let ask = AskRequest {
            id: new_id()?,
            kind: AskKind::Permission,
            tool: Some(wish.tool().to_owned()),
            input: wish.input(),
            risk: None,
            prompt,
            options: Vec::new(),
            unasked: wish.looks(),
        };
        Ok(Self::Wish { ask, wish })
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
        let required = form.requested_schema.required.unwrap_or_default();
        let fields = fields.into_iter().map(|(name, schema)| {
            let is_required = required.contains(&name);
            Field::read(name, schema).map(|(label, field)| (label, field, is_required))
        });
        let fields: Vec<_> = fields.collect::<Result<_, Error>>()?;
        // Beside a choice, a line that need not be filled in is for a remark. Nobody is asked for that.
        let has_choice = fields.iter().any(|(_, field, _)| matches!(field.takes, Takes::Choice { .. }));
        let is_remark = |field: &Field, is_required: bool| {
            has_choice && !is_required && matches!(field.takes, Takes::Text)
        };
        let fields: Vec<_> =
            fields.into_iter().filter(|(_, field, required)| !is_remark(field, *required)).collect();
        let alone = fields.len() == 1;
        let question = |(label, field, _): (String, Field, bool)| {
            let prompt = if alone { request.message.clone() } else { format!("{} {label}", request.message) };
            Ok((asks(prompt, field.options())?, field))
        };
        fields.into_iter().map(question).collect::<Result<_, _>>().map(Self::Form)
    }

    /// The ids by which it is withdrawn.
    pub(super) fn ids(&self) -> Vec<AskId> {
        match self {
            Self::Permission { ask, .. } => vec![ask.id.clone()],
            Self::Refused { .. } => Vec::new(),
            Self::Form(questions) | Self::Questions { questions, .. } => {
                questions.iter().map(|(ask, _)| ask.id.clone()).collect()
            }
            Self::Wish { ask, .. } => vec![ask.id.clone()],
        }
    }

    /// Asks, waits, and tells what came of it.
    pub(super) async fn put(self, turn: &Turn<'_>) -> Result<Settled, Closed> {
        match self {
            Self::Permission { ask, allow, deny } => {
                let tool = ask.tool.clone().unwrap_or_default();
                let argument = main_argument(&tool, &ask.input).map(Cow::into_owned).unwrap_or_default();
                let Some(answer) = turn.ask(ask).await? else {
                    return Ok(Settled::Answer(permission_answer(None, None)));
                };
                Ok(match answer.decision {
                    Some(Decision::AllowOnce | Decision::AllowAlways) => {
                        Settled::Allowed { answer: permission_answer(Some(allow), None), argument }
                    }
                    Some(Decision::Deny) | None => {
                        let reason = answer.reason;
                        Settled::Refused { answer: permission_answer(deny, reason.clone()), tool, reason }
                    }
                })
            }
            Self::Refused { tool, deny } => {
                let text = format!(
                    "the agent asked to use {tool} and would only take a yes for ever, which is not given; it was refused"
                );
                turn.tell(Said::Notice { text }).await?;
                let why = Some("a yes must hold for once only".to_owned());
                Ok(Settled::Answer(permission_answer(deny, why)))
            }
            Self::Form(questions) => Ok(Settled::Answer(match fill(questions, turn).await? {
                Filled::In(content) => {
                    form_answer(ElicitationAction::Accept(ElicitationAcceptAction::new().content(content)))
                }
                Filled::Declined => form_answer(ElicitationAction::Decline),
                Filled::Withdrawn => form_answer(ElicitationAction::Cancel),
            })),
            Self::Questions { questions, allow, deny } => {
                Ok(Settled::Answer(match fill(questions, turn).await? {
                    Filled::In(answers) => {
                        let mut answer = permission_answer(Some(allow), None);
                        answer["answers"] = as_json(&answers);
                        answer
                    }
                    Filled::Declined => permission_answer(deny, None),
                    Filled::Withdrawn => permission_answer(None, None),
                }))
            }
            Self::Wish { ask, wish } => Ok(match turn.ask(ask).await? {
                None => Settled::Denied(Error::request_cancelled()),
                Some(Answer { decision: Some(Decision::AllowOnce | Decision::AllowAlways), .. }) => {
                    Settled::Granted(wish)
                }
                Some(answer) => {
                    let reason = answer.reason.unwrap_or_else(|| "it is not allowed".to_owned());
                    Settled::Denied(Error::new(ErrorCode::INVALID_PARAMS, format!("refused: {reason}")))
                }
            }),
        }
    }
}

/// What became of some questions.
enum Filled {
    In(BTreeMap<String, ElicitationContentValue>),
    Declined,
    Withdrawn,
}

/// Asks one question after the other.
async fn fill(questions: Vec<(AskRequest, Field)>, turn: &Turn<'_>) -> Result<Filled, Closed> {
    let mut content = BTreeMap::new();
    for (ask, field) in questions {
        let Some(answer) = turn.ask(ask).await? else { return Ok(Filled::Withdrawn) };
        let Some(value) = field.fill(&answer) else { return Ok(Filled::Declined) };
        content.insert(field.name, value);
    }
    Ok(Filled::In(content))
}

/// The agent's names for a yes and a no that hold this once. By kind only: names and order differ from agent to agent. A
/// no for ever is better than none.
fn choices(options: &[PermissionOption]) -> (Option<PermissionOptionId>, Option<PermissionOptionId>) {
    let named =
        |kind| options.iter().find(|option| option.kind == kind).map(|option| option.option_id.clone());
    let deny = named(PermissionOptionKind::RejectOnce).or_else(|| named(PermissionOptionKind::RejectAlways));
    (named(PermissionOptionKind::AllowOnce), deny)
}

fn asks(prompt: String, options: Vec<String>) -> Result<AskRequest, Error> {
    Ok(AskRequest {
        id: new_id()?,
        kind: AskKind::Question,
        tool: None,
        input: Value::Null,
        risk: None,
        prompt,
        options,
        unasked: false,
    })
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

fn new_id() -> Result<AskId, Error> {
    ask_id().map_err(Error::into_internal_error)
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
                other => panic!("a permission, not {other:?}"),
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
