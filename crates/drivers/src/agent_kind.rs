//! The kind of agent that a session has: one in this process, a remote one, or a process that is driven as its manifest
//! says.

use std::sync::Arc;

use qd_catalog::Catalog;
use qd_protocol::event::RunError;
use qd_protocol::manifest::{DriverKind, Manifest};
use qd_protocol::worker::AgentSpec;

use crate::tool_server;

#[derive(Debug, Clone)]
pub enum AgentKind {
    /// Runs in this process.
    Echo,
    /// Runs elsewhere: nothing is started here.
    Remote(Arc<Manifest>),
    /// A process below a keeper, reached by a driver.
    Process(Arc<Manifest>),
}

impl AgentKind {
    /// Uses the manifest of the specification, or else the built-in agent of that name.
    pub fn from_spec(spec: &AgentSpec) -> Result<Self, RunError> {
        let manifest = match &spec.manifest {
            Some(manifest) => manifest.as_ref().clone(),
            None => Catalog::built_in().get(&spec.agent).ok_or_else(|| {
                RunError::new("unknown_agent", format!("this worker has no agent `{}`", spec.agent))
            })?,
        };
        Ok(match manifest.driver() {
            DriverKind::Echo => Self::Echo,
            DriverKind::A2a | DriverKind::Worker => Self::Remote(Arc::new(manifest)),
            _ => Self::Process(Arc::new(manifest)),
        })
    }

    /// The names of processes that the keeper must spare; `None` if the agent needs no keeper.
    pub fn helper_names(&self, spec: &AgentSpec) -> Option<Vec<String>> {
        let ours = spec.mcp.is_some().then(|| tool_server::SERVER_PROCESS_NAME.to_owned());
        match self {
            Self::Echo | Self::Remote(_) => None,
            Self::Process(manifest) => Some(manifest.turn.helpers.iter().cloned().chain(ours).collect()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use qd_protocol::{SessionId, WorkerId};

    #[test]
    fn the_specifications_manifest_decides_or_else_the_built_in_agent() {
        let spec = |agent: &str| {
            AgentSpec::new(SessionId::from_random(&[1]), WorkerId::from_random(&[1]), agent, "/")
        };
        assert!(matches!(AgentKind::from_spec(&spec("echo")), Ok(AgentKind::Echo)));
        assert!(matches!(AgentKind::from_spec(&spec("script")), Ok(AgentKind::Process(_))));
        let remote = AgentKind::from_spec(&spec("a2a:http://127.0.0.1:1")).unwrap();
        let none = remote.helper_names(&spec("x")).is_none();
        assert!(matches!(remote, AgentKind::Remote(_)) && none, "there is nothing to keep");
        assert!(matches!(AgentKind::from_spec(&spec("worker:ws://127.0.0.1:1")), Ok(AgentKind::Remote(_))));
        assert_eq!(AgentKind::from_spec(&spec("nobody")).unwrap_err().code, "unknown_agent");
        let mut named = spec("nobody");
        named.manifest = Catalog::built_in().get("claude").map(Box::new);
        assert!(
            matches!(AgentKind::from_spec(&named), Ok(AgentKind::Process(manifest)) if manifest.driver() == DriverKind::Claude)
        );
    }
}
