//! The agents that are known here. Manifests come with the program, from the user's own files, and from a project
//! that the user trusts; each later source adds to or overrides the earlier ones. This crate reads files and looks
//! for programs; it starts nothing, except a program to ask for its version.
//!
//! Layout, in reading order:
//! - [`Catalog`]: the effective manifests, by name.
//! - `manifest_reader`: one manifest, from text to a validated type.
//! - `agent_name`: agents that are described by their name alone, such as `acp:CMD`; `peer_address`: addresses of
//!   third-party workers.
//! - [`conversations`]: the conversations that agents have on disk.
//! - [`policy_enforcement`]: what makes an agent ask before it acts.
//! - [`programs`]: where a program is, and which version it has.
//! - [`project`]: what a project wants done in the worktrees of its sessions.
//! - [`trust`]: a project's files take effect only after the user has trusted them.

mod agent_name;
mod conversation_files;
pub mod conversations;
mod manifest_reader;
mod peer_address;
pub mod policy_enforcement;
pub mod programs;
pub mod project;
pub mod trust;

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, LazyLock};

use qd_protocol::api;
use qd_protocol::manifest::Manifest;
use toml::Table;

pub use agent_name::{
    AgentNameError, REMOTE_TOKEN, is_self_describing, manifest_from_name, manifest_from_name_in,
    split_plain_words, split_words,
};
pub use manifest_reader::ManifestError;
pub use peer_address::{PeerAddress, PeerAddressError, WORKER_TOKEN};

/// Manifests that come with the program, in the order in which agents are listed.
const BUILT_IN: [&str; 10] = [
    include_str!("../../../manifests/echo.toml"),
    include_str!("../../../manifests/script.toml"),
    include_str!("../../../manifests/claude.toml"),
    include_str!("../../../manifests/codex.toml"),
    include_str!("../../../manifests/gemini.toml"),
    include_str!("../../../manifests/copilot.toml"),
    include_str!("../../../manifests/opencode.toml"),
    include_str!("../../../manifests/qwen.toml"),
    include_str!("../../../manifests/claude-acp.toml"),
    include_str!("../../../manifests/codex-acp.toml"),
];

/// The folder in a project that holds its files for Quarterdeck.
pub const PROJECT_FOLDER: &str = ".quarterdeck";
/// The folder with manifests, in a project's folder and in the user's configuration.
pub const AGENTS_FOLDER: &str = "agents";
/// How many manifests are read from one folder. Bounds the work if the folder holds something else.
const MANIFEST_FILES_MAX: usize = 256;
/// The longest manifest, in bytes.
const MANIFEST_FILE_MAX: u64 = 256 << 10;

/// The known agents and their manifests.
#[derive(Debug, Clone, Default)]
pub struct Catalog {
    /// In the order in which agents are listed. Shared with other catalogs: one is made for each start of an agent.
    entries: Vec<Arc<CatalogEntry>>,
    problems: Vec<CatalogProblem>,
    /// The directory that `manifest:PATH` is resolved against.
    project: Option<PathBuf>,
}

/// One agent.
#[derive(Debug, Clone)]
pub struct CatalogEntry {
    /// How the agent is found, started and driven.
    pub manifest: Manifest,
    /// The last source that defined or changed it.
    pub origin: ManifestOrigin,
    table: Table,
}

/// Where a manifest came from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ManifestOrigin {
    /// Part of this program.
    BuiltIn,
    /// One of the user's own files.
    User(PathBuf),
    /// A file of a project that the user trusts.
    Project(PathBuf),
}

impl fmt::Display for ManifestOrigin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::BuiltIn => f.write_str("built-in"),
            Self::User(path) | Self::Project(path) => path.display().fmt(f),
        }
    }
}

/// A manifest that is not used, and why.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CatalogProblem {
    pub path: PathBuf,
    pub message: String,
}

impl Catalog {
    /// The manifests that come with the program.
    pub fn built_in() -> Self {
        static CATALOG: LazyLock<Catalog> = LazyLock::new(|| {
            let mut catalog = Catalog::default();
            for text in BUILT_IN {
                catalog
                    .overlay_manifest(text, ManifestOrigin::BuiltIn)
                    .expect("the manifests of this program are tested");
            }
            catalog
        });
        CATALOG.clone()
    }

    /// The built-in manifests, overlaid with the user's own folders; later folders win. A bad file affects only the
    /// agent that it names, and is reported by [`Catalog::problems`].
    pub fn with_user_folders(folders: &[PathBuf]) -> Self {
        let mut catalog = Self::built_in();
        for folder in folders {
            catalog.overlay_folder(folder, ManifestOrigin::User);
        }
        catalog
    }

    /// This catalog, overlaid with the project's manifests if the user trusts the project's current content.
    #[must_use]
    pub fn with_project(mut self, project: &Path, trust: &trust::ProjectTrust) -> Self {
        let folder = project.join(PROJECT_FOLDER);
        self.project = Some(project.to_owned());
        match trust.status_of(project) {
            trust::ProjectTrustStatus::Trusted => {
                self.overlay_folder(&folder.join(AGENTS_FOLDER), ManifestOrigin::Project)
            }
            trust::ProjectTrustStatus::Nothing => {}
            trust::ProjectTrustStatus::Unknown | trust::ProjectTrustStatus::Changed => {
                let message = format!(
                    "the project's own agents are not used until you run `qd trust {}` on their current content",
                    project.display()
                );
                self.problems.push(CatalogProblem { path: folder, message });
            }
        }
        self
    }

    /// The agents, in the order in which they are listed.
    pub fn entries(&self) -> impl DoubleEndedIterator<Item = &CatalogEntry> {
        self.entries.iter().map(Arc::as_ref)
    }

    /// The manifests that are not used, and why.
    pub fn problems(&self) -> &[CatalogProblem] {
        &self.problems
    }

    /// The agent with this name, or the agent that the name itself describes.
    pub fn get(&self, name: &str) -> Option<Manifest> {
        let listed = self.entries.iter().find(|entry| entry.manifest.agent.name == name);
        listed.map(|entry| entry.manifest.clone()).or_else(|| self.manifest_from_name(name).ok())
    }

    /// The agent that the name itself describes.
    pub fn manifest_from_name(&self, name: &str) -> Result<Manifest, AgentNameError> {
        match &self.project {
            Some(project) => manifest_from_name_in(name, project),
            None => manifest_from_name(name),
        }
    }

    /// The agents as the API lists them, with the programs and versions found on this machine.
    pub fn agents(&self, versions: &programs::ProgramVersions) -> Vec<api::Agent> {
        self.entries
            .iter()
            .map(|entry| agent_listing(&entry.manifest, &entry.origin.to_string(), versions))
            .collect()
    }

    fn overlay_folder(&mut self, folder: &Path, origin: fn(PathBuf) -> ManifestOrigin) {
        for path in manifest_files(folder) {
            let read = manifest_reader::read_file(&path, MANIFEST_FILE_MAX)
                .and_then(|text| self.overlay_manifest(&text, origin(path.clone())));
            if let Err(error) = read {
                self.problems.push(CatalogProblem { path, message: error.to_string() });
            }
        }
    }

    fn overlay_manifest(&mut self, text: &str, origin: ManifestOrigin) -> Result<(), ManifestError> {
        let table = manifest_reader::parse_table(text)?;
        let name = manifest_reader::manifest_name(&table, text)?;
        let before = self.entries.iter().position(|entry| entry.manifest.agent.name == name);
        let (table, manifest) = match before {
            // Parsed alone, so that an error has its line number.
            None => (table, manifest_reader::parse_manifest(text)?),
            Some(index) => {
                let below = &self.entries[index];
                let table = manifest_reader::merge_tables(below.table.clone(), table);
                let mut manifest = manifest_reader::parse_merged(&table, text)?;
                // A project must not make an agent ask less: it cannot override an `ask_mode` or an option that makes
                // the agent ask, offer other modes, let an agent read files past us, claim that it asks before it uses our
                // tools, or write and reach more in its sandbox.
                if matches!(origin, ManifestOrigin::Project(_)) {
                    manifest.modes.clone_from(&below.manifest.modes);
                    let options = below.manifest.policy.session_options.clone();
                    manifest.policy.session_options.extend(options);
                    let sandbox = &below.manifest.sandbox;
                    manifest.sandbox.hosts.retain(|host| sandbox.hosts.contains(host));
                    manifest.sandbox.writable.retain(|path| sandbox.writable.contains(path));
                    let below = &below.manifest.turn;
                    if below.ask_mode.is_some() {
                        manifest.turn.ask_mode.clone_from(&below.ask_mode);
                    }
                    manifest.turn.reads_files_itself &= below.reads_files_itself;
                    manifest.turn.uses_mcp_unasked =
                        manifest.turn.uses_mcp_unasked.max(below.uses_mcp_unasked);
                }
                (table, manifest)
            }
        };
        let entry = Arc::new(CatalogEntry { manifest, origin, table });
        match before {
            Some(index) => self.entries[index] = entry,
            None => self.entries.push(entry),
        }
        Ok(())
    }
}

/// An agent as the API lists it.
pub fn agent_listing(manifest: &Manifest, origin: &str, versions: &programs::ProgramVersions) -> api::Agent {
    let driver = manifest.driver();
    let found = programs::find_program(manifest);
    let available = !driver.has_program() || found.is_some();
    let capabilities = &manifest.capabilities;
    let settings = [
        ("model", capabilities.models),
        ("mode", !manifest.modes.offered.is_empty()),
        ("system_prompt", capabilities.system_prompts),
        ("mcp", capabilities.mcp),
    ];
    api::Agent {
        name: manifest.agent.name.clone(),
        description: manifest.agent.description.clone(),
        driver: driver.name().to_owned(),
        available,
        install: manifest.agent.install.clone().filter(|_| !available),
        version: found.as_deref().and_then(|program| versions.version_of(program)),
        tested: manifest.agent.tested.clone(),
        program: found.map(|program| program.display().to_string()),
        command: programs::searched_name(manifest),
        steers: manifest.can_steer(),
        resumes: manifest.can_resume(),
        approvals: capabilities.approvals,
        questions: capabilities.ask_user.any(),
        cost: match (manifest.cost.metered, manifest.cost.tokens) {
            (true, _) => api::CostReport::Money,
            (false, true) => api::CostReport::Tokens,
            (false, false) => api::CostReport::Nothing,
        },
        settings: settings.iter().filter(|(_, takes)| *takes).map(|(name, _)| (*name).to_owned()).collect(),
        modes: manifest.modes.offered.keys().cloned().collect(),
        refused_modes: manifest.modes.unasked.clone(),
        env: manifest.startup.pass_env.clone(),
        origin: origin.to_owned(),
    }
}

/// The manifest files of a folder, sorted by name.
fn manifest_files(folder: &Path) -> Vec<PathBuf> {
    let Ok(files) = std::fs::read_dir(folder) else { return Vec::new() };
    let paths = files.filter_map(|file| Some(file.ok()?.path()));
    let mut paths: Vec<PathBuf> = paths
        .filter(|path| path.extension().is_some_and(|kind| kind == "toml"))
        .take(MANIFEST_FILES_MAX)
        .collect();
    paths.sort();
    paths
}

/// Whether a pattern of `pass_env` matches a variable: a name, or a prefix followed by `*`.
pub fn matches_variable(pattern: &str, name: &str) -> bool {
    match pattern.strip_suffix('*') {
        Some(start) => name.starts_with(start),
        None => pattern == name,
    }
}

/// The variables of the caller's environment that are passed to an agent.
pub fn select_variables(
    patterns: &[String],
    vars: impl Iterator<Item = (String, String)>,
) -> BTreeMap<String, String> {
    vars.filter(|(name, _)| patterns.iter().any(|pattern| matches_variable(pattern, name))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use qd_protocol::manifest::DriverKind;

    fn write(folder: &Path, name: &str, text: &str) {
        std::fs::create_dir_all(folder).unwrap();
        std::fs::write(folder.join(name), text).unwrap();
    }

    #[test]
    fn every_manifest_of_the_program_is_complete_and_has_the_name_of_its_file() {
        let catalog = Catalog::built_in();
        assert_eq!(catalog.entries().count(), BUILT_IN.len());
        let files = std::fs::read_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/../../manifests")).unwrap();
        for file in files {
            let path = file.unwrap().path();
            let name = path.file_stem().unwrap().to_str().unwrap();
            let manifest = catalog.get(name).unwrap_or_else(|| panic!("{name} is not built in"));
            assert!(!manifest.agent.description.is_empty(), "{name}");
            let is_ours = matches!(name, "echo" | "script");
            assert_eq!(manifest.agent.install.is_some(), !is_ours, "{name}: how to install it");
            assert_eq!(manifest.agent.tested.is_some(), !is_ours, "{name}: the version that was tried");
            assert_eq!(manifest.command().is_empty(), name == "echo", "{name}: how to start it");
        }
    }

    #[test]
    fn a_users_file_overrides_known_agents_and_adds_new_ones() {
        let home = tempfile::tempdir().unwrap();
        write(home.path(), "claude.toml", "[agent]\nname = 'claude'\n[startup]\nisolated = true\n");
        write(
            home.path(),
            "mine.toml",
            "[agent]\nname = 'mine'\nbinary = 'mine'\n[fast_path]\nacp_stdio = true\n",
        );
        write(home.path(), "notes.md", "not a manifest");
        let catalog = Catalog::with_user_folders(&[home.path().to_owned()]);
        assert_eq!(catalog.problems(), []);
        let claude = catalog.get("claude").unwrap();
        assert!(claude.startup.isolated && claude.command().len() > 5, "{claude:?}");
        assert_eq!(catalog.get("mine").unwrap().driver(), DriverKind::Acp);
        assert_eq!(catalog.get("mine").unwrap().command(), ["mine"]);
        assert_eq!(
            catalog.entries().next_back().unwrap().origin,
            ManifestOrigin::User(home.path().join("mine.toml"))
        );
    }

    #[test]
    fn a_bad_file_is_reported_with_its_line_and_affects_nothing_else() {
        let home = tempfile::tempdir().unwrap();
        write(home.path(), "a.toml", "[agent]\nname = 'a'\nbinary = 'a'\n[startup]\ncomand = ['a']\n");
        write(home.path(), "b.toml", "[agent]\nname = 'b'\nbinary = 'b'\n");
        let catalog = Catalog::with_user_folders(&[home.path().to_owned()]);
        assert!(catalog.get("a").is_none() && catalog.get("b").is_some());
        let [problem] = catalog.problems() else { panic!("{:?}", catalog.problems()) };
        assert_eq!(problem.path, home.path().join("a.toml"));
        assert!(
            problem.message.contains("line 5") && problem.message.contains("comand"),
            "{}",
            problem.message
        );
    }

    #[test]
    fn a_projects_agents_are_used_once_trusted_and_only_with_that_content() {
        let (home, project) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let agents = project.path().join(PROJECT_FOLDER).join(AGENTS_FOLDER);
        write(
            &agents,
            "qwen.toml",
            "[agent]\nname = 'qwen'\n[turn]\nask_mode = 'yolo'\nrefused = 'goes_on'\nreads_files_itself = true\n\
             [sandbox]\nwritable = ['~']\nhosts = ['elsewhere.example', 'chat.qwen.ai']\n",
        );
        write(&agents, "ours.toml", "[agent]\nname = 'ours'\nbinary = './ours'\n");
        let mut trust = trust::ProjectTrust::open(&home.path().join("trust.json")).unwrap();
        let before = Catalog::built_in().with_project(project.path(), &trust);
        assert!(before.get("ours").is_none());
        assert!(before.problems()[0].message.contains("qd trust"), "{:?}", before.problems());

        trust.trust(project.path()).unwrap();
        let trusted = Catalog::built_in().with_project(project.path(), &trust);
        assert!(trusted.get("ours").is_some());
        let qwen = trusted.get("qwen").unwrap();
        assert_eq!(qwen.turn.ask_mode.as_deref(), Some("default"), "a project cannot make an agent ask less");
        assert_eq!((qwen.sandbox.writable.len(), qwen.sandbox.hosts.len()), (0, 1), "nor widen its sandbox");
        assert!(!qwen.turn.reads_files_itself, "nor let it read files past us");

        write(&agents, "more.toml", "[agent]\nname = 'more'\nbinary = 'more'\n");
        let trust = trust::ProjectTrust::open(&home.path().join("trust.json")).unwrap();
        let changed = Catalog::built_in().with_project(project.path(), &trust);
        assert!(changed.get("ours").is_none() && changed.get("more").is_none());
    }

    #[test]
    fn variables_are_matched_by_name_or_prefix() {
        let vars = [("OPENAI_API_KEY", "k"), ("OPENAI", "x"), ("HOME", "/h"), ("GH_TOKEN", "t")];
        let vars = vars.into_iter().map(|(name, value)| (name.to_owned(), value.to_owned()));
        let patterns = ["OPENAI_*".to_owned(), "GH_TOKEN".to_owned()];
        let names: Vec<String> = select_variables(&patterns, vars).into_keys().collect();
        assert_eq!(names, ["GH_TOKEN", "OPENAI_API_KEY"]);
    }
}
