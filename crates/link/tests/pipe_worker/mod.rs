//! A worker that is reached over pipes in memory: they can be cut or frozen, the worker can be out of reach or dead, and
//! a test can speak to it in bare frames.

#![expect(clippy::unwrap_used, reason = "this is all test")]

use std::fmt::Display;
use std::future::pending;
use std::sync::{Arc, Mutex, MutexGuard};

use qd_link::socket::{ByteStream, IncomingFrame, Socket, SocketError};
use qd_link::{
    AgentLink, LinkEvent, LinkOptions, MemorySpool, NumberedUpdate, WorkerConnector, WorkerEndpoint,
    WorkerEndpointOptions, WorkerUnreachable, read_hello, receive_agent_start,
};
use qd_protocol::frame::v1::{self, DaemonHello, DaemonLinkFrame, ProtocolVersions, WorkerLinkFrame};
use qd_protocol::limits::SPOOL_MAX;
use qd_protocol::link::{AgentCommand, AgentUpdate, TurnLimits, TurnUpdate, UpdateNumber};
use qd_protocol::worker::{AgentSpec, Secret};
use qd_protocol::{EventNumber, RunId, SessionId, WorkerId};
use tokio::io::{DuplexStream, duplex};
use tokio::sync::watch;
use tokio::task::AbortHandle;
use tokio_tungstenite::tungstenite::protocol::Role;

/// What a pipe holds. Small, so that it is full at once.
const PIPE: usize = 16 << 10;

/// How it stands with the worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum WorkerReachability {
    Open,
    Later,
    Dead,
}

/// See the module. Its clones are the same.
#[derive(Clone)]
pub(crate) struct PipeWorker(Arc<PipeWorkerShared>);

struct PipeWorkerShared {
    seat: watch::Sender<Option<WorkerEndpoint>>,
    frozen: watch::Sender<bool>,
    state: Mutex<PipeWorkerState>,
}

struct PipeWorkerState {
    way: WorkerReachability,
    dials: usize,
    left: Vec<AgentUpdate>,
    tasks: Vec<AbortHandle>,
}

impl PipeWorker {
    /// Where this seat is served.
    pub(crate) fn of(seat: &WorkerEndpoint) -> Self {
        let pier = Self::empty();
        pier.0.seat.send_replace(Some(seat.clone()));
        pier
    }

    /// Where nobody sits until somebody is started.
    pub(crate) fn empty() -> Self {
        let state =
            PipeWorkerState { way: WorkerReachability::Open, dials: 0, left: Vec::new(), tasks: Vec::new() };
        Self(Arc::new(PipeWorkerShared {
            seat: watch::Sender::new(None),
            frozen: watch::Sender::new(false),
            state: Mutex::new(state),
        }))
    }

    /// The seat of whom was started.
    pub(crate) async fn started(&self) -> WorkerEndpoint {
        let mut seat = self.0.seat.subscribe();
        let seat = seat.wait_for(Option::is_some).await.unwrap();
        seat.clone().unwrap()
    }

    pub(crate) fn set(&self, way: WorkerReachability) {
        self.lock().way = way;
    }

    /// What the worker leaves in its spool, from number 1.
    pub(crate) fn leave(&self, ups: impl IntoIterator<Item = AgentUpdate>) {
        self.lock().left = ups.into_iter().collect();
    }

    /// How often it was tried to reach the worker.
    pub(crate) fn dials(&self) -> usize {
        self.lock().dials
    }

    /// Breaks all connections.
    pub(crate) fn cut(&self) {
        self.lock().tasks.drain(..).for_each(|task| task.abort());
    }

    /// From now on nothing comes through, and nobody is told.
    pub(crate) fn freeze(&self) {
        self.set(WorkerReachability::Later);
        self.0.frozen.send_replace(true);
    }

    fn lock(&self) -> MutexGuard<'_, PipeWorkerState> {
        self.0.state.lock().unwrap()
    }

    /// The near end of a new connection.
    fn connect(&self) -> DuplexStream {
        let (near, mut near_pipe) = duplex(PIPE);
        let (mut far_pipe, far) = duplex(PIPE);
        let mut frozen = self.0.frozen.subscribe();
        let piping = tokio::spawn(async move {
            let freezes = async move { frozen.wait_for(|frozen| *frozen).await.is_ok() };
            tokio::select! {
                _ended = tokio::io::copy_bidirectional(&mut near_pipe, &mut far_pipe) => {}
                // The pipes stay, so that neither end sees the other go.
                true = freezes => pending().await,
            }
        });
        let serving = tokio::spawn(serve(self.clone(), far));
        self.lock().tasks.extend([piping.abort_handle(), serving.abort_handle()]);
        near
    }
}

impl WorkerConnector for PipeWorker {
    async fn dial(&mut self) -> Result<Socket<Box<dyn ByteStream>>, WorkerUnreachable> {
        let way = {
            let mut state = self.lock();
            state.dials += 1;
            state.way
        };
        match way {
            WorkerReachability::Open => {
                Ok(Socket::from_upgraded(Box::new(self.connect()) as Box<dyn ByteStream>, Role::Client).await)
            }
            WorkerReachability::Later => Err(WorkerUnreachable::RetryLater),
            WorkerReachability::Dead => Err(WorkerUnreachable::Dead),
        }
    }

    async fn read_undelivered(&mut self, after: UpdateNumber) -> Vec<NumberedUpdate> {
        let all = std::mem::take(&mut self.lock().left);
        (1..)
            .zip(all)
            .map(|(number, up)| NumberedUpdate { number: UpdateNumber(number), update: up })
            .filter(|thing| thing.number > after)
            .collect()
    }
}

/// What a worker does with a connection.
async fn serve(pier: PipeWorker, wire: DuplexStream) -> Result<(), SocketError> {
    let mut socket = Socket::from_upgraded(wire, Role::Server).await;
    let hello = read_hello(&mut socket).await?;
    let seat = pier.0.seat.borrow().clone();
    match seat {
        Some(seat) => seat.serve(socket, hello).await,
        None => {
            let started = receive_agent_start(socket, hello, &secret(), "test").await?;
            let options = WorkerEndpointOptions { numbered_after: started.spec.after, ..seat_options() };
            let seat = WorkerEndpoint::new(options, Box::new(MemorySpool::default()));
            pier.0.seat.send_replace(Some(seat.clone()));
            seat.serve_started(started).await
        }
    }
}

/// A daemon that speaks in bare frames.
pub(crate) struct RawFrameDaemon {
    socket: Socket<DuplexStream>,
}

pub(crate) async fn raw(pier: &PipeWorker) -> RawFrameDaemon {
    RawFrameDaemon { socket: Socket::from_upgraded(pier.connect(), Role::Client).await }
}

impl RawFrameDaemon {
    pub(crate) async fn send(&mut self, frame: &DaemonLinkFrame) {
        self.socket.send(frame).await.unwrap();
    }

    pub(crate) async fn send_text(&mut self, text: &str) {
        self.socket.feed_text(text.to_owned()).await.unwrap();
        self.socket.flush().await.unwrap();
    }

    /// A good hello, changed.
    pub(crate) async fn hello(&mut self, change: impl FnOnce(&mut DaemonHello)) {
        let LinkOptions { session, worker, journalled: taken, software, .. } = link_options();
        let nonce = "nonce".to_owned();
        let mut hello = DaemonHello {
            versions: ProtocolVersions::SUPPORTED,
            software,
            capabilities: Vec::new(),
            session,
            worker,
            nonce,
            journalled: taken,
        };
        change(&mut hello);
        self.send(&DaemonLinkFrame::Hello(hello)).await;
    }

    /// What came, if anything that can be read does before the connection ends.
    pub(crate) async fn next(&mut self) -> Option<WorkerLinkFrame> {
        loop {
            if let IncomingFrame::Text(text) = self.socket.next().await.ok()? {
                return serde_json::from_str(text.as_str()).ok();
            }
        }
    }
}

/// What is heard when a connection is there.
pub(crate) async fn attached(link: &mut AgentLink) -> v1::AgentPresence {
    match link.next_event().await {
        LinkEvent::Attached { presence: seat, .. } => seat,
        other => panic!("heard {other:?}"),
    }
}

pub(crate) async fn said(link: &mut AgentLink) -> Vec<NumberedUpdate> {
    match link.next_event().await {
        LinkEvent::Updates(said) => said,
        other => panic!("heard {other:?}"),
    }
}

pub(crate) fn numbers<'a>(things: impl IntoIterator<Item = &'a NumberedUpdate>) -> Vec<u64> {
    things.into_iter().map(|thing| thing.number.0).collect()
}

/// Something that is never merged and can be told from all others.
pub(crate) fn notice(text: impl Display) -> AgentUpdate {
    AgentUpdate::Turn { run: run(), update: TurnUpdate::Notice { text: text.to_string() } }
}

pub(crate) fn text_of(thing: &NumberedUpdate) -> &str {
    match &thing.update {
        AgentUpdate::Turn { update: TurnUpdate::Notice { text }, .. } => text,
        other => panic!("{other:?} is no notice"),
    }
}

/// The numbers in notices.
pub(crate) fn notices(things: &[NumberedUpdate]) -> impl Iterator<Item = usize> {
    things.iter().map(|thing| text_of(thing).parse().unwrap())
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

pub(crate) fn seat_options() -> WorkerEndpointOptions {
    let LinkOptions { session, worker, secret, journalled: taken, software, .. } = link_options();
    WorkerEndpointOptions { session, worker, secret, numbered_after: taken, spool_max: SPOOL_MAX, software }
}

pub(crate) fn link_options() -> LinkOptions {
    LinkOptions {
        session: SessionId::from_random(&[1; 8]),
        worker: WorkerId::from_random(&[2; 8]),
        secret: secret(),
        journalled: UpdateNumber(0),
        software: "test".to_owned(),
        start: None,
    }
}
