//! Everything that can be in the journal, and the words that events, asks and runs share.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::ids::{AskId, MessageId, Number, RunId, Seq, SessionId, WorkerId, WorkspaceId};
use crate::policy::{Policy, Risk, Rule};
use crate::text::Blob;
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
        pub enum Body { $($(#[$doc])* $name($data),)* }

        impl Body {
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
    WorkspaceRemoved(Empty) = "workspace.removed";
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
    RunStarted(Empty) = "run.started";
    /// A message began.
    MessageCreated(MessageCreated) = "message.created";
    /// A piece of the answer.
    TextDelta(Delta) = "text.delta";
    /// A piece of what the agent thinks.
    ThoughtDelta(Delta) = "thought.delta";
    /// A tool call began.
    ToolStarted(Tool) = "tool.started";
    /// A tool call gave something out.
    ToolOutput(Tool) = "tool.output";
    /// A tool call ended.
    ToolFinished(Tool) = "tool.finished";
    /// The agent's plan.
    PlanUpdated(Plan) = "plan.updated";
    /// Something a person should see.
    NoticeShown(Notice) = "notice.shown";
    /// An increment of what was used.
    UsageReported(UsageReported) = "usage.reported";
    /// The model was called once more.
    TurnStarted(Empty) = "turn.started";
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
    RunCancelRequested(CancelRequested) = "run.cancel_requested";
    /// A run was asked to stop, did not in time, and is being killed.
    RunKillRequested(Empty) = "run.kill_requested";
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
    /// Something failed.
    ErrorRaised(RunError) = "error.raised";
    /// Nothing starts any more.
    HaltSet(HaltSet) = "halt.set";
    /// Things start again.
    HaltLifted(Empty) = "halt.lifted";
}

/// Nothing to add.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Empty {}

/// See [`Body::WorkspaceCreated`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct WorkspaceCreated {
    /// Resolved, without symbolic links.
    pub path: String,
    /// For people.
    pub name: String,
}

/// See [`Body::SessionCreated`]. What the session was made with; later changes are `session.updated`.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct SessionCreated {
    /// The agent's name.
    pub agent: String,
    /// For people.
    #[serde(default)]
    pub title: Option<String>,
    /// Which model, in the agent's words.
    #[serde(default)]
    pub model: Option<String>,
    /// What the agent is told before anything else.
    #[serde(default)]
    pub system_prompt: Option<String>,
    /// What it may do without asking.
    #[serde(default)]
    pub policy: Policy,
    /// The session above.
    #[serde(default)]
    pub parent: Option<SessionId>,
    /// Where its agent works, as an absolute path; absent if that is not known, as on another machine.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub directory: Option<String>,
    /// Limits.
    #[serde(default)]
    pub limits: Limits,
    /// Names of the variables that were given; their values are kept elsewhere.
    #[serde(default)]
    pub env: Vec<String>,
}

/// What a run may take. Absent means no limit but where a default is named.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct Limits {
    /// Dollars, for the session and all below it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub budget_usd: Option<f64>,
    /// Model calls in one run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_turns: Option<u32>,
    /// Seconds of one run, waiting for people not counted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub run_timeout_s: Option<f64>,
    /// Seconds an agent may take to stop before it is killed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cancel_grace_s: Option<f64>,
    /// How often an agent that crashed is started again within the window; 0: never.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub restarts: Option<u32>,
    /// Seconds that a crash counts for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub restart_window_s: Option<f64>,
}

/// See [`Body::SessionUpdated`]. Only what changed is there.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct SessionUpdated {
    /// The new title.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub title: Option<String>,
    /// The new model.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model: Option<String>,
    /// The new policy; it counts for later asks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub policy: Option<Policy>,
    /// The new limits, all of them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limits: Option<Limits>,
    /// The agent's own name for the conversation.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub agent_session_id: Option<String>,
    /// A session below was created.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub child: Option<SessionId>,
    /// A session below that a suspended run waits for has ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub child_ended: Option<ChildResult>,
    /// The last cancel of the session above that was applied here, by its number there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent_cancel: Option<Number>,
    /// A cancel was passed on to the sessions below; it bears the number of this event.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub cancels_below: bool,
    /// Every session below has applied the cancel of this number.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub below_cancelled: Option<Number>,
    /// The session takes no more prompts and closes when its last run has ended and those below have closed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub closing: Option<Closing>,
    /// Every session below has closed.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub below_closed: bool,
    /// The agent did not let go of a killed turn: it is stopped, and the next run gets another.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub stops_agent: bool,
}

/// How a session closes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Closing {
    /// Its events stay.
    Keep,
    /// Its events are deleted once it is closed.
    Purge,
}

/// See [`Body::SessionClosed`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SessionClosed {
    /// Whether its events are deleted now.
    #[serde(default)]
    pub purge: bool,
}

/// See [`Body::RunAccepted`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunAccepted {
    /// The prompt, or its head.
    pub prompt: String,
    /// The file that holds the whole of it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub blob: Option<Blob>,
    /// Its place in the queue; 0: it starts at once.
    pub position: u32,
    /// What tells it apart from another prompt under the same id.
    pub fingerprint: String,
    /// The steer that it was before.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub steer: Option<Number>,
}

/// Why a run waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum QueueReason {
    /// Another run of the session is before it.
    Busy,
    /// A halt is set.
    Halted,
    /// Too many agents are alive.
    Capacity,
}

/// See [`Body::RunQueued`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunQueued {
    /// Why it waits.
    pub reason: QueueReason,
    /// Its place in the queue, from 1.
    pub position: u32,
}

/// Who speaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// The prompt.
    User,
    /// The answer.
    Assistant,
}

/// A file that comes with a prompt. Small ones have their data here, others a file beside the journal.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct Attachment {
    /// Its name, for the agent and for people.
    pub name: String,
    /// What it is.
    pub mime: String,
    /// Its content in base64, if it is small.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub data: Option<String>,
    /// The file that holds its content, if it is not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub blob: Option<Blob>,
}

/// One part of a message.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum Part {
    /// What was said.
    Text {
        /// The words, or their head.
        text: String,
        /// The file that holds the whole.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        blob: Option<Blob>,
    },
    /// What was thought.
    Thought {
        /// The words.
        text: String,
    },
    /// A tool call.
    Tool {
        /// The call.
        call_id: String,
        /// The tool.
        name: String,
        /// Its arguments.
        #[schema(value_type = Object)]
        input: Value,
        /// What it gave out while it ran.
        text: String,
        /// What it gave in the end, if it has ended.
        #[schema(value_type = Object)]
        output: Option<Value>,
        /// Whether it failed.
        is_error: Option<bool>,
    },
    /// The plan as it last was.
    Plan {
        /// Its entries.
        entries: Vec<PlanEntry>,
    },
    /// What the turn was told on its way.
    Steer {
        /// The words.
        text: String,
    },
    /// A file.
    File {
        /// The file.
        file: Attachment,
    },
}

/// See [`Body::MessageCreated`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct MessageCreated {
    /// The message.
    pub message_id: MessageId,
    /// Who speaks.
    pub role: Role,
    /// What is known of it at once: all of the user's, nothing of the assistant's.
    pub parts: Vec<Part>,
}

/// See [`Body::TextDelta`] and [`Body::ThoughtDelta`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Delta {
    /// The message it belongs to; a late one belongs to none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message_id: Option<MessageId>,
    /// The piece.
    pub text: String,
    /// The run that had already ended when this came.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub after_run: Option<RunId>,
}

/// See [`Body::ToolStarted`], [`Body::ToolOutput`] and [`Body::ToolFinished`]: what is known of a call.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct Tool {
    /// The message it belongs to; a late one belongs to none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message_id: Option<MessageId>,
    /// The call.
    pub call_id: String,
    /// The tool.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Its arguments.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub input: Option<Value>,
    /// What it gave out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub text: Option<String>,
    /// What it gave in the end.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub output: Option<Value>,
    /// Whether it failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub is_error: Option<bool>,
    /// The run that had already ended when this came.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub after_run: Option<RunId>,
}

/// One line of a plan.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct PlanEntry {
    /// What is to be done.
    pub content: String,
    /// How far it is, in the agent's words.
    #[serde(default)]
    pub status: String,
}

/// See [`Body::PlanUpdated`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Plan {
    /// The message it belongs to; a late one belongs to none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message_id: Option<MessageId>,
    /// All of it.
    pub entries: Vec<PlanEntry>,
    /// The run that had already ended when this came.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub after_run: Option<RunId>,
}

/// See [`Body::NoticeShown`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Notice {
    /// What.
    pub text: String,
    /// The run that had already ended when this came.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub after_run: Option<RunId>,
}

/// Tokens and money.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(default)]
pub struct Usage {
    /// Tokens in.
    pub input_tokens: u64,
    /// Tokens out.
    pub output_tokens: u64,
    /// Dollars.
    pub cost_usd: f64,
}

impl std::ops::AddAssign for Usage {
    fn add_assign(&mut self, more: Self) {
        self.input_tokens = self.input_tokens.saturating_add(more.input_tokens);
        self.output_tokens = self.output_tokens.saturating_add(more.output_tokens);
        self.cost_usd += more.cost_usd;
    }
}

/// See [`Body::UsageReported`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct UsageReported {
    /// Tokens in.
    pub input_tokens: u64,
    /// Tokens out.
    pub output_tokens: u64,
    /// Dollars.
    pub cost_usd: f64,
    /// The run that had already ended when this came.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub after_run: Option<RunId>,
}

impl UsageReported {
    /// The numbers alone.
    pub fn usage(&self) -> Usage {
        Usage { input_tokens: self.input_tokens, output_tokens: self.output_tokens, cost_usd: self.cost_usd }
    }
}

/// What an agent waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum AskKind {
    /// May this tool be used?
    Permission,
    /// A question to a person.
    Question,
}

/// Where an ask stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum AskState {
    /// Nobody has answered.
    Pending,
    /// Somebody has.
    Answered,
    /// The agent no longer waits.
    Withdrawn,
}

/// An answer to a permission.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Decision {
    /// This time.
    AllowOnce,
    /// This tool, for the rest of the session, unless the risk is high.
    AllowAlways,
    /// No.
    Deny,
}

/// An answer to an ask.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, utoipa::ToSchema)]
pub struct Answer {
    /// For a permission.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub decision: Option<Decision>,
    /// For a question.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub value: Option<String>,
    /// Why; a deny's reason is told to the agent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
}

/// Who resolved an ask.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum ResolvedBy {
    /// A person, or a program in a person's place.
    User,
    /// The session's policy.
    Policy,
    /// Its run was cancelled.
    Cancel,
    /// The agent withdrew it.
    Agent,
    /// Its run ended.
    End,
}

/// Something an agent waits for.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct Ask {
    /// The ask.
    pub id: AskId,
    /// Whose.
    pub session_id: SessionId,
    /// In which run.
    pub run_id: RunId,
    /// Permission or question.
    pub kind: AskKind,
    /// The tool that wants permission.
    pub tool: Option<String>,
    /// Its arguments.
    #[schema(value_type = Object)]
    pub input: Value,
    /// How much harm it could do.
    pub risk: Risk,
    /// The question, or what the tool would do.
    pub prompt: String,
    /// What a question may be answered with; empty: anything.
    pub options: Vec<String>,
    /// Since when.
    pub opened_at: Millis,
    /// Where it stands.
    pub state: AskState,
    /// The answer that won.
    pub answer: Option<Answer>,
}

/// See [`Body::AskOpened`]: the ask itself. Flattened, which we otherwise avoid, because the contract shows the ask's
/// fields at the top of its events; asks are rare, so what flattening costs does not matter.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct AskOpened {
    /// The ask's id, under the name that other events have for it.
    pub ask_id: AskId,
    /// All of it.
    #[serde(flatten)]
    pub ask: Ask,
}

/// See [`Body::AskResolved`]: the ask as it now stands, and why.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct AskResolved {
    /// The ask's id, under the name that other events have for it.
    pub ask_id: AskId,
    /// All of it.
    #[serde(flatten)]
    pub ask: Ask,
    /// By whom.
    pub by: ResolvedBy,
    /// The rule that decided; absent if the policy is one word.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rule: Option<Rule>,
    /// Whether the policy would have asked, but a person had allowed the tool for the rest of the session.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub granted: bool,
}

impl AskResolved {
    /// Of an ask as it now stands; no rule had a part in it.
    pub fn new(ask: Ask, by: ResolvedBy) -> Self {
        Self { ask_id: ask.id.clone(), ask, by, rule: None, granted: false }
    }
}

/// See [`Body::AskDelivered`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AskDelivered {
    /// The ask's id.
    pub ask_id: AskId,
}

/// See [`Body::SteerAccepted`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SteerAccepted {
    /// The words, or their head.
    pub text: String,
    /// The file that holds the whole.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub blob: Option<Blob>,
}

/// See [`Body::SteerSent`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SteerSent {
    /// The steer, by the number of its `steer.accepted`.
    pub steer: Number,
}

/// See [`Body::SteerTaken`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SteerTaken {
    /// The steer, by the number of its `steer.accepted`.
    pub steer: Number,
}

/// See [`Body::SteerMissed`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SteerMissed {
    /// The steer, by the number of its `steer.accepted`.
    pub steer: Number,
    /// The run it becomes; none if the run it was meant for was cancelled after it.
    pub next_run_id: Option<RunId>,
}

/// Who or what stops a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StopCause {
    /// A client.
    User,
    /// The session above was cancelled.
    Parent,
    /// The session is closing.
    Close,
    /// A halt that cancels.
    Halt,
    /// Over its time.
    Timeout,
    /// Over its turns.
    MaxTurns,
    /// Over its money.
    Budget,
}

impl StopCause {
    /// What a run that was stopped for this ends as.
    pub fn finish_reason(self) -> FinishReason {
        match self {
            Self::User | Self::Parent | Self::Close | Self::Halt => FinishReason::Cancelled,
            Self::Timeout => FinishReason::Timeout,
            Self::MaxTurns => FinishReason::MaxTurns,
            Self::Budget => FinishReason::BudgetExceeded,
        }
    }
}

/// See [`Body::RunCancelRequested`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CancelRequested {
    /// By whom or what.
    pub by: StopCause,
    /// In the client's words.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
}

/// Why a run ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum FinishReason {
    /// The agent had nothing more to say.
    EndTurn,
    /// A cancel hit it.
    Cancelled,
    /// The agent failed.
    Error,
    /// The model's limit on its answer.
    MaxTokens,
    /// Over its turns.
    MaxTurns,
    /// Over the budget of its session or of one above.
    BudgetExceeded,
    /// Over its time.
    Timeout,
    /// The model would not.
    Refused,
    /// Worker or machine lost in mid-turn.
    Interrupted,
}

/// How a message ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct Finish {
    /// As its run.
    pub reason: FinishReason,
}

/// See [`Body::MessageFinished`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MessageFinished {
    /// The message.
    pub message_id: MessageId,
    /// Always the assistant: the user's is complete when it is created.
    pub role: Role,
    /// How.
    pub finish: Finish,
}

/// What went wrong.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct RunError {
    /// A stable snake_case word.
    pub code: String,
    /// A sentence.
    pub message: String,
    /// The agent's exit status, if it exited.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exit_status: Option<i32>,
    /// The last lines that it wrote to stderr.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub stderr: Vec<String>,
}

impl RunError {
    /// An error with nothing more to say.
    pub fn new(code: &str, message: impl Into<String>) -> Self {
        Self { code: code.to_owned(), message: message.into(), exit_status: None, stderr: Vec::new() }
    }
}

/// What became of the processes that a run started.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, utoipa::ToSchema)]
pub struct Processes {
    /// Ended by us.
    pub killed: u32,
    /// Those that the kernel would not let die.
    pub survivors: u32,
}

/// See [`Body::WorkerStarted`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkerStarted {
    /// The worker.
    pub worker_id: WorkerId,
}

/// See [`Body::WorkerReattached`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct WorkerReattached {
    /// The worker.
    pub worker_id: WorkerId,
    /// Milliseconds that the turn under way has run, without its waits for people: only the worker was there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub run_time_ms: Option<u64>,
}

/// See [`Body::WorkerExited`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct WorkerExited {
    /// The worker.
    pub worker_id: WorkerId,
    /// Why.
    pub reason: ExitReason,
    /// What went wrong.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<RunError>,
}

/// Why a worker is no more.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ExitReason {
    /// Nobody needed it.
    Stopped,
    /// Its agent failed.
    Failed,
    /// It vanished.
    Lost,
}

/// See [`Body::RunSuspended`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RunSuspended {
    /// The sessions that it waits for.
    pub children: Vec<SessionId>,
    /// The conversation that it is resumed with.
    pub transcript: Vec<Value>,
}

/// See [`Body::RunResumed`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RunResumed {
    /// What became of the sessions that it waited for.
    pub children: Vec<ChildResult>,
}

/// What became of a session below.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ChildResult {
    /// The session.
    pub session_id: SessionId,
    /// How its last run ended; `None`: it had none.
    pub finish_reason: Option<FinishReason>,
    /// What that run said, or its head.
    pub text: String,
}

/// See [`Body::RunFinished`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RunFinished {
    /// Why it ended.
    pub finish_reason: FinishReason,
    /// The agent's result if it gave one, else all its text; or the head of that.
    pub text: String,
    /// The file that holds the whole.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub blob: Option<Blob>,
    /// What went wrong.
    pub error: Option<RunError>,
    /// What it used.
    pub usage: Usage,
    /// What became of the processes that it started.
    pub processes: Processes,
}

/// See [`Body::HaltSet`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HaltSet {
    /// In the client's words.
    pub reason: Option<String>,
    /// Whether live runs are cancelled.
    pub cancel: bool,
}
