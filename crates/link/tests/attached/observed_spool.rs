//! A spool in memory that a test can look into and break.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use bytes::Bytes;
use parking_lot::Mutex;
use qd_link::{MemorySpool, Spool};
use qd_protocol::link::UpdateNumber;

/// A spool that counts syncs, and can be made to refuse appends or to panic.
#[derive(Clone, Default)]
pub(crate) struct ObservedSpool {
    spool: Arc<Mutex<MemorySpool>>,
    syncs: Arc<AtomicUsize>,
    pub(crate) broken: Arc<AtomicBool>,
    pub(crate) sync_panics: Arc<AtomicBool>,
}

impl ObservedSpool {
    pub(crate) fn inspect<T>(&self, inspector: impl FnOnce(&mut MemorySpool) -> T) -> T {
        inspector(&mut self.spool.lock())
    }

    pub(crate) fn syncs(&self) -> usize {
        self.syncs.load(Ordering::Relaxed)
    }
}

impl Spool for ObservedSpool {
    fn append(&mut self, first: UpdateNumber, lines: &[Bytes]) -> io::Result<()> {
        if self.broken.load(Ordering::Relaxed) {
            return Err(io::ErrorKind::StorageFull.into());
        }
        self.inspect(|spool| {
            let held = spool.read(UpdateNumber(0), usize::MAX)?;
            if let Some((last, _)) = held.last() {
                assert_eq!(first.0, last.0 + 1, "numbers without a gap");
            }
            spool.append(first, lines)
        })
    }

    fn sync(&mut self) -> io::Result<()> {
        self.syncs.fetch_add(1, Ordering::Relaxed);
        assert!(!self.sync_panics.load(Ordering::Relaxed), "a sync that panics");
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
