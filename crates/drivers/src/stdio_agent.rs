//! An agent that is a process and talks on its stdin and stdout: how it is started within its time limit, and what of
//! its turns, its idle time and its stop is the same for every protocol. What the lines mean is up to the driver's
//! [`StdioConversation`].

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;
use qd_keeper::KeeperHandle;
use qd_link::{AgentOutput, LinkClosed};
use qd_protocol::event::RunError;
use qd_protocol::link::{AgentUpdate, TurnOutcome};
use qd_protocol::manifest::Manifest;
use qd_protocol::worker::AgentSpec;
use tokio::io::AsyncRead;
use tokio::net::unix::pipe;
use tokio::time::{Instant, timeout_at};

use crate::agent_driver::{AgentDriver, AgentStart};
use crate::agent_launcher::NOT_SIGNED_IN;
use crate::policy_enforcement::enforce_policy;
use crate::process::{AgentProcess, AgentProgram};
use crate::turn::{DriverPrompt, DriverTurn, DriverTurnEnd};

/// A conversation with an agent that is ready, over its stdin and stdout.
pub(crate) trait StdioConversation: Send + 'static {
    /// The agent's id for the conversation, with which it can be resumed.
    fn session_id(&self) -> Option<String>;

    /// Runs one turn. Returns `None` if the agent has exited.
    fn turn(
        &mut self,
        turn: &DriverTurn<'_>,
        prompt: &DriverPrompt,
    ) -> impl Future<Output = Result<Option<TurnOutcome>, LinkClosed>> + Send;

    /// Serves the agent between turns: late output goes to `output` under an earlier run. Returns when the agent has
    /// exited. Dropping the future loses nothing.
    fn idle(&mut self, output: &AgentOutput) -> impl Future<Output = ()> + Send;

    /// Closes the agent's stdin and returns its stdout.
    fn close_stdin(self) -> impl AsyncRead + Unpin + Send;
}

/// A process with a conversation.
pub(crate) struct StdioAgent<C> {
    process: AgentProcess,
    conversation: C,
    steers: bool,
    /// Held for as long as the agent lives: dropping it makes the keeper end everything.
    _keeper: Arc<KeeperHandle>,
}

impl<C: StdioConversation> AgentDriver for StdioAgent<C> {
    fn ready_update(&self, _: &AgentSpec) -> AgentUpdate {
        AgentUpdate::Ready { agent_session_id: self.conversation.session_id(), steers: self.steers }
    }

    fn turn<'a>(
        &'a mut self,
        turn: &'a DriverTurn<'a>,
        prompt: &'a DriverPrompt,
    ) -> BoxFuture<'a, Result<DriverTurnEnd, LinkClosed>> {
        Box::pin(async move {
            // What the agent wrote in earlier turns does not explain the end of this one.
            self.process.forget_stderr();
            Ok(match self.conversation.turn(turn, prompt).await? {
                Some(outcome) => DriverTurnEnd::Stopped(outcome),
                None => {
                    DriverTurnEnd::AgentExited(self.process.exit_error("in the middle of its turn").await)
                }
            })
        })
    }

    fn idle<'a>(&'a mut self, output: &'a AgentOutput) -> BoxFuture<'a, RunError> {
        Box::pin(async move {
            self.conversation.idle(output).await;
            self.process.exit_error("between two turns").await
        })
    }

    /// Asks the agent to exit by closing its stdin, and waits a little.
    fn stop(self: Box<Self>) -> BoxFuture<'static, ()> {
        Box::pin(async move {
            let Self { process, conversation, _keeper, .. } = *self;
            process.drain_and_wait(conversation.close_stdin()).await;
        })
    }
}

/// Why no conversation could be opened. `E` is the protocol's error.
#[derive(Debug)]
pub(crate) enum StdioHandshakeError<E> {
    AgentExited,
    /// The agent answered with an error.
    Refused(E),
}

/// An agent on stdio that is being started. All of its start has one time limit.
pub(crate) struct StdioAgentStart<'a> {
    pub(crate) spec: &'a AgentSpec,
    pub(crate) manifest: Arc<Manifest>,
    pub(crate) keeper: Arc<KeeperHandle>,
    time_limit: Duration,
    deadline: Instant,
}

impl<'a> StdioAgentStart<'a> {
    /// The time limit counts from now on.
    pub(crate) fn new(start: AgentStart<'a>) -> Result<Self, RunError> {
        let time_limit = start.time_limit();
        let keeper = Arc::clone(start.supervision()?.keeper);
        let AgentStart { spec, manifest, .. } = start;
        let manifest = Arc::new(enforce_policy(Manifest::clone(&manifest), spec)?);
        Ok(Self { spec, manifest, keeper, time_limit, deadline: Instant::now() + time_limit })
    }

    /// The program of the manifest.
    pub(crate) fn program(&self) -> AgentProgram {
        AgentProgram::from_manifest(&self.manifest, self.spec)
    }

    /// Starts a process, and returns it with its stdin and stdout.
    pub(crate) async fn start_process(
        &self,
        program: AgentProgram,
    ) -> Result<(AgentProcess, pipe::Sender, pipe::Receiver), RunError> {
        let started = timeout_at(self.deadline, AgentProcess::start(&self.keeper, self.spec, program)).await;
        started.map_err(|_| self.timeout_error())?
    }

    /// Waits for a step of the start. An agent that exits, or is not ready in time, fails with the last lines of its
    /// stderr; a refusal is returned.
    pub(crate) async fn finish_step<T, E>(
        &self,
        process: &mut AgentProcess,
        step: impl Future<Output = Result<T, StdioHandshakeError<E>>>,
    ) -> Result<Result<T, E>, RunError> {
        match timeout_at(self.deadline, step).await {
            Ok(Ok(value)) => Ok(Ok(value)),
            Ok(Err(StdioHandshakeError::Refused(refusal))) => Ok(Err(refusal)),
            Ok(Err(StdioHandshakeError::AgentExited)) => Err(process.exit_error("before it was ready").await),
            Err(_) => Err(process.with_stderr(self.timeout_error()).await),
        }
    }

    /// The agent is ready.
    pub(crate) fn into_agent<C>(self, process: AgentProcess, conversation: C, steers: bool) -> StdioAgent<C> {
        StdioAgent { process, conversation, steers, _keeper: self.keeper }
    }

    fn timeout_error(&self) -> RunError {
        let message = format!("the agent was not ready within {} s", self.time_limit.as_secs());
        RunError::new("agent_not_ready", message)
    }
}

/// The error of an agent that refused to open a conversation.
pub(crate) async fn refused_start(process: &mut AgentProcess, refusal: RunError) -> RunError {
    let code = match refusal.code.as_str() {
        NOT_SIGNED_IN => NOT_SIGNED_IN,
        _ => "agent_failed_to_start",
    };
    process.with_stderr(RunError { code: code.to_owned(), ..refusal }).await
}
