//! The directories of a joined worker: the folder for its spools, which belongs to this process alone, and the
//! directories in which sessions of another machine work here.

use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use qd_link::record::{self, WorkerFiles, WorkerLock};
use qd_protocol::WorkerId;

use super::random_bytes;

/// The spool folder of one process, with the lock that shows that the process is alive. Dropping it removes both:
/// updates that the daemon has not received by then cannot be asked for any more.
#[derive(Debug)]
pub(super) struct SpoolFolder {
    name: String,
    path: PathBuf,
    files: WorkerFiles,
    _lock: WorkerLock,
}

impl SpoolFolder {
    /// Creates a folder for this process, and removes those of dead processes.
    pub(super) fn create(dir: &Path) -> io::Result<Self> {
        DirBuilder::new().mode(0o700).recursive(true).create(dir)?;
        remove_dead_folders(dir)?;
        let name =
            WorkerId::from_random(&random_bytes::<26>()).as_str().replacen(WorkerId::PREFIX, "host-", 1);
        let files = WorkerFiles::of(dir, &name).ok_or(io::ErrorKind::InvalidFilename)?;
        let lock = WorkerLock::try_acquire(&files)?.ok_or(io::ErrorKind::ResourceBusy)?;
        let path = dir.join(&name);
        DirBuilder::new().mode(0o700).create(&path)?;
        Ok(Self { name, path, files, _lock: lock })
    }

    /// The random name of this process, as the daemon knows it.
    pub(super) fn name(&self) -> &str {
        &self.name
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for SpoolFolder {
    fn drop(&mut self) {
        let removed = fs::remove_dir_all(&self.path).and_then(|()| self.files.remove());
        if let Err(error) = removed {
            tracing::warn!(%error, "failed to remove the spool folder of a joined worker");
        }
    }
}

/// Removes the folders whose process is dead.
fn remove_dead_folders(dir: &Path) -> io::Result<()> {
    for entry in fs::read_dir(dir)?.flatten() {
        let name = entry.file_name();
        let Some(name) = name.to_str() else { continue };
        let is_folder = entry.file_type().is_ok_and(|kind| kind.is_dir());
        if let Some(files) = WorkerFiles::of(dir, name)
            && is_folder
            && !record::is_worker_alive(dir, name)
        {
            fs::remove_dir_all(entry.path())?;
            files.remove()?;
        }
    }
    Ok(())
}

/// The directory on this machine for a session whose directory is `there` on the daemon's machine: the same path, or
/// below `root` its whole path or its last component. The error lists what was tried.
pub(super) fn resolve_directory(there: &Path, root: Option<&Path>) -> Result<PathBuf, String> {
    let mut tried = vec![there.to_owned()];
    if let Some(root) = root {
        tried.push(root.join(there.strip_prefix("/").unwrap_or(there)));
        tried.extend(there.file_name().map(|name| root.join(name)));
        tried.dedup();
    }
    if let Some(here) = tried.iter().find(|path| path.is_dir()) {
        return Ok(here.clone());
    }
    let names: Vec<String> = tried.iter().map(|path| path.display().to_string()).collect();
    let advice = match root {
        Some(_) => "create one of them",
        None => "create it, or join with `--root DIR`",
    };
    Err(format!("there is no directory {} here; {advice}", names.join(" and no ")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_session_works_in_the_same_path_or_below_the_root_or_not_at_all() {
        let dir = tempfile::tempdir().unwrap();
        let (there, root) = (dir.path().join("shop"), dir.path().join("root"));
        let whole = root.join(there.strip_prefix("/").unwrap());
        let last = root.join("shop");
        let assert_lists = |root, paths: &[&PathBuf]| {
            let error = resolve_directory(&there, root).unwrap_err();
            assert!(paths.iter().all(|path| error.contains(&path.display().to_string())), "{error}");
        };
        assert_lists(None, &[&there]);
        assert_lists(Some(root.as_path()), &[&there, &whole, &last]);
        fs::create_dir_all(&last).unwrap();
        assert_eq!(resolve_directory(&there, Some(&root)), Ok(last));
        fs::create_dir_all(&whole).unwrap();
        assert_eq!(resolve_directory(&there, Some(&root)), Ok(whole));
        fs::write(&there, "a file is no directory").unwrap();
        assert!(resolve_directory(&there, None).is_err());
        fs::remove_file(&there).unwrap();
        fs::create_dir(&there).unwrap();
        assert_eq!(resolve_directory(&there, Some(&root)), Ok(there.clone()));
    }

    #[test]
    fn a_process_removes_its_own_folder_and_those_of_dead_processes() {
        let dir = tempfile::tempdir().unwrap();
        let joined = dir.path().join("joined");
        let first = SpoolFolder::create(&joined).unwrap();
        fs::write(first.path().join("spool"), "x").unwrap();
        let second = SpoolFolder::create(&joined).unwrap();
        assert!(first.path().exists(), "one that lives is left alone");
        assert_ne!(first.name(), second.name());
        drop(first);
        // The files that a killed process leaves behind.
        fs::create_dir(joined.join("host-dead")).unwrap();
        fs::write(joined.join("host-dead.lock"), "").unwrap();
        drop(SpoolFolder::create(&joined).unwrap());
        drop(second);
        assert_eq!(fs::read_dir(&joined).unwrap().count(), 0);
    }
}
