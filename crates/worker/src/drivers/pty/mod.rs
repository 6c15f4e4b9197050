//! The driver for any program that wants a terminal: one program, from its start to its end. It types prompts as a
//! person would and reads the screen as a person would; what the screen means stands in the program's manifest, or is
//! learnt from it where that says nothing. What cannot be told is an error, and never a guess.
//!
//! Layout, in reading order:
//! - `talk`: the start, turns and the time between them, in one loop each; `round`: what is known of one turn.
//! - `rules`: what a screen means; `prompt_line`: the line in which a program waits, learnt.
//! - `transcript`, `teller`: from the screen to the lines of a turn, and from those to what is said.
//! - `keys`: what is typed; `screen`: what is shown; `view`: the same for people who look on.
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

use std::sync::Arc;
use std::time::Duration;

use qd_keeper::KeeperHandle;
use qd_link::LinkClosed;
use qd_protocol::event::RunError;
use qd_protocol::manifest::Manifest;
use qd_protocol::worker::AgentSpec;

use self::conversation::{PtyConversation, PtyFailure};
use self::screen::TerminalSize;
use self::screen_rules::ScreenRules;
use self::shared_screen::SharedScreen;
use self::terminal::NewTerminal;
use super::process::{AgentProcess, AgentProgram};
use crate::agent_kind::own_program;
use crate::terminal_window::TerminalWindow;
use crate::turn::{DriverPrompt, DriverTurn, DriverTurnEnd};

/// How long a program whose terminal hung up may take to leave by itself.
const LEAVE_GRACE: Duration = Duration::from_secs(1);
/// What programs take the terminal for: what is shown of it can be drawn on nearly all of them.
const TERM: &str = "xterm-256color";

/// One live program.
pub(crate) struct PtyAgent {
    process: AgentProcess,
    conversation: PtyConversation,
}

impl PtyAgent {
    /// Starts the program in a terminal of its own, which the window shows from then on, and waits until it takes a
    /// prompt, within the limit.
    pub(crate) async fn start(
        spec: &AgentSpec,
        manifest: &Manifest,
        keeper: Arc<KeeperHandle>,
        window: &TerminalWindow,
        limit: Duration,
    ) -> Result<Self, RunError> {
        let rules = ScreenRules::from_manifest(manifest)?;
        let size = TerminalSize::clamped(manifest.pty.cols, manifest.pty.rows);
        let fresh = NewTerminal::open(size).map_err(|cause| {
            RunError::new("agent_failed_to_start", format!("no terminal could be opened: {cause}"))
        })?;
        let program = AgentProgram::from_manifest(manifest, spec);
        let name =
            program.argv.first().and_then(|path| path.rsplit('/').next()).unwrap_or_default().to_owned();
        let started = AgentProcess::start(&keeper, spec, in_terminal(program, &fresh.path));
        let late = || {
            RunError::new("agent_not_ready", format!("the agent was not ready within {} s", limit.as_secs()))
        };
        let until = tokio::time::Instant::now() + limit;
        let (process, _, _) = tokio::time::timeout_at(until, started).await.map_err(|_| late())??;
        let (view, typed) = SharedScreen::new(size);
        window.show_screen(&view);
        let terminal = fresh.into_terminal(process.exited());
        let talk = PtyConversation {
            terminal,
            screen: view,
            input: typed,
            rules,
            pty: manifest.pty.clone(),
            program_name: name,
            own_foreground: None,
            keeper,
            helpers: manifest.turn.helpers.clone(),
        };
        let mut agent = Self { process, conversation: talk };
        match tokio::time::timeout_at(until, agent.conversation.wait_until_ready()).await {
            Ok(Ok(())) => Ok(agent),
            Ok(Err(PtyFailure::ProgramExited)) => Err(agent.exit_error("before it was ready").await),
            Ok(Err(PtyFailure::Unclear(error))) => Err(error),
            Err(_) => Err(RunError { stderr: agent.conversation.last_lines(), ..late() }),
        }
    }

    /// Whether a turn can be steered: by typing while it runs.
    pub(crate) fn steers(&self) -> bool {
        self.conversation.pty.queued_input_supported
    }

    /// One turn. If it is dropped, the program is in an unknown state and must be ended; so it must be if it cannot be
    /// told what it does.
    pub(crate) async fn turn(
        &mut self,
        turn: &DriverTurn<'_>,
        prompt: &DriverPrompt,
    ) -> Result<DriverTurnEnd, LinkClosed> {
        Ok(match self.conversation.turn(turn, prompt).await? {
            Ok(outcome) => DriverTurnEnd::Stopped(outcome),
            Err(PtyFailure::ProgramExited) => {
                DriverTurnEnd::AgentExited(self.exit_error("in the middle of its turn").await)
            }
            Err(PtyFailure::Unclear(error)) => DriverTurnEnd::AgentExited(error),
        })
    }

    /// The time between turns. Comes back when the program has ended; nothing is lost if the wait is given up.
    pub(crate) async fn idle(&mut self) -> RunError {
        self.conversation.idle().await;
        self.exit_error("between two turns").await
    }

    /// Ends it as a closed window would: its terminal hangs up. The rest is the keeper's.
    pub(crate) async fn stop(self) {
        let exited = self.process.exited();
        drop(self);
        // The keeper makes it go.
        let _left = tokio::time::timeout(LEAVE_GRACE, exited).await;
    }

    /// Why it is gone, with what its screen last showed.
    async fn exit_error(&mut self, when: &str) -> RunError {
        let error = self.process.exit_error(when).await;
        match error.stderr.is_empty() {
            true => RunError { stderr: self.conversation.last_lines(), ..error },
            false => error,
        }
    }
}

impl Drop for PtyAgent {
    fn drop(&mut self) {
        self.conversation.screen.close();
    }
}

/// The program behind the step that makes a terminal its own.
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
