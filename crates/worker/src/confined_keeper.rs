//! The keeper of an agent's processes, which starts them in a sandbox if the agent is to be confined.
//!
//! Design: docs/design/agents-are-confined.md

use std::path::PathBuf;

use qd_drivers::agent_launcher::AgentLocation;
use qd_drivers::{own_program, own_program_path};
use qd_keeper::{KeeperError, KeeperHandle};
use qd_protocol::event::RunError;
use qd_protocol::manifest::Manifest;
use qd_protocol::sandbox::SandboxLevel;
use qd_protocol::worker::AgentSpec;
use qd_sandbox::SandboxPlan;

use crate::agent_sandbox::plan_agent_sandbox;
use crate::model_proxy::start_model_proxy;

/// Starts the keeper of an agent. A level that cannot be given is an error: the agent is never confined less than it says.
pub(crate) async fn start_keeper(spec: &AgentSpec) -> Result<KeeperHandle, RunError> {
    let report = match spec.sandbox.as_deref() {
        Some(sandbox) => plan_agent_sandbox(sandbox, AgentLocation::BelowKeeper)?,
        None => None,
    };
    let level = report.map_or(SandboxLevel::Off, |report| report.level);
    let started = match sandbox_plan(spec, level) {
        Some(plan) => {
            let proxy =
                spec.sandbox.as_deref().map(|sandbox| start_model_proxy(sandbox, agent_variable(spec)));
            let listener_channel = proxy.transpose().map_err(|cause| {
                let message = format!("failed to start the proxy to the agent's model: {cause}");
                RunError::new("agent_failed_to_start", message)
            })?;
            let exe = own_program();
            KeeperHandle::start_confined(&exe, &spec.mark, plan, listener_channel.flatten()).await
        }
        None => KeeperHandle::start(&own_program(), &spec.mark).await,
    };
    started.map_err(|cause| match cause {
        KeeperError::NotConfined(_) => {
            let message = format!("the agent cannot be confined as it was asked for: {cause}");
            RunError::new("sandbox_unavailable", message)
        }
        _ => RunError::new("keeper_failed", format!("failed to start the keeper: {cause}")),
    })
}

/// What the agent's environment has.
fn agent_variable(spec: &AgentSpec) -> impl Fn(&str) -> Option<String> + '_ {
    |name| {
        let manifest = || spec.manifest.as_deref()?.startup.env.get(name).cloned();
        spec.env.get(name).cloned().or_else(manifest).or_else(|| std::env::var(name).ok())
    }
}

fn sandbox_plan(spec: &AgentSpec, level: SandboxLevel) -> Option<SandboxPlan> {
    let sandbox = spec.sandbox.as_deref().filter(|_| level > SandboxLevel::Off)?;
    let mut plan = SandboxPlan::new(sandbox, level, &spec.cwd, agent_variable(spec));
    // The agent starts it as `qd mcp`, wherever it is installed.
    plan.readable.push(own_program_path());
    // A manifest in the home may name a script beside it. A directory is never meant: it could be the home itself.
    let command = spec.manifest.as_deref().map(Manifest::command).unwrap_or_default();
    plan.readable
        .extend(command.into_iter().map(PathBuf::from).filter(|path| path.is_absolute() && path.is_file()));
    Some(plan)
}
