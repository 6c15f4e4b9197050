//! A conversation with a server that is ready: turns, and the time between them. One loop puts all that can happen
//! into one order; it writes while it reads, and stops reading while its session takes nothing more.
//!
//! A turn is over when the server says so under the turn's own id, and in no other way. A cancel stays until then: the
//! server refuses one that comes before it has begun the turn, and then runs the whole of it.

use std::collections::BTreeMap;

use futures_util::StreamExt;
use qd_link::{AgentOutput, LinkClosed};
use qd_protocol::RunId;
use qd_protocol::event::RunError;
use qd_protocol::link::{TurnOutcome, TurnStopReason};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::io::{AsyncRead, AsyncWrite};

use super::asks::{CodexAsk, CodexAskOutcome};
use super::connection::{CodexConnection, CodexMessage, CodexParams, CodexRpcError};
use super::event_decoder::{CodexEventDecoder, CodexNotification, CodexOutput};
use super::handshake::CodexHandshakeResult;
use super::prompt_content;
use super::turn::{CodexOpenAsk, CodexTurn, sleep_until};
use super::turn_end::CodexTurnEnd;
use crate::drivers::emit::{EmitFuture, emit_late, emit_late_and_notices, wait_for_emit};
use crate::drivers::pricing::TokenPricing;
use crate::turn::{DriverPrompt, DriverSteer, DriverTurn};

/// A conversation.
pub(super) struct CodexConversation<R, W> {
    pub(super) connection: CodexConnection<R, W>,
    pub(super) thread: String,
    pub(super) decoder: CodexEventDecoder,
    /// The turn of ours that the server works on.
    live_turn: Option<String>,
    /// The same of agents that ours has started: a turn of each thread.
    pub(super) subagent_turns: BTreeMap<String, String>,
    /// The turn that words between turns belong to.
    last_run: Option<RunId>,
    /// Words between turns that are being said; they are not lost when a turn begins.
    late_output: Option<EmitFuture<'static>>,
    /// What the next turn is to tell first.
    first_notices: Vec<String>,
}

impl<R: AsyncRead + Unpin, W: AsyncWrite + Unpin> CodexConversation<R, W> {
    /// Goes on after the opening.
    pub(super) fn new(
        connection: CodexConnection<R, W>,
        opened: CodexHandshakeResult,
        pricing: TokenPricing,
    ) -> Self {
        let CodexHandshakeResult { thread, model, notices: first_notices } = opened;
        let decoder = CodexEventDecoder::new(thread.clone(), &model, pricing);
        let subagent_turns = BTreeMap::new();
        Self {
            connection,
            thread,
            decoder,
            live_turn: None,
            subagent_turns,
            last_run: None,
            late_output: None,
            first_notices,
        }
    }

    /// The agent's name for it.
    pub(super) fn thread_id(&self) -> &str {
        &self.thread
    }

    /// Closes the stream to the server and gives the other one up.
    pub(super) fn hang_up(self) -> R {
        self.connection.hang_up()
    }

    /// One turn, from its prompt to its end; `None` if the agent is no more.
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
        let (input, left_out) = prompt_content::turn_input(prompt);
        let request = self.connection.request("turn/start", json!({"threadId": self.thread, "input": input}));
        let mut round = CodexTurn::new(turn, request);
        let cannot = |name| format!("the agent cannot take the file {name}, which was left out");
        let notices = self.first_notices.drain(..).chain(left_out.into_iter().map(cannot)).collect();
        round.emitting = Some(Box::pin(emit_late_and_notices(turn, self.late_output.take(), notices)));
        loop {
            let listening = round.emitting.is_none();
            if listening && let Some(outcome) = self.take_outcome(&mut round) {
                return Ok(Some(outcome));
            }
            tokio::select! {
                // A cancel first; what was heard before what comes next.
                biased;
                () = turn.cancelled(), if !round.cancelled => self.cancel(&mut round),
                told = wait_for_emit(&mut round.emitting) => {
                    told?;
                    round.emitting = None;
                }
                Some(answered) = round.pending_answers.next() => {
                    let (id, reply) = answered?;
                    if round.close_ask(&id).is_some() {
                        self.send_ask_outcome(&id, reply);
                    }
                }
                steer = turn.next_steer(), if round.takes_steers() => self.send_steer(&mut round, steer),
                message = self.connection.next(listening) => {
                    let Some(message) = message else { return Ok(None) };
                    self.handle_message(&mut round, message).await?;
                }
                () = sleep_until(round.settle_deadline) => {
                    round.settle_deadline = None;
                    round.clean_request = None;
                }
            }
        }
    }

    /// The time between turns. What is said belongs to the turns before, and nobody is asked anything. Comes back when
    /// the agent is no more; nothing is lost if the wait is given up.
    pub(super) async fn idle(&mut self, voice: &AgentOutput) {
        loop {
            let listening = self.late_output.is_none();
            tokio::select! {
                biased;
                // A session that has let go of its agent hears no late words either.
                _told = wait_for_emit(&mut self.late_output) => self.late_output = None,
                message = self.connection.next(listening) => match message {
                    Some(message) => self.handle_idle_message(voice, message),
                    None => return,
                },
            }
        }
    }

    fn send_steer(&mut self, round: &mut CodexTurn<'_>, steer: DriverSteer) {
        let Some(turn) = round.id.clone() else { return };
        let id = self.send_steer_text(&self.thread.clone(), &turn, &steer.text);
        round.pending_steers.push((id, steer.number));
    }

    fn send_steer_text(&mut self, thread: &str, turn: &str, words: &str) -> u64 {
        let params =
            json!({"threadId": thread, "expectedTurnId": turn, "input": [prompt_content::text_block(words)]});
        self.connection.request("turn/steer", params)
    }

    /// Answers what the server waits for. A no has no room for its reason; so that goes before it as words of the user,
    /// and the model reads both before it goes on.
    fn send_ask_outcome(&mut self, id: &Value, reply: CodexAskOutcome) {
        if let Some((thread, turn, reason)) = reply.reason {
            self.send_steer_text(&thread, &turn, &format!("This was refused, for the reason: {reason}"));
        }
        self.connection.respond(id, Ok(reply.answer));
    }

    /// What a message means to the turn.
    async fn handle_message(
        &mut self,
        round: &mut CodexTurn<'_>,
        message: CodexMessage,
    ) -> Result<(), LinkClosed> {
        match message {
            CodexMessage::Response(id, answer) => self.handle_response(round, id, answer).await?,
            CodexMessage::Notification(method, params) => {
                let (heard, news) = self.decoder.decode(&method, &params);
                if let Some(news) = news {
                    self.apply_notification(round, news).await;
                }
                self.emit(round, heard);
            }
            CodexMessage::Request(id, method, params) => {
                match CodexAsk::from_request(&method, &params, self.decoder.tool_calls()) {
                    Ok(asked) if round.cancelled => self.connection.respond(&id, Ok(asked.cancel_answer())),
                    Ok(asked) => {
                        round.open_ask(
                            CodexOpenAsk {
                                id,
                                ask_ids: asked.ask_ids(),
                                cancel_answer: asked.cancel_answer(),
                            },
                            asked,
                        );
                    }
                    Err(refusal) => self.connection.respond(&id, Err(refusal)),
                }
            }
        }
        Ok(())
    }

    async fn handle_response(
        &mut self,
        round: &mut CodexTurn<'_>,
        id: u64,
        answer: Result<CodexParams, CodexRpcError>,
    ) -> Result<(), LinkClosed> {
        if id == round.start_request {
            match answer {
                Ok(started) => self.handle_turn_named(round, &started),
                Err(refusal) => round.outcome = Some(TurnOutcome::failed(run_error(&refusal))),
            }
        } else if Some(id) == round.interrupt_request {
            round.interrupt_refused = answer.is_err();
        } else if Some(id) == round.list_request {
            let last = answer.ok().and_then(|running| self.terminate_commands(round, &running));
            round.clean_request = round.clean_request.and(last);
        } else if Some(id) == round.clean_request {
            round.clean_request = None;
        } else if let Some(at) = round.pending_steers.iter().position(|(steer, _)| *steer == id) {
            let (_, number) = round.pending_steers.swap_remove(at);
            match answer {
                Ok(_) => round.turn.report_steer_taken(number).await?,
                Err(_) => round.turn.report_steer_missed(number).await?,
            }
        }
        Ok(())
    }

    /// The server has taken the prompt, and named the turn.
    fn handle_turn_named(&mut self, round: &mut CodexTurn<'_>, started: &CodexParams) {
        #[derive(Deserialize)]
        struct CodexTurnStarted {
            turn: CodexTurnId,
        }
        #[derive(Deserialize)]
        struct CodexTurnId {
            id: String,
        }
        let Some(CodexTurnStarted { turn: CodexTurnId { id } }) = started.read() else {
            let refusal = CodexRpcError::invalid_params("the agent's answer names no turn");
            round.outcome = Some(TurnOutcome::failed(run_error(&refusal)));
            return;
        };
        // It may have begun before: one that the agent began by itself takes the prompt in.
        round.started = self.live_turn.as_ref() == Some(&id);
        round.id = Some(id);
        // What has ended meanwhile may be this one.
        for ended in std::mem::take(&mut round.early_ends) {
            self.handle_turn_end(round, ended);
        }
        if round.cancelled && round.outcome.is_none() {
            self.interrupt(round);
        }
    }

    async fn apply_notification(&mut self, round: &mut CodexTurn<'_>, news: CodexNotification) {
        match news {
            CodexNotification::TurnStarted { thread, turn } => {
                self.decoder.assign_turn(&turn, &round.turn.run);
                self.track_turn_start(&thread, &turn);
                if thread != self.thread {
                    if round.cancelled {
                        self.connection
                            .request("turn/interrupt", json!({"threadId": thread, "turnId": turn}));
                    }
                } else if round.is_turn(&turn) {
                    round.started = true;
                    self.interrupt_again(round, true);
                }
            }
            CodexNotification::ItemStarted { turn } if round.is_turn(&turn) => {
                round.started = true;
                let first = !std::mem::replace(&mut round.has_items, true);
                self.interrupt_again(round, first);
            }
            CodexNotification::ItemStarted { .. } => {}
            CodexNotification::TurnCompleted { thread, turn } => {
                self.track_turn_end(&thread, &turn.id);
                if thread == self.thread {
                    self.handle_turn_end(round, turn);
                }
            }
            CodexNotification::TurnFailing { turn, why } => {
                if round.is_turn(&turn) {
                    round.pending_error = Some(why);
                }
            }
            CodexNotification::RequestResolved(id) => {
                if let Some(open) = round.close_ask(&id) {
                    for ask in &open.ask_ids {
                        round.turn.withdraw_ask(ask).await;
                    }
                }
            }
        }
    }

    /// A turn of our thread has ended: ours, or another, which means nothing to it.
    fn handle_turn_end(&mut self, round: &mut CodexTurn<'_>, ended: CodexTurnEnd) {
        if round.id.is_none() {
            round.early_ends.push(ended);
        } else if round.is_turn(&ended.id) && round.outcome.is_none() {
            let outcome = self.turn_outcome(round, &ended);
            if round.cancelled {
                // What it started in its last moment is ended, too.
                let clean = self.end_commands(round);
                round.end_after_clean(outcome, clean);
            } else {
                round.outcome = Some(outcome);
            }
        }
    }

    fn turn_outcome(&mut self, round: &mut CodexTurn<'_>, ended: &CodexTurnEnd) -> TurnOutcome {
        match ended.status.as_str() {
            "completed" => {
                TurnOutcome { text: self.decoder.take_result(), ..TurnOutcome::of(TurnStopReason::EndTurn) }
            }
            "interrupted" => TurnOutcome::of(TurnStopReason::Cancelled),
            "failed" => {
                let why = ended.error.clone().or(round.pending_error.take());
                let error = why.map(|why| why.run_error());
                TurnOutcome::failed(error.unwrap_or_else(|| {
                    RunError::new("agent_error", "the turn failed, and the agent did not say why")
                }))
            }
            other => {
                let message = format!("the turn ended in a way that we do not know: {other}");
                TurnOutcome::failed(RunError::new("agent_error", message))
            }
        }
    }

    fn emit(&mut self, round: &mut CodexTurn<'_>, heard: CodexOutput) {
        let CodexOutput { turn, updates: said } = heard;
        let run = turn.and_then(|turn| self.decoder.run_of_turn(&turn).cloned());
        round.emit(run.unwrap_or_else(|| round.turn.run.clone()), said);
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
        } else if self.subagent_turns.get(thread).is_some_and(|other| other == turn) {
            self.subagent_turns.remove(thread);
        }
    }

    /// What a message means while no turn runs.
    fn handle_idle_message(&mut self, voice: &AgentOutput, message: CodexMessage) {
        match message {
            CodexMessage::Response(..) => {}
            CodexMessage::Notification(method, params) => {
                let (heard, news) = self.decoder.decode(&method, &params);
                match news {
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
                let CodexOutput { turn, updates: said } = heard;
                let run = turn.and_then(|turn| self.decoder.run_of_turn(&turn).cloned());
                // Before the first turn, it is the past that an agent repeats after it was resumed.
                if let Some(run) = run.or_else(|| self.last_run.clone()).filter(|_| !said.is_empty()) {
                    self.late_output = Some(Box::pin(emit_late(voice.clone(), run, said)));
                }
            }
            CodexMessage::Request(id, method, params) => {
                let answer = CodexAsk::from_request(&method, &params, self.decoder.tool_calls())
                    .map(|asked| asked.unattended_answer());
                self.connection.respond(&id, answer);
            }
        }
    }
}

/// What went wrong, in the server's words.
pub(super) fn run_error(refusal: &CodexRpcError) -> RunError {
    RunError::new("agent_error", refusal.message.clone())
}
