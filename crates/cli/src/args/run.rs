//! The flags of verbs that start or change a session: `run`, `adopt`, `send`, `set` and `queue`.

use std::path::PathBuf;

use clap::{Args, ValueEnum};

use qd_protocol::sandbox::{NetworkSetting, SandboxSetting};

use super::sandbox::{network_parser, sandbox_parser};
use super::seconds;
use crate::render::session_cells::OUTCOME_WORDS;

/// `qd run`.
#[derive(Debug, Args)]
pub(crate) struct RunArgs {
    /// Agent to run [default: the configured one, else the only one installed]
    #[arg(long, short, value_name = "AGENT", conflicts_with = "session")]
    pub(crate) agent: Option<String>,
    /// Start in the background and print the session's id
    #[arg(long, short)]
    pub(crate) detach: bool,
    /// Project directory [default: the current directory]
    #[arg(short = 'C', value_name = "DIR", conflicts_with = "session")]
    pub(crate) dir: Option<PathBuf>,
    /// Model to use, as the agent names it
    #[arg(long, value_name = "MODEL", conflicts_with = "session")]
    pub(crate) model: Option<String>,
    /// Mode of the agent, such as plan; `qd agents --json` lists its modes
    #[arg(long, value_name = "MODE", conflicts_with = "session")]
    pub(crate) mode: Option<String>,
    /// Title for the session; other commands accept it in place of the id
    #[arg(long, value_name = "TITLE", conflicts_with = "session")]
    pub(crate) title: Option<String>,
    /// Continue this session instead of starting a new one
    #[arg(long, value_name = "ID")]
    pub(crate) session: Option<String>,
    /// Permission policy: ask, allow, deny, or rules as JSON or as a JSON file
    #[arg(long, value_name = "POLICY", conflicts_with = "session")]
    pub(crate) policy: Option<String>,
    /// Work in a new git worktree on a new branch, apart from your checkout
    #[arg(long, conflicts_with = "session")]
    pub(crate) worktree: bool,
    /// How strongly to confine the agent; see docs/sandbox.md
    #[arg(long, value_name = "LEVEL", value_parser = sandbox_parser(), conflicts_with = "session")]
    pub(crate) sandbox: Option<SandboxSetting>,
    /// Whether the agent reaches the network
    #[arg(long, value_name = "NETWORK", value_parser = network_parser(), conflicts_with = "session")]
    pub(crate) network: Option<NetworkSetting>,
    /// Stop the session's runs once it and the sessions below it have cost this many US dollars
    #[arg(long, value_name = "DOLLARS", value_parser = dollars, conflicts_with = "session")]
    pub(crate) budget: Option<f64>,
    /// Stop each run after this many model calls
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..), conflicts_with = "session")]
    pub(crate) max_turns: Option<u32>,
    /// System prompt for the agent
    #[arg(long, value_name = "TEXT", conflicts_with = "session")]
    pub(crate) system_prompt: Option<String>,
    /// Environment variable for the agent; without a value, the one that it has here; repeatable
    #[arg(long, value_name = "NAME[=VALUE]", conflicts_with = "session")]
    pub(crate) env: Vec<String>,
    /// File to attach to the prompt, such as a log or an image; repeatable
    #[arg(long, value_name = "PATH")]
    pub(crate) file: Vec<PathBuf>,
    /// What to do when the agent asks for permission or has a question [default: wait on a terminal, else exit]
    #[arg(long, value_enum, value_name = "ACTION")]
    pub(crate) on_ask: Option<OnAskAction>,
    /// Cancel the run after this time, such as 90 (seconds) or 10m, with exit code 124
    #[arg(long, value_name = "TIME", value_parser = seconds)]
    pub(crate) timeout: Option<f64>,
    /// The prompt; `-` reads it from stdin. Put `--` before one that begins with a dash
    pub(crate) prompt: String,
}

/// `qd adopt`.
#[derive(Debug, Args)]
pub(crate) struct AdoptArgs {
    /// Id of the conversation to continue, or its first characters; without one, conversations are listed
    pub(crate) id: Option<String>,
    /// Only conversations of this agent
    #[arg(long, short, value_name = "AGENT")]
    pub(crate) agent: Option<String>,
    /// Project directory [default: the current directory]
    #[arg(short = 'C', value_name = "DIR")]
    pub(crate) dir: Option<PathBuf>,
    /// List the conversations of all directories
    #[arg(long, conflicts_with_all = ["id", "dir"])]
    pub(crate) all: bool,
}

/// What `qd run` does when its agent opens an ask.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum OnAskAction {
    /// Wait for an answer, from this terminal or any other
    Wait,
    /// Deny permission requests and let the agent continue; cancel the run on a question
    Deny,
    /// Cancel the run and exit with 1
    Fail,
    /// Exit with 1 and leave the run waiting for an answer
    Exit,
}

/// `qd send`.
#[derive(Debug, Args)]
pub(crate) struct SendArgs {
    /// Session id or title
    pub(crate) id: String,
    /// The prompt; `-` reads it from stdin. Put `--` before one that begins with a dash
    pub(crate) text: String,
    /// Pass the text to the run in progress instead of queueing a new run
    #[arg(long, conflicts_with = "file")]
    pub(crate) steer: bool,
    /// File to attach to the prompt, such as a log or an image; repeatable
    #[arg(long, value_name = "PATH")]
    pub(crate) file: Vec<PathBuf>,
}

/// `qd set`.
#[derive(Debug, Args)]
pub(crate) struct SetArgs {
    /// Session id or title
    pub(crate) id: String,
    /// What to change: title, model, mode, policy, sandbox, network, budget, max_turns, timeout, grace or max_journal_mb; `none` removes a limit
    #[arg(required = true, value_name = "KEY=VALUE")]
    pub(crate) changes: Vec<String>,
}

/// `qd queue`.
#[derive(Debug, Args)]
pub(crate) struct QueueArgs {
    /// Session id or title
    pub(crate) id: String,
    /// Remove this run, which ends as cancelled; repeatable
    #[arg(long, value_name = "RUN", conflicts_with = "clear")]
    pub(crate) remove: Vec<String>,
    /// Remove all queued runs; the active run goes on
    #[arg(long)]
    pub(crate) clear: bool,
    /// Move this run to another place in the queue
    #[arg(long = "move", value_name = "RUN", requires = "to", conflicts_with_all = ["clear", "remove"])]
    pub(crate) moved_run: Option<String>,
    /// The place to move it to: 1 is next; a number beyond the end means the end
    #[arg(long, value_name = "PLACE", requires = "moved_run", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) to: Option<u32>,
}

/// `qd wait`.
#[derive(Debug, Args)]
pub(crate) struct WaitArgs {
    /// Sessions, runs or fleets
    #[arg(required = true, value_name = "ID")]
    pub(crate) ids: Vec<String>,
    /// Stop waiting after this time, such as 90 (seconds) or 10m, with exit code 124
    #[arg(long, value_name = "TIME", value_parser = seconds)]
    pub(crate) timeout: Option<f64>,
    /// What to do when a run waits for a person
    #[arg(long, value_enum, value_name = "ACTION", default_value_t = OnAskWhileWaiting::Wait)]
    pub(crate) on_ask: OnAskWhileWaiting,
}

/// What `qd wait` does when something that it waits for opens an ask.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum OnAskWhileWaiting {
    /// Say so, and wait for the answer
    Wait,
    /// Say so, and exit with 1; the run stays as it is
    Fail,
}

/// A condition of `qd ps --filter`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum SessionCondition {
    /// The session is in this state, or its last run ended so.
    State(String),
    /// The session has this agent.
    Agent(String),
    /// The title contains this.
    Title(String),
}

/// Parses a condition of `qd ps --filter`.
pub(super) fn session_condition(text: &str) -> Result<SessionCondition, String> {
    let expected = "expected state=STATE, agent=NAME or title=TEXT";
    let (key, value) = text.split_once('=').ok_or(expected)?;
    match key {
        "state" => session_state(value).map(SessionCondition::State),
        "agent" => Ok(SessionCondition::Agent(value.to_owned())),
        "title" => Ok(SessionCondition::Title(value.to_lowercase())),
        _ => Err(expected.to_owned()),
    }
}

/// Parses a state of a session or how its last run ended, in the words of `qd ps`. Spaces may be typed as `-`.
fn session_state(text: &str) -> Result<String, String> {
    const STATES: [&str; 5] = ["idle", "starting", "running", "waiting", "closed"];
    let word = text.to_lowercase().replace('-', " ");
    if STATES.contains(&word.as_str()) || OUTCOME_WORDS.contains(&word.as_str()) {
        return Ok(word);
    }
    let outcomes = OUTCOME_WORDS.map(|word| word.replace(' ', "-"));
    Err(format!("a state is one of {}, {}", STATES.join(", "), outcomes.join(", ")))
}

/// Parses an amount of money.
fn dollars(text: &str) -> Result<f64, String> {
    match text.trim_start_matches('$').parse::<f64>() {
        Ok(amount) if amount > 0.0 && amount.is_finite() => Ok(amount),
        _ => Err("expected an amount of US dollars above 0, such as 5 or 0.50".to_owned()),
    }
}
