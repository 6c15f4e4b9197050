//! A private copy of a worktree's index. An agent can write the index of its worktree, so the copy is checked: it must
//! name only files of the worktree, or git would read others for us, such as `../../token`. The copy is below the
//! private common directory, where no agent changes it after the check.
//!
//! Files are added to it with `git update-index`. Unlike `git add`, that runs no git in submodules.

use std::io;
use std::path::{Component, Path};

use tempfile::TempPath;

use crate::error::{WorktreeError, WorktreeResult, io_error_at};
use crate::git::{Git, git_failed};
use crate::git_worktree::GitWorktree;
use crate::links::{create_directory, open_regular_file, read_regular_file};
use crate::process::OutputLimit;
use crate::repository::path_text;
use crate::summary::UncommittedFile;

/// The mode of a submodule in the index.
const SUBMODULE_MODE: &str = "160000";

/// The maximum size of a file with attributes that is looked at.
const ATTRIBUTES_MAX: u64 = 1 << 20;

/// A copy of an index, removed when dropped.
pub(crate) struct IndexCopy {
    git: Git,
    _file: TempPath,
}

impl GitWorktree {
    /// Copies the index. It is an error if the index names anything outside the worktree.
    pub(crate) fn copy_index(&self) -> WorktreeResult<IndexCopy> {
        let (dir, index) = (&self.private_common_dir.path, self.record.git_dir.join("index"));
        let copy = tempfile::Builder::new().prefix("index.").tempfile_in(dir);
        let mut copy = copy.map_err(io_error_at("create a file in", dir))?;
        let mut source = open_regular_file(&index).map_err(io_error_at("open", &index))?;
        io::copy(&mut source, &mut copy).map_err(io_error_at("copy", &index))?;
        // The copy must have the modification time of the index. Git re-reads files that changed in the same second as
        // the index was written; for files that look older than the index it trusts what the index says.
        let modified = source.metadata().and_then(|metadata| metadata.modified());
        let dated = modified.and_then(|time| copy.as_file().set_modified(time));
        dated.map_err(io_error_at("set the modification time of", copy.path()))?;
        let git = self.git().with_env("GIT_INDEX_FILE", path_text(copy.path())?);
        self.check_index(&git)?;
        self.create_lfs_directory()?;
        Ok(IndexCopy { git, _file: copy.into_temp_path() })
    }

    fn check_index(&self, git: &Git) -> WorktreeResult<()> {
        let list = git.output(&["ls-files", "-z", "--cached"])?;
        let mut paths = list.split(|byte| *byte == 0).filter(|path| !path.is_empty());
        match paths.find(|path| !is_path_inside(path)) {
            None => Ok(()),
            Some(path) => {
                let path = String::from_utf8_lossy(path).into_owned();
                Err(WorktreeError::IndexLeadsOut { worktree: self.path.clone(), path })
            }
        }
    }

    /// LFS creates its directory when it first stores a file, which it cannot do through our link.
    fn create_lfs_directory(&self) -> WorktreeResult<()> {
        let attributes = read_regular_file(&self.path.join(".gitattributes"), ATTRIBUTES_MAX);
        match String::from_utf8_lossy(&attributes.unwrap_or_default()).contains("filter=lfs") {
            true => create_directory(&self.record.common_dir.join("lfs")),
            false => Ok(()),
        }
    }
}

/// The submodules in the index of a checkout, by path.
pub(crate) fn submodule_paths(git: &Git) -> WorktreeResult<Vec<String>> {
    let list = git.output(&["ls-files", "-z", "--stage"])?;
    let list = String::from_utf8_lossy(&list);
    let entries = list.split('\0').filter(|entry| entry.starts_with(SUBMODULE_MODE));
    let paths = entries.filter_map(|entry| Some(entry.split_once('\t')?.1));
    Ok(paths.filter(|path| is_path_inside(path.as_bytes())).map(str::to_owned).collect())
}

impl IndexCopy {
    /// Git in the worktree, with the copy in place of the index.
    pub(crate) fn git(&self) -> &Git {
        &self.git
    }

    /// Adds the untracked files by name, without their content, so that a diff with a commit shows them. `object` is the
    /// id of any object: git compares the file itself, because nothing is known about the entry.
    pub(crate) fn add_untracked(&self, object: &str) -> WorktreeResult<()> {
        let list = self.git.output(&["ls-files", "-z", "--others", "--exclude-standard"])?;
        let mut entries = Vec::new();
        for path in list.split(|byte| *byte == 0).filter(|path| !path.is_empty()) {
            // A directory is listed only if it is a repository of its own.
            let (mode, path) = match path.strip_suffix(b"/") {
                Some(repository) => (SUBMODULE_MODE, repository),
                None => ("100644", path),
            };
            entries.extend_from_slice(format!("{mode} {object}\t").as_bytes());
            entries.extend_from_slice(path);
            entries.push(0);
        }
        self.update(&["--index-info"], entries)
    }

    /// Adds the uncommitted files with their content.
    pub(crate) fn add_files(&self, files: &[UncommittedFile]) -> WorktreeResult<()> {
        let paths = |select: fn(&UncommittedFile) -> bool| {
            let selected = files.iter().filter(|file| select(file));
            selected.flat_map(|file| [file.path.as_bytes(), b"\0"].concat()).collect::<Vec<u8>>()
        };
        self.update(&["--force-remove", "--stdin"], paths(UncommittedFile::is_missing))?;
        self.update(&["--add", "--replace", "--stdin"], paths(UncommittedFile::is_unstaged))
    }

    fn update(&self, options: &[&str], input: Vec<u8>) -> WorktreeResult<()> {
        if input.is_empty() {
            return Ok(());
        }
        let args = [&["update-index", "-z"], options].concat();
        let output = self.git.run_with(&args, Some(input), OutputLimit::Head(64 << 10))?;
        if output.status.success() { Ok(()) } else { Err(git_failed(&args, &output)) }
    }
}

/// Whether a path in an index is that of a file in the work tree: it does not lead out, nor into git's own directory.
fn is_path_inside(path: &[u8]) -> bool {
    use std::os::unix::ffi::OsStrExt;
    let path = Path::new(std::ffi::OsStr::from_bytes(path));
    path.components()
        .all(|part| matches!(part, Component::Normal(name) if !name.as_bytes().eq_ignore_ascii_case(b".git")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_of_an_index_stays_in_the_work_tree() {
        for path in ["../../token", "/etc/passwd", "a/../../b", ".git/config", "a/.GIT/hooks/x", "..", "./a"]
        {
            assert!(!is_path_inside(path.as_bytes()), "{path}");
        }
        for path in ["a", "a/b", "...", ".gitignore", "a/..b", "git"] {
            assert!(is_path_inside(path.as_bytes()), "{path}");
        }
    }
}
