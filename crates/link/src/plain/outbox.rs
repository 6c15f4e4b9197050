//! What waits to be sent to a peer: frames in order, of one run at a time, bounded in bytes. A run's words wait for
//! room, its terminal never does, and nothing of a run is taken once its terminal is in.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

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
        let mut frame = json(frame);
        // Tried once before anything is made to wait with: mostly there is room.
        if let Some(back) = self.outbox.offer(self.run, frame)? {
            frame = back;
            loop {
                // Made before the next try: room that appears in between wakes it.
                let room = self.outbox.room.notified();
                match self.outbox.offer(self.run, frame)? {
                    None => break,
                    Some(back) => frame = back,
                }
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
    frames: Vec<String>,
    /// Of the frames.
    bytes: usize,
    /// Of the frames.
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
            state.push(json(&EventFrame { event: Event::Complete }));
        }
        state.push(json(terminal));
        state.terminals += 1;
        drop(state);
        self.filled.notify_one();
    }

    /// Waits until something is to be sent, and takes all of it.
    pub(super) async fn take(&self) -> Vec<String> {
        loop {
            let frames = self.take_now();
            if !frames.is_empty() {
                return frames;
            }
            self.filled.notified().await;
        }
    }

    /// What is to be sent, if anything is.
    pub(super) fn take_now(&self) -> Vec<String> {
        let mut state = self.lock();
        (state.bytes, state.terminals) = (0, 0);
        let frames = std::mem::take(&mut state.frames);
        drop(state);
        if !frames.is_empty() {
            self.room.notify_waiters();
        }
        frames
    }

    /// Whether so many ends wait that the peer should not cause another.
    pub(super) fn is_crowded(&self) -> bool {
        self.lock().terminals >= TERMINALS_MAX
    }

    /// Takes a frame in, or gives it back if there is no room.
    fn offer(&self, run: u64, frame: String) -> Result<Option<String>, Stopped> {
        let mut state = self.lock();
        if state.open != Some(run) {
            return Err(Stopped);
        }
        if state.bytes >= ROOM_BYTES {
            return Ok(Some(frame));
        }
        let first = state.frames.is_empty();
        state.push(frame);
        drop(state);
        if first {
            self.filled.notify_one();
        }
        Ok(None)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn push(&mut self, frame: String) {
        self.bytes += frame.len();
        self.frames.push(frame);
    }
}

fn json(frame: &impl Serialize) -> String {
    serde_json::to_string(frame).expect("a frame has string keys and no value that can fail")
}
