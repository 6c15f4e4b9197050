//! Requests and responses of the HTTP API. The docs of these types and fields are the descriptions in `openapi.json`,
//! so they are written for users of the API.

mod storage;
mod tokens;
mod workers;

use std::collections::BTreeMap;

use serde::{Deserialize, Deserializer, Serialize};
use serde_json::Value;

use crate::event::{
    Ask, ContextUsage, Event, FinishReason, FleetMembership, MessageFinish, MessagePart, MessageRole,
    ResolvedBy, RunError, TokenUsage,
};
use crate::ids::{AccountId, MessageId, RunId, Seq, SessionId, WorkspaceId};
use crate::mail::MailDelivery;
use crate::policy::{Policy, PolicyRule};
use crate::sandbox::{NetworkSetting, SandboxLevel, SandboxSetting};
use crate::text::BlobRef;
use crate::time::Millis;

pub use self::storage::{GcReport, GcRequest, JournalCheckReport, JournalDamage};
pub use self::tokens::{ClientToken, CreatedClientToken, NewClientToken, TokenRole};
pub use self::workers::{
    CreatedWorkerToken, JoinedWorker, NewWorkerToken, ProcessSummary, Worker, WorkerToken,
};

/// Response header with the daemon's version. Every response carries it, so a client can notice that its version
/// differs.
pub const VERSION_HEADER: &str = "quarterdeck-version";
/// Response header of a list that has more items. Its value is the `?after=` of the next page.
pub const NEXT_AFTER: &str = "next-after";

/// Response of `GET /healthz`.
#[derive(Debug, Clone, Serialize, Deserialize, utoipa::ToSchema)]
pub struct Health {
    /// Always `ok`.
    pub status: String,
}

/// Response of `GET /v1/version`.
#[derive(Debug, Clone, Serialize, Deserialize, utoipa::ToSchema)]
#[schema(as = Version)]
pub struct DaemonVersion {
    /// Version of the daemon.
    pub version: String,
    /// Version of this API.
    pub api: String,
    /// Process id of the daemon.
    pub pid: u32,
    /// The daemon's home directory.
    pub home: String,
    pub started_at: Millis,
}

/// Body of `POST /v1/workspaces`.
#[derive(Debug, Clone, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NewWorkspace {
    /// Absolute path of the project directory.
    pub path: String,
    /// Display name. Defaults to the name of the directory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
}

/// A project directory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct Workspace {
    pub id: WorkspaceId,
    /// Absolute path, with symbolic links resolved.
    pub path: String,
    /// Display name.
    pub name: String,
    pub created_at: Millis,
}

/// Body of `POST /v1/workspaces/{w}/sessions`.
#[derive(Debug, Clone, Default, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NewSession {
    /// Name of the agent, as listed by `GET /v1/agents`; `NAME@LABEL` for an agent on a joined machine; or a form
    /// such as `acp:CMD` that describes an agent by itself.
    pub agent: String,
    /// Absolute path of the agent's program, which may differ from the one that the daemon would find in its own `PATH`.
    /// Only accepted over the daemon's socket, and only for an agent of this machine that has a program.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub program: Option<String>,
    /// Title for people.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub title: Option<String>,
    /// Model that the agent should use, by the agent's own name for it. Defaults to the agent's own choice.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model: Option<String>,
    /// Mode that the agent should be in, one of its `modes`, such as `plan`. Defaults to the mode in which it starts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mode: Option<String>,
    /// System prompt for the agent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub system_prompt: Option<String>,
    /// What the agent may do without approval. Defaults to the daemon's `policy` setting, which is `ask` unless
    /// changed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub policy: Option<Policy>,
    /// Parent session.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent: Option<SessionId>,
    /// Whether the session gets its own git worktree.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub worktree: Option<bool>,
    /// Whether the agent gets the tools of `qd mcp`. Defaults to the daemon's setting.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mcp: Option<bool>,
    /// How strongly the agent is confined. Defaults to its manifest's level, then to the daemon's `sandbox` setting, which
    /// is `auto` unless changed. A level other than `auto` that this machine cannot give is refused.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sandbox: Option<SandboxSetting>,
    /// Whether the agent reaches the network. Without it, it still reaches the hosts of its model that its manifest names.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network: Option<NetworkSetting>,
    /// Budget in US dollars for the session and all sessions below it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub budget_usd: Option<f64>,
    /// Maximum number of model calls in one run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_turns: Option<u32>,
    /// Maximum duration of one run in seconds. Time spent waiting for people does not count.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub run_timeout_s: Option<f64>,
    /// Seconds that an agent may take to stop after a cancel before it is killed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cancel_grace_s: Option<f64>,
    /// How many times a crashed agent is restarted within `restart_window_s`; 0 means never.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub restarts: Option<u32>,
    /// Seconds for which a crash counts towards `restarts`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub restart_window_s: Option<f64>,
    /// MiB that the agent may report in all. Defaults to 4096.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_journal_mb: Option<u64>,
    /// Environment variables for the agent. Their values are never shown again.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub env: BTreeMap<String, String>,
    /// How mail without its own `deliver` reaches the session. Defaults to `prompt`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mail: Option<MailDelivery>,
    /// The agent's own id of a conversation that was begun outside Quarterdeck. The first prompt continues it. Only for
    /// an agent that resumes conversations, and without `worktree`, because a conversation stays in its directory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub agent_session_id: Option<String>,
}

/// Body of `PATCH /v1/workspaces/{w}/sessions/{s}`. A limit that is `null` is removed; an absent field does not change.
#[derive(Debug, Clone, Default, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
pub struct SessionPatch {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub title: Option<String>,
    /// New model, by the agent's own name for it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model: Option<String>,
    /// New mode, one of the agent's `modes`. It applies from the next prompt on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mode: Option<String>,
    /// New policy. It applies to later asks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub policy: Option<Policy>,
    /// How strongly the agent is confined, from its next start on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sandbox: Option<SandboxSetting>,
    /// Whether the agent reaches the network, from its next start on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network: Option<NetworkSetting>,
    /// New budget in US dollars for the session and all sessions below it.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "deserialize_nullable")]
    pub budget_usd: Option<Option<f64>>,
    /// New maximum number of model calls in one run.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "deserialize_nullable")]
    pub max_turns: Option<Option<u32>>,
    /// New maximum duration of one run in seconds. Time spent waiting for people does not count.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "deserialize_nullable")]
    pub run_timeout_s: Option<Option<f64>>,
    /// New number of seconds that an agent may take to stop after a cancel before it is killed.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "deserialize_nullable")]
    pub cancel_grace_s: Option<Option<f64>>,
    /// How many times a crashed agent is restarted within `restart_window_s`; 0 means never.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "deserialize_nullable")]
    pub restarts: Option<Option<u32>>,
    /// Seconds for which a crash counts towards `restarts`.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "deserialize_nullable")]
    pub restart_window_s: Option<Option<f64>>,
    /// New number of MiB that the agent may report in all.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "deserialize_nullable")]
    pub max_journal_mb: Option<Option<u64>>,
}

/// Tells `null` (`Some(None)`) from an absent field (`None`): serde calls this only for a field that is present.
fn deserialize_nullable<'de, D: Deserializer<'de>, T: Deserialize<'de>>(
    deserializer: D,
) -> Result<Option<Option<T>>, D::Error> {
    Option::deserialize(deserializer).map(Some)
}

/// What a session is doing now.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(rename_all = "snake_case")]
#[schema(as = SessionState)]
pub enum SessionStatus {
    /// No run is active. Queued runs may be waiting for the end of a halt, for the reset of a quota, or for a free agent
    /// slot.
    Idle,
    /// A run is next, and its agent is not ready yet.
    Starting,
    Running,
    /// The active run waits for a person or for sessions below.
    Waiting,
    /// The session has ended.
    Closed,
}

/// A conversation with one agent.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct Session {
    pub id: SessionId,
    pub workspace_id: WorkspaceId,
    /// Name of the agent.
    pub agent: String,
    /// Title for people.
    pub title: Option<String>,
    /// What the session is doing now.
    pub state: SessionStatus,
    /// True from the moment a prompt is accepted until no run is active or queued.
    pub busy: bool,
    /// Parent session.
    pub parent: Option<SessionId>,
    /// The fleet that the session belongs to, and its name there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fleet: Option<FleetMembership>,
    /// Model that the agent should use, by the agent's own name for it.
    pub model: Option<String>,
    /// The agent's mode. Absent as long as it is in the mode in which it starts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mode: Option<String>,
    /// System prompt for the agent.
    pub system_prompt: Option<String>,
    /// What the agent may do without approval.
    pub policy: Policy,
    /// Number of queued runs.
    pub queued: u32,
    /// Total usage of all runs of the session.
    pub usage: TokenUsage,
    /// How full the context of the agent's model is. Absent until the agent reports it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub context: Option<ContextUsage>,
    /// The agent's own id for the conversation.
    pub agent_session_id: Option<String>,
    /// Path of the session's git worktree, if it has one.
    pub worktree: Option<String>,
    /// Whether the agent gets the tools of `qd mcp`. Absent if the session leaves it to the daemon's setting.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mcp: Option<bool>,
    /// How strongly the agent is confined. Responses always have it; rows only if it is not the default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sandbox: Option<SessionSandbox>,
    /// Budget in US dollars for the session and all sessions below it.
    pub budget_usd: Option<f64>,
    /// Maximum number of model calls in one run.
    pub max_turns: Option<u32>,
    /// Maximum duration of one run in seconds. Time spent waiting for people does not count.
    pub run_timeout_s: Option<f64>,
    /// Seconds that an agent may take to stop after a cancel before it is killed.
    pub cancel_grace_s: Option<f64>,
    /// How many times a crashed agent is restarted within `restart_window_s`; 0 means never.
    pub restarts: Option<u32>,
    /// Seconds for which a crash counts towards `restarts`.
    pub restart_window_s: Option<f64>,
    /// MiB that the agent may report in all; absent if it is the default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_journal_mb: Option<u64>,
    /// Names of the environment variables given to the agent. Their values are never shown.
    pub env: Vec<String>,
    /// How mail without its own `deliver` reaches the session.
    #[serde(default)]
    pub mail: MailDelivery,
    /// Cost in US dollars of this session and all sessions below it. Present only with `?tree=true`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tree_cost_usd: Option<f64>,
    /// The account that the agent uses: the agent with its login. Sessions of the same account share its quota. Absent in
    /// what earlier releases stored.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub account: Option<AccountId>,
    /// When the quota of its account resets. Present only while it is exhausted: until then no run of the session starts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub quota_until: Option<Millis>,
    /// True if the session takes no more prompts and closes when its last run has ended.
    pub closing: bool,
    /// The run that the session is working on, or starts next. Absent if no prompt is waiting or in progress.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub active_run: Option<ActiveRun>,
    /// The run that ended last. Absent if none has ended, or only before this field existed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_run: Option<LastRun>,
    /// The beginning of the first prompt. Present only if the session has no title.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub auto_title: Option<String>,
    pub created_at: Millis,
    /// Time of the last change.
    pub updated_at: Millis,
}

/// How strongly a session's agent is confined.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, utoipa::ToSchema)]
pub struct SessionSandbox {
    /// The level that was asked for. Until the agent first starts, only what the session itself asks for is known.
    pub asked: SandboxSetting,
    /// The level in force since the agent's last start. Absent before the first.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub level: Option<SandboxLevel>,
    /// Whether the agent reaches the network.
    #[serde(default)]
    pub network: NetworkSetting,
    /// Whether the agent is to reach the network from its next start on, if that differs from `network`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network_asked: Option<NetworkSetting>,
    /// Why the agent is not confined although nobody asked for `off`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
}

/// The run that a session is working on, or starts next.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct ActiveRun {
    pub id: RunId,
    pub accepted_at: Millis,
    /// When the agent was ready for the prompt. Absent until then.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub started_at: Option<Millis>,
}

/// The run of a session that ended last.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct LastRun {
    pub id: RunId,
    pub finish_reason: FinishReason,
    pub finished_at: Millis,
}

/// JSON body of `POST /v1/workspaces/{w}/fleets`.
#[derive(Debug, Clone, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NewFleet {
    /// The fleet as in a fleet file: an object, or the text of the file.
    #[schema(value_type = Object)]
    pub spec: Value,
    /// Task that replaces the one in the file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub task: Option<String>,
    /// Environment variables. Each agent gets those that its manifest lists. The values are never shown or journalled.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub env: BTreeMap<String, String>,
    /// For agents by name, the absolute paths of their programs, as `program` of a session. Only accepted over the
    /// daemon's socket.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub programs: BTreeMap<String, String>,
}

/// A file attached to a prompt.
#[derive(Debug, Clone, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NewAttachment {
    /// File name, shown to the agent and to people.
    pub name: String,
    /// MIME type.
    #[serde(default = "default_mime")]
    pub mime: String,
    /// Content in base64.
    pub data: String,
}

fn default_mime() -> String {
    "application/octet-stream".to_owned()
}

/// Body of `POST /v1/workspaces/{w}/agent`.
#[derive(Debug, Clone, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NewRun {
    /// Session that gets the prompt.
    pub session_id: SessionId,
    pub prompt: String,
    /// Id chosen by the client. With it, the request can be repeated safely: the same id never starts a second run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub run_id: Option<RunId>,
    /// Files attached to the prompt.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub attachments: Vec<NewAttachment>,
}

/// What a run is doing now.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(rename_all = "snake_case")]
#[schema(as = RunState)]
pub enum RunStatus {
    /// The run is next, and its agent is getting ready.
    Accepted,
    /// The run waits in its session's queue or for a free agent slot.
    Queued,
    /// The agent is working on the run.
    Running,
    /// The agent waits for a person.
    Waiting,
    /// The run waits for sessions below.
    Suspended,
    /// The run has ended.
    Finished,
}

/// Response to an accepted prompt.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[schema(as = Receipt)]
pub struct PromptReceipt {
    pub run_id: RunId,
    /// `accepted` or `queued`.
    pub state: RunStatus,
    /// Place in the queue; 0 if the run starts at once.
    pub position: u32,
    /// Position of the run's `run.accepted` event in the journal.
    #[schema(value_type = u64)]
    pub seq: Seq,
}

/// One accepted prompt and its outcome.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct Run {
    pub id: RunId,
    pub session_id: SessionId,
    /// What the run is doing now.
    pub state: RunStatus,
    /// The prompt. In lists, a long prompt is cut.
    pub prompt: String,
    /// The file that holds the whole prompt, if the prompt was too large for its event.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prompt_blob: Option<BlobRef>,
    /// Why the run ended. Null while it has not ended.
    pub finish_reason: Option<FinishReason>,
    /// The agent's result. In lists, a long result is cut.
    pub text: Option<String>,
    /// The file that holds the whole result, if the result was too large for its event.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub text_blob: Option<BlobRef>,
    /// What went wrong, if the run failed.
    pub error: Option<RunError>,
    /// Tokens and money that the run used.
    pub usage: TokenUsage,
    pub accepted_at: Millis,
    /// When the agent was ready and got the prompt.
    pub started_at: Option<Millis>,
    pub finished_at: Option<Millis>,
}

/// Body of `POST …/cancel`. The body is optional.
#[derive(Debug, Clone, Default, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
pub struct CancelRequest {
    /// Cancel only this run. Without it, every run accepted so far is cancelled.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub run_id: Option<RunId>,
    /// Reason, recorded in the journal.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
}

/// What a cancel stopped.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, utoipa::ToSchema)]
#[schema(as = Cancelled)]
pub struct CancelResponse {
    /// Runs that will end as `cancelled`.
    pub cancelled: Vec<RunId>,
    /// True if there was nothing to cancel.
    pub idle: bool,
}

/// Body of `POST …/steer`.
#[derive(Debug, Clone, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
pub struct SteerRequest {
    /// Message for the running turn.
    pub text: String,
}

/// Response to an accepted steer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[schema(as = Steered)]
pub struct SteerReceipt {
    /// The run that is steered.
    pub run_id: RunId,
    /// Position of the `steer.accepted` event in the journal.
    #[schema(value_type = u64)]
    pub seq: Seq,
}

/// A queued run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[schema(as = Queued)]
pub struct QueueEntry {
    pub run_id: RunId,
    /// The prompt. A long prompt is cut.
    pub prompt: String,
    /// Place in the queue, from 1.
    pub position: u32,
    pub accepted_at: Millis,
}

/// Body of `PATCH …/queue/{run}`.
#[derive(Debug, Clone, Default, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
pub struct QueueMove {
    /// The queued run that is to come next after this one. Null or absent: move to the end of the queue.
    #[serde(default)]
    pub before: Option<RunId>,
}

/// Where a moved run waits now.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct QueuePlace {
    pub run_id: RunId,
    /// Place in the queue, from 1.
    pub position: u32,
}

/// A message of a session's conversation.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct Message {
    pub message_id: MessageId,
    /// The run that the message belongs to.
    pub run_id: RunId,
    /// Who wrote the message.
    pub role: MessageRole,
    /// Text, thoughts, tool calls and other parts, in order.
    pub parts: Vec<MessagePart>,
    /// How the message ended. Null while it is still being written.
    pub finish: Option<MessageFinish>,
}

/// Response of `GET …/sessions/{s}/events`.
#[derive(Debug, Clone, Serialize, Deserialize, utoipa::ToSchema)]
pub struct EventPage {
    /// Events in journal order.
    pub events: Vec<Event>,
    /// Value of `after` for the next request.
    #[schema(value_type = u64)]
    pub next_after: Seq,
}

/// Body of `POST /v1/asks/{ask}/answer`.
#[derive(Debug, Clone, Default, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
pub struct AnswerRequest {
    /// Answer to a permission request: `allow_once`, `allow_always` or `deny`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub decision: Option<String>,
    /// Answer to a question.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub value: Option<String>,
    /// Reason for the answer. The reason for a `deny` is passed to the agent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// The `input_sha256` of the ask that was shown. If the ask has another one, the answer is refused with
    /// `ask_changed` and the ask stays open.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub input_sha256: Option<String>,
}

/// An ask and how it was resolved.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct AskRecord {
    #[serde(flatten)]
    pub ask: Ask,
    /// Who or what resolved the ask. Absent while it is open.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub by: Option<ResolvedBy>,
    /// The rule of the policy that decided.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rule: Option<PolicyRule>,
    /// True if the policy would have asked, but a person had allowed the tool for the rest of the session.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub granted: bool,
    /// When the ask was resolved. Absent while it is open, and for asks of earlier releases.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resolved_at: Option<Millis>,
}

/// Response to the answer that resolved an ask.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, utoipa::ToSchema)]
#[schema(as = Resolved)]
pub struct AnswerResponse {
    /// Always true.
    pub resolved: bool,
    /// The ask with its answer.
    pub ask: Ask,
}

/// Body of `POST /v1/halt`. The body is optional.
#[derive(Debug, Clone, Default, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
pub struct HaltRequest {
    /// Reason, recorded in the journal and shown to people.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Whether live runs are cancelled too.
    #[serde(default)]
    pub cancel: bool,
}

/// The global halt. While it is set, no run starts.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, utoipa::ToSchema)]
#[schema(as = Halt)]
pub struct HaltStatus {
    /// Whether a halt is set.
    pub halted: bool,
    /// Reason given by the client that set the halt.
    pub reason: Option<String>,
    /// Whether the halt cancelled live runs.
    pub cancel: bool,
    /// When the halt was set.
    pub since: Option<Millis>,
}

/// The exhausted quota of an account. Until it resets, no run of the account's sessions starts.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[schema(as = Quota)]
pub struct AccountQuota {
    pub account: AccountId,
    /// Name of the agent.
    pub agent: String,
    /// When the quota resets, as the agent said.
    pub until: Millis,
    /// When the agent said so.
    pub since: Millis,
    /// The session whose agent said so.
    pub session_id: SessionId,
}

/// An agent, as listed by `GET /v1/agents`.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, utoipa::ToSchema)]
pub struct Agent {
    /// Name to use as a session's `agent`.
    pub name: String,
    /// One sentence for people.
    pub description: String,
    /// How the agent is driven: `built-in`, `acp`, `claude`, `codex`, `pty`, `exec`, `a2a` or `worker`.
    pub driver: String,
    /// Whether the agent can start on this machine.
    pub available: bool,
    /// Command that installs the agent, if it is not available.
    pub install: Option<String>,
    /// Version of the agent's program on this machine, if known.
    #[serde(default)]
    pub version: Option<String>,
    /// Version that Quarterdeck was last tested with.
    #[serde(default)]
    pub tested: Option<String>,
    /// Path of the agent's program on this machine.
    #[serde(default)]
    pub program: Option<String>,
    /// Name of the agent's program, which is searched in the `PATH`. Absent if the agent has none, or its manifest gives
    /// a path.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub command: Option<String>,
    /// Whether a running turn can be steered.
    pub steers: bool,
    /// Whether a new process of the agent can resume a conversation.
    #[serde(default)]
    pub resumes: bool,
    /// Whether the agent asks for permission before it uses tools.
    #[serde(default)]
    pub approvals: bool,
    /// Whether the agent asks people questions.
    #[serde(default)]
    pub questions: bool,
    /// What the agent reports about its cost.
    #[serde(default)]
    pub cost: CostReport,
    /// Session settings that the agent supports, besides those that Quarterdeck enforces itself.
    pub settings: Vec<String>,
    /// The modes that a session can choose for the agent.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub modes: Vec<String>,
    /// Modes in which the agent acts without asking. No session can choose them, because its policy could not hold.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub refused_modes: Vec<String>,
    /// Environment variables that `qd run` passes on from the caller's environment. A `*` at the end of a name matches
    /// the rest of it.
    pub env: Vec<String>,
    /// `built-in`, or the path of the manifest that describes the agent.
    #[serde(default)]
    pub origin: String,
}

/// What an agent reports about its cost.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum CostReport {
    #[default]
    Nothing,
    /// The number of tokens. The daemon's `prices` setting gives their cost.
    Tokens,
    /// The cost in money.
    Money,
}

/// A manifest that cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct ManifestProblem {
    /// The manifest file, or a project's folder of manifests.
    pub path: String,
    /// What is wrong, and how to fix it.
    pub message: String,
}

/// Body of `POST /v1/trust`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
pub struct TrustRequest {
    /// Absolute path of the project directory.
    pub path: String,
}

/// A project whose own agents and hooks are trusted.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[schema(as = Trusted)]
pub struct TrustedProject {
    /// Path of the project directory.
    pub path: String,
    /// Whether the project's files are unchanged since they were trusted. If not, none of them is used until the
    /// project is trusted again.
    pub unchanged: bool,
    /// The files that are trusted. Present only in the response that trusted them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub files: Vec<String>,
}

/// Something that a short id or a title can refer to, as found by `GET /v1/resolve?ref=`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[schema(as = Match)]
pub struct ReferenceMatch {
    pub kind: ReferenceKind,
    /// The full id.
    pub id: String,
    pub workspace_id: WorkspaceId,
    /// The session that it belongs to. For a session, its own id.
    pub session_id: Option<SessionId>,
}

/// Response of `GET /v1/short-ids`.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, utoipa::ToSchema)]
pub struct ShortIds {
    /// For each id, the shortest beginning that means only it, without the prefix of its kind. It has at least four
    /// characters. An id that nothing has, or that has no such beginning, is returned whole.
    pub ids: BTreeMap<String, String>,
}

/// What a reference can refer to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(rename_all = "snake_case")]
#[schema(as = MatchKind)]
pub enum ReferenceKind {
    Workspace,
    /// A session, by id or title.
    Session,
    Run,
    Ask,
    Fleet,
}
