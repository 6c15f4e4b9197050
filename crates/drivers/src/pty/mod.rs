//! The driver for any program that needs a terminal. It types prompts and reads the screen as a person would. What the
//! screen means is in the program's manifest, or is learnt from the screen if the manifest says nothing. If the state
//! of the program is unclear, the turn fails with an error: the driver never guesses.
//!
//! Layout, in reading order:
//! - `conversation`: the start, and the time between turns; `turn_loop`: the turns; `turn`: the state of one turn, and
//!   what its screen means for it.
//! - `screen_rules`: what a screen means; `prompt_line`: the program's prompt, learnt from its screen.
//! - `transcript`, `output_decoder`: from the screen to the lines of a turn, and from those to updates.
//! - `keys`: what is typed; `screen`: the terminal emulator; `shared_screen`: the same for people who watch.
//! - `terminal`: bytes.

mod conversation;
mod keys;
mod output_decoder;
mod prompt_line;
pub(crate) mod screen;
mod screen_rules;
pub(crate) mod shared_screen;
mod terminal;
mod transcript;
mod turn;
mod turn_loop;

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;
use qd_link::{AgentOutput, LinkClosed};
use qd_protocol::event::RunError;
use qd_protocol::link::AgentUpdate;
use qd_protocol::worker::AgentSpec;

use self::conversation::{PtyConversation, PtyFailure};
use self::screen::TerminalSize;
use self::screen_rules::ScreenRules;
use self::shared_screen::SharedScreen;
use self::terminal::NewTerminal;
use super::process::{AgentProcess, AgentProgram, own_program};
use crate::agent_driver::{AgentDriver, AgentStart, AgentSupervision};
use crate::turn::{DriverPrompt, DriverTurn, DriverTurnEnd};

/// How long a program whose terminal hung up may take to exit by itself.
const LEAVE_GRACE: Duration = Duration::from_secs(1);
/// The terminal type that programs see. What they draw for it works on nearly all terminals.
const TERM: &str = "xterm-256color";

pub(crate) struct PtyAgent {
    process: AgentProcess,
    conversation: PtyConversation,
}

impl PtyAgent {
    /// Starts the program in a terminal of its own, which the window shows from then on, and waits until it accepts a
    /// prompt, within the limit.
    pub(crate) async fn start(start: AgentStart<'_>) -> Result<Self, RunError> {
        let limit = start.time_limit();
        let AgentSupervision { keeper, window } = start.supervision()?;
        let AgentStart { spec, manifest, .. } = start;
        let rules = ScreenRules::from_manifest(&manifest)?;
        let size = TerminalSize::clamped(manifest.pty.cols, manifest.pty.rows);
        let new_terminal = NewTerminal::open(size).map_err(|cause| {
            RunError::new("agent_failed_to_start", format!("failed to open a terminal: {cause}"))
        })?;
        let program = AgentProgram::from_manifest(&manifest, spec);
        let name =
            program.argv.first().and_then(|path| path.rsplit('/').next()).unwrap_or_default().to_owned();
        let started = AgentProcess::start(keeper, spec, in_terminal(program, &new_terminal.path));
        let not_ready = || {
            RunError::new("agent_not_ready", format!("the agent was not ready within {} s", limit.as_secs()))
        };
        let deadline = tokio::time::Instant::now() + limit;
        let (process, _, _) = tokio::time::timeout_at(deadline, started).await.map_err(|_| not_ready())??;
        let (screen, input) = SharedScreen::new(size);
        window.show_screen(&screen);
        let terminal = new_terminal.into_terminal(process.exited());
        let conversation = PtyConversation {
            terminal,
            screen,
            input,
            rules,
            pty: manifest.pty.clone(),
            program_name: name,
            own_foreground: None,
            keeper: Arc::clone(keeper),
            helpers: manifest.turn.helpers.clone(),
        };
        let mut agent = Self { process, conversation };
        match tokio::time::timeout_at(deadline, agent.conversation.wait_until_ready()).await {
            Ok(Ok(())) => Ok(agent),
            Ok(Err(PtyFailure::ProgramExited)) => Err(agent.exit_error("before it was ready").await),
            Ok(Err(PtyFailure::Unclear(error))) => Err(error),
            Err(_) => Err(RunError { stderr: agent.conversation.last_lines(), ..not_ready() }),
        }
    }

    /// Explains why the program is gone, with the last lines of its screen if stderr is empty.
    async fn exit_error(&mut self, when: &str) -> RunError {
        let error = self.process.exit_error(when).await;
        match error.stderr.is_empty() {
            true => RunError { stderr: self.conversation.last_lines(), ..error },
            false => error,
        }
    }
}

impl AgentDriver for PtyAgent {
    /// The conversation has no id: it lives in the agent's process. A turn is steered by typing while it runs.
    fn ready_update(&self, _: &AgentSpec) -> AgentUpdate {
        let steers = self.conversation.pty.queued_input_supported;
        AgentUpdate::Ready { agent_session_id: None, steers }
    }

    /// If the state of the program is unclear, it must be ended.
    fn turn<'a>(
        &'a mut self,
        turn: &'a DriverTurn<'a>,
        prompt: &'a DriverPrompt,
    ) -> BoxFuture<'a, Result<DriverTurnEnd, LinkClosed>> {
        Box::pin(async move {
            Ok(match self.conversation.turn(turn, prompt).await? {
                Ok(outcome) => DriverTurnEnd::Stopped(outcome),
                Err(PtyFailure::ProgramExited) => {
                    DriverTurnEnd::AgentExited(self.exit_error("in the middle of its turn").await)
                }
                Err(PtyFailure::Unclear(error)) => DriverTurnEnd::AgentExited(error),
            })
        })
    }

    fn idle<'a>(&'a mut self, _: &'a AgentOutput) -> BoxFuture<'a, RunError> {
        Box::pin(async move {
            self.conversation.idle().await;
            self.exit_error("between two turns").await
        })
    }

    /// Ends the program as closing its window would: the terminal hangs up.
    fn stop(self: Box<Self>) -> BoxFuture<'static, ()> {
        let exited = self.process.exited();
        drop(self);
        // The keeper ends a program that stays.
        Box::pin(async move { drop(tokio::time::timeout(LEAVE_GRACE, exited).await) })
    }
}

impl Drop for PtyAgent {
    fn drop(&mut self) {
        self.conversation.screen.close();
    }
}

/// Wraps the program in `qd __tty`, which gives it its terminal.
fn in_terminal(program: AgentProgram, terminal: &str) -> AgentProgram {
    let AgentProgram { argv, process_name: _, mut env } = program;
    env.entry("TERM".to_owned()).or_insert_with(|| TERM.to_owned());
    let own = own_program().to_string_lossy().into_owned();
    let step = [own, crate::tty::TTY_COMMAND.to_owned(), terminal.to_owned()];
    AgentProgram {
        argv: step.into_iter().chain(argv).collect(),
        process_name: Some(qd_keeper::process_setup::PROGRAM_NAME.to_owned()),
        env,
    }
}
