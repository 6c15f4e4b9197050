//! `qd queue`: the runs that wait in a session's queue, their removal and their order.

use qd_protocol::api::{QueueEntry, QueueMove, QueuePlace, ReferenceKind};
use qd_protocol::{Millis, RunId};
use serde_json::Value;

use super::VerbContext;
use crate::args::QueueArgs;
use crate::client::DaemonClient;
use crate::failure::{CliExitCode, CliFailure, Result};
use crate::refs::{self, SessionOrRun};
use crate::render::table::TextTable;
use crate::render::text;

/// How much of a prompt is shown off a terminal; on one, the table cuts it to the width.
const PROMPT_CHARS: usize = 200;

/// Lists the queue, removes runs from it, or moves one.
pub(crate) async fn queue(context: &VerbContext, flags: &QueueArgs) -> Result<CliExitCode> {
    let client = context.client().await?;
    let session = refs::resolve_session(&client, &flags.id).await?;
    let path = format!("{}/queue", session.agent_path());
    if flags.clear {
        return print_removed(context, client.delete(&path).await?);
    }
    if let (Some(run), Some(place)) = (&flags.moved_run, flags.to) {
        let run = resolve_queued_run(&client, "--move", run).await?;
        return move_run(context, &client, &path, run, place).await;
    }
    if flags.remove.is_empty() {
        return list_queue(context, &client, &path).await;
    }
    // All ids are resolved first: if one is wrong, nothing is removed.
    let mut runs = Vec::new();
    for id in &flags.remove {
        runs.push(resolve_queued_run(&client, "--remove", id).await?);
    }
    for run in runs {
        print_removed(context, client.delete(&format!("{path}/{run}")).await?)?;
    }
    Ok(CliExitCode::Success)
}

async fn resolve_queued_run(client: &DaemonClient, flag: &str, id: &str) -> Result<RunId> {
    match refs::resolve_target(client, id).await? {
        SessionOrRun::Run(_, run) => Ok(run),
        SessionOrRun::Session(_) => {
            Err(CliFailure::Usage(format!("{id} is a session; {flag} needs a run, as `qd queue` lists it")))
        }
    }
}

/// Moves a run to a place, from 1. The daemon is told which run comes next after it, so a run that starts meanwhile does
/// not shift the meaning of the place.
async fn move_run(
    context: &VerbContext,
    client: &DaemonClient,
    path: &str,
    run: RunId,
    place: u32,
) -> Result<CliExitCode> {
    let queue: Vec<QueueEntry> = client.list(path).await?;
    let mut others = queue.into_iter().map(|entry| entry.run_id).filter(|other| *other != run);
    let before = others.nth(place as usize - 1);
    let moved: QueuePlace = client.patch(&format!("{path}/{run}"), &QueueMove { before }).await?;
    if context.out.json {
        context.out.print_json(&moved)?;
    } else {
        context.out.print_line(&format!("{run} moved to place {}", moved.position))?;
    }
    Ok(CliExitCode::Success)
}

async fn list_queue(context: &VerbContext, client: &DaemonClient, path: &str) -> Result<CliExitCode> {
    let queue: Vec<QueueEntry> = client.list(path).await?;
    if context.out.json {
        context.out.print_json(&queue)?;
        return Ok(CliExitCode::Success);
    }
    let ids = queue.iter().map(|entry| entry.run_id.to_string()).collect();
    let kinds = [ReferenceKind::Session, ReferenceKind::Run];
    let ids = refs::shown_ids(&context.out, client, &kinds, ids).await?;
    let now = Millis::now();
    let mut table = TextTable::new(&["RUN", "PLACE", "AGE", "PROMPT"]);
    for entry in queue {
        table.add_row([
            ids.shown(&entry.run_id),
            entry.position.to_string(),
            text::format_age(entry.accepted_at, now),
            text::first_line(&entry.prompt, PROMPT_CHARS),
        ]);
    }
    context.out.print_data(&table.render(context.out.out_style(), context.out.width()))?;
    Ok(CliExitCode::Success)
}

fn print_removed(context: &VerbContext, response: Value) -> Result<CliExitCode> {
    if context.out.json {
        context.out.print_json(&response)?;
        return Ok(CliExitCode::Success);
    }
    let removed = response["removed"].as_array().map(Vec::as_slice).unwrap_or_default();
    for run in removed.iter().filter_map(Value::as_str) {
        context.out.print_line(&format!("{run} removed"))?;
    }
    if removed.is_empty() {
        context.out.print_note("the queue is empty");
    }
    Ok(CliExitCode::Success)
}
