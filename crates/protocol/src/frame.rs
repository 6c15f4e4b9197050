//! The frames of a worker's WebSocket, one JSON text each. [`v1`] is what our own ends speak, [`join`] how a process on
//! another machine offers to, [`terminal`] how people look at a program's screen; [`plain`] is what a peer gets that offers no subprotocol. A frame that cannot be read is ignored on both, and so is a field that nobody
//! knows; what a `said` of [`v1`] may hold depends on the version that both sides have agreed on.

/// The subprotocol `quarterdeck.v1`: one connection serves one session, and may break while its run goes on.
///
/// The daemon's side speaks first, whoever dialled: [`ToDaemon::Hello`] answers [`ToWorker::Hello`], then comes
/// [`ToWorker::Proof`], and from then on both speak freely. All that the worker says is numbered and kept until it is
/// acknowledged; after a break it begins after the `taken` of the new hello.
pub mod v1 {
    use serde::{Deserialize, Serialize};

    use crate::ids::{EventNumber, RunId, SessionId, WorkerId};
    use crate::link::{AgentCommand, AgentUpdate, TurnLimits, UpdateNumber};
    use crate::worker::AgentSpec;

    /// The name that is offered and chosen in the upgrade.
    pub const SUBPROTOCOL: &str = "quarterdeck.v1";
    /// The oldest version of the frames that we speak.
    pub const VERSION_MIN: u32 = 1;
    /// The newest one. The greater of both sides' oldest and the lesser of their newest must meet.
    pub const VERSION_MAX: u32 = 1;

    /// The versions that a peer speaks.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
    pub struct ProtocolVersions {
        /// The oldest.
        pub min: u32,
        /// The newest.
        pub max: u32,
    }

    impl ProtocolVersions {
        /// Ours.
        pub const SUPPORTED: Self = Self { min: VERSION_MIN, max: VERSION_MAX };

        /// The newest that both speak.
        pub fn newest_common(self, other: Self) -> Option<u32> {
            let newest = self.max.min(other.max);
            (newest >= self.min.max(other.min)).then_some(newest)
        }
    }

    /// From the daemon's side.
    #[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
    #[serde(rename_all = "snake_case")]
    pub enum DaemonLinkFrame {
        /// The first frame.
        Hello(DaemonHello),
        /// That the daemon knows the secret: HMAC-SHA256 over `daemon`, the worker's nonce and the daemon's, each ended
        /// by a newline, in hex.
        Proof(String),
        /// Everything up to here is in the journal and need not be kept.
        Ack(UpdateNumber),
        /// A command.
        #[serde(rename = "do")]
        Command(AgentCommand),
        /// What this turn has left from now on, for a worker that is alone; the last word counts.
        Limits {
            /// The turn.
            run: RunId,
            /// What is left to it.
            limits: TurnLimits,
        },
        /// Start the agent: of a session that is new here, or of one whose agent rests.
        Start(Box<AgentSpec>),
        /// Stop the agent; keep what its turns left running on purpose. The answer is `Up::Rested`, or `Up::Gone` if
        /// nothing is left.
        Rest,
        /// End the agent and all that it started. The answer is `Up::Gone`.
        Close,
    }

    /// See [`ToWorker::Hello`].
    #[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
    pub struct DaemonHello {
        /// What it speaks.
        pub versions: ProtocolVersions,
        /// Its own version, for people.
        pub software: String,
        /// What it can do beyond its version.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        pub capabilities: Vec<String>,
        /// The session that this connection is for.
        pub session: SessionId,
        /// The worker that it wants.
        pub worker: WorkerId,
        /// A random word.
        pub nonce: String,
        /// The last number that is in the journal.
        #[serde(rename = "taken")]
        pub journalled: UpdateNumber,
    }

    /// From the worker's side.
    #[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
    #[serde(rename_all = "snake_case")]
    pub enum WorkerLinkFrame {
        /// The answer to the first frame.
        Hello(WorkerHello),
        /// It cannot be; the connection ends.
        Refused {
            /// Stable, for programs: `unsupported_version`, `unauthorized`, `busy`, `wrong_worker`, `bad_number`.
            code: String,
            /// What to do.
            message: String,
        },
        /// What was said, numbered upwards from `first` without a hole.
        #[serde(rename = "said")]
        Updates {
            /// The number of the first.
            first: UpdateNumber,
            /// All of it.
            #[serde(rename = "ups")]
            updates: Vec<AgentUpdate>,
        },
    }

    /// See [`ToDaemon::Hello`].
    #[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
    pub struct WorkerHello {
        /// The version that both will speak.
        pub version: u32,
        /// Its own version, for people.
        pub software: String,
        /// What it can do beyond its version.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        pub capabilities: Vec<String>,
        /// A random word.
        pub nonce: String,
        /// That it knows the secret: HMAC-SHA256 over `worker`, the daemon's nonce and its own, each ended by a newline,
        /// in hex.
        pub proof: String,
        /// What it has for this session and worker.
        #[serde(rename = "seat")]
        pub presence: AgentPresence,
        /// The last number that it has given.
        pub last: UpdateNumber,
        /// Every command up to this number has been applied here.
        pub applied: EventNumber,
        /// Its process.
        pub pid: u32,
        /// Milliseconds that the turn under way has run, without its waits for people.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub run_time_ms: Option<u64>,
        /// The model that the agent was started with, in its words.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub model: Option<String>,
    }

    /// What a worker has for a session.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
    #[serde(rename_all = "snake_case")]
    pub enum AgentPresence {
        /// Nothing: it waits for [`ToWorker::Start`].
        Empty,
        /// An agent that is not ready.
        Starting,
        /// An agent.
        Ready {
            /// Whether its turns can be steered.
            steers: bool,
        },
        /// No agent, but what its turns left running.
        Resting,
        /// No agent any more; its last words wait to be acknowledged.
        Gone,
    }
}

/// The control connection of a process on another machine that offers to work: one per process, dialled by it under the
/// same subprotocol. It carries no word of any agent; for each session it is given it dials a connection of [`v1`].
pub mod join {
    use serde::{Deserialize, Serialize};

    use super::v1::ProtocolVersions;
    use crate::api::Agent;
    use crate::ids::{SessionId, WorkerId};
    use crate::worker::{AgentSpec, Secret};

    /// From the joined process.
    #[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
    #[serde(rename_all = "snake_case")]
    pub enum WorkerJoinFrame {
        /// The first frame.
        Hello(Box<JoinHello>),
        /// It will not, or cannot any more, hold this session's agent.
        Refused {
            /// Whose agent.
            session: SessionId,
            /// Which worker of the session.
            worker: WorkerId,
            /// Stable, for programs: `path_not_found`, `unknown_agent`, `unknown_session`, `agent_not_started`.
            code: String,
            /// What to do.
            message: String,
        },
    }

    /// See [`ToDaemon::Hello`].
    #[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
    pub struct JoinHello {
        /// What it speaks.
        pub versions: ProtocolVersions,
        /// Its own version, for people.
        pub software: String,
        /// A random word, made once per process and kept over reconnects. Nobody else is told it.
        pub host: String,
        /// For people: most often the machine's name.
        pub name: String,
        /// What it can be chosen by.
        pub labels: Vec<String>,
        /// The agents that it offers.
        pub agents: Vec<Agent>,
        /// What it holds from before.
        #[serde(default)]
        #[serde(rename = "seats")]
        pub workers: Vec<SessionWorker>,
    }

    /// Which worker of which session.
    #[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
    pub struct SessionWorker {
        /// The session.
        pub session: SessionId,
        /// Its worker.
        pub worker: WorkerId,
    }

    /// From the daemon.
    #[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
    #[serde(rename_all = "snake_case")]
    pub enum DaemonJoinFrame {
        /// The answer to the first frame.
        Welcome {
            /// What the process is called here.
            name: String,
        },
        /// It cannot be; the connection ends, and trying again changes nothing.
        Refused {
            /// Stable, for programs: `unsupported_version`, `invalid_value`, `host_taken`.
            code: String,
            /// What to do.
            message: String,
        },
        /// Hold this agent, and dial. Said again, it only dials.
        Open {
            /// What to start.
            spec: Box<AgentSpec>,
            /// What both sides of this session's connections prove themselves with.
            secret: Secret,
        },
        /// Dial for a session that it holds.
        Dial(SessionWorker),
        /// Nobody wants this any more: end it and all that it started.
        Close(SessionWorker),
    }
}

/// The subprotocol `quarterdeck.terminal.v1`: one connection shows one session's terminal to one person. What is to be
/// written to that person's terminal, and what is typed at it, are binary frames; all else is text. Nothing of it is
/// kept.
///
/// On a worker's own socket the daemon first says whose terminal it wants, and both prove themselves as in [`v1`].
pub mod terminal {
    use serde::{Deserialize, Serialize};

    use crate::ids::{SessionId, WorkerId};

    /// The name that is offered and chosen in the upgrade.
    pub const SUBPROTOCOL: &str = "quarterdeck.terminal.v1";
    /// What one frame of keys may have; whoever pastes more sends several.
    pub const KEYS_MAX: usize = 64 << 10;

    /// From the daemon, before anything is shown.
    #[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
    #[serde(rename_all = "snake_case")]
    pub enum DaemonTerminalFrame {
        /// The first frame.
        #[serde(rename = "look")]
        Open(TerminalRequest),
        /// That the daemon knows the secret: as in [`v1`](super::v1::ToWorker::Proof).
        Proof(String),
    }

    /// See [`ToWorker::Look`].
    #[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
    pub struct TerminalRequest {
        /// Whose terminal.
        pub session: SessionId,
        /// Which worker of the session.
        pub worker: WorkerId,
        /// A random word.
        pub nonce: String,
    }

    /// From the worker, before anything is shown.
    #[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
    #[serde(rename_all = "snake_case")]
    pub enum WorkerTerminalFrame {
        /// The answer to the first frame.
        Hello {
            /// A random word.
            nonce: String,
            /// That it knows the secret: as in [`v1`](super::v1::WorkerHello::proof).
            proof: String,
        },
        /// Here it is: from now on all frames are those of the person.
        #[serde(rename = "here")]
        Ready,
        /// It cannot be; the connection ends.
        Refused {
            /// Stable, for programs: `unauthorized`, `no_terminal`.
            code: String,
            /// What to do.
            message: String,
        },
    }

    /// From the person, as text.
    #[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
    #[serde(rename_all = "snake_case")]
    pub enum ViewerFrame {
        /// The size of the person's terminal, which the program's gets as well.
        Size {
            /// Characters in a row.
            cols: u16,
            /// Rows.
            rows: u16,
        },
    }

    /// To the person, as text.
    #[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
    #[serde(rename_all = "snake_case")]
    pub enum ViewerNotice {
        /// The program is no more.
        #[serde(rename = "over")]
        Ended,
    }
}

/// Without a subprotocol: the connection is the run's life, and nothing is repeated.
pub mod plain {
    use serde::{Deserialize, Serialize};
    use serde_json::{Map, Value};

    /// From the parent.
    #[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
    #[serde(tag = "kind", rename_all = "snake_case")]
    pub enum PlainParentFrame {
        /// Begin a run; one that is active is cancelled first.
        Run {
            /// What to do.
            assignment: String,
            /// How hard to think, in the agent's words.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            reasoning_effort: Option<String>,
            /// The conversation that it goes on with.
            #[serde(default, skip_serializing_if = "Vec::is_empty")]
            messages: Vec<Value>,
        },
        /// Stop the active run.
        Cancel,
        /// Tell the active run something.
        Message {
            /// What.
            text: String,
        },
        /// Answer an approval.
        ApprovalReply {
            /// Which.
            id: String,
            /// Whether it may.
            approved: bool,
        },
    }

    /// From the worker.
    #[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
    #[serde(tag = "kind", rename_all = "snake_case")]
    pub enum PlainWorkerFrame {
        /// Something of the run: `{"type":"token","content":T}` is text, `{"type":"complete"}` the last.
        Event {
            /// What.
            event: Map<String, Value>,
        },
        /// The run waits for a decision.
        ApprovalRequest {
            /// Its name; it cannot be guessed.
            id: String,
            /// What it wants.
            body: PlainApproval,
        },
        /// The run has ended; nothing of it comes after.
        Terminal {
            /// How.
            status: PlainRunStatus,
            /// The result.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            result: Option<String>,
            /// What went wrong.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            error: Option<String>,
            /// The conversation so far, of a run that is suspended.
            #[serde(default, skip_serializing_if = "Vec::is_empty")]
            transcript: Vec<Value>,
        },
    }

    /// What needs approval.
    #[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
    #[serde(default)]
    pub struct PlainApproval {
        /// The tool.
        pub tool_name: String,
        /// What kind of permission.
        pub permission_type: String,
        /// On what.
        pub resource: String,
        /// In words.
        pub question: String,
    }

    /// How a run ended.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
    #[serde(rename_all = "snake_case")]
    pub enum PlainRunStatus {
        /// Well.
        Completed,
        /// Not well.
        Error,
        /// Because it was told to.
        Cancelled,
        /// It waits for others, and is to be run again with its transcript.
        Suspended,
    }
}
