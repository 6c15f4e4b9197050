//! The loop of one turn at a terminal: it types while it reads, stops reading while the session accepts no more updates,
//! and acts on the verdicts of [`PtyTurn`]. What a screen means is decided there, not here.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;
use qd_keeper::{KeeperError, SweepRequest, SweepResult, SweepScope};
use qd_link::LinkClosed;
use qd_protocol::AskId;
use qd_protocol::event::{AskAnswer, RunError};
use qd_protocol::link::{TurnOutcome, TurnStopReason, TurnUpdate};
use qd_protocol::manifest::SigintRule;
use tokio::time::Instant;

use super::conversation::{PtyConversation, PtyFailure, step};
use super::keys;
use super::screen_rules::PtyQuestion;
use super::turn::{PtyTurn, PtyVerdict};
use crate::emit::{EmitFuture, emit_all, left_out_notice, wait_for_emit};
use crate::turn::{DriverPrompt, DriverSteer, DriverTurn};

/// How long processes of the turn have to exit by themselves, if interrupting the program had no effect.
const SWEEP_GRACE: Duration = Duration::from_millis(500);

/// A sweep of the turn's processes.
type SweepFuture = BoxFuture<'static, Result<SweepResult, KeeperError>>;
/// A question of the program, the id of its ask, and the future of its answer.
type PtyPendingAsk<'t> = (PtyQuestion, AskId, BoxFuture<'t, Result<Option<AskAnswer>, LinkClosed>>);
/// How a turn ended.
type PtyTurnResult = Result<TurnOutcome, PtyFailure>;

/// A turn that is under way, and everything that it waits for.
struct OpenPtyTurn<'t> {
    turn: &'t DriverTurn<'t>,
    state: PtyTurn,
    /// When the screen is judged next.
    due: Instant,
    /// Updates that are being sent. Nothing is read and judged meanwhile.
    emitting: Option<EmitFuture<'t>>,
    asking: Option<PtyPendingAsk<'t>>,
    sweeping: Option<SweepFuture>,
    cancelled: bool,
}

impl<'t> OpenPtyTurn<'t> {
    fn new(turn: &'t DriverTurn<'t>, state: PtyTurn) -> Self {
        let due = state.judge_at();
        Self { turn, state, due, emitting: None, asking: None, sweeping: None, cancelled: false }
    }

    /// Judges the screen after it has settled again.
    fn judge_later(&mut self) {
        self.due = self.state.judge_at();
    }
}

impl PtyConversation {
    /// Runs one turn, from typing the prompt until the program waits for the next one.
    pub(super) async fn turn(
        &mut self,
        turn: &DriverTurn<'_>,
        prompt: &DriverPrompt,
    ) -> Result<PtyTurnResult, LinkClosed> {
        for file in &prompt.files {
            turn.emit(TurnUpdate::notice(left_out_notice(&file.name))).await?;
        }
        match self.wait_for_prompt(turn).await {
            Ok(None) => {}
            Ok(Some(outcome)) => return Ok(Ok(outcome)),
            Err(failure) => return Ok(Err(failure)),
        }
        let mut open = OpenPtyTurn::new(turn, self.begin_turn(&prompt.text));
        self.type_next_piece(&mut open);
        loop {
            let (rules, listening) = (&self.rules, open.emitting.is_none());
            let takes_steers =
                self.pty.queued_input_supported && !open.cancelled && open.state.keystrokes.is_empty();
            tokio::select! {
                // A cancel first; then updates that have arrived before new output.
                biased;
                () = turn.cancelled(), if !open.cancelled => self.cancel(&mut open),
                emitted = wait_for_emit(&mut open.emitting) => {
                    emitted?;
                    open.emitting = None;
                }
                _swept = wait_for_sweep(&mut open.sweeping) => open.sweeping = None,
                answer = wait_for_answer(&mut open.asking) => {
                    let (question, answer) = answer?;
                    self.type_answer(&mut open, &question, answer);
                }
                steer = turn.next_steer(), if takes_steers => self.type_steer(&mut open, steer).await?,
                stepped = step(&mut self.terminal, &mut self.input, &self.screen, listening, |screen| {
                    open.state.observe_piece(screen, rules)
                }) => match stepped {
                    Ok(true) => self.emit_new_lines(&mut open),
                    Ok(false) => {}
                    Err(failure) => {
                        let (updates, _) = self.finish_output(open.state, None);
                        emit_all(turn, updates).await?;
                        return Ok(Err(failure));
                    }
                },
                () = tokio::time::sleep_until(open.due), if listening => {
                    match self.judge(&mut open).await {
                        PtyVerdict::TurnOver(bytes_before) => {
                            return self.end_turn(open, bytes_before).await.map(Ok);
                        }
                        PtyVerdict::Unclear => {
                            let reason = "it has shown nothing new for ten minutes and is not at its prompt";
                            return Ok(Err(PtyFailure::Unclear(self.unclear_error(reason))));
                        }
                        PtyVerdict::JudgeAt(time) => open.due = time,
                        PtyVerdict::TypeNext => self.type_next_piece(&mut open),
                        PtyVerdict::Interrupt { in_vain } => self.interrupt_again(&mut open, in_vain),
                        PtyVerdict::Ask(question) => ask(&mut open, question),
                    }
                }
            }
        }
    }

    /// The turn before anything is typed.
    fn begin_turn(&self, prompt: &str) -> PtyTurn {
        let lines = keys::typeable_lines(prompt);
        let mut screen = self.screen.lock_screen();
        let pieces = keys::prompt_keystrokes(&lines, screen.emulator().bracketed_paste(), &self.pty);
        PtyTurn::begin(&mut screen, &lines, pieces)
    }

    fn cancel(&mut self, open: &mut OpenPtyTurn<'_>) {
        open.cancelled = true;
        open.asking = None;
        open.state.keystrokes.clear();
        if self.pty.sigint_cancels_turn != SigintRule::None {
            self.interrupt(open);
        }
    }

    fn interrupt(&mut self, open: &mut OpenPtyTurn<'_>) {
        self.terminal.type_in(keys::INTERRUPT);
        open.state.mark_interrupted();
        open.judge_later();
    }

    /// Interrupts a program that goes on. If the last interrupt was in vain, the processes that it started are ended.
    fn interrupt_again(&mut self, open: &mut OpenPtyTurn<'_>, in_vain: bool) {
        if in_vain && open.sweeping.is_none() {
            let (keeper, spare) = (Arc::clone(&self.keeper), self.helpers.clone());
            let sweep = SweepRequest { scope: SweepScope::Turn, grace: SWEEP_GRACE, spare };
            open.sweeping = Some(Box::pin(async move { keeper.sweep(sweep).await }));
        }
        self.interrupt(open);
    }

    fn type_answer(&mut self, open: &mut OpenPtyTurn<'_>, question: &PtyQuestion, answer: Option<AskAnswer>) {
        open.asking = None;
        if let Some(answer) = answer {
            self.terminal.type_in(&keys::line_keystrokes(&question.answer_text(&answer), &self.pty));
            open.state.mark_typed();
            open.judge_later();
        }
    }

    /// Types the next piece of the prompt.
    fn type_next_piece(&mut self, open: &mut OpenPtyTurn<'_>) {
        if let Some(piece) = open.state.keystrokes.pop_front() {
            self.terminal.type_in(&piece);
            open.state.mark_typed();
        }
        open.judge_later();
    }

    async fn type_steer(&mut self, open: &mut OpenPtyTurn<'_>, steer: DriverSteer) -> Result<(), LinkClosed> {
        let lines = keys::typeable_lines(&steer.text);
        open.state.transcript.add_typed(lines.iter().map(String::as_str));
        self.terminal.type_in(&keys::line_keystrokes(&steer.text, &self.pty));
        open.turn.report_steer_taken(steer.number).await
    }

    /// Starts to send what the program has written.
    fn emit_new_lines(&self, open: &mut OpenPtyTurn<'_>) {
        let mut screen = self.screen.lock_screen();
        open.state.observe_screen(&screen, &self.rules);
        open.judge_later();
        let lines = open.state.transcript.take_lines(&mut screen, &self.rules);
        let updates = open.state.decoder.decode_lines(lines, &self.rules);
        if !updates.is_empty() {
            open.emitting = Some(Box::pin(emit_all(open.turn, updates)));
        }
    }

    /// Judges a settled screen. Withdraws an ask that somebody has answered at the terminal, or that the program no
    /// longer asks.
    async fn judge(&mut self, open: &mut OpenPtyTurn<'_>) -> PtyVerdict {
        let alone = self.terminal.foreground() == self.own_foreground;
        let asking = open.asking.is_some();
        let verdict = open.state.judge(&self.screen.lock_screen(), &self.rules, asking, alone);
        if let (PtyVerdict::Ask(_) | PtyVerdict::TurnOver(_), Some((_, ask, _))) = (&verdict, &open.asking) {
            open.turn.withdraw_ask(ask).await;
            open.asking = None;
        }
        verdict
    }

    async fn end_turn(
        &mut self,
        open: OpenPtyTurn<'_>,
        bytes_before: usize,
    ) -> Result<TurnOutcome, LinkClosed> {
        let (updates, error) = self.finish_output(open.state, Some(bytes_before));
        emit_all(open.turn, updates).await?;
        Ok(match error {
            _ if open.cancelled => TurnOutcome::cancelled(),
            Some(line) => TurnOutcome::failed(RunError::new("agent_error", line)),
            None => TurnOutcome::of(TurnStopReason::EndTurn),
        })
    }

    /// The last updates of the turn, and the line that means that it failed.
    fn finish_output(
        &self,
        mut state: PtyTurn,
        bytes_before: Option<usize>,
    ) -> (Vec<TurnUpdate>, Option<String>) {
        let lines = state.transcript.finish(&mut self.screen.lock_screen(), bytes_before, &self.rules);
        let mut updates = state.decoder.decode_lines(lines, &self.rules);
        let error = state.decoder.finish(&mut updates);
        (updates, error)
    }
}

fn ask(open: &mut OpenPtyTurn<'_>, question: PtyQuestion) {
    if let Some(request) = question.ask_request() {
        open.asking = Some((question, request.id.clone(), Box::pin(open.turn.ask(request))));
    }
    open.judge_later();
}

/// Waits for a sweep; for ever if there is none.
async fn wait_for_sweep(sweeping: &mut Option<SweepFuture>) -> Result<SweepResult, KeeperError> {
    match sweeping {
        Some(sweeping) => sweeping.await,
        None => std::future::pending().await,
    }
}

/// Waits for the answer to a question; for ever if none is open.
async fn wait_for_answer(
    asking: &mut Option<PtyPendingAsk<'_>>,
) -> Result<(PtyQuestion, Option<AskAnswer>), LinkClosed> {
    match asking {
        Some((question, _, answer)) => Ok((question.clone(), answer.await?)),
        None => std::future::pending().await,
    }
}
