//! The disk itself, as the limit that durable figures are compared with: records written to a preallocated file, with
//! one fdatasync shared by all waiting callers. It knows nothing of the product, and does only what group commit
//! cannot do without.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, MutexGuard};
use tokio::sync::oneshot;

/// The size of the file. The log wraps around when it is full.
const FILE_BYTES: u64 = 256 << 20;

/// A log that does nothing but make records durable.
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
    /// Where [`RawLog::sync_one`] writes its next record.
    sync_offset: AtomicU64,
}

#[derive(Debug, Default)]
struct RawLogQueue {
    records: Vec<u8>,
    callers: Vec<oneshot::Sender<()>>,
    is_closing: bool,
}

impl RawLog {
    /// Creates the file with all blocks written and synced, so that a later sync only has data to move.
    pub fn create(path: &Path) -> Self {
        let file = OpenOptions::new().create_new(true).write(true).read(true).open(path);
        let file = file.expect("the log's directory can be written");
        let zeros = vec![0; 1 << 20];
        for offset in (0..FILE_BYTES).step_by(zeros.len()) {
            file.write_all_at(&zeros, offset).expect("the disk has room for the log");
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

    /// Appends a record, and returns when it is synced.
    pub async fn append(&self, record: &[u8]) {
        let (synced, wait) = oneshot::channel();
        {
            let mut queue = self.shared.lock();
            queue.records.extend_from_slice(record);
            queue.callers.push(synced);
        }
        self.shared.not_empty.notify_one();
        wait.await.expect("the writer lives as long as the log");
    }

    /// Writes one record and syncs it alone. Returns the time it took.
    pub fn sync_one(&self, record: &[u8]) -> Duration {
        let offset = self.shared.sync_offset.fetch_add(record.len() as u64, Relaxed) % (FILE_BYTES / 2);
        let started = Instant::now();
        self.shared.file.write_all_at(record, offset).expect("the file can be written");
        self.shared.file.sync_data().expect("the disk can be synced");
        started.elapsed()
    }

    /// Measures records per second: `producers` tasks each append records of `bytes` bytes, one after another, for
    /// `time`.
    pub async fn measure_throughput(self: &Arc<Self>, producers: usize, bytes: usize, time: Duration) -> f64 {
        let (stop, done) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let started = Instant::now();
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
        done.load(Relaxed) as f64 / started.elapsed().as_secs_f64()
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
        self.queue.lock()
    }

    fn run_writer(&self) {
        let mut offset = 0;
        loop {
            let mut queue = self.lock();
            while queue.callers.is_empty() {
                if queue.is_closing {
                    return;
                }
                self.not_empty.wait(&mut queue);
            }
            let RawLogQueue { records, callers, .. } = &mut *queue;
            let (records, callers) = (std::mem::take(records), std::mem::take(callers));
            drop(queue);
            if offset + records.len() as u64 > FILE_BYTES {
                offset = 0;
            }
            self.file.write_all_at(&records, offset).expect("the file can be written");
            self.file.sync_data().expect("the disk can be synced");
            offset += records.len() as u64;
            for caller in callers {
                // The caller may no longer wait.
                let _gone = caller.send(());
            }
        }
    }
}
