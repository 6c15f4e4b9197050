//! `qd stop`: stops the daemon and waits until it has exited. It starts a daemon only to stop workers that have
//! outlived theirs.

use std::time::Duration;

use qd_protocol::api::{DaemonVersion, Worker};
use qd_protocol::limits;
use serde_json::json;
use tokio::time::{Instant, sleep};

use super::VerbContext;
use crate::client::host::DaemonHost;
use crate::daemon;
use crate::failure::{CliExitCode, CliFailure, Result};

/// How long the shutdown may take: twice the daemon's own limit, for slow machines.
const STOP_TIMEOUT: Duration = Duration::from_secs(2 * limits::STOP_S);
/// Between two probes of a daemon that is shutting down.
const PROBE_INTERVAL: Duration = Duration::from_millis(20);

pub(crate) async fn stop(context: &VerbContext, workers: bool) -> Result<CliExitCode> {
    let client = match context.locator.connect(&context.out).await {
        Ok(client) => client,
        // Workers outlive their daemon. Only a daemon can stop them properly, because their end must be journalled.
        Err(CliFailure::Unreachable(_)) if workers && context.locator.has_workers() => {
            context.client().await?;
            // A new client without a restarter: the daemon that is being stopped must not be started again.
            context.locator.connect(&context.out).await?
        }
        Err(CliFailure::Unreachable(_)) if context.locator.explicit_host.is_none() => {
            return print_stopped(context, None, 0);
        }
        Err(failure) => return Err(failure),
    };
    let version: DaemonVersion = client.get("/v1/version").await?;
    let remaining: Vec<Worker> = if workers { Vec::new() } else { client.list("/v1/workers").await? };
    match client.post::<serde_json::Value>("/v1/shutdown", &json!({ "workers": workers })).await {
        // Another client stopped it, or it exited before its answer arrived.
        Ok(_) | Err(CliFailure::Unreachable(_)) => {}
        Err(failure) if failure.code() == Some("stopping") => {}
        Err(failure) => return Err(failure),
    }
    let deadline = Instant::now() + STOP_TIMEOUT;
    while client.probe().await.is_ok() {
        if Instant::now() > deadline {
            return Err(CliFailure::TimedOut(format!("the daemon (pid {}) is still answering", version.pid)));
        }
        sleep(PROBE_INTERVAL).await;
    }
    let is_local = matches!(client.host(), DaemonHost::Unix(_));
    if is_local && !daemon::wait_for_exit(version.pid, deadline.saturating_duration_since(Instant::now())) {
        return Err(CliFailure::TimedOut(format!("the daemon (pid {}) does not exit", version.pid)));
    }
    print_stopped(context, Some(version.pid), remaining.len())
}

/// Prints that the daemon has stopped, and how many agents keep running without it.
fn print_stopped(context: &VerbContext, pid: Option<u32>, agents: usize) -> Result<CliExitCode> {
    if context.out.json {
        context.out.print_json(&json!({ "stopped": pid.is_some(), "pid": pid, "agents": agents }))?;
        return Ok(CliExitCode::Success);
    }
    context.out.print_note(&match (pid, agents) {
        (None, _) => "no daemon was running".to_owned(),
        (Some(_), 0) => "the daemon has stopped".to_owned(),
        (Some(_), 1) => {
            "the daemon has stopped; 1 agent keeps running (`qd stop --workers` stops it)".to_owned()
        }
        (Some(_), n) => {
            format!("the daemon has stopped; {n} agents keep running (`qd stop --workers` stops them)")
        }
    });
    Ok(CliExitCode::Success)
}
