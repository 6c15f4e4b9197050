//! The agents of this machine: built-in manifests, overridden by the user's and by a trusted project's. The files are
//! read on each request, so that changes apply at once. Agents on other machines are handled in `workers`.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use qd_catalog::policy_enforcement;
use qd_catalog::programs::{self, ProgramVersions};
use qd_catalog::project::{self, ProjectFileStatus, ProjectSettings};
use qd_catalog::trust::{ProjectTrust, ProjectTrustStatus, TrustError};
use qd_catalog::{Catalog, CatalogProblem, ManifestOrigin};
use qd_home::DaemonHome;
use qd_protocol::api::{Agent, TrustedProject};
use qd_protocol::manifest::{DriverKind, Manifest, SandboxRules, TokenPrice, UnaskedMcpTools};
use qd_protocol::worker::{AgentLimits, SilenceRules};

use crate::workers::SandboxRequest;

/// How long idle agents are kept before they are stopped.
#[derive(Debug, Clone, Copy)]
pub(crate) struct IdleSetting {
    pub(crate) timeout: Duration,
    /// Whether the user's settings say so. Only then does it count over an agent's manifest.
    pub(crate) is_configured: bool,
}

/// What an agent's manifest and a trusted project say about its confinement.
#[derive(Debug, Default)]
pub(crate) struct AgentSandboxRules {
    /// Whether the agent is reached at an address, so that nothing of it runs here.
    pub(crate) is_elsewhere: bool,
    /// Whether the agent is a part of its worker, and starts nothing.
    pub(crate) is_in_worker: bool,
    pub(crate) manifest: SandboxRequest,
    /// What the project asks for. It can only make the confinement stricter.
    pub(crate) project: SandboxRequest,
    /// Where the agent keeps its own state.
    pub(crate) state_paths: Vec<String>,
    /// What the agent reads of the daemon's home.
    pub(crate) readable_paths: Vec<PathBuf>,
    pub(crate) model_hosts: Vec<String>,
}

/// The agents of this machine.
#[derive(Debug)]
pub(crate) struct LocalAgents {
    /// The folders of the user's own manifests; later ones win.
    folders: Vec<PathBuf>,
    trust_file: PathBuf,
    /// The folder for the settings of isolated agents.
    isolated_folder: PathBuf,
    /// The folder for the files that make agents ask before they act.
    policy_folder: PathBuf,
    versions: Arc<ProgramVersions>,
    prices: BTreeMap<String, TokenPrice>,
    silence: SilenceRules,
    limits: AgentLimits,
}

impl LocalAgents {
    pub(crate) fn new(
        home: &DaemonHome,
        prices: BTreeMap<String, TokenPrice>,
        silence: SilenceRules,
        limits: AgentLimits,
    ) -> Self {
        Self {
            folders: home.agent_folders(),
            trust_file: home.trust_file(),
            isolated_folder: home.isolated_agents(),
            policy_folder: home.policy_files(),
            versions: Arc::default(),
            prices,
            silence,
            limits,
        }
    }

    /// All listed agents, whether or not they can start here.
    pub(crate) fn list(&self, project: Option<&Path>) -> Vec<Agent> {
        self.catalog(project).agents(&self.versions)
    }

    /// Like [`Self::list`], with the version of each installed agent. Blocks as long as the slowest program takes.
    pub(crate) fn list_with_versions(&self, project: Option<&Path>) -> Vec<Agent> {
        let catalog = self.catalog(project);
        let manifests: Vec<Manifest> = catalog.entries().map(|entry| entry.manifest.clone()).collect();
        self.versions.probe_all(&manifests);
        catalog.agents(&self.versions)
    }

    /// Manifests that cannot be used, and why.
    pub(crate) fn manifest_problems(&self, project: Option<&Path>) -> Vec<CatalogProblem> {
        self.catalog(project).problems().to_vec()
    }

    /// An agent by name, including agents that are described by their name alone.
    pub(crate) fn find(&self, name: &str, project: Option<&Path>) -> Option<Agent> {
        let catalog = self.catalog(project);
        let listed = catalog.entries().find(|entry| entry.manifest.agent.name == name);
        match listed {
            Some(entry) => {
                Some(qd_catalog::agent_listing(&entry.manifest, &entry.origin.to_string(), &self.versions))
            }
            None => Some(qd_catalog::agent_listing(
                &catalog.manifest_from_name(name).ok()?,
                "its name",
                &self.versions,
            )),
        }
    }

    /// The manifest to start an agent with: the path of its program is resolved, and its isolated folders are created.
    /// `program` is the one that the session was created with, if any.
    pub(crate) fn launch_manifest(
        &self,
        name: &str,
        project: &Path,
        program: Option<&Path>,
    ) -> Option<Manifest> {
        let manifest = self.catalog(Some(project)).get(name)?;
        let manifest = match program {
            Some(program) => programs::with_given_program(manifest, program),
            None => manifest,
        };
        let manifest = programs::with_program_path(manifest);
        let manifest = programs::with_isolation(manifest, &self.isolated_folder);
        Some(policy_enforcement::with_policy_file(manifest, &self.policy_folder))
    }

    /// The setting of an agent that would let it act without asking, if one is in force that cannot be overridden. `env`
    /// has the variables of the session.
    pub(crate) fn overriding_setting(
        &self,
        name: &str,
        project: &Path,
        env: &BTreeMap<String, String>,
    ) -> Option<String> {
        let manifest =
            programs::with_isolation(self.catalog(Some(project)).get(name)?, &self.isolated_folder);
        policy_enforcement::find_overriding_setting(&manifest, env, project)
    }

    /// What an agent's manifest and a trusted project say about its confinement.
    pub(crate) fn sandbox_rules(&self, name: &str, project: &Path) -> AgentSandboxRules {
        let catalog = self.catalog(Some(project));
        let Some(manifest) = catalog.get(name) else { return AgentSandboxRules::default() };
        let SandboxRules { level, network, writable, hosts } = manifest.sandbox.clone();
        let listed = catalog.entries().find(|entry| entry.manifest.agent.name == name);
        let is_of_project = listed.is_some_and(|entry| matches!(entry.origin, ManifestOrigin::Project(_)));
        let file = match self.project_setup(project) {
            ProjectFileStatus::Trusted(settings) => settings,
            ProjectFileStatus::Absent | ProjectFileStatus::Untrusted | ProjectFileStatus::Invalid(_) => {
                ProjectSettings::default()
            }
        };
        let manifest_asks = SandboxRequest { level, network };
        let file_asks = SandboxRequest { level: file.sandbox, network: file.network };
        let isolated = manifest.startup.isolated.then(|| self.isolated_folder.join(name));
        AgentSandboxRules {
            is_elsewhere: matches!(manifest.driver(), DriverKind::A2a | DriverKind::Worker),
            is_in_worker: manifest.driver() == DriverKind::Echo,
            project: if is_of_project { manifest_asks.stricter(file_asks) } else { file_asks },
            manifest: manifest_asks,
            state_paths: writable
                .into_iter()
                .chain(isolated.map(|path| path.display().to_string()))
                .collect(),
            readable_paths: manifest.policy.file.map(|_| self.policy_folder.clone()).into_iter().collect(),
            model_hosts: hosts,
        }
    }

    /// Which tools of MCP servers this agent uses without asking.
    pub(crate) fn unasked_mcp_tools(&self, name: &str, project: &Path) -> UnaskedMcpTools {
        self.catalog(Some(project))
            .get(name)
            .map_or_else(UnaskedMcpTools::default, |manifest| manifest.turn.uses_mcp_unasked)
    }

    /// The patterns of the variables that decide which login this agent uses.
    pub(crate) fn login_variables(&self, name: &str, project: &Path) -> Vec<String> {
        self.catalog(Some(project)).get(name).map(|manifest| manifest.startup.login_env).unwrap_or_default()
    }

    /// Says in which folders the program of an agent is searched, for an error message.
    pub(crate) fn searched_places(&self, name: &str, project: &Path) -> Option<String> {
        Some(programs::searched_places(&self.catalog(Some(project)).get(name)?))
    }

    /// The project's worktree settings, if the project is trusted at its current content.
    pub(crate) fn project_setup(&self, project: &Path) -> ProjectFileStatus {
        match ProjectTrust::open(&self.trust_file) {
            Ok(trust) => project::read_project_settings(project, &trust),
            Err(error) => ProjectFileStatus::Invalid(error.to_string()),
        }
    }

    pub(crate) fn trusted_projects(&self) -> Result<Vec<TrustedProject>, TrustError> {
        let trust = ProjectTrust::open(&self.trust_file)?;
        Ok(trust.projects().map(|path| trust_status(&trust, path, Vec::new())).collect())
    }

    /// Trusts a project at its current content.
    pub(crate) fn trust(&self, project: &Path) -> Result<TrustedProject, TrustError> {
        let mut trust = ProjectTrust::open(&self.trust_file)?;
        let files = trust.trust(project)?;
        let files = files.iter().map(|file| file.display().to_string()).collect();
        Ok(trust_status(&trust, project, files))
    }

    /// Stops trusting a project, and returns the others.
    pub(crate) fn distrust(&self, project: &Path) -> Result<Vec<TrustedProject>, TrustError> {
        ProjectTrust::open(&self.trust_file)?.distrust(project)?;
        self.trusted_projects()
    }

    /// How long an idle agent is kept before it is stopped: from the user's settings, else from its manifest, else the
    /// default. `None` if it never is.
    pub(crate) fn idle_timeout(&self, name: &str, project: &Path, setting: IdleSetting) -> Option<Duration> {
        let Some(manifest) = self.catalog(Some(project)).get(name) else { return Some(setting.timeout) };
        let own = manifest.idle.rest_after_s.filter(|_| !setting.is_configured);
        manifest.can_stop_when_idle().then(|| own.map_or(setting.timeout, Duration::from_secs))
    }

    /// What follows if nothing comes from an agent in a turn.
    pub(crate) fn silence(&self) -> SilenceRules {
        self.silence
    }

    /// What an agent and all that it starts may use.
    pub(crate) fn limits(&self) -> AgentLimits {
        self.limits
    }

    /// Token prices by model.
    pub(crate) fn prices(&self) -> &BTreeMap<String, TokenPrice> {
        &self.prices
    }

    fn catalog(&self, project: Option<&Path>) -> Catalog {
        let catalog = Catalog::with_user_folders(&self.folders);
        let Some(project) = project else { return catalog };
        match ProjectTrust::open(&self.trust_file) {
            Ok(trust) => catalog.with_project(project, &trust),
            Err(error) => {
                tracing::warn!(%error, "could not read the list of trusted projects; none is trusted");
                catalog.with_project(project, &ProjectTrust::default())
            }
        }
    }
}

fn trust_status(trust: &ProjectTrust, project: &Path, files: Vec<String>) -> TrustedProject {
    let unchanged = trust.status_of(project) == ProjectTrustStatus::Trusted;
    TrustedProject { path: project.display().to_string(), unchanged, files }
}
