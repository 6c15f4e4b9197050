//! Plays a prompt as a scene. It does what it is told, in the workspace and outside: it is an agent for tests.

use std::fmt::Display;
use std::path::Path;

use agent_client_protocol::Error;
use agent_client_protocol::v1::schema::StopReason;
use qd_protocol::limits::BODY_MAX;
use serde_json::Value;
use tokio::io::AsyncReadExt;

use super::steps::{self, ScriptFileWrite, ScriptMcpCall, ScriptStep};
use super::turn::{ScriptAskDecision, ScriptTurn};
use super::{ScriptSetup, mcp_client, spawn};
use crate::drivers::acp::META_KEY;
use crate::drivers::echo;

/// The longest file that `read` says.
const READ_MAX: usize = BODY_MAX;

/// How a scene ended.
#[derive(Debug)]
pub(super) enum ScriptTurnEnd {
    Stopped(StopReason),
    /// It waits for the sessions that it started, and goes on with this step.
    Suspended {
        next: usize,
    },
    Failed {
        code: &'static str,
        message: String,
    },
    /// The process is to die.
    ExitProcess(i32),
}

/// What is to be played: a prompt, from one of its steps on.
#[derive(Debug)]
pub(super) struct ScriptPrompt {
    pub(super) prompt: String,
    first_step: usize,
}

impl ScriptPrompt {
    /// A prompt, or the rest of the one that the conversation says was suspended.
    pub(super) fn from_prompt(prompt: String, messages: &[Value]) -> Self {
        let suspended =
            messages.iter().rev().find_map(|message| message.get(META_KEY)?.get("next")?.as_u64());
        let begun = messages.first().and_then(|message| message.get("content")?.as_str());
        match (suspended.and_then(|next| usize::try_from(next).ok()), begun) {
            (Some(first), Some(begun)) => Self { prompt: begun.to_owned(), first_step: first },
            _ => Self { prompt, first_step: 0 },
        }
    }

    /// Plays the steps if the prompt is a script, echoes it if not. A script with a bad step is not begun.
    pub(super) async fn run(&self, scene: &ScriptTurn, setup: &ScriptSetup) -> ScriptTurnEnd {
        let steps = match steps::parse_script(&self.prompt) {
            Ok(steps) => steps,
            Err(bad) => return ScriptTurnEnd::Failed { code: "invalid_script", message: bad.to_string() },
        };
        let played = async {
            match steps {
                Some(steps) => self.run_steps(scene, setup, steps).await,
                None => {
                    for word in echo::split_words(&self.prompt) {
                        scene.say(word).await?;
                    }
                    Ok(ScriptTurnEnd::Stopped(StopReason::EndTurn))
                }
            }
        };
        tokio::select! {
            // A cancel that is there when the last step is done has won.
            biased;
            () = scene.cancelled() => ScriptTurnEnd::Stopped(StopReason::Cancelled),
            ended = played => ended.unwrap_or_else(|broken| {
                ScriptTurnEnd::Failed { code: "agent_error", message: broken.0 }
            }),
        }
    }

    async fn run_steps(
        &self,
        scene: &ScriptTurn,
        setup: &ScriptSetup,
        steps: Vec<ScriptStep>,
    ) -> Result<ScriptTurnEnd, ScriptStepError> {
        for (at, step) in steps.into_iter().enumerate().skip(self.first_step) {
            // Unique in the session, since real agents' are.
            let call_id = format!("call_{}_{}", scene.session.turn_count(), at + 1);
            let next = at + 1;
            match run_step(scene, setup, step, &call_id).await? {
                ScriptStepResult::Next => {}
                ScriptStepResult::Suspend => return Ok(ScriptTurnEnd::Suspended { next }),
                ScriptStepResult::Stop(reason) => return Ok(ScriptTurnEnd::Stopped(reason)),
                ScriptStepResult::Exit(status) => return Ok(ScriptTurnEnd::ExitProcess(status)),
            }
        }
        Ok(ScriptTurnEnd::Stopped(StopReason::EndTurn))
    }
}

/// What follows a step.
enum ScriptStepResult {
    Next,
    Suspend,
    Stop(StopReason),
    Exit(i32),
}

/// Why a step could not be done.
#[derive(Debug)]
struct ScriptStepError(String);

impl From<Error> for ScriptStepError {
    fn from(error: Error) -> Self {
        Self(error.message)
    }
}

async fn run_step(
    scene: &ScriptTurn,
    setup: &ScriptSetup,
    step: ScriptStep,
    call_id: &str,
) -> Result<ScriptStepResult, ScriptStepError> {
    let cwd = &scene.session.cwd;
    match step {
        ScriptStep::Say { text, times, every } => {
            for time in 0..times {
                if time > 0 && !every.is_zero() {
                    tokio::time::sleep(every).await;
                }
                scene.say(&text).await?;
            }
        }
        ScriptStep::Think(text) => scene.think(&text).await?,
        ScriptStep::Sleep(time) => tokio::time::sleep(time).await,
        ScriptStep::Tool(tool) => scene.use_tool(call_id, tool).await?,
        ScriptStep::Ask(ask) => return say_decision(scene, scene.ask(call_id, ask).await?).await,
        ScriptStep::Question(question) => return say_decision(scene, scene.question(question).await?).await,
        ScriptStep::Plan(entries) => scene.send_plan(entries).await?,
        ScriptStep::Usage(usage) => scene.report_usage(scene.session.add_usage(&usage)).await?,
        ScriptStep::Spawn(what) => {
            let started = spawn::start_process(&setup.exe, cwd, &what).await;
            let pid = started
                .map_err(|cause| ScriptStepError(format!("cannot start {}: {cause}", what.argv[0])))?;
            scene.say(&format!("pid {pid}")).await?;
        }
        ScriptStep::Write(ScriptFileWrite { path, content }) => write_file(&cwd.join(path), &content).await?,
        ScriptStep::Read(path) => scene.say(&read_file(&cwd.join(path)).await?).await?,
        ScriptStep::AwaitSteer(wait) => match tokio::time::timeout(wait, scene.next_steer()).await {
            Ok(text) => scene.say(&format!("steered: {}", text?)).await?,
            Err(_) => scene.say("no steer").await?,
        },
        ScriptStep::Mcp(ScriptMcpCall { tool, arguments }) => {
            let told = mcp_client::call_tool(scene.session.servers.first(), &tool, &arguments).await;
            scene.say(&told.map_err(ScriptStepError)?).await?;
        }
        ScriptStep::IgnoreCancel => scene.ignore_cancel(),
        ScriptStep::SayLate(text) => scene.queue_late_text(text),
        ScriptStep::Config => scene.say(&config_line(scene)).await?,
        ScriptStep::Stop(reason) => return Ok(ScriptStepResult::Stop(reason)),
        ScriptStep::Suspend => return Ok(ScriptStepResult::Suspend),
        ScriptStep::Fail(message) => return Err(ScriptStepError(message)),
        ScriptStep::Exit(status) => return Ok(ScriptStepResult::Exit(status)),
    }
    Ok(ScriptStepResult::Next)
}

/// Nobody answers when a turn is stopped, so that it ends, unless it was told to pay no heed.
async fn say_decision(
    scene: &ScriptTurn,
    decided: ScriptAskDecision,
) -> Result<ScriptStepResult, ScriptStepError> {
    match decided {
        ScriptAskDecision::Yes(text) => scene.say(&text).await?,
        ScriptAskDecision::No(reason) => scene.say(&format!("denied: {reason}")).await?,
        ScriptAskDecision::Unanswered if scene.ignores_cancel() => {}
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
    let cannot = |why: &dyn Display| ScriptStepError(format!("cannot read {}: {why}", path.display()));
    let mut content = String::new();
    let file = tokio::fs::File::open(path).await.map_err(|cause| cannot(&cause))?;
    file.take(READ_MAX as u64 + 1).read_to_string(&mut content).await.map_err(|cause| cannot(&cause))?;
    if content.len() > READ_MAX {
        return Err(cannot(&format_args!("it is longer than {READ_MAX} bytes")));
    }
    Ok(content)
}

/// One line, however many the system prompt has.
fn config_line(scene: &ScriptTurn) -> String {
    let shown = |value: &Option<String>| value.as_deref().unwrap_or("-").replace('\n', "\\n");
    let session = &scene.session;
    format!(
        "cwd={} model={} system_prompt={}",
        session.cwd.display(),
        shown(&session.model),
        shown(&session.system_prompt)
    )
}
