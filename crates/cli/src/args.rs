//! The command line: every verb, its flags and its help text. Values are validated here as far as that is possible
//! without a daemon; verbs ask the daemon about the rest.

use std::path::PathBuf;

mod access;
mod machines;
mod reports;
mod run;
mod sandbox;

use clap::{Args, Parser, Subcommand, ValueEnum};
use qd_protocol::policy::Risk;

pub(crate) use self::access::{AuditArgs, TokenCreateArgs, TokensVerb};
pub(crate) use self::machines::{JoinArgs, QuotaVerb, ServeArgs, WorkerTokenArgs, WorkerVerb, WorkersVerb};
pub(crate) use self::reports::{CostArgs, LogsArgs, SearchArgs, StatusArgs};
use self::run::session_condition;
pub(crate) use self::run::{
    AdoptArgs, OnAskAction, OnAskWhileWaiting, QueueArgs, RunArgs, SendArgs, SessionCondition, SetArgs,
    WaitArgs,
};
pub(crate) use self::sandbox::{parse_network, parse_sandbox};
use crate::client::host::DaemonHost;
use crate::verbs::worker;

/// Run, watch, steer and recover fleets of AI coding agents.
#[derive(Debug, Parser)]
#[command(name = "qd", version, propagate_version = true)]
#[command(after_help = "Examples:
  qd run 'explain this repository'      start a session and watch it answer
  qd run --detach 'fix the tests'       start it in the background; see `qd ps`
  qd status                             what needs you, works, or has finished
  qd asks                               what agents need your answer for
  qd up fleet.yaml                      start a team of agents

Wherever a command takes an id, the first characters of the id or the session's title work too. \
The daemon starts by itself when it is needed; `qd stop` stops it.

Exit codes: 0 success, 1 failure, 2 usage error, 3 not found, 4 daemon unreachable or not answering for 10 s, \
124 timeout, 130 cancelled.")]
pub(crate) struct CommandLine {
    #[command(flatten)]
    pub(crate) global: GlobalArgs,
    #[command(subcommand)]
    pub(crate) verb: CliVerb,
}

/// Flags that every verb accepts.
#[derive(Debug, Args)]
pub(crate) struct GlobalArgs {
    /// Print JSON: a single value, or one value per line for streams
    #[arg(long, global = true, help_heading = "Global options")]
    pub(crate) json: bool,
    /// Daemon to talk to: unix:PATH or http[s]://HOST:PORT [default: $QD_HOST, else the home's socket]
    #[arg(long, global = true, value_name = "HOST", help_heading = "Global options")]
    pub(crate) host: Option<DaemonHost>,
    /// Directory with the daemon's data [default: $QD_HOME, else ~/.local/share/quarterdeck]
    #[arg(long, global = true, value_name = "DIR", help_heading = "Global options")]
    pub(crate) home: Option<PathBuf>,
}

/// The verbs. Their doc comments are what `qd --help` prints.
#[derive(Debug, Subcommand)]
pub(crate) enum CliVerb {
    /// Start an agent on a prompt and show what it does
    #[command(after_help = "Examples:
  qd run 'why does the build fail?'
  git diff | qd run --agent claude -
  qd run --detach --title nightly --policy allow 'update the dependencies'

Ctrl-C cancels the run and waits for it to end. A second Ctrl-C exits without waiting. Ctrl-Z detaches: the run goes on.")]
    Run(RunArgs),
    /// Show what needs you, what is working, and what finished since your last look
    #[command(after_help = "Examples:
  qd status
  qd status --since 8h
  qd status --json | jq '.needs_you[].next'

Each line ends with the command that comes next. Only a look at a terminal counts as your last look: output to a pipe or \
a file, --json and --since leave it unchanged. The first look shows the last 24 hours.")]
    Status(StatusArgs),
    /// List conversations begun in an agent's own program, or continue one as a session
    #[command(after_help = "Examples:
  qd adopt                              list the conversations of this directory
  qd adopt --all --agent codex          list Codex's, of all directories
  qd adopt fb006d6f                     make a session of one

Leave the agent's own program before you continue its conversation here: two programs must not write to it at once. \
The session's log begins with its first prompt here; the agent remembers what was said before.")]
    Adopt(AdoptArgs),
    /// List sessions, or fleets with --fleet
    #[command(after_help = "Examples:
  qd ps
  qd ps -a --json | jq '.[].id'
  qd cancel $(qd ps -q --filter agent=claude --filter state=running)
  qd ps --filter state=failed
  qd ps --fleet                         list fleets
  qd ps --fleet flt_4k                  list the sessions of one fleet

STATE is what a session does, or how its last run ended. LAST is the time since something happened, CHANGES the lines of \
unmerged work in its worktree.")]
    Ps {
        /// Include closed sessions, and those without activity for a day
        #[arg(short, long)]
        all: bool,
        /// List fleets, or with an id the sessions of that fleet
        #[arg(long, value_name = "FLEET", num_args = 0..=1, default_missing_value = "")]
        fleet: Option<String>,
        /// Show sessions as a tree below the session that started them, with the cost of each subtree
        #[arg(long, conflicts_with = "fleet")]
        tree: bool,
        /// Print only the ids
        #[arg(short, long, conflicts_with_all = ["fleet", "tree"])]
        quiet: bool,
        /// Also show how strongly each agent is confined, and why one is not
        #[arg(short, long, conflicts_with_all = ["fleet", "tree", "quiet"])]
        verbose: bool,
        /// Only sessions with this value of state, agent or title (part of it is enough); repeatable
        #[arg(long, value_name = "KEY=VALUE", value_parser = session_condition, conflicts_with_all = ["fleet", "tree"])]
        filter: Vec<SessionCondition>,
    },
    /// Start a fleet from a file and watch it until it ends
    #[command(after_help = "Examples:
  qd up fleet.yaml
  qd up fleet.yaml --task 'port the parser' --detach
  qd up fleet.yaml --plan               show who would do what, start nothing

Exit code: 0 if every session succeeded or a route handled its failure, 1 if not, 130 if the fleet was cancelled.

Ctrl-C cancels the fleet and waits for it to end. A second Ctrl-C exits without waiting. Ctrl-Z detaches: it goes on.")]
    Up(UpArgs),
    /// Cancel fleets
    #[command(after_help = "Examples:
  qd down flt_4k")]
    Down {
        /// Fleet ids
        #[arg(required = true, value_name = "FLEET")]
        ids: Vec<String>,
    },
    /// Show a session so far, follow it live and talk to it; or watch a fleet
    #[command(after_help = "Examples:
  qd attach ses_4k
  echo 'and now the tests' | qd attach nightly
  qd attach --raw ses_4k                use the agent's own terminal interface
  qd attach flt_4k                      watch a fleet; Ctrl-C leaves it running

A line that you type is sent as a prompt, or as the answer if the agent is asking something. \
Commands: /steer TEXT, /cancel, /detach, /help.

With --raw, every key goes to the agent's program. Ctrl-] detaches; the session keeps running.")]
    Attach {
        /// Session id or title, or fleet id
        id: String,
        /// Show the agent's terminal screen and send it your keys (terminal agents only); Ctrl-] detaches
        #[arg(long, conflicts_with = "json")]
        raw: bool,
    },
    /// Send a prompt to a session without waiting for the answer
    #[command(after_help = "Examples:
  qd send nightly 'then open a pull request'
  qd send nightly --steer 'skip the slow tests'")]
    Send(SendArgs),
    /// Change a session's title, model, mode, policy, confinement or limits
    #[command(after_help = "Examples:
  qd set nightly title='nightly build' policy=allow
  qd set ses_4k budget=5 max_turns=40
  qd set ses_4k budget=none
  qd set ses_4k mode=plan

A new model or mode applies from the next turn, a new policy to later asks, `sandbox` and `network` from the agent's next start. \
`policy` takes what --policy takes, `timeout` and `grace` take seconds.")]
    Set(SetArgs),
    /// List a session's queued runs, remove some, or move one
    #[command(after_help = "Examples:
  qd queue nightly
  qd queue nightly --move run_7x --to 1
  qd queue nightly --remove run_7x
  qd queue nightly --clear")]
    Queue(QueueArgs),
    /// Print the conversation of a session, a run or a fleet
    #[command(after_help = "Examples:
  qd logs nightly
  qd logs --since 2h --tail 40 nightly
  qd logs -f --json run_7x | jq .kind")]
    Logs(LogsArgs),
    /// Find text in the prompts, answers, tool calls and changed files of all sessions
    #[command(after_help = "Examples:
  qd search flaky parser                both words, anywhere in the same text
  qd search 'connection reset' --since 7d
  qd search 'pars*' --agent claude      words that begin with `pars`
  qd search cargo publish --json | jq -r '.hits[].open'

The newest come first, each with the command that shows its conversation. Words are compared without case and accents. \
An argument of several words is a phrase.")]
    Search(SearchArgs),
    /// Show the tokens and the cost that sessions have used
    #[command(after_help = "Examples:
  qd cost                               all sessions, by agent
  qd cost --since 7d --by day
  qd cost --since today --by session
  qd cost --by model --json | jq .total.cost_usd

`unknown` means that no run reported a cost; `over $1.50`, that some did not. Purged sessions are not counted.")]
    Cost(CostArgs),
    /// Wait until sessions, runs or fleets are finished
    #[command(after_help = "Examples:
  qd wait nightly && make release
  qd wait --timeout 600 ses_4k flt_9b
  qd wait --on-ask fail nightly         stop waiting if a person is needed

The exit code is 0 only if every run that was waited for ended well; otherwise it is the highest of theirs. \
For a session that is idle already, it is that of its last run. What is waited for goes to stderr.")]
    Wait(WaitArgs),
    /// Cancel a session's current and queued runs, or a single run
    #[command(after_help = "Examples:
  qd cancel nightly
  qd cancel run_7x run_8a")]
    Cancel {
        /// Sessions or runs
        #[arg(required = true, value_name = "ID")]
        ids: Vec<String>,
    },
    /// Close sessions, so they accept no more prompts
    #[command(after_help = "Examples:
  qd rm nightly
  qd rm --purge ses_4k")]
    Rm {
        /// Sessions
        #[arg(required = true, value_name = "ID")]
        ids: Vec<String>,
        /// Also delete their events from the journal; this cannot be undone
        #[arg(long)]
        purge: bool,
    },
    /// Show the changes in a session's worktree, committed or not
    #[command(after_help = "Examples:
  qd diff nightly
  qd diff --stat ses_4k
  qd diff ses_4k | git apply --check")]
    Diff {
        /// Session id or title
        id: String,
        /// Show only the changed files with their line counts
        #[arg(long)]
        stat: bool,
    },
    /// Merge a session's worktree into a branch
    #[command(after_help = "Examples:
  qd merge nightly                      into the branch that it started from
  qd merge ses_4k --into release --squash

Uncommitted changes in the worktree are committed first. On a conflict, the conflicts are shown and nothing changes. \
If the target branch is checked out somewhere, that checkout is updated too; it must have no uncommitted changes.")]
    Merge {
        /// Session id or title
        id: String,
        /// Branch to merge into [default: the branch that the worktree was created from]
        #[arg(long, value_name = "BRANCH")]
        into: Option<String>,
        /// Squash everything into one commit
        #[arg(long)]
        squash: bool,
        /// Message of the commits that the merge makes [default: the session's title]
        #[arg(short, long, value_name = "MESSAGE")]
        message: Option<String>,
    },
    /// List the worktrees of sessions, or remove them
    #[command(after_help = "Examples:
  qd worktrees
  qd worktrees rm ses_4k
  qd worktrees gc                       remove merged ones of closed sessions")]
    Worktrees {
        #[command(subcommand)]
        verb: Option<WorktreesVerb>,
    },
    /// List agents' open permission requests and questions
    ///
    /// On a terminal, the list is followed by each ask as a whole, with a prompt for its answer. With an id, one ask is
    /// shown as a whole.
    #[command(after_help = "Examples:
  qd asks                 list the open asks; on a terminal, go through them
  qd asks 3f7a            show one ask whole
  qd asks --history       what was decided, and by whom
  qd asks -f --json")]
    Asks {
        /// Id of one ask, to show it whole
        ask: Option<String>,
        /// Keep printing new ones as they arrive
        #[arg(short, long, conflicts_with_all = ["ask", "history"])]
        follow: bool,
        /// List what was decided, the newest first
        #[arg(long, conflicts_with = "ask")]
        history: bool,
        /// How many decisions to list
        #[arg(long, value_name = "N", default_value = "50", requires = "history",
            value_parser = clap::value_parser!(u32).range(1..=100_000))]
        limit: u32,
    },
    /// List messages to sessions, or send one
    #[command(
        args_conflicts_with_subcommands = true,
        after_help = "Examples:
  qd mail                               list all messages and their state
  qd mail nightly --state waiting
  qd mail -f --json
  qd mail send nightly 'the build is green again'
  qd mail send nightly --steer 'skip the slow tests'"
    )]
    Mail {
        /// Only messages to this session (id or title)
        session: Option<String>,
        /// Only messages in this state
        #[arg(long, value_name = "STATE", conflicts_with = "follow",
            value_parser = ["waiting", "delivering", "claimed", "delivered", "acknowledged", "quarantined"])]
        state: Option<String>,
        /// Print messages and their deliveries as they happen from now on
        #[arg(short, long)]
        follow: bool,
        #[command(subcommand)]
        verb: Option<MailVerb>,
    },
    /// Approve an agent's permission request
    #[command(after_help = "Examples:
  qd allow 3f7a
  qd allow 3f7a 9k2c
  qd allow --all --risk low")]
    Allow {
        /// Ids of the asks, as `qd asks` lists them
        #[arg(required_unless_present = "all", conflicts_with = "all", value_name = "ASK")]
        asks: Vec<String>,
        /// Allow every open request; without --risk, you are asked to confirm
        #[arg(long)]
        all: bool,
        /// With --all: allow only requests up to this risk
        #[arg(long, value_enum, requires = "all", conflicts_with = "asks")]
        risk: Option<RiskArgument>,
        /// Allow this tool for the rest of the session; high-risk actions still need your approval
        #[arg(long)]
        always: bool,
    },
    /// Deny an agent's permission request
    #[command(after_help = "Example:
  qd deny 3f7a use the staging server")]
    Deny {
        /// Id of the ask, as `qd asks` lists it
        ask: String,
        /// Reason, passed on to the agent
        reason: Vec<String>,
    },
    /// Answer an agent's question
    #[command(after_help = "Examples:
  qd answer 3f7a 'the second one'
  qd answer 3f7a 2        choose the second option")]
    Answer {
        /// Id of the ask, as `qd asks` lists it
        ask: String,
        /// Your answer: any text, or an option of the question by its number or in full. Put `--` before one that
        /// begins with a dash
        #[arg(allow_negative_numbers = true)]
        value: String,
    },
    /// Test permission policies against past requests
    Policy {
        #[command(subcommand)]
        verb: PolicyVerb,
    },
    /// Stop new runs from starting, in all workspaces
    #[command(after_help = "Examples:
  qd halt
  qd halt --cancel the bill is too high")]
    Halt {
        /// Also cancel the runs in progress
        #[arg(long)]
        cancel: bool,
        /// Reason, recorded with the halt
        reason: Vec<String>,
    },
    /// Lift the halt: queued runs start again
    Unhalt,
    /// List accounts whose quota is exhausted, or let one start runs before it resets
    #[command(after_help = "Examples:
  qd quota
  qd quota release claude      its queued runs start again at once

When an agent reports that its quota is exhausted and when it resets, all sessions with the same agent and login \
wait until then.")]
    Quota {
        #[command(subcommand)]
        verb: Option<QuotaVerb>,
    },
    /// Trust a project's agents and hooks at their current content
    Trust {
        /// Project directory; without one, trusted projects are listed
        dir: Option<PathBuf>,
        /// Withdraw the trust
        #[arg(long, requires = "dir")]
        no: bool,
    },
    /// List known agents and whether they are installed
    Agents,
    /// List running workers, or manage the machines that may join
    #[command(after_help = "Examples:
  qd workers
  qd workers machines                  list joined machines
  qd workers token laptop              print how another machine joins
  qd workers revoke laptop")]
    Workers {
        #[command(subcommand)]
        verb: Option<WorkersVerb>,
    },
    /// Create, list or revoke the tokens with which clients use the daemon over TCP
    #[command(after_help = "Examples:
  qd tokens create phone --role approver --expires 30d
  qd tokens list
  qd tokens revoke phone")]
    Tokens {
        #[command(subcommand)]
        verb: Option<TokensVerb>,
    },
    /// Show who did what, and when, newest first
    #[command(after_help = "Examples:
  qd audit --since 24h
  qd audit --session parser --json")]
    Audit(AuditArgs),
    /// Serve an agent over WebSocket, or run agents for a daemon on another machine
    #[command(
        args_conflicts_with_subcommands = true,
        override_usage = "qd worker --listen ADDR --agent AGENT [OPTIONS]
       qd worker join URL --token TOKEN --label LABEL [OPTIONS]",
        after_help = "Examples:
  qd worker --listen 127.0.0.1:7778 --agent script
  qd worker --listen 127.0.0.1:0 --agent echo --serve one --accept-timeout-s 10

An address that other machines can reach needs --token, --tls-cert and --tls-key."
    )]
    Worker {
        #[command(flatten)]
        serve: Option<worker::WorkerArgs>,
        #[command(subcommand)]
        verb: Option<WorkerVerb>,
    },
    /// Run the daemon in the foreground
    #[command(after_help = "Examples:
  qd serve
  qd serve --listen unix:/run/user/1000/qd.sock --listen 127.0.0.1:7777
  qd serve --listen 0.0.0.0:7777 --tls self --allow-host build.example")]
    Serve(ServeArgs),
    /// Stop the daemon; running agents keep working
    Stop {
        /// Also stop the workers and their agents
        #[arg(long)]
        workers: bool,
    },
    /// Show the effective settings and where each comes from, or change one
    #[command(after_help = "Examples:
  qd config
  qd config set agent claude            the agent of `qd run` without --agent
  qd config unset agent

`set` and `unset` change config.toml in the home. docs/operations.md lists all keys.")]
    Config {
        #[command(subcommand)]
        verb: Option<ConfigVerb>,
    },
    /// Show disk usage and delete old closed sessions
    #[command(after_help = "Examples:
  qd gc
  qd gc --older-than 7 --yes")]
    Gc {
        /// Delete sessions that have been closed for this many days
        #[arg(long, value_name = "DAYS", default_value_t = 30)]
        older_than: u32,
        /// Actually delete; without it, only show what would be deleted
        #[arg(long)]
        yes: bool,
    },
    /// Check the installation and suggest fixes
    Doctor {
        /// Rebuild the lists of sessions, runs and asks from the journal; stop the daemon first
        #[arg(long)]
        rebuild: bool,
    },
    /// Serve Quarterdeck's tools as an MCP server on stdio
    #[command(
        after_help = "Agents that Quarterdeck starts get this server automatically. To use it from an editor, \
configure an MCP server with the command `qd` and the argument `mcp`; see docs/mcp.md."
    )]
    Mcp {
        /// Project directory for agents started through the tools [default: the current directory]
        #[arg(short = 'C', value_name = "DIR")]
        dir: Option<PathBuf>,
    },
    /// Print a shell completion script
    #[command(after_help = "Example:
  qd completions bash > ~/.local/share/bash-completion/completions/qd

In bash, zsh and fish, Tab also offers the ids of sessions, fleets, asks and queued runs, with their titles. It asks the \
daemon that runs, and offers no ids if none runs or it does not answer within 1 s.")]
    Completions {
        /// Shell to generate the script for
        shell: clap_complete::Shell,
    },
    /// Write the manual pages
    #[command(after_help = "Examples:
  qd man ~/.local/share/man/man1       then `man qd-run`
  qd man | man -l -                    read the main page")]
    Man {
        /// Directory to write one page per verb into; without it, the main page goes to stdout
        dir: Option<PathBuf>,
    },
}

/// `qd config`.
#[derive(Debug, Subcommand)]
pub(crate) enum ConfigVerb {
    /// Change a setting
    Set {
        /// Key, as `qd config` lists it
        key: String,
        /// New value: a word, a number, or any TOML value
        #[arg(allow_negative_numbers = true)]
        value: String,
    },
    /// Remove a setting from the home's file, so that its default applies
    Unset {
        /// Key, as `qd config` lists it
        key: String,
    },
}

/// `qd policy`.
#[derive(Debug, Subcommand)]
pub(crate) enum PolicyVerb {
    /// Show what would change if a policy had been in effect
    #[command(after_help = "Examples:
  qd policy test rules.json
  qd policy test allow --session nightly
  qd policy test rules.json --limit 200
  qd policy test rules.json --json | jq '.trials[] | select(.against_person)'

A policy is `ask`, `allow`, `deny` or a list of rules, as for `qd run --policy`:
  [{\"tool\": \"Bash\", \"match\": \"git status*\", \"decision\": \"allow\"}]

This is a dry run: no past decision and no session's policy changes. Exit code 2: the policy is not valid.")]
    Test {
        /// JSON file with rules, or anything else that --policy accepts
        #[arg(value_name = "FILE")]
        policy: String,
        /// Only requests of this session
        #[arg(long, value_name = "ID")]
        session: Option<String>,
        /// Only requests from this project directory
        #[arg(long, value_name = "DIR")]
        workspace: Option<PathBuf>,
        /// Only the newest N requests, up to 1000
        #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1000))]
        limit: Option<u32>,
    },
}

/// `qd worktrees`.
#[derive(Debug, Subcommand)]
pub(crate) enum WorktreesVerb {
    /// Remove the worktrees of closed sessions, asking first if one has unmerged work
    Rm {
        /// Sessions whose worktrees to remove
        #[arg(required = true, value_name = "ID")]
        ids: Vec<String>,
        /// Remove them even with unmerged work; commits stay on their branch, uncommitted changes are lost
        #[arg(long)]
        force: bool,
    },
    /// Remove all worktrees of closed sessions that are fully committed and merged
    Gc,
}

/// `qd mail`.
#[derive(Debug, Subcommand)]
pub(crate) enum MailVerb {
    /// Send a message: an idle session starts on it at once, a busy one after its turn
    Send {
        /// Session id or title
        id: String,
        /// The message; `-` reads it from stdin
        text: String,
        /// Deliver it into the running turn if the agent can be steered
        #[arg(long, conflicts_with = "hold")]
        steer: bool,
        /// Keep it in the mailbox until it is claimed
        #[arg(long)]
        hold: bool,
        /// Kind of message [default: task, or reply with --reply-to]
        #[arg(long, value_name = "KIND", value_parser = ["task", "ask", "handoff", "reply"])]
        kind: Option<String>,
        /// Id of the message that this one answers
        #[arg(long, value_name = "MAIL")]
        reply_to: Option<String>,
    },
}

/// `qd up`.
#[derive(Debug, Args)]
pub(crate) struct UpArgs {
    /// Fleet file (YAML); `-` reads it from stdin
    pub(crate) file: PathBuf,
    /// Task for the fleet, overriding the one in the file
    #[arg(long, value_name = "TASK")]
    pub(crate) task: Option<String>,
    /// Start the fleet in the background and print its id
    #[arg(short, long, conflicts_with = "plan")]
    pub(crate) detach: bool,
    /// Show who would do what without starting anything
    #[arg(long)]
    pub(crate) plan: bool,
    /// Project directory [default: the current directory]
    #[arg(short = 'C', value_name = "DIR")]
    pub(crate) dir: Option<PathBuf>,
}

/// A risk on the command line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum RiskArgument {
    Low,
    Medium,
    High,
}

impl From<RiskArgument> for Risk {
    fn from(risk: RiskArgument) -> Self {
        match risk {
            RiskArgument::Low => Self::Low,
            RiskArgument::Medium => Self::Medium,
            RiskArgument::High => Self::High,
        }
    }
}

/// Parses a duration: seconds, or a number with `s`, `m` or `h`. More than a year is rejected as a typo.
pub(crate) fn seconds(text: &str) -> Result<f64, String> {
    const YEAR: f64 = 366.0 * 86_400.0;
    let (number, unit) = match text.char_indices().next_back() {
        Some((at, 's')) => (&text[..at], 1.0),
        Some((at, 'm')) => (&text[..at], 60.0),
        Some((at, 'h')) => (&text[..at], 3600.0),
        _ => (text, 1.0),
    };
    match number.parse::<f64>().map(|number| number * unit) {
        Ok(seconds) if seconds > 0.0 && seconds <= YEAR => Ok(seconds),
        _ => {
            Err("expected a number of seconds above 0, such as 90 or 0.5, or a time such as 10m or 2h"
                .to_owned())
        }
    }
}

#[cfg(test)]
mod tests;
