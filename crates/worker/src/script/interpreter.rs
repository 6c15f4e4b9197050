//! Plays the steps of a script in one turn. It does what it is told, in the workspace and outside: it is an agent for
//! tests. It knows its turn and the file system, and neither link nor session.

use std::path::Path;

use qd_link::Closed;
use qd_protocol::AskId;
use qd_protocol::event::{AskKind, Decision, RunError};
use qd_protocol::limits::{BODY_MAX, INLINE_MAX};
use qd_protocol::link::{AskRequest, Said, Stop};
use qd_protocol::text::{escaped_len, head};
use serde_json::Value;
use tokio::io::AsyncReadExt;

use super::steps::{Ask, Question, Step, Tool, Write};
use crate::turn::{End, Turn, error, failed, outcome, whole};

/// Room for the note behind an output that was cut.
const NOTE_MAX: usize = 64;
/// The longest file that `read` says.
const READ_MAX: usize = BODY_MAX;
/// Random bytes in the id of an ask, five bits of each of which count.
const ASK_RANDOM: usize = 26;

/// Does the steps in order. A turn that is stopped from outside is dropped at whatever it waits for.
pub(crate) async fn play(turn: &Turn<'_>, steps: Vec<Step>) -> Result<End, Closed> {
    let mut calls = 0;
    for step in steps {
        match perform(turn, step, &mut calls).await {
            Ok(None) => {}
            Ok(Some(end)) => return Ok(end),
            Err(Broken::Failed(error)) => return Ok(End::Stopped(failed(error))),
            Err(Broken::Closed(closed)) => return Err(closed),
        }
    }
    Ok(End::Stopped(outcome(Stop::EndTurn)))
}

/// Why a step could not be done.
#[derive(Debug, thiserror::Error)]
enum Broken {
    #[error(transparent)]
    Closed(#[from] Closed),
    #[error("{}", .0.message)]
    Failed(RunError),
}

impl From<RunError> for Broken {
    fn from(error: RunError) -> Self {
        Self::Failed(error)
    }
}

/// Does one step; gives the end of the turn if it is one.
async fn perform(turn: &Turn<'_>, step: Step, calls: &mut u32) -> Result<Option<End>, Broken> {
    match step {
        Step::Say { text, times, every } => {
            for time in 0..times {
                if time > 0 && !every.is_zero() {
                    tokio::time::sleep(every).await;
                }
                turn.say(text.as_str()).await?;
            }
        }
        Step::Think(text) => turn.tell(Said::Thought { text }).await?,
        Step::Sleep(time) => tokio::time::sleep(time).await,
        Step::Tool(tool) => {
            *calls += 1;
            use_tool(turn, format!("{}.{calls}", turn.run), tool).await?;
        }
        Step::Ask(ask) => return permission(turn, ask).await,
        Step::Question(question) => return ask_question(turn, question).await,
        Step::Plan(entries) => turn.tell(Said::Plan { entries }).await?,
        Step::Usage(usage) => turn.tell(Said::Usage { usage }).await?,
        Step::Write(Write { path, content }) => write(&turn.spec.cwd.join(path), content).await?,
        Step::Read(path) => turn.say(read(&turn.spec.cwd.join(path)).await?).await?,
        Step::AwaitSteer(wait) => match turn.steer(wait).await? {
            Some(steer) => {
                let text = whole(&turn.spec.blobs, steer.text, steer.blob.as_ref()).await?;
                turn.say(format!("steered: {text}")).await?;
            }
            None => turn.say("no steer").await?,
        },
        Step::IgnoreCancel => turn.ignore_cancel(),
        Step::Late(text) => turn.say_late(text),
        Step::Config => turn.say(config(turn)).await?,
        Step::Stop(stop) => return Ok(Some(End::Stopped(outcome(stop)))),
        Step::Fail(message) => return Err(error("agent_error", &message).into()),
        Step::Exit(status) => return Ok(Some(End::Exited(status))),
    }
    Ok(None)
}

async fn use_tool(turn: &Turn<'_>, call_id: String, tool: Tool) -> Result<(), Closed> {
    let Tool { name, input, output, is_error } = tool;
    turn.tell(Said::ToolStarted { call_id: call_id.clone(), name: name.clone(), input: bounded(input) })
        .await?;
    let output = bounded(output);
    if let Value::String(text) = &output {
        turn.tell(Said::ToolOutput { call_id: call_id.clone(), text: text.clone() }).await?;
    }
    turn.tell(Said::ToolFinished { call_id, name, output, is_error }).await
}

async fn permission(turn: &Turn<'_>, ask: Ask) -> Result<Option<End>, Broken> {
    let Ask { tool, input, risk } = ask;
    let request = AskRequest {
        id: ask_id()?,
        kind: AskKind::Permission,
        prompt: format!("May the agent use {tool}?"),
        tool: Some(tool),
        input,
        risk,
        options: Vec::new(),
    };
    let Some(answer) = turn.ask(request).await? else { return Ok(unanswered(turn)) };
    match answer.decision {
        Some(Decision::AllowOnce | Decision::AllowAlways) => turn.say("allowed").await?,
        Some(Decision::Deny) | None => {
            let reason = answer.reason.as_deref().unwrap_or("no reason given");
            turn.say(format!("denied: {reason}")).await?;
        }
    }
    Ok(None)
}

async fn ask_question(turn: &Turn<'_>, question: Question) -> Result<Option<End>, Broken> {
    let Question { prompt, options } = question;
    let request = AskRequest {
        id: ask_id()?,
        kind: AskKind::Question,
        tool: None,
        input: Value::Null,
        risk: None,
        prompt,
        options,
    };
    let Some(answer) = turn.ask(request).await? else { return Ok(unanswered(turn)) };
    turn.say(answer.value.unwrap_or_default()).await?;
    Ok(None)
}

/// An ask is withdrawn when its run is stopped, so the turn ends, unless it was told to pay no heed.
fn unanswered(turn: &Turn<'_>) -> Option<End> {
    (!turn.ignores_cancel()).then(|| End::Stopped(outcome(Stop::Cancelled)))
}

fn ask_id() -> Result<AskId, RunError> {
    let mut random = [0; ASK_RANDOM];
    getrandom::fill(&mut random)
        .map_err(|cause| error("agent_error", &format!("the system gives no random numbers: {cause}")))?;
    Ok(AskId::from_random(&random))
}

async fn write(path: &Path, content: String) -> Result<(), RunError> {
    let written = async {
        if let Some(folder) = path.parent() {
            tokio::fs::create_dir_all(folder).await?;
        }
        tokio::fs::write(path, content).await
    };
    written.await.map_err(|cause| error("agent_error", &format!("cannot write {}: {cause}", path.display())))
}

async fn read(path: &Path) -> Result<String, RunError> {
    let cannot =
        |why: &dyn std::fmt::Display| error("agent_error", &format!("cannot read {}: {why}", path.display()));
    let mut content = String::new();
    let file = tokio::fs::File::open(path).await.map_err(|cause| cannot(&cause))?;
    file.take(READ_MAX as u64 + 1).read_to_string(&mut content).await.map_err(|cause| cannot(&cause))?;
    if content.len() > READ_MAX {
        return Err(cannot(&format_args!("it is longer than {READ_MAX} bytes")));
    }
    Ok(content)
}

/// One line, however many the system prompt has.
fn config(turn: &Turn<'_>) -> String {
    let shown = |value: &Option<String>| value.as_deref().unwrap_or("-").replace('\n', "\\n");
    let spec = turn.spec;
    format!(
        "cwd={} model={} system_prompt={}",
        spec.cwd.display(),
        shown(&spec.model),
        shown(&spec.system_prompt)
    )
}

/// The value if it fits an event, else as much of its text as does and a note of its size.
fn bounded(value: Value) -> Value {
    match value {
        Value::String(text) if escaped_len(&text) <= INLINE_MAX => Value::String(text),
        Value::String(text) => Value::String(cut(&text)),
        other => {
            let json = other.to_string();
            if json.len() <= INLINE_MAX { other } else { Value::String(cut(&json)) }
        }
    }
}

fn cut(text: &str) -> String {
    format!("{}\n[cut: {} bytes in all]", head(text, INLINE_MAX - NOTE_MAX), text.len())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn an_output_that_does_not_fit_is_cut_with_a_note_of_its_size() {
        assert_eq!(bounded(json!({"a": 1})), json!({"a": 1}));
        for large in [json!("\"".repeat(INLINE_MAX)), json!(["ä".repeat(INLINE_MAX)])] {
            let Value::String(text) = bounded(large) else { panic!("it became text") };
            assert!(escaped_len(&text) <= INLINE_MAX);
            assert!(text.ends_with(" bytes in all]"), "{}", &text[text.len() - 40..]);
        }
    }
}
