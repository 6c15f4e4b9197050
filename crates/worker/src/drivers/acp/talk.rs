//! A conversation with an agent that is ready: turns, and the time between them. One loop puts all that can happen
//! into one order; it writes while it reads, and stops reading while its session takes nothing more.
//!
//! The crate's own connection is not used on this side, only its types: its queues have no bounds, by design, and it
//! answers lines that are no messages.

use agent_client_protocol::v1::schema::{
    CancelNotification, CancelRequestNotification, CreateElicitationRequest, Meta, PromptCapabilities,
    PromptResponse, ReadTextFileRequest, RequestPermissionRequest, SessionId, SessionNotification,
    SessionUpdate, StopReason, WriteTextFileRequest,
};
use agent_client_protocol::{
    Error, ErrorCode, JsonRpcMessage, JsonRpcResponse, RawJsonRpcId, RawJsonRpcMessage,
    RawJsonRpcNotification, RawJsonRpcParams, RawJsonRpcRequest, RawJsonRpcResponse,
};
use futures_util::StreamExt;
use qd_link::{Closed, Voice};
use qd_protocol::RunId;
use qd_protocol::event::RunError;
use qd_protocol::link::{Outcome, Stop};
use qd_protocol::manifest::Steer as Verb;
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::io::{AsyncRead, AsyncWrite};

use super::asks::{Asked, Wanted};
use super::compose;
use super::ear::{Asking, Ear, ours};
use super::files::Files;
use super::opening::{Opened, words};
use super::round::{Open, Round};
use super::wire::Peer;
use crate::drivers::telling::{Telling, said, say_late, tell_first};
use crate::turn::{Prompt, Steer, Turn};

/// A conversation.
pub(super) struct Talk<R, W> {
    peer: Peer<R, W>,
    session: SessionId,
    takes: PromptCapabilities,
    /// The agent's verb for a word on the way.
    steer: Verb,
    files: Files,
    ear: Ear,
    /// The turn that words between turns belong to.
    last_run: Option<RunId>,
    /// Words between turns that are being said; they are not lost when a turn begins.
    late: Option<Telling<'static>>,
    /// What the next turn is to tell first.
    notice: Option<String>,
}

impl<R: AsyncRead + Unpin, W: AsyncWrite + Unpin> Talk<R, W> {
    /// Goes on after the opening.
    pub(super) fn new(peer: Peer<R, W>, opened: Opened, files: Files, steer: Verb) -> Self {
        let forgot =
            |why| format!("the agent could not go on with its old conversation and began a new one: {why}");
        Self {
            peer,
            session: opened.session,
            takes: opened.can.prompt_capabilities,
            steer,
            files,
            ear: opened.ear,
            last_run: None,
            late: None,
            notice: opened.forgot.map(forgot),
        }
    }

    /// The agent's name for it.
    pub(super) fn session(&self) -> &SessionId {
        &self.session
    }

    /// Closes the stream to the agent and gives the other one up.
    pub(super) fn hang_up(self) -> R {
        self.peer.hang_up()
    }

    /// One turn, from its prompt to the agent's answer; `None` if the agent is no more.
    pub(super) async fn turn(&mut self, turn: &Turn<'_>, prompt: &Prompt) -> Result<Option<Outcome>, Closed> {
        if turn.is_cancelled() {
            return Ok(Some(Outcome::of(Stop::Cancelled)));
        }
        self.last_run = Some(turn.run.clone());
        self.ear.begin_turn();
        let (request, left_out) = compose::request(self.session.clone(), &self.takes, prompt);
        let mut round = Round::new(turn, self.peer.request(&request));
        let cannot = |name| format!("the agent cannot take the file {name}, which was left out");
        let notices = self.notice.take().into_iter().chain(left_out.into_iter().map(cannot)).collect();
        round.telling = Some(Box::pin(tell_first(turn, self.late.take(), notices)));
        loop {
            let listening = round.telling.is_none();
            tokio::select! {
                // A cancel first; what was heard before what comes next.
                biased;
                () = turn.cancelled(), if !round.cancelled => self.cancel(&mut round),
                told = said(&mut round.telling) => {
                    told?;
                    round.told();
                }
                Some(answered) = round.asks.next() => {
                    let (id, answer) = answered?;
                    if round.close(&id).is_some() {
                        self.peer.answer(id, Ok(answer));
                    }
                }
                steer = turn.next_steer(), if self.steer != Verb::None && !round.cancelled => {
                    self.steer(&mut round, steer);
                }
                (id, served) = self.files.next() => self.peer.answer(id, served),
                message = self.peer.next(listening) => {
                    let Some(message) = message else { return Ok(None) };
                    if let Some(outcome) = self.hear(&mut round, message).await? {
                        return Ok(Some(outcome));
                    }
                }
            }
        }
    }

    /// The time between turns. What is said belongs to the turn before, nobody is asked anything, and files are
    /// served. Comes back when the agent is no more; nothing is lost if the wait is given up.
    pub(super) async fn idle(&mut self, voice: &Voice) {
        loop {
            let listening = self.late.is_none();
            tokio::select! {
                biased;
                // A session that has let go of its agent hears no late words either.
                _told = said(&mut self.late) => self.late = None,
                (id, served) = self.files.next() => self.peer.answer(id, served),
                message = self.peer.next(listening) => match message {
                    Some(message) => self.overhear(voice, message),
                    None => return,
                },
            }
        }
    }

    /// Asks the agent to stop, once, and answers all that it waits for.
    fn cancel(&mut self, round: &mut Round<'_>) {
        round.cancelled = true;
        round.too_early = !round.begun;
        self.peer.notify(&CancelNotification::new(self.session.clone()));
        round.asks.clear();
        for open in round.open.drain(..) {
            self.peer.answer(open.id, Ok(open.cancelled));
        }
        if let Some((open, _)) = round.next_ask.take() {
            self.peer.answer(open.id, Ok(open.cancelled));
        }
    }

    fn steer(&mut self, round: &mut Round<'_>, steer: Steer) {
        let Verb::Request(method) = &self.steer else { return };
        let prompt = json!([{"type": "text", "text": steer.text}]);
        let id = self.peer.request_by_name(method, json!({"sessionId": self.session, "prompt": prompt}));
        round.steers.push((id, steer.number));
    }

    /// What a message means to the turn; gives its outcome if that was it.
    async fn hear<'t>(
        &mut self,
        round: &mut Round<'t>,
        message: RawJsonRpcMessage,
    ) -> Result<Option<Outcome>, Closed> {
        match message {
            RawJsonRpcMessage::Response(response) if *response.id() == round.prompt => {
                return self.outcome(round.turn, response).await.map(Some);
            }
            RawJsonRpcMessage::Response(response) => {
                if let Some(at) = round.steers.iter().position(|(id, _)| id == response.id()) {
                    let (_, number) = round.steers.swap_remove(at);
                    if was_taken(&response) {
                        round.turn.steer_taken(number).await?;
                    } else {
                        round.turn.steer_missed(number).await?;
                    }
                }
            }
            RawJsonRpcMessage::Notification(notification) => match self.notified(notification) {
                Some(Notified::Update(update)) => {
                    let said = self.ear.hear(update);
                    round.tell(said);
                    self.cancel_again(round);
                }
                Some(Notified::GivenUp(id)) => {
                    if let Some(open) = round.close(&id) {
                        self.peer.answer(id, Err(Error::request_cancelled()));
                        for ask in &open.asks {
                            round.turn.withdraw(ask).await;
                        }
                    }
                }
                None => {}
            },
            RawJsonRpcMessage::Request(request) => {
                if let Some((id, wanted)) = self.serve(request) {
                    self.ask(round, id, wanted);
                }
                self.cancel_again(round);
            }
        }
        Ok(None)
    }

    /// An agent may miss a cancel that reaches it before its turn has begun; its first word shows that it has.
    fn cancel_again(&mut self, round: &mut Round<'_>) {
        round.begun = true;
        if std::mem::take(&mut round.too_early) {
            self.peer.notify(&CancelNotification::new(self.session.clone()));
        }
    }

    fn ask<'t>(&mut self, round: &mut Round<'t>, id: RawJsonRpcId, wanted: Wanted) {
        let cancelled = wanted.cancelled();
        let (said, asked) = match wanted {
            Wanted::Permission(request) => {
                let RequestPermissionRequest { tool_call, options, meta, .. } = *request;
                let Asking { said, tool, title, input } = self.ear.asked(tool_call);
                (said, Asked::permission(tool, title, input, &options, meta.as_ref()))
            }
            Wanted::Form(request) => (Vec::new(), Asked::form(*request)),
        };
        round.tell(said);
        match asked {
            Ok(_) if round.cancelled => self.peer.answer(id, Ok(cancelled)),
            Ok(asked) => round.ask(Open { id, asks: asked.ids(), cancelled }, asked),
            Err(error) => self.peer.answer(id, Err(error)),
        }
    }

    /// What a message means while no turn runs.
    fn overhear(&mut self, voice: &Voice, message: RawJsonRpcMessage) {
        match message {
            RawJsonRpcMessage::Response(_) => {}
            RawJsonRpcMessage::Notification(notification) => {
                if let Some(Notified::Update(update)) = self.notified(notification) {
                    let said = self.ear.hear(update);
                    // Before the first turn, it is the past that an agent repeats after it was resumed.
                    if let Some(run) = self.last_run.clone().filter(|_| !said.is_empty()) {
                        self.late = Some(Box::pin(say_late(voice.clone(), run, said)));
                    }
                }
            }
            RawJsonRpcMessage::Request(request) => {
                if let Some((id, wanted)) = self.serve(request) {
                    self.peer.answer(id, Ok(wanted.cancelled()));
                }
            }
        }
    }

    fn notified(&self, notification: RawJsonRpcNotification) -> Option<Notified> {
        let RawJsonRpcNotification { method, params } = notification;
        let params = value(params);
        if let Ok(said) = SessionNotification::parse_message(&method, &params) {
            // Agents may speak of sessions below ours, which nobody here has asked for.
            return (said.session_id == self.session).then_some(Notified::Update(said.update));
        }
        let given_up = CancelRequestNotification::parse_message(&method, &params).ok()?;
        Some(Notified::GivenUp(given_up.request_id.into()))
    }

    /// Begins to do what the agent asks for, or refuses it; gives back what only the turn can decide.
    fn serve(&mut self, request: RawJsonRpcRequest) -> Option<(RawJsonRpcId, Wanted)> {
        let RawJsonRpcRequest { id, method, params } = request;
        let params = value(params);
        let wanted = if RequestPermissionRequest::matches_method(&method) {
            RequestPermissionRequest::parse_message(&method, &params)
                .map(|it| Wanted::Permission(Box::new(it)))
        } else if CreateElicitationRequest::matches_method(&method) {
            CreateElicitationRequest::parse_message(&method, &params).map(|it| Wanted::Form(Box::new(it)))
        } else if ReadTextFileRequest::matches_method(&method) {
            match ReadTextFileRequest::parse_message(&method, &params) {
                Ok(request) => {
                    self.files.read(id, request);
                    return None;
                }
                Err(error) => Err(error),
            }
        } else if WriteTextFileRequest::matches_method(&method) {
            match WriteTextFileRequest::parse_message(&method, &params) {
                Ok(request) => {
                    self.files.write(id, request);
                    return None;
                }
                Err(error) => Err(error),
            }
        } else {
            Err(Error::method_not_found())
        };
        match wanted {
            Ok(wanted) => Some((id, wanted)),
            Err(error) => {
                self.peer.answer(id, Err(error));
                None
            }
        }
    }

    async fn outcome(&mut self, turn: &Turn<'_>, response: RawJsonRpcResponse) -> Result<Outcome, Closed> {
        let result = match response {
            RawJsonRpcResponse::Result { result, .. } => PromptResponse::from_json("session/prompt", result),
            RawJsonRpcResponse::Error { error, .. } => Err(error.into_acp_error()),
        };
        let answer = match result {
            Ok(answer) => answer,
            Err(error) => return Ok(Outcome::failed(run_error(&error))),
        };
        if let Some(usage) = answer.usage.as_ref().and_then(|usage| self.ear.hear_usage(usage)) {
            turn.tell(usage).await?;
        }
        if let Some(transcript) = suspended(answer.meta.as_ref()) {
            return Ok(Outcome { transcript, ..Outcome::of(Stop::Suspended) });
        }
        Ok(match answer.stop_reason {
            StopReason::EndTurn => Outcome::of(Stop::EndTurn),
            StopReason::MaxTokens => Outcome::of(Stop::MaxTokens),
            StopReason::MaxTurnRequests => Outcome::of(Stop::MaxTurns),
            StopReason::Refusal => Outcome::of(Stop::Refused),
            StopReason::Cancelled => Outcome::of(Stop::Cancelled),
            other => {
                let message = format!("the agent stopped for a reason that we do not know: {other:?}");
                Outcome::failed(RunError::new("agent_error", message))
            }
        })
    }
}

/// What the agent tells without wanting anything.
#[expect(
    clippy::large_enum_variant,
    reason = "it is taken apart at once, and there is one for every piece of text"
)]
enum Notified {
    Update(SessionUpdate),
    /// It no longer wants an answer to this.
    GivenUp(RawJsonRpcId),
}

fn value(params: Option<RawJsonRpcParams>) -> Value {
    params.map(RawJsonRpcParams::into_value).unwrap_or_default()
}

/// `taken` is our own agent's word, `injected` that of the adapters that invented the method.
fn was_taken(response: &RawJsonRpcResponse) -> bool {
    let RawJsonRpcResponse::Result { result, .. } = response else { return false };
    result["outcome"] == "taken" || result["outcome"] == "injected"
}

/// The conversation of a turn that is to be resumed with it.
fn suspended(meta: Option<&Meta>) -> Option<Vec<Value>> {
    #[derive(Deserialize)]
    struct Answer {
        suspended: Suspended,
    }
    #[derive(Deserialize)]
    struct Suspended {
        #[serde(default)]
        transcript: Vec<Value>,
    }
    ours(meta).map(|Answer { suspended }| suspended.transcript)
}

/// What went wrong, in the agent's words. A code of our own may come with it.
pub(super) fn run_error(told: &Error) -> RunError {
    #[derive(Deserialize)]
    struct Data {
        quarterdeck: Code,
    }
    #[derive(Deserialize)]
    struct Code {
        code: String,
    }
    let code =
        told.data.as_ref().and_then(|data| Data::deserialize(data).ok()).map(|data| data.quarterdeck.code);
    let code =
        code.filter(|code| code.len() <= 64 && code.bytes().all(|b| b.is_ascii_lowercase() || b == b'_'));
    let code = match &code {
        Some(code) => code,
        None if told.code == ErrorCode::AUTH_REQUIRED => "agent_not_signed_in",
        None => "agent_error",
    };
    RunError::new(code, words(told))
}
