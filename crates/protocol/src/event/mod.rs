//! Every kind of event in the journal, and the types that events share with the API.
//!
//! Layout: `actor` (who caused an event), `session` (settings of a session and its workers), `run` (the course of a
//! prompt, and steers), `message` (messages, tool calls, usage), `ask` (permission requests and questions), `fleet`
//! (routing between sessions), `mail` (messages between sessions), `quota` (exhausted quotas of accounts), `token`
//! (tokens of clients and workers).

mod actor;
mod ask;
mod fleet;
mod mail;
mod message;
mod quota;
mod run;
mod session;
mod token;

use serde::{Deserialize, Serialize};
use serde_json::Value;

pub use self::actor::EventActor;
pub use self::ask::{
    Ask, AskAnswer, AskDelivered, AskKind, AskOpened, AskResolved, AskStatus, PermissionDecision, ResolvedBy,
};
pub use self::fleet::{
    FleetFinished, FleetMentioned, FleetRouted, FleetRunEnded, FleetStarted, FleetStopReason, FleetUpdated,
    RouteAssignment, RouteSource, SubtaskRef,
};
pub use self::mail::{MailAcknowledged, MailClaimed, MailDelivered, MailQuarantined, MailReturned, MailSent};
pub use self::message::{
    Attachment, ContextCompacted, ContextUpdated, ContextUsage, MessageCreated, MessageDelta, MessageFinish,
    MessageFinished, MessagePart, MessageRole, NoticeShown, PlanEntry, PlanUpdated, TokenUsage,
    ToolCallEvent, UsageReported,
};
pub use self::quota::{QuotaReached, QuotaReleaseCause, QuotaReleased};
pub use self::run::{
    ChildResult, FinishReason, ProcessCleanup, QueueReason, RunAccepted, RunCancelRequested, RunError,
    RunFinished, RunMoved, RunQueued, RunResumed, RunStopCause, RunSuspended, SteerAccepted, SteerMissed,
    SteerSent, SteerTaken, SurvivingProcess,
};
pub use self::session::{
    FleetMembership, ModeChangeSource, ModeChanged, SessionCloseMode, SessionClosed, SessionCreated,
    SessionLimits, SessionUpdated, SessionWorktree, WorkerExitReason, WorkerExited, WorkerReattached,
    WorkerStarted,
};
pub use self::token::{TokenCreated, TokenRevoked};
use crate::ids::{RunId, Seq, SessionId, WorkspaceId};
use crate::time::Millis;

/// One event of the journal.
#[derive(Debug, Clone, Serialize, Deserialize, utoipa::ToSchema)]
pub struct Event {
    /// Position in the journal. It strictly increases over the whole journal.
    #[schema(value_type = u64)]
    pub seq: Seq,
    /// When the daemon decided the event.
    pub ts: Millis,
    pub workspace_id: Option<WorkspaceId>,
    pub session_id: Option<SessionId>,
    pub run_id: Option<RunId>,
    /// Kind of event, such as `run.finished`. New kinds may be added, so ignore those that you do not know.
    pub kind: String,
    /// Fields that depend on the kind.
    #[schema(value_type = Object)]
    pub data: Value,
}

macro_rules! kinds {
    ($($(#[$doc:meta])* $name:ident($data:ty) = $kind:literal;)*) => {
        /// The kind of an event with its data. Kind and data are stored and sent as separate fields.
        #[derive(Debug, Clone, PartialEq)]
        pub enum EventBody { $($(#[$doc])* $name($data),)* }

        impl EventBody {
            /// Every kind that this version writes.
            pub const KINDS: &[&str] = &[$($kind,)*];

            /// The kind as it appears in JSON.
            pub fn kind(&self) -> &'static str {
                match self { $(Self::$name(_) => $kind,)* }
            }

            /// The data as JSON, with who caused the event if a command did.
            pub fn encode(&self, actor: Option<&EventActor>) -> Result<Vec<u8>, serde_json::Error> {
                let mut data = match self { $(Self::$name(data) => serde_json::to_vec(data)?,)* };
                if let Some(actor) = actor {
                    actor.add_to(&mut data)?;
                }
                Ok(data)
            }

            /// Parses a stored event. Returns `None` for a kind that this version does not know.
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
    /// A directory was added.
    WorkspaceCreated(WorkspaceCreated) = "workspace.created";
    /// A workspace was forgotten.
    WorkspaceRemoved(EmptyEventData) = "workspace.removed";
    /// A session was created.
    SessionCreated(SessionCreated) = "session.created";
    /// Settings or bookkeeping of a session changed.
    SessionUpdated(SessionUpdated) = "session.updated";
    /// The mode of a session's agent changed.
    ModeChanged(ModeChanged) = "mode.changed";
    /// A session is closed.
    SessionClosed(SessionClosed) = "session.closed";
    /// A prompt is in the journal.
    RunAccepted(RunAccepted) = "run.accepted";
    /// A run waits.
    RunQueued(RunQueued) = "run.queued";
    /// A queued run has another place in the queue.
    RunMoved(RunMoved) = "run.moved";
    /// The agent is ready and gets the prompt next.
    RunStarted(EmptyEventData) = "run.started";
    /// A message begins.
    MessageCreated(MessageCreated) = "message.created";
    /// A piece of the answer.
    TextDelta(MessageDelta) = "text.delta";
    /// A piece of the agent's thinking.
    ThoughtDelta(MessageDelta) = "thought.delta";
    /// A tool call started.
    ToolStarted(ToolCallEvent) = "tool.started";
    /// A tool call produced output.
    ToolOutput(ToolCallEvent) = "tool.output";
    /// A tool call ended.
    ToolFinished(ToolCallEvent) = "tool.finished";
    /// The agent's complete current plan.
    PlanUpdated(PlanUpdated) = "plan.updated";
    /// Something that a person should see.
    NoticeShown(NoticeShown) = "notice.shown";
    /// Usage since the last report, not a total.
    UsageReported(UsageReported) = "usage.reported";
    /// How full the agent's context is.
    ContextUpdated(ContextUpdated) = "context.updated";
    /// The agent replaced the older part of its conversation with a summary.
    ContextCompacted(ContextCompacted) = "context.compacted";
    /// The model was called once more.
    TurnStarted(EmptyEventData) = "turn.started";
    /// The agent waits for a person.
    AskOpened(AskOpened) = "ask.opened";
    /// An ask was answered or withdrawn.
    AskResolved(AskResolved) = "ask.resolved";
    /// The agent has received the answer.
    AskDelivered(AskDelivered) = "ask.delivered";
    /// A steer is in the journal.
    SteerAccepted(SteerAccepted) = "steer.accepted";
    /// A steer that waited for its run to start now goes to the agent.
    SteerSent(SteerSent) = "steer.sent";
    /// The turn took a steer.
    SteerTaken(SteerTaken) = "steer.taken";
    /// The turn ended without taking a steer.
    SteerMissed(SteerMissed) = "steer.missed";
    /// A run must stop.
    RunCancelRequested(RunCancelRequested) = "run.cancel_requested";
    /// The agent did not stop within the grace period and is killed.
    RunKillRequested(EmptyEventData) = "run.kill_requested";
    /// A run waits for the sessions that it started, and uses no process while it waits.
    RunSuspended(RunSuspended) = "run.suspended";
    /// The sessions that a run waited for have ended, and the agent gets their results next.
    RunResumed(RunResumed) = "run.resumed";
    /// An assistant message is complete.
    MessageFinished(MessageFinished) = "message.finished";
    /// A run has ended.
    RunFinished(RunFinished) = "run.finished";
    /// The session gets a worker.
    WorkerStarted(WorkerStarted) = "worker.started";
    /// The daemon has found a worker again that it had lost contact with.
    WorkerReattached(WorkerReattached) = "worker.reattached";
    /// A worker is gone.
    WorkerExited(WorkerExited) = "worker.exited";
    /// A fleet and all its sessions were created.
    FleetStarted(FleetStarted) = "fleet.started";
    /// A run of a fleet ended, or its result or stop state changed.
    FleetUpdated(FleetUpdated) = "fleet.updated";
    /// A route of a fleet fires: sessions get prompts, or a person is asked.
    FleetRouted(FleetRouted) = "fleet.routed";
    /// A session of a fleet mentioned others, and its message goes to them.
    FleetMentioned(FleetMentioned) = "fleet.mentioned";
    /// A fleet has ended.
    FleetFinished(FleetFinished) = "fleet.finished";
    /// A mail message is in the journal.
    MailSent(MailSent) = "mail.sent";
    /// The agent has the message.
    MailDelivered(MailDelivered) = "mail.delivered";
    /// A client claimed a message for a limited time.
    MailClaimed(MailClaimed) = "mail.claimed";
    /// The claimer is done with the message.
    MailAcknowledged(MailAcknowledged) = "mail.acknowledged";
    /// A message waits in the mailbox again.
    MailReturned(MailReturned) = "mail.returned";
    /// A message will not be delivered any more.
    MailQuarantined(MailQuarantined) = "mail.quarantined";
    /// An agent failed.
    ErrorRaised(RunError) = "error.raised";
    /// A token for a client or a worker was created.
    TokenCreated(TokenCreated) = "token.created";
    /// A token was revoked.
    TokenRevoked(TokenRevoked) = "token.revoked";
    /// An agent reported that the quota of its account is exhausted: no run of that account starts before it resets.
    QuotaReached(QuotaReached) = "quota.reached";
    /// The quota of an account has reset, or a person released it: runs of that account start again.
    QuotaReleased(QuotaReleased) = "quota.released";
    /// A halt was set: no run starts any more.
    HaltSet(HaltSet) = "halt.set";
    /// The halt was lifted: runs start again.
    HaltLifted(EmptyEventData) = "halt.lifted";
}

/// Data of an event kind that has no fields.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct EmptyEventData {}

/// Data of `workspace.created`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct WorkspaceCreated {
    /// Absolute path, with symbolic links resolved.
    pub path: String,
    /// Display name.
    pub name: String,
}

/// Data of `halt.set`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HaltSet {
    /// Reason given by the client.
    pub reason: Option<String>,
    /// Whether live runs are cancelled.
    pub cancel: bool,
}
