//! What changed in a worktree, committed or not, against a commit. New files that git does not know yet are part of it:
//! they are put into an index of our own, so that the worktree's own stays as its agent left it.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use qd_protocol::limits::PATCH_MAX;
use qd_protocol::worktree::{DiffFile, WorktreeDiff};
use tempfile::TempPath;

use crate::error::{WorktreeError, WorktreeResult, io_error_at};
use crate::git::{Git, git_failed};
use crate::git_worktree::GitWorktree;
use crate::process::OutputLimit;
use crate::repository::{branch_tip, path_text};

/// How git is to show changes, whatever people have set: nothing but its own words.
const PLAIN_DIFF_ARGS: [&str; 4] = ["diff", "--no-ext-diff", "--no-textconv", "--no-color"];

/// What changed, by file.
pub type ChangesByFile = BTreeMap<String, FileChange>;

/// What changed in one file.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct FileChange {
    /// The lines as they were before; none where the file as a whole changed, as one that is not text.
    pub hunks: Vec<Hunk>,
}

/// Some lines that were replaced, or a place where some were put in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Hunk {
    /// The first line, from 1; for an insertion, the line that it comes after.
    pub start: u64,
    /// How many; 0 for an insertion.
    pub count: u64,
}

impl GitWorktree {
    /// What a session changed since where it began; the files alone, if `with_patch` is false.
    pub fn diff(&self, with_patch: bool) -> WorktreeResult<WorktreeDiff> {
        let head = self.head()?;
        let base = self.diff_base(&head)?;
        let index = self.index_with_untracked()?;
        let git = self.git_with_index(&index)?;
        let numbers =
            git.output(&[&PLAIN_DIFF_ARGS[..], &["--numstat", "-z", "--no-renames", &base, "--"]].concat())?;
        let (mut patch, mut truncated) = (None, false);
        if with_patch {
            let args = [&PLAIN_DIFF_ARGS[..], &["--find-renames", &base, "--"]].concat();
            let ended = git.run_with(&args, None, OutputLimit::Head(PATCH_MAX))?;
            if !ended.status.success() {
                return Err(git_failed(&args, &ended));
            }
            truncated = ended.truncated;
            patch = Some(String::from_utf8_lossy(&ended.stdout).into_owned());
        }
        let uncommitted = !crate::summary::uncommitted_files(&self.git(), "normal")?.is_empty();
        Ok(WorktreeDiff { base, head, uncommitted, files: parse_numstat(&numbers), patch, truncated })
    }

    /// What changed against a commit, by lines.
    pub fn changes(&self, against: &str) -> WorktreeResult<ChangesByFile> {
        let index = self.index_with_untracked()?;
        let git = self.git_with_index(&index)?;
        let shown =
            git.output(&[&PLAIN_DIFF_ARGS[..], &["--unified=0", "--no-renames", against, "--"]].concat())?;
        Ok(parse_patch(&String::from_utf8_lossy(&shown)))
    }

    /// What a session's changes are shown against: where it and its target parted, so that what it took over from there
    /// is not shown as its own; but where it began, once all of it is merged.
    fn diff_base(&self, head: &str) -> WorktreeResult<String> {
        let git = self.git();
        let begun = self.record.base.clone();
        let Some(target) = &self.record.target else { return Ok(begun) };
        let Some(there) = branch_tip(&git, target)? else { return Ok(begun) };
        let parted = git.optional_text(&["merge-base", &there, head])?;
        Ok(parted.filter(|parted| parted != head).unwrap_or(begun))
    }

    /// A copy of its index in which the files that git does not know are known. Removed when dropped.
    fn index_with_untracked(&self) -> WorktreeResult<TempPath> {
        let index = self.copy_index()?;
        self.git_with_index(&index)?.output(&["add", "--intent-to-add", "--", "."])?;
        Ok(index)
    }

    /// A copy of its index. Removed when dropped.
    pub(crate) fn copy_index(&self) -> WorktreeResult<TempPath> {
        let (dir, index) = (&self.git_dir, self.git_dir.join("index"));
        let copy = tempfile::Builder::new().prefix("quarterdeck.index.").tempfile_in(dir);
        let copy = copy.map_err(io_error_at("make a file in", dir))?.into_temp_path();
        fs::copy(&index, &copy).map_err(io_error_at("copy", &index))?;
        // As old as the index: git looks into a file that changed in the same second as that was written, and of one that
        // seems to be older it believes what the index says.
        let aged = fs::metadata(&index).and_then(|about| about.modified());
        let aged = aged.and_then(|then| fs::File::options().write(true).open(&copy)?.set_modified(then));
        aged.map_err(io_error_at("date", &copy))?;
        Ok(copy)
    }

    /// Git in it with another index.
    pub(crate) fn git_with_index(&self, index: &Path) -> WorktreeResult<Git> {
        Ok(self.git().with_env("GIT_INDEX_FILE", path_text(index)?))
    }
}

/// Numbers of lines by file: added, removed, name.
fn parse_numstat(numbers: &[u8]) -> Vec<DiffFile> {
    let text = String::from_utf8_lossy(numbers);
    let rows = text.split('\0').filter_map(|row| {
        let mut parts = row.splitn(3, '\t');
        let (added, removed, path) = (parts.next()?, parts.next()?, parts.next()?);
        Some(DiffFile { path: path.to_owned(), added: added.parse().ok(), removed: removed.parse().ok() })
    });
    rows.collect()
}

/// A patch without context, by file. A line of a file never begins like a header: git puts a sign before it.
fn parse_patch(patch: &str) -> ChangesByFile {
    let mut changes = ChangesByFile::new();
    let mut current: Option<&mut FileChange> = None;
    for line in patch.lines() {
        if let Some(names) = line.strip_prefix("diff --git ") {
            current = Some(changes.entry(header_path(names).to_owned()).or_default());
        } else if let (Some(change), Some(at)) = (&mut current, line.strip_prefix("@@ -")) {
            change.hunks.extend(parse_hunk(at));
        }
    }
    changes
}

/// Without renames, a header names the same file twice: `a/NAME b/NAME`, each in quotes if the name is an odd one.
fn header_path(names: &str) -> &str {
    let first = names.get(..names.len() / 2).unwrap_or(names);
    let bare = first.strip_prefix('"').and_then(|rest| rest.strip_suffix('"')).unwrap_or(first);
    bare.strip_prefix("a/").unwrap_or(bare)
}

/// `12,3 +14 @@ …`: lines 12 to 14.
fn parse_hunk(at: &str) -> Option<Hunk> {
    let old = at.split(' ').next()?;
    let (start, count) = old.split_once(',').unwrap_or((old, "1"));
    Some(Hunk { start: start.parse().ok()?, count: count.parse().ok()? })
}

/// The commit at which two commits parted; none if they have nothing in common.
pub(crate) fn merge_base(git: &Git, one: &str, other: &str) -> WorktreeResult<Option<String>> {
    match git.optional_text(&["merge-base", one, other]) {
        Err(WorktreeError::GitFailed { .. }) => Ok(None),
        found => found,
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
