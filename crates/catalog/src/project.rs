//! `project.toml` in a project's folder: what is to be done in the worktrees of its sessions. It counts only if the user
//! trusts the project as it is, since it starts programs.

use std::path::Path;

use qd_protocol::limits::HOOKS_MAX;
use serde::Deserialize;

use crate::trust::{ProjectTrust, ProjectTrustStatus};
use crate::{MANIFEST_FILE_MAX, PROJECT_FOLDER, manifest_reader};

/// The file in the project's folder.
pub const PROJECT_FILE: &str = "project.toml";

/// What a project says.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ProjectSettings {
    /// Of worktrees.
    #[serde(default)]
    pub worktree: WorktreeSettings,
}

/// What is to be done in worktrees.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WorktreeSettings {
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
pub enum ProjectFileStatus {
    /// There is none.
    Absent,
    /// It counts.
    Trusted(ProjectSettings),
    /// It does not count, because nobody has said so of it as it is.
    Untrusted,
    /// It would count, and cannot be used.
    Invalid(String),
}

/// What a project says, as far as it counts.
pub fn read_project_settings(project: &Path, trust: &ProjectTrust) -> ProjectFileStatus {
    let path = project.join(PROJECT_FOLDER).join(PROJECT_FILE);
    if path.symlink_metadata().is_err() {
        return ProjectFileStatus::Absent;
    }
    // Before it is read and after: it must not be another one for the moment in between.
    let trusted = || trust.status_of(project) == ProjectTrustStatus::Trusted;
    let (before, text) = (trusted(), manifest_reader::read_file(&path, MANIFEST_FILE_MAX));
    if !before || !trusted() {
        return ProjectFileStatus::Untrusted;
    }
    let bad = |why: String| ProjectFileStatus::Invalid(format!("{}: {why}", path.display()));
    let text = match text {
        Ok(text) => text,
        Err(error) => return bad(error.to_string()),
    };
    match toml::from_str::<ProjectSettings>(&text) {
        Err(error) => bad(error.to_string()),
        Ok(read) => {
            let WorktreeSettings { setup, teardown, bring } = &read.worktree;
            match [setup, teardown, bring].iter().any(|list| list.len() > HOOKS_MAX) {
                true => bad(format!("each list has at most {HOOKS_MAX} entries")),
                false => ProjectFileStatus::Trusted(read),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(project: &Path, text: &str) {
        std::fs::create_dir_all(project.join(PROJECT_FOLDER)).unwrap();
        std::fs::write(project.join(PROJECT_FOLDER).join(PROJECT_FILE), text).unwrap();
    }

    #[test]
    fn a_projects_file_counts_once_it_is_trusted_and_only_as_it_was() {
        let (home, project) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let list = home.path().join("trust.json");
        let mut trust = ProjectTrust::open(&list).unwrap();
        assert_eq!(super::read_project_settings(project.path(), &trust), ProjectFileStatus::Absent);
        write(project.path(), "[worktree]\nsetup = ['npm ci']\nbring = ['.env']\n");
        assert_eq!(super::read_project_settings(project.path(), &trust), ProjectFileStatus::Untrusted);
        trust.trust(project.path()).unwrap();
        let ProjectFileStatus::Trusted(read) = super::read_project_settings(project.path(), &trust) else {
            panic!("it is trusted")
        };
        assert_eq!(
            (read.worktree.setup, read.worktree.bring),
            (vec!["npm ci".to_owned()], vec![".env".to_owned()])
        );
        write(project.path(), "[worktree]\nsetup = ['curl evil']\n");
        assert_eq!(super::read_project_settings(project.path(), &trust), ProjectFileStatus::Untrusted);
        write(project.path(), "[worktree]\nset_up = []\n");
        trust.trust(project.path()).unwrap();
        assert!(
            matches!(super::read_project_settings(project.path(), &trust), ProjectFileStatus::Invalid(why) if why.contains("set_up"))
        );
    }
}
