//! Running workers, machines that have joined, and the tokens that they join with, as the API shows them.

use serde::{Deserialize, Serialize};

use crate::ids::{SessionId, TokenId};
use crate::time::Millis;

/// A live worker, the process that holds a session's agent. Listed by `GET /v1/workers`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct Worker {
    pub id: String,
    /// The session whose agent the worker holds.
    pub session_id: SessionId,
    /// Process id of the worker, on its own machine.
    pub pid: u32,
    pub started_at: Millis,
    /// Until when the worker counts as alive if nothing more is received from it.
    pub lease_expires_at: Millis,
    /// Name of the agent that the worker holds.
    pub agent: String,
    /// Name of the joined machine that the worker runs on. Null if it runs on this machine.
    #[serde(default)]
    pub host: Option<String>,
    /// Processes below the worker: the agent, and whatever its turns started and left running. Empty for a worker on
    /// another machine.
    pub processes: Vec<ProcessSummary>,
}

/// A worker on another machine that has joined this daemon. Listed by `GET /v1/workers/joined`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct JoinedWorker {
    /// Name under which this daemon lists it, usually the name of the machine.
    pub name: String,
    /// Labels by which a session can choose it, with `NAME@LABEL` as its agent.
    pub labels: Vec<String>,
    /// Names of the agents that it offers.
    pub agents: Vec<String>,
    /// Sessions whose agents it holds.
    pub sessions: Vec<SessionId>,
    /// Whether it is connected now.
    pub connected: bool,
    /// When it joined this daemon.
    pub joined_at: Millis,
    /// Until when its sessions wait for it if nothing more is received from it.
    pub lease_expires_at: Millis,
    /// Version of its Quarterdeck.
    pub version: String,
}

/// Body of `POST /v1/workers/tokens`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NewWorkerToken {
    /// Name for people.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Labels that a worker may join with. Without them it may join with one, which is made from the name, or from the
    /// id if there is no name.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub labels: Vec<String>,
    /// Names of the agents that a worker may offer. Without them, any.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub agents: Vec<String>,
}

/// A token with which a worker on another machine can join. Listed by `GET /v1/workers/tokens`. The token itself is
/// shown only once, in the response that created it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct WorkerToken {
    /// Id to use in `DELETE /v1/workers/tokens/{id}`.
    pub id: TokenId,
    /// Name for people.
    pub name: Option<String>,
    pub created_at: Millis,
    /// When a worker last joined with this token.
    pub last_used_at: Option<Millis>,
    /// Labels that a worker may join with. Null for a token that an earlier release made; it allows
    /// any.
    #[serde(default)]
    pub labels: Option<Vec<String>>,
    /// Names of the agents that a worker may offer. Null allows any.
    #[serde(default)]
    pub agents: Option<Vec<String>>,
}

/// Response to the creation of a worker token, with everything that `qd worker join` needs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[schema(as = MadeWorkerToken)]
pub struct CreatedWorkerToken {
    /// Id to use in `DELETE /v1/workers/tokens/{id}`.
    pub id: TokenId,
    /// Name for people.
    pub name: Option<String>,
    pub created_at: Millis,
    /// Labels that a worker may join with.
    #[serde(default)]
    pub labels: Option<Vec<String>>,
    /// Names of the agents that a worker may offer. Null allows any.
    #[serde(default)]
    pub agents: Option<Vec<String>>,
    /// The token. It is not shown again.
    pub token: String,
    /// Address to join at. Null if the daemon listens on no port.
    pub url: Option<String>,
    /// Fingerprint of the certificate to accept there, if the daemon created the certificate itself.
    pub fingerprint: Option<String>,
}

/// A process below a worker.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[schema(as = Process)]
pub struct ProcessSummary {
    pub pid: u32,
    pub name: String,
}
