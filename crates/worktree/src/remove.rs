//! Removes worktrees. Without force, only a worktree that contains no unmerged work is removed. With force, uncommitted
//! changes are lost, but commits never are: a branch stays if it has commits that nothing else contains.

use std::fs;
use std::path::Path;

use qd_protocol::worktree::WorktreeStatus;

use crate::error::{WorktreeError, WorktreeResult, io_error_at};
use crate::git_worktree::GitWorktree;
use crate::records::GitRecords;
use crate::repository::branch_tip;
use crate::summary::WorktreeSummary;

impl GitWorktree {
    /// Checks that the worktree contains no unmerged work.
    pub fn check_removal(&self) -> WorktreeResult<()> {
        let WorktreeSummary { state, changed_files, ahead } = self.summarize()?;
        match state.is_safe_to_remove() {
            true => Ok(()),
            false => Err(WorktreeError::Unmerged { path: self.path.clone(), state, changed_files, ahead }),
        }
    }

    /// Removes the worktree and its branch. Returns the branch if it stays because of its commits.
    pub fn remove(self, force: bool) -> WorktreeResult<Option<String>> {
        if !force {
            self.check_removal()?;
        }
        remove_directory(&self.path)?;
        // Git's directory comes second: without the files it is only a reminder that git would drop by itself.
        remove_directory(&self.record.git_dir)?;
        self.records().remove(&self.path)?;
        let repository_git = self.repository_git();
        if let Some(tip) = branch_tip(&repository_git, &self.record.branch)? {
            let full = format!("refs/heads/{}", self.record.branch);
            if !self.is_merged(&repository_git, &tip)? {
                return Ok(Some(self.record.branch));
            }
            repository_git.output(&["update-ref", "-d", &full, &tip])?;
        }
        Ok(None)
    }
}

/// Removes what is at the path of a worktree but is not one, or whose repository is gone. Its content is unknown, so
/// this needs `force`, unless the directory is empty.
pub fn remove_unknown(path: &Path, records: &GitRecords, force: bool) -> WorktreeResult<()> {
    if fs::remove_dir(path).is_err() {
        if !force {
            let state = WorktreeStatus::Unknown;
            return Err(WorktreeError::Unmerged { path: path.to_owned(), state, changed_files: 0, ahead: 0 });
        }
        remove_directory(path)?;
    }
    records.remove(path)
}

fn remove_directory(path: &Path) -> WorktreeResult<()> {
    fs::remove_dir_all(path).map_err(io_error_at("remove", path))
}
