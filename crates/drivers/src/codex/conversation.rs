//! A conversation with a server that is ready: turns, and the time between them. One loop puts everything that can
//! happen into one order. It writes while it reads, and it stops reading while the session cannot take more updates.
//!
//! A turn is over only when the server reports its end under the turn's own id. Until then a cancel stays in force: the
//! server refuses an interrupt that comes before it has begun the turn, and then runs the whole turn.

use std::collections::BTreeMap;

use qd_link::{AgentOutput, LinkClosed};
use qd_protocol::RunId;
use qd_protocol::event::RunError;
use qd_protocol::link::{TurnOutcome, TurnStopReason};
use qd_protocol::manifest::AgentModes;
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::io::{AsyncRead, AsyncWrite};

use super::asks::{CodexAsk, CodexAskOutcome};
use super::connection::{CodexConnection, CodexMessage, CodexParams, CodexRpcError};
use super::event_decoder::{CodexEventDecoder, CodexNotification, CodexOutput};
use super::handshake::CodexHandshakeResult;
use super::prompt_content;
use super::turn::{CodexTurn, sleep_until};
use super::turn_end::CodexTurnEnd;
use crate::emit::{EmitFuture, emit_late, emit_late_and_notices, left_out_notice, wait_for_emit};
use crate::mode_guard::ModeGuard;
use crate::pricing::TokenPricing;
use crate::stdio_agent::StdioConversation;
use crate::turn::{DriverPrompt, DriverSteer, DriverTurn};
use crate::turn_state::{OpenAsk, TurnEvent};

/// A conversation with one Codex server.
pub(crate) struct CodexConversation<R, W> {
    pub(super) connection: CodexConnection<R, W>,
    pub(super) thread: String,
    pub(super) decoder: CodexEventDecoder,
    modes: ModeGuard,
    model: String,
    effort: Option<String>,
    /// The turn of our thread that the server works on.
    live_turn: Option<String>,
    /// Running turns of the agents that ours has started, by thread.
    pub(super) subagent_turns: BTreeMap<String, String>,
    /// The run that output between turns belongs to.
    last_run: Option<RunId>,
    /// Output between turns that is being sent. Kept here so that it is not lost when the next turn begins.
    late_output: Option<EmitFuture<'static>>,
    /// Notices that the next turn emits first.
    first_notices: Vec<String>,
}

impl<R: AsyncRead + Unpin, W: AsyncWrite + Unpin> CodexConversation<R, W> {
    /// Takes over the connection after the handshake.
    pub(super) fn new(
        connection: CodexConnection<R, W>,
        handshake: CodexHandshakeResult,
        pricing: TokenPricing,
        modes: AgentModes,
    ) -> Self {
        let CodexHandshakeResult { thread, model, effort, notices: first_notices } = handshake;
        let decoder = CodexEventDecoder::new(thread.clone(), &model, pricing);
        let subagent_turns = BTreeMap::new();
        Self {
            connection,
            thread,
            decoder,
            modes: ModeGuard::new(modes, None),
            model,
            effort,
            live_turn: None,
            subagent_turns,
            last_run: None,
            late_output: None,
            first_notices,
        }
    }
}

impl<R, W> StdioConversation for CodexConversation<R, W>
where
    R: AsyncRead + Unpin + Send + 'static,
    W: AsyncWrite + Unpin + Send + 'static,
{
    fn session_id(&self) -> Option<String> {
        Some(self.thread.clone())
    }

    /// Runs one turn, from the prompt to its end. Returns `None` if the agent has exited.
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
        let (input, left_out) = prompt_content::turn_input(prompt);
        let mut params = json!({"threadId": self.thread, "input": input});
        match self.modes.mode_before_turn(prompt.mode.as_deref()) {
            Ok(None) => {}
            // A resumed thread may be in any mode, so it is set with each turn.
            Ok(Some(mode)) => params["collaborationMode"] = self.collaboration_mode(&mode),
            Err(error) => return Ok(Some(TurnOutcome::failed(error))),
        }
        let request = self.connection.request("turn/start", params);
        let mut open_turn = CodexTurn::new(turn, request);
        let notices = self.first_notices.drain(..).chain(left_out.into_iter().map(left_out_notice)).collect();
        open_turn.state.emitting =
            Some(Box::pin(emit_late_and_notices(turn, self.late_output.take(), notices)));
        loop {
            let listening = open_turn.state.is_listening();
            if listening && let Some(outcome) = self.take_outcome(&mut open_turn) {
                return Ok(Some(outcome));
            }
            let (cancellable, steerable) = (!open_turn.cancelled, open_turn.takes_steers());
            let message = self.connection.next(listening);
            let event = tokio::select! {
                biased;
                event = open_turn.state.next_event(cancellable, steerable, message) => event?,
                () = sleep_until(open_turn.settle_deadline) => {
                    open_turn.settle_deadline = None;
                    open_turn.clean_request = None;
                    continue;
                }
            };
            match event {
                TurnEvent::CancelRequested => self.cancel(&mut open_turn),
                TurnEvent::Answered(id, outcome) => self.send_ask_outcome(&id, outcome),
                TurnEvent::Steer(steer) => self.send_steer(&mut open_turn, steer),
                TurnEvent::Message(None) => return Ok(None),
                TurnEvent::Message(Some(message)) => self.handle_message(&mut open_turn, message).await?,
                TurnEvent::Nothing => {}
            }
        }
    }

    /// Serves the agent between turns. Output belongs to the earlier runs, and asks are declined. Returns when the
    /// agent has exited. Cancel safe.
    async fn idle(&mut self, output: &AgentOutput) {
        loop {
            let listening = self.late_output.is_none();
            tokio::select! {
                biased;
                // The result is ignored: a session that has let go of its agent does not want late output.
                _sent = wait_for_emit(&mut self.late_output) => self.late_output = None,
                message = self.connection.next(listening) => match message {
                    Some(message) => self.handle_idle_message(output, message),
                    None => return,
                },
            }
        }
    }

    fn close_stdin(self) -> impl AsyncRead + Unpin + Send {
        self.connection.close_stdin()
    }
}

impl<R: AsyncRead + Unpin, W: AsyncWrite + Unpin> CodexConversation<R, W> {
    /// The parameter that puts this and later turns into a mode. It has the model's settings too, so they are repeated.
    fn collaboration_mode(&self, mode: &str) -> Value {
        let instructions: Option<&str> = None;
        let settings = json!({"model": self.model, "reasoning_effort": self.effort, "developer_instructions": instructions});
        json!({"mode": mode, "settings": settings})
    }

    fn send_steer(&mut self, open_turn: &mut CodexTurn<'_>, steer: DriverSteer) {
        let Some(turn) = open_turn.id.clone() else { return };
        let id = self.send_steer_text(&self.thread.clone(), &turn, &steer.text);
        open_turn.pending_steers.push((id, steer.number));
    }

    fn send_steer_text(&mut self, thread: &str, turn: &str, text: &str) -> u64 {
        let params =
            json!({"threadId": thread, "expectedTurnId": turn, "input": [prompt_content::text_block(text)]});
        self.connection.request("turn/steer", params)
    }

    /// Sends the outcome of an ask. A denial has no field for its reason, so the reason goes before it as a steer, and
    /// the model reads both before it continues.
    fn send_ask_outcome(&mut self, id: &Value, outcome: CodexAskOutcome) {
        if let Some((thread, turn, reason)) = outcome.reason {
            self.send_steer_text(&thread, &turn, &format!("This was refused, for the reason: {reason}"));
        }
        self.connection.respond(id, Ok(outcome.answer));
    }

    /// Handles one message during a turn.
    async fn handle_message(
        &mut self,
        open_turn: &mut CodexTurn<'_>,
        message: CodexMessage,
    ) -> Result<(), LinkClosed> {
        match message {
            CodexMessage::Response(id, response) => self.handle_response(open_turn, id, response).await?,
            CodexMessage::Notification(method, params) => {
                let (output, notification) = self.decoder.decode(&method, &params);
                if let Some(notification) = notification {
                    self.apply_notification(open_turn, notification).await;
                }
                self.emit(open_turn, output);
            }
            CodexMessage::Request(id, method, params) => {
                match CodexAsk::from_request(&method, &params, self.decoder.tool_calls()) {
                    Ok(ask) if open_turn.cancelled => self.connection.respond(&id, Ok(ask.cancel_answer())),
                    Ok(ask) => {
                        let cancel_answer = ask.cancel_answer();
                        let open = OpenAsk { id, ask_ids: ask.ask_ids(), cancel_answer };
                        open_turn.state.ask(open, Box::pin(ask.ask_and_wait(open_turn.state.turn)));
                    }
                    Err(error) => self.connection.respond(&id, Err(error)),
                }
            }
        }
        Ok(())
    }

    async fn handle_response(
        &mut self,
        open_turn: &mut CodexTurn<'_>,
        id: u64,
        response: Result<CodexParams, CodexRpcError>,
    ) -> Result<(), LinkClosed> {
        if id == open_turn.start_request {
            match response {
                Ok(started) => self.handle_turn_named(open_turn, &started),
                Err(error) => open_turn.outcome = Some(TurnOutcome::failed(run_error(&error))),
            }
        } else if Some(id) == open_turn.interrupt_request {
            open_turn.interrupt_refused = response.is_err();
        } else if Some(id) == open_turn.list_request {
            let last = response.ok().and_then(|terminals| self.terminate_commands(open_turn, &terminals));
            open_turn.clean_request = open_turn.clean_request.and(last);
        } else if Some(id) == open_turn.clean_request {
            open_turn.clean_request = None;
        } else if let Some(at) = open_turn.pending_steers.iter().position(|(steer, _)| *steer == id) {
            let (_, number) = open_turn.pending_steers.swap_remove(at);
            match response {
                Ok(_) => open_turn.state.turn.report_steer_taken(number).await?,
                Err(_) => open_turn.state.turn.report_steer_missed(number).await?,
            }
        }
        Ok(())
    }

    /// Handles the response to `turn/start`, which has the turn's id.
    fn handle_turn_named(&mut self, open_turn: &mut CodexTurn<'_>, started: &CodexParams) {
        #[derive(Deserialize)]
        struct CodexTurnStarted {
            turn: CodexTurnId,
        }
        #[derive(Deserialize)]
        struct CodexTurnId {
            id: String,
        }
        let Some(CodexTurnStarted { turn: CodexTurnId { id } }) = started.read() else {
            let error = CodexRpcError::invalid_params("the agent's response names no turn");
            open_turn.outcome = Some(TurnOutcome::failed(run_error(&error)));
            return;
        };
        // The turn may have begun before: a turn that the agent started on its own takes the prompt in.
        open_turn.started = self.live_turn.as_ref() == Some(&id);
        open_turn.id = Some(id);
        // One of the turns that ended meanwhile may be this one.
        for ended in std::mem::take(&mut open_turn.early_ends) {
            self.handle_turn_end(open_turn, ended);
        }
        if open_turn.cancelled && open_turn.outcome.is_none() {
            self.interrupt(open_turn);
        }
    }

    async fn apply_notification(&mut self, open_turn: &mut CodexTurn<'_>, notification: CodexNotification) {
        match notification {
            CodexNotification::TurnStarted { thread, turn } => {
                self.decoder.assign_turn(&turn, &open_turn.state.turn.run);
                self.track_turn_start(&thread, &turn);
                if thread != self.thread {
                    if open_turn.cancelled {
                        self.connection
                            .request("turn/interrupt", json!({"threadId": thread, "turnId": turn}));
                    }
                } else if open_turn.is_turn(&turn) {
                    open_turn.started = true;
                    self.interrupt_again(open_turn, true);
                }
            }
            CodexNotification::ItemStarted { turn } if open_turn.is_turn(&turn) => {
                open_turn.started = true;
                let first = !std::mem::replace(&mut open_turn.has_items, true);
                self.interrupt_again(open_turn, first);
            }
            CodexNotification::ItemStarted { .. } => {}
            CodexNotification::TurnCompleted { thread, turn } => {
                self.track_turn_end(&thread, &turn.id);
                if thread == self.thread {
                    self.handle_turn_end(open_turn, turn);
                }
            }
            CodexNotification::TurnFailing { turn, why: error } => {
                if open_turn.is_turn(&turn) {
                    open_turn.pending_error = Some(error);
                }
            }
            CodexNotification::RequestResolved(id) => {
                if let Some(open) = open_turn.state.close_ask(&id) {
                    for ask in &open.ask_ids {
                        open_turn.state.turn.withdraw_ask(ask).await;
                    }
                }
            }
        }
    }

    /// Handles the end of a turn of our thread. The end of any turn but ours is ignored.
    fn handle_turn_end(&mut self, open_turn: &mut CodexTurn<'_>, ended: CodexTurnEnd) {
        if open_turn.id.is_none() {
            open_turn.early_ends.push(ended);
        } else if open_turn.is_turn(&ended.id) && open_turn.outcome.is_none() {
            let outcome = self.turn_outcome(open_turn, &ended);
            if open_turn.cancelled {
                // Also ends commands that the turn started in its last moment.
                let clean = self.end_commands(open_turn);
                open_turn.end_after_clean(outcome, clean);
            } else {
                open_turn.outcome = Some(outcome);
            }
        }
    }

    fn turn_outcome(&mut self, open_turn: &mut CodexTurn<'_>, ended: &CodexTurnEnd) -> TurnOutcome {
        match ended.status.as_str() {
            "completed" => {
                TurnOutcome { text: self.decoder.take_result(), ..TurnOutcome::of(TurnStopReason::EndTurn) }
            }
            "interrupted" => TurnOutcome::cancelled(),
            "failed" => {
                let error = ended.error.clone().or(open_turn.pending_error.take());
                let error = error.map(|error| error.run_error(self.decoder.quota_resets_at()));
                TurnOutcome::failed(error.unwrap_or_else(|| {
                    RunError::new("agent_error", "the turn failed without a reason from the agent")
                }))
            }
            other => {
                let message = format!("the turn ended with an unknown status: {other}");
                TurnOutcome::failed(RunError::new("agent_error", message))
            }
        }
    }

    fn emit(&mut self, open_turn: &mut CodexTurn<'_>, output: CodexOutput) {
        let CodexOutput { turn, updates } = output;
        let run = turn.and_then(|turn| self.decoder.run_of_turn(&turn).cloned());
        let run = run.unwrap_or_else(|| open_turn.state.turn.run.clone());
        open_turn.state.emit_for_run(run, updates);
    }

    fn track_turn_start(&mut self, thread: &str, turn: &str) {
        if thread == self.thread {
            self.live_turn = Some(turn.to_owned());
        } else {
            self.subagent_turns.insert(thread.to_owned(), turn.to_owned());
        }
    }

    fn track_turn_end(&mut self, thread: &str, turn: &str) {
        if thread == self.thread {
            self.live_turn.take_if(|live| live == turn);
        } else if self.subagent_turns.get(thread).is_some_and(|running| running == turn) {
            self.subagent_turns.remove(thread);
        }
    }

    /// Handles one message between turns.
    fn handle_idle_message(&mut self, output: &AgentOutput, message: CodexMessage) {
        match message {
            CodexMessage::Response(..) => {}
            CodexMessage::Notification(method, params) => {
                let (decoded, notification) = self.decoder.decode(&method, &params);
                match notification {
                    Some(CodexNotification::TurnStarted { thread, turn }) => {
                        self.track_turn_start(&thread, &turn);
                        if let Some(run) = &self.last_run {
                            self.decoder.assign_turn(&turn, run);
                        }
                    }
                    Some(CodexNotification::TurnCompleted { thread, turn }) => {
                        self.track_turn_end(&thread, &turn.id)
                    }
                    _ => {}
                }
                let CodexOutput { turn, updates } = decoded;
                let run = turn.and_then(|turn| self.decoder.run_of_turn(&turn).cloned());
                // Before the first turn there is no run: then this is the replay of a resumed conversation.
                if let Some(run) = run.or_else(|| self.last_run.clone()).filter(|_| !updates.is_empty()) {
                    self.late_output = Some(Box::pin(emit_late(output.clone(), run, updates)));
                }
            }
            CodexMessage::Request(id, method, params) => {
                let answer = CodexAsk::from_request(&method, &params, self.decoder.tool_calls())
                    .map(|ask| ask.unattended_answer());
                self.connection.respond(&id, answer);
            }
        }
    }
}

/// The run error for a JSON-RPC error of the server.
pub(super) fn run_error(error: &CodexRpcError) -> RunError {
    RunError::new("agent_error", error.message.clone())
}
