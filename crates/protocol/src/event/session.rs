//! What a conversation is made with, how that changes, and the processes that hold its agent.

use serde::{Deserialize, Serialize};

use super::{ChildResult, RunError};
use crate::ids::{EventNumber, FleetId, SessionId, WorkerId};
use crate::mail::MailDelivery;
use crate::policy::Policy;

/// See [`EventBody::SessionCreated`]. What the session was made with; later changes are `session.updated`.
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
    /// The fleet that it belongs to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fleet: Option<FleetMembership>,
    /// Where its agent works, as an absolute path; absent if that is not known, as on another machine.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub directory: Option<String>,
    /// The git worktree that its agent works in, made before that is first started.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub worktree: Option<SessionWorktree>,
    /// Limits.
    #[serde(default)]
    pub limits: SessionLimits,
    /// Whether its agent is given the tools of `qd mcp`; absent: as configured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mcp: Option<bool>,
    /// Names of the variables that were given; their values are kept elsewhere.
    #[serde(default)]
    pub env: Vec<String>,
    /// How mail reaches it that does not say.
    #[serde(default, skip_serializing_if = "MailDelivery::is_prompt")]
    pub mail: MailDelivery,
}

/// A git worktree of a session. All that making it needs is here, so that making it again makes the same.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SessionWorktree {
    /// Where it is; its name is the session's id.
    pub path: String,
    /// The branch that is made for it.
    pub branch: String,
    /// The commit that it begins from.
    pub base: String,
    /// The branch that its work is to go into, unless told otherwise.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub target: Option<String>,
    /// The top of the checkout that it was asked for from.
    pub repository: String,
}

/// A session's part in a fleet.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[schema(as = Membership)]
pub struct FleetMembership {
    /// The fleet.
    pub fleet_id: FleetId,
    /// What it is called there.
    pub name: String,
}

/// What a run may take. Absent means no limit but where a default is named.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct SessionLimits {
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

/// See [`EventBody::SessionUpdated`]. Only what changed is there.
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
    pub limits: Option<SessionLimits>,
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
    pub parent_cancel: Option<EventNumber>,
    /// A cancel was passed on to the sessions below; it bears the number of this event.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub cancels_below: bool,
    /// Every session below has applied the cancel of this number.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub below_cancelled: Option<EventNumber>,
    /// The session takes no more prompts and closes when its last run has ended and those below have closed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub closing: Option<SessionCloseMode>,
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
pub enum SessionCloseMode {
    /// Its events stay.
    Keep,
    /// Its events are deleted once it is closed.
    Purge,
}

/// See [`EventBody::SessionClosed`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SessionClosed {
    /// Whether its events are deleted now.
    #[serde(default)]
    pub purge: bool,
}

/// See [`EventBody::WorkerStarted`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkerStarted {
    /// The worker.
    pub worker_id: WorkerId,
}

/// See [`EventBody::WorkerReattached`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct WorkerReattached {
    /// The worker.
    pub worker_id: WorkerId,
    /// Milliseconds that the turn under way has run, without its waits for people: only the worker was there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub run_time_ms: Option<u64>,
}

/// See [`EventBody::WorkerExited`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct WorkerExited {
    /// The worker.
    pub worker_id: WorkerId,
    /// Why.
    pub reason: WorkerExitReason,
    /// What went wrong.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<RunError>,
}

/// Why a worker is no more.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WorkerExitReason {
    /// Nobody needed it.
    Stopped,
    /// Its agent failed.
    Failed,
    /// It vanished.
    Lost,
}
