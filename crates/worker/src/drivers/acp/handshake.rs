//! How a conversation begins: the handshake, then a new session or an old one. What a resumed agent repeats of its
//! past is thrown away here, because the session has it already.

use std::path::Path;
use std::time::Duration;

use agent_client_protocol::schema::ProtocolVersion;
use agent_client_protocol::v1::schema::{
    AgentCapabilities, ClientCapabilities, ClientSessionCapabilities, ElicitationCapabilities,
    ElicitationFormCapabilities, EnvVariable, FileSystemCapabilities, Implementation, InitializeRequest,
    LoadSessionRequest, McpServer, McpServerStdio, Meta, NewSessionRequest, NewSessionResponse,
    NoticeCapabilities, ResumeSessionRequest, SessionId, SessionNotification,
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
use super::event_decoder::{AcpEventDecoder, META_KEY, quarterdeck_meta};
use super::profile::AcpProfile;
use crate::drivers::tool_server::{SERVER_NAME, ToolServer};

/// Silence after which an agent that repeats the past late is believed to have done so.
const REPLAY_SILENCE: Duration = Duration::from_millis(400);
/// How long it is listened to at most.
const REPLAY_MAX: Duration = Duration::from_secs(10);

/// What a conversation begins with.
#[derive(Debug)]
pub(super) struct AcpHandshakeOptions<'a> {
    pub(super) cwd: &'a Path,
    pub(super) model: Option<&'a str>,
    pub(super) system_prompt: Option<&'a str>,
    /// The agent's name for the conversation to go on with.
    pub(super) resume: Option<&'a str>,
    /// What is peculiar to the agent.
    pub(super) profile: AcpProfile,
    /// Whether commands are run for the agent.
    pub(super) runs_commands: bool,
    /// The server that it is given.
    pub(super) tools: Option<ToolServer>,
}

/// What came of it.
#[derive(Debug)]
pub(super) struct AcpHandshakeResult {
    pub(super) session: SessionId,
    pub(super) capabilities: AgentCapabilities,
    /// What it has counted so far: a resumed agent's totals go on.
    pub(super) decoder: AcpEventDecoder,
    /// Why the old conversation was not gone on with, if that was wanted.
    pub(super) resume_failure: Option<String>,
}

/// Why nothing came of it.
#[derive(Debug)]
pub(super) enum AcpHandshakeError {
    /// The agent is no more.
    AgentExited,
    /// It would not.
    Refused(Error),
}

/// Shakes hands and opens a session.
pub(super) async fn perform_handshake<R, W>(
    peer: &mut AcpConnection<R, W>,
    opening: &AcpHandshakeOptions<'_>,
) -> Result<AcpHandshakeResult, AcpHandshakeError>
where
    R: AsyncRead + Unpin,
    W: AsyncWrite + Unpin,
{
    let mut ear = AcpEventDecoder::new(opening.profile.clone());
    let hello = call(peer, &mut ear, &initialize_request(opening.runs_commands)).await?;
    if hello.protocol_version != ProtocolVersion::V1 {
        let message =
            format!("the agent speaks version {} of the protocol; we speak 1", hello.protocol_version);
        return Err(AcpHandshakeError::Refused(Error::new(Error::invalid_request().code, message)));
    }
    let can = hello.agent_capabilities;
    let mut forgot = None;
    if let Some(id) = opening.resume.filter(|_| !is_stateless(&can)) {
        match resume_session(peer, &mut ear, &can, opening, id).await {
            Ok(choices) => {
                let session = SessionId::new(id);
                if opening.profile.late_replay {
                    drain_replay(peer, &mut ear).await?;
                }
                apply_settings(peer, &mut ear, &session, opening, &choices).await?;
                return Ok(AcpHandshakeResult {
                    session,
                    capabilities: can,
                    decoder: ear,
                    resume_failure: forgot,
                });
            }
            Err(AcpHandshakeError::AgentExited) => return Err(AcpHandshakeError::AgentExited),
            Err(AcpHandshakeError::Refused(error)) => forgot = Some(error_text(&error)),
        }
    }
    let request = NewSessionRequest::new(opening.cwd)
        .mcp_servers(opening.mcp_servers())
        .meta(opening.quarterdeck_session_meta());
    // What it counted for a conversation that it then refused does not count.
    ear = AcpEventDecoder::new(opening.profile.clone());
    let answer = call_raw(peer, &mut ear, request.method(), &request).await?;
    let opened = NewSessionResponse::from_json(request.method(), answer.clone())
        .map_err(AcpHandshakeError::Refused)?;
    let choices = AcpSessionSettings::parse(answer);
    apply_settings(peer, &mut ear, &opened.session_id, opening, &choices).await?;
    Ok(AcpHandshakeResult {
        session: opened.session_id,
        capabilities: can,
        decoder: ear,
        resume_failure: forgot,
    })
}

/// What an agent lets its client choose, as it stands.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct AcpSessionSettings {
    modes: Option<AcpModes>,
    models: Option<AcpModels>,
    config_options: Option<Vec<AcpConfigOption>>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct AcpModes {
    current_mode_id: String,
    #[serde(default)]
    available_modes: Vec<AcpMode>,
}

#[derive(Debug, Deserialize)]
struct AcpMode {
    id: String,
}

/// Older than settings, and not part of the protocol's types any more; several agents know nothing else.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct AcpModels {
    current_model_id: Option<String>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct AcpConfigOption {
    id: String,
    category: Option<String>,
    current_value: Option<Value>,
    #[serde(default)]
    options: Vec<Value>,
}

impl AcpConfigOption {
    fn offers_value(&self, value: &str) -> bool {
        let is = |option: &Value| option["value"] == value;
        let grouped = |option: &Value| option["options"].as_array().is_some_and(|them| them.iter().any(is));
        self.options.iter().any(|option| is(option) || grouped(option))
    }
}

impl AcpSessionSettings {
    /// An agent whose words make no sense here lets us choose nothing.
    fn parse(answer: Value) -> Self {
        serde_json::from_value(answer).unwrap_or_default()
    }

    fn option_in_category(&self, category: &str) -> Option<&AcpConfigOption> {
        self.config_options.as_deref()?.iter().find(|setting| setting.category.as_deref() == Some(category))
    }
}

/// Puts the agent into the mode in which it asks, and gives it its model.
async fn apply_settings<R, W>(
    peer: &mut AcpConnection<R, W>,
    ear: &mut AcpEventDecoder,
    session: &SessionId,
    opening: &AcpHandshakeOptions<'_>,
    choices: &AcpSessionSettings,
) -> Result<(), AcpHandshakeError>
where
    R: AsyncRead + Unpin,
    W: AsyncWrite + Unpin,
{
    let set = |setting: &AcpConfigOption, value: &str| {
        ("session/set_config_option", json!({"sessionId": session, "configId": setting.id, "value": value}))
    };
    let mut wanted = Vec::new();
    if let Some(mode) = opening.profile.ask_mode.as_deref() {
        match (&choices.modes, choices.option_in_category("mode")) {
            (Some(modes), _) if modes.current_mode_id == mode => {}
            (Some(modes), _) if modes.available_modes.iter().any(|known| known.id == mode) => {
                wanted.push(("session/set_mode", json!({"sessionId": session, "modeId": mode})));
            }
            (None, Some(setting))
                if setting.current_value != Some(json!(mode)) && setting.offers_value(mode) =>
            {
                wanted.push(set(setting, mode));
            }
            _ => {}
        }
    }
    if let Some(model) = opening.model.filter(|_| !opening.profile.model_set_at_start) {
        match (choices.option_in_category("model"), &choices.models) {
            (Some(setting), _) if setting.current_value != Some(json!(model)) => {
                wanted.push(set(setting, model));
            }
            (None, Some(models)) if models.current_model_id.as_deref() != Some(model) => {
                wanted.push(("session/set_model", json!({"sessionId": session, "modelId": model})));
            }
            _ => {}
        }
    }
    for (method, params) in wanted {
        call_raw(peer, ear, method, &params).await?;
    }
    Ok(())
}

/// Waits until an agent has repeated what it says of the past, all of which is thrown away.
async fn drain_replay<R, W>(
    peer: &mut AcpConnection<R, W>,
    ear: &mut AcpEventDecoder,
) -> Result<(), AcpHandshakeError>
where
    R: AsyncRead + Unpin,
    W: AsyncWrite + Unpin,
{
    let until = Instant::now() + REPLAY_MAX;
    while let Ok(message) =
        tokio::time::timeout_at(until.min(Instant::now() + REPLAY_SILENCE), peer.next(true)).await
    {
        handle_setup_message(peer, ear, message.ok_or(AcpHandshakeError::AgentExited)?);
    }
    Ok(())
}

/// An agent's error in one sentence. Many put the cause into `data` and only "Internal error" into the message.
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
    /// The servers that the agent is to start.
    fn mcp_servers(&self) -> Vec<McpServer> {
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

    /// What the protocol has no field for.
    fn quarterdeck_session_meta(&self) -> Meta {
        Meta::from_iter([(
            META_KEY.to_owned(),
            json!({"model": self.model, "system_prompt": self.system_prompt}),
        )])
    }
}

fn initialize_request(runs_commands: bool) -> InitializeRequest {
    let files = FileSystemCapabilities::new().read_text_file(true).write_text_file(true);
    let capabilities = ClientCapabilities::new()
        .fs(files)
        .terminal(runs_commands)
        .session(ClientSessionCapabilities::new().notices(NoticeCapabilities::new()))
        .elicitation(ElicitationCapabilities::new().form(ElicitationFormCapabilities::new()));
    InitializeRequest::new(ProtocolVersion::V1)
        .client_capabilities(capabilities)
        .client_info(Implementation::new(META_KEY, env!("CARGO_PKG_VERSION")).title("Quarterdeck".to_owned()))
}

/// Goes on with an old conversation in the way the agent can; rather in the one that repeats nothing.
async fn resume_session<R, W>(
    peer: &mut AcpConnection<R, W>,
    ear: &mut AcpEventDecoder,
    can: &AgentCapabilities,
    opening: &AcpHandshakeOptions<'_>,
    id: &str,
) -> Result<AcpSessionSettings, AcpHandshakeError>
where
    R: AsyncRead + Unpin,
    W: AsyncWrite + Unpin,
{
    if can.session_capabilities.resume.is_some() {
        let request = ResumeSessionRequest::new(id.to_owned(), opening.cwd)
            .mcp_servers(opening.mcp_servers())
            .meta(opening.quarterdeck_session_meta());
        call_raw(peer, ear, request.method(), &request).await.map(AcpSessionSettings::parse)
    } else if can.load_session {
        let request = LoadSessionRequest::new(id.to_owned(), opening.cwd)
            .mcp_servers(opening.mcp_servers())
            .meta(opening.quarterdeck_session_meta());
        call_raw(peer, ear, request.method(), &request).await.map(AcpSessionSettings::parse)
    } else {
        let message = "the agent cannot go on with an old conversation";
        Err(AcpHandshakeError::Refused(Error::new(Error::method_not_found().code, message)))
    }
}

/// Whether each of the agent's prompts stands for itself, so that no conversation can be lost.
fn is_stateless(can: &AgentCapabilities) -> bool {
    #[derive(Deserialize)]
    struct AcpStatelessMeta {
        stateless: bool,
    }
    quarterdeck_meta(can.meta.as_ref()).is_some_and(|AcpStatelessMeta { stateless }| stateless)
}

/// Asks and waits for the answer. What is said meanwhile is the past, of which only the totals are kept.
async fn call<T, R, W>(
    peer: &mut AcpConnection<R, W>,
    ear: &mut AcpEventDecoder,
    request: &T,
) -> Result<T::Response, AcpHandshakeError>
where
    T: JsonRpcRequest + Serialize,
    R: AsyncRead + Unpin,
    W: AsyncWrite + Unpin,
{
    let answer = call_raw(peer, ear, request.method(), request).await?;
    T::Response::from_json(request.method(), answer).map_err(AcpHandshakeError::Refused)
}

/// The same by a method's name, for an answer as it is.
async fn call_raw<R, W>(
    peer: &mut AcpConnection<R, W>,
    ear: &mut AcpEventDecoder,
    method: &str,
    params: &impl Serialize,
) -> Result<Value, AcpHandshakeError>
where
    R: AsyncRead + Unpin,
    W: AsyncWrite + Unpin,
{
    let params = serde_json::to_value(params).expect("the protocol's own types are JSON");
    let id = peer.request_by_name(method, params);
    loop {
        match peer.next(true).await.ok_or(AcpHandshakeError::AgentExited)? {
            RawJsonRpcMessage::Response(response) if *response.id() == id => {
                return match response {
                    RawJsonRpcResponse::Result { result, .. } => Ok(result),
                    RawJsonRpcResponse::Error { error, .. } => {
                        Err(AcpHandshakeError::Refused(error.into_acp_error()))
                    }
                };
            }
            other => handle_setup_message(peer, ear, other),
        }
    }
}

/// What is said before the first turn.
fn handle_setup_message<R, W>(
    peer: &mut AcpConnection<R, W>,
    ear: &mut AcpEventDecoder,
    message: RawJsonRpcMessage,
) where
    R: AsyncRead + Unpin,
    W: AsyncWrite + Unpin,
{
    match message {
        RawJsonRpcMessage::Response(_) => {}
        RawJsonRpcMessage::Request(request) => peer.respond(request.id, Err(Error::method_not_found())),
        RawJsonRpcMessage::Notification(said) => {
            let params = said.params.map(RawJsonRpcParams::into_value).unwrap_or_default();
            if let Ok(notification) = SessionNotification::parse_message(&said.method, &params) {
                ear.decode(notification.update, &|_| None);
            }
        }
    }
}
