//! `qd stop`: ends the daemon and waits until it is gone. The only verb besides `serve` that never starts one.

use std::time::Duration;

use qd_protocol::api::{DaemonVersion, Worker};
use qd_protocol::limits;
use serde_json::json;
use tokio::time::{Instant, sleep};

use super::VerbContext;
use crate::client::host::DaemonHost;
use crate::daemon;
use crate::failure::{CliExitCode, CliFailure, Result};

/// How long it may take: what the daemon promises, and as much again for a slow machine.
const STOP_TIMEOUT: Duration = Duration::from_secs(2 * limits::STOP_S);
/// Between two looks at a daemon that is on another machine.
const PROBE_INTERVAL: Duration = Duration::from_millis(20);

/// Ends the daemon.
pub(crate) async fn stop(context: &VerbContext, workers: bool) -> Result<CliExitCode> {
    let client = match context.locator.connect(&context.out).await {
        Ok(client) => client,
        // Workers outlive their daemon, and only a daemon can end them with all that that means: it is journalled.
        Err(CliFailure::Unreachable(_)) if workers && context.locator.has_workers() => {
            context.client().await?;
            // Not the client of a verb that goes on: nothing may take the place of what we end.
            context.locator.connect(&context.out).await?
        }
        Err(CliFailure::Unreachable(_)) if context.locator.explicit_host.is_none() => {
            return print_stopped(context, None, 0);
        }
        Err(failure) => return Err(failure),
    };
    let version: DaemonVersion = client.get("/v1/version").await?;
    let staying: Vec<Worker> = if workers { Vec::new() } else { client.list("/v1/workers").await? };
    match client.post::<serde_json::Value>("/v1/shutdown", &json!({ "workers": workers })).await {
        // Somebody else ended it, or it was quicker than its own answer.
        Ok(_) | Err(CliFailure::Unreachable(_)) => {}
        Err(failure) if failure.code() == Some("stopping") => {}
        Err(failure) => return Err(failure),
    }
    let deadline = Instant::now() + STOP_TIMEOUT;
    while client.probe().await.is_ok() {
        if Instant::now() > deadline {
            return Err(CliFailure::TimedOut(format!("the daemon (pid {}) still answers", version.pid)));
        }
        sleep(PROBE_INTERVAL).await;
    }
    let here = matches!(client.host(), DaemonHost::Unix(_));
    if here && !daemon::wait_for_exit(version.pid, deadline.saturating_duration_since(Instant::now())) {
        return Err(CliFailure::TimedOut(format!("the daemon (pid {}) does not end", version.pid)));
    }
    print_stopped(context, Some(version.pid), staying.len())
}

/// Says that it is gone, and how many agents go on without it.
fn print_stopped(context: &VerbContext, pid: Option<u32>, agents: usize) -> Result<CliExitCode> {
    if context.out.json {
        context.out.print_json(&json!({ "stopped": pid.is_some(), "pid": pid, "agents": agents }))?;
        return Ok(CliExitCode::Success);
    }
    context.out.print_note(&match (pid, agents) {
        (None, _) => "no daemon was running".to_owned(),
        (Some(_), 0) => "the daemon has ended".to_owned(),
        (Some(_), 1) => "the daemon has ended; 1 agent goes on (`qd stop --workers` ends it)".to_owned(),
        (Some(_), n) => format!("the daemon has ended; {n} agents go on (`qd stop --workers` ends them)"),
    });
    Ok(CliExitCode::Success)
}
