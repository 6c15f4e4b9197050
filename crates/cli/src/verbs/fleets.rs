//! `qd ps --fleet`: lists fleets, or the sessions of one fleet.

use qd_protocol::api::{Session, SessionStatus, Workspace};
use qd_protocol::fleet::{Fleet, FleetSession};
use qd_protocol::{Millis, SessionId};
use std::collections::HashMap;

use super::VerbContext;
use crate::failure::{CliExitCode, Result};
use crate::refs;
use crate::render::table::TextTable;
use crate::render::text;

const TASK_CHARS: usize = 60;

/// Lists the fleets of every workspace, or the sessions of the named fleet.
pub(crate) async fn list_fleets(context: &VerbContext, name: &str) -> Result<CliExitCode> {
    if !name.is_empty() {
        return show_fleet(context, name).await;
    }
    let client = context.client().await?;
    let mut fleets: Vec<(Workspace, Fleet)> = Vec::new();
    for workspace in client.list::<Workspace>("/v1/workspaces").await? {
        let found: Vec<Fleet> = client.list(&format!("/v1/workspaces/{}/fleets", workspace.id)).await?;
        fleets.extend(found.into_iter().map(|fleet| (workspace.clone(), fleet)));
    }
    if context.out.json {
        let fleets: Vec<&Fleet> = fleets.iter().map(|(_, fleet)| fleet).collect();
        context.out.print_json(&fleets)?;
        return Ok(CliExitCode::Success);
    }
    let ids = fleets.iter().map(|(_, fleet)| fleet.id.to_string()).collect();
    let ids = refs::shown_ids(&context.out, &client, &refs::WATCHED_KINDS, ids).await?;
    let now = Millis::now();
    let mut table = TextTable::new(&["ID", "STATE", "SESSIONS", "AGE", "TASK", "WORKSPACE"]);
    for (workspace, fleet) in &fleets {
        table.add_row([
            ids.shown(&fleet.id),
            text::wire_name(&fleet.state),
            count_sessions(fleet),
            text::format_age(fleet.created_at, now),
            text::first_line(&fleet.task, TASK_CHARS),
            workspace.path.clone(),
        ]);
    }
    context.out.print_data(&table.render(context.out.out_style(), context.out.width()))?;
    Ok(CliExitCode::Success)
}

async fn show_fleet(context: &VerbContext, name: &str) -> Result<CliExitCode> {
    let client = context.client().await?;
    let fleet = refs::resolve_fleet(&client, name).await?;
    if context.out.json {
        context.out.print_json(&client.get::<serde_json::Value>(&fleet.path()).await?)?;
        return Ok(CliExitCode::Success);
    }
    let view: Fleet = client.get(&fleet.path()).await?;
    let sessions: Vec<Session> = client.list(&format!("/v1/workspaces/{}/sessions", fleet.workspace)).await?;
    let sessions: HashMap<SessionId, Session> =
        sessions.into_iter().map(|session| (session.id.clone(), session)).collect();
    let ids = view.sessions.values().map(|member| member.session_id.to_string()).collect();
    let ids = refs::shown_ids(&context.out, &client, &refs::WATCHED_KINDS, ids).await?;
    let mut table = TextTable::new(&["NAME", "ID", "AGENT", "STATE", "COST"]);
    for (name, member) in &view.sessions {
        let session = sessions.get(&member.session_id);
        table.add_row([
            name.clone(),
            ids.shown(&member.session_id),
            session.map_or_else(|| "-".to_owned(), |session| session.agent.clone()),
            text::wire_name(&member.state),
            session.map_or_else(|| "-".to_owned(), |session| text::format_dollars(session.usage.cost_usd)),
        ]);
    }
    context.out.print_note(&format!(
        "{} {}: {}",
        view.id,
        text::wire_name(&view.state),
        text::first_line(&view.task, TASK_CHARS)
    ));
    context.out.print_data(&table.render(context.out.out_style(), context.out.width()))?;
    for problem in &view.problems {
        context.out.print_note(problem);
    }
    Ok(CliExitCode::Success)
}

/// How many sessions of a fleet work, of how many. One that has ended shows only how many it had.
fn count_sessions(fleet: &Fleet) -> String {
    let count = fleet.sessions.len();
    let is_busy =
        |session: &&FleetSession| !matches!(session.state, SessionStatus::Idle | SessionStatus::Closed);
    match fleet.state.is_final() {
        true => count.to_string(),
        false => format!("{} of {count} busy", fleet.sessions.values().filter(is_busy).count()),
    }
}
