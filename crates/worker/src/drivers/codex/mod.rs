//! The driver for Codex's own server on stdio: one process for each session, from its start to its end. It turns
//! prompts into what the agent says; queueing, deadlines and killing are its caller's.
//!
//! Layout, in reading order:
//! - `opening`: the handshake, and a thread new or old.
//! - `talk`: turns and the time between them, in one loop each; `round`: what is open in one turn; `stopping`: its cancel.
//! - `compose`, `words`, `items`, `calls`, `ends`, `usage`: prompts, what is told, tools, those that are open, how turns end,
//!   tokens and their price.
//! - `asks`, `forms`: permissions and questions.
//! - `wire`: lines of JSON-RPC.

mod asks;
mod calls;
mod compose;
mod ends;
mod forms;
mod items;
mod opening;
mod round;
mod stopping;
mod talk;
#[cfg(test)]
mod tests;
mod usage;
mod wire;
mod words;

use std::sync::Arc;
use std::time::Duration;

use qd_keeper::Keeper;
use qd_link::{Closed, Voice};
use qd_protocol::event::RunError;
use qd_protocol::manifest::Manifest;
use qd_protocol::worker::AgentSpec;
use tokio::net::unix::pipe;

use self::opening::{Opening, Unopened};
use self::talk::{Talk, run_error};
use self::wire::Peer;
use super::price::Pricing;
use super::process::{Process, Program};
use super::tools::ToolServer;
use crate::turn::{End, Prompt, Turn};

/// One live agent.
pub(crate) struct Codex {
    process: Process,
    talk: Talk<pipe::Receiver, pipe::Sender>,
    /// Held as long as the agent lives: without it the keeper ends everything.
    _keeper: Arc<Keeper>,
}

impl Codex {
    /// Starts the server and opens its thread, the old one if the specification names it, within the limit.
    pub(crate) async fn start(
        spec: &AgentSpec,
        manifest: &Manifest,
        keeper: Arc<Keeper>,
        limit: Duration,
    ) -> Result<Self, RunError> {
        let late = || {
            RunError::new("agent_not_ready", format!("the agent was not ready within {} s", limit.as_secs()))
        };
        let until = tokio::time::Instant::now() + limit;
        let started =
            tokio::time::timeout_at(until, Process::start(&keeper, spec, Program::of(manifest, spec))).await;
        let (mut process, stdin, stdout) = started.map_err(|_| late())??;
        let mut peer = Peer::new(stdout, stdin, process.exited());
        let opening = Opening::of(spec);
        let opened = match tokio::time::timeout_at(until, opening::open(&mut peer, &opening)).await {
            Ok(Ok(opened)) => opened,
            Ok(Err(Unopened::HungUp)) => return Err(process.why("before it was ready").await),
            Ok(Err(Unopened::Refused(refusal))) => {
                let error = RunError { code: "agent_failed_to_start".to_owned(), ..run_error(&refusal) };
                return Err(process.complains(error).await);
            }
            Err(_) => return Err(process.complains(late()).await),
        };
        let talk = Talk::new(peer, opened, Pricing::of(spec));
        Ok(Self { process, talk, _keeper: keeper })
    }

    /// The agent's name for the conversation, by which it can be resumed: the one that it is in, also if that is new
    /// because the old one could not be gone on with.
    pub(crate) fn session_id(&self) -> Option<String> {
        Some(self.talk.thread().to_owned())
    }

    /// One turn. If it is dropped, the agent is in an unknown state and must be ended.
    pub(crate) async fn turn(&mut self, turn: &Turn<'_>, prompt: &Prompt) -> Result<End, Closed> {
        match self.talk.turn(turn, prompt).await? {
            Some(outcome) => Ok(End::Stopped(outcome)),
            None => Ok(End::Exited(self.process.why("in the middle of its turn").await)),
        }
    }

    /// The time between turns: late words go to `voice` under the runs before. Comes back when the agent has ended;
    /// nothing is lost if the wait is given up.
    pub(crate) async fn idle(&mut self, voice: &Voice) -> RunError {
        self.talk.idle(voice).await;
        self.process.why("between two turns").await
    }

    /// Ends it politely: closes its stdin and waits a little. The rest is the keeper's.
    pub(crate) async fn stop(self) {
        let Self { process, talk, _keeper } = self;
        process.leave(talk.hang_up()).await;
    }
}

impl<'a> Opening<'a> {
    fn of(spec: &'a AgentSpec) -> Self {
        Self {
            cwd: &spec.cwd,
            model: spec.model.as_deref(),
            system_prompt: spec.system_prompt.as_deref(),
            resume: spec.agent_session_id.as_deref(),
            tools: ToolServer::of(spec),
        }
    }
}
