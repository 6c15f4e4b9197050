//! The handshake with the server: initialize, read the user's own settings, then start or resume a thread.
//! Notifications that arrive meanwhile are dropped, because they concern the past or nothing that was asked for.

use std::path::Path;

use serde::Deserialize;
use serde_json::{Value, json};
use tokio::io::{AsyncRead, AsyncWrite};

use super::connection::{CodexConnection, CodexMessage, CodexParams, CodexRpcError};
use crate::emit::new_conversation_notice;
use crate::stdio_agent::StdioHandshakeError;
use crate::tool_server::{CALL_TIMEOUT_S, SERVER_NAME, ToolServer};

/// Options for opening a conversation.
#[derive(Debug)]
pub(super) struct CodexHandshakeOptions<'a> {
    pub(super) cwd: &'a Path,
    pub(super) model: Option<&'a str>,
    pub(super) system_prompt: Option<&'a str>,
    /// The id of the thread to resume.
    pub(super) resume: Option<&'a str>,
    /// Our MCP server, which the agent is to start.
    pub(super) tools: Option<ToolServer>,
}

/// A conversation that was opened.
#[derive(Debug)]
pub(super) struct CodexHandshakeResult {
    pub(super) thread: String,
    /// The effective model, which determines the token price.
    pub(super) model: String,
    /// The effective reasoning effort.
    pub(super) effort: Option<String>,
    /// Notices that the first turn emits first.
    pub(super) notices: Vec<String>,
}

/// Why no conversation could be opened.
pub(super) type CodexHandshakeError = StdioHandshakeError<CodexRpcError>;

/// Initializes the server and opens a thread: the old one if it can be resumed, else a new one.
pub(super) async fn perform_handshake<R, W>(
    connection: &mut CodexConnection<R, W>,
    options: &CodexHandshakeOptions<'_>,
) -> Result<CodexHandshakeResult, CodexHandshakeError>
where
    R: AsyncRead + Unpin,
    W: AsyncWrite + Unpin,
{
    let hello = json!({
        "clientInfo": {"name": "quarterdeck", "title": "Quarterdeck", "version": env!("CARGO_PKG_VERSION")},
        // Ending the commands of a turn is an experimental method, and no other method does that.
        "capabilities": {"experimentalApi": true},
    });
    call(connection, "initialize", hello).await?;
    connection.notify("initialized");
    let params = options.thread_params(has_own_approvals(connection, options.cwd).await?);
    let mut notices = Vec::new();
    if let Some(id) = options.resume {
        let mut params = params.clone();
        params["threadId"] = json!(id);
        // Old turns can be many megabytes, and the session already has them.
        params["excludeTurns"] = json!(true);
        match call(connection, "thread/resume", params).await {
            Ok(response) => return parse_thread(&response, notices),
            Err(CodexHandshakeError::AgentExited) => return Err(CodexHandshakeError::AgentExited),
            // A thread that never had a turn is refused, too: nothing was saved for it.
            Err(CodexHandshakeError::Refused(CodexRpcError { message, .. })) => {
                notices.push(new_conversation_notice(message))
            }
        }
    }
    let response = call(connection, "thread/start", params).await?;
    parse_thread(&response, notices)
}

impl CodexHandshakeOptions<'_> {
    /// The parameters for starting and resuming a thread. In this sandbox Codex may only read, and asks for the rest,
    /// whatever the user's own settings allow.
    fn thread_params(&self, own_approvals: bool) -> Value {
        let mut params = json!({
            "cwd": self.cwd,
            "model": self.model,
            "developerInstructions": self.system_prompt,
            // People or their policy answer, not a model in their place.
            "approvalsReviewer": "user",
            "sandbox": "read-only",
        });
        if !own_approvals {
            params["approvalPolicy"] = json!("on-request");
        }
        if let Some(tools) = &self.tools {
            // A separate entry, beside the user's own servers.
            params["config"] = json!({ format!("mcp_servers.{SERVER_NAME}"): {
                "command": tools.command,
                "args": tools.args,
                "env": tools.env,
                "tool_timeout_sec": CALL_TIMEOUT_S,
            }});
        }
        params
    }
}

/// Whether the user's own approval policy is stricter than `on-request`, which would weaken it. `never` does not count:
/// it never asks, so nobody could deny anything.
async fn has_own_approvals<R, W>(
    connection: &mut CodexConnection<R, W>,
    cwd: &Path,
) -> Result<bool, CodexHandshakeError>
where
    R: AsyncRead + Unpin,
    W: AsyncWrite + Unpin,
{
    #[derive(Deserialize)]
    struct CodexConfigResponse {
        config: CodexConfig,
    }
    #[derive(Deserialize)]
    struct CodexConfig {
        approval_policy: Option<Value>,
    }
    let response = match call(connection, "config/read", json!({"cwd": cwd})).await {
        Ok(response) => response.read::<CodexConfigResponse>(),
        Err(CodexHandshakeError::AgentExited) => return Err(CodexHandshakeError::AgentExited),
        // Other versions may not have this method.
        Err(CodexHandshakeError::Refused(_)) => None,
    };
    let policy = response.and_then(|response| response.config.approval_policy);
    Ok(policy.is_some_and(|policy| policy.is_object() || policy == "untrusted"))
}

fn parse_thread(
    response: &CodexParams,
    notices: Vec<String>,
) -> Result<CodexHandshakeResult, CodexHandshakeError> {
    #[derive(Deserialize)]
    #[serde(rename_all = "camelCase")]
    struct CodexThreadResponse {
        thread: CodexThread,
        #[serde(default)]
        model: String,
        reasoning_effort: Option<String>,
        sandbox: Option<CodexSandbox>,
    }
    #[derive(Deserialize)]
    struct CodexThread {
        id: String,
    }
    #[derive(Deserialize)]
    struct CodexSandbox {
        #[serde(rename = "type")]
        kind: String,
    }
    let Some(CodexThreadResponse { thread, model, reasoning_effort: effort, sandbox }) = response.read()
    else {
        return Err(CodexHandshakeError::Refused(CodexRpcError::invalid_params(
            "the agent's response names no thread",
        )));
    };
    if let Some(CodexSandbox { kind }) = sandbox.filter(|sandbox| sandbox.kind != "readOnly") {
        let message =
            format!("Codex did not take the read-only sandbox but `{kind}`, in which it does not ask");
        return Err(CodexHandshakeError::Refused(CodexRpcError::invalid_params(message)));
    }
    Ok(CodexHandshakeResult { thread: thread.id, model, effort, notices })
}

/// Sends a request and waits for its response.
async fn call<R, W>(
    connection: &mut CodexConnection<R, W>,
    method: &str,
    params: Value,
) -> Result<CodexParams, CodexHandshakeError>
where
    R: AsyncRead + Unpin,
    W: AsyncWrite + Unpin,
{
    let id = connection.request(method, params);
    loop {
        match connection.next(true).await.ok_or(CodexHandshakeError::AgentExited)? {
            CodexMessage::Response(response_id, result) if response_id == id => {
                return result.map_err(CodexHandshakeError::Refused);
            }
            CodexMessage::Response(..) | CodexMessage::Notification(..) => {}
            CodexMessage::Request(id, method, _) => {
                connection.respond(&id, Err(CodexRpcError::unknown_method(&method)))
            }
        }
    }
}
