//! What anybody implements to be a worker: an [`Executor`] gets a [`Job`] and a [`Turn`] through which it speaks and
//! listens, and gives back an [`Outcome`]. Which wire lies behind a turn is not its business: the same executor serves
//! a peer without a subprotocol and one that speaks `quarterdeck.v1`.

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

/// Random bytes of an ask's id, each of which becomes five bits: more than 128 together, so that nobody can guess it.
const ASK_ID_BYTES: usize = 26;

/// A worker, as far as it differs from every other.
pub trait Executor: Send + Sync + 'static {
    /// Does one job. It runs in a task of its own; a panic ends the job as failed and nothing else. When the turn is
    /// cancelled it should come to its end soon: after five seconds it is dropped where it stands.
    fn run(&self, job: RunAssignment, turn: RunHandle) -> impl Future<Output = TurnOutcome> + Send;
}

/// A function is enough.
impl<F, R> Executor for F
where
    F: Fn(RunAssignment, RunHandle) -> R + Send + Sync + 'static,
    R: Future<Output = TurnOutcome> + Send,
{
    fn run(&self, job: RunAssignment, turn: RunHandle) -> impl Future<Output = TurnOutcome> + Send {
        self(job, turn)
    }
}

/// What to do.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct RunAssignment {
    /// The prompt.
    pub prompt: String,
    /// How hard to think, in the agent's words.
    pub reasoning_effort: Option<String>,
    /// The conversation that it goes on with; empty if it is new.
    pub messages: Vec<Value>,
    /// Files that come with it; none without a subprotocol.
    pub files: Vec<PromptFile>,
    /// The run that it serves, where the peer says so.
    pub run: Option<RunId>,
}

impl From<&str> for RunAssignment {
    /// A prompt and nothing else.
    fn from(assignment: &str) -> Self {
        Self { prompt: assignment.to_owned(), ..Self::default() }
    }
}

/// The words were not said: the run is over, or it is cancelled and its peer does not read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the run has been stopped")]
pub struct RunStopped;

/// One run, as its executor sees it. Cheap to clone, and mute once the run has ended.
#[derive(Debug, Clone)]
pub struct RunHandle {
    shared: Arc<RunShared>,
}

impl RunHandle {
    pub(crate) fn new(mouth: RunOutput) -> Self {
        let shared =
            RunShared { output: mouth, inbox: RunInbox::default(), cancel: CancellationToken::new() };
        Self { shared: Arc::new(shared) }
    }

    /// Says a piece of the answer. Waits while the peer is behind: that is how a slow reader slows the work down.
    pub async fn send_text(&self, text: impl Into<String>) -> Result<(), RunStopped> {
        self.send_update(TurnUpdate::Text { text: text.into() }).await
    }

    /// Says anything else that needs no answer, with the same waiting. After a cancel it still goes out if there is
    /// room for it.
    pub async fn send_update(&self, what: TurnUpdate) -> Result<(), RunStopped> {
        match &self.shared.output {
            RunOutput::Plain(mouth) => mouth.send_update(&what, &self.shared.cancel).await,
            RunOutput::Link { output: voice, run } => {
                let said = voice.send(AgentUpdate::Turn { run: run.clone(), update: what });
                self.unless_cancelled(said).await.ok_or(RunStopped)?.map_err(|_| RunStopped)
            }
        }
    }

    /// The next thing that the run is told on its way; `None` once it is cancelled. Nothing is lost if the wait is
    /// given up, and one who never asks is never steered.
    pub async fn next_steer(&self) -> Option<String> {
        let RunSteer { text, number } = self.unless_cancelled(self.shared.inbox.wait_for_steer()).await?;
        if let (RunOutput::Link { output: voice, .. }, Some(steer)) = (&self.shared.output, number) {
            // Without a pause, in which the wait could be given up and the words be lost: there is always room for so
            // little. A session that has let go needs no word of it.
            let _heard = tokio::task::unconstrained(voice.send(AgentUpdate::SteerTaken { steer })).await;
        }
        Some(text)
    }

    /// Asks for leave and waits, as long as it takes. A run that is cancelled has no leave for anything.
    pub async fn request_approval(&self, approval: PlainApproval) -> bool {
        let mut random = [0; ASK_ID_BYTES];
        if let Err(error) = getrandom::fill(&mut random) {
            tracing::error!("no random numbers, so nobody can be asked: {error}");
            return false;
        }
        let id = AskId::from_random(&random);
        // Before it is asked: the answer may be there at once.
        let Some(reply) = self.shared.inbox.open_ask(id.clone()) else { return false };
        match &self.shared.output {
            RunOutput::Plain(mouth) => {
                let asked = mouth.send_approval_request(&id, approval, &self.shared.cancel).await;
                asked.is_ok() && self.unless_cancelled(reply).await.flatten().unwrap_or(false)
            }
            RunOutput::Link { output: voice, run } => {
                let ask =
                    AgentUpdate::Ask { run: run.clone(), ask: permission_request(id.clone(), approval) };
                let asked = self.unless_cancelled(voice.send(ask)).await;
                if !matches!(asked, Some(Ok(()))) {
                    return false;
                }
                let Some(allowed) = self.unless_cancelled(reply).await.flatten() else { return false };
                voice.send(AgentUpdate::AskDelivered { ask: id }).await.is_ok() && allowed
            }
        }
    }

    /// Waits for a cancel; there at once if one has come.
    pub async fn cancelled(&self) {
        self.shared.cancel.cancelled().await;
    }

    /// Whether a cancel has come.
    pub fn is_cancelled(&self) -> bool {
        self.shared.cancel.is_cancelled()
    }

    /// What tells of the cancel, for tasks and libraries that take such a thing.
    pub fn cancellation_token(&self) -> CancellationToken {
        self.shared.cancel.clone()
    }

    pub(crate) fn cancel(&self) {
        self.shared.cancel.cancel();
    }

    pub(crate) fn inbox(&self) -> &RunInbox {
        &self.shared.inbox
    }

    /// What is there at once counts even then: the cancel only ends waits.
    async fn unless_cancelled<F: Future>(&self, wait: F) -> Option<F::Output> {
        tokio::select! {
            biased;
            output = wait => Some(output),
            () = self.shared.cancel.cancelled() => None,
        }
    }
}

/// Where a turn's words go.
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
