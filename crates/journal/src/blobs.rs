//! Texts and files too large for an event. Each is a file in `blobs/`, named by the SHA-256 of its content. A file is
//! complete and synced before it gets its name, so every name that is known can be read.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;

use bytes::Bytes;
use qd_files::{DRAFT_PREFIX, replace_file};
use qd_protocol::Millis;
use qd_protocol::text::BlobRef;
use sha2::{Digest, Sha256};
use tokio::sync::Semaphore;

use crate::error::{BlobError, JournalOpenError};

/// Files that are written or read at the same time.
const CONCURRENT_MAX: usize = 4;

/// The store for large texts and files.
#[derive(Debug, Clone)]
pub struct BlobStore {
    dir: Arc<Path>,
    permits: Arc<Semaphore>,
}

/// A stored file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BlobFile {
    pub blob: BlobRef,
    /// When the file was last put. The event that refers to it may be appended only a moment later.
    pub put_at: Millis,
}

impl BlobStore {
    /// Creates the directory and removes files that a crash left incomplete.
    pub(crate) fn open(home: &Path) -> Result<Self, JournalOpenError> {
        let dir = home.join("blobs");
        let doing = "create the directory for large texts";
        fs::DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(&dir)
            .map_err(JournalOpenError::io(doing))?;
        for entry in fs::read_dir(&dir).map_err(JournalOpenError::io(doing))? {
            let entry = entry.map_err(JournalOpenError::io(doing))?;
            if entry.file_name().to_string_lossy().starts_with(DRAFT_PREFIX) {
                fs::remove_file(entry.path()).map_err(JournalOpenError::io(doing))?;
            }
        }
        Ok(Self { dir: dir.into(), permits: Arc::new(Semaphore::new(CONCURRENT_MAX)) })
    }

    /// Stores some bytes. They are synced when this returns. The same bytes are stored only once.
    pub async fn put(&self, bytes: impl Into<Bytes>) -> Result<BlobRef, BlobError> {
        let (bytes, blobs) = (bytes.into(), self.clone());
        self.run_blocking(move || blobs.put_blocking(&bytes)).await
    }

    /// Reads the content stored under a hash.
    pub async fn get(&self, sha256: &str) -> Result<Option<Vec<u8>>, BlobError> {
        let Some(path) = self.path(sha256) else { return Ok(None) };
        self.run_blocking(move || absent_is_none(fs::read(path))).await
    }

    pub async fn list(&self) -> Result<Vec<BlobFile>, BlobError> {
        let dir = self.dir.clone();
        self.run_blocking(move || list(&dir)).await
    }

    /// Removes a file. Returns whether it existed.
    pub async fn remove(&self, sha256: &str) -> Result<bool, BlobError> {
        let Some(path) = self.path(sha256) else { return Ok(false) };
        self.run_blocking(move || Ok(absent_is_none(fs::remove_file(path))?.is_some())).await
    }

    async fn run_blocking<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> io::Result<T> + Send + 'static,
    ) -> Result<T, BlobError> {
        let permit =
            self.permits.clone().acquire_owned().await.map_err(|_| BlobError::Io("closed".to_owned()))?;
        let work = move || {
            let _permit = permit;
            work()
        };
        match tokio::task::spawn_blocking(work).await {
            Ok(result) => Ok(result?),
            Err(failure) => Err(BlobError::Io(failure.to_string())),
        }
    }

    /// The path of a blob. Only a hash is a valid name, so no name can leave the directory.
    fn path(&self, sha256: &str) -> Option<PathBuf> {
        is_hash(sha256.as_bytes()).then(|| self.dir.join(sha256))
    }

    fn put_blocking(&self, bytes: &[u8]) -> io::Result<BlobRef> {
        let sha256 = hex::encode(Sha256::digest(bytes));
        let path = self.dir.join(&sha256);
        let blob = BlobRef { sha256, size: bytes.len() as u64 };
        if let Some(existing) = absent_is_none(File::open(&path))?
            && existing.metadata()?.len() == blob.size
        {
            // Make the file young again, so that a running garbage collection does not remove it.
            existing.set_modified(SystemTime::now())?;
            return Ok(blob);
        }
        replace_file(&path, bytes)?;
        Ok(blob)
    }
}

/// Whether this is a lower-case hexadecimal SHA-256.
pub(crate) fn is_hash(text: &[u8]) -> bool {
    text.len() == 64 && text.iter().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'))
}

fn list(dir: &Path) -> io::Result<Vec<BlobFile>> {
    let mut files = Vec::new();
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        let Ok(sha256) = entry.file_name().into_string() else { continue };
        if !is_hash(sha256.as_bytes()) {
            continue;
        }
        let Some(metadata) = absent_is_none(entry.metadata())? else { continue };
        let modified = metadata.modified()?.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let put_at = Millis(u64::try_from(modified.as_millis()).unwrap_or(u64::MAX));
        files.push(BlobFile { blob: BlobRef { sha256, size: metadata.len() }, put_at });
    }
    files.sort_by(|a, b| a.blob.sha256.cmp(&b.blob.sha256));
    Ok(files)
}

fn absent_is_none<T>(result: io::Result<T>) -> io::Result<Option<T>> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[tokio::test]
    async fn a_large_text_is_kept_once_privately_and_under_its_hash() {
        let home = tempfile::tempdir().unwrap();
        let blobs = BlobStore::open(home.path()).unwrap();
        let blob = blobs.put(&b"abc"[..]).await.unwrap();
        assert_eq!(blob.sha256, "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
        assert_eq!(blob.size, 3);
        assert_eq!(blobs.put(b"abc".to_vec()).await.unwrap(), blob);
        let files = blobs.list().await.unwrap();
        assert_eq!(files.iter().map(|file| &file.blob).collect::<Vec<_>>(), [&blob]);
        let mode = home.path().join("blobs").join(&blob.sha256).metadata().unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        assert_eq!(blobs.get(&blob.sha256).await.unwrap().as_deref(), Some(&b"abc"[..]));
        assert!(blobs.remove(&blob.sha256).await.unwrap());
        assert!(!blobs.remove(&blob.sha256).await.unwrap());
        assert_eq!(blobs.get(&blob.sha256).await.unwrap(), None);
    }

    #[tokio::test]
    async fn only_a_hash_is_the_name_of_a_large_text() {
        let home = tempfile::tempdir().unwrap();
        let blobs = BlobStore::open(home.path()).unwrap();
        fs::write(home.path().join("secret"), "x").unwrap();
        for name in ["../secret", "", "..", &"A".repeat(64), &format!("../{}", "a".repeat(61))] {
            assert_eq!(blobs.get(name).await.unwrap(), None, "{name}");
            assert!(!blobs.remove(name).await.unwrap(), "{name}");
        }
    }

    #[tokio::test]
    async fn what_a_crash_left_half_written_is_gone_after_the_next_start() {
        let home = tempfile::tempdir().unwrap();
        let blobs = BlobStore::open(home.path()).unwrap();
        let kept = blobs.put(&b"whole"[..]).await.unwrap();
        let half = home.path().join("blobs").join(".unfinished-7");
        fs::write(&half, "ha").unwrap();
        let blobs = BlobStore::open(home.path()).unwrap();
        assert!(!half.exists());
        assert!(blobs.get(&kept.sha256).await.unwrap().is_some());
    }
}
