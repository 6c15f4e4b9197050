//! `qd wait`: until sessions or runs have nothing more to do. The exit code is the greatest of those of the runs that
//! were waited for; of a session that was idle already, that of its last run.

use std::time::Duration;

use qd_protocol::FinishReason;
use qd_protocol::api::{Run, RunState, Session};
use serde_json::json;
use tokio::time::{Instant, timeout_at};

use super::Context;
use crate::client::Client;
use crate::failure::{Exit, Failure, Result};
use crate::refs::{self, SessionRef, Target};
use crate::render::conversation::reason;

/// One request waits so long at most; then it is asked again.
const SLICE_S: u64 = 60;

/// Waits for all of `ids`.
pub(crate) async fn wait(context: &Context, ids: &[String], timeout: Option<f64>) -> Result<Exit> {
    let client = context.client().await?;
    let mut targets = Vec::new();
    for id in ids {
        targets.push(refs::target(&client, id).await?);
    }
    let all = ends(context, &client, &targets);
    let Some(seconds) = timeout else { return all.await };
    match timeout_at(Instant::now() + Duration::from_secs_f64(seconds), all).await {
        Ok(ended) => ended,
        Err(_) => Err(Failure::TimedOut(format!("not all had ended within {seconds} s"))),
    }
}

async fn ends(context: &Context, client: &Client, targets: &[Target]) -> Result<Exit> {
    let mut worst = Exit::Well;
    let mut answers = Vec::new();
    for target in targets {
        let (id, ended) = match target {
            Target::Run(session, run) => {
                let end = run_end(client, &session.run_path(run)).await?;
                (run.to_string(), end)
            }
            Target::Session(session) => (session.id.to_string(), session_end(client, session).await?),
        };
        let exit = ended.map_or(Exit::Well, Exit::of);
        worst = worst.max(exit);
        let word = ended.map(reason);
        if context.out.json {
            answers.push(json!({ "id": id, "finish_reason": word, "exit_code": exit as u8 }));
        } else {
            context.out.line(&format!("{id} {}", word.unwrap_or("idle")))?;
        }
    }
    if context.out.json {
        context.out.value(&answers)?;
    }
    Ok(worst)
}

/// Waits for the end of one run.
async fn run_end(client: &Client, path: &str) -> Result<Option<FinishReason>> {
    loop {
        match client.get::<Run>(&format!("{path}/wait?timeout_s={SLICE_S}")).await {
            Ok(run) => return Ok(run.finish_reason),
            Err(failure) if failure.code() == Some("wait_timeout") => {}
            // Somebody stops the daemon. The run goes on without it, and may end under the next.
            Err(failure) if failure.code() == Some("stopping") => client.until_back().await?,
            Err(failure) => return Err(failure),
        }
    }
}

/// Waits until a session is not busy, and gives the worst end of the runs that were waited for.
async fn session_end(client: &Client, session: &SessionRef) -> Result<Option<FinishReason>> {
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
        for run in runs.iter().filter(|run| run.state != RunState::Finished) {
            worst = worse(worst, run_end(client, &session.run_path(&run.id)).await?);
        }
    }
}

fn worse(one: Option<FinishReason>, other: Option<FinishReason>) -> Option<FinishReason> {
    [one, other].into_iter().flatten().max_by_key(|&reason| Exit::of(reason))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_worst_end_counts() {
        let (well, failed) = (Some(FinishReason::EndTurn), Some(FinishReason::Error));
        assert_eq!(worse(None, well), well);
        assert_eq!(worse(failed, well), failed);
        assert_eq!(worse(failed, Some(FinishReason::Cancelled)), Some(FinishReason::Cancelled));
    }
}
