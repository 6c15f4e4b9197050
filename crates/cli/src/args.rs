//! The command line: every verb, its flags and its help. Parsing ends here; a verb gets values that are right by
//! themselves and asks the daemon about the rest.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};

use crate::client::host::DaemonHost;
use crate::verbs::worker;

/// Runs, watches, steers and recovers fleets of AI coding agents.
#[derive(Debug, Parser)]
#[command(name = "qd", version, propagate_version = true)]
#[command(after_help = "Examples:
  qd run 'explain this repository'      start a conversation and see the answer
  qd run --detach 'fix the tests'       leave it to itself; `qd ps`, `qd attach ID` find it again
  qd asks                               what agents wait for
Ids may be shortened, or be a title. Exit codes: 0 well, 1 failed, 2 wrong usage, 3 not found,
4 no daemon, 124 timed out, 130 cancelled.")]
pub(crate) struct CommandLine {
    /// What holds for every verb.
    #[command(flatten)]
    pub(crate) global: GlobalArgs,
    /// What to do.
    #[command(subcommand)]
    pub(crate) verb: CliVerb,
}

/// What holds for every verb.
#[derive(Debug, Args)]
pub(crate) struct GlobalArgs {
    /// Print JSON: one value, or one per line for streams
    #[arg(long, global = true)]
    pub(crate) json: bool,
    /// The daemon: unix:PATH, http://HOST:PORT or https://HOST:PORT [default: $QD_HOST, else the home's socket]
    #[arg(long, global = true, value_name = "HOST")]
    pub(crate) host: Option<DaemonHost>,
    /// Where the daemon keeps everything [default: $QD_HOME, else quarterdeck in the XDG data directory]
    #[arg(long, global = true, value_name = "DIR")]
    pub(crate) home: Option<PathBuf>,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub(crate) enum CliVerb {
    /// Give an agent a prompt and show its answer as it comes
    #[command(after_help = "Examples:
  qd run 'why does the build fail?'
  git diff | qd run --agent claude -
  qd run --detach --title nightly --policy allow 'update the dependencies'
Ctrl-C cancels the run and waits for its end; a second one leaves it alone.")]
    Run(RunArgs),
    /// List sessions
    #[command(after_help = "Examples:
  qd ps
  qd ps -a --json | jq '.[].id'
  qd ps --fleet                         the fleets
  qd ps --fleet flt_4k                  the sessions of one")]
    Ps {
        /// The closed ones too
        #[arg(short, long)]
        all: bool,
        /// The fleets, or the sessions of one
        #[arg(long, value_name = "FLEET", num_args = 0..=1, default_missing_value = "")]
        fleet: Option<String>,
        /// Each session below the one that started it, with what it and all below it cost
        #[arg(long, conflicts_with = "fleet")]
        tree: bool,
    },
    /// Start a fleet from its file and watch it to its end
    #[command(after_help = "Examples:
  qd up fleet.yaml
  qd up fleet.yaml --task 'port the parser' --detach
  qd up fleet.yaml --plan               show who would do what, and start nothing
Exit codes: 0 if every session that ran ended well or its failure was routed on, 1 if not, 130 if cancelled.
Ctrl-C cancels the fleet and waits for its end; a second one leaves it alone.")]
    Up(UpArgs),
    /// Cancel fleets
    #[command(after_help = "Examples:
  qd down flt_4k")]
    Down {
        /// Fleets
        #[arg(required = true, value_name = "FLEET")]
        ids: Vec<String>,
    },
    /// Show what happened in a session, go on live, and talk to it
    #[command(after_help = "Examples:
  qd attach ses_4k
  echo 'and now the tests' | qd attach nightly
  qd attach --raw ses_4k                the screen of its terminal, and its keys
A line is sent as a prompt, or answers the ask that is open. /steer TEXT, /cancel, /detach, /help.
With --raw, every key goes to the program; Ctrl-] leaves, and the session goes on.")]
    Attach {
        /// The session
        id: String,
        /// Show the screen of its terminal and take keys, for an agent that has one; Ctrl-] leaves
        #[arg(long, conflicts_with = "json")]
        raw: bool,
    },
    /// Give a session one more prompt, without waiting for the answer
    #[command(after_help = "Examples:
  qd send nightly 'then open a pull request'
  qd send nightly --steer 'skip the slow tests'")]
    Send {
        /// The session
        id: String,
        /// The prompt; `-` reads it from stdin
        text: String,
        /// Tell it to the run that is active now
        #[arg(long)]
        steer: bool,
    },
    /// Print the conversation of a session or a run
    #[command(after_help = "Examples:
  qd logs nightly
  qd logs -f --json run_7x | jq .kind")]
    Logs {
        /// Go on with whatever happens
        #[arg(short, long)]
        follow: bool,
        /// The session or run
        id: String,
    },
    /// Wait until sessions or runs have nothing more to do
    #[command(after_help = "Examples:
  qd wait nightly && make release
  qd wait --timeout 600 ses_4k ses_9b
The exit code is the greatest of those of the runs that were waited for.")]
    Wait {
        /// Sessions or runs
        #[arg(required = true, value_name = "ID")]
        ids: Vec<String>,
        /// Give up after so many seconds, with exit code 124
        #[arg(long, value_name = "S", value_parser = seconds)]
        timeout: Option<f64>,
    },
    /// Cancel everything a session has to do, or one run
    #[command(after_help = "Examples:
  qd cancel nightly
  qd cancel run_7x run_8a")]
    Cancel {
        /// Sessions or runs
        #[arg(required = true, value_name = "ID")]
        ids: Vec<String>,
    },
    /// Close sessions
    #[command(after_help = "Examples:
  qd rm nightly
  qd rm --purge ses_4k")]
    Rm {
        /// Sessions
        #[arg(required = true, value_name = "ID")]
        ids: Vec<String>,
        /// Delete their events as well
        #[arg(long)]
        purge: bool,
    },
    /// Show what a session changed in its worktree, committed or not
    #[command(after_help = "Examples:
  qd diff nightly
  qd diff --stat ses_4k
  qd diff ses_4k | git apply --check")]
    Diff {
        /// The session
        id: String,
        /// Only the files, with numbers of lines
        #[arg(long)]
        stat: bool,
    },
    /// Merge what a session did in its worktree into a branch
    #[command(after_help = "Examples:
  qd merge nightly                      into the branch that it began from
  qd merge ses_4k --into release --squash
What the session had not committed is committed first. On a conflict the places are shown and nothing is changed.
A checkout of the branch is moved along, and only if everything in it is committed.")]
    Merge {
        /// The session
        id: String,
        /// The branch [default: the one that the worktree began from]
        #[arg(long, value_name = "BRANCH")]
        into: Option<String>,
        /// Make one commit of all of it
        #[arg(long)]
        squash: bool,
    },
    /// List the worktrees of sessions, and remove those that are merged
    #[command(after_help = "Examples:
  qd worktrees
  qd worktrees rm ses_4k
  qd worktrees gc                       all of closed sessions that hold nothing unmerged")]
    Worktrees {
        /// What else to do
        #[command(subcommand)]
        verb: Option<WorktreesVerb>,
    },
    /// List what agents wait for
    #[command(after_help = "Examples:
  qd asks
  qd asks -f --json")]
    Asks {
        /// Go on with new ones
        #[arg(short, long)]
        follow: bool,
    },
    /// List the mail of a session or of all, or send some
    #[command(
        args_conflicts_with_subcommands = true,
        after_help = "Examples:
  qd mail                               everything that was sent, and where it stands
  qd mail nightly --state waiting
  qd mail -f --json
  qd mail send nightly 'the build is green again'
  qd mail send nightly --steer 'skip the slow tests'"
    )]
    Mail {
        /// The session
        session: Option<String>,
        /// Only what stands so
        #[arg(long, value_name = "STATE", conflicts_with = "follow",
            value_parser = ["waiting", "delivering", "claimed", "delivered", "acknowledged", "quarantined"])]
        state: Option<String>,
        /// Show what becomes of mail from now on
        #[arg(short, long)]
        follow: bool,
        /// What else to do
        #[command(subcommand)]
        verb: Option<MailVerb>,
    },
    /// Let an agent do what it asks for
    #[command(after_help = "Example:
  qd allow ask_3f")]
    Allow {
        /// The ask
        ask: String,
        /// This tool for the rest of the session (never where the risk is high)
        #[arg(long)]
        always: bool,
    },
    /// Refuse what an agent asks for
    #[command(after_help = "Example:
  qd deny ask_3f use the staging server")]
    Deny {
        /// The ask
        ask: String,
        /// What the agent is told
        reason: Vec<String>,
    },
    /// Answer an agent's question
    #[command(after_help = "Example:
  qd answer ask_3f 'the second one'")]
    Answer {
        /// The ask
        ask: String,
        /// The answer
        #[arg(allow_hyphen_values = true)]
        value: String,
    },
    /// Try rules on what agents have asked for so far
    Policy {
        /// What to do with them
        #[command(subcommand)]
        verb: PolicyVerb,
    },
    /// Let nothing start any more, in any workspace
    #[command(after_help = "Examples:
  qd halt
  qd halt --cancel the bill is too high")]
    Halt {
        /// Cancel what is running too
        #[arg(long)]
        cancel: bool,
        /// Why
        reason: Vec<String>,
    },
    /// Let things start again
    Unhalt,
    /// Lets a project's own agents, and what it does in worktrees, count as they are now
    Trust {
        /// The project's directory
        dir: Option<PathBuf>,
        /// Trust it no longer
        #[arg(long, requires = "dir")]
        no: bool,
    },
    /// List known agents and whether they can start here
    Agents,
    /// List live workers, and say who may join from other machines
    #[command(after_help = "Examples:
  qd workers
  qd workers machines                  those that have joined
  qd workers token --name laptop       print the line with which another machine joins
  qd workers revoke laptop")]
    Workers {
        /// What else to do
        #[command(subcommand)]
        verb: Option<WorkersVerb>,
    },
    /// Serve an agent to any parent, or work for a daemon
    #[command(
        args_conflicts_with_subcommands = true,
        override_usage = "qd worker --listen ADDR --agent A [OPTIONS]\n       qd worker join URL --token T --label L [OPTIONS]",
        after_help = "Examples:
  qd worker --listen 127.0.0.1:7778 --agent script
  qd worker --listen 127.0.0.1:0 --agent echo --serve one --accept-timeout-s 10
Where other machines reach it, it needs --token and --tls-cert with --tls-key."
    )]
    Worker {
        /// Serve an agent
        #[command(flatten)]
        serve: Option<worker::WorkerArgs>,
        /// Work for a daemon
        #[command(subcommand)]
        verb: Option<WorkerVerb>,
    },
    /// Run the daemon in the foreground
    #[command(after_help = "Examples:
  qd serve
  qd serve --listen unix:/run/user/1000/qd.sock --listen 127.0.0.1:7777
  qd serve --listen 0.0.0.0:7777 --tls self --allow-host build.example")]
    Serve(ServeArgs),
    /// End the daemon and wait until it is gone
    Stop {
        /// End the workers, and so the agents, as well
        #[arg(long)]
        workers: bool,
    },
    /// Show which settings count, and from where
    Config,
    /// Show what the home holds and free what is old
    #[command(after_help = "Examples:
  qd gc
  qd gc --older-than 7 --yes")]
    Gc {
        /// Sessions that have been closed for so many days
        #[arg(long, value_name = "DAYS", default_value_t = 30)]
        older_than: u32,
        /// Do it, instead of only saying what it would free
        #[arg(long)]
        yes: bool,
    },
    /// Check the installation and say what to do
    Doctor {
        /// Make the lists anew from the events (the daemon must be stopped)
        #[arg(long)]
        rebuild: bool,
    },
    /// Serve tools for agents on stdio, by the Model Context Protocol
    #[command(
        after_help = "An agent that Quarterdeck starts is given this server by itself. In an editor, name `qd` as \
the command and `mcp` as its argument; see docs/mcp.md."
    )]
    Mcp {
        /// The project directory of the agents that are started [default: the current one]
        #[arg(short = 'C', value_name = "DIR")]
        dir: Option<PathBuf>,
    },
    /// Print completions for a shell
    #[command(after_help = "Example:
  qd completions bash > ~/.local/share/bash-completion/completions/qd")]
    Completions {
        /// The shell
        shell: clap_complete::Shell,
    },
}

/// `qd policy`.
#[derive(Debug, Subcommand)]
pub(crate) enum PolicyVerb {
    /// Say what would change if this policy had been there
    #[command(after_help = "Examples:
  qd policy test rules.json
  qd policy test allow --session nightly
  qd policy test rules.json --limit 200 --json | jq '.trials[] | select(.against_person)'
A policy is ask, allow, deny or rules, as `qd run --policy` takes it:
  [{\"tool\": \"Bash\", \"match\": \"git status*\", \"decision\": \"allow\"}]
Nothing is decided again, and no session's policy changes. Exit code 2: the policy cannot be used.")]
    Test {
        /// The policy: a file of JSON, or what else --policy takes
        #[arg(value_name = "FILE")]
        policy: String,
        /// Only what this session asked for
        #[arg(long, value_name = "ID")]
        session: Option<String>,
        /// Only what was asked for in this project directory
        #[arg(long, value_name = "DIR")]
        workspace: Option<PathBuf>,
        /// The newest so many, up to 1000
        #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1000))]
        limit: Option<u32>,
    },
}

/// `qd worktrees`.
#[derive(Debug, Subcommand)]
pub(crate) enum WorktreesVerb {
    /// Remove worktrees of closed sessions; asks about one that holds work, or refuses where nobody can be asked
    Rm {
        /// Sessions that they were made for
        #[arg(required = true, value_name = "ID")]
        ids: Vec<String>,
        /// Remove them with work that is not merged; what is committed stays on its branch
        #[arg(long)]
        force: bool,
    },
    /// Remove every worktree of a closed session in which everything is committed and merged
    Gc,
}

/// `qd mail`.
#[derive(Debug, Subcommand)]
pub(crate) enum MailVerb {
    /// Send a message to a session: a prompt if it is idle, else after its turn
    Send {
        /// The session
        id: String,
        /// The message; `-` reads it from stdin
        text: String,
        /// Tell it to the turn that is running, if there is one that can be steered
        #[arg(long, conflicts_with = "hold")]
        steer: bool,
        /// Let it wait in the mailbox until somebody claims it
        #[arg(long)]
        hold: bool,
        /// What it is meant as [default: task, or reply with --reply-to]
        #[arg(long, value_name = "KIND", value_parser = ["task", "ask", "handoff", "reply"])]
        kind: Option<String>,
        /// The message that it answers
        #[arg(long, value_name = "MAIL")]
        reply_to: Option<String>,
    },
}

/// `qd workers`.
#[derive(Debug, Subcommand)]
pub(crate) enum WorkersVerb {
    /// List the machines that have joined
    Machines,
    /// Make a worker token and print the line with which another machine joins
    Token {
        /// A name for people; the line that is printed gives it to the machine as its label
        #[arg(long, value_name = "N")]
        name: Option<String>,
    },
    /// List worker tokens; the tokens themselves are not shown again
    Tokens,
    /// Revoke a worker token and cut off whoever joined with it
    Revoke {
        /// The token's id, the beginning of it, or its name
        id: String,
    },
}

/// `qd worker`.
#[derive(Debug, Subcommand)]
pub(crate) enum WorkerVerb {
    /// Hold agents on this machine for a daemon on another
    #[command(after_help = "Example:
  qd worker join https://deck.example:7777 --token qdw_… --fingerprint AB:CD:… --label gpu
Sessions whose agent is NAME@LABEL then run here: in the same path if it is here, else below --root.
It stays, dials again when the connection breaks, and ends its agents on Ctrl-C.")]
    Join(JoinArgs),
}

/// `qd worker join`.
#[derive(Debug, Args)]
pub(crate) struct JoinArgs {
    /// The daemon, as `qd workers token` printed it: https://HOST:PORT, or http:// on this machine
    pub(crate) url: String,
    /// The worker token
    #[arg(long, value_name = "T", env = "QD_WORKER_TOKEN", hide_env_values = true)]
    pub(crate) token: String,
    /// What sessions can choose this machine by; may be given several times
    #[arg(long, value_name = "L")]
    pub(crate) label: Vec<String>,
    /// Where to work for sessions whose directory is not here
    #[arg(long, value_name = "DIR")]
    pub(crate) root: Option<PathBuf>,
    /// The one certificate to accept, as `qd serve --tls self` printed it
    #[arg(long, value_name = "SHA256")]
    pub(crate) fingerprint: Option<String>,
    /// An agent to offer; may be given several times [default: all that can start here]
    #[arg(long, value_name = "A")]
    pub(crate) agent: Vec<String>,
}

/// `qd up`.
#[derive(Debug, Args)]
pub(crate) struct UpArgs {
    /// The fleet's file; `-` reads it from stdin
    pub(crate) file: PathBuf,
    /// What to do, instead of the file's own task
    #[arg(long, value_name = "T")]
    pub(crate) task: Option<String>,
    /// Leave it to itself and print its id
    #[arg(long, conflicts_with = "plan")]
    pub(crate) detach: bool,
    /// Show who would do what, and start nothing
    #[arg(long)]
    pub(crate) plan: bool,
    /// The project directory [default: the current one]
    #[arg(short = 'C', value_name = "DIR")]
    pub(crate) dir: Option<PathBuf>,
}

/// `qd run`.
#[derive(Debug, Args)]
pub(crate) struct RunArgs {
    /// The agent [default: the configured one, else the only one found, else echo]
    #[arg(long, short, value_name = "A", conflicts_with = "session")]
    pub(crate) agent: Option<String>,
    /// Print the session's id and leave it to itself
    #[arg(long, short)]
    pub(crate) detach: bool,
    /// The project directory [default: the current one]
    #[arg(short = 'C', value_name = "DIR", conflicts_with = "session")]
    pub(crate) dir: Option<PathBuf>,
    /// Which model, in the agent's words
    #[arg(long, value_name = "M", conflicts_with = "session")]
    pub(crate) model: Option<String>,
    /// A name for people
    #[arg(long, value_name = "T", conflicts_with = "session")]
    pub(crate) title: Option<String>,
    /// Go on with this session instead of a new one
    #[arg(long, value_name = "ID")]
    pub(crate) session: Option<String>,
    /// ask, allow, deny, or rules: JSON or a file of it
    #[arg(long, value_name = "P", conflicts_with = "session")]
    pub(crate) policy: Option<String>,
    /// Work in a git worktree of its own, on a branch of its own
    #[arg(long, conflicts_with = "session")]
    pub(crate) worktree: bool,
    /// What to do when the agent asks
    #[arg(long, value_enum, default_value_t = OnAskAction::Wait)]
    pub(crate) on_ask: OnAskAction,
    /// Cancel the run after so many seconds, with exit code 124
    #[arg(long, value_name = "S", value_parser = seconds)]
    pub(crate) timeout: Option<f64>,
    /// The prompt; `-` reads it from stdin
    #[arg(allow_hyphen_values = true)]
    pub(crate) prompt: String,
}

/// What `qd run` does when its agent asks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum OnAskAction {
    /// Wait for an answer from here or elsewhere
    Wait,
    /// Deny it at once and go on
    Deny,
    /// Cancel the run and fail
    Fail,
}

/// `qd serve`.
#[derive(Debug, Args)]
pub(crate) struct ServeArgs {
    /// Where to listen: unix:PATH or HOST:PORT, port 0 for any free one [default: the home's socket]
    #[arg(long, value_name = "ADDR")]
    pub(crate) listen: Vec<String>,
    /// A name that clients may have in their Host header
    #[arg(long, value_name = "NAME")]
    pub(crate) allow_host: Vec<String>,
    /// `self`: make a certificate and print its fingerprint
    #[arg(long, value_name = "HOW", value_parser = ["self"], conflicts_with_all = ["tls_cert", "tls_key"])]
    pub(crate) tls: Option<String>,
    /// The certificate, as PEM
    #[arg(long, value_name = "FILE", requires = "tls_key")]
    pub(crate) tls_cert: Option<PathBuf>,
    /// Its key, as PEM
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    pub(crate) tls_key: Option<PathBuf>,
    /// Leave the caller's terminal; set by `qd` itself when it starts a daemon
    #[arg(long, hide = true)]
    pub(crate) background: bool,
}

/// A time that can be waited for. More than a year is taken for a slip of the pen.
pub(crate) fn seconds(text: &str) -> Result<f64, String> {
    const YEAR: f64 = 366.0 * 86_400.0;
    match text.parse::<f64>() {
        Ok(seconds) if seconds > 0.0 && seconds <= YEAR => Ok(seconds),
        _ => Err("a number of seconds above 0, such as 90 or 0.5".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    fn parse(line: &[&str]) -> Result<CommandLine, clap::Error> {
        CommandLine::try_parse_from(std::iter::once(&"qd").chain(line))
    }

    #[test]
    fn the_command_line_is_well_formed() {
        CommandLine::command().debug_assert();
    }

    #[test]
    fn every_verb_of_the_contract_is_there() {
        let verbs: Vec<String> =
            CommandLine::command().get_subcommands().map(|verb| verb.get_name().to_owned()).collect();
        for verb in
            "serve run ps attach send logs wait cancel rm asks allow deny answer halt unhalt agents workers \
                     doctor completions stop config gc"
                .split_whitespace()
        {
            assert!(verbs.iter().any(|known| known == verb), "{verb}");
        }
    }

    #[test]
    fn a_prompt_may_be_a_dash_or_json() {
        for prompt in ["-", "[{\"say\":\"hi\"}]", "-v is a flag, is it not?"] {
            let Ok(CommandLine { verb: CliVerb::Run(run), .. }) =
                parse(&["run", "--agent", "script", prompt])
            else {
                panic!("{prompt}")
            };
            assert_eq!(run.prompt, prompt);
        }
    }

    #[test]
    fn global_flags_stand_before_or_after_the_verb() {
        assert!(parse(&["--json", "ps"]).unwrap().global.json);
        assert!(parse(&["ps", "-a", "--json", "--host", "unix:/x"]).unwrap().global.json);
    }

    #[test]
    fn nonsense_is_refused() {
        for line in [
            &["ps", "--host", "example.com"][..],
            &["run"],
            &["run", "--timeout", "0", "x"],
            &["run", "--timeout", "-1", "x"],
            &["run", "--timeout", "NaN", "x"],
            &["run", "--session", "s", "--agent", "a", "x"],
            &["run", "--on-ask", "shrug", "x"],
            &["policy", "test"],
            &["policy", "test", "allow", "--limit", "0"],
            &["policy", "test", "allow", "--limit", "1001"],
            &["serve", "--tls-cert", "a"],
            &["mail", "send", "s"],
            &["mail", "send", "s", "t", "--steer", "--hold"],
            &["mail", "--state", "lost"],
            &["worker"],
            &["worker", "--agent", "echo", "--listen", "nonsense"],
            &["worker", "--agent", "echo", "--listen", "unix:/run/x.sock"],
            &["worker", "--agent", "echo", "--listen", "127.0.0.1:99999"],
            &["serve", "--tls", "self", "--tls-cert", "a", "--tls-key", "b"],
            &["wait"],
            &["dance"],
        ] {
            assert_eq!(parse(line).unwrap_err().exit_code(), 2, "{line:?}");
        }
    }

    #[test]
    fn help_is_a_verb_too_and_a_bare_worker_names_join() {
        for line in [&["help"][..], &["help", "run"], &["help", "workers", "token"]] {
            assert_eq!(parse(line).unwrap_err().kind(), clap::error::ErrorKind::DisplayHelp, "{line:?}");
        }
        assert!(parse(&["worker"]).unwrap_err().to_string().contains("qd worker join URL"));
    }

    #[test]
    fn a_reason_needs_no_quotes() {
        let CliVerb::Deny { reason, .. } = parse(&["deny", "ask_1", "not", "now"]).unwrap().verb else {
            panic!()
        };
        assert_eq!(reason.join(" "), "not now");
    }
}
