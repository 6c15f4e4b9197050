//! The worker's side of one session: takes what its agent says, numbers and keeps it, and gives it to the daemon that is
//! attached, if one is. The rules are in `store` and `wishes`, without a task or a connection; here are the waking, the
//! ending, and the one lock that they share.

mod attachment;
mod handshake;
mod lifecycle_queue;
mod outbox;
mod spool_sync;

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use qd_protocol::frame::v1;
use qd_protocol::link::{AgentCommand, AgentUpdate, TurnLimits, UpdateNumber};
use qd_protocol::worker::Secret;
use qd_protocol::{RunId, SessionId, WorkerId};
use tokio::sync::{Notify, watch};
use tokio::task::{JoinError, JoinHandle};
use tokio::time::Instant;

use self::attachment::serve_daemon;
use self::handshake::{EndpointSummary, HandshakeRefusal, complete_handshake, refuse_daemon};
pub use self::handshake::{StartedConnection, read_hello, receive_agent_start};
use self::lifecycle_queue::LifecycleQueue;
pub use self::lifecycle_queue::LifecycleRequest;
use self::outbox::EndpointOutbox;
use self::spool_sync::sync_spool_while_detached;
use crate::command_queue::CommandQueue;
use crate::local::{AgentCommandSender, LocalLinkEvent, SessionEndpoint};
use crate::socket::{ByteStream, Socket, SocketError};
use crate::spool::Spool;

/// What a seat is made with.
#[derive(Debug, Clone)]
pub struct WorkerEndpointOptions {
    /// Whose seat.
    pub session: SessionId,
    /// The worker's id, as the session knows it.
    pub worker: WorkerId,
    /// What both sides prove themselves with; empty: nobody has to.
    pub secret: Secret,
    /// The last number that the session has heard; what is said here is numbered after it.
    pub numbered_after: UpdateNumber,
    /// Bytes that may wait in the spool before the agent has to.
    pub spool_max: u64,
    /// Our version, for people.
    pub software: String,
}

/// How long the turn under way has run, if one is.
pub type TurnClock = Box<dyn Fn() -> Option<Duration> + Send>;

/// How a seat is.
#[derive(Debug, Clone, PartialEq)]
pub struct WorkerEndpointStatus {
    /// Whether a daemon is attached.
    pub attached: bool,
    /// Since when it is, or is not.
    pub attachment_changed_at: Instant,
    /// What there is for it.
    pub presence: v1::AgentPresence,
    /// The turn that the agent is in.
    pub run: Option<RunId>,
    /// What the daemon last said is left to a turn, after its prompt.
    pub limits: Option<(RunId, TurnLimits)>,
    /// Whether something was said that the daemon has not acknowledged.
    pub has_unacked: bool,
}

/// The worker's side of one session. Cheap to clone; with the last clone its agent ends.
#[derive(Clone)]
pub struct WorkerEndpoint {
    owner: Arc<EndpointOwner>,
}

impl WorkerEndpoint {
    /// A seat whose agent is about to come. Has to be called within a runtime.
    pub fn new(options: WorkerEndpointOptions, spool: Box<dyn Spool>) -> WorkerEndpoint {
        let state = EndpointState {
            outbox: EndpointOutbox::new(options.numbered_after, spool, options.spool_max),
            commands: CommandQueue::default(),
            requests: LifecycleQueue::new(),
            agent: None,
            connection: None,
            presence: v1::AgentPresence::Starting,
            attachment_changed_at: Instant::now(),
            run: None,
            limits: None,
            turn_clock: None,
            model: None,
        };
        let shared = Arc::new(EndpointShared {
            options,
            status: watch::Sender::new(state.status()),
            state: Mutex::new(state),
            space_freed: Notify::new(),
            request_ready: Notify::new(),
            sync_needed: Notify::new(),
        });
        let settler = tokio::spawn(sync_spool_while_detached(Arc::clone(&shared)));
        WorkerEndpoint { owner: Arc::new(EndpointOwner { shared, spool_sync_task: settler }) }
    }

    /// Gives the seat its agent, the first or one after a rest. What it says is numbered, kept and sent from here on,
    /// and when it is gone the seat says so. An agent that sat here before is ended.
    pub fn set_agent(&self, agent: SessionEndpoint) {
        let shared = Arc::clone(&self.owner.shared);
        let mut state = self.owner.shared.lock();
        let (orders, stop) = (agent.command_sender(), Arc::new(Notify::new()));
        let task = tokio::spawn(forward_agent_output(shared, agent, Arc::clone(&stop)));
        state.presence = v1::AgentPresence::Starting;
        state.agent = Some(EndpointAgent { command_sender: orders, stop, task });
        state.requests.on_agent_set();
        state.forward_commands();
        self.owner.shared.publish_status(&state);
    }

    /// Takes the agent out again: its task is ended and awaited, and nothing more of it is said.
    pub async fn remove_agent(&self) {
        let seated = self.owner.shared.lock().agent.take();
        if let Some(mut seated) = seated {
            seated.stop.notify_one();
            // It ends only by itself: nobody else holds it.
            let _ended: Result<(), JoinError> = (&mut seated.task).await;
        }
    }

    /// A word of the worker itself, such as [`Up::Rested`] or [`Up::Gone`]. It is never kept waiting, and the last one
    /// is the last.
    pub async fn send(&self, up: AgentUpdate) {
        self.owner.shared.send_all(&[up]);
    }

    /// Serves one connection whose first frame was this hello, until it ends. A newer connection ends an older one.
    pub async fn serve<W: ByteStream>(
        &self,
        mut socket: Socket<W>,
        hello: v1::DaemonHello,
    ) -> Result<(), SocketError> {
        let shared = &self.owner.shared;
        let WorkerEndpointOptions { session, worker, secret, software, .. } = &shared.options;
        if hello.session != *session || hello.worker != *worker {
            return Err(refuse_daemon(&mut socket, HandshakeRefusal::wrong_worker(&hello)).await);
        }
        let Some(having) = shared.summarize_for(hello.journalled) else {
            return Err(refuse_daemon(&mut socket, HandshakeRefusal::bad_number(hello.journalled)).await);
        };
        complete_handshake(&mut socket, &hello, secret, software, having).await?;
        serve_daemon(shared, socket, hello.journalled).await
    }

    /// Serves the connection on which this seat's agent was started, until it ends.
    pub async fn serve_started<W: ByteStream>(
        &self,
        started: StartedConnection<W>,
    ) -> Result<(), SocketError> {
        serve_daemon(&self.owner.shared, started.socket, started.journalled).await
    }

    /// What the daemon wants next, each once and in order. Nothing is lost if the wait is given up.
    pub async fn next_request(&self) -> LifecycleRequest {
        let shared = &self.owner.shared;
        loop {
            if let Some(wanted) = shared.lock().requests.pop() {
                return wanted;
            }
            shared.request_ready.notified().await;
        }
    }

    /// How the seat is, now and from now on.
    pub fn watch_status(&self) -> watch::Receiver<WorkerEndpointStatus> {
        self.owner.shared.status.subscribe()
    }

    /// Says with which model the agent was started.
    pub fn set_model(&self, model: Option<String>) {
        self.owner.shared.lock().model = model;
    }

    /// Says how the time of turns is told. Without it a daemon that comes back counts by its own clock.
    pub fn set_turn_clock(&self, clock: TurnClock) {
        self.owner.shared.lock().turn_clock = Some(clock);
    }
}

impl fmt::Debug for WorkerEndpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let WorkerEndpointOptions { session, worker, .. } = &self.owner.shared.options;
        f.debug_struct("Seat").field("session", session).field("worker", worker).finish_non_exhaustive()
    }
}

/// What all clones of a seat share, and its tasks do not: when it goes, they end.
struct EndpointOwner {
    shared: Arc<EndpointShared>,
    spool_sync_task: JoinHandle<()>,
}

impl Drop for EndpointOwner {
    fn drop(&mut self) {
        self.spool_sync_task.abort();
        // The agent's task ends with what is dropped here.
        self.shared.lock().agent = None;
    }
}

/// What a seat and its tasks share.
struct EndpointShared {
    options: WorkerEndpointOptions,
    state: Mutex<EndpointState>,
    /// The state, as far as others may see it.
    status: watch::Sender<WorkerEndpointStatus>,
    /// Wakes the agent's task: there is room again.
    space_freed: Notify,
    /// Wakes who waits for wishes.
    request_ready: Notify,
    /// Wakes the one who syncs.
    sync_needed: Notify,
}

struct EndpointState {
    outbox: EndpointOutbox,
    /// Which commands have been here, whatever agent they were for, and those that wait for an agent.
    commands: CommandQueue,
    requests: LifecycleQueue,
    agent: Option<EndpointAgent>,
    /// The daemon that is attached, by what wakes its connection.
    connection: Option<Arc<Notify>>,
    presence: v1::AgentPresence,
    attachment_changed_at: Instant,
    run: Option<RunId>,
    limits: Option<(RunId, TurnLimits)>,
    turn_clock: Option<TurnClock>,
    model: Option<String>,
}

/// An agent in its seat.
struct EndpointAgent {
    command_sender: AgentCommandSender,
    stop: Arc<Notify>,
    task: JoinHandle<()>,
}

impl Drop for EndpointAgent {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl EndpointShared {
    /// Nothing that runs under the lock can leave the state half changed, so a panic elsewhere does not spoil it.
    fn lock(&self) -> MutexGuard<'_, EndpointState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Tells those who watch what they can see, if it has changed.
    fn publish_status(&self, state: &EndpointState) {
        let now = state.status();
        self.status.send_if_modified(|shown| {
            let changed = *shown != now;
            *shown = now;
            changed
        });
    }

    /// Numbers, keeps and sends what was said. Written as JSON once, for the spool and the daemon both.
    fn send_all(&self, ups: &[AgentUpdate]) {
        let (mut json, mut ends) = (Vec::new(), vec![0]);
        for up in ups {
            serde_json::to_writer(&mut json, up)
                .expect("what is said has no map with keys that are not text");
            ends.push(json.len());
        }
        let json = Bytes::from(json);
        let mut state = self.lock();
        for (up, ends) in ups.iter().zip(ends.windows(2)) {
            if state.presence == v1::AgentPresence::Gone {
                tracing::debug!(?up, "said after the last word, and so not said");
                break;
            }
            state.apply_update(up);
            state.outbox.push(json.slice(ends[0]..ends[1]));
        }
        state.outbox.flush_to_spool();
        self.notify_changed(&state);
    }

    /// Wakes whoever may have something to do now that the state has changed.
    fn notify_changed(&self, state: &EndpointState) {
        if let Some(connection) = &state.connection {
            connection.notify_one();
        }
        if state.connection.is_none() || state.outbox.is_failing() {
            self.sync_needed.notify_one();
        }
        if !state.outbox.is_full() {
            self.space_freed.notify_one();
        }
        self.publish_status(state);
    }

    /// A command for the agent. One that finds none waits for the next.
    fn push_command(&self, down: AgentCommand) {
        let mut state = self.lock();
        state.commands.push(down);
        state.forward_commands();
        self.publish_status(&state);
    }

    fn set_turn_limits(&self, run: RunId, limits: TurnLimits) {
        let mut state = self.lock();
        state.limits = Some((run, limits));
        self.publish_status(&state);
    }

    fn push_request(&self, wanted: LifecycleRequest) {
        if self.lock().requests.push(wanted) {
            self.request_ready.notify_one();
        }
    }

    /// What a daemon that has taken so much is told in our hello; `None` if it cannot go on from there.
    fn summarize_for(&self, taken: UpdateNumber) -> Option<EndpointSummary> {
        let state = self.lock();
        state.outbox.can_resume_after(taken).then(|| EndpointSummary {
            presence: state.reported_presence(),
            last: state.outbox.last(),
            applied: state.commands.all_seen_upto(),
            run_time: state.turn_clock.as_ref().and_then(|clock| clock()),
            model: state.model.clone(),
        })
    }
}

impl EndpointState {
    /// What there is for the daemon. An agent that is on its way counts, so that it is not wanted twice.
    fn reported_presence(&self) -> v1::AgentPresence {
        match self.presence {
            v1::AgentPresence::Resting if self.requests.awaits_agent() => v1::AgentPresence::Starting,
            seat => seat,
        }
    }

    fn status(&self) -> WorkerEndpointStatus {
        WorkerEndpointStatus {
            attached: self.connection.is_some(),
            attachment_changed_at: self.attachment_changed_at,
            presence: self.reported_presence(),
            run: self.run.clone(),
            limits: self.limits.clone(),
            has_unacked: self.outbox.is_unacked(),
        }
    }

    /// Gives the agent the commands that wait, if there is an agent.
    fn forward_commands(&mut self) {
        let Some(agent) = &self.agent else { return };
        while let Some(down) = self.commands.pop() {
            if let AgentCommand::Prompt { run, .. } = &down {
                self.run = Some(run.clone());
            }
            agent.command_sender.send(down);
        }
    }

    /// What this word says of the seat itself.
    fn apply_update(&mut self, up: &AgentUpdate) {
        match up {
            AgentUpdate::Ready { steers, .. } => self.presence = v1::AgentPresence::Ready { steers: *steers },
            AgentUpdate::Terminal { run, .. } if self.run.as_ref() == Some(run) => self.run = None,
            AgentUpdate::Rested => {
                self.presence = v1::AgentPresence::Resting;
                self.run = None;
                self.requests.on_agent_rested();
            }
            AgentUpdate::Gone(_) => {
                self.presence = v1::AgentPresence::Gone;
                self.run = None;
            }
            _ => {}
        }
    }
}

/// Takes what an agent says for as long as there is room, and tells that it is gone.
async fn forward_agent_output(shared: Arc<EndpointShared>, mut agent: SessionEndpoint, stop: Arc<Notify>) {
    loop {
        let hear = async {
            while shared.lock().outbox.is_full() {
                shared.space_freed.notified().await;
            }
            agent.next_event().await
        };
        let heard = tokio::select! {
            biased;
            () = stop.notified() => None,
            heard = hear => Some(heard),
        };
        match heard {
            Some(LocalLinkEvent::Updates(said)) => {
                shared.send_all(&said.into_iter().map(|thing| thing.update).collect::<Vec<_>>())
            }
            Some(LocalLinkEvent::Gone(gone)) => return shared.send_all(&[AgentUpdate::Gone(gone)]),
            None => return agent.stop().await,
        }
        // An agent that is always ahead would otherwise keep the connection from its share.
        tokio::task::coop::consume_budget().await;
    }
}
