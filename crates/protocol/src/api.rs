//! Requests and answers of the HTTP API, as in section 3 of the contract.

use std::collections::BTreeMap;

use serde::{Deserialize, Deserializer, Serialize};
use serde_json::Value;

use crate::event::{
    Ask, Event, FinishReason, FleetMembership, MessageFinish, MessagePart, MessageRole, RunError, TokenUsage,
};
use crate::ids::{MessageId, RunId, Seq, SessionId, TokenId, WorkspaceId};
use crate::mail::MailDelivery;
use crate::policy::Policy;
use crate::text::BlobRef;
use crate::time::Millis;

/// The header that every answer carries, so that a client of another version can say so.
pub const VERSION_HEADER: &str = "quarterdeck-version";
/// The header that a list carries while there is more; its value is for `?after=`.
pub const NEXT_AFTER: &str = "next-after";

/// `GET /healthz`.
#[derive(Debug, Clone, Serialize, Deserialize, utoipa::ToSchema)]
pub struct Health {
    /// `ok`.
    pub status: String,
}

/// `GET /v1/version`.
#[derive(Debug, Clone, Serialize, Deserialize, utoipa::ToSchema)]
#[schema(as = Version)]
pub struct DaemonVersion {
    /// Of the daemon.
    pub version: String,
    /// Of this API.
    pub api: String,
    /// Its process.
    pub pid: u32,
    /// Its home.
    pub home: String,
    /// Since when.
    pub started_at: Millis,
}

/// `POST /v1/workspaces`.
#[derive(Debug, Clone, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NewWorkspace {
    /// An absolute path of a directory.
    pub path: String,
    /// For people; the directory's own name unless given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
}

/// A project directory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct Workspace {
    /// The workspace.
    pub id: WorkspaceId,
    /// Resolved, without symbolic links.
    pub path: String,
    /// For people.
    pub name: String,
    /// Since when.
    pub created_at: Millis,
}

/// `POST /v1/workspaces/{w}/sessions`.
#[derive(Debug, Clone, Default, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NewSession {
    /// The agent's name.
    pub agent: String,
    /// For people.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub title: Option<String>,
    /// Which model, in the agent's words.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model: Option<String>,
    /// What the agent is told before anything else.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub system_prompt: Option<String>,
    /// What it may do without asking; `ask` unless given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub policy: Option<Policy>,
    /// The session above.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent: Option<SessionId>,
    /// Whether it gets a git worktree of its own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub worktree: Option<bool>,
    /// Whether its agent is given the tools of `qd mcp`; as configured unless given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mcp: Option<bool>,
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
    /// How often an agent that crashed is started again within `restart_window_s`; 0: never.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub restarts: Option<u32>,
    /// Seconds that a crash counts for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub restart_window_s: Option<f64>,
    /// Variables for the agent; the values are never shown again.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub env: BTreeMap<String, String>,
    /// How mail reaches it that does not say; `prompt` unless given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mail: Option<MailDelivery>,
}

/// `PATCH /v1/workspaces/{w}/sessions/{s}`. A limit that is `null` is lifted; what is absent stays.
#[derive(Debug, Clone, Default, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
pub struct SessionPatch {
    /// The new title.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub title: Option<String>,
    /// The new model.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model: Option<String>,
    /// The new policy; it counts for later asks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub policy: Option<Policy>,
    /// The new budget.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "deserialize_nullable")]
    pub budget_usd: Option<Option<f64>>,
    /// The new turn limit.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "deserialize_nullable")]
    pub max_turns: Option<Option<u32>>,
    /// The new time limit.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "deserialize_nullable")]
    pub run_timeout_s: Option<Option<f64>>,
    /// The new grace.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "deserialize_nullable")]
    pub cancel_grace_s: Option<Option<f64>>,
    /// How often an agent that crashed is started again within `restart_window_s`; 0: never.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "deserialize_nullable")]
    pub restarts: Option<Option<u32>>,
    /// Seconds that a crash counts for.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "deserialize_nullable")]
    pub restart_window_s: Option<Option<f64>>,
}

/// Tells `null` from absent: this is only called for a field that is there.
fn deserialize_nullable<'de, D: Deserializer<'de>, T: Deserialize<'de>>(
    deserializer: D,
) -> Result<Option<Option<T>>, D::Error> {
    Option::deserialize(deserializer).map(Some)
}

/// What a session does right now.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(rename_all = "snake_case")]
#[schema(as = SessionState)]
pub enum SessionStatus {
    /// Nothing.
    Idle,
    /// Its agent is not ready yet.
    Starting,
    /// A run is active.
    Running,
    /// The active run waits for a person or for sessions below.
    Waiting,
    /// It has ended.
    Closed,
}

/// A conversation with one agent.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct Session {
    /// The session.
    pub id: SessionId,
    /// Its project.
    pub workspace_id: WorkspaceId,
    /// Its agent.
    pub agent: String,
    /// For people.
    pub title: Option<String>,
    /// What it does right now.
    pub state: SessionStatus,
    /// True from the moment a prompt is accepted until its run has ended and nothing is queued.
    pub busy: bool,
    /// The session above.
    pub parent: Option<SessionId>,
    /// The fleet that it belongs to, and its name there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fleet: Option<FleetMembership>,
    /// Which model, in the agent's words.
    pub model: Option<String>,
    /// What the agent is told before anything else.
    pub system_prompt: Option<String>,
    /// What it may do without asking.
    pub policy: Policy,
    /// How many runs wait.
    pub queued: u32,
    /// What all its runs have used.
    pub usage: TokenUsage,
    /// The agent's own name for the conversation.
    pub agent_session_id: Option<String>,
    /// Its worktree, if it has one.
    pub worktree: Option<String>,
    /// Whether its agent is given the tools of `qd mcp`, if the session says so itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mcp: Option<bool>,
    /// Dollars, for the session and all below it.
    pub budget_usd: Option<f64>,
    /// Model calls in one run.
    pub max_turns: Option<u32>,
    /// Seconds of one run.
    pub run_timeout_s: Option<f64>,
    /// Seconds an agent may take to stop before it is killed.
    pub cancel_grace_s: Option<f64>,
    /// How often an agent that crashed is started again within `restart_window_s`; 0: never.
    pub restarts: Option<u32>,
    /// Seconds that a crash counts for.
    pub restart_window_s: Option<f64>,
    /// Names of the variables that it was given.
    pub env: Vec<String>,
    /// How mail reaches it that does not say.
    #[serde(default)]
    pub mail: MailDelivery,
    /// Dollars that it and all sessions below it have cost; only if `?tree=true` asks for it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tree_cost_usd: Option<f64>,
    /// Whether it takes no more prompts and closes when its last run has ended.
    pub closing: bool,
    /// Since when.
    pub created_at: Millis,
    /// The last change.
    pub updated_at: Millis,
}

/// `POST /v1/workspaces/{w}/fleets` as JSON.
#[derive(Debug, Clone, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NewFleet {
    /// The fleet, as its file has it: an object, or the file's text.
    #[schema(value_type = Object)]
    pub spec: Value,
    /// What to do, instead of the file's own task.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub task: Option<String>,
    /// Variables; each agent is given those that its manifest lists. Their values are never shown or journalled.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub env: BTreeMap<String, String>,
}

/// A file that comes with a prompt.
#[derive(Debug, Clone, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NewAttachment {
    /// Its name.
    pub name: String,
    /// What it is.
    #[serde(default = "default_mime")]
    pub mime: String,
    /// Its content in base64.
    pub data: String,
}

fn default_mime() -> String {
    "application/octet-stream".to_owned()
}

/// `POST /v1/workspaces/{w}/agent`.
#[derive(Debug, Clone, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NewRun {
    /// Whom to ask.
    pub session_id: SessionId,
    /// What.
    pub prompt: String,
    /// The client's own name for the run, which makes a repeat harmless.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub run_id: Option<RunId>,
    /// Files.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub attachments: Vec<NewAttachment>,
}

/// What a run does right now.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(rename_all = "snake_case")]
#[schema(as = RunState)]
pub enum RunStatus {
    /// It is next, and its agent is being made ready.
    Accepted,
    /// It waits.
    Queued,
    /// The agent works on it.
    Running,
    /// The agent waits for a person.
    Waiting,
    /// It waits for sessions below.
    Suspended,
    /// It has ended.
    Finished,
}

/// The answer to an accepted prompt.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[schema(as = Receipt)]
pub struct PromptReceipt {
    /// The run.
    pub run_id: RunId,
    /// `accepted` or `queued`.
    pub state: RunStatus,
    /// 0 if it starts at once, else its place in the queue.
    pub position: u32,
    /// Of its `run.accepted`.
    #[schema(value_type = u64)]
    pub seq: Seq,
}

/// One accepted prompt.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct Run {
    /// The run.
    pub id: RunId,
    /// Whose.
    pub session_id: SessionId,
    /// What it does right now.
    pub state: RunStatus,
    /// What was asked, or its head in lists.
    pub prompt: String,
    /// The file that holds the whole prompt.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prompt_blob: Option<BlobRef>,
    /// Why it ended.
    pub finish_reason: Option<FinishReason>,
    /// The agent's result, or its head in lists.
    pub text: Option<String>,
    /// The file that holds the whole text.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub text_blob: Option<BlobRef>,
    /// What went wrong.
    pub error: Option<RunError>,
    /// What it used.
    pub usage: TokenUsage,
    /// When it was accepted.
    pub accepted_at: Millis,
    /// When the agent got it.
    pub started_at: Option<Millis>,
    /// When it ended.
    pub finished_at: Option<Millis>,
}

/// `POST …/cancel`; the body may be absent.
#[derive(Debug, Clone, Default, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
pub struct CancelRequest {
    /// This run alone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub run_id: Option<RunId>,
    /// For the journal.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
}

/// What a cancel hit.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, utoipa::ToSchema)]
#[schema(as = Cancelled)]
pub struct CancelResponse {
    /// These end as `cancelled`.
    pub cancelled: Vec<RunId>,
    /// Whether there was nothing to hit.
    pub idle: bool,
}

/// `POST …/steer`.
#[derive(Debug, Clone, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
pub struct SteerRequest {
    /// What the running turn should hear.
    pub text: String,
}

/// The answer to an accepted steer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[schema(as = Steered)]
pub struct SteerReceipt {
    /// The run that is steered.
    pub run_id: RunId,
    /// Of its `steer.accepted`.
    #[schema(value_type = u64)]
    pub seq: Seq,
}

/// One that waits in a queue.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[schema(as = Queued)]
pub struct QueueEntry {
    /// The run.
    pub run_id: RunId,
    /// What was asked, or its head.
    pub prompt: String,
    /// Its place, from 1.
    pub position: u32,
    /// Since when.
    pub accepted_at: Millis,
}

/// A message of a session.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct Message {
    /// The message.
    pub message_id: MessageId,
    /// Its run.
    pub run_id: RunId,
    /// Who speaks.
    pub role: MessageRole,
    /// What was said, thought and done, in order.
    pub parts: Vec<MessagePart>,
    /// How it ended, if it has.
    pub finish: Option<MessageFinish>,
}

/// `GET …/sessions/{s}/events`.
#[derive(Debug, Clone, Serialize, Deserialize, utoipa::ToSchema)]
pub struct EventPage {
    /// In order.
    pub events: Vec<Event>,
    /// For the next call's `after`.
    #[schema(value_type = u64)]
    pub next_after: Seq,
}

/// `POST /v1/asks/{ask}/answer`.
#[derive(Debug, Clone, Default, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
pub struct AnswerRequest {
    /// For a permission: `allow_once`, `allow_always` or `deny`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub decision: Option<String>,
    /// For a question.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub value: Option<String>,
    /// Why; a deny's reason is told to the agent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
}

/// The answer to a winning answer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, utoipa::ToSchema)]
#[schema(as = Resolved)]
pub struct AnswerResponse {
    /// True.
    pub resolved: bool,
    /// The ask as it now stands.
    pub ask: Ask,
}

/// `POST /v1/halt`; the body may be absent.
#[derive(Debug, Clone, Default, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
pub struct HaltRequest {
    /// For the journal and for people.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Whether live runs are cancelled.
    #[serde(default)]
    pub cancel: bool,
}

/// Whether anything may start.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, utoipa::ToSchema)]
#[schema(as = Halt)]
pub struct HaltStatus {
    /// Whether it is set.
    pub halted: bool,
    /// In the client's words.
    pub reason: Option<String>,
    /// Whether live runs were cancelled.
    pub cancel: bool,
    /// Since when.
    pub since: Option<Millis>,
}

/// `GET /v1/agents`.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, utoipa::ToSchema)]
pub struct Agent {
    /// What `agent` takes.
    pub name: String,
    /// For people.
    pub description: String,
    /// How it is reached.
    pub driver: String,
    /// Whether it can start here.
    pub available: bool,
    /// How to install it, if it cannot.
    pub install: Option<String>,
    /// The version of its program here, if that is known.
    #[serde(default)]
    pub version: Option<String>,
    /// The version that it was last tried with.
    #[serde(default)]
    pub tested: Option<String>,
    /// Its program here.
    #[serde(default)]
    pub program: Option<String>,
    /// Whether its turns can be steered.
    pub steers: bool,
    /// Whether another process of it can go on with a conversation.
    #[serde(default)]
    pub resumes: bool,
    /// Whether it asks before it uses tools.
    #[serde(default)]
    pub approvals: bool,
    /// Whether it asks people questions.
    #[serde(default)]
    pub questions: bool,
    /// What it tells of its cost.
    #[serde(default)]
    pub cost: CostReport,
    /// The settings of a session that it can take beyond those that we enforce ourselves.
    pub settings: Vec<String>,
    /// Variables that `qd run` sends along from the caller's environment; `*` at the end of a name stands for the rest.
    pub env: Vec<String>,
    /// `built-in`, or the file that describes it.
    #[serde(default)]
    pub origin: String,
}

/// What an agent tells of its cost.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum CostReport {
    /// Nothing.
    #[default]
    Nothing,
    /// How many tokens it used; what they cost is for the settings to say.
    Tokens,
    /// What it cost.
    Money,
}

/// A manifest that does not count.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct ManifestProblem {
    /// The file, or a project's folder of them.
    pub path: String,
    /// What is wrong, and what to do.
    pub message: String,
}

/// `POST /v1/trust`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
pub struct TrustRequest {
    /// The project's directory, absolute.
    pub path: String,
}

/// A project whose own agents count.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[schema(as = Trusted)]
pub struct TrustedProject {
    /// Its directory.
    pub path: String,
    /// Whether it is still as it was when that was said; if not, nothing of it counts.
    pub unchanged: bool,
    /// What it brings, where it was just trusted.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub files: Vec<String>,
}

/// One thing that a shortened id or a title may mean: `GET /v1/resolve?ref=`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[schema(as = Match)]
pub struct ReferenceMatch {
    /// What it is.
    pub kind: ReferenceKind,
    /// Its whole id.
    pub id: String,
    /// Its project.
    pub workspace_id: WorkspaceId,
    /// Its session; itself, if it is one.
    pub session_id: Option<SessionId>,
}

/// What a reference can mean.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(rename_all = "snake_case")]
#[schema(as = MatchKind)]
pub enum ReferenceKind {
    /// A project directory.
    Workspace,
    /// A conversation, by id or by title.
    Session,
    /// An accepted prompt.
    Run,
    /// Something an agent waits for.
    Ask,
    /// Several sessions that work together.
    Fleet,
}

/// `GET /v1/gc`: what the home holds. `POST /v1/gc`: the same, and what was freed.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, utoipa::ToSchema)]
#[schema(as = Gc)]
pub struct GcReport {
    /// Bytes of the journal with its log.
    pub journal_bytes: u64,
    /// Bytes of texts and files kept beside it.
    pub blob_bytes: u64,
    /// Bytes of the daemon's own log.
    pub log_bytes: u64,
    /// Sessions that are closed for longer than asked.
    pub closed_sessions: u64,
    /// Their events.
    pub closed_events: u64,
    /// Files that no event names any more, once those are gone.
    pub loose_blobs: u64,
    /// Their bytes.
    pub loose_blob_bytes: u64,
    /// Whether it was done, not only counted.
    pub done: bool,
    /// Bytes given back, if it was.
    pub freed_bytes: u64,
}

/// `POST /v1/gc`, and the same as query for `GET`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema, utoipa::IntoParams)]
#[serde(deny_unknown_fields)]
pub struct GcRequest {
    /// Closed sessions count once they have been closed for so many days.
    #[serde(default = "default_gc_days")]
    pub older_than_days: u32,
}

fn default_gc_days() -> u32 {
    30
}

/// `GET /v1/workers`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct Worker {
    /// The worker.
    pub id: String,
    /// Whose agent it holds.
    pub session_id: SessionId,
    /// Its process.
    pub pid: u32,
    /// Since when.
    pub started_at: Millis,
    /// Until when it counts as alive without another word.
    pub lease_expires_at: Millis,
    /// The agent that it holds.
    pub agent: String,
    /// The machine that it is on and that its pid belongs to, by the name under which that joined; none: this one.
    #[serde(default)]
    pub host: Option<String>,
    /// What runs below it: the agent, and what its turns started and left. Of another machine nothing is known.
    pub processes: Vec<ProcessSummary>,
}

/// `GET /v1/workers/joined`: a process on another machine that has offered to work.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct JoinedWorker {
    /// What it is called here.
    pub name: String,
    /// What it can be chosen by: `NAME@LABEL` as a session's agent.
    pub labels: Vec<String>,
    /// The names of the agents that it offers.
    pub agents: Vec<String>,
    /// Sessions whose agents it holds.
    pub sessions: Vec<SessionId>,
    /// Whether it is connected.
    pub connected: bool,
    /// Since when it is known to this daemon.
    pub joined_at: Millis,
    /// Until when its sessions wait for it without another word.
    pub lease_expires_at: Millis,
    /// Its version.
    pub version: String,
}

/// `POST /v1/workers/tokens`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NewWorkerToken {
    /// For people.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
}

/// `GET /v1/workers/tokens`: what a process on another machine may join with. The token itself is shown once, by the
/// answer that made it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct WorkerToken {
    /// Its name in `DELETE /v1/workers/tokens/{id}`.
    pub id: TokenId,
    /// For people.
    pub name: Option<String>,
    /// Since when it counts.
    pub created_at: Millis,
    /// When somebody last joined with it.
    pub last_used_at: Option<Millis>,
}

/// The answer that made a worker token: all that `qd worker join` needs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[schema(as = MadeWorkerToken)]
pub struct CreatedWorkerToken {
    /// Its name.
    pub id: TokenId,
    /// For people.
    pub name: Option<String>,
    /// Since when it counts.
    pub created_at: Millis,
    /// The token. It is not shown again.
    pub token: String,
    /// Where to join; none if the daemon listens on no port.
    pub url: Option<String>,
    /// The certificate to accept there, if it is one of the daemon's own making.
    pub fingerprint: Option<String>,
}

/// A process below a worker.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[schema(as = Process)]
pub struct ProcessSummary {
    /// Its pid.
    pub pid: u32,
    /// Its name.
    pub name: String,
}
