//! A conversation with an agent that is ready: turns, and the time between them. One loop puts all that can happen
//! into one order; it writes while it reads, and stops reading while its session takes nothing more.
//!
//! The crate's own connection is not used on this side, only its types: its queues have no bounds, by design, and it
//! answers lines that are no messages.

use agent_client_protocol::v1::schema::{
    CancelNotification, CancelRequestNotification, CreateElicitationRequest, Meta, PromptCapabilities,
    PromptResponse, RequestPermissionRequest, SessionId, SessionNotification, SessionUpdate, StopReason,
};
use agent_client_protocol::{
    Error, ErrorCode, JsonRpcMessage, JsonRpcResponse, RawJsonRpcId, RawJsonRpcMessage,
    RawJsonRpcNotification, RawJsonRpcParams, RawJsonRpcRequest, RawJsonRpcResponse,
};
use futures_util::StreamExt;
use qd_link::{Closed, Voice};
use qd_protocol::RunId;
use qd_protocol::event::RunError;
use qd_protocol::link::{Outcome, Said, Stop};
use qd_protocol::manifest::{QuestionsBy, Refused, Steer as Verb};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::io::{AsyncRead, AsyncWrite};

use super::asks::{Asked, Settled, Wanted};
use super::calls::Asking;
use super::compose;
use super::ear::{Ear, OURS, ours};
use super::opening::{Opened, words};
use super::round::Round;
use super::service::{Request, Service, Wish};
use super::wire::Peer;
use crate::drivers::floor::Open;
use crate::drivers::telling::{Telling, said, say_late, tell_first};
use crate::turn::{Prompt, Steer, Turn};

/// The method of a prompt, which for some agents is also their verb for a steer.
const PROMPT: &str = "session/prompt";

/// A conversation.
pub(super) struct Talk<R, W> {
    peer: Peer<R, W>,
    session: SessionId,
    takes: PromptCapabilities,
    service: Service,
    ear: Ear,
    /// The turn that words between turns belong to.
    last_run: Option<RunId>,
    /// Words between turns that are being said; they are not lost when a turn begins.
    late: Option<Telling<'static>>,
    /// What the next turn is to tell first.
    notice: Option<String>,
    /// Whether the agent reads what we put beside the protocol, a reason for instance.
    reads_ours: bool,
    /// Why tools were refused, of which the agent could not be told then.
    reasons: Vec<String>,
}

impl<R: AsyncRead + Unpin, W: AsyncWrite + Unpin> Talk<R, W> {
    /// Goes on after the opening.
    pub(super) fn new(peer: Peer<R, W>, opened: Opened, service: Service) -> Self {
        let forgot =
            |why| format!("the agent could not go on with its old conversation and began a new one: {why}");
        let reads_ours = opened.can.meta.as_ref().is_some_and(|meta| meta.contains_key(OURS));
        Self {
            peer,
            session: opened.session,
            takes: opened.can.prompt_capabilities,
            service,
            ear: opened.ear,
            last_run: None,
            late: None,
            notice: opened.forgot.map(forgot),
            reads_ours,
            reasons: Vec::new(),
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
        let reasons = std::mem::take(&mut self.reasons);
        let (request, left_out) = compose::request(self.session.clone(), &self.takes, prompt, &reasons);
        let mut round = Round::new(turn, self.peer.request(&request));
        let cannot = |name| format!("the agent cannot take the file {name}, which was left out");
        let notices = self.notice.take().into_iter().chain(left_out.into_iter().map(cannot)).collect();
        round.floor.telling = Some(Box::pin(tell_first(turn, self.late.take(), notices)));
        loop {
            let listening = round.floor.telling.is_none();
            tokio::select! {
                // A cancel first; what was heard before what comes next.
                biased;
                () = turn.cancelled(), if !round.cancelled => self.cancel(&mut round),
                told = said(&mut round.floor.telling) => {
                    told?;
                    round.floor.told();
                }
                Some(answered) = round.floor.asks.next() => {
                    let (id, settled) = answered?;
                    if round.floor.close(&id).is_some() {
                        self.settle(&mut round, id, settled);
                    }
                }
                steer = turn.next_steer(), if self.steers() && !round.cancelled => {
                    self.steer(&mut round, steer).await?;
                }
                (id, served) = self.service.next() => self.peer.answer(id, served),
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
                (id, served) = self.service.next() => self.peer.answer(id, served),
                message = self.peer.next(listening) => match message {
                    Some(message) => self.overhear(voice, message),
                    None => return,
                },
            }
        }
    }

    /// Asks the agent to stop, once, and answers all that it waits for.
    fn cancel(&mut self, round: &mut Round<'_>) {
        round.stops();
        self.peer.notify(&CancelNotification::new(self.session.clone()));
        for open in round.floor.close_all() {
            self.peer.answer(open.id, open.cancelled);
        }
    }

    fn verb(&self) -> &Verb {
        &self.ear.profile().steer
    }

    fn steers(&self) -> bool {
        *self.verb() != Verb::None
    }

    async fn steer(&mut self, round: &mut Round<'_>, steer: Steer) -> Result<(), Closed> {
        match self.verb().clone() {
            Verb::None | Verb::Native => round.floor.turn.steer_missed(steer.number).await,
            Verb::Request(method) => {
                let id = self.peer.request_by_name(&method, self.text(&steer.text));
                round.steers.push((id, steer.number));
                Ok(())
            }
            // It is answered when the turn is over, and so is the prompt before it.
            Verb::Prompt => {
                let id = self.peer.request_by_name(PROMPT, self.text(&steer.text));
                round.prompts.push(id);
                round.floor.turn.steer_taken(steer.number).await
            }
            Verb::Pull(_) => {
                round.pulled.push_back(steer);
                Ok(())
            }
        }
    }

    fn text(&self, text: &str) -> Value {
        json!({"sessionId": self.session, "prompt": [{"type": "text", "text": text}]})
    }

    /// Tells the agent what came of an ask.
    fn settle(&mut self, round: &mut Round<'_>, id: RawJsonRpcId, settled: Settled) {
        match settled {
            Settled::Answer(answer) => self.peer.answer(id, Ok(answer)),
            Settled::Allowed { answer, argument } => {
                round.granted.push(argument);
                self.peer.answer(id, Ok(answer));
            }
            Settled::Refused { answer, tool, reason } => {
                round.refused = true;
                self.peer.answer(id, Ok(answer));
                if let Some(reason) = reason {
                    self.explain(&tool, &reason);
                }
            }
            Settled::Granted(wish) => self.service.grant(id, wish),
            Settled::Denied(error) => self.peer.answer(id, Err(error)),
        }
    }

    /// Tells the agent why a tool was refused. The protocol has no word for that; what cannot be told on the way, as to an
    /// agent that stops there and would begin anew for it, is told with the next prompt.
    fn explain(&mut self, tool: &str, reason: &str) {
        if self.reads_ours {
            return;
        }
        let text = format!("{tool} was refused: {reason}");
        match self.verb().clone() {
            Verb::Request(method) if self.ear.profile().refused == Refused::GoesOn => {
                // Whatever it says to that.
                let _id = self.peer.request_by_name(&method, self.text(&text));
            }
            _ => self.reasons.push(text),
        }
    }

    /// What a message means to the turn; gives its outcome if that was it.
    async fn hear<'t>(
        &mut self,
        round: &mut Round<'t>,
        message: RawJsonRpcMessage,
    ) -> Result<Option<Outcome>, Closed> {
        match message {
            RawJsonRpcMessage::Response(response) if round.prompts.contains(response.id()) => {
                round.prompts.retain(|id| id != response.id());
                let by_refusal = round.refused && !round.cancelled;
                let outcome = self.outcome(round.floor.turn, by_refusal, response).await?;
                // A steer that was given as a prompt is part of the turn.
                return Ok(round.prompts.is_empty().then_some(outcome));
            }
            RawJsonRpcMessage::Response(response) => {
                if let Some(at) = round.steers.iter().position(|(id, _)| id == response.id()) {
                    let (_, number) = round.steers.swap_remove(at);
                    if was_taken(&response) {
                        round.floor.turn.steer_taken(number).await?;
                    } else {
                        round.floor.turn.steer_missed(number).await?;
                    }
                }
            }
            RawJsonRpcMessage::Notification(notification) => match self.notified(notification) {
                Some(Notified::Update(update)) => {
                    let said = self.hear_update(update);
                    if !said.is_empty() {
                        self.cancel_again(round);
                    }
                    round.floor.tell(said);
                }
                Some(Notified::GivenUp(id)) => {
                    if let Some(open) = round.floor.close(&id) {
                        self.peer.answer(id, Err(Error::request_cancelled()));
                        for ask in &open.asks {
                            round.floor.turn.withdraw(ask).await;
                        }
                    }
                }
                None => {}
            },
            RawJsonRpcMessage::Request(request) if self.is_pull(&request) => {
                let mut texts = Vec::new();
                while let Some(Steer { number, text }) = round.pulled.pop_front() {
                    round.floor.turn.steer_taken(number).await?;
                    texts.push(text);
                }
                self.peer.answer(request.id, Ok(json!({ "messages": texts })));
            }
            RawJsonRpcMessage::Request(request) => {
                if let Some((id, wanted)) = self.serve(request) {
                    self.ask(round, id, wanted);
                }
                self.cancel_again(round);
            }
        }
        Ok(None)
    }

    fn hear_update(&mut self, update: SessionUpdate) -> Vec<Said> {
        let Self { ear, service, .. } = self;
        ear.hear(update, &|terminal| service.shown(terminal))
    }

    /// Whether the agent asks for what it may have been told on its way.
    fn is_pull(&self, request: &RawJsonRpcRequest) -> bool {
        matches!(self.verb(), Verb::Pull(method) if **method == *request.method)
    }

    fn cancel_again(&mut self, round: &mut Round<'_>) {
        if round.stops_again() {
            self.peer.notify(&CancelNotification::new(self.session.clone()));
        }
    }

    fn ask<'t>(&mut self, round: &mut Round<'t>, id: RawJsonRpcId, wanted: Wanted) {
        let cancelled = wanted.cancelled();
        let (said, asked) = match wanted {
            Wanted::Permission(request) => {
                let RequestPermissionRequest { tool_call, options, meta, .. } = *request;
                let Self { ear, service, .. } = self;
                let Asking { said, tool, title, input } =
                    ear.asked(tool_call, &|terminal| service.shown(terminal));
                let questions = match ear.profile().questions {
                    QuestionsBy::Permission => Asked::questions(&input, &options),
                    QuestionsBy::Form => None,
                };
                let asked = questions
                    .unwrap_or_else(|| Asked::permission(tool, title, input, &options, meta.as_ref()));
                (said, asked)
            }
            Wanted::Form(request) => (Vec::new(), Asked::form(*request)),
            Wanted::Wish(wish) if round.cancelled => {
                return self.peer.answer(id, Err(refused(&wish, "the turn is being stopped")));
            }
            Wanted::Wish(wish) => {
                let argument = self.service.root().join(wish.argument());
                let is_granted =
                    |it: &String| *it == wish.argument() || self.service.root().join(it) == argument;
                if round.granted.iter().any(is_granted) {
                    return self.service.grant(id, wish);
                }
                (Vec::new(), Asked::wish(wish))
            }
        };
        round.floor.tell(said);
        match asked {
            Ok(_) if round.cancelled => self.peer.answer(id, cancelled),
            Ok(asked) => {
                let open = Open { id, asks: asked.ids(), cancelled };
                round.floor.ask(open, Box::pin(asked.put(round.floor.turn)));
            }
            Err(error) => self.peer.answer(id, Err(error)),
        }
    }

    /// What a message means while no turn runs.
    fn overhear(&mut self, voice: &Voice, message: RawJsonRpcMessage) {
        match message {
            RawJsonRpcMessage::Response(_) => {}
            RawJsonRpcMessage::Notification(notification) => {
                if let Some(Notified::Update(update)) = self.notified(notification) {
                    let said = self.hear_update(update);
                    // Before the first turn, it is the past that an agent repeats after it was resumed.
                    if let Some(run) = self.last_run.clone().filter(|_| !said.is_empty()) {
                        self.late = Some(Box::pin(say_late(voice.clone(), run, said)));
                    }
                }
            }
            RawJsonRpcMessage::Request(request) if self.is_pull(&request) => {
                self.peer.answer(request.id, Ok(json!({ "messages": [] })));
            }
            RawJsonRpcMessage::Request(request) => match self.serve(request) {
                // Nobody can be asked, and looking is what agents do.
                Some((id, Wanted::Wish(wish))) if wish.looks() => self.service.grant(id, wish),
                Some((id, Wanted::Wish(wish))) => {
                    self.peer.answer(id, Err(refused(&wish, "no turn is under way")));
                }
                Some((id, wanted)) => self.peer.answer(id, wanted.cancelled()),
                None => {}
            },
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
        } else {
            match self.service.take(&id, &method, &params) {
                Request::Wish(wish) => Ok(Wanted::Wish(wish)),
                Request::Other => Err(Error::method_not_found()),
                Request::UnderWay => return None,
                Request::Answer(answer) => {
                    self.peer.answer(id, answer);
                    return None;
                }
            }
        };
        match wanted {
            Ok(wanted) => Some((id, wanted)),
            Err(error) => {
                self.peer.answer(id, Err(error));
                None
            }
        }
    }

    async fn outcome(
        &mut self,
        turn: &Turn<'_>,
        by_refusal: bool,
        response: RawJsonRpcResponse,
    ) -> Result<Outcome, Closed> {
        let result = match response {
            RawJsonRpcResponse::Result { result, .. } => PromptResponse::from_json("session/prompt", result),
            RawJsonRpcResponse::Error { error, .. } => Err(error.into_acp_error()),
        };
        let answer = match result {
            Ok(answer) => answer,
            Err(error) => return Ok(Outcome::failed(run_error(&error))),
        };
        if let Some(usage) = self.ear.hear_answer(answer.usage.as_ref(), answer.meta.as_ref()) {
            turn.tell(usage).await?;
        }
        if let Some(transcript) = suspended(answer.meta.as_ref()) {
            return Ok(Outcome { transcript, ..Outcome::of(Stop::Suspended) });
        }
        Ok(match answer.stop_reason {
            StopReason::EndTurn => match self.ear.failure() {
                Some(why) => Outcome::failed(RunError::new("agent_error", why)),
                None => Outcome::of(Stop::EndTurn),
            },
            // Some end their turn when a tool is refused, and call that a cancel.
            StopReason::Cancelled if by_refusal => Outcome::of(Stop::EndTurn),
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

fn refused(wish: &Wish, why: &str) -> Error {
    Error::new(ErrorCode::INVALID_PARAMS, format!("{} is refused: {why}", wish.tool()))
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
