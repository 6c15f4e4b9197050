//! Where appends wait for the writer. Callers put one in under a short lock; the writer takes all there are, up to a
//! batch, in one. The queue is bounded in number and bytes, and a caller that finds it full waits without a thread.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use qd_protocol::Seq;
use tokio::sync::{Notify, oneshot};

use crate::error::AppendError;
use crate::event::EventDraft;
use crate::lock_ignoring_poison;
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
const BATCH_WAIT: Duration = Duration::from_micros(200);

/// What is asked of the writer.
#[derive(Debug)]
pub(crate) enum WriterTask {
    Append(AppendJob),
    /// Give so many free pages back to the file system, and say how many were.
    Vacuum {
        pages: u32,
        answer: oneshot::Sender<Result<u64, AppendError>>,
    },
}

/// One append.
#[derive(Debug)]
pub(crate) struct AppendJob {
    pub(crate) events: Vec<EventDraft>,
    pub(crate) rows: Vec<RowChange>,
    pub(crate) idempotency: Option<IdempotencyRecord>,
    pub(crate) may_use_reserve: bool,
    pub(crate) answer: oneshot::Sender<Result<AppendReceipt, AppendError>>,
}

/// An answer to be given again to whoever asks with the same `Idempotency-Key`, written with what it answers.
pub struct IdempotencyRecord {
    /// The key, already made unique to its route by the caller if that is wanted.
    pub key: String,
    /// What tells the request apart from another under the same key.
    pub fingerprint: [u8; 32],
    /// Makes the answer out of the first seq of the append, or of the journal's head if it has no events. Called
    /// again if the append has to be made again at another seq.
    pub make_response: Box<dyn FnMut(Seq) -> Vec<u8> + Send>,
}

impl std::fmt::Debug for IdempotencyRecord {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Remember").field("key", &self.key).finish_non_exhaustive()
    }
}

/// Where an append is; both are the journal's head if it had no events.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AppendReceipt {
    /// Its first event.
    pub first: Seq,
    /// Its last event.
    pub last: Seq,
}

impl WriterTask {
    fn size(&self) -> (usize, usize) {
        match self {
            Self::Append(job) => {
                let events: usize = job.events.iter().map(EventDraft::weight).sum();
                let rows: usize = job.rows.iter().map(RowChange::weight).sum();
                (job.events.len() + job.rows.len(), events + rows)
            }
            Self::Vacuum { .. } => (0, 0),
        }
    }
}

/// The queue between callers and the writer.
#[derive(Debug, Default)]
pub(crate) struct WriterQueue {
    state: Mutex<WriterQueueState>,
    filled: Condvar,
    space_freed: Notify,
}

#[derive(Debug, Default)]
struct WriterQueueState {
    /// Each with its size, so that it is weighed once and by its caller.
    tasks: VecDeque<(WriterTask, usize, usize)>,
    items: usize,
    bytes: usize,
    /// Whether somebody waits for room.
    has_blocked_callers: bool,
    /// How much the writer waits for, if it waits: only then does putting some in need a system call.
    wakeup_len: usize,
    closed: bool,
}

impl WriterQueue {
    /// Puts work in, waiting for room first if there is none. What was put in is done even if nobody waits for it.
    pub(crate) async fn put(&self, work: WriterTask) -> Result<(), AppendError> {
        let (items, bytes) = work.size();
        let mut work = Some((work, items, bytes));
        loop {
            let room = self.space_freed.notified();
            tokio::pin!(room);
            {
                let mut waiting = lock_ignoring_poison(&self.state);
                if waiting.closed {
                    return Err(AppendError::Stopped);
                }
                let fits = waiting.tasks.len() < QUEUE_MAX && waiting.bytes + bytes <= QUEUE_BYTES;
                if fits || waiting.tasks.is_empty() {
                    waiting.items += items;
                    waiting.bytes += bytes;
                    waiting.tasks.extend(work.take());
                    if waiting.wakeup_len > 0 && waiting.tasks.len() >= waiting.wakeup_len {
                        waiting.wakeup_len = 0;
                        drop(waiting);
                        self.filled.notify_one();
                    }
                    return Ok(());
                }
                waiting.has_blocked_callers = true;
                // Still under the lock: the writer cannot make room before we listen.
                room.as_mut().enable();
            }
            room.await;
        }
    }

    /// How many wait.
    pub(crate) fn len(&self) -> usize {
        lock_ignoring_poison(&self.state).tasks.len()
    }

    /// Takes a batch, waiting for the first of it. False when the queue is closed and empty. If as many as `company`
    /// are likely to be there in a moment, waits for them a little, so that they share a sync.
    pub(crate) fn take(&self, batch: &mut Vec<WriterTask>, company: usize) -> bool {
        let mut waiting = lock_ignoring_poison(&self.state);
        let mut patience = None;
        loop {
            let there = waiting.tasks.len();
            if waiting.closed && there == 0 {
                return false;
            }
            if waiting.closed || there >= company.max(1) {
                break;
            }
            if there == 0 {
                waiting.wakeup_len = 1;
                waiting = self.filled.wait(waiting).unwrap_or_else(PoisonError::into_inner);
                continue;
            }
            let until = *patience.get_or_insert_with(|| Instant::now() + BATCH_WAIT);
            let Some(left) = until.checked_duration_since(Instant::now()) else { break };
            waiting.wakeup_len = company;
            waiting = self.filled.wait_timeout(waiting, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        waiting.wakeup_len = 0;
        let (mut items, mut bytes) = (0, 0);
        while let Some((_, next_items, next_bytes)) = waiting.tasks.front() {
            let over = items + next_items > BATCH_MAX || bytes + next_bytes > BATCH_BYTES;
            if over && !batch.is_empty() {
                break;
            }
            items += next_items;
            bytes += next_bytes;
            let next = waiting.tasks.pop_front().expect("it was at the front");
            batch.push(next.0);
        }
        waiting.items -= items;
        waiting.bytes -= bytes;
        let crowded = std::mem::take(&mut waiting.has_blocked_callers);
        drop(waiting);
        if crowded {
            self.space_freed.notify_waiters();
        }
        true
    }

    /// Lets nothing more in. The writer still does what is there.
    pub(crate) fn close(&self) {
        lock_ignoring_poison(&self.state).closed = true;
        self.filled.notify_one();
        self.space_freed.notify_waiters();
    }

    /// Closes, and drops what is there, so that everyone who waits learns that nothing was done.
    pub(crate) fn abandon(&self) {
        self.close();
        let dropped = std::mem::take(&mut lock_ignoring_poison(&self.state).tasks);
        drop(dropped);
    }
}
