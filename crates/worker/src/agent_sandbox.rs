//! How this worker confines an agent: what was asked for, decided by what this machine can do. The daemon has tried that
//! already if it runs on the same machine. A level that was asked for by name is given or the agent is not started.

use std::sync::OnceLock;

use qd_core::sandbox::{SandboxUnavailable, plan_sandbox};
use qd_drivers::agent_launcher::AgentLocation;
use qd_protocol::ErrorCode;
use qd_protocol::event::RunError;
use qd_protocol::sandbox_spec::{SandboxReport, SandboxSpec, SandboxSupport};

/// How this machine can confine agents, tried once.
pub(crate) fn sandbox_support() -> &'static SandboxSupport {
    static SUPPORT: OnceLock<SandboxSupport> = OnceLock::new();
    SUPPORT.get_or_init(qd_keeper::probe_sandbox_support)
}

/// The confinement of an agent that is about to start. `None` if nothing of it runs in processes of its own.
pub(crate) fn plan_agent_sandbox(
    spec: &SandboxSpec,
    location: AgentLocation,
) -> Result<Option<SandboxReport>, RunError> {
    match location {
        AgentLocation::InWorker | AgentLocation::Remote => Ok(None),
        AgentLocation::BelowKeeper => {
            let support = match &spec.support {
                Some(support) => support,
                None => sandbox_support(),
            };
            plan_sandbox(spec.asked, spec.network, support).map(Some).map_err(sandbox_error)
        }
    }
}

/// The error of a start that cannot be confined as was asked for.
fn sandbox_error(error: SandboxUnavailable) -> RunError {
    RunError::new(ErrorCode::SandboxUnavailable.as_str(), error.to_string())
}
