//! The driver for agents that speak the Agent Client Protocol on their stdio: one agent, from its start to its end.
//! It turns prompts into what the agent says; queueing, deadlines and killing are its caller's.
//!
//! Layout, in reading order:
//! - `profile`: what is peculiar to one agent.
//! - `opening`: the handshake, and a session new or old, in the right mode.
//! - `talk`: turns and the time between them, in one loop each; `round`: what is open in one turn.
//! - `compose`: prompts; `ear`: updates, with `calls`, `diff` and `usage`; `asks`: permissions and questions.
//! - `service`: what is done for the agent: `files` and `terminals`.
//! - `wire`: lines of JSON-RPC.

mod asks;
mod calls;
mod compose;
mod diff;
mod ear;
mod files;
mod opening;
mod profile;
mod round;
mod service;
mod talk;
mod terminals;
#[cfg(test)]
mod tests;
mod usage;
mod wire;

use std::sync::Arc;
use std::time::Duration;

use qd_keeper::Keeper;
use qd_link::{Closed, Voice};
use qd_protocol::Millis;
use qd_protocol::event::RunError;
use qd_protocol::manifest::Manifest;
use qd_protocol::worker::AgentSpec;
use tokio::net::unix::pipe;

pub(crate) use self::compose::news;
pub(crate) use self::ear::OURS;
use self::opening::{Opening, Unopened};
use self::profile::Profile;
use self::service::Service;
use self::talk::{Talk, run_error};
use self::wire::Peer;
use super::process::{Process, Program};
use super::tools::ToolServer;
use crate::turn::{End, Prompt, Turn};

/// One live agent.
pub(crate) struct Acp {
    process: Process,
    talk: Talk<pipe::Receiver, pipe::Sender>,
    steers: bool,
    /// Held as long as the agent lives: without it the keeper ends everything.
    _keeper: Arc<Keeper>,
}

impl Acp {
    /// Starts the agent's process and opens its session, the old one if the specification names it, within the limit.
    pub(crate) async fn start(
        spec: &AgentSpec,
        manifest: &Manifest,
        keeper: Arc<Keeper>,
        limit: Duration,
    ) -> Result<Self, RunError> {
        let late = || {
            RunError::new("agent_not_ready", format!("the agent was not ready within {} s", limit.as_secs()))
        };
        if manifest.resume.next_minute && spec.agent_session_id.is_some() {
            next_minute(spec.last_active).await;
        }
        let until = tokio::time::Instant::now() + limit;
        let started =
            tokio::time::timeout_at(until, Process::start(&keeper, spec, Program::of(manifest, spec))).await;
        let (mut process, stdin, stdout) = started.map_err(|_| late())??;
        let mut peer = Peer::new(stdout, stdin, process.exited());
        let service = Service::below(&spec.cwd, Some(Arc::clone(&keeper)));
        let opening = Opening::of(spec, Profile::of(manifest, spec), service.runs_commands());
        let opened = match tokio::time::timeout_at(until, opening::open(&mut peer, &opening)).await {
            Ok(Ok(opened)) => opened,
            Ok(Err(Unopened::HungUp)) => return Err(process.why("before it was ready").await),
            Ok(Err(Unopened::Refused(told))) => {
                let told = RunError { code: "agent_failed_to_start".to_owned(), ..run_error(&told) };
                return Err(process.complains(told).await);
            }
            Err(_) => return Err(process.complains(late()).await),
        };
        let talk = Talk::new(peer, opened, service);
        Ok(Self { process, talk, steers: manifest.steers(), _keeper: keeper })
    }

    /// The agent's name for the conversation, by which it can be resumed: the one that it is in, also if that is new
    /// because the old one could not be gone on with. Under the old name each later start would fail in the same way
    /// and lose what has been said since.
    pub(crate) fn session_id(&self) -> Option<String> {
        Some(self.talk.session().to_string())
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

/// Waits until the minute is over in which a conversation was last used.
async fn next_minute(used: Option<Millis>) {
    const MINUTE: u64 = 60_000;
    let now = Millis::now();
    if used.is_some_and(|used| used.0 / MINUTE == now.0 / MINUTE) {
        tokio::time::sleep(Duration::from_millis(MINUTE - now.0 % MINUTE)).await;
    }
}

impl<'a> Opening<'a> {
    fn of(spec: &'a AgentSpec, profile: Profile, runs_commands: bool) -> Self {
        Self {
            cwd: &spec.cwd,
            model: spec.model.as_deref(),
            system_prompt: spec.system_prompt.as_deref(),
            resume: spec.agent_session_id.as_deref(),
            profile,
            runs_commands,
            tools: ToolServer::of(spec),
        }
    }
}
