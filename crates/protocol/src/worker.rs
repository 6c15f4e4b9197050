//! What a worker is started with and how it is found again.

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::ids::{SessionId, WorkerId};
use crate::link::UpdateNumber;
use crate::manifest::{Manifest, TokenPrice};
use crate::time::Millis;

/// What a worker process of the daemon reads from its standard input, as one JSON value up to the end of the file.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct WorkerHostSpec {
    /// The name of the process among the workers of its home, and of its files: `ID.json`, `ID.sock`.
    pub id: String,
    /// The folder with the records, the sockets and, per session, the spools. Absolute, and ours alone.
    pub dir: PathBuf,
    /// What both sides prove themselves with.
    pub secret: Secret,
    /// How long to keep an agent in mid-turn while no daemon comes.
    pub orphan_busy_ms: u64,
    /// How long to keep an agent without a turn while no daemon comes.
    pub orphan_idle_ms: u64,
    /// Agents to start at once.
    pub agents: Vec<AgentSpec>,
}

/// All that an agent is started with.
#[derive(Clone, PartialEq, Serialize, Deserialize)]
pub struct AgentSpec {
    /// Whose agent.
    pub session: SessionId,
    /// Its worker's id: a new one for each time that the session gets a worker.
    pub worker: WorkerId,
    /// Which agent, without `@label`.
    pub agent: String,
    /// How it is started and understood, its program found; none if whoever starts it is to know by its name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub manifest: Option<Box<Manifest>>,
    /// What its tokens cost, by model, where it does not say so itself.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub prices: BTreeMap<String, TokenPrice>,
    /// Where it works.
    pub cwd: PathBuf,
    /// Which model, in the agent's words.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model: Option<String>,
    /// What it is told before anything else.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub system_prompt: Option<String>,
    /// Variables it is given. The values are secrets as far as we know.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub env: BTreeMap<String, String>,
    /// Where it finds the tools of `qd mcp`, if it is given them. Its token is among the variables, as [`TOKEN_VAR`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tools: Option<Box<McpAccess>>,
    /// The agent's own name for the conversation, if it is to go on with one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub agent_session_id: Option<String>,
    /// When the conversation was last used, as far as that is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_active: Option<Millis>,
    /// The last number the session has heard; what this worker says is numbered after it.
    pub after: UpdateNumber,
    /// A random word in the environment of all that the agent starts: the last net if worker and keeper are killed.
    pub mark: String,
}

impl AgentSpec {
    /// An agent of a session that has heard nothing, with nothing beyond what every agent needs.
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
            env: BTreeMap::new(),
            tools: None,
            agent_session_id: None,
            last_active: None,
            after: UpdateNumber(0),
            mark: String::new(),
        }
    }
}

impl fmt::Debug for AgentSpec {
    /// Shows the names in `env` and none of the values: this ends up in logs.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { session, worker, agent, manifest, prices, cwd, .. } = self;
        let Self { model, system_prompt, env, tools, agent_session_id, last_active, after, mark, .. } = self;
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
            .field("agent_session_id", agent_session_id)
            .field("last_active", last_active)
            .field("after", after)
            .field("mark", mark)
            .finish()
    }
}

/// The variable with the token of a session, with which `qd mcp` speaks for it.
pub const SESSION_TOKEN_VAR: &str = "QD_SESSION_TOKEN";

/// What an agent is told of the tools that it is given.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct McpAccess {
    /// Where the daemon is, in the words of `--host`.
    pub host: String,
    /// Where the token of the session is kept, for whatever may be seen by others.
    pub token_file: PathBuf,
}

/// What stands before a path in [`TOKEN_VAR`], where that has the file of a token and not the token itself.
pub const TOKEN_FILE_PREFIX: &str = "file:";

/// Something that must not be shown. Its `Debug` does not.
#[derive(Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Secret(pub String);

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(…)")
    }
}

/// How a worker announces itself: `AGENT_ID.json` in the folder for it, replaced by rename, renewed before its lease
/// is over, and removed at the end.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkerRecord {
    /// Its name.
    pub agent_id: String,
    /// What it does.
    pub role: String,
    /// What it can be chosen by.
    #[serde(default)]
    pub labels: Vec<String>,
    /// Where it listens: `ws://HOST:PORT` or `unix:PATH`.
    pub endpoint: String,
    /// Its process.
    pub pid: u32,
    /// When that process started, in the kernel's ticks since boot: a pid alone may be somebody else's by now.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub start_ticks: Option<u64>,
    /// Its version.
    pub version: String,
    /// Since when it runs.
    pub started_at: Millis,
    /// Until when it counts without another word.
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
