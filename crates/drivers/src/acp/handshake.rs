//! The handshake with an agent: initialize, then open a new session or resume an old one. The history that a resumed
//! agent replays is dropped here, because the session already has it.

use qd_protocol::worker::META_KEY;
use std::path::Path;
use std::time::Duration;

use agent_client_protocol::schema::ProtocolVersion;
use agent_client_protocol::v1::schema::{
    AgentCapabilities, ClientCapabilities, ClientSessionCapabilities, CompactionCapabilities,
    ElicitationCapabilities, ElicitationFormCapabilities, EnvVariable, FileSystemCapabilities, HttpHeader,
    Implementation, InitializeRequest, LoadSessionRequest, McpServer, McpServerHttp, McpServerStdio, Meta,
    NewSessionRequest, NewSessionResponse, NoticeCapabilities, ResumeSessionRequest, SessionId,
    SessionNotification,
};
use agent_client_protocol::{
    Error, JsonRpcMessage, JsonRpcRequest, JsonRpcResponse, RawJsonRpcMessage, RawJsonRpcParams,
    RawJsonRpcResponse,
};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::time::Instant;

use super::connection::AcpConnection;
use super::event_decoder::{AcpEventDecoder, quarterdeck_meta};
use super::profile::AcpProfile;
use super::session_settings::{AcpConfigOption, AcpSessionSettings};
use super::settings_guard::AcpSettingsGuard;
use crate::stdio_agent::StdioHandshakeError;
use crate::tool_gateway::ToolGateway;
use crate::tool_server::{SERVER_NAME, ToolServer};

/// How long an agent that replays late must be silent before its replay counts as finished.
const REPLAY_SILENCE: Duration = Duration::from_millis(400);
/// The longest time to wait for a late replay.
const REPLAY_MAX: Duration = Duration::from_secs(10);
/// The longest time to wait for the list of the agent's commands. It follows the session at once.
const COMMAND_LIST_MAX: Duration = Duration::from_secs(2);

/// Options for opening a conversation.
#[derive(Debug)]
pub(super) struct AcpHandshakeOptions<'a> {
    pub(super) cwd: &'a Path,
    pub(super) model: Option<&'a str>,
    pub(super) system_prompt: Option<&'a str>,
    /// The agent's id of the conversation to resume.
    pub(super) resume: Option<&'a str>,
    /// What that conversation has cost before, if it is known.
    pub(super) earlier_cost_usd: Option<f64>,
    pub(super) profile: AcpProfile,
    /// Whether we offer to run commands for the agent.
    pub(super) runs_commands: bool,
    /// Our MCP server, which the agent is to start.
    pub(super) tools: Option<ToolServer>,
    /// The same server over HTTP, for agents that start none.
    pub(super) tool_gateway: Option<ToolGateway>,
}

/// A conversation that was opened.
#[derive(Debug)]
pub(super) struct AcpHandshakeResult {
    pub(super) session: SessionId,
    pub(super) capabilities: AgentCapabilities,
    /// The decoder used during the handshake. It has counted the usage totals, which continue in a resumed
    /// conversation.
    pub(super) decoder: AcpEventDecoder,
    /// Watches the mode and the options that make the agent ask.
    pub(super) guard: AcpSettingsGuard,
    /// Why the old conversation could not be resumed, if that was requested.
    pub(super) resume_failure: Option<String>,
}

/// Why no conversation could be opened.
pub(super) type AcpHandshakeError = StdioHandshakeError<Error>;

/// Initializes the agent and opens a session: the old one if it can be resumed, else a new one.
pub(super) async fn perform_handshake<R, W>(
    connection: &mut AcpConnection<R, W>,
    options: &AcpHandshakeOptions<'_>,
) -> Result<AcpHandshakeResult, AcpHandshakeError>
where
    R: AsyncRead + Unpin,
    W: AsyncWrite + Unpin,
{
    let mut decoder = AcpEventDecoder::resumed(options.profile.clone(), options.earlier_cost_usd);
    let hello = call(connection, &mut decoder, &initialize_request(options)).await;
    let hello = hello.map_err(explain_first_refusal)?;
    if hello.protocol_version != ProtocolVersion::V1 {
        let message = format!(
            "the agent speaks version {} of the Agent Client Protocol; only version 1 is supported",
            hello.protocol_version
        );
        return Err(AcpHandshakeError::Refused(Error::new(Error::invalid_request().code, message)));
    }
    let capabilities = hello.agent_capabilities;
    let mut resume_failure = None;
    if let Some(id) = options.resume.filter(|_| !is_stateless(&capabilities)) {
        match resume_session(connection, &mut decoder, &capabilities, options, id).await {
            Ok(settings) => {
                let session = SessionId::new(id);
                if options.profile.late_replay {
                    drain_replay(connection, &mut decoder).await?;
                }
                let guard = apply_settings(connection, &mut decoder, &session, options, &settings).await?;
                wait_for_commands(connection, &mut decoder).await?;
                return Ok(AcpHandshakeResult { session, capabilities, decoder, guard, resume_failure });
            }
            Err(AcpHandshakeError::AgentExited) => return Err(AcpHandshakeError::AgentExited),
            Err(AcpHandshakeError::Refused(error)) => resume_failure = Some(error_text(&error)),
        }
    }
    let request =
        NewSessionRequest::new(options.cwd).mcp_servers(options.mcp_servers()).meta(options.session_meta());
    // Usage counted for the conversation that could not be resumed is dropped.
    decoder = AcpEventDecoder::new(options.profile.clone());
    let response = call_raw(connection, &mut decoder, request.method(), &request).await?;
    let new_session = NewSessionResponse::from_json(request.method(), response.clone())
        .map_err(AcpHandshakeError::Refused)?;
    let settings = AcpSessionSettings::parse(response);
    let session = new_session.session_id;
    let guard = apply_settings(connection, &mut decoder, &session, options, &settings).await?;
    wait_for_commands(connection, &mut decoder).await?;
    Ok(AcpHandshakeResult { session, capabilities, decoder, guard, resume_failure })
}

/// Says what it means if the very first request is not known: every agent of this protocol knows it. A program that
/// repeats what it reads, like `cat`, gives us our own refusal of our own request.
fn explain_first_refusal(error: AcpHandshakeError) -> AcpHandshakeError {
    match error {
        AcpHandshakeError::Refused(refusal) if refusal.code == Error::method_not_found().code => {
            let message = "the program does not speak the Agent Client Protocol on its standard input and output; \
                           check the command, or start it as `exec:COMMAND` or `pty:COMMAND`";
            AcpHandshakeError::Refused(Error::new(refusal.code, message))
        }
        other => other,
    }
}

/// Sets the mode and the options in which the agent asks for permission, and the model.
async fn apply_settings<R, W>(
    connection: &mut AcpConnection<R, W>,
    decoder: &mut AcpEventDecoder,
    session: &SessionId,
    options: &AcpHandshakeOptions<'_>,
    settings: &AcpSessionSettings,
) -> Result<AcpSettingsGuard, AcpHandshakeError>
where
    R: AsyncRead + Unpin,
    W: AsyncWrite + Unpin,
{
    let set = |option: &AcpConfigOption, value: &str| {
        ("session/set_config_option", json!({"sessionId": session, "configId": option.id, "value": value}))
    };
    decoder.set_context_size(settings.context_size());
    let AcpProfile { modes, kept_options, .. } = &options.profile;
    let mut guard = AcpSettingsGuard::new(session.clone(), modes.clone(), kept_options.clone(), settings);
    let mut requests: Vec<(&str, Value)> = guard
        .kept_option_requests(settings.config_options.as_deref().unwrap_or_default())
        .into_iter()
        .map(|request| (request.method, request.params))
        .collect();
    if let Some(mode) = options.profile.ask_mode.as_deref() {
        match (&settings.modes, settings.option_in_category("mode")) {
            (Some(modes), _) if modes.current_mode_id == mode => {}
            (Some(modes), _) if modes.available_modes.iter().any(|known| known.id == mode) => {
                requests.push(("session/set_mode", json!({"sessionId": session, "modeId": mode})));
                guard.record_mode(mode);
            }
            (None, Some(option))
                if option.current_value != Some(json!(mode)) && option.offers_value(mode) =>
            {
                requests.push(set(option, mode));
                guard.record_mode(mode);
            }
            _ => {}
        }
    }
    if let Some(model) = options.model.filter(|_| !options.profile.model_set_at_start) {
        match (settings.option_in_category("model"), &settings.models) {
            (Some(option), _) if option.current_value != Some(json!(model)) => {
                requests.push(set(option, model));
            }
            (None, Some(models)) if models.current_model_id.as_deref() != Some(model) => {
                requests.push(("session/set_model", json!({"sessionId": session, "modelId": model})));
            }
            _ => {}
        }
    }
    for (method, params) in requests {
        call_raw(connection, decoder, method, &params).await?;
    }
    Ok(guard)
}

/// Waits until an agent has finished its replay, and drops all of it.
async fn drain_replay<R, W>(
    connection: &mut AcpConnection<R, W>,
    decoder: &mut AcpEventDecoder,
) -> Result<(), AcpHandshakeError>
where
    R: AsyncRead + Unpin,
    W: AsyncWrite + Unpin,
{
    let deadline = Instant::now() + REPLAY_MAX;
    while let Ok(message) =
        tokio::time::timeout_at(deadline.min(Instant::now() + REPLAY_SILENCE), connection.next(true)).await
    {
        handle_setup_message(connection, decoder, message.ok_or(AcpHandshakeError::AgentExited)?);
    }
    Ok(())
}

/// Waits until the agent has listed its commands, if they must be known before a prompt.
async fn wait_for_commands<R, W>(
    connection: &mut AcpConnection<R, W>,
    decoder: &mut AcpEventDecoder,
) -> Result<(), AcpHandshakeError>
where
    R: AsyncRead + Unpin,
    W: AsyncWrite + Unpin,
{
    let deadline = Instant::now() + COMMAND_LIST_MAX;
    while decoder.waits_for_commands() {
        // An agent that lists nothing has no commands that we know of.
        let Ok(message) = tokio::time::timeout_at(deadline, connection.next(true)).await else { break };
        handle_setup_message(connection, decoder, message.ok_or(AcpHandshakeError::AgentExited)?);
    }
    Ok(())
}

/// An agent's error as one line of text. Many agents put the cause into `data` and only "Internal error" into the
/// message.
pub(super) fn error_text(error: &Error) -> String {
    let details = error.data.as_ref().and_then(|data| {
        data.as_str().or_else(|| data.get("details").or_else(|| data.get("message")).and_then(Value::as_str))
    });
    match details {
        Some(details) if error.message.is_empty() => details.to_owned(),
        Some(details) => format!("{}: {details}", error.message),
        None => error.message.clone(),
    }
}

impl AcpHandshakeOptions<'_> {
    /// The MCP servers that the agent is to use.
    fn mcp_servers(&self) -> Vec<McpServer> {
        if let Some(gateway) = &self.tool_gateway {
            let token = HttpHeader::new("Authorization", gateway.authorization.as_str());
            let server = McpServerHttp::new(SERVER_NAME, gateway.url.as_str()).headers(vec![token]);
            return vec![McpServer::Http(server)];
        }
        let server = |tools: &ToolServer| {
            let env = tools
                .env
                .iter()
                .map(|(name, value)| EnvVariable::new(name.as_str(), value.as_str()))
                .collect();
            let stdio =
                McpServerStdio::new(SERVER_NAME, tools.command.clone()).args(tools.args.clone()).env(env);
            McpServer::Stdio(stdio)
        };
        self.tools.iter().map(server).collect()
    }

    /// The `_meta` of a request that opens a session: values that have no field in the protocol.
    fn session_meta(&self) -> Meta {
        let mut meta = self.profile.session_meta.clone();
        let ours = json!({"model": self.model, "system_prompt": self.system_prompt});
        meta.insert(META_KEY.to_owned(), ours);
        meta
    }
}

fn initialize_request(options: &AcpHandshakeOptions<'_>) -> InitializeRequest {
    // Writes go through us wherever the agent lets them, so that the policy judges each of them.
    let reads = !options.profile.reads_files_itself;
    let files = FileSystemCapabilities::new().read_text_file(reads).write_text_file(true);
    let capabilities = ClientCapabilities::new()
        .fs(files)
        .terminal(options.runs_commands)
        .session(
            ClientSessionCapabilities::new()
                .notices(NoticeCapabilities::new())
                .compaction(CompactionCapabilities::new()),
        )
        .elicitation(ElicitationCapabilities::new().form(ElicitationFormCapabilities::new()));
    InitializeRequest::new(ProtocolVersion::V1)
        .client_capabilities(capabilities)
        .client_info(Implementation::new(META_KEY, env!("CARGO_PKG_VERSION")).title("Quarterdeck".to_owned()))
}

/// Resumes an old conversation. `session/resume` is preferred to `session/load`, because it replays nothing.
async fn resume_session<R, W>(
    connection: &mut AcpConnection<R, W>,
    decoder: &mut AcpEventDecoder,
    capabilities: &AgentCapabilities,
    options: &AcpHandshakeOptions<'_>,
    id: &str,
) -> Result<AcpSessionSettings, AcpHandshakeError>
where
    R: AsyncRead + Unpin,
    W: AsyncWrite + Unpin,
{
    if capabilities.session_capabilities.resume.is_some() {
        let request = ResumeSessionRequest::new(id.to_owned(), options.cwd)
            .mcp_servers(options.mcp_servers())
            .meta(options.session_meta());
        call_raw(connection, decoder, request.method(), &request).await.map(AcpSessionSettings::parse)
    } else if capabilities.load_session {
        let request = LoadSessionRequest::new(id.to_owned(), options.cwd)
            .mcp_servers(options.mcp_servers())
            .meta(options.session_meta());
        call_raw(connection, decoder, request.method(), &request).await.map(AcpSessionSettings::parse)
    } else {
        let message = "the agent cannot resume a conversation";
        Err(AcpHandshakeError::Refused(Error::new(Error::method_not_found().code, message)))
    }
}

/// Whether the agent handles each prompt on its own, so that there is no conversation to lose.
fn is_stateless(capabilities: &AgentCapabilities) -> bool {
    #[derive(Deserialize)]
    struct AcpStatelessMeta {
        stateless: bool,
    }
    quarterdeck_meta(capabilities.meta.as_ref()).is_some_and(|AcpStatelessMeta { stateless }| stateless)
}

/// Sends a request and waits for its typed response. Updates that arrive meanwhile are a replay; only their usage
/// totals are kept.
async fn call<T, R, W>(
    connection: &mut AcpConnection<R, W>,
    decoder: &mut AcpEventDecoder,
    request: &T,
) -> Result<T::Response, AcpHandshakeError>
where
    T: JsonRpcRequest + Serialize,
    R: AsyncRead + Unpin,
    W: AsyncWrite + Unpin,
{
    let response = call_raw(connection, decoder, request.method(), request).await?;
    T::Response::from_json(request.method(), response).map_err(AcpHandshakeError::Refused)
}

/// Sends a request by its method name and returns the raw response.
async fn call_raw<R, W>(
    connection: &mut AcpConnection<R, W>,
    decoder: &mut AcpEventDecoder,
    method: &str,
    params: &impl Serialize,
) -> Result<Value, AcpHandshakeError>
where
    R: AsyncRead + Unpin,
    W: AsyncWrite + Unpin,
{
    let params = serde_json::to_value(params).expect("the protocol's own types are JSON");
    let id = connection.request_by_name(method, params);
    loop {
        match connection.next(true).await.ok_or(AcpHandshakeError::AgentExited)? {
            RawJsonRpcMessage::Response(response) if *response.id() == id => {
                return match response {
                    RawJsonRpcResponse::Result { result, .. } => Ok(result),
                    RawJsonRpcResponse::Error { error, .. } => {
                        Err(AcpHandshakeError::Refused(error.into_acp_error()))
                    }
                };
            }
            other => handle_setup_message(connection, decoder, other),
        }
    }
}

/// Handles a message that arrives before the first turn.
fn handle_setup_message<R, W>(
    connection: &mut AcpConnection<R, W>,
    decoder: &mut AcpEventDecoder,
    message: RawJsonRpcMessage,
) where
    R: AsyncRead + Unpin,
    W: AsyncWrite + Unpin,
{
    match message {
        RawJsonRpcMessage::Response(_) => {}
        RawJsonRpcMessage::Request(request) => connection.respond(request.id, Err(Error::method_not_found())),
        RawJsonRpcMessage::Notification(notification) => {
            let params = notification.params.map(RawJsonRpcParams::into_value).unwrap_or_default();
            if let Ok(session_update) = SessionNotification::parse_message(&notification.method, &params) {
                decoder.decode(session_update.update, &|_| None);
            }
        }
    }
}
