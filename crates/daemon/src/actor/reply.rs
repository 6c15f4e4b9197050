//! Translates the machine's replies and refusals into responses and errors of the API.

use qd_core::session::{CommandRefusal, CommandReply, ToolCallVerdict};
use qd_protocol::api::{CancelResponse, PromptReceipt, RunStatus, SteerReceipt};
use qd_protocol::event::Ask;
use qd_protocol::limits::{ASKS_OPEN_MAX, MAIL_OPEN_MAX};
use qd_protocol::mail::MailReceipt;
use qd_protocol::{ApiError, AskId, ErrorCode, MailId, Millis, RunId, Seq};
use serde::{Deserialize, Serialize};
use tokio::sync::oneshot;

/// The result of a command. It is serializable, because it is stored under the client's `Idempotency-Key`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) enum ActorReply {
    /// A prompt was accepted.
    Accepted(PromptReceipt),
    /// A prompt or a message had been accepted before; its row has the first receipt.
    #[serde(rename = "Known")]
    AlreadyAccepted,
    /// The runs that a cancel stopped.
    Cancelled(CancelResponse),
    /// A steer was accepted.
    Steered(SteerReceipt),
    /// The ask was resolved by this answer.
    Answered(Box<Ask>),
    /// A question was opened.
    #[serde(rename = "Asked")]
    AskOpened(AskId),
    /// Whether a call of one of our tools may be performed. It is not stored: a repeat is judged by the ask.
    #[serde(skip)]
    ToolCallJudged(ToolCallVerdict),
    /// These runs left the queue.
    Removed(Vec<RunId>),
    /// The run is at this place of the queue now.
    Moved { position: u32 },
    /// A message was accepted.
    Mailed(MailReceipt),
    /// The caller holds these messages until the given time, each with the number of its claim.
    Claimed(Vec<(MailId, u64)>, Millis),
    /// The command succeeded without further result.
    Done,
}

/// The reply to a command, and the part of it that may come later.
#[derive(Debug)]
pub(crate) struct CommandCompletion {
    pub(crate) reply: ActorReply,
    /// The runs that a cancel stopped in descendant sessions, once all of them have applied it.
    pub(crate) cancelled_in_children: Option<oneshot::Receiver<Vec<RunId>>>,
}

/// Details of a reply that only the events of its step have.
#[derive(Debug, Clone, Default)]
pub(super) struct ReplyDetails {
    /// The run that a prompt became.
    pub(super) run: Option<RunId>,
    /// The receipt of a message, complete but for its seq.
    pub(super) mail: Option<MailReceipt>,
}

/// Translates a reply. `seq_of` gives the seq of an event by its index in the step.
pub(super) fn to_actor_reply(
    reply: &CommandReply,
    details: &ReplyDetails,
    seq_of: impl Fn(usize) -> Seq,
) -> Result<ActorReply, ApiError> {
    Ok(match reply {
        CommandReply::Accepted { position, event: Some(event) } => match &details.run {
            Some(run) => ActorReply::Accepted(PromptReceipt {
                run_id: run.clone(),
                state: if *position == 0 { RunStatus::Accepted } else { RunStatus::Queued },
                position: *position,
                seq: seq_of(*event),
            }),
            None => ActorReply::AlreadyAccepted,
        },
        CommandReply::Accepted { event: None, .. } => ActorReply::AlreadyAccepted,
        CommandReply::Cancelled(hit) => {
            ActorReply::Cancelled(CancelResponse { cancelled: hit.clone(), idle: hit.is_empty() })
        }
        CommandReply::Steered { run, event } => {
            ActorReply::Steered(SteerReceipt { run_id: run.clone(), seq: seq_of(*event) })
        }
        CommandReply::Answered(ask) => ActorReply::Answered(ask.clone()),
        CommandReply::QuestionOpened(ask) => ActorReply::AskOpened(ask.clone()),
        CommandReply::ToolCallJudged(verdict) => ActorReply::ToolCallJudged(verdict.clone()),
        CommandReply::Removed(runs) => ActorReply::Removed(runs.clone()),
        CommandReply::Moved { position } => ActorReply::Moved { position: *position },
        CommandReply::MailAccepted { event } => match (event, &details.mail) {
            (Some(event), Some(mail)) => {
                ActorReply::Mailed(MailReceipt { seq: seq_of(*event), ..mail.clone() })
            }
            _ => ActorReply::AlreadyAccepted,
        },
        CommandReply::MailClaimed { mail, until } => {
            ActorReply::Claimed(mail.iter().map(|(id, claim)| (id.clone(), claim.0)).collect(), *until)
        }
        CommandReply::Done => ActorReply::Done,
        CommandReply::Refused(refusal) => return Err(refusal_error(refusal)),
    })
}

fn refusal_error(refusal: &CommandRefusal) -> ApiError {
    match refusal {
        CommandRefusal::Closed => {
            ApiError::new(ErrorCode::SessionClosed, "the session is closed; create another one")
        }
        CommandRefusal::QueueFull => ApiError::new(
            ErrorCode::QueueFull,
            "100 prompts are already waiting; retry when some have run, or clear the queue",
        ),
        CommandRefusal::JournalLimit => ApiError::new(
            ErrorCode::JournalLimit,
            "the agent of this session has said as much as it may; raise `max_journal_mb` of the session to go on",
        ),
        CommandRefusal::RunIdConflict => run_id_conflict(),
        CommandRefusal::NotRunning => {
            ApiError::new(ErrorCode::NotRunning, "no run is active that could be steered; send a prompt")
        }
        CommandRefusal::NoTurn => ApiError::new(
            ErrorCode::NotRunning,
            "no run is active in which a person could be asked something",
        ),
        CommandRefusal::TooManyAsks => ApiError::new(
            ErrorCode::TooManyAsks,
            format!("{ASKS_OPEN_MAX} asks of this session are open; try again when some are answered"),
        ),
        CommandRefusal::SteerUnsupported => ApiError::new(
            ErrorCode::SteerUnsupported,
            "this agent cannot be steered; send a prompt, which waits its turn",
        ),
        CommandRefusal::NotQueued => {
            ApiError::new(ErrorCode::NotQueued, "the run does not wait in the queue; to stop it, cancel it")
        }
        CommandRefusal::MoveTargetNotQueued => ApiError::new(
            ErrorCode::NotQueued,
            "the run in `before` does not wait in the queue, so nothing was moved; list the queue and try again",
        ),
        CommandRefusal::AskNotOpen => ApiError::new(ErrorCode::NotFound, "no open ask has this id"),
        CommandRefusal::AskChanged => ask_changed(),
        CommandRefusal::InvalidAnswer(why) => ApiError::new(ErrorCode::InvalidAnswer, why.clone()),
        CommandRefusal::MailboxFull => ApiError::new(
            ErrorCode::MailboxFull,
            format!("this mailbox already holds {MAIL_OPEN_MAX} messages; claim some, or retry later"),
        ),
        CommandRefusal::NotClaimed => ApiError::new(
            ErrorCode::NotClaimed,
            "the message is not claimed by this claim; claim it, and acknowledge it in time",
        ),
    }
}

/// The error for an answer that was given to another input than that of the ask.
pub(crate) fn ask_changed() -> ApiError {
    ApiError::new(
        ErrorCode::AskChanged,
        "the ask is not the one that was shown: `input_sha256` differs; read the ask again and decide anew",
    )
}

/// The error for a run id that was used for another prompt.
pub(crate) fn run_id_conflict() -> ApiError {
    ApiError::new(ErrorCode::RunIdConflict, "this run_id was used for another prompt; choose a new one")
}
