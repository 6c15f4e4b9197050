//! What the server asks of people, and the answers to that: permissions and questions. Nothing is sent here; an
//! [`Asked`] is what a turn asks its session, and knows what the server is to be told then.

use qd_link::Closed;
use qd_protocol::AskId;
use qd_protocol::event::{AskKind, Decision};
use qd_protocol::link::{AskRequest, Said};
use qd_protocol::policy::Risk;
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::calls::Calls;
use super::forms::{self, Field};
use super::items::{BASH, EDIT, Tool, mcp_tool, script};
use super::wire::{Params, Refusal};
use crate::turn::{Turn, ask_id};

/// Questions that may be asked at once.
const QUESTIONS_MAX: usize = 32;

/// Something that the server waits for.
#[derive(Debug)]
pub(super) struct Asked {
    what: What,
    /// Thread and turn that are to be told why something was refused, where the answer has no room for that.
    of: Option<(String, String)>,
}

#[derive(Debug)]
enum What {
    /// May this tool be used?
    Permission { ask: AskRequest, style: Style },
    /// The same, of a server that would take no yes that holds this once.
    Refused { tool: String, style: Style },
    /// Questions, one after the other, each with its name.
    Questions(Vec<(AskRequest, String)>),
    /// A form of an MCP server: one question after the other.
    Form(Vec<(AskRequest, Field)>),
}

/// How the server is told yes and no.
#[derive(Debug)]
enum Style {
    /// To a tool call.
    Decision,
    /// The same, in older words.
    Review,
    /// To wider permissions, which are these.
    Permissions(Value),
    /// To a tool of an MCP server.
    Elicitation,
}

/// What the server is to be told.
#[derive(Debug, PartialEq)]
pub(super) struct Reply {
    pub(super) answer: Value,
    /// Why it is a no, where the answer has no room for that; and who is to know.
    pub(super) reason: Option<(String, String, String)>,
}

/// The fields of all requests together; each method has some of them.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Request {
    thread_id: Option<String>,
    turn_id: Option<String>,
    item_id: String,
    command: Value,
    cwd: Option<String>,
    reason: Option<String>,
    available_decisions: Option<Vec<Value>>,
    network_approval_context: Option<Network>,
    additional_permissions: Option<Value>,
    grant_root: Option<String>,
    file_changes: Option<Map<String, Value>>,
    permissions: Value,
    questions: Vec<Question>,
    server_name: String,
    mode: String,
    message: String,
    url: String,
    requested_schema: Value,
    #[serde(rename = "_meta")]
    meta: Value,
}

#[derive(Debug, Deserialize)]
struct Network {
    host: String,
    protocol: String,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Question {
    id: String,
    question: String,
    #[serde(default)]
    header: String,
    #[serde(default)]
    is_secret: bool,
    #[serde(default)]
    options: Option<Vec<Choice>>,
}

#[derive(Debug, Deserialize)]
struct Choice {
    label: String,
    #[serde(default)]
    description: String,
}

impl Asked {
    /// What a request asks for; what is known of open calls fills the gaps. Refused if nobody can be asked that.
    pub(super) fn read(method: &str, params: &Params, calls: &Calls) -> Result<Self, Refusal> {
        let unreadable = || Refusal::invalid(format!("quarterdeck cannot read these parameters of {method}"));
        let request: Request = params.read().ok_or_else(unreadable)?;
        let of = request.thread_id.clone().zip(request.turn_id.clone());
        let what = match method {
            "item/commandExecution/requestApproval" => request.command(calls, Style::Decision),
            "execCommandApproval" => request.command(calls, Style::Review),
            "item/fileChange/requestApproval" => request.change(calls, Style::Decision),
            "applyPatchApproval" => request.change(calls, Style::Review),
            "item/permissions/requestApproval" => request.wider(),
            "item/tool/requestUserInput" => request.questions(),
            "mcpServer/elicitation/request" => request.elicitation(calls),
            _ => return Err(Refusal::unknown(method)),
        };
        Ok(Self { what: what?, of })
    }

    /// The ids by which it is withdrawn.
    pub(super) fn ids(&self) -> Vec<AskId> {
        match &self.what {
            What::Permission { ask, .. } => vec![ask.id.clone()],
            What::Refused { .. } => Vec::new(),
            What::Questions(questions) => questions.iter().map(|(ask, _)| ask.id.clone()).collect(),
            What::Form(questions) => questions.iter().map(|(ask, _)| ask.id.clone()).collect(),
        }
    }

    /// What the server is told if its turn is stopped before anybody has answered.
    pub(super) fn cancelled(&self) -> Value {
        match &self.what {
            What::Permission { style, .. } | What::Refused { style, .. } => style.cancelled(),
            What::Questions(_) => json!({"answers": {}}),
            What::Form(_) => Style::Elicitation.cancelled(),
        }
    }

    /// What the server is told if nobody can be asked: a no, after which it goes on.
    pub(super) fn unasked(&self) -> Value {
        match &self.what {
            What::Permission { style, .. } | What::Refused { style, .. } => style.no(None),
            What::Questions(_) => json!({"answers": {}}),
            What::Form(_) => Style::Elicitation.no(None),
        }
    }

    /// Asks, waits, and gives what the server is to be told.
    pub(super) async fn put(self, turn: &Turn<'_>) -> Result<Reply, Closed> {
        let Self { what, of } = self;
        let plain = |answer| Reply { answer, reason: None };
        match what {
            What::Permission { ask, style } => {
                let Some(answer) = turn.ask(ask).await? else { return Ok(plain(style.cancelled())) };
                Ok(match answer.decision {
                    Some(Decision::AllowOnce | Decision::AllowAlways) => plain(style.yes()),
                    Some(Decision::Deny) | None => {
                        let told = style.no(answer.reason.as_deref());
                        let reason = answer.reason.filter(|_| !matches!(style, Style::Review));
                        let reason = reason.zip(of).map(|(reason, (thread, turn))| (thread, turn, reason));
                        Reply { answer: told, reason }
                    }
                })
            }
            What::Refused { tool, style } => {
                let text = format!(
                    "the agent asked to use {tool} and would take no yes for this once, so it was refused"
                );
                turn.tell(Said::Notice { text }).await?;
                Ok(plain(style.no(None)))
            }
            What::Questions(questions) => {
                let mut answers = Map::new();
                for (ask, id) in questions {
                    let Some(answer) = turn.ask(ask).await? else { break };
                    if let Some(value) = answer.value {
                        answers.insert(id, json!({"answers": [value]}));
                    }
                }
                Ok(plain(json!({"answers": answers})))
            }
            What::Form(questions) => {
                let mut content = Map::new();
                for (ask, field) in questions {
                    let Some(answer) = turn.ask(ask).await? else {
                        return Ok(plain(Style::Elicitation.cancelled()));
                    };
                    match answer.value.as_deref().and_then(|value| field.fill(value)) {
                        Some(value) => content.insert(field.name, value),
                        None => return Ok(plain(Style::Elicitation.no(None))),
                    };
                }
                Ok(plain(json!({"action": "accept", "content": content})))
            }
        }
    }
}

impl Style {
    /// A yes that holds this once, always: with one that holds longer the agent would ask no more, and so get around
    /// every later rule and every high risk.
    fn yes(&self) -> Value {
        match self {
            Self::Decision => json!({"decision": "accept"}),
            Self::Review => json!({"decision": "approved"}),
            Self::Permissions(wanted) => json!({"permissions": wanted, "scope": "turn"}),
            Self::Elicitation => json!({"action": "accept", "content": {}}),
        }
    }

    /// A no, after which the turn goes on.
    fn no(&self, reason: Option<&str>) -> Value {
        match self {
            Self::Decision => json!({"decision": "decline"}),
            Self::Review => json!({"decision": {"denied": {"rejection": reason.unwrap_or("refused")}}}),
            Self::Permissions(_) => json!({"permissions": {}, "scope": "turn"}),
            Self::Elicitation => json!({"action": "decline"}),
        }
    }

    /// A no that ends the turn, where there is one.
    fn cancelled(&self) -> Value {
        match self {
            Self::Decision => json!({"decision": "cancel"}),
            Self::Review => json!({"decision": "abort"}),
            Self::Permissions(_) => self.no(None),
            Self::Elicitation => json!({"action": "cancel"}),
        }
    }
}

impl Request {
    fn command(self, calls: &Calls, style: Style) -> Result<What, Refusal> {
        let known = calls.get(&self.item_id).filter(|tool| tool.name == BASH);
        let command = match &self.command {
            Value::String(line) => json!(script(line)),
            Value::Array(_) => self.command.clone(),
            _ => known.map(|tool| tool.input["command"].clone()).unwrap_or_default(),
        };
        let tool = match &self.network_approval_context {
            // A command wants to reach this host: the command itself was seen to before.
            Some(Network { host, protocol }) => {
                let scheme = if protocol == "http" { "http" } else { "https" };
                let input =
                    json!({"url": format!("{scheme}://{host}"), "protocol": protocol, "for": command});
                Tool { name: "Network".to_owned(), input }
            }
            None => {
                let mut input = json!({"command": command, "cwd": self.cwd});
                if let Some(wider) = &self.additional_permissions {
                    input["permissions"] = wider.clone();
                }
                Tool { name: BASH.to_owned(), input }
            }
        };
        self.permission(tool, None, style)
    }

    fn change(self, calls: &Calls, style: Style) -> Result<What, Refusal> {
        let known = calls.get(&self.item_id).filter(|tool| tool.name == EDIT);
        let mut input = match (&self.file_changes, known) {
            (Some(changes), _) => {
                json!({"path": changes.keys().collect::<Vec<_>>(), "changes": changes})
            }
            (None, Some(tool)) => tool.input.clone(),
            (None, None) => json!({}),
        };
        let mut risk = None;
        // More than the change itself, or one that nobody has seen: no rule for paths can judge that.
        if self.grant_root.is_some() || input["path"].is_null() {
            input["grant_root"] = json!(self.grant_root);
            risk = Some(Risk::High);
        }
        self.permission(Tool { name: EDIT.to_owned(), input }, risk, style)
    }

    /// Wider permissions for the rest of the turn. Nobody is asked about what is then done with them.
    fn wider(self) -> Result<What, Refusal> {
        let input = json!({"permissions": self.permissions, "cwd": self.cwd});
        let style = Style::Permissions(self.permissions.clone());
        self.permission(Tool { name: "Permissions".to_owned(), input }, Some(Risk::High), style)
    }

    fn permission(self, tool: Tool, risk: Option<Risk>, style: Style) -> Result<What, Refusal> {
        let Tool { name, mut input } = tool;
        let only_longer = |decisions: &Vec<Value>| !decisions.contains(&json!("accept"));
        if self.available_decisions.as_ref().is_some_and(only_longer) {
            return Ok(What::Refused { tool: name, style });
        }
        if let Some(reason) = &self.reason {
            input["reason"] = json!(reason);
        }
        let asked = Some(self.message).filter(|message| !message.is_empty()).or(self.reason);
        let ask = AskRequest {
            id: new_id()?,
            kind: AskKind::Permission,
            prompt: asked.unwrap_or_else(|| format!("May the agent use {name}?")),
            tool: Some(name),
            input,
            risk,
            options: Vec::new(),
            unasked: false,
        };
        Ok(What::Permission { ask, style })
    }

    fn questions(self) -> Result<What, Refusal> {
        if self.questions.is_empty() || self.questions.len() > QUESTIONS_MAX {
            return Err(Refusal::invalid(format!("1 to {QUESTIONS_MAX} questions can be asked at once")));
        }
        let question = |Question { id, question, header, is_secret, options }: Question| {
            let options = options.unwrap_or_default();
            let mut prompt = if header.is_empty() { question } else { format!("{header}: {question}") };
            for Choice { label, description } in options.iter().filter(|one| !one.description.is_empty()) {
                prompt.push_str(&format!("\n{label}: {description}"));
            }
            if is_secret {
                prompt.push_str("\nThe answer is wanted as a secret, but answers are journalled.");
            }
            let labels = options.into_iter().map(|choice| choice.label).collect();
            Ok((question_ask(prompt, forms::listed(labels))?, id))
        };
        self.questions.into_iter().map(question).collect::<Result<_, _>>().map(What::Questions)
    }

    /// What an MCP server wants to know, or whether one of its tools may be used, which is asked in the same way.
    fn elicitation(self, calls: &Calls) -> Result<What, Refusal> {
        if self.meta["codex_approval_kind"] == "mcp_tool_call" {
            let input = self.meta["tool_params"].clone();
            let known = calls.of_server(&self.server_name, &input).cloned();
            let name = known.map_or_else(|| mcp_tool(&self.server_name, "unknown"), |tool| tool.name);
            let input = if input.is_object() { input } else { json!({"arguments": input}) };
            return self.permission(Tool { name, input }, None, Style::Elicitation);
        }
        let fields = match self.mode.as_str() {
            "form" | "openai/form" | "openaiForm" => forms::fields(&self.requested_schema)?,
            "url" => vec![(self.url.clone(), Field::done())],
            other => return Err(Refusal::invalid(format!("quarterdeck has no way to ask for {other}"))),
        };
        let question = |(label, field): (String, Field)| {
            let prompt = format!("{} ({}) {label}", self.message, self.server_name);
            Ok((question_ask(prompt, field.options())?, field))
        };
        fields.into_iter().map(question).collect::<Result<_, _>>().map(What::Form)
    }
}

fn question_ask(prompt: String, options: Vec<String>) -> Result<AskRequest, Refusal> {
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

fn new_id() -> Result<AskId, Refusal> {
    ask_id().map_err(|cause| Refusal::invalid(cause.to_string()))
}
