//! `qd worktrees`: those that there are, and their end. One that holds work that is not merged goes only if somebody says
//! so of it: on a terminal by answering, elsewhere by `--force`.

use qd_protocol::api::SessionStatus;
use qd_protocol::worktree::{RemovedWorktree, Worktree, WorktreeStatus};

use super::VerbContext;
use super::merge::describe_overlap;
use super::stdin_lines::StdinLines;
use crate::client::DaemonClient;
use crate::failure::{CliExitCode, CliFailure, Result};
use crate::render::table::TextTable;
use crate::render::text;

const PATH: &str = "/v1/worktrees";

/// Lists them.
pub(crate) async fn list(context: &VerbContext) -> Result<CliExitCode> {
    let client = context.client().await?;
    let all: Vec<Worktree> = client.list(PATH).await?;
    if context.out.json {
        context.out.print_json(&all)?;
        return Ok(CliExitCode::Success);
    }
    context.out.print_data(&table(&all).render(context.out.out_style(), context.out.width()))?;
    for one in &all {
        // Each pair once.
        for overlap in one.overlaps.iter().filter(|other| other.session_id > one.session_id) {
            let (mine, theirs) = (&one.session_id, &overlap.session_id);
            context.out.print_note(&format!(
                "{mine} and {theirs} changed the same lines: {}",
                describe_overlap(overlap)
            ));
        }
    }
    Ok(CliExitCode::Success)
}

fn table(all: &[Worktree]) -> TextTable {
    let mut table = TextTable::new(&["SESSION", "STATE", "SIZE", "BRANCH", "TITLE", "PATH"]);
    for one in all {
        let title = match (&one.title, one.session_state) {
            (Some(title), _) => text::truncate(title, 30),
            (None, None) => "(purged)".to_owned(),
            (None, Some(_)) => "-".to_owned(),
        };
        table.add_row([
            one.session_id.to_string(),
            describe_state(one),
            text::format_size(one.size_bytes),
            one.branch.clone(),
            title,
            one.path.clone(),
        ]);
    }
    table
}

fn describe_state(one: &Worktree) -> String {
    let word = one.state.as_str();
    let mut state = match one.state {
        WorktreeStatus::Dirty => format!("{word} {}", one.changed_files),
        WorktreeStatus::Ahead => format!("{word} {}", one.ahead),
        _ => word.to_owned(),
    };
    if is_open(one) {
        state.push_str(", open");
    }
    state
}

fn is_open(one: &Worktree) -> bool {
    one.session_state.is_some_and(|state| state != SessionStatus::Closed)
}

/// Removes some. All are looked up first: a wrong one among them removes none.
pub(crate) async fn rm(context: &VerbContext, ids: &[String], force: bool) -> Result<CliExitCode> {
    let client = context.client().await?;
    let all: Vec<Worktree> = client.list(PATH).await?;
    let mut chosen = Vec::new();
    for id in ids {
        chosen.push(find_worktree(id, &all)?);
    }
    let mut typed = StdinLines::new();
    let mut removed = Vec::new();
    for one in chosen {
        let answer = match remove(&client, one, force).await {
            Err(CliFailure::Refused(refusal)) if refusal.error.code == "unmerged_work" => {
                let why = &refusal.error.message;
                if !confirm(context, &mut typed, why).await {
                    let how = format!(
                        "{why}; to remove it all the same: qd worktrees rm --force {}",
                        one.session_id
                    );
                    return Err(CliFailure::Other(anyhow::anyhow!(how)));
                }
                remove(&client, one, true).await?
            }
            answer => answer?,
        };
        print_removed(context, &answer)?;
        removed.push(answer);
    }
    if context.out.json {
        context.out.print_json(&removed)?;
    }
    Ok(CliExitCode::Success)
}

/// Removes all that hold nothing and whose sessions are closed.
pub(crate) async fn gc(context: &VerbContext) -> Result<CliExitCode> {
    let client = context.client().await?;
    let all: Vec<Worktree> = client.list(PATH).await?;
    let (mut removed, mut bytes, mut kept) = (Vec::new(), 0, 0);
    for one in &all {
        if is_open(one) || !one.state.is_safe_to_remove() {
            kept += 1;
            continue;
        }
        let answer = match remove(&client, one, false).await {
            // One that stands in the way, or has changed since it was listed, holds up no other.
            Err(CliFailure::Refused(refusal)) => {
                context.out.print_note(&format!("{} stays: {}", one.session_id, refusal.error.message));
                kept += 1;
                continue;
            }
            answer => answer?,
        };
        print_removed(context, &answer)?;
        bytes += one.size_bytes;
        removed.push(answer);
    }
    if context.out.json {
        context.out.print_json(&removed)?;
    } else {
        let count = removed.len();
        context.out.print_note(&format!(
            "removed {count} ({}), kept {kept} that are open or hold work that is not merged",
            text::format_size(bytes)
        ));
    }
    Ok(CliExitCode::Success)
}

async fn remove(client: &DaemonClient, one: &Worktree, force: bool) -> Result<RemovedWorktree> {
    let query = if force { "?force=true" } else { "" };
    let answer = client.delete(&format!("{PATH}/{}{query}", one.session_id)).await?;
    Ok(serde_json::from_value(answer).map_err(anyhow::Error::from)?)
}

fn print_removed(context: &VerbContext, removed: &RemovedWorktree) -> Result<()> {
    if context.out.json {
        return Ok(());
    }
    context.out.print_line(removed.session_id.as_str())?;
    if let Some(branch) = &removed.kept_branch {
        context
            .out
            .print_note(&format!("the branch {branch} stays: it has commits that no other branch has"));
    }
    Ok(())
}

/// Asks a person, if there is one.
async fn confirm(context: &VerbContext, typed: &mut StdinLines, why: &str) -> bool {
    if !typed.tty || !context.out.err_tty || context.out.json {
        return false;
    }
    context.out.print_stderr(&format!("{}; remove it all the same? [y/N] ", text::strip_controls(why)));
    let line = typed.next_line().await;
    context.out.line_was_typed();
    line.is_some_and(|line| matches!(line.trim(), "y" | "Y" | "yes"))
}

/// The worktree that an id, the beginning of one, or a title means.
fn find_worktree<'a>(text: &str, all: &'a [Worktree]) -> Result<&'a Worktree> {
    let exact = |one: &&Worktree| one.session_id.as_str() == text;
    if let Some(one) = all.iter().find(exact) {
        return Ok(one);
    }
    let meant = |one: &&Worktree| {
        one.title.as_deref() == Some(text) || (!text.is_empty() && one.session_id.as_str().starts_with(text))
    };
    let mut found = all.iter().filter(meant);
    match (found.next(), found.next()) {
        (Some(one), None) => Ok(one),
        (None, _) => {
            Err(CliFailure::NotFound(format!("no worktree of a session {text}; `qd worktrees` lists them")))
        }
        (Some(one), Some(other)) => Err(CliFailure::Usage(format!(
            "{text} may mean {} or {}; say more of it",
            one.session_id, other.session_id
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use qd_protocol::SessionId;

    fn worktree(id: &str, title: Option<&str>) -> Worktree {
        Worktree {
            session_id: SessionId::parse(id).unwrap(),
            workspace_id: None,
            title: title.map(str::to_owned),
            session_state: None,
            path: format!("/w/{id}"),
            repository: None,
            branch: format!("qd/{id}"),
            base: None,
            target: None,
            state: WorktreeStatus::Dirty,
            changed_files: 3,
            ahead: 0,
            size_bytes: 2048,
            overlaps: Vec::new(),
        }
    }

    #[test]
    fn a_worktree_is_meant_by_id_beginning_or_title() {
        let all = [worktree("ses_ab", None), worktree("ses_abc", Some("nightly"))];
        assert_eq!(find_worktree("ses_ab", &all).unwrap().session_id.as_str(), "ses_ab");
        assert_eq!(find_worktree("nightly", &all).unwrap().session_id.as_str(), "ses_abc");
        assert_eq!(find_worktree("ses_a", &all).unwrap_err().exit_code(), CliExitCode::Usage);
        assert_eq!(find_worktree("x", &all).unwrap_err().exit_code(), CliExitCode::NotFound);
        assert_eq!(find_worktree("", &all).unwrap_err().exit_code(), CliExitCode::NotFound);
    }

    #[test]
    fn a_state_says_how_much_and_whether_its_session_is_open() {
        let one = worktree("ses_ab", None);
        assert_eq!(describe_state(&one), "dirty 3");
        let open =
            Worktree { session_state: Some(SessionStatus::Idle), state: WorktreeStatus::Merged, ..one };
        assert_eq!(describe_state(&open), "merged, open");
    }
}
