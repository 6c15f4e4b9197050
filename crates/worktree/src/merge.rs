//! The work of a session brought into a branch, or nothing at all. Everything is tried in a scratch worktree first, with a
//! commit that no branch knows yet; only when that has gone well is the session's branch moved, then the target, and that
//! only from where it was seen. A crash in between leaves the session's work committed on its own branch, and a merge that
//! can be asked for again.

use std::fs;
use std::path::{Path, PathBuf};

use qd_protocol::limits::CONFLICT_MAX;
use qd_protocol::worktree::Conflict;

use crate::error::{Error, Result, io_at};
use crate::git::{Git, failed, said};
use crate::process::Keep;
use crate::repository::{branch_tip, checkouts, plain};
use crate::standing::changed;
use crate::tree::{Tree, unfinished};

/// What is to be merged, and how.
#[derive(Debug, Clone)]
pub struct Merge<'a> {
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
pub struct Done {
    /// The branch.
    pub into: String,
    /// Where it is now.
    pub commit: String,
    /// Whether it has moved.
    pub moved: bool,
    /// The commit that was made of what was not committed.
    pub committed: Option<String>,
    /// The checkout of the branch that was moved along.
    pub checkout: Option<PathBuf>,
}

impl Tree {
    /// Merges it.
    pub fn merge(&self, merge: &Merge<'_>) -> Result<Done> {
        let beside = self.git_beside();
        let into = merge.into.map(str::to_owned).or(self.note.target.clone()).ok_or(Error::NoTarget)?;
        let old = branch_tip(&beside, &into)?
            .ok_or_else(|| Error::NoBranch { name: into.clone(), repository: self.common.clone() })?;
        if let Some(what) = self.unfinished() {
            return Err(Error::Unfinished { path: self.path.clone(), what });
        }
        let checkout = self.checkout_of(&into)?;
        let (head, candidate) = self.candidate(merge.message)?;
        let mut done = Done { into, commit: old.clone(), moved: false, committed: None, checkout: None };
        if candidate != head {
            done.committed = Some(candidate.clone());
        }
        let new = if self.git().holds(&["merge-base", "--is-ancestor", &candidate, &old])? {
            None
        } else {
            self.try_out(merge, &done.into, &old, &candidate)?
        };
        // From here on it goes well, or leaves only what can be asked for again.
        if candidate != head {
            self.adopt(&head, &candidate)?;
        }
        let Some(new) = new else { return Ok(done) };
        match &checkout {
            Some(path) => {
                let git = Git::at(path, self.stop());
                let args = ["merge", "--ff-only", "--quiet", &new];
                let ended = git.run(&args)?;
                if !ended.status.success() {
                    return Err(Error::Moved { branch: done.into, said: said(&ended) });
                }
            }
            None => {
                let full = format!("refs/heads/{}", done.into);
                let args = ["update-ref", "-m", merge.message, &full, &new, &old];
                let ended = beside.run(&args)?;
                if !ended.status.success() {
                    return Err(Error::Moved { branch: done.into, said: said(&ended) });
                }
            }
        }
        Ok(Done { commit: new, moved: true, checkout, ..done })
    }

    /// The checkout of a branch, if it has one. It has to be clean: it will be moved along.
    fn checkout_of(&self, branch: &str) -> Result<Option<PathBuf>> {
        let full = format!("refs/heads/{branch}");
        for one in checkouts(&self.git_beside())?.into_iter().filter(|one| !one.is_gone) {
            let git = Git::at(&one.path, self.stop());
            let Some(git_dir) = git.maybe(&["rev-parse", "--absolute-git-dir"])? else { continue };
            let git_dir = Path::new(&git_dir);
            // A branch that is being rebased is checked out nowhere, and must not be moved all the same.
            let rebased = ["rebase-merge/head-name", "rebase-apply/head-name"]
                .iter()
                .any(|file| fs::read_to_string(git_dir.join(file)).is_ok_and(|name| name.trim() == full));
            if rebased {
                return Err(Error::Unfinished { path: one.path, what: "a rebase" });
            }
            if one.branch.as_deref() != Some(&full)
                || git.text(&["rev-parse", "--is-bare-repository"])? == "true"
            {
                continue;
            }
            if let Some(what) = unfinished(git_dir) {
                return Err(Error::Unfinished { path: one.path, what });
            }
            // Files that git does not know stay where they are; if one is in the way, git says so and moves nothing.
            let count = changed(&git, "no")?.len();
            if count > 0 {
                return Err(Error::CheckoutDirty { branch: branch.to_owned(), path: one.path, count });
            }
            return Ok(Some(one.path));
        }
        Ok(None)
    }

    /// Where the worktree is, and a commit of everything in it: the same one, if all is committed. No branch, no index and
    /// no file changes.
    fn candidate(&self, message: &str) -> Result<(String, String)> {
        let head = self.head()?;
        let files = changed(&self.git(), "all")?;
        self.check_identity()?;
        if let Some(file) = files.iter().find(|file| file.is_unmerged()) {
            let what = "a merge";
            return Err(Error::Unfinished { path: self.path.join(&file.path), what });
        }
        // Where all files are listed one by one, only a repository is listed as a directory.
        if let Some(inner) = files.iter().find(|file| file.is_untracked() && file.path.ends_with('/')) {
            return Err(Error::Embedded(inner.path.clone()));
        }
        if files.is_empty() {
            return Ok((head.clone(), head));
        }
        let index = self.copied_index()?;
        let git = self.git_with_index(&index)?;
        git.bytes(&["add", "--all", "--", "."])?;
        let tree = git.text(&["write-tree"])?;
        // What git would write differently, such as ends of lines, is no change to it.
        if tree == git.text(&["rev-parse", "--verify", &format!("{head}^{{tree}}")])? {
            return Ok((head.clone(), head));
        }
        let candidate = git.text(&["commit-tree", "-p", &head, "-m", message, &tree])?;
        Ok((head, candidate))
    }

    fn check_identity(&self) -> Result<()> {
        let git = self.git();
        for key in ["user.name", "user.email"] {
            if git.maybe(&["config", "--get", key])?.is_none() {
                return Err(Error::NoIdentity);
            }
        }
        Ok(())
    }

    /// Makes the commit the session's own. Its files are what the commit holds, so only the index follows.
    fn adopt(&self, head: &str, candidate: &str) -> Result<()> {
        let git = self.git();
        let args = ["update-ref", "-m", "quarterdeck: what was not committed", "HEAD", candidate, head];
        let ended = git.run(&args)?;
        if !ended.status.success() {
            return Err(Error::Moved { branch: self.note.branch.clone(), said: said(&ended) });
        }
        git.bytes(&["reset", "--quiet", "--mixed"]).map(drop)
    }

    /// Merges in a scratch worktree; gives the new commit, or none if it would change nothing.
    fn try_out(&self, merge: &Merge<'_>, into: &str, old: &str, candidate: &str) -> Result<Option<String>> {
        let scratch = Scratch::new(self, merge.scratch, old)?;
        // Large files need not be there to be merged by what points to them.
        let git = Git::at(merge.scratch, self.stop()).with("GIT_LFS_SKIP_SMUDGE", "1");
        let args: &[&str] = match merge.squash {
            true => &["merge", "--squash", "--no-verify", candidate],
            false => &["merge", "--no-ff", "--no-edit", "--no-verify", "-m", merge.message, candidate],
        };
        let ended = git.run(args)?;
        if !ended.status.success() {
            let conflicts = conflicts(&git)?;
            return Err(match conflicts.is_empty() {
                true => failed(args, &ended),
                false => Error::Conflicts { into: into.to_owned(), conflicts },
            });
        }
        if merge.squash {
            if git.holds(&["diff", "--cached", "--quiet", "--no-ext-diff"])? {
                return Ok(None);
            }
            git.bytes(&["commit", "--quiet", "--no-verify", "-m", merge.message])?;
        }
        let new = git.text(&["rev-parse", "--verify", "HEAD^{commit}"])?;
        drop(scratch);
        Ok(Some(new))
    }
}

/// The files that two sides changed, with the places.
fn conflicts(git: &Git) -> Result<Vec<Conflict>> {
    let files = changed(git, "no")?;
    let mut room = CONFLICT_MAX;
    let mut found = Vec::new();
    for file in files.into_iter().filter(|file| file.is_unmerged()) {
        let args = ["diff", "--no-ext-diff", "--no-textconv", "--", &file.path];
        let git = git.clone().with("GIT_LITERAL_PATHSPECS", "1");
        let ended = git.run_with(&args, None, Keep::Head(room))?;
        room -= ended.out.len().min(room);
        let mut hunks = String::from_utf8_lossy(&ended.out).into_owned();
        if ended.cut {
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
        found.push(Conflict { path: file.path, what: what.to_owned(), hunks });
    }
    Ok(found)
}

/// A worktree to try things in. It never holds anything of anybody's, so it is removed whatever is in it.
struct Scratch<'a> {
    tree: &'a Tree,
    path: &'a Path,
}

impl<'a> Scratch<'a> {
    fn new(tree: &'a Tree, path: &'a Path, at: &str) -> Result<Self> {
        let scratch = Self { tree, path };
        scratch.remove();
        if let Some(parent) = path.parent() {
            fs::create_dir_all(parent).map_err(io_at("make", parent))?;
        }
        let git = tree.git_beside().with("GIT_LFS_SKIP_SMUDGE", "1");
        let add = ["worktree", "add", "--quiet", "--force", "--force", "--detach", "--", plain(path)?, at];
        git.bytes(&add)?;
        Ok(scratch)
    }

    fn remove(&self) {
        // Also when everything is to stop: this is quick, and nobody would know of it later.
        let git = Git::at(&self.tree.common, &crate::Stop::default());
        let Ok(path) = plain(self.path) else { return };
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

impl Drop for Scratch<'_> {
    fn drop(&mut self) {
        self.remove();
    }
}
