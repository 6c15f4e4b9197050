//! The WebSocket frames between daemons, workers and viewers, one JSON text each. [`v1`] is the link between a daemon
//! and a worker; [`join`] is the control connection of a worker on another machine; [`terminal`] shows an agent's
//! terminal to a person; [`plain`] is for peers that offer no subprotocol. Receivers ignore frames that they cannot
//! parse and fields that they do not know. Which updates a `said` frame of [`v1`] may hold depends on the version that
//! both sides agreed on.

/// The subprotocol `quarterdeck.v1`. One connection serves one session, and the session's run continues if the
/// connection breaks.
///
/// The daemon sends the first frame, whichever side opened the connection: its
/// [`DaemonLinkFrame::Hello`](v1::DaemonLinkFrame::Hello). The worker answers with
/// [`WorkerLinkFrame::Hello`](v1::WorkerLinkFrame::Hello), and the daemon sends
/// [`DaemonLinkFrame::Proof`](v1::DaemonLinkFrame::Proof). After that both sides send freely. The worker numbers its
/// updates and keeps each until the daemon has acknowledged it. After a reconnect it resends everything after the
/// `taken` of the new hello.
pub mod v1 {
    use serde::{Deserialize, Serialize};

    use crate::ids::{EventNumber, RunId, SessionId, WorkerId};
    use crate::link::{AgentCommand, AgentUpdate, TurnLimits, UpdateNumber};
    use crate::sandbox_spec::SandboxSelection;
    use crate::worker::AgentSpec;

    /// Name of the subprotocol in the WebSocket upgrade.
    pub const SUBPROTOCOL: &str = "quarterdeck.v1";
    /// Oldest version of the frames that this build supports.
    pub const VERSION_MIN: u32 = 1;
    /// Newest version of the frames that this build supports. Two sides can talk if their ranges overlap.
    pub const VERSION_MAX: u32 = 1;

    /// The range of versions that a peer supports.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
    pub struct ProtocolVersions {
        pub min: u32,
        pub max: u32,
    }

    impl ProtocolVersions {
        /// The range that this build supports.
        pub const SUPPORTED: Self = Self { min: VERSION_MIN, max: VERSION_MAX };

        /// The newest version that both sides support.
        pub fn newest_common(self, other: Self) -> Option<u32> {
            let newest = self.max.min(other.max);
            (newest >= self.min.max(other.min)).then_some(newest)
        }
    }

    /// Frames from the daemon to the worker.
    #[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
    #[serde(rename_all = "snake_case")]
    pub enum DaemonLinkFrame {
        /// The first frame on the connection.
        Hello(DaemonHello),
        /// Proof that the daemon knows the secret: HMAC-SHA256 over `daemon`, the worker's nonce and the daemon's
        /// nonce, each followed by a newline, in hex.
        Proof(String),
        /// Every update up to this number is journalled, so the worker may drop it.
        Ack(UpdateNumber),
        #[serde(rename = "do")]
        Command(AgentCommand),
        /// What remains of the turn's limits from now on. The worker enforces it while no daemon is attached; a later
        /// frame replaces an earlier one.
        Limits { run: RunId, limits: TurnLimits },
        /// Start the agent, for a session that is new to this worker or whose agent was stopped while idle.
        Start(Box<AgentSpec>),
        /// Stop the idle agent, but keep processes that its turns left running on purpose. The worker answers with
        /// [`AgentUpdate::IdleStopped`], or with [`AgentUpdate::Gone`] if no process is left.
        #[serde(rename = "rest")]
        StopIdleAgent,
        /// Stop the agent and every process that it started. The worker answers with [`AgentUpdate::Gone`].
        Close,
    }

    /// Data of [`DaemonLinkFrame::Hello`].
    #[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
    pub struct DaemonHello {
        pub versions: ProtocolVersions,
        /// Version of the daemon, for people.
        pub software: String,
        /// Features beyond the protocol version.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        pub capabilities: Vec<String>,
        /// The session that this connection serves.
        pub session: SessionId,
        /// The worker that the daemon expects.
        pub worker: WorkerId,
        /// Random text, which the worker's proof covers.
        pub nonce: String,
        /// Number of the last update that is journalled.
        #[serde(rename = "taken")]
        pub journalled: UpdateNumber,
    }

    /// Frames from the worker to the daemon.
    #[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
    #[serde(rename_all = "snake_case")]
    pub enum WorkerLinkFrame {
        /// The answer to the daemon's hello.
        Hello(WorkerHello),
        /// The worker refuses the connection and closes it.
        Refused {
            /// Stable code: `unsupported_version`, `unauthorized`, `busy`, `wrong_worker` or `bad_number`.
            code: String,
            /// One sentence for people: what happened and what to do.
            message: String,
        },
        /// Updates with consecutive numbers from `first` on.
        #[serde(rename = "said")]
        Updates {
            /// Number of the first update.
            first: UpdateNumber,
            #[serde(rename = "ups")]
            updates: Vec<AgentUpdate>,
        },
    }

    /// Data of [`WorkerLinkFrame::Hello`].
    #[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
    pub struct WorkerHello {
        /// The version that both sides will use.
        pub version: u32,
        /// Version of the worker, for people.
        pub software: String,
        /// Features beyond the protocol version.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        pub capabilities: Vec<String>,
        /// Random text, which the daemon's proof covers.
        pub nonce: String,
        /// Proof that the worker knows the secret: HMAC-SHA256 over `worker`, the daemon's nonce and the worker's
        /// nonce, each followed by a newline, in hex.
        pub proof: String,
        /// What the worker holds for this session and worker id.
        #[serde(rename = "seat")]
        pub presence: AgentPresence,
        /// Number of the last update.
        pub last: UpdateNumber,
        /// Every command up to this number has been applied.
        pub applied: EventNumber,
        /// Process id of the worker.
        pub pid: u32,
        /// Milliseconds that the current turn has run, without its waits for people.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub run_time_ms: Option<u64>,
        /// Model that the agent was started with, by the agent's own name for it.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub model: Option<String>,
        /// How strongly the daemon asked to confine the agent when it was started.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub sandbox: Option<SandboxSelection>,
    }

    /// What a worker holds for a session.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
    #[serde(rename_all = "snake_case")]
    pub enum AgentPresence {
        /// Nothing. The worker waits for [`DaemonLinkFrame::Start`].
        Empty,
        /// An agent that is not ready yet.
        Starting,
        /// An agent that is ready.
        Ready {
            /// Whether a running turn can be steered.
            steers: bool,
        },
        /// No agent, but processes that its turns left running on purpose.
        #[serde(rename = "resting")]
        IdleStopped,
        /// No agent any more. Its last updates wait to be acknowledged.
        Gone,
    }
}

/// The control connection of a worker on another machine. The worker opens one per process, with the same subprotocol
/// as [`v1`]. It carries no output of agents: for each session that the worker is given, it opens a separate [`v1`]
/// connection.
pub mod join {
    use serde::{Deserialize, Serialize};

    use super::v1::ProtocolVersions;
    use crate::api::Agent;
    use crate::ids::{SessionId, WorkerId};
    use crate::sandbox_spec::SandboxSupport;
    use crate::worker::{AgentSpec, Secret};

    /// Frames from the worker to the daemon.
    #[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
    #[serde(rename_all = "snake_case")]
    pub enum WorkerJoinFrame {
        /// The first frame on the connection.
        Hello(Box<JoinHello>),
        /// The worker cannot hold this session's agent, or can no longer hold it.
        Refused {
            session: SessionId,
            worker: WorkerId,
            /// Stable code: `path_not_found`, `unknown_agent`, `unknown_session`, `agent_not_started` or
            /// `sandbox_unavailable`.
            code: String,
            /// One sentence for people: what happened and what to do.
            message: String,
        },
    }

    /// Data of [`WorkerJoinFrame::Hello`].
    #[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
    pub struct JoinHello {
        pub versions: ProtocolVersions,
        /// Version of the worker, for people.
        pub software: String,
        /// Random id of the worker process. It stays the same across reconnects and is known only to the worker and the
        /// daemon.
        #[serde(rename = "host")]
        pub process_id: String,
        /// Name for people, usually the name of the machine.
        pub name: String,
        /// Labels by which sessions can choose this worker.
        pub labels: Vec<String>,
        pub agents: Vec<Agent>,
        /// The workers of sessions that this process still holds from an earlier connection.
        #[serde(rename = "seats", default)]
        pub workers: Vec<SessionWorker>,
        /// How this machine can confine agents. An older worker says nothing, and confines none.
        #[serde(default, skip_serializing_if = "SandboxSupport::confines_nothing")]
        pub sandbox: SandboxSupport,
    }

    /// A session and the id of its worker.
    #[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
    pub struct SessionWorker {
        pub session: SessionId,
        pub worker: WorkerId,
    }

    /// Frames from the daemon to the worker.
    #[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
    #[serde(rename_all = "snake_case")]
    pub enum DaemonJoinFrame {
        /// The answer to the worker's hello.
        Welcome {
            /// Name under which the daemon lists the worker.
            name: String,
        },
        /// The daemon refuses the worker and closes the connection. Trying again would not help.
        Refused {
            /// Stable code: `unsupported_version`, `invalid_value` or `host_taken`.
            code: String,
            /// One sentence for people: what happened and what to do.
            message: String,
        },
        /// Start this agent and open a connection for its session. If the agent is already there, only open the
        /// connection.
        Open {
            spec: Box<AgentSpec>,
            /// The secret that both sides of this session's connections prove they know.
            secret: Secret,
        },
        /// Open a connection for a session that the worker holds.
        Dial(SessionWorker),
        /// This session's agent is no longer needed: stop it and every process that it started.
        Close(SessionWorker),
    }
}

/// The subprotocol `quarterdeck.terminal.v1`. One connection shows one session's terminal to one person. Screen output
/// and typed keys are binary frames; everything else is text. Nothing of it is stored.
///
/// On a worker's socket, the daemon first names the terminal that it wants, and both sides prove themselves as in
/// [`v1`].
pub mod terminal {
    use serde::{Deserialize, Serialize};

    use crate::ids::{SessionId, WorkerId};

    /// Name of the subprotocol in the WebSocket upgrade.
    pub const SUBPROTOCOL: &str = "quarterdeck.terminal.v1";
    /// Maximum size of one frame of keys in bytes. A client splits a longer paste into several frames.
    pub const KEYS_MAX: usize = 64 << 10;

    /// Handshake frames from the daemon to the worker.
    #[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
    #[serde(rename_all = "snake_case")]
    pub enum DaemonTerminalFrame {
        /// The first frame on the connection.
        #[serde(rename = "look")]
        Open(TerminalRequest),
        /// Proof that the daemon knows the secret, as in [`v1`](super::v1::DaemonLinkFrame::Proof).
        Proof(String),
    }

    /// Data of [`DaemonTerminalFrame::Open`].
    #[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
    pub struct TerminalRequest {
        /// The session whose terminal is wanted.
        pub session: SessionId,
        pub worker: WorkerId,
        /// Random text, which the worker's proof covers.
        pub nonce: String,
    }

    /// Handshake frames from the worker to the daemon.
    #[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
    #[serde(rename_all = "snake_case")]
    pub enum WorkerTerminalFrame {
        /// The answer to the daemon's first frame.
        Hello {
            /// Random text, which the daemon's proof covers.
            nonce: String,
            /// Proof that the worker knows the secret, as in [`v1`](super::v1::WorkerHello::proof).
            proof: String,
        },
        /// The terminal is connected. All further frames are those between the viewer and the terminal.
        #[serde(rename = "here")]
        Ready,
        /// The worker refuses the connection and closes it.
        Refused {
            /// Stable code: `unauthorized` or `no_terminal`.
            code: String,
            /// One sentence for people: what happened and what to do.
            message: String,
        },
    }

    /// Text frames from the viewer.
    #[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
    #[serde(rename_all = "snake_case")]
    pub enum ViewerFrame {
        /// Size of the viewer's terminal. The agent's terminal is resized to it.
        Size { cols: u16, rows: u16 },
    }

    /// Text frames to the viewer.
    #[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
    #[serde(rename_all = "snake_case")]
    pub enum ViewerNotice {
        /// The program in the terminal has ended.
        #[serde(rename = "over")]
        Ended,
    }
}

/// Frames for peers that offer no subprotocol. A run lives only as long as its connection, and nothing is sent again.
pub mod plain {
    use serde::{Deserialize, Serialize};
    use serde_json::{Map, Value};

    /// Frames from the parent to the worker.
    #[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
    #[serde(tag = "kind", rename_all = "snake_case")]
    pub enum PlainParentFrame {
        /// Start a run. An active run is cancelled first.
        Run {
            assignment: String,
            /// How much the model should think, in the agent's own terms.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            reasoning_effort: Option<String>,
            /// The conversation that the run continues.
            #[serde(default, skip_serializing_if = "Vec::is_empty")]
            messages: Vec<Value>,
        },
        Cancel,
        /// Steer the active run.
        Message {
            text: String,
        },
        /// Answer an approval request.
        ApprovalReply {
            /// Id of the approval request.
            id: String,
            approved: bool,
        },
    }

    /// Frames from the worker to the parent.
    #[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
    #[serde(tag = "kind", rename_all = "snake_case")]
    pub enum PlainWorkerFrame {
        /// An event of the run. `{"type":"token","content":T}` is a piece of text; `{"type":"complete"}` is the last
        /// event.
        Event { event: Map<String, Value> },
        /// The run waits for an approval.
        ApprovalRequest {
            /// Id for the reply. It cannot be guessed.
            id: String,
            body: PlainApproval,
        },
        /// The run has ended. No frame of this run follows.
        Terminal {
            status: PlainRunStatus,
            #[serde(default, skip_serializing_if = "Option::is_none")]
            result: Option<String>,
            #[serde(default, skip_serializing_if = "Option::is_none")]
            error: Option<String>,
            /// The conversation so far, if the run is suspended.
            #[serde(default, skip_serializing_if = "Vec::is_empty")]
            transcript: Vec<Value>,
        },
    }

    /// The action that needs approval.
    #[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
    #[serde(default)]
    pub struct PlainApproval {
        pub tool_name: String,
        /// Kind of permission, such as `WriteFile`.
        pub permission_type: String,
        /// What the tool would act on: a path, a command or a URL.
        pub resource: String,
        /// The request as a sentence for people.
        pub question: String,
    }

    /// How a run ended.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
    #[serde(rename_all = "snake_case")]
    pub enum PlainRunStatus {
        Completed,
        Error,
        Cancelled,
        /// The run waits for other sessions. It must be started again with its transcript.
        Suspended,
    }
}
