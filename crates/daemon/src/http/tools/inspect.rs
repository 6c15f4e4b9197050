//! The states and results of the sessions within reach. Nothing is changed here.

use std::sync::Arc;
use std::time::Duration;

use qd_journal::{AskFilter, EventFilter, EventTopic, RunFilter, SessionRow};
use qd_protocol::event::Ask;
use qd_protocol::limits::{CHILDREN_MAX, DEPTH_MAX, PAGE_MAX, TOOL_POLL_S, TOOL_TEXT_MAX, WAITED_FOR_MAX};
use qd_protocol::text::escaped_head;
use qd_protocol::{ApiError, RunId};
use serde::Deserialize;
use serde_json::{Map, Value, json};
use tokio::time::Instant;

use super::super::runs::load_full_run;
use super::super::{sessions, unreadable_row};
use super::caller::{SessionReach, ToolCaller};
use super::json_object;
use crate::daemon::{Daemon, read_failed, stopping_error};
use crate::invalid_value;

/// The events that may end a wait.
const WAIT_END_KINDS: [&str; 2] = ["run.finished", "session.closed"];
/// The most sessions that `list` shows.
const LISTED_MAX: usize = 200;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct WaitToolArguments {
    sessions: Vec<String>,
    #[serde(default)]
    timeout_s: Option<f64>,
}

/// Waits until these sessions have nothing to do, or the time is up, and shows them.
pub(super) async fn wait(
    daemon: &Arc<Daemon>,
    caller: &ToolCaller,
    arguments: WaitToolArguments,
) -> Result<Map<String, Value>, ApiError> {
    let WaitToolArguments { sessions, timeout_s } = arguments;
    if !(1..=WAITED_FOR_MAX).contains(&sessions.len()) {
        return Err(invalid_value(format!("`sessions` must name 1 to {WAITED_FOR_MAX} sessions")));
    }
    let timeout = poll_timeout(timeout_s)?;
    let mut rows = Vec::with_capacity(sessions.len());
    for reference in &sessions {
        rows.push(caller.find_session(daemon, reference, SessionReach::Descendants).await?);
    }
    let topic = match &rows[..] {
        [session] => EventTopic::Session(session.key),
        [first, ..] if rows.iter().all(|row| row.workspace == first.workspace) => {
            EventTopic::Workspace(first.workspace)
        }
        _ => EventTopic::All,
    };
    let kinds = WAIT_END_KINDS.map(str::to_owned);
    let mut events = daemon.journal.subscribe(EventFilter { topic, kinds: Some(Arc::from(kinds)) }, None);
    let deadline = Instant::now() + timeout;
    let mut stop = daemon.stop_signal();
    // The subscription comes before the query, so no end can fall between the two.
    let finished = loop {
        for row in &mut rows {
            // A session that was purged meanwhile has nothing to do either.
            match daemon.journal.session(&row.id).await.map_err(read_failed)? {
                Some(current) => *row = current,
                None => row.live = false,
            }
        }
        if rows.iter().all(|row| !row.live) {
            break true;
        }
        tokio::select! {
            biased;
            _ = stop.wait_for(|stop| *stop) => return Err(stopping_error()),
            event = events.next() => drop(event.map_err(read_failed)?),
            () = tokio::time::sleep_until(deadline) => break false,
        }
    };
    let mut summaries = Vec::with_capacity(rows.len());
    for row in &rows {
        summaries.push(session_summary(daemon, row).await?);
    }
    Ok(json_object(json!({ "finished": finished, "sessions": summaries })))
}

/// How long one request may wait.
pub(super) fn poll_timeout(timeout_s: Option<f64>) -> Result<Duration, ApiError> {
    let limit = TOOL_POLL_S as f64;
    let seconds = timeout_s.unwrap_or(0.0);
    if !(0.0..=limit).contains(&seconds) {
        return Err(invalid_value(format!(
            "`timeout_s` must be from 0 to {limit} seconds; call again to wait longer"
        )));
    }
    Ok(Duration::from_secs_f64(seconds))
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct StatusToolArguments {
    #[serde(default)]
    session: Option<String>,
}

/// Shows one session, by default the caller's own.
pub(super) async fn status(
    daemon: &Arc<Daemon>,
    caller: &ToolCaller,
    arguments: StatusToolArguments,
) -> Result<Map<String, Value>, ApiError> {
    let row = match (&arguments.session, caller) {
        (Some(reference), _) => {
            caller.find_session(daemon, reference, SessionReach::OwnAndDescendants).await?
        }
        (None, ToolCaller::Session(own)) => {
            caller.find_session(daemon, own.id.as_str(), SessionReach::OwnAndDescendants).await?
        }
        (None, ToolCaller::User(_)) => {
            let open = caller.reachable(daemon, usize::MAX).await?;
            let busy = open.iter().filter(|row| row.live).count();
            return Ok(json_object(
                json!({ "open": open.len(), "busy": busy, "halted": daemon.is_halted() }),
            ));
        }
    };
    let mut result = session_summary(daemon, &row).await?;
    let lineage = daemon.journal.lineage(row.key).await.map_err(read_failed)?;
    let tree = daemon.journal.tree_cost(row.key).await.map_err(read_failed)?;
    result["tree_cost_usd"] = json!(tree);
    result["budget_left_usd"] = json!(daemon.budget_left(&[row.key]).await);
    result["depth"] = json!({ "now": lineage.len(), "most": DEPTH_MAX });
    let tree_size = daemon.journal.tree_size(row.key).await.map_err(read_failed)?;
    result["open_below"] = json!(tree_size.saturating_sub(usize::from(row.closed_at.is_none())));
    result["children_max"] = json!(CHILDREN_MAX);
    result["asks"] = pending_asks(daemon, &row).await?;
    Ok(json_object(result))
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ListToolArguments {}

/// The agents that can be started here, and the sessions within reach.
pub(super) async fn list(
    daemon: &Arc<Daemon>,
    caller: &ToolCaller,
    ListToolArguments {}: ListToolArguments,
) -> Result<Map<String, Value>, ApiError> {
    let project = match caller {
        ToolCaller::User(_) => None,
        ToolCaller::Session(own) => Some(daemon.workspaces.get(&own.workspace)?.path.clone()),
    };
    let agents: Vec<Value> = daemon
        .workers
        .agents()
        .list(project.as_deref())
        .into_iter()
        .filter(|agent| agent.available)
        .map(|agent| json!({ "name": agent.name, "description": agent.description, "steers": agent.steers }))
        .collect();
    let mut sessions = Vec::new();
    for row in caller.reachable(daemon, LISTED_MAX).await? {
        let session = sessions::session_view(daemon, &row)?;
        sessions.push(json!({
            "session": session.id, "title": session.title, "agent": session.agent, "state": session.state,
            "busy": session.busy, "parent": session.parent, "cost_usd": session.usage.cost_usd,
        }));
    }
    Ok(json_object(json!({ "agents": agents, "sessions": sessions })))
}

/// A session with the state or result of its last run.
async fn session_summary(daemon: &Daemon, row: &SessionRow) -> Result<Value, ApiError> {
    let session = sessions::session_view(daemon, row)?;
    let mut summary = json!({
        "session": session.id, "title": session.title, "agent": session.agent, "state": session.state,
        "busy": session.busy, "parent": session.parent, "queued": session.queued,
        "cost_usd": session.usage.cost_usd,
    });
    let filter = RunFilter { session: Some(row.key), ..RunFilter::default() };
    let runs = daemon.journal.runs(filter, None::<&RunId>, usize::MAX).await.map_err(read_failed)?;
    let last = match row.live {
        // The first unfinished run is the active one.
        true => runs.iter().find(|run| !run.finished),
        false => runs.last(),
    };
    if let Some(last) = last {
        let run = load_full_run(daemon, last).await?;
        summary["run"] = json!({ "run": run.id, "state": run.state, "finish_reason": run.finish_reason });
        if let Some(text) = run.text.filter(|_| last.finished) {
            let head = escaped_head(&text, TOOL_TEXT_MAX);
            summary["finish_reason"] = json!(run.finish_reason);
            summary["text"] = json!(head);
            summary["truncated"] = json!(head.len() < text.len());
        }
        if let Some(error) = run.error {
            summary["error"] = json!({ "code": error.code, "message": error.message });
        }
    }
    if row.live {
        summary["waiting_for_people"] =
            json!(!pending_asks(daemon, row).await?.as_array().is_none_or(Vec::is_empty));
    }
    Ok(summary)
}

/// The open asks of a session.
async fn pending_asks(daemon: &Daemon, row: &SessionRow) -> Result<Value, ApiError> {
    let filter = AskFilter { session: Some(row.key), pending_only: true, ..AskFilter::default() };
    let mut asks = Vec::new();
    for row in daemon.journal.asks(filter, None, PAGE_MAX).await.map_err(read_failed)? {
        let ask: Ask = serde_json::from_slice(&row.doc).map_err(unreadable_row("ask", &row.id))?;
        asks.push(json!({ "ask": ask.id, "kind": ask.kind, "tool": ask.tool, "prompt": ask.prompt }));
    }
    Ok(Value::Array(asks))
}
