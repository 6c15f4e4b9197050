//! How agents are to be confined: which of several requests counts, whether the machine can satisfy it, and what a
//! worker is told. The decisions themselves are in `qd_core::sandbox`; confining is the worker's job.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use qd_core::sandbox::{
    AGENT_ELSEWHERE, AGENT_IN_WORKER, SandboxRequests, SandboxUnavailable, UnavailableSandbox, plan_sandbox,
    stricter_setting,
};
use qd_home::DaemonHome;
use qd_protocol::SessionId;
use qd_protocol::event::SessionCreated;
use qd_protocol::sandbox::{NetworkSetting, SandboxLevel, SandboxSetting};
use qd_protocol::sandbox_spec::{SandboxReport, SandboxSpec, SandboxSupport};
use qd_sandbox::SandboxPlan;

use super::Workers;
use crate::agents::AgentSandboxRules;

/// What the user's settings say about confinement.
#[derive(Debug, Clone, Default)]
pub(crate) struct SandboxDefaults {
    pub(crate) level: SandboxSetting,
    pub(crate) network: NetworkSetting,
    pub(crate) credential_paths: Vec<String>,
    /// Hosts of models, beside those of the manifests.
    pub(crate) model_hosts: Vec<String>,
}

/// What a session itself asks for. `None` leaves it to the manifest and the settings.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct SandboxRequest {
    pub(crate) level: Option<SandboxSetting>,
    pub(crate) network: Option<NetworkSetting>,
}

impl SandboxRequest {
    pub(crate) fn of_session(settings: &SessionCreated) -> Self {
        Self { level: settings.sandbox, network: settings.network }
    }

    /// The stricter of both requests.
    pub(crate) fn stricter(self, other: Self) -> Self {
        let level = match (self.level, other.level) {
            (Some(one), Some(other)) => Some(stricter_setting(one, other)),
            (one, other) => one.or(other),
        };
        let off = [self.network, other.network].contains(&Some(NetworkSetting::Off));
        Self { level, network: if off { Some(NetworkSetting::Off) } else { self.network.or(other.network) } }
    }
}

/// How this daemon confines agents.
#[derive(Debug)]
pub(super) struct Sandboxes {
    home: DaemonHome,
    defaults: SandboxDefaults,
    /// What this machine can do, once it was tried.
    support: OnceLock<SandboxSupport>,
}

impl Sandboxes {
    pub(super) fn new(home: &DaemonHome, defaults: SandboxDefaults) -> Self {
        Self { home: home.clone(), defaults, support: OnceLock::new() }
    }

    /// What this machine can do. The first call tries it, which takes some milliseconds and blocks.
    fn support(&self) -> &SandboxSupport {
        self.support.get_or_init(qd_keeper::probe_sandbox_support)
    }

    /// The settings that count for an agent.
    fn settings(
        &self,
        rules: &AgentSandboxRules,
        session: SandboxRequest,
    ) -> (SandboxSetting, NetworkSetting) {
        let SandboxRequest { level, network } = session;
        let level = SandboxRequests {
            session: level,
            manifest: rules.manifest.level,
            settings: Some(self.defaults.level),
            project: rules.project.level,
        };
        let network = SandboxRequests {
            session: network,
            manifest: rules.manifest.network,
            settings: Some(self.defaults.network),
            project: rules.project.network,
        };
        (level.setting(), network.setting())
    }
}

impl Workers {
    /// Finds out how this machine can confine agents, so that no session waits for that later. Blocks.
    pub(crate) fn probe_sandbox_support(&self) {
        self.sandboxes.support();
    }

    /// The settings that count for a session of this agent.
    pub(crate) fn sandbox_settings(
        &self,
        agent: &str,
        project: &Path,
        session: SandboxRequest,
    ) -> (SandboxSetting, NetworkSetting) {
        self.sandboxes.settings(&self.sandbox_rules(agent, project), session)
    }

    /// How an agent would be confined if it were started now. On another machine only its worker knows: then this is
    /// `None`, unless no machine that offers the agent can satisfy the request.
    pub(crate) fn plan_sandbox(
        &self,
        agent: &str,
        project: &Path,
        session: SandboxRequest,
    ) -> Result<Option<SandboxReport>, SandboxUnavailable> {
        self.plan_by_rules(agent, &self.sandbox_rules(agent, project), session)
    }

    fn plan_by_rules(
        &self,
        agent: &str,
        rules: &AgentSandboxRules,
        session: SandboxRequest,
    ) -> Result<Option<SandboxReport>, SandboxUnavailable> {
        let (asked, network) = self.sandboxes.settings(rules, session);
        if rules.is_elsewhere {
            return plan_elsewhere(asked, network).map(Some);
        }
        if rules.is_in_worker && (asked, network) == (SandboxSetting::Auto, NetworkSetting::On) {
            let why = Some(AGENT_IN_WORKER.to_owned());
            return Ok(Some(SandboxReport { asked, level: SandboxLevel::Off, network, why }));
        }
        match self.remote_agent(agent) {
            None => plan_sandbox(asked, network, self.sandboxes.support()).map(Some),
            Some(remote) => {
                let support = self.joined.sandbox_support(&remote);
                support.map_or(Ok(None), |support| plan_sandbox(asked, network, &support).map(|_| None))
            }
        }
    }

    /// What the worker of a session confines the agent with; `None` for an agent that starts no process of ours.
    pub(crate) fn sandbox_spec(
        &self,
        session: &SessionId,
        settings: &SessionCreated,
        project: &Path,
    ) -> Result<Option<Box<SandboxSpec>>, SandboxUnavailable> {
        let request = SandboxRequest::of_session(settings);
        let rules = self.sandbox_rules(&settings.agent, project);
        self.plan_by_rules(&settings.agent, &rules, request)?;
        if rules.is_elsewhere {
            return Ok(None);
        }
        let (asked, network) = self.sandboxes.settings(&rules, request);
        let home = &self.sandboxes.home;
        Ok(Some(Box::new(SandboxSpec {
            asked,
            daemon_selection: None,
            network,
            support: self.is_local(&settings.agent).then(|| self.sandboxes.support().clone()),
            home: home.path().to_owned(),
            workspace: project.to_owned(),
            worktree: settings.worktree.as_ref().map(|worktree| PathBuf::from(&worktree.path)),
            mail_folder: Some(home.mail().join(session.as_str())),
            tool_directory: Some(home.tool_directory(session)),
            daemon_socket: Some(home.socket()),
            state_paths: rules.state_paths,
            readable_paths: rules.readable_paths,
            credential_paths: self.sandboxes.defaults.credential_paths.clone(),
            model_hosts: [rules.model_hosts.as_slice(), &self.sandboxes.defaults.model_hosts].concat(),
        })))
    }

    /// How a project's hooks are confined in the worktree of a session: like the session's agent, but without what only
    /// the agent needs. `None` if they are not.
    pub(crate) fn plan_hook_sandbox(
        &self,
        agent: &str,
        session: SandboxRequest,
        project: &Path,
        worktree: &Path,
    ) -> Result<Option<SandboxPlan>, SandboxUnavailable> {
        let (asked, network) = self.sandbox_settings(agent, project, session);
        let SandboxReport { level, .. } = plan_sandbox(asked, network, self.sandboxes.support())?;
        if level == SandboxLevel::Off {
            return Ok(None);
        }
        let spec = SandboxSpec {
            network,
            home: self.sandboxes.home.path().to_owned(),
            workspace: project.to_owned(),
            credential_paths: self.sandboxes.defaults.credential_paths.clone(),
            ..SandboxSpec::default()
        };
        Ok(Some(SandboxPlan::new(&spec, level, worktree, |name| std::env::var(name).ok())))
    }

    fn sandbox_rules(&self, agent: &str, project: &Path) -> AgentSandboxRules {
        match self.remote_agent(agent) {
            None => self.agents.sandbox_rules(agent, project),
            // The other machine has its own manifests.
            Some(_) => AgentSandboxRules::default(),
        }
    }
}

/// An agent that is reached at an address is never confined, and says so.
fn plan_elsewhere(
    asked: SandboxSetting,
    network: NetworkSetting,
) -> Result<SandboxReport, SandboxUnavailable> {
    let wanted = match (asked, network) {
        (SandboxSetting::Deck | SandboxSetting::Workspace, _) => Some(UnavailableSandbox::Level(asked)),
        (_, NetworkSetting::Off) => Some(UnavailableSandbox::NetworkOff),
        (SandboxSetting::Auto | SandboxSetting::Off, NetworkSetting::On) => None,
    };
    match wanted {
        Some(wanted) => Err(SandboxUnavailable::elsewhere(wanted)),
        None => {
            let why = Some(AGENT_ELSEWHERE.to_owned());
            Ok(SandboxReport { asked, level: SandboxLevel::Off, network, why })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_agent_elsewhere_is_not_confined_and_refuses_every_level_by_name() {
        for asked in [SandboxSetting::Auto, SandboxSetting::Off] {
            let report = plan_elsewhere(asked, NetworkSetting::On).unwrap();
            assert_eq!(report.level, SandboxLevel::Off);
            assert!(report.why.unwrap().contains("elsewhere"));
            let refused = plan_elsewhere(asked, NetworkSetting::Off).unwrap_err();
            assert_eq!(refused.wanted, UnavailableSandbox::NetworkOff);
        }
        for asked in [SandboxSetting::Deck, SandboxSetting::Workspace] {
            let refused = plan_elsewhere(asked, NetworkSetting::On).unwrap_err();
            assert_eq!(refused.wanted, UnavailableSandbox::Level(asked));
        }
    }
}
