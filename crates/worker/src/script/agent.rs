//! The requests that the scripted agent answers, and its sessions. Everything that takes time is a task of the
//! connection, so that a cancel or a steer is heard at once; the tasks end with it.

use std::collections::HashMap;
use std::io::Write;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use agent_client_protocol::schema::ProtocolVersion;
use agent_client_protocol::v1::schema::{
    self, AgentCapabilities, CancelNotification, ContentBlock, Implementation, InitializeRequest,
    InitializeResponse, LoadSessionRequest, LoadSessionResponse, McpServer, Meta, NewSessionRequest,
    NewSessionResponse, PromptCapabilities, PromptRequest, PromptResponse, SessionId, StopReason,
};
use agent_client_protocol::v1::{ConnectionTo, Responder};
use agent_client_protocol::{
    Agent, Client, Error, ErrorCode, JsonRpcRequest, JsonRpcResponse, on_receive_notification,
    on_receive_request,
};
use qd_protocol::event::Usage;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::mpsc;

use super::flow::{Flow, lines};
use super::interpreter::{Ending, Part};
use super::memory::{Memory, Remembered, gist};
use super::scene::Scene;
use super::{READY_MS, Setup};
use crate::drivers::acp::OURS;

/// Random bytes in a session's id, five bits of each of which count.
const SESSION_RANDOM: usize = 20;
/// Sessions that one process holds.
const SESSIONS_MAX: usize = 1024;

/// Serves one client over two streams. Gives the status to exit with.
pub(crate) async fn serve<R, W>(from: R, to: W, setup: Setup) -> i32
where
    R: AsyncRead + Unpin + Send + 'static,
    W: AsyncWrite + Unpin + Send + 'static,
{
    let (exit, mut exits) = mpsc::channel(1);
    let flow = Arc::new(Flow::default());
    let script = Arc::new(Script { setup, sessions: Mutex::default(), flow: Arc::clone(&flow), exit });
    let [a, b, c, d, e, f] = std::array::from_fn(|_| Arc::clone(&script));
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
                client.spawn(Arc::clone(&b).open(request, responder))
            },
            on_receive_request!(),
        )
        .on_receive_request(
            async move |request: LoadSessionRequest, responder, client: ConnectionTo<Client>| {
                client.spawn(Arc::clone(&c).load(request, responder, client.clone()))
            },
            on_receive_request!(),
        )
        .on_receive_request(
            async move |request: PromptRequest, responder, client: ConnectionTo<Client>| {
                d.prompt(request, responder, client)
            },
            on_receive_request!(),
        )
        .on_receive_request(
            async move |request: SteerRequest, responder, _client| e.steer(request, responder),
            on_receive_request!(),
        )
        .on_receive_notification(
            async move |cancel: CancelNotification, _client| {
                f.cancel(&cancel.session_id);
                Ok(())
            },
            on_receive_notification!(),
        )
        .connect_to(lines(from, to, flow));
    tokio::select! {
        ended = connection => i32::from(ended.is_err()),
        Some(status) = exits.recv() => status,
    }
}

/// A steer: the method that the adapters for Claude and Codex have.
#[derive(Debug, Clone, Serialize, Deserialize, JsonRpcRequest)]
#[request(method = "_session/steering", response = Steered)]
#[serde(rename_all = "camelCase")]
struct SteerRequest {
    session_id: SessionId,
    prompt: Vec<ContentBlock>,
}

/// What became of it. The answer comes only when that is known.
#[derive(Debug, Clone, Serialize, Deserialize, JsonRpcResponse)]
pub(super) struct Steered {
    pub(super) outcome: Fate,
}

/// See [`Steered`].
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Fate {
    /// The turn took it in.
    Taken,
    /// It did not.
    Missed,
}

/// The whole agent.
#[derive(Debug)]
struct Script {
    setup: Setup,
    sessions: Mutex<HashMap<SessionId, Arc<Session>>>,
    flow: Arc<Flow>,
    /// Where a script says that the process is to die.
    exit: mpsc::Sender<i32>,
}

/// One conversation.
#[derive(Debug)]
pub(super) struct Session {
    pub(super) id: SessionId,
    pub(super) cwd: PathBuf,
    pub(super) model: Option<String>,
    pub(super) system_prompt: Option<String>,
    /// The servers that it was given. None is started before a step needs one.
    pub(super) servers: Vec<McpServer>,
    memory: Memory,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// The turn that runs.
    scene: Option<Arc<Scene>>,
    /// How many there have been.
    turns: u64,
    used: Usage,
}

impl Script {
    /// Ready after as long as the environment says.
    async fn initialize(self: Arc<Self>, responder: Responder<InitializeResponse>) -> Result<(), Error> {
        if let Some(ms) = &self.setup.ready_ms {
            let Ok(ms) = ms.trim().parse() else {
                // The value is not shown: none of the environment's ever is.
                let message = format!("{READY_MS} must be a whole number of milliseconds");
                // As real agents do. It is said in the answer as well, so nothing is lost if nobody reads it here.
                let _told = writeln!(std::io::stderr(), "{message}");
                return responder.respond_with_error(Error::new(ErrorCode::INTERNAL_ERROR, message));
            };
            tokio::time::sleep(Duration::from_millis(ms)).await;
        }
        let takes = PromptCapabilities::new().image(true).audio(true).embedded_context(true);
        let remembers = self.setup.state.is_some();
        // Without a folder there is nothing to go on with, and nobody needs to be told that it was forgotten.
        let word = Meta::from_iter([(OURS.to_owned(), json!({ "stateless": !remembers }))]);
        let can = AgentCapabilities::new().load_session(remembers).prompt_capabilities(takes).meta(word);
        responder.respond(
            InitializeResponse::new(ProtocolVersion::V1)
                .agent_capabilities(can)
                .agent_info(Implementation::new("script", env!("CARGO_PKG_VERSION"))),
        )
    }

    async fn open(
        self: Arc<Self>,
        request: NewSessionRequest,
        responder: Responder<NewSessionResponse>,
    ) -> Result<(), Error> {
        let opened = async {
            let id = session_id()?;
            let (cwd, servers) = (request.cwd, request.mcp_servers);
            let session = self.add(id.clone(), (cwd, servers), request.meta.as_ref(), State::default())?;
            session.memory.begin().await.map_err(Error::into_internal_error)?;
            Ok(NewSessionResponse::new(id))
        };
        responder.respond_with_result(opened.await)
    }

    /// Says its past again before it answers, as real agents do.
    async fn load(
        self: Arc<Self>,
        request: LoadSessionRequest,
        responder: Responder<LoadSessionResponse>,
        client: ConnectionTo<Client>,
    ) -> Result<(), Error> {
        let id = request.session_id;
        let Some(past) = self.memory(&id).recall().await else {
            return responder.respond_with_error(schema::Error::session_not_found(id).into());
        };
        let used = past.last().map(|turn| turn.used).unwrap_or_default();
        let state = State { scene: None, turns: past.len() as u64, used };
        let given = (request.cwd, request.mcp_servers);
        let loaded = self.add(id, given, request.meta.as_ref(), state).map(|session| (session, past));
        match loaded {
            Err(error) => responder.respond_with_error(error),
            Ok((session, past)) => {
                let scene = Scene::new(client, Arc::clone(&self.flow), session);
                for turn in &past {
                    scene.replay(&turn.prompt, &turn.answer).await?;
                }
                scene.report(used).await?;
                responder.respond(LoadSessionResponse::new())
            }
        }
    }

    fn prompt(
        &self,
        request: PromptRequest,
        responder: Responder<PromptResponse>,
        client: ConnectionTo<Client>,
    ) -> Result<(), Error> {
        let session = self.session(&request.session_id)?;
        let scene = Arc::new(Scene::new(client.clone(), Arc::clone(&self.flow), Arc::clone(&session)));
        {
            let mut state = session.lock();
            if state.scene.is_some() {
                let message = "the session has a turn already";
                return responder.respond_with_error(Error::new(ErrorCode::INVALID_REQUEST, message));
            }
            state.scene = Some(Arc::clone(&scene));
            state.turns += 1;
        }
        let part = Part::of(text(&request.prompt), messages(request.meta.as_ref()));
        let (setup, exit) = (self.setup.clone(), self.exit.clone());
        client.spawn(async move {
            let ending = part.play(&scene, &setup).await;
            let said = scene.words();
            // Whatever the session was told until here is part of this turn; what comes now is not.
            session.lock().scene = None;
            scene.miss_steers();
            let used = session.used();
            let turn = Remembered { prompt: gist(&part.prompt).to_owned(), answer: said.clone(), used };
            session.memory.add(&turn).await.map_err(Error::into_internal_error)?;
            if let Ending::Exited(status) = ending {
                scene.drained().await;
                // Nobody is left to hear it if that fails.
                let _gone = exit.send(status).await;
                return Ok(());
            }
            responder.respond_with_result(answer(ending, &part.prompt, &said))?;
            scene.say_late().await
        })
    }

    fn steer(&self, request: SteerRequest, responder: Responder<Steered>) -> Result<(), Error> {
        let running = self.session(&request.session_id)?.lock().scene.clone();
        match running {
            Some(scene) => scene.put_steer(text(&request.prompt), responder),
            None => responder.respond(Steered { outcome: Fate::Missed }),
        }
    }

    /// A cancel that hits nothing changes nothing.
    fn cancel(&self, id: &SessionId) {
        let running = self.session(id).ok().and_then(|session| session.lock().scene.clone());
        if let Some(scene) = running {
            scene.cancel();
        }
    }

    fn memory(&self, id: &SessionId) -> Memory {
        Memory::of(self.setup.state.as_deref(), &id.0)
    }

    fn add(
        &self,
        id: SessionId,
        (cwd, servers): (PathBuf, Vec<McpServer>),
        meta: Option<&Meta>,
        state: State,
    ) -> Result<Arc<Session>, Error> {
        #[derive(Default, Deserialize)]
        struct Settings {
            model: Option<String>,
            system_prompt: Option<String>,
        }
        let settings = meta.and_then(|meta| Settings::deserialize(meta.get(OURS)?).ok()).unwrap_or_default();
        let session = Arc::new(Session {
            memory: self.memory(&id),
            id: id.clone(),
            cwd,
            model: settings.model,
            system_prompt: settings.system_prompt,
            servers,
            state: Mutex::new(state),
        });
        let mut sessions = self.sessions.lock().unwrap_or_else(PoisonError::into_inner);
        if sessions.len() >= SESSIONS_MAX {
            return Err(Error::new(ErrorCode::INTERNAL_ERROR, "too many sessions in one process"));
        }
        sessions.insert(id, Arc::clone(&session));
        Ok(session)
    }

    fn session(&self, id: &SessionId) -> Result<Arc<Session>, Error> {
        let sessions = self.sessions.lock().unwrap_or_else(PoisonError::into_inner);
        sessions.get(id).cloned().ok_or_else(|| schema::Error::session_not_found(id.clone()).into())
    }
}

impl Session {
    /// How many turns there have been, this one included.
    pub(super) fn turns(&self) -> u64 {
        self.lock().turns
    }

    /// All that was used.
    pub(super) fn used(&self) -> Usage {
        self.lock().used
    }

    /// Uses more; gives all that was used.
    pub(super) fn uses(&self, more: &Usage) -> Usage {
        let mut state = self.lock();
        state.used += *more;
        state.used
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What the client is told about a turn that has ended.
fn answer(ending: Ending, prompt: &str, said: &str) -> Result<PromptResponse, Error> {
    match ending {
        Ending::Stopped(reason) => Ok(PromptResponse::new(reason)),
        Ending::Suspended { next } => {
            let transcript = json!([
                {"role": "user", "content": prompt},
                {"role": "assistant", "content": said, OURS: {"next": next}},
            ]);
            let meta = json!({OURS: {"suspended": {"transcript": transcript}}});
            Ok(PromptResponse::new(StopReason::EndTurn).meta(meta.as_object().cloned()))
        }
        Ending::Failed { code, message } => {
            Err(Error::new(ErrorCode::INTERNAL_ERROR, message).data(json!({OURS: {"code": code}})))
        }
        Ending::Exited(status) => Err(Error::new(ErrorCode::INTERNAL_ERROR, format!("exit {status}"))),
    }
}

fn text(blocks: &[ContentBlock]) -> String {
    let words = blocks.iter().filter_map(|block| match block {
        ContentBlock::Text(text) => Some(text.text.as_str()),
        _ => None,
    });
    words.collect()
}

/// The conversation that a prompt goes on with.
fn messages(meta: Option<&Meta>) -> &[Value] {
    meta.and_then(|meta| meta.get(OURS)?.get("messages")?.as_array()).map_or(&[], Vec::as_slice)
}

fn session_id() -> Result<SessionId, Error> {
    let mut random = [0; SESSION_RANDOM];
    getrandom::fill(&mut random).map_err(Error::into_internal_error)?;
    let letters = random.iter().map(|byte| char::from(b'a' + (byte & 15)));
    Ok(SessionId::new(letters.collect::<String>()))
}
