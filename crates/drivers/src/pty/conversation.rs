//! A program in its terminal: its start, its turns, and the time between them. One loop puts all events in one order.
//! The loop types while it reads, and stops reading while its session accepts no more updates. All timeouts count from
//! the program's last output.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;
use qd_keeper::{KeeperError, KeeperHandle, SweepRequest, SweepResult, SweepScope};
use qd_link::LinkClosed;
use qd_protocol::AskId;
use qd_protocol::event::{AskAnswer, RunError};
use qd_protocol::link::{TurnOutcome, TurnStopReason, TurnUpdate};
use qd_protocol::manifest::{SigintRule, TerminalRules};
use rustix::process::Pid;
use tokio::sync::mpsc;
use tokio::time::Instant;

use super::keys;
use super::screen::TerminalScreen;
use super::screen_rules::{PtyQuestion, ScreenRules};
use super::shared_screen::{SharedScreen, TerminalInput};
use super::terminal::PtyTerminal;
use super::turn::{PtyTurn, PtyVerdict, SETTLE_TIME};
use crate::turn::{DriverPrompt, DriverSteer, DriverTurn};

/// How long a program without a described prompt may stay silent without showing a prompt.
const SILENCE_MAX: Duration = Duration::from_secs(10);
/// How long a program may take to show its prompt again, which it showed when its last turn ended.
const PROMPT_WAIT_MAX: Duration = Duration::from_secs(5);
/// How long processes of the turn have to exit by themselves, if interrupting the program had no effect.
const SWEEP_GRACE: Duration = Duration::from_millis(500);
/// The number of screen lines that an error of the program includes.
const LAST_LINES_MAX: usize = 20;

pub(super) struct PtyConversation {
    pub(super) terminal: PtyTerminal,
    pub(super) screen: Arc<SharedScreen>,
    /// Input of people who watch the terminal.
    pub(super) input: mpsc::Receiver<TerminalInput>,
    pub(super) rules: ScreenRules,
    pub(super) pty: TerminalRules,
    pub(super) program_name: String,
    /// The foreground process group while the program waits at its prompt.
    pub(super) own_foreground: Option<Pid>,
    /// Ends the processes of a turn.
    pub(super) keeper: Arc<KeeperHandle>,
    /// Names of the program's own helper processes, which a sweep of a turn spares.
    pub(super) helpers: Vec<String>,
}

/// Why a program cannot be used any longer.
#[derive(Debug)]
pub(super) enum PtyFailure {
    ProgramExited,
    /// Its state cannot be recognised from its screen.
    Unclear(RunError),
}

/// A sweep of the turn's processes.
type SweepFuture = BoxFuture<'static, Result<SweepResult, KeeperError>>;
/// Updates that are being sent.
type PtyEmitFuture<'t> = BoxFuture<'t, Result<(), LinkClosed>>;
/// A question of the program, the id of its ask, and the future of its answer.
type PtyPendingAsk<'t> = (PtyQuestion, AskId, BoxFuture<'t, Result<Option<AskAnswer>, LinkClosed>>);

impl PtyConversation {
    /// Waits until the program accepts a prompt.
    pub(super) async fn wait_until_ready(&mut self) -> Result<(), PtyFailure> {
        let mut last_output = Instant::now();
        let mut due = last_output + SILENCE_MAX;
        loop {
            tokio::select! {
                biased;
                stepped = self.step(true, |_| {}) => if stepped? {
                    last_output = Instant::now();
                    due = last_output + SETTLE_TIME;
                },
                () = tokio::time::sleep_until(due) => {
                    let (may_be_ready, knows_prompt) = {
                        let screen = self.screen.lock_screen();
                        let may_be_ready = self.rules.may_be_ready(&screen);
                        (may_be_ready, may_be_ready && self.rules.learn_prompt(&screen))
                    };
                    if knows_prompt {
                        self.own_foreground = self.terminal.foreground();
                        return Ok(());
                    }
                    if may_be_ready && last_output.elapsed() >= SILENCE_MAX {
                        return Err(PtyFailure::Unclear(self.unclear_error("it shows no prompt")));
                    }
                    due = if may_be_ready { last_output + SILENCE_MAX } else { Instant::now() + SILENCE_MAX };
                }
            }
        }
    }

    /// Runs one turn, from typing the prompt until the program waits for the next one.
    pub(super) async fn turn(
        &mut self,
        turn: &DriverTurn<'_>,
        prompt: &DriverPrompt,
    ) -> Result<Result<TurnOutcome, PtyFailure>, LinkClosed> {
        for file in &prompt.files {
            let text = format!("the agent cannot take the file {}, which was left out", file.name);
            turn.emit(TurnUpdate::Notice { text }).await?;
        }
        match self.wait_for_prompt(turn).await {
            Ok(None) => {}
            Ok(Some(outcome)) => return Ok(Ok(outcome)),
            Err(failure) => return Ok(Err(failure)),
        }
        let lines = keys::typeable_lines(&prompt.text);
        let mut pty_turn = {
            let mut screen = self.screen.lock_screen();
            let pieces = keys::prompt_keystrokes(&lines, screen.emulator().bracketed_paste(), &self.pty);
            PtyTurn::begin(&mut screen, &lines, pieces)
        };
        self.type_next_piece(&mut pty_turn);
        let mut due = pty_turn.judge_at();
        let mut emitting: Option<PtyEmitFuture<'_>> = None;
        let mut asking: Option<PtyPendingAsk<'_>> = None;
        let mut cancelled = false;
        let mut sweeping: Option<SweepFuture> = None;
        loop {
            let listening = emitting.is_none();
            let (rules, interrupts) = (&self.rules, self.pty.sigint_cancels_turn != SigintRule::None);
            tokio::select! {
                // A cancel first; then updates that have arrived before new output.
                biased;
                () = turn.cancelled(), if !cancelled => {
                    cancelled = true;
                    asking = None;
                    pty_turn.keystrokes.clear();
                    if interrupts {
                        self.terminal.type_in(keys::INTERRUPT);
                        pty_turn.mark_interrupted();
                        due = pty_turn.judge_at();
                    }
                }
                emitted = wait_for_optional(&mut emitting) => {
                    emitted?;
                    emitting = None;
                }
                _swept = wait_for_optional(&mut sweeping) => sweeping = None,
                answer = wait_for_answer(&mut asking) => {
                    let (question, answer) = answer?;
                    asking = None;
                    if let Some(answer) = answer {
                        self.terminal.type_in(&keys::line_keystrokes(&question.answer_text(&answer), &self.pty));
                        pty_turn.mark_typed();
                        due = pty_turn.judge_at();
                    }
                }
                steer = turn.next_steer(), if self.pty.queued_input_supported && !cancelled && pty_turn.keystrokes.is_empty() => {
                    self.type_steer(turn, &mut pty_turn, steer).await?;
                }
                stepped = step(&mut self.terminal, &mut self.input, &self.screen, listening, |screen| pty_turn.observe_piece(screen, rules)) => {
                    match stepped {
                        Err(failure) => {
                            let (updates, _) = self.finish_output(pty_turn, None);
                            emit_all(turn, updates).await?;
                            return Ok(Err(failure));
                        }
                        Ok(false) => {}
                        Ok(true) => {
                            let mut screen = self.screen.lock_screen();
                            pty_turn.observe_screen(&screen, &self.rules);
                            due = pty_turn.judge_at();
                            let lines = pty_turn.transcript.take_lines(&mut screen, &self.rules);
                            let updates = pty_turn.decoder.decode_lines(lines, &self.rules);
                            if !updates.is_empty() {
                                emitting = Some(Box::pin(emit_all(turn, updates)));
                            }
                        }
                    }
                }
                () = tokio::time::sleep_until(due), if listening => {
                    let alone = self.terminal.foreground() == self.own_foreground;
                    let verdict = pty_turn.judge(&self.screen.lock_screen(), &self.rules, asking.is_some(), alone);
                    if let (PtyVerdict::Ask(_) | PtyVerdict::TurnOver(_), Some((_, ask, _))) = (&verdict, &asking) {
                        // Somebody has answered at the terminal, or the program no longer asks.
                        turn.withdraw_ask(ask).await;
                        asking = None;
                    }
                    match verdict {
                        PtyVerdict::JudgeAt(time) => due = time,
                        PtyVerdict::TypeNext => {
                            self.type_next_piece(&mut pty_turn);
                            due = pty_turn.judge_at();
                        }
                        PtyVerdict::Interrupt { in_vain } => {
                            if in_vain && sweeping.is_none() {
                                let (keeper, spare) = (Arc::clone(&self.keeper), self.helpers.clone());
                                let sweep = SweepRequest { scope: SweepScope::Turn, grace: SWEEP_GRACE, spare };
                                sweeping = Some(Box::pin(async move { keeper.sweep(sweep).await }));
                            }
                            self.terminal.type_in(keys::INTERRUPT);
                            pty_turn.mark_interrupted();
                            due = pty_turn.judge_at();
                        }
                        PtyVerdict::Ask(question) => {
                            if let Some(request) = question.ask_request() {
                                asking = Some((question, request.id.clone(), Box::pin(turn.ask(request))));
                            }
                            due = pty_turn.judge_at();
                        }
                        PtyVerdict::Unclear => {
                            let reason = "it has shown nothing new for ten minutes and is not at its prompt";
                            return Ok(Err(PtyFailure::Unclear(self.unclear_error(reason))));
                        }
                        PtyVerdict::TurnOver(bytes_before) => {
                            let (updates, error) = self.finish_output(pty_turn, Some(bytes_before));
                            emit_all(turn, updates).await?;
                            return Ok(Ok(match error {
                                _ if cancelled => TurnOutcome::of(TurnStopReason::Cancelled),
                                Some(line) => TurnOutcome::failed(RunError::new("agent_error", line)),
                                None => TurnOutcome::of(TurnStopReason::EndTurn),
                            }));
                        }
                    }
                }
            }
        }
    }

    /// Runs between turns. Output belongs to no turn then: a person may be at the terminal. Resolves when the program
    /// has exited; dropping the wait loses nothing.
    pub(super) async fn idle(&mut self) {
        while self.step(true, |_| {}).await.is_ok() {
            self.screen.lock_screen().take_scrolled_rows();
        }
    }

    pub(super) fn last_lines(&self) -> Vec<String> {
        self.screen.lock_screen().last_lines(LAST_LINES_MAX)
    }

    /// The last updates of the turn, and the line that means that it failed.
    fn finish_output(
        &self,
        mut pty_turn: PtyTurn,
        bytes_before: Option<usize>,
    ) -> (Vec<TurnUpdate>, Option<String>) {
        let lines = pty_turn.transcript.finish(&mut self.screen.lock_screen(), bytes_before, &self.rules);
        let mut updates = pty_turn.decoder.decode_lines(lines, &self.rules);
        let error = pty_turn.decoder.finish(&mut updates);
        (updates, error)
    }

    /// Waits until the program is at its prompt, which it should be already. Returns the outcome of the turn if it
    /// never is.
    async fn wait_for_prompt(&mut self, turn: &DriverTurn<'_>) -> Result<Option<TurnOutcome>, PtyFailure> {
        let deadline = Instant::now() + PROMPT_WAIT_MAX;
        loop {
            if turn.is_cancelled() {
                return Ok(Some(TurnOutcome::of(TurnStopReason::Cancelled)));
            }
            if self.rules.idle_match(&self.screen.lock_screen()).is_some() {
                return Ok(None);
            }
            tokio::select! {
                stepped = self.step(true, |_| {}) => {
                    stepped?;
                }
                () = turn.cancelled() => {}
                () = tokio::time::sleep_until(deadline) => {
                    let message = format!(
                        "{} is not waiting for a prompt; `qd attach --raw` shows what it is doing",
                        self.program_name
                    );
                    let error = RunError { stderr: self.last_lines(), ..RunError::new("agent_busy", message) };
                    return Ok(Some(TurnOutcome::failed(error)));
                }
            }
        }
    }

    /// Types the next piece of the prompt.
    fn type_next_piece(&mut self, pty_turn: &mut PtyTurn) {
        if let Some(piece) = pty_turn.keystrokes.pop_front() {
            self.terminal.type_in(&piece);
            pty_turn.mark_typed();
        }
    }

    async fn type_steer(
        &mut self,
        turn: &DriverTurn<'_>,
        pty_turn: &mut PtyTurn,
        steer: DriverSteer,
    ) -> Result<(), LinkClosed> {
        let lines = keys::typeable_lines(&steer.text);
        pty_turn.transcript.add_typed(lines.iter().map(String::as_str));
        self.terminal.type_in(&keys::line_keystrokes(&steer.text, &self.pty));
        turn.report_steer_taken(steer.number).await
    }

    async fn step(
        &mut self,
        listening: bool,
        observe: impl FnMut(&TerminalScreen),
    ) -> Result<bool, PtyFailure> {
        step(&mut self.terminal, &mut self.input, &self.screen, listening, observe).await
    }

    fn unclear_error(&self, reason: &str) -> RunError {
        let hint = match self.rules.is_described() {
            true => "its screen matches none of the `idle` patterns of its manifest",
            false => "its manifest has no `idle` pattern under `[parse]` that describes its prompt",
        };
        let message = format!("cannot tell when {} has finished: {reason}, and {hint}", self.program_name);
        RunError { stderr: self.last_lines(), ..RunError::new("agent_unclear", message) }
    }
}

/// Waits for the next input or output at the terminal. Returns true if the program has written something.
async fn step(
    terminal: &mut PtyTerminal,
    input: &mut mpsc::Receiver<TerminalInput>,
    screen: &SharedScreen,
    listening: bool,
    observe: impl FnMut(&TerminalScreen),
) -> Result<bool, PtyFailure> {
    tokio::select! {
        biased;
        Some(input) = input.recv(), if terminal.can_type() => {
            match input {
                TerminalInput::Keys(keys) => terminal.type_in(&keys),
                TerminalInput::Resize(size) => {
                    // If the program cannot be notified, it keeps the old size, and the screen has to match it.
                    if terminal.resize(size).is_ok() {
                        screen.lock_screen().resize(size);
                        screen.notify_viewers();
                    }
                }
            }
            Ok(false)
        }
        output = terminal.next_output(listening) => {
            let output = output.ok_or(PtyFailure::ProgramExited)?;
            let replies = {
                let mut screen = screen.lock_screen();
                screen.feed(&output, observe);
                screen.take_replies()
            };
            terminal.type_in(&replies);
            screen.notify_viewers();
            Ok(true)
        }
    }
}

/// Waits for a future; for ever if there is none.
async fn wait_for_optional<T>(future: &mut Option<BoxFuture<'_, T>>) -> T {
    match future {
        Some(future) => future.await,
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

async fn emit_all(
    turn: &DriverTurn<'_>,
    updates: impl IntoIterator<Item = TurnUpdate>,
) -> Result<(), LinkClosed> {
    for update in updates {
        turn.emit(update).await?;
    }
    Ok(())
}
