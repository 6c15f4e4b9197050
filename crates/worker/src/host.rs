//! A worker's inside: the seats of its sessions, and the way from a connection to one of them. Where connections come
//! from is not its business: the worker process listens, a joined worker dials, and both give them here.

mod place;
pub(crate) mod process;

use std::collections::{HashMap, HashSet};
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use qd_link::socket::{Socket, SocketError, Wire};
use qd_link::{FileSpool, Seat, SeatOptions, greet, offer_empty};
use qd_protocol::frame::terminal::Look;
use qd_protocol::frame::v1;
use qd_protocol::limits::SPOOL_MAX;
use qd_protocol::worker::{AgentSpec, Secret};
use qd_protocol::{SessionId, WorkerId};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use self::place::Place;
use crate::drivers::pty::view::Viewer;
use crate::window::{self, Window};

pub use process::main;

/// Our version, for people.
pub(crate) const SOFTWARE: &str = concat!("quarterdeck ", env!("CARGO_PKG_VERSION"));

/// What a host is made with.
#[derive(Debug, Clone)]
pub struct HostOptions {
    /// Where the spools are.
    pub dir: PathBuf,
    /// What both sides prove themselves with.
    pub secret: Secret,
    /// How long to keep an agent in mid-turn while no daemon comes.
    pub orphan_busy: Duration,
    /// How long to keep an agent without a turn while no daemon comes.
    pub orphan_idle: Duration,
}

/// Why a seat cannot be had.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// There is one of this name.
    #[error("the worker `{0}` is here already")]
    Taken(WorkerId),
    /// Its spool cannot be made.
    #[error("failed to make the spool of `{0}`: {1}")]
    Spool(WorkerId, io::Error),
    /// The host ends.
    #[error("the worker is about to end")]
    Ending,
}

/// The sessions of one worker process. Cheap to clone; all clones are the same host.
#[derive(Debug, Clone)]
pub struct Host {
    shared: Arc<Shared>,
}

impl Host {
    /// A host without sessions.
    pub fn new(options: HostOptions) -> Self {
        let shared = Shared {
            options,
            seats: Mutex::default(),
            count: watch::Sender::new(0),
            keepers: tokio::sync::Mutex::default(),
            tasks: TaskTracker::new(),
            stopping: CancellationToken::new(),
        };
        Self { shared: Arc::new(shared) }
    }

    /// Starts an agent in a seat of its own. It stays until the agent is gone and the daemon knows all that it said.
    /// Has to be called within a runtime.
    pub fn open(&self, spec: Box<AgentSpec>) -> Result<Seat, OpenError> {
        self.open_with(spec, self.shared.options.secret.clone())
    }

    /// The same with a secret for this seat alone.
    pub fn open_with(&self, spec: Box<AgentSpec>, secret: Secret) -> Result<Seat, OpenError> {
        let shared = &self.shared;
        if shared.stopping.is_cancelled() {
            return Err(OpenError::Ending);
        }
        let mut seats = shared.seats();
        if seats.contains_key(&spec.worker) {
            return Err(OpenError::Taken(spec.worker.clone()));
        }
        let folder = FileSpool::folder(&shared.options.dir, &spec.worker);
        let spool =
            FileSpool::create(&folder).map_err(|error| OpenError::Spool(spec.worker.clone(), error))?;
        let options = SeatOptions {
            session: spec.session.clone(),
            worker: spec.worker.clone(),
            secret,
            after: spec.after,
            spool_max: SPOOL_MAX,
            software: SOFTWARE.to_owned(),
        };
        let seat = Seat::new(options, Box::new(spool));
        let ending = shared.stopping.child_token();
        let taken = Taken {
            session: spec.session.clone(),
            seat: seat.clone(),
            window: Arc::default(),
            ending: ending.clone(),
            over: CancellationToken::new(),
        };
        let window = Arc::clone(&taken.window);
        seats.insert(spec.worker.clone(), taken);
        drop(seats);
        shared.recount();
        let place = Place::new(Arc::clone(shared), seat.clone(), spec, folder, window, ending);
        shared.tasks.spawn(place.keep());
        Ok(seat)
    }

    /// Serves one connection until it ends: finds the seat that it is for, or makes one of what it is told to start.
    pub async fn serve<W: Wire>(&self, mut socket: Socket<W>) -> Result<(), SocketError> {
        let hello = greet(&mut socket).await?;
        let shared = &self.shared;
        let (seat, over, started) = match shared.find(&hello) {
            Some((seat, over)) => (seat, over, Err((socket, hello))),
            None => {
                let started = offer_empty(socket, hello, &shared.options.secret, SOFTWARE).await?;
                let seat = self.open(started.spec.clone()).map_err(|error| {
                    tracing::warn!(session = %started.spec.session, %error, "a session could not be started");
                    SocketError::Closed
                })?;
                let over = shared.over(&started.spec.worker).unwrap_or_default();
                (seat, over, Ok(started))
            }
        };
        let serve = async {
            match started {
                Ok(started) => seat.serve_started(started).await,
                Err((socket, hello)) => seat.serve(socket, hello).await,
            }
        };
        tokio::select! {
            served = serve => served,
            // Nothing is left to be said, and the daemon knows it.
            () = over.cancelled() => Ok(()),
        }
    }

    /// Serves one connection of a person who looks at a session's terminal, until it ends.
    pub async fn show<W: Wire>(&self, mut socket: Socket<W>) -> Result<(), SocketError> {
        let look = qd_link::terminal::asked(&mut socket, &self.shared.options.secret).await?;
        let Some(viewer) = self.shared.look(&look) else {
            let message = "the session's agent has no terminal";
            return Err(qd_link::terminal::refuse(&mut socket, "no_terminal", message).await);
        };
        qd_link::terminal::here(&mut socket).await?;
        window::show(socket, viewer).await
    }

    /// The seats that are taken: whose, and by which worker of theirs.
    pub fn taken(&self) -> Vec<(SessionId, WorkerId)> {
        self.shared.seats().iter().map(|(worker, taken)| (taken.session.clone(), worker.clone())).collect()
    }

    /// Ends an agent that nobody wants any more, with all that it started and said.
    pub fn close(&self, worker: &WorkerId) {
        if let Some(taken) = self.shared.seats().get(worker) {
            taken.ending.cancel();
        }
    }

    /// How many sessions there are, now and from now on.
    pub fn count(&self) -> watch::Receiver<usize> {
        self.shared.count.subscribe()
    }

    /// Ends every agent with all that it started, and returns when that is done. What the daemon does not know yet
    /// stays in the spools.
    pub async fn stop(&self) {
        self.shared.stopping.cancel();
        self.shared.tasks.close();
        self.shared.tasks.wait().await;
    }
}

/// What the places of a host have in common.
#[derive(Debug)]
struct Shared {
    options: HostOptions,
    seats: Mutex<HashMap<WorkerId, Taken>>,
    count: watch::Sender<usize>,
    /// The keepers, by pid. Locked also while one is started or lost, since children that belong to no keeper are then
    /// told from a keeper that is not in here yet.
    keepers: tokio::sync::Mutex<HashSet<u32>>,
    tasks: TaskTracker,
    stopping: CancellationToken,
}

/// A seat that is not free.
#[derive(Debug)]
struct Taken {
    session: SessionId,
    seat: Seat,
    /// Where people look at its terminal.
    window: Arc<Window>,
    /// Ends its agent; the host's own end does as well.
    ending: CancellationToken,
    /// Ends the connections that serve it.
    over: CancellationToken,
}

impl Shared {
    fn seats(&self) -> MutexGuard<'_, HashMap<WorkerId, Taken>> {
        self.seats.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The seat that a connection is for. One of the same session and another worker is given as well, so that it
    /// refuses, unless its agent is gone: then only its last words are in nobody's way.
    fn find(&self, hello: &v1::DaemonHello) -> Option<(Seat, CancellationToken)> {
        let seats = self.seats();
        let rival = |taken: &&Taken| {
            taken.session == hello.session && taken.seat.state().borrow().seat != v1::Seat::Gone
        };
        let found = seats.get(&hello.worker).or_else(|| seats.values().find(rival))?;
        Some((found.seat.clone(), found.over.clone()))
    }

    fn look(&self, look: &Look) -> Option<Viewer> {
        let window = {
            let seats = self.seats();
            let taken = seats.get(&look.worker).filter(|taken| taken.session == look.session)?;
            Arc::clone(&taken.window)
        };
        window.look()
    }

    fn over(&self, worker: &WorkerId) -> Option<CancellationToken> {
        self.seats().get(worker).map(|taken| taken.over.clone())
    }

    /// Frees a seat.
    fn leave(&self, worker: &WorkerId) {
        let taken = self.seats().remove(worker);
        if let Some(taken) = taken {
            taken.over.cancel();
        }
        self.recount();
    }

    fn recount(&self) {
        self.count.send_replace(self.seats().len());
    }
}
