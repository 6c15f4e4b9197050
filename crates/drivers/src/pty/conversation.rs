//! A program in its terminal: its start, and the time between its turns. All timeouts count from the program's last
//! output. The loop of a turn is in `turn_loop`.

use std::sync::Arc;
use std::time::Duration;

use qd_keeper::KeeperHandle;
use qd_protocol::event::RunError;
use qd_protocol::link::TurnOutcome;
use qd_protocol::manifest::TerminalRules;
use rustix::process::Pid;
use tokio::sync::mpsc;
use tokio::time::Instant;

use super::screen::TerminalScreen;
use super::screen_rules::ScreenRules;
use super::shared_screen::{SharedScreen, TerminalInput};
use super::terminal::PtyTerminal;
use super::turn::SETTLE_TIME;
use crate::turn::DriverTurn;

/// How long a program without a described prompt may stay silent without showing a prompt.
const SILENCE_MAX: Duration = Duration::from_secs(10);
/// How long a program may take to show its prompt again, which it showed when its last turn ended.
const PROMPT_WAIT_MAX: Duration = Duration::from_secs(5);
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

    /// Waits until the program is at its prompt, which it should be already. Returns the outcome of the turn if it
    /// never is.
    pub(super) async fn wait_for_prompt(
        &mut self,
        turn: &DriverTurn<'_>,
    ) -> Result<Option<TurnOutcome>, PtyFailure> {
        let deadline = Instant::now() + PROMPT_WAIT_MAX;
        loop {
            if turn.is_cancelled() {
                return Ok(Some(TurnOutcome::cancelled()));
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

    async fn step(
        &mut self,
        listening: bool,
        observe: impl FnMut(&TerminalScreen),
    ) -> Result<bool, PtyFailure> {
        step(&mut self.terminal, &mut self.input, &self.screen, listening, observe).await
    }

    pub(super) fn unclear_error(&self, reason: &str) -> RunError {
        let hint = match self.rules.is_described() {
            true => "its screen matches none of the `idle` patterns of its manifest",
            false => "its manifest has no `idle` pattern under `[parse]` that describes its prompt",
        };
        let message = format!("cannot tell when {} has finished: {reason}, and {hint}", self.program_name);
        RunError { stderr: self.last_lines(), ..RunError::new("agent_unclear", message) }
    }
}

/// Waits for the next input or output at the terminal. Returns true if the program has written something.
pub(super) async fn step(
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
