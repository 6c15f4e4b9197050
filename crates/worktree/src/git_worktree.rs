//! Creates a worktree, finishes one after a crash, and opens one.
//!
//! A worktree is created in steps, and a crash can come after each: the branch, git's directory, the files, our record.
//! The record comes last, before anyone may work there. So a worktree without a record contains nobody's work, unless an
//! earlier release created it.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use crate::error::{WorktreeError, WorktreeResult, io_error_at};
use crate::git::{Git, GitDirectories};
use crate::links;
use crate::private_common_dir::{PrivateCommonDir, configuration_text, create_missing_directories};
use crate::process::StopFlag;
use crate::records::{EarlierRecord, GitRecords, WorktreeRecord, read_earlier_record};
use crate::repository::{Repository, branch_tip, checkouts, common_git, path_text};

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

/// An existing worktree. Its paths are those of our record.
#[derive(Debug, Clone)]
pub struct GitWorktree {
    pub path: PathBuf,
    pub record: WorktreeRecord,
    pub(crate) private_common_dir: PrivateCommonDir,
    records: GitRecords,
    stop: StopFlag,
}

impl WorktreePlan {
    /// Creates the worktree or the missing parts of it. An existing one is used as it is. `mark` is set in git's
    /// environment, so that a later process can find and end it.
    pub fn create(
        &self,
        records: &GitRecords,
        mark: Option<(&'static str, &str)>,
        stop: &StopFlag,
    ) -> WorktreeResult<GitWorktree> {
        path_text(&self.path)?;
        let repository = Repository::of(&self.repository, records, stop)?;
        let creation = WorktreeCreation { plan: self, repository, records, mark, stop };
        match inspect_path(&self.path)? {
            PathContent::Absent => {}
            PathContent::Directory if records.read(&self.path)?.is_some() => {
                let tree = GitWorktree::open(&self.path, records, stop)?;
                return match tree.record.common_dir == creation.repository.common_dir {
                    true => Ok(tree),
                    false => Err(self.path_occupied("it belongs to another repository")),
                };
            }
            PathContent::Directory => match linked_git_dir(&self.path) {
                Some((git_dir, common_dir)) if common_dir == creation.repository.common_dir => {
                    return creation.finish(git_dir);
                }
                Some(_) => return Err(self.path_occupied("it belongs to another repository")),
                None if remove_empty_worktree(&self.path)? => {}
                None => return Err(self.path_occupied("it is not a worktree")),
            },
            PathContent::Other => return Err(self.path_occupied("it is not a worktree")),
        }
        creation.begin()
    }

    fn path_occupied(&self, reason: &str) -> WorktreeError {
        WorktreeError::PathOccupied { path: self.path.clone(), reason: reason.to_owned() }
    }
}

/// A worktree that is being created.
struct WorktreeCreation<'a> {
    plan: &'a WorktreePlan,
    repository: Repository,
    records: &'a GitRecords,
    mark: Option<(&'static str, &'a str)>,
    stop: &'a StopFlag,
}

impl WorktreeCreation<'_> {
    /// Creates the worktree where nothing is.
    fn begin(&self) -> WorktreeResult<GitWorktree> {
        let Repository { common_dir, private_common_dir, top, .. } = &self.repository;
        let WorktreePlan { path, branch, base, .. } = self.plan;
        // The record of a worktree that was here before would make the new one look finished.
        self.records.remove(path)?;
        if let Some(parent) = path.parent() {
            links::create_directory(parent)?;
        }
        create_missing_directories(common_dir)?;
        let full = format!("refs/heads/{branch}");
        for checkout in checkouts(common_dir, private_common_dir, top) {
            let git = checkout.git(common_dir, private_common_dir, self.stop);
            if checkout.path != *path && checkout.branch(&git)?.as_ref() == Some(&full) {
                return Err(WorktreeError::BranchInUse { branch: branch.clone(), path: checkout.path });
            }
        }
        let git = self.marked(self.repository.common_git(self.stop));
        // Forced twice, because git may remember a locked worktree at this path that no longer exists. Without the files,
        // because they are checked out with our own directories.
        let add = ["worktree", "add", "--quiet", "--force", "--force", "--no-checkout"];
        let path = path_text(path)?;
        // An existing branch of this name is from an earlier attempt, or contains the session's commits.
        match branch_tip(&git, branch)? {
            Some(_) => git.output(&[&add[..], &["--", path, branch]].concat())?,
            None => git.output(&[&add[..], &["--no-track", "-b", branch, "--", path, base]].concat())?,
        };
        match linked_git_dir(&self.plan.path) {
            Some((git_dir, found)) if found == *common_dir => self.finish(git_dir),
            _ => Err(WorktreeError::NoWorktree(self.plan.path.clone())),
        }
    }

    /// Completes a worktree for which git has a directory: its files, and our record.
    fn finish(&self, git_dir: PathBuf) -> WorktreeResult<GitWorktree> {
        let WorktreePlan { path, branch, base, target, .. } = self.plan;
        let earlier = read_earlier_record(&git_dir)?;
        let settings = match (&earlier, git_dir.join("info/sparse-checkout").exists()) {
            (None, true) => self.repository.private_common_dir.main_checkout_settings.clone(),
            _ => Vec::new(),
        };
        let record = WorktreeRecord {
            git_dir,
            common_dir: self.repository.common_dir.clone(),
            repository: self.repository.top.clone(),
            branch: branch.clone(),
            base: base.clone(),
            target: target.clone(),
            set_up: earlier.as_ref().is_some_and(|earlier| earlier.set_up),
            settings,
        };
        let tree = GitWorktree {
            path: path.clone(),
            record,
            private_common_dir: self.repository.private_common_dir.clone(),
            records: self.records.clone(),
            stop: self.stop.clone(),
        };
        if earlier.is_none() {
            self.check_out(&tree)?;
        }
        self.records.write(path, &tree.record)?;
        Ok(tree)
    }

    /// Writes the files of a worktree in which no one has worked yet.
    fn check_out(&self, tree: &GitWorktree) -> WorktreeResult<()> {
        let git_dir = &tree.record.git_dir;
        links::remove_pointer_drafts(&tree.path)?;
        // Git has written the path of our private common directory, which only we use.
        links::write_pointer(&tree.path, git_dir)?;
        drop(fs::remove_file(git_dir.join("locked")));
        if !tree.record.settings.is_empty() {
            let file = git_dir.join("config.worktree");
            let text = configuration_text(&tree.record.settings);
            qd_files::replace_file(&file, text.as_bytes()).map_err(io_error_at("write", &file))?;
        }
        // Git writes its index after the files: without an index the files are incomplete, and the process that held
        // the index lock was stopped or died with the machine.
        if !git_dir.join("index").exists() {
            drop(fs::remove_file(git_dir.join("index.lock")));
            let git = self.marked(tree.git());
            git.output(&["symbolic-ref", "HEAD", &format!("refs/heads/{}", self.plan.branch)])?;
            git.output(&["reset", "--hard", "--quiet"])?;
        }
        Ok(())
    }

    fn marked(&self, git: Git) -> Git {
        match self.mark {
            Some((name, value)) => git.with_env(name, value),
            None => git,
        }
    }
}

impl GitWorktree {
    /// Opens the worktree at a path. It must be as we recorded it.
    pub fn open(path: &Path, records: &GitRecords, stop: &StopFlag) -> WorktreeResult<Self> {
        let tree = Self::open_recorded(path, records, stop)?;
        let WorktreeRecord { git_dir, common_dir, .. } = &tree.record;
        links::check_links(path, git_dir, common_dir)?;
        Ok(tree)
    }

    /// Opens the worktree at a path, whatever it says about itself. Only for removing it.
    pub fn open_recorded(path: &Path, records: &GitRecords, stop: &StopFlag) -> WorktreeResult<Self> {
        let no_worktree = || WorktreeError::NoWorktree(path.to_owned());
        if !matches!(inspect_path(path)?, PathContent::Directory) {
            return Err(no_worktree());
        }
        let record = match records.read(path)? {
            Some(record) => record,
            None => adopt_earlier_record(path, records)?.ok_or_else(no_worktree)?,
        };
        if !record.git_dir.is_dir() || !record.common_dir.is_dir() {
            return Err(no_worktree());
        }
        let private_common_dir = records.private_common_dir(&record.common_dir, stop)?;
        let (path, records, stop) = (path.to_owned(), records.clone(), stop.clone());
        Ok(Self { path, record, private_common_dir, records, stop })
    }

    /// Git in the worktree.
    pub(crate) fn git(&self) -> Git {
        let directories = GitDirectories {
            git_dir: self.record.git_dir.clone(),
            private_common_dir: self.private_common_dir.path.clone(),
            work_tree: Some(self.path.clone()),
            settings: self.record.settings.clone(),
        };
        Git::in_checkout(directories, &self.stop)
    }

    /// Git in the directory that all checkouts share, for operations that may outlive the worktree.
    pub(crate) fn repository_git(&self) -> Git {
        common_git(&self.record.common_dir, &self.private_common_dir, &self.stop)
    }

    /// The flag that stops this worktree's git commands.
    pub fn stop(&self) -> &StopFlag {
        &self.stop
    }

    pub(crate) fn records(&self) -> &GitRecords {
        &self.records
    }

    /// Records that the setup of the new worktree is done.
    pub fn mark_set_up(&mut self) -> WorktreeResult<()> {
        self.record.set_up = true;
        self.records.write(&self.path, &self.record)
    }

    /// The top directory of the repository that the worktree belongs to.
    pub fn repository_top(&self) -> &Path {
        let common_dir = &self.record.common_dir;
        let top = common_dir.parent().filter(|_| common_dir.file_name().is_some_and(|name| name == ".git"));
        top.unwrap_or(common_dir)
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
        operation_in_progress(&self.record.git_dir)
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
    Directory,
    /// A file, or a symlink, which would lead to something that is not ours.
    Other,
}

fn inspect_path(path: &Path) -> WorktreeResult<PathContent> {
    match path.symlink_metadata() {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(PathContent::Absent),
        Err(error) => Err(io_error_at("inspect", path)(error)),
        Ok(metadata) if metadata.is_dir() => Ok(PathContent::Directory),
        Ok(_) => Ok(PathContent::Other),
    }
}

/// Git's directory of a worktree, and the one that all checkouts share, if these and the worktree lead to each other.
fn linked_git_dir(path: &Path) -> Option<(PathBuf, PathBuf)> {
    let git_dir = links::git_dir_of(path).ok()?;
    let common_dir = links::common_dir_of(&git_dir).ok()?;
    links::check_links(path, &git_dir, &common_dir).ok()?;
    Some((git_dir, common_dir))
}

/// Takes over the record that an earlier release made of a worktree. A wrong one does no harm beyond the worktree: with
/// our directories, git runs nothing that its repository configures.
fn adopt_earlier_record(path: &Path, records: &GitRecords) -> WorktreeResult<Option<WorktreeRecord>> {
    let Some((git_dir, common_dir)) = linked_git_dir(path) else { return Ok(None) };
    let Some(earlier) = read_earlier_record(&git_dir)? else { return Ok(None) };
    let EarlierRecord { branch, base, target, set_up } = earlier;
    let repository = common_dir.parent().unwrap_or(&common_dir).to_owned();
    let settings = Vec::new();
    let record = WorktreeRecord { git_dir, common_dir, repository, branch, base, target, set_up, settings };
    records.write(path, &record)?;
    Ok(Some(record))
}

/// Removes a directory that has only what git had written before it was stopped. False if there is something else in it.
fn remove_empty_worktree(path: &Path) -> WorktreeResult<bool> {
    let mut entries = fs::read_dir(path).map_err(io_error_at("read", path))?;
    let pointer = path.join(".git");
    let has_pointer = pointer.symlink_metadata().is_ok_and(|metadata| metadata.is_file());
    if !entries.all(|entry| entry.is_ok_and(|entry| has_pointer && entry.file_name() == ".git")) {
        return Ok(false);
    }
    drop(fs::remove_file(pointer));
    fs::remove_dir(path).map_err(io_error_at("remove", path))?;
    Ok(true)
}
