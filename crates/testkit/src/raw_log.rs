//! The disk itself, as the limit that durable figures are held against: records into a preallocated file, with one
//! fdatasync for all who wait. It knows nothing of the product, and does no more than group commit cannot do without.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use tokio::sync::oneshot;

/// Bytes of the file; the log begins again at its start when it is full.
const FILE_BYTES: u64 = 256 << 20;

/// A log that can do nothing but be durable.
#[derive(Debug)]
pub struct RawLog {
    shared: Arc<RawLogState>,
    writer: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct RawLogState {
    file: File,
    queue: Mutex<RawLogQueue>,
    not_empty: Condvar,
    /// Where the next record goes that shares its sync with nobody.
    sync_offset: AtomicU64,
}

#[derive(Debug, Default)]
struct RawLogQueue {
    records: Vec<u8>,
    callers: Vec<oneshot::Sender<()>>,
    is_closing: bool,
}

impl RawLog {
    /// Makes the file, all of its blocks written and synced: a sync then has only data to move.
    pub fn create(path: &Path) -> Self {
        let file = OpenOptions::new().create_new(true).write(true).read(true).open(path);
        let file = file.expect("the log's directory can be written");
        let zeros = vec![0; 1 << 20];
        for at in (0..FILE_BYTES).step_by(zeros.len()) {
            file.write_all_at(&zeros, at).expect("the disk has room for the log");
        }
        file.sync_all().expect("the disk can be synced");
        let shared = Arc::new(RawLogState {
            file,
            queue: Mutex::default(),
            not_empty: Condvar::new(),
            sync_offset: AtomicU64::new(0),
        });
        let for_writer = Arc::clone(&shared);
        let writer = std::thread::spawn(move || for_writer.run_writer());
        Self { shared, writer: Some(writer) }
    }

    /// Appends a record; it is synced when this returns.
    pub async fn append(&self, record: &[u8]) {
        let (synced, wait) = oneshot::channel();
        {
            let mut waiting = self.shared.lock();
            waiting.records.extend_from_slice(record);
            waiting.callers.push(synced);
        }
        self.shared.not_empty.notify_one();
        wait.await.expect("the writer lives as long as the log");
    }

    /// One record written behind the last and synced, with nobody to share the sync.
    pub fn sync_one(&self, record: &[u8]) -> Duration {
        let at = self.shared.sync_offset.fetch_add(record.len() as u64, Relaxed) % (FILE_BYTES / 2);
        let begun = Instant::now();
        self.shared.file.write_all_at(record, at).expect("the file can be written");
        self.shared.file.sync_data().expect("the disk can be synced");
        begun.elapsed()
    }

    /// Records of so many bytes per second, of producers that each wait for one before they make the next.
    pub async fn measure_throughput(self: &Arc<Self>, producers: usize, bytes: usize, time: Duration) -> f64 {
        let (stop, done) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let begun = Instant::now();
        let tasks: Vec<_> = (0..producers)
            .map(|_| {
                let (log, stop, done) = (Arc::clone(self), Arc::clone(&stop), Arc::clone(&done));
                tokio::spawn(async move {
                    let record = vec![b'x'; bytes];
                    while !stop.load(Relaxed) {
                        log.append(&record).await;
                        done.fetch_add(1, Relaxed);
                    }
                })
            })
            .collect();
        tokio::time::sleep(time).await;
        stop.store(true, Relaxed);
        for task in tasks {
            task.await.expect("a producer does not panic");
        }
        done.load(Relaxed) as f64 / begun.elapsed().as_secs_f64()
    }
}

impl Drop for RawLog {
    fn drop(&mut self) {
        self.shared.lock().is_closing = true;
        self.shared.not_empty.notify_one();
        if let Some(writer) = self.writer.take() {
            let _panicked = writer.join();
        }
    }
}

impl RawLogState {
    fn lock(&self) -> MutexGuard<'_, RawLogQueue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run_writer(&self) {
        let mut at = 0;
        loop {
            let mut waiting = self.lock();
            while waiting.callers.is_empty() {
                if waiting.is_closing {
                    return;
                }
                waiting = self.not_empty.wait(waiting).unwrap_or_else(PoisonError::into_inner);
            }
            let RawLogQueue { records, callers, .. } = &mut *waiting;
            let (records, callers) = (std::mem::take(records), std::mem::take(callers));
            drop(waiting);
            if at + records.len() as u64 > FILE_BYTES {
                at = 0;
            }
            self.file.write_all_at(&records, at).expect("the file can be written");
            self.file.sync_data().expect("the disk can be synced");
            at += records.len() as u64;
            for caller in callers {
                // Whoever does not wait any more does not need to know.
                let _gone = caller.send(());
            }
        }
    }
}
