//! A conversation with an agent that is ready: turns, and the time between them. One loop puts everything that can
//! happen into one order. It writes while it reads, and it stops reading while the session cannot take more updates.
//!
//! Only the types of the `agent-client-protocol` crate are used on this side, not its connection: its queues are
//! unbounded by design, and it answers lines that are not messages.

use std::collections::VecDeque;

use agent_client_protocol::v1::schema::{
    CancelNotification, CancelRequestNotification, CreateElicitationRequest, PromptCapabilities,
    PromptRequest, RequestPermissionRequest, SessionId, SessionNotification, SessionUpdate,
};
use agent_client_protocol::{
    Error, ErrorCode, JsonRpcMessage, RawJsonRpcId, RawJsonRpcMessage, RawJsonRpcNotification,
    RawJsonRpcParams, RawJsonRpcRequest, RawJsonRpcResponse,
};
use qd_link::{AgentOutput, LinkClosed};
use qd_protocol::RunId;
use qd_protocol::event::RunError;
use qd_protocol::link::{TurnOutcome, TurnUpdate};
use qd_protocol::manifest::{QuestionMethod, RefusalRule, SteerMethod};
use qd_protocol::worker::META_KEY;
use serde_json::{Value, json};
use tokio::io::{AsyncRead, AsyncWrite};

use super::asks::{AcpApprovalRequest, AcpAsk, AcpAskOutcome};
use super::client_service::{AcpClientOperation, AcpClientService, AcpRequestHandling};
use super::connection::AcpConnection;
use super::event_decoder::AcpEventDecoder;
use super::handshake::{AcpHandshakeResult, error_text};
use super::prompt_content;
use super::settings_guard::{AcpSettingRequest, AcpSettingsGuard};
use super::tool_calls::AcpToolPermission;
use super::turn::{AcpPendingPrompt, AcpTurn};
use super::turn_end::turn_outcome;
use crate::emit::{
    EmitFuture, emit_late, emit_late_and_notices, left_out_notice, new_conversation_notice, wait_for_emit,
};
use crate::mode_guard::MODE_UNAVAILABLE;
use crate::stdio_agent::StdioConversation;
use crate::tool_gateway::ToolGateway;
use crate::turn::{DriverPrompt, DriverSteer, DriverTurn};
use crate::turn_state::{OpenAsk, TurnEvent};

/// The method for prompts. Some agents also take steers through it.
const PROMPT_METHOD: &str = "session/prompt";

/// A conversation with one ACP agent.
pub(crate) struct AcpConversation<R, W> {
    connection: AcpConnection<R, W>,
    session: SessionId,
    prompt_capabilities: PromptCapabilities,
    service: AcpClientService,
    decoder: AcpEventDecoder,
    guard: AcpSettingsGuard,
    /// Whether the last prompt was a command of the agent's own, which may have changed its settings.
    was_command: bool,
    /// Requests that change a setting back, unanswered.
    pending_settings: Vec<(RawJsonRpcId, AcpSettingRequest)>,
    /// The run that output between turns belongs to.
    last_run: Option<RunId>,
    /// Output between turns that is being sent. Kept here so that it is not lost when the next turn begins.
    late_output: Option<EmitFuture<'static>>,
    /// A notice that the next turn emits first.
    first_notice: Option<String>,
    /// Whether the agent reads our `_meta` key, such as the reason of a denial.
    reads_our_meta: bool,
    /// Whether the cancel of the turn before crossed its end. The agent may take it for a cancel of the next prompt.
    cancel_crossed_end: bool,
    /// Reasons of denials that could not be passed on at the time; they go with the next prompt.
    unsent_reasons: Vec<String>,
    /// The gateway to our tools, which is open as long as the agent lives.
    _tool_gateway: Option<ToolGateway>,
}

impl<R: AsyncRead + Unpin, W: AsyncWrite + Unpin> AcpConversation<R, W> {
    /// Takes over the connection after the handshake.
    pub(super) fn new(
        connection: AcpConnection<R, W>,
        handshake: AcpHandshakeResult,
        service: AcpClientService,
    ) -> Self {
        let reads_our_meta =
            handshake.capabilities.meta.as_ref().is_some_and(|meta| meta.contains_key(META_KEY));
        Self {
            connection,
            session: handshake.session,
            prompt_capabilities: handshake.capabilities.prompt_capabilities,
            service,
            decoder: handshake.decoder,
            guard: handshake.guard,
            was_command: false,
            pending_settings: Vec::new(),
            last_run: None,
            late_output: None,
            first_notice: handshake.resume_failure.map(new_conversation_notice),
            reads_our_meta,
            cancel_crossed_end: false,
            unsent_reasons: Vec::new(),
            _tool_gateway: None,
        }
    }

    /// Keeps the gateway open until the conversation ends.
    pub(super) fn hold_tool_gateway(&mut self, gateway: Option<ToolGateway>) {
        self._tool_gateway = gateway;
    }
}

impl<R, W> StdioConversation for AcpConversation<R, W>
where
    R: AsyncRead + Unpin + Send + 'static,
    W: AsyncWrite + Unpin + Send + 'static,
{
    fn session_id(&self) -> Option<String> {
        Some(self.session.to_string())
    }

    /// Runs one turn, from the prompt to the agent's response. Returns `None` if the agent has exited.
    async fn turn(
        &mut self,
        turn: &DriverTurn<'_>,
        prompt: &DriverPrompt,
    ) -> Result<Option<TurnOutcome>, LinkClosed> {
        if turn.is_cancelled() {
            return Ok(Some(TurnOutcome::cancelled()));
        }
        self.last_run = Some(turn.run.clone());
        self.decoder.begin_turn();
        let reasons = std::mem::take(&mut self.unsent_reasons);
        let (mut request, left_out) =
            prompt_content::prompt_request(self.session.clone(), &self.prompt_capabilities, prompt, &reasons);
        prompt_content::escape_first_text(&mut request, |text| self.decoder.escape_unknown_command(text));
        let mut open_turn = AcpTurn::new(turn);
        let after_command =
            std::mem::replace(&mut self.was_command, prompt.text.trim_start().starts_with('/'));
        match self.guard.requests_before_turn(prompt.mode.as_deref(), after_command) {
            Ok(settings) => self.send_settings_and_prompt(&mut open_turn, settings, request),
            Err(error) => return Ok(Some(TurnOutcome::failed(error))),
        }
        let notices =
            self.first_notice.take().into_iter().chain(left_out.into_iter().map(left_out_notice)).collect();
        open_turn.state.emitting =
            Some(Box::pin(emit_late_and_notices(turn, self.late_output.take(), notices)));
        loop {
            let (cancellable, listening) = (!open_turn.cancelled, open_turn.state.is_listening());
            let steerable = self.steers() && cancellable && open_turn.prompt_after_settings.is_none();
            let message = next_message(&mut self.connection, &mut self.service, listening);
            match open_turn.state.next_event(cancellable, steerable, message).await? {
                // The agent does not have the prompt yet.
                TurnEvent::CancelRequested if open_turn.prompt_after_settings.is_some() => {
                    return Ok(Some(TurnOutcome::cancelled()));
                }
                TurnEvent::CancelRequested => self.cancel(&mut open_turn),
                TurnEvent::Answered(id, outcome) => self.send_ask_outcome(&mut open_turn, id, outcome),
                TurnEvent::Steer(steer) => self.send_steer(&mut open_turn, steer).await?,
                TurnEvent::Message(None) => return Ok(None),
                TurnEvent::Message(Some(message)) => {
                    if let Some(outcome) = self.handle_message(&mut open_turn, message).await? {
                        return Ok(Some(outcome));
                    }
                }
                TurnEvent::Nothing => {}
            }
        }
    }

    /// Serves the agent between turns. Output belongs to the previous run, asks are cancelled, and files are served.
    /// Returns when the agent has exited. Cancel safe.
    async fn idle(&mut self, output: &AgentOutput) {
        loop {
            let listening = self.late_output.is_none();
            tokio::select! {
                biased;
                // The result is ignored: a session that has let go of its agent does not want late output.
                _sent = wait_for_emit(&mut self.late_output) => self.late_output = None,
                message = next_message(&mut self.connection, &mut self.service, listening) => match message {
                    Some(message) => self.handle_idle_message(output, message),
                    None => return,
                },
            }
        }
    }

    fn close_stdin(self) -> impl AsyncRead + Unpin + Send {
        self.connection.hang_up()
    }
}

impl<R: AsyncRead + Unpin, W: AsyncWrite + Unpin> AcpConversation<R, W> {
    /// Sends the first of the requests for settings, or the prompt if there is none left.
    fn send_settings_and_prompt(
        &mut self,
        open_turn: &mut AcpTurn<'_>,
        settings: VecDeque<AcpSettingRequest>,
        prompt: PromptRequest,
    ) {
        let Some(first) = settings.front() else { return self.send_prompt(open_turn, prompt) };
        let id = self.connection.request_by_name(first.method, first.params.clone());
        open_turn.prompt_after_settings = Some(AcpPendingPrompt { id, settings, prompt });
    }

    fn send_prompt(&mut self, open_turn: &mut AcpTurn<'_>, request: PromptRequest) {
        open_turn.open_prompts.push(self.connection.request(&request));
        open_turn.prompt_to_repeat = std::mem::take(&mut self.cancel_crossed_end).then_some(request);
    }

    /// Asks the agent to stop and cancels everything that it waits for.
    fn cancel(&mut self, open_turn: &mut AcpTurn<'_>) {
        open_turn.mark_cancelled();
        self.connection.notify(&CancelNotification::new(self.session.clone()));
        for open in open_turn.state.close_all_asks() {
            self.connection.respond(open.id, open.cancel_answer);
        }
    }

    fn steer_method(&self) -> &SteerMethod {
        &self.decoder.profile().steer
    }

    fn steers(&self) -> bool {
        *self.steer_method() != SteerMethod::None
    }

    async fn send_steer(
        &mut self,
        open_turn: &mut AcpTurn<'_>,
        steer: DriverSteer,
    ) -> Result<(), LinkClosed> {
        match self.steer_method().clone() {
            SteerMethod::None | SteerMethod::Native => {
                open_turn.state.turn.report_steer_missed(steer.number).await
            }
            SteerMethod::Request(method) => {
                let id = self.connection.request_by_name(&method, self.text_prompt_params(&steer.text));
                open_turn.pending_steers.push((id, steer.number));
                Ok(())
            }
            // The agent answers both this and the earlier prompt when the turn is over.
            SteerMethod::Prompt => {
                let id = self.connection.request_by_name(PROMPT_METHOD, self.text_prompt_params(&steer.text));
                open_turn.open_prompts.push(id);
                open_turn.state.turn.report_steer_taken(steer.number).await
            }
            SteerMethod::Pull(_) => {
                open_turn.pullable_steers.push_back(steer);
                Ok(())
            }
        }
    }

    fn text_prompt_params(&self, text: &str) -> Value {
        let escaped = self.decoder.escape_unknown_command(text);
        let text = escaped.as_deref().unwrap_or(text);
        json!({"sessionId": self.session, "prompt": [{"type": "text", "text": text}]})
    }

    /// Sends the agent the outcome of an ask.
    fn send_ask_outcome(&mut self, open_turn: &mut AcpTurn<'_>, id: RawJsonRpcId, outcome: AcpAskOutcome) {
        match outcome {
            AcpAskOutcome::Answer(answer) => self.connection.respond(id, Ok(answer)),
            AcpAskOutcome::ToolAllowed { answer, argument } => {
                open_turn.allowed_arguments.push(argument);
                self.connection.respond(id, Ok(answer));
            }
            AcpAskOutcome::ToolDenied { answer, tool, reason } => {
                open_turn.tool_refused = true;
                self.connection.respond(id, Ok(answer));
                if let Some(reason) = reason {
                    self.explain_denial(&tool, &reason);
                }
            }
            AcpAskOutcome::OperationAllowed(operation) => self.service.perform_operation(id, operation),
            AcpAskOutcome::OperationDenied(error) => self.connection.respond(id, Err(error)),
        }
    }

    /// Passes the reason of a denial to the agent. The protocol has no field for it, so it goes as a steer. If the
    /// agent cannot be steered, or ends its turn at a denial and would start a new one for the steer, the reason goes
    /// with the next prompt.
    fn explain_denial(&mut self, tool: &str, reason: &str) {
        if self.reads_our_meta {
            return;
        }
        let text = format!("{tool} was refused: {reason}");
        match self.steer_method().clone() {
            SteerMethod::Request(method)
                if self.decoder.profile().on_tool_refused == RefusalRule::Continues =>
            {
                // The response does not matter.
                let _id = self.connection.request_by_name(&method, self.text_prompt_params(&text));
            }
            _ => self.unsent_reasons.push(text),
        }
    }

    /// Handles one message during a turn. Returns the outcome if the message ended the turn.
    async fn handle_message<'t>(
        &mut self,
        open_turn: &mut AcpTurn<'t>,
        message: RawJsonRpcMessage,
    ) -> Result<Option<TurnOutcome>, LinkClosed> {
        match message {
            RawJsonRpcMessage::Response(response) if open_turn.open_prompts.contains(response.id()) => {
                open_turn.open_prompts.retain(|id| id != response.id());
                if self.repeat_prompt(open_turn, &response) {
                    return Ok(None);
                }
                let cancel_was_taken = is_cancelled_response(&response) && !open_turn.cancelled_again;
                self.cancel_crossed_end |= open_turn.cancelled && !cancel_was_taken;
                if let Some(error) = open_turn.policy_error.take() {
                    return Ok(Some(TurnOutcome::failed(error)));
                }
                let by_refusal = open_turn.tool_refused && !open_turn.cancelled;
                let outcome =
                    turn_outcome(&mut self.decoder, open_turn.state.turn, by_refusal, response).await?;
                // Steers sent as prompts are part of the turn, so it ends with the last of them.
                return Ok(open_turn.open_prompts.is_empty().then_some(outcome));
            }
            RawJsonRpcMessage::Response(response) if open_turn.awaits_setting(response.id()) => {
                return Ok(self.handle_turn_setting_response(open_turn, response));
            }
            RawJsonRpcMessage::Response(response) => {
                if let Some(error) = self.handle_setting_response(&response) {
                    open_turn.policy_error = Some(error);
                    self.cancel(open_turn);
                }
                if let Some(at) = open_turn.pending_steers.iter().position(|(id, _)| id == response.id()) {
                    let (_, number) = open_turn.pending_steers.swap_remove(at);
                    if steer_was_taken(&response) {
                        open_turn.state.turn.report_steer_taken(number).await?;
                    } else {
                        open_turn.state.turn.report_steer_missed(number).await?;
                    }
                }
            }
            RawJsonRpcMessage::Notification(notification) => match self.parse_notification(notification) {
                Some(AcpNotification::Update(update)) => {
                    let updates = self.decode_and_guard(update);
                    // How full the context is can also be reported by an agent that is just stopping.
                    if updates.iter().any(|update| !matches!(update, TurnUpdate::Context(_))) {
                        self.cancel_again(open_turn);
                    }
                    open_turn.state.emit(updates);
                }
                Some(AcpNotification::RequestCancelled(id)) => {
                    if let Some(ask) = open_turn.state.close_ask(&id) {
                        self.connection.respond(id, Err(Error::request_cancelled()));
                        for ask in &ask.ask_ids {
                            open_turn.state.turn.withdraw_ask(ask).await;
                        }
                    }
                }
                None => {}
            },
            RawJsonRpcMessage::Request(request) if self.is_steer_pull(&request) => {
                let mut texts = Vec::new();
                while let Some(DriverSteer { number, text }) = open_turn.pullable_steers.pop_front() {
                    open_turn.state.turn.report_steer_taken(number).await?;
                    texts.push(text);
                }
                self.connection.respond(request.id, Ok(json!({ "messages": texts })));
            }
            RawJsonRpcMessage::Request(request) => {
                if let Some((id, wanted)) = self.serve_request(request) {
                    self.open_ask(open_turn, id, wanted);
                }
                self.cancel_again(open_turn);
            }
        }
        Ok(None)
    }

    /// Sends the prompt again if the agent has applied the stop of an earlier run to it: it reports a cancel that nobody
    /// requested in this turn, before any output.
    fn repeat_prompt(&mut self, open_turn: &mut AcpTurn<'_>, response: &RawJsonRpcResponse) -> bool {
        let Some(request) = open_turn.prompt_to_repeat.take() else { return false };
        let is_stale = is_cancelled_response(response) && !open_turn.cancelled && !self.decoder.has_output();
        if is_stale {
            open_turn.open_prompts.push(self.connection.request(&request));
        }
        is_stale
    }

    /// Goes on towards the prompt once the agent has granted a setting. Returns the outcome of the turn if it refuses.
    fn handle_turn_setting_response(
        &mut self,
        open_turn: &mut AcpTurn<'_>,
        response: RawJsonRpcResponse,
    ) -> Option<TurnOutcome> {
        let AcpPendingPrompt { mut settings, prompt, .. } = open_turn.prompt_after_settings.take()?;
        let setting = settings.pop_front()?;
        match response {
            RawJsonRpcResponse::Result { .. } => {
                self.guard.record_granted(&setting);
                self.send_settings_and_prompt(open_turn, settings, prompt);
                None
            }
            RawJsonRpcResponse::Error { error, .. } => {
                let why = error_text(&error.into_acp_error());
                let message = format!("the agent refused {}: {why}", setting.description());
                Some(TurnOutcome::failed(RunError::new(MODE_UNAVAILABLE, message)))
            }
        }
    }

    /// Handles the response to a request that changes a setting back. Returns an error if the agent refuses.
    fn handle_setting_response(&mut self, response: &RawJsonRpcResponse) -> Option<RunError> {
        let at = self.pending_settings.iter().position(|(id, _)| id == response.id())?;
        let (_, request) = self.pending_settings.swap_remove(at);
        match response {
            RawJsonRpcResponse::Result { .. } => {
                self.guard.record_granted(&request);
                None
            }
            RawJsonRpcResponse::Error { error, .. } => {
                Some(self.guard.record_refused(&request, &error_text(&error.clone().into_acp_error())))
            }
        }
    }

    /// Decodes an update. Changes settings back that the agent must not have changed.
    fn decode_and_guard(&mut self, update: SessionUpdate) -> Vec<TurnUpdate> {
        let (mut updates, mut requests) = self.guard.judge_report(&update);
        for update in self.decode_update(update) {
            let (mode_updates, mode_requests) = match &update {
                TurnUpdate::ToolFinished { name, is_error: false, .. } => self.guard.judge_tool(name),
                _ => (Vec::new(), Vec::new()),
            };
            updates.push(update);
            updates.extend(mode_updates);
            requests.extend(mode_requests);
        }
        for request in requests {
            let id = self.connection.request_by_name(request.method, request.params.clone());
            self.pending_settings.push((id, request));
        }
        updates
    }

    fn decode_update(&mut self, update: SessionUpdate) -> Vec<TurnUpdate> {
        let Self { decoder, service, .. } = self;
        decoder.decode(update, &|terminal| service.terminal_output(terminal))
    }

    /// Whether the request is the agent pulling its steers.
    fn is_steer_pull(&self, request: &RawJsonRpcRequest) -> bool {
        matches!(self.steer_method(), SteerMethod::Pull(method) if **method == *request.method)
    }

    fn cancel_again(&mut self, open_turn: &mut AcpTurn<'_>) {
        if open_turn.should_cancel_again() {
            self.connection.notify(&CancelNotification::new(self.session.clone()));
        }
    }

    fn open_ask<'t>(&mut self, open_turn: &mut AcpTurn<'t>, id: RawJsonRpcId, request: AcpApprovalRequest) {
        let cancel_answer = request.cancel_answer();
        let (updates, ask) = match request {
            AcpApprovalRequest::Permission(request) => {
                let RequestPermissionRequest { tool_call, options, meta, .. } = *request;
                let Self { decoder, service, .. } = self;
                let AcpToolPermission { updates, tool, title, input } = decoder
                    .record_permission_request(tool_call, &|terminal| service.terminal_output(terminal));
                let questions = match decoder.profile().questions {
                    QuestionMethod::Permission => AcpAsk::questions(&input, &options),
                    QuestionMethod::Form => None,
                };
                let ask = questions
                    .unwrap_or_else(|| AcpAsk::permission(tool, title, input, &options, meta.as_ref()));
                (updates, ask)
            }
            AcpApprovalRequest::Form(request) => (Vec::new(), AcpAsk::form(*request)),
            AcpApprovalRequest::Operation(operation) if open_turn.cancelled => {
                return self
                    .connection
                    .respond(id, Err(operation_refused(&operation, "the turn is being stopped")));
            }
            AcpApprovalRequest::Operation(operation) => {
                let argument = self.service.root().join(operation.argument());
                let is_allowed = |allowed: &String| {
                    *allowed == operation.argument() || self.service.root().join(allowed) == argument
                };
                if open_turn.allowed_arguments.iter().any(is_allowed) {
                    return self.service.perform_operation(id, operation);
                }
                (Vec::new(), AcpAsk::operation(operation))
            }
        };
        open_turn.state.emit(updates);
        match ask {
            Ok(_) if open_turn.cancelled => self.connection.respond(id, cancel_answer),
            Ok(ask) => {
                let open = OpenAsk { id, ask_ids: ask.ask_ids(), cancel_answer };
                open_turn.state.ask(open, Box::pin(ask.ask_and_wait(open_turn.state.turn)));
            }
            Err(error) => self.connection.respond(id, Err(error)),
        }
    }

    /// Handles one message between turns.
    fn handle_idle_message(&mut self, output: &AgentOutput, message: RawJsonRpcMessage) {
        match message {
            // If the agent has refused to change a setting back, the next turn fails.
            RawJsonRpcMessage::Response(response) => drop(self.handle_setting_response(&response)),
            RawJsonRpcMessage::Notification(notification) => {
                if let Some(AcpNotification::Update(update)) = self.parse_notification(notification) {
                    let updates = self.decode_and_guard(update);
                    // Before the first turn there is no run: then this is the replay of a resumed conversation.
                    if let Some(run) = self.last_run.clone().filter(|_| !updates.is_empty()) {
                        self.late_output = Some(Box::pin(emit_late(output.clone(), run, updates)));
                    }
                }
            }
            RawJsonRpcMessage::Request(request) if self.is_steer_pull(&request) => {
                self.connection.respond(request.id, Ok(json!({ "messages": [] })));
            }
            RawJsonRpcMessage::Request(request) => match self.serve_request(request) {
                // Nobody can be asked between turns, but reading is harmless.
                Some((id, AcpApprovalRequest::Operation(operation))) if operation.is_read_only() => {
                    self.service.perform_operation(id, operation)
                }
                Some((id, AcpApprovalRequest::Operation(operation))) => {
                    self.connection.respond(id, Err(operation_refused(&operation, "no turn is running")));
                }
                Some((id, request)) => self.connection.respond(id, request.cancel_answer()),
                None => {}
            },
        }
    }

    fn parse_notification(&self, notification: RawJsonRpcNotification) -> Option<AcpNotification> {
        let RawJsonRpcNotification { method, params } = notification;
        let params = params_value(params);
        if let Ok(notification) = SessionNotification::parse_message(&method, &params) {
            // Agents may report on their own child sessions, which no one here has asked for.
            return (notification.session_id == self.session)
                .then_some(AcpNotification::Update(notification.update));
        }
        let cancelled = CancelRequestNotification::parse_message(&method, &params).ok()?;
        Some(AcpNotification::RequestCancelled(cancelled.request_id.into()))
    }

    /// Starts to serve a request of the agent, or refuses it. Returns the requests that need a decision in the turn.
    fn serve_request(&mut self, request: RawJsonRpcRequest) -> Option<(RawJsonRpcId, AcpApprovalRequest)> {
        let RawJsonRpcRequest { id, method, params } = request;
        let params = params_value(params);
        let wanted = if RequestPermissionRequest::matches_method(&method) {
            RequestPermissionRequest::parse_message(&method, &params)
                .map(|request| AcpApprovalRequest::Permission(Box::new(request)))
        } else if CreateElicitationRequest::matches_method(&method) {
            CreateElicitationRequest::parse_message(&method, &params)
                .map(|request| AcpApprovalRequest::Form(Box::new(request)))
        } else {
            match self.service.handle_request(&id, &method, &params) {
                AcpRequestHandling::NeedsApproval(operation) => Ok(AcpApprovalRequest::Operation(operation)),
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
}

/// The agent's next message; `None` if the agent has exited. Responds to requests that have been served meanwhile.
async fn next_message<R: AsyncRead + Unpin, W: AsyncWrite + Unpin>(
    connection: &mut AcpConnection<R, W>,
    service: &mut AcpClientService,
    listening: bool,
) -> Option<RawJsonRpcMessage> {
    loop {
        tokio::select! {
            biased;
            (id, served) = service.next() => connection.respond(id, served),
            message = connection.next(listening) => return message,
        }
    }
}

/// A notification from the agent that concerns us.
#[expect(
    clippy::large_enum_variant,
    reason = "it is taken apart at once, and there is one for every piece of text"
)]
enum AcpNotification {
    Update(SessionUpdate),
    /// The agent no longer waits for the response to this request of its own.
    RequestCancelled(RawJsonRpcId),
}

fn operation_refused(operation: &AcpClientOperation, why: &str) -> Error {
    Error::new(ErrorCode::INVALID_PARAMS, format!("{} is refused: {why}", operation.tool()))
}

fn params_value(params: Option<RawJsonRpcParams>) -> Value {
    params.map(RawJsonRpcParams::into_value).unwrap_or_default()
}

/// Whether the response to a prompt says that the turn was cancelled.
fn is_cancelled_response(response: &RawJsonRpcResponse) -> bool {
    matches!(response, RawJsonRpcResponse::Result { result, .. } if result["stopReason"] == "cancelled")
}

/// Our own scripted agent answers `taken`; the adapters that invented the method answer `injected`.
fn steer_was_taken(response: &RawJsonRpcResponse) -> bool {
    let RawJsonRpcResponse::Result { result, .. } = response else { return false };
    result["outcome"] == "taken" || result["outcome"] == "injected"
}
