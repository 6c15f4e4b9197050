//! How a conversation begins: the handshake, the user's own settings, then a thread new or old. What is said meanwhile
//! is thrown away, because it is about the past or about nothing that anybody asked for.

use std::path::Path;

use serde::Deserialize;
use serde_json::{Value, json};
use tokio::io::{AsyncRead, AsyncWrite};

use super::connection::{CodexConnection, CodexMessage, CodexParams, CodexRpcError};
use crate::drivers::tool_server::{CALL_TIMEOUT_S, SERVER_NAME, ToolServer};

/// What a conversation begins with.
#[derive(Debug)]
pub(super) struct CodexHandshakeOptions<'a> {
    pub(super) cwd: &'a Path,
    pub(super) model: Option<&'a str>,
    pub(super) system_prompt: Option<&'a str>,
    /// The agent's name for the conversation to go on with.
    pub(super) resume: Option<&'a str>,
    /// The server that it is given.
    pub(super) tools: Option<ToolServer>,
}

/// What came of it.
#[derive(Debug)]
pub(super) struct CodexHandshakeResult {
    pub(super) thread: String,
    /// The model that counts, by which tokens are priced.
    pub(super) model: String,
    /// What the first turn is to tell first.
    pub(super) notices: Vec<String>,
}

/// Why nothing came of it.
#[derive(Debug)]
pub(super) enum CodexHandshakeError {
    /// The agent is no more.
    AgentExited,
    /// It would not.
    Refused(CodexRpcError),
}

/// Shakes hands and opens a thread.
pub(super) async fn perform_handshake<R, W>(
    peer: &mut CodexConnection<R, W>,
    opening: &CodexHandshakeOptions<'_>,
) -> Result<CodexHandshakeResult, CodexHandshakeError>
where
    R: AsyncRead + Unpin,
    W: AsyncWrite + Unpin,
{
    let hello = json!({
        "clientInfo": {"name": "quarterdeck", "title": "Quarterdeck", "version": env!("CARGO_PKG_VERSION")},
        // Ending the commands of a turn is an experimental method, and nothing else ends them.
        "capabilities": {"experimentalApi": true},
    });
    call(peer, "initialize", hello).await?;
    peer.notify("initialized");
    let params = opening.thread_params(has_own_approvals(peer, opening.cwd).await?);
    let mut notices = Vec::new();
    if let Some(id) = opening.resume {
        let mut params = params.clone();
        params["threadId"] = json!(id);
        // They could be many megabytes, and the session has them.
        params["excludeTurns"] = json!(true);
        match call(peer, "thread/resume", params).await {
            Ok(answer) => return parse_thread(&answer, notices),
            Err(CodexHandshakeError::AgentExited) => return Err(CodexHandshakeError::AgentExited),
            // Also of a thread that never had a turn, for which nothing was written down.
            Err(CodexHandshakeError::Refused(CodexRpcError { message, .. })) => notices.push(format!(
                "the agent could not go on with its old conversation and began a new one: {message}"
            )),
        }
    }
    let answer = call(peer, "thread/start", params).await?;
    parse_thread(&answer, notices)
}

impl CodexHandshakeOptions<'_> {
    /// What a thread is started and resumed with. The sandbox is left out, so that the user's settings and trust in
    /// the folder count: without any, Codex may only read, and asks for the rest.
    fn thread_params(&self, own_approvals: bool) -> Value {
        let mut params = json!({
            "cwd": self.cwd,
            "model": self.model,
            "developerInstructions": self.system_prompt,
            // People or their policy answer, and no model does in their place.
            "approvalsReviewer": "user",
        });
        if !own_approvals {
            params["approvalPolicy"] = json!("on-request");
        }
        if let Some(tools) = &self.tools {
            // Under its own name beside the user's servers.
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

/// Whether the user has settings of their own about what is asked, that on-request would weaken. `never` is none of
/// these: it never asks, and then there is nobody to say no.
async fn has_own_approvals<R, W>(
    peer: &mut CodexConnection<R, W>,
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
    let answer = match call(peer, "config/read", json!({"cwd": cwd})).await {
        Ok(answer) => answer.read::<CodexConfigResponse>(),
        Err(CodexHandshakeError::AgentExited) => return Err(CodexHandshakeError::AgentExited),
        // Other versions may have no such method.
        Err(CodexHandshakeError::Refused(_)) => None,
    };
    let policy = answer.and_then(|answer| answer.config.approval_policy);
    Ok(policy.is_some_and(|policy| policy.is_object() || policy == "untrusted"))
}

fn parse_thread(
    answer: &CodexParams,
    mut notices: Vec<String>,
) -> Result<CodexHandshakeResult, CodexHandshakeError> {
    #[derive(Deserialize)]
    struct CodexThreadResponse {
        thread: CodexThread,
        #[serde(default)]
        model: String,
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
    let Some(CodexThreadResponse { thread, model, sandbox }) = answer.read() else {
        return Err(CodexHandshakeError::Refused(CodexRpcError::invalid_params(
            "the agent's answer names no thread",
        )));
    };
    if sandbox.is_some_and(|sandbox| sandbox.kind == "dangerFullAccess") {
        let text = "Codex's own settings give it full access (danger-full-access), so it asks for nothing";
        notices.push(text.to_owned());
    }
    Ok(CodexHandshakeResult { thread: thread.id, model, notices })
}

/// Asks and waits for the answer.
async fn call<R, W>(
    peer: &mut CodexConnection<R, W>,
    method: &str,
    params: Value,
) -> Result<CodexParams, CodexHandshakeError>
where
    R: AsyncRead + Unpin,
    W: AsyncWrite + Unpin,
{
    let id = peer.request(method, params);
    loop {
        match peer.next(true).await.ok_or(CodexHandshakeError::AgentExited)? {
            CodexMessage::Response(of, answer) if of == id => {
                return answer.map_err(CodexHandshakeError::Refused);
            }
            CodexMessage::Response(..) | CodexMessage::Notification(..) => {}
            CodexMessage::Request(id, method, _) => {
                peer.respond(&id, Err(CodexRpcError::unknown_method(&method)))
            }
        }
    }
}
