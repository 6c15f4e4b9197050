//! `qd ps`: lists sessions. Sessions and workspaces are fetched in parallel, asks only if a session is waiting.

use std::collections::HashMap;

use qd_protocol::api::{HaltStatus, Session, SessionStatus, Workspace};
use qd_protocol::event::Ask;
use qd_protocol::{Millis, SessionId, WorkspaceId};

use super::VerbContext;
use crate::args::SessionFilter;
use crate::failure::{CliExitCode, Result};
use crate::render::table::TextTable;
use crate::render::text;

/// Titles are truncated to this length, so the columns after them stay on the screen.
pub(super) const TITLE_CHARS: usize = 40;

/// Lists open sessions, or with `all` also closed ones.
pub(crate) async fn ps(
    context: &VerbContext,
    all: bool,
    quiet: bool,
    filters: &[SessionFilter],
) -> Result<CliExitCode> {
    let client = context.client().await?;
    let path = if all { "/v1/sessions" } else { "/v1/sessions?open=true" };
    if context.out.json && filters.is_empty() && !quiet {
        context.out.print_json(&client.list::<serde_json::Value>(path).await?)?;
        return Ok(CliExitCode::Success);
    }
    let (sessions, workspaces) = tokio::join!(client.list(path), client.list("/v1/workspaces"));
    let (mut sessions, workspaces): (Vec<Session>, Vec<Workspace>) = (sessions?, workspaces?);
    sessions.retain(|session| filters.iter().all(|filter| passes(session, filter)));
    if quiet {
        let ids: Vec<&str> = sessions.iter().map(|session| session.id.as_str()).collect();
        match context.out.json {
            true => context.out.print_json(&ids)?,
            false => ids.iter().try_for_each(|id| context.out.print_line(id))?,
        }
        return Ok(CliExitCode::Success);
    }
    if context.out.json {
        context.out.print_json(&sessions)?;
        return Ok(CliExitCode::Success);
    }
    let mut asks: Vec<Ask> = Vec::new();
    if sessions.iter().any(|session| session.state == SessionStatus::Waiting) {
        asks = client.list("/v1/asks?state=pending").await?;
    }
    let mut queue_reason = "no free slot";
    if sessions.iter().any(is_waiting_to_start) && client.get::<HaltStatus>("/v1/halt").await?.halted {
        queue_reason = "halted";
    }
    let table = table(&sessions, &workspaces, &asks, queue_reason, Millis::now());
    context.out.print_data(&table.render(context.out.out_style(), context.out.width()))?;
    Ok(CliExitCode::Success)
}

fn passes(session: &Session, filter: &SessionFilter) -> bool {
    match filter {
        SessionFilter::State(state) => text::wire_name(&session.state) == *state,
        SessionFilter::Agent(agent) => session.agent == *agent,
        SessionFilter::Title(part) => {
            session.title.as_ref().is_some_and(|title| title.to_lowercase().contains(part))
        }
    }
}

/// Whether an idle session has queued prompts: they wait for the end of a halt or for a free slot.
fn is_waiting_to_start(session: &Session) -> bool {
    session.state == SessionStatus::Idle && session.queued > 0
}

fn table(
    sessions: &[Session],
    workspaces: &[Workspace],
    asks: &[Ask],
    queue_reason: &str,
    now: Millis,
) -> TextTable {
    let paths: HashMap<&WorkspaceId, &str> =
        workspaces.iter().map(|workspace| (&workspace.id, workspace.path.as_str())).collect();
    let mut open_asks: HashMap<&SessionId, usize> = HashMap::new();
    for ask in asks {
        if let Some(session) = &ask.session_id {
            *open_asks.entry(session).or_default() += 1;
        }
    }
    let mut table = TextTable::new(&["ID", "AGENT", "STATE", "AGE", "COST", "TITLE", "WORKSPACE"]);
    for session in sessions {
        let workspace = paths.get(&session.workspace_id).copied().unwrap_or(session.workspace_id.as_str());
        table.add_row([
            session.id.to_string(),
            session.agent.clone(),
            describe_state(session, open_asks.get(&session.id).copied().unwrap_or(0), queue_reason),
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

/// The state with the numbers of open asks and queued prompts. `queue_reason` says why an idle session has queued ones.
pub(super) fn describe_state(session: &Session, asks: usize, queue_reason: &str) -> String {
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
        state.push_str(&format!(" ({queue_reason})"));
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
    fn a_row_shows_agent_state_age_and_workspace() {
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
    fn filters_compare_state_agent_and_part_of_the_title() {
        let passes = |filter| passes(&session(), &filter);
        assert!(passes(SessionFilter::State("waiting".to_owned())));
        assert!(!passes(SessionFilter::State("idle".to_owned())));
        assert!(passes(SessionFilter::Agent("echo".to_owned())));
        assert!(!passes(SessionFilter::Agent("ech".to_owned())));
        assert!(passes(SessionFilter::Title("night".to_owned())));
        assert!(!passes(SessionFilter::Title("day".to_owned())));
    }

    #[test]
    fn a_workspace_that_is_gone_is_shown_by_its_id() {
        let table = table(&[session()], &[], &[], "", Millis(0));
        assert!(table.render(TextStyle::new(false), None).contains("ws_1"));
    }

    #[test]
    fn queued_prompts_of_an_idle_session_show_the_reason() {
        let idle = Session { state: SessionStatus::Idle, ..session() };
        assert_eq!(describe_state(&idle, 0, "no free slot"), "idle, 2 queued (no free slot)");
        let running = Session { state: SessionStatus::Running, ..session() };
        assert_eq!(describe_state(&running, 0, "no free slot"), "running, 2 queued");
    }
}
