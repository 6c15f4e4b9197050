//! What a seat has said and the daemon has not acknowledged: numbered, kept in the spool, and the newest of it at hand.
//! No task, lock or connection is known here; the spool is the only thing that is touched.

use std::collections::VecDeque;
use std::{fmt, io};

use bytes::Bytes;
use qd_protocol::link::UpdateNumber;

use crate::spool::Spool;
use crate::update_window::WINDOW_BYTES;

/// What is kept at hand for a connection that is a little behind; one that is further behind is served from the spool.
const RECENT_MAX: usize = 256 << 10;

/// See the module.
pub(super) struct EndpointOutbox {
    /// `None` while it is being synced elsewhere.
    spool: Option<Box<dyn Spool>>,
    spool_max: u64,
    /// What the spool held when it was last seen.
    spool_bytes: u64,
    /// Something is in the spool that a power cut would take.
    unsynced: bool,
    /// The spool failed to take what it was given; this is said once.
    failing: bool,
    /// The last number that was given.
    last: UpdateNumber,
    /// Everything up to here is acknowledged, and forgotten.
    acked: UpdateNumber,
    /// Everything up to here is in the spool, or acknowledged.
    spooled: UpdateNumber,
    /// The last number that the connection has been given, if there is a connection.
    last_sent: Option<UpdateNumber>,
    /// The newest lines, up to `last` without a hole: at least those that are not in the spool.
    recent: VecDeque<Bytes>,
    recent_bytes: usize,
    /// Of these, what is not in the spool.
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

    /// The last number that was given.
    pub(super) fn last(&self) -> UpdateNumber {
        self.last
    }

    /// Whether something waits to be acknowledged.
    pub(super) fn is_unacked(&self) -> bool {
        self.acked < self.last
    }

    /// Whether so much waits that the agent has to.
    pub(super) fn is_full(&self) -> bool {
        self.spool_bytes + self.unspooled_bytes as u64 >= self.spool_max
            || self.unspooled_bytes >= WINDOW_BYTES
    }

    /// Whether a daemon that has taken everything up to here can go on from here.
    pub(super) fn can_resume_after(&self, taken: UpdateNumber) -> bool {
        (self.acked..=self.last).contains(&taken)
    }

    /// Whether the spool does not take what it is given.
    pub(super) fn is_failing(&self) -> bool {
        self.failing
    }

    /// Takes in something said, which gets the next number; for all of a batch, [`Store::write_through`] comes after.
    pub(super) fn push(&mut self, line: Bytes) {
        self.last.0 += 1;
        self.recent_bytes += line.len();
        self.unspooled_bytes += line.len();
        self.recent.push_back(line);
    }

    /// Everything up to here need not be kept.
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

    /// A connection begins after this number, or there is none any more.
    pub(super) fn set_last_sent(&mut self, given: Option<UpdateNumber>) {
        self.last_sent = given;
        self.drop_recent();
    }

    /// What the connection gets next: all that waits for it, up to about `max_bytes`, and the number of the first.
    pub(super) fn next_batch(&mut self, max_bytes: usize) -> io::Result<Option<(UpdateNumber, Vec<Bytes>)>> {
        let Some(given) = self.last_sent.filter(|given| *given < self.last) else { return Ok(None) };
        let behind = usize::try_from(self.last.0 - given.0).unwrap_or(usize::MAX);
        let lines = match self.recent.len().checked_sub(behind) {
            Some(skip) => self.read_recent(skip, max_bytes),
            None => self.read_spool(given, max_bytes)?,
        };
        if lines.is_empty() {
            return Ok(None);
        }
        self.last_sent = Some(UpdateNumber(given.0 + lines.len() as u64));
        self.drop_recent();
        Ok(Some((UpdateNumber(given.0 + 1), lines)))
    }

    /// Gives the spool what it has not taken yet.
    pub(super) fn flush_to_spool(&mut self) {
        let unspooled = self.first_unspooled();
        if let Some(spool) = &mut self.spool
            && self.spooled < self.last
        {
            let lines = &self.recent.make_contiguous()[unspooled..];
            match spool.append(UpdateNumber(self.spooled.0 + 1), lines) {
                Ok(()) => {
                    self.spooled = self.last;
                    self.unspooled_bytes = 0;
                    self.unsynced = true;
                    self.failing = false;
                }
                Err(error) if !self.failing => {
                    tracing::error!(%error, "the spool takes nothing; the agent waits unless the daemon takes it");
                    self.failing = true;
                }
                Err(_) => {}
            }
            self.spool_bytes = spool.bytes();
        }
        self.drop_recent();
    }

    /// Gives the spool away to be synced where it may take long, if there is something to sync. What is said meanwhile
    /// waits in memory.
    pub(super) fn take_spool_to_sync(&mut self) -> Option<Box<dyn Spool>> {
        if self.unsynced { self.spool.take() } else { None }
    }

    /// Takes the spool back.
    pub(super) fn return_spool(&mut self, spool: Box<dyn Spool>, synced: bool) {
        self.spool = Some(spool);
        self.unsynced &= !synced;
        self.trim();
        self.flush_to_spool();
    }

    /// Where in `recent` those begin that are not in the spool.
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
            return Err(io::Error::new(io::ErrorKind::InvalidData, "the spool has a hole"));
        }
        Ok(read.into_iter().map(|(_, line)| line).collect())
    }

    fn trim(&mut self) {
        if let Some(spool) = &mut self.spool {
            if let Err(error) = spool.trim(self.acked) {
                tracing::warn!(%error, "the spool could not forget what was acknowledged");
            }
            self.spool_bytes = spool.bytes();
        }
    }

    /// Drops what is in the spool and nobody needs at hand: what the connection has, and what is more than a little.
    fn drop_recent(&mut self) {
        while let Some(line) = self.recent.front() {
            let number = UpdateNumber(self.last.0 + 1 - self.recent.len() as u64);
            let needed =
                self.last_sent.is_some_and(|given| number > given) && self.recent_bytes <= RECENT_MAX;
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
        let Self { last, acked, spooled, last_sent: given, recent, .. } = self;
        f.debug_struct("Store")
            .field("last", last)
            .field("acked", acked)
            .field("spooled", spooled)
            .field("given", given)
            .field("recent", &recent.len())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::sync::{Arc, Mutex};

    use proptest::prelude::*;

    use super::*;
    use crate::spool::MemorySpool;

    /// A spool that can be looked into, and made to take nothing.
    #[derive(Clone, Default)]
    struct InspectableSpool {
        spool: Arc<Mutex<MemorySpool>>,
        full: Arc<AtomicBool>,
    }

    impl InspectableSpool {
        fn inspect<T>(&self, look: impl FnOnce(&mut MemorySpool) -> T) -> T {
            look(&mut self.spool.lock().expect("no test panics with it"))
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

    fn push_lines(store: &mut EndpointOutbox, count: u64) {
        for _ in 0..count {
            store.push(line(store.last().0 + 1));
        }
        store.flush_to_spool();
    }

    /// All that the connection is given, which has to be what was said.
    fn drain_batches(store: &mut EndpointOutbox, max_bytes: usize) -> Vec<u64> {
        let mut numbers = Vec::new();
        while let Some((first, lines)) = store.next_batch(max_bytes).unwrap() {
            for (number, found) in (first.0..).zip(lines) {
                assert_eq!(found, line(number));
                numbers.push(number);
            }
        }
        numbers
    }

    #[test]
    fn a_daemon_goes_on_after_what_it_has_and_from_nowhere_else() {
        let mut store = outbox_over(&InspectableSpool::default());
        push_lines(&mut store, 10);
        store.ack(UpdateNumber(4));
        let possible: Vec<_> = (0..12).filter(|taken| store.can_resume_after(UpdateNumber(*taken))).collect();
        assert_eq!(possible, (4..=10).collect::<Vec<_>>());
        store.set_last_sent(Some(UpdateNumber(7)));
        assert_eq!(drain_batches(&mut store, 1), [8, 9, 10]);
        store.ack(UpdateNumber(99));
        assert!(!store.is_unacked());
    }

    #[test]
    fn nothing_is_held_in_memory_that_the_spool_has_and_nobody_waits_for() {
        let mut store = outbox_over(&InspectableSpool::default());
        push_lines(&mut store, 100);
        assert_eq!(store.recent.capacity(), 0);
        store.set_last_sent(Some(UpdateNumber(0)));
        push_lines(&mut store, 5000);
        assert!(store.recent_bytes <= RECENT_MAX);
        assert_eq!(drain_batches(&mut store, 1000), (1..=5100).collect::<Vec<_>>());
        assert_eq!(store.recent.capacity(), 0);
    }

    #[test]
    fn what_is_said_while_the_spool_is_away_counts_and_follows_when_it_is_back() {
        let spool = InspectableSpool::default();
        let mut store = outbox_over(&spool);
        push_lines(&mut store, 10);
        let lent = store.take_spool_to_sync().unwrap();
        push_lines(&mut store, 20_000);
        assert!(store.is_full());
        assert_eq!(spool.bytes(), 1000);
        store.ack(UpdateNumber(15));
        store.return_spool(lent, true);
        assert_eq!(spool.bytes(), (20_010 - 15) * 100);
        assert!(store.take_spool_to_sync().is_some(), "what came meanwhile is not synced");
    }

    #[test]
    fn a_spool_that_takes_nothing_is_made_up_for_by_a_daemon_that_does() {
        let spool = InspectableSpool::default();
        let mut store = outbox_over(&spool);
        push_lines(&mut store, 5);
        store.set_last_sent(Some(UpdateNumber(0)));
        spool.full.store(true, Ordering::Relaxed);
        push_lines(&mut store, 5);
        assert!(store.is_failing());
        assert_eq!(drain_batches(&mut store, 1000), (1..=10).collect::<Vec<_>>());
        store.ack(UpdateNumber(8));
        spool.full.store(false, Ordering::Relaxed);
        store.flush_to_spool();
        assert!(!store.is_failing());
        let kept = spool.inspect(|spool| spool.read(UpdateNumber(0), usize::MAX)).unwrap();
        assert_eq!(kept, [(UpdateNumber(9), line(9)), (UpdateNumber(10), line(10))]);
    }

    #[derive(Debug, Clone)]
    enum OutboxOperation {
        Push(u64),
        Ack(u64),
        Attach(u64),
        Detach,
        Give,
        Fill(bool),
        Sync,
    }

    fn operation() -> impl Strategy<Value = OutboxOperation> {
        prop_oneof![
            4 => (1u64..2000).prop_map(OutboxOperation::Push),
            2 => (0u64..3000).prop_map(OutboxOperation::Ack),
            1 => (0u64..3000).prop_map(OutboxOperation::Attach),
            1 => Just(OutboxOperation::Detach),
            3 => Just(OutboxOperation::Give),
            1 => any::<bool>().prop_map(OutboxOperation::Fill),
            1 => Just(OutboxOperation::Sync),
        ]
    }

    proptest! {
        #[test]
        fn whatever_happens_a_connection_is_given_all_that_follows_what_it_had(
            deeds in proptest::collection::vec(operation(), 1..60),
        ) {
            let spool = InspectableSpool::default();
            let mut store = outbox_over(&spool);
            let (mut lent, mut next) = (None, None);
            for deed in deeds {
                match deed {
                    OutboxOperation::Push(count) => push_lines(&mut store, count),
                    OutboxOperation::Ack(upto) => {
                        // A daemon acknowledges what it was given.
                        if let Some(next) = next {
                            store.ack(UpdateNumber(upto.min(next - 1)));
                        }
                    }
                    OutboxOperation::Attach(after) => {
                        let taken = UpdateNumber(after.clamp(store.acked.0, store.last.0));
                        store.ack(taken);
                        store.set_last_sent(Some(taken));
                        next = Some(taken.0 + 1);
                    }
                    OutboxOperation::Detach => {
                        store.set_last_sent(None);
                        next = None;
                    }
                    OutboxOperation::Give => {
                        let numbers = drain_batches(&mut store, 5000);
                        if let Some(next) = &mut next {
                            prop_assert!(numbers.iter().copied().eq((*next..).take(numbers.len())));
                            *next += numbers.len() as u64;
                            prop_assert!(lent.is_some() || *next == store.last.0 + 1, "all of it comes");
                        } else {
                            prop_assert!(numbers.is_empty());
                        }
                    }
                    OutboxOperation::Fill(full) => spool.full.store(full, Ordering::Relaxed),
                    OutboxOperation::Sync => match lent.take() {
                        Some(spool) => store.return_spool(spool, true),
                        None => lent = store.take_spool_to_sync(),
                    },
                }
                let unspooled: usize = store.recent.range(store.first_unspooled()..).map(Bytes::len).sum();
                prop_assert_eq!(store.unspooled_bytes, unspooled);
                prop_assert!(store.recent_bytes <= RECENT_MAX + unspooled + 100);
            }
        }
    }
}
