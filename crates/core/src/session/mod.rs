//! One conversation, as a machine. [`step`] judges an input and answers with a [`Step`]: events, effects, a reply.
//! Every change of [`State`] goes through [`evolve`], so replaying the journal gives the same state, byte for byte.
//!
//! What the state does not hold is as important: nothing that the journal does not say. Whether an agent is there,
//! whether a halt is set and whether a budget is spent are facts of the moment; they come with each input as the
//! [`World`].

mod advance;
mod agent;
mod commands;
mod evolve;
mod finish;
mod mail;
mod state;
mod step_builder;
mod suspend;
mod timers;
mod tool_questions;
mod worker;

use qd_protocol::event::{Ask, AskAnswer, Attachment, ChildResult, EventBody, RunStopCause, SessionLimits};
use qd_protocol::link::{AgentExitReason, AgentUpdate, AskResolution as AskReply, UpdateNumber};
use qd_protocol::mail::{MailDelivery, MailKind};
use qd_protocol::policy::Policy;
use qd_protocol::{AskId, EventNumber, LongText, MailId, Millis, RunId, SessionId, WorkerId};

pub(crate) use commands::validate_answer;
pub use evolve::evolve;
pub use state::{
    AskEntry, MailDeliveryState, MailboxEntry, PendingSteer, RunExecution, RunStopRequest, RunSuspension,
    SessionPhase, SessionState, UnfinishedRun,
};
pub use timers::{deadline, seconds_to_millis};

use crate::rows::UpdatedRow;
use step_builder::SessionStepBuilder;

/// What is true at this moment outside the journal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SessionContext {
    /// The time.
    pub now: Millis,
    /// Whether a halt is set: nothing starts.
    pub halted: bool,
    /// Whether the budget of this session, or of one above it, is spent: what would start ends at once.
    pub over_budget: bool,
    /// Whether one more agent may live.
    pub slot_available: bool,
    /// The agent.
    pub agent: AgentAvailability,
}

/// Whether there is an agent to talk to. With a worker that is being stopped there is none, but one is on its way:
/// [`Link::Starting`] until the worker is gone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AgentAvailability {
    /// No.
    Absent,
    /// No, but a worker that holds what turns have left running.
    WorkerOnly,
    /// On its way.
    Starting,
    /// Yes.
    Ready {
        /// Whether its turns can be steered.
        steerable: bool,
    },
    /// It may be; the connection is broken and being mended.
    Lost,
}

/// Everything that can happen to a session.
#[derive(Debug, Clone, PartialEq)]
pub enum SessionInput {
    /// A client, or the daemon itself, wants something.
    Command(SessionCommand),
    /// The agent's side said something.
    LinkMessage(UpdateNumber, AgentUpdate),
    /// The connection broke; the agent may live on.
    LinkLost,
    /// The worker is connected; it has applied our commands up to this number.
    WorkerAttached {
        /// The last number applied.
        applied: EventNumber,
        /// Whether it was there before, and so has been found again.
        reattached: bool,
        /// How long the turn under way has run, as the worker counts it.
        run_time_ms: Option<u64>,
    },
    /// There is no worker any more, as the link found out.
    WorkerGone(AgentExitReason),
    /// Something that a person should see happened on the way to an agent.
    Notice {
        /// What.
        text: String,
    },
    /// A [`deadline`] may have passed.
    Tick,
    /// The world changed for the better, or we have just been rebuilt: see what can go on.
    Wake,
}

/// What a client, or the daemon itself, wants.
#[derive(Debug, Clone, PartialEq)]
pub enum SessionCommand {
    /// Take a prompt.
    AcceptPrompt(PromptSubmission),
    /// Stop every run there is, or one.
    Cancel {
        /// This one alone.
        run: Option<RunId>,
        /// By whom.
        by: RunStopCause,
        /// In the client's words.
        reason: Option<String>,
    },
    /// The session above was cancelled.
    CancelFromParent {
        /// The number of that cancel there, by which a repeat is known.
        cause: EventNumber,
    },
    /// All sessions below have applied this cancel.
    ChildrenCancelled {
        /// The number it bears here.
        number: EventNumber,
    },
    /// Stop the active run because a halt says so; what waits goes on waiting.
    CancelActiveRun,
    /// The budget of this session or of one above is spent.
    OverBudget,
    /// Tell the running turn something.
    Steer {
        /// What.
        text: LongText,
    },
    /// Answer an ask.
    Answer {
        /// Which.
        ask: AskId,
        /// How.
        answer: AskAnswer,
    },
    /// Remove one that waits.
    RemoveQueued {
        /// Which.
        run: RunId,
    },
    /// Remove all that wait.
    ClearQueue,
    /// Change settings.
    UpdateSettings(SettingsUpdate),
    /// A session below is being created, in the same transaction.
    AddChild {
        /// Its id.
        child: SessionId,
    },
    /// End the conversation.
    Close {
        /// Whether its events go too.
        purge: bool,
    },
    /// All sessions below have closed.
    ChildrenClosed,
    /// A session below has nothing to do any more. Said at least once; only a run that waits for it takes note.
    ChildEnded(ChildResult),
    /// The agent asks a person something by a tool call, whose result the answer will be.
    OpenQuestion {
        /// The ask, by a new id.
        ask: AskId,
        /// What it wants to know.
        prompt: String,
        /// What it may be answered with; empty: anything.
        options: Vec<String>,
    },
    /// The answer to such a question was given to the call.
    AnswerDelivered {
        /// Which.
        ask: AskId,
    },
    /// The call that waited for such a question is no more.
    WithdrawQuestion {
        /// Which.
        ask: AskId,
    },
    /// Take a message.
    AcceptMail(MailSubmission),
    /// Give out messages that wait.
    ClaimMail {
        /// How many at most.
        max: usize,
        /// For how long.
        lease_ms: u64,
    },
    /// Whoever claimed a message is done with it.
    AcknowledgeMail {
        /// Which.
        id: MailId,
        /// By this claim; without one, by whoever has it.
        claim: Option<EventNumber>,
    },
}

/// A message that was checked at the edge, under an id that no other message has.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MailSubmission {
    /// The message.
    pub id: MailId,
    /// From whom, as the daemon says.
    pub from: String,
    /// From which session.
    pub from_session: Option<SessionId>,
    /// Meant as.
    pub kind: MailKind,
    /// The words.
    pub text: String,
    /// What it answers.
    pub in_reply_to: Option<MailId>,
    /// What the sender knows the exchange by.
    pub correlation_id: Option<String>,
    /// How it is to be delivered; as the session's settings say unless given.
    pub deliver: Option<MailDelivery>,
    /// The run that it becomes, where somebody waits for one; else it gets one of its own.
    pub run: Option<RunId>,
    /// What tells it apart from another message under the same id.
    pub fingerprint: String,
}

/// A prompt that was checked at the edge.
#[derive(Debug, Clone, PartialEq)]
pub struct PromptSubmission {
    /// Its run.
    pub run: RunId,
    /// What to do.
    pub prompt: LongText,
    /// Files.
    pub attachments: Vec<Attachment>,
    /// What tells it apart from another prompt under the same id.
    pub fingerprint: String,
}

/// A change of settings that was checked at the edge. What is `None` stays.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct SettingsUpdate {
    /// The new title.
    pub title: Option<String>,
    /// The new model.
    pub model: Option<String>,
    /// The new policy.
    pub policy: Option<Policy>,
    /// The new limits, all of them.
    pub limits: Option<SessionLimits>,
}

/// What a step decided.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct SessionStep {
    /// To be journalled, in order.
    pub events: Vec<SessionEvent>,
    /// What they change in the lists, in the same transaction; the last word on each row counts.
    pub rows: Vec<UpdatedRow>,
    /// Whether they change the session's own row.
    pub session_changed: bool,
    /// To be done once they are.
    pub effects: Vec<SessionEffect>,
    /// For whoever sent the command.
    pub reply: Option<CommandReply>,
    /// Texts that do not fit their event and must be kept as files before it is journalled.
    pub oversized_texts: Vec<OversizedText>,
}

/// An event of a session, before the journal gives it a seq.
#[derive(Debug, Clone, PartialEq)]
pub struct SessionEvent {
    /// Its place in the session.
    pub number: EventNumber,
    /// When it was decided.
    pub ts: Millis,
    /// The run that it belongs to.
    pub run: Option<RunId>,
    /// What was heard and made it.
    pub link_number: Option<UpdateNumber>,
    /// What happened.
    pub body: EventBody,
}

/// The text of a `run.finished` that is too long for it.
#[derive(Debug, Clone, PartialEq)]
pub struct OversizedText {
    /// Which of the step's events.
    pub event_index: usize,
    /// The text; `None`: it is the run's deltas, joined, which only the journal has.
    pub text: Option<String>,
}

/// What the shell is to do once the events are journalled.
#[derive(Debug, Clone, PartialEq)]
pub enum SessionEffect {
    /// See that there is an agent. Nothing, if there is one or one is on its way.
    LaunchAgent {
        /// In this worker.
        worker: WorkerId,
        /// Whether the worker is new; else it is there and has no agent.
        new_worker: bool,
    },
    /// Give the prompt of this run to the agent, or what a suspended run goes on with.
    SendPrompt {
        /// The number of its `run.started`, or of its `run.resumed`.
        number: EventNumber,
        /// The run.
        run: RunId,
    },
    /// Give a steer to the agent.
    SendSteer {
        /// The number of the event that sends it.
        number: EventNumber,
        /// The run.
        run: RunId,
        /// The words.
        text: LongText,
    },
    /// Ask the agent to stop.
    CancelTurn {
        /// The number of the `run.cancel_requested`.
        number: EventNumber,
        /// The run.
        run: RunId,
    },
    /// Stop the agent's turn whatever it takes.
    KillTurn {
        /// The number of the `run.kill_requested`.
        number: EventNumber,
        /// The run.
        run: RunId,
    },
    /// Give an answer to the agent.
    SendAnswer {
        /// The number of the `ask.resolved`.
        number: EventNumber,
        /// The ask.
        ask: AskId,
        /// The answer.
        reply: AskReply,
    },
    /// End the agent and its worker; then say that it is gone. Nothing, if that is under way.
    StopAgent,
    /// See which of these sessions below have ended, and say [`Command::ChildEnded`] for each of them.
    QueryChildren {
        /// The sessions.
        children: Vec<SessionId>,
    },
    /// Nothing is left to do here: say [`Command::ChildEnded`] to the session above.
    NotifyParent,
    /// A run of a session in a fleet has ended: say so to the fleet, which knows whether it started it.
    NotifyFleet {
        /// The run.
        run: RunId,
    },
    /// Cancel the sessions below; then say [`Command::BelowCancelled`].
    CancelChildren {
        /// The number that this cancel bears.
        number: EventNumber,
    },
    /// Close the sessions below; then say [`Command::BelowClosed`].
    CloseChildren {
        /// Whether their events go too.
        purge: bool,
    },
    /// Money was spent: see whether a budget is.
    CheckBudget,
    /// The session is closed and its events are to be deleted.
    Purge,
}

/// What became of a command.
#[derive(Debug, Clone, PartialEq)]
pub enum CommandReply {
    /// A prompt is ours.
    Accepted {
        /// Its place in the queue; 0: it starts at once.
        position: u32,
        /// Its `run.accepted` among the step's events; `None`: it was ours before.
        event: Option<usize>,
    },
    /// These runs were hit.
    Cancelled(Vec<RunId>),
    /// A steer is ours.
    Steered {
        /// The run it goes to.
        run: RunId,
        /// Its `steer.accepted` among the step's events.
        event: usize,
    },
    /// An answer won.
    Answered(Box<Ask>),
    /// A question is open.
    QuestionOpened(AskId),
    /// These runs left the queue.
    Removed(Vec<RunId>),
    /// A message is ours.
    MailAccepted {
        /// Its `mail.sent` among the step's events; `None`: it was ours before.
        event: Option<usize>,
    },
    /// These messages are the caller's until then, each by its claim.
    MailClaimed {
        /// The messages, the oldest first.
        mail: Vec<(MailId, EventNumber)>,
        /// Until when.
        until: Millis,
    },
    /// It is so.
    Done,
    /// It is not.
    Refused(CommandRefusal),
}

/// Why a command was refused.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CommandRefusal {
    /// The session takes no more.
    Closed,
    /// Too many wait.
    QueueFull,
    /// The id is known with other words.
    RunIdConflict,
    /// There is nothing to steer.
    NotRunning,
    /// No turn runs in which something could be asked.
    NoTurn,
    /// The agent cannot be steered.
    SteerUnsupported,
    /// The run does not wait in the queue.
    NotQueued,
    /// No open ask has this id.
    AskNotOpen,
    /// The answer does not fit.
    InvalidAnswer(String),
    /// Too many messages lie here.
    MailboxFull,
    /// Nobody has claimed the message, or somebody else.
    NotClaimed,
}

/// Judges one input. Each event is applied with [`evolve`] as it is decided; nothing else changes the state.
pub fn step(state: &mut SessionState, input: SessionInput, world: &SessionContext) -> SessionStep {
    let mut draft = SessionStepBuilder::new(state, *world);
    match input {
        SessionInput::Command(command) => draft.handle_command(command),
        SessionInput::LinkMessage(number, up) => draft.handle_link_message(number, up),
        SessionInput::LinkLost => {}
        SessionInput::WorkerAttached { applied, reattached: again, run_time_ms } => {
            draft.handle_worker_attached(applied, again, run_time_ms)
        }
        SessionInput::WorkerGone(gone) => draft.handle_worker_gone(gone),
        SessionInput::Notice { text } => draft.emit_notice(text),
        SessionInput::Tick => draft.handle_tick(),
        SessionInput::Wake => draft.handle_wake(),
    }
    draft.into_step()
}
