//! Decides what the model does, by the markers in the user's last message. Nothing here knows of HTTP.

use std::collections::HashSet;
use std::time::Duration;

use super::request::ModelRequest;
use super::tools::{self, ModelToolCall, ShellRights};

#[derive(Debug, PartialEq)]
pub(super) enum ModelPlan {
    /// Sends these tokens, each after a pause.
    Say {
        tokens: Vec<String>,
        pause: Duration,
    },
    Call(ModelToolCall),
    /// Answers with this error status.
    Refuse(u16),
    /// Refuses because the quota of the account is exhausted, and resets in so many seconds.
    RefuseForQuota(u64),
    /// Sends these tokens, and then cuts the connection.
    Cut {
        tokens: Vec<String>,
        pause: Duration,
    },
    /// Sends these tokens, and then says that the answer has reached its limit of tokens.
    Truncate(Vec<String>),
    /// Answers with status 200 and this body, whatever the API expects.
    SendBody(&'static str),
    /// Never answers.
    Hang,
    /// Sends one token, and then nothing more.
    Stall,
}

/// The pause between tokens of a slow answer: five per second.
const SLOW_TOKEN_PAUSE: Duration = Duration::from_millis(200);

/// The pause between tokens of an answer that is cut, so that each token is sent before the cut.
const BEFORE_CUT: Duration = Duration::from_millis(30);

/// The model that no server has.
const UNKNOWN_MODEL: &str = "no-such-model";

/// What Copilot tells the model by itself after an answer that was truncated.
const CONTINUE_REQUEST: &str = "Please continue from where you left off";

/// The name of the process that `TOOL:sleep:SECONDS` starts, given as its `argv[0]`.
pub fn sleeper_name(seconds: &str) -> String {
    format!("qd-sleep-{seconds}")
}

/// What the model remembers between requests: which errors it has already given.
#[derive(Debug, Default)]
pub(super) struct ModelScript {
    given_errors: HashSet<String>,
}

impl ModelScript {
    pub(super) fn plan(&mut self, request: &ModelRequest) -> ModelPlan {
        if request.is_side_call() {
            return plan_side_call(request);
        }
        if request.model.contains(UNKNOWN_MODEL) {
            return ModelPlan::Refuse(404);
        }
        let (texts, results) = (request.user_texts(), request.latest_results());
        let Some((text, earlier)) = texts.split_last() else {
            return plan_text("ECHO[] the user said nothing");
        };
        if let Some(status) = number_after_marker(text, "ERR:") {
            return ModelPlan::Refuse(status);
        }
        if let Some(status) =
            number_after_marker(text, "ERRONCE:").filter(|_| self.given_errors.insert(text.clone()))
        {
            return ModelPlan::Refuse(status);
        }
        if let Some(seconds) = number_after_marker(text, "QUOTA:") {
            return ModelPlan::RefuseForQuota(seconds);
        }
        if let Some(status) = number_after_marker(text, "ERRAFTER:").filter(|_| !results.is_empty()) {
            return ModelPlan::Refuse(status);
        }
        if text.contains("DROPONCE") {
            if self.given_errors.insert(text.clone()) {
                return plan_cut();
            }
        } else if text.contains("DROP") {
            return plan_cut();
        }
        // An agent that asks for the rest of a truncated answer gets an answer that is truncated again.
        let is_own_request = text.starts_with(CONTINUE_REQUEST);
        let marked = if is_own_request {
            earlier.iter().rfind(|it| !it.starts_with(CONTINUE_REQUEST))
        } else {
            Some(text)
        };
        if let Some(plan) = marked.and_then(|text| plan_strange_answer(text)) {
            return plan;
        }
        if let Some(plan) = plan_tool_call(request, text, results.len()) {
            return plan;
        }
        if results.is_empty() {
            if let Some(seconds) = number_after_marker::<usize>(text, "SLOW:") {
                let tokens =
                    (0..seconds * 5).map(|n| format!("tok{n} ")).chain(["SLOWEND".to_owned()]).collect();
                return ModelPlan::Say { tokens, pause: SLOW_TOKEN_PAUSE };
            }
            if let Some(n) = number_after_marker::<usize>(text, "BURST:") {
                return ModelPlan::Say {
                    tokens: (0..n).map(|n| format!("b{n} ")).collect(),
                    pause: Duration::ZERO,
                };
            }
        }
        if text.contains("RECALL") {
            return plan_text(&format!("RECALL[{}]", earlier.join(" | ")));
        }
        let last =
            results.last().map(|last| format!(" last={:?}", first_chars(last, 160))).unwrap_or_default();
        plan_text(&format!(
            "ECHO[{}] users={} results={}{last}",
            first_chars(text, 120),
            texts.len(),
            results.len()
        ))
    }
}

/// An answer of a model or a network that does not work as it should, if `text` asks for one.
fn plan_strange_answer(text: &str) -> Option<ModelPlan> {
    if text.contains("EMPTY-BODY") {
        Some(ModelPlan::SendBody(""))
    } else if text.contains("GARBLED") {
        Some(ModelPlan::SendBody("data: {\"id\": \"cut of\n\ndata: }{\n\n"))
    } else if text.contains("OUT-OF-TOKENS") {
        Some(ModelPlan::Truncate(["as ", "long ", "as "].map(str::to_owned).to_vec()))
    } else if text.contains("HANG") {
        Some(ModelPlan::Hang)
    } else if text.contains("STALL") {
        Some(ModelPlan::Stall)
    } else {
        None
    }
}

/// The next tool call that `text` asks for, if any.
fn plan_tool_call(request: &ModelRequest, text: &str, results: usize) -> Option<ModelPlan> {
    let line = after_marker(text, "TOOL:")?;
    let (kind, argument) = line.split_once(':').unwrap_or((line.split_whitespace().next()?, ""));
    let first_word = argument.split_whitespace().next().unwrap_or("x");
    if results >= if kind == "two" { 2 } else { 1 } {
        return None;
    }
    let shell = |command: &str, rights| tools::shell_call(&request.tools, command, rights);
    let call = match kind {
        "run" => shell(argument.trim(), ShellRights::Escalated),
        "plain" => shell(argument.trim(), ShellRights::Plain),
        "write" => shell(&format!("echo hi > {first_word}"), ShellRights::Escalated),
        "two" => shell(&format!("echo hi{results} >> {first_word}"), ShellRights::Escalated),
        // Claude refuses commands that begin with `sleep`, and Gemini removes `bash -c` but leaves its quotes. The
        // name lets tests find the process.
        "sleep" => {
            let command = format!("(exec -a {} sleep {first_word}) && echo slept", sleeper_name(first_word));
            shell(&command, ShellRights::Escalated)
        }
        "create" => tools::write_call(&request.tools, first_word),
        "read" => tools::read_call(&request.tools, first_word),
        "ask" => tools::question_call(&request.tools),
        "todo" => tools::todo_call(&request.tools),
        "call" => tools::named_call(&request.tools, argument.trim()),
        "mcp" => tools::mcp_call(&request.tools, argument.trim()),
        other => return Some(plan_text(&format!("ECHO no such tool in the script: {other}"))),
    };
    let names = || request.tools.iter().map(|tool| tool.name.as_str()).collect::<Vec<_>>().join(", ");
    Some(
        call.map_or_else(
            || plan_text(&format!("ECHO no tool for {kind} among {}", names())),
            ModelPlan::Call,
        ),
    )
}

/// A title, a summary, a judgement: any answer of the right form will do.
fn plan_side_call(request: &ModelRequest) -> ModelPlan {
    match &request.json_schema {
        Some(schema) => {
            ModelPlan::Say { tokens: vec![tools::minimal_value(schema).to_string()], pause: Duration::ZERO }
        }
        None => plan_text("Scripted aside"),
    }
}

fn plan_text(text: &str) -> ModelPlan {
    ModelPlan::Say { tokens: text.split_inclusive(' ').map(str::to_owned).collect(), pause: Duration::ZERO }
}

fn plan_cut() -> ModelPlan {
    ModelPlan::Cut { tokens: (0..3).map(|n| format!("d{n} ")).collect(), pause: BEFORE_CUT }
}

/// The rest of the line after `marker`.
fn after_marker<'a>(text: &'a str, marker: &str) -> Option<&'a str> {
    text.split_once(marker)?.1.lines().next()
}

/// The number after `marker`.
fn number_after_marker<T: std::str::FromStr>(text: &str, marker: &str) -> Option<T> {
    let rest = after_marker(text, marker)?;
    let end = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
    rest[..end].parse().ok()
}

fn first_chars(text: &str, chars: usize) -> String {
    text.chars().take(chars).collect()
}
