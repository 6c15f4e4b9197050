//! Copies files that git ignores, such as local settings, into a new worktree. They come from the checkout that the
//! worktree was created from. Nothing is read from outside that checkout or written outside the worktree: no symlink is
//! followed on either side.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Component, Path, PathBuf};

use qd_protocol::limits::{BRING_FILES_MAX, BRING_MIB_MAX, HOOKS_MAX};
use rustix::fs::{CWD, Mode, OFlags, openat};

use crate::error::{WorktreeError, WorktreeResult, io_error_at};
use crate::git::git_failed;
use crate::process::{OutputLimit, StopFlag};
use crate::repository::Repository;

/// The maximum depth of directories that a pattern matches.
const DEPTH_MAX: usize = 32;

#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct CopiedFiles {
    /// Paths of the copied files, from the top of the repository.
    pub files: Vec<String>,
    /// The files that were not copied, each with the reason.
    pub skipped: Vec<String>,
}

/// Checks that a pattern is valid: a path from the top of the repository, in which `*` and `?` match anything except
/// `/`.
pub fn check_pattern(pattern: &str) -> WorktreeResult<()> {
    let bad = |reason: &str| {
        Err(WorktreeError::BadPattern { pattern: pattern.to_owned(), reason: reason.to_owned() })
    };
    let path = Path::new(pattern);
    if pattern.is_empty() || pattern.contains(['\0', '\n']) {
        return bad("it is empty or contains a line break");
    }
    if !path.components().all(|part| matches!(part, Component::Normal(_))) {
        return bad(
            "it leads out of the repository; use a path from the top of the repository, without `..`",
        );
    }
    if path.components().any(|part| part.as_os_str() == ".git") {
        return bad("git's own files cannot be copied");
    }
    Ok(())
}

/// Copies the ignored files that match the patterns from a checkout to another directory. Existing files are kept.
pub fn copy_ignored_files(
    patterns: &[String],
    from: &Repository,
    to: &Path,
    stop: &StopFlag,
) -> WorktreeResult<CopiedFiles> {
    let mut matches = Vec::new();
    for pattern in patterns.iter().take(HOOKS_MAX) {
        check_pattern(pattern)?;
        let parts: Vec<&str> = pattern.split('/').filter(|part| !part.is_empty()).collect();
        collect_matches(&from.top, Path::new(""), &parts, 0, &mut matches)
            .map_err(|reason| WorktreeError::BadPattern { pattern: pattern.clone(), reason })?;
    }
    matches.sort();
    matches.dedup();
    let mut copied = CopiedFiles::default();
    let ignored = filter_ignored(from, &matches, stop)?;
    let mut bytes = 0;
    for file in matches {
        let name = file.display().to_string();
        if !ignored.contains(&file) {
            copied.skipped.push(format!("{name}: git does not ignore it; only ignored files are copied"));
            continue;
        }
        if stop.is_set() {
            return Err(WorktreeError::Stopped);
        }
        match copy_file(&from.top, to, &file, &mut bytes).map_err(io_error_at("copy", &file))? {
            None => copied.files.push(name),
            Some(reason) => copied.skipped.push(format!("{name}: {reason}")),
        }
    }
    Ok(copied)
}

/// Finds the files that a pattern matches. A matching directory is taken with everything in it.
fn collect_matches(
    top: &Path,
    dir: &Path,
    parts: &[&str],
    depth: usize,
    matches: &mut Vec<PathBuf>,
) -> std::result::Result<(), String> {
    let limit_exceeded = || {
        format!("it matches more than {BRING_FILES_MAX} files or is more than {DEPTH_MAX} directories deep")
    };
    if depth > DEPTH_MAX {
        return Err(limit_exceeded());
    }
    // Missing or unreadable directories are skipped.
    let Ok(entries) = fs::read_dir(top.join(dir)) else { return Ok(()) };
    for entry in entries.flatten() {
        let name = entry.file_name();
        let Some(text) = name.to_str() else { continue };
        let is_match = parts.first().is_none_or(|part| matches_pattern(part, text));
        let Ok(kind) = entry.file_type() else { continue };
        if !is_match || name == ".git" {
            continue;
        }
        let path = dir.join(&name);
        let rest = parts.get(1..).unwrap_or_default();
        if kind.is_dir() {
            collect_matches(top, &path, rest, depth + 1, matches)?;
        } else if kind.is_file() && rest.is_empty() {
            matches.push(path);
        }
        if matches.len() > BRING_FILES_MAX {
            return Err(limit_exceeded());
        }
    }
    Ok(())
}

/// Whether a name matches one component of a pattern.
fn matches_pattern(pattern: &str, name: &str) -> bool {
    let (pattern, name): (Vec<char>, Vec<char>) = (pattern.chars().collect(), name.chars().collect());
    // Where to continue after a mismatch: after the last star, one character later.
    let (mut p, mut n, mut retry) = (0, 0, None);
    while n < name.len() {
        match pattern.get(p) {
            Some('*') => {
                retry = Some((p, n));
                p += 1;
            }
            Some(&c) if c == '?' || c == name[n] => (p, n) = (p + 1, n + 1),
            _ => match retry {
                Some((star, from)) => {
                    retry = Some((star, from + 1));
                    (p, n) = (star + 1, from + 1);
                }
                None => return false,
            },
        }
    }
    pattern[p..].iter().all(|c| *c == '*')
}

/// The files that git ignores.
fn filter_ignored(checkout: &Repository, files: &[PathBuf], stop: &StopFlag) -> WorktreeResult<Vec<PathBuf>> {
    if files.is_empty() {
        return Ok(Vec::new());
    }
    let mut input = Vec::new();
    for file in files {
        input.extend_from_slice(file.as_os_str().as_encoded_bytes());
        input.push(0);
    }
    let args = ["check-ignore", "-z", "--stdin"];
    let output = checkout.git(stop).run_with(&args, Some(input), OutputLimit::Head(64 << 20))?;
    // Exit status 1 means that none of them is ignored.
    if !matches!(output.status.code(), Some(0 | 1)) {
        return Err(git_failed(&args, &output));
    }
    let text = String::from_utf8_lossy(&output.stdout);
    Ok(text.split('\0').filter(|name| !name.is_empty()).map(PathBuf::from).collect())
}

/// Copies one file. Returns the reason if it was skipped.
fn copy_file(from: &Path, to: &Path, file: &Path, bytes: &mut u64) -> io::Result<Option<&'static str>> {
    let target = to.join(file);
    // A symlink in the worktree could lead out of it.
    let mut directory = to.to_owned();
    for part in file.parent().iter().flat_map(|parent| parent.components()) {
        directory.push(part);
        match directory.symlink_metadata() {
            Ok(metadata) if metadata.is_dir() => {}
            Ok(_) => return Ok(Some("part of its path in the worktree is not a directory")),
            Err(error) if error.kind() == io::ErrorKind::NotFound => fs::create_dir(&directory)?,
            Err(error) => return Err(error),
        }
    }
    if target.symlink_metadata().is_ok() {
        return Ok(Some("it already exists in the worktree"));
    }
    let mut source = open_without_links(from, file)?;
    let metadata = source.metadata()?;
    *bytes += metadata.len();
    if *bytes > (BRING_MIB_MAX as u64) << 20 {
        return Ok(Some("the size limit for copied files is reached"));
    }
    // Written under another name first, so that a crash cannot leave an incomplete file under the real name.
    let draft = target.with_file_name(format!(".qd-{}-{}", std::process::id(), metadata.ino()));
    let write = || -> io::Result<()> {
        let mode = metadata.mode() & 0o777;
        let mut copy: File = OpenOptions::new()
            .write(true)
            .create_new(true)
            .custom_flags(OFlags::NOFOLLOW.bits().cast_signed())
            .mode(mode)
            .open(&draft)?;
        io::copy(&mut source, &mut copy)?;
        fs::rename(&draft, &target)
    };
    let mut write = write;
    let written = write();
    if written.is_err() {
        drop(fs::remove_file(&draft));
    }
    written.map(|()| None)
}

/// Opens a file of the checkout without following any link: an agent could have put one into its path since the file was
/// listed, and would get a copy of what it leads to.
fn open_without_links(checkout: &Path, file: &Path) -> io::Result<File> {
    let as_folder = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let mut folder = openat(CWD, checkout, as_folder, Mode::empty())?;
    for name in file.parent().into_iter().flat_map(Path::iter) {
        folder = openat(&folder, name, as_folder, Mode::empty())?;
    }
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    Ok(openat(&folder, file.file_name().unwrap_or_default(), flags, Mode::empty())?.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_link_that_appears_after_a_file_was_listed_is_not_followed() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        for name in ["checkout", "worktree", "home"] {
            fs::create_dir(path(name)).unwrap();
        }
        fs::write(path("home/token"), "secret").unwrap();
        std::os::unix::fs::symlink(path("home"), path("checkout/config")).unwrap();
        std::os::unix::fs::symlink(path("home/token"), path("checkout/token")).unwrap();
        for file in ["config/token", "token"] {
            let copied = copy_file(&path("checkout"), &path("worktree"), Path::new(file), &mut 0);
            assert!(copied.is_err() && !path("worktree").join(file).exists(), "{file}");
        }
    }

    #[test]
    fn a_star_stands_for_anything_in_a_name() {
        for (pattern, name, expected) in [
            (".env", ".env", true),
            ("*.local", "a.local", true),
            ("*.local", ".local", true),
            ("a*b*c", "a1b2b3c", true),
            ("a*b*c", "a1b2b3", false),
            ("?x", "ax", true),
            ("?x", "x", false),
            ("*", "anything", true),
            ("", "x", false),
        ] {
            assert_eq!(matches_pattern(pattern, name), expected, "{pattern} {name}");
        }
    }

    #[test]
    fn a_pattern_that_leads_out_is_refused() {
        for pattern in ["", "/etc/passwd", "../x", "a/../../x", ".git/config", "./x", "a\nb"] {
            assert!(check_pattern(pattern).is_err(), "{pattern:?}");
        }
        assert!(check_pattern("config/*.local").is_ok());
    }
}
