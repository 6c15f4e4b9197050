//! `qd wait`: waits until sessions or runs are finished. The exit code is the highest of the runs that were waited for;
//! for a session that is already idle, that of its last run.

use std::time::Duration;

use qd_protocol::FinishReason;
use qd_protocol::api::{Run, RunStatus, Session};
use serde_json::json;
use tokio::time::{Instant, sleep, timeout_at};

use super::VerbContext;
use crate::client::DaemonClient;
use crate::failure::{CliExitCode, CliFailure, Result};
use crate::refs::{self, ResolvedSession, SessionOrRun};
use crate::render::conversation::finish_reason_name;

/// How long one request waits before it is repeated.
const REQUEST_WAIT_S: u64 = 60;
/// How long to wait after a 429, as its `Retry-After` says.
const OVERLOADED_RETRY: Duration = Duration::from_secs(1);

/// Waits for all of `ids`.
pub(crate) async fn wait(context: &VerbContext, ids: &[String], timeout: Option<f64>) -> Result<CliExitCode> {
    let client = context.client().await?;
    let mut targets = Vec::new();
    for id in ids {
        targets.push(refs::resolve_target(&client, id).await?);
    }
    let all = wait_for_all(context, &client, &targets);
    let Some(seconds) = timeout else { return all.await };
    match timeout_at(Instant::now() + Duration::from_secs_f64(seconds), all).await {
        Ok(result) => result,
        Err(_) => Err(CliFailure::TimedOut(format!("not everything finished within {seconds} s"))),
    }
}

async fn wait_for_all(
    context: &VerbContext,
    client: &DaemonClient,
    targets: &[SessionOrRun],
) -> Result<CliExitCode> {
    let mut worst = CliExitCode::Success;
    let mut answers = Vec::new();
    for target in targets {
        let (id, reason) = match target {
            SessionOrRun::Run(session, run) => {
                (run.to_string(), wait_for_run(client, &session.run_path(run)).await?)
            }
            SessionOrRun::Session(session) => {
                (session.id.to_string(), wait_for_session(client, session).await?)
            }
        };
        let exit = reason.map_or(CliExitCode::Success, CliExitCode::from_finish_reason);
        worst = worst.max(exit);
        let reason = reason.map(finish_reason_name);
        if context.out.json {
            answers.push(json!({ "id": id, "finish_reason": reason, "exit_code": exit as u8 }));
        } else {
            context.out.print_line(&format!("{id} {}", reason.unwrap_or("idle")))?;
        }
    }
    if context.out.json {
        context.out.print_json(&answers)?;
    }
    Ok(worst)
}

async fn wait_for_run(client: &DaemonClient, path: &str) -> Result<Option<FinishReason>> {
    loop {
        match client.get::<Run>(&format!("{path}/wait?timeout_s={REQUEST_WAIT_S}")).await {
            Ok(run) => return Ok(run.finish_reason),
            Err(failure) if failure.code() == Some("wait_timeout") => {}
            // Too many clients wait. The run continues, so this one tries again.
            Err(failure) if failure.code() == Some("overloaded") => sleep(OVERLOADED_RETRY).await,
            // The daemon is being stopped. The run continues without it and can end under the next daemon.
            Err(failure) if failure.code() == Some("stopping") => client.wait_until_back().await?,
            Err(failure) => return Err(failure),
        }
    }
}

/// Waits until a session is not busy, and returns the worst finish reason of the runs that were waited for.
async fn wait_for_session(client: &DaemonClient, session: &ResolvedSession) -> Result<Option<FinishReason>> {
    let mut worst: Option<FinishReason> = None;
    loop {
        let busy = client.get::<Session>(&session.path()).await?.busy;
        if !busy && worst.is_some() {
            return Ok(worst);
        }
        let list = format!("/v1/workspaces/{}/runs?session={}", session.workspace, session.id);
        let runs: Vec<Run> = client.list(&list).await?;
        if !busy {
            return Ok(runs.last().and_then(|run| run.finish_reason));
        }
        for run in runs.iter().filter(|run| run.state != RunStatus::Finished) {
            worst = worse(worst, wait_for_run(client, &session.run_path(&run.id)).await?);
        }
    }
}

fn worse(one: Option<FinishReason>, other: Option<FinishReason>) -> Option<FinishReason> {
    [one, other].into_iter().flatten().max_by_key(|&reason| CliExitCode::from_finish_reason(reason))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_worst_finish_reason_counts() {
        let (done, failed) = (Some(FinishReason::EndTurn), Some(FinishReason::Error));
        assert_eq!(worse(None, done), done);
        assert_eq!(worse(failed, done), failed);
        assert_eq!(worse(failed, Some(FinishReason::Cancelled)), Some(FinishReason::Cancelled));
    }
}
