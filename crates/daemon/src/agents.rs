//! The agents of this machine, as the daemon knows them: the program's own manifests under the user's and a trusted
//! project's. Files are read again each time that somebody asks, so that what is changed counts at once; what lives
//! elsewhere is the workers' business.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use qd_catalog::find::{self, Versions};
use qd_catalog::project::{self, Found};
use qd_catalog::trust::{Standing, Trust, TrustError};
use qd_catalog::{Catalog, Problem};
use qd_protocol::api::{Agent, Trusted};
use qd_protocol::manifest::{Manifest, Price};

use crate::home::Home;

/// Which agents there are here.
#[derive(Debug)]
pub(crate) struct Agents {
    /// The user's own manifests; later ones win.
    folders: Vec<PathBuf>,
    trust: PathBuf,
    /// Where agents that are to be isolated have their settings.
    isolated: PathBuf,
    versions: Arc<Versions>,
    prices: BTreeMap<String, Price>,
}

impl Agents {
    pub(crate) fn new(home: &Home, prices: BTreeMap<String, Price>) -> Self {
        Self {
            folders: home.agent_folders(),
            trust: home.trust_file(),
            isolated: home.isolated(),
            versions: Arc::default(),
            prices,
        }
    }

    /// Those that can be named, whether or not they can start here.
    pub(crate) fn list(&self, project: Option<&Path>) -> Vec<Agent> {
        self.catalog(project).agents(&self.versions)
    }

    /// The same with the version of each that is here, which takes as long as the slowest needs to tell it. Blocks.
    pub(crate) fn list_versions(&self, project: Option<&Path>) -> Vec<Agent> {
        let catalog = self.catalog(project);
        let manifests: Vec<Manifest> = catalog.entries().iter().map(|entry| entry.manifest.clone()).collect();
        self.versions.ask(&manifests);
        catalog.agents(&self.versions)
    }

    /// Manifests that do not count, and why.
    pub(crate) fn problems(&self, project: Option<&Path>) -> Vec<Problem> {
        self.catalog(project).problems().to_vec()
    }

    /// One of them, also one that only its name describes.
    pub(crate) fn find(&self, name: &str, project: Option<&Path>) -> Option<Agent> {
        let catalog = self.catalog(project);
        let listed = catalog.entries().iter().find(|entry| entry.manifest.agent.name == name);
        match listed {
            Some(entry) => {
                Some(qd_catalog::agent(&entry.manifest, &entry.origin.to_string(), &self.versions))
            }
            None => Some(qd_catalog::agent(&catalog.described(name).ok()?, "its name", &self.versions)),
        }
    }

    /// How an agent is started, its program found and its own folders made.
    pub(crate) fn manifest(&self, name: &str, project: &Path) -> Option<Manifest> {
        let manifest = find::located(self.catalog(Some(project)).get(name)?);
        Some(find::isolated(manifest, &self.isolated))
    }

    /// What a project wants done in worktrees, if it is trusted as it is.
    pub(crate) fn project(&self, project: &Path) -> Found {
        match Trust::open(&self.trust) {
            Ok(trust) => project::read(project, &trust),
            Err(error) => Found::Bad(error.to_string()),
        }
    }

    /// The projects that are trusted.
    pub(crate) fn trusted(&self) -> Result<Vec<Trusted>, TrustError> {
        let trust = Trust::open(&self.trust)?;
        Ok(trust.projects().map(|path| standing(&trust, path, Vec::new())).collect())
    }

    /// Trusts a project as it is now.
    pub(crate) fn trust(&self, project: &Path) -> Result<Trusted, TrustError> {
        let mut trust = Trust::open(&self.trust)?;
        let files = trust.trust(project)?;
        let files = files.iter().map(|file| file.display().to_string()).collect();
        Ok(standing(&trust, project, files))
    }

    /// Trusts it no longer; gives the others.
    pub(crate) fn distrust(&self, project: &Path) -> Result<Vec<Trusted>, TrustError> {
        Trust::open(&self.trust)?.distrust(project)?;
        self.trusted()
    }

    /// After how long an idle one is put to rest, where its manifest does not leave that to the settings; `None` if it
    /// never is.
    pub(crate) fn rest_after(&self, name: &str, project: &Path, usual: Duration) -> Option<Duration> {
        let Some(manifest) = self.catalog(Some(project)).get(name) else { return Some(usual) };
        manifest.rests().then(|| manifest.idle.rest_after_s.map_or(usual, Duration::from_secs))
    }

    /// What tokens cost, by model.
    pub(crate) fn prices(&self) -> &BTreeMap<String, Price> {
        &self.prices
    }

    fn catalog(&self, project: Option<&Path>) -> Catalog {
        let catalog = Catalog::of_user(&self.folders);
        let Some(project) = project else { return catalog };
        match Trust::open(&self.trust) {
            Ok(trust) => catalog.with_project(project, &trust),
            Err(error) => {
                tracing::warn!(%error, "no project is trusted");
                catalog.with_project(project, &Trust::default())
            }
        }
    }
}

fn standing(trust: &Trust, project: &Path, files: Vec<String>) -> Trusted {
    let unchanged = trust.stands(project) == Standing::Trusted;
    Trusted { path: project.display().to_string(), unchanged, files }
}
