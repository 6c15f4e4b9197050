//! What a project brings — manifests, and later hooks and rules — counts only after the user has said so of its content
//! as it was then. One file holds for which folders that is; it is replaced whole.

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::PROJECT_FOLDER;

/// Files that a project may bring; more cannot be looked at by anybody.
const FILES_MAX: usize = 1000;
/// MiB that they may have together.
const MIB_MAX: u64 = 16;
/// Folders in folders.
const DEPTH_MAX: usize = 8;

/// The projects whose own files count.
#[derive(Debug, Clone, Default)]
pub struct ProjectTrust {
    file: PathBuf,
    contents: TrustFile,
}

#[derive(Debug, Clone, Default, Serialize, Deserialize)]
struct TrustFile {
    /// By the project's resolved path: the digest of what it brought.
    projects: BTreeMap<PathBuf, String>,
}

/// How a project stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProjectTrustStatus {
    /// It brings nothing.
    Nothing,
    /// It is trusted as it is.
    Trusted,
    /// Nobody has said anything of it.
    Unknown,
    /// It was trusted, and is different now.
    Changed,
}

/// Why trust cannot be given or known.
#[derive(Debug, thiserror::Error)]
pub enum TrustError {
    /// The project cannot be read.
    #[error("failed to read {0}: {1}")]
    Unreadable(PathBuf, io::Error),
    /// It has nothing that could be trusted.
    #[error("{0} has no folder {PROJECT_FOLDER}, so there is nothing to trust")]
    NothingToTrust(PathBuf),
    /// It brings more than anybody has looked at.
    #[error("the folder {PROJECT_FOLDER} of {0} has more than {FILES_MAX} files or {MIB_MAX} MiB")]
    TooMuch(PathBuf),
    /// The list cannot be kept.
    #[error("failed to keep {0}: {1}")]
    Unwritable(PathBuf, io::Error),
    /// The list is not one of ours.
    #[error("{0} cannot be understood: {1}")]
    Bad(PathBuf, serde_json::Error),
}

impl ProjectTrust {
    /// The list in this file, which need not be there.
    pub fn open(file: &Path) -> Result<Self, TrustError> {
        let kept = match std::fs::read(file) {
            Ok(json) => {
                serde_json::from_slice(&json).map_err(|error| TrustError::Bad(file.to_owned(), error))?
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => TrustFile::default(),
            Err(error) => return Err(TrustError::Unreadable(file.to_owned(), error)),
        };
        Ok(Self { file: file.to_owned(), contents: kept })
    }

    /// How a project stands. One that cannot be read is not trusted.
    pub fn status_of(&self, project: &Path) -> ProjectTrustStatus {
        let Ok(project) = project.canonicalize() else { return ProjectTrustStatus::Nothing };
        match project_digest(&project) {
            Ok(None) => ProjectTrustStatus::Nothing,
            Ok(Some((digest, _))) => match self.contents.projects.get(&project) {
                Some(known) if *known == digest => ProjectTrustStatus::Trusted,
                Some(_) => ProjectTrustStatus::Changed,
                None => ProjectTrustStatus::Unknown,
            },
            Err(_) => ProjectTrustStatus::Unknown,
        }
    }

    /// Trusts what a project brings as it is now; gives the files.
    pub fn trust(&mut self, project: &Path) -> Result<Vec<PathBuf>, TrustError> {
        let project =
            project.canonicalize().map_err(|error| TrustError::Unreadable(project.to_owned(), error))?;
        let (digest, files) =
            project_digest(&project)?.ok_or_else(|| TrustError::NothingToTrust(project.clone()))?;
        self.contents.projects.insert(project, digest);
        self.save()?;
        Ok(files)
    }

    /// Trusts it no longer; tells whether it was.
    pub fn distrust(&mut self, project: &Path) -> Result<bool, TrustError> {
        // A folder that is gone is known by the name it had.
        let project = project.canonicalize().unwrap_or_else(|_| project.to_owned());
        let was = self.contents.projects.remove(&project).is_some();
        if was {
            self.save()?;
        }
        Ok(was)
    }

    /// The projects that are trusted, as they were then.
    pub fn projects(&self) -> impl Iterator<Item = &Path> {
        self.contents.projects.keys().map(PathBuf::as_path)
    }

    fn save(&self) -> Result<(), TrustError> {
        let failed = |error| TrustError::Unwritable(self.file.clone(), error);
        let new = self.file.with_extension("new");
        let mut file = std::fs::OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(true)
            .mode(0o600)
            .open(&new)
            .map_err(failed)?;
        let json = serde_json::to_vec_pretty(&self.contents).expect("paths and digests are JSON");
        file.write_all(&json).and_then(|()| file.sync_all()).map_err(failed)?;
        std::fs::rename(&new, &self.file).map_err(failed)
    }
}

/// The digest of all that a project brings, and its files; `None` if it brings nothing. Symlinks are refused, since what
/// is behind them may change without a word.
fn project_digest(project: &Path) -> Result<Option<(String, Vec<PathBuf>)>, TrustError> {
    let root = project.join(PROJECT_FOLDER);
    let mut files = Vec::new();
    match root.symlink_metadata() {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(TrustError::Unreadable(root, error)),
        Ok(_) => collect_files(&root, 0, &mut files)
            .map_err(|error| TrustError::Unreadable(root.clone(), error))?
            .then_some(())
            .ok_or_else(|| TrustError::TooMuch(project.to_owned()))?,
    }
    if files.is_empty() {
        return Ok(None);
    }
    files.sort();
    let mut hash = Sha256::new();
    let mut bytes = 0;
    for file in &files {
        let name = file.strip_prefix(&root).unwrap_or(file).as_os_str().as_encoded_bytes();
        bytes += file.metadata().map_err(|error| TrustError::Unreadable(file.clone(), error))?.len();
        if bytes > MIB_MAX << 20 {
            return Err(TrustError::TooMuch(project.to_owned()));
        }
        let content = std::fs::read(file).map_err(|error| TrustError::Unreadable(file.clone(), error))?;
        for part in [name, &content] {
            // With its length, so that no two folders can look the same.
            hash.update((part.len() as u64).to_le_bytes());
            hash.update(part);
        }
    }
    let digest = hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
    Ok(Some((digest, files)))
}

/// Every file below a folder; false if there are too many.
fn collect_files(folder: &Path, depth: usize, files: &mut Vec<PathBuf>) -> io::Result<bool> {
    for entry in std::fs::read_dir(folder)? {
        let entry = entry?;
        let kind = entry.file_type()?;
        if kind.is_symlink() {
            return Err(io::Error::other(format!("{} is a symlink", entry.path().display())));
        }
        if kind.is_dir() {
            if depth >= DEPTH_MAX || !collect_files(&entry.path(), depth + 1, files)? {
                return Ok(false);
            }
        } else if kind.is_file() {
            files.push(entry.path());
        }
        if files.len() > FILES_MAX {
            return Ok(false);
        }
    }
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn trust_is_of_the_content_and_is_kept() {
        let (home, project) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let list = home.path().join("trust.json");
        let mut trust = ProjectTrust::open(&list).unwrap();
        assert_eq!(trust.status_of(project.path()), ProjectTrustStatus::Nothing);
        assert!(matches!(trust.trust(project.path()), Err(TrustError::NothingToTrust(_))));
        let file = project.path().join(PROJECT_FOLDER).join("agents/a.toml");
        std::fs::create_dir_all(file.parent().unwrap()).unwrap();
        std::fs::write(&file, "a").unwrap();
        assert_eq!(trust.status_of(project.path()), ProjectTrustStatus::Unknown);
        assert_eq!(trust.trust(project.path()).unwrap(), [file.canonicalize().unwrap()]);

        let mut later = ProjectTrust::open(&list).unwrap();
        assert_eq!(later.status_of(project.path()), ProjectTrustStatus::Trusted);
        std::fs::write(&file, "b").unwrap();
        assert_eq!(later.status_of(project.path()), ProjectTrustStatus::Changed);
        assert!(later.distrust(project.path()).unwrap() && !later.distrust(project.path()).unwrap());
        assert_eq!(ProjectTrust::open(&list).unwrap().status_of(project.path()), ProjectTrustStatus::Unknown);
    }

    #[test]
    fn a_symlink_is_never_trusted() {
        let (home, project) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        std::fs::create_dir(project.path().join(PROJECT_FOLDER)).unwrap();
        std::os::unix::fs::symlink("/etc", project.path().join(PROJECT_FOLDER).join("agents")).unwrap();
        let mut trust = ProjectTrust::open(&home.path().join("trust.json")).unwrap();
        assert!(matches!(trust.trust(project.path()), Err(TrustError::Unreadable(..))));
        assert_eq!(trust.status_of(project.path()), ProjectTrustStatus::Unknown);
    }
}
