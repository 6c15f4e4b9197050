//! Runs a prompt as a script. It does what it is told, inside and outside the workspace: it is an agent for tests.

use std::fmt::Display;
use std::path::Path;
use std::time::Duration;

use agent_client_protocol::Error;
use agent_client_protocol::v1::schema::StopReason;
use futures_util::future::try_join_all;
use qd_protocol::limits::BODY_MAX;
use qd_protocol::text::split_words;
use qd_protocol::worker::META_KEY;
use serde_json::Value;
use tokio::io::AsyncReadExt;

use super::steps::{self, ScriptAsk, ScriptFileWrite, ScriptMcpCall, ScriptMode, ScriptStep};
use super::turn::{ScriptAskDecision, ScriptTurn};
use super::{ScriptSetup, mcp_client, spawn};

/// The longest file that a `read` step sends, in bytes.
const READ_MAX: usize = BODY_MAX;

/// How a turn ended.
#[derive(Debug)]
pub(super) enum ScriptTurnEnd {
    Stopped(StopReason),
    /// The turn waits for the sessions that it started, and continues with this step.
    Suspended {
        next: usize,
    },
    Failed {
        code: &'static str,
        message: String,
    },
    /// The process exits with this status.
    ExitProcess(i32),
}

/// A prompt, and the step to begin with.
#[derive(Debug)]
pub(super) struct ScriptPrompt {
    pub(super) prompt: String,
    first_step: usize,
}

impl ScriptPrompt {
    /// A new prompt, or the rest of the prompt that was suspended according to the messages.
    pub(super) fn from_prompt(prompt: String, messages: &[Value]) -> Self {
        let suspended =
            messages.iter().rev().find_map(|message| message.get(META_KEY)?.get("next")?.as_u64());
        let original = messages.first().and_then(|message| message.get("content")?.as_str());
        match (suspended.and_then(|next| usize::try_from(next).ok()), original) {
            (Some(first_step), Some(original)) => Self { prompt: original.to_owned(), first_step },
            _ => Self { prompt, first_step: 0 },
        }
    }

    /// Runs the steps if the prompt is a script, echoes it if not. A script with an invalid step is not started at all.
    pub(super) async fn run(&self, turn: &ScriptTurn, setup: &ScriptSetup) -> ScriptTurnEnd {
        let steps = match steps::parse_script(&self.prompt) {
            Ok(steps) => steps,
            Err(error) => {
                return ScriptTurnEnd::Failed { code: "invalid_script", message: error.to_string() };
            }
        };
        let script = async {
            match steps {
                Some(steps) => self.run_steps(turn, setup, steps).await,
                None => {
                    for word in split_words(&self.prompt) {
                        turn.say(word).await?;
                    }
                    Ok(ScriptTurnEnd::Stopped(StopReason::EndTurn))
                }
            }
        };
        tokio::select! {
            // A cancel that has arrived when the last step is done takes precedence.
            biased;
            () = turn.cancelled() => ScriptTurnEnd::Stopped(StopReason::Cancelled),
            ended = script => ended.unwrap_or_else(|error| {
                ScriptTurnEnd::Failed { code: "agent_error", message: error.0 }
            }),
        }
    }

    async fn run_steps(
        &self,
        turn: &ScriptTurn,
        setup: &ScriptSetup,
        steps: Vec<ScriptStep>,
    ) -> Result<ScriptTurnEnd, ScriptStepError> {
        for (at, step) in steps.into_iter().enumerate().skip(self.first_step) {
            // Unique in the session, as the call ids of real agents are.
            let call_id = format!("call_{}_{}", turn.session.turn_count(), at + 1);
            let next = at + 1;
            match run_step(turn, setup, step, &call_id).await? {
                ScriptStepResult::Next => {}
                ScriptStepResult::Suspend => return Ok(ScriptTurnEnd::Suspended { next }),
                ScriptStepResult::Stop(reason) => return Ok(ScriptTurnEnd::Stopped(reason)),
                ScriptStepResult::Exit(status) => return Ok(ScriptTurnEnd::ExitProcess(status)),
            }
        }
        Ok(ScriptTurnEnd::Stopped(StopReason::EndTurn))
    }
}

enum ScriptStepResult {
    Next,
    Suspend,
    Stop(StopReason),
    Exit(i32),
}

#[derive(Debug)]
struct ScriptStepError(String);

impl From<Error> for ScriptStepError {
    fn from(error: Error) -> Self {
        Self(error.message)
    }
}

async fn run_step(
    turn: &ScriptTurn,
    setup: &ScriptSetup,
    step: ScriptStep,
    call_id: &str,
) -> Result<ScriptStepResult, ScriptStepError> {
    let cwd = &turn.session.cwd;
    match step {
        ScriptStep::Say { text, times, every } => {
            for time in 0..times {
                if time > 0 && !every.is_zero() {
                    tokio::time::sleep(every).await;
                }
                turn.say(&text).await?;
            }
        }
        ScriptStep::Think(text) => turn.think(&text).await?,
        // Even a sleep of nothing goes through the timer, which ticks once a millisecond.
        ScriptStep::Sleep(Duration::ZERO) => {}
        ScriptStep::Sleep(time) => tokio::time::sleep(time).await,
        ScriptStep::Tool(tool) => turn.use_tool(call_id, tool).await?,
        ScriptStep::Ask(ask) if ask.times == 1 => {
            return say_decision(turn, turn.ask(call_id, ask).await?).await;
        }
        ScriptStep::Ask(ask) => ask_at_once(turn, call_id, &ask).await?,
        ScriptStep::Question(question) => return say_decision(turn, turn.question(question).await?).await,
        ScriptStep::Plan(entries) => turn.send_plan(entries).await?,
        ScriptStep::Mode(mode) => turn.switch_mode(mode).await?,
        ScriptStep::Usage(usage) => turn.report_usage(turn.session.add_usage(&usage)).await?,
        ScriptStep::Spawn(process) => {
            let started = spawn::start_process(&setup.exe, cwd, &process).await;
            let pid = started
                .map_err(|cause| ScriptStepError(format!("cannot start {}: {cause}", process.argv[0])))?;
            turn.say(&format!("pid {}", turn.host_pid(pid).await)).await?;
        }
        ScriptStep::Write(ScriptFileWrite { path, content }) => write_file(&cwd.join(path), &content).await?,
        ScriptStep::Read(path) => turn.say(&read_file(&cwd.join(path)).await?).await?,
        ScriptStep::AwaitSteer(wait) => match tokio::time::timeout(wait, turn.next_steer()).await {
            Ok(text) => turn.say(&format!("steered: {}", text?)).await?,
            Err(_) => turn.say("no steer").await?,
        },
        ScriptStep::Mcp(ScriptMcpCall { tool, arguments }) => {
            let result = mcp_client::call_tool(turn.session.servers.first(), &tool, &arguments).await;
            turn.say(&result.map_err(ScriptStepError)?).await?;
        }
        ScriptStep::IgnoreCancel => turn.ignore_cancel(),
        ScriptStep::SayLate(text) => turn.queue_late_text(text),
        ScriptStep::Config => turn.say(&config_line(turn)).await?,
        ScriptStep::Stop(reason) => return Ok(ScriptStepResult::Stop(reason)),
        ScriptStep::Suspend => return Ok(ScriptStepResult::Suspend),
        ScriptStep::Fail(message) => return Err(ScriptStepError(message)),
        ScriptStep::Exit(status) => return Ok(ScriptStepResult::Exit(status)),
    }
    Ok(ScriptStepResult::Next)
}

/// Makes all requests of an ask at once, and says how they were answered.
async fn ask_at_once(turn: &ScriptTurn, call_id: &str, ask: &ScriptAsk) -> Result<(), ScriptStepError> {
    let ids: Vec<String> = (1..=ask.times).map(|number| format!("{call_id}_{number}")).collect();
    let asked = try_join_all(ids.iter().map(|id| turn.ask(id, ask.clone()))).await?;
    let count = |is_such: fn(&ScriptAskDecision) -> bool| asked.iter().filter(|asked| is_such(asked)).count();
    let allowed = count(|decision| matches!(decision, ScriptAskDecision::Yes(_)));
    let denied = count(|decision| matches!(decision, ScriptAskDecision::No(_)));
    Ok(turn.say(&format!("{allowed} allowed, {denied} denied")).await?)
}

/// Reports the decision on an ask. An ask without an answer means that the turn is cancelled, so the turn stops unless
/// it ignores cancels.
async fn say_decision(
    turn: &ScriptTurn,
    decision: ScriptAskDecision,
) -> Result<ScriptStepResult, ScriptStepError> {
    match decision {
        ScriptAskDecision::Yes(text) => turn.say(&text).await?,
        ScriptAskDecision::No(reason) => turn.say(&format!("denied: {reason}")).await?,
        ScriptAskDecision::Unanswered if turn.ignores_cancel() => {}
        ScriptAskDecision::Unanswered => return Ok(ScriptStepResult::Stop(StopReason::Cancelled)),
    }
    Ok(ScriptStepResult::Next)
}

async fn write_file(path: &Path, content: &str) -> Result<(), ScriptStepError> {
    let written = async {
        if let Some(folder) = path.parent() {
            tokio::fs::create_dir_all(folder).await?;
        }
        tokio::fs::write(path, content).await
    };
    written.await.map_err(|cause| ScriptStepError(format!("cannot write {}: {cause}", path.display())))
}

async fn read_file(path: &Path) -> Result<String, ScriptStepError> {
    let cannot = |reason: &dyn Display| ScriptStepError(format!("cannot read {}: {reason}", path.display()));
    let mut content = String::new();
    let file = tokio::fs::File::open(path).await.map_err(|cause| cannot(&cause))?;
    file.take(READ_MAX as u64 + 1).read_to_string(&mut content).await.map_err(|cause| cannot(&cause))?;
    if content.len() > READ_MAX {
        return Err(cannot(&format_args!("it is longer than {READ_MAX} bytes")));
    }
    Ok(content)
}

/// The session's settings in one line, even if the system prompt has several.
fn config_line(turn: &ScriptTurn) -> String {
    let shown = |value: &Option<String>| value.as_deref().unwrap_or("-").replace('\n', "\\n");
    let session = &turn.session;
    let mode = match session.mode() {
        ScriptMode::Default => String::new(),
        mode => format!(" mode={}", mode.name()),
    };
    format!(
        "cwd={} model={} system_prompt={}{mode}",
        session.cwd.display(),
        shown(&session.model),
        shown(&session.system_prompt)
    )
}
