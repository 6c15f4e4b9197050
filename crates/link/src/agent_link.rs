//! The daemon's side of a session's link: one task that keeps a connection to the worker, and a handle that never
//! waits, but to hear. What is heard once, what is said again and what may wait is decided in `mailbox` and `outbox`;
//! here are the waking and the ending.

mod inbox;
mod link_task;
mod outbox;

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use qd_protocol::frame::v1;
use qd_protocol::link::{AgentCommand, AgentExitReason, TurnLimits, UpdateNumber};
use qd_protocol::worker::{AgentSpec, Secret};
use qd_protocol::{EventNumber, RunId, SessionId, WorkerId};
use tokio::sync::Notify;
use tokio::task::JoinHandle;

use self::inbox::AgentLinkInbox;
use self::link_task::AgentLinkTask;
use crate::socket::{ByteStream, STEP_TIMEOUT, Socket};
use crate::update_window::NumberedUpdate;

/// How a session's worker is reached.
pub trait WorkerConnector: Send + 'static {
    /// A connection to it, upgraded to the subprotocol.
    fn dial(&mut self)
    -> impl Future<Output = Result<Socket<Box<dyn ByteStream>>, WorkerUnreachable>> + Send;

    /// What a dead worker left in its spool, after this number.
    fn read_undelivered(&mut self, after: UpdateNumber) -> impl Future<Output = Vec<NumberedUpdate>> + Send;
}

/// Why a worker is not reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WorkerUnreachable {
    /// Not now. It is tried again, soon and then less often.
    RetryLater,
    /// It will never be back.
    Dead,
}

/// What a link is opened with.
#[derive(Debug, Clone)]
pub struct LinkOptions {
    /// Whose link.
    pub session: SessionId,
    /// The worker that it wants.
    pub worker: WorkerId,
    /// What both sides prove themselves with; empty: nobody has to.
    pub secret: Secret,
    /// The last number that is in the journal.
    pub journalled: UpdateNumber,
    /// Our version, for people.
    pub software: String,
    /// What to start if the worker has nothing for the session; without it, that means that the agent is lost.
    pub start: Option<Box<AgentSpec>>,
}

/// What a session hears of its agent.
#[derive(Debug, Clone, PartialEq)]
pub enum LinkEvent {
    /// All that waited, in order.
    Updates(Vec<NumberedUpdate>),
    /// The connection broke; the agent may go on.
    Disconnected,
    /// The connection is there. What the session owes the agent is to be sent before it listens again.
    Attached {
        /// Every command up to this number has been applied.
        applied: EventNumber,
        /// What the worker has for the session.
        presence: v1::AgentPresence,
        /// The worker's process.
        pid: u32,
        /// How long the turn under way has run, as the worker counts it.
        run_time_ms: Option<u64>,
        /// The model that the agent was started with.
        model: Option<String>,
        /// Whether the link was attached before.
        reattached: bool,
    },
    /// The agent is no more, and all that it said has been heard. Its worker would have said more than this.
    Gone(AgentExitReason),
}

/// The daemon's side of one session's link. Dropping it lets the agent go on alone.
#[derive(Debug)]
pub struct AgentLink {
    shared: Arc<AgentLinkShared>,
    /// Handed out, and not known to be in the journal.
    unacked: VecDeque<NumberedUpdate>,
    task: JoinHandle<()>,
}

impl AgentLink {
    /// Begins to look for the worker. Has to be called within a runtime.
    pub fn open<R: WorkerConnector>(mut options: LinkOptions, route: R) -> AgentLink {
        let shared = Arc::new(AgentLinkShared {
            inbox: Mutex::new(AgentLinkInbox::new(options.journalled, options.start.take())),
            wake: Notify::new(),
            detach: Notify::new(),
            event_ready: Notify::new(),
        });
        let task = tokio::spawn(AgentLinkTask::new(options, route, Arc::clone(&shared)).run());
        AgentLink { shared, unacked: VecDeque::new(), task }
    }

    /// Waits for news of the agent; that it is gone is told as often as asked. Nothing is lost if the wait is given up.
    pub async fn next_event(&mut self) -> LinkEvent {
        if self.shared.lock().outbox.finish_resend() {
            self.shared.wake.notify_one();
        }
        loop {
            let heard = self.shared.take_event();
            match heard {
                Some(LinkEvent::Updates(said)) => {
                    self.unacked.extend(said.iter().cloned());
                    return LinkEvent::Updates(said);
                }
                Some(heard) => return heard,
                None => self.shared.event_ready.notified().await,
            }
        }
    }

    /// Everything up to here is in the journal and need not be kept, here or there.
    pub fn ack(&mut self, upto: UpdateNumber) {
        let known = self.unacked.partition_point(|thing| thing.number <= upto);
        self.unacked.drain(..known);
        if self.unacked.is_empty() {
            self.unacked = VecDeque::new();
        }
        self.shared.lock().ack(upto);
        self.shared.wake.notify_one();
    }

    /// What was handed out and never acknowledged, for a session that has to begin again from its journal.
    pub fn unacked(&self) -> impl Iterator<Item = &NumberedUpdate> {
        self.unacked.iter()
    }

    /// Tells the agent something; never waits. What is sent on a connection that breaks is forgotten, and so the session
    /// sends what it owes again when it hears [`Heard::Attached`]: that goes out first, then what was sent meanwhile.
    pub fn send(&self, down: AgentCommand) {
        self.shared.lock().outbox.push_command(down);
        self.shared.wake.notify_one();
    }

    /// Says what a turn has left from now on. Only the last word counts, and it is not said again after a break.
    pub fn set_turn_limits(&self, run: RunId, limits: TurnLimits) {
        self.shared.lock().outbox.set_turn_limits(run, limits);
        self.shared.wake.notify_one();
    }

    /// Whether everything has been heard that the worker had said when the connection was made.
    pub fn is_caught_up(&self) -> bool {
        self.shared.lock().is_caught_up()
    }

    /// Starts the agent of a seat that rests, or is about to.
    pub fn start_agent(&self, spec: Box<AgentSpec>) {
        self.shared.lock().outbox.request_start(spec);
        self.shared.wake.notify_one();
    }

    /// Stops the agent, and keeps what its turns left running. Said until it rests.
    pub fn rest_agent(&self) {
        self.shared.lock().outbox.request_rest();
        self.shared.wake.notify_one();
    }

    /// Ends the agent and all that it started. Said until it is gone.
    pub fn close(&self) {
        self.shared.lock().outbox.request_close();
        self.shared.wake.notify_one();
    }

    /// Lets go once what was acknowledged and sent has gone out, or soon if it cannot: a worker waits for the
    /// acknowledgement of its last word.
    pub async fn detach(mut self) {
        self.shared.lock().outbox.finish_resend();
        self.shared.detach.notify_one();
        // A worker that does not take it will find out by its own clock.
        let _ended = tokio::time::timeout(STEP_TIMEOUT, &mut self.task).await;
    }
}

impl Drop for AgentLink {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// What a link and its task share.
#[derive(Debug)]
struct AgentLinkShared {
    inbox: Mutex<AgentLinkInbox>,
    /// Wakes the task: there is something to send, or room to read.
    wake: Notify,
    /// Tells the task to end.
    detach: Notify,
    /// Wakes the session.
    event_ready: Notify,
}

impl AgentLinkShared {
    /// Nothing that runs under the lock can leave the state half changed, so a panic elsewhere does not spoil it.
    fn lock(&self) -> MutexGuard<'_, AgentLinkInbox> {
        self.inbox.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What the session hears next; the task reads on if it had to stop for it.
    fn take_event(&self) -> Option<LinkEvent> {
        let mut mailbox = self.lock();
        let stopped = !mailbox.has_room();
        let heard = mailbox.take_event();
        if stopped && mailbox.has_room() {
            self.wake.notify_one();
        }
        heard
    }
}
