//! Asks from the server: permission requests and questions, and the responses to them. Nothing is sent here. A
//! [`CodexAsk`] puts its questions to the session and knows which response the server then gets.

use qd_link::LinkClosed;
use qd_protocol::AskId;
use qd_protocol::event::PermissionDecision;
use qd_protocol::link::AskRequest;
use qd_protocol::policy::Risk;
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::connection::{CodexParams, CodexRpcError};
use super::items::{BASH, CodexToolUse, EDIT, unwrap_shell};
use super::tool_calls::CodexToolCalls;
use crate::asks::{
    FormError, FormField, FormOutcome, QUESTIONS_MAX, ask_form, form_fields, listable_options,
    once_not_offered_notice, permission_request, question_request,
};
use crate::tool_server::mcp_tool_name;
use crate::turn::DriverTurn;

/// An ask that the server waits for.
#[derive(Debug)]
pub(super) struct CodexAsk {
    kind: CodexAskKind,
    /// The thread and turn that get the reason of a denial as a steer, if the response has no field for it.
    thread_and_turn: Option<(String, String)>,
}

#[derive(Debug)]
enum CodexAskKind {
    /// A permission request for a tool.
    Permission { ask: AskRequest, style: CodexAnswerStyle },
    /// A permission request without an option to allow just once. It is refused.
    OnceNotOffered { tool: String, style: CodexAnswerStyle },
    /// Questions, asked one after the other, each with its id.
    Questions(Vec<(AskRequest, String)>),
    /// A form of an MCP server. Its questions are asked one after the other.
    Form(Vec<(AskRequest, FormField)>),
}

/// The format of the response to a permission request.
#[derive(Debug)]
enum CodexAnswerStyle {
    /// For a tool call.
    Decision,
    /// For a tool call, in the older format.
    Review,
    /// For wider permissions, which are these.
    Permissions(Value),
    /// For a tool of an MCP server.
    Elicitation,
}

/// The response to an ask.
#[derive(Debug, PartialEq)]
pub(super) struct CodexAskOutcome {
    pub(super) answer: Value,
    /// Thread, turn and reason of a denial, if the response has no field for the reason.
    pub(super) reason: Option<(String, String, String)>,
}

/// The fields of all requests together; each method has some of them.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct CodexApprovalRequest {
    thread_id: Option<String>,
    turn_id: Option<String>,
    item_id: String,
    command: Value,
    cwd: Option<String>,
    reason: Option<String>,
    available_decisions: Option<Vec<Value>>,
    network_approval_context: Option<CodexNetworkContext>,
    additional_permissions: Option<Value>,
    grant_root: Option<String>,
    file_changes: Option<Map<String, Value>>,
    permissions: Value,
    questions: Vec<CodexQuestion>,
    server_name: String,
    mode: String,
    message: String,
    url: String,
    requested_schema: Value,
    #[serde(rename = "_meta")]
    meta: Value,
}

#[derive(Debug, Deserialize)]
struct CodexNetworkContext {
    host: String,
    protocol: String,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct CodexQuestion {
    id: String,
    question: String,
    #[serde(default)]
    header: String,
    #[serde(default)]
    is_secret: bool,
    #[serde(default)]
    options: Option<Vec<CodexQuestionOption>>,
}

#[derive(Debug, Deserialize)]
struct CodexQuestionOption {
    label: String,
    #[serde(default)]
    description: String,
}

impl CodexAsk {
    /// Builds the ask for a request. Open tool calls fill the gaps. Fails if people cannot be asked this.
    pub(super) fn from_request(
        method: &str,
        params: &CodexParams,
        calls: &CodexToolCalls,
    ) -> Result<Self, CodexRpcError> {
        let unreadable =
            || CodexRpcError::invalid_params(format!("quarterdeck cannot parse the parameters of {method}"));
        let request: CodexApprovalRequest = params.read().ok_or_else(unreadable)?;
        let thread_and_turn = request.thread_id.clone().zip(request.turn_id.clone());
        let kind = match method {
            "item/commandExecution/requestApproval" => request.command_ask(calls, CodexAnswerStyle::Decision),
            "execCommandApproval" => request.command_ask(calls, CodexAnswerStyle::Review),
            "item/fileChange/requestApproval" => request.change_ask(calls, CodexAnswerStyle::Decision),
            "applyPatchApproval" => request.change_ask(calls, CodexAnswerStyle::Review),
            "item/permissions/requestApproval" => request.permissions_ask(),
            "item/tool/requestUserInput" => request.questions_ask(),
            "mcpServer/elicitation/request" => request.elicitation_ask(calls),
            _ => return Err(CodexRpcError::unknown_method(method)),
        };
        Ok(Self { kind: kind?, thread_and_turn })
    }

    /// The ids with which its questions are withdrawn.
    pub(super) fn ask_ids(&self) -> Vec<AskId> {
        match &self.kind {
            CodexAskKind::Permission { ask, .. } => vec![ask.id.clone()],
            CodexAskKind::OnceNotOffered { .. } => Vec::new(),
            CodexAskKind::Questions(questions) => questions.iter().map(|(ask, _)| ask.id.clone()).collect(),
            CodexAskKind::Form(questions) => questions.iter().map(|(ask, _)| ask.id.clone()).collect(),
        }
    }

    /// The response if the turn is cancelled before anybody has answered.
    pub(super) fn cancel_answer(&self) -> Value {
        match &self.kind {
            CodexAskKind::Permission { style, .. } | CodexAskKind::OnceNotOffered { style, .. } => {
                style.cancel_answer()
            }
            CodexAskKind::Questions(_) => json!({"answers": {}}),
            CodexAskKind::Form(_) => CodexAnswerStyle::Elicitation.cancel_answer(),
        }
    }

    /// The response if nobody can be asked: a denial, after which the agent continues.
    pub(super) fn unattended_answer(&self) -> Value {
        match &self.kind {
            CodexAskKind::Permission { style, .. } | CodexAskKind::OnceNotOffered { style, .. } => {
                style.deny_answer(None)
            }
            CodexAskKind::Questions(_) => json!({"answers": {}}),
            CodexAskKind::Form(_) => CodexAnswerStyle::Elicitation.deny_answer(None),
        }
    }

    /// Asks the session, waits for the answer, and returns the response for the server.
    pub(super) async fn ask_and_wait(self, turn: &DriverTurn<'_>) -> Result<CodexAskOutcome, LinkClosed> {
        let Self { kind, thread_and_turn } = self;
        let without_reason = |answer| CodexAskOutcome { answer, reason: None };
        match kind {
            CodexAskKind::Permission { ask, style } => {
                let Some(answer) = turn.ask(ask).await? else {
                    return Ok(without_reason(style.cancel_answer()));
                };
                if answer.decision.is_some_and(PermissionDecision::allows) {
                    return Ok(without_reason(style.allow_answer()));
                }
                let denial = style.deny_answer(answer.reason.as_deref());
                let reason = answer.reason.filter(|_| !matches!(style, CodexAnswerStyle::Review));
                let reason =
                    reason.zip(thread_and_turn).map(|(reason, (thread, turn))| (thread, turn, reason));
                Ok(CodexAskOutcome { answer: denial, reason })
            }
            CodexAskKind::OnceNotOffered { tool, style } => {
                turn.emit(once_not_offered_notice(&tool)).await?;
                Ok(without_reason(style.deny_answer(None)))
            }
            CodexAskKind::Questions(questions) => {
                let mut answers = Map::new();
                for (ask, id) in questions {
                    let Some(answer) = turn.ask(ask).await? else { break };
                    if let Some(value) = answer.value {
                        answers.insert(id, json!({"answers": [value]}));
                    }
                }
                Ok(without_reason(json!({"answers": answers})))
            }
            CodexAskKind::Form(questions) => Ok(without_reason(match ask_form(questions, turn).await? {
                FormOutcome::Completed(content) => json!({"action": "accept", "content": content}),
                FormOutcome::Declined => CodexAnswerStyle::Elicitation.deny_answer(None),
                FormOutcome::Withdrawn => CodexAnswerStyle::Elicitation.cancel_answer(),
            })),
        }
    }
}

impl CodexAnswerStyle {
    /// Allows just this once, always. With a longer permission the agent would not ask again, and so would get around
    /// every later rule and every high-risk check.
    fn allow_answer(&self) -> Value {
        match self {
            Self::Decision => json!({"decision": "accept"}),
            Self::Review => json!({"decision": "approved"}),
            Self::Permissions(permissions) => json!({"permissions": permissions, "scope": "turn"}),
            Self::Elicitation => json!({"action": "accept", "content": {}}),
        }
    }

    /// Denies; the turn goes on.
    fn deny_answer(&self, reason: Option<&str>) -> Value {
        match self {
            Self::Decision => json!({"decision": "decline"}),
            Self::Review => json!({"decision": {"denied": {"rejection": reason.unwrap_or("refused")}}}),
            Self::Permissions(_) => json!({"permissions": {}, "scope": "turn"}),
            Self::Elicitation => json!({"action": "decline"}),
        }
    }

    /// Denies and ends the turn, where the format can express that.
    fn cancel_answer(&self) -> Value {
        match self {
            Self::Decision => json!({"decision": "cancel"}),
            Self::Review => json!({"decision": "abort"}),
            Self::Permissions(_) => self.deny_answer(None),
            Self::Elicitation => json!({"action": "cancel"}),
        }
    }
}

impl CodexApprovalRequest {
    fn command_ask(
        self,
        calls: &CodexToolCalls,
        style: CodexAnswerStyle,
    ) -> Result<CodexAskKind, CodexRpcError> {
        let known = calls.tool_use(&self.item_id).filter(|tool| tool.name == BASH);
        let command = match &self.command {
            Value::String(line) => json!(unwrap_shell(line)),
            Value::Array(_) => self.command.clone(),
            _ => known.map(|tool| tool.input["command"].clone()).unwrap_or_default(),
        };
        let tool = match &self.network_approval_context {
            // A command wants to reach this host. The command itself was approved before.
            Some(CodexNetworkContext { host, protocol }) => {
                let scheme = if protocol == "http" { "http" } else { "https" };
                let input =
                    json!({"url": format!("{scheme}://{host}"), "protocol": protocol, "for": command});
                CodexToolUse { name: "Network".to_owned(), input }
            }
            None => {
                let mut input = json!({"command": command, "cwd": self.cwd});
                if let Some(wider) = &self.additional_permissions {
                    input["permissions"] = wider.clone();
                }
                CodexToolUse { name: BASH.to_owned(), input }
            }
        };
        self.permission_ask(tool, None, style)
    }

    fn change_ask(
        self,
        calls: &CodexToolCalls,
        style: CodexAnswerStyle,
    ) -> Result<CodexAskKind, CodexRpcError> {
        let known = calls.tool_use(&self.item_id).filter(|tool| tool.name == EDIT);
        let mut input = match (&self.file_changes, known) {
            (Some(changes), _) => {
                json!({"path": changes.keys().collect::<Vec<_>>(), "changes": changes})
            }
            (None, Some(tool)) => tool.input.clone(),
            (None, None) => json!({}),
        };
        let mut risk = None;
        // The request goes beyond the change itself, or the change is unknown. No rule on paths can judge that.
        if self.grant_root.is_some() || input["path"].is_null() {
            input["grant_root"] = json!(self.grant_root);
            risk = Some(Risk::High);
        }
        self.permission_ask(CodexToolUse { name: EDIT.to_owned(), input }, risk, style)
    }

    /// Wider permissions for the rest of the turn. What the agent does with them is not asked about.
    fn permissions_ask(self) -> Result<CodexAskKind, CodexRpcError> {
        let input = json!({"permissions": self.permissions, "cwd": self.cwd});
        let style = CodexAnswerStyle::Permissions(self.permissions.clone());
        self.permission_ask(CodexToolUse { name: "Permissions".to_owned(), input }, Some(Risk::High), style)
    }

    fn permission_ask(
        self,
        tool: CodexToolUse,
        risk: Option<Risk>,
        style: CodexAnswerStyle,
    ) -> Result<CodexAskKind, CodexRpcError> {
        let CodexToolUse { name, mut input } = tool;
        let lacks_once = |decisions: &Vec<Value>| !decisions.contains(&json!("accept"));
        if self.available_decisions.as_ref().is_some_and(lacks_once) {
            return Ok(CodexAskKind::OnceNotOffered { tool: name, style });
        }
        if let Some(reason) = &self.reason {
            input["reason"] = json!(reason);
        }
        let prompt = Some(self.message).filter(|message| !message.is_empty()).or(self.reason);
        let ask = permission_request(name, input, prompt)?;
        Ok(CodexAskKind::Permission { ask: AskRequest { risk, ..ask }, style })
    }

    fn questions_ask(self) -> Result<CodexAskKind, CodexRpcError> {
        if self.questions.is_empty() || self.questions.len() > QUESTIONS_MAX {
            return Err(CodexRpcError::invalid_params(format!(
                "1 to {QUESTIONS_MAX} questions can be asked at once"
            )));
        }
        let question = |CodexQuestion { id, question, header, is_secret, options }: CodexQuestion| {
            let options = options.unwrap_or_default();
            let mut prompt = if header.is_empty() { question } else { format!("{header}: {question}") };
            for CodexQuestionOption { label, description } in
                options.iter().filter(|option| !option.description.is_empty())
            {
                prompt.push_str(&format!("\n{label}: {description}"));
            }
            if is_secret {
                prompt.push_str("\nThe agent wants this kept secret, but answers are journalled.");
            }
            let labels = options.into_iter().map(|option| option.label).collect();
            Ok((question_request(prompt, listable_options(labels))?, id))
        };
        self.questions.into_iter().map(question).collect::<Result<_, _>>().map(CodexAskKind::Questions)
    }

    /// An MCP server asks a question, or wants permission for one of its tools, which comes in the same form.
    fn elicitation_ask(self, calls: &CodexToolCalls) -> Result<CodexAskKind, CodexRpcError> {
        if self.meta["codex_approval_kind"] == "mcp_tool_call" {
            let input = self.meta["tool_params"].clone();
            let known = calls.find_mcp_call(&self.server_name, &input).cloned();
            let name = known.map_or_else(|| mcp_tool_name(&self.server_name, "unknown"), |tool| tool.name);
            let input = if input.is_object() { input } else { json!({"arguments": input}) };
            return self.permission_ask(CodexToolUse { name, input }, None, CodexAnswerStyle::Elicitation);
        }
        let fields = match self.mode.as_str() {
            "form" | "openai/form" | "openaiForm" => form_fields(&self.requested_schema)?,
            // The form is at another place, and people only confirm that it is done.
            "url" => {
                let done = "done".to_owned();
                vec![(self.url.clone(), FormField::from_labels(done.clone(), vec![done], false))]
            }
            other => {
                return Err(CodexRpcError::invalid_params(format!(
                    "quarterdeck does not support the elicitation mode {other}"
                )));
            }
        };
        let question = |(label, field): (String, FormField)| {
            let prompt = format!("{} ({}) {label}", self.message, self.server_name);
            Ok((question_request(prompt, field.options())?, field))
        };
        fields.into_iter().map(question).collect::<Result<_, _>>().map(CodexAskKind::Form)
    }
}

impl From<getrandom::Error> for CodexRpcError {
    fn from(error: getrandom::Error) -> Self {
        Self::invalid_params(error.to_string())
    }
}

impl From<FormError> for CodexRpcError {
    fn from(error: FormError) -> Self {
        Self::invalid_params(error.to_string())
    }
}
