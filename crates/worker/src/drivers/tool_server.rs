//! The tools of `qd mcp`, as an agent is given them: a program on stdio that it starts itself, with the variables by which
//! that finds the daemon and speaks for the session. How an agent is told of it is its driver's business.

use std::collections::BTreeMap;
use std::path::PathBuf;

use qd_protocol::limits::WAIT_MAX_S;
use qd_protocol::worker::{AgentSpec, McpAccess, SESSION_TOKEN_VAR, TOKEN_FILE_PREFIX};

/// What the server is called among an agent's.
pub(crate) const SERVER_NAME: &str = "quarterdeck";
/// What its process is called, by which a keeper knows it as one of the agent's helpers.
pub(crate) const SERVER_PROCESS_NAME: &str = "qd-mcp";
/// The variable that says where the daemon is.
pub(crate) const HOST_VAR: &str = "QD_HOST";
/// How long an agent should let a call last: as long as the longest wait, and a little for the way.
pub(crate) const CALL_TIMEOUT_S: u64 = WAIT_MAX_S + 60;

/// A server that an agent can start.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ToolServer {
    /// The program, by a path that means the same to everybody.
    pub(crate) command: PathBuf,
    /// Its arguments.
    pub(crate) args: Vec<String>,
    /// Its variables. Agents put them where others can see them, such as on a command line, so none of them is a secret:
    /// of the token they have the file.
    pub(crate) env: BTreeMap<String, String>,
}

impl ToolServer {
    /// The one for this agent, if it is to have one.
    pub(crate) fn from_spec(spec: &AgentSpec) -> Option<Self> {
        let McpAccess { host, token_file } = spec.tools.as_deref()?;
        let token = format!("{TOKEN_FILE_PREFIX}{}", token_file.display());
        let env =
            BTreeMap::from([(HOST_VAR.to_owned(), host.clone()), (SESSION_TOKEN_VAR.to_owned(), token)]);
        Some(Self { command: own_program_path(), args: vec!["mcp".to_owned()], env })
    }
}

/// This very program, by a path that another process can use; also when another version has been put in its place.
fn own_program_path() -> PathBuf {
    match std::env::current_exe() {
        Ok(path) if path.exists() => path,
        _ => PathBuf::from(format!("/proc/{}/exe", std::process::id())),
    }
}

#[cfg(test)]
mod tests {
    use qd_protocol::{SessionId, WorkerId};

    use super::*;

    #[test]
    fn an_agent_has_the_server_that_its_specification_gives_it() {
        let mut spec = AgentSpec::new(SessionId::from_random(&[1]), WorkerId::from_random(&[1]), "x", "/");
        assert_eq!(ToolServer::from_spec(&spec), None);
        spec.tools =
            Some(Box::new(McpAccess { host: "unix:/h".to_owned(), token_file: PathBuf::from("/s/t") }));
        spec.env.insert(SESSION_TOKEN_VAR.to_owned(), "secret".to_owned());
        let server = ToolServer::from_spec(&spec).unwrap();
        assert!(server.command.is_absolute() && server.args == ["mcp"]);
        assert_eq!(
            (server.env[HOST_VAR].as_str(), server.env[SESSION_TOKEN_VAR].as_str()),
            ("unix:/h", "file:/s/t")
        );
    }
}
