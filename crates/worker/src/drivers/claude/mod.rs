//! The driver for agents that speak Claude Code's own protocol on their stdio: lines of JSON, some of which want an
//! answer. One agent, from its start to its end; queueing, deadlines and killing are its caller's.
//!
//! Layout, in reading order:
//! - `opening`: the handshake.
//! - `talk`: turns and the time between them, in one loop each; `round`: what is open in one turn.
//! - `compose`, `ear`, `asks`, `tally`: prompts, what is heard, permissions and questions, what it costs.
//! - `words`: the protocol's lines.

mod asks;
mod compose;
mod ear;
mod opening;
mod round;
mod talk;
mod tally;
#[cfg(test)]
mod tests;
mod words;

use std::sync::Arc;
use std::time::Duration;

use qd_keeper::Keeper;
use qd_link::{Closed, Voice};
use qd_protocol::event::RunError;
use qd_protocol::manifest::Manifest;
use qd_protocol::worker::AgentSpec;
use serde_json::json;
use tokio::net::unix::pipe;
use tokio::time::{Instant, timeout_at};

use self::ear::Ear;
use self::opening::Unopened;
use self::talk::Talk;
use self::tally::Tally;
use super::lines::Lines;
use super::price::Pricing;
use super::process::{Process, Program};
use super::tools::{NAME, ToolServer};
use crate::turn::{End, Prompt, Turn};

/// The flags for a conversation under a name of ours, and for one that is to go on.
const BEGIN: &str = "--session-id";
const RESUME: &str = "--resume";
/// The flag before the servers that it is given.
const SERVERS: &str = "--mcp-config";

/// One live agent.
pub(crate) struct Claude {
    process: Process,
    talk: Talk<pipe::Receiver, pipe::Sender>,
    steers: bool,
    /// Held as long as the agent lives: without it the keeper ends everything.
    _keeper: Arc<Keeper>,
}

impl Claude {
    /// Starts the agent's process, in its old conversation if the specification names one, within the limit. A
    /// conversation that is not there is begun anew: one that never had a prompt has left nothing to go on with.
    pub(crate) async fn start(
        spec: &AgentSpec,
        manifest: &Manifest,
        keeper: Arc<Keeper>,
        limit: Duration,
    ) -> Result<Self, RunError> {
        let start = Start { spec, manifest, keeper: &keeper, until: Instant::now() + limit, limit };
        let mut forgot = None;
        if let Some(old) = &spec.agent_session_id {
            match start.begin(RESUME, old).await? {
                Ok((process, lines)) => {
                    let talk = start.talk(lines, old.clone(), None);
                    return Ok(Self { process, talk, steers: manifest.steers(), _keeper: keeper });
                }
                Err(Refusal { why, .. }) => forgot = Some(why),
            }
        }
        let name =
            words::uuid().map_err(|cause| RunError::new("agent_failed_to_start", cause.to_string()))?;
        match start.begin(BEGIN, &name).await? {
            Ok((process, lines)) => {
                let talk = start.talk(lines, name, forgot);
                Ok(Self { process, talk, steers: manifest.steers(), _keeper: keeper })
            }
            Err(Refusal { why, mut process }) => {
                Err(process.complains(RunError::new("agent_failed_to_start", why)).await)
            }
        }
    }

    /// The agent's name for the conversation, by which it can be resumed. It is known before the first prompt.
    pub(crate) fn session_id(&self) -> Option<String> {
        Some(self.talk.session().to_owned())
    }

    /// Whether a turn can be steered.
    pub(crate) fn steers(&self) -> bool {
        self.steers
    }

    /// One turn. If it is dropped, the agent is in an unknown state and must be ended.
    pub(crate) async fn turn(&mut self, turn: &Turn<'_>, prompt: &Prompt) -> Result<End, Closed> {
        match self.talk.turn(turn, prompt).await? {
            Some(outcome) => Ok(End::Stopped(outcome)),
            None => Ok(End::Exited(self.process.why("in the middle of its turn").await)),
        }
    }

    /// The time between turns: late words go to `voice` under the run before. Comes back when the agent has ended;
    /// nothing is lost if the wait is given up.
    pub(crate) async fn idle(&mut self, voice: &Voice) -> RunError {
        self.talk.idle(voice).await;
        self.process.why("between two turns").await
    }

    /// Ends it politely: closes its stdin and waits a little. The rest is the keeper's.
    pub(crate) async fn stop(self) {
        let Self { process, talk, _keeper, .. } = self;
        process.leave(talk.hang_up()).await;
    }
}

/// A start, which may need a second process.
struct Start<'a> {
    spec: &'a AgentSpec,
    manifest: &'a Manifest,
    keeper: &'a Keeper,
    limit: Duration,
    until: Instant,
}

/// What it is told of a server. Everybody can read a command line, and nothing in it is a secret.
fn servers(tools: &ToolServer) -> [String; 2] {
    let server = json!({ "type": "stdio", "command": tools.command, "args": tools.args, "env": tools.env });
    [SERVERS.to_owned(), json!({ "mcpServers": { NAME: server } }).to_string()]
}

/// A process that would not begin, and why.
struct Refusal {
    why: String,
    process: Process,
}

type Begun = (Process, Lines<pipe::Receiver, pipe::Sender>);

impl Start<'_> {
    /// Starts the process in the conversation of this name.
    async fn begin(&self, flag: &str, name: &str) -> Result<Result<Begun, Refusal>, RunError> {
        let mut program = Program::of(self.manifest, self.spec);
        program.argv.extend(ToolServer::of(self.spec).iter().flat_map(servers));
        program.argv.extend([flag.to_owned(), name.to_owned()]);
        let started = timeout_at(self.until, Process::start(self.keeper, self.spec, program)).await;
        let (mut process, stdin, stdout) = started.map_err(|_| self.late())??;
        let mut lines = Lines::new(stdout, stdin, process.exited());
        match timeout_at(self.until, opening::open(&mut lines)).await {
            Ok(Ok(())) => Ok(Ok((process, lines))),
            Ok(Err(Unopened::Refused(why))) => {
                // Two of them at once could both write to the same conversation.
                let gone = timeout_at(self.until, process.exited()).await;
                match gone {
                    Ok(()) => Ok(Err(Refusal { why, process })),
                    Err(_) => Err(process.complains(self.late()).await),
                }
            }
            Ok(Err(Unopened::HungUp)) => Err(process.why("before it was ready").await),
            Err(_) => Err(process.complains(self.late()).await),
        }
    }

    fn talk(
        &self,
        lines: Lines<pipe::Receiver, pipe::Sender>,
        session: String,
        forgot: Option<String>,
    ) -> Talk<pipe::Receiver, pipe::Sender> {
        let resumed = self.spec.agent_session_id.as_ref() == Some(&session);
        let tally = Tally::new(Pricing::of(self.spec), self.spec.model.clone(), resumed);
        Talk::new(lines, session, Ear::new(tally), self.manifest.steers(), forgot)
    }

    fn late(&self) -> RunError {
        let message = format!("the agent was not ready within {} s", self.limit.as_secs());
        RunError::new("agent_not_ready", message)
    }
}
