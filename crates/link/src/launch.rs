//! What a session must tell to get an agent, and who gives it one. Only the words live here: agents are behind
//! [`Launcher`], in `qd-worker`.

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;

use qd_protocol::SessionId;
use qd_protocol::api::Agent;
use qd_protocol::link::UpNumber;

use crate::local::SessionEnd;

/// Whoever can start agents.
pub trait Launcher: Send + Sync + 'static {
    /// The agents it knows, whether or not they can start here.
    fn agents(&self) -> Vec<Agent>;

    /// Starts one and returns at once. The first thing heard is `Ready`, or within
    /// [`START_S`](qd_protocol::limits::START_S) that it is gone; a name nobody knows is heard the same way.
    fn launch(&self, spec: AgentSpec) -> SessionEnd;
}

/// All that an agent is started with.
#[derive(Clone)]
pub struct AgentSpec {
    /// Whose agent.
    pub session: SessionId,
    /// Which one.
    pub agent: String,
    /// Where it works.
    pub cwd: PathBuf,
    /// Which model, in the agent's words.
    pub model: Option<String>,
    /// What it is told before anything else.
    pub system_prompt: Option<String>,
    /// Variables it is given. The values are secrets as far as we know.
    pub env: BTreeMap<String, String>,
    /// The agent's own name for the conversation, if it is to go on with one.
    pub agent_session_id: Option<String>,
    /// The last number the session has heard; what this agent says is numbered after it.
    pub after: UpNumber,
    /// The folder with the texts that are too large for an event.
    pub blobs: PathBuf,
}

impl fmt::Debug for AgentSpec {
    /// Shows the names in `env` and none of the values: this ends up in logs.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { session, agent, cwd, model, system_prompt, env, agent_session_id, after, blobs } = self;
        f.debug_struct("AgentSpec")
            .field("session", session)
            .field("agent", agent)
            .field("cwd", cwd)
            .field("model", model)
            .field("system_prompt", system_prompt)
            .field("env", &env.keys().collect::<Vec<_>>())
            .field("agent_session_id", agent_session_id)
            .field("after", after)
            .field("blobs", blobs)
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_specification_never_shows_the_values_of_its_variables() {
        let spec = AgentSpec {
            session: SessionId::from_random(&[1; 4]),
            agent: "echo".to_owned(),
            cwd: "/".into(),
            model: None,
            system_prompt: None,
            env: BTreeMap::from([("API_KEY".to_owned(), "hunter2".to_owned())]),
            agent_session_id: None,
            after: UpNumber(0),
            blobs: "/blobs".into(),
        };
        let shown = format!("{spec:?} {spec:#?}");
        assert!(shown.contains("API_KEY") && !shown.contains("hunter2"), "{shown}");
    }
}
