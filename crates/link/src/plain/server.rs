//! One connection of a worker, without a subprotocol: its frames become what happens to runs, and what runs say
//! becomes frames. Reading never waits for writing, so a cancel is heard from a peer that does not read.

use std::sync::Arc;

use qd_protocol::AskId;
use qd_protocol::frame::plain::{FromParent, FromWorker, Status};
use qd_protocol::link::{Outcome, Stop};
use tokio_util::sync::CancellationToken;

use super::outbox::{Mouth, Outbox};
use crate::executor::running::{GRACE, Running};
use crate::executor::{self, Executor, Job, Steer, Turn};
use crate::socket::{Incoming, Moved, STEP, Socket, SocketError, Wire};

/// Runs that were overtaken while the one before them ended; beyond that the peer is no longer read.
const OVERTAKEN_MAX: usize = 64;

/// Serves one connection until the peer ends it or `stop` says so. Its run ends with it, and has ended when this
/// returns.
pub(crate) async fn serve<E: Executor, W: Wire>(
    mut socket: Socket<W>,
    executor: Arc<E>,
    stop: &CancellationToken,
) {
    let mut desk = Desk::new(executor);
    let outbox = Arc::clone(&desk.outbox);
    let ended = tokio::select! {
        ended = converse(&mut socket, &mut desk, &outbox) => ended,
        () = stop.cancelled() => Ok(()),
    };
    desk.dismiss().await;
    if ended.is_ok() {
        // A peer that does not read has had its chance.
        let _heard = tokio::time::timeout(STEP, last_words(&mut socket, &outbox)).await;
    }
}

/// Goes on until the connection breaks.
async fn converse<E: Executor, W: Wire>(
    socket: &mut Socket<W>,
    desk: &mut Desk<E>,
    outbox: &Outbox,
) -> Result<(), SocketError> {
    let mut writing = false;
    loop {
        let reading = !outbox.is_crowded() && desk.overtaken < OVERTAKEN_MAX;
        tokio::select! {
            // What the peer wants goes before what it gets.
            biased;
            moved = socket.moves(reading, writing) => match moved? {
                Moved::Read(Incoming::Text(text)) => desk.take(text.as_str()),
                Moved::Read(Incoming::Binary(_) | Incoming::Alive) => {}
                Moved::Written => writing = false,
            },
            outcome = desk.ended() => desk.finish(outcome),
            batch = outbox.take(), if !writing => {
                for frame in batch.frames() {
                    socket.start_bytes(frame)?;
                }
                writing = true;
            }
        }
    }
}

async fn last_words<W: Wire>(socket: &mut Socket<W>, outbox: &Outbox) -> Result<(), SocketError> {
    for frame in outbox.take_now().frames() {
        socket.start_bytes(frame)?;
    }
    socket.flush().await?;
    socket.close().await;
    Ok(())
}

/// The runs of one connection: the one that is active, and the one that replaces it when it has ended.
#[derive(Debug)]
struct Desk<E> {
    executor: Arc<E>,
    outbox: Arc<Outbox>,
    active: Option<Running>,
    /// Made at once, so that what comes for it has somewhere to go.
    next: Option<(Job, Turn)>,
    /// Runs that were the next one and are owed no more than their terminals.
    overtaken: usize,
    /// The last number that a run was given.
    runs: u64,
}

impl<E: Executor> Desk<E> {
    fn new(executor: Arc<E>) -> Self {
        Self { executor, outbox: Arc::default(), active: None, next: None, overtaken: 0, runs: 0 }
    }

    /// Does what a frame says; one that cannot be read says nothing.
    fn take(&mut self, frame: &str) {
        match serde_json::from_str(frame) {
            Ok(FromParent::Run { assignment, reasoning_effort, messages }) => {
                self.run(Job { assignment, reasoning_effort, messages, ..Job::default() });
            }
            Ok(FromParent::Cancel) => self.cancel(),
            Ok(FromParent::Message { text }) => self.message(text),
            Ok(FromParent::ApprovalReply { id, approved }) => {
                if let (Ok(ask), Some(active)) = (AskId::parse(&id), &self.active) {
                    active.turn().inbox().answer(&ask, Some(approved));
                }
            }
            Err(_) => {}
        }
    }

    fn run(&mut self, job: Job) {
        if let Some(active) = &mut self.active {
            active.cancel();
        }
        self.runs += 1;
        let turn = Turn::new(executor::Mouth::Plain(Mouth::new(&self.outbox, self.runs)));
        if self.next.replace((job, turn)).is_some() {
            self.overtaken += 1;
        }
        self.start_next();
    }

    fn cancel(&mut self) {
        if let Some(active) = &mut self.active {
            active.cancel();
        }
        if let Some((_, turn)) = &self.next {
            turn.cancel();
        }
    }

    /// It is for the newest run, started or not.
    fn message(&self, text: String) {
        let next = self.next.as_ref().map(|(_, turn)| turn);
        let Some(turn) = next.or(self.active.as_ref().map(Running::turn)) else { return };
        if !turn.inbox().put_steer(Steer { text, number: None }) {
            tracing::warn!("a run takes no messages and too many wait: one is dropped");
        }
    }

    async fn ended(&mut self) -> Outcome {
        match &mut self.active {
            Some(active) => active.ended().await,
            None => std::future::pending().await,
        }
    }

    fn finish(&mut self, outcome: Outcome) {
        self.active = None;
        self.tell(outcome);
        for _ in 0..std::mem::take(&mut self.overtaken) {
            self.tell(Outcome::cancelled());
        }
        self.start_next();
    }

    /// Starts the run that waits, if it may.
    fn start_next(&mut self) {
        if self.active.is_some() {
            return;
        }
        let Some((job, turn)) = self.next.take() else { return };
        if turn.is_cancelled() {
            self.tell(Outcome::cancelled());
        } else {
            self.outbox.open(self.runs);
            self.active = Some(Running::start(&self.executor, job, turn, GRACE));
        }
    }

    fn tell(&self, outcome: Outcome) {
        self.outbox.finish(outcome.stop == Stop::EndTurn, &terminal(outcome));
    }

    /// Ends everything, politely first.
    async fn dismiss(&mut self) {
        self.cancel();
        while self.active.is_some() {
            let outcome = self.ended().await;
            self.finish(outcome);
        }
    }
}

/// Four ends are known here; the rest are errors that say which they are.
fn terminal(outcome: Outcome) -> FromWorker {
    let status = match outcome.stop {
        Stop::EndTurn => Status::Completed,
        Stop::Cancelled => Status::Cancelled,
        Stop::Suspended => Status::Suspended,
        Stop::Error
        | Stop::MaxTokens
        | Stop::MaxTurns
        | Stop::Refused
        | Stop::Timeout
        | Stop::BudgetExceeded => Status::Error,
    };
    let error = outcome.error.map(|error| error.message);
    let error = error.or_else(|| (status == Status::Error).then(|| why(outcome.stop).to_owned()));
    FromWorker::Terminal { status, result: outcome.text, error, transcript: outcome.transcript }
}

fn why(stop: Stop) -> &'static str {
    match stop {
        Stop::MaxTokens => "the model's limit on its answer was reached",
        Stop::MaxTurns => "the agent's limit on its turns was reached",
        Stop::Refused => "the model refused",
        Stop::Timeout => "its time was over",
        Stop::BudgetExceeded => "its budget was spent",
        Stop::EndTurn | Stop::Cancelled | Stop::Suspended | Stop::Error => "it failed without a word",
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::Duration;

    use tokio::io::DuplexStream;
    use tokio_tungstenite::tungstenite::protocol::Role;

    use super::*;

    /// The wire itself holds next to nothing, so whatever is kept is kept by us.
    const WIRE_BYTES: usize = 1 << 10;
    /// The clock is stopped and jumps over this only when nobody has anything to do.
    const REST: Duration = Duration::from_secs(1);

    async fn peer_of(executor: impl Executor) -> Socket<DuplexStream> {
        let (ours, theirs) = tokio::io::duplex(WIRE_BYTES);
        let ours = Socket::upgraded(ours, Role::Server).await;
        tokio::spawn(async move { serve(ours, Arc::new(executor), &CancellationToken::new()).await });
        Socket::upgraded(theirs, Role::Client).await
    }

    fn run() -> FromParent {
        FromParent::Run { assignment: String::new(), reasoning_effort: None, messages: Vec::new() }
    }

    #[tokio::test(start_paused = true)]
    async fn a_peer_that_reads_nothing_slows_its_run_down_instead_of_filling_memory() {
        static SAID: AtomicUsize = AtomicUsize::new(0);
        let mut peer = peer_of(async |_: Job, turn: Turn| {
            while turn.say("x".repeat(1000)).await.is_ok() {
                SAID.fetch_add(1, Ordering::SeqCst);
            }
            Outcome::cancelled()
        })
        .await;
        peer.send(&run()).await.unwrap();
        tokio::time::sleep(REST).await;
        let said = SAID.load(Ordering::SeqCst);
        assert!((100..1000).contains(&said), "{said} kB wait for a peer that does not read");
        tokio::time::sleep(REST).await;
        assert_eq!(said, SAID.load(Ordering::SeqCst));
    }

    #[tokio::test(start_paused = true)]
    async fn a_peer_that_starts_run_after_run_and_reads_nothing_is_no_longer_read() {
        let mut peer = peer_of(async |_: Job, _: Turn| Outcome::completed("x".repeat(1000))).await;
        let mut sent = 0;
        while tokio::time::timeout(REST, peer.send(&run())).await.is_ok() {
            sent += 1;
            assert!(sent < 10_000, "it is read without end");
        }
        // Whoever begins to read is served again.
        while !matches!(peer.next().await, Ok(Incoming::Text(_))) {}
    }
}
