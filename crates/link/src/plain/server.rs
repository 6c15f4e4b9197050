//! One connection of a worker, without a subprotocol: its frames become what happens to runs, and what runs say
//! becomes frames. Reading never waits for writing, so a cancel is heard from a peer that does not read.

use std::sync::Arc;

use qd_protocol::AskId;
use qd_protocol::frame::plain::{PlainParentFrame, PlainRunStatus, PlainWorkerFrame};
use qd_protocol::link::{TurnOutcome, TurnStopReason};
use tokio_util::sync::CancellationToken;

use super::outbox::{PlainOutbox, PlainRunOutput};
use crate::executor::executor_task::{CANCEL_GRACE, ExecutorTask};
use crate::executor::{self, Executor, RunAssignment, RunHandle, RunSteer};
use crate::socket::{ByteStream, IncomingFrame, STEP_TIMEOUT, Socket, SocketError, SocketProgress};

/// Runs that were overtaken while the one before them ended; beyond that the peer is no longer read.
const SUPERSEDED_MAX: usize = 64;

/// Serves one connection until the peer ends it or `stop` says so. Its run ends with it, and has ended when this
/// returns.
pub(crate) async fn serve_connection<E: Executor, W: ByteStream>(
    mut socket: Socket<W>,
    executor: Arc<E>,
    stop: &CancellationToken,
) {
    let mut desk = PlainConnectionRuns::new(executor);
    let outbox = Arc::clone(&desk.outbox);
    let ended = tokio::select! {
        ended = exchange_frames(&mut socket, &mut desk, &outbox) => ended,
        () = stop.cancelled() => Ok(()),
    };
    desk.cancel_and_wait().await;
    if ended.is_ok() {
        // A peer that does not read has had its chance.
        let _heard = tokio::time::timeout(STEP_TIMEOUT, flush_and_close(&mut socket, &outbox)).await;
    }
}

/// Goes on until the connection breaks.
async fn exchange_frames<E: Executor, W: ByteStream>(
    socket: &mut Socket<W>,
    desk: &mut PlainConnectionRuns<E>,
    outbox: &PlainOutbox,
) -> Result<(), SocketError> {
    let mut writing = false;
    loop {
        let reading = !outbox.has_terminal_backlog() && desk.superseded < SUPERSEDED_MAX;
        tokio::select! {
            // What the peer wants goes before what it gets.
            biased;
            moved = socket.progress(reading, writing) => match moved? {
                SocketProgress::Read(IncomingFrame::Text(text)) => desk.receive_frame(text.as_str()),
                SocketProgress::Read(IncomingFrame::Binary(_) | IncomingFrame::Alive) => {}
                SocketProgress::Written => writing = false,
            },
            outcome = desk.wait_for_outcome() => desk.finish_active(outcome),
            batch = outbox.take(), if !writing => {
                for frame in batch.frames() {
                    socket.queue_text_bytes(frame)?;
                }
                writing = true;
            }
        }
    }
}

async fn flush_and_close<W: ByteStream>(
    socket: &mut Socket<W>,
    outbox: &PlainOutbox,
) -> Result<(), SocketError> {
    for frame in outbox.take_now().frames() {
        socket.queue_text_bytes(frame)?;
    }
    socket.flush().await?;
    socket.close().await;
    Ok(())
}

/// The runs of one connection: the one that is active, and the one that replaces it when it has ended.
#[derive(Debug)]
struct PlainConnectionRuns<E> {
    executor: Arc<E>,
    outbox: Arc<PlainOutbox>,
    active: Option<ExecutorTask>,
    /// Made at once, so that what comes for it has somewhere to go.
    next: Option<(RunAssignment, RunHandle)>,
    /// Runs that were the next one and are owed no more than their terminals.
    superseded: usize,
    /// The last number that a run was given.
    last_run: u64,
}

impl<E: Executor> PlainConnectionRuns<E> {
    fn new(executor: Arc<E>) -> Self {
        Self { executor, outbox: Arc::default(), active: None, next: None, superseded: 0, last_run: 0 }
    }

    /// Does what a frame says; one that cannot be read says nothing.
    fn receive_frame(&mut self, frame: &str) {
        match serde_json::from_str(frame) {
            Ok(PlainParentFrame::Run { assignment, reasoning_effort, messages }) => {
                self.queue_run(RunAssignment {
                    prompt: assignment,
                    reasoning_effort,
                    messages,
                    ..RunAssignment::default()
                });
            }
            Ok(PlainParentFrame::Cancel) => self.cancel_runs(),
            Ok(PlainParentFrame::Message { text }) => self.deliver_message(text),
            Ok(PlainParentFrame::ApprovalReply { id, approved }) => {
                if let (Ok(ask), Some(active)) = (AskId::parse(&id), &self.active) {
                    active.turn().inbox().resolve_ask(&ask, Some(approved));
                }
            }
            Err(_) => {}
        }
    }

    fn queue_run(&mut self, job: RunAssignment) {
        if let Some(active) = &mut self.active {
            active.cancel();
        }
        self.last_run += 1;
        let turn =
            RunHandle::new(executor::RunOutput::Plain(PlainRunOutput::new(&self.outbox, self.last_run)));
        if self.next.replace((job, turn)).is_some() {
            self.superseded += 1;
        }
        self.start_next();
    }

    fn cancel_runs(&mut self) {
        if let Some(active) = &mut self.active {
            active.cancel();
        }
        if let Some((_, turn)) = &self.next {
            turn.cancel();
        }
    }

    /// It is for the newest run, started or not.
    fn deliver_message(&self, text: String) {
        let next = self.next.as_ref().map(|(_, turn)| turn);
        let Some(turn) = next.or(self.active.as_ref().map(ExecutorTask::turn)) else { return };
        if !turn.inbox().push_steer(RunSteer { text, number: None }) {
            tracing::warn!("a run takes no messages and too many wait: one is dropped");
        }
    }

    async fn wait_for_outcome(&mut self) -> TurnOutcome {
        match &mut self.active {
            Some(active) => active.wait_for_outcome().await,
            None => std::future::pending().await,
        }
    }

    fn finish_active(&mut self, outcome: TurnOutcome) {
        self.active = None;
        self.send_terminal(outcome);
        for _ in 0..std::mem::take(&mut self.superseded) {
            self.send_terminal(TurnOutcome::cancelled());
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
            self.send_terminal(TurnOutcome::cancelled());
        } else {
            self.outbox.open_run(self.last_run);
            self.active = Some(ExecutorTask::start(&self.executor, job, turn, CANCEL_GRACE));
        }
    }

    fn send_terminal(&self, outcome: TurnOutcome) {
        self.outbox.finish_run(outcome.stop == TurnStopReason::EndTurn, &terminal_frame(outcome));
    }

    /// Ends everything, politely first.
    async fn cancel_and_wait(&mut self) {
        self.cancel_runs();
        while self.active.is_some() {
            let outcome = self.wait_for_outcome().await;
            self.finish_active(outcome);
        }
    }
}

/// Four ends are known here; the rest are errors that say which they are.
fn terminal_frame(outcome: TurnOutcome) -> PlainWorkerFrame {
    let status = match outcome.stop {
        TurnStopReason::EndTurn => PlainRunStatus::Completed,
        TurnStopReason::Cancelled => PlainRunStatus::Cancelled,
        TurnStopReason::Suspended => PlainRunStatus::Suspended,
        TurnStopReason::Error
        | TurnStopReason::MaxTokens
        | TurnStopReason::MaxTurns
        | TurnStopReason::Refused
        | TurnStopReason::Timeout
        | TurnStopReason::BudgetExceeded => PlainRunStatus::Error,
    };
    let error = outcome.error.map(|error| error.message);
    let error = error
        .or_else(|| (status == PlainRunStatus::Error).then(|| stop_description(outcome.stop).to_owned()));
    PlainWorkerFrame::Terminal { status, result: outcome.text, error, transcript: outcome.transcript }
}

fn stop_description(stop: TurnStopReason) -> &'static str {
    match stop {
        TurnStopReason::MaxTokens => "the model's limit on its answer was reached",
        TurnStopReason::MaxTurns => "the agent's limit on its turns was reached",
        TurnStopReason::Refused => "the model refused",
        TurnStopReason::Timeout => "its time was over",
        TurnStopReason::BudgetExceeded => "its budget was spent",
        TurnStopReason::EndTurn
        | TurnStopReason::Cancelled
        | TurnStopReason::Suspended
        | TurnStopReason::Error => "it failed without a word",
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
        let ours = Socket::from_upgraded(ours, Role::Server).await;
        tokio::spawn(
            async move { serve_connection(ours, Arc::new(executor), &CancellationToken::new()).await },
        );
        Socket::from_upgraded(theirs, Role::Client).await
    }

    fn run_frame() -> PlainParentFrame {
        PlainParentFrame::Run { assignment: String::new(), reasoning_effort: None, messages: Vec::new() }
    }

    #[tokio::test(start_paused = true)]
    async fn a_peer_that_reads_nothing_slows_its_run_down_instead_of_filling_memory() {
        static SAID: AtomicUsize = AtomicUsize::new(0);
        let mut peer = peer_of(async |_: RunAssignment, turn: RunHandle| {
            while turn.send_text("x".repeat(1000)).await.is_ok() {
                SAID.fetch_add(1, Ordering::SeqCst);
            }
            TurnOutcome::cancelled()
        })
        .await;
        peer.send(&run_frame()).await.unwrap();
        tokio::time::sleep(REST).await;
        let said = SAID.load(Ordering::SeqCst);
        assert!((100..1000).contains(&said), "{said} kB wait for a peer that does not read");
        tokio::time::sleep(REST).await;
        assert_eq!(said, SAID.load(Ordering::SeqCst));
    }

    #[tokio::test(start_paused = true)]
    async fn a_peer_that_starts_run_after_run_and_reads_nothing_is_no_longer_read() {
        let mut peer =
            peer_of(async |_: RunAssignment, _: RunHandle| TurnOutcome::completed("x".repeat(1000))).await;
        let mut sent = 0;
        while tokio::time::timeout(REST, peer.send(&run_frame())).await.is_ok() {
            sent += 1;
            assert!(sent < 10_000, "it is read without end");
        }
        // Whoever begins to read is served again.
        while !matches!(peer.next().await, Ok(IncomingFrame::Text(_))) {}
    }
}
