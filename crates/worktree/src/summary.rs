//! What would be lost with a worktree. Files are compared with the last commit; commits with all branches, tags and
//! remote branches of the repository, except the branches of sessions.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use qd_protocol::limits::WORKTREE_FILES_MAX;
use qd_protocol::worktree::WorktreeStatus;

use crate::error::WorktreeResult;
use crate::git::{Git, IGNORE_SUBMODULE_FILES};
use crate::git_worktree::GitWorktree;
use crate::repository::branch_tip;

/// The prefix of session branches.
pub const BRANCH_PREFIX: &str = "qd/";

/// The work in a worktree that is nowhere else.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WorktreeSummary {
    pub state: WorktreeStatus,
    /// Files with uncommitted changes.
    pub changed_files: u64,
    /// Commits that are not merged.
    pub ahead: u64,
}

/// A file with uncommitted changes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct UncommittedFile {
    /// The two-letter status code of `git status`.
    pub(crate) code: String,
    pub(crate) path: String,
}

impl UncommittedFile {
    pub(crate) fn is_untracked(&self) -> bool {
        self.code == "??"
    }

    /// Whether the file was deleted, and the index still has it.
    pub(crate) fn is_missing(&self) -> bool {
        self.code.ends_with('D')
    }

    /// Whether the index does not have the current content of the file.
    pub(crate) fn is_unstaged(&self) -> bool {
        !self.is_missing() && !self.code.ends_with([' ', 'm'])
    }

    /// Whether the file has an unresolved conflict.
    pub(crate) fn is_unmerged(&self) -> bool {
        self.code.contains('U') || matches!(self.code.as_str(), "AA" | "DD")
    }
}

impl GitWorktree {
    /// Finds the unmerged work in the worktree.
    pub fn summarize(&self) -> WorktreeResult<WorktreeSummary> {
        let changed_files = self.uncommitted_files("normal")?.len() as u64;
        let head = self.head()?;
        let repository_git = self.repository_git();
        // The agent may have checked out something else, so both that and the session's branch count.
        let mut tips = vec![head.clone()];
        tips.extend(branch_tip(&repository_git, &self.record.branch)?.filter(|tip| *tip != head));
        let mut ahead = 0;
        for tip in &tips {
            if !self.is_merged(&repository_git, tip)? {
                ahead += self.count_ahead(&repository_git, tip)?.max(1);
            }
        }
        let is_untouched = tips.iter().all(|tip| *tip == self.record.base);
        let state = match (changed_files, ahead, is_untouched) {
            (1.., _, _) => WorktreeStatus::Dirty,
            (0, 1.., _) => WorktreeStatus::Ahead,
            (0, 0, true) => WorktreeStatus::Clean,
            (0, 0, false) => WorktreeStatus::Merged,
        };
        Ok(WorktreeSummary { state, changed_files, ahead })
    }

    /// The files with uncommitted changes, and the submodules that have some. See [`uncommitted_files`].
    pub(crate) fn uncommitted_files(&self, untracked: &str) -> WorktreeResult<Vec<UncommittedFile>> {
        let mut files = uncommitted_files(&self.git(), untracked)?;
        if self.has_submodules() {
            files.extend(self.changed_submodules()?);
        }
        Ok(files)
    }

    /// Whether nothing is lost with a commit: it is the commit that the worktree started from, another branch or tag
    /// contains it, or merging it into its target would change nothing, as after a squash merge.
    pub(crate) fn is_merged(&self, git: &Git, tip: &str) -> WorktreeResult<bool> {
        if tip == self.record.base {
            return Ok(true);
        }
        let contains = format!("--contains={tip}");
        let list_refs = ["for-each-ref", "--format=%(refname)", &contains];
        let refs = ["refs/heads", "refs/remotes", "refs/tags"];
        let holders = git.output_text(&[&list_refs[..], &refs[..]].concat())?;
        let session_prefix = format!("refs/heads/{BRANCH_PREFIX}");
        // Branches of other sessions do not count, because they may be removed too.
        if holders.lines().any(|holder| !holder.starts_with(&session_prefix)) {
            return Ok(true);
        }
        let Some(target) = &self.record.target else { return Ok(false) };
        let Some(target_tip) = branch_tip(git, target)? else { return Ok(false) };
        // An older git cannot merge without a checkout. Then the commit counts as not merged.
        let merged = git.optional_text(&["merge-tree", "--write-tree", &target_tip, tip])?;
        let tree =
            git.optional_text(&["rev-parse", "--verify", "--quiet", &format!("{target_tip}^{{tree}}")])?;
        Ok(merged.is_some() && merged == tree)
    }

    fn count_ahead(&self, git: &Git, tip: &str) -> WorktreeResult<u64> {
        let target = match &self.record.target {
            Some(target) => branch_tip(git, target)?,
            None => None,
        };
        let against = format!("^{}", target.as_ref().unwrap_or(&self.record.base));
        let count = git.optional_text(&["rev-list", "--count", "--end-of-options", tip, &against])?;
        Ok(count.and_then(|count| count.parse().ok()).unwrap_or(1))
    }
}

/// The files with uncommitted changes. `untracked` is git's mode for untracked files: `no`, `normal` (an untracked
/// directory is one entry) or `all`. Changes inside submodules are not among them.
pub(crate) fn uncommitted_files(git: &Git, untracked: &str) -> WorktreeResult<Vec<UncommittedFile>> {
    let untracked = format!("--untracked-files={untracked}");
    let list =
        git.output(&["status", "--porcelain=v1", "-z", "--no-renames", IGNORE_SUBMODULE_FILES, &untracked])?;
    let list = String::from_utf8_lossy(&list);
    let entries = list.split('\0').filter_map(|entry| Some((entry.get(..2)?, entry.get(3..)?)));
    Ok(entries.map(|(code, path)| UncommittedFile { code: code.to_owned(), path: path.to_owned() }).collect())
}

/// The disk space used below a directory in bytes, without following symlinks. Unreadable entries count as zero.
pub fn disk_usage(path: &Path) -> u64 {
    let (mut bytes, mut entries_seen) = (0, 0);
    let mut directories = vec![path.to_owned()];
    while let Some(directory) = directories.pop() {
        let Ok(entries) = fs::read_dir(&directory) else { continue };
        for entry in entries.flatten() {
            let Ok(metadata) = entry.metadata() else { continue };
            entries_seen += 1;
            if entries_seen > WORKTREE_FILES_MAX {
                return bytes;
            }
            bytes += metadata.blocks() * 512;
            if metadata.is_dir() {
                directories.push(entry.path());
            }
        }
    }
    bytes
}
