//! One session's place in a host: it owns the keeper and the agent, does what the daemon wants of them, and sees to
//! their end. What the agent says goes past it, from the agent's task through the seat.

use std::path::{Path, PathBuf};
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use qd_keeper::{Keeper, end_orphans};
use qd_link::{FileSpool, Numbered, Seat, SeatState, Wanted, host_with};
use qd_protocol::RunId;
use qd_protocol::event::RunError;
use qd_protocol::frame::v1;
use qd_protocol::link::{Gone, Up};
use qd_protocol::worker::AgentSpec;
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::Shared;
use crate::agent::{Around, Leash, live};
use crate::below::{Below, KeeperGone};
use crate::kinds::{Kind, own_program};
use crate::redact::{Redactor, Secrets};
use crate::window::Window;

/// How long an agent has to end by itself when it is put to rest.
const REST: Duration = Duration::from_secs(2);
/// How long all that an agent started has to end by itself when the session is over.
const CLOSE: Duration = Duration::from_secs(1);
/// How long an attached daemon has to acknowledge the last words of a worker that ends.
const FAREWELL: Duration = Duration::from_secs(2);
/// How often the spool is looked at for the last word.
const LOOK: Duration = Duration::from_millis(5);

/// One session's place.
#[derive(Debug)]
pub(super) struct Place {
    host: Arc<Shared>,
    seat: Seat,
    spec: Box<AgentSpec>,
    spool: PathBuf,
    below: Option<Arc<Below>>,
    leash: Arc<Leash>,
    window: Arc<Window>,
    /// Nobody wants it any more, or the host ends.
    ending: CancellationToken,
}

/// Why a place is given up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Leaving {
    /// The agent is gone, and the seat has said so.
    Gone,
    /// The agent is to be ended: the daemon closes the session, or the host ends.
    Ended,
    /// The same, because no daemon came for too long: nobody waits for one any longer.
    Abandoned,
    /// The keeper is lost, and with it the knowledge of what the agent started.
    KeeperGone,
}

impl From<KeeperGone> for Leaving {
    fn from(KeeperGone: KeeperGone) -> Self {
        Self::KeeperGone
    }
}

impl Place {
    pub(super) fn new(
        host: Arc<Shared>,
        seat: Seat,
        spec: Box<AgentSpec>,
        spool: PathBuf,
        window: Arc<Window>,
        ending: CancellationToken,
    ) -> Self {
        Self { host, seat, spec, spool, below: None, leash: Arc::default(), window, ending }
    }

    /// Holds the place until the daemon knows all of it, or nobody comes for it.
    pub(super) async fn keep(self) {
        let (host, seat, spool) = (Arc::clone(&self.host), self.seat.clone(), self.spool.clone());
        let (worker, ending) = (self.spec.worker.clone(), self.ending.clone());
        // In a task of its own: a panic in one place is the end of that one alone, and its keeper ends all below it.
        let leaving = match tokio::spawn(self.live()).await {
            Ok(leaving) => leaving,
            Err(_) => {
                seat.unseat().await;
                let message = "the worker failed; please report this with its log";
                seat.say(Up::Gone(Gone::Failed(RunError::new("worker_panicked", message)))).await;
                Leaving::Gone
            }
        };
        let known = match leaving {
            Leaving::Abandoned => false,
            Leaving::Gone | Leaving::Ended | Leaving::KeeperGone => {
                acknowledged(&host, seat.state(), &ending).await
            }
        };
        let unwanted = ending.is_cancelled() && !host.stopping.is_cancelled();
        if !known && !unwanted {
            kept(&spool).await;
        }
        host.leave(&worker);
        drop(seat);
        if (known || unwanted)
            && let Err(error) = FileSpool::remove(&spool)
        {
            tracing::warn!(%worker, %error, "a spool could not be removed");
        }
    }

    /// From the agent's start to the end of it and all that it started.
    async fn live(mut self) -> Leaving {
        let leaving = match Box::pin(self.begin()).await {
            Ok(()) => self.serve().await,
            Err(error) => {
                self.seat.say(Up::Gone(Gone::Failed(error))).await;
                Leaving::Gone
            }
        };
        Box::pin(self.end(leaving)).await;
        leaving
    }

    async fn begin(&mut self) -> Result<(), RunError> {
        let kind = Kind::of(&self.spec)?;
        if let Some(helpers) = kind.helpers(&self.spec) {
            let mut keepers = self.host.keepers.lock().await;
            let keeper = Keeper::start(&own_program(), &self.spec.mark).await.map_err(|cause| {
                RunError::new("keeper_failed", format!("the keeper could not be started: {cause}"))
            })?;
            keepers.insert(keeper.pid());
            self.below = Some(Arc::new(Below::new(keeper, helpers, Arc::clone(&self.window))));
        }
        self.start(kind);
        Ok(())
    }

    /// Gives the seat an agent.
    fn start(&mut self, kind: Kind) {
        self.leash = Arc::default();
        let around = Around {
            below: self.below.clone(),
            seat: Some(self.seat.state()),
            leash: Arc::clone(&self.leash),
        };
        let leash = Arc::clone(&self.leash);
        self.seat.set_model(self.spec.model.clone());
        self.seat.set_clock(Box::new(move || leash.run_time()));
        let filter = Redactor::filter(Secrets::of(&self.spec.env));
        let spec = self.spec.clone();
        self.seat.seat(host_with(spec.after, Some(filter), |end| live(kind, spec, around, end)));
    }

    /// Does what the daemon wants for as long as there is anything to do it with.
    async fn serve(&mut self) -> Leaving {
        let mut state = self.seat.state();
        let host = Arc::clone(&self.host);
        let mut abandoned = pin!(abandoned(&host, state.clone()));
        loop {
            if state.borrow_and_update().seat == v1::Seat::Gone {
                return Leaving::Gone;
            }
            let done = tokio::select! {
                wanted = self.seat.wanted() => Box::pin(self.obey(wanted)).await,
                () = self.ending.cancelled() => Err(Leaving::Ended),
                () = keeper_lost(self.below.as_ref()) => Err(Leaving::KeeperGone),
                () = self.leash.keeper_gone() => Err(Leaving::KeeperGone),
                () = &mut abandoned => Err(Leaving::Abandoned),
                changed = state.changed() => changed.map_err(|_| Leaving::Ended),
            };
            if let Err(leaving) = done {
                return leaving;
            }
        }
    }

    async fn obey(&mut self, wanted: Wanted) -> Result<(), Leaving> {
        let (seat, in_turn) = {
            let state = self.seat.state();
            let now = state.borrow();
            (now.seat, now.run.is_some())
        };
        match (wanted, seat) {
            (Wanted::Close, _) => Err(Leaving::Ended),
            (Wanted::Start(spec), v1::Seat::Resting) => {
                // It stays where it is: a session's directory never changes, and on another machine it has another name.
                // So has its program, and what is started on a machine is for that machine to say.
                let manifest = self.spec.manifest.take().or_else(|| spec.manifest.clone());
                *self.spec = AgentSpec { cwd: self.spec.cwd.clone(), manifest, ..*spec };
                match Kind::of(&self.spec) {
                    Ok(kind) => self.start(kind),
                    Err(error) => {
                        tracing::warn!(agent = %self.spec.agent, error = error.message, "it cannot be started")
                    }
                }
                Ok(())
            }
            (Wanted::Rest, v1::Seat::Starting | v1::Seat::Ready { .. }) if !in_turn => self.rest().await,
            // It was said again after a break, and has been done.
            (Wanted::Start(_) | Wanted::Rest, _) => Ok(()),
        }
    }

    /// Stops the agent. What its turns left on purpose stays, and the place with it; without any of that it is given up.
    async fn rest(&mut self) -> Result<(), Leaving> {
        self.leash.rest(REST).await;
        self.seat.unseat().await;
        let keeps_some = match &self.below {
            Some(below) => below.sweep_agent(REST).await?,
            None => false,
        };
        if !keeps_some {
            return Err(Leaving::Ended);
        }
        self.seat.say(Up::Rested).await;
        Ok(())
    }

    /// Ends whatever there is and says so, unless it has been said.
    async fn end(mut self, leaving: Leaving) {
        self.seat.unseat().await;
        let swept = match self.below.take() {
            Some(below) => self.end_below(below, leaving).await,
            None => Ok(()),
        };
        if leaving == Leaving::Gone {
            return;
        }
        let gone = match swept {
            Ok(()) => Gone::Stopped,
            Err(gone) => Gone::Failed(gone.into()),
        };
        self.seat.say(Up::Gone(gone)).await;
    }

    /// Ends all that the agent started, through the keeper and with it, or in its place.
    async fn end_below(&self, below: Arc<Below>, leaving: Leaving) -> Result<(), KeeperGone> {
        let keeper = below.keeper();
        let swept = match leaving {
            Leaving::Gone | Leaving::Ended | Leaving::Abandoned => below.sweep_all(CLOSE).await,
            Leaving::KeeperGone => Err(KeeperGone),
        };
        let mut keepers = self.host.keepers.lock().await;
        if swept.is_err() {
            // Only then have its children fallen to us.
            keeper.lost().await;
            let others: Vec<u32> = keepers.iter().copied().filter(|other| *other != keeper.pid()).collect();
            end_orphans(&others, CLOSE).await;
        }
        keepers.remove(&keeper.pid());
        swept
    }
}

/// Waits until the daemon has acknowledged everything; false if it should not be waited for any longer.
async fn acknowledged(
    host: &Shared,
    mut state: watch::Receiver<SeatState>,
    ending: &CancellationToken,
) -> bool {
    let in_vain = state.clone();
    tokio::select! {
        biased;
        known = state.wait_for(|state| !state.unacked) => known.is_ok(),
        () = abandoned(host, in_vain.clone()) => false,
        () = farewell(ending, in_vain) => false,
    }
}

/// Waits until the last word is in the spool, where whoever comes later finds it. It is there at once, unless the spool
/// was just being synced; one that takes nothing, on a full disk, is not waited for.
async fn kept(spool: &Path) {
    let last_word = || {
        let last = FileSpool::last(spool).ok().flatten();
        matches!(last, Some(Numbered { up: Up::Gone(_), .. }))
    };
    let looks = async {
        while !last_word() {
            tokio::time::sleep(LOOK).await;
        }
    };
    if tokio::time::timeout(FAREWELL, looks).await.is_err() {
        tracing::warn!(path = %spool.display(), "the last words of an agent could not be kept");
    }
}

/// Waits until no daemon has been attached for too long. An agent that comes out of its turn meanwhile is idle only from
/// then on.
async fn abandoned(host: &Shared, mut state: watch::Receiver<SeatState>) {
    let mut turn: Option<RunId> = None;
    let mut turned = Instant::now();
    loop {
        let SeatState { attached, since, run, .. } = state.borrow_and_update().clone();
        if run != turn {
            turned = Instant::now();
        }
        let patience = if run.is_some() { host.options.orphan_busy } else { host.options.orphan_idle };
        turn = run;
        tokio::select! {
            () = tokio::time::sleep_until(since.max(turned) + patience), if !attached => return,
            changed = state.changed() => if changed.is_err() { return },
        }
    }
}

/// Waits until the place is to end, and then a little for a daemon that is attached.
async fn farewell(ending: &CancellationToken, mut state: watch::Receiver<SeatState>) {
    ending.cancelled().await;
    let _detached = tokio::time::timeout(FAREWELL, state.wait_for(|state| !state.attached)).await;
}

async fn keeper_lost(below: Option<&Arc<Below>>) {
    match below {
        Some(below) => below.keeper().lost().await,
        None => std::future::pending().await,
    }
}
