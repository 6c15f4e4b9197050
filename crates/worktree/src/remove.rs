//! Removes worktrees. Without force, only a worktree that contains no unmerged work is removed. With force, uncommitted
//! changes are lost, but commits never are: a branch stays if it has commits that nothing else contains.

use std::fs;
use std::path::{Path, PathBuf};

use qd_protocol::worktree::WorktreeStatus;

use crate::error::{WorktreeError, WorktreeResult, io_error_at};
use crate::git_worktree::GitWorktree;
use crate::process::StopFlag;
use crate::repository::{branch_tip, path_text};
use crate::summary::WorktreeSummary;

impl GitWorktree {
    /// Checks whether the worktree may be removed. With `force`, unmerged work does not prevent it.
    pub fn check_removal(&self, force: bool) -> WorktreeResult<WorktreeSummary> {
        let summary = self.summarize()?;
        let WorktreeSummary { state, changed_files, ahead } = summary;
        if !force && !state.is_safe_to_remove() {
            return Err(WorktreeError::Unmerged { path: self.path.clone(), state, changed_files, ahead });
        }
        Ok(summary)
    }

    /// Removes the worktree and its branch. Returns the branch if it stays because of its commits.
    pub fn remove(self, force: bool) -> WorktreeResult<Option<String>> {
        self.check_removal(force)?;
        let repository_git = self.repository_git();
        let path = path_text(&self.path)?.to_owned();
        // Git checks once more, and refuses if something has changed since. But it also refuses if there are
        // submodules.
        let has_submodules = self.has_submodules();
        let args: &[&str] = match force || has_submodules {
            true => &["worktree", "remove", "--force", "--force", "--", &path],
            false => &["worktree", "remove", "--", &path],
        };
        repository_git.output(args)?;
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
pub fn remove_unknown(path: &Path, force: bool) -> WorktreeResult<()> {
    if fs::remove_dir(path).is_ok() {
        return Ok(());
    }
    if !force {
        let state = WorktreeStatus::Unknown;
        return Err(WorktreeError::Unmerged { path: path.to_owned(), state, changed_files: 0, ahead: 0 });
    }
    fs::remove_dir_all(path).map_err(io_error_at("remove", path))
}

/// The repository that a worktree belongs to, whether or not it still exists.
pub fn repository_of(path: &Path, stop: &StopFlag) -> Option<PathBuf> {
    let tree = GitWorktree::open(path, stop).ok()?;
    let top =
        tree.common_dir.parent().filter(|_| tree.common_dir.file_name().is_some_and(|name| name == ".git"));
    Some(top.map_or(tree.common_dir.clone(), Path::to_owned))
}
