//! The worker's side of one session: takes what its agent says, numbers and keeps it, and gives it to the daemon that is
//! attached, if one is. The rules are in `store` and `wishes`, without a task or a connection; here are the waking, the
//! ending, and the one lock that they share.

mod connection;
mod handshake;
mod settle;
mod store;
mod wishes;

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use qd_protocol::frame::v1;
use qd_protocol::link::{Down, TurnLimits, Up, UpNumber};
use qd_protocol::worker::Secret;
use qd_protocol::{RunId, SessionId, WorkerId};
use tokio::sync::{Notify, watch};
use tokio::task::{JoinError, JoinHandle};
use tokio::time::Instant;

use self::connection::converse;
use self::handshake::{Having, Refusal, prove, refuse};
pub use self::handshake::{Started, greet, offer_empty};
use self::settle::settle;
use self::store::Store;
pub use self::wishes::Wanted;
use self::wishes::Wishes;
use crate::down::Commands;
use crate::local::{FromAgent, Orders, SessionEnd};
use crate::socket::{Socket, SocketError, Wire};
use crate::spool::Spool;

/// What a seat is made with.
#[derive(Debug, Clone)]
pub struct SeatOptions {
    /// Whose seat.
    pub session: SessionId,
    /// The worker's id, as the session knows it.
    pub worker: WorkerId,
    /// What both sides prove themselves with; empty: nobody has to.
    pub secret: Secret,
    /// The last number that the session has heard; what is said here is numbered after it.
    pub after: UpNumber,
    /// Bytes that may wait in the spool before the agent has to.
    pub spool_max: u64,
    /// Our version, for people.
    pub software: String,
}

/// How long the turn under way has run, if one is.
pub type Clock = Box<dyn Fn() -> Option<Duration> + Send>;

/// How a seat is.
#[derive(Debug, Clone, PartialEq)]
pub struct SeatState {
    /// Whether a daemon is attached.
    pub attached: bool,
    /// Since when it is, or is not.
    pub since: Instant,
    /// What there is for it.
    pub seat: v1::Seat,
    /// The turn that the agent is in.
    pub run: Option<RunId>,
    /// What the daemon last said is left to a turn, after its prompt.
    pub limits: Option<(RunId, TurnLimits)>,
    /// Whether something was said that the daemon has not acknowledged.
    pub unacked: bool,
}

/// The worker's side of one session. Cheap to clone; with the last clone its agent ends.
#[derive(Clone)]
pub struct Seat {
    owner: Arc<Owner>,
}

impl Seat {
    /// A seat whose agent is about to come. Has to be called within a runtime.
    pub fn new(options: SeatOptions, spool: Box<dyn Spool>) -> Seat {
        let state = State {
            store: Store::new(options.after, spool, options.spool_max),
            commands: Commands::default(),
            wishes: Wishes::new(),
            agent: None,
            connection: None,
            seat: v1::Seat::Starting,
            since: Instant::now(),
            run: None,
            limits: None,
            clock: None,
            model: None,
        };
        let shared = Arc::new(Shared {
            options,
            shown: watch::Sender::new(state.show()),
            state: Mutex::new(state),
            room: Notify::new(),
            wished: Notify::new(),
            unsettled: Notify::new(),
        });
        let settler = tokio::spawn(settle(Arc::clone(&shared)));
        Seat { owner: Arc::new(Owner { shared, settler }) }
    }

    /// Gives the seat its agent, the first or one after a rest. What it says is numbered, kept and sent from here on,
    /// and when it is gone the seat says so. An agent that sat here before is ended.
    pub fn seat(&self, agent: SessionEnd) {
        let shared = Arc::clone(&self.owner.shared);
        let mut state = self.owner.shared.lock();
        let (orders, stop) = (agent.orders(), Arc::new(Notify::new()));
        let task = tokio::spawn(attend(shared, agent, Arc::clone(&stop)));
        state.seat = v1::Seat::Starting;
        state.agent = Some(Seated { orders, stop, task });
        state.wishes.seated();
        state.pass_on();
        self.owner.shared.show(&state);
    }

    /// Takes the agent out again: its task is ended and awaited, and nothing more of it is said.
    pub async fn unseat(&self) {
        let seated = self.owner.shared.lock().agent.take();
        if let Some(mut seated) = seated {
            seated.stop.notify_one();
            // It ends only by itself: nobody else holds it.
            let _ended: Result<(), JoinError> = (&mut seated.task).await;
        }
    }

    /// A word of the worker itself, such as [`Up::Rested`] or [`Up::Gone`]. It is never kept waiting, and the last one
    /// is the last.
    pub async fn say(&self, up: Up) {
        self.owner.shared.say(&[up]);
    }

    /// Serves one connection whose first frame was this hello, until it ends. A newer connection ends an older one.
    pub async fn serve<W: Wire>(
        &self,
        mut socket: Socket<W>,
        hello: v1::DaemonHello,
    ) -> Result<(), SocketError> {
        let shared = &self.owner.shared;
        let SeatOptions { session, worker, secret, software, .. } = &shared.options;
        if hello.session != *session || hello.worker != *worker {
            return Err(refuse(&mut socket, Refusal::wrong_worker(&hello)).await);
        }
        let Some(having) = shared.having(hello.taken) else {
            return Err(refuse(&mut socket, Refusal::bad_number(hello.taken)).await);
        };
        prove(&mut socket, &hello, secret, software, having).await?;
        converse(shared, socket, hello.taken).await
    }

    /// Serves the connection on which this seat's agent was started, until it ends.
    pub async fn serve_started<W: Wire>(&self, started: Started<W>) -> Result<(), SocketError> {
        converse(&self.owner.shared, started.socket, started.taken).await
    }

    /// What the daemon wants next, each once and in order. Nothing is lost if the wait is given up.
    pub async fn wanted(&self) -> Wanted {
        let shared = &self.owner.shared;
        loop {
            if let Some(wanted) = shared.lock().wishes.take() {
                return wanted;
            }
            shared.wished.notified().await;
        }
    }

    /// How the seat is, now and from now on.
    pub fn state(&self) -> watch::Receiver<SeatState> {
        self.owner.shared.shown.subscribe()
    }

    /// Says with which model the agent was started.
    pub fn set_model(&self, model: Option<String>) {
        self.owner.shared.lock().model = model;
    }

    /// Says how the time of turns is told. Without it a daemon that comes back counts by its own clock.
    pub fn set_clock(&self, clock: Clock) {
        self.owner.shared.lock().clock = Some(clock);
    }
}

impl fmt::Debug for Seat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let SeatOptions { session, worker, .. } = &self.owner.shared.options;
        f.debug_struct("Seat").field("session", session).field("worker", worker).finish_non_exhaustive()
    }
}

/// What all clones of a seat share, and its tasks do not: when it goes, they end.
struct Owner {
    shared: Arc<Shared>,
    settler: JoinHandle<()>,
}

impl Drop for Owner {
    fn drop(&mut self) {
        self.settler.abort();
        // The agent's task ends with what is dropped here.
        self.shared.lock().agent = None;
    }
}

/// What a seat and its tasks share.
struct Shared {
    options: SeatOptions,
    state: Mutex<State>,
    /// The state, as far as others may see it.
    shown: watch::Sender<SeatState>,
    /// Wakes the agent's task: there is room again.
    room: Notify,
    /// Wakes who waits for wishes.
    wished: Notify,
    /// Wakes the one who syncs.
    unsettled: Notify,
}

struct State {
    store: Store,
    /// Which commands have been here, whatever agent they were for, and those that wait for an agent.
    commands: Commands,
    wishes: Wishes,
    agent: Option<Seated>,
    /// The daemon that is attached, by what wakes its connection.
    connection: Option<Arc<Notify>>,
    seat: v1::Seat,
    since: Instant,
    run: Option<RunId>,
    limits: Option<(RunId, TurnLimits)>,
    clock: Option<Clock>,
    model: Option<String>,
}

/// An agent in its seat.
struct Seated {
    orders: Orders,
    stop: Arc<Notify>,
    task: JoinHandle<()>,
}

impl Drop for Seated {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Shared {
    /// Nothing that runs under the lock can leave the state half changed, so a panic elsewhere does not spoil it.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Tells those who watch what they can see, if it has changed.
    fn show(&self, state: &State) {
        let now = state.show();
        self.shown.send_if_modified(|shown| {
            let changed = *shown != now;
            *shown = now;
            changed
        });
    }

    /// Numbers, keeps and sends what was said. Written as JSON once, for the spool and the daemon both.
    fn say(&self, ups: &[Up]) {
        let (mut json, mut ends) = (Vec::new(), vec![0]);
        for up in ups {
            serde_json::to_writer(&mut json, up)
                .expect("what is said has no map with keys that are not text");
            ends.push(json.len());
        }
        let json = Bytes::from(json);
        let mut state = self.lock();
        for (up, ends) in ups.iter().zip(ends.windows(2)) {
            if state.seat == v1::Seat::Gone {
                tracing::debug!(?up, "said after the last word, and so not said");
                break;
            }
            state.note(up);
            state.store.push(json.slice(ends[0]..ends[1]));
        }
        state.store.write_through();
        self.changed(&state);
    }

    /// Wakes whoever may have something to do now that the state has changed.
    fn changed(&self, state: &State) {
        if let Some(connection) = &state.connection {
            connection.notify_one();
        }
        if state.connection.is_none() || state.store.is_failing() {
            self.unsettled.notify_one();
        }
        if !state.store.is_full() {
            self.room.notify_one();
        }
        self.show(state);
    }

    /// A command for the agent. One that finds none waits for the next.
    fn command(&self, down: Down) {
        let mut state = self.lock();
        state.commands.put(down);
        state.pass_on();
        self.show(&state);
    }

    fn limit(&self, run: RunId, limits: TurnLimits) {
        let mut state = self.lock();
        state.limits = Some((run, limits));
        self.show(&state);
    }

    fn want(&self, wanted: Wanted) {
        if self.lock().wishes.put(wanted) {
            self.wished.notify_one();
        }
    }

    /// What a daemon that has taken so much is told in our hello; `None` if it cannot go on from there.
    fn having(&self, taken: UpNumber) -> Option<Having> {
        let state = self.lock();
        state.store.reaches(taken).then(|| Having {
            seat: state.seat(),
            last: state.store.last(),
            applied: state.commands.floor(),
            run_time: state.clock.as_ref().and_then(|clock| clock()),
            model: state.model.clone(),
        })
    }
}

impl State {
    /// What there is for the daemon. An agent that is on its way counts, so that it is not wanted twice.
    fn seat(&self) -> v1::Seat {
        match self.seat {
            v1::Seat::Resting if self.wishes.awaits_agent() => v1::Seat::Starting,
            seat => seat,
        }
    }

    fn show(&self) -> SeatState {
        SeatState {
            attached: self.connection.is_some(),
            since: self.since,
            seat: self.seat(),
            run: self.run.clone(),
            limits: self.limits.clone(),
            unacked: self.store.is_unacked(),
        }
    }

    /// Gives the agent the commands that wait, if there is an agent.
    fn pass_on(&mut self) {
        let Some(agent) = &self.agent else { return };
        while let Some(down) = self.commands.take() {
            if let Down::Prompt { run, .. } = &down {
                self.run = Some(run.clone());
            }
            agent.orders.send(down);
        }
    }

    /// What this word says of the seat itself.
    fn note(&mut self, up: &Up) {
        match up {
            Up::Ready { steers, .. } => self.seat = v1::Seat::Ready { steers: *steers },
            Up::Terminal { run, .. } if self.run.as_ref() == Some(run) => self.run = None,
            Up::Rested => {
                self.seat = v1::Seat::Resting;
                self.run = None;
                self.wishes.rested();
            }
            Up::Gone(_) => {
                self.seat = v1::Seat::Gone;
                self.run = None;
            }
            _ => {}
        }
    }
}

/// Takes what an agent says for as long as there is room, and tells that it is gone.
async fn attend(shared: Arc<Shared>, mut agent: SessionEnd, stop: Arc<Notify>) {
    loop {
        let hear = async {
            while shared.lock().store.is_full() {
                shared.room.notified().await;
            }
            agent.hear().await
        };
        let heard = tokio::select! {
            biased;
            () = stop.notified() => None,
            heard = hear => Some(heard),
        };
        match heard {
            Some(FromAgent::Said(said)) => {
                shared.say(&said.into_iter().map(|thing| thing.up).collect::<Vec<_>>())
            }
            Some(FromAgent::Gone(gone)) => return shared.say(&[Up::Gone(gone)]),
            None => return agent.stop().await,
        }
        // An agent that is always ahead would otherwise keep the connection from its share.
        tokio::task::coop::consume_budget().await;
    }
}
