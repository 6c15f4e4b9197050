//! Tool calls. A call is one or more requests to a [`ToolBackend`]. Each request is short and has a key that
//! identifies repeats, so a daemon restart or a broken connection neither loses a request nor performs it twice.
//! Waiting is a loop of such requests here, with progress notifications for the client.

use std::convert::Infallible;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use qd_protocol::error::ErrorDoc;
use qd_protocol::limits::{TOOL_POLL_S, TOOL_WAIT_S, WAIT_MAX_S};
use rmcp::model::{
    CallToolRequestParams, CallToolResponse, CallToolResult, Extensions, Implementation, ListToolsResult,
    PaginatedRequestParams, ProgressNotificationParam, ServerCapabilities, ServerConfig, Tool,
};
use rmcp::service::RequestContext;
use rmcp::{ErrorData, RoleServer, ServerHandler};
use serde_json::{Map, Value, json};
use tokio::time::Instant;

use crate::tools::{INSTRUCTIONS, ToolName};

/// The pause between two messages that tell a client which asked for progress that the call is still running. Many
/// clients give up after a minute.
const PROGRESS_INTERVAL: Duration = Duration::from_secs(10);
/// The error code of a request that waits for a person's permission.
const PERMISSION_PENDING: &str = "permission_pending";
/// Random bytes in a request key.
const KEY_BYTES: usize = 16;

/// Carries out the tools: the daemon itself, or a client of the daemon.
pub trait ToolBackend: Send + Sync + 'static {
    /// Performs one request. A request that waits takes no longer than its `timeout_s`. The same `key` is only used
    /// again to repeat the same request.
    fn call(
        &self,
        request: McpToolRequest<'_>,
    ) -> impl Future<Output = Result<Map<String, Value>, ErrorDoc>> + Send;
}

/// One request of a tool call.
#[derive(Debug)]
pub struct McpToolRequest<'a> {
    pub tool: ToolName,
    pub arguments: Map<String, Value>,
    /// Identifies repeats of this request: the key of the call, `#`, and the number of the request within the call.
    pub key: String,
    /// Context of the call: over HTTP, the head of the request.
    pub extensions: &'a Extensions,
}

/// The MCP server, for one client or many.
#[derive(Debug, Clone)]
pub struct McpToolServer<D> {
    backend: D,
}

impl<D: ToolBackend> McpToolServer<D> {
    /// A server whose calls this backend carries out.
    pub fn new(backend: D) -> Self {
        Self { backend }
    }

    async fn perform_tool(
        &self,
        tool: ToolName,
        mut arguments: Map<String, Value>,
        call: &McpCall<'_>,
    ) -> Result<Map<String, Value>, ErrorDoc> {
        match tool {
            ToolName::SpawnAgent => {
                let waits = match arguments.remove("wait") {
                    None | Some(Value::Null) => false,
                    Some(Value::Bool(waits)) => waits,
                    Some(_) => return Err(invalid_value("`wait` must be true or false")),
                };
                let deadline = parse_deadline(arguments.remove("timeout_s"))?;
                let mut spawned = self.send_request(tool, arguments, call).await?;
                if waits {
                    let sessions = json!([spawned.get("session").cloned().unwrap_or_default()]);
                    let ended = self.wait_for_sessions(sessions, deadline, call).await?;
                    spawned.insert("finished".to_owned(), ended.get("finished").cloned().unwrap_or_default());
                    let result = ended.get("sessions").and_then(|sessions| sessions.get(0)).cloned();
                    spawned.insert("result".to_owned(), result.unwrap_or_default());
                }
                Ok(spawned)
            }
            ToolName::Wait => {
                let deadline = parse_deadline(arguments.remove("timeout_s"))?;
                let sessions = arguments.remove("sessions").unwrap_or_default();
                if let Some(name) = arguments.keys().next() {
                    return Err(invalid_value(&format!("`wait` takes no `{name}`")));
                }
                self.wait_for_sessions(sessions, deadline, call).await
            }
            ToolName::AskHuman => self.ask_human(arguments, call).await,
            _ => self.send_request(tool, arguments, call).await,
        }
    }

    async fn wait_for_sessions(
        &self,
        sessions: Value,
        deadline: Instant,
        call: &McpCall<'_>,
    ) -> Result<Map<String, Value>, ErrorDoc> {
        loop {
            let timeout = poll_timeout(deadline);
            let arguments = Map::from_iter([
                ("sessions".to_owned(), sessions.clone()),
                ("timeout_s".to_owned(), json!(timeout.as_secs_f64())),
            ]);
            let status = self.send_request(ToolName::Wait, arguments, call).await?;
            if status.get("finished") == Some(&json!(true)) || Instant::now() >= deadline {
                return Ok(status);
            }
        }
    }

    /// Asks a person, then waits for the answer. If the client gives up, the question is withdrawn, because the
    /// answer would reach nobody.
    async fn ask_human(
        &self,
        arguments: Map<String, Value>,
        call: &McpCall<'_>,
    ) -> Result<Map<String, Value>, ErrorDoc> {
        let deadline = Instant::now() + Duration::from_secs(WAIT_MAX_S);
        let mut status = self.send_request(ToolName::AskHuman, arguments, call).await?;
        while status.get("state") == Some(&json!("pending")) && Instant::now() < deadline {
            let ask = status.get("ask_id").cloned().unwrap_or_default();
            let with = |name: &str, value: Value| {
                Map::from_iter([("ask_id".to_owned(), ask.clone()), (name.to_owned(), value)])
            };
            let more = with("timeout_s", json!(poll_timeout(deadline).as_secs_f64()));
            status = tokio::select! {
                status = self.send_request(ToolName::AskHuman, more, call) => status?,
                () = call.context.ct.cancelled() => {
                    return self.send_request(ToolName::AskHuman, with("withdraw", json!(true)), call).await;
                }
            };
        }
        Ok(status)
    }

    async fn send_request(
        &self,
        tool: ToolName,
        arguments: Map<String, Value>,
        call: &McpCall<'_>,
    ) -> Result<Map<String, Value>, ErrorDoc> {
        let number = call.requests.fetch_add(1, Ordering::Relaxed);
        let key = format!("{}#{number}", call.key);
        let deadline = Instant::now() + Duration::from_secs(WAIT_MAX_S);
        loop {
            let (arguments, key) = (arguments.clone(), key.clone());
            let extensions = &call.context.extensions;
            let refusal = match self.backend.call(McpToolRequest { tool, arguments, key, extensions }).await {
                Err(refusal) if refusal.code == PERMISSION_PENDING => refusal,
                result => return result,
            };
            if call.context.ct.is_cancelled() {
                self.withdraw_permission_request(&refusal, call).await;
            } else if Instant::now() < deadline {
                continue;
            }
            return Err(refusal);
        }
    }

    /// Withdraws the permission request of a call that its client has given up.
    async fn withdraw_permission_request(&self, pending: &ErrorDoc, call: &McpCall<'_>) {
        let Some(ask) = pending.details.get("ask_id").cloned() else { return };
        let arguments =
            Map::from_iter([("ask_id".to_owned(), ask), ("withdraw".to_owned(), Value::Bool(true))]);
        let key = format!("{}#withdraw", call.key);
        let extensions = &call.context.extensions;
        let request = McpToolRequest { tool: ToolName::AskHuman, arguments, key, extensions };
        // If it fails, the request ends with the turn.
        let _result = self.backend.call(request).await;
    }
}

/// One call from a client.
struct McpCall<'a> {
    /// Identifies the call, so that all its requests need permission only once.
    key: String,
    /// How many requests it has sent.
    requests: AtomicU32,
    context: &'a RequestContext<RoleServer>,
}

impl McpCall<'_> {
    /// Keeps telling a client that asked for progress that the call is still running.
    async fn report_progress(&self) -> Infallible {
        let Some(token) = self.context.meta.get_progress_token() else {
            return std::future::pending().await;
        };
        let began = Instant::now();
        loop {
            tokio::time::sleep(PROGRESS_INTERVAL).await;
            let seconds = began.elapsed().as_secs();
            let mut progress = ProgressNotificationParam::new(token.clone(), seconds as f64);
            progress.message = Some(format!("waiting for {seconds} s"));
            // If the client is gone, it does not need the notification.
            let _gone = self.context.peer.notify_progress(progress).await;
        }
    }
}

impl<D: ToolBackend> ServerHandler for McpToolServer<D> {
    fn get_info(&self) -> ServerConfig {
        let about = Implementation::new("quarterdeck", env!("CARGO_PKG_VERSION")).with_title("Quarterdeck");
        ServerConfig::new(ServerCapabilities::builder().enable_tools().build())
            .with_server_info(about)
            .with_instructions(INSTRUCTIONS)
    }

    async fn list_tools(
        &self,
        _: Option<PaginatedRequestParams>,
        _: RequestContext<RoleServer>,
    ) -> Result<ListToolsResult, ErrorData> {
        Ok(ListToolsResult::with_all_items(ToolName::ALL.map(ToolName::describe).into()))
    }

    fn get_tool(&self, name: &str) -> Option<Tool> {
        ToolName::parse(name).map(ToolName::describe)
    }

    async fn call_tool(
        &self,
        request: CallToolRequestParams,
        context: RequestContext<RoleServer>,
    ) -> Result<CallToolResponse, ErrorData> {
        let Some(tool) = ToolName::parse(&request.name) else {
            let names = ToolName::ALL.map(ToolName::as_str).join(", ");
            let message = format!("there is no tool {}; there are: {names}", request.name);
            return Err(ErrorData::invalid_params(message, None));
        };
        let key = random_key().map_err(|error| ErrorData::internal_error(error.message, None))?;
        let call = McpCall { key, requests: AtomicU32::new(0), context: &context };
        // Boxed, because a server holds one of these futures per running call.
        let performed = Box::pin(self.perform_tool(tool, request.arguments.unwrap_or_default(), &call));
        let result = tokio::select! {
            result = performed => result,
            never = call.report_progress() => match never {},
        };
        // Failures of a tool are for the model to read, so they are results and not protocol errors.
        Ok(match result {
            Ok(value) => CallToolResult::structured(Value::Object(value)),
            Err(ErrorDoc { code, message, details }) => CallToolResult::structured_error(
                json!({ "error": { "code": code, "message": message, "details": details } }),
            ),
        }
        .into())
    }
}

/// When a wait ends.
fn parse_deadline(timeout: Option<Value>) -> Result<Instant, ErrorDoc> {
    let seconds = match timeout {
        None | Some(Value::Null) => TOOL_WAIT_S as f64,
        Some(value) => {
            value.as_f64().filter(|seconds| (0.0..=WAIT_MAX_S as f64).contains(seconds)).ok_or_else(|| {
                invalid_value(&format!("`timeout_s` must be a number of seconds from 0 to {WAIT_MAX_S}"))
            })?
        }
    };
    Ok(Instant::now() + Duration::from_secs_f64(seconds))
}

/// How long one request of a wait may take.
fn poll_timeout(deadline: Instant) -> Duration {
    deadline.saturating_duration_since(Instant::now()).min(Duration::from_secs(TOOL_POLL_S))
}

fn invalid_value(message: &str) -> ErrorDoc {
    ErrorDoc { code: "invalid_value".to_owned(), message: message.to_owned(), details: Map::new() }
}

fn random_key() -> Result<String, ErrorDoc> {
    let mut random = [0; KEY_BYTES];
    getrandom::fill(&mut random).map_err(|error| ErrorDoc {
        code: "internal".to_owned(),
        message: format!("cannot generate random bytes: {error}"),
        details: Map::new(),
    })?;
    Ok(hex::encode(random))
}
