//! What anybody implements to be a worker: an [`Executor`] gets a [`Job`] and a [`Turn`] through which it speaks and
//! listens, and gives back an [`Outcome`]. Which wire lies behind a turn is not its business: the same executor serves
//! a peer without a subprotocol and one that speaks `quarterdeck.v1`.

mod inbox;
pub(crate) mod linked;
pub(crate) mod running;

use std::sync::Arc;

use qd_protocol::event::AskKind;
pub use qd_protocol::event::RunError;
pub use qd_protocol::frame::plain::Approval;
use qd_protocol::link::{AskRequest, File, Up};
pub use qd_protocol::link::{Outcome, Said};
use qd_protocol::{AskId, RunId};
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

pub(crate) use self::inbox::{Inbox, Steer};
use crate::local::Voice;
use crate::plain;

/// Random bytes of an ask's id, each of which becomes five bits: more than 128 together, so that nobody can guess it.
const ASK_ID_BYTES: usize = 26;

/// A worker, as far as it differs from every other.
pub trait Executor: Send + Sync + 'static {
    /// Does one job. It runs in a task of its own; a panic ends the job as failed and nothing else. When the turn is
    /// cancelled it should come to its end soon: after five seconds it is dropped where it stands.
    fn run(&self, job: Job, turn: Turn) -> impl Future<Output = Outcome> + Send;
}

/// A function is enough.
impl<F, R> Executor for F
where
    F: Fn(Job, Turn) -> R + Send + Sync + 'static,
    R: Future<Output = Outcome> + Send,
{
    fn run(&self, job: Job, turn: Turn) -> impl Future<Output = Outcome> + Send {
        self(job, turn)
    }
}

/// What to do.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Job {
    /// The prompt.
    pub assignment: String,
    /// How hard to think, in the agent's words.
    pub reasoning_effort: Option<String>,
    /// The conversation that it goes on with; empty if it is new.
    pub messages: Vec<Value>,
    /// Files that come with it; none without a subprotocol.
    pub files: Vec<File>,
    /// The run that it serves, where the peer says so.
    pub run: Option<RunId>,
}

impl From<&str> for Job {
    /// A prompt and nothing else.
    fn from(assignment: &str) -> Self {
        Self { assignment: assignment.to_owned(), ..Self::default() }
    }
}

/// The words were not said: the run is over, or it is cancelled and its peer does not read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the run has been stopped")]
pub struct Stopped;

/// One run, as its executor sees it. Cheap to clone, and mute once the run has ended.
#[derive(Debug, Clone)]
pub struct Turn {
    shared: Arc<Shared>,
}

impl Turn {
    pub(crate) fn new(mouth: Mouth) -> Self {
        let shared = Shared { mouth, inbox: Inbox::default(), cancel: CancellationToken::new() };
        Self { shared: Arc::new(shared) }
    }

    /// Says a piece of the answer. Waits while the peer is behind: that is how a slow reader slows the work down.
    pub async fn say(&self, text: impl Into<String>) -> Result<(), Stopped> {
        self.event(Said::Text { text: text.into() }).await
    }

    /// Says anything else that needs no answer, with the same waiting. After a cancel it still goes out if there is
    /// room for it.
    pub async fn event(&self, what: Said) -> Result<(), Stopped> {
        match &self.shared.mouth {
            Mouth::Plain(mouth) => mouth.say(&what, &self.shared.cancel).await,
            Mouth::Link { voice, run } => {
                let said = voice.say(Up::Said { run: run.clone(), what });
                self.unless_cancelled(said).await.ok_or(Stopped)?.map_err(|_| Stopped)
            }
        }
    }

    /// The next thing that the run is told on its way; `None` once it is cancelled. Nothing is lost if the wait is
    /// given up, and one who never asks is never steered.
    pub async fn steer(&self) -> Option<String> {
        let Steer { text, number } = self.unless_cancelled(self.shared.inbox.steer()).await?;
        if let (Mouth::Link { voice, .. }, Some(steer)) = (&self.shared.mouth, number) {
            // Without a pause, in which the wait could be given up and the words be lost: there is always room for so
            // little. A session that has let go needs no word of it.
            let _heard = tokio::task::unconstrained(voice.say(Up::SteerTaken { steer })).await;
        }
        Some(text)
    }

    /// Asks for leave and waits, as long as it takes. A run that is cancelled has no leave for anything.
    pub async fn approve(&self, approval: Approval) -> bool {
        let mut random = [0; ASK_ID_BYTES];
        if let Err(error) = getrandom::fill(&mut random) {
            tracing::error!("no random numbers, so nobody can be asked: {error}");
            return false;
        }
        let id = AskId::from_random(&random);
        // Before it is asked: the answer may be there at once.
        let Some(reply) = self.shared.inbox.open(id.clone()) else { return false };
        match &self.shared.mouth {
            Mouth::Plain(mouth) => {
                let asked = mouth.ask(&id, approval, &self.shared.cancel).await;
                asked.is_ok() && self.unless_cancelled(reply).await.flatten().unwrap_or(false)
            }
            Mouth::Link { voice, run } => {
                let ask = Up::Ask { run: run.clone(), ask: permission(id.clone(), approval) };
                let asked = self.unless_cancelled(voice.say(ask)).await;
                if !matches!(asked, Some(Ok(()))) {
                    return false;
                }
                let Some(allowed) = self.unless_cancelled(reply).await.flatten() else { return false };
                voice.say(Up::AskDelivered { ask: id }).await.is_ok() && allowed
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
    pub fn token(&self) -> CancellationToken {
        self.shared.cancel.clone()
    }

    pub(crate) fn cancel(&self) {
        self.shared.cancel.cancel();
    }

    pub(crate) fn inbox(&self) -> &Inbox {
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
pub(crate) enum Mouth {
    /// To a peer without a subprotocol.
    Plain(plain::Mouth),
    /// To a session, numbered.
    Link { voice: Voice, run: RunId },
}

#[derive(Debug)]
struct Shared {
    mouth: Mouth,
    inbox: Inbox,
    cancel: CancellationToken,
}

fn permission(id: AskId, approval: Approval) -> AskRequest {
    AskRequest {
        id,
        kind: AskKind::Permission,
        tool: Some(approval.tool_name),
        input: json!({ "permission_type": approval.permission_type, "resource": approval.resource }),
        risk: None,
        prompt: approval.question,
        options: Vec::new(),
        unasked: false,
    }
}
