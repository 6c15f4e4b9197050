//! Where appends wait for the writer. Callers put one in under a short lock; the writer takes all there are, up to a
//! batch, in one. The queue is bounded in number and bytes, and a caller that finds it full waits without a thread.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use qd_protocol::Seq;
use tokio::sync::{Notify, oneshot};

use crate::error::AppendError;
use crate::event::Draft;
use crate::held;
use crate::rows::RowChange;

/// Appends that may wait.
pub(crate) const QUEUE_MAX: usize = 4096;
/// Bytes that may wait; one append always may.
pub(crate) const QUEUE_BYTES: usize = 32 << 20;
/// Events and row changes of one transaction, unless a single append has more.
pub(crate) const BATCH_MAX: usize = 1024;
/// Bytes of one transaction, unless a single append has more.
pub(crate) const BATCH_BYTES: usize = 1 << 20;
/// How long the writer waits at most for callers that are likely to come: about what a sync takes on a fast disk, so
/// that it is never a bad bargain.
const PATIENCE: Duration = Duration::from_micros(200);

/// What is asked of the writer.
#[derive(Debug)]
pub(crate) enum Work {
    Append(Job),
    /// Give so many free pages back to the file system, and say how many were.
    Vacuum {
        pages: u32,
        answer: oneshot::Sender<Result<u64, AppendError>>,
    },
}

/// One append.
#[derive(Debug)]
pub(crate) struct Job {
    pub(crate) events: Vec<Draft>,
    pub(crate) rows: Vec<RowChange>,
    pub(crate) remember: Option<Remember>,
    pub(crate) reserve: bool,
    pub(crate) answer: oneshot::Sender<Result<Appended, AppendError>>,
}

/// An answer to be given again to whoever asks with the same `Idempotency-Key`, written with what it answers.
pub struct Remember {
    /// The key, already made unique to its route by the caller if that is wanted.
    pub key: String,
    /// What tells the request apart from another under the same key.
    pub fingerprint: [u8; 32],
    /// Makes the answer out of the first seq of the append, or of the journal's head if it has no events. Called
    /// again if the append has to be made again at another seq.
    pub answer: Box<dyn FnMut(Seq) -> Vec<u8> + Send>,
}

impl std::fmt::Debug for Remember {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Remember").field("key", &self.key).finish_non_exhaustive()
    }
}

/// Where an append is; both are the journal's head if it had no events.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Appended {
    /// Its first event.
    pub first: Seq,
    /// Its last event.
    pub last: Seq,
}

impl Work {
    fn size(&self) -> (usize, usize) {
        match self {
            Self::Append(job) => {
                let events: usize = job.events.iter().map(Draft::weight).sum();
                let rows: usize = job.rows.iter().map(RowChange::weight).sum();
                (job.events.len() + job.rows.len(), events + rows)
            }
            Self::Vacuum { .. } => (0, 0),
        }
    }
}

/// The queue between callers and the writer.
#[derive(Debug, Default)]
pub(crate) struct Queue {
    waiting: Mutex<Waiting>,
    filled: Condvar,
    room: Notify,
}

#[derive(Debug, Default)]
struct Waiting {
    /// Each with its size, so that it is weighed once and by its caller.
    work: VecDeque<(Work, usize, usize)>,
    items: usize,
    bytes: usize,
    /// Whether somebody waits for room.
    crowded: bool,
    /// How much the writer waits for, if it waits: only then does putting some in need a system call.
    wanted: usize,
    closed: bool,
}

impl Queue {
    /// Puts work in, waiting for room first if there is none. What was put in is done even if nobody waits for it.
    pub(crate) async fn put(&self, work: Work) -> Result<(), AppendError> {
        let (items, bytes) = work.size();
        let mut work = Some((work, items, bytes));
        loop {
            let room = self.room.notified();
            tokio::pin!(room);
            {
                let mut waiting = held(&self.waiting);
                if waiting.closed {
                    return Err(AppendError::Stopped);
                }
                let fits = waiting.work.len() < QUEUE_MAX && waiting.bytes + bytes <= QUEUE_BYTES;
                if fits || waiting.work.is_empty() {
                    waiting.items += items;
                    waiting.bytes += bytes;
                    waiting.work.extend(work.take());
                    if waiting.wanted > 0 && waiting.work.len() >= waiting.wanted {
                        waiting.wanted = 0;
                        drop(waiting);
                        self.filled.notify_one();
                    }
                    return Ok(());
                }
                waiting.crowded = true;
                // Still under the lock: the writer cannot make room before we listen.
                room.as_mut().enable();
            }
            room.await;
        }
    }

    /// How many wait.
    pub(crate) fn len(&self) -> usize {
        held(&self.waiting).work.len()
    }

    /// Takes a batch, waiting for the first of it. False when the queue is closed and empty. If as many as `company`
    /// are likely to be there in a moment, waits for them a little, so that they share a sync.
    pub(crate) fn take(&self, batch: &mut Vec<Work>, company: usize) -> bool {
        let mut waiting = held(&self.waiting);
        let mut patience = None;
        loop {
            let there = waiting.work.len();
            if waiting.closed && there == 0 {
                return false;
            }
            if waiting.closed || there >= company.max(1) {
                break;
            }
            if there == 0 {
                waiting.wanted = 1;
                waiting = self.filled.wait(waiting).unwrap_or_else(PoisonError::into_inner);
                continue;
            }
            let until = *patience.get_or_insert_with(|| Instant::now() + PATIENCE);
            let Some(left) = until.checked_duration_since(Instant::now()) else { break };
            waiting.wanted = company;
            waiting = self.filled.wait_timeout(waiting, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        waiting.wanted = 0;
        let (mut items, mut bytes) = (0, 0);
        while let Some((_, next_items, next_bytes)) = waiting.work.front() {
            let over = items + next_items > BATCH_MAX || bytes + next_bytes > BATCH_BYTES;
            if over && !batch.is_empty() {
                break;
            }
            items += next_items;
            bytes += next_bytes;
            let next = waiting.work.pop_front().expect("it was at the front");
            batch.push(next.0);
        }
        waiting.items -= items;
        waiting.bytes -= bytes;
        let crowded = std::mem::take(&mut waiting.crowded);
        drop(waiting);
        if crowded {
            self.room.notify_waiters();
        }
        true
    }

    /// Lets nothing more in. The writer still does what is there.
    pub(crate) fn close(&self) {
        held(&self.waiting).closed = true;
        self.filled.notify_one();
        self.room.notify_waiters();
    }

    /// Closes, and drops what is there, so that everyone who waits learns that nothing was done.
    pub(crate) fn abandon(&self) {
        self.close();
        let dropped = std::mem::take(&mut held(&self.waiting).work);
        drop(dropped);
    }
}
