//! Finds out what this machine can do, by doing it: a program is started at each level, in a process of its own.

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::process::{Command, ExitCode, Stdio};

use qd_protocol::sandbox::{NetworkSetting, SandboxLevel};
use qd_protocol::sandbox_spec::{SandboxSpec, SandboxSupport};
use rustix::process::{Pid, WaitOptions, waitpid};

use crate::error::SandboxError;
use crate::init::SANDBOX_COMMAND;
use crate::kernel;
use crate::launcher::{ConfinedProgram, Sandbox};
use crate::plan::SandboxPlan;

/// The argument after [`SANDBOX_COMMAND`] that makes `qd` run the probe.
pub(crate) const PROBE_ARGUMENT: &str = "probe";

/// What this machine can do for the present user. Takes a few milliseconds and blocks; `exe` is `qd`.
pub fn probe_sandbox(exe: &Path) -> SandboxSupport {
    let output = Command::new(exe)
        .args([SANDBOX_COMMAND, PROBE_ARGUMENT])
        .env_clear()
        .stdin(Stdio::null())
        .stderr(Stdio::null())
        .output();
    let support = output.and_then(|output| Ok(serde_json::from_slice(&output.stdout)?));
    support.unwrap_or_else(|error| SandboxSupport {
        missing: Some(SandboxError::internal(&error).to_string()),
        ..SandboxSupport::default()
    })
}

/// Tries each level and prints the result as JSON.
pub(crate) fn main() -> ExitCode {
    let mut support = SandboxSupport::default();
    for level in [SandboxLevel::Deck, SandboxLevel::Workspace] {
        match start_true(level, NetworkSetting::On) {
            Ok(()) => support.strongest = level,
            Err(error) => {
                support.missing = Some(error.to_string());
                break;
            }
        }
    }
    if support.strongest > SandboxLevel::Off {
        support.leaves_abstract_sockets = !kernel::has_scopes();
        let without_network = start_true(SandboxLevel::Deck, NetworkSetting::Off);
        support.network_off = without_network.is_ok();
        support.missing = support.missing.or(without_network.err().map(|error| error.to_string()));
    }
    let printed = serde_json::to_vec(&support).map_err(io::Error::from);
    match printed.and_then(|json| io::stdout().write_all(&json)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => ExitCode::FAILURE,
    }
}

/// Starts `true` in a sandbox that hides what every machine has, and waits for it.
fn start_true(level: SandboxLevel, network: NetworkSetting) -> Result<(), SandboxError> {
    let internal = |error: io::Error| SandboxError::internal(&error);
    // Any directory that is not needed can stand for the daemon's home.
    let spec = SandboxSpec { network, home: "/var/tmp".into(), ..SandboxSpec::default() };
    let plan = SandboxPlan::new(&spec, level, Path::new("/"), |_| None);
    let plan = SandboxPlan { writable: Vec::new(), ..plan };
    let sandbox = Sandbox::start(&plan)?;
    let program = ConfinedProgram {
        path: "/bin/true".into(),
        arguments: vec!["true".to_owned()],
        env: BTreeMap::new(),
        cwd: "/".into(),
    };
    let descriptor = || io::stdin().as_fd().try_clone_to_owned().map_err(internal);
    let stdio: [OwnedFd; 3] = [descriptor()?, descriptor()?, descriptor()?];
    let exit = sandbox.spawn(&program, &stdio).and_then(wait_for).map_err(internal);
    sandbox.kill();
    let init = wait_for(sandbox.init_pid()).map_err(internal);
    match (exit?, init?) {
        (Some(0), _) => Ok(()),
        (status, _) => {
            Err(internal(io::Error::other(format!("`true` exited with {status:?} in the sandbox"))))
        }
    }
}

/// Waits for a child, and returns its exit status unless a signal ended it.
fn wait_for(pid: u32) -> io::Result<Option<i32>> {
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw);
    Ok(waitpid(pid, WaitOptions::empty())?.and_then(|(_, status)| status.exit_status()))
}
