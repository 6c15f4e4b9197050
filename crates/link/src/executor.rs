//! The interface for writing a worker. An [`Executor`] gets a [`RunAssignment`] and a [`RunHandle`], through which it
//! sends updates and receives steers, and returns a [`TurnOutcome`]. It need not know the wire behind the handle: the
//! same executor serves a peer without a subprotocol and one that speaks `quarterdeck.v1`.

pub(crate) mod executor_task;
mod inbox;
pub(crate) mod linked_agent;

use std::sync::Arc;

use qd_protocol::event::AskKind;
pub use qd_protocol::event::RunError;
pub use qd_protocol::frame::plain::PlainApproval;
use qd_protocol::link::{AgentUpdate, AskRequest, PromptFile};
pub use qd_protocol::link::{TurnOutcome, TurnUpdate};
use qd_protocol::{AskId, RunId};
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

pub(crate) use self::inbox::{RunInbox, RunSteer};
use crate::local::AgentOutput;
use crate::plain;

/// Random bytes of an ask's id. Each becomes five bits, so the id has more than 128 bits and cannot be guessed.
const ASK_ID_BYTES: usize = 26;

/// The part of a worker that you write.
pub trait Executor: Send + Sync + 'static {
    /// Does one run, in a task of its own. A panic fails the run and nothing else. When the run is cancelled it should
    /// end soon: after five seconds it is aborted.
    fn run(&self, assignment: RunAssignment, run: RunHandle) -> impl Future<Output = TurnOutcome> + Send;
}

/// A function is enough.
impl<F, R> Executor for F
where
    F: Fn(RunAssignment, RunHandle) -> R + Send + Sync + 'static,
    R: Future<Output = TurnOutcome> + Send,
{
    fn run(&self, assignment: RunAssignment, run: RunHandle) -> impl Future<Output = TurnOutcome> + Send {
        self(assignment, run)
    }
}

/// What an executor has to do.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct RunAssignment {
    pub prompt: String,
    /// How hard the model should think, in the agent's own terms.
    pub reasoning_effort: Option<String>,
    /// The conversation to continue; empty for a new one.
    pub messages: Vec<Value>,
    /// Files attached to the prompt. Always empty without a subprotocol.
    pub files: Vec<PromptFile>,
    /// The id of the run, if the peer sends one.
    pub run: Option<RunId>,
}

impl From<&str> for RunAssignment {
    fn from(prompt: &str) -> Self {
        Self { prompt: prompt.to_owned(), ..Self::default() }
    }
}

/// The update was not sent: the run is over, or it is cancelled and its peer does not read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the run has been stopped")]
pub struct RunStopped;

/// One run, as its executor sees it. Cheap to clone; once the run has ended, nothing can be sent through it.
#[derive(Debug, Clone)]
pub struct RunHandle {
    shared: Arc<RunShared>,
}

impl RunHandle {
    pub(crate) fn new(output: RunOutput) -> Self {
        let shared = RunShared { output, inbox: RunInbox::default(), cancel: CancellationToken::new() };
        Self { shared: Arc::new(shared) }
    }

    /// Sends a piece of the answer. Waits while the peer is behind, which is how a slow reader slows the work down.
    pub async fn send_text(&self, text: impl Into<String>) -> Result<(), RunStopped> {
        self.send_update(TurnUpdate::Text { text: text.into() }).await
    }

    /// Sends any other update that needs no answer, waiting in the same way. After a cancel it is still sent if there
    /// is room.
    pub async fn send_update(&self, update: TurnUpdate) -> Result<(), RunStopped> {
        match &self.shared.output {
            RunOutput::Plain(output) => output.send_update(&update, &self.shared.cancel).await,
            RunOutput::Link { output, run } => {
                let sent = output.send(AgentUpdate::Turn { run: run.clone(), update });
                self.unless_cancelled(sent).await.ok_or(RunStopped)?.map_err(|_| RunStopped)
            }
        }
    }

    /// The next steer, or `None` once the run is cancelled. Cancelling the wait loses nothing. An executor that never
    /// calls this is never steered.
    pub async fn next_steer(&self) -> Option<String> {
        let RunSteer { text, number } = self.unless_cancelled(self.shared.inbox.wait_for_steer()).await?;
        if let (RunOutput::Link { output, .. }, Some(steer)) = (&self.shared.output, number) {
            // Unconstrained, so that this does not yield: if the wait were cancelled here, the text would be lost.
            // There is always room for an update this small. A session that has released the agent does not need it.
            let _sent = tokio::task::unconstrained(output.send(AgentUpdate::SteerTaken { steer })).await;
        }
        Some(text)
    }

    /// Asks for permission and waits as long as it takes. A cancelled run gets no permission.
    pub async fn request_approval(&self, approval: PlainApproval) -> bool {
        let mut random = [0; ASK_ID_BYTES];
        if let Err(error) = getrandom::fill(&mut random) {
            tracing::error!("failed to draw random numbers for an ask; denying it: {error}");
            return false;
        }
        let id = AskId::from_random(&random);
        // Registered before the ask is sent, because the answer may arrive at once.
        let Some(reply) = self.shared.inbox.open_ask(id.clone()) else { return false };
        match &self.shared.output {
            RunOutput::Plain(output) => {
                let sent = output.send_approval_request(&id, approval, &self.shared.cancel).await;
                sent.is_ok() && self.unless_cancelled(reply).await.flatten().unwrap_or(false)
            }
            RunOutput::Link { output, run } => {
                let ask =
                    AgentUpdate::Ask { run: run.clone(), ask: permission_request(id.clone(), approval) };
                let sent = self.unless_cancelled(output.send(ask)).await;
                if !matches!(sent, Some(Ok(()))) {
                    return false;
                }
                let Some(allowed) = self.unless_cancelled(reply).await.flatten() else { return false };
                output.send(AgentUpdate::AskDelivered { ask: id }).await.is_ok() && allowed
            }
        }
    }

    /// Waits until the run is cancelled. Returns at once if it already is.
    pub async fn cancelled(&self) {
        self.shared.cancel.cancelled().await;
    }

    pub fn is_cancelled(&self) -> bool {
        self.shared.cancel.is_cancelled()
    }

    /// The token that is cancelled with the run, for tasks and libraries that take one.
    pub fn cancellation_token(&self) -> CancellationToken {
        self.shared.cancel.clone()
    }

    pub(crate) fn cancel(&self) {
        self.shared.cancel.cancel();
    }

    pub(crate) fn inbox(&self) -> &RunInbox {
        &self.shared.inbox
    }

    /// An output that is ready at once counts even after a cancel: the cancel only ends waits.
    async fn unless_cancelled<F: Future>(&self, wait: F) -> Option<F::Output> {
        tokio::select! {
            biased;
            output = wait => Some(output),
            () = self.shared.cancel.cancelled() => None,
        }
    }
}

/// Where the updates of a run go.
#[derive(Debug)]
pub(crate) enum RunOutput {
    /// To a peer without a subprotocol.
    Plain(plain::PlainRunOutput),
    /// To a session, numbered.
    Link { output: AgentOutput, run: RunId },
}

#[derive(Debug)]
struct RunShared {
    output: RunOutput,
    inbox: RunInbox,
    cancel: CancellationToken,
}

fn permission_request(id: AskId, approval: PlainApproval) -> AskRequest {
    AskRequest {
        id,
        kind: AskKind::Permission,
        tool: Some(approval.tool_name),
        input: json!({ "permission_type": approval.permission_type, "resource": approval.resource }),
        risk: None,
        prompt: approval.question,
        options: Vec::new(),
        implicit: false,
    }
}
