//! The small files that connect a checkout with its repository: `.git` in the checkout, and `commondir` and `gitdir` in
//! git's directory for it. An agent can change them, so they are never followed without being compared with what we
//! recorded. Nothing here runs git.

use std::fs::{self, DirEntry, File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use qd_files::DRAFT_PREFIX;
use rustix::fs::OFlags;

use crate::error::{WorktreeError, WorktreeResult, io_error_at};

/// The maximum size of a file with a path in it.
const LINK_MAX: u64 = 16 << 10;

/// Opens a file to read it. A pipe or a device, which could be read for ever, is an error.
pub(crate) fn open_regular_file(path: &Path) -> io::Result<File> {
    let flags = OFlags::NONBLOCK.bits().cast_signed();
    let file = OpenOptions::new().read(true).custom_flags(flags).open(path)?;
    if file.metadata()?.is_file() { Ok(file) } else { Err(io::Error::other("it is not a file")) }
}

/// Reads a file of limited size.
pub(crate) fn read_regular_file(path: &Path, max: u64) -> io::Result<Vec<u8>> {
    let mut content = Vec::new();
    match open_regular_file(path)?.take(max + 1).read_to_end(&mut content)? {
        size if size as u64 > max => Err(io::Error::other("it is too large")),
        _ => Ok(content),
    }
}

/// Git's directory of a checkout, as its `.git` says: the directory itself, or where the file leads.
pub(crate) fn git_dir_of(work_tree: &Path) -> io::Result<PathBuf> {
    let pointer = work_tree.join(".git");
    let kind = pointer.symlink_metadata()?.file_type();
    if kind.is_dir() {
        return pointer.canonicalize();
    }
    if !kind.is_file() {
        return Err(io::Error::other("it is neither a file nor a directory"));
    }
    let text = read_link_text(&pointer)?;
    let target = text.strip_prefix("gitdir:").map(str::trim_start).filter(|target| !target.is_empty());
    let target = target.ok_or_else(|| io::Error::other("it does not name a directory"))?;
    work_tree.join(target).canonicalize()
}

/// The directory that all checkouts share, as git's directory of one checkout says.
pub(crate) fn common_dir_of(git_dir: &Path) -> io::Result<PathBuf> {
    git_dir.join(read_link_text(&git_dir.join("commondir"))?).canonicalize()
}

/// The checkout that git's directory for it is about.
pub(crate) fn work_tree_of(git_dir: &Path) -> io::Result<PathBuf> {
    let pointer = git_dir.join(read_link_text(&git_dir.join("gitdir"))?);
    match (pointer.parent(), pointer.file_name()) {
        (Some(work_tree), Some(name)) if name == ".git" => work_tree.canonicalize(),
        _ => Err(io::Error::other("it does not name a `.git`")),
    }
}

fn read_link_text(path: &Path) -> io::Result<String> {
    let text = String::from_utf8(read_regular_file(path, LINK_MAX)?).map_err(io::Error::other)?;
    Ok(text.trim_end_matches(['\n', '\r']).to_owned())
}

/// The content of `.git` in a checkout.
pub(crate) fn pointer_text(git_dir: &Path) -> String {
    format!("gitdir: {}", git_dir.display())
}

/// Writes `.git` of a checkout.
pub(crate) fn write_pointer(work_tree: &Path, git_dir: &Path) -> WorktreeResult<()> {
    let pointer = work_tree.join(".git");
    let text = format!("{}\n", pointer_text(git_dir));
    qd_files::replace_file(&pointer, text.as_bytes()).map_err(io_error_at("write", &pointer))
}

/// Removes what a crash has left of writing `.git`. Only for a checkout in which nobody has worked yet.
pub(crate) fn remove_pointer_drafts(work_tree: &Path) -> WorktreeResult<()> {
    let entries = fs::read_dir(work_tree).map_err(io_error_at("list", work_tree))?;
    let is_draft = |entry: &DirEntry| entry.file_name().as_bytes().starts_with(DRAFT_PREFIX.as_bytes());
    for draft in entries.flatten().filter(is_draft).map(|entry| entry.path()) {
        fs::remove_file(&draft).map_err(io_error_at("remove", &draft))?;
    }
    Ok(())
}

/// Checks that a worktree, git's directory for it and the repository still lead to each other, by these paths.
pub(crate) fn check_links(work_tree: &Path, git_dir: &Path, common_dir: &Path) -> WorktreeResult<()> {
    let pointer = work_tree.join(".git");
    // A directory would be another repository, which was put in the place of the pointer.
    let is_file = pointer.symlink_metadata().is_ok_and(|metadata| metadata.is_file());
    let target = match is_file {
        true => git_dir_of(work_tree),
        false => Err(io::Error::other("it is not a file any more")),
    };
    check_link(&pointer, target, git_dir, pointer_text(git_dir))?;
    let expected_text = common_dir.display().to_string();
    check_link(&git_dir.join("commondir"), common_dir_of(git_dir), common_dir, expected_text)?;
    let expected_text = pointer.display().to_string();
    let work_tree = work_tree.canonicalize().map_err(io_error_at("resolve", work_tree))?;
    check_link(&git_dir.join("gitdir"), work_tree_of(git_dir), &work_tree, expected_text)
}

fn check_link(
    file: &Path,
    found: io::Result<PathBuf>,
    expected: &Path,
    expected_text: String,
) -> WorktreeResult<()> {
    let found = match found {
        Ok(found) if found == expected => return Ok(()),
        Ok(found) => format!("leads to {}", found.display()),
        Err(error) => format!("leads nowhere ({error})"),
    };
    let (file, expected) = (file.to_owned(), expected.to_owned());
    Err(WorktreeError::Changed { file, found, expected, expected_text })
}

/// Creates a directory unless it exists.
pub(crate) fn create_directory(path: &Path) -> WorktreeResult<()> {
    fs::create_dir_all(path).map_err(io_error_at("create", path))
}
