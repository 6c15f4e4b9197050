//! A program in its terminal: its start, turns, and the time between them. One loop puts all that can happen into one
//! order; it types while it reads, and stops reading while its session takes nothing more. Time is measured only from
//! what the program last wrote.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;
use qd_keeper::{Keeper, KeeperError, Sweep, Swept, What};
use qd_link::Closed;
use qd_protocol::AskId;
use qd_protocol::event::{Answer, RunError};
use qd_protocol::link::{Outcome, Said, Stop};
use qd_protocol::manifest::{Pty, SigintRule};
use rustix::process::Pid;
use tokio::sync::mpsc;
use tokio::time::Instant;

use super::keys;
use super::round::{Round, SETTLE, Verdict};
use super::rules::{Question, Rules};
use super::screen::Screen;
use super::terminal::Terminal;
use super::view::{Typed, View};
use crate::turn::{Prompt, Steer, Turn};

/// How long a program of which nothing is known may show nothing from which it could be told that it waits.
const SILENT: Duration = Duration::from_secs(10);
/// How long a program may take to wait for a prompt again that did when its last turn ended.
const NOT_WAITING: Duration = Duration::from_secs(5);
/// How long what a program has started has to end by itself, if interrupting it was in vain.
const SWEEP_GRACE: Duration = Duration::from_millis(500);
/// Lines of the screen that are told of a program that failed.
const LAST_LINES: usize = 20;

/// A program in its terminal.
pub(super) struct Talk {
    pub(super) terminal: Terminal,
    pub(super) view: Arc<View>,
    /// What people type.
    pub(super) typed: mpsc::Receiver<Typed>,
    pub(super) rules: Rules,
    pub(super) pty: Pty,
    /// What it is called.
    pub(super) name: String,
    /// Who has the terminal while the program waits.
    pub(super) own: Option<Pid>,
    /// Whoever can end what it has started.
    pub(super) keeper: Arc<Keeper>,
    /// Names of its own helpers, which no turn has to answer for.
    pub(super) helpers: Vec<String>,
}

/// Why there is no going on with a program.
#[derive(Debug)]
pub(super) enum Unfit {
    /// It is no more.
    Over,
    /// It cannot be told what it does.
    Unclear(RunError),
}

/// What it has started is being ended.
type Sweeping = BoxFuture<'static, Result<Swept, KeeperError>>;
/// Something that is being said.
type Telling<'t> = BoxFuture<'t, Result<(), Closed>>;
/// A question, the name of its ask, and its answer that somebody waits for.
type Asking<'t> = (Question, AskId, BoxFuture<'t, Result<Option<Answer>, Closed>>);

impl Talk {
    /// Waits until the program takes a prompt.
    pub(super) async fn open(&mut self) -> Result<(), Unfit> {
        let mut moved = Instant::now();
        let mut due = moved + SILENT;
        loop {
            tokio::select! {
                biased;
                stepped = self.step(true, |_| {}) => if stepped? {
                    moved = Instant::now();
                    due = moved + SETTLE;
                },
                () = tokio::time::sleep_until(due) => {
                    let (may_be, can_tell) = {
                        let screen = self.view.screen();
                        let may_be = self.rules.may_be_ready(&screen);
                        (may_be, may_be && self.rules.learn(&screen))
                    };
                    if can_tell {
                        self.own = self.terminal.foreground();
                        return Ok(());
                    }
                    if may_be && moved.elapsed() >= SILENT {
                        return Err(Unfit::Unclear(self.cannot_tell("it shows no line in which it waits")));
                    }
                    due = if may_be { moved + SILENT } else { Instant::now() + SILENT };
                }
            }
        }
    }

    /// One turn, from its prompt to the program's next wait for one.
    pub(super) async fn turn(
        &mut self,
        turn: &Turn<'_>,
        prompt: &Prompt,
    ) -> Result<Result<Outcome, Unfit>, Closed> {
        for file in &prompt.files {
            let text = format!("the agent cannot take the file {}, which was left out", file.name);
            turn.tell(Said::Notice { text }).await?;
        }
        match self.wait(turn).await {
            Ok(None) => {}
            Ok(Some(outcome)) => return Ok(Ok(outcome)),
            Err(unfit) => return Ok(Err(unfit)),
        }
        let lines = keys::lines(&prompt.text);
        let mut round = {
            let mut screen = self.view.screen();
            let pieces = keys::prompt(&lines, screen.shown().bracketed_paste(), &self.pty);
            Round::begin(&mut screen, &lines, pieces)
        };
        self.type_next(&mut round);
        let mut due = round.due();
        let mut telling: Option<Telling<'_>> = None;
        let mut asking: Option<Asking<'_>> = None;
        let mut cancelled = false;
        let mut sweeping: Option<Sweeping> = None;
        loop {
            let listening = telling.is_none();
            let (rules, interrupts) = (&self.rules, self.pty.sigint_cancels_turn != SigintRule::None);
            tokio::select! {
                // A cancel first; what was heard before what comes next.
                biased;
                () = turn.cancelled(), if !cancelled => {
                    cancelled = true;
                    asking = None;
                    round.pieces.clear();
                    if interrupts {
                        self.terminal.type_in(keys::INTERRUPT);
                        round.interrupted();
                        due = round.due();
                    }
                }
                told = done(&mut telling) => {
                    told?;
                    telling = None;
                }
                _swept = done(&mut sweeping) => sweeping = None,
                answer = answered(&mut asking) => {
                    let (question, answer) = answer?;
                    asking = None;
                    if let Some(answer) = answer {
                        self.terminal.type_in(&keys::line(&question.reply(&answer), &self.pty));
                        round.typed();
                        due = round.due();
                    }
                }
                steer = turn.next_steer(), if self.pty.queued_input_supported && !cancelled && round.pieces.is_empty() => {
                    self.steer(turn, &mut round, steer).await?;
                }
                stepped = step(&mut self.terminal, &mut self.typed, &self.view, listening, |screen| round.glance(screen, rules)) => {
                    match stepped {
                        Err(unfit) => {
                            let (said, _) = self.last_words(round, None);
                            tell(turn, said).await?;
                            return Ok(Err(unfit));
                        }
                        Ok(false) => {}
                        Ok(true) => {
                            let mut screen = self.view.screen();
                            round.look(&screen, &self.rules);
                            due = round.due();
                            let lines = round.transcript.take(&mut screen, &self.rules);
                            let said = round.teller.tell(lines, &self.rules);
                            if !said.is_empty() {
                                telling = Some(Box::pin(tell(turn, said)));
                            }
                        }
                    }
                }
                () = tokio::time::sleep_until(due), if listening => {
                    let alone = self.terminal.foreground() == self.own;
                    let verdict = round.judge(&self.view.screen(), &self.rules, asking.is_some(), alone);
                    if let (Verdict::Ask(_) | Verdict::Over(_), Some((_, ask, _))) = (&verdict, &asking) {
                        // Somebody at the terminal has answered it, or the program no longer asks.
                        turn.withdraw(ask).await;
                        asking = None;
                    }
                    match verdict {
                        Verdict::Later(then) => due = then,
                        Verdict::Type => {
                            self.type_next(&mut round);
                            due = round.due();
                        }
                        Verdict::Interrupt { in_vain } => {
                            if in_vain && sweeping.is_none() {
                                let (keeper, spare) = (Arc::clone(&self.keeper), self.helpers.clone());
                                let sweep = Sweep { what: What::Turn, grace: SWEEP_GRACE, spare };
                                sweeping = Some(Box::pin(async move { keeper.sweep(sweep).await }));
                            }
                            self.terminal.type_in(keys::INTERRUPT);
                            round.interrupted();
                            due = round.due();
                        }
                        Verdict::Ask(question) => {
                            if let Some(request) = question.request() {
                                asking = Some((question, request.id.clone(), Box::pin(turn.ask(request))));
                            }
                            due = round.due();
                        }
                        Verdict::Lost => {
                            let why = "it has shown nothing new for ten minutes and does not stand where it waits";
                            return Ok(Err(Unfit::Unclear(self.cannot_tell(why))));
                        }
                        Verdict::Over(after) => {
                            let (said, error) = self.last_words(round, Some(after));
                            tell(turn, said).await?;
                            return Ok(Ok(match error {
                                _ if cancelled => Outcome::of(Stop::Cancelled),
                                Some(line) => Outcome::failed(RunError::new("agent_error", line)),
                                None => Outcome::of(Stop::EndTurn),
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
            self.view.screen().take_gone();
        }
    }

    /// The last lines of the screen.
    pub(super) fn last_lines(&self) -> Vec<String> {
        self.view.screen().last_lines(LAST_LINES)
    }

    /// The last of what the turn says, and the line that means that it failed.
    fn last_words(&self, mut round: Round, waits: Option<usize>) -> (Vec<Said>, Option<String>) {
        let lines = round.transcript.finish(&mut self.view.screen(), waits, &self.rules);
        let mut said = round.teller.tell(lines, &self.rules);
        let error = round.teller.finish(&mut said);
        (said, error)
    }

    /// Waits until the program waits for a prompt, which it should do already. Gives how the turn ends if it never does.
    async fn wait(&mut self, turn: &Turn<'_>) -> Result<Option<Outcome>, Unfit> {
        let until = Instant::now() + NOT_WAITING;
        loop {
            if turn.is_cancelled() {
                return Ok(Some(Outcome::of(Stop::Cancelled)));
            }
            if self.rules.waits(&self.view.screen()).is_some() {
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
                        self.name
                    );
                    let error = RunError { stderr: self.last_lines(), ..RunError::new("agent_busy", message) };
                    return Ok(Some(Outcome::failed(error)));
                }
            }
        }
    }

    /// Types the next piece of what is to be typed.
    fn type_next(&mut self, round: &mut Round) {
        if let Some(piece) = round.pieces.pop_front() {
            self.terminal.type_in(&piece);
            round.typed();
        }
    }

    async fn steer(&mut self, turn: &Turn<'_>, round: &mut Round, steer: Steer) -> Result<(), Closed> {
        let lines = keys::lines(&steer.text);
        round.transcript.typed(lines.iter().map(String::as_str));
        self.terminal.type_in(&keys::line(&steer.text, &self.pty));
        turn.steer_taken(steer.number).await
    }

    async fn step(&mut self, listening: bool, glance: impl FnMut(&Screen)) -> Result<bool, Unfit> {
        step(&mut self.terminal, &mut self.typed, &self.view, listening, glance).await
    }

    fn cannot_tell(&self, why: &str) -> RunError {
        let manifest = match self.rules.is_described() {
            true => "none of the `idle` patterns of its manifest is on its screen",
            false => "its manifest has no `idle` pattern under `[parse]` that says how that looks",
        };
        let message = format!("cannot tell when {} has finished: {why}, and {manifest}", self.name);
        RunError { stderr: self.last_lines(), ..RunError::new("agent_unclear", message) }
    }
}

/// Waits for something to happen at the terminal; true if the program has written something.
async fn step(
    terminal: &mut Terminal,
    typed: &mut mpsc::Receiver<Typed>,
    view: &View,
    listening: bool,
    glance: impl FnMut(&Screen),
) -> Result<bool, Unfit> {
    tokio::select! {
        biased;
        Some(typed) = typed.recv(), if terminal.has_room() => {
            match typed {
                Typed::Keys(keys) => terminal.type_in(&keys),
                Typed::Size(size) => {
                    // A program that is not told keeps its own idea, and the screen has to be of the same.
                    if terminal.resize(size).is_ok() {
                        view.screen().resize(size);
                        view.show();
                    }
                }
            }
            Ok(false)
        }
        output = terminal.next(listening) => {
            let output = output.ok_or(Unfit::Over)?;
            let replies = {
                let mut screen = view.screen();
                screen.feed(&output, glance);
                screen.take_replies()
            };
            terminal.type_in(&replies);
            view.show();
            Ok(true)
        }
    }
}

/// Waits for something to be done; for ever if nothing is.
async fn done<T>(doing: &mut Option<BoxFuture<'_, T>>) -> T {
    match doing {
        Some(doing) => doing.await,
        None => std::future::pending().await,
    }
}

/// Waits for the answer to a question; for ever if there is none.
async fn answered(asking: &mut Option<Asking<'_>>) -> Result<(Question, Option<Answer>), Closed> {
    match asking {
        Some((question, _, answer)) => Ok((question.clone(), answer.await?)),
        None => std::future::pending().await,
    }
}

async fn tell(turn: &Turn<'_>, said: impl IntoIterator<Item = Said>) -> Result<(), Closed> {
    for what in said {
        turn.tell(what).await?;
    }
    Ok(())
}
