//! How a daemon finds a worker that somebody else started: the worker keeps a record of itself in a folder and renews
//! the record's lease for as long as it lives. A record only makes a worker known; using it still takes a token.

use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use qd_protocol::limits::LEASE_S;
use qd_protocol::worker::WorkerRecord;
use qd_protocol::{Millis, WorkerId};
use tokio::task::JoinHandle;
use tokio::time::MissedTickBehavior;

/// A record has a few hundred bytes; a much larger file is not a record.
const RECORD_MAX: u64 = 64 << 10;
/// The record is for everybody whom the user's umask and the folder let in.
const RECORD_MODE: u32 = 0o666;
/// How often a lease is renewed. Two renewals may fail before it expires.
pub const RENEW_EVERY: Duration = Duration::from_secs(LEASE_S / 3);

/// Why a worker cannot be announced.
#[derive(Debug, thiserror::Error)]
pub enum LeaseAnnounceError {
    /// The name cannot be a plain file name.
    #[error("{0:?} cannot name a worker: 1 to 128 of A-Za-z0-9_.:- that begin with a letter or digit")]
    BadName(String),
    /// The folder or the file cannot be written.
    #[error("failed to write the worker's record: {0}")]
    Write(#[from] io::Error),
}

/// A published record. It is renewed until this is dropped, which removes it.
#[derive(Debug)]
pub struct LeaseAnnouncement {
    record_file: Arc<LeasedRecordFile>,
    renewal: JoinHandle<()>,
}

impl LeaseAnnouncement {
    /// Writes the record and starts renewing it. Creates the folder if needed. Must be called within a tokio runtime.
    pub fn publish(dir: &Path, record: WorkerRecord) -> Result<Self, LeaseAnnounceError> {
        // The rule for ids is also the rule for file names: no separator, no leading dot.
        if WorkerId::parse(&record.agent_id).is_err() {
            return Err(LeaseAnnounceError::BadName(record.agent_id));
        }
        let record_file =
            Arc::new(LeasedRecordFile { dir: dir.to_owned(), record, withdrawn: Mutex::new(false) });
        record_file.renew()?;
        let renewed = Arc::clone(&record_file);
        let renewal = tokio::spawn(async move {
            let mut ticks = tokio::time::interval(RENEW_EVERY);
            ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
            ticks.tick().await;
            loop {
                ticks.tick().await;
                if let Err(error) = renewed.renew() {
                    tracing::warn!("failed to renew the worker's record: {error}");
                }
            }
        });
        Ok(Self { record_file, renewal })
    }
}

impl Drop for LeaseAnnouncement {
    fn drop(&mut self) {
        self.renewal.abort();
        self.record_file.withdraw();
    }
}

/// A record of this process, without a lease; [`LeaseAnnouncement::publish`] sets the lease.
pub fn record_of_this_process(agent_id: &str, role: &str, endpoint: &str) -> WorkerRecord {
    WorkerRecord {
        agent_id: agent_id.to_owned(),
        role: role.to_owned(),
        labels: Vec::new(),
        endpoint: endpoint.to_owned(),
        pid: std::process::id(),
        start_ticks: None,
        version: env!("CARGO_PKG_VERSION").to_owned(),
        started_at: Millis::now(),
        lease_expires_at: Millis::default(),
    }
}

/// Writes a record into a folder with a fresh lease, and returns it as written. Nobody reads half a record. The `mode` of
/// the file is subject to the umask.
pub fn write_record(dir: &Path, record: &WorkerRecord, mode: u32) -> io::Result<WorkerRecord> {
    let lease_expires_at = Millis::now().plus(LEASE_S * 1000);
    let record = WorkerRecord { lease_expires_at, ..record.clone() };
    // Readers ignore this name because of its leading dot, and the pid keeps other processes from writing to it.
    let draft = dir.join(format!(".{}.{}", record.agent_id, std::process::id()));
    let mut file = fs::OpenOptions::new().write(true).create(true).truncate(true).mode(mode).open(&draft)?;
    file.write_all(&serde_json::to_vec(&record)?)?;
    fs::rename(&draft, record_path(dir, &record.agent_id))?;
    Ok(record)
}

/// The workers in a folder whose lease has not expired, sorted by name. Files that are not records are ignored.
pub fn live_records(dir: &Path, now: Millis) -> Vec<WorkerRecord> {
    let mut records = read_records(dir);
    records.retain(|record| record.lease_expires_at > now);
    records
}

/// Every record in a folder, of living and dead workers, sorted by id. Files that are not records are ignored.
pub fn read_records(dir: &Path) -> Vec<WorkerRecord> {
    let Ok(entries) = fs::read_dir(dir) else { return Vec::new() };
    let mut records: Vec<WorkerRecord> =
        entries.filter_map(|entry| read_record(&entry.ok()?.path())).collect();
    records.sort_by(|a, b| a.agent_id.cmp(&b.agent_id));
    records
}

/// The record in this file, if the file is a record and is named after its id.
fn read_record(path: &Path) -> Option<WorkerRecord> {
    let id = path.file_name()?.to_str()?.strip_suffix(".json")?;
    if fs::metadata(path).ok()?.len() > RECORD_MAX {
        return None;
    }
    let record: WorkerRecord = serde_json::from_slice(&fs::read(path).ok()?).ok()?;
    (record.agent_id == id && WorkerId::parse(id).is_ok()).then_some(record)
}

#[derive(Debug)]
struct LeasedRecordFile {
    dir: PathBuf,
    record: WorkerRecord,
    /// Held during every write and the removal, so no renewal can follow the removal.
    withdrawn: Mutex<bool>,
}

impl LeasedRecordFile {
    fn renew(&self) -> io::Result<()> {
        let withdrawn = self.withdrawn.lock();
        if *withdrawn {
            return Ok(());
        }
        fs::create_dir_all(&self.dir)?;
        write_record(&self.dir, &self.record, RECORD_MODE)?;
        Ok(())
    }

    /// Removes the record, unless another worker has taken the name in the meantime.
    fn withdraw(&self) {
        let mut withdrawn = self.withdrawn.lock();
        *withdrawn = true;
        let ours = |record: &WorkerRecord| {
            (&record.agent_id, record.pid, record.started_at)
                == (&self.record.agent_id, self.record.pid, self.record.started_at)
        };
        if read_records(&self.dir).iter().any(ours)
            && let Err(error) = fs::remove_file(record_path(&self.dir, &self.record.agent_id))
        {
            tracing::warn!("failed to remove the worker's record: {error}");
        }
    }
}

fn record_path(dir: &Path, agent_id: &str) -> PathBuf {
    dir.join(format!("{agent_id}.json"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(id: &str) -> WorkerRecord {
        record_of_this_process(id, "test", "ws://127.0.0.1:1")
    }

    fn live_names(dir: &Path, now: Millis) -> Vec<String> {
        live_records(dir, now).into_iter().map(|record| record.agent_id).collect()
    }

    #[tokio::test(start_paused = true)]
    async fn a_record_is_there_renewed_and_gone_with_its_worker() {
        let home = tempfile::tempdir().unwrap();
        let dir = home.path().join("made");
        let announcement = LeaseAnnouncement::publish(&dir, record("a")).unwrap();
        assert_eq!(live_names(&dir, Millis::now()), ["a"]);
        fs::remove_file(dir.join("a.json")).unwrap();
        tokio::time::sleep(RENEW_EVERY + Duration::from_secs(1)).await;
        assert_eq!(live_names(&dir, Millis::now()), ["a"]);
        drop(announcement);
        assert_eq!(fs::read_dir(&dir).unwrap().count(), 0);
    }

    #[tokio::test]
    async fn a_record_whose_lease_is_over_is_not_used() {
        let dir = tempfile::tempdir().unwrap();
        let _announcement = LeaseAnnouncement::publish(dir.path(), record("a")).unwrap();
        let over = live_records(dir.path(), Millis::now())[0].lease_expires_at;
        assert_eq!(live_names(dir.path(), over), [""; 0]);
    }

    #[tokio::test]
    async fn a_name_that_is_a_path_is_refused_and_what_is_no_record_harms_nobody() {
        let dir = tempfile::tempdir().unwrap();
        for bad in ["../a", "a/b", ".a", "", "a\n"] {
            let refused = LeaseAnnouncement::publish(dir.path(), record(bad));
            assert!(matches!(refused, Err(LeaseAnnounceError::BadName(_))), "{bad:?}");
        }
        fs::write(dir.path().join("half.json"), "{\"agent_id\":").unwrap();
        fs::create_dir(dir.path().join("folder.json")).unwrap();
        let stolen = WorkerRecord { lease_expires_at: Millis(u64::MAX / 2), ..record("somebody") };
        fs::write(dir.path().join("else.json"), serde_json::to_string(&stolen).unwrap()).unwrap();
        let _announcement = LeaseAnnouncement::publish(dir.path(), record("a")).unwrap();
        assert_eq!(live_names(dir.path(), Millis::now()), ["a"]);
    }

    #[tokio::test]
    async fn a_worker_leaves_the_record_of_one_that_took_its_name() {
        let dir = tempfile::tempdir().unwrap();
        let first = LeaseAnnouncement::publish(dir.path(), record("a")).unwrap();
        let later = WorkerRecord { started_at: Millis::now().plus(1), ..record("a") };
        let _second = LeaseAnnouncement::publish(dir.path(), later).unwrap();
        drop(first);
        assert_eq!(live_names(dir.path(), Millis::now()), ["a"]);
    }

    #[test]
    fn only_records_that_bear_their_own_name_are_found() {
        let dir = tempfile::tempdir().unwrap();
        let put = |name: &str, text: &str| fs::write(dir.path().join(name), text).unwrap();
        let (first, second) = (record("a"), record("b"));
        put("b.json", &serde_json::to_string(&second).unwrap());
        put("a.json", &serde_json::to_string(&first).unwrap());
        put("c.json", &serde_json::to_string(&first).unwrap());
        put("d.json", "{\"agent_id\":");
        put("e.json.tmp", &serde_json::to_string(&record("e")).unwrap());
        assert_eq!(read_records(dir.path()), [first, second]);
        assert_eq!(read_records(&dir.path().join("absent")), []);
    }
}
