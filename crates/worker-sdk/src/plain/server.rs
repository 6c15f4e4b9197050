//! One connection of a worker, without a subprotocol. The peer's frames start, steer and stop runs, and the updates of
//! runs become frames. Reading never waits for writing, so even a peer that does not read can cancel.

use std::sync::Arc;

use qd_protocol::AskId;
use qd_protocol::frame::plain::{PlainParentFrame, PlainRunStatus, PlainWorkerFrame};
use qd_protocol::link::{TurnOutcome, TurnStopReason};
use tokio_util::sync::CancellationToken;

use super::outbox::{PlainOutbox, PlainRunOutput};
use crate::executor::{self, CANCEL_GRACE, Executor, ExecutorTask, RunAssignment, RunHandle, RunSteer};
use crate::socket::{ByteStream, IncomingFrame, STEP_TIMEOUT, Socket, SocketError, SocketProgress};

/// How many runs may be superseded while the active one ends. Beyond that the peer is no longer read.
const SUPERSEDED_MAX: usize = 64;

/// Serves one connection until the peer closes it or `stop` is cancelled. The connection's run has ended when this
/// returns.
pub(crate) async fn serve_connection<E: Executor, W: ByteStream>(
    mut socket: Socket<W>,
    executor: Arc<E>,
    stop: &CancellationToken,
) {
    let mut runs = PlainConnectionRuns::new(executor);
    let outbox = Arc::clone(&runs.outbox);
    let ended = tokio::select! {
        ended = exchange_frames(&mut socket, &mut runs, &outbox) => ended,
        () = stop.cancelled() => Ok(()),
    };
    runs.cancel_and_wait().await;
    if ended.is_ok() {
        // A peer that does not read gets no more than this time.
        let _flushed = tokio::time::timeout(STEP_TIMEOUT, flush_and_close(&mut socket, &outbox)).await;
    }
}

/// Exchanges frames until the connection breaks.
async fn exchange_frames<E: Executor, W: ByteStream>(
    socket: &mut Socket<W>,
    runs: &mut PlainConnectionRuns<E>,
    outbox: &PlainOutbox,
) -> Result<(), SocketError> {
    let mut writing = false;
    loop {
        let reading = !outbox.has_terminal_backlog() && runs.superseded < SUPERSEDED_MAX;
        tokio::select! {
            // Reading goes before writing, so a cancel is not delayed by output.
            biased;
            progress = socket.progress(reading, writing) => match progress? {
                SocketProgress::Read(IncomingFrame::Text(text)) => runs.receive_frame(text.as_str()),
                SocketProgress::Read(IncomingFrame::Binary(_) | IncomingFrame::Alive) => {}
                SocketProgress::Written => writing = false,
            },
            outcome = runs.wait_for_outcome() => runs.finish_active(outcome),
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

/// The runs of one connection: the active run, and the run that replaces it when it has ended.
#[derive(Debug)]
struct PlainConnectionRuns<E> {
    executor: Arc<E>,
    outbox: Arc<PlainOutbox>,
    active: Option<ExecutorTask>,
    /// Its handle exists at once, so that messages for it have somewhere to go.
    next: Option<(RunAssignment, RunHandle)>,
    /// Runs that were replaced before they started. Each still gets its terminal frame.
    superseded: usize,
    /// The number of the newest run.
    last_run: u64,
}

impl<E: Executor> PlainConnectionRuns<E> {
    fn new(executor: Arc<E>) -> Self {
        Self { executor, outbox: Arc::default(), active: None, next: None, superseded: 0, last_run: 0 }
    }

    /// Handles a frame. One that cannot be parsed is ignored.
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
                    active.handle().inbox().resolve_ask(&ask, Some(approved));
                }
            }
            Err(_) => {}
        }
    }

    fn queue_run(&mut self, assignment: RunAssignment) {
        if let Some(active) = &mut self.active {
            active.cancel();
        }
        self.last_run += 1;
        let handle =
            RunHandle::new(executor::RunOutput::Plain(PlainRunOutput::new(&self.outbox, self.last_run)));
        if self.next.replace((assignment, handle)).is_some() {
            self.superseded += 1;
        }
        self.start_next();
    }

    fn cancel_runs(&mut self) {
        if let Some(active) = &mut self.active {
            active.cancel();
        }
        if let Some((_, handle)) = &self.next {
            handle.cancel();
        }
    }

    /// Delivers a message to the newest run, started or not.
    fn deliver_message(&self, text: String) {
        let next = self.next.as_ref().map(|(_, handle)| handle);
        let Some(handle) = next.or(self.active.as_ref().map(ExecutorTask::handle)) else { return };
        if !handle.inbox().push_steer(RunSteer { text, number: None }) {
            tracing::warn!("dropping a message: too many wait for the run");
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

    /// Starts the waiting run if no other is active.
    fn start_next(&mut self) {
        if self.active.is_some() {
            return;
        }
        let Some((assignment, handle)) = self.next.take() else { return };
        if handle.is_cancelled() {
            self.send_terminal(TurnOutcome::cancelled());
        } else {
            self.outbox.open_run(self.last_run);
            self.active =
                Some(ExecutorTask::start_with_handle(&self.executor, assignment, handle, CANCEL_GRACE));
        }
    }

    fn send_terminal(&self, outcome: TurnOutcome) {
        self.outbox.finish_run(outcome.stop == TurnStopReason::EndTurn, &terminal_frame(outcome));
    }

    /// Cancels all runs and waits for the active one to end.
    async fn cancel_and_wait(&mut self) {
        self.cancel_runs();
        while self.active.is_some() {
            let outcome = self.wait_for_outcome().await;
            self.finish_active(outcome);
        }
    }
}

/// The plain frames know four outcomes. All others are errors whose message says what happened.
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
        TurnStopReason::MaxTokens => "the model reached its output limit",
        TurnStopReason::MaxTurns => "the agent reached its turn limit",
        TurnStopReason::Refused => "the model refused",
        TurnStopReason::Timeout => "the run timed out",
        TurnStopReason::BudgetExceeded => "the budget is spent",
        TurnStopReason::EndTurn
        | TurnStopReason::Cancelled
        | TurnStopReason::Suspended
        | TurnStopReason::Error => "the run failed without an error message",
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::Duration;

    use tokio::io::DuplexStream;
    use tokio_tungstenite::tungstenite::protocol::Role;

    use super::*;

    /// The pipe holds next to nothing, so anything buffered is buffered by our code.
    const PIPE_BYTES: usize = 1 << 10;
    /// The clock is paused and jumps over this only when no task has work to do.
    const IDLE_TIME: Duration = Duration::from_secs(1);

    async fn peer_of(executor: impl Executor) -> Socket<DuplexStream> {
        let (worker_end, peer_end) = tokio::io::duplex(PIPE_BYTES);
        let worker_end = Socket::from_upgraded(worker_end, Role::Server).await;
        tokio::spawn(async move {
            serve_connection(worker_end, Arc::new(executor), &CancellationToken::new()).await
        });
        Socket::from_upgraded(peer_end, Role::Client).await
    }

    fn run_frame() -> PlainParentFrame {
        PlainParentFrame::Run { assignment: String::new(), reasoning_effort: None, messages: Vec::new() }
    }

    #[tokio::test(start_paused = true)]
    async fn a_peer_that_reads_nothing_slows_its_run_down_instead_of_filling_memory() {
        static SENT_KB: AtomicUsize = AtomicUsize::new(0);
        let mut peer = peer_of(async |_: RunAssignment, run: RunHandle| {
            while run.send_text("x".repeat(1000)).await.is_ok() {
                SENT_KB.fetch_add(1, Ordering::SeqCst);
            }
            TurnOutcome::cancelled()
        })
        .await;
        peer.send(&run_frame()).await.unwrap();
        tokio::time::sleep(IDLE_TIME).await;
        let sent_kb = SENT_KB.load(Ordering::SeqCst);
        assert!((100..1000).contains(&sent_kb), "{sent_kb} kB wait for a peer that does not read");
        tokio::time::sleep(IDLE_TIME).await;
        assert_eq!(sent_kb, SENT_KB.load(Ordering::SeqCst));
    }

    #[tokio::test(start_paused = true)]
    async fn a_peer_that_starts_run_after_run_and_reads_nothing_is_no_longer_read() {
        let mut peer =
            peer_of(async |_: RunAssignment, _: RunHandle| TurnOutcome::completed("x".repeat(1000))).await;
        let mut sent = 0;
        while tokio::time::timeout(IDLE_TIME, peer.send(&run_frame())).await.is_ok() {
            sent += 1;
            assert!(sent < 10_000, "the peer is read without end");
        }
        // Reading resumes once the peer reads.
        while !matches!(peer.next().await, Ok(IncomingFrame::Text(_))) {}
    }
}
