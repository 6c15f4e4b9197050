//! What the machine replied, in the words of the API.

use qd_core::session::{Refusal, Reply};
use qd_protocol::api::{Cancelled, Receipt, RunState, Steered};
use qd_protocol::event::Ask;
use qd_protocol::limits::MAIL_OPEN_MAX;
use qd_protocol::mail::MailReceipt;
use qd_protocol::{ApiError, AskId, Code, MailId, Millis, RunId, Seq};
use serde::{Deserialize, Serialize};
use tokio::sync::oneshot;

/// What came of a request. It can be written down and read again, for a client that asks twice.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) enum Answer {
    /// A prompt is ours.
    Accepted(Receipt),
    /// A prompt or a message was ours before; its row has the first receipt.
    Known,
    /// What a cancel hit.
    Cancelled(Cancelled),
    /// A steer is ours.
    Steered(Steered),
    /// An answer won.
    Answered(Box<Ask>),
    /// A question is open.
    Asked(AskId),
    /// These left the queue.
    Removed(Vec<RunId>),
    /// A message is ours.
    Mailed(MailReceipt),
    /// These messages are the caller's until then, each by its claim.
    Claimed(Vec<(MailId, u64)>, Millis),
    /// It is so.
    Done,
}

/// An answer, and what may still come of it.
#[derive(Debug)]
pub(crate) struct Done {
    pub(crate) answer: Answer,
    /// The runs that a cancel hit in the sessions below, once all of them have it.
    pub(crate) below: Option<oneshot::Receiver<Vec<RunId>>>,
}

/// What the events of a step say that its reply does not repeat.
#[derive(Debug, Clone, Default)]
pub(super) struct Said {
    /// The run of a prompt.
    pub(super) run: Option<RunId>,
    /// The receipt of a message, all but its place.
    pub(super) mail: Option<MailReceipt>,
}

/// Puts a reply into words. `seq_of` says where an event of the step came to lie.
pub(super) fn answer(reply: &Reply, said: &Said, seq_of: impl Fn(usize) -> Seq) -> Result<Answer, ApiError> {
    Ok(match reply {
        Reply::Accepted { position, event: Some(event) } => match &said.run {
            Some(run) => Answer::Accepted(Receipt {
                run_id: run.clone(),
                state: if *position == 0 { RunState::Accepted } else { RunState::Queued },
                position: *position,
                seq: seq_of(*event),
            }),
            None => Answer::Known,
        },
        Reply::Accepted { event: None, .. } => Answer::Known,
        Reply::Cancelled(hit) => {
            Answer::Cancelled(Cancelled { cancelled: hit.clone(), idle: hit.is_empty() })
        }
        Reply::Steered { run, event } => {
            Answer::Steered(Steered { run_id: run.clone(), seq: seq_of(*event) })
        }
        Reply::Answered(ask) => Answer::Answered(ask.clone()),
        Reply::Asked(ask) => Answer::Asked(ask.clone()),
        Reply::Removed(runs) => Answer::Removed(runs.clone()),
        Reply::Mailed { event } => match (event, &said.mail) {
            (Some(event), Some(mail)) => Answer::Mailed(MailReceipt { seq: seq_of(*event), ..mail.clone() }),
            _ => Answer::Known,
        },
        Reply::Claimed { mail, until } => {
            Answer::Claimed(mail.iter().map(|(id, claim)| (id.clone(), claim.0)).collect(), *until)
        }
        Reply::Done => Answer::Done,
        Reply::Refused(refusal) => return Err(refused(refusal)),
    })
}

fn refused(refusal: &Refusal) -> ApiError {
    match refusal {
        Refusal::Closed => ApiError::new(Code::SessionClosed, "the session is closed; create another one"),
        Refusal::QueueFull => ApiError::new(
            Code::QueueFull,
            "100 prompts wait already; retry when some have run, or clear the queue",
        ),
        Refusal::RunIdConflict => run_id_conflict(),
        Refusal::NotRunning => {
            ApiError::new(Code::NotRunning, "no run is active that could be steered; send a prompt")
        }
        Refusal::NoTurn => {
            ApiError::new(Code::NotRunning, "no run is active in which a person could be asked something")
        }
        Refusal::SteerUnsupported => ApiError::new(
            Code::SteerUnsupported,
            "this agent cannot be steered; send a prompt, which waits its turn",
        ),
        Refusal::NotQueued => {
            ApiError::new(Code::NotQueued, "the run does not wait in the queue; to stop it, cancel it")
        }
        Refusal::AskNotOpen => ApiError::new(Code::NotFound, "no open ask has this id"),
        Refusal::InvalidAnswer(why) => ApiError::new(Code::InvalidAnswer, why.clone()),
        Refusal::MailboxFull => ApiError::new(
            Code::MailboxFull,
            format!("{MAIL_OPEN_MAX} messages lie in this mailbox already; claim some, or retry later"),
        ),
        Refusal::NotClaimed => ApiError::new(
            Code::NotClaimed,
            "the message is not claimed by this claim; claim it, and acknowledge it in time",
        ),
    }
}

/// The run id is known, with other words.
pub(crate) fn run_id_conflict() -> ApiError {
    ApiError::new(Code::RunIdConflict, "this run_id was used for another prompt; choose a new one")
}
