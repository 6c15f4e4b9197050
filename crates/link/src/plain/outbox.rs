//! What waits to be sent to a peer: frames in order, of one run at a time, bounded in bytes. A run's words wait for
//! room, its terminal never does, and nothing of a run is taken once its terminal is in.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use qd_protocol::AskId;
use qd_protocol::frame::plain::{PlainApproval, PlainWorkerFrame};
use qd_protocol::link::TurnUpdate;
use serde::Serialize;
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

use super::event::{PlainEvent, PlainEventFrame};
use crate::executor::RunStopped;

/// Bytes that may wait before a run has to.
const OUTBOX_BYTES_MAX: usize = 256 << 10;
/// Terminals that may wait before the peer is no longer read: each was caused by a frame of its own.
const TERMINALS_MAX: usize = 16;

/// The mouth of one run.
#[derive(Debug)]
pub(crate) struct PlainRunOutput {
    outbox: Arc<PlainOutbox>,
    run: u64,
}

impl PlainRunOutput {
    pub(super) fn new(outbox: &Arc<PlainOutbox>, run: u64) -> Self {
        Self { outbox: Arc::clone(outbox), run }
    }

    /// Says something; waits for room until there is some or the run is cancelled.
    pub(crate) async fn send_update(
        &self,
        what: &TurnUpdate,
        cancel: &CancellationToken,
    ) -> Result<(), RunStopped> {
        self.send_frame(&PlainEventFrame { event: PlainEvent::from(what) }, cancel).await
    }

    /// Asks for leave; waits in the same way.
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
        // Tried once before anything is made to wait with: mostly there is room.
        let mut sent = self.outbox.try_push(self.run, frame)?;
        while !sent {
            // Made before the next try: room that appears in between wakes it.
            let room = self.outbox.space_freed.notified();
            sent = self.outbox.try_push(self.run, frame)?;
            if !sent {
                tokio::select! {
                    () = room => {}
                    () = cancel.cancelled() => return Err(RunStopped),
                }
            }
        }
        // An executor that never waits would otherwise keep its own task from being ended.
        tokio::task::coop::consume_budget().await;
        Ok(())
    }
}

/// Frames that are to be sent, in order.
#[derive(Debug, Default)]
pub(super) struct PlainFrameBatch {
    /// One after another: a million small events are not a million small pieces of memory.
    json: Vec<u8>,
    /// Where each of them ends.
    frame_ends: Vec<usize>,
}

impl PlainFrameBatch {
    /// Each of them.
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

/// See the module.
#[derive(Debug, Default)]
pub(super) struct PlainOutbox {
    state: Mutex<PlainOutboxState>,
    /// Wakes the writer.
    frames_ready: Notify,
    /// Wakes runs that wait for room.
    space_freed: Notify,
}

#[derive(Debug, Default)]
struct PlainOutboxState {
    batch: PlainFrameBatch,
    /// Of the batch.
    waiting_terminals: usize,
    /// The run that may speak.
    open_run: Option<u64>,
}

impl PlainOutbox {
    /// Lets a run speak.
    pub(super) fn open_run(&self, run: u64) {
        self.lock().open_run = Some(run);
    }

    /// Sends the last words of the run that could speak, if there was one, and lets nobody speak.
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

    /// Waits until something is to be sent, and takes all of it.
    pub(super) async fn take(&self) -> PlainFrameBatch {
        loop {
            let batch = self.take_now();
            if !batch.is_empty() {
                return batch;
            }
            self.frames_ready.notified().await;
        }
    }

    /// What is to be sent, if anything is.
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

    /// Whether so many ends wait that the peer should not cause another.
    pub(super) fn has_terminal_backlog(&self) -> bool {
        self.lock().waiting_terminals >= TERMINALS_MAX
    }

    /// Takes a frame in, if there is room.
    fn try_push(&self, run: u64, frame: &impl Serialize) -> Result<bool, RunStopped> {
        let mut state = self.lock();
        if state.open_run != Some(run) {
            return Err(RunStopped);
        }
        if state.batch.json.len() >= OUTBOX_BYTES_MAX {
            return Ok(false);
        }
        let first = state.batch.is_empty();
        state.batch.push(frame);
        drop(state);
        if first {
            self.frames_ready.notify_one();
        }
        Ok(true)
    }

    fn lock(&self) -> MutexGuard<'_, PlainOutboxState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
