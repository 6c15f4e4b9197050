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

mod keys;
mod prompt_line;
mod round;
mod rules;
pub(crate) mod screen;
mod talk;
mod teller;
mod terminal;
mod transcript;
pub(crate) mod view;

use std::sync::Arc;
use std::time::Duration;

use qd_keeper::Keeper;
use qd_link::Closed;
use qd_protocol::event::RunError;
use qd_protocol::manifest::Manifest;
use qd_protocol::worker::AgentSpec;

use self::rules::Rules;
use self::screen::Size;
use self::talk::{Talk, Unfit};
use self::terminal::Fresh;
use self::view::View;
use super::process::{Process, Program};
use crate::kinds::own_program;
use crate::turn::{End, Prompt, Turn};
use crate::window::Window;

/// How long a program whose terminal hung up may take to leave by itself.
const LEAVE: Duration = Duration::from_secs(1);
/// What programs take the terminal for: what is shown of it can be drawn on nearly all of them.
const TERM: &str = "xterm-256color";

/// One live program.
pub(crate) struct Pty {
    process: Process,
    talk: Talk,
}

impl Pty {
    /// Starts the program in a terminal of its own, which the window shows from then on, and waits until it takes a
    /// prompt, within the limit.
    pub(crate) async fn start(
        spec: &AgentSpec,
        manifest: &Manifest,
        keeper: Arc<Keeper>,
        window: &Window,
        limit: Duration,
    ) -> Result<Self, RunError> {
        let rules = Rules::of(manifest)?;
        let size = Size::near(manifest.pty.cols, manifest.pty.rows);
        let fresh = Fresh::open(size).map_err(|cause| {
            RunError::new("agent_failed_to_start", format!("no terminal could be opened: {cause}"))
        })?;
        let program = Program::of(manifest, spec);
        let name =
            program.argv.first().and_then(|path| path.rsplit('/').next()).unwrap_or_default().to_owned();
        let started = Process::start(&keeper, spec, in_terminal(program, &fresh.path));
        let late = || {
            RunError::new("agent_not_ready", format!("the agent was not ready within {} s", limit.as_secs()))
        };
        let until = tokio::time::Instant::now() + limit;
        let (process, _, _) = tokio::time::timeout_at(until, started).await.map_err(|_| late())??;
        let (view, typed) = View::new(size);
        window.open(&view);
        let terminal = fresh.of(process.exited());
        let talk = Talk {
            terminal,
            view,
            typed,
            rules,
            pty: manifest.pty.clone(),
            name,
            own: None,
            keeper,
            helpers: manifest.turn.helpers.clone(),
        };
        let mut agent = Self { process, talk };
        match tokio::time::timeout_at(until, agent.talk.open()).await {
            Ok(Ok(())) => Ok(agent),
            Ok(Err(Unfit::Over)) => Err(agent.why("before it was ready").await),
            Ok(Err(Unfit::Unclear(error))) => Err(error),
            Err(_) => Err(RunError { stderr: agent.talk.last_lines(), ..late() }),
        }
    }

    /// Whether a turn can be steered: by typing while it runs.
    pub(crate) fn steers(&self) -> bool {
        self.talk.pty.queued_input_supported
    }

    /// One turn. If it is dropped, the program is in an unknown state and must be ended; so it must be if it cannot be
    /// told what it does.
    pub(crate) async fn turn(&mut self, turn: &Turn<'_>, prompt: &Prompt) -> Result<End, Closed> {
        Ok(match self.talk.turn(turn, prompt).await? {
            Ok(outcome) => End::Stopped(outcome),
            Err(Unfit::Over) => End::Exited(self.why("in the middle of its turn").await),
            Err(Unfit::Unclear(error)) => End::Exited(error),
        })
    }

    /// The time between turns. Comes back when the program has ended; nothing is lost if the wait is given up.
    pub(crate) async fn idle(&mut self) -> RunError {
        self.talk.idle().await;
        self.why("between two turns").await
    }

    /// Ends it as a closed window would: its terminal hangs up. The rest is the keeper's.
    pub(crate) async fn stop(self) {
        let exited = self.process.exited();
        drop(self);
        // The keeper makes it go.
        let _left = tokio::time::timeout(LEAVE, exited).await;
    }

    /// Why it is gone, with what its screen last showed.
    async fn why(&mut self, when: &str) -> RunError {
        let error = self.process.why(when).await;
        match error.stderr.is_empty() {
            true => RunError { stderr: self.talk.last_lines(), ..error },
            false => error,
        }
    }
}

impl Drop for Pty {
    fn drop(&mut self) {
        self.talk.view.end();
    }
}

/// The program behind the step that makes a terminal its own.
fn in_terminal(program: Program, terminal: &str) -> Program {
    let Program { argv, called: _, mut env } = program;
    env.entry("TERM".to_owned()).or_insert_with(|| TERM.to_owned());
    let own = own_program().to_string_lossy().into_owned();
    let step = [own, crate::tty::VERB.to_owned(), terminal.to_owned()];
    Program {
        argv: step.into_iter().chain(argv).collect(),
        called: Some(qd_keeper::own::PROGRAM.to_owned()),
        env,
    }
}
