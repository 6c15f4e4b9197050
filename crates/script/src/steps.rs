//! The steps of a script, parsed from a prompt. All of them are validated before the first one runs; nothing runs here.

use std::path::PathBuf;
use std::time::Duration;

use agent_client_protocol::v1::schema::StopReason;
use qd_protocol::event::{PlanEntry, TokenUsage};
use qd_protocol::limits::{HEAD_MAX, INLINE_MAX};
use qd_protocol::policy::Risk;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

/// One step of a script.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum ScriptStep {
    Say {
        text: String,
        times: u64,
        every: Duration,
    },
    Think(String),
    Sleep(Duration),
    Tool(ScriptToolCall),
    Ask(ScriptAsk),
    Question(ScriptQuestion),
    Plan(Vec<PlanEntry>),
    /// Switches the agent's mode, without being asked to.
    Mode(ScriptMode),
    Usage(TokenUsage),
    Spawn(ScriptSpawn),
    Write(ScriptFileWrite),
    Read(PathBuf),
    AwaitSteer(Duration),
    Mcp(ScriptMcpCall),
    IgnoreCancel,
    SayLate(String),
    Config,
    Stop(StopReason),
    Suspend,
    Fail(String),
    Exit(i32),
}

/// The modes of the agent. They change nothing but what it reports.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum ScriptMode {
    #[default]
    Default,
    Plan,
    /// A mode that no session may be in.
    Yolo,
}

impl ScriptMode {
    pub(crate) const ALL: [Self; 3] = [Self::Default, Self::Plan, Self::Yolo];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Default => "default",
            Self::Plan => "plan",
            Self::Yolo => "yolo",
        }
    }
}

/// `{"tool": …}`.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ScriptToolCall {
    pub(crate) name: String,
    #[serde(default = "empty_object")]
    pub(crate) input: Value,
    #[serde(default)]
    pub(crate) output: Value,
    #[serde(default)]
    pub(crate) is_error: bool,
}

/// `{"ask": …}`.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ScriptAsk {
    pub(crate) tool: String,
    #[serde(default = "empty_object")]
    pub(crate) input: Value,
    #[serde(default)]
    pub(crate) risk: Option<Risk>,
    /// How many times it is asked at once. More than once, only the answers are counted.
    #[serde(default = "once")]
    pub(crate) times: usize,
}

/// `{"question": …}`.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ScriptQuestion {
    pub(crate) prompt: String,
    #[serde(default)]
    pub(crate) options: Vec<String>,
}

/// `{"spawn": …}`.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ScriptSpawn {
    pub(crate) argv: Vec<String>,
    #[serde(default)]
    pub(crate) setsid: bool,
    #[serde(default)]
    pub(crate) double_fork: bool,
}

/// `{"mcp": …}`: a call of a tool of an MCP server that the agent was given.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ScriptMcpCall {
    pub(crate) tool: String,
    #[serde(default = "empty_object")]
    pub(crate) arguments: Value,
}

/// `{"write": …}`.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ScriptFileWrite {
    pub(crate) path: PathBuf,
    pub(crate) content: String,
}

/// A script that cannot be run: the step, and what is wrong with it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("step {position} of {steps}{}: {reason}", .name.as_ref().map(|name| format!(" (`{name}`)")).unwrap_or_default())]
pub(crate) struct ScriptParseError {
    position: usize,
    steps: usize,
    name: Option<String>,
    reason: String,
}

/// Parses a script; `None` if the prompt is not a JSON array and therefore an ordinary prompt.
pub(crate) fn parse_script(prompt: &str) -> Result<Option<Vec<ScriptStep>>, ScriptParseError> {
    if !prompt.trim_start().starts_with('[') {
        return Ok(None);
    }
    let Ok(steps) = serde_json::from_str::<Vec<Value>>(prompt) else { return Ok(None) };
    let count = steps.len();
    let read = |(at, value)| {
        parse_step(value).map_err(|(name, reason)| ScriptParseError {
            position: at + 1,
            steps: count,
            name,
            reason,
        })
    };
    steps.into_iter().enumerate().map(read).collect::<Result<_, _>>().map(Some)
}

/// What is wrong with a step, with its name if it has one.
type ScriptStepProblem = (Option<String>, String);

fn parse_step(value: Value) -> Result<ScriptStep, ScriptStepProblem> {
    let Value::Object(mut fields) = value else {
        return Err((None, "a step is an object such as {\"say\": \"hello\"}".to_owned()));
    };
    if let Some(text) = fields.remove("say") {
        return parse_say(text, fields).map_err(|reason| (Some("say".to_owned()), reason));
    }
    let mut fields = fields.into_iter();
    let (Some((name, value)), None) = (fields.next(), fields.next()) else {
        return Err((None, "a step has exactly one name".to_owned()));
    };
    parse_named(&name, value).map_err(|reason| (Some(name), reason))
}

/// Parses the only step with more than one field.
fn parse_say(text: Value, rest: Map<String, Value>) -> Result<ScriptStep, String> {
    #[derive(Deserialize)]
    #[serde(deny_unknown_fields)]
    struct ScriptSayOptions {
        times: Option<u64>,
        every_ms: Option<u64>,
    }
    let ScriptSayOptions { times, every_ms } = parse_args(Value::Object(rest))?;
    Ok(ScriptStep::Say {
        text: parse_args(text)?,
        times: times.unwrap_or(1),
        every: Duration::from_millis(every_ms.unwrap_or_default()),
    })
}

fn parse_named(name: &str, value: Value) -> Result<ScriptStep, String> {
    Ok(match name {
        "think" => ScriptStep::Think(parse_args(value)?),
        "sleep_ms" => ScriptStep::Sleep(Duration::from_millis(parse_args(value)?)),
        "tool" => {
            let tool: ScriptToolCall = parse_args(value)?;
            require_size(tool.name.len(), HEAD_MAX)?;
            ScriptStep::Tool(tool)
        }
        "ask" => ScriptStep::Ask(parse_args(require_event_size(value)?)?),
        "question" => ScriptStep::Question(parse_args(require_event_size(value)?)?),
        "plan" => ScriptStep::Plan(parse_plan(require_event_size(value)?)?),
        "mode" => ScriptStep::Mode(parse_args(value)?),
        "usage" => ScriptStep::Usage(parse_usage(value)?),
        "write" => ScriptStep::Write(parse_args(value)?),
        "read" => ScriptStep::Read(parse_args(value)?),
        "await_steer" => ScriptStep::AwaitSteer(Duration::from_millis(parse_args(value)?)),
        "mcp" => ScriptStep::Mcp(parse_args(value)?),
        "ignore_cancel" => require_true(&value).map(|()| ScriptStep::IgnoreCancel)?,
        "late" => ScriptStep::SayLate(parse_args(value)?),
        "config" => require_true(&value).map(|()| ScriptStep::Config)?,
        "stop" => ScriptStep::Stop(parse_stop(value)?),
        "suspend" => require_true(&value).map(|()| ScriptStep::Suspend)?,
        "fail" => ScriptStep::Fail(parse_args(value)?),
        "exit" => ScriptStep::Exit(parse_args(value)?),
        "spawn" => ScriptStep::Spawn(parse_spawn(value)?),
        _ => return Err("there is no such step".to_owned()),
    })
}

fn parse_plan(value: Value) -> Result<Vec<PlanEntry>, String> {
    #[derive(Deserialize)]
    #[serde(deny_unknown_fields)]
    struct ScriptPlanEntry {
        content: String,
        #[serde(default)]
        status: String,
    }
    let entries: Vec<ScriptPlanEntry> = parse_args(value)?;
    Ok(entries.into_iter().map(|ScriptPlanEntry { content, status }| PlanEntry { content, status }).collect())
}

fn parse_usage(value: Value) -> Result<TokenUsage, String> {
    #[derive(Deserialize)]
    #[serde(deny_unknown_fields)]
    struct ScriptUsage {
        #[serde(default)]
        input_tokens: u64,
        #[serde(default)]
        output_tokens: u64,
        #[serde(default)]
        cost_usd: f64,
    }
    let ScriptUsage { input_tokens, output_tokens, cost_usd } = parse_args(value)?;
    if cost_usd < 0.0 {
        return Err("`cost_usd` is not negative".to_owned());
    }
    Ok(TokenUsage { input_tokens, output_tokens, cost_usd })
}

fn parse_spawn(value: Value) -> Result<ScriptSpawn, String> {
    let spawn: ScriptSpawn = parse_args(value)?;
    if spawn.argv.is_empty() {
        return Err("`argv` names no program".to_owned());
    }
    Ok(spawn)
}

/// A script can stop only for these reasons; the others have steps of their own.
fn parse_stop(value: Value) -> Result<StopReason, String> {
    #[derive(Deserialize)]
    #[serde(rename_all = "snake_case")]
    enum ScriptStopReason {
        MaxTokens,
        MaxTurns,
        Refused,
    }
    Ok(match parse_args(value)? {
        ScriptStopReason::MaxTokens => StopReason::MaxTokens,
        ScriptStopReason::MaxTurns => StopReason::MaxTurnRequests,
        ScriptStopReason::Refused => StopReason::Refusal,
    })
}

fn parse_args<T: DeserializeOwned>(value: Value) -> Result<T, String> {
    serde_json::from_value(value).map_err(|error| error.to_string())
}

fn require_true(value: &Value) -> Result<(), String> {
    if *value == Value::Bool(true) { Ok(()) } else { Err("takes only `true`".to_owned()) }
}

/// Requires that a value fits into one event. Text that is streamed and output that can be cut need not fit.
fn require_event_size(value: Value) -> Result<Value, String> {
    require_size(value.to_string().len(), INLINE_MAX)?;
    Ok(value)
}

fn require_size(size: usize, limit: usize) -> Result<(), String> {
    if size <= limit { Ok(()) } else { Err(format!("is {size} bytes long; at most {limit} fit")) }
}

fn once() -> usize {
    1
}

fn empty_object() -> Value {
    Value::Object(Map::new())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_json_array_is_a_script() {
        for text in ["hello", "{\"say\":\"x\"}", "[1, 2", "\"[]\"", "", "[] and more"] {
            assert_eq!(parse_script(text), Ok(None), "{text}");
        }
        assert_eq!(parse_script(" []\n"), Ok(Some(vec![])));
    }

    #[test]
    fn every_step_of_the_contract_is_read() {
        let script = r#"[
            {"say":"a"}, {"say":"b","times":3,"every_ms":10}, {"think":"c"}, {"sleep_ms":5},
            {"tool":{"name":"Bash","input":{"command":"ls"},"output":"x","is_error":true}}, {"tool":{"name":"T"}},
            {"ask":{"tool":"Bash","input":{},"risk":"high"}}, {"ask":{"tool":"Bash","times":300}}, {"question":{"prompt":"q","options":["y","n"]}},
            {"plan":[{"content":"p","status":"pending"}]}, {"usage":{"input_tokens":1,"cost_usd":0.5}},
            {"spawn":{"argv":["true"],"setsid":true}}, {"write":{"path":"f","content":"z"}}, {"read":"f"}, {"await_steer":7}, {"ignore_cancel":true},
            {"mcp":{"tool":"list"}}, {"mode":"plan"},
            {"late":"l"}, {"config":true}, {"stop":"refused"}, {"suspend":true}, {"fail":"w"}, {"exit":3}]"#;
        let steps = parse_script(script).unwrap().unwrap();
        assert_eq!(steps.len(), 24);
        assert_eq!(
            steps[1],
            ScriptStep::Say { text: "b".to_owned(), times: 3, every: Duration::from_millis(10) }
        );
        assert_eq!(
            steps[20..],
            [
                ScriptStep::Stop(StopReason::Refusal),
                ScriptStep::Suspend,
                ScriptStep::Fail("w".to_owned()),
                ScriptStep::Exit(3)
            ]
        );
    }

    #[test]
    fn a_bad_step_is_named_by_its_position_and_what_is_wrong() {
        for (script, expected) in [
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
            let error = parse_script(script).unwrap_err().to_string();
            assert!(error.starts_with(expected), "{error}");
        }
        let long = format!(r#"[{{"question":{{"prompt":"{}"}}}}]"#, "x".repeat(INLINE_MAX));
        assert!(parse_script(&long).unwrap_err().to_string().contains("at most"));
    }
}
