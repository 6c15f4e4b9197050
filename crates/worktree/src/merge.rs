//! Merges a worktree's work into a branch, or changes nothing at all. Everything is first tried in a scratch checkout,
//! with a commit that no branch refers to yet. Only if that succeeds is the session's branch moved, and then the target
//! branch, only if it is still where it was. A crash in between leaves the session's work committed on its own branch,
//! and the merge can be requested again.

use std::fs;
use std::path::{Path, PathBuf};

use qd_protocol::limits::CONFLICT_MAX;
use qd_protocol::worktree::MergeConflict;

use crate::changes::PLAIN_DIFF_ARGS;
use crate::error::{WorktreeError, WorktreeResult, io_error_at};
use crate::git::{Git, GitDirectories, error_text, git_failed};
use crate::git_worktree::{GitWorktree, operation_in_progress};
use crate::links::{create_directory, read_regular_file};
use crate::private_common_dir::create_missing_directories;
use crate::process::OutputLimit;
use crate::records::WorktreeRecord;
use crate::repository::{Checkout, branch_tip, checkouts};
use crate::summary::uncommitted_files;

/// The maximum size of the patterns of a sparse checkout.
const PATTERNS_MAX: u64 = 4 << 20;

#[derive(Debug, Clone)]
pub struct MergeOptions<'a> {
    /// The branch to merge into. Absent: the worktree's own target.
    pub into: Option<&'a str>,
    /// Whether all work becomes a single commit.
    pub squash: bool,
    /// The message of the commits.
    pub message: &'a str,
    /// The path of the scratch checkout. Anything there is removed.
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
        create_missing_directories(&self.record.common_dir)?;
        let repository_git = self.repository_git();
        let into =
            merge.into.map(str::to_owned).or(self.record.target.clone()).ok_or(WorktreeError::NoTarget)?;
        let old = branch_tip(&repository_git, &into)?.ok_or_else(|| WorktreeError::NoBranch {
            name: into.clone(),
            repository: self.record.common_dir.clone(),
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
            Some(checkout) => {
                let args = ["merge", "--ff-only", "--quiet", &new];
                let output = self.checkout_git(checkout).run(&args)?;
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
        let checkout = checkout.map(|checkout| checkout.path);
        Ok(MergeOutcome { commit: new, has_moved: true, checkout, ..outcome })
    }

    fn checkout_git(&self, checkout: &Checkout) -> Git {
        checkout.git(&self.record.common_dir, &self.private_common_dir, self.stop())
    }

    /// The checkout of a branch, if it has one. It must be clean, because it will be updated.
    fn clean_checkout_of(&self, branch: &str) -> WorktreeResult<Option<Checkout>> {
        let full = format!("refs/heads/{branch}");
        let WorktreeRecord { common_dir, repository, .. } = &self.record;
        for checkout in checkouts(common_dir, &self.private_common_dir, repository) {
            let git = self.checkout_git(&checkout);
            // A branch that is being rebased is not checked out anywhere, but must not be moved either.
            let is_rebasing = ["rebase-merge/head-name", "rebase-apply/head-name"].iter().any(|file| {
                fs::read_to_string(checkout.git_dir.join(file)).is_ok_and(|name| name.trim() == full)
            });
            if is_rebasing {
                return Err(WorktreeError::Unfinished { path: checkout.path, operation: "a rebase" });
            }
            if checkout.branch(&git)?.as_ref() != Some(&full) {
                continue;
            }
            if let Some(operation) = operation_in_progress(&checkout.git_dir) {
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
            return Ok(Some(checkout));
        }
        Ok(None)
    }

    /// The worktree's head, and a commit of everything in it; both are the same if nothing is uncommitted. No branch,
    /// index or file is changed.
    fn candidate_commit(&self, message: &str) -> WorktreeResult<(String, String)> {
        let head = self.head()?;
        self.check_identity()?;
        let index = self.copy_index()?;
        let git = index.git();
        let files = uncommitted_files(git, "all")?;
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
        index.add_files(&files)?;
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

    /// Merges in a scratch checkout. Returns the new commit, or nothing if the merge would change nothing.
    fn try_merge(
        &self,
        merge: &MergeOptions<'_>,
        into: &str,
        old: &str,
        candidate: &str,
    ) -> WorktreeResult<Option<String>> {
        let scratch = ScratchCheckout::new(self, merge.scratch, old)?;
        let git = scratch.git();
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
            if git.exits_zero(&[&PLAIN_DIFF_ARGS[..], &["--cached", "--quiet"]].concat())? {
                return Ok(None);
            }
            git.output(&["commit", "--quiet", "--no-verify", "-m", merge.message])?;
        }
        Ok(Some(git.output_text(&["rev-parse", "--verify", "HEAD^{commit}"])?))
    }
}

/// The conflicting files with their conflicting hunks.
fn read_conflicts(git: &Git) -> WorktreeResult<Vec<MergeConflict>> {
    let files = uncommitted_files(git, "no")?;
    let mut remaining = CONFLICT_MAX;
    let mut conflicts = Vec::new();
    for file in files.into_iter().filter(|file| file.is_unmerged()) {
        let args = [&PLAIN_DIFF_ARGS[..], &["--", &file.path]].concat();
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

/// A checkout for trying a merge. The repository does not know of it: its git directory is ours, and it is removed
/// whatever is in it, because it never contains anyone's work.
struct ScratchCheckout<'a> {
    tree: &'a GitWorktree,
    path: &'a Path,
}

impl<'a> ScratchCheckout<'a> {
    fn new(tree: &'a GitWorktree, path: &'a Path, at: &str) -> WorktreeResult<Self> {
        let scratch = Self { tree, path };
        scratch.remove();
        let (work_tree, git_dir) = scratch.directories();
        create_directory(&work_tree)?;
        create_directory(&git_dir)?;
        let write = |name: &str, text: &str| {
            let file = git_dir.join(name);
            fs::write(&file, text).map_err(io_error_at("write", &file))
        };
        if tree.record.common_dir.join("reftable").exists() {
            // Git's newer format of refs: an empty stack of tables, and a head for older versions.
            create_directory(&git_dir.join("reftable"))?;
            write("reftable/tables.list", "")?;
            write("HEAD", "ref: refs/heads/.invalid\n")?;
            scratch.git().output(&["update-ref", "--no-deref", "HEAD", at])?;
        } else {
            write("HEAD", &format!("{at}\n"))?;
        }
        // Only the files that the worktree has are needed to merge.
        let patterns = tree.record.git_dir.join("info/sparse-checkout");
        if let Ok(patterns) = read_regular_file(&patterns, PATTERNS_MAX) {
            create_directory(&git_dir.join("info"))?;
            write("info/sparse-checkout", &String::from_utf8_lossy(&patterns))?;
        }
        scratch.git().output(&["reset", "--hard", "--quiet"])?;
        Ok(scratch)
    }

    /// The directory of the files, and that of git.
    fn directories(&self) -> (PathBuf, PathBuf) {
        (self.path.join("files"), self.path.join("git"))
    }

    fn git(&self) -> Git {
        let (work_tree, git_dir) = self.directories();
        let directories = GitDirectories {
            git_dir,
            private_common_dir: self.tree.private_common_dir.path.clone(),
            work_tree: Some(work_tree),
            settings: self.tree.record.settings.clone(),
        };
        Git::in_checkout(directories, self.tree.stop())
    }

    fn remove(&self) {
        // Earlier releases made it known to the repository, and a crash may have left it so.
        if self.path.join(".git").exists() {
            let path = self.path.canonicalize().ok();
            let WorktreeRecord { common_dir, repository, .. } = &self.tree.record;
            let mut checkouts = checkouts(common_dir, &self.tree.private_common_dir, repository).into_iter();
            if let Some(checkout) = checkouts.find(|checkout| Some(&checkout.path) == path.as_ref()) {
                drop(fs::remove_dir_all(checkout.git_dir));
            }
        }
        drop(fs::remove_dir_all(self.path));
    }
}

impl Drop for ScratchCheckout<'_> {
    fn drop(&mut self) {
        self.remove();
    }
}
