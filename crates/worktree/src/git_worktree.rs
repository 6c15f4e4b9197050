//! A worktree made, made again after a crash, and found. All that is known of one lies in git's own folder for it, so it
//! can be judged also when whoever wanted it is forgotten.
//!
//! Making happens in steps, each of which may be the last before a crash: the branch, git's folder, the files, our note.
//! The note comes last and before anybody may work there, so a worktree without one holds no work of anybody's.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::error::{WorktreeError, WorktreeResult, io_error_at};
use crate::git::Git;
use crate::process::StopFlag;
use crate::repository::{Repository, branch_tip, checkouts, path_text};

/// Our note in git's folder of a worktree.
const RECORD_FILE: &str = "quarterdeck.json";

/// A worktree that is to be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WorktreePlan {
    /// A checkout of the repository.
    pub repository: PathBuf,
    /// Where the worktree goes.
    pub path: PathBuf,
    /// The branch that is made for it.
    pub branch: String,
    /// The commit that it begins from.
    pub base: String,
    /// The branch that its work is to go into.
    pub target: Option<String>,
}

/// A worktree that is there.
#[derive(Debug, Clone)]
pub struct GitWorktree {
    /// Where.
    pub path: PathBuf,
    /// Git's folder for it.
    pub git_dir: PathBuf,
    /// What it shares with the other checkouts.
    pub common_dir: PathBuf,
    /// What we noted.
    pub record: WorktreeRecord,
    stop: StopFlag,
}

/// What is kept of a worktree beside its files.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorktreeRecord {
    /// The branch that was made for it.
    pub branch: String,
    /// The commit that it began from.
    pub base: String,
    /// The branch that its work is to go into.
    #[serde(default)]
    pub target: Option<String>,
    /// Whether all was done that a project wants done in a new one.
    #[serde(default)]
    pub set_up: bool,
}

impl WorktreePlan {
    /// Makes the worktree, or what is missing of it; one that is there is used as it is. `mark` is put into the
    /// environment of git, so that whoever comes after us can find and end it.
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
                if let Some(note) = read_record(&git_dir)? {
                    return Ok(GitWorktree {
                        path: self.path.clone(),
                        git_dir,
                        common_dir: common,
                        record: note,
                        stop: stop.clone(),
                    });
                }
                // Nobody has worked there. Git writes its index after the files: without one they are not all there,
                // and whoever holds the lock for it was stopped or died with its machine.
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
            // What git had written before it was stopped, and nothing else.
            PathContent::EmptyWorktree => {
                drop(fs::remove_file(self.path.join(".git")));
                fs::remove_dir(&self.path).map_err(io_error_at("remove", &self.path))?;
            }
            PathContent::Other => return Err(self.path_occupied("it is not a worktree")),
        }
        if let Some(parent) = self.path.parent() {
            fs::create_dir_all(parent).map_err(io_error_at("make", parent))?;
        }
        let full = format!("refs/heads/{}", self.branch);
        let elsewhere = |one: &crate::repository::Checkout| {
            one.branch.as_deref() == Some(&full) && !one.is_gone && one.path != self.path
        };
        if let Some(other) = checkouts(&git)?.into_iter().find(elsewhere) {
            return Err(WorktreeError::BranchInUse { branch: self.branch.clone(), path: other.path });
        }
        // Forced twice: git may remember a worktree at this place that is gone, and hold it locked.
        let add = ["worktree", "add", "--quiet", "--force", "--force"];
        // A branch of this name is of an earlier try, or holds what the session has committed so far.
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
        let note = WorktreeRecord {
            branch: self.branch.clone(),
            base: self.base.clone(),
            target: self.target.clone(),
            set_up: false,
        };
        write_record(&git_dir, &note)?;
        Ok(GitWorktree {
            path: self.path.clone(),
            git_dir,
            common_dir: common,
            record: note,
            stop: stop.clone(),
        })
    }

    fn path_occupied(&self, why: &str) -> WorktreeError {
        WorktreeError::PathOccupied { path: self.path.clone(), why: why.to_owned() }
    }
}

impl GitWorktree {
    /// The worktree at a path.
    pub fn open(path: &Path, stop: &StopFlag) -> WorktreeResult<Self> {
        match inspect_path(path, stop)? {
            PathContent::Checkout { git_dir, common } => match read_record(&git_dir)? {
                Some(note) => Ok(Self {
                    path: path.to_owned(),
                    git_dir,
                    common_dir: common,
                    record: note,
                    stop: stop.clone(),
                }),
                None => Err(WorktreeError::NoWorktree(path.to_owned())),
            },
            _ => Err(WorktreeError::NoWorktree(path.to_owned())),
        }
    }

    /// Git in it.
    pub fn git(&self) -> Git {
        Git::at(&self.path, &self.stop)
    }

    /// Git beside it, in what all checkouts share: for what may outlive the worktree.
    pub fn repository_git(&self) -> Git {
        Git::at(&self.common_dir, &self.stop)
    }

    /// What stops it.
    pub fn stop(&self) -> &StopFlag {
        &self.stop
    }

    /// Keeps that all was done that is to be done in a new one.
    pub fn mark_set_up(&mut self) -> WorktreeResult<()> {
        self.record.set_up = true;
        write_record(&self.git_dir, &self.record)
    }

    /// Whether the repository has others inside it, which are not checked out with it.
    pub fn has_submodules(&self) -> bool {
        self.path.join(".gitmodules").symlink_metadata().is_ok()
    }

    /// The commit that it is at.
    pub fn head(&self) -> WorktreeResult<String> {
        self.git().output_text(&["rev-parse", "--verify", "HEAD^{commit}"])
    }

    /// What it is in the middle of, if it is.
    pub fn operation_in_progress(&self) -> Option<&'static str> {
        operation_in_progress(&self.git_dir)
    }
}

/// What a checkout is in the middle of.
pub(crate) fn operation_in_progress(git_dir: &Path) -> Option<&'static str> {
    let signs = [
        ("rebase-merge", "a rebase"),
        ("rebase-apply", "a rebase"),
        ("MERGE_HEAD", "a merge"),
        ("CHERRY_PICK_HEAD", "a cherry-pick"),
        ("REVERT_HEAD", "a revert"),
        ("BISECT_LOG", "a bisection"),
    ];
    signs.into_iter().find(|(sign, _)| git_dir.join(sign).exists()).map(|(_, what)| what)
}

/// What is at the place of a worktree.
enum PathContent {
    Absent,
    /// A checkout whose top this is.
    Checkout {
        git_dir: PathBuf,
        common: PathBuf,
    },
    /// An empty directory, or one with nothing but git's pointer.
    EmptyWorktree,
    Other,
}

fn inspect_path(path: &Path, stop: &StopFlag) -> WorktreeResult<PathContent> {
    match path.symlink_metadata() {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(PathContent::Absent),
        Err(error) => return Err(io_error_at("look at", path)(error)),
        // A link would lead who follows it to something that is not ours.
        Ok(found) if !found.is_dir() => return Ok(PathContent::Other),
        Ok(_) => {}
    }
    let git = Git::at(path, stop);
    // A worktree has a file, not a directory: a directory is a repository that somebody has made there.
    let pointer = path.join(".git").symlink_metadata().is_ok_and(|found| found.is_file());
    let ask = |what: &str| git.optional_text(&["rev-parse", "--path-format=absolute", what]);
    if pointer
        && let Some(top) = ask("--show-toplevel")?
        && Path::new(&top) == path.canonicalize().map_err(io_error_at("resolve", path))?
        && let (Some(git_dir), Some(common)) = (ask("--git-dir")?, ask("--git-common-dir")?)
    {
        let resolved = |text: String| Path::new(&text).canonicalize().unwrap_or(PathBuf::from(text));
        return Ok(PathContent::Checkout { git_dir: resolved(git_dir), common: resolved(common) });
    }
    let mut entries = fs::read_dir(path).map_err(io_error_at("read", path))?;
    let only_pointer = entries.all(|entry| entry.is_ok_and(|entry| pointer && entry.file_name() == ".git"));
    Ok(if only_pointer { PathContent::EmptyWorktree } else { PathContent::Other })
}

fn read_record(git_dir: &Path) -> WorktreeResult<Option<WorktreeRecord>> {
    let path = git_dir.join(RECORD_FILE);
    match fs::read(&path) {
        // One that cannot be read is as good as none only if nobody worked there, which it does not say.
        Ok(text) => serde_json::from_slice(&text).map(Some).map_err(|error| WorktreeError::PathOccupied {
            path,
            why: format!("it is no note of ours ({error})"),
        }),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(io_error_at("read", &path)(error)),
    }
}

fn write_record(git_dir: &Path, note: &WorktreeRecord) -> WorktreeResult<()> {
    let (path, draft) = (git_dir.join(RECORD_FILE), git_dir.join("quarterdeck.new"));
    let text = serde_json::to_vec(note).map_err(|error| io_error_at("write", &path)(error.into()))?;
    let write = || {
        let mut file = fs::File::create(&draft)?;
        std::io::Write::write_all(&mut file, &text)?;
        file.sync_all()?;
        fs::rename(&draft, &path)?;
        fs::File::open(git_dir)?.sync_all()
    };
    write().map_err(io_error_at("write", &path))
}
