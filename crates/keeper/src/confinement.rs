//! The sandbox in which a keeper starts its children, once it was told to. Everything that the children start is in it
//! too, so killing its init ends all of them, however they try to hide.
//!
//! Design: docs/design/agents-are-confined.md

use std::io;
use std::os::fd::OwnedFd;

use qd_sandbox::{ConfinedProgram, Sandbox, SandboxError, SandboxPlan, send_with_descriptors};
use rustix::net::SendFlags;

/// A keeper's sandbox. If it ends, the next child is started in a new one of the same plan.
#[derive(Debug)]
pub(crate) struct KeeperConfinement {
    plan: SandboxPlan,
    sandbox: Option<Sandbox>,
    /// Where the worker takes the listener of each sandbox, at which it serves the proxy to the agent's model.
    listener_channel: Option<OwnedFd>,
}

impl KeeperConfinement {
    /// Makes the sandbox. This process is restricted too, as far as it can: it can no longer start anything outside.
    pub(crate) fn start(plan: SandboxPlan, listener_channel: Option<OwnedFd>) -> Result<Self, SandboxError> {
        // The kernel may not have it. The namespaces do not depend on it.
        let _available = qd_sandbox::restrict_own_scope();
        let mut confinement = Self { plan, sandbox: None, listener_channel };
        confinement.sandbox = Some(confinement.start_sandbox()?);
        Ok(confinement)
    }

    /// Starts a program in the sandbox, and returns its pid.
    pub(crate) fn spawn(&mut self, program: &ConfinedProgram, stdio: &[OwnedFd; 3]) -> io::Result<u32> {
        let sandbox = match self.sandbox.take() {
            Some(sandbox) => sandbox,
            None => self.start_sandbox().map_err(io::Error::other)?,
        };
        self.sandbox.insert(sandbox).spawn(program, stdio)
    }

    fn start_sandbox(&self) -> Result<Sandbox, SandboxError> {
        let mut sandbox = Sandbox::start(&self.plan)?;
        if let (Some(listener), Some(channel)) = (sandbox.take_model_listener(), &self.listener_channel) {
            // It fails only if the worker is gone, and then everything ends.
            let _unsent = send_with_descriptors(channel, &[0], &[listener], SendFlags::DONTWAIT);
        }
        Ok(sandbox)
    }

    /// Whether a process is the init of the sandbox, which belongs to no agent and no turn.
    pub(crate) fn is_init(&self, pid: u32) -> bool {
        self.sandbox.as_ref().is_some_and(|sandbox| sandbox.init_pid() == pid)
    }

    /// Records that a child was reaped.
    pub(crate) fn record_reaped(&mut self, pid: u32) {
        self.sandbox.take_if(|sandbox| sandbox.init_pid() == pid);
    }

    pub(crate) fn is_running(&self) -> bool {
        self.sandbox.is_some()
    }

    /// Ends everything in the sandbox. It is gone once its init is reaped.
    pub(crate) fn kill(&self) {
        if let Some(sandbox) = &self.sandbox {
            sandbox.kill();
        }
    }
}
