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
use qd_link::{AgentOutput, LinkClosed};
use qd_protocol::RunId;
use qd_protocol::event::RunError;
use qd_protocol::link::{TurnOutcome, TurnStopReason, TurnUpdate};
use qd_protocol::manifest::{QuestionMethod, RefusalRule, SteerMethod as Verb};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::io::{AsyncRead, AsyncWrite};

use super::asks::{AcpApprovalRequest, AcpAsk, AcpAskOutcome};
use super::client_service::{AcpClientOperation, AcpClientService, AcpRequestHandling};
use super::connection::AcpConnection;
use super::event_decoder::{AcpEventDecoder, META_KEY, quarterdeck_meta};
use super::handshake::{AcpHandshakeResult, error_text};
use super::prompt_content;
use super::tool_calls::AcpToolPermission;
use super::turn::AcpTurn;
use crate::drivers::emit::{EmitFuture, emit_late, emit_late_and_notices, wait_for_emit};
use crate::drivers::turn_state::OpenAsk;
use crate::turn::{DriverPrompt, DriverSteer, DriverTurn};

/// The method of a prompt, which for some agents is also their verb for a steer.
const PROMPT_METHOD: &str = "session/prompt";

/// A conversation.
pub(super) struct AcpConversation<R, W> {
    connection: AcpConnection<R, W>,
    session: SessionId,
    prompt_capabilities: PromptCapabilities,
    service: AcpClientService,
    decoder: AcpEventDecoder,
    /// The turn that words between turns belong to.
    last_run: Option<RunId>,
    /// Words between turns that are being said; they are not lost when a turn begins.
    late_output: Option<EmitFuture<'static>>,
    /// What the next turn is to tell first.
    first_notice: Option<String>,
    /// Whether the agent reads what we put beside the protocol, a reason for instance.
    reads_our_meta: bool,
    /// Why tools were refused, of which the agent could not be told then.
    untold_reasons: Vec<String>,
}

impl<R: AsyncRead + Unpin, W: AsyncWrite + Unpin> AcpConversation<R, W> {
    /// Goes on after the opening.
    pub(super) fn new(
        connection: AcpConnection<R, W>,
        opened: AcpHandshakeResult,
        service: AcpClientService,
    ) -> Self {
        let forgot =
            |why| format!("the agent could not go on with its old conversation and began a new one: {why}");
        let reads_our_meta =
            opened.capabilities.meta.as_ref().is_some_and(|meta| meta.contains_key(META_KEY));
        Self {
            connection,
            session: opened.session,
            prompt_capabilities: opened.capabilities.prompt_capabilities,
            service,
            decoder: opened.decoder,
            last_run: None,
            late_output: None,
            first_notice: opened.resume_failure.map(forgot),
            reads_our_meta,
            untold_reasons: Vec::new(),
        }
    }

    /// The agent's name for it.
    pub(super) fn session_id(&self) -> &SessionId {
        &self.session
    }

    /// Closes the stream to the agent and gives the other one up.
    pub(super) fn hang_up(self) -> R {
        self.connection.hang_up()
    }

    /// One turn, from its prompt to the agent's answer; `None` if the agent is no more.
    pub(super) async fn turn(
        &mut self,
        turn: &DriverTurn<'_>,
        prompt: &DriverPrompt,
    ) -> Result<Option<TurnOutcome>, LinkClosed> {
        if turn.is_cancelled() {
            return Ok(Some(TurnOutcome::of(TurnStopReason::Cancelled)));
        }
        self.last_run = Some(turn.run.clone());
        self.decoder.begin_turn();
        let reasons = std::mem::take(&mut self.untold_reasons);
        let (request, left_out) =
            prompt_content::prompt_request(self.session.clone(), &self.prompt_capabilities, prompt, &reasons);
        let mut round = AcpTurn::new(turn, self.connection.request(&request));
        let cannot = |name| format!("the agent cannot take the file {name}, which was left out");
        let notices = self.first_notice.take().into_iter().chain(left_out.into_iter().map(cannot)).collect();
        round.state.emitting = Some(Box::pin(emit_late_and_notices(turn, self.late_output.take(), notices)));
        loop {
            let listening = round.state.emitting.is_none();
            tokio::select! {
                // A cancel first; what was heard before what comes next.
                biased;
                () = turn.cancelled(), if !round.cancelled => self.cancel(&mut round),
                told = wait_for_emit(&mut round.state.emitting) => {
                    told?;
                    round.state.finish_emitting();
                }
                Some(answered) = round.state.pending_answers.next() => {
                    let (id, settled) = answered?;
                    if round.state.close_ask(&id).is_some() {
                        self.send_ask_outcome(&mut round, id, settled);
                    }
                }
                steer = turn.next_steer(), if self.steers() && !round.cancelled => {
                    self.send_steer(&mut round, steer).await?;
                }
                (id, served) = self.service.next() => self.connection.respond(id, served),
                message = self.connection.next(listening) => {
                    let Some(message) = message else { return Ok(None) };
                    if let Some(outcome) = self.handle_message(&mut round, message).await? {
                        return Ok(Some(outcome));
                    }
                }
            }
        }
    }

    /// The time between turns. What is said belongs to the turn before, nobody is asked anything, and files are
    /// served. Comes back when the agent is no more; nothing is lost if the wait is given up.
    pub(super) async fn idle(&mut self, voice: &AgentOutput) {
        loop {
            let listening = self.late_output.is_none();
            tokio::select! {
                biased;
                // A session that has let go of its agent hears no late words either.
                _told = wait_for_emit(&mut self.late_output) => self.late_output = None,
                (id, served) = self.service.next() => self.connection.respond(id, served),
                message = self.connection.next(listening) => match message {
                    Some(message) => self.handle_idle_message(voice, message),
                    None => return,
                },
            }
        }
    }

    /// Asks the agent to stop, once, and answers all that it waits for.
    fn cancel(&mut self, round: &mut AcpTurn<'_>) {
        round.mark_cancelled();
        self.connection.notify(&CancelNotification::new(self.session.clone()));
        for open in round.state.close_all_asks() {
            self.connection.respond(open.id, open.cancel_answer);
        }
    }

    fn steer_method(&self) -> &Verb {
        &self.decoder.profile().steer
    }

    fn steers(&self) -> bool {
        *self.steer_method() != Verb::None
    }

    async fn send_steer(&mut self, round: &mut AcpTurn<'_>, steer: DriverSteer) -> Result<(), LinkClosed> {
        match self.steer_method().clone() {
            Verb::None | Verb::Native => round.state.turn.report_steer_missed(steer.number).await,
            Verb::Request(method) => {
                let id = self.connection.request_by_name(&method, self.text_prompt_params(&steer.text));
                round.pending_steers.push((id, steer.number));
                Ok(())
            }
            // It is answered when the turn is over, and so is the prompt before it.
            Verb::Prompt => {
                let id = self.connection.request_by_name(PROMPT_METHOD, self.text_prompt_params(&steer.text));
                round.open_prompts.push(id);
                round.state.turn.report_steer_taken(steer.number).await
            }
            Verb::Pull(_) => {
                round.pullable_steers.push_back(steer);
                Ok(())
            }
        }
    }

    fn text_prompt_params(&self, text: &str) -> Value {
        json!({"sessionId": self.session, "prompt": [{"type": "text", "text": text}]})
    }

    /// Tells the agent what came of an ask.
    fn send_ask_outcome(&mut self, round: &mut AcpTurn<'_>, id: RawJsonRpcId, settled: AcpAskOutcome) {
        match settled {
            AcpAskOutcome::Answer(answer) => self.connection.respond(id, Ok(answer)),
            AcpAskOutcome::ToolAllowed { answer, argument } => {
                round.allowed_arguments.push(argument);
                self.connection.respond(id, Ok(answer));
            }
            AcpAskOutcome::ToolDenied { answer, tool, reason } => {
                round.tool_refused = true;
                self.connection.respond(id, Ok(answer));
                if let Some(reason) = reason {
                    self.explain_denial(&tool, &reason);
                }
            }
            AcpAskOutcome::OperationAllowed(wish) => self.service.perform_operation(id, wish),
            AcpAskOutcome::OperationDenied(error) => self.connection.respond(id, Err(error)),
        }
    }

    /// Tells the agent why a tool was refused. The protocol has no word for that; what cannot be told on the way, as to an
    /// agent that stops there and would begin anew for it, is told with the next prompt.
    fn explain_denial(&mut self, tool: &str, reason: &str) {
        if self.reads_our_meta {
            return;
        }
        let text = format!("{tool} was refused: {reason}");
        match self.steer_method().clone() {
            Verb::Request(method) if self.decoder.profile().on_tool_refused == RefusalRule::GoesOn => {
                // Whatever it says to that.
                let _id = self.connection.request_by_name(&method, self.text_prompt_params(&text));
            }
            _ => self.untold_reasons.push(text),
        }
    }

    /// What a message means to the turn; gives its outcome if that was it.
    async fn handle_message<'t>(
        &mut self,
        round: &mut AcpTurn<'t>,
        message: RawJsonRpcMessage,
    ) -> Result<Option<TurnOutcome>, LinkClosed> {
        match message {
            RawJsonRpcMessage::Response(response) if round.open_prompts.contains(response.id()) => {
                round.open_prompts.retain(|id| id != response.id());
                let by_refusal = round.tool_refused && !round.cancelled;
                let outcome = self.turn_outcome(round.state.turn, by_refusal, response).await?;
                // A steer that was given as a prompt is part of the turn.
                return Ok(round.open_prompts.is_empty().then_some(outcome));
            }
            RawJsonRpcMessage::Response(response) => {
                if let Some(at) = round.pending_steers.iter().position(|(id, _)| id == response.id()) {
                    let (_, number) = round.pending_steers.swap_remove(at);
                    if steer_was_taken(&response) {
                        round.state.turn.report_steer_taken(number).await?;
                    } else {
                        round.state.turn.report_steer_missed(number).await?;
                    }
                }
            }
            RawJsonRpcMessage::Notification(notification) => match self.parse_notification(notification) {
                Some(AcpNotification::Update(update)) => {
                    let said = self.decode_update(update);
                    if !said.is_empty() {
                        self.cancel_again(round);
                    }
                    round.state.emit(said);
                }
                Some(AcpNotification::RequestCancelled(id)) => {
                    if let Some(open) = round.state.close_ask(&id) {
                        self.connection.respond(id, Err(Error::request_cancelled()));
                        for ask in &open.ask_ids {
                            round.state.turn.withdraw_ask(ask).await;
                        }
                    }
                }
                None => {}
            },
            RawJsonRpcMessage::Request(request) if self.is_steer_pull(&request) => {
                let mut texts = Vec::new();
                while let Some(DriverSteer { number, text }) = round.pullable_steers.pop_front() {
                    round.state.turn.report_steer_taken(number).await?;
                    texts.push(text);
                }
                self.connection.respond(request.id, Ok(json!({ "messages": texts })));
            }
            RawJsonRpcMessage::Request(request) => {
                if let Some((id, wanted)) = self.serve_request(request) {
                    self.open_ask(round, id, wanted);
                }
                self.cancel_again(round);
            }
        }
        Ok(None)
    }

    fn decode_update(&mut self, update: SessionUpdate) -> Vec<TurnUpdate> {
        let Self { decoder: ear, service, .. } = self;
        ear.decode(update, &|terminal| service.terminal_output(terminal))
    }

    /// Whether the agent asks for what it may have been told on its way.
    fn is_steer_pull(&self, request: &RawJsonRpcRequest) -> bool {
        matches!(self.steer_method(), Verb::Pull(method) if **method == *request.method)
    }

    fn cancel_again(&mut self, round: &mut AcpTurn<'_>) {
        if round.should_cancel_again() {
            self.connection.notify(&CancelNotification::new(self.session.clone()));
        }
    }

    fn open_ask<'t>(&mut self, round: &mut AcpTurn<'t>, id: RawJsonRpcId, wanted: AcpApprovalRequest) {
        let cancelled = wanted.cancel_answer();
        let (said, asked) = match wanted {
            AcpApprovalRequest::Permission(request) => {
                let RequestPermissionRequest { tool_call, options, meta, .. } = *request;
                let Self { decoder: ear, service, .. } = self;
                let AcpToolPermission { updates: said, tool, title, input } =
                    ear.record_permission_request(tool_call, &|terminal| service.terminal_output(terminal));
                let questions = match ear.profile().questions {
                    QuestionMethod::Permission => AcpAsk::questions(&input, &options),
                    QuestionMethod::Form => None,
                };
                let asked = questions
                    .unwrap_or_else(|| AcpAsk::permission(tool, title, input, &options, meta.as_ref()));
                (said, asked)
            }
            AcpApprovalRequest::Form(request) => (Vec::new(), AcpAsk::form(*request)),
            AcpApprovalRequest::Operation(wish) if round.cancelled => {
                return self
                    .connection
                    .respond(id, Err(operation_refused(&wish, "the turn is being stopped")));
            }
            AcpApprovalRequest::Operation(wish) => {
                let argument = self.service.root().join(wish.argument());
                let is_granted =
                    |it: &String| *it == wish.argument() || self.service.root().join(it) == argument;
                if round.allowed_arguments.iter().any(is_granted) {
                    return self.service.perform_operation(id, wish);
                }
                (Vec::new(), AcpAsk::operation(wish))
            }
        };
        round.state.emit(said);
        match asked {
            Ok(_) if round.cancelled => self.connection.respond(id, cancelled),
            Ok(asked) => {
                let open = OpenAsk { id, ask_ids: asked.ask_ids(), cancel_answer: cancelled };
                round.state.ask(open, Box::pin(asked.ask_and_wait(round.state.turn)));
            }
            Err(error) => self.connection.respond(id, Err(error)),
        }
    }

    /// What a message means while no turn runs.
    fn handle_idle_message(&mut self, voice: &AgentOutput, message: RawJsonRpcMessage) {
        match message {
            RawJsonRpcMessage::Response(_) => {}
            RawJsonRpcMessage::Notification(notification) => {
                if let Some(AcpNotification::Update(update)) = self.parse_notification(notification) {
                    let said = self.decode_update(update);
                    // Before the first turn, it is the past that an agent repeats after it was resumed.
                    if let Some(run) = self.last_run.clone().filter(|_| !said.is_empty()) {
                        self.late_output = Some(Box::pin(emit_late(voice.clone(), run, said)));
                    }
                }
            }
            RawJsonRpcMessage::Request(request) if self.is_steer_pull(&request) => {
                self.connection.respond(request.id, Ok(json!({ "messages": [] })));
            }
            RawJsonRpcMessage::Request(request) => match self.serve_request(request) {
                // Nobody can be asked, and looking is what agents do.
                Some((id, AcpApprovalRequest::Operation(wish))) if wish.is_read_only() => {
                    self.service.perform_operation(id, wish)
                }
                Some((id, AcpApprovalRequest::Operation(wish))) => {
                    self.connection.respond(id, Err(operation_refused(&wish, "no turn is under way")));
                }
                Some((id, wanted)) => self.connection.respond(id, wanted.cancel_answer()),
                None => {}
            },
        }
    }

    fn parse_notification(&self, notification: RawJsonRpcNotification) -> Option<AcpNotification> {
        let RawJsonRpcNotification { method, params } = notification;
        let params = params_value(params);
        if let Ok(said) = SessionNotification::parse_message(&method, &params) {
            // Agents may speak of sessions below ours, which nobody here has asked for.
            return (said.session_id == self.session).then_some(AcpNotification::Update(said.update));
        }
        let given_up = CancelRequestNotification::parse_message(&method, &params).ok()?;
        Some(AcpNotification::RequestCancelled(given_up.request_id.into()))
    }

    /// Begins to do what the agent asks for, or refuses it; gives back what only the turn can decide.
    fn serve_request(&mut self, request: RawJsonRpcRequest) -> Option<(RawJsonRpcId, AcpApprovalRequest)> {
        let RawJsonRpcRequest { id, method, params } = request;
        let params = params_value(params);
        let wanted = if RequestPermissionRequest::matches_method(&method) {
            RequestPermissionRequest::parse_message(&method, &params)
                .map(|it| AcpApprovalRequest::Permission(Box::new(it)))
        } else if CreateElicitationRequest::matches_method(&method) {
            CreateElicitationRequest::parse_message(&method, &params)
                .map(|it| AcpApprovalRequest::Form(Box::new(it)))
        } else {
            match self.service.handle_request(&id, &method, &params) {
                AcpRequestHandling::NeedsApproval(wish) => Ok(AcpApprovalRequest::Operation(wish)),
                AcpRequestHandling::NotHandled => Err(Error::method_not_found()),
                AcpRequestHandling::Pending => return None,
                AcpRequestHandling::Responded(answer) => {
                    self.connection.respond(id, answer);
                    return None;
                }
            }
        };
        match wanted {
            Ok(wanted) => Some((id, wanted)),
            Err(error) => {
                self.connection.respond(id, Err(error));
                None
            }
        }
    }

    async fn turn_outcome(
        &mut self,
        turn: &DriverTurn<'_>,
        by_refusal: bool,
        response: RawJsonRpcResponse,
    ) -> Result<TurnOutcome, LinkClosed> {
        let result = match response {
            RawJsonRpcResponse::Result { result, .. } => PromptResponse::from_json("session/prompt", result),
            RawJsonRpcResponse::Error { error, .. } => Err(error.into_acp_error()),
        };
        let answer = match result {
            Ok(answer) => answer,
            Err(error) => return Ok(TurnOutcome::failed(run_error(&error))),
        };
        if let Some(usage) = self.decoder.decode_prompt_response(answer.usage.as_ref(), answer.meta.as_ref())
        {
            turn.emit(usage).await?;
        }
        if let Some(transcript) = suspended_transcript(answer.meta.as_ref()) {
            return Ok(TurnOutcome { transcript, ..TurnOutcome::of(TurnStopReason::Suspended) });
        }
        Ok(match answer.stop_reason {
            StopReason::EndTurn => match self.decoder.turn_failure() {
                Some(why) => TurnOutcome::failed(RunError::new("agent_error", why)),
                None => TurnOutcome::of(TurnStopReason::EndTurn),
            },
            // Some end their turn when a tool is refused, and call that a cancel.
            StopReason::Cancelled if by_refusal => TurnOutcome::of(TurnStopReason::EndTurn),
            StopReason::MaxTokens => TurnOutcome::of(TurnStopReason::MaxTokens),
            StopReason::MaxTurnRequests => TurnOutcome::of(TurnStopReason::MaxTurns),
            StopReason::Refusal => TurnOutcome::of(TurnStopReason::Refused),
            StopReason::Cancelled => TurnOutcome::of(TurnStopReason::Cancelled),
            other => {
                let message = format!("the agent stopped for a reason that we do not know: {other:?}");
                TurnOutcome::failed(RunError::new("agent_error", message))
            }
        })
    }
}

/// What the agent tells without wanting anything.
#[expect(
    clippy::large_enum_variant,
    reason = "it is taken apart at once, and there is one for every piece of text"
)]
enum AcpNotification {
    Update(SessionUpdate),
    /// It no longer wants an answer to this.
    RequestCancelled(RawJsonRpcId),
}

fn operation_refused(wish: &AcpClientOperation, why: &str) -> Error {
    Error::new(ErrorCode::INVALID_PARAMS, format!("{} is refused: {why}", wish.tool()))
}

fn params_value(params: Option<RawJsonRpcParams>) -> Value {
    params.map(RawJsonRpcParams::into_value).unwrap_or_default()
}

/// `taken` is our own agent's word, `injected` that of the adapters that invented the method.
fn steer_was_taken(response: &RawJsonRpcResponse) -> bool {
    let RawJsonRpcResponse::Result { result, .. } = response else { return false };
    result["outcome"] == "taken" || result["outcome"] == "injected"
}

/// The conversation of a turn that is to be resumed with it.
fn suspended_transcript(meta: Option<&Meta>) -> Option<Vec<Value>> {
    #[derive(Deserialize)]
    struct AcpSuspensionMeta {
        suspended: AcpSuspension,
    }
    #[derive(Deserialize)]
    struct AcpSuspension {
        #[serde(default)]
        transcript: Vec<Value>,
    }
    quarterdeck_meta(meta).map(|AcpSuspensionMeta { suspended }| suspended.transcript)
}

/// What went wrong, in the agent's words. A code of our own may come with it.
pub(super) fn run_error(told: &Error) -> RunError {
    #[derive(Deserialize)]
    struct AcpErrorData {
        quarterdeck: AcpErrorCode,
    }
    #[derive(Deserialize)]
    struct AcpErrorCode {
        code: String,
    }
    let code = told
        .data
        .as_ref()
        .and_then(|data| AcpErrorData::deserialize(data).ok())
        .map(|data| data.quarterdeck.code);
    let code =
        code.filter(|code| code.len() <= 64 && code.bytes().all(|b| b.is_ascii_lowercase() || b == b'_'));
    let code = match &code {
        Some(code) => code,
        None if told.code == ErrorCode::AUTH_REQUIRED => "agent_not_signed_in",
        None => "agent_error",
    };
    RunError::new(code, error_text(told))
}
