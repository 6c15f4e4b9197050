//! A program in its terminal: its start, turns, and the time between them. One loop puts all that can happen into one
//! order; it types while it reads, and stops reading while its session takes nothing more. Time is measured only from
//! what the program last wrote.

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

/// How long a program of which nothing is known may show nothing from which it could be told that it waits.
const SILENCE_MAX: Duration = Duration::from_secs(10);
/// How long a program may take to wait for a prompt again that did when its last turn ended.
const PROMPT_WAIT_MAX: Duration = Duration::from_secs(5);
/// How long what a program has started has to end by itself, if interrupting it was in vain.
const SWEEP_GRACE: Duration = Duration::from_millis(500);
/// Lines of the screen that are told of a program that failed.
const LAST_LINES_MAX: usize = 20;

/// A program in its terminal.
pub(super) struct PtyConversation {
    pub(super) terminal: PtyTerminal,
    pub(super) screen: Arc<SharedScreen>,
    /// What people type.
    pub(super) input: mpsc::Receiver<TerminalInput>,
    pub(super) rules: ScreenRules,
    pub(super) pty: TerminalRules,
    /// What it is called.
    pub(super) program_name: String,
    /// Who has the terminal while the program waits.
    pub(super) own_foreground: Option<Pid>,
    /// Whoever can end what it has started.
    pub(super) keeper: Arc<KeeperHandle>,
    /// Names of its own helpers, which no turn has to answer for.
    pub(super) helpers: Vec<String>,
}

/// Why there is no going on with a program.
#[derive(Debug)]
pub(super) enum PtyFailure {
    /// It is no more.
    ProgramExited,
    /// It cannot be told what it does.
    Unclear(RunError),
}

/// What it has started is being ended.
type SweepFuture = BoxFuture<'static, Result<SweepResult, KeeperError>>;
/// Something that is being said.
type PtyEmitFuture<'t> = BoxFuture<'t, Result<(), LinkClosed>>;
/// A question, the name of its ask, and its answer that somebody waits for.
type PtyPendingAsk<'t> = (PtyQuestion, AskId, BoxFuture<'t, Result<Option<AskAnswer>, LinkClosed>>);

impl PtyConversation {
    /// Waits until the program takes a prompt.
    pub(super) async fn wait_until_ready(&mut self) -> Result<(), PtyFailure> {
        let mut moved = Instant::now();
        let mut due = moved + SILENCE_MAX;
        loop {
            tokio::select! {
                biased;
                stepped = self.step(true, |_| {}) => if stepped? {
                    moved = Instant::now();
                    due = moved + SETTLE_TIME;
                },
                () = tokio::time::sleep_until(due) => {
                    let (may_be, can_tell) = {
                        let screen = self.screen.lock_screen();
                        let may_be = self.rules.may_be_ready(&screen);
                        (may_be, may_be && self.rules.learn_prompt(&screen))
                    };
                    if can_tell {
                        self.own_foreground = self.terminal.foreground();
                        return Ok(());
                    }
                    if may_be && moved.elapsed() >= SILENCE_MAX {
                        return Err(PtyFailure::Unclear(self.unclear_error("it shows no line in which it waits")));
                    }
                    due = if may_be { moved + SILENCE_MAX } else { Instant::now() + SILENCE_MAX };
                }
            }
        }
    }

    /// One turn, from its prompt to the program's next wait for one.
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
            Err(unfit) => return Ok(Err(unfit)),
        }
        let lines = keys::typeable_lines(&prompt.text);
        let mut round = {
            let mut screen = self.screen.lock_screen();
            let pieces = keys::prompt_keystrokes(&lines, screen.emulator().bracketed_paste(), &self.pty);
            PtyTurn::begin(&mut screen, &lines, pieces)
        };
        self.type_next_piece(&mut round);
        let mut due = round.judge_at();
        let mut telling: Option<PtyEmitFuture<'_>> = None;
        let mut asking: Option<PtyPendingAsk<'_>> = None;
        let mut cancelled = false;
        let mut sweeping: Option<SweepFuture> = None;
        loop {
            let listening = telling.is_none();
            let (rules, interrupts) = (&self.rules, self.pty.sigint_cancels_turn != SigintRule::None);
            tokio::select! {
                // A cancel first; what was heard before what comes next.
                biased;
                () = turn.cancelled(), if !cancelled => {
                    cancelled = true;
                    asking = None;
                    round.keystrokes.clear();
                    if interrupts {
                        self.terminal.type_in(keys::INTERRUPT);
                        round.mark_interrupted();
                        due = round.judge_at();
                    }
                }
                told = wait_for_optional(&mut telling) => {
                    told?;
                    telling = None;
                }
                _swept = wait_for_optional(&mut sweeping) => sweeping = None,
                answer = wait_for_answer(&mut asking) => {
                    let (question, answer) = answer?;
                    asking = None;
                    if let Some(answer) = answer {
                        self.terminal.type_in(&keys::line_keystrokes(&question.answer_text(&answer), &self.pty));
                        round.mark_typed();
                        due = round.judge_at();
                    }
                }
                steer = turn.next_steer(), if self.pty.queued_input_supported && !cancelled && round.keystrokes.is_empty() => {
                    self.type_steer(turn, &mut round, steer).await?;
                }
                stepped = step(&mut self.terminal, &mut self.input, &self.screen, listening, |screen| round.observe_piece(screen, rules)) => {
                    match stepped {
                        Err(unfit) => {
                            let (said, _) = self.finish_output(round, None);
                            emit_all(turn, said).await?;
                            return Ok(Err(unfit));
                        }
                        Ok(false) => {}
                        Ok(true) => {
                            let mut screen = self.screen.lock_screen();
                            round.observe_screen(&screen, &self.rules);
                            due = round.judge_at();
                            let lines = round.transcript.take_lines(&mut screen, &self.rules);
                            let said = round.decoder.decode_lines(lines, &self.rules);
                            if !said.is_empty() {
                                telling = Some(Box::pin(emit_all(turn, said)));
                            }
                        }
                    }
                }
                () = tokio::time::sleep_until(due), if listening => {
                    let alone = self.terminal.foreground() == self.own_foreground;
                    let verdict = round.judge(&self.screen.lock_screen(), &self.rules, asking.is_some(), alone);
                    if let (PtyVerdict::Ask(_) | PtyVerdict::TurnOver(_), Some((_, ask, _))) = (&verdict, &asking) {
                        // Somebody at the terminal has answered it, or the program no longer asks.
                        turn.withdraw_ask(ask).await;
                        asking = None;
                    }
                    match verdict {
                        PtyVerdict::JudgeAt(then) => due = then,
                        PtyVerdict::TypeNext => {
                            self.type_next_piece(&mut round);
                            due = round.judge_at();
                        }
                        PtyVerdict::Interrupt { in_vain } => {
                            if in_vain && sweeping.is_none() {
                                let (keeper, spare) = (Arc::clone(&self.keeper), self.helpers.clone());
                                let sweep = SweepRequest { scope: SweepScope::Turn, grace: SWEEP_GRACE, spare };
                                sweeping = Some(Box::pin(async move { keeper.sweep(sweep).await }));
                            }
                            self.terminal.type_in(keys::INTERRUPT);
                            round.mark_interrupted();
                            due = round.judge_at();
                        }
                        PtyVerdict::Ask(question) => {
                            if let Some(request) = question.ask_request() {
                                asking = Some((question, request.id.clone(), Box::pin(turn.ask(request))));
                            }
                            due = round.judge_at();
                        }
                        PtyVerdict::Unclear => {
                            let why = "it has shown nothing new for ten minutes and does not stand where it waits";
                            return Ok(Err(PtyFailure::Unclear(self.unclear_error(why))));
                        }
                        PtyVerdict::TurnOver(after) => {
                            let (said, error) = self.finish_output(round, Some(after));
                            emit_all(turn, said).await?;
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

    /// The time between turns. What is shown belongs to no turn: a person may be at the terminal. Comes back when the
    /// program is no more; nothing is lost if the wait is given up.
    pub(super) async fn idle(&mut self) {
        while self.step(true, |_| {}).await.is_ok() {
            self.screen.lock_screen().take_scrolled_rows();
        }
    }

    /// The last lines of the screen.
    pub(super) fn last_lines(&self) -> Vec<String> {
        self.screen.lock_screen().last_lines(LAST_LINES_MAX)
    }

    /// The last of what the turn says, and the line that means that it failed.
    fn finish_output(&self, mut round: PtyTurn, waits: Option<usize>) -> (Vec<TurnUpdate>, Option<String>) {
        let lines = round.transcript.finish(&mut self.screen.lock_screen(), waits, &self.rules);
        let mut said = round.decoder.decode_lines(lines, &self.rules);
        let error = round.decoder.finish(&mut said);
        (said, error)
    }

    /// Waits until the program waits for a prompt, which it should do already. Gives how the turn ends if it never does.
    async fn wait_for_prompt(&mut self, turn: &DriverTurn<'_>) -> Result<Option<TurnOutcome>, PtyFailure> {
        let until = Instant::now() + PROMPT_WAIT_MAX;
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
                () = tokio::time::sleep_until(until) => {
                    let message = format!(
                        "{} does not wait for a prompt; `qd attach --raw` shows what it does instead",
                        self.program_name
                    );
                    let error = RunError { stderr: self.last_lines(), ..RunError::new("agent_busy", message) };
                    return Ok(Some(TurnOutcome::failed(error)));
                }
            }
        }
    }

    /// Types the next piece of what is to be typed.
    fn type_next_piece(&mut self, round: &mut PtyTurn) {
        if let Some(piece) = round.keystrokes.pop_front() {
            self.terminal.type_in(&piece);
            round.mark_typed();
        }
    }

    async fn type_steer(
        &mut self,
        turn: &DriverTurn<'_>,
        round: &mut PtyTurn,
        steer: DriverSteer,
    ) -> Result<(), LinkClosed> {
        let lines = keys::typeable_lines(&steer.text);
        round.transcript.add_typed(lines.iter().map(String::as_str));
        self.terminal.type_in(&keys::line_keystrokes(&steer.text, &self.pty));
        turn.report_steer_taken(steer.number).await
    }

    async fn step(
        &mut self,
        listening: bool,
        glance: impl FnMut(&TerminalScreen),
    ) -> Result<bool, PtyFailure> {
        step(&mut self.terminal, &mut self.input, &self.screen, listening, glance).await
    }

    fn unclear_error(&self, why: &str) -> RunError {
        let manifest = match self.rules.is_described() {
            true => "none of the `idle` patterns of its manifest is on its screen",
            false => "its manifest has no `idle` pattern under `[parse]` that says how that looks",
        };
        let message = format!("cannot tell when {} has finished: {why}, and {manifest}", self.program_name);
        RunError { stderr: self.last_lines(), ..RunError::new("agent_unclear", message) }
    }
}

/// Waits for something to happen at the terminal; true if the program has written something.
async fn step(
    terminal: &mut PtyTerminal,
    typed: &mut mpsc::Receiver<TerminalInput>,
    view: &SharedScreen,
    listening: bool,
    glance: impl FnMut(&TerminalScreen),
) -> Result<bool, PtyFailure> {
    tokio::select! {
        biased;
        Some(typed) = typed.recv(), if terminal.can_type() => {
            match typed {
                TerminalInput::Keys(keys) => terminal.type_in(&keys),
                TerminalInput::Resize(size) => {
                    // A program that is not told keeps its own idea, and the screen has to be of the same.
                    if terminal.resize(size).is_ok() {
                        view.lock_screen().resize(size);
                        view.notify_viewers();
                    }
                }
            }
            Ok(false)
        }
        output = terminal.next_output(listening) => {
            let output = output.ok_or(PtyFailure::ProgramExited)?;
            let replies = {
                let mut screen = view.lock_screen();
                screen.feed(&output, glance);
                screen.take_replies()
            };
            terminal.type_in(&replies);
            view.notify_viewers();
            Ok(true)
        }
    }
}

/// Waits for something to be done; for ever if nothing is.
async fn wait_for_optional<T>(doing: &mut Option<BoxFuture<'_, T>>) -> T {
    match doing {
        Some(doing) => doing.await,
        None => std::future::pending().await,
    }
}

/// Waits for the answer to a question; for ever if there is none.
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
    said: impl IntoIterator<Item = TurnUpdate>,
) -> Result<(), LinkClosed> {
    for what in said {
        turn.emit(what).await?;
    }
    Ok(())
}
