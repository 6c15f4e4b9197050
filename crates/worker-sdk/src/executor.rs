//! The interface for writing a worker. An [`Executor`] gets a [`RunAssignment`] and a [`RunHandle`], through which it
//! sends updates and receives steers, and returns a [`TurnOutcome`]. It need not know the wire behind the handle: the
//! same executor serves a peer with the plain frames and one with a subprotocol.

mod executor_task;
mod inbox;
mod run_transport;

use std::sync::Arc;

use qd_protocol::frame::plain::PlainApproval;
use qd_protocol::link::{PromptFile, TurnOutcome, TurnUpdate};
use qd_protocol::{AskId, RunId};
use serde_json::Value;
use tokio_util::sync::CancellationToken;

pub(crate) use self::executor_task::CANCEL_GRACE;
pub use self::executor_task::{ExecutorTask, panic_message};
pub use self::inbox::PENDING_ASKS_MAX;
pub(crate) use self::inbox::{RunInbox, RunSteer};
pub use self::run_transport::{RunTransport, SendFuture};
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
    /// What the user wants, as text.
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
            RunOutput::Other(transport) => {
                self.unless_cancelled(transport.send_update(update)).await.ok_or(RunStopped)?
            }
        }
    }

    /// The next steer, or `None` once the run is cancelled. Cancelling the wait loses nothing. An executor that never
    /// calls this is never steered.
    pub async fn next_steer(&self) -> Option<String> {
        let RunSteer { text, number } = self.unless_cancelled(self.shared.inbox.wait_for_steer()).await?;
        if let (RunOutput::Other(transport), Some(number)) = (&self.shared.output, number) {
            // Unconstrained, so that this does not yield: if the wait were cancelled here, the text would be lost. A
            // peer that no longer reads does not need the confirmation.
            let _sent = tokio::task::unconstrained(transport.confirm_steer(number)).await;
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
        let opened = self.unless_cancelled(self.shared.inbox.open_ask(id.clone())).await;
        let Some(reply) = opened else { return false };
        match &self.shared.output {
            RunOutput::Plain(output) => {
                let sent = output.send_approval_request(&id, approval, &self.shared.cancel).await;
                sent.is_ok() && self.unless_cancelled(reply).await.flatten().unwrap_or(false)
            }
            RunOutput::Other(transport) => {
                let sent = self.unless_cancelled(transport.request_approval(id.clone(), approval)).await;
                if !matches!(sent, Some(Ok(()))) {
                    return false;
                }
                let Some(allowed) = self.unless_cancelled(reply).await.flatten() else { return false };
                transport.confirm_answer(id).await.is_ok() && allowed
            }
        }
    }

    /// Waits until the run is cancelled. Returns at once if it already is.
    pub async fn cancelled(&self) {
        self.shared.cancel.cancelled().await;
    }

    /// Whether the run has been cancelled.
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
    /// To a peer without a subprotocol. Not behind the trait, because such a run may send millions of small updates.
    Plain(plain::PlainRunOutput),
    /// To a peer with a subprotocol.
    Other(Box<dyn RunTransport>),
}

#[derive(Debug)]
struct RunShared {
    output: RunOutput,
    inbox: RunInbox,
    cancel: CancellationToken,
}
