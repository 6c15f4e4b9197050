//! What would be lost with a worktree. Its files count as they are against the last commit, its commits against every
//! branch, tag and remote branch of the repository that is not a session's own.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use qd_protocol::limits::WORKTREE_FILES_MAX;
use qd_protocol::worktree::WorktreeStatus;

use crate::error::WorktreeResult;
use crate::git::Git;
use crate::git_worktree::GitWorktree;
use crate::repository::branch_tip;

/// What branches of sessions begin with.
pub const BRANCH_PREFIX: &str = "qd/";

/// How a worktree stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WorktreeSummary {
    /// In a word.
    pub state: WorktreeStatus,
    /// Files with changes that are not committed.
    pub changed_files: u64,
    /// Commits that are not merged.
    pub ahead: u64,
}

/// A file with changes that are not committed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct UncommittedFile {
    /// Git's two letters.
    pub(crate) code: String,
    pub(crate) path: String,
}

impl UncommittedFile {
    pub(crate) fn is_untracked(&self) -> bool {
        self.code == "??"
    }

    /// Two sides have not been brought together.
    pub(crate) fn is_unmerged(&self) -> bool {
        self.code.contains('U') || matches!(self.code.as_str(), "AA" | "DD")
    }
}

impl GitWorktree {
    /// How it stands.
    pub fn summarize(&self) -> WorktreeResult<WorktreeSummary> {
        let changed_files = uncommitted_files(&self.git(), "normal")?.len() as u64;
        let head = self.head()?;
        let beside = self.repository_git();
        // The agent may have left its branch behind; both ends count.
        let mut tips = vec![head.clone()];
        tips.extend(branch_tip(&beside, &self.record.branch)?.filter(|tip| *tip != head));
        let mut ahead = 0;
        for tip in &tips {
            if !self.is_merged(&beside, tip)? {
                ahead += self.count_ahead(&beside, tip)?.max(1);
            }
        }
        let untouched = tips.iter().all(|tip| *tip == self.record.base);
        let state = match (changed_files, ahead, untouched) {
            (1.., _, _) => WorktreeStatus::Dirty,
            (0, 1.., _) => WorktreeStatus::Ahead,
            (0, 0, true) => WorktreeStatus::Clean,
            (0, 0, false) => WorktreeStatus::Merged,
        };
        Ok(WorktreeSummary { state, changed_files, ahead })
    }

    /// Whether nothing is lost with a commit: it is where it began, some other branch or tag holds it, or merging it
    /// into its target would change nothing, as after a squash.
    pub(crate) fn is_merged(&self, git: &Git, tip: &str) -> WorktreeResult<bool> {
        if tip == self.record.base {
            return Ok(true);
        }
        let contains = format!("--contains={tip}");
        let listed = ["for-each-ref", "--format=%(refname)", &contains];
        let refs = ["refs/heads", "refs/remotes", "refs/tags"];
        let holders = git.output_text(&[&listed[..], &refs[..]].concat())?;
        let own = format!("refs/heads/{BRANCH_PREFIX}");
        // What only other sessions hold may go with them.
        if holders.lines().any(|holder| !holder.starts_with(&own)) {
            return Ok(true);
        }
        let Some(target) = &self.record.target else { return Ok(false) };
        let Some(there) = branch_tip(git, target)? else { return Ok(false) };
        // An older git cannot try a merge without a checkout; then it is simply not known to be merged.
        let merged = git.optional_text(&["merge-tree", "--write-tree", &there, tip])?;
        let tree = git.optional_text(&["rev-parse", "--verify", "--quiet", &format!("{there}^{{tree}}")])?;
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

/// The files with changes that are not committed, those that git does not know included. `untracked` is `normal`, where a
/// directory of them is one, or `all`.
pub(crate) fn uncommitted_files(git: &Git, untracked: &str) -> WorktreeResult<Vec<UncommittedFile>> {
    let untracked = format!("--untracked-files={untracked}");
    let list = git.output(&["status", "--porcelain=v1", "-z", "--no-renames", &untracked])?;
    let list = String::from_utf8_lossy(&list);
    let entries = list.split('\0').filter_map(|entry| Some((entry.get(..2)?, entry.get(3..)?)));
    Ok(entries.map(|(code, path)| UncommittedFile { code: code.to_owned(), path: path.to_owned() }).collect())
}

/// Bytes on the disk below a directory, links not followed. What cannot be read counts as nothing.
pub fn disk_usage(path: &Path) -> u64 {
    let (mut bytes, mut seen) = (0, 0);
    let mut folders = vec![path.to_owned()];
    while let Some(folder) = folders.pop() {
        let Ok(entries) = fs::read_dir(&folder) else { continue };
        for entry in entries.flatten() {
            let Ok(found) = entry.metadata() else { continue };
            seen += 1;
            if seen > WORKTREE_FILES_MAX {
                return bytes;
            }
            bytes += found.blocks() * 512;
            if found.is_dir() {
                folders.push(entry.path());
            }
        }
    }
    bytes
}
