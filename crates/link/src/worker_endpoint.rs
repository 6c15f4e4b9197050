//! The worker's side of one session: it takes the agent's updates, numbers and spools them, and sends them to the
//! attached daemon, if there is one. The rules are in `outbox` and `lifecycle_queue`, which know no task or
//! connection; this file does the waking, the shutdown and the locking.

mod attachment;
mod handshake;
mod lifecycle_queue;
mod outbox;
mod spool_sync;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use parking_lot::{Mutex, MutexGuard};
use qd_protocol::event::RunError;
use qd_protocol::frame::v1;
use qd_protocol::link::{AgentCommand, AgentUpdate, TurnLimits, UpdateNumber};
use qd_protocol::sandbox_spec::SandboxSelection;
use qd_protocol::worker::Secret;
use qd_protocol::{RunId, SessionId, WorkerId};
use qd_worker_sdk::socket::{ByteStream, Socket, SocketError};
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
use crate::spool::Spool;
use crate::task_watch::TaskWatch;

#[derive(Debug, Clone)]
pub struct WorkerEndpointOptions {
    pub session: SessionId,
    /// The worker's id, as the session knows it.
    pub worker: WorkerId,
    /// The secret that both sides prove they know. If it is empty, no proof is needed.
    pub secret: Secret,
    /// The last update number that the session has received. New updates are numbered after it.
    pub numbered_after: UpdateNumber,
    /// How many bytes may wait in the spool before the agent has to wait.
    pub spool_max: u64,
    /// Our version, for logs.
    pub software: String,
}

/// Returns how long the current turn has run, or `None` if no turn is active.
pub type TurnClock = Box<dyn Fn() -> Option<Duration> + Send>;

/// What an endpoint publishes about itself.
#[derive(Debug, Clone, PartialEq)]
pub struct WorkerEndpointStatus {
    pub attached: bool,
    /// When a daemon last attached or detached.
    pub attachment_changed_at: Instant,
    pub presence: v1::AgentPresence,
    /// The run of the current turn.
    pub run: Option<RunId>,
    /// The remaining limits of a turn, as the daemon last sent them after its prompt.
    pub limits: Option<(RunId, TurnLimits)>,
    /// Whether any update is not acknowledged yet.
    pub has_unacked: bool,
}

/// The worker's side of one session. Cheap to clone; dropping the last clone ends its agent.
#[derive(Clone)]
pub struct WorkerEndpoint {
    owner: Arc<EndpointOwner>,
}

impl WorkerEndpoint {
    /// Creates an endpoint whose agent is about to start. Must be called within a tokio runtime.
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
            sandbox: None,
        };
        let shared = Arc::new(EndpointShared {
            options,
            status: watch::Sender::new(state.status()),
            state: Mutex::new(state),
            space_freed: Notify::new(),
            request_ready: Notify::new(),
            sync_needed: Notify::new(),
            tasks: TaskWatch::new(),
        });
        let sync = sync_spool_while_detached(Arc::clone(&shared));
        let spool_sync_task = shared.tasks.spawn_endless("spool sync", sync);
        WorkerEndpoint { owner: Arc::new(EndpointOwner { shared, spool_sync_task }) }
    }

    /// Gives the endpoint its agent, at first or after an idle stop. From now on the agent's updates are numbered,
    /// spooled and sent, and its end is reported. A previous agent is ended.
    pub fn set_agent(&self, agent: SessionEndpoint) {
        let shared = Arc::clone(&self.owner.shared);
        let mut state = self.owner.shared.lock();
        let (command_sender, stop) = (agent.command_sender(), Arc::new(Notify::new()));
        let forward = forward_agent_output(shared, agent, Arc::clone(&stop));
        let task = self.owner.shared.tasks.spawn("agent output", forward);
        state.presence = v1::AgentPresence::Starting;
        state.agent = Some(EndpointAgent { command_sender, stop, task });
        state.requests.on_agent_set();
        state.forward_commands();
        self.owner.shared.publish_status(&state);
    }

    /// Removes the agent: its task is ended and awaited, and none of its updates are sent any more.
    pub async fn remove_agent(&self) {
        let agent = self.owner.shared.lock().agent.take();
        if let Some(mut agent) = agent {
            agent.stop.notify_one();
            // The task ends by itself, and only this handle awaits it.
            let _ended: Result<(), JoinError> = (&mut agent.task).await;
        }
    }

    /// Sends an update of the worker itself, such as [`AgentUpdate::IdleStopped`] or [`AgentUpdate::Gone`]. It never waits
    /// for space. Nothing can be sent after `Gone`.
    pub async fn send(&self, update: AgentUpdate) {
        self.owner.shared.send_all(&[update]);
    }

    /// Serves one connection whose first frame was this hello, until the connection ends. A newer connection ends an
    /// older one.
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
        let Some(summary) = shared.summarize_for(hello.journalled) else {
            return Err(refuse_daemon(&mut socket, HandshakeRefusal::bad_number(hello.journalled)).await);
        };
        complete_handshake(&mut socket, &hello, secret, software, summary).await?;
        self.serve_attached(socket, hello.journalled).await
    }

    /// Ends the connection of the attached daemon, if there is one.
    pub(crate) fn disconnect(&self) {
        let mut state = self.owner.shared.lock();
        if let Some(connection) = state.connection.take() {
            state.outbox.set_last_sent(None);
            state.attachment_changed_at = Instant::now();
            self.owner.shared.notify_changed(&state);
            connection.notify_one();
        }
    }

    /// Serves the connection on which this endpoint's agent was started, until the connection ends.
    pub async fn serve_started<W: ByteStream>(
        &self,
        started: StartedConnection<W>,
    ) -> Result<(), SocketError> {
        self.serve_attached(started.socket, started.journalled).await
    }

    /// A panic while a daemon is served would happen again with each of its attempts to reconnect. So it is a death
    /// like that of a task of ours.
    async fn serve_attached<W: ByteStream>(
        &self,
        socket: Socket<W>,
        received: UpdateNumber,
    ) -> Result<(), SocketError> {
        let shared = &self.owner.shared;
        let served = shared.tasks.run("connection", serve_daemon(shared, socket, received)).await;
        served.unwrap_or(Err(SocketError::Closed))
    }

    /// The last death of a task of this endpoint; `None` while all are alive. Without them the session would wait for
    /// ever, so the owner of the endpoint ends it.
    pub fn watch_task_deaths(&self) -> watch::Receiver<Option<RunError>> {
        self.owner.shared.tasks.subscribe()
    }

    /// The daemon's next lifecycle request, each once and in order. Cancelling the wait loses nothing.
    pub async fn next_request(&self) -> LifecycleRequest {
        let shared = &self.owner.shared;
        loop {
            if let Some(request) = shared.lock().requests.pop() {
                return request;
            }
            shared.request_ready.notified().await;
        }
    }

    pub fn watch_status(&self) -> watch::Receiver<WorkerEndpointStatus> {
        self.owner.shared.status.subscribe()
    }

    /// Sets the settings that the agent was started with, which are reported to a daemon that attaches.
    pub fn set_start_settings(&self, model: Option<String>, sandbox: Option<SandboxSelection>) {
        let mut state = self.owner.shared.lock();
        (state.model, state.sandbox) = (model, sandbox);
    }

    /// Sets how turns are timed. Without it, a daemon that reattaches measures by its own clock.
    pub fn set_turn_clock(&self, clock: TurnClock) {
        self.owner.shared.lock().turn_clock = Some(clock);
    }
}

impl fmt::Debug for WorkerEndpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let WorkerEndpointOptions { session, worker, .. } = &self.owner.shared.options;
        f.debug_struct("WorkerEndpoint")
            .field("session", session)
            .field("worker", worker)
            .finish_non_exhaustive()
    }
}

/// What all clones of an endpoint share but its tasks do not. Dropping it ends the tasks.
struct EndpointOwner {
    shared: Arc<EndpointShared>,
    spool_sync_task: JoinHandle<()>,
}

impl Drop for EndpointOwner {
    fn drop(&mut self) {
        self.spool_sync_task.abort();
        // Dropping the agent aborts its task.
        self.shared.lock().agent = None;
    }
}

/// What an endpoint and its tasks share.
struct EndpointShared {
    options: WorkerEndpointOptions,
    state: Mutex<EndpointState>,
    /// The part of the state that others may see.
    status: watch::Sender<WorkerEndpointStatus>,
    /// Wakes the agent's task: there is space in the outbox again.
    space_freed: Notify,
    /// Wakes the caller of [`WorkerEndpoint::next_request`].
    request_ready: Notify,
    /// Wakes the task that syncs the spool.
    sync_needed: Notify,
    tasks: TaskWatch,
}

struct EndpointState {
    outbox: EndpointOutbox,
    /// Commands that wait for an agent, and the numbers of all that arrived before, whatever agent they were for.
    commands: CommandQueue,
    requests: LifecycleQueue,
    agent: Option<EndpointAgent>,
    /// Wakes the connection of the attached daemon. `None` if no daemon is attached.
    connection: Option<Arc<Notify>>,
    presence: v1::AgentPresence,
    attachment_changed_at: Instant,
    run: Option<RunId>,
    limits: Option<(RunId, TurnLimits)>,
    turn_clock: Option<TurnClock>,
    model: Option<String>,
    /// How strongly the daemon asked to confine the agent.
    sandbox: Option<SandboxSelection>,
}

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
    /// Nothing that runs under the lock can leave the state half changed, not even by a panic.
    fn lock(&self) -> MutexGuard<'_, EndpointState> {
        self.state.lock()
    }

    /// Publishes the status if it has changed.
    fn publish_status(&self, state: &EndpointState) {
        let status = state.status();
        self.status.send_if_modified(|published| {
            let changed = *published != status;
            *published = status;
            changed
        });
    }

    /// Numbers, spools and sends updates. Each is serialized once, for both the spool and the daemon.
    fn send_all(&self, updates: &[AgentUpdate]) {
        let (mut json, mut ends) = (Vec::new(), vec![0]);
        for update in updates {
            serde_json::to_writer(&mut json, update)
                .expect("an update has no map with keys that are not strings");
            ends.push(json.len());
        }
        let json = Bytes::from(json);
        let mut state = self.lock();
        for (update, ends) in updates.iter().zip(ends.windows(2)) {
            if state.presence == v1::AgentPresence::Gone {
                tracing::debug!(?update, "dropping an update after the agent's end");
                break;
            }
            state.apply_update(update);
            state.outbox.push(json.slice(ends[0]..ends[1]));
        }
        state.outbox.flush_to_spool();
        self.notify_changed(&state);
    }

    /// Wakes every task that may have work to do after a change of the state.
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

    /// Queues a command for the agent. Without an agent, it waits for the next one.
    fn push_command(&self, command: AgentCommand) {
        let mut state = self.lock();
        state.commands.push(command);
        state.forward_commands();
        self.publish_status(&state);
    }

    fn set_turn_limits(&self, run: RunId, limits: TurnLimits) {
        let mut state = self.lock();
        state.limits = Some((run, limits));
        self.publish_status(&state);
    }

    fn push_request(&self, request: LifecycleRequest) {
        if self.lock().requests.push(request) {
            self.request_ready.notify_one();
        }
    }

    /// What our hello tells a daemon that has received everything up to `received`; `None` if it cannot continue from
    /// there.
    fn summarize_for(&self, received: UpdateNumber) -> Option<EndpointSummary> {
        let state = self.lock();
        state.outbox.can_resume_after(received).then(|| EndpointSummary {
            presence: state.reported_presence(),
            last: state.outbox.last(),
            applied: state.commands.all_seen_upto(),
            run_time: state.turn_clock.as_ref().and_then(|clock| clock()),
            model: state.model.clone(),
            sandbox: state.sandbox,
        })
    }
}

impl EndpointState {
    /// The presence to report. An agent that is about to start counts as starting, so the daemon does not request it
    /// twice.
    fn reported_presence(&self) -> v1::AgentPresence {
        match self.presence {
            v1::AgentPresence::IdleStopped if self.requests.awaits_agent() => v1::AgentPresence::Starting,
            presence => presence,
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

    /// Passes waiting commands to the agent, if there is one.
    fn forward_commands(&mut self) {
        let Some(agent) = &self.agent else { return };
        while let Some(command) = self.commands.pop() {
            if let AgentCommand::Prompt { run, .. } = &command {
                self.run = Some(run.clone());
            }
            agent.command_sender.send(command);
        }
    }

    /// Updates the endpoint's own state from an update.
    fn apply_update(&mut self, update: &AgentUpdate) {
        match update {
            AgentUpdate::Ready { steers, .. } => self.presence = v1::AgentPresence::Ready { steers: *steers },
            AgentUpdate::TurnEnded { run, .. } if self.run.as_ref() == Some(run) => self.run = None,
            AgentUpdate::IdleStopped => {
                self.presence = v1::AgentPresence::IdleStopped;
                self.run = None;
                self.requests.on_idle_stopped();
            }
            AgentUpdate::Gone(_) => {
                self.presence = v1::AgentPresence::Gone;
                self.run = None;
            }
            _ => {}
        }
    }
}

/// Forwards the agent's updates while the outbox has space, and reports the agent's end.
async fn forward_agent_output(shared: Arc<EndpointShared>, mut agent: SessionEndpoint, stop: Arc<Notify>) {
    loop {
        let next_event = async {
            while shared.lock().outbox.is_full() {
                shared.space_freed.notified().await;
            }
            agent.next_event().await
        };
        let event = tokio::select! {
            biased;
            () = stop.notified() => None,
            event = next_event => Some(event),
        };
        match event {
            Some(LocalLinkEvent::Updates(updates)) => {
                shared.send_all(&updates.into_iter().map(|numbered| numbered.update).collect::<Vec<_>>())
            }
            Some(LocalLinkEvent::Gone(gone)) => return shared.send_all(&[AgentUpdate::Gone(gone)]),
            None => return agent.stop().await,
        }
        // Without this, an agent that always has more to send would starve the connection.
        tokio::task::coop::consume_budget().await;
    }
}
