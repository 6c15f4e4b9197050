//! `qd ps --tree`: each session below the one that started it. What a row costs is its own and all below it, so that every
//! dollar stands once in each row above it and the roots add up to the whole.

use std::collections::{BTreeMap, HashSet};

use qd_protocol::api::Session;
use qd_protocol::{Millis, SessionId};
use serde_json::{Value, json};

use super::VerbContext;
use super::ps::{self, TITLE_CHARS};
use crate::failure::{CliExitCode, Result};
use crate::render::table::TextTable;
use crate::render::text;

/// Shows the sessions as trees; the closed ones too with `all`.
pub(crate) async fn tree(context: &VerbContext, all: bool) -> Result<CliExitCode> {
    let client = context.client().await?;
    // Also those that are not shown: what they cost was spent.
    let sessions: Vec<Session> = client.list("/v1/sessions").await?;
    let rows = build_rows(&sessions, all);
    if context.out.json {
        let shown: Vec<Value> = rows
            .iter()
            .map(SessionTreeRow::json)
            .collect::<serde_json::Result<_>>()
            .map_err(anyhow::Error::from)?;
        context.out.print_json(&shown)?;
        return Ok(CliExitCode::Success);
    }
    let mut table = TextTable::new(&["SESSION", "AGENT", "STATE", "AGE", "COST", "TREE", "TITLE"]);
    for row in &rows {
        let session = row.session;
        table.add_row([
            format!("{}{}", row.branch, session.id),
            session.agent.clone(),
            ps::describe_state(session, 0, "held"),
            text::format_age(session.created_at, Millis::now()),
            text::format_dollars(session.usage.cost_usd),
            text::format_dollars(row.tree_cost),
            session
                .title
                .as_deref()
                .map_or_else(|| "-".to_owned(), |title| text::truncate(title, TITLE_CHARS)),
        ]);
    }
    context.out.print_data(&table.render(context.out.out_style(), context.out.width()))?;
    Ok(CliExitCode::Success)
}

/// One session in its place.
#[derive(Debug)]
struct SessionTreeRow<'a> {
    session: &'a Session,
    depth: usize,
    /// The lines that lead to it.
    branch: String,
    /// What it and all below it cost.
    tree_cost: f64,
}

impl SessionTreeRow<'_> {
    fn json(&self) -> serde_json::Result<Value> {
        let mut shown = serde_json::to_value(self.session)?;
        shown["depth"] = json!(self.depth);
        shown["tree_cost_usd"] = json!(self.tree_cost);
        Ok(shown)
    }
}

/// The rows, each session right after the one above it and its elder siblings with all below them. A closed session is
/// left out unless `all`, but not if something open is below it.
fn build_rows(sessions: &[Session], all: bool) -> Vec<SessionTreeRow<'_>> {
    let known: HashSet<&SessionId> = sessions.iter().map(|session| &session.id).collect();
    let mut below: BTreeMap<Option<&SessionId>, Vec<&Session>> = BTreeMap::new();
    for session in sessions {
        // One whose parent was purged stands for itself.
        let parent = session.parent.as_ref().filter(|parent| known.contains(parent));
        below.entry(parent).or_default().push(session);
    }
    let mut rows = Vec::new();
    let roots = below.get(&None).cloned().unwrap_or_default();
    for root in roots {
        add_subtree(root, &below, all, "", "", 0, &mut rows);
    }
    rows
}

/// Adds a session and all below it; gives what they cost and whether any is shown.
fn add_subtree<'a>(
    session: &'a Session,
    below: &BTreeMap<Option<&SessionId>, Vec<&'a Session>>,
    all: bool,
    branch: &str,
    trunk: &str,
    depth: usize,
    rows: &mut Vec<SessionTreeRow<'a>>,
) -> (f64, bool) {
    let at = rows.len();
    rows.push(SessionTreeRow { session, depth, branch: branch.to_owned(), tree_cost: 0.0 });
    let children = below.get(&Some(&session.id)).map_or(&[][..], Vec::as_slice);
    let is_open = |session: &Session| !matches!(session.state, qd_protocol::api::SessionStatus::Closed);
    let mut cost = session.usage.cost_usd;
    let mut shown = all || is_open(session);
    for (place, child) in children.iter().enumerate() {
        let (joint, line) =
            if place + 1 == children.len() { ("└─ ", "   ") } else { ("├─ ", "│  ") };
        let (spent, child_shown) = add_subtree(
            child,
            below,
            all,
            &format!("{trunk}{joint}"),
            &format!("{trunk}{line}"),
            depth + 1,
            rows,
        );
        cost += spent;
        shown |= child_shown;
    }
    if shown {
        rows[at].tree_cost = cost;
    } else {
        rows.truncate(at);
    }
    (cost, shown)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn session(id: &str, parent: Option<&str>, cost: f64, state: &str) -> Session {
        serde_json::from_value(json!({
            "id": id, "workspace_id": "ws_1", "agent": "echo", "title": null, "state": state, "busy": false,
            "parent": parent, "model": null, "system_prompt": null, "policy": "ask", "queued": 0,
            "usage": {"input_tokens": 1, "output_tokens": 2, "cost_usd": cost}, "agent_session_id": null,
            "worktree": null, "budget_usd": null, "max_turns": null, "run_timeout_s": null, "cancel_grace_s": null,
            "restarts": null, "restart_window_s": null, "env": [], "closing": false,
            "created_at": "1970-01-01T00:00:00.000Z", "updated_at": "1970-01-01T00:00:00.000Z"
        }))
        .unwrap()
    }

    #[test]
    fn every_session_stands_below_its_own_and_every_dollar_counts_once_in_each_above() {
        let sessions = [
            session("ses_a", None, 1.0, "idle"),
            session("ses_b", Some("ses_a"), 2.0, "idle"),
            session("ses_x", None, 16.0, "idle"),
            session("ses_c", Some("ses_b"), 4.0, "closed"),
            session("ses_d", Some("ses_a"), 8.0, "idle"),
            session("ses_e", Some("ses_gone"), 32.0, "idle"),
        ];
        let shown: Vec<String> = build_rows(&sessions, true)
            .iter()
            .map(|row| format!("{}{} {}", row.branch, row.session.id, row.tree_cost))
            .collect();
        assert_eq!(shown, ["ses_a 15", "├─ ses_b 6", "│  └─ ses_c 4", "└─ ses_d 8", "ses_x 16", "ses_e 32"]);
        let open: Vec<String> = build_rows(&sessions, false)
            .iter()
            .map(|row| format!("{} {}", row.session.id, row.tree_cost))
            .collect();
        assert_eq!(
            open,
            ["ses_a 15", "ses_b 6", "ses_d 8", "ses_x 16", "ses_e 32"],
            "what a closed one cost was spent"
        );
    }
}
