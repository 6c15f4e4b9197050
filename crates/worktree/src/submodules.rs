//! Uncommitted changes inside submodules. Git would find them by running itself in each submodule, with the
//! configuration that is there. We look ourselves, with our own directories as in any other checkout.

use std::path::{Path, PathBuf};

use crate::error::WorktreeResult;
use crate::git::Git;
use crate::git_worktree::GitWorktree;
use crate::index_copy::submodule_paths;
use crate::links;
use crate::repository::Checkout;
use crate::summary::{UncommittedFile, uncommitted_files};

/// How deep submodules in submodules are looked at. What is deeper counts as changed.
const DEPTH_MAX: usize = 8;

impl GitWorktree {
    /// The submodules that are checked out and have uncommitted changes.
    pub(crate) fn changed_submodules(&self) -> WorktreeResult<Vec<UncommittedFile>> {
        let paths = self.changed_submodules_in(&self.git(), &self.path, DEPTH_MAX)?;
        Ok(paths.into_iter().map(|path| UncommittedFile { code: " m".to_owned(), path }).collect())
    }

    fn changed_submodules_in(&self, git: &Git, checkout: &Path, depth: usize) -> WorktreeResult<Vec<String>> {
        if checkout.join(".gitmodules").symlink_metadata().is_err() {
            return Ok(Vec::new());
        }
        let mut paths = submodule_paths(git)?;
        // A submodule that cannot be read counts as changed, because there may be work in it.
        paths.retain(|path| {
            let directory = checkout.join(path);
            let is_checked_out = directory.join(".git").symlink_metadata().is_ok();
            is_checked_out && !self.is_clean_submodule(directory, depth - 1).unwrap_or(false)
        });
        Ok(paths)
    }

    fn is_clean_submodule(&self, directory: PathBuf, depth: usize) -> WorktreeResult<bool> {
        let Ok(git_dir) = links::git_dir_of(&directory) else { return Ok(false) };
        let private = self.records().private_common_dir(&git_dir, self.stop())?;
        let git = Checkout::new(directory.clone(), git_dir.clone()).git(&git_dir, &private, self.stop());
        Ok(depth > 0
            && uncommitted_files(&git, "normal")?.is_empty()
            && self.changed_submodules_in(&git, &directory, depth)?.is_empty())
    }
}
