//! The state of a session, its parts, and the queries on it. Only [`evolve`](super::evolve()) changes the state, and it
//! holds nothing that is not in the journal.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use qd_protocol::api::LastRun;
use qd_protocol::event::{
    Ask, ChildResult, ContextUsage, RunStopCause, SessionCloseMode, SessionCreated, TokenUsage,
};
use qd_protocol::link::{AskResolution, UpdateNumber};
use qd_protocol::sandbox_spec::SandboxReport;
use qd_protocol::text::BlobRef;
use qd_protocol::{
    AccountId, AskId, ClockReading, EventNumber, LongText, MachineUptime, MailId, Millis, RunId, SessionId,
    WorkerId, WorkspaceId,
};
use serde::{Deserialize, Serialize};

use crate::quota::usual_account;

/// Everything the machine knows about one session. Snapshots are this struct, serialized.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SessionState {
    pub id: SessionId,
    pub workspace: WorkspaceId,
    /// The number of its last event, which is also how many events it has.
    pub number: EventNumber,
    /// The last agent update that caused an event. An update with this number or a lower one is a repeat.
    #[serde(rename = "taken")]
    pub last_update_number: UpdateNumber,
    /// The settings it was created with, and later changes.
    pub settings: SessionCreated,
    /// The agent's own id of the conversation, used to resume it.
    pub agent_session_id: Option<String>,
    /// The last total that the agent reported for the cost of this conversation.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub conversation_cost_usd: Option<f64>,
    /// The worker that hosts the agent, from its `worker.started` to its `worker.exited`.
    #[serde(default)]
    pub worker: Option<WorkerId>,
    /// How the agent has been confined since it was last started.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sandbox: Option<SandboxReport>,
    /// When the current or last worker started.
    #[serde(default)]
    pub worker_since: Millis,
    /// Since when that worker is being stopped. It gets no more runs.
    #[serde(rename = "stopping", default)]
    pub worker_stopping_since: Option<ClockReading>,
    /// When workers recently failed or were lost, oldest first. Holds no more entries than the restart limit needs.
    #[serde(default)]
    pub crashes: VecDeque<ClockReading>,
    /// Runs that have not ended, in the order in which they are served. Only the first can have started.
    pub runs: VecDeque<UnfinishedRun>,
    /// Asks without an answer, and answers whose delivery the agent has not confirmed.
    pub asks: BTreeMap<AskId, AskEntry>,
    /// Tools that a person has allowed for the rest of the session.
    pub grants: BTreeSet<String>,
    /// The usage of all its runs.
    pub usage: TokenUsage,
    /// How full the context of the agent's model was when the agent last reported it.
    #[serde(rename = "context", default, skip_serializing_if = "Option::is_none")]
    pub agent_context: Option<ContextUsage>,
    /// The approximate size of everything that its agent has reported. Snapshots of earlier releases lack it.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub output_bytes: u64,
    pub children: BTreeSet<SessionId>,
    /// The number of a cancel that not all child sessions have confirmed.
    #[serde(rename = "owed_cancel")]
    pub pending_child_cancel: Option<EventNumber>,
    /// The number of the last cancel of the parent session that was applied here.
    #[serde(rename = "parent_cancel")]
    pub last_parent_cancel: EventNumber,
    /// Set once the session is closing. It then accepts no more prompts.
    pub closing: Option<SessionCloseMode>,
    /// All child sessions have closed. Only used while this session is closing.
    #[serde(rename = "below_closed")]
    pub children_closed: bool,
    pub closed: bool,
    pub created_at: Millis,
    /// The time of its last event.
    pub updated_at: Millis,
    /// The uptime at its last event that has one. All uptimes in the state are of the same boot.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_uptime: Option<MachineUptime>,
    /// When its last run ended.
    #[serde(default)]
    pub last_finished: Option<Millis>,
    /// The run that ended last.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_run: Option<LastRun>,
    /// The beginning of the first prompt that is not blank, shown as the title if there is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub auto_title: Option<String>,
    /// Messages that are not yet delivered, acknowledged or quarantined, in order of arrival. Their text is in the
    /// journal.
    #[serde(default)]
    pub mail: VecDeque<MailboxEntry>,
}

fn is_zero(bytes: &u64) -> bool {
    *bytes == 0
}

/// A message in the mailbox that is not yet delivered, acknowledged or quarantined.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MailboxEntry {
    pub id: MailId,
    /// How many times it was returned to the mailbox.
    pub returns: u32,
    #[serde(rename = "stands")]
    pub delivery: MailDeliveryState,
}

/// How far the delivery of a message has come.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum MailDeliveryState {
    /// It waits in the mailbox to be claimed.
    Held,
    /// It became this run, whose prompt the agent does not have yet.
    Run(RunId),
    /// It was sent as a steer to the active run, and becomes a run of its own if the turn misses the steer.
    Steer {
        /// The run that is steered.
        #[serde(rename = "told")]
        target_run: RunId,
        /// The run that it becomes if the steer is missed.
        #[serde(rename = "otherwise")]
        fallback_run: RunId,
    },
    /// A caller has claimed it.
    Claimed {
        /// The number of its `mail.claimed` event.
        claim: EventNumber,
        /// When the claim expires, as its claimant was told.
        until: Millis,
        /// When it was claimed, from which its expiry is counted. Claims of earlier releases lack it.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        since: Option<ClockReading>,
    },
}

impl MailDeliveryState {
    pub fn is_claimed(&self) -> bool {
        matches!(self, Self::Claimed { .. })
    }

    /// Milliseconds until the claim expires; `None` if there is no claim.
    pub fn claim_time_left(&self, now: ClockReading) -> Option<u64> {
        match *self {
            Self::Claimed { until, since: Some(since), .. } => {
                Some(until.since(since.wall).saturating_sub(now.lease_time_since(since)))
            }
            Self::Claimed { until, since: None, .. } => Some(until.since(now.wall)),
            Self::Held | Self::Run(_) | Self::Steer { .. } => None,
        }
    }
}

/// A run that has not ended. Its prompt is in the journal.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct UnfinishedRun {
    pub id: RunId,
    pub accepted_at: Millis,
    /// Its position in the queue when it was accepted, which its receipt repeats.
    pub position: u32,
    /// Tells its prompt apart from a different one under the same run id.
    pub fingerprint: String,
    /// It is a steer that its turn missed.
    pub was_steer: bool,
    /// The message that became this run. Cleared once the agent has it.
    #[serde(default)]
    pub mail: Option<MailId>,
    /// It waits because the limit on live agents is reached.
    #[serde(rename = "lacks_room", default)]
    pub waits_for_slot: bool,
    /// The reset of the quota that its last `run.queued` named.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub quota_until: Option<Millis>,
    /// Steers that the turn has neither taken nor missed.
    pub steers: Vec<PendingSteer>,
    /// Set once the run has started.
    #[serde(rename = "started")]
    pub execution: Option<RunExecution>,
}

/// The part of a run's state that exists once the run has started.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RunExecution {
    #[serde(rename = "at")]
    pub started_at: ClockReading,
    /// The number of its `run.started` or its last `run.resumed`. The prompt sent to the agent has the same number.
    pub number: EventNumber,
    /// That number is of a `run.resumed`.
    #[serde(default)]
    pub resumed: bool,
    /// The requested stop. It is a latch and is never cleared.
    pub stop: Option<RunStopRequest>,
    /// The kill that followed the stop.
    pub kill: Option<RunStopRequest>,
    /// Milliseconds spent waiting for people and child sessions, up to `waiting_since`.
    pub waited_ms: u64,
    /// Since when it has been waiting for a person or a child session.
    pub waiting_since: Option<ClockReading>,
    /// Child sessions that it has started since it was last suspended.
    #[serde(default)]
    pub children: BTreeSet<SessionId>,
    /// Set while it waits for child sessions. No turn is under way then.
    #[serde(default)]
    pub suspended: Option<RunSuspension>,
    /// Model calls so far.
    pub turns: u32,
    /// The agent reports its model calls itself; otherwise tool calls are counted.
    pub reports_turns: bool,
    /// The beginning of the answer, as much as fits into an event.
    pub text: String,
    /// Length of the whole answer in bytes.
    pub text_len: u64,
    pub usage: TokenUsage,
}

impl RunExecution {
    /// Milliseconds that the run has worked so far, without the time it waited.
    pub fn run_time(&self, now: ClockReading) -> u64 {
        self.waiting_since.unwrap_or(now).elapsed_since(self.started_at).saturating_sub(self.waited_ms)
    }
}

/// The child sessions that a suspended run waits for.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct RunSuspension {
    /// Child sessions that have not ended.
    pub waits_for: BTreeSet<SessionId>,
    /// Results of the other child sessions, in the order in which they ended.
    #[serde(rename = "ended")]
    pub results: Vec<ChildResult>,
}

/// A request to the agent to stop, or the kill that followed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunStopRequest {
    /// The number of the `run.cancel_requested` or `run.kill_requested` event.
    pub number: EventNumber,
    pub at: ClockReading,
    pub by: RunStopCause,
}

/// A steer that the turn has neither taken nor missed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PendingSteer {
    /// The number of its `steer.accepted` event.
    pub accepted: EventNumber,
    /// The number of the event that sent it; `None` while it waits for its run to start.
    pub sent: Option<EventNumber>,
    /// The text, or its head if there is a blob.
    pub text: String,
    /// The file that holds the whole text.
    pub blob: Option<BlobRef>,
    /// The message that was delivered as this steer.
    #[serde(default)]
    pub mail: Option<MailId>,
}

impl PendingSteer {
    /// The text together with its blob.
    pub fn full_text(&self) -> LongText {
        LongText { head: self.text.clone(), blob: self.blob.clone() }
    }
}

/// An ask that is still open, or whose answer is on its way.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum AskEntry {
    Pending(Box<Ask>),
    /// Answered, but the agent has not confirmed that it received the answer.
    Answered {
        run: Option<RunId>,
        /// The number of its `ask.resolved` event.
        number: EventNumber,
        /// The reply that the agent gets.
        reply: AskResolution,
        /// A tool call waits for the answer, so nothing is sent over the link.
        #[serde(rename = "by_call", default, skip_serializing_if = "std::ops::Not::not")]
        asked_by_tool: bool,
    },
}

impl AskEntry {
    pub fn run(&self) -> Option<&RunId> {
        match self {
            Self::Pending(ask) => ask.run_id.as_ref(),
            Self::Answered { run, .. } => run.as_ref(),
        }
    }
}

/// The activity of a session, as far as the journal knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SessionPhase {
    /// There is no run.
    Idle,
    /// Its first run waits because the limit on live agents is reached.
    Queued,
    /// Its first run has not started.
    Unstarted,
    /// The agent is working on a run.
    Running,
    /// A run waits for a person or for child sessions.
    Waiting,
    /// The session has ended.
    Closed,
}

impl SessionState {
    /// The state after `session.created`, the first event.
    pub fn new(id: SessionId, workspace: WorkspaceId, created: SessionCreated, at: ClockReading) -> Self {
        Self {
            id,
            workspace,
            number: EventNumber(1),
            last_update_number: UpdateNumber(0),
            agent_session_id: created.agent_session_id.clone(),
            conversation_cost_usd: None,
            settings: created,
            worker: None,
            sandbox: None,
            worker_since: at.wall,
            worker_stopping_since: None,
            crashes: VecDeque::new(),
            runs: VecDeque::new(),
            asks: BTreeMap::new(),
            grants: BTreeSet::new(),
            usage: TokenUsage::default(),
            agent_context: None,
            output_bytes: 0,
            children: BTreeSet::new(),
            pending_child_cancel: None,
            last_parent_cancel: EventNumber(0),
            closing: None,
            children_closed: false,
            closed: false,
            created_at: at.wall,
            updated_at: at.wall,
            last_uptime: at.uptime,
            last_finished: None,
            last_run: None,
            auto_title: None,
            mail: VecDeque::new(),
        }
    }

    /// True from the moment a prompt is accepted until its run has ended and nothing is queued.
    pub fn is_busy(&self) -> bool {
        !self.runs.is_empty()
    }

    pub fn phase(&self) -> SessionPhase {
        match self.runs.front() {
            _ if self.closed => SessionPhase::Closed,
            None => SessionPhase::Idle,
            Some(UnfinishedRun { execution: None, waits_for_slot: true, .. }) => SessionPhase::Queued,
            Some(UnfinishedRun { execution: None, .. }) => SessionPhase::Unstarted,
            Some(_) if self.suspension().is_some() => SessionPhase::Waiting,
            Some(_) if self.pending_asks().next().is_some() => SessionPhase::Waiting,
            Some(_) => SessionPhase::Running,
        }
    }

    /// The run that has started and not ended.
    pub fn active_run(&self) -> Option<(&UnfinishedRun, &RunExecution)> {
        let run = self.runs.front()?;
        Some((run, run.execution.as_ref()?))
    }

    /// The active run, unless it is suspended. The agent is then in a turn of it.
    pub fn current_turn(&self) -> Option<(&UnfinishedRun, &RunExecution)> {
        self.active_run().filter(|(_, started)| started.suspended.is_none())
    }

    /// What the active run waits for, if it is suspended.
    pub fn suspension(&self) -> Option<&RunSuspension> {
        self.active_run()?.1.suspended.as_ref()
    }

    /// The first run waits because the limit on live agents is reached.
    pub fn waits_for_slot(&self) -> bool {
        self.runs.front().is_some_and(|run| run.waits_for_slot)
    }

    /// The first run, if it only needs an agent: it has not started, or everything it was suspended for has ended.
    pub fn run_awaiting_agent(&self) -> Option<&UnfinishedRun> {
        self.runs.front().filter(|run| match &run.execution {
            None => true,
            Some(started) => {
                started.suspended.as_ref().is_some_and(|suspension| suspension.waits_for.is_empty())
            }
        })
    }

    /// The run with this id, if it has not ended.
    pub fn run(&self, id: &RunId) -> Option<&UnfinishedRun> {
        self.runs.iter().find(|run| run.id == *id)
    }

    /// Asks that are not answered.
    pub fn pending_asks(&self) -> impl Iterator<Item = &Ask> {
        self.asks.values().filter_map(|entry| match entry {
            AskEntry::Pending(ask) => Some(&**ask),
            AskEntry::Answered { .. } => None,
        })
    }

    /// The message with this id, if it is still in the mailbox.
    pub fn mailbox_entry(&self, id: &MailId) -> Option<&MailboxEntry> {
        self.mail.iter().find(|entry| entry.id == *id)
    }

    /// Milliseconds until the first claim on a message expires.
    pub fn next_claim_expiry(&self, now: ClockReading) -> Option<u64> {
        self.mail
            .iter()
            .filter_map(|entry| entry.delivery.claim_time_left(now))
            .min()
            .filter(|_| !self.closed)
    }

    /// The session has unfinished business that only the journal remembers: a cancel or close of child sessions, or
    /// claims that will expire. A restarted daemon has to load such a session.
    pub fn has_pending_obligations(&self) -> bool {
        self.pending_child_cancel.is_some()
            || (self.closing.is_some() && !self.closed)
            || (!self.closed && self.mail.iter().any(|entry| entry.delivery.is_claimed()))
    }

    /// The session is closing, and nothing is left to wait for except perhaps its worker.
    pub fn is_ready_to_close(&self) -> bool {
        let children_done = self.children.is_empty() || self.children_closed;
        self.closing.is_some() && !self.closed && !self.is_busy() && children_done
    }

    /// The account that the agent uses.
    pub fn account(&self) -> AccountId {
        self.settings.account.clone().unwrap_or_else(|| usual_account(&self.settings.agent))
    }

    /// How many runs at the head of the list are not queued: 1 if a run is active or about to start, otherwise 0. `held`
    /// says that no run may start now, because of a halt or a quota.
    pub fn serving_count(&self, held: bool) -> usize {
        match self.runs.front() {
            Some(run) => usize::from(run.execution.is_some() || !(held || run.waits_for_slot)),
            None => 0,
        }
    }

    /// Runs in the queue, with their positions from 1.
    pub fn queued_runs(&self, held: bool) -> impl Iterator<Item = (u32, &UnfinishedRun)> {
        (1..).zip(self.runs.iter().skip(self.serving_count(held)))
    }
}
