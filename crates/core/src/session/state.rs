//! What a session is, as far as the journal says. Only [`evolve`](super::evolve) changes it; here are its parts and
//! the questions that can be asked of it.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use qd_protocol::event::{Ask, ChildResult, Closing, SessionCreated, StopCause, Usage};
use qd_protocol::link::{Reply, UpNumber};
use qd_protocol::text::Blob;
use qd_protocol::{AskId, MailId, Millis, Number, RunId, SessionId, Text, WorkerId, WorkspaceId};
use serde::{Deserialize, Serialize};

/// One conversation.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct State {
    /// The session.
    pub id: SessionId,
    /// Its project.
    pub workspace: WorkspaceId,
    /// How many events it has.
    pub number: Number,
    /// The last thing heard that made an event. What is not above it was heard before.
    pub taken: UpNumber,
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
    pub stopping: Option<Millis>,
    /// When workers of late were lost or failed, oldest first: no more of them than it takes to stop starting others.
    #[serde(default)]
    pub crashes: VecDeque<Millis>,
    /// Runs that have not ended, in the order in which they are served. Only the first can have started.
    pub runs: VecDeque<Run>,
    /// Asks that nobody has answered, and answers that the agent has not confirmed.
    pub asks: BTreeMap<AskId, AskEntry>,
    /// Tools that a person has allowed for the rest of the session.
    pub grants: BTreeSet<String>,
    /// What all its runs have used.
    pub usage: Usage,
    /// Sessions below.
    pub children: BTreeSet<SessionId>,
    /// A cancel that the sessions below have not all confirmed.
    pub owed_cancel: Option<Number>,
    /// The last cancel of the session above that was applied here.
    pub parent_cancel: Number,
    /// Whether it takes no more prompts.
    pub closing: Option<Closing>,
    /// Whether the sessions below have closed, where this one is closing.
    pub below_closed: bool,
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
    pub mail: VecDeque<Letter>,
}

/// A message that something may still become of.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Letter {
    /// The message.
    pub id: MailId,
    /// How often it has come back.
    pub returns: u32,
    /// Where it stands.
    pub stands: Stands,
}

/// Where a message stands.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Stands {
    /// It waits to be claimed.
    Held,
    /// It is this run, which the agent does not have yet.
    Run(RunId),
    /// It is being told to the active run, and becomes this one if that does not take it.
    Steer {
        /// The run that it is told to.
        told: RunId,
        /// The run that it becomes.
        otherwise: RunId,
    },
    /// Somebody has it.
    Claimed {
        /// The number of its `mail.claimed`.
        claim: Number,
        /// Until when.
        until: Millis,
    },
}

/// A run that has not ended. Its prompt is in the journal, not here.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Run {
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
    pub lacks_room: bool,
    /// Steers that the turn has neither taken nor missed.
    pub steers: Vec<Steer>,
    /// What there is once the agent has it.
    pub started: Option<Started>,
}

/// A run that the agent works on.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Started {
    /// When.
    pub at: Millis,
    /// The number of its `run.started`, or of its last `run.resumed`: what the agent was last given bears it.
    pub number: Number,
    /// Whether it was a `run.resumed`.
    #[serde(default)]
    pub resumed: bool,
    /// The stop that was asked for: a latch, never taken back.
    pub stop: Option<Mark>,
    /// The kill after that.
    pub kill: Option<Mark>,
    /// Milliseconds that it has waited for people and for sessions below, up to `waiting_since`.
    pub waited_ms: u64,
    /// Since when it waits for one of them.
    pub waiting_since: Option<Millis>,
    /// Sessions that it has started since it was last suspended.
    #[serde(default)]
    pub children: BTreeSet<SessionId>,
    /// What there is while it waits for sessions that it started. No turn is under way then.
    #[serde(default)]
    pub suspended: Option<Suspended>,
    /// Model calls so far.
    pub turns: u32,
    /// Whether the agent itself reports them; else tool calls are counted.
    pub reports_turns: bool,
    /// The beginning of what it said, as much as fits an event.
    pub text: String,
    /// Bytes of all that it said.
    pub text_len: u64,
    /// What it used.
    pub usage: Usage,
}

impl Started {
    /// Milliseconds that it has run by now, without its waits.
    pub fn run_time(&self, now: Millis) -> u64 {
        self.waiting_since.unwrap_or(now).since(self.at).saturating_sub(self.waited_ms)
    }
}

/// What a suspended run waits for.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct Suspended {
    /// Sessions that have not ended.
    pub waits_for: BTreeSet<SessionId>,
    /// What became of the others, in the order in which they ended.
    pub ended: Vec<ChildResult>,
}

/// A moment at which something was asked of the agent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mark {
    /// The event.
    pub number: Number,
    /// When.
    pub at: Millis,
    /// Why.
    pub by: StopCause,
}

/// A steer that is under way.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Steer {
    /// The number of its `steer.accepted`.
    pub accepted: Number,
    /// The number of the event that sent it; `None`: it waits for its run to start.
    pub sent: Option<Number>,
    /// The words, or their head.
    pub text: String,
    /// The file that holds the whole.
    pub blob: Option<Blob>,
    /// The message that it is.
    #[serde(default)]
    pub mail: Option<MailId>,
}

impl Steer {
    /// Its words.
    pub fn words(&self) -> Text {
        Text { head: self.text.clone(), blob: self.blob.clone() }
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
        number: Number,
        /// What the agent is told.
        reply: Reply,
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
pub enum Phase {
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

impl State {
    /// A session that has just been created. The event is its first.
    pub fn new(id: SessionId, workspace: WorkspaceId, created: SessionCreated, at: Millis) -> Self {
        Self {
            id,
            workspace,
            number: Number(1),
            taken: UpNumber(0),
            settings: created,
            agent_session_id: None,
            worker: None,
            worker_since: at,
            stopping: None,
            crashes: VecDeque::new(),
            runs: VecDeque::new(),
            asks: BTreeMap::new(),
            grants: BTreeSet::new(),
            usage: Usage::default(),
            children: BTreeSet::new(),
            owed_cancel: None,
            parent_cancel: Number(0),
            closing: None,
            below_closed: false,
            closed: false,
            created_at: at,
            updated_at: at,
            last_finished: None,
            mail: VecDeque::new(),
        }
    }

    /// True from the moment a prompt is accepted until its run has ended and nothing is queued.
    pub fn busy(&self) -> bool {
        !self.runs.is_empty()
    }

    /// What it does.
    pub fn phase(&self) -> Phase {
        match self.runs.front() {
            _ if self.closed => Phase::Closed,
            None => Phase::Idle,
            Some(Run { started: None, lacks_room: true, .. }) => Phase::Queued,
            Some(Run { started: None, .. }) => Phase::Unstarted,
            Some(_) if self.suspended().is_some() => Phase::Waiting,
            Some(_) if self.pending_asks().next().is_some() => Phase::Waiting,
            Some(_) => Phase::Running,
        }
    }

    /// The run that has started and not ended.
    pub fn active(&self) -> Option<(&Run, &Started)> {
        let run = self.runs.front()?;
        Some((run, run.started.as_ref()?))
    }

    /// The active run, if the agent is in a turn of it.
    pub fn turn(&self) -> Option<(&Run, &Started)> {
        self.active().filter(|(_, started)| started.suspended.is_none())
    }

    /// What the active run waits for, if it is suspended.
    pub fn suspended(&self) -> Option<&Suspended> {
        self.active()?.1.suspended.as_ref()
    }

    /// The run of this id, if it has not ended.
    pub fn run(&self, id: &RunId) -> Option<&Run> {
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
    pub fn letter(&self, id: &MailId) -> Option<&Letter> {
        self.mail.iter().find(|letter| letter.id == *id)
    }

    /// When the first claim on a message runs out.
    pub fn claim_expires(&self) -> Option<Millis> {
        let until = |letter: &Letter| match letter.stands {
            Stands::Claimed { until, .. } => Some(until),
            _ => None,
        };
        self.mail.iter().filter_map(until).min().filter(|_| !self.closed)
    }

    /// Whether it owes somebody something that only the journal remembers: another session, or whoever waits for a
    /// message to come back.
    pub fn owes(&self) -> bool {
        self.owed_cancel.is_some()
            || (self.closing.is_some() && !self.closed)
            || self.claim_expires().is_some()
    }

    /// Whether it is closing and nothing is left of it but, perhaps, its worker.
    pub fn is_closing_up(&self) -> bool {
        let below = self.children.is_empty() || self.below_closed;
        self.closing.is_some() && !self.closed && !self.busy() && below
    }

    /// How many runs at the head of the list are not waiting: the one that is active or about to be.
    pub fn serving(&self, halted: bool) -> usize {
        match self.runs.front() {
            Some(run) => usize::from(run.started.is_some() || !(halted || run.lacks_room)),
            None => 0,
        }
    }

    /// Runs that wait, with their places from 1.
    pub fn waiting(&self, halted: bool) -> impl Iterator<Item = (u32, &Run)> {
        (1..).zip(self.runs.iter().skip(self.serving(halted)))
    }
}
