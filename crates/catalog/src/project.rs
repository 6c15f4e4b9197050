//! `project.toml` in a project's folder: what is to be done in the worktrees of its sessions. It counts only if the user
//! trusts the project as it is, since it starts programs.

use std::path::Path;

use qd_protocol::limits::HOOKS_MAX;
use serde::Deserialize;

use crate::trust::{Standing, Trust};
use crate::{FILE_MAX, PROJECT, read};

/// The file in the project's folder.
pub const FILE: &str = "project.toml";

/// What a project says.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Project {
    /// Of worktrees.
    #[serde(default)]
    pub worktree: Worktrees,
}

/// What is to be done in worktrees.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Worktrees {
    /// Lines of shell that run in a new one.
    #[serde(default)]
    pub setup: Vec<String>,
    /// Lines of shell that run in one before it is removed.
    #[serde(default)]
    pub teardown: Vec<String>,
    /// Files that git ignores and that are copied into a new one: paths in which `*` and `?` stand for anything but `/`.
    #[serde(default)]
    pub bring: Vec<String>,
}

/// How a project's file stands.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Found {
    /// There is none.
    Nothing,
    /// It counts.
    Counts(Project),
    /// It does not count, because nobody has said so of it as it is.
    Untrusted,
    /// It would count, and cannot be used.
    Bad(String),
}

/// What a project says, as far as it counts.
pub fn read(project: &Path, trust: &Trust) -> Found {
    let path = project.join(PROJECT).join(FILE);
    if path.symlink_metadata().is_err() {
        return Found::Nothing;
    }
    // Before it is read and after: it must not be another one for the moment in between.
    let trusted = || trust.stands(project) == Standing::Trusted;
    let (before, text) = (trusted(), read::file(&path, FILE_MAX));
    if !before || !trusted() {
        return Found::Untrusted;
    }
    let bad = |why: String| Found::Bad(format!("{}: {why}", path.display()));
    let text = match text {
        Ok(text) => text,
        Err(error) => return bad(error.to_string()),
    };
    match toml::from_str::<Project>(&text) {
        Err(error) => bad(error.to_string()),
        Ok(read) => {
            let Worktrees { setup, teardown, bring } = &read.worktree;
            match [setup, teardown, bring].iter().any(|list| list.len() > HOOKS_MAX) {
                true => bad(format!("each list has at most {HOOKS_MAX} entries")),
                false => Found::Counts(read),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(project: &Path, text: &str) {
        std::fs::create_dir_all(project.join(PROJECT)).unwrap();
        std::fs::write(project.join(PROJECT).join(FILE), text).unwrap();
    }

    #[test]
    fn a_projects_file_counts_once_it_is_trusted_and_only_as_it_was() {
        let (home, project) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let list = home.path().join("trust.json");
        let mut trust = Trust::open(&list).unwrap();
        assert_eq!(super::read(project.path(), &trust), Found::Nothing);
        write(project.path(), "[worktree]\nsetup = ['npm ci']\nbring = ['.env']\n");
        assert_eq!(super::read(project.path(), &trust), Found::Untrusted);
        trust.trust(project.path()).unwrap();
        let Found::Counts(read) = super::read(project.path(), &trust) else { panic!("it is trusted") };
        assert_eq!(
            (read.worktree.setup, read.worktree.bring),
            (vec!["npm ci".to_owned()], vec![".env".to_owned()])
        );
        write(project.path(), "[worktree]\nsetup = ['curl evil']\n");
        assert_eq!(super::read(project.path(), &trust), Found::Untrusted);
        write(project.path(), "[worktree]\nset_up = []\n");
        trust.trust(project.path()).unwrap();
        assert!(matches!(super::read(project.path(), &trust), Found::Bad(why) if why.contains("set_up")));
    }
}
