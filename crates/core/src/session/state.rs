//! What a session is, as far as the journal says. Only [`evolve`](super::evolve) changes it; here are its parts and
//! the questions that can be asked of it.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use qd_protocol::event::{Ask, ChildResult, RunStopCause, SessionCloseMode, SessionCreated, TokenUsage};
use qd_protocol::link::{AskResolution, UpdateNumber};
use qd_protocol::text::BlobRef;
use qd_protocol::{AskId, EventNumber, LongText, MailId, Millis, RunId, SessionId, WorkerId, WorkspaceId};
use serde::{Deserialize, Serialize};

/// One conversation.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SessionState {
    /// The session.
    pub id: SessionId,
    /// Its project.
    pub workspace: WorkspaceId,
    /// How many events it has.
    pub number: EventNumber,
    /// The last thing heard that made an event. What is not above it was heard before.
    #[serde(rename = "taken")]
    pub last_link_number: UpdateNumber,
    /// What it was made with, as changed since.
    pub settings: SessionCreated,
    /// The agent's own name for the conversation.
    pub agent_session_id: Option<String>,
    /// The worker that holds its agent, or did: from its `worker.started` to its `worker.exited`.
    #[serde(default)]
    pub worker: Option<WorkerId>,
    /// Since when it has the last one that it had.
    #[serde(default)]
    pub worker_since: Millis,
    /// Since when that worker is being ended. It is given no run any more.
    #[serde(default)]
    #[serde(rename = "stopping")]
    pub worker_stopping_since: Option<Millis>,
    /// When workers of late were lost or failed, oldest first: no more of them than it takes to stop starting others.
    #[serde(default)]
    pub crashes: VecDeque<Millis>,
    /// Runs that have not ended, in the order in which they are served. Only the first can have started.
    pub runs: VecDeque<UnfinishedRun>,
    /// Asks that nobody has answered, and answers that the agent has not confirmed.
    pub asks: BTreeMap<AskId, AskEntry>,
    /// Tools that a person has allowed for the rest of the session.
    pub grants: BTreeSet<String>,
    /// What all its runs have used.
    pub usage: TokenUsage,
    /// Sessions below.
    pub children: BTreeSet<SessionId>,
    /// A cancel that the sessions below have not all confirmed.
    #[serde(rename = "owed_cancel")]
    pub pending_child_cancel: Option<EventNumber>,
    /// The last cancel of the session above that was applied here.
    #[serde(rename = "parent_cancel")]
    pub last_parent_cancel: EventNumber,
    /// Whether it takes no more prompts.
    pub closing: Option<SessionCloseMode>,
    /// Whether the sessions below have closed, where this one is closing.
    #[serde(rename = "below_closed")]
    pub children_closed: bool,
    /// Whether it has ended.
    pub closed: bool,
    /// Since when it exists.
    pub created_at: Millis,
    /// Its last event.
    pub updated_at: Millis,
    /// When its last run ended.
    #[serde(default)]
    pub last_finished: Option<Millis>,
    /// Messages that something may still become of, in the order in which they came. Their words are in the journal.
    #[serde(default)]
    pub mail: VecDeque<MailboxEntry>,
}

/// A message that something may still become of.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MailboxEntry {
    /// The message.
    pub id: MailId,
    /// How often it has come back.
    pub returns: u32,
    /// Where it stands.
    #[serde(rename = "stands")]
    pub delivery: MailDeliveryState,
}

/// Where a message stands.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum MailDeliveryState {
    /// It waits to be claimed.
    Held,
    /// It is this run, which the agent does not have yet.
    Run(RunId),
    /// It is being told to the active run, and becomes this one if that does not take it.
    Steer {
        /// The run that it is told to.
        #[serde(rename = "told")]
        target_run: RunId,
        /// The run that it becomes.
        #[serde(rename = "otherwise")]
        fallback_run: RunId,
    },
    /// Somebody has it.
    Claimed {
        /// The number of its `mail.claimed`.
        claim: EventNumber,
        /// Until when.
        until: Millis,
    },
}

/// A run that has not ended. Its prompt is in the journal, not here.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct UnfinishedRun {
    /// The run.
    pub id: RunId,
    /// When it was accepted.
    pub accepted_at: Millis,
    /// Its place in the queue when it was accepted, for its receipt.
    pub position: u32,
    /// What tells it apart from another prompt under the same id.
    pub fingerprint: String,
    /// Whether it was a steer that its turn did not take.
    pub was_steer: bool,
    /// The message that it is, until the agent has it.
    #[serde(default)]
    pub mail: Option<MailId>,
    /// Whether it waits because no more agents may live.
    #[serde(default)]
    #[serde(rename = "lacks_room")]
    pub waits_for_slot: bool,
    /// Steers that the turn has neither taken nor missed.
    pub steers: Vec<PendingSteer>,
    /// What there is once the agent has it.
    pub started: Option<RunExecution>,
}

/// A run that the agent works on.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RunExecution {
    /// When.
    #[serde(rename = "at")]
    pub started_at: Millis,
    /// The number of its `run.started`, or of its last `run.resumed`: what the agent was last given bears it.
    pub number: EventNumber,
    /// Whether it was a `run.resumed`.
    #[serde(default)]
    pub resumed: bool,
    /// The stop that was asked for: a latch, never taken back.
    pub stop: Option<RunStopRequest>,
    /// The kill after that.
    pub kill: Option<RunStopRequest>,
    /// Milliseconds that it has waited for people and for sessions below, up to `waiting_since`.
    pub waited_ms: u64,
    /// Since when it waits for one of them.
    pub waiting_since: Option<Millis>,
    /// Sessions that it has started since it was last suspended.
    #[serde(default)]
    pub children: BTreeSet<SessionId>,
    /// What there is while it waits for sessions that it started. No turn is under way then.
    #[serde(default)]
    pub suspended: Option<RunSuspension>,
    /// Model calls so far.
    pub turns: u32,
    /// Whether the agent itself reports them; else tool calls are counted.
    pub reports_turns: bool,
    /// The beginning of what it said, as much as fits an event.
    pub text: String,
    /// Bytes of all that it said.
    pub text_len: u64,
    /// What it used.
    pub usage: TokenUsage,
}

impl RunExecution {
    /// Milliseconds that it has run by now, without its waits.
    pub fn run_time(&self, now: Millis) -> u64 {
        self.waiting_since.unwrap_or(now).since(self.started_at).saturating_sub(self.waited_ms)
    }
}

/// What a suspended run waits for.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct RunSuspension {
    /// Sessions that have not ended.
    pub waits_for: BTreeSet<SessionId>,
    /// What became of the others, in the order in which they ended.
    #[serde(rename = "ended")]
    pub results: Vec<ChildResult>,
}

/// A moment at which something was asked of the agent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunStopRequest {
    /// The event.
    pub number: EventNumber,
    /// When.
    pub at: Millis,
    /// Why.
    pub by: RunStopCause,
}

/// A steer that is under way.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PendingSteer {
    /// The number of its `steer.accepted`.
    pub accepted: EventNumber,
    /// The number of the event that sent it; `None`: it waits for its run to start.
    pub sent: Option<EventNumber>,
    /// The words, or their head.
    pub text: String,
    /// The file that holds the whole.
    pub blob: Option<BlobRef>,
    /// The message that it is.
    #[serde(default)]
    pub mail: Option<MailId>,
}

impl PendingSteer {
    /// Its words.
    pub fn full_text(&self) -> LongText {
        LongText { head: self.text.clone(), blob: self.blob.clone() }
    }
}

/// An ask that is not done with.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum AskEntry {
    /// Nobody has answered.
    Pending(Ask),
    /// Answered; the agent has not confirmed that it knows.
    Answered {
        /// The run.
        run: Option<RunId>,
        /// The number of its `ask.resolved`.
        number: EventNumber,
        /// What the agent is told.
        reply: AskResolution,
        /// Whether a tool call waits for it, and nothing goes down the link.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        by_call: bool,
    },
}

impl AskEntry {
    /// The run that it belongs to.
    pub fn run(&self) -> Option<&RunId> {
        match self {
            Self::Pending(ask) => ask.run_id.as_ref(),
            Self::Answered { run, .. } => run.as_ref(),
        }
    }
}

/// What a session does, as far as the journal says.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SessionPhase {
    /// No run.
    Idle,
    /// Runs that wait until one more agent may live.
    Queued,
    /// A run that has not started.
    Unstarted,
    /// A run that the agent works on.
    Running,
    /// A run that waits for a person or for sessions below.
    Waiting,
    /// It has ended.
    Closed,
}

impl SessionState {
    /// A session that has just been created. The event is its first.
    pub fn new(id: SessionId, workspace: WorkspaceId, created: SessionCreated, at: Millis) -> Self {
        Self {
            id,
            workspace,
            number: EventNumber(1),
            last_link_number: UpdateNumber(0),
            settings: created,
            agent_session_id: None,
            worker: None,
            worker_since: at,
            worker_stopping_since: None,
            crashes: VecDeque::new(),
            runs: VecDeque::new(),
            asks: BTreeMap::new(),
            grants: BTreeSet::new(),
            usage: TokenUsage::default(),
            children: BTreeSet::new(),
            pending_child_cancel: None,
            last_parent_cancel: EventNumber(0),
            closing: None,
            children_closed: false,
            closed: false,
            created_at: at,
            updated_at: at,
            last_finished: None,
            mail: VecDeque::new(),
        }
    }

    /// True from the moment a prompt is accepted until its run has ended and nothing is queued.
    pub fn is_busy(&self) -> bool {
        !self.runs.is_empty()
    }

    /// What it does.
    pub fn phase(&self) -> SessionPhase {
        match self.runs.front() {
            _ if self.closed => SessionPhase::Closed,
            None => SessionPhase::Idle,
            Some(UnfinishedRun { started: None, waits_for_slot: true, .. }) => SessionPhase::Queued,
            Some(UnfinishedRun { started: None, .. }) => SessionPhase::Unstarted,
            Some(_) if self.suspension().is_some() => SessionPhase::Waiting,
            Some(_) if self.pending_asks().next().is_some() => SessionPhase::Waiting,
            Some(_) => SessionPhase::Running,
        }
    }

    /// The run that has started and not ended.
    pub fn active_run(&self) -> Option<(&UnfinishedRun, &RunExecution)> {
        let run = self.runs.front()?;
        Some((run, run.started.as_ref()?))
    }

    /// The active run, if the agent is in a turn of it.
    pub fn current_turn(&self) -> Option<(&UnfinishedRun, &RunExecution)> {
        self.active_run().filter(|(_, started)| started.suspended.is_none())
    }

    /// What the active run waits for, if it is suspended.
    pub fn suspension(&self) -> Option<&RunSuspension> {
        self.active_run()?.1.suspended.as_ref()
    }

    /// The run of this id, if it has not ended.
    pub fn run(&self, id: &RunId) -> Option<&UnfinishedRun> {
        self.runs.iter().find(|run| run.id == *id)
    }

    /// Asks that nobody has answered.
    pub fn pending_asks(&self) -> impl Iterator<Item = &Ask> {
        self.asks.values().filter_map(|entry| match entry {
            AskEntry::Pending(ask) => Some(ask),
            AskEntry::Answered { .. } => None,
        })
    }

    /// The message of this id, if something may still become of it.
    pub fn mailbox_entry(&self, id: &MailId) -> Option<&MailboxEntry> {
        self.mail.iter().find(|letter| letter.id == *id)
    }

    /// When the first claim on a message runs out.
    pub fn next_claim_expiry(&self) -> Option<Millis> {
        let until = |letter: &MailboxEntry| match letter.delivery {
            MailDeliveryState::Claimed { until, .. } => Some(until),
            _ => None,
        };
        self.mail.iter().filter_map(until).min().filter(|_| !self.closed)
    }

    /// Whether it owes somebody something that only the journal remembers: another session, or whoever waits for a
    /// message to come back.
    pub fn has_pending_obligations(&self) -> bool {
        self.pending_child_cancel.is_some()
            || (self.closing.is_some() && !self.closed)
            || self.next_claim_expiry().is_some()
    }

    /// Whether it is closing and nothing is left of it but, perhaps, its worker.
    pub fn is_ready_to_close(&self) -> bool {
        let below = self.children.is_empty() || self.children_closed;
        self.closing.is_some() && !self.closed && !self.is_busy() && below
    }

    /// How many runs at the head of the list are not waiting: the one that is active or about to be.
    pub fn serving_count(&self, halted: bool) -> usize {
        match self.runs.front() {
            Some(run) => usize::from(run.started.is_some() || !(halted || run.waits_for_slot)),
            None => 0,
        }
    }

    /// Runs that wait, with their places from 1.
    pub fn queued_runs(&self, halted: bool) -> impl Iterator<Item = (u32, &UnfinishedRun)> {
        (1..).zip(self.runs.iter().skip(self.serving_count(halted)))
    }
}
