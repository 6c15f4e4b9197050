//! Asks in the terms of the protocol: permission requests, forms and operations, and the responses to them. Nothing is
//! sent here. An [`AcpAsk`] puts its questions to the session and knows which response the agent then gets.

use std::borrow::Cow;

use agent_client_protocol::v1::schema::{
    CreateElicitationRequest, CreateElicitationResponse, ElicitationAcceptAction, ElicitationAction,
    ElicitationMode, Meta, PermissionOption, PermissionOptionId, PermissionOptionKind,
    RequestPermissionOutcome, RequestPermissionRequest, RequestPermissionResponse, SelectedPermissionOutcome,
};
use agent_client_protocol::{Error, ErrorCode};
use qd_core::policy::main_argument;
use qd_link::LinkClosed;
use qd_protocol::AskId;
use qd_protocol::event::PermissionDecision;
use qd_protocol::link::AskRequest;
use qd_protocol::policy::Risk;
use qd_protocol::worker::META_KEY;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::client_service::AcpClientOperation;
use super::event_decoder::quarterdeck_meta;
use crate::asks::{
    FormField, FormOutcome, QUESTIONS_MAX, ask_form, form_fields, once_not_offered_notice,
    permission_request, question_request,
};
use crate::turn::DriverTurn;

/// A request of the agent that a person or the policy decides.
pub(super) enum AcpApprovalRequest {
    Permission(Box<RequestPermissionRequest>),
    Form(Box<CreateElicitationRequest>),
    Operation(AcpClientOperation),
}

/// The outcome of an ask.
#[derive(Debug)]
pub(super) enum AcpAskOutcome {
    /// The response for the agent, with nothing more to do.
    Answer(Value),
    /// The tool may be used. `argument` is what the policy judged it by.
    ToolAllowed { answer: Value, argument: String },
    /// The tool may not be used.
    ToolDenied { answer: Value, tool: String, reason: Option<String> },
    /// We are to perform the operation.
    OperationAllowed(AcpClientOperation),
    /// The operation is refused with this error.
    OperationDenied(Error),
}

impl AcpApprovalRequest {
    /// The response if nobody can be asked, or if the turn is cancelled before anybody has answered.
    pub(super) fn cancel_answer(&self) -> Result<Value, Error> {
        match self {
            Self::Permission(_) => Ok(permission_answer(None, None)),
            Self::Form(_) => Ok(form_answer(ElicitationAction::Cancel)),
            Self::Operation(_) => Err(Error::request_cancelled()),
        }
    }
}

/// An ask that an agent waits for.
#[derive(Debug)]
pub(super) enum AcpAsk {
    /// A permission request for a tool.
    Permission {
        ask: AskRequest,
        /// The agent's ids for the options that allow and deny once.
        allow: PermissionOptionId,
        deny: Option<PermissionOptionId>,
    },
    /// A permission request without an option to allow just once. It is refused.
    OnceNotOffered { tool: String, deny: Option<PermissionOptionId> },
    /// A form. Its questions are asked one after the other, each with its field.
    Form(Vec<(AskRequest, FormField)>),
    /// Questions that the agent sends as a permission request, with its ids for the options to allow and deny.
    Questions {
        questions: Vec<(AskRequest, FormField)>,
        allow: PermissionOptionId,
        deny: Option<PermissionOptionId>,
    },
    /// An operation that the agent wants us to perform.
    Operation { ask: AskRequest, operation: AcpClientOperation },
}

impl AcpAsk {
    /// Builds the ask for a permission request.
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
        let mut ask = permission_request(tool, input, prompt).map_err(Error::into_internal_error)?;
        ask.risk = quarterdeck_meta(meta).map(|AcpRiskMeta { risk }| risk);
        let (allow, deny) = once_options(options);
        Ok(match allow {
            Some(allow) => Self::Permission { ask, allow, deny },
            // An option that allows for ever is never chosen: the agent would not ask again and so would get around
            // every later rule and every high-risk check. Nobody is asked for an approval that could not be passed on.
            None => Self::OnceNotOffered { tool: ask.tool.unwrap_or_default(), deny },
        })
    }

    /// Builds the ask for questions that are the arguments of a permission request. `None` if the arguments are no
    /// questions.
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
        let (allow, in_bounds) = (allow?, (1..=QUESTIONS_MAX).contains(&questions.len()));
        if !in_bounds {
            return Some(Err(Error::invalid_params().data(json!(format!("1 to {QUESTIONS_MAX} questions")))));
        }
        let question = |(number, question): (usize, AcpQuestion)| {
            let labels = question.options.into_iter().map(|option| option.label).collect();
            let field = FormField::from_labels(number.to_string(), labels, question.multi_select);
            Ok((
                question_request(question.question, field.options()).map_err(Error::into_internal_error)?,
                field,
            ))
        };
        let questions = questions.into_iter().enumerate().map(question).collect::<Result<_, _>>();
        Some(questions.map(|questions| Self::Questions { questions, allow, deny }))
    }

    /// Builds the ask for an operation that we would perform.
    pub(super) fn operation(operation: AcpClientOperation) -> Result<Self, Error> {
        let prompt = match &operation {
            AcpClientOperation::Read(_) => format!("May the agent read {}?", operation.argument()),
            AcpClientOperation::Write(_) => format!("May the agent write {}?", operation.argument()),
            AcpClientOperation::Run(_) => operation.argument(),
        };
        let tool = operation.tool().to_owned();
        let mut ask =
            permission_request(tool, operation.input(), Some(prompt)).map_err(Error::into_internal_error)?;
        ask.implicit = operation.is_read_only();
        Ok(Self::Operation { ask, operation })
    }

    /// Builds the ask for a form.
    pub(super) fn form(request: CreateElicitationRequest) -> Result<Self, Error> {
        let ElicitationMode::Form(form) = request.mode else {
            return Err(Error::invalid_params().data(json!("only forms are supported")));
        };
        let mut fields = form_fields(&as_json(&form.requested_schema))
            .map_err(|error| Error::invalid_params().data(json!(error.to_string())))?;
        let required = form.requested_schema.required.unwrap_or_default();
        // An optional text field beside a choice is for a remark. Nobody is asked for it.
        let has_choice = fields.iter().any(|(_, field)| field.is_choice());
        fields.retain(|(_, field)| !(has_choice && field.is_text() && !required.contains(&field.name)));
        let alone = fields.len() == 1;
        let question = |(label, field): (String, FormField)| {
            let prompt = if alone { request.message.clone() } else { format!("{} {label}", request.message) };
            Ok((question_request(prompt, field.options()).map_err(Error::into_internal_error)?, field))
        };
        fields.into_iter().map(question).collect::<Result<_, _>>().map(Self::Form)
    }

    /// The ids with which its questions are withdrawn.
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

    /// Asks the session and waits for the outcome.
    pub(super) async fn ask_and_wait(self, turn: &DriverTurn<'_>) -> Result<AcpAskOutcome, LinkClosed> {
        match self {
            Self::Permission { ask, allow, deny } => {
                let tool = ask.tool.clone().unwrap_or_default();
                let argument = main_argument(&tool, &ask.input).map(Cow::into_owned).unwrap_or_default();
                let Some(answer) = turn.ask(ask).await? else {
                    return Ok(AcpAskOutcome::Answer(permission_answer(None, None)));
                };
                if answer.decision.is_some_and(PermissionDecision::allows) {
                    let answer = permission_answer(Some(allow), None);
                    return Ok(AcpAskOutcome::ToolAllowed { answer, argument });
                }
                let reason = answer.reason;
                let answer = permission_answer(deny, reason.clone());
                Ok(AcpAskOutcome::ToolDenied { answer, tool, reason })
            }
            Self::OnceNotOffered { tool, deny } => {
                turn.emit(once_not_offered_notice(&tool)).await?;
                let why = Some("permission can only be given for one use".to_owned());
                Ok(AcpAskOutcome::Answer(permission_answer(deny, why)))
            }
            Self::Form(questions) => Ok(AcpAskOutcome::Answer(match ask_form(questions, turn).await? {
                FormOutcome::Completed(content) => {
                    let mut answer = form_answer(ElicitationAction::Accept(ElicitationAcceptAction::new()));
                    answer["content"] = Value::Object(content);
                    answer
                }
                FormOutcome::Declined => form_answer(ElicitationAction::Decline),
                FormOutcome::Withdrawn => form_answer(ElicitationAction::Cancel),
            })),
            Self::Questions { questions, allow, deny } => {
                Ok(AcpAskOutcome::Answer(match ask_form(questions, turn).await? {
                    FormOutcome::Completed(answers) => {
                        let mut answer = permission_answer(Some(allow), None);
                        answer["answers"] = Value::Object(answers);
                        answer
                    }
                    FormOutcome::Declined => permission_answer(deny, None),
                    FormOutcome::Withdrawn => permission_answer(None, None),
                }))
            }
            Self::Operation { ask, operation } => Ok(match turn.ask(ask).await? {
                None => AcpAskOutcome::OperationDenied(Error::request_cancelled()),
                Some(answer) if answer.decision.is_some_and(PermissionDecision::allows) => {
                    AcpAskOutcome::OperationAllowed(operation)
                }
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

/// The agent's ids for the options that allow and deny once. They are found by kind, because names and order differ
/// between agents. To deny for ever is better than having no way to deny.
fn once_options(options: &[PermissionOption]) -> (Option<PermissionOptionId>, Option<PermissionOptionId>) {
    let option_id =
        |kind| options.iter().find(|option| option.kind == kind).map(|option| option.option_id.clone());
    let deny =
        option_id(PermissionOptionKind::RejectOnce).or_else(|| option_id(PermissionOptionKind::RejectAlways));
    (option_id(PermissionOptionKind::AllowOnce), deny)
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

#[cfg(test)]
mod tests {
    use agent_client_protocol::v1::schema::{
        ElicitationFormMode, ElicitationSchema, ElicitationSessionScope, EnumOption, StringPropertySchema,
    };

    use super::*;

    fn permission_option(id: &'static str, kind: PermissionOptionKind) -> PermissionOption {
        PermissionOption::new(id, id, kind)
    }

    #[test]
    fn options_are_chosen_by_kind_and_permission_is_never_given_for_ever() {
        use PermissionOptionKind::{AllowAlways, AllowOnce, RejectAlways, RejectOnce};
        let permission = |options: &[PermissionOption]| {
            let ask = AcpAsk::permission("Bash".to_owned(), None, json!({}), options, None).unwrap();
            let (allow, deny) = match ask {
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
    fn the_risk_that_the_agent_reports_is_passed_on_and_nonsense_is_not() {
        let risk = |meta: Value| {
            let options = [permission_option("a", PermissionOptionKind::AllowOnce)];
            let ask =
                AcpAsk::permission("T".to_owned(), None, json!({}), &options, meta.as_object()).unwrap();
            let AcpAsk::Permission { ask, .. } = ask else { panic!("a permission") };
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
        assert_eq!(colour.1.parse_answer("Blue"), Some(json!("b")));
        assert_eq!(count.0.prompt, "Please: count");
        assert_eq!(count.1.parse_answer(" 7 "), Some(json!(7)));
        assert_eq!(count.1.parse_answer("many"), None);
    }
}
