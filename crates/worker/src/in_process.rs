//! The built-in agents inside the daemon's own process, each in a task that owns it from ready to gone. The task takes
//! commands while a turn runs, so that a cancel, a steer, an answer or a kill reaches it at once.

use std::collections::BTreeMap;
use std::time::Duration;

use qd_link::{AgentEnd, AgentSpec, Closed, Launcher, SessionEnd, host};
use qd_protocol::RunId;
use qd_protocol::api::Agent;
use qd_protocol::event::RunError;
use qd_protocol::limits::START_S;
use qd_protocol::link::{Down, Gone, Outcome, Said, Stop, Up};
use qd_protocol::text::Blob;

use crate::drivers::echo;
use crate::script;
use crate::turn::{End, Inbox, Steer, Turn, error, failed, outcome, whole};

/// Starts the built-in agents in tasks of this process.
#[derive(Debug, Clone, Copy, Default)]
pub struct InProcess;

impl Launcher for InProcess {
    fn agents(&self) -> Vec<Agent> {
        vec![Builtin::Echo.describe(), Builtin::Script.describe()]
    }

    fn launch(&self, spec: AgentSpec) -> SessionEnd {
        match Builtin::named(&spec.agent) {
            // Boxed, since an idle agent should not carry it twice.
            Some(builtin) => host(spec.after, |end| live(builtin, Box::new(spec), end)),
            None => {
                let message = format!("there is no built-in agent `{}`", spec.agent);
                host(spec.after, |_| async move { Gone::Failed(error("unknown_agent", &message)) })
            }
        }
    }
}

#[derive(Debug, Clone, Copy)]
enum Builtin {
    Echo,
    Script,
}

impl Builtin {
    fn named(name: &str) -> Option<Self> {
        match name {
            "echo" => Some(Self::Echo),
            "script" => Some(Self::Script),
            _ => None,
        }
    }

    fn describe(self) -> Agent {
        let (name, description, settings) = match self {
            Self::Echo => ("echo", "Says the prompt again, word by word.", vec![]),
            Self::Script => {
                ("script", "Does the steps that its prompt lists, for tests.", vec!["model", "system_prompt"])
            }
        };
        Agent {
            name: name.to_owned(),
            description: description.to_owned(),
            driver: "built-in".to_owned(),
            available: true,
            install: None,
            steers: self.steers(),
            settings: settings.into_iter().map(str::to_owned).collect(),
            env: Vec::new(),
        }
    }

    fn steers(self) -> bool {
        matches!(self, Self::Script)
    }

    async fn prepare(self, env: &BTreeMap<String, String>) -> Result<(), RunError> {
        match self {
            Self::Echo => Ok(()),
            Self::Script => script::prepare(env).await,
        }
    }

    async fn turn(self, turn: Turn<'_>, prompt: String, blob: Option<Blob>) -> Result<End, Closed> {
        let prompt = match whole(&turn.spec.blobs, prompt, blob.as_ref()).await {
            Ok(prompt) => prompt,
            Err(error) => return Ok(End::Stopped(failed(error))),
        };
        match self {
            Self::Echo => echo::turn(&turn, &prompt).await,
            Self::Script => script::turn(&turn, &prompt).await,
        }
    }
}

/// The life of one agent.
async fn live(builtin: Builtin, spec: Box<AgentSpec>, mut end: AgentEnd) -> Gone {
    // Everything that is not idling is boxed: ten thousand idle agents should cost a few megabytes.
    if let Err(error) = Box::pin(ready(builtin, &spec)).await {
        return Gone::Failed(error);
    }
    let hello = Up::Ready { agent_session_id: spec.agent_session_id.clone(), steers: builtin.steers() };
    if Box::pin(end.say(hello)).await.is_err() {
        return Gone::Stopped;
    }
    while let Some(down) = end.command().await {
        match Box::pin(obey(builtin, &spec, &mut end, down)).await {
            Ok(None) => {}
            Ok(Some(gone)) => return gone,
            Err(Closed) => break,
        }
    }
    Gone::Stopped
}

async fn ready(builtin: Builtin, spec: &AgentSpec) -> Result<(), RunError> {
    match tokio::time::timeout(Duration::from_secs(START_S), builtin.prepare(&spec.env)).await {
        Ok(prepared) => prepared,
        Err(_) => Err(error("agent_not_ready", &format!("the agent was not ready within {START_S} s"))),
    }
}

/// Does what an idle agent is told: a prompt is a turn, and anything else came too late for its own.
async fn obey(
    builtin: Builtin,
    spec: &AgentSpec,
    end: &mut AgentEnd,
    down: Down,
) -> Result<Option<Gone>, Closed> {
    match down {
        Down::Prompt { run, prompt, blob, .. } => one_turn(builtin, spec, end, run, prompt, blob).await,
        Down::Steer { number, .. } => {
            end.say(Up::SteerMissed { steer: number }).await?;
            Ok(None)
        }
        Down::Cancel { .. } | Down::Kill { .. } | Down::Answer { .. } => Ok(None),
    }
}

/// One turn, from its prompt to its terminal and what is said too late. Gives how the agent went if it did not outlive
/// its turn.
async fn one_turn(
    builtin: Builtin,
    spec: &AgentSpec,
    end: &mut AgentEnd,
    run: RunId,
    prompt: String,
    blob: Option<Blob>,
) -> Result<Option<Gone>, Closed> {
    let inbox = Inbox::default();
    let turn = Turn { run: run.clone(), spec, voice: end.voice(), inbox: &inbox };
    let mut work = Box::pin(builtin.turn(turn, prompt, blob));
    let ended = loop {
        tokio::select! {
            // Commands first: a cancel that is there when the work ends has won.
            biased;
            down = end.command() => {
                let Some(down) = down else { return Err(Closed) };
                if let Some(outcome) = interrupt(&inbox, &run, end, down).await? {
                    break End::Stopped(outcome);
                }
            }
            ended = &mut work => break ended?,
        }
    };
    drop(work);
    match ended {
        End::Stopped(outcome) => {
            for steer in inbox.missed() {
                end.say(Up::SteerMissed { steer }).await?;
            }
            end.say(Up::Terminal { run: run.clone(), outcome }).await?;
            for text in inbox.late() {
                end.say(Up::Said { run: run.clone(), what: Said::Text { text } }).await?;
            }
            Ok(None)
        }
        End::Exited(status) => {
            let message = format!("the agent exited with status {status} in the middle of its turn");
            Ok(Some(Gone::Failed(RunError { exit_status: Some(status), ..error("agent_exited", &message) })))
        }
    }
}

/// Applies a command to the running turn; gives the outcome if that stops it.
async fn interrupt(
    inbox: &Inbox,
    current: &RunId,
    end: &AgentEnd,
    down: Down,
) -> Result<Option<Outcome>, Closed> {
    match down {
        Down::Cancel { run, .. } if run == *current && inbox.heeds_cancel() => {
            Ok(Some(outcome(Stop::Cancelled)))
        }
        Down::Kill { run, .. } if run == *current => Ok(Some(outcome(Stop::Cancelled))),
        Down::Cancel { .. } | Down::Kill { .. } => Ok(None),
        Down::Steer { number, run, text, blob } => {
            let misses =
                if run == *current { inbox.put_steer(Steer { number, text, blob }).is_some() } else { true };
            if misses {
                end.say(Up::SteerMissed { steer: number }).await?;
            }
            Ok(None)
        }
        Down::Answer { ask, answer, .. } => {
            inbox.put_reply(&ask, answer);
            Ok(None)
        }
        // A session has one turn at a time. Should that ever be wrong, the second must not wait for ever.
        Down::Prompt { run, .. } => {
            let busy =
                failed(error("agent_busy", "the agent was given a prompt in the middle of another turn"));
            end.say(Up::Terminal { run, outcome: busy }).await?;
            Ok(None)
        }
    }
}
