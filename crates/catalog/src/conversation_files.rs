//! Finds the files of an agent's conversations: the root folder, and below it the paths that match a pattern. It looks
//! at names and metadata only, follows no links below the root, and stops at a number of entries.

use std::fs::{DirEntry, Metadata};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use qd_protocol::Millis;

/// The most folder entries that are read for one agent. Bounds the work if a folder holds other files.
const ENTRIES_MAX: usize = 50_000;
/// Stands for the id of the conversation in a pattern.
const ID_PLACEHOLDER: &str = "{id}";

/// A file that may contain a conversation.
#[derive(Debug)]
pub(crate) struct ConversationFile {
    pub(crate) path: PathBuf,
    /// The id in its path, if the pattern has one.
    pub(crate) id: Option<String>,
    pub(crate) changed_at: Millis,
}

/// The folder that an entry of `roots` names. `None` if it needs a variable that is not set.
pub(crate) fn resolve_root(root: &str, variable: &dyn Fn(&str) -> Option<String>) -> Option<PathBuf> {
    if let Some((name, default, rest)) = split_default(root) {
        return resolve_root(&format!("${name}{rest}"), variable)
            .or_else(|| resolve_root(&format!("{default}{rest}"), variable));
    }
    let (name, rest) = match root.strip_prefix('$') {
        Some(named) => named.split_at(named.find('/').unwrap_or(named.len())),
        None => match root.strip_prefix('~') {
            Some(rest) => ("HOME", rest),
            None => return Some(PathBuf::from(root)),
        },
    };
    let value = variable(name).filter(|value| !value.is_empty())?;
    Some(Path::new(&value).join(rest.trim_start_matches('/')))
}

/// The parts of `${NAME:-default}/rest`.
fn split_default(root: &str) -> Option<(&str, &str, &str)> {
    let (named, rest) = root.strip_prefix("${")?.split_once('}')?;
    let (name, default) = named.split_once(":-")?;
    Some((name, default, rest))
}

/// The regular files below `root` that match the pattern.
pub(crate) fn find_files(root: &Path, pattern: &str) -> Vec<ConversationFile> {
    let parts: Vec<&str> = pattern.split('/').collect();
    let mut entries_left = ENTRIES_MAX;
    let mut level = vec![(root.to_owned(), None)];
    for part in &parts {
        let mut next = Vec::new();
        for (folder, id) in level {
            for (path, found_id) in matching_entries(&folder, part, &mut entries_left) {
                next.push((path, found_id.or_else(|| id.clone())));
            }
        }
        level = next;
    }
    let with_metadata = level.into_iter().filter_map(|(path, id)| {
        let metadata = path.symlink_metadata().ok().filter(Metadata::is_file)?;
        Some(ConversationFile { path, id, changed_at: changed_at(&metadata) })
    });
    with_metadata.collect()
}

/// The entries of a folder that match one part of a pattern, each with the id in its name.
fn matching_entries(folder: &Path, part: &str, entries_left: &mut usize) -> Vec<(PathBuf, Option<String>)> {
    let (start, end, has_id) = match (part.split_once(ID_PLACEHOLDER), part.split_once('*')) {
        (Some((start, end)), _) => (start, end, true),
        (None, Some((start, end))) => (start, end, false),
        (None, None) => {
            let path = folder.join(part);
            let is_link = path.symlink_metadata().map_or(true, |metadata| metadata.is_symlink());
            return if is_link { Vec::new() } else { vec![(path, None)] };
        }
    };
    let Ok(entries) = std::fs::read_dir(folder) else { return Vec::new() };
    let is_link = |entry: &DirEntry| entry.file_type().map_or(true, |kind| kind.is_symlink());
    let mut found = Vec::new();
    for entry in entries.flatten() {
        let Some(left) = entries_left.checked_sub(1) else { break };
        *entries_left = left;
        let name = entry.file_name();
        let middle = name.to_str().and_then(|name| name.strip_prefix(start)?.strip_suffix(end));
        if let Some(middle) = middle.filter(|middle| !middle.is_empty() && !is_link(&entry)) {
            found.push((entry.path(), has_id.then(|| middle.to_owned())));
        }
    }
    found
}

fn changed_at(metadata: &Metadata) -> Millis {
    let seconds = u64::try_from(metadata.mtime()).unwrap_or(0);
    let part = u64::try_from(metadata.mtime_nsec()).unwrap_or(0) / 1_000_000;
    Millis(seconds.saturating_mul(1000).saturating_add(part))
}
