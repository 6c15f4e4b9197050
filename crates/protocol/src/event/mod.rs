//! Everything that can be in the journal, and the words that events, asks and runs share.
//!
//! Layout: `session` (what a conversation is made with), `run` (what becomes of a prompt), `message` (what is said),
//! `ask` (what an agent waits for), `fleet` (what is given to whom), `mail` (what sessions write to each other).

mod ask;
mod fleet;
mod mail;
mod message;
mod run;
mod session;

use serde::{Deserialize, Serialize};
use serde_json::Value;

pub use self::ask::{
    Ask, AskAnswer, AskDelivered, AskKind, AskOpened, AskResolved, AskStatus, PermissionDecision, ResolvedBy,
};
pub use self::fleet::{
    FleetFinished, FleetMentioned, FleetRouted, FleetRunEnded, FleetStarted, FleetStopReason, FleetUpdated,
    RouteAssignment, RouteSource, SubtaskRef,
};
pub use self::mail::{MailAcknowledged, MailClaimed, MailDelivered, MailQuarantined, MailReturned, MailSent};
pub use self::message::{
    Attachment, MessageCreated, MessageDelta, MessageFinish, MessageFinished, MessagePart, MessageRole,
    NoticeShown, PlanEntry, PlanUpdated, TokenUsage, ToolCallEvent, UsageReported,
};
pub use self::run::{
    ChildResult, FinishReason, ProcessCleanup, QueueReason, RunAccepted, RunCancelRequested, RunError,
    RunFinished, RunQueued, RunResumed, RunStopCause, RunSuspended, SteerAccepted, SteerMissed, SteerSent,
    SteerTaken,
};
pub use self::session::{
    FleetMembership, SessionCloseMode, SessionClosed, SessionCreated, SessionLimits, SessionUpdated,
    SessionWorktree, WorkerExitReason, WorkerExited, WorkerReattached, WorkerStarted,
};
use crate::ids::{RunId, Seq, SessionId, WorkspaceId};
use crate::time::Millis;

/// One record of the journal, as clients see it.
#[derive(Debug, Clone, Serialize, Deserialize, utoipa::ToSchema)]
pub struct Event {
    /// Position in the journal.
    #[schema(value_type = u64)]
    pub seq: Seq,
    /// When it was decided.
    pub ts: Millis,
    /// Whose project.
    pub workspace_id: Option<WorkspaceId>,
    /// Whose conversation.
    pub session_id: Option<SessionId>,
    /// Whose run.
    pub run_id: Option<RunId>,
    /// What happened.
    pub kind: String,
    /// The particulars, by kind.
    #[schema(value_type = Object)]
    pub data: Value,
}

macro_rules! kinds {
    ($($(#[$doc:meta])* $name:ident($data:ty) = $kind:literal;)*) => {
        /// What happened, with its particulars. The kind and the data are stored and sent apart.
        #[derive(Debug, Clone, PartialEq)]
        pub enum EventBody { $($(#[$doc])* $name($data),)* }

        impl EventBody {
            /// Every kind that this version writes.
            pub const KINDS: &[&str] = &[$($kind,)*];

            /// The kind, as it stands on the wire.
            pub fn kind(&self) -> &'static str {
                match self { $(Self::$name(_) => $kind,)* }
            }

            /// The data as JSON.
            pub fn encode(&self) -> Result<Vec<u8>, serde_json::Error> {
                match self { $(Self::$name(data) => serde_json::to_vec(data),)* }
            }

            /// Reads a stored event; `None` for a kind that this version does not know.
            pub fn decode(kind: &str, data: &[u8]) -> Result<Option<Self>, serde_json::Error> {
                match kind {
                    $($kind => serde_json::from_slice(data).map(|data| Some(Self::$name(data))),)*
                    _ => Ok(None),
                }
            }
        }
    };
}

kinds! {
    /// A directory is known from here on.
    WorkspaceCreated(WorkspaceCreated) = "workspace.created";
    /// A directory was forgotten.
    WorkspaceRemoved(EmptyEventData) = "workspace.removed";
    /// A conversation exists.
    SessionCreated(SessionCreated) = "session.created";
    /// Something about a conversation changed.
    SessionUpdated(SessionUpdated) = "session.updated";
    /// A conversation has ended.
    SessionClosed(SessionClosed) = "session.closed";
    /// A prompt is ours.
    RunAccepted(RunAccepted) = "run.accepted";
    /// It waits.
    RunQueued(RunQueued) = "run.queued";
    /// The agent is ready and gets the prompt next.
    RunStarted(EmptyEventData) = "run.started";
    /// A message began.
    MessageCreated(MessageCreated) = "message.created";
    /// A piece of the answer.
    TextDelta(MessageDelta) = "text.delta";
    /// A piece of what the agent thinks.
    ThoughtDelta(MessageDelta) = "thought.delta";
    /// A tool call began.
    ToolStarted(ToolCallEvent) = "tool.started";
    /// A tool call gave something out.
    ToolOutput(ToolCallEvent) = "tool.output";
    /// A tool call ended.
    ToolFinished(ToolCallEvent) = "tool.finished";
    /// The agent's plan.
    PlanUpdated(PlanUpdated) = "plan.updated";
    /// Something a person should see.
    NoticeShown(NoticeShown) = "notice.shown";
    /// An increment of what was used.
    UsageReported(UsageReported) = "usage.reported";
    /// The model was called once more.
    TurnStarted(EmptyEventData) = "turn.started";
    /// The agent waits for a person.
    AskOpened(AskOpened) = "ask.opened";
    /// It need not wait any more.
    AskResolved(AskResolved) = "ask.resolved";
    /// The agent has the answer.
    AskDelivered(AskDelivered) = "ask.delivered";
    /// A steer is ours.
    SteerAccepted(SteerAccepted) = "steer.accepted";
    /// It waited for its run to start, and goes to the agent now.
    SteerSent(SteerSent) = "steer.sent";
    /// The turn took it in.
    SteerTaken(SteerTaken) = "steer.taken";
    /// The turn did not.
    SteerMissed(SteerMissed) = "steer.missed";
    /// A run is to stop.
    RunCancelRequested(RunCancelRequested) = "run.cancel_requested";
    /// A run was asked to stop, did not in time, and is being killed.
    RunKillRequested(EmptyEventData) = "run.kill_requested";
    /// A run waits for the sessions that it started, and costs no process meanwhile.
    RunSuspended(RunSuspended) = "run.suspended";
    /// They have ended, and the agent gets their results next.
    RunResumed(RunResumed) = "run.resumed";
    /// A message is complete.
    MessageFinished(MessageFinished) = "message.finished";
    /// A run has ended.
    RunFinished(RunFinished) = "run.finished";
    /// The session gets a worker.
    WorkerStarted(WorkerStarted) = "worker.started";
    /// A daemon that had lost it found it again.
    WorkerReattached(WorkerReattached) = "worker.reattached";
    /// It is no more.
    WorkerExited(WorkerExited) = "worker.exited";
    /// Several sessions work together from here on.
    FleetStarted(FleetStarted) = "fleet.started";
    /// Something about a fleet changed.
    FleetUpdated(FleetUpdated) = "fleet.updated";
    /// Sessions of a fleet are given what others have ended with, or a person is asked.
    FleetRouted(FleetRouted) = "fleet.routed";
    /// Sessions of a fleet are written to by one that mentioned them.
    FleetMentioned(FleetMentioned) = "fleet.mentioned";
    /// A fleet has ended.
    FleetFinished(FleetFinished) = "fleet.finished";
    /// A message is in the mailbox of its session.
    MailSent(MailSent) = "mail.sent";
    /// The agent has it.
    MailDelivered(MailDelivered) = "mail.delivered";
    /// Somebody has it for a while.
    MailClaimed(MailClaimed) = "mail.claimed";
    /// Whoever had it is done with it.
    MailAcknowledged(MailAcknowledged) = "mail.acknowledged";
    /// It is in the mailbox again, until somebody claims it.
    MailReturned(MailReturned) = "mail.returned";
    /// Nobody gets it any more.
    MailQuarantined(MailQuarantined) = "mail.quarantined";
    /// Something failed.
    ErrorRaised(RunError) = "error.raised";
    /// Nothing starts any more.
    HaltSet(HaltSet) = "halt.set";
    /// Things start again.
    HaltLifted(EmptyEventData) = "halt.lifted";
}

/// Nothing to add.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct EmptyEventData {}

/// See [`EventBody::WorkspaceCreated`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct WorkspaceCreated {
    /// Resolved, without symbolic links.
    pub path: String,
    /// For people.
    pub name: String,
}

/// See [`EventBody::HaltSet`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HaltSet {
    /// In the client's words.
    pub reason: Option<String>,
    /// Whether live runs are cancelled.
    pub cancel: bool,
}
