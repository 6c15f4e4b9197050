//! The updates of an endpoint that the daemon has not acknowledged: numbered, kept in the spool, and the newest of
//! them in memory. The spool is the only thing touched here; no task, lock or connection is known.
//!
//! Design: docs/design/spool-is-trimmed-by-the-journal.md

use std::collections::VecDeque;
use std::{fmt, io};

use bytes::Bytes;
use qd_protocol::link::UpdateNumber;

use crate::spool::Spool;
use crate::update_window::WINDOW_BYTES;

/// Bytes kept in memory for a connection that is slightly behind. One that is further behind is served from the spool.
const RECENT_MAX: usize = 256 << 10;

pub(super) struct EndpointOutbox {
    /// `None` while another thread syncs it.
    spool: Option<Box<dyn Spool>>,
    spool_max: u64,
    /// The size of the spool when it was last checked.
    spool_bytes: u64,
    /// The spool holds updates that a power failure would lose.
    unsynced: bool,
    /// The last append to the spool failed. Logged only when it changes, and tried again only by
    /// [`EndpointOutbox::retry_spool`]: appending all that waits with every new update would take ever longer.
    failing: bool,
    /// The last number that was given out.
    last: UpdateNumber,
    /// Everything up to this number is acknowledged and forgotten.
    acked: UpdateNumber,
    /// Everything up to this number is in the spool, or acknowledged.
    spooled: UpdateNumber,
    /// The last number that was sent on the connection. `None` without a connection.
    last_sent: Option<UpdateNumber>,
    /// The newest lines up to `last`, without gaps. They include at least the lines that are not in the spool.
    recent: VecDeque<Bytes>,
    recent_bytes: usize,
    /// The bytes of `recent` that are not in the spool.
    unspooled_bytes: usize,
}

impl EndpointOutbox {
    pub(super) fn new(after: UpdateNumber, spool: Box<dyn Spool>, spool_max: u64) -> Self {
        Self {
            spool_bytes: spool.bytes(),
            spool: Some(spool),
            spool_max,
            unsynced: false,
            failing: false,
            last: after,
            acked: after,
            spooled: after,
            last_sent: None,
            recent: VecDeque::new(),
            recent_bytes: 0,
            unspooled_bytes: 0,
        }
    }

    pub(super) fn last(&self) -> UpdateNumber {
        self.last
    }

    pub(super) fn is_unacked(&self) -> bool {
        self.acked < self.last
    }

    /// Whether so much waits that the agent has to wait.
    pub(super) fn is_full(&self) -> bool {
        self.spool_bytes + self.unspooled_bytes as u64 >= self.spool_max
            || self.unspooled_bytes >= WINDOW_BYTES
    }

    /// Whether a daemon that has received everything up to this number can continue from there.
    pub(super) fn can_resume_after(&self, received: UpdateNumber) -> bool {
        (self.acked..=self.last).contains(&received)
    }

    /// Whether the last append to the spool failed.
    pub(super) fn is_failing(&self) -> bool {
        self.failing
    }

    /// Adds a line under the next number. After a batch, the caller calls [`EndpointOutbox::flush_to_spool`].
    pub(super) fn push(&mut self, line: Bytes) {
        self.last.0 += 1;
        self.recent_bytes += line.len();
        self.unspooled_bytes += line.len();
        self.recent.push_back(line);
    }

    /// Forgets everything up to this number.
    pub(super) fn ack(&mut self, upto: UpdateNumber) {
        let upto = upto.min(self.last);
        if upto <= self.acked {
            return;
        }
        self.acked = upto;
        self.unsynced &= self.is_unacked();
        if self.spooled < upto {
            self.spooled = upto;
            self.unspooled_bytes = self.recent.range(self.first_unspooled()..).map(Bytes::len).sum();
        }
        self.trim();
        self.flush_to_spool();
    }

    /// A connection begins after this number, or with `None` there is no connection any more.
    pub(super) fn set_last_sent(&mut self, last_sent: Option<UpdateNumber>) {
        self.last_sent = last_sent;
        self.drop_recent();
    }

    /// The next lines for the connection, about `max_bytes` of them, and the number of the first.
    pub(super) fn next_batch(&mut self, max_bytes: usize) -> io::Result<Option<(UpdateNumber, Vec<Bytes>)>> {
        let Some(last_sent) = self.last_sent.filter(|last_sent| *last_sent < self.last) else {
            return Ok(None);
        };
        let behind = usize::try_from(self.last.0 - last_sent.0).unwrap_or(usize::MAX);
        let lines = match self.recent.len().checked_sub(behind) {
            Some(skip) => self.read_recent(skip, max_bytes),
            None => self.read_spool(last_sent, max_bytes)?,
        };
        if lines.is_empty() {
            return Ok(None);
        }
        self.last_sent = Some(UpdateNumber(last_sent.0 + lines.len() as u64));
        self.drop_recent();
        Ok(Some((UpdateNumber(last_sent.0 + 1), lines)))
    }

    /// Appends to the spool what is not in it yet. After a failure, everything waits in memory for
    /// [`EndpointOutbox::retry_spool`].
    pub(super) fn flush_to_spool(&mut self) {
        if !self.failing {
            self.append_to_spool();
        }
        self.drop_recent();
    }

    /// Tries again to append what could not be appended before.
    pub(super) fn retry_spool(&mut self) {
        self.append_to_spool();
        self.drop_recent();
    }

    fn append_to_spool(&mut self) {
        if self.spooled == self.last {
            // Nothing waits any more: the daemon has acknowledged it.
            self.failing = false;
            return;
        }
        let first_unspooled = self.first_unspooled();
        if let Some(spool) = &mut self.spool {
            let lines = &self.recent.make_contiguous()[first_unspooled..];
            match spool.append(UpdateNumber(self.spooled.0 + 1), lines) {
                Ok(()) => {
                    self.spooled = self.last;
                    self.unspooled_bytes = 0;
                    self.unsynced = true;
                    self.failing = false;
                }
                Err(error) => {
                    if !std::mem::replace(&mut self.failing, true) {
                        tracing::error!(%error, "failed to append to the spool; updates wait in memory");
                    }
                }
            }
            self.spool_bytes = spool.bytes();
        }
    }

    /// Hands out the spool to be synced on another thread, if there is something to sync. New updates wait in memory
    /// meanwhile.
    pub(super) fn take_spool_to_sync(&mut self) -> Option<Box<dyn Spool>> {
        if self.unsynced { self.spool.take() } else { None }
    }

    pub(super) fn return_spool(&mut self, spool: Box<dyn Spool>, synced: bool) {
        self.spool = Some(spool);
        self.unsynced &= !synced;
        self.trim();
        self.flush_to_spool();
    }

    /// The index in `recent` of the first line that is not in the spool.
    fn first_unspooled(&self) -> usize {
        let count = usize::try_from(self.last.0 - self.spooled.0).unwrap_or(usize::MAX);
        self.recent.len().saturating_sub(count)
    }

    fn read_recent(&self, skip: usize, max_bytes: usize) -> Vec<Bytes> {
        let mut bytes = 0;
        let fits = |line: &&Bytes| {
            let first = bytes == 0;
            bytes += line.len();
            first || bytes <= max_bytes
        };
        self.recent.iter().skip(skip).take_while(fits).cloned().collect()
    }

    fn read_spool(&mut self, after: UpdateNumber, max_bytes: usize) -> io::Result<Vec<Bytes>> {
        let Some(spool) = &mut self.spool else { return Ok(Vec::new()) };
        let read = spool.read(after, max_bytes)?;
        if !read.iter().map(|(number, _)| number.0).eq((after.0 + 1..).take(read.len())) || read.is_empty() {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "gap in the spool"));
        }
        Ok(read.into_iter().map(|(_, line)| line).collect())
    }

    fn trim(&mut self) {
        if let Some(spool) = &mut self.spool {
            if let Err(error) = spool.trim(self.acked) {
                tracing::warn!(%error, "failed to remove acknowledged updates from the spool");
            }
            self.spool_bytes = spool.bytes();
        }
    }

    /// Drops spooled lines from memory that the connection has already received, or that exceed [`RECENT_MAX`].
    fn drop_recent(&mut self) {
        while let Some(line) = self.recent.front() {
            let number = UpdateNumber(self.last.0 + 1 - self.recent.len() as u64);
            let needed =
                self.last_sent.is_some_and(|last_sent| number > last_sent) && self.recent_bytes <= RECENT_MAX;
            if number > self.spooled || needed {
                return;
            }
            self.recent_bytes -= line.len();
            self.recent.pop_front();
        }
        self.recent = VecDeque::new();
    }
}

impl fmt::Debug for EndpointOutbox {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { last, acked, spooled, last_sent, recent, .. } = self;
        f.debug_struct("EndpointOutbox")
            .field("last", last)
            .field("acked", acked)
            .field("spooled", spooled)
            .field("last_sent", last_sent)
            .field("recent", &recent.len())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};

    use parking_lot::Mutex;
    use proptest::prelude::*;

    use super::*;
    use crate::spool::MemorySpool;

    /// A spool that a test can inspect, and make refuse appends.
    #[derive(Clone, Default)]
    struct InspectableSpool {
        spool: Arc<Mutex<MemorySpool>>,
        full: Arc<AtomicBool>,
    }

    impl InspectableSpool {
        fn inspect<T>(&self, inspector: impl FnOnce(&mut MemorySpool) -> T) -> T {
            inspector(&mut self.spool.lock())
        }
    }

    impl Spool for InspectableSpool {
        fn append(&mut self, first: UpdateNumber, lines: &[Bytes]) -> io::Result<()> {
            if self.full.load(Ordering::Relaxed) {
                return Err(io::ErrorKind::StorageFull.into());
            }
            let held = self.inspect(|spool| spool.read(UpdateNumber(0), usize::MAX))?;
            assert!(held.last().is_none_or(|(last, _)| last.0 + 1 == first.0), "numbers without a hole");
            self.inspect(|spool| spool.append(first, lines))
        }

        fn sync(&mut self) -> io::Result<()> {
            Ok(())
        }

        fn trim(&mut self, upto: UpdateNumber) -> io::Result<()> {
            self.inspect(|spool| spool.trim(upto))
        }

        fn read(&mut self, after: UpdateNumber, max_bytes: usize) -> io::Result<Vec<(UpdateNumber, Bytes)>> {
            self.inspect(|spool| spool.read(after, max_bytes))
        }

        fn bytes(&self) -> u64 {
            self.inspect(|spool| spool.bytes())
        }
    }

    fn line(number: u64) -> Bytes {
        Bytes::from(format!("{number:0>100}"))
    }

    fn outbox_over(spool: &InspectableSpool) -> EndpointOutbox {
        EndpointOutbox::new(UpdateNumber(0), Box::new(spool.clone()), 1 << 20)
    }

    fn push_lines(outbox: &mut EndpointOutbox, count: u64) {
        for _ in 0..count {
            outbox.push(line(outbox.last().0 + 1));
        }
        outbox.flush_to_spool();
    }

    /// Drains all batches and checks that each line is the one that was pushed.
    fn drain_batches(outbox: &mut EndpointOutbox, max_bytes: usize) -> Vec<u64> {
        let mut numbers = Vec::new();
        while let Some((first, lines)) = outbox.next_batch(max_bytes).unwrap() {
            for (number, found) in (first.0..).zip(lines) {
                assert_eq!(found, line(number));
                numbers.push(number);
            }
        }
        numbers
    }

    #[test]
    fn a_daemon_goes_on_after_what_it_has_and_from_nowhere_else() {
        let mut outbox = outbox_over(&InspectableSpool::default());
        push_lines(&mut outbox, 10);
        outbox.ack(UpdateNumber(4));
        let possible: Vec<_> =
            (0..12).filter(|number| outbox.can_resume_after(UpdateNumber(*number))).collect();
        assert_eq!(possible, (4..=10).collect::<Vec<_>>());
        outbox.set_last_sent(Some(UpdateNumber(7)));
        assert_eq!(drain_batches(&mut outbox, 1), [8, 9, 10]);
        outbox.ack(UpdateNumber(99));
        assert!(!outbox.is_unacked());
    }

    #[test]
    fn nothing_is_held_in_memory_that_the_spool_has_and_nobody_waits_for() {
        let mut outbox = outbox_over(&InspectableSpool::default());
        push_lines(&mut outbox, 100);
        assert_eq!(outbox.recent.capacity(), 0);
        outbox.set_last_sent(Some(UpdateNumber(0)));
        push_lines(&mut outbox, 5000);
        assert!(outbox.recent_bytes <= RECENT_MAX);
        assert_eq!(drain_batches(&mut outbox, 1000), (1..=5100).collect::<Vec<_>>());
        assert_eq!(outbox.recent.capacity(), 0);
    }

    #[test]
    fn what_is_said_while_the_spool_is_away_counts_and_follows_when_it_is_back() {
        let spool = InspectableSpool::default();
        let mut outbox = outbox_over(&spool);
        push_lines(&mut outbox, 10);
        let taken_spool = outbox.take_spool_to_sync().unwrap();
        push_lines(&mut outbox, 20_000);
        assert!(outbox.is_full());
        assert_eq!(spool.bytes(), 1000);
        outbox.ack(UpdateNumber(15));
        outbox.return_spool(taken_spool, true);
        assert_eq!(spool.bytes(), (20_010 - 15) * 100);
        assert!(outbox.take_spool_to_sync().is_some(), "what came meanwhile is not synced");
    }

    #[test]
    fn a_spool_that_takes_nothing_is_made_up_for_by_a_daemon_that_does() {
        let spool = InspectableSpool::default();
        let mut outbox = outbox_over(&spool);
        push_lines(&mut outbox, 5);
        outbox.set_last_sent(Some(UpdateNumber(0)));
        spool.full.store(true, Ordering::Relaxed);
        push_lines(&mut outbox, 5);
        assert!(outbox.is_failing());
        assert_eq!(drain_batches(&mut outbox, 1000), (1..=10).collect::<Vec<_>>());
        outbox.ack(UpdateNumber(8));
        spool.full.store(false, Ordering::Relaxed);
        push_lines(&mut outbox, 1);
        assert!(outbox.is_failing(), "not tried again with each update");
        outbox.retry_spool();
        assert!(!outbox.is_failing());
        let kept = spool.inspect(|spool| spool.read(UpdateNumber(0), usize::MAX)).unwrap();
        assert_eq!(kept, [9, 10, 11].map(|number| (UpdateNumber(number), line(number))));
    }

    #[test]
    fn a_spool_that_failed_is_used_again_once_nothing_waits_for_it() {
        let spool = InspectableSpool::default();
        let mut outbox = outbox_over(&spool);
        outbox.set_last_sent(Some(UpdateNumber(0)));
        spool.full.store(true, Ordering::Relaxed);
        push_lines(&mut outbox, 3);
        assert!(outbox.is_failing());
        assert_eq!(drain_batches(&mut outbox, 1000), [1, 2, 3]);
        outbox.ack(UpdateNumber(3));
        outbox.retry_spool();
        assert!(!outbox.is_failing());
        spool.full.store(false, Ordering::Relaxed);
        push_lines(&mut outbox, 1);
        assert!(spool.bytes() > 0);
    }

    #[derive(Debug, Clone)]
    enum OutboxOperation {
        Push(u64),
        Ack(u64),
        Attach(u64),
        Detach,
        SendAll,
        Fill(bool),
        Retry,
        Sync,
    }

    fn operation() -> impl Strategy<Value = OutboxOperation> {
        prop_oneof![
            4 => (1u64..2000).prop_map(OutboxOperation::Push),
            2 => (0u64..3000).prop_map(OutboxOperation::Ack),
            1 => (0u64..3000).prop_map(OutboxOperation::Attach),
            1 => Just(OutboxOperation::Detach),
            3 => Just(OutboxOperation::SendAll),
            1 => any::<bool>().prop_map(OutboxOperation::Fill),
            1 => Just(OutboxOperation::Retry),
            1 => Just(OutboxOperation::Sync),
        ]
    }

    proptest! {
        #[test]
        fn whatever_happens_a_connection_is_given_all_that_follows_what_it_had(
            operations in proptest::collection::vec(operation(), 1..60),
        ) {
            let spool = InspectableSpool::default();
            let mut outbox = outbox_over(&spool);
            let (mut syncing_spool, mut next) = (None, None);
            for operation in operations {
                match operation {
                    OutboxOperation::Push(count) => push_lines(&mut outbox, count),
                    OutboxOperation::Ack(upto) => {
                        // A daemon only acknowledges what it was sent.
                        if let Some(next) = next {
                            outbox.ack(UpdateNumber(upto.min(next - 1)));
                        }
                    }
                    OutboxOperation::Attach(after) => {
                        let received = UpdateNumber(after.clamp(outbox.acked.0, outbox.last.0));
                        outbox.ack(received);
                        outbox.set_last_sent(Some(received));
                        next = Some(received.0 + 1);
                    }
                    OutboxOperation::Detach => {
                        outbox.set_last_sent(None);
                        next = None;
                    }
                    OutboxOperation::SendAll => {
                        let numbers = drain_batches(&mut outbox, 5000);
                        if let Some(next) = &mut next {
                            prop_assert!(numbers.iter().copied().eq((*next..).take(numbers.len())));
                            *next += numbers.len() as u64;
                            prop_assert!(syncing_spool.is_some() || *next == outbox.last.0 + 1, "all of it comes");
                        } else {
                            prop_assert!(numbers.is_empty());
                        }
                    }
                    OutboxOperation::Retry => outbox.retry_spool(),
                    OutboxOperation::Fill(full) => spool.full.store(full, Ordering::Relaxed),
                    OutboxOperation::Sync => match syncing_spool.take() {
                        Some(spool) => outbox.return_spool(spool, true),
                        None => syncing_spool = outbox.take_spool_to_sync(),
                    },
                }
                let unspooled: usize = outbox.recent.range(outbox.first_unspooled()..).map(Bytes::len).sum();
                prop_assert_eq!(outbox.unspooled_bytes, unspooled);
                prop_assert!(outbox.recent_bytes <= RECENT_MAX + unspooled + 100);
            }
        }
    }
}
