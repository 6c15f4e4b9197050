//! What passes between daemon and worker about confinement: what a machine can do, what an agent is to be confined
//! with, and what it got.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::model_host::{ModelHost, ModelHostSetting};
use crate::sandbox::{NetworkSetting, SandboxLevel, SandboxSetting};

/// The name of a session's socket in its tool directory.
pub const SESSION_SOCKET_NAME: &str = "qd.sock";

/// The port, on the loopback interface of a sandbox without network, of the proxy through which the agent reaches its
/// model.
pub const MODEL_PROXY_PORT: u16 = 3128;

/// How a machine can confine agents. One that says nothing confines none.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct SandboxSupport {
    /// The strongest level that the machine can give. It can give all weaker ones too.
    pub strongest: SandboxLevel,
    /// Whether an agent can be cut off from the network.
    #[serde(default)]
    pub network_off: bool,
    /// Whether an agent with network still reaches abstract sockets outside, because the kernel cannot close them.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub leaves_abstract_sockets: bool,
    /// What keeps the machine from giving more, and how to change that. Absent if it gives everything.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub missing: Option<String>,
}

impl SandboxSupport {
    /// Whether the machine has nothing to say about confinement.
    pub fn confines_nothing(&self) -> bool {
        *self == Self::default()
    }
}

/// How strongly an agent is to be confined, without the paths that this needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct SandboxSelection {
    pub level: SandboxSetting,
    #[serde(default)]
    pub network: NetworkSetting,
}

/// What a worker confines an agent with. Paths that begin with `~` are below the home directory of the worker's user.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct SandboxSpec {
    /// The level that was asked for: by the session, else by its manifest or the settings.
    pub asked: SandboxSetting,
    #[serde(default)]
    pub network: NetworkSetting,
    /// What the daemon asked for, on a machine whose own manifest may have made that stricter.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub daemon_selection: Option<SandboxSelection>,
    /// What the worker's machine can do, if the daemon has tried it there. Otherwise the worker tries.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub support: Option<SandboxSupport>,
    /// The daemon's home. A confined agent sees of it only the folders that this specification names.
    pub home: PathBuf,
    /// The project directory.
    pub workspace: PathBuf,
    /// The session's git worktree, if it has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub worktree: Option<PathBuf>,
    /// The session's mail folder.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mail_folder: Option<PathBuf>,
    /// The folder with the session's token and socket, through which the agent reaches the tools of `qd mcp`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tool_directory: Option<PathBuf>,
    /// The daemon's own socket, if it is in the home. Inside, its path leads to the socket in the tool directory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub daemon_socket: Option<PathBuf>,
    /// Where the agent keeps its own state. Writable at every level, also below the daemon's home.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub state_paths: Vec<String>,
    /// Files of the daemon's home that the agent reads, such as those that make it ask before it acts.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub readable_paths: Vec<PathBuf>,
    /// Keys and credentials, which the agent cannot read at `workspace`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub credential_paths: Vec<String>,
    /// The hosts of the agent's model, which are reachable even without network: `HOST` (at port 443), `HOST:PORT`, or
    /// `$NAME` for the host of the URL in an environment variable.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub model_hosts: Vec<String>,
}

impl SandboxSpec {
    /// What the daemon asked for.
    pub fn selection_by_daemon(&self) -> SandboxSelection {
        self.daemon_selection.unwrap_or(SandboxSelection { level: self.asked, network: self.network })
    }

    /// The hosts of the agent's model. `variable` returns what its environment has.
    pub fn resolve_model_hosts(&self, variable: impl Fn(&str) -> Option<String>) -> Vec<ModelHost> {
        // Manifests and settings were checked when they were read.
        let settings = self.model_hosts.iter().filter_map(|host| host.parse::<ModelHostSetting>().ok());
        settings.filter_map(|setting| setting.resolve(&variable)).collect()
    }

    /// Whether the agent reaches its model through a proxy of ours, and nothing else.
    pub fn has_model_proxy(&self) -> bool {
        self.network == NetworkSetting::Off && !self.model_hosts.is_empty()
    }
}

/// The confinement of a session's agent since its last start.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct SandboxReport {
    /// The level that was asked for.
    pub asked: SandboxSetting,
    /// The level that is in force.
    pub level: SandboxLevel,
    #[serde(default)]
    pub network: NetworkSetting,
    /// Why the agent is not confined, or less than `deck`, although nobody asked for `off`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
}
