//! `qd ps --fleet`: lists fleets, or the sessions of one fleet.

use qd_protocol::api::{HaltStatus, Session, SessionStatus, Workspace};
use qd_protocol::fleet::{Fleet, FleetSession};
use qd_protocol::{Millis, SessionId};
use std::collections::HashMap;

use super::VerbContext;
use super::answer::PENDING_PATH;
use crate::client::DaemonClient;
use crate::failure::{CliExitCode, Result};
use crate::refs;
use crate::render::session_cells::{self, ShownIds};
use crate::render::session_table::{SessionListFacts, count_asks};
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
    let table = fleets_table(&fleets, &ids, Millis::now());
    context.out.print_data(&table.render(context.out.out_style(), context.out.width()))?;
    Ok(CliExitCode::Success)
}

fn fleets_table(fleets: &[(Workspace, Fleet)], ids: &ShownIds, now: Millis) -> TextTable {
    let mut table = TextTable::new(&["ID", "STATE", "SESSIONS", "AGE", "TASK", "WORKSPACE"]);
    table.keep_ends(5);
    for (workspace, fleet) in fleets {
        table.add_row([
            ids.shown(&fleet.id),
            text::wire_name(&fleet.state),
            count_sessions(fleet),
            text::format_age(fleet.created_at, now),
            text::first_line(&fleet.task, TASK_CHARS),
            workspace.path.clone(),
        ]);
    }
    table
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
    context.out.print_note(&format!(
        "{} {}: {}",
        view.id,
        text::wire_name(&view.state),
        text::first_line(&view.task, TASK_CHARS)
    ));
    let facts = fetch_facts(context, &client, &view).await?;
    let table = members_table(&view, &sessions, &facts);
    context.out.print_data(&table.render(context.out.out_style(), context.out.width()))?;
    for problem in &view.problems {
        context.out.print_note(problem);
    }
    Ok(CliExitCode::Success)
}

/// What the list of members says besides the sessions themselves.
async fn fetch_facts(
    context: &VerbContext,
    client: &DaemonClient,
    fleet: &Fleet,
) -> Result<SessionListFacts> {
    let mut facts = SessionListFacts { queue_reason: "no free slot", ..SessionListFacts::default() };
    let ids = fleet.sessions.values().map(|member| member.session_id.to_string()).collect();
    facts.ids = refs::shown_ids(&context.out, client, &refs::WATCHED_KINDS, ids).await?;
    if !fleet.state.is_final() {
        facts.open_asks = count_asks(&client.list(PENDING_PATH).await?);
        if client.get::<HaltStatus>("/v1/halt").await?.halted {
            facts.queue_reason = "halted";
        }
    }
    Ok(facts)
}

/// The sessions of a fleet, each with what it does or how its last run ended.
fn members_table(
    fleet: &Fleet,
    sessions: &HashMap<SessionId, Session>,
    facts: &SessionListFacts,
) -> TextTable {
    let mut table = TextTable::new(&["NAME", "ID", "AGENT", "STATE", "COST"]);
    for (name, member) in &fleet.sessions {
        let session = sessions.get(&member.session_id);
        table.add_row([
            name.clone(),
            facts.ids.shown(&member.session_id),
            session.map_or_else(|| "-".to_owned(), |session| session.agent.clone()),
            session.map_or_else(
                || text::wire_name(&member.state),
                |session| session_cells::describe_state(session, facts.asks_of(session), facts.queue_reason),
            ),
            session.map_or_else(|| "-".to_owned(), |session| text::format_dollars(session.usage.cost_usd)),
        ]);
    }
    table
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::render::session_cells::tests::ended_session;
    use crate::render::view_snapshot::assert_view;
    use qd_protocol::event::FinishReason;
    use serde_json::json;

    #[test]
    fn fleets_and_their_sessions_read_well() {
        let member = |id: &str, state: &str| json!({ "session_id": id, "state": state });
        let fleet = |id: &str, state: &str| -> Fleet {
            serde_json::from_value(json!({
                "id": id, "workspace_id": "ws_1", "state": state, "result": null, "problems": [],
                "sessions": {
                    "lead": member("ses_ar477mby3tane7hf", "running"), "review": member("ses_b07hx2k1m9d4vq8s", "idle"),
                },
                "task": "Port the parser to the new tokenizer, keep every public name, and write the notes.",
                "created_at": Millis(0), "updated_at": Millis(0),
            }))
            .unwrap()
        };
        let workspace: Workspace = serde_json::from_value(json!({
            "id": "ws_1", "path": "/home/ann/code/shop", "name": "shop", "created_at": Millis(0),
        }))
        .unwrap();
        let running = fleet("flt_7d2k9x4m1v8q3s6z", "running");
        let fleets =
            [(workspace.clone(), running.clone()), (workspace, fleet("flt_0a1b2c3d4e5f6g7h", "done"))];
        assert_view("fleets", |style, width| {
            fleets_table(&fleets, &ShownIds::default(), Millis(600_000)).render(style, width)
        });
        let lead: Session = serde_json::from_value(json!({
            "id": "ses_ar477mby3tane7hf", "workspace_id": "ws_1", "agent": "claude", "title": null,
            "state": "running", "busy": true, "parent": null, "model": null, "system_prompt": null, "policy": "ask",
            "queued": 0, "usage": {"input_tokens": 1, "output_tokens": 2, "cost_usd": 0.25}, "agent_session_id": null,
            "worktree": null, "budget_usd": null, "max_turns": null, "run_timeout_s": null, "cancel_grace_s": null,
            "restarts": null, "restart_window_s": null, "env": [], "closing": false,
            "created_at": Millis(0), "updated_at": Millis(0),
        }))
        .unwrap();
        let review = ended_session("ses_b07hx2k1m9d4vq8s", FinishReason::Error, 0);
        let sessions = HashMap::from([(lead.id.clone(), lead), (review.id.clone(), review)]);
        assert_view("fleet_members", |style, width| {
            members_table(&running, &sessions, &SessionListFacts::default()).render(style, width)
        });
    }
}
