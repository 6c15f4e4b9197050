//! The flags of verbs that run a daemon, connect machines or concern accounts: `serve`, `worker`, `workers`, `quota`.

use std::path::PathBuf;

use clap::{Args, Subcommand};

/// `qd workers`.
#[derive(Debug, Subcommand)]
pub(crate) enum WorkersVerb {
    /// List the machines that have joined
    Machines,
    /// Create a worker token and print the command with which another machine joins
    #[command(after_help = "Examples:
  qd workers token lab                        joins with the label lab
  qd workers token ml-box --label gpu --agent claude

The machine can join with these labels and offer these agents, and no others.")]
    Token(WorkerTokenArgs),
    /// List worker tokens by id and name; the secrets are never shown again
    Tokens,
    /// Revoke a worker token and disconnect the machines that joined with it
    Revoke {
        /// Id of the token, its first characters, or its name
        id: String,
    },
}

/// `qd workers token`.
#[derive(Debug, Args)]
pub(crate) struct WorkerTokenArgs {
    /// Name for the token; without --label also the machine's label
    pub(crate) name: Option<String>,
    /// The same as NAME
    #[arg(long = "name", value_name = "NAME", conflicts_with = "name", hide = true)]
    pub(crate) named: Option<String>,
    /// Label that the machine may join with; repeatable
    #[arg(long, value_name = "LABEL")]
    pub(crate) label: Vec<String>,
    /// Agent that the machine may offer; repeatable [default: any]
    #[arg(long, value_name = "AGENT")]
    pub(crate) agent: Vec<String>,
}

/// `qd quota`.
#[derive(Debug, Subcommand)]
pub(crate) enum QuotaVerb {
    /// Let the queued runs of an account start before its quota resets
    Release {
        /// Account or agent, as `qd quota` lists it, or a session
        #[arg(value_name = "ACCOUNT|AGENT|SESSION")]
        name: String,
    },
}

/// `qd worker`.
#[derive(Debug, Subcommand)]
pub(crate) enum WorkerVerb {
    /// Join a daemon on another machine and run agents for it here
    #[command(after_help = "Example:
  qd worker join https://deck.example:7777 --token qdw_… --label gpu

Sessions whose agent is NAME@LABEL then run on this machine: in the same directory if it exists, else below --root. \
The worker reconnects when the connection breaks. Ctrl-C stops it and its agents.")]
    Join(JoinArgs),
}

/// `qd worker join`.
#[derive(Debug, Args)]
pub(crate) struct JoinArgs {
    /// Address of the daemon: https://HOST:PORT, or http:// for a daemon on this machine
    pub(crate) url: String,
    /// Worker token from `qd workers token`
    #[arg(long, value_name = "TOKEN", env = "QD_WORKER_TOKEN", hide_env_values = true)]
    pub(crate) token: String,
    /// Label by which sessions choose this machine (AGENT@LABEL); repeatable
    #[arg(long, value_name = "LABEL")]
    pub(crate) label: Vec<String>,
    /// Directory for sessions whose project directory does not exist here
    #[arg(long, value_name = "DIR")]
    pub(crate) root: Option<PathBuf>,
    /// Accept only the certificate with this fingerprint, as `qd serve --tls self` prints it
    #[arg(long, value_name = "SHA256")]
    pub(crate) fingerprint: Option<String>,
    /// Agent to offer; repeatable [default: all agents installed here]
    #[arg(long, value_name = "AGENT")]
    pub(crate) agent: Vec<String>,
}

/// `qd serve`.
#[derive(Debug, Args)]
pub(crate) struct ServeArgs {
    /// Address to listen on: unix:PATH or HOST:PORT (port 0: any free port); repeatable [default: the home's socket]
    #[arg(long, value_name = "ADDR")]
    pub(crate) listen: Vec<String>,
    /// Host name that clients may use in their Host header; repeatable
    #[arg(long, value_name = "NAME")]
    pub(crate) allow_host: Vec<String>,
    /// `self`: create a self-signed certificate and print its fingerprint
    #[arg(long, value_name = "HOW", value_parser = ["self"], conflicts_with_all = ["tls_cert", "tls_key"])]
    pub(crate) tls: Option<String>,
    /// TLS certificate (PEM)
    #[arg(long, value_name = "FILE", requires = "tls_key")]
    pub(crate) tls_cert: Option<PathBuf>,
    /// Private key of the certificate (PEM)
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    pub(crate) tls_key: Option<PathBuf>,
    /// Detach from the caller's terminal; `qd` passes this when it starts a daemon
    #[arg(long, hide = true)]
    pub(crate) background: bool,
}
