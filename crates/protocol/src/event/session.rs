//! Events about the settings of a session, and about the workers that hold its agent.

use serde::{Deserialize, Serialize};

use super::{ChildResult, RunError};
use crate::ids::{AccountId, EventNumber, FleetId, RunId, SessionId, WorkerId};
use crate::mail::MailDelivery;
use crate::policy::Policy;
use crate::sandbox::{NetworkSetting, SandboxSetting};
use crate::sandbox_spec::SandboxReport;

/// Data of `session.created`: the settings that the session was created with. Later changes are `session.updated`.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct SessionCreated {
    pub agent: String,
    /// Path of the agent's program, if the caller resolved it. Absent: the daemon finds it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub program: Option<String>,
    #[serde(default)]
    pub title: Option<String>,
    /// Model that the agent should use, by the agent's own name for it.
    #[serde(default)]
    pub model: Option<String>,
    /// Mode that the agent should be in, such as `plan`. Later changes are `mode.changed`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mode: Option<String>,
    #[serde(default)]
    pub system_prompt: Option<String>,
    #[serde(default)]
    pub policy: Policy,
    /// Parent session.
    #[serde(default)]
    pub parent: Option<SessionId>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fleet: Option<FleetMembership>,
    /// Absolute path of the directory in which the agent works. Absent if it is unknown, as on another machine.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub directory: Option<String>,
    /// The git worktree in which the agent works. It is created before the agent first starts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub worktree: Option<SessionWorktree>,
    #[serde(default)]
    pub limits: SessionLimits,
    /// Whether the agent gets the tools of `qd mcp`. Absent: the daemon's setting decides.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mcp: Option<bool>,
    /// How strongly the agent is confined. Absent: its manifest decides, else the daemon's setting.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sandbox: Option<SandboxSetting>,
    /// Whether the agent reaches the network. Absent: its manifest decides, else the daemon's setting.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network: Option<NetworkSetting>,
    /// Names of the environment variables given to the agent. Their values are not in the journal.
    #[serde(default)]
    pub env: Vec<String>,
    /// How mail without its own `deliver` reaches the session.
    #[serde(default, skip_serializing_if = "MailDelivery::is_prompt")]
    pub mail: MailDelivery,
    /// The agent's own id of a conversation that was begun elsewhere. The first start of the agent resumes it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub agent_session_id: Option<String>,
    /// The account that the agent uses, if the session's variables have a login of their own. Absent: the agent's usual
    /// login.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub account: Option<AccountId>,
}

/// The git worktree of a session. It holds everything that creating the worktree needs, so a repeat after a crash
/// creates the same worktree.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SessionWorktree {
    /// Path of the worktree. Its last component is the session's id.
    pub path: String,
    /// The branch that is created for the worktree.
    pub branch: String,
    /// The commit from which the worktree starts.
    pub base: String,
    /// The branch into which the work is merged by default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub target: Option<String>,
    /// Top directory of the checkout that the worktree was created from.
    pub repository: String,
}

/// A session's membership in a fleet.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[schema(as = Membership)]
pub struct FleetMembership {
    pub fleet_id: FleetId,
    /// Name of the session in the fleet.
    pub name: String,
}

/// Limits of a session. Without a value there is no limit, except for the fields that name a default.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct SessionLimits {
    /// Budget in US dollars for the session and all sessions below it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub budget_usd: Option<f64>,
    /// Maximum number of model calls in one run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_turns: Option<u32>,
    /// Maximum duration of one run in seconds. Time spent waiting for people does not count.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub run_timeout_s: Option<f64>,
    /// Seconds that an agent may take to stop after a cancel before it is killed. Defaults to
    /// [`CANCEL_GRACE_S`](crate::limits::CANCEL_GRACE_S).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cancel_grace_s: Option<f64>,
    /// How many times a crashed agent is restarted within the window; 0 means never. Defaults to
    /// [`RESTARTS`](crate::limits::RESTARTS).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub restarts: Option<u32>,
    /// Seconds for which a crash counts. Defaults to [`RESTART_WINDOW_S`](crate::limits::RESTART_WINDOW_S).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub restart_window_s: Option<f64>,
    /// MiB that the agent may report in all. Defaults to [`JOURNAL_MB_MAX`](crate::limits::JOURNAL_MB_MAX).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_journal_mb: Option<u64>,
}

/// Data of `session.updated`. Only the fields that changed are present.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct SessionUpdated {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub title: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model: Option<String>,
    /// New policy. It applies to later asks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub policy: Option<Policy>,
    /// How strongly the agent is confined, from its next start on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sandbox: Option<SandboxSetting>,
    /// Whether the agent reaches the network, from its next start on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network: Option<NetworkSetting>,
    /// The confinement that the worker gave the agent, if it differs from the last that was reported.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub confined: Option<SandboxReport>,
    /// The complete new limits, not only those that changed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limits: Option<SessionLimits>,
    /// The agent's own id for the conversation.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub agent_session_id: Option<String>,
    /// A child session was created.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub child: Option<SessionId>,
    /// A child session that a suspended run waits for has ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub child_ended: Option<ChildResult>,
    /// A cancel of the parent session was applied here. This is its number in the parent; the child recognises a repeat
    /// by it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent_cancel: Option<EventNumber>,
    /// A cancel must be passed on to the sessions below. The number of this event identifies it.
    #[serde(rename = "cancels_below", default, skip_serializing_if = "std::ops::Not::not")]
    pub cancels_children: bool,
    /// Every session below has applied the cancel with this number.
    #[serde(rename = "below_cancelled", default, skip_serializing_if = "Option::is_none")]
    pub children_cancelled: Option<EventNumber>,
    /// The session takes no more prompts. It closes when its last run has ended and all sessions below have closed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub closing: Option<SessionCloseMode>,
    /// Every session below has closed.
    #[serde(rename = "below_closed", default, skip_serializing_if = "std::ops::Not::not")]
    pub children_closed: bool,
    /// The agent did not let go of a killed turn. It is stopped, and the next run gets a new agent.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub stops_agent: bool,
    /// The first run waited for a free slot and has it: an agent is started in the worker that the session has.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub takes_slot: bool,
}

/// Data of `mode.changed`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModeChanged {
    /// The agent's new mode, such as `plan`. If the user has changed it, the agent gets it with its next prompt.
    pub mode: String,
    pub by: ModeChangeSource,
    /// The run that had already ended when the agent reported this.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub after_run: Option<RunId>,
}

/// Who has changed the mode of an agent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ModeChangeSource {
    /// A client, as a setting of the session.
    User,
    /// The agent: its model, or a command of its own that it got as a prompt.
    Agent,
}

/// What happens to the events of a session that closes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SessionCloseMode {
    /// The events stay in the journal.
    Keep,
    /// The events are deleted once the session is closed.
    Purge,
}

/// Data of `session.closed`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SessionClosed {
    /// Whether the session's events are deleted now.
    #[serde(default)]
    pub purge: bool,
}

/// Data of `worker.started`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkerStarted {
    pub worker_id: WorkerId,
    /// How the worker is to confine the agent. Absent if that is unknown, as on another machine that is not connected.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sandbox: Option<SandboxReport>,
}

/// Data of `worker.reattached`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct WorkerReattached {
    pub worker_id: WorkerId,
    /// Milliseconds that the current turn has run, without its waits for people. Only the worker could measure this,
    /// because no daemon was attached.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub run_time_ms: Option<u64>,
}

/// Data of `worker.exited`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct WorkerExited {
    pub worker_id: WorkerId,
    pub reason: WorkerExitReason,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<RunError>,
}

/// Why a worker is gone.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WorkerExitReason {
    /// It was stopped because nothing needed it any more.
    Stopped,
    /// Its agent failed.
    Failed,
    /// It disappeared, by itself or with its machine.
    Lost,
}
