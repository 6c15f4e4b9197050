//! Our own records about git, in a folder that no agent may write: which directories belong to a worktree, and a private
//! common directory for each repository. What a worktree or a repository says about itself is compared with these
//! records, and never believed.
//!
//! A record does not depend on its session, so a worktree can be judged even if that session is forgotten. Earlier
//! releases had the record in git's directory of the worktree; it is taken over once.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::error::{WorktreeError, WorktreeResult, io_error_at};
use crate::links::{create_directory, read_regular_file};
use crate::private_common_dir::PrivateCommonDir;
use crate::process::StopFlag;

/// The record of earlier releases, in git's directory of a worktree.
const EARLIER_RECORD_FILE: &str = "quarterdeck.json";
/// The maximum size of a record.
const RECORD_MAX: u64 = 1 << 20;

/// The folder of our records.
#[derive(Debug, Clone)]
pub struct GitRecords {
    folder: PathBuf,
}

/// What we store about a worktree.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorktreeRecord {
    /// Git's directory for the worktree.
    pub git_dir: PathBuf,
    /// Git's directory that all checkouts of the repository share.
    pub common_dir: PathBuf,
    /// The checkout that the worktree was created from.
    pub repository: PathBuf,
    /// The branch that was created for the worktree.
    pub branch: String,
    /// The commit that the worktree started from.
    pub base: String,
    /// The branch that its work is merged into by default.
    #[serde(default)]
    pub target: Option<String>,
    /// Whether the project's hooks and file copies for a new worktree have been done.
    #[serde(default)]
    pub set_up: bool,
    /// Settings that git uses in this worktree alone, as `NAME=VALUE`.
    #[serde(default)]
    pub settings: Vec<String>,
}

/// The record of earlier releases.
#[derive(Debug, Deserialize)]
pub(crate) struct EarlierRecord {
    pub(crate) branch: String,
    pub(crate) base: String,
    #[serde(default)]
    pub(crate) target: Option<String>,
    #[serde(default)]
    pub(crate) set_up: bool,
}

impl GitRecords {
    pub fn in_folder(folder: &Path) -> Self {
        Self { folder: folder.to_owned() }
    }

    /// The private common directory of a repository.
    pub(crate) fn private_common_dir(
        &self,
        common_dir: &Path,
        stop: &StopFlag,
    ) -> WorktreeResult<PrivateCommonDir> {
        PrivateCommonDir::of(common_dir, &self.folder.join("repositories"), stop)
    }

    /// The record of the worktree at a path, if there is one.
    pub(crate) fn read(&self, worktree: &Path) -> WorktreeResult<Option<WorktreeRecord>> {
        read_record(&self.file(worktree)?)
    }

    pub(crate) fn write(&self, worktree: &Path, record: &WorktreeRecord) -> WorktreeResult<()> {
        let file = self.file(worktree)?;
        if let Some(folder) = file.parent() {
            create_directory(folder)?;
        }
        let text = serde_json::to_vec(record).map_err(|error| io_error_at("write", &file)(error.into()))?;
        qd_files::replace_file(&file, &text).map_err(io_error_at("write", &file))
    }

    /// Removes the record of a worktree that does not exist.
    pub(crate) fn remove(&self, worktree: &Path) -> WorktreeResult<()> {
        let file = self.file(worktree)?;
        match fs::remove_file(&file) {
            Err(error) if error.kind() != ErrorKind::NotFound => Err(io_error_at("remove", &file)(error)),
            _ => Ok(()),
        }
    }

    /// Worktrees are named by their last component, the session's id.
    fn file(&self, worktree: &Path) -> WorktreeResult<PathBuf> {
        let name = worktree.file_name().and_then(|name| name.to_str());
        let name = name.ok_or_else(|| WorktreeError::BadPath(worktree.to_owned()))?;
        Ok(self.folder.join("worktrees").join(format!("{name}.json")))
    }
}

/// The record of an earlier release, if git's directory of a worktree has one.
pub(crate) fn read_earlier_record(git_dir: &Path) -> WorktreeResult<Option<EarlierRecord>> {
    read_record(&git_dir.join(EARLIER_RECORD_FILE))
}

fn read_record<T: serde::de::DeserializeOwned>(file: &Path) -> WorktreeResult<Option<T>> {
    match read_regular_file(file, RECORD_MAX) {
        // An unreadable record is an error: it does not prove that no one has worked there.
        Ok(text) => serde_json::from_slice(&text).map(Some).map_err(|error| WorktreeError::PathOccupied {
            path: file.to_owned(),
            reason: format!("it is not a Quarterdeck record ({error})"),
        }),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(io_error_at("read", file)(error)),
    }
}
