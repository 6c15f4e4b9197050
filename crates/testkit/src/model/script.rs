//! What the model does, decided by the markers in what the user said last. Nothing here knows of HTTP.

use std::collections::HashSet;
use std::time::Duration;

use super::request::ModelRequest;
use super::tools::{self, ModelToolCall, ShellRights};

/// What the model does with one request.
#[derive(Debug, PartialEq)]
pub(super) enum ModelPlan {
    /// Says these tokens, each after a pause.
    Say { tokens: Vec<String>, pause: Duration },
    /// Calls a tool.
    Call(ModelToolCall),
    /// Answers with an error.
    Refuse(u16),
    /// Says these tokens, and then cuts the connection.
    Cut { tokens: Vec<String>, pause: Duration },
}

/// Between tokens of a slow answer: five in a second.
const SLOW_TOKEN_PAUSE: Duration = Duration::from_millis(200);

/// Between tokens of an answer that is cut, so that each of them is on its way before the cut.
const BEFORE_CUT: Duration = Duration::from_millis(30);

/// The name of the process that `TOOL:sleep:<seconds>` starts: its first argument, whatever program it is.
pub fn sleeper_name(seconds: &str) -> String {
    format!("qd-sleep-{seconds}")
}

/// What the model remembers from one request to the next: which errors it has given already.
#[derive(Debug, Default)]
pub(super) struct ModelScript {
    given_errors: HashSet<String>,
}

impl ModelScript {
    /// Decides.
    pub(super) fn plan(&mut self, heard: &ModelRequest) -> ModelPlan {
        if heard.is_side_call() {
            return plan_side_call(heard);
        }
        let (texts, results) = (heard.user_texts(), heard.latest_results());
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
        if text.contains("DROPONCE") {
            if self.given_errors.insert(text.clone()) {
                return plan_cut();
            }
        } else if text.contains("DROP") {
            return plan_cut();
        }
        if let Some(plan) = plan_tool_call(heard, text, results.len()) {
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

/// The call that `text` wants next, if it wants one.
fn plan_tool_call(heard: &ModelRequest, text: &str, results: usize) -> Option<ModelPlan> {
    let line = after_marker(text, "TOOL:")?;
    let (kind, argument) = line.split_once(':').unwrap_or((line.split_whitespace().next()?, ""));
    let word = argument.split_whitespace().next().unwrap_or("x");
    if results >= if kind == "two" { 2 } else { 1 } {
        return None;
    }
    let shell = |command: &str, rights| tools::shell_call(&heard.tools, command, rights);
    let call = match kind {
        "run" => shell(argument.trim(), ShellRights::Escalated),
        "plain" => shell(argument.trim(), ShellRights::Plain),
        "write" => shell(&format!("echo hi > {word}"), ShellRights::Escalated),
        "two" => shell(&format!("echo hi{results} >> {word}"), ShellRights::Escalated),
        // Claude refuses to begin with `sleep`, and Gemini takes `bash -c` away and leaves its quotes. The name is for
        // whoever looks for the process.
        "sleep" => {
            let line = format!("(exec -a {} sleep {word}) && echo slept", sleeper_name(word));
            shell(&line, ShellRights::Escalated)
        }
        "read" => tools::read_call(&heard.tools, word),
        "ask" => tools::question_call(&heard.tools),
        "mcp" => tools::mcp_call(&heard.tools, argument.trim()),
        other => return Some(plan_text(&format!("ECHO no such tool in the script: {other}"))),
    };
    let names = || heard.tools.iter().map(|tool| tool.name.as_str()).collect::<Vec<_>>().join(", ");
    Some(
        call.map_or_else(
            || plan_text(&format!("ECHO no tool for {kind} among {}", names())),
            ModelPlan::Call,
        ),
    )
}

/// A title, a summary, a judgement: whoever asks is content with anything of the right form.
fn plan_side_call(heard: &ModelRequest) -> ModelPlan {
    match &heard.json_schema {
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

/// What follows `marker` on its line.
fn after_marker<'a>(text: &'a str, marker: &str) -> Option<&'a str> {
    text.split_once(marker)?.1.lines().next()
}

/// The number that follows `marker`.
fn number_after_marker<T: std::str::FromStr>(text: &str, marker: &str) -> Option<T> {
    let rest = after_marker(text, marker)?;
    let end = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
    rest[..end].parse().ok()
}

fn first_chars(text: &str, chars: usize) -> String {
    text.chars().take(chars).collect()
}
