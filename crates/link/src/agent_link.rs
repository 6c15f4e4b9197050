//! The daemon's side of a session's link: a task that keeps a connection to the worker, and a handle whose only
//! blocking call is [`AgentLink::next_event`]. The rules live in `inbox` (each update once, bounded) and `outbox`
//! (what is sent again); this file does the waking and the shutdown.

mod inbox;
mod link_task;
mod outbox;

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};
use qd_protocol::frame::v1;
use qd_protocol::link::{AgentCommand, AgentExitReason, TurnLimits, UpdateNumber};
use qd_protocol::sandbox_spec::SandboxSelection;
use qd_protocol::worker::{AgentSpec, Secret};
use qd_protocol::{EventNumber, RunId, SessionId, WorkerId};
use qd_worker_sdk::socket::{ByteStream, STEP_TIMEOUT, Socket};
use tokio::sync::Notify;
use tokio::task::JoinHandle;

use self::inbox::AgentLinkInbox;
use self::link_task::AgentLinkTask;
use crate::update_window::NumberedUpdate;

/// Reaches the worker of one session.
pub trait WorkerConnector: Send + 'static {
    /// Opens a connection to the worker, upgraded to the subprotocol.
    fn dial(&mut self)
    -> impl Future<Output = Result<Socket<Box<dyn ByteStream>>, WorkerUnreachable>> + Send;

    /// Ends a worker that is lost or was given up, with everything that its agent started, so that nothing more can
    /// come from it. Called before [`WorkerConnector::read_undelivered`].
    fn end_worker(&mut self) -> impl Future<Output = WorkerEnding> + Send {
        std::future::ready(WorkerEnding::NotFound)
    }

    /// Reads the updates after this number that a dead worker left in its spool.
    fn read_undelivered(&mut self, after: UpdateNumber) -> impl Future<Output = Vec<NumberedUpdate>> + Send;
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum WorkerUnreachable {
    /// The worker cannot be reached now, for this reason. The link retries with growing pauses, until
    /// [`LinkOptions::reach_timeout`] has passed.
    RetryLater(String),
    /// The worker's machine is away. The connector has waited for it for a while, and itself decides how long to wait
    /// in all, so this attempt does not count towards [`LinkOptions::reach_timeout`].
    MachineAway,
    /// The worker is dead and will not come back.
    Dead,
}

/// What became of a worker that was to be ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum WorkerEnding {
    /// The worker was alive. It has been ended, and nothing that its agent started is left.
    Ended,
    /// No process of the worker was found.
    NotFound,
    /// The worker is on another machine, which was told to end it.
    Requested,
    /// The worker's process holds workers of other sessions too, and was left running.
    LeftRunning,
    /// These processes are still alive.
    Survived(Vec<u32>),
}

#[derive(Debug, Clone)]
pub struct LinkOptions {
    pub session: SessionId,
    /// The worker that the session expects.
    pub worker: WorkerId,
    /// The secret that both sides prove they know. If it is empty, no proof is needed.
    pub secret: Secret,
    /// The last update number in the journal.
    pub journalled: UpdateNumber,
    /// How long a worker that is not dead is tried before it is given up.
    pub reach_timeout: Duration,
    /// Our version, for logs.
    pub software: String,
    /// What to start if the worker has no agent for the session. Without it, an empty worker means that the agent is
    /// lost.
    pub start: Option<Box<AgentSpec>>,
}

/// What a link reports to its session.
#[derive(Debug, Clone, PartialEq)]
pub enum LinkEvent {
    /// All updates that were waiting, in order.
    Updates(Vec<NumberedUpdate>),
    /// The connection broke. The agent may still be running.
    Disconnected,
    /// The link is connected. The session must resend its outstanding commands before it calls
    /// [`AgentLink::next_event`] again.
    Attached {
        /// Every command up to this number has been applied.
        applied: EventNumber,
        presence: v1::AgentPresence,
        /// The pid of the worker process.
        pid: u32,
        /// How long the current turn has run, as measured by the worker.
        run_time_ms: Option<u64>,
        /// The model that the agent was started with.
        model: Option<String>,
        /// How strongly the agent was to be confined when it was started. Earlier workers do not say it.
        sandbox: Option<SandboxSelection>,
        /// Whether this link was attached before.
        reattached: bool,
    },
    /// The worker is gone, and with it the agent. All of its updates have been delivered; a living worker would have
    /// reported the end as an update.
    Gone(AgentExitReason),
}

/// The daemon's side of one session's link. Dropping it leaves the agent running.
#[derive(Debug)]
pub struct AgentLink {
    shared: Arc<AgentLinkShared>,
    /// Updates that were delivered to the session and not acknowledged yet.
    unacked: VecDeque<NumberedUpdate>,
    task: JoinHandle<()>,
}

impl AgentLink {
    /// Starts connecting to the worker. Must be called within a tokio runtime.
    pub fn open<R: WorkerConnector>(mut options: LinkOptions, connector: R) -> AgentLink {
        let shared = Arc::new(AgentLinkShared {
            inbox: Mutex::new(AgentLinkInbox::new(options.journalled, options.start.take())),
            wake: Notify::new(),
            detach: Notify::new(),
            event_ready: Notify::new(),
        });
        let task = tokio::spawn(AgentLinkTask::new(options, connector, Arc::clone(&shared)).run());
        AgentLink { shared, unacked: VecDeque::new(), task }
    }

    /// Waits for the next event. Once the agent is gone, every call returns `Gone`. Cancelling the wait loses nothing.
    pub async fn next_event(&mut self) -> LinkEvent {
        if self.shared.lock().outbox.finish_resend() {
            self.shared.wake.notify_one();
        }
        loop {
            let event = self.shared.take_event();
            match event {
                Some(LinkEvent::Updates(updates)) => {
                    self.unacked.extend(updates.iter().cloned());
                    return LinkEvent::Updates(updates);
                }
                Some(event) => return event,
                None => self.shared.event_ready.notified().await,
            }
        }
    }

    /// Everything up to this number is journalled. Neither this side nor the worker needs to keep it.
    pub fn ack(&mut self, upto: UpdateNumber) {
        let acked = self.unacked.partition_point(|update| update.number <= upto);
        self.unacked.drain(..acked);
        if self.unacked.is_empty() {
            self.unacked = VecDeque::new();
        }
        self.shared.lock().ack(upto);
        self.shared.wake.notify_one();
    }

    /// Updates that were delivered and never acknowledged, for a session that has to rebuild itself from its journal.
    pub fn unacked(&self) -> impl Iterator<Item = &NumberedUpdate> {
        self.unacked.iter()
    }

    /// Sends a command to the agent; never waits. Commands on a connection that breaks are forgotten, so the session
    /// resends its outstanding commands on [`LinkEvent::Attached`]. Those go out first, then the commands sent in the
    /// meantime.
    pub fn send(&self, command: AgentCommand) {
        self.shared.lock().outbox.push_command(command);
        self.shared.wake.notify_one();
    }

    /// Sends the remaining limits of a turn. Only the latest limits count, and they are not resent after a break.
    pub fn set_turn_limits(&self, run: RunId, limits: TurnLimits) {
        self.shared.lock().outbox.set_turn_limits(run, limits);
        self.shared.wake.notify_one();
    }

    /// Whether every update that the worker had when the connection was made has been delivered.
    pub fn is_caught_up(&self) -> bool {
        self.shared.lock().is_caught_up()
    }

    /// Starts the agent again on an endpoint whose agent is stopped, or about to be.
    pub fn start_agent(&self, spec: Box<AgentSpec>) {
        self.shared.lock().outbox.request_start(spec);
        self.shared.wake.notify_one();
    }

    /// Stops the idle agent but keeps what its turns left running. Sent on every connection until the agent has
    /// stopped.
    pub fn stop_idle_agent(&self) {
        self.shared.lock().outbox.request_idle_stop();
        self.shared.wake.notify_one();
    }

    /// Ends the agent and everything it started. Sent on every connection until the agent is gone.
    pub fn close(&self) {
        self.shared.lock().outbox.request_close();
        self.shared.wake.notify_one();
    }

    /// Closes the link once all acknowledgements and commands have gone out, or after a timeout. A worker that
    /// is done waits for the acknowledgement of its last update.
    pub async fn detach(mut self) {
        self.shared.lock().outbox.finish_resend();
        self.shared.detach.notify_one();
        // A worker that does not read will notice the lost connection by its own timeout.
        let _ended = tokio::time::timeout(STEP_TIMEOUT, &mut self.task).await;
    }
}

impl Drop for AgentLink {
    fn drop(&mut self) {
        self.task.abort();
    }
}

#[derive(Debug)]
struct AgentLinkShared {
    inbox: Mutex<AgentLinkInbox>,
    /// Wakes the task: there is something to send, or room to read more.
    wake: Notify,
    /// Tells the task to end.
    detach: Notify,
    /// Wakes the session: an event is ready.
    event_ready: Notify,
}

impl AgentLinkShared {
    /// Nothing that runs under the lock can leave the state half changed, not even by a panic.
    fn lock(&self) -> MutexGuard<'_, AgentLinkInbox> {
        self.inbox.lock()
    }

    /// Takes the next event and wakes the task if it had stopped reading for lack of room.
    fn take_event(&self) -> Option<LinkEvent> {
        let mut inbox = self.lock();
        let was_full = !inbox.has_room();
        let event = inbox.take_event();
        if was_full && inbox.has_room() {
            self.wake.notify_one();
        }
        event
    }
}
