//! A conversation with an agent that is ready: turns, and the time between them. One loop puts everything that can
//! happen into one order. It writes while it reads, and it stops reading while the session cannot take more updates.
//!
//! Every message that we send has a UUID, and the agent reports what becomes of it. A turn is over when all messages
//! sent for it are settled. So no result can be mistaken for that of another message, even if the agent has started a
//! turn on its own.

use qd_link::{AgentOutput, LinkClosed};
use qd_protocol::RunId;
use qd_protocol::event::RunError;
use qd_protocol::link::{TurnOutcome, TurnUpdate};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::io::{AsyncRead, AsyncWrite};

use super::asks::{ClaudeApprovalRequest, ClaudeAsk, unattended_answer};
use super::event_decoder::ClaudeEventDecoder;
use super::messages::{self, ClaudeCommandState, ClaudeMessage, ClaudeTurnResult};
use super::prompt_content;
use super::turn::{ClaudePendingPrompt, ClaudeSteerOutcome, ClaudeTurn};
use crate::emit::{
    EmitFuture, emit_late, emit_late_and_notices, left_out_notice, new_conversation_notice, wait_for_emit,
};
use crate::line_transport::{LineTransport, log_ignored_line};
use crate::mode_guard::{MODE_UNAVAILABLE, ModeGuard, ModeReaction};
use crate::stdio_agent::StdioConversation;
use crate::turn::{DriverPrompt, DriverSteer, DriverTurn};
use crate::turn_state::{OpenAsk, TurnEvent};

/// A conversation with one Claude Code process.
pub(crate) struct ClaudeConversation<R, W> {
    lines: LineTransport<R, W>,
    session: String,
    decoder: ClaudeEventDecoder,
    modes: ModeGuard,
    /// Requests that switch the mode back, unanswered: their ids and modes.
    pending_modes: Vec<(String, String)>,
    steers: bool,
    /// Whether the agent reports what becomes of messages. Versions that do report it before any other output of a
    /// turn.
    reports_lifecycle: bool,
    /// The number of control requests sent so far, used for their ids.
    last_request: u64,
    /// The run that output between turns belongs to.
    last_run: Option<RunId>,
    /// Where output between turns goes. Known from the first call of [`Self::idle`].
    output: Option<AgentOutput>,
    /// Output between turns that is being sent. Kept here so that it is not lost when the next turn begins.
    late_output: Option<EmitFuture<'static>>,
    /// A notice that the next turn emits first.
    first_notice: Option<String>,
}

impl<R: AsyncRead + Unpin, W: AsyncWrite + Unpin> ClaudeConversation<R, W> {
    /// Takes over the lines after the handshake. `resume_failure` is why the old conversation could not be resumed.
    pub(super) fn new(
        lines: LineTransport<R, W>,
        session: String,
        decoder: ClaudeEventDecoder,
        modes: ModeGuard,
        steers: bool,
        resume_failure: Option<String>,
    ) -> Self {
        Self {
            lines,
            session,
            decoder,
            modes,
            pending_modes: Vec::new(),
            steers,
            reports_lifecycle: false,
            last_request: 0,
            last_run: None,
            output: None,
            late_output: None,
            first_notice: resume_failure.map(new_conversation_notice),
        }
    }
}

impl<R, W> StdioConversation for ClaudeConversation<R, W>
where
    R: AsyncRead + Unpin + Send + 'static,
    W: AsyncWrite + Unpin + Send + 'static,
{
    fn session_id(&self) -> Option<String> {
        Some(self.session.clone())
    }

    /// Runs one turn, from the prompt to the agent's last result. Returns `None` if the agent has exited.
    async fn turn(
        &mut self,
        turn: &DriverTurn<'_>,
        prompt: &DriverPrompt,
    ) -> Result<Option<TurnOutcome>, LinkClosed> {
        if turn.is_cancelled() {
            return Ok(Some(TurnOutcome::cancelled()));
        }
        let uuid = match messages::random_uuid() {
            Ok(uuid) => uuid,
            Err(cause) => return Ok(Some(TurnOutcome::failed(randomness_error(cause)))),
        };
        let previous_run = self.last_run.replace(turn.run.clone());
        let (content, left_out) = prompt_content::content_blocks(prompt);
        let message = messages::user_message(&uuid, content);
        let mut open_turn = ClaudeTurn::new(turn, uuid);
        match self.modes.mode_before_turn(prompt.mode.as_deref()) {
            Ok(None) => self.lines.queue_message(&message),
            Ok(Some(mode)) => {
                let request_id = self.request_mode(&mode);
                open_turn.prompt_after_mode = Some(ClaudePendingPrompt { request_id, mode, message });
            }
            Err(error) => return Ok(Some(TurnOutcome::failed(error))),
        }
        let notices =
            self.first_notice.take().into_iter().chain(left_out.into_iter().map(left_out_notice)).collect();
        open_turn.state.emitting =
            Some(Box::pin(emit_late_and_notices(turn, self.late_output.take(), notices)));
        loop {
            let steerable = self.steers && open_turn.takes_steers();
            let message = next_message(&mut self.lines, open_turn.state.is_listening());
            match open_turn.state.next_event(!open_turn.cancelled, steerable, message).await? {
                // The agent does not have the prompt yet.
                TurnEvent::CancelRequested if open_turn.prompt_after_mode.is_some() => {
                    return Ok(Some(TurnOutcome::cancelled()));
                }
                TurnEvent::CancelRequested => self.cancel(&mut open_turn),
                TurnEvent::Answered(id, answer) => {
                    self.lines.queue_message(&messages::control_response(&id, answer));
                }
                TurnEvent::Steer(steer) => self.send_steer(&mut open_turn, steer),
                TurnEvent::Message(None) => return Ok(None),
                TurnEvent::Message(Some(message)) => {
                    self.handle_message(&mut open_turn, previous_run.as_ref(), message).await?;
                    if let Some(outcome) = open_turn.take_outcome() {
                        self.deny_open_asks(&mut open_turn);
                        return Ok(Some(outcome));
                    }
                }
                TurnEvent::Nothing => {}
            }
        }
    }

    /// Serves the agent between turns. Output belongs to the previous run, and asks are denied. Returns when the agent
    /// has exited. Cancel safe.
    async fn idle(&mut self, output: &AgentOutput) {
        self.output = Some(output.clone());
        loop {
            let listening = self.late_output.is_none();
            tokio::select! {
                biased;
                // The result is ignored: a session that has let go of its agent does not want late output.
                _sent = wait_for_emit(&mut self.late_output) => self.late_output = None,
                message = next_message(&mut self.lines, listening) => match message {
                    Some(message) => self.handle_idle_message(message),
                    None => return,
                },
            }
        }
    }

    fn close_stdin(self) -> impl AsyncRead + Unpin + Send {
        self.lines.close_stdin()
    }
}

impl<R: AsyncRead + Unpin, W: AsyncWrite + Unpin> ClaudeConversation<R, W> {
    /// Asks the agent to stop and denies its open asks.
    fn cancel(&mut self, open_turn: &mut ClaudeTurn<'_>) {
        open_turn.cancelled = true;
        self.interrupt();
        // This comes after the interrupt; otherwise the agent would continue with the denial.
        self.deny_open_asks(open_turn);
    }

    /// Denies all open asks. Nobody will answer them, and a background task would wait for ever.
    fn deny_open_asks(&mut self, open_turn: &mut ClaudeTurn<'_>) {
        for open in open_turn.state.close_all_asks() {
            self.lines.queue_message(&messages::control_response(&open.id, unattended_answer()));
        }
    }

    /// Interrupts the agent. Queued messages are cancelled too; otherwise they would start as soon as the agent has
    /// stopped.
    fn interrupt(&mut self) {
        self.send_control_request(json!({"subtype": "interrupt", "cancel_queued": true}));
    }

    /// Asks the agent to switch to a mode. Returns the id of the request.
    fn request_mode(&mut self, mode: &str) -> String {
        self.send_control_request(json!({"subtype": "set_permission_mode", "mode": mode}))
    }

    /// Sends a control request and returns its id. Few responses are needed: lifecycle reports and results say more.
    fn send_control_request(&mut self, request: Value) -> String {
        self.last_request += 1;
        let id = format!("qd-{}", self.last_request);
        self.lines.queue_message(&messages::control_request(&id, request));
        id
    }

    /// Sends a steer as another message without priority. While a tool runs or waits for permission, the agent takes it
    /// into the turn along with the tool's result. While the model is writing, it follows when that is over, and
    /// nothing is cut off.
    fn send_steer(&mut self, open_turn: &mut ClaudeTurn<'_>, steer: DriverSteer) {
        // Without a UUID its outcome cannot be tracked. The steer then counts as missed and runs later.
        let Ok(uuid) = messages::random_uuid() else { return };
        self.lines.queue_message(&messages::user_message(&uuid, vec![messages::text_block(&steer.text)]));
        open_turn.add_steer(uuid, steer.number);
    }

    /// Handles one message during a turn. Output before the turn has begun belongs to the previous run.
    async fn handle_message(
        &mut self,
        open_turn: &mut ClaudeTurn<'_>,
        previous_run: Option<&RunId>,
        message: ClaudeMessage,
    ) -> Result<(), LinkClosed> {
        match message {
            ClaudeMessage::Lifecycle { uuid, state } => {
                self.reports_lifecycle = true;
                let steer_outcomes = open_turn.update_message(&uuid, state);
                report_steers(open_turn.state.turn, steer_outcomes).await?;
                // The agent may have missed an interrupt that reached it before it started on this message.
                if state == ClaudeCommandState::Started
                    && open_turn.cancelled
                    && open_turn.is_own_message(&uuid)
                {
                    self.interrupt();
                }
            }
            ClaudeMessage::Result(result) => {
                let usage = self.decoder.count_result(&result);
                if !open_turn.is_ended_by(&result, self.reports_lifecycle) {
                    self.emit(open_turn, previous_run, usage);
                    return Ok(());
                }
                for update in usage {
                    open_turn.state.turn.emit(update).await?;
                }
                let steer_outcomes = open_turn.apply_result(&result, self.reports_lifecycle);
                report_steers(open_turn.state.turn, steer_outcomes).await?;
                if open_turn.has_failed() {
                    // Steers that wait for a failed turn are called back; they run later as prompts.
                    for uuid in open_turn.waiting_steers() {
                        self.send_control_request(
                            json!({"subtype": "cancel_async_message", "message_uuid": uuid}),
                        );
                    }
                }
            }
            ClaudeMessage::QuotaExhausted { resets_at } => open_turn.quota_resets_at = resets_at,
            ClaudeMessage::ControlRequest { id, request } => self.open_ask(open_turn, id, &request),
            ClaudeMessage::ControlCancelled { id } => {
                for ask in open_turn.state.close_ask(&id).into_iter().flat_map(|open| open.ask_ids) {
                    open_turn.state.turn.withdraw_ask(&ask).await;
                }
            }
            ClaudeMessage::ControlResponse { id, answer } if open_turn.awaits_mode(&id) => {
                self.handle_mode_response(open_turn, answer);
            }
            ClaudeMessage::ControlResponse { id, answer } if self.is_pending_mode(&id) => {
                if let Some(error) = self.handle_switch_back_response(&id, answer) {
                    open_turn.policy_error = Some(error);
                    self.cancel(open_turn);
                }
            }
            // The response to an interrupt lists the messages that were dropped.
            ClaudeMessage::ControlResponse { answer: Ok(answer), .. } => {
                for uuid in answer["cancelled"].as_array().into_iter().flatten().filter_map(Value::as_str) {
                    let steer_outcomes = open_turn.update_message(uuid, ClaudeCommandState::Cancelled);
                    report_steers(open_turn.state.turn, steer_outcomes).await?;
                }
            }
            message => {
                self.update_session_id(&message);
                let mut updates = self.guard_mode(&message);
                updates.extend(match self.previous_run_target(open_turn, previous_run) {
                    Some(_) => self.decoder.decode_between_turns(message),
                    None => self.decoder.decode(message),
                });
                self.emit(open_turn, previous_run, updates);
            }
        }
        Ok(())
    }

    /// Sends the prompt once the agent is in its mode, or fails the turn.
    fn handle_mode_response(&mut self, open_turn: &mut ClaudeTurn<'_>, answer: Result<Value, String>) {
        let Some(ClaudePendingPrompt { mode, message, .. }) = open_turn.prompt_after_mode.take() else {
            return;
        };
        match answer {
            Ok(_) => {
                self.modes.record_mode(&mode);
                self.lines.queue_message(&message);
            }
            Err(why) => {
                let message = format!("the agent refused its mode `{mode}`: {why}");
                open_turn.fail_unsent(RunError::new(MODE_UNAVAILABLE, message));
            }
        }
    }

    fn is_pending_mode(&self, request_id: &str) -> bool {
        self.pending_modes.iter().any(|(id, _)| id == request_id)
    }

    /// Handles the response to a request that switches the mode back. Returns an error if the agent refuses.
    fn handle_switch_back_response(&mut self, id: &str, answer: Result<Value, String>) -> Option<RunError> {
        let at = self.pending_modes.iter().position(|(pending, _)| pending == id)?;
        let (_, mode) = self.pending_modes.swap_remove(at);
        match answer {
            Ok(_) => {
                self.modes.record_mode(&mode);
                None
            }
            Err(why) => Some(self.modes.record_refusal("mode", &why)),
        }
    }

    /// Switches the agent back from a mode that it must not be in, and returns what the session is told about its mode.
    fn guard_mode(&mut self, message: &ClaudeMessage) -> Vec<TurnUpdate> {
        let ClaudeMessage::System { line, .. } = message else { return Vec::new() };
        let Some(mode) = line["permissionMode"].as_str() else { return Vec::new() };
        let ModeReaction { update, switch_back_to } = self.modes.judge_report(mode);
        if let Some(back) = switch_back_to {
            let id = self.request_mode(&back);
            self.pending_modes.push((id, back));
        }
        update.into_iter().collect()
    }

    fn emit(&self, open_turn: &mut ClaudeTurn<'_>, previous_run: Option<&RunId>, updates: Vec<TurnUpdate>) {
        match self.previous_run_target(open_turn, previous_run) {
            Some((output, run)) if !updates.is_empty() => {
                open_turn.state.emitting = Some(Box::pin(emit_late(output.clone(), run.clone(), updates)));
            }
            _ => open_turn.state.emit(updates),
        }
    }

    /// Where output goes that arrives before this turn has begun: to the previous run, if there is one.
    fn previous_run_target<'a>(
        &'a self,
        open_turn: &ClaudeTurn<'_>,
        previous_run: Option<&'a RunId>,
    ) -> Option<(&'a AgentOutput, &'a RunId)> {
        self.output.as_ref().zip(previous_run).filter(|_| self.reports_lifecycle && !open_turn.prompt_started)
    }

    fn open_ask(&mut self, open_turn: &mut ClaudeTurn<'_>, id: String, request: &Value) {
        let Some(approval) = self.parse_approval_request(&id, request) else { return };
        if open_turn.cancelled {
            self.lines.queue_message(&messages::control_response(&id, unattended_answer()));
            return;
        }
        let plan = self.decoder.plan_for(&approval.tool_name);
        match ClaudeAsk::from_request(approval, plan) {
            Ok(ask) => {
                let open = OpenAsk { id, ask_ids: ask.ask_ids(), cancel_answer: () };
                open_turn.state.ask(open, Box::pin(ask.ask_and_wait(open_turn.state.turn)));
            }
            Err(cause) => {
                self.lines.queue_message(&messages::control_error(&id, &randomness_error(cause).message))
            }
        }
    }

    /// Parses a request to use a tool. Any other request is refused.
    fn parse_approval_request(&mut self, id: &str, request: &Value) -> Option<ClaudeApprovalRequest> {
        let reason = match request["subtype"].as_str() {
            Some("can_use_tool") => match ClaudeApprovalRequest::deserialize(request) {
                Ok(approval) => return Some(approval),
                Err(cause) => format!("the request cannot be read: {cause}"),
            },
            Some(subtype) => format!("{subtype} is not supported"),
            None => "a request without a subtype is not supported".to_owned(),
        };
        self.lines.queue_message(&messages::control_error(id, &reason));
        None
    }

    /// Handles one message between turns.
    fn handle_idle_message(&mut self, message: ClaudeMessage) {
        let updates: Vec<TurnUpdate> = match message {
            ClaudeMessage::Lifecycle { .. } => {
                self.reports_lifecycle = true;
                return;
            }
            ClaudeMessage::ControlRequest { id, request } => {
                if self.parse_approval_request(&id, &request).is_some() {
                    self.lines.queue_message(&messages::control_response(&id, unattended_answer()));
                }
                return;
            }
            ClaudeMessage::Result(result) => {
                let usage = self.decoder.count_result(&result);
                usage.into_iter().chain(failure_notice(&result)).collect()
            }
            // If the agent has refused to switch its mode back, the next turn fails.
            ClaudeMessage::ControlResponse { id, answer } => {
                let _error: Option<RunError> = self.handle_switch_back_response(&id, answer);
                return;
            }
            message => {
                self.update_session_id(&message);
                let mode = self.guard_mode(&message);
                mode.into_iter().chain(self.decoder.decode_between_turns(message)).collect()
            }
        };
        // Output before the first turn belongs to no run and is dropped.
        if let Some((output, run)) =
            self.output.clone().zip(self.last_run.clone()).filter(|_| !updates.is_empty())
        {
            self.late_output = Some(Box::pin(emit_late(output, run, updates)));
        }
    }

    /// Tracks the agent's session id, which can change: some of the agent's own commands start a new conversation.
    fn update_session_id(&mut self, message: &ClaudeMessage) {
        if let ClaudeMessage::System { subtype, line } = message
            && subtype == "init"
            && let Some(session) = line["session_id"].as_str()
            && session != self.session
        {
            session.clone_into(&mut self.session);
        }
    }
}

/// Returns the agent's next message, or `None` at the end of its stream. Cancel safe.
pub(super) async fn next_message<R, W>(
    lines: &mut LineTransport<R, W>,
    listening: bool,
) -> Option<ClaudeMessage>
where
    R: AsyncRead + Unpin,
    W: AsyncWrite + Unpin,
{
    loop {
        let line = lines.next_line(listening).await?;
        match ClaudeMessage::parse(&line) {
            Some(message) => return Some(message),
            None => log_ignored_line(&line),
        }
    }
}

async fn report_steers(
    turn: &DriverTurn<'_>,
    outcomes: impl IntoIterator<Item = ClaudeSteerOutcome>,
) -> Result<(), LinkClosed> {
    for outcome in outcomes {
        match outcome {
            ClaudeSteerOutcome::Taken(steer) => turn.report_steer_taken(steer).await?,
            ClaudeSteerOutcome::Missed(steer) => turn.report_steer_missed(steer).await?,
        }
    }
    Ok(())
}

/// The notice about a turn that the agent started on its own and that failed.
fn failure_notice(result: &ClaudeTurnResult) -> Option<TurnUpdate> {
    let aborted = result.terminal_reason.as_deref().is_some_and(|reason| reason.starts_with("aborted"));
    let why = result.errors.first().or(result.result.as_ref()).filter(|_| result.is_error && !aborted)?;
    Some(TurnUpdate::notice(format!("the agent continued on its own and failed: {why}")))
}

fn randomness_error(cause: getrandom::Error) -> RunError {
    RunError::new("agent_error", format!("cannot generate a random id for a message: {cause}"))
}
