//! What a sandbox is to be: which level, what is hidden, and which paths stay. A plan is made by the worker, which knows
//! the agent and the user's environment, and carried out by the sandbox's init.

use std::path::{Path, PathBuf};

use qd_protocol::sandbox::{NetworkSetting, SandboxLevel};
use qd_protocol::sandbox_spec::{SESSION_SOCKET_NAME, SandboxSpec};
use rustix::process::getuid;
use serde::{Deserialize, Serialize};

/// Sockets through which a process outside can be told to start programs. They are files, and made by system services.
const SERVICE_SOCKETS: [&str; 6] = [
    "/run/docker.sock",
    "/run/snapd.socket",
    "/run/systemd/private",
    "/var/lib/incus/unix.socket",
    "/var/lib/lxd/unix.socket",
    "/var/snap/lxd/common/lxd/unix.socket",
];
/// Directories whose sockets do the same.
const SERVICE_SOCKET_DIRECTORIES: [&str; 6] =
    ["/run/containerd", "/run/crio", "/run/dbus", "/run/libvirt", "/run/podman", "/run/screen"];
/// Where programs put temporary files if they are not told otherwise.
const TEMPORARY_DIRECTORIES: [&str; 2] = ["/tmp", "/var/tmp"];

/// Where programs share memory and queues by name.
const SHARED_MEMORY_DIRECTORIES: [&str; 2] = ["/dev/shm", "/dev/mqueue"];

/// How an agent, and everything that it starts, is confined.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct SandboxPlan {
    pub level: SandboxLevel,
    pub network: NetworkSetting,
    /// Whether the init opens the port of a proxy to the agent's model.
    #[serde(default)]
    pub has_model_proxy: bool,
    /// The daemon's home. Of it, only what the other fields name can be seen.
    pub home: PathBuf,
    /// The project directory. At `workspace`, its git hooks and configuration are read-only.
    pub workspace: PathBuf,
    /// What the agent may write: below the home and other hidden directories at every level, and elsewhere at `workspace`.
    pub writable: Vec<PathBuf>,
    /// What the agent may read below the home, and below other directories that are hidden.
    pub readable: Vec<PathBuf>,
    /// Links that the home has inside: each path and what it leads to.
    pub links: Vec<(PathBuf, PathBuf)>,
    /// Directories that are empty at first and not shared with anybody outside.
    pub private_directories: Vec<PathBuf>,
    /// Files and sockets that look empty.
    pub hidden_files: Vec<PathBuf>,
    /// Keys and credentials. Hidden at `workspace`.
    pub credentials: Vec<PathBuf>,
}

impl SandboxPlan {
    /// The plan for an agent that works in `cwd`. `variable` returns what the agent's environment has.
    pub fn new(
        spec: &SandboxSpec,
        level: SandboxLevel,
        cwd: &Path,
        variable: impl Fn(&str) -> Option<String>,
    ) -> Self {
        let user_home = variable("HOME").map(PathBuf::from);
        let below_user_home = |path: &String| expand_home(path, user_home.as_deref());
        let mut writable: Vec<PathBuf> = vec![cwd.to_owned(), spec.workspace.clone()];
        writable.extend([&spec.worktree, &spec.mail_folder].into_iter().flatten().cloned());
        writable.extend(spec.state_paths.iter().filter_map(below_user_home));
        let mut readable = spec.readable_paths.clone();
        readable.extend(spec.tool_directory.clone());
        let links = spec.daemon_socket.iter().zip(&spec.tool_directory);
        let links = links.map(|(path, directory)| (path.clone(), directory.join(SESSION_SOCKET_NAME)));
        let links = links.collect();
        let mut private_directories = session_socket_directories(&variable);
        let mut credentials = Vec::new();
        if level == SandboxLevel::Workspace {
            private_directories.extend(TEMPORARY_DIRECTORIES.map(PathBuf::from));
            private_directories.extend(SHARED_MEMORY_DIRECTORIES.map(PathBuf::from));
            private_directories.extend(variable("TMPDIR").map(PathBuf::from));
            credentials.extend(spec.credential_paths.iter().filter_map(below_user_home));
        } else {
            readable.extend(key_agents(&variable));
        }
        Self {
            level,
            network: spec.network,
            has_model_proxy: spec.has_model_proxy(),
            home: spec.home.clone(),
            workspace: spec.workspace.clone(),
            writable,
            readable,
            links,
            private_directories,
            hidden_files: SERVICE_SOCKETS
                .map(PathBuf::from)
                .into_iter()
                .chain(named_sockets(&variable))
                .collect(),
            credentials,
        }
    }
}

/// Where the user's own session has its sockets: through a tmux, D-Bus or systemd that runs outside, a process could
/// start others outside.
fn session_socket_directories(variable: &impl Fn(&str) -> Option<String>) -> Vec<PathBuf> {
    let user = getuid().as_raw();
    let tmux = |below: &str| PathBuf::from(below).join(format!("tmux-{user}"));
    let mut directories = vec![tmux("/tmp"), PathBuf::from(format!("/run/user/{user}"))];
    directories.extend(variable("TMUX_TMPDIR").map(|below| tmux(&below)));
    directories.extend(variable("SCREENDIR").map(PathBuf::from));
    directories.extend(variable("HOME").map(|below| PathBuf::from(below).join(".screen")));
    // Somebody may have set it to a directory that everything is in. What is hidden there would be missed.
    let user_home = variable("HOME").map(PathBuf::from).unwrap_or_default();
    let is_for_sockets = |path: &PathBuf| {
        !user_home.starts_with(path) && !TEMPORARY_DIRECTORIES.iter().any(|shared| path == Path::new(shared))
    };
    directories.extend(variable("XDG_RUNTIME_DIR").map(PathBuf::from).filter(is_for_sockets));
    directories.extend(SERVICE_SOCKET_DIRECTORIES.map(PathBuf::from));
    directories
}

/// Sockets of such programs that variables name, wherever they are.
fn named_sockets(variable: &impl Fn(&str) -> Option<String>) -> Vec<PathBuf> {
    let bus = variable("DBUS_SESSION_BUS_ADDRESS").unwrap_or_default();
    let bus_path = |address: &str| Some(address.strip_prefix("unix:path=")?.split(',').next()?.to_owned());
    let docker = variable("DOCKER_HOST").and_then(|host| Some(host.strip_prefix("unix://")?.to_owned()));
    let tmux = variable("TMUX").and_then(|terminal| Some(terminal.split(',').next()?.to_owned()));
    let named = bus.split(';').filter_map(bus_path).chain(docker).chain(tmux);
    named.map(PathBuf::from).filter(|path| path.is_absolute()).collect()
}

/// The programs that hold the user's keys, with which git and ssh work. They start nothing, and at `deck` the keys
/// themselves can be read as well.
fn key_agents(variable: &impl Fn(&str) -> Option<String>) -> Vec<PathBuf> {
    let user = getuid().as_raw();
    let runtime = variable("XDG_RUNTIME_DIR").map_or(format!("/run/user/{user}").into(), PathBuf::from);
    variable("SSH_AUTH_SOCK").map(PathBuf::from).into_iter().chain([runtime.join("gnupg")]).collect()
}

/// The path that a setting names: `~/x` is below the user's home directory. Other relative paths name nothing.
fn expand_home(path: &str, user_home: Option<&Path>) -> Option<PathBuf> {
    let path = match path.strip_prefix('~') {
        Some(rest) => user_home?.join(rest.trim_start_matches('/')),
        None => PathBuf::from(path),
    };
    path.is_absolute().then_some(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec() -> SandboxSpec {
        SandboxSpec {
            home: "/q".into(),
            workspace: "/w".into(),
            mail_folder: Some("/q/mail/s".into()),
            tool_directory: Some("/q/tools/s".into()),
            daemon_socket: Some("/q/qd.sock".into()),
            state_paths: vec!["~/.agent".to_owned(), "relative".to_owned()],
            credential_paths: vec!["~/.ssh".to_owned()],
            ..SandboxSpec::default()
        }
    }

    fn plan(level: SandboxLevel) -> SandboxPlan {
        SandboxPlan::new(&spec(), level, Path::new("/q/worktrees/s"), |name| match name {
            "HOME" => Some("/h".to_owned()),
            "XDG_RUNTIME_DIR" => Some("/run/mine".to_owned()),
            "TMPDIR" => Some("/scratch".to_owned()),
            "SSH_AUTH_SOCK" => Some("/run/mine/ssh".to_owned()),
            _ => None,
        })
    }

    #[test]
    fn an_agent_keeps_its_directory_mail_and_state_and_reads_its_tools() {
        let plan = plan(SandboxLevel::Deck);
        assert_eq!(plan.writable, ["/q/worktrees/s", "/w", "/q/mail/s", "/h/.agent"].map(PathBuf::from));
        assert_eq!(plan.readable, ["/q/tools/s", "/run/mine/ssh", "/run/mine/gnupg"].map(PathBuf::from));
        assert_eq!(plan.links, [("/q/qd.sock".into(), "/q/tools/s/qd.sock".into())]);
        assert!(plan.private_directories.contains(&"/run/mine".into()));
        assert!(plan.credentials.is_empty() && !plan.private_directories.contains(&"/tmp".into()));
    }

    #[test]
    fn a_socket_that_a_variable_names_is_hidden_wherever_it_is() {
        let variable = |name: &str| match name {
            "DBUS_SESSION_BUS_ADDRESS" => {
                Some("unix:abstract=/tmp/x,guid=1;unix:path=/tmp/bus,guid=2".to_owned())
            }
            "DOCKER_HOST" => Some("unix:///home/u/docker.sock".to_owned()),
            "TMUX" => Some("/scratch/tmux.sock,12,0".to_owned()),
            _ => None,
        };
        let plan = SandboxPlan::new(&spec(), SandboxLevel::Deck, Path::new("/w"), variable);
        for socket in ["/tmp/bus", "/home/u/docker.sock", "/scratch/tmux.sock"] {
            assert!(plan.hidden_files.contains(&socket.into()), "{socket}");
        }
    }

    #[test]
    fn a_runtime_directory_that_has_other_things_too_is_not_hidden() {
        for shared in ["/tmp", "/h", "/"] {
            let variable = |name: &str| match name {
                "HOME" => Some("/h".to_owned()),
                "XDG_RUNTIME_DIR" => Some(shared.to_owned()),
                _ => None,
            };
            let plan = SandboxPlan::new(&spec(), SandboxLevel::Deck, Path::new("/w"), variable);
            assert!(!plan.private_directories.contains(&shared.into()), "{shared}");
        }
    }

    #[test]
    fn at_workspace_temporary_files_are_private_and_credentials_hidden() {
        let plan = plan(SandboxLevel::Workspace);
        assert!(plan.writable.contains(&"/w".into()));
        assert_eq!(plan.credentials, [PathBuf::from("/h/.ssh")]);
        assert_eq!(plan.readable, [PathBuf::from("/q/tools/s")]);
        for directory in ["/tmp", "/var/tmp", "/scratch", "/dev/shm"] {
            assert!(plan.private_directories.contains(&directory.into()), "{directory}");
        }
    }
}
