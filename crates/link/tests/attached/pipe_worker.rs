//! A worker that is reached over pipes in memory. The pipes can be cut or frozen, the worker can be unreachable or
//! dead, and a test can send it raw frames.

#![expect(clippy::unwrap_used, reason = "this is all test")]

use std::fmt::Display;
use std::future::pending;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};
use qd_link::{
    AgentLink, LinkEvent, LinkOptions, MemorySpool, NumberedUpdate, WorkerConnector, WorkerEnding,
    WorkerEndpoint, WorkerEndpointOptions, WorkerUnreachable, read_hello, receive_agent_start,
};
use qd_protocol::frame::v1::{self, DaemonHello, DaemonLinkFrame, ProtocolVersions, WorkerLinkFrame};
use qd_protocol::limits::SPOOL_MAX;
use qd_protocol::link::{AgentCommand, AgentUpdate, TurnLimits, TurnUpdate, UpdateNumber};
use qd_protocol::worker::{AgentSpec, Secret};
use qd_protocol::{EventNumber, RunId, SessionId, WorkerId};
use qd_worker_sdk::socket::{ByteStream, IncomingFrame, Socket, SocketError};
use tokio::io::{DuplexStream, duplex};
use tokio::sync::watch;
use tokio::task::AbortHandle;
use tokio_tungstenite::tungstenite::protocol::Role;

/// How long a worker is tried before it is given up.
pub(crate) const REACH_TIMEOUT: Duration = Duration::from_secs(600);
/// How long one attempt waits for a machine that is away.
const AWAY_WAIT: Duration = Duration::from_secs(10);
/// What a pipe holds. Small, so that it fills quickly.
const PIPE: usize = 16 << 10;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum WorkerReachability {
    Open,
    Later,
    Away,
    Dead,
}

/// See the module. All clones are the same worker.
#[derive(Clone)]
pub(crate) struct PipeWorker(Arc<PipeWorkerShared>);

struct PipeWorkerShared {
    endpoint: watch::Sender<Option<WorkerEndpoint>>,
    frozen: watch::Sender<bool>,
    state: Mutex<PipeWorkerState>,
}

struct PipeWorkerState {
    reachability: WorkerReachability,
    dials: usize,
    undelivered: Vec<AgentUpdate>,
    /// Whether the link has ended the worker.
    ended: bool,
    /// What ending the worker returns; by default, whether it was dead.
    ending: Option<WorkerEnding>,
    tasks: Vec<AbortHandle>,
}

impl PipeWorker {
    /// A worker that serves this endpoint.
    pub(crate) fn of(endpoint: &WorkerEndpoint) -> Self {
        let worker = Self::empty();
        worker.0.endpoint.send_replace(Some(endpoint.clone()));
        worker
    }

    /// A worker without an endpoint, until a daemon starts an agent.
    pub(crate) fn empty() -> Self {
        let state = PipeWorkerState {
            reachability: WorkerReachability::Open,
            dials: 0,
            undelivered: Vec::new(),
            ended: false,
            ending: None,
            tasks: Vec::new(),
        };
        Self(Arc::new(PipeWorkerShared {
            endpoint: watch::Sender::new(None),
            frozen: watch::Sender::new(false),
            state: Mutex::new(state),
        }))
    }

    /// Waits for the endpoint of the agent that was started.
    pub(crate) async fn started(&self) -> WorkerEndpoint {
        let mut endpoint = self.0.endpoint.subscribe();
        let endpoint = endpoint.wait_for(Option::is_some).await.unwrap();
        endpoint.clone().unwrap()
    }

    pub(crate) fn set(&self, reachability: WorkerReachability) {
        self.lock().reachability = reachability;
    }

    /// Sets the updates that the worker leaves in its spool, numbered from 1.
    pub(crate) fn leave(&self, updates: impl IntoIterator<Item = AgentUpdate>) {
        self.lock().undelivered = updates.into_iter().collect();
    }

    /// Whether the link has ended the worker.
    pub(crate) fn is_ended(&self) -> bool {
        self.lock().ended
    }

    /// Sets what becomes of the worker when it is ended.
    pub(crate) fn set_ending(&self, ending: WorkerEnding) {
        self.lock().ending = Some(ending);
    }

    /// How many times a connection was attempted.
    pub(crate) fn dials(&self) -> usize {
        self.lock().dials
    }

    /// Breaks all connections.
    pub(crate) fn cut(&self) {
        self.lock().tasks.drain(..).for_each(|task| task.abort());
    }

    /// From now on nothing passes the pipes, without either end noticing.
    pub(crate) fn freeze(&self) {
        self.set(WorkerReachability::Later);
        self.0.frozen.send_replace(true);
    }

    fn lock(&self) -> MutexGuard<'_, PipeWorkerState> {
        self.0.state.lock()
    }

    /// The daemon's end of a new connection.
    fn connect(&self) -> DuplexStream {
        let (daemon_end, mut daemon_pipe) = duplex(PIPE);
        let (mut worker_pipe, worker_end) = duplex(PIPE);
        let mut frozen = self.0.frozen.subscribe();
        let piping = tokio::spawn(async move {
            let is_frozen = async move { frozen.wait_for(|frozen| *frozen).await.is_ok() };
            tokio::select! {
                _ended = tokio::io::copy_bidirectional(&mut daemon_pipe, &mut worker_pipe) => {}
                // The pipes stay open, so that neither end sees the other close.
                true = is_frozen => pending().await,
            }
        });
        let serving = tokio::spawn(serve(self.clone(), worker_end));
        self.lock().tasks.extend([piping.abort_handle(), serving.abort_handle()]);
        daemon_end
    }
}

impl WorkerConnector for PipeWorker {
    async fn dial(&mut self) -> Result<Socket<Box<dyn ByteStream>>, WorkerUnreachable> {
        let reachability = {
            let mut state = self.lock();
            state.dials += 1;
            state.reachability
        };
        match reachability {
            WorkerReachability::Open => {
                Ok(Socket::from_upgraded(Box::new(self.connect()) as Box<dyn ByteStream>, Role::Client).await)
            }
            WorkerReachability::Later => Err(WorkerUnreachable::RetryLater("nobody answers".to_owned())),
            WorkerReachability::Away => {
                tokio::time::sleep(AWAY_WAIT).await;
                Err(WorkerUnreachable::MachineAway)
            }
            WorkerReachability::Dead => Err(WorkerUnreachable::Dead),
        }
    }

    async fn end_worker(&mut self) -> WorkerEnding {
        let mut state = self.lock();
        let was_dead = state.reachability == WorkerReachability::Dead;
        state.ended = true;
        state.tasks.drain(..).for_each(|task| task.abort());
        state.ending.clone().unwrap_or(if was_dead { WorkerEnding::NotFound } else { WorkerEnding::Ended })
    }

    async fn read_undelivered(&mut self, after: UpdateNumber) -> Vec<NumberedUpdate> {
        let all = std::mem::take(&mut self.lock().undelivered);
        (1..)
            .zip(all)
            .map(|(number, update)| NumberedUpdate { number: UpdateNumber(number), update })
            .filter(|numbered| numbered.number > after)
            .collect()
    }
}

/// Serves one connection as a worker does.
async fn serve(worker: PipeWorker, stream: DuplexStream) -> Result<(), SocketError> {
    let mut socket = Socket::from_upgraded(stream, Role::Server).await;
    let hello = read_hello(&mut socket).await?;
    let endpoint = worker.0.endpoint.borrow().clone();
    match endpoint {
        Some(endpoint) => endpoint.serve(socket, hello).await,
        None => {
            let started = receive_agent_start(socket, hello, &secret(), "test").await?;
            let options = WorkerEndpointOptions { numbered_after: started.spec.after, ..endpoint_options() };
            let endpoint = WorkerEndpoint::new(options, Box::new(MemorySpool::default()));
            worker.0.endpoint.send_replace(Some(endpoint.clone()));
            endpoint.serve_started(started).await
        }
    }
}

/// A daemon that sends raw frames.
pub(crate) struct RawFrameDaemon {
    socket: Socket<DuplexStream>,
}

pub(crate) async fn raw_daemon(worker: &PipeWorker) -> RawFrameDaemon {
    RawFrameDaemon { socket: Socket::from_upgraded(worker.connect(), Role::Client).await }
}

impl RawFrameDaemon {
    pub(crate) async fn send(&mut self, frame: &DaemonLinkFrame) {
        self.socket.send(frame).await.unwrap();
    }

    pub(crate) async fn send_text(&mut self, text: &str) {
        self.socket.feed_text(text.to_owned()).await.unwrap();
        self.socket.flush().await.unwrap();
    }

    /// Sends a valid hello with this change.
    pub(crate) async fn hello(&mut self, change: impl FnOnce(&mut DaemonHello)) {
        let LinkOptions { session, worker, journalled, software, .. } = link_options();
        let nonce = "nonce".to_owned();
        let mut hello = DaemonHello {
            versions: ProtocolVersions::SUPPORTED,
            software,
            capabilities: Vec::new(),
            session,
            worker,
            nonce,
            journalled,
        };
        change(&mut hello);
        self.send(&DaemonLinkFrame::Hello(hello)).await;
    }

    /// The next frame that can be parsed, or `None` when the connection ends.
    pub(crate) async fn next(&mut self) -> Option<WorkerLinkFrame> {
        loop {
            if let IncomingFrame::Text(text) = self.socket.next().await.ok()? {
                return serde_json::from_str(text.as_str()).ok();
            }
        }
    }
}

/// Waits for the `Attached` event.
pub(crate) async fn wait_attached(link: &mut AgentLink) -> v1::AgentPresence {
    match link.next_event().await {
        LinkEvent::Attached { presence, .. } => presence,
        other => panic!("got {other:?}"),
    }
}

pub(crate) async fn next_updates(link: &mut AgentLink) -> Vec<NumberedUpdate> {
    match link.next_event().await {
        LinkEvent::Updates(updates) => updates,
        other => panic!("got {other:?}"),
    }
}

pub(crate) fn numbers<'a>(numbered: impl IntoIterator<Item = &'a NumberedUpdate>) -> Vec<u64> {
    numbered.into_iter().map(|numbered| numbered.number.0).collect()
}

/// An update that is never merged and can be told from all others.
pub(crate) fn notice(text: impl Display) -> AgentUpdate {
    AgentUpdate::Turn { run: run(), update: TurnUpdate::notice(text.to_string()) }
}

pub(crate) fn text_of(numbered: &NumberedUpdate) -> &str {
    match &numbered.update {
        AgentUpdate::Turn { update: TurnUpdate::Notice { text, .. }, .. } => text,
        other => panic!("{other:?} is not a notice"),
    }
}

/// The numbers in the texts of notices.
pub(crate) fn notices(numbered: &[NumberedUpdate]) -> impl Iterator<Item = usize> {
    numbered.iter().map(|numbered| text_of(numbered).parse().unwrap())
}

pub(crate) fn run() -> RunId {
    RunId::parse("run_1").unwrap()
}

pub(crate) fn steer(number: u64) -> AgentCommand {
    AgentCommand::Steer { number: EventNumber(number), run: run(), text: String::new() }
}

pub(crate) fn prompt(number: u64) -> AgentCommand {
    AgentCommand::Prompt {
        number: EventNumber(number),
        run: run(),
        prompt: "go".to_owned(),
        mode: None,
        files: Vec::new(),
        messages: Vec::new(),
        limits: TurnLimits::default(),
    }
}

pub(crate) fn secret() -> Secret {
    Secret("between us".to_owned())
}

pub(crate) fn spec() -> Box<AgentSpec> {
    let LinkOptions { session, worker, .. } = link_options();
    Box::new(AgentSpec::new(session, worker, "test", "/"))
}

pub(crate) fn endpoint_options() -> WorkerEndpointOptions {
    let LinkOptions { session, worker, secret, journalled, software, .. } = link_options();
    WorkerEndpointOptions {
        session,
        worker,
        secret,
        numbered_after: journalled,
        spool_max: SPOOL_MAX,
        software,
    }
}

pub(crate) fn link_options() -> LinkOptions {
    LinkOptions {
        session: SessionId::from_random(&[1; 8]),
        worker: WorkerId::from_random(&[2; 8]),
        secret: secret(),
        journalled: UpdateNumber(0),
        reach_timeout: REACH_TIMEOUT,
        software: "test".to_owned(),
        start: None,
    }
}
