//! Compares the files of a storm with what the daemon says: worktrees hold the work of their own session alone, every
//! worktree is listed, and no spool is left once every session is closed.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use super::deck::StormDeck;
use super::settle::list;

/// Every worktree on disk is in the daemon's list, and holds only what prompts to its own session wrote.
pub(crate) async fn check_worktrees(deck: &StormDeck) {
    let Some(listed) = list(deck, "/v1/worktrees").await else {
        return deck.violation(None, "the worktrees cannot be listed".to_owned());
    };
    let listed: BTreeSet<&str> =
        listed.iter().filter_map(|worktree| worktree["session_id"].as_str()).collect();
    let markers = deck.record(|record| record.markers.clone());
    for folder in entries(&deck.home.join("worktrees")) {
        let session = folder.file_name().unwrap_or_default().to_string_lossy().into_owned();
        // Beside the worktrees is the folder in which merges are tried.
        if !session.starts_with("ses_") {
            continue;
        }
        if !listed.contains(session.as_str()) {
            deck.violation(Some(&session), format!("its worktree {} is not listed", folder.display()));
        }
        for file in entries(&folder) {
            let text = std::fs::read_to_string(&file).unwrap_or_default();
            let number = text.strip_prefix('<').and_then(|text| text.strip_suffix('>')?.parse::<u64>().ok());
            let Some(owner) = number.and_then(|number| markers.get(&number)) else { continue };
            if *owner != session && !was_merged(deck, &file, &text) {
                let what = format!("{} was written by a prompt to {owner}", file.display());
                deck.violation(Some(&session), what);
            }
        }
    }
}

/// Whether a file's content came with a merge of another session: then it is in the history of the project's branch.
fn was_merged(deck: &StormDeck, file: &Path, text: &str) -> bool {
    let name = file.file_name().unwrap_or_default();
    let repository = deck.home.with_file_name("repo");
    let log = std::process::Command::new("git")
        .arg("-C")
        .arg(repository)
        .args(["log", "--format=%h", &format!("-S{text}"), "main", "--"])
        .arg(name)
        .output();
    log.is_ok_and(|log| !log.stdout.is_empty())
}

/// Spools that are left although every session is closed.
pub(crate) fn leftover_spools(deck: &StormDeck) -> Vec<String> {
    let spools = entries(&deck.home.join("workers").join("spool"));
    let describe = |spool: &PathBuf| format!("{} is left after every session was closed", spool.display());
    spools.iter().map(describe).collect()
}

fn entries(folder: &Path) -> Vec<PathBuf> {
    let found = std::fs::read_dir(folder).into_iter().flatten().flatten();
    found.map(|entry| entry.path()).collect()
}
