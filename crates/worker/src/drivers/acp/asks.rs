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
use qd_link::LinkClosed;
use qd_protocol::AskId;
use qd_protocol::event::{AskAnswer, AskKind, PermissionDecision};
use qd_protocol::link::{AskRequest, TurnUpdate};
use qd_protocol::policy::Risk;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::client_service::AcpClientOperation;
use super::event_decoder::{META_KEY, quarterdeck_meta};
use crate::turn::{DriverTurn, new_ask_id};
use qd_link::event_size::OPTIONS_BYTES;

/// Questions that one form may have.
const FIELDS_MAX: usize = 32;
/// Options that one question may have.
const OPTIONS_MAX: usize = 128;

/// What the agent wants of a person or a policy.
pub(super) enum AcpApprovalRequest {
    Permission(Box<RequestPermissionRequest>),
    Form(Box<CreateElicitationRequest>),
    Operation(AcpClientOperation),
}

/// What came of an ask.
#[derive(Debug)]
pub(super) enum AcpAskOutcome {
    /// What the agent is told.
    Answer(Value),
    /// A tool may be used, and so what it was judged by.
    ToolAllowed { answer: Value, argument: String },
    /// It may not, and perhaps why.
    ToolDenied { answer: Value, tool: String, reason: Option<String> },
    /// A wish is to be done.
    OperationAllowed(AcpClientOperation),
    /// Or not.
    OperationDenied(Error),
}

impl AcpApprovalRequest {
    /// What the agent is told when nobody can be asked, or its turn is stopped before anybody has answered.
    pub(super) fn cancel_answer(&self) -> Result<Value, Error> {
        match self {
            Self::Permission(_) => Ok(permission_answer(None, None)),
            Self::Form(_) => Ok(form_answer(ElicitationAction::Cancel)),
            Self::Operation(_) => Err(Error::request_cancelled()),
        }
    }
}

/// Something that an agent waits for.
#[derive(Debug)]
pub(super) enum AcpAsk {
    /// May this tool be used?
    Permission {
        ask: AskRequest,
        /// The agent's names for a yes and a no that hold this once.
        allow: PermissionOptionId,
        deny: Option<PermissionOptionId>,
    },
    /// The same of an agent that would take no yes that holds this once.
    OnceNotOffered { tool: String, deny: Option<PermissionOptionId> },
    /// A form: one question after the other, each with the name of its field.
    Form(Vec<(AskRequest, AcpFormField)>),
    /// Questions of an agent that asks them as if it wanted permission: its names for a yes and a no.
    Questions {
        questions: Vec<(AskRequest, AcpFormField)>,
        allow: PermissionOptionId,
        deny: Option<PermissionOptionId>,
    },
    /// May we do this for the agent?
    Operation { ask: AskRequest, operation: AcpClientOperation },
}

impl AcpAsk {
    /// A permission for a tool whose name and arguments are known.
    pub(super) fn permission(
        tool: String,
        title: Option<String>,
        input: Value,
        options: &[PermissionOption],
        meta: Option<&Meta>,
    ) -> Result<Self, Error> {
        #[derive(Deserialize)]
        struct AcpRiskMeta {
            risk: Risk,
        }
        let prompt = title.filter(|title| *title != tool);
        let ask = AskRequest {
            id: generate_ask_id()?,
            kind: AskKind::Permission,
            prompt: prompt.unwrap_or_else(|| format!("May the agent use {tool}?")),
            tool: Some(tool),
            input,
            risk: quarterdeck_meta(meta).map(|AcpRiskMeta { risk }| risk),
            options: Vec::new(),
            implicit: false,
        };
        let (allow, deny) = once_options(options);
        Ok(match allow {
            Some(allow) => Self::Permission { ask, allow, deny },
            // A yes for ever is never given, whatever is decided: the agent would not ask again, and so get around
            // every later rule and every high risk. Nobody is asked for a yes that could not be passed on.
            None => Self::OnceNotOffered { tool: ask.tool.unwrap_or_default(), deny },
        })
    }

    /// Questions that come as a permission for a tool whose arguments they are; `None` if these are not any.
    pub(super) fn questions(input: &Value, options: &[PermissionOption]) -> Option<Result<Self, Error>> {
        #[derive(Deserialize)]
        struct AcpQuestionArguments {
            questions: Vec<AcpQuestion>,
        }
        #[derive(Deserialize)]
        #[serde(rename_all = "camelCase")]
        struct AcpQuestion {
            question: String,
            #[serde(default)]
            options: Vec<AcpQuestionOption>,
            #[serde(default)]
            multi_select: bool,
        }
        #[derive(Deserialize)]
        struct AcpQuestionOption {
            label: String,
        }
        let AcpQuestionArguments { questions } = AcpQuestionArguments::deserialize(input).ok()?;
        let (allow, deny) = once_options(options);
        let (allow, in_bounds) = (allow?, (1..=FIELDS_MAX).contains(&questions.len()));
        if !in_bounds {
            return Some(Err(Error::invalid_params().data(json!(format!("1 to {FIELDS_MAX} questions")))));
        }
        let question = |(number, question): (usize, AcpQuestion)| {
            let words = question.options.into_iter().map(|choice| (choice.label.clone(), choice.label));
            let choices: Vec<_> = words.collect();
            let takes = match choices.is_empty() {
                true => AcpFieldType::Text,
                false => AcpFieldType::Choice { choices, many: question.multi_select },
            };
            let field = AcpFormField { name: number.to_string(), field_type: takes };
            Ok((question_ask(question.question, field.options())?, field))
        };
        let questions = questions.into_iter().enumerate().map(question).collect::<Result<_, _>>();
        Some(questions.map(|questions| Self::Questions { questions, allow, deny }))
    }

    /// Something to be done for the agent.
    pub(super) fn operation(wish: AcpClientOperation) -> Result<Self, Error> {
        let prompt = match &wish {
            AcpClientOperation::Read(_) => format!("May the agent read {}?", wish.argument()),
            AcpClientOperation::Write(_) => format!("May the agent write {}?", wish.argument()),
            AcpClientOperation::Run(_) => wish.argument(),
        };
        let ask = AskRequest {
            id: generate_ask_id()?,
            kind: AskKind::Permission,
            tool: Some(wish.tool().to_owned()),
            input: wish.input(),
            risk: None,
            prompt,
            options: Vec::new(),
            implicit: wish.is_read_only(),
        };
        Ok(Self::Operation { ask, operation: wish })
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
            AcpFormField::from_schema(name, schema).map(|(label, field)| (label, field, is_required))
        });
        let fields: Vec<_> = fields.collect::<Result<_, Error>>()?;
        // Beside a choice, a line that need not be filled in is for a remark. Nobody is asked for that.
        let has_choice =
            fields.iter().any(|(_, field, _)| matches!(field.field_type, AcpFieldType::Choice { .. }));
        let is_remark = |field: &AcpFormField, is_required: bool| {
            has_choice && !is_required && matches!(field.field_type, AcpFieldType::Text)
        };
        let fields: Vec<_> =
            fields.into_iter().filter(|(_, field, required)| !is_remark(field, *required)).collect();
        let alone = fields.len() == 1;
        let question = |(label, field, _): (String, AcpFormField, bool)| {
            let prompt = if alone { request.message.clone() } else { format!("{} {label}", request.message) };
            Ok((question_ask(prompt, field.options())?, field))
        };
        fields.into_iter().map(question).collect::<Result<_, _>>().map(Self::Form)
    }

    /// The ids by which it is withdrawn.
    pub(super) fn ask_ids(&self) -> Vec<AskId> {
        match self {
            Self::Permission { ask, .. } => vec![ask.id.clone()],
            Self::OnceNotOffered { .. } => Vec::new(),
            Self::Form(questions) | Self::Questions { questions, .. } => {
                questions.iter().map(|(ask, _)| ask.id.clone()).collect()
            }
            Self::Operation { ask, .. } => vec![ask.id.clone()],
        }
    }

    /// Asks, waits, and tells what came of it.
    pub(super) async fn ask_and_wait(self, turn: &DriverTurn<'_>) -> Result<AcpAskOutcome, LinkClosed> {
        match self {
            Self::Permission { ask, allow, deny } => {
                let tool = ask.tool.clone().unwrap_or_default();
                let argument = main_argument(&tool, &ask.input).map(Cow::into_owned).unwrap_or_default();
                let Some(answer) = turn.ask(ask).await? else {
                    return Ok(AcpAskOutcome::Answer(permission_answer(None, None)));
                };
                Ok(match answer.decision {
                    Some(PermissionDecision::AllowOnce | PermissionDecision::AllowAlways) => {
                        AcpAskOutcome::ToolAllowed { answer: permission_answer(Some(allow), None), argument }
                    }
                    Some(PermissionDecision::Deny) | None => {
                        let reason = answer.reason;
                        AcpAskOutcome::ToolDenied {
                            answer: permission_answer(deny, reason.clone()),
                            tool,
                            reason,
                        }
                    }
                })
            }
            Self::OnceNotOffered { tool, deny } => {
                let text = format!(
                    "the agent asked to use {tool} and would only take a yes for ever, which is not given; it was refused"
                );
                turn.emit(TurnUpdate::Notice { text }).await?;
                let why = Some("a yes must hold for once only".to_owned());
                Ok(AcpAskOutcome::Answer(permission_answer(deny, why)))
            }
            Self::Form(questions) => {
                Ok(AcpAskOutcome::Answer(match ask_questions(questions, turn).await? {
                    AcpFormOutcome::Completed(content) => form_answer(ElicitationAction::Accept(
                        ElicitationAcceptAction::new().content(content),
                    )),
                    AcpFormOutcome::Declined => form_answer(ElicitationAction::Decline),
                    AcpFormOutcome::Withdrawn => form_answer(ElicitationAction::Cancel),
                }))
            }
            Self::Questions { questions, allow, deny } => {
                Ok(AcpAskOutcome::Answer(match ask_questions(questions, turn).await? {
                    AcpFormOutcome::Completed(answers) => {
                        let mut answer = permission_answer(Some(allow), None);
                        answer["answers"] = as_json(&answers);
                        answer
                    }
                    AcpFormOutcome::Declined => permission_answer(deny, None),
                    AcpFormOutcome::Withdrawn => permission_answer(None, None),
                }))
            }
            Self::Operation { ask, operation: wish } => Ok(match turn.ask(ask).await? {
                None => AcpAskOutcome::OperationDenied(Error::request_cancelled()),
                Some(AskAnswer {
                    decision: Some(PermissionDecision::AllowOnce | PermissionDecision::AllowAlways),
                    ..
                }) => AcpAskOutcome::OperationAllowed(wish),
                Some(answer) => {
                    let reason = answer.reason.unwrap_or_else(|| "it is not allowed".to_owned());
                    AcpAskOutcome::OperationDenied(Error::new(
                        ErrorCode::INVALID_PARAMS,
                        format!("refused: {reason}"),
                    ))
                }
            }),
        }
    }
}

/// What became of some questions.
enum AcpFormOutcome {
    Completed(BTreeMap<String, ElicitationContentValue>),
    Declined,
    Withdrawn,
}

/// Asks one question after the other.
async fn ask_questions(
    questions: Vec<(AskRequest, AcpFormField)>,
    turn: &DriverTurn<'_>,
) -> Result<AcpFormOutcome, LinkClosed> {
    let mut content = BTreeMap::new();
    for (ask, field) in questions {
        let Some(answer) = turn.ask(ask).await? else { return Ok(AcpFormOutcome::Withdrawn) };
        let Some(value) = field.parse_answer(&answer) else { return Ok(AcpFormOutcome::Declined) };
        content.insert(field.name, value);
    }
    Ok(AcpFormOutcome::Completed(content))
}

/// The agent's names for a yes and a no that hold this once. By kind only: names and order differ from agent to agent. A
/// no for ever is better than none.
fn once_options(options: &[PermissionOption]) -> (Option<PermissionOptionId>, Option<PermissionOptionId>) {
    let named =
        |kind| options.iter().find(|option| option.kind == kind).map(|option| option.option_id.clone());
    let deny = named(PermissionOptionKind::RejectOnce).or_else(|| named(PermissionOptionKind::RejectAlways));
    (named(PermissionOptionKind::AllowOnce), deny)
}

fn question_ask(prompt: String, options: Vec<String>) -> Result<AskRequest, Error> {
    Ok(AskRequest {
        id: generate_ask_id()?,
        kind: AskKind::Question,
        tool: None,
        input: Value::Null,
        risk: None,
        prompt,
        options,
        implicit: false,
    })
}

/// One field of a form: what it takes, and what the words of an answer stand for.
#[derive(Debug)]
pub(super) struct AcpFormField {
    name: String,
    field_type: AcpFieldType,
}

#[derive(Debug)]
enum AcpFieldType {
    Text,
    Integer,
    Number,
    Boolean,
    /// One of these, by the word that people see; several of them in one list if `many`.
    Choice {
        choices: Vec<(String, String)>,
        many: bool,
    },
}

impl AcpFormField {
    /// The field, and what people call it.
    fn from_schema(name: String, schema: ElicitationPropertySchema) -> Result<(String, Self), Error> {
        let titled =
            |options: Vec<EnumOption>| options.into_iter().map(|one| (one.title, one.value)).collect();
        let plain = |values: Vec<String>| values.into_iter().map(|one| (one.clone(), one)).collect();
        let (label, takes) = match schema {
            ElicitationPropertySchema::String(text) => {
                let choices: Option<Vec<_>> = text.one_of.map(titled).or_else(|| text.enum_values.map(plain));
                let takes = choices
                    .map_or(AcpFieldType::Text, |choices| AcpFieldType::Choice { choices, many: false });
                (text.description.or(text.title), takes)
            }
            ElicitationPropertySchema::Integer(number) => {
                (number.description.or(number.title), AcpFieldType::Integer)
            }
            ElicitationPropertySchema::Number(number) => {
                (number.description.or(number.title), AcpFieldType::Number)
            }
            ElicitationPropertySchema::Boolean(truth) => {
                (truth.description.or(truth.title), AcpFieldType::Boolean)
            }
            ElicitationPropertySchema::Array(list) => {
                let choices = match list.items {
                    MultiSelectItems::String(items) => plain(items.values),
                    MultiSelectItems::Titled(items) => titled(items.options),
                    _ => return Err(unknown_field_type(&name)),
                };
                (list.description.or(list.title), AcpFieldType::Choice { choices, many: true })
            }
            _ => return Err(unknown_field_type(&name)),
        };
        Ok((label.unwrap_or_else(|| name.clone()), Self { name, field_type: takes }))
    }

    /// What may be answered; anything if that cannot be listed.
    fn options(&self) -> Vec<String> {
        match &self.field_type {
            AcpFieldType::Boolean => vec!["yes".to_owned(), "no".to_owned()],
            AcpFieldType::Choice { choices, many: false }
                if choices.len() <= OPTIONS_MAX && labels_len(choices) <= OPTIONS_BYTES =>
            {
                choices.iter().map(|(word, _)| word.clone()).collect()
            }
            _ => Vec::new(),
        }
    }

    /// What the agent gets for an answer; `None` if it is none.
    fn parse_answer(&self, answer: &AskAnswer) -> Option<ElicitationContentValue> {
        let value = answer.value.as_deref()?;
        Some(match &self.field_type {
            AcpFieldType::Text => ElicitationContentValue::String(value.to_owned()),
            AcpFieldType::Integer => ElicitationContentValue::Integer(value.trim().parse().ok()?),
            AcpFieldType::Number => ElicitationContentValue::Number(value.trim().parse().ok()?),
            AcpFieldType::Boolean => ElicitationContentValue::Boolean(value == "yes"),
            AcpFieldType::Choice { choices, many } => {
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

fn labels_len(choices: &[(String, String)]) -> usize {
    choices.iter().map(|(word, _)| word.len()).sum()
}

fn unknown_field_type(field: &str) -> Error {
    Error::invalid_params().data(json!(format!("the field `{field}` is of an unknown type")))
}

fn permission_answer(option: Option<PermissionOptionId>, reason: Option<String>) -> Value {
    let outcome = match option {
        Some(option) => RequestPermissionOutcome::Selected(SelectedPermissionOutcome::new(option)),
        None => RequestPermissionOutcome::Cancelled,
    };
    let meta = reason.map(|reason| Meta::from_iter([(META_KEY.to_owned(), json!({"reason": reason}))]));
    as_json(&RequestPermissionResponse::new(outcome).meta(meta))
}

fn form_answer(action: ElicitationAction) -> Value {
    as_json(&CreateElicitationResponse::new(action))
}

fn as_json<T: Serialize>(answer: &T) -> Value {
    serde_json::to_value(answer).expect("the protocol's own types are JSON")
}

fn generate_ask_id() -> Result<AskId, Error> {
    new_ask_id().map_err(Error::into_internal_error)
}

#[cfg(test)]
mod tests {
    use agent_client_protocol::v1::schema::{
        ElicitationFormMode, ElicitationSchema, ElicitationSessionScope, StringPropertySchema,
    };

    use super::*;

    fn permission_option(id: &'static str, kind: PermissionOptionKind) -> PermissionOption {
        PermissionOption::new(id, id, kind)
    }

    #[test]
    fn options_are_chosen_by_kind_and_a_yes_for_ever_is_never_given() {
        use PermissionOptionKind::{AllowAlways, AllowOnce, RejectAlways, RejectOnce};
        let permission = |options: &[PermissionOption]| {
            let asked = AcpAsk::permission("Bash".to_owned(), None, json!({}), options, None).unwrap();
            let (allow, deny) = match asked {
                AcpAsk::Permission { allow, deny, .. } => (Some(allow), deny),
                AcpAsk::OnceNotOffered { deny, .. } => (None, deny),
                other => panic!("a permission, not {other:?}"),
            };
            (allow.map(|id| id.to_string()), deny.map(|id| id.to_string()))
        };
        let all = [
            permission_option("a", AllowAlways),
            permission_option("b", RejectAlways),
            permission_option("c", AllowOnce),
            permission_option("d", RejectOnce),
        ];
        assert_eq!(permission(&all), (Some("c".to_owned()), Some("d".to_owned())));
        assert_eq!(permission(&all[..2]), (None, Some("b".to_owned())));
        assert_eq!(permission(&[]), (None, None));
    }

    #[test]
    fn the_agents_word_on_the_risk_is_passed_on_and_nonsense_is_not() {
        let risk = |meta: Value| {
            let options = [permission_option("a", PermissionOptionKind::AllowOnce)];
            let asked =
                AcpAsk::permission("T".to_owned(), None, json!({}), &options, meta.as_object()).unwrap();
            let AcpAsk::Permission { ask, .. } = asked else { panic!("a permission") };
            ask.risk
        };
        assert_eq!(risk(json!({META_KEY: {"risk": "high"}})), Some(Risk::High));
        assert_eq!(risk(json!({META_KEY: {"risk": "enormous"}})), None);
        assert_eq!(risk(json!({})), None);
    }

    #[test]
    fn a_form_is_one_question_for_each_of_its_fields() {
        let colour = StringPropertySchema::new()
            .description("Which colour?".to_owned())
            .one_of(vec![EnumOption::new("r", "Red"), EnumOption::new("b", "Blue")]);
        let schema = ElicitationSchema::new().property("colour", colour, true).integer("count", 0, 9, true);
        let form = ElicitationFormMode::new(ElicitationSessionScope::new("s"), schema);
        let AcpAsk::Form(mut questions) =
            AcpAsk::form(CreateElicitationRequest::new(form, "Please:")).unwrap()
        else {
            panic!("a form")
        };
        let (count, colour) = (questions.pop().unwrap(), questions.pop().unwrap());
        assert_eq!(
            (colour.0.prompt.as_str(), colour.0.options),
            ("Please: Which colour?", vec!["Red".to_owned(), "Blue".to_owned()])
        );
        let says = |value: &str| AskAnswer { value: Some(value.to_owned()), ..AskAnswer::default() };
        assert_eq!(
            colour.1.parse_answer(&says("Blue")),
            Some(ElicitationContentValue::String("b".to_owned()))
        );
        assert_eq!(count.0.prompt, "Please: count");
        assert_eq!(count.1.parse_answer(&says(" 7 ")), Some(ElicitationContentValue::Integer(7)));
        assert_eq!(count.1.parse_answer(&says("many")), None);
    }
}
