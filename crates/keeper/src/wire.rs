//! What worker and keeper say to each other: one JSON value per line over a socket pair, each with the number of the
//! request that it belongs to. Descriptors travel beside the first byte of the line that they belong to.

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::procfs::ProcessIdentity;

/// How many descriptors come with [`Command::Start`]: the child's standard input, output and error.
pub(crate) const DESCRIPTORS: usize = 3;
/// The longest line. The kernel takes far less as arguments and environment of a program.
pub(crate) const LINE_MAX: usize = 32 << 20;

/// A program to start.
#[derive(Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LaunchSpec {
    /// The program and its arguments. A program without a slash is looked for in the `PATH` of `env`.
    pub argv: Vec<String>,
    /// Its whole environment, but for the mark, which is added.
    pub env: BTreeMap<String, String>,
    /// Where it begins.
    pub cwd: PathBuf,
    /// What it is called instead of its program's name, as its first word.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[serde(rename = "called")]
    pub arg0: Option<String>,
}

impl fmt::Debug for LaunchSpec {
    /// Shows the names in `env` and none of the values: they may be secrets.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { argv, env, cwd, arg0: called } = self;
        f.debug_struct("Launch")
            .field("argv", argv)
            .field("env", &env.keys().collect::<Vec<_>>())
            .field("cwd", cwd)
            .field("called", called)
            .finish()
    }
}

/// Which processes a sweep ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SweepScope {
    /// Those that were not there when the turn began. Not the agent itself, nor its helpers by name with what is below
    /// them. None if no turn is open.
    Turn,
    /// The agent, what is below it, and what was there before its first turn; not what a finished turn left running.
    Agent,
    /// Everything.
    All,
}

impl SweepScope {
    /// Whether all that `other` ends is ended by this as well.
    pub(crate) fn includes(self, other: Self) -> bool {
        self == other || self == Self::All
    }
}

/// An order to end processes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SweepRequest {
    /// Which.
    #[serde(rename = "what")]
    pub scope: SweepScope,
    /// How long they have after SIGTERM. Nothing: they are killed at once.
    pub grace: Duration,
    /// Names of the agent's own helpers, which outlive a turn.
    pub spare: Vec<String>,
}

/// What a sweep did.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SweepResult {
    /// How many processes were found and are gone, whether they went when asked or were killed.
    pub killed: u32,
    /// Those that the kernel would not let die.
    pub survivors: Vec<ProcessIdentity>,
}

/// How a child ended. Neither is known if its keeper was lost first.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChildExit {
    /// Its exit status, if it exited.
    pub status: Option<i32>,
    /// The signal that ended it, if one did.
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

/// Something said, and the number of the request that it is or answers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct NumberedLine<T> {
    pub(crate) id: u64,
    pub(crate) body: T,
}

impl<T: Serialize> NumberedLine<T> {
    /// Itself as one line.
    pub(crate) fn to_line(&self) -> Vec<u8> {
        let mut line =
            serde_json::to_vec(self).expect("its maps have strings as keys, and its paths are UTF-8");
        line.push(b'\n');
        line
    }
}

/// What a worker wants. Each is answered.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum KeeperCommand {
    /// Start a program, which is from then on known by the number of this request.
    Start {
        launch: LaunchSpec,
        /// Whether it is a process of the turn like any other, and not the agent.
        in_turn: bool,
    },
    /// Send a signal to a started program.
    Signal { child: u64, signal: i32 },
    /// Remember the processes that there are: all that come now are the turn's.
    BeginTurn,
    /// Remember what the turn leaves running.
    EndTurn,
    /// End processes.
    Sweep(SweepRequest),
    /// List what turns have left running.
    #[serde(rename = "left")]
    ListLeftovers,
}

/// What a keeper answers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum KeeperReply {
    /// The program runs.
    Started { pid: u32 },
    /// The program could not be started.
    Failed {
        message: String,
        /// Because there is none of that name.
        not_found: bool,
    },
    /// A started program has ended; the only thing that comes unasked.
    Exited(ChildExit),
    /// It was done.
    Done,
    /// The sweep is over.
    Swept(SweepResult),
    /// These run.
    #[serde(rename = "left")]
    Leftovers(Vec<ProcessIdentity>),
}

/// Bytes of a stream until they make lines.
#[derive(Debug, Default)]
pub(crate) struct KeeperLineBuffer {
    bytes: Vec<u8>,
    /// How many of them are known to hold no end of a line.
    searched: usize,
}

/// What came is not of our language, so nothing after it can be understood.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct MalformedKeeperLine;

impl KeeperLineBuffer {
    pub(crate) fn push(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
    }

    /// The next whole line, read.
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
        let left = NumberedLine { id: 2, body: KeeperCommand::ListLeftovers };
        let both = [begin.to_line(), left.to_line()].concat();
        for cut in 0..both.len() {
            let mut lines = KeeperLineBuffer::default();
            let mut read = Vec::new();
            for piece in [&both[..cut], &both[cut..]] {
                lines.push(piece);
                while let Some(command) = lines.next::<NumberedLine<KeeperCommand>>().unwrap() {
                    read.push(command);
                }
            }
            assert_eq!(read, [begin.clone(), left.clone()], "cut at {cut}");
        }
    }

    #[test]
    fn a_line_of_another_language_is_garbled() {
        let mut lines = KeeperLineBuffer::default();
        lines.push(b"GET / HTTP/1.1\n");
        assert_eq!(lines.next::<NumberedLine<KeeperCommand>>(), Err(MalformedKeeperLine));
    }

    #[test]
    fn a_line_without_end_is_garbled_and_not_kept_for_ever() {
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
