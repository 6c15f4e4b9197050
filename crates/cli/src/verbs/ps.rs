//! `qd ps`: the sessions, as one table. Sessions and workspaces are asked for at once; asks only if somebody waits.

use std::collections::HashMap;

use qd_protocol::api::{HaltStatus, Session, SessionStatus, Workspace};
use qd_protocol::event::Ask;
use qd_protocol::{Millis, SessionId, WorkspaceId};

use super::VerbContext;
use crate::failure::{CliExitCode, Result};
use crate::render::table::TextTable;
use crate::render::text;

/// How much of a title is shown, so that the columns after it stay on the screen.
pub(super) const TITLE_CHARS: usize = 40;

/// Lists sessions; the closed ones too with `all`.
pub(crate) async fn ps(context: &VerbContext, all: bool) -> Result<CliExitCode> {
    let client = context.client().await?;
    let path = if all { "/v1/sessions" } else { "/v1/sessions?open=true" };
    if context.out.json {
        context.out.print_json(&client.list::<serde_json::Value>(path).await?)?;
        return Ok(CliExitCode::Success);
    }
    let (sessions, workspaces) = tokio::join!(client.list(path), client.list("/v1/workspaces"));
    let (sessions, workspaces): (Vec<Session>, Vec<Workspace>) = (sessions?, workspaces?);
    let mut asks: Vec<Ask> = Vec::new();
    if sessions.iter().any(|session| session.state == SessionStatus::Waiting) {
        asks = client.list("/v1/asks?state=pending").await?;
    }
    let mut why = "no room";
    if sessions.iter().any(is_waiting_to_start) && client.get::<HaltStatus>("/v1/halt").await?.halted {
        why = "halted";
    }
    let table = table(&sessions, &workspaces, &asks, why, Millis::now());
    context.out.print_data(&table.render(context.out.out_style(), context.out.width()))?;
    Ok(CliExitCode::Success)
}

/// Whether prompts of a session wait though nothing of its own is before them: for the end of a halt, or for room.
fn is_waiting_to_start(session: &Session) -> bool {
    session.state == SessionStatus::Idle && session.queued > 0
}

fn table(sessions: &[Session], workspaces: &[Workspace], asks: &[Ask], held: &str, now: Millis) -> TextTable {
    let paths: HashMap<&WorkspaceId, &str> =
        workspaces.iter().map(|workspace| (&workspace.id, workspace.path.as_str())).collect();
    let mut waiting: HashMap<&SessionId, usize> = HashMap::new();
    for ask in asks {
        if let Some(session) = &ask.session_id {
            *waiting.entry(session).or_default() += 1;
        }
    }
    let mut table = TextTable::new(&["ID", "AGENT", "STATE", "AGE", "COST", "TITLE", "WORKSPACE"]);
    for session in sessions {
        let workspace = paths.get(&session.workspace_id).copied().unwrap_or(session.workspace_id.as_str());
        table.add_row([
            session.id.to_string(),
            session.agent.clone(),
            describe_state(session, waiting.get(&session.id).copied().unwrap_or(0), held),
            text::format_age(session.created_at, now),
            text::format_dollars(session.usage.cost_usd),
            session
                .title
                .as_deref()
                .map_or_else(|| "-".to_owned(), |title| text::truncate(title, TITLE_CHARS)),
            workspace.to_owned(),
        ]);
    }
    table
}

/// The state, with how many asks and prompts wait; prompts of one that is held, for what.
pub(super) fn describe_state(session: &Session, asks: usize, held: &str) -> String {
    let mut state = match session.state {
        SessionStatus::Idle => "idle",
        SessionStatus::Starting => "starting",
        SessionStatus::Running => "running",
        SessionStatus::Waiting => "waiting",
        SessionStatus::Closed => "closed",
    }
    .to_owned();
    if asks > 0 {
        state.push_str(&format!(", {asks} ask{}", if asks == 1 { "" } else { "s" }));
    }
    if session.queued > 0 {
        state.push_str(&format!(", {} queued", session.queued));
    }
    if is_waiting_to_start(session) {
        state.push_str(&format!(" ({held})"));
    }
    if session.closing && session.state != SessionStatus::Closed {
        state.push_str(", closing");
    }
    state
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::render::ask::tests::permission;
    use crate::render::style::TextStyle;
    use qd_protocol::policy::Risk;
    use serde_json::json;

    fn session() -> Session {
        serde_json::from_value(json!({
            "id": "ses_1", "workspace_id": "ws_1", "agent": "echo", "title": "nightly", "state": "waiting",
            "busy": true, "parent": null, "model": null, "system_prompt": null, "policy": "ask", "queued": 2,
            "usage": {"input_tokens": 1, "output_tokens": 2, "cost_usd": 0.25}, "agent_session_id": null,
            "worktree": null, "budget_usd": null, "max_turns": null, "run_timeout_s": null, "cancel_grace_s": null, "restarts": null, "restart_window_s": null,
            "env": [], "closing": false,
            "created_at": "1970-01-01T00:00:00.000Z", "updated_at": "1970-01-01T00:00:00.000Z"
        }))
        .unwrap()
    }

    #[test]
    fn a_row_says_who_does_what_where_since_when() {
        let workspace = Workspace {
            id: WorkspaceId::parse("ws_1").unwrap(),
            path: "/src/app".to_owned(),
            name: "app".to_owned(),
            created_at: Millis(0),
        };
        let table = table(&[session()], &[workspace], &[permission(Risk::Low)], "halted", Millis(120_000));
        assert_eq!(
            table.render(TextStyle::new(false), None),
            "ID     AGENT  STATE                     AGE  COST   TITLE    WORKSPACE\n\
             ses_1  echo   waiting, 1 ask, 2 queued  2m   $0.25  nightly  /src/app\n"
        );
    }

    #[test]
    fn a_workspace_that_is_gone_is_shown_by_its_id() {
        let table = table(&[session()], &[], &[], "", Millis(0));
        assert!(table.render(TextStyle::new(false), None).contains("ws_1"));
    }

    #[test]
    fn a_prompt_that_waits_for_nothing_of_its_session_says_for_what() {
        let idle = Session { state: SessionStatus::Idle, ..session() };
        assert_eq!(describe_state(&idle, 0, "no room"), "idle, 2 queued (no room)");
        let running = Session { state: SessionStatus::Running, ..session() };
        assert_eq!(describe_state(&running, 0, "no room"), "running, 2 queued");
    }
}
