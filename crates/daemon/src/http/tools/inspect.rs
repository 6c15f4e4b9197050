//! What the sessions within reach are doing and what became of them. Nothing is changed here.

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

/// What may end a wait.
const WAIT_END_KINDS: [&str; 2] = ["run.finished", "session.closed"];
/// Sessions that a list shows.
const LISTED_MAX: usize = 200;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct WaitToolArguments {
    sessions: Vec<String>,
    #[serde(default)]
    timeout_s: Option<f64>,
}

/// Waits until these sessions have nothing to do, or the time is over, and shows them.
pub(super) async fn wait(
    daemon: &Arc<Daemon>,
    caller: &ToolCaller,
    wanted: WaitToolArguments,
) -> Result<Map<String, Value>, ApiError> {
    let WaitToolArguments { sessions, timeout_s } = wanted;
    if !(1..=WAITED_FOR_MAX).contains(&sessions.len()) {
        return Err(invalid_value(format!("`sessions` names 1 to {WAITED_FOR_MAX} sessions")));
    }
    let seconds = poll_timeout(timeout_s)?;
    let mut rows = Vec::with_capacity(sessions.len());
    for reference in &sessions {
        rows.push(caller.find_session(daemon, reference, SessionReach::Descendants).await?);
    }
    let topic = match &rows[..] {
        [one] => EventTopic::Session(one.key),
        [first, ..] if rows.iter().all(|row| row.workspace == first.workspace) => {
            EventTopic::Workspace(first.workspace)
        }
        _ => EventTopic::All,
    };
    let kinds = WAIT_END_KINDS.map(str::to_owned);
    let mut news = daemon.journal.subscribe(EventFilter { topic, kinds: Some(Arc::from(kinds)) }, None);
    let deadline = Instant::now() + seconds;
    let mut stop = daemon.stop_signal();
    // Subscribed first, then looked: no end can fall between the two.
    let finished = loop {
        for row in &mut rows {
            // One that was purged meanwhile has nothing to do either.
            match daemon.journal.session(&row.id).await.map_err(read_failed)? {
                Some(now) => *row = now,
                None => row.live = false,
            }
        }
        if rows.iter().all(|row| !row.live) {
            break true;
        }
        tokio::select! {
            biased;
            _ = stop.wait_for(|stop| *stop) => return Err(stopping_error()),
            heard = news.next() => drop(heard.map_err(read_failed)?),
            () = tokio::time::sleep_until(deadline) => break false,
        }
    };
    let mut shown = Vec::with_capacity(rows.len());
    for row in &rows {
        shown.push(session_summary(daemon, row).await?);
    }
    Ok(json_object(json!({ "finished": finished, "sessions": shown })))
}

/// How long one request may wait.
pub(super) fn poll_timeout(timeout_s: Option<f64>) -> Result<Duration, ApiError> {
    let most = TOOL_POLL_S as f64;
    let seconds = timeout_s.unwrap_or(0.0);
    if !(0.0..=most).contains(&seconds) {
        return Err(invalid_value(format!(
            "one request waits from 0 to {most} seconds: `timeout_s`; ask again for more"
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

/// Shows one session; the caller's own unless one is named.
pub(super) async fn status(
    daemon: &Arc<Daemon>,
    caller: &ToolCaller,
    wanted: StatusToolArguments,
) -> Result<Map<String, Value>, ApiError> {
    let row = match (&wanted.session, caller) {
        (Some(reference), _) => {
            caller.find_session(daemon, reference, SessionReach::OwnAndDescendants).await?
        }
        (None, ToolCaller::Session(own)) => {
            caller.find_session(daemon, own.id.as_str(), SessionReach::OwnAndDescendants).await?
        }
        (None, ToolCaller::User) => {
            let open = caller.reachable(daemon, usize::MAX).await?;
            let busy = open.iter().filter(|row| row.live).count();
            return Ok(json_object(
                json!({ "open": open.len(), "busy": busy, "halted": daemon.is_halted() }),
            ));
        }
    };
    let mut shown = session_summary(daemon, &row).await?;
    let line = daemon.journal.lineage(row.key).await.map_err(read_failed)?;
    let tree = daemon.journal.tree_cost(row.key).await.map_err(read_failed)?;
    shown["tree_cost_usd"] = json!(tree);
    shown["budget_left_usd"] = json!(daemon.budget_left(&[row.key]).await);
    shown["depth"] = json!({ "now": line.len(), "most": DEPTH_MAX });
    let below = daemon.journal.tree_size(row.key).await.map_err(read_failed)?;
    shown["open_below"] = json!(below.saturating_sub(usize::from(row.closed_at.is_none())));
    shown["children_max"] = json!(CHILDREN_MAX);
    shown["asks"] = pending_asks(daemon, &row).await?;
    Ok(json_object(shown))
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
        ToolCaller::User => None,
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
    let mut shown = Vec::new();
    for row in caller.reachable(daemon, LISTED_MAX).await? {
        let session = sessions::session_view(daemon, &row)?;
        shown.push(json!({
            "session": session.id, "title": session.title, "agent": session.agent, "state": session.state,
            "busy": session.busy, "parent": session.parent, "cost_usd": session.usage.cost_usd,
        }));
    }
    Ok(json_object(json!({ "agents": agents, "sessions": shown })))
}

/// A session and how its last run stands or ended.
async fn session_summary(daemon: &Daemon, row: &SessionRow) -> Result<Value, ApiError> {
    let session = sessions::session_view(daemon, row)?;
    let mut shown = json!({
        "session": session.id, "title": session.title, "agent": session.agent, "state": session.state,
        "busy": session.busy, "parent": session.parent, "queued": session.queued,
        "cost_usd": session.usage.cost_usd,
    });
    let of = RunFilter { session: Some(row.key), ..RunFilter::default() };
    let runs = daemon.journal.runs(of, None::<&RunId>, usize::MAX).await.map_err(read_failed)?;
    let last = match row.live {
        // Of those that wait, the first is the one that is worked on.
        true => runs.iter().find(|run| !run.finished),
        false => runs.last(),
    };
    if let Some(last) = last {
        let run = load_full_run(daemon, last).await?;
        shown["run"] = json!({ "run": run.id, "state": run.state, "finish_reason": run.finish_reason });
        if let Some(text) = run.text.filter(|_| last.finished) {
            let kept = escaped_head(&text, TOOL_TEXT_MAX);
            shown["finish_reason"] = json!(run.finish_reason);
            shown["text"] = json!(kept);
            shown["truncated"] = json!(kept.len() < text.len());
        }
        if let Some(error) = run.error {
            shown["error"] = json!({ "code": error.code, "message": error.message });
        }
    }
    if row.live {
        shown["waiting_for_people"] =
            json!(!pending_asks(daemon, row).await?.as_array().is_none_or(Vec::is_empty));
    }
    Ok(shown)
}

/// What a session asks of people.
async fn pending_asks(daemon: &Daemon, row: &SessionRow) -> Result<Value, ApiError> {
    let of = AskFilter { session: Some(row.key), pending_only: true, ..AskFilter::default() };
    let mut shown = Vec::new();
    for row in daemon.journal.asks(of, None, PAGE_MAX).await.map_err(read_failed)? {
        let ask: Ask = serde_json::from_slice(&row.doc).map_err(unreadable_row("ask", &row.id))?;
        shown.push(json!({ "ask": ask.id, "kind": ask.kind, "tool": ask.tool, "prompt": ask.prompt }));
    }
    Ok(Value::Array(shown))
}
