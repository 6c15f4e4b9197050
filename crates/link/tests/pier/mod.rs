//! A worker that is reached over pipes in memory: they can be cut or frozen, the worker can be out of reach or dead, and
//! a test can speak to it in bare frames.

#![expect(clippy::unwrap_used, reason = "this is all test")]

use std::fmt::Display;
use std::future::pending;
use std::sync::{Arc, Mutex, MutexGuard};

use qd_link::socket::{Incoming, Socket, SocketError, Wire};
use qd_link::{
    AgentLink, Heard, LinkOptions, MemorySpool, Numbered, Route, Seat, SeatOptions, Unreachable, greet,
    offer_empty,
};
use qd_protocol::frame::v1::{self, DaemonHello, ToDaemon, ToWorker, Versions};
use qd_protocol::limits::SPOOL_MAX;
use qd_protocol::link::{Down, Said, TurnLimits, Up, UpNumber};
use qd_protocol::worker::{AgentSpec, Secret};
use qd_protocol::{Number, RunId, SessionId, WorkerId};
use tokio::io::{DuplexStream, duplex};
use tokio::sync::watch;
use tokio::task::AbortHandle;
use tokio_tungstenite::tungstenite::protocol::Role;

/// What a pipe holds. Small, so that it is full at once.
const PIPE: usize = 16 << 10;

/// How it stands with the worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Way {
    Open,
    Later,
    Dead,
}

/// See the module. Its clones are the same.
#[derive(Clone)]
pub(crate) struct Pier(Arc<Shared>);

struct Shared {
    seat: watch::Sender<Option<Seat>>,
    frozen: watch::Sender<bool>,
    state: Mutex<State>,
}

struct State {
    way: Way,
    dials: usize,
    left: Vec<Up>,
    tasks: Vec<AbortHandle>,
}

impl Pier {
    /// Where this seat is served.
    pub(crate) fn of(seat: &Seat) -> Self {
        let pier = Self::empty();
        pier.0.seat.send_replace(Some(seat.clone()));
        pier
    }

    /// Where nobody sits until somebody is started.
    pub(crate) fn empty() -> Self {
        let state = State { way: Way::Open, dials: 0, left: Vec::new(), tasks: Vec::new() };
        Self(Arc::new(Shared {
            seat: watch::Sender::new(None),
            frozen: watch::Sender::new(false),
            state: Mutex::new(state),
        }))
    }

    /// The seat of whom was started.
    pub(crate) async fn started(&self) -> Seat {
        let mut seat = self.0.seat.subscribe();
        let seat = seat.wait_for(Option::is_some).await.unwrap();
        seat.clone().unwrap()
    }

    pub(crate) fn set(&self, way: Way) {
        self.lock().way = way;
    }

    /// What the worker leaves in its spool, from number 1.
    pub(crate) fn leave(&self, ups: impl IntoIterator<Item = Up>) {
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
        self.set(Way::Later);
        self.0.frozen.send_replace(true);
    }

    fn lock(&self) -> MutexGuard<'_, State> {
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

impl Route for Pier {
    async fn dial(&mut self) -> Result<Socket<Box<dyn Wire>>, Unreachable> {
        let way = {
            let mut state = self.lock();
            state.dials += 1;
            state.way
        };
        match way {
            Way::Open => Ok(Socket::upgraded(Box::new(self.connect()) as Box<dyn Wire>, Role::Client).await),
            Way::Later => Err(Unreachable::Later),
            Way::Dead => Err(Unreachable::Dead),
        }
    }

    async fn remains(&mut self, after: UpNumber) -> Vec<Numbered> {
        let all = std::mem::take(&mut self.lock().left);
        (1..)
            .zip(all)
            .map(|(number, up)| Numbered { number: UpNumber(number), up })
            .filter(|thing| thing.number > after)
            .collect()
    }
}

/// What a worker does with a connection.
async fn serve(pier: Pier, wire: DuplexStream) -> Result<(), SocketError> {
    let mut socket = Socket::upgraded(wire, Role::Server).await;
    let hello = greet(&mut socket).await?;
    let seat = pier.0.seat.borrow().clone();
    match seat {
        Some(seat) => seat.serve(socket, hello).await,
        None => {
            let started = offer_empty(socket, hello, &secret(), "test").await?;
            let options = SeatOptions { after: started.spec.after, ..seat_options() };
            let seat = Seat::new(options, Box::new(MemorySpool::default()));
            pier.0.seat.send_replace(Some(seat.clone()));
            seat.serve_started(started).await
        }
    }
}

/// A daemon that speaks in bare frames.
pub(crate) struct Raw {
    socket: Socket<DuplexStream>,
}

pub(crate) async fn raw(pier: &Pier) -> Raw {
    Raw { socket: Socket::upgraded(pier.connect(), Role::Client).await }
}

impl Raw {
    pub(crate) async fn send(&mut self, frame: &ToWorker) {
        self.socket.send(frame).await.unwrap();
    }

    pub(crate) async fn send_text(&mut self, text: &str) {
        self.socket.feed_text(text.to_owned()).await.unwrap();
        self.socket.flush().await.unwrap();
    }

    /// A good hello, changed.
    pub(crate) async fn hello(&mut self, change: impl FnOnce(&mut DaemonHello)) {
        let LinkOptions { session, worker, taken, software, .. } = link_options();
        let nonce = "nonce".to_owned();
        let mut hello = DaemonHello {
            versions: Versions::OURS,
            software,
            capabilities: Vec::new(),
            session,
            worker,
            nonce,
            taken,
        };
        change(&mut hello);
        self.send(&ToWorker::Hello(hello)).await;
    }

    /// What came, if anything that can be read does before the connection ends.
    pub(crate) async fn next(&mut self) -> Option<ToDaemon> {
        loop {
            if let Incoming::Text(text) = self.socket.next().await.ok()? {
                return serde_json::from_str(text.as_str()).ok();
            }
        }
    }
}

/// What is heard when a connection is there.
pub(crate) async fn attached(link: &mut AgentLink) -> v1::Seat {
    match link.hear().await {
        Heard::Attached { seat, .. } => seat,
        other => panic!("heard {other:?}"),
    }
}

pub(crate) async fn said(link: &mut AgentLink) -> Vec<Numbered> {
    match link.hear().await {
        Heard::Said(said) => said,
        other => panic!("heard {other:?}"),
    }
}

pub(crate) fn numbers<'a>(things: impl IntoIterator<Item = &'a Numbered>) -> Vec<u64> {
    things.into_iter().map(|thing| thing.number.0).collect()
}

/// Something that is never merged and can be told from all others.
pub(crate) fn notice(text: impl Display) -> Up {
    Up::Said { run: run(), what: Said::Notice { text: text.to_string() } }
}

pub(crate) fn text_of(thing: &Numbered) -> &str {
    match &thing.up {
        Up::Said { what: Said::Notice { text }, .. } => text,
        other => panic!("{other:?} is no notice"),
    }
}

/// The numbers in notices.
pub(crate) fn notices(things: &[Numbered]) -> impl Iterator<Item = usize> {
    things.iter().map(|thing| text_of(thing).parse().unwrap())
}

pub(crate) fn run() -> RunId {
    RunId::parse("run_1").unwrap()
}

pub(crate) fn steer(number: u64) -> Down {
    Down::Steer { number: Number(number), run: run(), text: String::new() }
}

pub(crate) fn prompt(number: u64) -> Down {
    Down::Prompt {
        number: Number(number),
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

pub(crate) fn seat_options() -> SeatOptions {
    let LinkOptions { session, worker, secret, taken, software, .. } = link_options();
    SeatOptions { session, worker, secret, after: taken, spool_max: SPOOL_MAX, software }
}

pub(crate) fn link_options() -> LinkOptions {
    LinkOptions {
        session: SessionId::from_random(&[1; 8]),
        worker: WorkerId::from_random(&[2; 8]),
        secret: secret(),
        taken: UpNumber(0),
        software: "test".to_owned(),
        start: None,
    }
}
