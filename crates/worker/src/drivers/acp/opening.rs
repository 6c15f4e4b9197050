//! How a conversation begins: the handshake, then a new session or an old one. What a resumed agent repeats of its
//! past is thrown away here, because the session has it already.

use std::path::Path;

use agent_client_protocol::schema::ProtocolVersion;
use agent_client_protocol::v1::schema::{
    AgentCapabilities, ClientCapabilities, ClientSessionCapabilities, ElicitationCapabilities,
    ElicitationFormCapabilities, FileSystemCapabilities, Implementation, InitializeRequest,
    LoadSessionRequest, Meta, NewSessionRequest, NoticeCapabilities, ResumeSessionRequest, SessionId,
    SessionNotification,
};
use agent_client_protocol::{
    Error, JsonRpcMessage, JsonRpcRequest, JsonRpcResponse, RawJsonRpcMessage, RawJsonRpcParams,
    RawJsonRpcResponse,
};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::io::{AsyncRead, AsyncWrite};

use super::ear::{Ear, OURS, ours};
use super::wire::Peer;

/// What a conversation begins with.
#[derive(Debug)]
pub(super) struct Opening<'a> {
    pub(super) cwd: &'a Path,
    pub(super) model: Option<&'a str>,
    pub(super) system_prompt: Option<&'a str>,
    /// The agent's name for the conversation to go on with.
    pub(super) resume: Option<&'a str>,
}

/// What came of it.
#[derive(Debug)]
pub(super) struct Opened {
    pub(super) session: SessionId,
    pub(super) can: AgentCapabilities,
    /// What it has counted so far: a resumed agent's totals go on.
    pub(super) ear: Ear,
    /// Why the old conversation was not gone on with, if that was wanted.
    pub(super) forgot: Option<String>,
}

/// Why nothing came of it.
#[derive(Debug)]
pub(super) enum Unopened {
    /// The agent is no more.
    HungUp,
    /// It would not.
    Refused(Error),
}

/// Shakes hands and opens a session.
pub(super) async fn open<R, W>(peer: &mut Peer<R, W>, opening: &Opening<'_>) -> Result<Opened, Unopened>
where
    R: AsyncRead + Unpin,
    W: AsyncWrite + Unpin,
{
    let mut ear = Ear::default();
    let hello = call(peer, &mut ear, &initialize()).await?;
    if hello.protocol_version != ProtocolVersion::V1 {
        let message =
            format!("the agent speaks version {} of the protocol; we speak 1", hello.protocol_version);
        return Err(Unopened::Refused(Error::new(Error::invalid_request().code, message)));
    }
    let can = hello.agent_capabilities;
    let mut forgot = None;
    if let Some(id) = opening.resume.filter(|_| !is_stateless(&can)) {
        match resume(peer, &mut ear, &can, opening, id).await {
            Ok(()) => return Ok(Opened { session: SessionId::new(id), can, ear, forgot }),
            Err(Unopened::HungUp) => return Err(Unopened::HungUp),
            Err(Unopened::Refused(error)) => forgot = Some(words(&error)),
        }
    }
    let request = NewSessionRequest::new(opening.cwd).meta(opening.meta());
    // What it counted for a conversation that it then refused does not count.
    ear = Ear::default();
    let session = call(peer, &mut ear, &request).await?.session_id;
    Ok(Opened { session, can, ear, forgot })
}

/// An agent's error in one sentence. Many put the cause into `data` and only "Internal error" into the message.
pub(super) fn words(error: &Error) -> String {
    let details = error.data.as_ref().and_then(|data| {
        data.as_str().or_else(|| data.get("details").or_else(|| data.get("message")).and_then(Value::as_str))
    });
    match details {
        Some(details) if error.message.is_empty() => details.to_owned(),
        Some(details) => format!("{}: {details}", error.message),
        None => error.message.clone(),
    }
}

impl Opening<'_> {
    /// What the protocol has no field for.
    fn meta(&self) -> Meta {
        Meta::from_iter([(
            OURS.to_owned(),
            json!({"model": self.model, "system_prompt": self.system_prompt}),
        )])
    }
}

fn initialize() -> InitializeRequest {
    let files = FileSystemCapabilities::new().read_text_file(true).write_text_file(true);
    let capabilities = ClientCapabilities::new()
        .fs(files)
        .session(ClientSessionCapabilities::new().notices(NoticeCapabilities::new()))
        .elicitation(ElicitationCapabilities::new().form(ElicitationFormCapabilities::new()));
    InitializeRequest::new(ProtocolVersion::V1)
        .client_capabilities(capabilities)
        .client_info(Implementation::new(OURS, env!("CARGO_PKG_VERSION")).title("Quarterdeck".to_owned()))
}

/// Goes on with an old conversation in the way the agent can; rather in the one that repeats nothing.
async fn resume<R, W>(
    peer: &mut Peer<R, W>,
    ear: &mut Ear,
    can: &AgentCapabilities,
    opening: &Opening<'_>,
    id: &str,
) -> Result<(), Unopened>
where
    R: AsyncRead + Unpin,
    W: AsyncWrite + Unpin,
{
    if can.session_capabilities.resume.is_some() {
        let request = ResumeSessionRequest::new(id.to_owned(), opening.cwd).meta(opening.meta());
        call(peer, ear, &request).await.map(drop)
    } else if can.load_session {
        let request = LoadSessionRequest::new(id.to_owned(), opening.cwd).meta(opening.meta());
        call(peer, ear, &request).await.map(drop)
    } else {
        let message = "the agent cannot go on with an old conversation";
        Err(Unopened::Refused(Error::new(Error::method_not_found().code, message)))
    }
}

/// Whether each of the agent's prompts stands for itself, so that no conversation can be lost.
fn is_stateless(can: &AgentCapabilities) -> bool {
    #[derive(Deserialize)]
    struct Word {
        stateless: bool,
    }
    ours(can.meta.as_ref()).is_some_and(|Word { stateless }| stateless)
}

/// Asks and waits for the answer. What is said meanwhile is the past, of which only the totals are kept.
async fn call<T, R, W>(peer: &mut Peer<R, W>, ear: &mut Ear, request: &T) -> Result<T::Response, Unopened>
where
    T: JsonRpcRequest,
    R: AsyncRead + Unpin,
    W: AsyncWrite + Unpin,
{
    let id = peer.request(request);
    loop {
        match peer.next(true).await.ok_or(Unopened::HungUp)? {
            RawJsonRpcMessage::Response(response) if *response.id() == id => {
                return match response {
                    RawJsonRpcResponse::Result { result, .. } => {
                        T::Response::from_json(request.method(), result)
                    }
                    RawJsonRpcResponse::Error { error, .. } => Err(error.into_acp_error()),
                }
                .map_err(Unopened::Refused);
            }
            RawJsonRpcMessage::Response(_) => {}
            RawJsonRpcMessage::Request(request) => peer.answer(request.id, Err(Error::method_not_found())),
            RawJsonRpcMessage::Notification(said) => {
                let params = said.params.map(RawJsonRpcParams::into_value).unwrap_or_default();
                if let Ok(notification) = SessionNotification::parse_message(&said.method, &params) {
                    ear.hear(notification.update);
                }
            }
        }
    }
}
