//! The messages between worker and keeper: one JSON value per line over a socket pair, each with the id of its request.
//! Descriptors travel with the first byte of the line they belong to.

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use qd_sandbox::SandboxPlan;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::procfs::ProcessIdentity;

/// The descriptors that accompany [`KeeperCommand::Start`]: the child's standard input, output and error.
pub(crate) const DESCRIPTORS: usize = 3;
/// The longest accepted line. The kernel accepts far less for a program's arguments and environment.
pub(crate) const LINE_MAX: usize = 32 << 20;

#[derive(Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LaunchSpec {
    /// The program and its arguments. A program without a slash is searched in the `PATH` of `env`.
    pub argv: Vec<String>,
    /// The whole environment, to which the mark is added.
    pub env: BTreeMap<String, String>,
    pub cwd: PathBuf,
    /// The child's `argv[0]`, if it is not to be the first of `argv`.
    #[serde(rename = "called", default, skip_serializing_if = "Option::is_none")]
    pub arg0: Option<String>,
}

impl fmt::Debug for LaunchSpec {
    /// Shows the names in `env` without their values, which may be secrets.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { argv, env, cwd, arg0 } = self;
        f.debug_struct("LaunchSpec")
            .field("argv", argv)
            .field("env", &env.keys().collect::<Vec<_>>())
            .field("cwd", cwd)
            .field("arg0", arg0)
            .finish()
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SweepScope {
    /// The processes that did not exist when the turn began, except the agent itself and its helpers (by name) with
    /// everything below them. None if no turn is open.
    Turn,
    /// Like [`SweepScope::Turn`], for the turn that ended last. None if a turn or another agent has begun since.
    EndedTurn,
    /// The agent, everything below it, and what existed before its first turn, but not what finished turns left
    /// running.
    Agent,
    All,
}

impl SweepScope {
    /// Whether this scope ends everything that `other` ends.
    pub(crate) fn includes(self, other: Self) -> bool {
        self == other || self == Self::All
    }
}

/// A request to end processes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SweepRequest {
    #[serde(rename = "what")]
    pub scope: SweepScope,
    /// The time that processes have after SIGTERM. If it is zero, they are killed at once.
    pub grace: Duration,
    /// Names of the agent's own helpers, which outlive a turn.
    pub spare: Vec<String>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SweepResult {
    /// The number of processes that were found and are gone, whether they exited on SIGTERM or were killed.
    pub killed: u32,
    /// Processes that SIGKILL did not end in time.
    pub survivors: Vec<ProcessIdentity>,
}

/// How a child exited. Both fields are absent if its keeper was lost first.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChildExit {
    pub status: Option<i32>,
    /// The signal that ended it, if any.
    pub signal: Option<i32>,
}

impl fmt::Display for ChildExit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.status, self.signal) {
            (Some(status), _) => write!(f, "exit status {status}"),
            (None, Some(signal)) => write!(f, "signal {signal}"),
            (None, None) => f.write_str("unknown"),
        }
    }
}

/// A message with the id of the request that it makes or answers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct NumberedLine<T> {
    pub(crate) id: u64,
    pub(crate) body: T,
}

impl<T: Serialize> NumberedLine<T> {
    /// Serializes the message as one line.
    pub(crate) fn to_line(&self) -> Vec<u8> {
        let mut line = serde_json::to_vec(self).expect("maps have string keys, and paths are UTF-8");
        line.push(b'\n');
        line
    }
}

/// The worker's requests. Each is answered.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum KeeperCommand {
    /// Start all later programs in a sandbox. If it has a proxy to the agent's model, a socket comes with this, to which
    /// the keeper sends the listener of each sandbox.
    Confine(Box<SandboxPlan>),
    /// Start a program. It is then known by the id of this request.
    Start {
        launch: LaunchSpec,
        /// Whether it belongs to the turn and is not the agent.
        in_turn: bool,
    },
    /// Send a signal to a started program.
    Signal {
        child: u64,
        signal: i32,
    },
    /// Record the existing processes: all that appear later belong to the turn.
    BeginTurn,
    /// Record what the turn leaves running.
    EndTurn {
        /// Names of the agent's own helpers, which the turn may always leave.
        spare: Vec<String>,
    },
    /// Reply at once. Sent to a keeper that has not replied to something else for a while.
    Ping,
    Sweep(SweepRequest),
    /// List what turns have left running.
    #[serde(rename = "left")]
    ListLeftovers,
}

/// The keeper's replies.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum KeeperReply {
    Started {
        pid: u32,
    },
    /// The program, or the sandbox, could not be started.
    Failed {
        message: String,
        /// The program does not exist.
        not_found: bool,
    },
    /// A started program has exited. This is the only unsolicited message.
    Exited(ChildExit),
    Done,
    TurnEnded {
        /// Whether the turn left processes running.
        leaves_processes: bool,
    },
    Swept(SweepResult),
    #[serde(rename = "left")]
    Leftovers(Vec<ProcessIdentity>),
}

/// Splits a byte stream into lines.
#[derive(Debug, Default)]
pub(crate) struct KeeperLineBuffer {
    bytes: Vec<u8>,
    /// How many of the bytes have been searched for the end of a line.
    searched: usize,
}

/// The line is not one of our messages, so nothing after it can be trusted either.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct MalformedKeeperLine;

impl KeeperLineBuffer {
    pub(crate) fn push(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
    }

    /// The next complete line, parsed.
    pub(crate) fn next<T: DeserializeOwned>(&mut self) -> Result<Option<T>, MalformedKeeperLine> {
        let Some(end) = self.bytes.iter().skip(self.searched).position(|byte| *byte == b'\n') else {
            self.searched = self.bytes.len();
            return if self.searched > LINE_MAX { Err(MalformedKeeperLine) } else { Ok(None) };
        };
        let line: Vec<u8> = self.bytes.drain(..=self.searched + end).collect();
        self.searched = 0;
        serde_json::from_slice(&line).map(Some).map_err(|_| MalformedKeeperLine)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_read_whole_wherever_the_stream_was_cut() {
        let begin = NumberedLine { id: 1, body: KeeperCommand::BeginTurn };
        let list = NumberedLine { id: 2, body: KeeperCommand::ListLeftovers };
        let both = [begin.to_line(), list.to_line()].concat();
        for cut in 0..both.len() {
            let mut lines = KeeperLineBuffer::default();
            let mut read = Vec::new();
            for piece in [&both[..cut], &both[cut..]] {
                lines.push(piece);
                while let Some(command) = lines.next::<NumberedLine<KeeperCommand>>().unwrap() {
                    read.push(command);
                }
            }
            assert_eq!(read, [begin.clone(), list.clone()], "cut at {cut}");
        }
    }

    #[test]
    fn a_line_of_another_protocol_is_malformed() {
        let mut lines = KeeperLineBuffer::default();
        lines.push(b"GET / HTTP/1.1\n");
        assert_eq!(lines.next::<NumberedLine<KeeperCommand>>(), Err(MalformedKeeperLine));
    }

    #[test]
    fn a_line_without_end_is_malformed_and_not_kept_for_ever() {
        let mut lines = KeeperLineBuffer::default();
        lines.push(&vec![b' '; LINE_MAX + 1]);
        assert_eq!(lines.next::<NumberedLine<KeeperCommand>>(), Err(MalformedKeeperLine));
    }

    #[test]
    fn a_launch_never_shows_the_values_of_its_variables() {
        let env = BTreeMap::from([("API_KEY".to_owned(), "hunter2".to_owned())]);
        let shown = format!("{:?}", LaunchSpec { env, ..LaunchSpec::default() });
        assert!(shown.contains("API_KEY") && !shown.contains("hunter2"), "{shown}");
    }
}
