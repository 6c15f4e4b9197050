//! `qd ps --tree`: shows sessions below the session that started them. Each row has its own cost and the cost of its
//! subtree, so the subtree costs of the roots add up to the total.

use std::collections::{BTreeMap, HashSet};

use qd_protocol::api::Session;
use qd_protocol::{Millis, SessionId};
use serde_json::{Value, json};

use super::VerbContext;
use crate::failure::{CliExitCode, Result};
use crate::refs;
use crate::render::session_cells::{self, ShownIds};
use crate::render::table::TextTable;
use crate::render::text;

/// Shows open sessions as trees, or with `all` also closed ones.
pub(crate) async fn tree(context: &VerbContext, all: bool) -> Result<CliExitCode> {
    let client = context.client().await?;
    // Closed sessions are fetched too, because their cost counts.
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
    let ids = rows.iter().map(|row| row.session.id.to_string()).collect();
    let ids = refs::shown_ids(&context.out, &client, &refs::WATCHED_KINDS, ids).await?;
    let table = table(&rows, &ids, Millis::now());
    context.out.print_data(&table.render(context.out.out_style(), context.out.width()))?;
    Ok(CliExitCode::Success)
}

fn table(rows: &[SessionTreeRow<'_>], ids: &ShownIds, now: Millis) -> TextTable {
    let mut table = TextTable::new(&["SESSION", "AGENT", "STATE", "AGE", "COST", "TREE", "TITLE"]);
    for row in rows {
        let session = row.session;
        table.add_row([
            format!("{}{}", row.branch, ids.shown(&session.id)),
            session.agent.clone(),
            session_cells::describe_state(session, 0, "held"),
            text::format_age(session.created_at, now),
            text::format_dollars(session.usage.cost_usd),
            text::format_dollars(row.tree_cost),
            session_cells::shown_title(session),
        ]);
    }
    table
}

#[derive(Debug)]
struct SessionTreeRow<'a> {
    session: &'a Session,
    depth: usize,
    /// The tree lines before the id.
    branch: String,
    /// Cost of the session and everything below it, in dollars.
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

/// The rows in depth-first order. Without `all`, closed sessions are left out unless an open session is below them.
fn build_rows(sessions: &[Session], all: bool) -> Vec<SessionTreeRow<'_>> {
    let known: HashSet<&SessionId> = sessions.iter().map(|session| &session.id).collect();
    let mut children: BTreeMap<Option<&SessionId>, Vec<&Session>> = BTreeMap::new();
    for session in sessions {
        // A session whose parent was purged becomes a root.
        let parent = session.parent.as_ref().filter(|parent| known.contains(parent));
        children.entry(parent).or_default().push(session);
    }
    let mut rows = Vec::new();
    let roots = children.get(&None).cloned().unwrap_or_default();
    for root in roots {
        add_subtree(root, &children, all, "", "", 0, &mut rows);
    }
    rows
}

/// Adds a session and everything below it. Returns their cost and whether any of them is shown.
fn add_subtree<'a>(
    session: &'a Session,
    children_of: &BTreeMap<Option<&SessionId>, Vec<&'a Session>>,
    all: bool,
    branch: &str,
    indent: &str,
    depth: usize,
    rows: &mut Vec<SessionTreeRow<'a>>,
) -> (f64, bool) {
    let index = rows.len();
    rows.push(SessionTreeRow { session, depth, branch: branch.to_owned(), tree_cost: 0.0 });
    let children = children_of.get(&Some(&session.id)).map_or(&[][..], Vec::as_slice);
    let is_open = |session: &Session| !matches!(session.state, qd_protocol::api::SessionStatus::Closed);
    let mut cost = session.usage.cost_usd;
    let mut shown = all || is_open(session);
    for (i, child) in children.iter().enumerate() {
        let (joint, line) = if i + 1 == children.len() { ("└─ ", "   ") } else { ("├─ ", "│  ") };
        let (child_cost, child_shown) = add_subtree(
            child,
            children_of,
            all,
            &format!("{indent}{joint}"),
            &format!("{indent}{line}"),
            depth + 1,
            rows,
        );
        cost += child_cost;
        shown |= child_shown;
    }
    if shown {
        rows[index].tree_cost = cost;
    } else {
        rows.truncate(index);
    }
    (cost, shown)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::render::view_snapshot::assert_view;

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
    fn sessions_are_below_their_parent_and_costs_add_up_along_the_tree() {
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
            "the cost of a hidden closed session still counts"
        );
    }

    #[test]
    fn a_tree_reads_well() {
        let titled = |title: &str, session: Session| Session { title: Some(title.to_owned()), ..session };
        let sessions = [
            titled("ship the release", session("ses_ar477mby3tane7hf", None, 1.0, "running")),
            titled(
                "write the notes",
                session("ses_b07hx2k1m9d4vq8s", Some("ses_ar477mby3tane7hf"), 0.25, "idle"),
            ),
            session("ses_c99pl3w7n2f5zt6r", Some("ses_b07hx2k1m9d4vq8s"), 0.004, "closed"),
            titled(
                "port the parser to the new tokenizer and keep its names",
                session("ses_d", None, 0.0, "idle"),
            ),
        ];
        let rows = build_rows(&sessions, true);
        assert_view("tree", |style, width| {
            table(&rows, &ShownIds::default(), Millis(600_000)).render(style, width)
        });
    }
}
