//! The steps of a script, read from a prompt. All of them are checked before the first is done; nothing is done here.

use std::path::PathBuf;
use std::time::Duration;

use agent_client_protocol::v1::schema::StopReason;
use qd_protocol::event::{PlanEntry, Usage};
use qd_protocol::limits::{HEAD_MAX, INLINE_MAX};
use qd_protocol::policy::Risk;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

/// One step. See section 9 of the contract.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Step {
    Say { text: String, times: u64, every: Duration },
    Think(String),
    Sleep(Duration),
    Tool(Tool),
    Ask(Ask),
    Question(Question),
    Plan(Vec<PlanEntry>),
    Usage(Usage),
    Spawn(Spawn),
    Write(Write),
    Read(PathBuf),
    AwaitSteer(Duration),
    Mcp(Mcp),
    IgnoreCancel,
    Late(String),
    Config,
    Stop(StopReason),
    Suspend,
    Fail(String),
    Exit(i32),
}

/// `{"tool": …}`.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Tool {
    pub(crate) name: String,
    #[serde(default = "nothing")]
    pub(crate) input: Value,
    #[serde(default)]
    pub(crate) output: Value,
    #[serde(default)]
    pub(crate) is_error: bool,
}

/// `{"ask": …}`.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Ask {
    pub(crate) tool: String,
    #[serde(default = "nothing")]
    pub(crate) input: Value,
    #[serde(default)]
    pub(crate) risk: Option<Risk>,
}

/// `{"question": …}`.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Question {
    pub(crate) prompt: String,
    #[serde(default)]
    pub(crate) options: Vec<String>,
}

/// `{"spawn": …}`.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Spawn {
    pub(crate) argv: Vec<String>,
    #[serde(default)]
    pub(crate) setsid: bool,
    #[serde(default)]
    pub(crate) double_fork: bool,
}

/// `{"mcp": …}`: a tool of a server that the agent was given.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Mcp {
    pub(crate) tool: String,
    #[serde(default = "nothing")]
    pub(crate) arguments: Value,
}

/// `{"write": …}`.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Write {
    pub(crate) path: PathBuf,
    pub(crate) content: String,
}

/// A script that cannot be played: which step, and why.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("step {position} of {steps}{}: {why}", .name.as_ref().map(|name| format!(" (`{name}`)")).unwrap_or_default())]
pub(crate) struct BadStep {
    position: usize,
    steps: usize,
    name: Option<String>,
    why: String,
}

/// Reads a script; `None` if the prompt is not a JSON array, and so is not one.
pub(crate) fn parse(prompt: &str) -> Result<Option<Vec<Step>>, BadStep> {
    if !prompt.trim_start().starts_with('[') {
        return Ok(None);
    }
    let Ok(steps) = serde_json::from_str::<Vec<Value>>(prompt) else { return Ok(None) };
    let count = steps.len();
    let read = |(at, value)| {
        step(value).map_err(|(name, why)| BadStep { position: at + 1, steps: count, name, why })
    };
    steps.into_iter().enumerate().map(read).collect::<Result<_, _>>().map(Some)
}

/// Why a step is bad, with its name if it has one.
type Bad = (Option<String>, String);

fn step(value: Value) -> Result<Step, Bad> {
    let Value::Object(mut fields) = value else {
        return Err((None, "a step is an object such as {\"say\": \"hello\"}".to_owned()));
    };
    if let Some(text) = fields.remove("say") {
        return say(text, fields).map_err(|why| (Some("say".to_owned()), why));
    }
    let mut fields = fields.into_iter();
    let (Some((name, value)), None) = (fields.next(), fields.next()) else {
        return Err((None, "a step has exactly one name".to_owned()));
    };
    named(&name, value).map_err(|why| (Some(name), why))
}

/// The one step with more than one field.
fn say(text: Value, rest: Map<String, Value>) -> Result<Step, String> {
    #[derive(Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Rest {
        times: Option<u64>,
        every_ms: Option<u64>,
    }
    let Rest { times, every_ms } = args(Value::Object(rest))?;
    Ok(Step::Say {
        text: args(text)?,
        times: times.unwrap_or(1),
        every: Duration::from_millis(every_ms.unwrap_or_default()),
    })
}

fn named(name: &str, value: Value) -> Result<Step, String> {
    Ok(match name {
        "think" => Step::Think(args(value)?),
        "sleep_ms" => Step::Sleep(Duration::from_millis(args(value)?)),
        "tool" => {
            let tool: Tool = args(value)?;
            fits(tool.name.len(), HEAD_MAX)?;
            Step::Tool(tool)
        }
        "ask" => Step::Ask(args(fitting(value)?)?),
        "question" => Step::Question(args(fitting(value)?)?),
        "plan" => Step::Plan(plan(fitting(value)?)?),
        "usage" => Step::Usage(usage(value)?),
        "write" => Step::Write(args(value)?),
        "read" => Step::Read(args(value)?),
        "await_steer" => Step::AwaitSteer(Duration::from_millis(args(value)?)),
        "mcp" => Step::Mcp(args(value)?),
        "ignore_cancel" => only_true(&value).map(|()| Step::IgnoreCancel)?,
        "late" => Step::Late(args(value)?),
        "config" => only_true(&value).map(|()| Step::Config)?,
        "stop" => Step::Stop(stop(value)?),
        "suspend" => only_true(&value).map(|()| Step::Suspend)?,
        "fail" => Step::Fail(args(value)?),
        "exit" => Step::Exit(args(value)?),
        "spawn" => Step::Spawn(spawn(value)?),
        _ => return Err("there is no such step".to_owned()),
    })
}

fn plan(value: Value) -> Result<Vec<PlanEntry>, String> {
    #[derive(Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Entry {
        content: String,
        #[serde(default)]
        status: String,
    }
    let entries: Vec<Entry> = args(value)?;
    Ok(entries.into_iter().map(|Entry { content, status }| PlanEntry { content, status }).collect())
}

fn usage(value: Value) -> Result<Usage, String> {
    #[derive(Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Used {
        #[serde(default)]
        input_tokens: u64,
        #[serde(default)]
        output_tokens: u64,
        #[serde(default)]
        cost_usd: f64,
    }
    let Used { input_tokens, output_tokens, cost_usd } = args(value)?;
    if cost_usd < 0.0 {
        return Err("`cost_usd` is not negative".to_owned());
    }
    Ok(Usage { input_tokens, output_tokens, cost_usd })
}

fn spawn(value: Value) -> Result<Spawn, String> {
    let spawn: Spawn = args(value)?;
    if spawn.argv.is_empty() {
        return Err("`argv` names no program".to_owned());
    }
    Ok(spawn)
}

/// The contract lets a script stop for these reasons only; the rest have steps of their own.
fn stop(value: Value) -> Result<StopReason, String> {
    #[derive(Deserialize)]
    #[serde(rename_all = "snake_case")]
    enum Reason {
        MaxTokens,
        MaxTurns,
        Refused,
    }
    Ok(match args(value)? {
        Reason::MaxTokens => StopReason::MaxTokens,
        Reason::MaxTurns => StopReason::MaxTurnRequests,
        Reason::Refused => StopReason::Refusal,
    })
}

fn args<T: DeserializeOwned>(value: Value) -> Result<T, String> {
    serde_json::from_value(value).map_err(|error| error.to_string())
}

fn only_true(value: &Value) -> Result<(), String> {
    if *value == Value::Bool(true) { Ok(()) } else { Err("takes only `true`".to_owned()) }
}

/// What becomes one event must fit one; text that is streamed and outputs that can be cut need not.
fn fitting(value: Value) -> Result<Value, String> {
    fits(value.to_string().len(), INLINE_MAX)?;
    Ok(value)
}

fn fits(size: usize, limit: usize) -> Result<(), String> {
    if size <= limit { Ok(()) } else { Err(format!("is {size} bytes long; at most {limit} fit")) }
}

fn nothing() -> Value {
    Value::Object(Map::new())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_json_array_is_a_script() {
        for text in ["hello", "{\"say\":\"x\"}", "[1, 2", "\"[]\"", "", "[] and more"] {
            assert_eq!(parse(text), Ok(None), "{text}");
        }
        assert_eq!(parse(" []\n"), Ok(Some(vec![])));
    }

    #[test]
    fn every_step_of_the_contract_is_read() {
        let script = r#"[
            {"say":"a"}, {"say":"b","times":3,"every_ms":10}, {"think":"c"}, {"sleep_ms":5},
            {"tool":{"name":"Bash","input":{"command":"ls"},"output":"x","is_error":true}}, {"tool":{"name":"T"}},
            {"ask":{"tool":"Bash","input":{},"risk":"high"}}, {"question":{"prompt":"q","options":["y","n"]}},
            {"plan":[{"content":"p","status":"pending"}]}, {"usage":{"input_tokens":1,"cost_usd":0.5}},
            {"spawn":{"argv":["true"],"setsid":true}}, {"write":{"path":"f","content":"z"}}, {"read":"f"}, {"await_steer":7}, {"ignore_cancel":true},
            {"mcp":{"tool":"list"}},
            {"late":"l"}, {"config":true}, {"stop":"refused"}, {"suspend":true}, {"fail":"w"}, {"exit":3}]"#;
        let steps = parse(script).unwrap().unwrap();
        assert_eq!(steps.len(), 22);
        assert_eq!(steps[1], Step::Say { text: "b".to_owned(), times: 3, every: Duration::from_millis(10) });
        assert_eq!(
            steps[18..],
            [Step::Stop(StopReason::Refusal), Step::Suspend, Step::Fail("w".to_owned()), Step::Exit(3)]
        );
    }

    #[test]
    fn a_bad_step_is_named_by_its_position_and_what_is_wrong() {
        for (script, says) in [
            (r#"[{"say":"a"},{"sing":"b"}]"#, "step 2 of 2 (`sing`): there is no such step"),
            (r#"[{"say":"a","tmes":2}]"#, "step 1 of 1 (`say`): unknown field `tmes`"),
            (r#"[{"say":7}]"#, "step 1 of 1 (`say`): invalid type: integer `7`, expected a string"),
            (r#"[{"sleep_ms":-1}]"#, "step 1 of 1 (`sleep_ms`): invalid value: integer `-1`"),
            (r#"[{"tool":{}}]"#, "step 1 of 1 (`tool`): missing field `name`"),
            (r#"[{"think":"a","sleep_ms":1}]"#, "step 1 of 1: a step has exactly one name"),
            (r#"[{}]"#, "step 1 of 1: a step has exactly one name"),
            (r#"["a"]"#, "step 1 of 1: a step is an object"),
            (r#"[{"stop":"end_turn"}]"#, "step 1 of 1 (`stop`): unknown variant `end_turn`"),
            (r#"[{"config":false}]"#, "step 1 of 1 (`config`): takes only `true`"),
            (r#"[{"usage":{"cost_usd":-1}}]"#, "step 1 of 1 (`usage`): `cost_usd` is not negative"),
            (r#"[{"spawn":{"argv":[]}}]"#, "step 1 of 1 (`spawn`): `argv` names no program"),
        ] {
            let bad = parse(script).unwrap_err().to_string();
            assert!(bad.starts_with(says), "{bad}");
        }
        let long = format!(r#"[{{"question":{{"prompt":"{}"}}}}]"#, "x".repeat(INLINE_MAX));
        assert!(parse(&long).unwrap_err().to_string().contains("at most"));
    }
}
