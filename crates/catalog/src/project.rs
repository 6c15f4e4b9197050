//! Reads `project.toml` in a project's folder: what to do in the worktrees of its sessions, and how strongly its agents
//! are confined. It starts programs, so it takes effect only if the user trusts the project's current content.

use std::path::Path;

use qd_protocol::limits::HOOKS_MAX;
use qd_protocol::sandbox::{NetworkSetting, SandboxSetting};
use serde::Deserialize;

use crate::trust::{ProjectTrust, ProjectTrustStatus};
use crate::{MANIFEST_FILE_MAX, PROJECT_FOLDER, manifest_reader};

/// The name of the file in the project's folder.
pub const PROJECT_FILE: &str = "project.toml";

/// The settings of a project.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ProjectSettings {
    #[serde(default)]
    pub worktree: WorktreeSettings,
    /// How strongly the project's agents are confined, at least.
    #[serde(default)]
    pub sandbox: Option<SandboxSetting>,
    /// `off` cuts the project's agents off from the network.
    #[serde(default)]
    pub network: Option<NetworkSetting>,
}

/// What to do in the worktrees of a project's sessions.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WorktreeSettings {
    /// Shell lines to run in a new worktree.
    #[serde(default)]
    pub setup: Vec<String>,
    /// Shell lines to run in a worktree before it is removed.
    #[serde(default)]
    pub teardown: Vec<String>,
    /// Files ignored by git to copy into a new worktree: paths in which `*` and `?` match anything but `/`.
    #[serde(default)]
    pub bring: Vec<String>,
}

/// Whether a project's settings can be used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ProjectFileStatus {
    /// There is no project file.
    Absent,
    Trusted(ProjectSettings),
    /// The project's current content is not trusted.
    Untrusted,
    /// The file is trusted, but not valid.
    Invalid(String),
}

/// The settings of a project, if it is trusted.
pub fn read_project_settings(project: &Path, trust: &ProjectTrust) -> ProjectFileStatus {
    let path = project.join(PROJECT_FOLDER).join(PROJECT_FILE);
    if path.symlink_metadata().is_err() {
        return ProjectFileStatus::Absent;
    }
    // Check trust before and after reading, so that the file cannot be swapped in between.
    let trusted = || trust.status_of(project) == ProjectTrustStatus::Trusted;
    let (before, text) = (trusted(), manifest_reader::read_file(&path, MANIFEST_FILE_MAX));
    if !before || !trusted() {
        return ProjectFileStatus::Untrusted;
    }
    let bad = |problem: String| ProjectFileStatus::Invalid(format!("{}: {problem}", path.display()));
    let text = match text {
        Ok(text) => text,
        Err(error) => return bad(error.to_string()),
    };
    match toml::from_str::<ProjectSettings>(&text) {
        Err(error) => bad(error.to_string()),
        Ok(settings) => {
            let WorktreeSettings { setup, teardown, bring } = &settings.worktree;
            match [setup, teardown, bring].iter().any(|list| list.len() > HOOKS_MAX) {
                true => bad(format!("each list may have at most {HOOKS_MAX} entries")),
                false => ProjectFileStatus::Trusted(settings),
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
    fn a_project_file_is_used_once_trusted_and_only_with_that_content() {
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
