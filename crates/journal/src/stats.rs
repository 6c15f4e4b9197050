//! Counters for operators, kept without locks. Everything counts from the start of the process. The journal never reads
//! them to decide anything.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

/// Upper bounds of the commit latency buckets, in microseconds.
pub const COMMIT_US_BOUNDS: [u64; 12] =
    [100, 250, 500, 1_000, 2_500, 5_000, 10_000, 25_000, 50_000, 100_000, 500_000, 1_000_000];
/// Upper bounds of the batch size buckets, in events.
pub const BATCH_EVENTS_BOUNDS: [u64; 11] = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024];

#[derive(Debug)]
pub struct JournalStats {
    pub events: AtomicU64,
    /// Committed transactions. Each is one sync.
    pub commits: AtomicU64,
    /// Transactions that failed and were rolled back.
    pub failed_commits: AtomicU64,
    /// Appends refused because they contradict the journal.
    pub violations: AtomicU64,
    /// Time from the start of a transaction to the end of its sync, in microseconds.
    pub commit_us: Histogram<12>,
    /// Events per transaction.
    pub batch_events: Histogram<11>,
    /// Bytes used in SQLite's log at the last checkpoint.
    pub log_bytes: AtomicU64,
    /// Open subscriptions.
    pub subscriptions: AtomicUsize,
    /// 1 while the disk reserve is spent, else 0.
    pub reserve_spent: AtomicUsize,
}

impl Default for JournalStats {
    fn default() -> Self {
        Self {
            events: AtomicU64::default(),
            commits: AtomicU64::default(),
            failed_commits: AtomicU64::default(),
            violations: AtomicU64::default(),
            commit_us: Histogram::new(&COMMIT_US_BOUNDS),
            batch_events: Histogram::new(&BATCH_EVENTS_BOUNDS),
            log_bytes: AtomicU64::default(),
            subscriptions: AtomicUsize::default(),
            reserve_spent: AtomicUsize::default(),
        }
    }
}

impl JournalStats {
    pub(crate) fn record_commit(&self, events: u64, elapsed: Duration) {
        self.events.fetch_add(events, Relaxed);
        self.commits.fetch_add(1, Relaxed);
        self.commit_us.add(u64::try_from(elapsed.as_micros()).unwrap_or(u64::MAX));
        self.batch_events.add(events);
    }
}

/// Counts of values in fixed buckets.
#[derive(Debug)]
pub struct Histogram<const N: usize> {
    bounds: &'static [u64; N],
    buckets: [AtomicU64; N],
    above: AtomicU64,
    sum: AtomicU64,
}

impl<const N: usize> Histogram<N> {
    fn new(bounds: &'static [u64; N]) -> Self {
        Self {
            bounds,
            buckets: std::array::from_fn(|_| AtomicU64::default()),
            above: AtomicU64::default(),
            sum: AtomicU64::default(),
        }
    }

    fn add(&self, value: u64) {
        let at = self.bounds.partition_point(|bound| *bound < value);
        self.buckets.get(at).unwrap_or(&self.above).fetch_add(1, Relaxed);
        self.sum.fetch_add(value, Relaxed);
    }

    /// For every bound, the number of values up to and including it, as Prometheus expects.
    pub fn cumulative(&self) -> Vec<(u64, u64)> {
        let mut total = 0;
        self.bounds
            .iter()
            .zip(&self.buckets)
            .map(|(bound, bucket)| {
                total += bucket.load(Relaxed);
                (*bound, total)
            })
            .collect()
    }

    /// The number of values.
    pub fn count(&self) -> u64 {
        self.buckets.iter().map(|bucket| bucket.load(Relaxed)).sum::<u64>() + self.above.load(Relaxed)
    }

    pub fn sum(&self) -> u64 {
        self.sum.load(Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_histogram_counts_every_value_once() {
        let histogram = Histogram::new(&BATCH_EVENTS_BOUNDS);
        for value in [0, 1, 2, 3, 1024, 5000] {
            histogram.add(value);
        }
        assert_eq!(histogram.count(), 6);
        assert_eq!(histogram.sum(), 6030);
        assert_eq!(histogram.cumulative()[..3], [(1, 2), (2, 3), (4, 4)]);
        assert_eq!(histogram.cumulative()[10], (1024, 5));
    }
}
