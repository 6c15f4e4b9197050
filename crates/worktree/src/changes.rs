//! The changes in a worktree, committed or not, compared with a commit. Untracked files are included: they are added to
//! a private copy of the index, so the worktree's own index stays as the agent left it.

use std::collections::BTreeMap;

use qd_protocol::limits::PATCH_MAX;
use qd_protocol::worktree::{DiffFile, WorktreeDiff};

use crate::error::{WorktreeError, WorktreeResult};
use crate::git::{Git, IGNORE_SUBMODULE_FILES, git_failed};
use crate::git_worktree::GitWorktree;
use crate::process::OutputLimit;
use crate::repository::branch_tip;

/// Diff options for plain output, whatever the user's settings are. No program is run for it.
pub(crate) const PLAIN_DIFF_ARGS: [&str; 5] =
    ["diff", "--no-ext-diff", "--no-textconv", "--no-color", IGNORE_SUBMODULE_FILES];

/// Changes by path.
pub type ChangesByFile = BTreeMap<String, FileChange>;

#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct FileChange {
    /// The changed ranges of lines in the old version. Empty if the file changed as a whole, for example a binary file.
    pub hunks: Vec<Hunk>,
}

/// A range of lines that was replaced, or a position where lines were inserted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Hunk {
    /// The first line, from 1. For an insertion, the line that it comes after.
    pub start: u64,
    /// The number of lines; 0 for an insertion.
    pub count: u64,
}

impl GitWorktree {
    /// A session's changes since it started. Without `with_patch`, only the list of files.
    pub fn diff(&self, with_patch: bool) -> WorktreeResult<WorktreeDiff> {
        let head = self.head()?;
        let base = self.diff_base(&head)?;
        let index = self.copy_index()?;
        index.add_untracked(&head)?;
        let git = index.git();
        let numstat =
            git.output(&[&PLAIN_DIFF_ARGS[..], &["--numstat", "-z", "--no-renames", &base, "--"]].concat())?;
        let (mut patch, mut truncated) = (None, false);
        if with_patch {
            let args = [&PLAIN_DIFF_ARGS[..], &["--find-renames", &base, "--"]].concat();
            let output = git.run_with(&args, None, OutputLimit::Head(PATCH_MAX))?;
            if !output.status.success() {
                return Err(git_failed(&args, &output));
            }
            truncated = output.truncated;
            patch = Some(String::from_utf8_lossy(&output.stdout).into_owned());
        }
        let uncommitted = !self.uncommitted_files("normal")?.is_empty();
        Ok(WorktreeDiff { base, head, uncommitted, files: parse_numstat(&numstat), patch, truncated })
    }

    /// The changed lines compared with a commit, by file.
    pub fn changes(&self, against: &str) -> WorktreeResult<ChangesByFile> {
        let index = self.copy_index()?;
        index.add_untracked(against)?;
        let patch = index
            .git()
            .output(&[&PLAIN_DIFF_ARGS[..], &["--unified=0", "--no-renames", against, "--"]].concat())?;
        Ok(parse_patch(&String::from_utf8_lossy(&patch)))
    }

    /// What the session itself changed, by file.
    pub(crate) fn own_changes(&self, head: &str) -> WorktreeResult<ChangesByFile> {
        self.changes(&self.diff_base(head)?)
    }

    /// The commit that a session's changes are compared with: the merge base with its target, so that changes taken
    /// over from the target do not count as its own. Once everything is merged, it is the commit that the session
    /// started from.
    fn diff_base(&self, head: &str) -> WorktreeResult<String> {
        let git = self.git();
        let start = self.record.base.clone();
        let Some(target) = &self.record.target else { return Ok(start) };
        let Some(target_tip) = branch_tip(&git, target)? else { return Ok(start) };
        let merge_base = git.optional_text(&["merge-base", &target_tip, head])?;
        Ok(merge_base.filter(|merge_base| merge_base != head).unwrap_or(start))
    }
}

/// Parses `git diff --numstat -z`: added lines, removed lines, path.
fn parse_numstat(numstat: &[u8]) -> Vec<DiffFile> {
    let text = String::from_utf8_lossy(numstat);
    let rows = text.split('\0').filter_map(|row| {
        let mut parts = row.splitn(3, '\t');
        let (added, removed, path) = (parts.next()?, parts.next()?, parts.next()?);
        Some(DiffFile { path: path.to_owned(), added: added.parse().ok(), removed: removed.parse().ok() })
    });
    rows.collect()
}

/// Parses a patch without context. Content lines cannot be mistaken for headers, because git prefixes them with a sign.
fn parse_patch(patch: &str) -> ChangesByFile {
    let mut changes = ChangesByFile::new();
    let mut current: Option<&mut FileChange> = None;
    for line in patch.lines() {
        if let Some(names) = line.strip_prefix("diff --git ") {
            current = Some(changes.entry(header_path(names).to_owned()).or_default());
        } else if let (Some(change), Some(range)) = (&mut current, line.strip_prefix("@@ -")) {
            change.hunks.extend(parse_hunk(range));
        }
    }
    changes
}

/// The path in a `diff --git` header. Without renames it contains the same path twice, `a/NAME b/NAME`, in quotes if
/// the name needs them.
fn header_path(names: &str) -> &str {
    let first = names.get(..names.len() / 2).unwrap_or(names);
    let bare = first.strip_prefix('"').and_then(|rest| rest.strip_suffix('"')).unwrap_or(first);
    bare.strip_prefix("a/").unwrap_or(bare)
}

/// Parses a hunk header: `12,3 +14 @@ …` means lines 12 to 14.
fn parse_hunk(range: &str) -> Option<Hunk> {
    let old = range.split(' ').next()?;
    let (start, count) = old.split_once(',').unwrap_or((old, "1"));
    Some(Hunk { start: start.parse().ok()?, count: count.parse().ok()? })
}

/// The merge base of two commits. Absent if they have no common history.
pub(crate) fn merge_base(git: &Git, first: &str, second: &str) -> WorktreeResult<Option<String>> {
    match git.optional_text(&["merge-base", first, second]) {
        Err(WorktreeError::GitFailed { .. }) => Ok(None),
        result => result,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_patch_is_read_by_file_and_line() {
        let patch = "diff --git a/a b.txt b/a b.txt\nindex 1..2 100644\n--- a/a b.txt\n+++ b/a b.txt\n\
                     @@ -3 +3,2 @@ fn x\n-old\n+new\n+diff --git a/z b/z\n@@ -10,0 +12,4 @@\n+more\n\
                     diff --git \"a/t\\tb\" \"b/t\\tb\"\nnew file mode 100644\n@@ -0,0 +1 @@\n+x\n\
                     diff --git a/logo.png b/logo.png\nBinary files a/logo.png and b/logo.png differ\n";
        let changes = parse_patch(patch);
        let hunks = |name: &str| changes[name].hunks.clone();
        assert_eq!(hunks("a b.txt"), [Hunk { start: 3, count: 1 }, Hunk { start: 10, count: 0 }]);
        assert_eq!(hunks("t\\tb"), [Hunk { start: 0, count: 0 }]);
        assert_eq!(hunks("logo.png"), []);
        assert_eq!(changes.len(), 3);
    }
}
