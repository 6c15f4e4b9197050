//! `qd stop`: ends the daemon and waits until it is gone. The only verb besides `serve` that never starts one.

use std::time::Duration;

use qd_protocol::api::{Version, Worker};
use qd_protocol::limits;
use serde_json::json;
use tokio::time::{Instant, sleep};

use super::Context;
use crate::client::host::Host;
use crate::daemon;
use crate::failure::{Exit, Failure, Result};

/// How long it may take: what the daemon promises, and as much again for a slow machine.
const PATIENCE: Duration = Duration::from_secs(2 * limits::STOP_S);
/// Between two looks at a daemon that is on another machine.
const LOOK: Duration = Duration::from_millis(20);

/// Ends the daemon.
pub(crate) async fn stop(context: &Context, workers: bool) -> Result<Exit> {
    let client = match context.whereabouts.find(&context.out).await {
        Ok(client) => client,
        // Workers outlive their daemon, and only a daemon can end them with all that that means: it is journalled.
        Err(Failure::Unreachable(_)) if workers && context.whereabouts.has_workers() => {
            context.client().await?;
            // Not the client of a verb that goes on: nothing may take the place of what we end.
            context.whereabouts.find(&context.out).await?
        }
        Err(Failure::Unreachable(_)) if context.whereabouts.explicit.is_none() => {
            return stopped(context, None, 0);
        }
        Err(failure) => return Err(failure),
    };
    let version: Version = client.get("/v1/version").await?;
    let staying: Vec<Worker> = if workers { Vec::new() } else { client.list("/v1/workers").await? };
    match client.post::<serde_json::Value>("/v1/shutdown", &json!({ "workers": workers })).await {
        // Somebody else ended it, or it was quicker than its own answer.
        Ok(_) | Err(Failure::Unreachable(_)) => {}
        Err(failure) if failure.code() == Some("stopping") => {}
        Err(failure) => return Err(failure),
    }
    let deadline = Instant::now() + PATIENCE;
    while client.probe().await.is_ok() {
        if Instant::now() > deadline {
            return Err(Failure::TimedOut(format!("the daemon (pid {}) still answers", version.pid)));
        }
        sleep(LOOK).await;
    }
    let here = matches!(client.host(), Host::Unix(_));
    if here && !daemon::wait_for_end(version.pid, deadline.saturating_duration_since(Instant::now())) {
        return Err(Failure::TimedOut(format!("the daemon (pid {}) does not end", version.pid)));
    }
    stopped(context, Some(version.pid), staying.len())
}

/// Says that it is gone, and how many agents go on without it.
fn stopped(context: &Context, pid: Option<u32>, agents: usize) -> Result<Exit> {
    if context.out.json {
        context.out.value(&json!({ "stopped": pid.is_some(), "pid": pid, "agents": agents }))?;
        return Ok(Exit::Well);
    }
    context.out.note(&match (pid, agents) {
        (None, _) => "no daemon was running".to_owned(),
        (Some(_), 0) => "the daemon has ended".to_owned(),
        (Some(_), 1) => "the daemon has ended; 1 agent goes on (`qd stop --workers` ends it)".to_owned(),
        (Some(_), n) => format!("the daemon has ended; {n} agents go on (`qd stop --workers` ends them)"),
    });
    Ok(Exit::Well)
}
