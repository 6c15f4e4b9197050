//! What kind of agent a session is to have: in this process, elsewhere, or a process of its own that is driven as its
//! manifest says.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use qd_catalog::Catalog;
use qd_protocol::event::RunError;
use qd_protocol::manifest::{DriverKind, Manifest};
use qd_protocol::worker::AgentSpec;

use crate::drivers::tool_server;

/// How an agent is reached.
#[derive(Debug, Clone)]
pub(crate) enum AgentKind {
    /// In this process.
    Echo,
    /// Elsewhere: nothing of it is started here.
    Remote(Arc<Manifest>),
    /// By a driver, below a keeper.
    Process(Arc<Manifest>),
}

impl AgentKind {
    /// As the specification says, and if it says nothing, as its name does to everybody.
    pub(crate) fn from_spec(spec: &AgentSpec) -> Result<Self, RunError> {
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

    /// What a keeper must spare; `None` if the agent needs none.
    pub(crate) fn helper_names(&self, spec: &AgentSpec) -> Option<Vec<String>> {
        let ours = spec.tools.is_some().then(|| tool_server::SERVER_PROCESS_NAME.to_owned());
        match self {
            Self::Echo | Self::Remote(_) => None,
            Self::Process(manifest) => Some(manifest.turn.helpers.iter().cloned().chain(ours).collect()),
        }
    }
}

/// This very program, also when another version has been put in its place.
pub(crate) fn own_program() -> PathBuf {
    let link = Path::new("/proc/self/exe");
    match link.exists() {
        true => link.to_owned(),
        false => std::env::current_exe().unwrap_or_else(|_| PathBuf::from("qd")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use qd_protocol::{SessionId, WorkerId};

    #[test]
    fn an_agent_is_what_its_specification_says_and_else_what_its_name_does() {
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
