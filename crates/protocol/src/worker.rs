//! What a worker is started with, and the record by which it is found again.

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::ids::{SessionId, WorkerId};
use crate::link::UpdateNumber;
use crate::manifest::{Manifest, TokenPrice};
use crate::sandbox_spec::SandboxSpec;
use crate::time::Millis;

/// What a local worker process reads from its standard input: one JSON value, up to the end of the input.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct WorkerHostSpec {
    /// Name of the process among the workers of its home, and of its files `ID.json` and `ID.sock`.
    pub id: String,
    /// Folder for records, sockets and the spools of sessions. An absolute path that only the owner can access.
    pub dir: PathBuf,
    /// The secret that daemon and worker prove to each other that they know.
    pub secret: Secret,
    /// How long to keep an agent that is in a turn while there is no daemon.
    pub orphan_busy_ms: u64,
    /// How long to keep an agent that is not in a turn while there is no daemon.
    pub orphan_idle_ms: u64,
    /// Agents to start at once.
    pub agents: Vec<AgentSpec>,
}

/// Everything that an agent is started with.
#[derive(Clone, PartialEq, Serialize, Deserialize)]
pub struct AgentSpec {
    pub session: SessionId,
    /// Id of the worker. A session gets a new one each time that it gets a worker.
    pub worker: WorkerId,
    /// Name of the agent, without `@label`.
    pub agent: String,
    /// The agent's manifest with its program already found. `None` if the worker must find the agent by its name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub manifest: Option<Box<Manifest>>,
    /// Prices of tokens by model, for an agent that does not report its cost.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub prices: BTreeMap<String, TokenPrice>,
    /// Directory in which the agent works.
    pub cwd: PathBuf,
    /// Model that the agent should use, by the agent's own name for it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub system_prompt: Option<String>,
    /// What follows if nothing comes from the agent in a turn. An older daemon sets nothing.
    #[serde(default, skip_serializing_if = "SilenceRules::is_empty")]
    pub silence: SilenceRules,
    /// What the agent and all that it starts may use. An older daemon limits nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limits: Option<Box<AgentLimits>>,
    /// Environment variables for the agent. Any of the values may be a secret.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub env: BTreeMap<String, String>,
    /// Access to the tools of `qd mcp`, if the agent gets them.
    #[serde(rename = "tools", default, skip_serializing_if = "Option::is_none")]
    pub mcp: Option<Box<McpAccess>>,
    /// How the agent is to be confined. An older daemon sets nothing, and then it is not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sandbox: Option<Box<SandboxSpec>>,
    /// The agent's own id for the conversation, if the agent is to resume one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub agent_session_id: Option<String>,
    /// The cost of that conversation so far in US dollars, by the agent's own count. `None` if it is unknown, because the
    /// conversation was begun elsewhere: then the agent's first total is where counting begins.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub conversation_cost_usd: Option<f64>,
    /// When the conversation was last used, if known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_active: Option<Millis>,
    /// Number of the last update that the session has journalled. This worker's updates are numbered after it.
    pub after: UpdateNumber,
    /// The mark: the worker's id and a code that only its home can make, in the environment of everything that the
    /// agent starts. Processes are found by it if worker and keeper are both killed.
    pub mark: String,
}

impl AgentSpec {
    /// The specification of an agent for a session without updates, with only the fields that every agent needs.
    pub fn new(session: SessionId, worker: WorkerId, agent: &str, cwd: impl Into<PathBuf>) -> Self {
        Self {
            session,
            worker,
            agent: agent.to_owned(),
            manifest: None,
            prices: BTreeMap::new(),
            cwd: cwd.into(),
            model: None,
            system_prompt: None,
            silence: SilenceRules::default(),
            limits: None,
            env: BTreeMap::new(),
            mcp: None,
            sandbox: None,
            agent_session_id: None,
            conversation_cost_usd: None,
            last_active: None,
            after: UpdateNumber(0),
            mark: String::new(),
        }
    }
}

impl fmt::Debug for AgentSpec {
    /// Shows the names in `env` but not the values, because this output ends up in logs.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { session, worker, agent, manifest, prices, cwd, .. } = self;
        let Self {
            model, system_prompt, env, mcp: tools, agent_session_id, last_active, after, mark, ..
        } = self;
        let Self { conversation_cost_usd, silence, limits, sandbox, .. } = self;
        f.debug_struct("AgentSpec")
            .field("session", session)
            .field("worker", worker)
            .field("agent", agent)
            .field("manifest", manifest)
            .field("prices", prices)
            .field("cwd", cwd)
            .field("model", model)
            .field("system_prompt", system_prompt)
            .field("env", &env.keys().collect::<Vec<_>>())
            .field("tools", tools)
            .field("sandbox", sandbox)
            .field("agent_session_id", agent_session_id)
            .field("conversation_cost_usd", conversation_cost_usd)
            .field("silence", silence)
            .field("limits", limits)
            .field("last_active", last_active)
            .field("after", after)
            .field("mark", mark)
            .finish()
    }
}

/// What follows if nothing comes from an agent in a turn, although the turn waits neither for a person nor for a tool.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct SilenceRules {
    /// After how many milliseconds people are told; again each time that the silence has doubled.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub notice_ms: Option<u64>,
    /// After how many milliseconds the turn is ended as an error.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub end_ms: Option<u64>,
}

impl SilenceRules {
    /// Whether nothing follows.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

/// What an agent and all that it starts may use. Without a value there is no limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct AgentLimits {
    /// Processes at once.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub processes: Option<u64>,
    /// MiB of memory of all processes together.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_mb: Option<u64>,
    /// The same in percent of the memory of the worker's machine.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_percent: Option<u64>,
    /// MiB that the agent may say in a minute.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub output_mb_per_min: Option<u64>,
}

/// Our key in a `_meta` of the Agent Client Protocol, for values that have no field there. The driver for that protocol
/// and the scripted agent use it.
pub const META_KEY: &str = "quarterdeck";

/// Our own request of the Agent Client Protocol, with which the scripted agent asks what the machine calls a process that
/// it knows by its pid in its sandbox. Parameters and result are `{"pid": N}`.
pub const HOST_PID_METHOD: &str = "_quarterdeck/host_pid";

/// Environment variable that says with which token `qd mcp` acts for a session. Agents get the path of the token's file,
/// after [`TOKEN_FILE_PREFIX`]; the token itself is a valid value too.
pub const SESSION_TOKEN_VAR: &str = "QD_SESSION_TOKEN";

/// How an agent reaches the tools of `qd mcp`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct McpAccess {
    /// Address of the socket that the session has for itself, as `--host` takes it.
    pub host: String,
    /// File with the session's token. Agents are told its path and never the token itself.
    pub token_file: PathBuf,
    /// The token, so that it can be removed from the agent's output. An older daemon puts it into `env` instead.
    #[serde(default)]
    pub token: Secret,
}

/// Prefix of the value of [`SESSION_TOKEN_VAR`] if the value is the path of a token file and not the token itself.
pub const TOKEN_FILE_PREFIX: &str = "file:";

/// A value that must not be shown. Its `Debug` output hides it.
#[derive(Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Secret(pub String);

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(…)")
    }
}

/// The file `AGENT_ID.json` by which a worker announces itself in a folder. It is replaced by rename, renewed before
/// its lease expires, and removed when the worker exits.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkerRecord {
    /// Name of the worker.
    pub agent_id: String,
    /// What the worker does, such as the name of the agent that it serves.
    pub role: String,
    /// Labels by which the worker can be chosen.
    #[serde(default)]
    pub labels: Vec<String>,
    /// Address at which the worker listens: `ws://HOST:PORT` or `unix:PATH`.
    pub endpoint: String,
    pub pid: u32,
    /// Start time of the process in kernel ticks since boot. It detects that the pid was reused by another process.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub start_ticks: Option<u64>,
    pub version: String,
    pub started_at: Millis,
    /// Until when the record is valid without renewal.
    pub lease_expires_at: Millis,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_specification_never_shows_the_values_of_its_variables() {
        let session = SessionId::from_random(&[1; 4]);
        let spec = AgentSpec {
            env: BTreeMap::from([("API_KEY".to_owned(), "hunter2".to_owned())]),
            ..AgentSpec::new(session, WorkerId::from_random(&[2; 4]), "echo", "/")
        };
        let shown = format!("{spec:?} {spec:#?} {:?}", Secret("hunter2".to_owned()));
        assert!(shown.contains("API_KEY") && !shown.contains("hunter2"), "{shown}");
    }
}
