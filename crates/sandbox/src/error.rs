//! Why a sandbox could not be made, and what a person can do about it.

use std::io;

use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use crate::mounts::MountError;

/// Why a sandbox could not be made. It crosses processes, so the cause is a text.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{what}: {cause}{}", help.as_ref().map(|help| format!("; {help}")).unwrap_or_default())]
pub struct SandboxError {
    what: String,
    cause: String,
    /// What to change on the machine, if that is known.
    help: Option<String>,
}

impl SandboxError {
    pub(crate) fn user_namespace(cause: &io::Error) -> Self {
        let help = match cause.raw_os_error().map(Errno::from_raw_os_error) {
            Some(Errno::NOSPC) => "raise the limit, for example with `sysctl user.max_user_namespaces=65536`",
            Some(Errno::PERM | Errno::ACCESS) => {
                "allow them with `sysctl kernel.unprivileged_userns_clone=1`, on Ubuntu with `sysctl \
                 kernel.apparmor_restrict_unprivileged_userns=0`; in a container, start it with a seccomp profile \
                 that allows `clone` and `unshare`"
            }
            _ => "the kernel needs user, PID and mount namespaces",
        };
        Self::new("user namespaces cannot be made", cause, Some(help))
    }

    pub(crate) fn mount(MountError { path, source }: &MountError) -> Self {
        let is_denied =
            matches!(source.raw_os_error().map(Errno::from_raw_os_error), Some(Errno::PERM | Errno::ACCESS));
        let help = match is_denied {
            true if path.as_os_str() == "/proc" => Some(
                "a part of `/proc` is hidden here, as in most containers; start the container with \
                 `--security-opt systempaths=unconfined`",
            ),
            true => Some("a security module of this machine forbids mounts in user namespaces"),
            false => None,
        };
        Self::new(&format!("{} cannot be mounted", path.display()), source, help)
    }

    pub(crate) fn model_proxy(cause: &io::Error) -> Self {
        Self::new("the port of the proxy to the model cannot be opened", cause, None)
    }

    pub(crate) fn network(cause: &io::Error) -> Self {
        Self::new("the network cannot be cut off", cause, None)
    }

    pub(crate) fn internal(cause: &io::Error) -> Self {
        Self::new("the sandbox could not be started", cause, None)
    }

    fn new(what: &str, cause: &io::Error, help: Option<&str>) -> Self {
        Self { what: what.to_owned(), cause: cause.to_string(), help: help.map(str::to_owned) }
    }
}
