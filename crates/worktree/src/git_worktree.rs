//! Creates a worktree, finishes one after a crash, and opens one. Everything known about a worktree is in git's own
//! directory for it, so a worktree can be judged even if the session that wanted it is forgotten.
//!
//! A worktree is created in steps, and a crash can come after each: the branch, git's directory, the files, our record.
//! The record comes last, before anyone may work there. So a worktree without a record contains nobody's work.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::error::{WorktreeError, WorktreeResult, io_error_at};
use crate::git::Git;
use crate::process::StopFlag;
use crate::repository::{Repository, branch_tip, checkouts, path_text};

/// Our record, in git's directory of a worktree.
const RECORD_FILE: &str = "quarterdeck.json";

/// A worktree to create.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WorktreePlan {
    /// Any checkout of the repository.
    pub repository: PathBuf,
    pub path: PathBuf,
    /// The branch to create for the worktree.
    pub branch: String,
    /// The commit that the worktree starts from.
    pub base: String,
    /// The branch that its work is merged into by default.
    pub target: Option<String>,
}

/// An existing worktree.
#[derive(Debug, Clone)]
pub struct GitWorktree {
    pub path: PathBuf,
    /// Git's directory for this worktree.
    pub git_dir: PathBuf,
    /// Git's directory that all checkouts of the repository share.
    pub common_dir: PathBuf,
    pub record: WorktreeRecord,
    stop: StopFlag,
}

/// What we store about a worktree, in git's directory for it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorktreeRecord {
    /// The branch that was created for the worktree.
    pub branch: String,
    /// The commit that the worktree started from.
    pub base: String,
    /// The branch that its work is merged into by default.
    #[serde(default)]
    pub target: Option<String>,
    /// Whether the project's hooks and file copies for a new worktree have been done.
    #[serde(default)]
    pub set_up: bool,
}

impl WorktreePlan {
    /// Creates the worktree or the missing parts of it. An existing one is used as it is. `mark` is set in git's
    /// environment, so that a later process can find and end it.
    pub fn create(&self, mark: Option<(&'static str, &str)>, stop: &StopFlag) -> WorktreeResult<GitWorktree> {
        let path = path_text(&self.path)?;
        let repository = Repository::of(&self.repository, stop)?;
        let marked = |git: Git| match mark {
            Some((name, value)) => git.with_env(name, value),
            None => git,
        };
        let git = marked(repository.git(stop));
        match inspect_path(&self.path, stop)? {
            PathContent::Absent => {}
            PathContent::Checkout { git_dir, common } if common == repository.common_dir => {
                if let Some(record) = read_record(&git_dir)? {
                    return Ok(GitWorktree {
                        path: self.path.clone(),
                        git_dir,
                        common_dir: common,
                        record,
                        stop: stop.clone(),
                    });
                }
                // No one has worked there yet. Git writes its index after the files: without an index the files are
                // incomplete, and the process that held the index lock was stopped or died with the machine.
                if !git_dir.join("index").exists() {
                    drop(fs::remove_file(git_dir.join("index.lock")));
                    marked(Git::at(&self.path, stop)).output(&["reset", "--hard", "--quiet"])?;
                }
                drop(git.run(&["worktree", "unlock", "--", path])?);
                return self.write_first_record(git_dir, common, stop);
            }
            PathContent::Checkout { .. } => {
                return Err(self.path_occupied("it belongs to another repository"));
            }
            // Only what git had written before it was stopped.
            PathContent::EmptyWorktree => {
                drop(fs::remove_file(self.path.join(".git")));
                fs::remove_dir(&self.path).map_err(io_error_at("remove", &self.path))?;
            }
            PathContent::Other => return Err(self.path_occupied("it is not a worktree")),
        }
        if let Some(parent) = self.path.parent() {
            fs::create_dir_all(parent).map_err(io_error_at("create", parent))?;
        }
        let full = format!("refs/heads/{}", self.branch);
        let elsewhere = |checkout: &crate::repository::Checkout| {
            checkout.branch.as_deref() == Some(&full) && !checkout.is_gone && checkout.path != self.path
        };
        if let Some(other) = checkouts(&git)?.into_iter().find(elsewhere) {
            return Err(WorktreeError::BranchInUse { branch: self.branch.clone(), path: other.path });
        }
        // Forced twice, because git may remember a locked worktree at this path that no longer exists.
        let add = ["worktree", "add", "--quiet", "--force", "--force"];
        // An existing branch of this name is from an earlier attempt, or contains the session's commits.
        match branch_tip(&git, &self.branch)? {
            Some(_) => git.output(&[&add[..], &["--", path, &self.branch]].concat())?,
            None => {
                git.output(&[&add[..], &["--no-track", "-b", &self.branch, "--", path, &self.base]].concat())?
            }
        };
        match inspect_path(&self.path, stop)? {
            PathContent::Checkout { git_dir, common } => self.write_first_record(git_dir, common, stop),
            _ => Err(WorktreeError::NoWorktree(self.path.clone())),
        }
    }

    fn write_first_record(
        &self,
        git_dir: PathBuf,
        common: PathBuf,
        stop: &StopFlag,
    ) -> WorktreeResult<GitWorktree> {
        let record = WorktreeRecord {
            branch: self.branch.clone(),
            base: self.base.clone(),
            target: self.target.clone(),
            set_up: false,
        };
        write_record(&git_dir, &record)?;
        Ok(GitWorktree { path: self.path.clone(), git_dir, common_dir: common, record, stop: stop.clone() })
    }

    fn path_occupied(&self, reason: &str) -> WorktreeError {
        WorktreeError::PathOccupied { path: self.path.clone(), reason: reason.to_owned() }
    }
}

impl GitWorktree {
    /// Opens the worktree at a path.
    pub fn open(path: &Path, stop: &StopFlag) -> WorktreeResult<Self> {
        match inspect_path(path, stop)? {
            PathContent::Checkout { git_dir, common } => match read_record(&git_dir)? {
                Some(record) => Ok(Self {
                    path: path.to_owned(),
                    git_dir,
                    common_dir: common,
                    record,
                    stop: stop.clone(),
                }),
                None => Err(WorktreeError::NoWorktree(path.to_owned())),
            },
            _ => Err(WorktreeError::NoWorktree(path.to_owned())),
        }
    }

    /// Git in the worktree.
    pub fn git(&self) -> Git {
        Git::at(&self.path, &self.stop)
    }

    /// Git in the directory that all checkouts share, for operations that may outlive the worktree.
    pub fn repository_git(&self) -> Git {
        Git::at(&self.common_dir, &self.stop)
    }

    /// The flag that stops this worktree's git commands.
    pub fn stop(&self) -> &StopFlag {
        &self.stop
    }

    /// Records that the setup of the new worktree is done.
    pub fn mark_set_up(&mut self) -> WorktreeResult<()> {
        self.record.set_up = true;
        write_record(&self.git_dir, &self.record)
    }

    /// Whether the repository has submodules. They are not checked out in the worktree.
    pub fn has_submodules(&self) -> bool {
        self.path.join(".gitmodules").symlink_metadata().is_ok()
    }

    /// The commit that is checked out.
    pub fn head(&self) -> WorktreeResult<String> {
        self.git().output_text(&["rev-parse", "--verify", "HEAD^{commit}"])
    }

    /// The unfinished operation in the worktree, if any, such as "a merge".
    pub fn operation_in_progress(&self) -> Option<&'static str> {
        operation_in_progress(&self.git_dir)
    }
}

/// The unfinished operation in a checkout, if any.
pub(crate) fn operation_in_progress(git_dir: &Path) -> Option<&'static str> {
    let markers = [
        ("rebase-merge", "a rebase"),
        ("rebase-apply", "a rebase"),
        ("MERGE_HEAD", "a merge"),
        ("CHERRY_PICK_HEAD", "a cherry-pick"),
        ("REVERT_HEAD", "a revert"),
        ("BISECT_LOG", "a bisection"),
    ];
    markers.into_iter().find(|(marker, _)| git_dir.join(marker).exists()).map(|(_, operation)| operation)
}

/// What is at the path of a worktree.
enum PathContent {
    Absent,
    /// The top directory of a checkout.
    Checkout {
        git_dir: PathBuf,
        common: PathBuf,
    },
    /// An empty directory, or one that contains only git's pointer file.
    EmptyWorktree,
    Other,
}

fn inspect_path(path: &Path, stop: &StopFlag) -> WorktreeResult<PathContent> {
    match path.symlink_metadata() {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(PathContent::Absent),
        Err(error) => return Err(io_error_at("inspect", path)(error)),
        // A symlink would lead to something that is not ours.
        Ok(metadata) if !metadata.is_dir() => return Ok(PathContent::Other),
        Ok(_) => {}
    }
    let git = Git::at(path, stop);
    // In a worktree `.git` is a file. A directory would be a repository that someone created there.
    let has_pointer = path.join(".git").symlink_metadata().is_ok_and(|metadata| metadata.is_file());
    let rev_parse = |what: &str| git.optional_text(&["rev-parse", "--path-format=absolute", what]);
    if has_pointer
        && let Some(top) = rev_parse("--show-toplevel")?
        && Path::new(&top) == path.canonicalize().map_err(io_error_at("resolve", path))?
        && let (Some(git_dir), Some(common)) = (rev_parse("--git-dir")?, rev_parse("--git-common-dir")?)
    {
        let resolved = |text: String| Path::new(&text).canonicalize().unwrap_or(PathBuf::from(text));
        return Ok(PathContent::Checkout { git_dir: resolved(git_dir), common: resolved(common) });
    }
    let mut entries = fs::read_dir(path).map_err(io_error_at("read", path))?;
    let only_pointer =
        entries.all(|entry| entry.is_ok_and(|entry| has_pointer && entry.file_name() == ".git"));
    Ok(if only_pointer { PathContent::EmptyWorktree } else { PathContent::Other })
}

fn read_record(git_dir: &Path) -> WorktreeResult<Option<WorktreeRecord>> {
    let path = git_dir.join(RECORD_FILE);
    match fs::read(&path) {
        // An unreadable record is an error: it does not prove that no one has worked there.
        Ok(text) => serde_json::from_slice(&text).map(Some).map_err(|error| WorktreeError::PathOccupied {
            path,
            reason: format!("it is not a Quarterdeck record ({error})"),
        }),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(io_error_at("read", &path)(error)),
    }
}

fn write_record(git_dir: &Path, record: &WorktreeRecord) -> WorktreeResult<()> {
    let path = git_dir.join(RECORD_FILE);
    let text = serde_json::to_vec(record).map_err(|error| io_error_at("write", &path)(error.into()))?;
    qd_files::replace_file(&path, &text).map_err(io_error_at("write", &path))
}
