//! `qd mcp`: the MCP server for agents on stdio. It forwards each tool call to the daemon and retries while the daemon
//! is down, so an agent that waits does not notice a restart.

use std::path::Path;
use std::time::Duration;

use qd_mcp::server::McpToolRequest;
use qd_mcp::{McpToolServer, ToolBackend, ToolName};
use qd_protocol::error::ErrorDoc;
use qd_protocol::limits::TOOL_AWAY_S;
use qd_protocol::worker::{SESSION_TOKEN_VAR, TOKEN_FILE_PREFIX};
use rmcp::ServiceExt;
use rmcp::transport::io::stdio_pipes;
use serde_json::{Map, Value, json};
use tokio::sync::Mutex;
use tokio::time::Instant;

use super::VerbContext;
use crate::client::DaemonClient;
use crate::daemon::DaemonLocator;
use crate::failure::{CliExitCode, CliFailure, Result};
use crate::output::CliOutput;

/// Delay before the second attempt; doubled before each further one, up to the maximum.
const FIRST_RETRY_DELAY: Duration = Duration::from_millis(50);
const MAX_RETRY_DELAY: Duration = Duration::from_secs(2);

/// Serves until stdin ends.
pub(crate) async fn mcp(context: &VerbContext, dir: Option<&Path>) -> Result<CliExitCode> {
    // The keeper recognizes its agent's helper by this process name.
    qd_keeper::process_setup::set_process_name(c"qd-mcp");
    let dir = dir.unwrap_or(Path::new("."));
    let dir = dir
        .canonicalize()
        .map_err(|error| CliFailure::Usage(format!("cannot use the directory {}: {error}", dir.display())))?;
    let token = std::env::var(SESSION_TOKEN_VAR)
        .ok()
        .filter(|token| !token.is_empty())
        .map(read_token)
        .transpose()?;
    let forwarder = McpForwarder {
        locator: context.locator.clone(),
        out: context.out.clone(),
        directory: dir.to_string_lossy().into_owned(),
        token,
        client: Mutex::new(None),
    };
    match McpToolServer::new(forwarder).serve(stdio_pipes()).await {
        Ok(running) => {
            // The result does not matter: the client is gone.
            let _ended = running.waiting().await;
        }
        // Stdin ended before the client initialized. That is not a failure.
        Err(error) => context.out.print_note(&format!("no MCP client connected: {error}")),
    }
    Ok(CliExitCode::Success)
}

/// The token itself, or the content of the file if the variable names one.
fn read_token(value: String) -> Result<String> {
    let Some(path) = value.strip_prefix(TOKEN_FILE_PREFIX) else { return Ok(value) };
    let text = std::fs::read_to_string(path).map_err(|error| {
        CliFailure::Usage(format!(
            "cannot read {path}, which {SESSION_TOKEN_VAR} names: {error}; the session may be closed"
        ))
    })?;
    Ok(text.trim().to_owned())
}

/// Forwards tool calls to the daemon, across its restarts.
#[derive(Debug)]
struct McpForwarder {
    locator: DaemonLocator,
    out: CliOutput,
    /// Project directory for agents that are started outside of any session.
    directory: String,
    /// Session token. Without one, calls are made as the user.
    token: Option<String>,
    /// Client of the daemon that answered last. Reset after a failure.
    client: Mutex<Option<DaemonClient>>,
}

impl McpForwarder {
    async fn client(&self) -> Result<DaemonClient> {
        let mut cached = self.client.lock().await;
        if let Some(client) = &*cached {
            return Ok(client.clone());
        }
        let client = match &self.token {
            Some(token) => self.locator.session_client(token.clone()),
            None => self.locator.connect_or_start(&self.out).await?,
        };
        *cached = Some(client.clone());
        Ok(client)
    }

    async fn call_once(
        &self,
        path: &str,
        arguments: &Map<String, Value>,
        key: &str,
    ) -> Result<Map<String, Value>> {
        self.client().await?.post_once(path, arguments, key).await
    }
}

impl ToolBackend for McpForwarder {
    async fn call(&self, request: McpToolRequest<'_>) -> std::result::Result<Map<String, Value>, ErrorDoc> {
        let McpToolRequest { tool, mut arguments, key, .. } = request;
        if tool == ToolName::SpawnAgent && self.token.is_none() {
            arguments.entry("directory").or_insert_with(|| json!(self.directory));
        }
        let path = format!("/v1/tools/{}", tool.as_str());
        let deadline = Instant::now() + Duration::from_secs(TOOL_AWAY_S);
        let mut delay = FIRST_RETRY_DELAY;
        loop {
            let failure = match self.call_once(&path, &arguments, &key).await {
                Ok(done) => return Ok(done),
                Err(failure) => failure,
            };
            match failure {
                CliFailure::Refused(refusal) if refusal.error.code != "stopping" => return Err(refusal.error),
                failure if Instant::now() > deadline => {
                    return Err(ErrorDoc {
                        code: "daemon_unreachable".to_owned(),
                        message: failure.to_string(),
                        details: Map::new(),
                    });
                }
                // The next attempt connects anew, or starts a daemon if it may.
                _ => *self.client.lock().await = None,
            }
            tokio::time::sleep(delay).await;
            delay = (delay * 2).min(MAX_RETRY_DELAY);
        }
    }
}
