//! Plays a prompt as a scene. It does what it is told, in the workspace and outside: it is an agent for tests.

use std::fmt::Display;
use std::path::Path;

use agent_client_protocol::Error;
use agent_client_protocol::v1::schema::StopReason;
use qd_protocol::limits::BODY_MAX;
use serde_json::Value;
use tokio::io::AsyncReadExt;

use super::scene::{Decided, Scene};
use super::steps::{self, Mcp, Step, Write};
use super::{Setup, spawn, tools};
use crate::drivers::acp::OURS;
use crate::drivers::echo;

/// The longest file that `read` says.
const READ_MAX: usize = BODY_MAX;

/// How a scene ended.
#[derive(Debug)]
pub(super) enum Ending {
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
    Exited(i32),
}

/// What is to be played: a prompt, from one of its steps on.
#[derive(Debug)]
pub(super) struct Part {
    pub(super) prompt: String,
    first: usize,
}

impl Part {
    /// A prompt, or the rest of the one that the conversation says was suspended.
    pub(super) fn of(prompt: String, messages: &[Value]) -> Self {
        let suspended = messages.iter().rev().find_map(|message| message.get(OURS)?.get("next")?.as_u64());
        let begun = messages.first().and_then(|message| message.get("content")?.as_str());
        match (suspended.and_then(|next| usize::try_from(next).ok()), begun) {
            (Some(first), Some(begun)) => Self { prompt: begun.to_owned(), first },
            _ => Self { prompt, first: 0 },
        }
    }

    /// Plays the steps if the prompt is a script, echoes it if not. A script with a bad step is not begun.
    pub(super) async fn play(&self, scene: &Scene, setup: &Setup) -> Ending {
        let steps = match steps::parse(&self.prompt) {
            Ok(steps) => steps,
            Err(bad) => return Ending::Failed { code: "invalid_script", message: bad.to_string() },
        };
        let played = async {
            match steps {
                Some(steps) => self.play_steps(scene, setup, steps).await,
                None => {
                    for word in echo::words(&self.prompt) {
                        scene.say(word).await?;
                    }
                    Ok(Ending::Stopped(StopReason::EndTurn))
                }
            }
        };
        tokio::select! {
            // A cancel that is there when the last step is done has won.
            biased;
            () = scene.cancelled() => Ending::Stopped(StopReason::Cancelled),
            ended = played => ended.unwrap_or_else(|broken| {
                Ending::Failed { code: "agent_error", message: broken.0 }
            }),
        }
    }

    async fn play_steps(&self, scene: &Scene, setup: &Setup, steps: Vec<Step>) -> Result<Ending, Broken> {
        for (at, step) in steps.into_iter().enumerate().skip(self.first) {
            // Unique in the session, since real agents' are.
            let call_id = format!("call_{}_{}", scene.session.turns(), at + 1);
            let next = at + 1;
            match perform(scene, setup, step, &call_id).await? {
                Then::Next => {}
                Then::Suspend => return Ok(Ending::Suspended { next }),
                Then::Stop(reason) => return Ok(Ending::Stopped(reason)),
                Then::Exit(status) => return Ok(Ending::Exited(status)),
            }
        }
        Ok(Ending::Stopped(StopReason::EndTurn))
    }
}

/// What follows a step.
enum Then {
    Next,
    Suspend,
    Stop(StopReason),
    Exit(i32),
}

/// Why a step could not be done.
#[derive(Debug)]
struct Broken(String);

impl From<Error> for Broken {
    fn from(error: Error) -> Self {
        Self(error.message)
    }
}

async fn perform(scene: &Scene, setup: &Setup, step: Step, call_id: &str) -> Result<Then, Broken> {
    let cwd = &scene.session.cwd;
    match step {
        Step::Say { text, times, every } => {
            for time in 0..times {
                if time > 0 && !every.is_zero() {
                    tokio::time::sleep(every).await;
                }
                scene.say(&text).await?;
            }
        }
        Step::Think(text) => scene.think(&text).await?,
        Step::Sleep(time) => tokio::time::sleep(time).await,
        Step::Tool(tool) => scene.tool(call_id, tool).await?,
        Step::Ask(ask) => return say_decided(scene, scene.ask(call_id, ask).await?).await,
        Step::Question(question) => return say_decided(scene, scene.question(question).await?).await,
        Step::Plan(entries) => scene.plan(entries).await?,
        Step::Usage(usage) => scene.report(scene.session.uses(&usage)).await?,
        Step::Spawn(what) => {
            let started = spawn::start(&setup.exe, cwd, &what).await;
            let pid = started.map_err(|cause| Broken(format!("cannot start {}: {cause}", what.argv[0])))?;
            scene.say(&format!("pid {pid}")).await?;
        }
        Step::Write(Write { path, content }) => write(&cwd.join(path), &content).await?,
        Step::Read(path) => scene.say(&read(&cwd.join(path)).await?).await?,
        Step::AwaitSteer(wait) => match tokio::time::timeout(wait, scene.steer()).await {
            Ok(text) => scene.say(&format!("steered: {}", text?)).await?,
            Err(_) => scene.say("no steer").await?,
        },
        Step::Mcp(Mcp { tool, arguments }) => {
            let told = tools::call(scene.session.servers.first(), &tool, &arguments).await;
            scene.say(&told.map_err(Broken)?).await?;
        }
        Step::IgnoreCancel => scene.ignore_cancel(),
        Step::Late(text) => scene.keep_for_later(text),
        Step::Config => scene.say(&config(scene)).await?,
        Step::Stop(reason) => return Ok(Then::Stop(reason)),
        Step::Suspend => return Ok(Then::Suspend),
        Step::Fail(message) => return Err(Broken(message)),
        Step::Exit(status) => return Ok(Then::Exit(status)),
    }
    Ok(Then::Next)
}

/// Nobody answers when a turn is stopped, so that it ends, unless it was told to pay no heed.
async fn say_decided(scene: &Scene, decided: Decided) -> Result<Then, Broken> {
    match decided {
        Decided::Yes(text) => scene.say(&text).await?,
        Decided::No(reason) => scene.say(&format!("denied: {reason}")).await?,
        Decided::Nobody if scene.ignores_cancel() => {}
        Decided::Nobody => return Ok(Then::Stop(StopReason::Cancelled)),
    }
    Ok(Then::Next)
}

async fn write(path: &Path, content: &str) -> Result<(), Broken> {
    let written = async {
        if let Some(folder) = path.parent() {
            tokio::fs::create_dir_all(folder).await?;
        }
        tokio::fs::write(path, content).await
    };
    written.await.map_err(|cause| Broken(format!("cannot write {}: {cause}", path.display())))
}

async fn read(path: &Path) -> Result<String, Broken> {
    let cannot = |why: &dyn Display| Broken(format!("cannot read {}: {why}", path.display()));
    let mut content = String::new();
    let file = tokio::fs::File::open(path).await.map_err(|cause| cannot(&cause))?;
    file.take(READ_MAX as u64 + 1).read_to_string(&mut content).await.map_err(|cause| cannot(&cause))?;
    if content.len() > READ_MAX {
        return Err(cannot(&format_args!("it is longer than {READ_MAX} bytes")));
    }
    Ok(content)
}

/// One line, however many the system prompt has.
fn config(scene: &Scene) -> String {
    let shown = |value: &Option<String>| value.as_deref().unwrap_or("-").replace('\n', "\\n");
    let session = &scene.session;
    format!(
        "cwd={} model={} system_prompt={}",
        session.cwd.display(),
        shown(&session.model),
        shown(&session.system_prompt)
    )
}
