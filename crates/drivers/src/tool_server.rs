//! The tools of `qd mcp` as an agent gets them: a program that it starts itself and talks to on stdio, with variables
//! that tell it where the daemon is and which session it acts for. Each driver tells its agent about it in its own way.

use std::collections::BTreeMap;
use std::path::PathBuf;

use qd_protocol::limits::WAIT_MAX_S;
use qd_protocol::worker::{AgentSpec, McpAccess, SESSION_TOKEN_VAR, TOKEN_FILE_PREFIX};

/// The name of the server in the agent's MCP configuration.
pub(crate) const SERVER_NAME: &str = "quarterdeck";
/// The name of its process, by which a keeper knows it as one of the agent's helpers.
pub(crate) const SERVER_PROCESS_NAME: &str = "qd-mcp";
/// The variable with the daemon's address.
pub(crate) const HOST_VAR: &str = "QD_HOST";
/// How long an agent should let a call last, in seconds: the longest wait, plus a margin.
pub(crate) const CALL_TIMEOUT_S: u64 = WAIT_MAX_S + 60;

/// What the kernel adds to the path of a program whose file is gone.
const DELETED_SUFFIX: &str = " (deleted)";

/// An MCP server that an agent can start.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ToolServer {
    /// The program, by a path that is valid in every process.
    pub(crate) command: PathBuf,
    pub(crate) args: Vec<String>,
    /// Its environment. Agents put these variables where others can see them, such as on a command line, so none of
    /// them is a secret: the token is passed as a file.
    pub(crate) env: BTreeMap<String, String>,
}

impl ToolServer {
    /// The server for this agent, if its specification asks for one.
    pub(crate) fn from_spec(spec: &AgentSpec) -> Option<Self> {
        let McpAccess { host, token_file, .. } = spec.mcp.as_deref()?;
        let token = format!("{TOKEN_FILE_PREFIX}{}", token_file.display());
        let env =
            BTreeMap::from([(HOST_VAR.to_owned(), host.clone()), (SESSION_TOKEN_VAR.to_owned(), token)]);
        Some(Self { command: own_program_path(), args: vec!["mcp".to_owned()], env })
    }
}

/// The name by which policy rules and events know a tool of an MCP server, whatever its agent calls it.
pub(crate) fn mcp_tool_name(server: &str, tool: &str) -> String {
    format!("mcp__{server}__{tool}")
}

/// The path of this program for use by other processes. If its file has been replaced by another version, that one is
/// used: inside a sandbox our own process cannot be seen.
pub fn own_program_path() -> PathBuf {
    let own = std::env::current_exe().unwrap_or_default();
    let replaced = own.to_str().and_then(|path| path.strip_suffix(DELETED_SUFFIX)).map(PathBuf::from);
    let found = [Some(own), replaced].into_iter().flatten().find(|path| path.exists());
    found.unwrap_or_else(|| PathBuf::from(format!("/proc/{}/exe", std::process::id())))
}

#[cfg(test)]
mod tests {
    use qd_protocol::worker::Secret;
    use qd_protocol::{SessionId, WorkerId};

    use super::*;

    #[test]
    fn an_agent_has_the_server_that_its_specification_gives_it() {
        let mut spec = AgentSpec::new(SessionId::from_random(&[1]), WorkerId::from_random(&[1]), "x", "/");
        assert_eq!(ToolServer::from_spec(&spec), None);
        let token = Secret("secret".to_owned());
        spec.mcp = Some(Box::new(McpAccess { host: "unix:/h".to_owned(), token_file: "/s/t".into(), token }));
        let server = ToolServer::from_spec(&spec).unwrap();
        assert!(server.command.is_absolute() && server.args == ["mcp"]);
        assert_eq!(
            (server.env[HOST_VAR].as_str(), server.env[SESSION_TOKEN_VAR].as_str()),
            ("unix:/h", "file:/s/t")
        );
    }
}
