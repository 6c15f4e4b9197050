//! The end of a worktree. Without force only of one that holds nothing; with it, files that were never committed are lost,
//! but commits never are: a branch that holds some which nothing else has stays.

use std::fs;
use std::path::{Path, PathBuf};

use qd_protocol::worktree::WorktreeStatus;

use crate::error::{WorktreeError, WorktreeResult, io_error_at};
use crate::git_worktree::GitWorktree;
use crate::process::StopFlag;
use crate::repository::{branch_tip, path_text};
use crate::summary::WorktreeSummary;

impl GitWorktree {
    /// Whether it may be removed; with `force`, also if it holds work.
    pub fn check_removal(&self, force: bool) -> WorktreeResult<WorktreeSummary> {
        let standing = self.summarize()?;
        let WorktreeSummary { state, changed_files, ahead } = standing;
        if !force && !state.is_safe_to_remove() {
            return Err(WorktreeError::Unmerged { path: self.path.clone(), state, changed_files, ahead });
        }
        Ok(standing)
    }

    /// Removes it and its branch; gives the branch, if that stays because of its commits.
    pub fn remove(self, force: bool) -> WorktreeResult<Option<String>> {
        self.check_removal(force)?;
        let beside = self.repository_git();
        let path = path_text(&self.path)?.to_owned();
        // Git looks once more itself, and refuses what has changed since; but it also refuses what has submodules.
        let has_inner = self.has_submodules();
        let args: &[&str] = match force || has_inner {
            true => &["worktree", "remove", "--force", "--force", "--", &path],
            false => &["worktree", "remove", "--", &path],
        };
        beside.output(args)?;
        if let Some(tip) = branch_tip(&beside, &self.record.branch)? {
            let full = format!("refs/heads/{}", self.record.branch);
            if !self.is_merged(&beside, &tip)? {
                return Ok(Some(self.record.branch));
            }
            beside.output(&["update-ref", "-d", &full, &tip])?;
        }
        Ok(None)
    }
}

/// Removes what is at the place of a worktree and is none, or whose repository is gone: nobody can tell what it holds, so
/// only if that is wanted. An empty directory holds nothing.
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

/// The repository that a worktree says it belongs to, whether or not that is still there.
pub fn repository_of(path: &Path, stop: &StopFlag) -> Option<PathBuf> {
    let tree = GitWorktree::open(path, stop).ok()?;
    let top =
        tree.common_dir.parent().filter(|_| tree.common_dir.file_name().is_some_and(|name| name == ".git"));
    Some(top.map_or(tree.common_dir.clone(), Path::to_owned))
}
