//! The queue between callers and the writer. Callers add an append under a short lock; the writer takes everything up
//! to the size of a batch at once. The queue is bounded in entries and bytes, and a caller that finds it full waits
//! without blocking a thread.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use qd_protocol::Seq;
use tokio::sync::{Notify, oneshot};

use crate::error::AppendError;
use crate::event::EventDraft;
use crate::merge::MergePlan;
use crate::rows::RowChange;

/// Appends that may wait in the queue.
pub(crate) const QUEUE_MAX: usize = 4096;
/// Bytes that may wait in the queue. An empty queue accepts an append of any size.
pub(crate) const QUEUE_BYTES: usize = 32 << 20;
/// Events and row changes per transaction, unless a single append has more.
pub(crate) const BATCH_MAX: usize = 1024;
/// Bytes per transaction, unless a single append has more.
pub(crate) const BATCH_BYTES: usize = 1 << 20;
/// The maximum time that the writer waits for callers that are likely to come. It is about as long as a sync on a fast
/// disk, so sharing a sync always pays for the wait.
const BATCH_WAIT: Duration = Duration::from_micros(200);

#[derive(Debug)]
pub(crate) enum WriterTask {
    Append(AppendJob),
    /// Merges events in a transaction of its own. Answers false if they are not there any more.
    Merge {
        plan: Box<MergePlan>,
        reply: oneshot::Sender<Result<bool, AppendError>>,
    },
    /// Returns up to this many free pages to the file system and answers with how many it returned.
    Vacuum {
        pages: u32,
        reply: oneshot::Sender<Result<u64, AppendError>>,
    },
}

#[derive(Debug)]
pub(crate) struct AppendJob {
    pub(crate) events: Vec<EventDraft>,
    pub(crate) rows: Vec<RowChange>,
    pub(crate) idempotency: Option<IdempotencyRecord>,
    pub(crate) may_use_reserve: bool,
    pub(crate) answer: oneshot::Sender<Result<AppendReceipt, AppendError>>,
}

/// A response that is written in the same transaction as the append it answers, and sent again for every later request
/// with the same `Idempotency-Key`.
pub struct IdempotencyRecord {
    /// The key. The caller includes the route in it if keys are to be separate per route.
    pub key: String,
    /// Tells the request from another one under the same key.
    pub fingerprint: [u8; 32],
    /// Renders the response from the first seq of the append, or from the journal's head if it has no events. It is
    /// called again if the append is retried at another seq.
    pub make_response: Box<dyn FnMut(Seq) -> Vec<u8> + Send>,
}

impl std::fmt::Debug for IdempotencyRecord {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("IdempotencyRecord").field("key", &self.key).finish_non_exhaustive()
    }
}

/// The seqs of an append. Both are the journal's head if it had no events.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AppendReceipt {
    pub first: Seq,
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
            Self::Merge { .. } | Self::Vacuum { .. } => (0, 0),
        }
    }
}

#[derive(Debug, Default)]
pub(crate) struct WriterQueue {
    state: Mutex<WriterQueueState>,
    filled: Condvar,
    space_freed: Notify,
}

#[derive(Debug, Default)]
struct WriterQueueState {
    /// Each task with its number of items and bytes, which the caller has computed once.
    tasks: VecDeque<(WriterTask, usize, usize)>,
    items: usize,
    bytes: usize,
    /// Whether a caller waits for space.
    has_blocked_callers: bool,
    /// The queue length that the writer waits for; 0 if it is not waiting. Only when the length is reached do callers
    /// need a system call to wake it.
    wakeup_len: usize,
    closed: bool,
}

impl WriterQueue {
    /// Adds a task, waiting for space first if the queue is full. A task in the queue is carried out even if its caller
    /// has gone away.
    pub(crate) async fn put(&self, task: WriterTask) -> Result<(), AppendError> {
        let (items, bytes) = task.size();
        let mut task = Some((task, items, bytes));
        loop {
            let space = self.space_freed.notified();
            tokio::pin!(space);
            {
                let mut state = self.state.lock();
                if state.closed {
                    return Err(AppendError::Stopped);
                }
                let fits = state.tasks.len() < QUEUE_MAX && state.bytes + bytes <= QUEUE_BYTES;
                if fits || state.tasks.is_empty() {
                    state.items += items;
                    state.bytes += bytes;
                    state.tasks.extend(task.take());
                    if state.wakeup_len > 0 && state.tasks.len() >= state.wakeup_len {
                        state.wakeup_len = 0;
                        drop(state);
                        self.filled.notify_one();
                    }
                    return Ok(());
                }
                state.has_blocked_callers = true;
                // Registered while still holding the lock, so that the writer cannot free space before we listen.
                space.as_mut().enable();
            }
            space.await;
        }
    }

    /// The number of queued tasks.
    pub(crate) fn len(&self) -> usize {
        self.state.lock().tasks.len()
    }

    /// Takes a batch, waiting for its first task. Returns false when the queue is closed and empty. If `expected`
    /// callers are likely to come in a moment, waits for them up to `BATCH_WAIT`, so that they share a sync.
    pub(crate) fn take(&self, batch: &mut Vec<WriterTask>, expected: usize) -> bool {
        let mut state = self.state.lock();
        let mut deadline = None;
        loop {
            let queued = state.tasks.len();
            if state.closed && queued == 0 {
                return false;
            }
            if state.closed || queued >= expected.max(1) {
                break;
            }
            if queued == 0 {
                state.wakeup_len = 1;
                self.filled.wait(&mut state);
                continue;
            }
            let until = *deadline.get_or_insert_with(|| Instant::now() + BATCH_WAIT);
            let Some(left) = until.checked_duration_since(Instant::now()) else { break };
            state.wakeup_len = expected;
            self.filled.wait_for(&mut state, left);
        }
        state.wakeup_len = 0;
        let (mut items, mut bytes) = (0, 0);
        while let Some((_, next_items, next_bytes)) = state.tasks.front() {
            let over = items + next_items > BATCH_MAX || bytes + next_bytes > BATCH_BYTES;
            if over && !batch.is_empty() {
                break;
            }
            items += next_items;
            bytes += next_bytes;
            let next = state.tasks.pop_front().expect("the task was at the front");
            batch.push(next.0);
        }
        state.items -= items;
        state.bytes -= bytes;
        let has_blocked_callers = std::mem::take(&mut state.has_blocked_callers);
        drop(state);
        if has_blocked_callers {
            self.space_freed.notify_waiters();
        }
        true
    }

    /// Refuses new tasks. The writer still carries out the queued ones.
    pub(crate) fn close(&self) {
        self.state.lock().closed = true;
        self.filled.notify_one();
        self.space_freed.notify_waiters();
    }

    /// Closes the queue and drops the queued tasks, so that their callers learn that nothing was done.
    pub(crate) fn abandon(&self) {
        self.close();
        let dropped = std::mem::take(&mut self.state.lock().tasks);
        drop(dropped);
    }
}
