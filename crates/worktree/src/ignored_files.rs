//! Files that git ignores and a new worktree misses: settings of this machine. They are copied from the checkout that the
//! worktree was made from, never from outside it and never to outside the worktree: no link is followed on either side.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Component, Path, PathBuf};

use qd_protocol::limits::{BRING_FILES_MAX, BRING_MIB_MAX, HOOKS_MAX};
use rustix::fs::OFlags;

use crate::error::{WorktreeError, WorktreeResult, io_error_at};
use crate::git::{Git, git_failed};
use crate::process::{OutputLimit, StopFlag};

/// Directories in directories that a pattern is followed into.
const DEPTH_MAX: usize = 32;

/// What was brought, and what was not.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct CopiedFiles {
    /// The files, from the top.
    pub files: Vec<String>,
    /// Those that were left, with the reason.
    pub skipped: Vec<String>,
}

/// Whether a pattern can be used: a path from the top of the repository in which `*` and `?` stand for anything but `/`.
pub fn check_pattern(pattern: &str) -> WorktreeResult<()> {
    let bad = |why: &str| Err(WorktreeError::BadPattern { pattern: pattern.to_owned(), why: why.to_owned() });
    let path = Path::new(pattern);
    if pattern.is_empty() || pattern.contains(['\0', '\n']) {
        return bad("it is empty, or has more than one line");
    }
    if !path.components().all(|part| matches!(part, Component::Normal(_))) {
        return bad("it leads out of the repository; name a path from its top, without `..`");
    }
    if path.components().any(|part| part.as_os_str() == ".git") {
        return bad("git's own files belong to git");
    }
    Ok(())
}

/// Copies what the patterns name from one checkout into another. What is there already stays.
pub fn copy_ignored_files(
    patterns: &[String],
    from: &Path,
    to: &Path,
    stop: &StopFlag,
) -> WorktreeResult<CopiedFiles> {
    let mut wanted = Vec::new();
    for pattern in patterns.iter().take(HOOKS_MAX) {
        check_pattern(pattern)?;
        let parts: Vec<&str> = pattern.split('/').filter(|part| !part.is_empty()).collect();
        collect_matches(from, Path::new(""), &parts, 0, &mut wanted)
            .map_err(|why| WorktreeError::BadPattern { pattern: pattern.clone(), why })?;
    }
    wanted.sort();
    wanted.dedup();
    let mut brought = CopiedFiles::default();
    let ignored = filter_ignored(from, &wanted, stop)?;
    let mut bytes = 0;
    for file in wanted {
        let name = file.display().to_string();
        if !ignored.contains(&file) {
            brought
                .skipped
                .push(format!("{name}: git does not ignore it, so it comes with a commit or not at all"));
            continue;
        }
        if stop.is_set() {
            return Err(WorktreeError::Stopped);
        }
        match copy_file(from, to, &file, &mut bytes).map_err(io_error_at("bring along", &file))? {
            None => brought.files.push(name),
            Some(why) => brought.skipped.push(format!("{name}: {why}")),
        }
    }
    Ok(brought)
}

/// Finds what a pattern names below a directory. A directory that it names is taken with everything in it.
fn collect_matches(
    top: &Path,
    at: &Path,
    parts: &[&str],
    depth: usize,
    found: &mut Vec<PathBuf>,
) -> std::result::Result<(), String> {
    let too_much = || format!("it is more than {BRING_FILES_MAX} files or {DEPTH_MAX} directories deep");
    if depth > DEPTH_MAX {
        return Err(too_much());
    }
    // What is not there, or cannot be read, is not brought.
    let Ok(entries) = fs::read_dir(top.join(at)) else { return Ok(()) };
    for entry in entries.flatten() {
        let name = entry.file_name();
        let Some(text) = name.to_str() else { continue };
        let fits = parts.first().is_none_or(|part| matches_pattern(part, text));
        let Ok(kind) = entry.file_type() else { continue };
        if !fits || name == ".git" {
            continue;
        }
        let path = at.join(&name);
        let rest = parts.get(1..).unwrap_or_default();
        if kind.is_dir() {
            collect_matches(top, &path, rest, depth + 1, found)?;
        } else if kind.is_file() && rest.is_empty() {
            found.push(path);
        }
        if found.len() > BRING_FILES_MAX {
            return Err(too_much());
        }
    }
    Ok(())
}

/// Whether a name is what a part of a pattern means.
fn matches_pattern(pattern: &str, name: &str) -> bool {
    let (pattern, name): (Vec<char>, Vec<char>) = (pattern.chars().collect(), name.chars().collect());
    // Where to go on if what was tried does not fit: after the last star, one character later.
    let (mut p, mut n, mut again) = (0, 0, None);
    while n < name.len() {
        match pattern.get(p) {
            Some('*') => {
                again = Some((p, n));
                p += 1;
            }
            Some(&c) if c == '?' || c == name[n] => (p, n) = (p + 1, n + 1),
            _ => match again {
                Some((star, from)) => {
                    again = Some((star, from + 1));
                    (p, n) = (star + 1, from + 1);
                }
                None => return false,
            },
        }
    }
    pattern[p..].iter().all(|c| *c == '*')
}

/// Those that git ignores.
fn filter_ignored(top: &Path, files: &[PathBuf], stop: &StopFlag) -> WorktreeResult<Vec<PathBuf>> {
    if files.is_empty() {
        return Ok(Vec::new());
    }
    let mut input = Vec::new();
    for file in files {
        input.extend_from_slice(file.as_os_str().as_encoded_bytes());
        input.push(0);
    }
    let args = ["check-ignore", "-z", "--stdin"];
    let ended = Git::at(top, stop).run_with(&args, Some(input), OutputLimit::Head(64 << 20))?;
    // 1: none of them.
    if !matches!(ended.status.code(), Some(0 | 1)) {
        return Err(git_failed(&args, &ended));
    }
    let text = String::from_utf8_lossy(&ended.stdout);
    Ok(text.split('\0').filter(|name| !name.is_empty()).map(PathBuf::from).collect())
}

/// Copies one file; gives the reason if it is left.
fn copy_file(from: &Path, to: &Path, file: &Path, bytes: &mut u64) -> io::Result<Option<&'static str>> {
    let target = to.join(file);
    // A link in the worktree could lead out of it.
    let mut folder = to.to_owned();
    for part in file.parent().iter().flat_map(|parent| parent.components()) {
        folder.push(part);
        match folder.symlink_metadata() {
            Ok(found) if found.is_dir() => {}
            Ok(_) => return Ok(Some("something that is not a directory is in its way")),
            Err(error) if error.kind() == io::ErrorKind::NotFound => fs::create_dir(&folder)?,
            Err(error) => return Err(error),
        }
    }
    if target.symlink_metadata().is_ok() {
        return Ok(Some("it is there already"));
    }
    let no_follow = OFlags::NOFOLLOW.bits().cast_signed();
    let mut source = OpenOptions::new().read(true).custom_flags(no_follow).open(from.join(file))?;
    let found = source.metadata()?;
    *bytes += found.len();
    if *bytes > (BRING_MIB_MAX as u64) << 20 {
        return Ok(Some("all of them together are too large"));
    }
    // Under another name first: a crash in the middle leaves no half of a file that counts as one.
    let draft = target.with_file_name(format!(".qd-{}-{}", std::process::id(), found.ino()));
    let write = || -> io::Result<()> {
        let mode = found.mode() & 0o777;
        let mut copy: File = OpenOptions::new()
            .write(true)
            .create_new(true)
            .custom_flags(no_follow)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_star_stands_for_anything_in_a_name() {
        for (pattern, name, fits) in [
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
            assert_eq!(matches_pattern(pattern, name), fits, "{pattern} {name}");
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
