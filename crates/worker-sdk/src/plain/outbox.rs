//! The frames that wait for a peer: in order, of one run at a time, bounded in bytes. A run's updates wait for room,
//! its terminal never does, and nothing of a run is accepted after its terminal.

use std::sync::Arc;

use bytes::Bytes;
use parking_lot::{Mutex, MutexGuard};
use qd_protocol::AskId;
use qd_protocol::frame::plain::{PlainApproval, PlainWorkerFrame};
use qd_protocol::link::TurnUpdate;
use serde::Serialize;
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

use super::event::{PlainEvent, PlainEventFrame};
use crate::executor::RunStopped;

/// How many bytes may wait before the run has to.
const OUTBOX_BYTES_MAX: usize = 256 << 10;
/// How many terminals may wait before the peer is no longer read. Each was caused by one of the peer's frames.
const TERMINALS_MAX: usize = 16;

/// Sends the frames of one run.
#[derive(Debug)]
pub(crate) struct PlainRunOutput {
    outbox: Arc<PlainOutbox>,
    run: u64,
}

impl PlainRunOutput {
    pub(super) fn new(outbox: &Arc<PlainOutbox>, run: u64) -> Self {
        Self { outbox: Arc::clone(outbox), run }
    }

    /// Sends an update. Waits until there is room or the run is cancelled.
    pub(crate) async fn send_update(
        &self,
        update: &TurnUpdate,
        cancel: &CancellationToken,
    ) -> Result<(), RunStopped> {
        self.send_frame(&PlainEventFrame { event: PlainEvent::from(update) }, cancel).await
    }

    /// Sends an approval request, waiting in the same way.
    pub(crate) async fn send_approval_request(
        &self,
        id: &AskId,
        body: PlainApproval,
        cancel: &CancellationToken,
    ) -> Result<(), RunStopped> {
        let request = PlainWorkerFrame::ApprovalRequest { id: id.as_str().to_owned(), body };
        self.send_frame(&request, cancel).await
    }

    async fn send_frame(&self, frame: &impl Serialize, cancel: &CancellationToken) -> Result<(), RunStopped> {
        // The first try needs no waiter, because usually there is room.
        let mut sent = self.outbox.try_push(self.run, frame)?;
        while !sent {
            // Registered before the next try, so that space freed in between is not missed.
            let space_freed = self.outbox.space_freed.notified();
            sent = self.outbox.try_push(self.run, frame)?;
            if !sent {
                tokio::select! {
                    () = space_freed => {}
                    () = cancel.cancelled() => return Err(RunStopped),
                }
            }
        }
        // Without this, an executor that never waits would keep its own task from being aborted.
        tokio::task::coop::consume_budget().await;
        Ok(())
    }
}

#[derive(Debug, Default)]
pub(super) struct PlainFrameBatch {
    /// All frames back to back, so that a million small events are not a million allocations.
    json: Vec<u8>,
    /// Where each frame ends.
    frame_ends: Vec<usize>,
}

impl PlainFrameBatch {
    pub(super) fn frames(self) -> impl Iterator<Item = Bytes> {
        let (json, mut begin) = (Bytes::from(self.json), 0);
        self.frame_ends.into_iter().map(move |end| json.slice(std::mem::replace(&mut begin, end)..end))
    }

    fn push(&mut self, frame: &impl Serialize) {
        let written = serde_json::to_writer(&mut self.json, frame);
        written.expect("a frame has string keys and no value that can fail");
        self.frame_ends.push(self.json.len());
    }

    fn is_empty(&self) -> bool {
        self.frame_ends.is_empty()
    }
}

#[derive(Debug, Default)]
pub(super) struct PlainOutbox {
    state: Mutex<PlainOutboxState>,
    /// Wakes the writer.
    frames_ready: Notify,
    /// Wakes runs that wait for space.
    space_freed: Notify,
}

#[derive(Debug, Default)]
struct PlainOutboxState {
    batch: PlainFrameBatch,
    /// How many terminals the batch contains.
    waiting_terminals: usize,
    /// The run whose frames are accepted.
    open_run: Option<u64>,
}

impl PlainOutbox {
    /// Accepts frames of this run from now on.
    pub(super) fn open_run(&self, run: u64) {
        self.lock().open_run = Some(run);
    }

    /// Queues the terminal of the open run, or of a run that was never opened, and accepts no more frames until the
    /// next run opens.
    pub(super) fn finish_run(&self, complete: bool, terminal: &PlainWorkerFrame) {
        let mut state = self.lock();
        state.open_run = None;
        if complete {
            state.batch.push(&PlainEventFrame { event: PlainEvent::Complete });
        }
        state.batch.push(terminal);
        state.waiting_terminals += 1;
        drop(state);
        self.frames_ready.notify_one();
    }

    /// Waits for frames and takes all of them.
    pub(super) async fn take(&self) -> PlainFrameBatch {
        loop {
            let batch = self.take_now();
            if !batch.is_empty() {
                return batch;
            }
            self.frames_ready.notified().await;
        }
    }

    /// Takes the waiting frames, if any.
    pub(super) fn take_now(&self) -> PlainFrameBatch {
        let mut state = self.lock();
        state.waiting_terminals = 0;
        let batch = std::mem::take(&mut state.batch);
        drop(state);
        if !batch.is_empty() {
            self.space_freed.notify_waiters();
        }
        batch
    }

    /// Whether so many terminals wait that the peer should not cause another.
    pub(super) fn has_terminal_backlog(&self) -> bool {
        self.lock().waiting_terminals >= TERMINALS_MAX
    }

    /// Queues a frame and returns true, or false if there is no room.
    fn try_push(&self, run: u64, frame: &impl Serialize) -> Result<bool, RunStopped> {
        let mut state = self.lock();
        if state.open_run != Some(run) {
            return Err(RunStopped);
        }
        if state.batch.json.len() >= OUTBOX_BYTES_MAX {
            return Ok(false);
        }
        let was_empty = state.batch.is_empty();
        state.batch.push(frame);
        drop(state);
        if was_empty {
            self.frames_ready.notify_one();
        }
        Ok(true)
    }

    fn lock(&self) -> MutexGuard<'_, PlainOutboxState> {
        self.state.lock()
    }
}
