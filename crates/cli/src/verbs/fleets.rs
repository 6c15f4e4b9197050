//! `qd ps --fleet`: the fleets, or the sessions of one.

use qd_protocol::api::{Session, SessionState, Workspace};
use qd_protocol::fleet::Fleet;
use qd_protocol::{Millis, SessionId};
use std::collections::HashMap;

use super::Context;
use crate::failure::{Exit, Result};
use crate::refs;
use crate::render::table::Table;
use crate::render::text;

/// How much of a task is shown.
const TASK: usize = 60;

/// Lists the fleets of every workspace; with a name, the sessions of one.
pub(crate) async fn ps(context: &Context, name: &str) -> Result<Exit> {
    if !name.is_empty() {
        return one(context, name).await;
    }
    let client = context.client().await?;
    let mut fleets: Vec<(Workspace, Fleet)> = Vec::new();
    for workspace in client.list::<Workspace>("/v1/workspaces").await? {
        let found: Vec<Fleet> = client.list(&format!("/v1/workspaces/{}/fleets", workspace.id)).await?;
        fleets.extend(found.into_iter().map(|fleet| (workspace.clone(), fleet)));
    }
    if context.out.json {
        let fleets: Vec<&Fleet> = fleets.iter().map(|(_, fleet)| fleet).collect();
        context.out.value(&fleets)?;
        return Ok(Exit::Well);
    }
    let now = Millis::now();
    let mut table = Table::new(&["ID", "STATE", "SESSIONS", "AGE", "TASK", "WORKSPACE"]);
    for (workspace, fleet) in &fleets {
        let busy = fleet.sessions.values().filter(|session| session.state != SessionState::Idle).count();
        table.row([
            fleet.id.to_string(),
            word(&fleet.state),
            format!("{busy}/{}", fleet.sessions.len()),
            text::age(fleet.created_at, now),
            text::head(&fleet.task, TASK),
            workspace.path.clone(),
        ]);
    }
    context.out.data(&table.render(context.out.out_style(), context.out.width()))?;
    Ok(Exit::Well)
}

async fn one(context: &Context, name: &str) -> Result<Exit> {
    let client = context.client().await?;
    let fleet = refs::fleet(&client, name).await?;
    if context.out.json {
        context.out.value(&client.get::<serde_json::Value>(&fleet.path()).await?)?;
        return Ok(Exit::Well);
    }
    let view: Fleet = client.get(&fleet.path()).await?;
    let sessions: Vec<Session> = client.list(&format!("/v1/workspaces/{}/sessions", fleet.workspace)).await?;
    let sessions: HashMap<SessionId, Session> =
        sessions.into_iter().map(|session| (session.id.clone(), session)).collect();
    let mut table = Table::new(&["NAME", "ID", "AGENT", "STATE", "COST"]);
    for (name, member) in &view.sessions {
        let session = sessions.get(&member.session_id);
        table.row([
            name.clone(),
            member.session_id.to_string(),
            session.map_or_else(|| "-".to_owned(), |session| session.agent.clone()),
            word(&member.state),
            session.map_or_else(|| "-".to_owned(), |session| text::dollars(session.usage.cost_usd)),
        ]);
    }
    context.out.note(&format!("{} {}: {}", view.id, word(&view.state), text::head(&view.task, TASK)));
    context.out.data(&table.render(context.out.out_style(), context.out.width()))?;
    for problem in &view.problems {
        context.out.note(problem);
    }
    Ok(Exit::Well)
}

/// A state as it stands on the wire.
fn word(state: &impl serde::Serialize) -> String {
    let word = serde_json::to_value(state).ok();
    word.and_then(|word| word.as_str().map(str::to_owned)).unwrap_or_default()
}
