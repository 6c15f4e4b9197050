//! `qd queue`: the runs that wait in a session's queue, and their removal.

use qd_protocol::Millis;
use qd_protocol::api::QueueEntry;
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

/// Lists the queue, or removes runs from it.
pub(crate) async fn queue(context: &VerbContext, flags: &QueueArgs) -> Result<CliExitCode> {
    let client = context.client().await?;
    let session = refs::resolve_session(&client, &flags.id).await?;
    let path = format!("{}/queue", session.agent_path());
    if flags.clear {
        return print_removed(context, client.delete(&path).await?);
    }
    if flags.remove.is_empty() {
        return list_queue(context, &client, &path).await;
    }
    // All ids are resolved first: if one is wrong, nothing is removed.
    let mut runs = Vec::new();
    for id in &flags.remove {
        match refs::resolve_target(&client, id).await? {
            SessionOrRun::Run(_, run) => runs.push(run),
            SessionOrRun::Session(_) => {
                return Err(CliFailure::Usage(format!(
                    "{id} is a session; --remove needs a run, as `qd queue` lists it"
                )));
            }
        }
    }
    for run in runs {
        print_removed(context, client.delete(&format!("{path}/{run}")).await?)?;
    }
    Ok(CliExitCode::Success)
}

async fn list_queue(context: &VerbContext, client: &DaemonClient, path: &str) -> Result<CliExitCode> {
    let queue: Vec<QueueEntry> = client.list(path).await?;
    if context.out.json {
        context.out.print_json(&queue)?;
        return Ok(CliExitCode::Success);
    }
    let now = Millis::now();
    let mut table = TextTable::new(&["RUN", "POSITION", "AGE", "PROMPT"]);
    for entry in queue {
        table.add_row([
            entry.run_id.to_string(),
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
