//! Which projects the user trusts. A project's own files (manifests, worktree hooks) take effect only after the user
//! has trusted their content, and only while it is unchanged. One file lists the trusted projects; it is replaced
//! atomically.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::PROJECT_FOLDER;

/// How many files a project's folder may have. Nobody would review more.
const FILES_MAX: usize = 1000;
/// How many MiB these files may have together.
const MIB_MAX: u64 = 16;
/// How deep folders may be nested.
const DEPTH_MAX: usize = 8;

/// The list of trusted projects.
#[derive(Debug, Clone, Default)]
pub struct ProjectTrust {
    file: PathBuf,
    contents: TrustFile,
}

#[derive(Debug, Clone, Default, Serialize, Deserialize)]
struct TrustFile {
    /// The digest of a project's trusted content, by the project's resolved path.
    projects: BTreeMap<PathBuf, String>,
}

/// Whether a project is trusted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProjectTrustStatus {
    /// It has no files that need trust.
    Nothing,
    /// Its current content is trusted.
    Trusted,
    /// It was never trusted, or cannot be read.
    Unknown,
    /// It was trusted, but its content has changed since.
    Changed,
}

/// Why a project cannot be trusted, or the list cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TrustError {
    #[error("failed to read {0}: {1}")]
    Unreadable(PathBuf, io::Error),
    #[error("{0} has no folder {PROJECT_FOLDER}, so there is nothing to trust")]
    NothingToTrust(PathBuf),
    /// It has too many or too large files to be reviewed.
    #[error("the folder {PROJECT_FOLDER} of {0} has more than {FILES_MAX} files or {MIB_MAX} MiB")]
    TooMuch(PathBuf),
    /// The list cannot be written.
    #[error("failed to write {0}: {1}")]
    Unwritable(PathBuf, io::Error),
    /// The list is not valid.
    #[error("failed to parse {0}: {1}")]
    Bad(PathBuf, serde_json::Error),
}

impl ProjectTrust {
    /// Opens the list in this file, which need not exist.
    pub fn open(file: &Path) -> Result<Self, TrustError> {
        let contents = match std::fs::read(file) {
            Ok(json) => {
                serde_json::from_slice(&json).map_err(|error| TrustError::Bad(file.to_owned(), error))?
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => TrustFile::default(),
            Err(error) => return Err(TrustError::Unreadable(file.to_owned(), error)),
        };
        Ok(Self { file: file.to_owned(), contents })
    }

    /// Whether a project is trusted. A project that cannot be read is not.
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

    /// Trusts the current content of a project. Returns its files.
    pub fn trust(&mut self, project: &Path) -> Result<Vec<PathBuf>, TrustError> {
        let project =
            project.canonicalize().map_err(|error| TrustError::Unreadable(project.to_owned(), error))?;
        let (digest, files) =
            project_digest(&project)?.ok_or_else(|| TrustError::NothingToTrust(project.clone()))?;
        self.contents.projects.insert(project, digest);
        self.save()?;
        Ok(files)
    }

    /// Removes the trust in a project. Returns whether it was trusted.
    pub fn distrust(&mut self, project: &Path) -> Result<bool, TrustError> {
        // A folder that no longer exists is looked up by the given path.
        let project = project.canonicalize().unwrap_or_else(|_| project.to_owned());
        let was_trusted = self.contents.projects.remove(&project).is_some();
        if was_trusted {
            self.save()?;
        }
        Ok(was_trusted)
    }

    /// The paths of all trusted projects, whether or not their content has changed since.
    pub fn projects(&self) -> impl Iterator<Item = &Path> {
        self.contents.projects.keys().map(PathBuf::as_path)
    }

    fn save(&self) -> Result<(), TrustError> {
        let failed = |error| TrustError::Unwritable(self.file.clone(), error);
        let json = serde_json::to_vec_pretty(&self.contents).expect("paths and digests are JSON");
        qd_files::replace_file(&self.file, &json).map_err(failed)
    }
}

/// The digest of a project's files, and the files; `None` if there are none. Symlinks are refused, because their
/// targets may change unnoticed.
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
            // Include the length, so that no two different folders have the same input.
            hash.update((part.len() as u64).to_le_bytes());
            hash.update(part);
        }
    }
    Ok(Some((hex::encode(hash.finalize()), files)))
}

/// Collects every file below a folder. Returns false if there are too many, or they are nested too deep.
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
    fn trust_is_for_the_content_and_is_stored() {
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
