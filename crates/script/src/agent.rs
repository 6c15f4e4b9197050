//! The requests that the scripted agent answers, and its sessions. Everything that takes time runs as a task of the
//! connection, so that a cancel or a steer is handled at once. The tasks end with the connection.

use std::collections::HashMap;
use std::io::Write;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use agent_client_protocol::schema::ProtocolVersion;
use agent_client_protocol::v1::schema::{
    self, AgentCapabilities, CancelNotification, ContentBlock, Implementation, InitializeRequest,
    InitializeResponse, LoadSessionRequest, LoadSessionResponse, McpServer, Meta, NewSessionRequest,
    NewSessionResponse, PromptCapabilities, PromptRequest, PromptResponse, SessionId, SessionMode,
    SessionModeState, SetSessionModeRequest, SetSessionModeResponse, StopReason,
};
use agent_client_protocol::v1::{ConnectionTo, Responder};
use agent_client_protocol::{
    Agent, Client, Error, ErrorCode, JsonRpcRequest, JsonRpcResponse, on_receive_notification,
    on_receive_request,
};
use parking_lot::{Mutex, MutexGuard};
use qd_protocol::event::TokenUsage;
use qd_protocol::worker::META_KEY;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::mpsc;

use super::flow_control::{ScriptFlowControl, counted_lines};
use super::interpreter::{ScriptPrompt, ScriptTurnEnd};
use super::memory::{ScriptMemory, ScriptTurnRecord, remembered_part};
use super::steps::ScriptMode;
use super::turn::ScriptTurn;
use super::{READY_MS_VAR, ScriptSetup};

/// Random bytes in a session id. Four bits of each are used.
const SESSION_RANDOM_BYTES: usize = 20;
/// The most sessions that one process holds.
const SESSIONS_MAX: usize = 1024;

/// Serves one client over two streams. Returns the exit status.
pub async fn serve<R, W>(from: R, to: W, setup: ScriptSetup) -> i32
where
    R: AsyncRead + Unpin + Send + 'static,
    W: AsyncWrite + Unpin + Send + 'static,
{
    let (exit_sender, mut exit_receiver) = mpsc::channel(1);
    let flow = Arc::new(ScriptFlowControl::default());
    let script = Arc::new(ScriptAgent {
        setup,
        sessions: Mutex::default(),
        flow: Arc::clone(&flow),
        exit_status: exit_sender,
    });
    let [a, b, c, d, e, f, g] = std::array::from_fn(|_| Arc::clone(&script));
    let connection = Agent
        .v1()
        .name("script")
        .on_receive_request(
            async move |_: InitializeRequest, responder, client: ConnectionTo<Client>| {
                client.spawn(Arc::clone(&a).initialize(responder))
            },
            on_receive_request!(),
        )
        .on_receive_request(
            async move |request: NewSessionRequest, responder, client: ConnectionTo<Client>| {
                client.spawn(Arc::clone(&b).new_session(request, responder))
            },
            on_receive_request!(),
        )
        .on_receive_request(
            async move |request: LoadSessionRequest, responder, client: ConnectionTo<Client>| {
                client.spawn(Arc::clone(&c).load_session(request, responder, client.clone()))
            },
            on_receive_request!(),
        )
        .on_receive_request(
            async move |request: PromptRequest, responder, client: ConnectionTo<Client>| {
                d.start_turn(request, responder, client)
            },
            on_receive_request!(),
        )
        .on_receive_request(
            async move |request: ScriptSteerRequest, responder, _client| e.steer(request, responder),
            on_receive_request!(),
        )
        .on_receive_request(
            async move |request: SetSessionModeRequest, responder, _client| g.set_mode(&request, responder),
            on_receive_request!(),
        )
        .on_receive_notification(
            async move |cancel: CancelNotification, _client| {
                f.cancel(&cancel.session_id);
                Ok(())
            },
            on_receive_notification!(),
        )
        .connect_to(counted_lines(from, to, flow));
    tokio::select! {
        ended = connection => i32::from(ended.is_err()),
        Some(status) = exit_receiver.recv() => status,
    }
}

/// A steer, by the method that the adapters for Claude and Codex have.
#[derive(Debug, Clone, Serialize, Deserialize, JsonRpcRequest)]
#[request(method = "_session/steering", response = ScriptSteerResponse)]
#[serde(rename_all = "camelCase")]
struct ScriptSteerRequest {
    session_id: SessionId,
    prompt: Vec<ContentBlock>,
}

/// The reply to a steer, which comes only when its outcome is known.
#[derive(Debug, Clone, Serialize, Deserialize, JsonRpcResponse)]
pub(super) struct ScriptSteerResponse {
    pub(super) outcome: ScriptSteerOutcome,
}

#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum ScriptSteerOutcome {
    /// The turn took it in.
    Taken,
    Missed,
}

#[derive(Debug)]
struct ScriptAgent {
    setup: ScriptSetup,
    sessions: Mutex<HashMap<SessionId, Arc<ScriptSession>>>,
    flow: Arc<ScriptFlowControl>,
    /// Receives the status when a script exits the process.
    exit_status: mpsc::Sender<i32>,
}

#[derive(Debug)]
pub(super) struct ScriptSession {
    pub(super) id: SessionId,
    pub(super) cwd: PathBuf,
    pub(super) model: Option<String>,
    pub(super) system_prompt: Option<String>,
    /// The MCP servers that the session was given. A server is started only when a step needs it.
    pub(super) servers: Vec<McpServer>,
    memory: ScriptMemory,
    state: Mutex<ScriptSessionState>,
}

#[derive(Debug, Default)]
struct ScriptSessionState {
    turn: Option<Arc<ScriptTurn>>,
    turn_count: u64,
    usage: TokenUsage,
    mode: ScriptMode,
}

impl ScriptAgent {
    /// Answers after the delay that the environment sets.
    async fn initialize(self: Arc<Self>, responder: Responder<InitializeResponse>) -> Result<(), Error> {
        if let Some(ms) = &self.setup.ready_ms {
            let Ok(ms) = ms.trim().parse() else {
                // The value is not shown: values of the environment may be secrets.
                let message = format!("{READY_MS_VAR} must be a whole number of milliseconds");
                // Also on stderr, as real agents do. Nothing is lost if nobody reads it, since the reply has it too.
                let _written = writeln!(std::io::stderr(), "{message}");
                return responder.respond_with_error(Error::new(ErrorCode::INTERNAL_ERROR, message));
            };
            tokio::time::sleep(Duration::from_millis(ms)).await;
        }
        let prompt_capabilities = PromptCapabilities::new().image(true).audio(true).embedded_context(true);
        let remembers = self.setup.state_dir.is_some();
        // Without a folder there is nothing to resume, and nobody needs a notice that the conversation was forgotten.
        let meta = Meta::from_iter([(META_KEY.to_owned(), json!({ "stateless": !remembers }))]);
        let capabilities = AgentCapabilities::new()
            .load_session(remembers)
            .prompt_capabilities(prompt_capabilities)
            .meta(meta);
        responder.respond(
            InitializeResponse::new(ProtocolVersion::V1)
                .agent_capabilities(capabilities)
                .agent_info(Implementation::new("script", env!("CARGO_PKG_VERSION"))),
        )
    }

    async fn new_session(
        self: Arc<Self>,
        request: NewSessionRequest,
        responder: Responder<NewSessionResponse>,
    ) -> Result<(), Error> {
        let opened = async {
            let id = new_session_id()?;
            let (cwd, servers) = (request.cwd, request.mcp_servers);
            let session = self.add_session(
                id.clone(),
                (cwd, servers),
                request.meta.as_ref(),
                ScriptSessionState::default(),
            )?;
            session.memory.create_file().await.map_err(Error::into_internal_error)?;
            Ok(NewSessionResponse::new(id).modes(initial_modes()))
        };
        responder.respond_with_result(opened.await)
    }

    /// Replays the conversation before it answers, as real agents do.
    async fn load_session(
        self: Arc<Self>,
        request: LoadSessionRequest,
        responder: Responder<LoadSessionResponse>,
        client: ConnectionTo<Client>,
    ) -> Result<(), Error> {
        let id = request.session_id;
        let Some(past) = self.memory_of(&id).load_turns().await else {
            return responder.respond_with_error(schema::Error::session_not_found(id).into());
        };
        let usage = past.last().map(|turn| turn.used).unwrap_or_default();
        let state = ScriptSessionState {
            turn: None,
            turn_count: past.len() as u64,
            usage,
            mode: ScriptMode::Default,
        };
        let request_parts = (request.cwd, request.mcp_servers);
        let loaded =
            self.add_session(id, request_parts, request.meta.as_ref(), state).map(|session| (session, past));
        match loaded {
            Err(error) => responder.respond_with_error(error),
            Ok((session, past)) => {
                let script_turn = ScriptTurn::new(client, Arc::clone(&self.flow), session);
                for turn in &past {
                    script_turn.replay(&turn.prompt, &turn.answer).await?;
                }
                script_turn.report_usage(usage).await?;
                responder.respond(LoadSessionResponse::new().modes(initial_modes()))
            }
        }
    }

    fn start_turn(
        &self,
        request: PromptRequest,
        responder: Responder<PromptResponse>,
        client: ConnectionTo<Client>,
    ) -> Result<(), Error> {
        let session = self.find_session(&request.session_id)?;
        let script_turn =
            Arc::new(ScriptTurn::new(client.clone(), Arc::clone(&self.flow), Arc::clone(&session)));
        {
            let mut state = session.lock();
            if state.turn.is_some() {
                let message = "the session has a turn already";
                return responder.respond_with_error(Error::new(ErrorCode::INVALID_REQUEST, message));
            }
            state.turn = Some(Arc::clone(&script_turn));
            state.turn_count += 1;
        }
        let script_prompt = ScriptPrompt::from_prompt(
            text_of_blocks(&request.prompt),
            previous_messages(request.meta.as_ref()),
        );
        let (setup, exit) = (self.setup.clone(), self.exit_status.clone());
        client.spawn(async move {
            let ending = script_prompt.run(&script_turn, &setup).await;
            let text = script_turn.remembered_text();
            // Commands that arrived until here belong to this turn; later ones do not.
            session.lock().turn = None;
            script_turn.miss_steers();
            let used = session.usage();
            let turn = ScriptTurnRecord {
                prompt: remembered_part(&script_prompt.prompt).to_owned(),
                answer: text.clone(),
                used,
            };
            session.memory.append_turn(&turn).await.map_err(Error::into_internal_error)?;
            if let ScriptTurnEnd::ExitProcess(status) = ending {
                script_turn.wait_until_drained().await;
                // If this fails, nobody is left to receive it.
                let _sent = exit.send(status).await;
                return Ok(());
            }
            responder.respond_with_result(prompt_response(ending, &script_prompt.prompt, &text))?;
            script_turn.send_late_texts().await
        })
    }

    fn steer(
        &self,
        request: ScriptSteerRequest,
        responder: Responder<ScriptSteerResponse>,
    ) -> Result<(), Error> {
        let running = self.find_session(&request.session_id)?.lock().turn.clone();
        match running {
            Some(script_turn) => script_turn.queue_steer(text_of_blocks(&request.prompt), responder),
            None => responder.respond(ScriptSteerResponse { outcome: ScriptSteerOutcome::Missed }),
        }
    }

    fn set_mode(
        &self,
        request: &SetSessionModeRequest,
        responder: Responder<SetSessionModeResponse>,
    ) -> Result<(), Error> {
        let session = self.find_session(&request.session_id)?;
        let wanted = request.mode_id.to_string();
        match ScriptMode::ALL.into_iter().find(|mode| mode.name() == wanted) {
            Some(mode) => {
                session.set_mode(mode);
                responder.respond(SetSessionModeResponse::new())
            }
            None => {
                let message = format!("there is no mode `{wanted}`");
                responder.respond_with_error(Error::new(ErrorCode::INVALID_PARAMS, message))
            }
        }
    }

    /// Cancels the running turn; does nothing if there is none.
    fn cancel(&self, id: &SessionId) {
        let running = self.find_session(id).ok().and_then(|session| session.lock().turn.clone());
        if let Some(script_turn) = running {
            script_turn.cancel();
        }
    }

    fn memory_of(&self, id: &SessionId) -> ScriptMemory {
        ScriptMemory::for_session(self.setup.state_dir.as_deref(), &id.0)
    }

    fn add_session(
        &self,
        id: SessionId,
        (cwd, servers): (PathBuf, Vec<McpServer>),
        meta: Option<&Meta>,
        state: ScriptSessionState,
    ) -> Result<Arc<ScriptSession>, Error> {
        #[derive(Default, Deserialize)]
        struct ScriptSettings {
            model: Option<String>,
            system_prompt: Option<String>,
        }
        let settings =
            meta.and_then(|meta| ScriptSettings::deserialize(meta.get(META_KEY)?).ok()).unwrap_or_default();
        let session = Arc::new(ScriptSession {
            memory: self.memory_of(&id),
            id: id.clone(),
            cwd,
            model: settings.model,
            system_prompt: settings.system_prompt,
            servers,
            state: Mutex::new(state),
        });
        let mut sessions = self.sessions.lock();
        if sessions.len() >= SESSIONS_MAX {
            return Err(Error::new(ErrorCode::INTERNAL_ERROR, "too many sessions in one process"));
        }
        sessions.insert(id, Arc::clone(&session));
        Ok(session)
    }

    fn find_session(&self, id: &SessionId) -> Result<Arc<ScriptSession>, Error> {
        let sessions = self.sessions.lock();
        sessions.get(id).cloned().ok_or_else(|| schema::Error::session_not_found(id.clone()).into())
    }
}

impl ScriptSession {
    /// The number of turns so far, including the current one.
    pub(super) fn turn_count(&self) -> u64 {
        self.lock().turn_count
    }

    pub(super) fn usage(&self) -> TokenUsage {
        self.lock().usage
    }

    pub(super) fn mode(&self) -> ScriptMode {
        self.lock().mode
    }

    pub(super) fn set_mode(&self, mode: ScriptMode) {
        self.lock().mode = mode;
    }

    /// Adds usage, and returns the new total.
    pub(super) fn add_usage(&self, more: &TokenUsage) -> TokenUsage {
        let mut state = self.lock();
        state.usage += *more;
        state.usage
    }

    fn lock(&self) -> MutexGuard<'_, ScriptSessionState> {
        self.state.lock()
    }
}

/// The modes of a session that was just opened.
fn initial_modes() -> SessionModeState {
    let modes = ScriptMode::ALL.map(|mode| SessionMode::new(mode.name(), mode.name()));
    SessionModeState::new(ScriptMode::default().name(), modes.to_vec())
}

/// The reply to a prompt whose turn has ended.
fn prompt_response(ending: ScriptTurnEnd, prompt: &str, answer: &str) -> Result<PromptResponse, Error> {
    match ending {
        ScriptTurnEnd::Stopped(reason) => Ok(PromptResponse::new(reason)),
        ScriptTurnEnd::Suspended { next } => {
            let transcript = json!([
                {"role": "user", "content": prompt},
                {"role": "assistant", "content": answer, META_KEY: {"next": next}},
            ]);
            let meta = json!({META_KEY: {"suspended": {"transcript": transcript}}});
            Ok(PromptResponse::new(StopReason::EndTurn).meta(meta.as_object().cloned()))
        }
        ScriptTurnEnd::Failed { code, message } => {
            Err(Error::new(ErrorCode::INTERNAL_ERROR, message).data(json!({META_KEY: {"code": code}})))
        }
        ScriptTurnEnd::ExitProcess(status) => {
            Err(Error::new(ErrorCode::INTERNAL_ERROR, format!("exit {status}")))
        }
    }
}

fn text_of_blocks(blocks: &[ContentBlock]) -> String {
    let texts = blocks.iter().filter_map(|block| match block {
        ContentBlock::Text(text) => Some(text.text.as_str()),
        _ => None,
    });
    texts.collect()
}

/// The earlier messages of the conversation that a prompt continues.
fn previous_messages(meta: Option<&Meta>) -> &[Value] {
    meta.and_then(|meta| meta.get(META_KEY)?.get("messages")?.as_array()).map_or(&[], Vec::as_slice)
}

fn new_session_id() -> Result<SessionId, Error> {
    let mut random = [0; SESSION_RANDOM_BYTES];
    getrandom::fill(&mut random).map_err(Error::into_internal_error)?;
    let letters = random.iter().map(|byte| char::from(b'a' + (byte & 15)));
    Ok(SessionId::new(letters.collect::<String>()))
}
