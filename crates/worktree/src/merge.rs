//! The work of a session brought into a branch, or nothing at all. Everything is tried in a scratch worktree first, with a
//! commit that no branch knows yet; only when that has gone well is the session's branch moved, then the target, and that
//! only from where it was seen. A crash in between leaves the session's work committed on its own branch, and a merge that
//! can be asked for again.

use std::fs;
use std::path::{Path, PathBuf};

use qd_protocol::limits::CONFLICT_MAX;
use qd_protocol::worktree::MergeConflict;

use crate::error::{WorktreeError, WorktreeResult, io_error_at};
use crate::git::{Git, error_text, git_failed};
use crate::git_worktree::{GitWorktree, operation_in_progress};
use crate::process::OutputLimit;
use crate::repository::{branch_tip, checkouts, path_text};
use crate::summary::uncommitted_files;

/// What is to be merged, and how.
#[derive(Debug, Clone)]
pub struct MergeOptions<'a> {
    /// The branch; the worktree's own target, if none is named.
    pub into: Option<&'a str>,
    /// Whether all of it becomes one commit.
    pub squash: bool,
    /// What the commits are to say.
    pub message: &'a str,
    /// Where it is tried. Whatever is there is removed.
    pub scratch: &'a Path,
}

/// What became of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MergeOutcome {
    /// The branch.
    pub into: String,
    /// Where it is now.
    pub commit: String,
    /// Whether it has moved.
    pub has_moved: bool,
    /// The commit that was made of what was not committed.
    pub committed: Option<String>,
    /// The checkout of the branch that was moved along.
    pub checkout: Option<PathBuf>,
}

impl GitWorktree {
    /// Merges it.
    pub fn merge(&self, merge: &MergeOptions<'_>) -> WorktreeResult<MergeOutcome> {
        let beside = self.repository_git();
        let into =
            merge.into.map(str::to_owned).or(self.record.target.clone()).ok_or(WorktreeError::NoTarget)?;
        let old = branch_tip(&beside, &into)?.ok_or_else(|| WorktreeError::NoBranch {
            name: into.clone(),
            repository: self.common_dir.clone(),
        })?;
        if let Some(what) = self.operation_in_progress() {
            return Err(WorktreeError::Unfinished { path: self.path.clone(), what });
        }
        let checkout = self.clean_checkout_of(&into)?;
        let (head, candidate) = self.candidate_commit(merge.message)?;
        let mut done =
            MergeOutcome { into, commit: old.clone(), has_moved: false, committed: None, checkout: None };
        if candidate != head {
            done.committed = Some(candidate.clone());
        }
        let new = if self.git().exits_zero(&["merge-base", "--is-ancestor", &candidate, &old])? {
            None
        } else {
            self.try_merge(merge, &done.into, &old, &candidate)?
        };
        // From here on it goes well, or leaves only what can be asked for again.
        if candidate != head {
            self.adopt_commit(&head, &candidate)?;
        }
        let Some(new) = new else { return Ok(done) };
        match &checkout {
            Some(path) => {
                let git = Git::at(path, self.stop());
                let args = ["merge", "--ff-only", "--quiet", &new];
                let ended = git.run(&args)?;
                if !ended.status.success() {
                    return Err(WorktreeError::BranchMoved { branch: done.into, said: error_text(&ended) });
                }
            }
            None => {
                let full = format!("refs/heads/{}", done.into);
                let args = ["update-ref", "-m", merge.message, &full, &new, &old];
                let ended = beside.run(&args)?;
                if !ended.status.success() {
                    return Err(WorktreeError::BranchMoved { branch: done.into, said: error_text(&ended) });
                }
            }
        }
        Ok(MergeOutcome { commit: new, has_moved: true, checkout, ..done })
    }

    /// The checkout of a branch, if it has one. It has to be clean: it will be moved along.
    fn clean_checkout_of(&self, branch: &str) -> WorktreeResult<Option<PathBuf>> {
        let full = format!("refs/heads/{branch}");
        for one in checkouts(&self.repository_git())?.into_iter().filter(|one| !one.is_gone) {
            let git = Git::at(&one.path, self.stop());
            let Some(git_dir) = git.optional_text(&["rev-parse", "--absolute-git-dir"])? else { continue };
            let git_dir = Path::new(&git_dir);
            // A branch that is being rebased is checked out nowhere, and must not be moved all the same.
            let rebased = ["rebase-merge/head-name", "rebase-apply/head-name"]
                .iter()
                .any(|file| fs::read_to_string(git_dir.join(file)).is_ok_and(|name| name.trim() == full));
            if rebased {
                return Err(WorktreeError::Unfinished { path: one.path, what: "a rebase" });
            }
            if one.branch.as_deref() != Some(&full)
                || git.output_text(&["rev-parse", "--is-bare-repository"])? == "true"
            {
                continue;
            }
            if let Some(what) = operation_in_progress(git_dir) {
                return Err(WorktreeError::Unfinished { path: one.path, what });
            }
            // Files that git does not know stay where they are; if one is in the way, git says so and moves nothing.
            let count = uncommitted_files(&git, "no")?.len();
            if count > 0 {
                return Err(WorktreeError::CheckoutDirty {
                    branch: branch.to_owned(),
                    path: one.path,
                    count,
                });
            }
            return Ok(Some(one.path));
        }
        Ok(None)
    }

    /// Where the worktree is, and a commit of everything in it: the same one, if all is committed. No branch, no index and
    /// no file changes.
    fn candidate_commit(&self, message: &str) -> WorktreeResult<(String, String)> {
        let head = self.head()?;
        let files = uncommitted_files(&self.git(), "all")?;
        self.check_identity()?;
        if let Some(file) = files.iter().find(|file| file.is_unmerged()) {
            let what = "a merge";
            return Err(WorktreeError::Unfinished { path: self.path.join(&file.path), what });
        }
        // Where all files are listed one by one, only a repository is listed as a directory.
        if let Some(inner) = files.iter().find(|file| file.is_untracked() && file.path.ends_with('/')) {
            return Err(WorktreeError::EmbeddedRepository(inner.path.clone()));
        }
        if files.is_empty() {
            return Ok((head.clone(), head));
        }
        let index = self.copy_index()?;
        let git = self.git_with_index(&index)?;
        git.output(&["add", "--all", "--", "."])?;
        let tree = git.output_text(&["write-tree"])?;
        // What git would write differently, such as ends of lines, is no change to it.
        if tree == git.output_text(&["rev-parse", "--verify", &format!("{head}^{{tree}}")])? {
            return Ok((head.clone(), head));
        }
        let candidate = git.output_text(&["commit-tree", "-p", &head, "-m", message, &tree])?;
        Ok((head, candidate))
    }

    fn check_identity(&self) -> WorktreeResult<()> {
        let git = self.git();
        for key in ["user.name", "user.email"] {
            if git.optional_text(&["config", "--get", key])?.is_none() {
                return Err(WorktreeError::NoIdentity);
            }
        }
        Ok(())
    }

    /// Makes the commit the session's own. Its files are what the commit holds, so only the index follows.
    fn adopt_commit(&self, head: &str, candidate: &str) -> WorktreeResult<()> {
        let git = self.git();
        let args = ["update-ref", "-m", "quarterdeck: what was not committed", "HEAD", candidate, head];
        let ended = git.run(&args)?;
        if !ended.status.success() {
            return Err(WorktreeError::BranchMoved {
                branch: self.record.branch.clone(),
                said: error_text(&ended),
            });
        }
        git.output(&["reset", "--quiet", "--mixed"]).map(drop)
    }

    /// Merges in a scratch worktree; gives the new commit, or none if it would change nothing.
    fn try_merge(
        &self,
        merge: &MergeOptions<'_>,
        into: &str,
        old: &str,
        candidate: &str,
    ) -> WorktreeResult<Option<String>> {
        let scratch = ScratchWorktree::new(self, merge.scratch, old)?;
        // Large files need not be there to be merged by what points to them.
        let git = Git::at(merge.scratch, self.stop()).with_env("GIT_LFS_SKIP_SMUDGE", "1");
        let args: &[&str] = match merge.squash {
            true => &["merge", "--squash", "--no-verify", candidate],
            false => &["merge", "--no-ff", "--no-edit", "--no-verify", "-m", merge.message, candidate],
        };
        let ended = git.run(args)?;
        if !ended.status.success() {
            let conflicts = read_conflicts(&git)?;
            return Err(match conflicts.is_empty() {
                true => git_failed(args, &ended),
                false => WorktreeError::Conflicts { into: into.to_owned(), conflicts },
            });
        }
        if merge.squash {
            if git.exits_zero(&["diff", "--cached", "--quiet", "--no-ext-diff"])? {
                return Ok(None);
            }
            git.output(&["commit", "--quiet", "--no-verify", "-m", merge.message])?;
        }
        let new = git.output_text(&["rev-parse", "--verify", "HEAD^{commit}"])?;
        drop(scratch);
        Ok(Some(new))
    }
}

/// The files that two sides changed, with the places.
fn read_conflicts(git: &Git) -> WorktreeResult<Vec<MergeConflict>> {
    let files = uncommitted_files(git, "no")?;
    let mut room = CONFLICT_MAX;
    let mut found = Vec::new();
    for file in files.into_iter().filter(|file| file.is_unmerged()) {
        let args = ["diff", "--no-ext-diff", "--no-textconv", "--", &file.path];
        let git = git.clone().with_env("GIT_LITERAL_PATHSPECS", "1");
        let ended = git.run_with(&args, None, OutputLimit::Head(room))?;
        room -= ended.stdout.len().min(room);
        let mut hunks = String::from_utf8_lossy(&ended.stdout).into_owned();
        if ended.truncated {
            hunks.push_str("\n… and more\n");
        }
        let what = match file.code.as_str() {
            "AA" => "both added it",
            "DD" => "both deleted it",
            "AU" => "the branch added it",
            "UA" => "the session added it",
            "DU" => "the branch deleted it, the session changed it",
            "UD" => "the session deleted it, the branch changed it",
            _ => "both changed it",
        };
        found.push(MergeConflict { path: file.path, what: what.to_owned(), hunks });
    }
    Ok(found)
}

/// A worktree to try things in. It never holds anything of anybody's, so it is removed whatever is in it.
struct ScratchWorktree<'a> {
    tree: &'a GitWorktree,
    path: &'a Path,
}

impl<'a> ScratchWorktree<'a> {
    fn new(tree: &'a GitWorktree, path: &'a Path, at: &str) -> WorktreeResult<Self> {
        let scratch = Self { tree, path };
        scratch.remove();
        if let Some(parent) = path.parent() {
            fs::create_dir_all(parent).map_err(io_error_at("make", parent))?;
        }
        let git = tree.repository_git().with_env("GIT_LFS_SKIP_SMUDGE", "1");
        let add =
            ["worktree", "add", "--quiet", "--force", "--force", "--detach", "--", path_text(path)?, at];
        git.output(&add)?;
        Ok(scratch)
    }

    fn remove(&self) {
        // Also when everything is to stop: this is quick, and nobody would know of it later.
        let git = Git::at(&self.tree.common_dir, &crate::StopFlag::default());
        let Ok(path) = path_text(self.path) else { return };
        if !self.path.exists() {
            return;
        }
        let removed = git.run(&["worktree", "remove", "--force", "--force", "--", path]);
        if !removed.is_ok_and(|ended| ended.status.success()) {
            drop(fs::remove_dir_all(self.path));
            drop(git.run(&["worktree", "prune"]));
        }
    }
}

impl Drop for ScratchWorktree<'_> {
    fn drop(&mut self) {
        self.remove();
    }
}
