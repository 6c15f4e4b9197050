//! The state machine of one session. [`step`] handles an input and returns a [`SessionStep`]: events, effects, a reply.
//! Every change of [`SessionState`] goes through [`evolve()`], so replaying the journal gives the same state, byte for
//! byte.
//!
//! The state holds nothing that the journal does not contain. Whether an agent is connected, a halt is set or a budget
//! is spent can change at any moment; these facts come with each input as the [`SessionContext`].
//!
//! Design: docs/design/context-beside-state.md

mod advance;
mod agent;
mod agent_phase;
mod commands;
mod evolve;
mod finish;
mod liveness;
mod mail;
mod output_size;
mod queued_runs;
mod quota;
mod state;
mod step_builder;
mod suspend;
mod timers;
mod tool_permissions;
mod tool_questions;
mod worker;

use std::sync::Arc;

use qd_protocol::event::{
    Ask, AskAnswer, Attachment, ChildResult, EventActor, EventBody, RunStopCause, SessionLimits,
};
use qd_protocol::link::{AgentExitReason, AgentUpdate, AskRequest, AskResolution, UpdateNumber};
use qd_protocol::mail::{MailDelivery, MailKind};
use qd_protocol::policy::Policy;
use qd_protocol::sandbox::{NetworkSetting, SandboxSetting};
use qd_protocol::sandbox_spec::SandboxReport;
use qd_protocol::{AskId, ClockReading, EventNumber, LongText, MailId, Millis, RunId, SessionId, WorkerId};

pub use agent_phase::AgentPhase;
pub(crate) use commands::validate_answer;
pub use evolve::evolve;
pub use liveness::{ExpectedWakeup, expected_wakeup};
pub use state::{
    AskEntry, MailDeliveryState, MailboxEntry, PendingSteer, RunExecution, RunStopRequest, RunSuspension,
    SessionPhase, SessionState, UnfinishedRun,
};
pub use timers::{deadline, seconds_to_millis};
pub use tool_permissions::ToolCallVerdict;
pub use worker::may_start_worker;

use crate::rows::UpdatedRow;
use step_builder::SessionStepBuilder;

/// Current facts that are not in the journal.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SessionContext {
    pub now: ClockReading,
    /// A halt is set: no run starts.
    pub halted: bool,
    /// When the quota of the session's account resets, if it is exhausted: until then no run starts.
    pub quota_until: Option<Millis>,
    /// The budget of this session or of an ancestor is spent: a run that would start ends at once.
    pub over_budget: bool,
    /// The limit on live agents allows one more.
    pub slot_available: bool,
    pub agent: AgentAvailability,
    /// How an agent that is started now would be confined, if that is known. Only read by a step that
    /// [`may_start_worker`]. The worker has the last word.
    pub sandbox: Option<SandboxReport>,
}

impl SessionContext {
    /// No run may start, so a run that has not started counts as queued.
    pub fn holds_runs(&self) -> bool {
        self.halted || self.quota_until.is_some()
    }
}

/// Whether there is an agent to send a prompt to. While a worker is being stopped its agent counts as
/// [`AgentAvailability::Starting`], because the next one can start once the worker is gone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AgentAvailability {
    /// No agent and no connection to a worker.
    Absent,
    /// No agent, but its worker lives on for processes that earlier turns left running.
    IdleStopped,
    Starting,
    Ready {
        /// The agent accepts steers during a turn.
        steerable: bool,
    },
    /// The connection is broken and being re-established; the agent may still be alive. The link ends this state: it
    /// reattaches, or gives the worker up after a time limit and reports it as gone.
    Lost,
}

/// Every input of the session machine.
#[derive(Debug, Clone, PartialEq)]
pub enum SessionInput {
    /// A request from a client or from the daemon itself. Every event that is decided while it is handled carries its
    /// actor.
    Command { actor: Arc<EventActor>, command: SessionCommand },
    /// An update from the agent's side, under its link number.
    Update(UpdateNumber, AgentUpdate),
    /// The worker is connected.
    WorkerAttached {
        /// The last of our commands that the worker has applied.
        applied: EventNumber,
        /// The worker existed before and was found again.
        reattached: bool,
        /// How long the current turn has run, as measured by the worker.
        run_time_ms: Option<u64>,
    },
    /// The link found that the worker no longer exists.
    WorkerGone(AgentExitReason),
    /// A message for people about preparing the agent.
    Notice { text: String },
    /// A [`deadline`] may have passed.
    Tick,
    /// The context improved, or the state was just rebuilt from the journal: continue whatever can continue.
    Wake,
}

/// A request from a client or from the daemon itself.
#[derive(Debug, Clone, PartialEq)]
pub enum SessionCommand {
    AcceptPrompt(PromptSubmission),
    /// Stop all runs, or a single one.
    Cancel {
        /// Stop only this run.
        run: Option<RunId>,
        by: RunStopCause,
        /// The client's explanation.
        reason: Option<String>,
    },
    /// The parent session was cancelled.
    CancelFromParent {
        /// The number of the cancel in the parent's journal, which identifies repeats.
        cause: EventNumber,
    },
    /// All child sessions have applied this cancel.
    ChildrenCancelled {
        /// The number of the cancel in this session's journal.
        number: EventNumber,
    },
    /// Stop the active run because of a halt; queued runs stay queued.
    CancelActiveRun,
    /// The budget of this session or of an ancestor is spent.
    OverBudget,
    /// Send a steer to the running turn.
    Steer {
        text: LongText,
    },
    Answer {
        ask: AskId,
        answer: AskAnswer,
        /// The digest of the input that the answer was given to, if the client says so.
        shown_sha256: Option<String>,
    },
    /// Remove one run from the queue.
    RemoveQueued {
        run: RunId,
    },
    /// Remove all runs from the queue.
    ClearQueue,
    /// Move one run to another place in the queue.
    MoveQueued {
        run: RunId,
        /// The queued run that comes next after it; `None` moves it to the end.
        before: Option<RunId>,
    },
    UpdateSettings(SettingsUpdate),
    /// A child session is being created, in the same transaction.
    AddChild {
        child: SessionId,
    },
    /// End the session.
    Close {
        /// Delete its events as well.
        purge: bool,
    },
    /// All child sessions have closed.
    ChildrenClosed,
    /// A child session has become idle. Delivered at least once; only a run that waits for this child reacts.
    ChildEnded(ChildResult),
    /// The agent asks a person a question through one of our tools; the answer becomes the result of the tool call.
    OpenQuestion {
        /// A new id for the ask.
        ask: AskId,
        prompt: String,
        /// The allowed answers; empty means any text.
        options: Vec<String>,
    },
    /// An agent that does not ask before it uses our tools calls one: judge the call before it is performed. The id of
    /// the request is the same if the request is repeated.
    JudgeToolCall(AskRequest),
    /// The tool call has received the answer to its question.
    AnswerDelivered {
        ask: AskId,
    },
    /// The tool call that waited for the answer no longer exists.
    WithdrawQuestion {
        ask: AskId,
    },
    /// Accept a mail message.
    AcceptMail(MailSubmission),
    /// Claim messages that are held in the mailbox.
    ClaimMail {
        max: usize,
        lease_ms: u64,
    },
    /// The claimant has processed a message.
    AcknowledgeMail {
        id: MailId,
        /// The claim to acknowledge; `None` acknowledges whichever claim is current.
        claim: Option<EventNumber>,
    },
}

/// A mail message that was validated at the edge, under an id that no other message has.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MailSubmission {
    pub id: MailId,
    /// The sender, as determined by the daemon and not by the sender itself.
    pub from: String,
    pub from_session: Option<SessionId>,
    pub kind: MailKind,
    pub text: String,
    pub in_reply_to: Option<MailId>,
    /// Chosen by the sender to match replies to requests.
    pub correlation_id: Option<String>,
    /// How to deliver it; `None` uses the session's setting.
    pub deliver: Option<MailDelivery>,
    /// The run id to use if the message becomes a run, because a caller already waits for that id.
    pub run: Option<RunId>,
    /// Tells this message apart from a different one under the same id.
    pub fingerprint: String,
}

/// A prompt that was validated at the edge.
#[derive(Debug, Clone, PartialEq)]
pub struct PromptSubmission {
    pub run: RunId,
    pub prompt: LongText,
    pub attachments: Vec<Attachment>,
    /// Tells this prompt apart from a different one under the same run id.
    pub fingerprint: String,
}

/// A change of settings that was validated at the edge. `None` leaves a setting as it is.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct SettingsUpdate {
    pub title: Option<String>,
    pub model: Option<String>,
    pub mode: Option<String>,
    pub policy: Option<Policy>,
    pub sandbox: Option<SandboxSetting>,
    pub network: Option<NetworkSetting>,
    /// Replaces all limits.
    pub limits: Option<SessionLimits>,
}

/// The result of a step.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct SessionStep {
    /// Events to append to the journal, in order.
    pub events: Vec<SessionEvent>,
    /// Rows that the events change, written in the same transaction. The last value of a row wins.
    pub rows: Vec<UpdatedRow>,
    /// The events change the session's own row.
    pub session_changed: bool,
    /// Effects to carry out once the events are journalled.
    pub effects: Vec<SessionEffect>,
    /// The reply to the command, if the input was one.
    pub reply: Option<CommandReply>,
    /// Texts that do not fit their event and must be written to files before the event is journalled.
    pub oversized_texts: Vec<OversizedText>,
}

/// An event of a session, before the journal gives it a seq.
#[derive(Debug, Clone, PartialEq)]
pub struct SessionEvent {
    /// Position in the session's own sequence of events, from 1.
    pub number: EventNumber,
    /// When the step decided it.
    pub ts: ClockReading,
    pub run: Option<RunId>,
    /// The number of the agent update that caused this event. Only the first event of a step has it.
    pub update_number: Option<UpdateNumber>,
    /// Who caused it, if it was not the agent's work.
    pub actor: Option<Arc<EventActor>>,
    pub body: EventBody,
}

/// The result text of a `run.finished` event that is too long for the event.
#[derive(Debug, Clone, PartialEq)]
pub struct OversizedText {
    /// Index into the step's events.
    pub event_index: usize,
    /// The text. `None` means the concatenated deltas of the run, which only the journal has.
    pub text: Option<String>,
}

/// An action that the shell carries out once the events are journalled.
#[derive(Debug, Clone, PartialEq)]
pub enum SessionEffect {
    /// Make sure that an agent is running. Does nothing if one is running or starting.
    LaunchAgent {
        worker: WorkerId,
        /// The worker has to be started; otherwise it is running without an agent.
        new_worker: bool,
    },
    /// Send the agent this run's prompt or, after a suspension, the results of the child sessions.
    SendPrompt {
        /// The number of the `run.started` or `run.resumed` event.
        number: EventNumber,
        run: RunId,
    },
    SendSteer {
        /// The number of the `steer.accepted` or `steer.sent` event.
        number: EventNumber,
        run: RunId,
        text: LongText,
    },
    /// Ask the agent to stop its turn.
    CancelTurn {
        /// The number of the `run.cancel_requested` event.
        number: EventNumber,
        run: RunId,
    },
    /// Stop the agent's turn by killing processes.
    KillTurn {
        /// The number of the `run.kill_requested` event.
        number: EventNumber,
        run: RunId,
    },
    /// Send an answer to the agent.
    SendAnswer {
        /// The number of the `ask.resolved` event.
        number: EventNumber,
        ask: AskId,
        reply: AskResolution,
    },
    /// Stop the agent and its worker, then report the worker as gone. Does nothing if that is under way.
    StopAgent,
    /// Find out which of these child sessions have ended, and send [`SessionCommand::ChildEnded`] for each.
    QueryChildren { children: Vec<SessionId> },
    /// This session is idle: send [`SessionCommand::ChildEnded`] to its parent.
    NotifyParent,
    /// A run of a session in a fleet has ended: report it to the fleet, which knows whether it assigned the run.
    NotifyFleet { run: RunId },
    /// Cancel the child sessions, then send [`SessionCommand::ChildrenCancelled`].
    CancelChildren {
        /// The number of the cancel, to pass on to the children.
        number: EventNumber,
    },
    /// Close the child sessions, then send [`SessionCommand::ChildrenClosed`].
    CloseChildren {
        /// Delete their events as well.
        purge: bool,
    },
    /// The agent reported cost: check the budgets.
    CheckBudget,
    /// The quota of the account is exhausted: have its other sessions check whether their runs may start.
    WakeAccount,
    /// The session is closed: delete its events.
    Purge,
}

/// The reply to a command.
#[derive(Debug, Clone, PartialEq)]
pub enum CommandReply {
    /// A prompt was accepted.
    Accepted {
        /// Position in the queue; 0 means that the run starts at once.
        position: u32,
        /// Index of its `run.accepted` among the step's events; `None` if it had been accepted before.
        event: Option<usize>,
    },
    /// The cancel applied to these runs.
    Cancelled(Vec<RunId>),
    /// A steer was accepted.
    Steered {
        run: RunId,
        /// Index of its `steer.accepted` among the step's events.
        event: usize,
    },
    /// The answer was accepted; the ask is now resolved.
    Answered(Box<Ask>),
    QuestionOpened(AskId),
    /// Whether a call of one of our tools may be performed.
    ToolCallJudged(ToolCallVerdict),
    /// These runs were removed from the queue.
    Removed(Vec<RunId>),
    /// The run is at this place of the queue, from 1.
    Moved {
        position: u32,
    },
    /// A mail message was accepted.
    MailAccepted {
        /// Index of its `mail.sent` among the step's events; `None` if it had been accepted before.
        event: Option<usize>,
    },
    /// These messages are claimed for the caller.
    MailClaimed {
        /// The messages with the number of their claim, oldest first.
        mail: Vec<(MailId, EventNumber)>,
        /// When the claims expire.
        until: Millis,
    },
    /// The command was applied and has nothing to return.
    Done,
    Refused(CommandRefusal),
}

/// Why a command was refused.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CommandRefusal {
    /// The session is closed or closing.
    Closed,
    /// The queue is at its limit.
    QueueFull,
    /// The agent has said as much as it may in this session.
    JournalLimit,
    /// The run id is already used for a different prompt.
    RunIdConflict,
    /// No run can be steered now.
    NotRunning,
    /// No turn is running in which a question could be asked.
    NoTurn,
    /// As many asks are open as may be.
    TooManyAsks,
    /// The agent does not support steering.
    SteerUnsupported,
    /// The run is not in the queue.
    NotQueued,
    /// The run before which another is to be moved is not in the queue.
    MoveTargetNotQueued,
    AskNotOpen,
    /// The answer was given to another input than that of the ask. The ask stays open.
    AskChanged,
    /// The answer is not valid for this ask; the text says why.
    InvalidAnswer(String),
    /// The mailbox is at its limit.
    MailboxFull,
    /// The message is not claimed, or is claimed by another caller.
    NotClaimed,
}

/// Handles one input. Each event is applied with [`evolve()`] as it is decided; nothing else changes the state.
pub fn step(state: &mut SessionState, input: SessionInput, context: &SessionContext) -> SessionStep {
    let mut builder = SessionStepBuilder::new(state, context.clone());
    match input {
        SessionInput::Command { actor, command } => {
            builder.set_actor(actor);
            builder.handle_command(command);
        }
        SessionInput::Update(number, update) => builder.handle_update(number, update),
        SessionInput::WorkerAttached { applied, reattached, run_time_ms } => {
            builder.handle_worker_attached(applied, reattached, run_time_ms)
        }
        SessionInput::WorkerGone(reason) => builder.handle_worker_gone(reason),
        SessionInput::Notice { text } => builder.emit_notice(text),
        SessionInput::Tick => builder.handle_tick(),
        SessionInput::Wake => builder.handle_wake(),
    }
    builder.into_step()
}
