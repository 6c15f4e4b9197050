//! `qd mcp`: the tools for agents on stdio. What they do is the daemon's; here each request is carried to it, again and
//! again while it is away, so that an agent that waits does not notice a restart.

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

/// Before the second try; doubled before each one after it, up to the longest.
const FIRST_RETRY_DELAY: Duration = Duration::from_millis(50);
const MAX_RETRY_DELAY: Duration = Duration::from_secs(2);

/// Serves until stdin ends.
pub(crate) async fn mcp(context: &VerbContext, dir: Option<&Path>) -> Result<CliExitCode> {
    // By this name a keeper knows it as one of its agent's helpers.
    qd_keeper::process_setup::set_process_name(c"qd-mcp");
    let dir = dir.unwrap_or(Path::new("."));
    let dir = dir.canonicalize().map_err(|error| {
        CliFailure::Usage(format!("{} is no directory to work in: {error}", dir.display()))
    })?;
    let token = std::env::var(SESSION_TOKEN_VAR)
        .ok()
        .filter(|token| !token.is_empty())
        .map(read_token)
        .transpose()?;
    let far = McpForwarder {
        locator: context.locator.clone(),
        out: context.out.clone(),
        directory: dir.to_string_lossy().into_owned(),
        token,
        client: Mutex::new(None),
    };
    match McpToolServer::new(far).serve(stdio_pipes()).await {
        Ok(running) => {
            // However it ended, its client is gone.
            let _ended = running.waiting().await;
        }
        // Nobody said hello before stdin ended; that is no failure.
        Err(error) => context.out.print_note(&format!("no client began a session: {error}")),
    }
    Ok(CliExitCode::Success)
}

/// The token that the variable has, or that is in the file which it names.
fn read_token(said: String) -> Result<String> {
    let Some(path) = said.strip_prefix(TOKEN_FILE_PREFIX) else { return Ok(said) };
    let text = std::fs::read_to_string(path).map_err(|error| {
        CliFailure::Usage(format!(
            "{SESSION_TOKEN_VAR} names {path}, which cannot be read: {error}; the session may be closed"
        ))
    })?;
    Ok(text.trim().to_owned())
}

/// The daemon, wherever it is and whenever it is back.
#[derive(Debug)]
struct McpForwarder {
    locator: DaemonLocator,
    out: CliOutput,
    /// Where agents are started that belong to no session.
    directory: String,
    /// With which we speak for a session; without one, for the user.
    token: Option<String>,
    /// Of the daemon that answered last.
    client: Mutex<Option<DaemonClient>>,
}

impl McpForwarder {
    async fn client(&self) -> Result<DaemonClient> {
        let mut known = self.client.lock().await;
        if let Some(client) = &*known {
            return Ok(client.clone());
        }
        let client = match &self.token {
            Some(token) => self.locator.session_client(token.clone()),
            None => self.locator.connect_or_start(&self.out).await?,
        };
        *known = Some(client.clone());
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
        let mut pause = FIRST_RETRY_DELAY;
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
                // The next try finds the daemon that is there then, or starts one where that is ours to do.
                _ => *self.client.lock().await = None,
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(MAX_RETRY_DELAY);
        }
    }
}
