//! `qd wait`: waits until sessions, runs or fleets are finished, and says on stderr what it waits for. The exit code is
//! the highest of the runs that were waited for; for a session that is already idle, that of its last run.

use std::collections::HashSet;
use std::time::Duration;

use qd_protocol::api::{Run, RunStatus, Session};
use qd_protocol::event::Ask;
use qd_protocol::fleet::{Fleet, FleetStatus};
use qd_protocol::{FinishReason, Millis, RunId};
use serde_json::json;
use tokio::time::{Instant, sleep, timeout_at};

use super::VerbContext;
use super::ask_feed::AskFeed;
use crate::args::{OnAskWhileWaiting, WaitArgs};
use crate::client::DaemonClient;
use crate::client::stream::EventStream;
use crate::failure::{CliExitCode, CliFailure, Result};
use crate::local_time::format_local_time;
use crate::refs::{self, ResolvedFleet, ResolvedSession, WatchTarget};
use crate::render::{ask, session_cells, text};

/// How long one request waits before it is repeated.
const REQUEST_WAIT_S: u64 = 60;
/// How long to wait after a 429, as its `Retry-After` says.
const OVERLOADED_RETRY: Duration = Duration::from_secs(1);

/// Waits for all of the targets.
pub(crate) async fn wait(context: &VerbContext, flags: &WaitArgs) -> Result<CliExitCode> {
    let client = context.client().await?;
    let mut targets = Vec::new();
    for id in &flags.ids {
        targets.push(refs::resolve_watch_target(&client, id).await?);
    }
    let all = async {
        tokio::select! {
            exit = wait_for_all(context, &client, &targets) => exit,
            exit = report_asks(context, &client, &targets, flags.on_ask) => exit,
        }
    };
    let Some(seconds) = flags.timeout else { return all.await };
    match timeout_at(Instant::now() + Duration::from_secs_f64(seconds), all).await {
        Ok(result) => result,
        Err(_) => Err(CliFailure::TimedOut(format!("not everything finished within {seconds} s"))),
    }
}

/// Says which asks hold the targets up, now and whenever one is opened. Returns only if `on_ask` says so.
async fn report_asks(
    context: &VerbContext,
    client: &DaemonClient,
    targets: &[WatchTarget],
    on_ask: OnAskWhileWaiting,
) -> Result<CliExitCode> {
    let mut feed = AskFeed::open(client).await?;
    let owners = waited_owners(client, targets).await?;
    loop {
        let ask = feed.next().await?;
        let session = ask.session_id.as_ref().map(ToString::to_string);
        let fleet = ask.fleet_id.as_ref().map(ToString::to_string);
        if ![session, fleet].into_iter().flatten().any(|id| owners.contains(&id)) {
            continue;
        }
        context.out.print_note(&format!("waiting for you: {}", describe_owner(&ask)));
        context.out.print_stderr(&ask::format_ask(&ask, context.out.err_style(), context.out.err_width()));
        context.out.print_stderr(&ask::answer_commands(&ask));
        if on_ask == OnAskWhileWaiting::Fail {
            context
                .out
                .print_note("not waiting for an answer (--on-ask fail); the run goes on when it is answered");
            return Ok(CliExitCode::Failed);
        }
    }
}

/// The ids of the sessions and fleets whose asks hold the targets up.
async fn waited_owners(client: &DaemonClient, targets: &[WatchTarget]) -> Result<HashSet<String>> {
    let mut owners = HashSet::new();
    for target in targets {
        match target {
            WatchTarget::Session(session) | WatchTarget::Run(session, _) => {
                owners.insert(session.id.to_string());
            }
            WatchTarget::Fleet(fleet) => {
                let view: Fleet = client.get(&fleet.path()).await?;
                owners.extend(view.sessions.values().map(|member| member.session_id.to_string()));
                owners.insert(fleet.id.clone());
            }
        }
    }
    Ok(owners)
}

fn describe_owner(ask: &Ask) -> String {
    let session = ask.session_id.as_ref().map(|id| format!("{id} needs an answer"));
    let fleet = || ask.fleet_id.as_ref().map(|id| format!("{id} needs an answer"));
    session.or_else(fleet).unwrap_or_default()
}

async fn wait_for_all(
    context: &VerbContext,
    client: &DaemonClient,
    targets: &[WatchTarget],
) -> Result<CliExitCode> {
    let mut worst = CliExitCode::Success;
    let mut answers = Vec::new();
    for target in targets {
        let (id, outcome) = match target {
            WatchTarget::Run(session, run) => {
                context.out.print_note(&format!("waiting for {run} of {}", session.id));
                note_quota(context, client, session, &mut None).await?;
                (run.to_string(), wait_for_run(client, &session.run_path(run)).await?.into())
            }
            WatchTarget::Session(session) => {
                (session.id.to_string(), wait_for_session(context, client, session).await?.into())
            }
            WatchTarget::Fleet(fleet) => {
                (fleet.id.clone(), wait_for_fleet(context, client, fleet).await?.into())
            }
        };
        let WaitOutcome { word, exit } = outcome;
        worst = worst.max(exit);
        if context.out.json {
            answers.push(json!({ "id": id, "finish_reason": word, "exit_code": exit as u8 }));
        } else {
            context.out.print_line(&format!("{id} {}", word.as_deref().unwrap_or("idle")))?;
        }
    }
    if context.out.json {
        context.out.print_json(&answers)?;
    }
    Ok(worst)
}

/// How a target ended. Without a word it never ran.
struct WaitOutcome {
    /// The outcome by its name in JSON, because scripts read it.
    word: Option<String>,
    exit: CliExitCode,
}

impl From<Option<FinishReason>> for WaitOutcome {
    fn from(reason: Option<FinishReason>) -> Self {
        let exit = reason.map_or(CliExitCode::Success, CliExitCode::from_finish_reason);
        Self { word: reason.as_ref().map(text::wire_name), exit }
    }
}

impl From<FleetStatus> for WaitOutcome {
    fn from(state: FleetStatus) -> Self {
        let (word, exit) = match state {
            FleetStatus::Done => ("done", CliExitCode::Success),
            FleetStatus::Cancelled => ("cancelled", CliExitCode::Cancelled),
            FleetStatus::Failed | FleetStatus::Running | FleetStatus::Waiting => {
                ("failed", CliExitCode::Failed)
            }
        };
        Self { word: Some(word.to_owned()), exit }
    }
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

/// Waits until a session is not busy. Returns the worst finish reason of the runs that had not ended at first, or were
/// accepted meanwhile; if there is none, that of the last run.
async fn wait_for_session(
    context: &VerbContext,
    client: &DaemonClient,
    session: &ResolvedSession,
) -> Result<Option<FinishReason>> {
    let list = format!("/v1/workspaces/{}/runs?session={}", session.workspace, session.id);
    let mut runs: Vec<Run> = client.list(&list).await?;
    let is_over = |run: &&Run| run.state == RunStatus::Finished;
    let over_at_first: HashSet<RunId> = runs.iter().filter(is_over).map(|run| run.id.clone()).collect();
    match runs.len() - over_at_first.len() {
        0 => {}
        1 => context.out.print_note(&format!("waiting for {}", session.id)),
        count => context.out.print_note(&format!("waiting for {count} runs of {}", session.id)),
    }
    let mut noted_reset = None;
    loop {
        for run in runs.iter().filter(|run| !is_over(run)) {
            note_quota(context, client, session, &mut noted_reset).await?;
            wait_for_run(client, &session.run_path(&run.id)).await?;
        }
        let busy = client.get::<Session>(&session.path()).await?.busy;
        runs = client.list(&list).await?;
        if !busy && runs.iter().all(|run| is_over(&run)) {
            break;
        }
    }
    let waited_for = runs.iter().filter(|run| !over_at_first.contains(&run.id));
    let worst = worst_reason(waited_for.filter_map(|run| run.finish_reason));
    Ok(worst.or_else(|| runs.last().and_then(|run| run.finish_reason)))
}

/// Says that a session waits for the reset of its account's quota, once for each reset.
async fn note_quota(
    context: &VerbContext,
    client: &DaemonClient,
    session: &ResolvedSession,
    noted_reset: &mut Option<Millis>,
) -> Result<()> {
    let session: Session = client.get(&session.path()).await?;
    let until = session.quota_until.filter(|_| session_cells::is_waiting_to_start(&session));
    if let Some(until) = until.filter(|until| noted_reset.replace(*until) != Some(*until)) {
        let (id, agent) = (&session.id, &session.agent);
        let time = format_local_time(until);
        context.out.print_note(&format!(
            "{id} waits for the quota of {agent}, which resets at {time}; `qd quota release {id}` does not wait for it"
        ));
    }
    Ok(())
}

async fn wait_for_fleet(
    context: &VerbContext,
    client: &DaemonClient,
    fleet: &ResolvedFleet,
) -> Result<FleetStatus> {
    let path = format!("/v1/workspaces/{}/events?kinds=fleet.finished", fleet.workspace);
    let mut stream = EventStream::from_now(client, &path).await?;
    let mut is_noted = false;
    loop {
        let state = client.get::<Fleet>(&fleet.path()).await?.state;
        if state.is_final() {
            return Ok(state);
        }
        if !std::mem::replace(&mut is_noted, true) {
            context.out.print_note(&format!("waiting for {}", fleet.id));
        }
        stream.next().await?;
    }
}

fn worst_reason(reasons: impl Iterator<Item = FinishReason>) -> Option<FinishReason> {
    reasons.max_by_key(|&reason| CliExitCode::from_finish_reason(reason))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_worst_finish_reason_counts() {
        let (done, failed) = (FinishReason::EndTurn, FinishReason::Error);
        assert_eq!(worst_reason([].into_iter()), None);
        assert_eq!(worst_reason([done].into_iter()), Some(done));
        assert_eq!(worst_reason([failed, done].into_iter()), Some(failed));
        assert_eq!(
            worst_reason([failed, FinishReason::Cancelled].into_iter()),
            Some(FinishReason::Cancelled)
        );
    }
}
