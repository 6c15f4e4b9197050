//! What waits to be sent to a peer: frames in order, of one run at a time, bounded in bytes. A run's words wait for
//! room, its terminal never does, and nothing of a run is taken once its terminal is in.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use qd_protocol::AskId;
use qd_protocol::frame::plain::{Approval, FromWorker};
use qd_protocol::link::Said;
use serde::Serialize;
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

use super::event::{Event, EventFrame};
use crate::executor::Stopped;

/// Bytes that may wait before a run has to.
const ROOM_BYTES: usize = 256 << 10;
/// Terminals that may wait before the peer is no longer read: each was caused by a frame of its own.
const TERMINALS_MAX: usize = 16;

/// The mouth of one run.
#[derive(Debug)]
pub(crate) struct Mouth {
    outbox: Arc<Outbox>,
    run: u64,
}

impl Mouth {
    pub(super) fn new(outbox: &Arc<Outbox>, run: u64) -> Self {
        Self { outbox: Arc::clone(outbox), run }
    }

    /// Says something; waits for room until there is some or the run is cancelled.
    pub(crate) async fn say(&self, what: &Said, cancel: &CancellationToken) -> Result<(), Stopped> {
        self.send(&EventFrame { event: Event::from(what) }, cancel).await
    }

    /// Asks for leave; waits in the same way.
    pub(crate) async fn ask(
        &self,
        id: &AskId,
        body: Approval,
        cancel: &CancellationToken,
    ) -> Result<(), Stopped> {
        let request = FromWorker::ApprovalRequest { id: id.as_str().to_owned(), body };
        self.send(&request, cancel).await
    }

    async fn send(&self, frame: &impl Serialize, cancel: &CancellationToken) -> Result<(), Stopped> {
        // Tried once before anything is made to wait with: mostly there is room.
        let mut sent = self.outbox.offer(self.run, frame)?;
        while !sent {
            // Made before the next try: room that appears in between wakes it.
            let room = self.outbox.room.notified();
            sent = self.outbox.offer(self.run, frame)?;
            if !sent {
                tokio::select! {
                    () = room => {}
                    () = cancel.cancelled() => return Err(Stopped),
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
pub(super) struct Batch {
    /// One after another: a million small events are not a million small pieces of memory.
    json: Vec<u8>,
    /// Where each of them ends.
    ends: Vec<usize>,
}

impl Batch {
    /// Each of them.
    pub(super) fn frames(self) -> impl Iterator<Item = Bytes> {
        let (json, mut begin) = (Bytes::from(self.json), 0);
        self.ends.into_iter().map(move |end| json.slice(std::mem::replace(&mut begin, end)..end))
    }

    fn push(&mut self, frame: &impl Serialize) {
        let written = serde_json::to_writer(&mut self.json, frame);
        written.expect("a frame has string keys and no value that can fail");
        self.ends.push(self.json.len());
    }

    fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }
}

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Outbox {
    state: Mutex<State>,
    /// Wakes the writer.
    filled: Notify,
    /// Wakes runs that wait for room.
    room: Notify,
}

#[derive(Debug, Default)]
struct State {
    batch: Batch,
    /// Of the batch.
    terminals: usize,
    /// The run that may speak.
    open: Option<u64>,
}

impl Outbox {
    /// Lets a run speak.
    pub(super) fn open(&self, run: u64) {
        self.lock().open = Some(run);
    }

    /// Sends the last words of the run that could speak, if there was one, and lets nobody speak.
    pub(super) fn finish(&self, complete: bool, terminal: &FromWorker) {
        let mut state = self.lock();
        state.open = None;
        if complete {
            state.batch.push(&EventFrame { event: Event::Complete });
        }
        state.batch.push(terminal);
        state.terminals += 1;
        drop(state);
        self.filled.notify_one();
    }

    /// Waits until something is to be sent, and takes all of it.
    pub(super) async fn take(&self) -> Batch {
        loop {
            let batch = self.take_now();
            if !batch.is_empty() {
                return batch;
            }
            self.filled.notified().await;
        }
    }

    /// What is to be sent, if anything is.
    pub(super) fn take_now(&self) -> Batch {
        let mut state = self.lock();
        state.terminals = 0;
        let batch = std::mem::take(&mut state.batch);
        drop(state);
        if !batch.is_empty() {
            self.room.notify_waiters();
        }
        batch
    }

    /// Whether so many ends wait that the peer should not cause another.
    pub(super) fn is_crowded(&self) -> bool {
        self.lock().terminals >= TERMINALS_MAX
    }

    /// Takes a frame in, if there is room.
    fn offer(&self, run: u64, frame: &impl Serialize) -> Result<bool, Stopped> {
        let mut state = self.lock();
        if state.open != Some(run) {
            return Err(Stopped);
        }
        if state.batch.json.len() >= ROOM_BYTES {
            return Ok(false);
        }
        let first = state.batch.is_empty();
        state.batch.push(frame);
        drop(state);
        if first {
            self.filled.notify_one();
        }
        Ok(true)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
