//! What the model does, decided by the markers in what the user said last. Nothing here knows of HTTP.

use std::collections::HashSet;
use std::time::Duration;

use super::heard::Heard;
use super::tools::{self, Call, Rights};

/// What the model does with one request.
#[derive(Debug, PartialEq)]
pub(super) enum Plan {
    /// Says these tokens, each after a pause.
    Say { tokens: Vec<String>, pause: Duration },
    /// Calls a tool.
    Call(Call),
    /// Answers with an error.
    Refuse(u16),
    /// Says these tokens, and then cuts the connection.
    Cut { tokens: Vec<String>, pause: Duration },
}

/// Between tokens of a slow answer: five in a second.
const SLOW: Duration = Duration::from_millis(200);

/// Between tokens of an answer that is cut, so that each of them is on its way before the cut.
const BEFORE_CUT: Duration = Duration::from_millis(30);

/// The name of the process that `TOOL:sleep:<seconds>` starts: its first argument, whatever program it is.
pub fn sleeper(seconds: &str) -> String {
    format!("qd-sleep-{seconds}")
}

/// What the model remembers from one request to the next: which errors it has given already.
#[derive(Debug, Default)]
pub(super) struct Script {
    given: HashSet<String>,
}

impl Script {
    /// Decides.
    pub(super) fn plan(&mut self, heard: &Heard) -> Plan {
        if heard.is_side() {
            return side(heard);
        }
        let (texts, results) = (heard.texts(), heard.results());
        let Some((text, earlier)) = texts.split_last() else {
            return say("ECHO[] the user said nothing");
        };
        if let Some(status) = number(text, "ERR:") {
            return Plan::Refuse(status);
        }
        if let Some(status) = number(text, "ERRONCE:").filter(|_| self.given.insert(text.clone())) {
            return Plan::Refuse(status);
        }
        if text.contains("DROPONCE") {
            if self.given.insert(text.clone()) {
                return cut();
            }
        } else if text.contains("DROP") {
            return cut();
        }
        if let Some(plan) = tool(heard, text, results.len()) {
            return plan;
        }
        if results.is_empty() {
            if let Some(seconds) = number::<usize>(text, "SLOW:") {
                let tokens =
                    (0..seconds * 5).map(|n| format!("tok{n} ")).chain(["SLOWEND".to_owned()]).collect();
                return Plan::Say { tokens, pause: SLOW };
            }
            if let Some(n) = number::<usize>(text, "BURST:") {
                return Plan::Say {
                    tokens: (0..n).map(|n| format!("b{n} ")).collect(),
                    pause: Duration::ZERO,
                };
            }
        }
        if text.contains("RECALL") {
            return say(&format!("RECALL[{}]", earlier.join(" | ")));
        }
        let last = results.last().map(|last| format!(" last={:?}", start(last, 160))).unwrap_or_default();
        say(&format!("ECHO[{}] users={} results={}{last}", start(text, 120), texts.len(), results.len()))
    }
}

/// The call that `text` wants next, if it wants one.
fn tool(heard: &Heard, text: &str, results: usize) -> Option<Plan> {
    let line = rest(text, "TOOL:")?;
    let (kind, argument) = line.split_once(':').unwrap_or((line.split_whitespace().next()?, ""));
    let word = argument.split_whitespace().next().unwrap_or("x");
    if results >= if kind == "two" { 2 } else { 1 } {
        return None;
    }
    let shell = |command: &str, rights| tools::shell(&heard.tools, command, rights);
    let call = match kind {
        "run" => shell(argument.trim(), Rights::Escalated),
        "plain" => shell(argument.trim(), Rights::Plain),
        "write" => shell(&format!("echo hi > {word}"), Rights::Escalated),
        "two" => shell(&format!("echo hi{results} >> {word}"), Rights::Escalated),
        // Claude refuses to begin with `sleep`, and Gemini takes `bash -c` away and leaves its quotes. The name is for
        // whoever looks for the process.
        "sleep" => {
            let line = format!("(exec -a {} sleep {word}) && echo slept", sleeper(word));
            shell(&line, Rights::Escalated)
        }
        "read" => tools::read(&heard.tools, word),
        "ask" => tools::ask(&heard.tools),
        "mcp" => tools::server(&heard.tools, argument.trim()),
        other => return Some(say(&format!("ECHO no such tool in the script: {other}"))),
    };
    let names = || heard.tools.iter().map(|tool| tool.name.as_str()).collect::<Vec<_>>().join(", ");
    Some(call.map_or_else(|| say(&format!("ECHO no tool for {kind} among {}", names())), Plan::Call))
}

/// A title, a summary, a judgement: whoever asks is content with anything of the right form.
fn side(heard: &Heard) -> Plan {
    match &heard.form {
        Some(schema) => Plan::Say { tokens: vec![tools::filled(schema).to_string()], pause: Duration::ZERO },
        None => say("Scripted aside"),
    }
}

fn say(text: &str) -> Plan {
    Plan::Say { tokens: text.split_inclusive(' ').map(str::to_owned).collect(), pause: Duration::ZERO }
}

fn cut() -> Plan {
    Plan::Cut { tokens: (0..3).map(|n| format!("d{n} ")).collect(), pause: BEFORE_CUT }
}

/// What follows `marker` on its line.
fn rest<'a>(text: &'a str, marker: &str) -> Option<&'a str> {
    text.split_once(marker)?.1.lines().next()
}

/// The number that follows `marker`.
fn number<T: std::str::FromStr>(text: &str, marker: &str) -> Option<T> {
    let rest = rest(text, marker)?;
    let end = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
    rest[..end].parse().ok()
}

fn start(text: &str, chars: usize) -> String {
    text.chars().take(chars).collect()
}
