//! Merges a worktree's work into a branch, or changes nothing at all. Everything is first tried in a scratch worktree,
//! with a commit that no branch refers to yet. Only if that succeeds is the session's branch moved, and then the target
//! branch, only if it is still where it was. A crash in between leaves the session's work committed on its own branch,
//! and the merge can be requested again.

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

#[derive(Debug, Clone)]
pub struct MergeOptions<'a> {
    /// The branch to merge into. Absent: the worktree's own target.
    pub into: Option<&'a str>,
    /// Whether all work becomes a single commit.
    pub squash: bool,
    /// The message of the commits.
    pub message: &'a str,
    /// The path of the scratch worktree. Anything there is removed.
    pub scratch: &'a Path,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MergeOutcome {
    /// The branch that was merged into.
    pub into: String,
    /// The commit that the branch is at now.
    pub commit: String,
    /// Whether the branch has moved.
    pub has_moved: bool,
    /// The commit created from uncommitted changes, if there were any.
    pub committed: Option<String>,
    /// The checkout of the branch, if there is one. Its files were updated.
    pub checkout: Option<PathBuf>,
}

impl GitWorktree {
    /// Merges the worktree's work into a branch.
    pub fn merge(&self, merge: &MergeOptions<'_>) -> WorktreeResult<MergeOutcome> {
        let repository_git = self.repository_git();
        let into =
            merge.into.map(str::to_owned).or(self.record.target.clone()).ok_or(WorktreeError::NoTarget)?;
        let old = branch_tip(&repository_git, &into)?.ok_or_else(|| WorktreeError::NoBranch {
            name: into.clone(),
            repository: self.common_dir.clone(),
        })?;
        if let Some(operation) = self.operation_in_progress() {
            return Err(WorktreeError::Unfinished { path: self.path.clone(), operation });
        }
        let checkout = self.clean_checkout_of(&into)?;
        let (head, candidate) = self.candidate_commit(merge.message)?;
        let mut outcome =
            MergeOutcome { into, commit: old.clone(), has_moved: false, committed: None, checkout: None };
        if candidate != head {
            outcome.committed = Some(candidate.clone());
        }
        let new = if self.git().exits_zero(&["merge-base", "--is-ancestor", &candidate, &old])? {
            None
        } else {
            self.try_merge(merge, &outcome.into, &old, &candidate)?
        };
        // From here on the merge succeeds, or leaves only a state in which it can be requested again.
        if candidate != head {
            self.adopt_commit(&head, &candidate)?;
        }
        let Some(new) = new else { return Ok(outcome) };
        match &checkout {
            Some(path) => {
                let git = Git::at(path, self.stop());
                let args = ["merge", "--ff-only", "--quiet", &new];
                let output = git.run(&args)?;
                if !output.status.success() {
                    return Err(WorktreeError::BranchMoved {
                        branch: outcome.into,
                        detail: error_text(&output),
                    });
                }
            }
            None => {
                let full = format!("refs/heads/{}", outcome.into);
                let args = ["update-ref", "-m", merge.message, &full, &new, &old];
                let output = repository_git.run(&args)?;
                if !output.status.success() {
                    return Err(WorktreeError::BranchMoved {
                        branch: outcome.into,
                        detail: error_text(&output),
                    });
                }
            }
        }
        Ok(MergeOutcome { commit: new, has_moved: true, checkout, ..outcome })
    }

    /// The checkout of a branch, if it has one. It must be clean, because it will be updated.
    fn clean_checkout_of(&self, branch: &str) -> WorktreeResult<Option<PathBuf>> {
        let full = format!("refs/heads/{branch}");
        for checkout in checkouts(&self.repository_git())?.into_iter().filter(|checkout| !checkout.is_gone) {
            let git = Git::at(&checkout.path, self.stop());
            let Some(git_dir) = git.optional_text(&["rev-parse", "--absolute-git-dir"])? else { continue };
            let git_dir = Path::new(&git_dir);
            // A branch that is being rebased is not checked out anywhere, but must not be moved either.
            let is_rebasing = ["rebase-merge/head-name", "rebase-apply/head-name"]
                .iter()
                .any(|file| fs::read_to_string(git_dir.join(file)).is_ok_and(|name| name.trim() == full));
            if is_rebasing {
                return Err(WorktreeError::Unfinished { path: checkout.path, operation: "a rebase" });
            }
            if checkout.branch.as_deref() != Some(&full)
                || git.output_text(&["rev-parse", "--is-bare-repository"])? == "true"
            {
                continue;
            }
            if let Some(operation) = operation_in_progress(git_dir) {
                return Err(WorktreeError::Unfinished { path: checkout.path, operation });
            }
            // Untracked files stay where they are. If one is in the way, git refuses and moves nothing.
            let count = uncommitted_files(&git, "no")?.len();
            if count > 0 {
                return Err(WorktreeError::CheckoutDirty {
                    branch: branch.to_owned(),
                    path: checkout.path,
                    count,
                });
            }
            return Ok(Some(checkout.path));
        }
        Ok(None)
    }

    /// The worktree's head, and a commit of everything in it; both are the same if nothing is uncommitted. No branch,
    /// index or file is changed.
    fn candidate_commit(&self, message: &str) -> WorktreeResult<(String, String)> {
        let head = self.head()?;
        let files = uncommitted_files(&self.git(), "all")?;
        self.check_identity()?;
        if let Some(file) = files.iter().find(|file| file.is_unmerged()) {
            let operation = "a merge";
            return Err(WorktreeError::Unfinished { path: self.path.join(&file.path), operation });
        }
        // With `all`, untracked files are listed one by one, so an entry that is a directory is a repository.
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
        // Differences that git normalizes, such as line endings, are not changes.
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

    /// Moves the session's branch to the commit. The files already match it, so only the index must follow.
    fn adopt_commit(&self, head: &str, candidate: &str) -> WorktreeResult<()> {
        let git = self.git();
        let args = ["update-ref", "-m", "quarterdeck: commit uncommitted changes", "HEAD", candidate, head];
        let output = git.run(&args)?;
        if !output.status.success() {
            return Err(WorktreeError::BranchMoved {
                branch: self.record.branch.clone(),
                detail: error_text(&output),
            });
        }
        git.output(&["reset", "--quiet", "--mixed"]).map(drop)
    }

    /// Merges in a scratch worktree. Returns the new commit, or nothing if the merge would change nothing.
    fn try_merge(
        &self,
        merge: &MergeOptions<'_>,
        into: &str,
        old: &str,
        candidate: &str,
    ) -> WorktreeResult<Option<String>> {
        let scratch = ScratchWorktree::new(self, merge.scratch, old)?;
        // Files in LFS need not be downloaded, because their pointers are merged.
        let git = Git::at(merge.scratch, self.stop()).with_env("GIT_LFS_SKIP_SMUDGE", "1");
        let args: &[&str] = match merge.squash {
            true => &["merge", "--squash", "--no-verify", candidate],
            false => &["merge", "--no-ff", "--no-edit", "--no-verify", "-m", merge.message, candidate],
        };
        let output = git.run(args)?;
        if !output.status.success() {
            let conflicts = read_conflicts(&git)?;
            return Err(match conflicts.is_empty() {
                true => git_failed(args, &output),
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

/// The conflicting files with their conflicting hunks.
fn read_conflicts(git: &Git) -> WorktreeResult<Vec<MergeConflict>> {
    let files = uncommitted_files(git, "no")?;
    let mut remaining = CONFLICT_MAX;
    let mut conflicts = Vec::new();
    for file in files.into_iter().filter(|file| file.is_unmerged()) {
        let args = ["diff", "--no-ext-diff", "--no-textconv", "--", &file.path];
        let git = git.clone().with_env("GIT_LITERAL_PATHSPECS", "1");
        let output = git.run_with(&args, None, OutputLimit::Head(remaining))?;
        remaining -= output.stdout.len().min(remaining);
        let mut hunks = String::from_utf8_lossy(&output.stdout).into_owned();
        if output.truncated {
            hunks.push_str("\n… truncated\n");
        }
        let what = match file.code.as_str() {
            "AA" => "both sides added it",
            "DD" => "both sides deleted it",
            "AU" => "the branch added it",
            "UA" => "the session added it",
            "DU" => "the branch deleted it, the session changed it",
            "UD" => "the session deleted it, the branch changed it",
            _ => "both sides changed it",
        };
        conflicts.push(MergeConflict { path: file.path, what: what.to_owned(), hunks });
    }
    Ok(conflicts)
}

/// A worktree for trying a merge. It never contains anyone's work, so it is removed whatever is in it.
struct ScratchWorktree<'a> {
    tree: &'a GitWorktree,
    path: &'a Path,
}

impl<'a> ScratchWorktree<'a> {
    fn new(tree: &'a GitWorktree, path: &'a Path, at: &str) -> WorktreeResult<Self> {
        let scratch = Self { tree, path };
        scratch.remove();
        if let Some(parent) = path.parent() {
            fs::create_dir_all(parent).map_err(io_error_at("create", parent))?;
        }
        let git = tree.repository_git().with_env("GIT_LFS_SKIP_SMUDGE", "1");
        let add =
            ["worktree", "add", "--quiet", "--force", "--force", "--detach", "--", path_text(path)?, at];
        git.output(&add)?;
        Ok(scratch)
    }

    fn remove(&self) {
        // With a flag of its own, because this must run even if everything is to stop: it is quick, and nobody would
        // remove it later.
        let git = Git::at(&self.tree.common_dir, &crate::StopFlag::default());
        let Ok(path) = path_text(self.path) else { return };
        if !self.path.exists() {
            return;
        }
        let removed = git.run(&["worktree", "remove", "--force", "--force", "--", path]);
        if !removed.is_ok_and(|output| output.status.success()) {
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
