//! `qd worktrees`: lists and removes the worktrees of sessions. A worktree with unmerged work is removed only on
//! confirmation: by answering on a terminal, or with `--force`.

use qd_protocol::api::SessionStatus;
use qd_protocol::worktree::{RemovedWorktree, Worktree, WorktreeStatus};

use super::VerbContext;
use super::merge::describe_overlap;
use super::stdin_lines::StdinLines;
use crate::client::DaemonClient;
use crate::failure::{CliExitCode, CliFailure, Result};
use crate::refs;
use crate::render::session_cells::ShownIds;
use crate::render::table::TextTable;
use crate::render::text;
use crate::render::visible_text::show_prose;

const PATH: &str = "/v1/worktrees";

pub(crate) async fn list(context: &VerbContext) -> Result<CliExitCode> {
    let client = context.client().await?;
    let all: Vec<Worktree> = client.list(PATH).await?;
    if context.out.json {
        context.out.print_json(&all)?;
        return Ok(CliExitCode::Success);
    }
    let ids = all.iter().map(|worktree| worktree.session_id.to_string()).collect();
    let ids = refs::shown_ids(&context.out, &client, &refs::WATCHED_KINDS, ids).await?;
    context.out.print_data(&table(&all, &ids).render(context.out.out_style(), context.out.width()))?;
    for worktree in &all {
        if let Some(problem) = &worktree.problem {
            context.out.print_note(&format!("{}: {problem}", worktree.session_id));
        }
        // Each pair is printed once.
        for overlap in worktree.overlaps.iter().filter(|other| other.session_id > worktree.session_id) {
            let (first, second) = (&worktree.session_id, &overlap.session_id);
            context.out.print_note(&format!(
                "{first} and {second} changed the same lines: {}",
                describe_overlap(overlap)
            ));
        }
    }
    Ok(CliExitCode::Success)
}

fn table(all: &[Worktree], ids: &ShownIds) -> TextTable {
    let mut table = TextTable::new(&["SESSION", "STATE", "SIZE", "BRANCH", "TITLE", "PATH"]);
    table.set_min_width(1, usize::MAX);
    table.keep_ends(5);
    for worktree in all {
        let title = match (&worktree.title, worktree.session_state) {
            (Some(title), _) => text::truncate(title, 30),
            (None, None) => "(purged)".to_owned(),
            (None, Some(_)) => "-".to_owned(),
        };
        table.add_row([
            ids.shown(&worktree.session_id),
            describe_state(worktree),
            text::format_size(worktree.size_bytes),
            worktree.branch.clone(),
            title,
            worktree.path.clone(),
        ]);
    }
    table
}

/// The state with the number of changed files or unmerged commits, and whether the session is still open.
fn describe_state(worktree: &Worktree) -> String {
    let name = worktree.state.as_str();
    let mut state = match worktree.state {
        WorktreeStatus::Dirty => format!("{name} {}", worktree.changed_files),
        WorktreeStatus::Ahead => format!("{name} {}", worktree.ahead),
        _ => name.to_owned(),
    };
    if is_open(worktree) {
        state.push_str(", open");
    }
    state
}

fn is_open(worktree: &Worktree) -> bool {
    worktree.session_state.is_some_and(|state| state != SessionStatus::Closed)
}

/// Removes the worktrees of these sessions. All ids are resolved first: if one is wrong, nothing is removed.
pub(crate) async fn rm(context: &VerbContext, ids: &[String], force: bool) -> Result<CliExitCode> {
    let client = context.client().await?;
    let all: Vec<Worktree> = client.list(PATH).await?;
    let mut chosen = Vec::new();
    for id in ids {
        chosen.push(find_worktree(id, &all)?);
    }
    let mut stdin = StdinLines::new();
    let mut removed = Vec::new();
    for worktree in chosen {
        let answer = match remove(&client, worktree, force).await {
            Err(CliFailure::Refused(refusal)) if refusal.error.code == "unmerged_work" => {
                let why = &refusal.error.message;
                if !confirm(context, &mut stdin, why).await {
                    let message = format!(
                        "{why}; to remove it anyway, run `qd worktrees rm --force {}`",
                        worktree.session_id
                    );
                    return Err(CliFailure::Other(anyhow::anyhow!(message)));
                }
                remove(&client, worktree, true).await?
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

/// Removes the worktrees of closed sessions that have no unmerged work.
pub(crate) async fn gc(context: &VerbContext) -> Result<CliExitCode> {
    let client = context.client().await?;
    let all: Vec<Worktree> = client.list(PATH).await?;
    let (mut removed, mut bytes, mut kept) = (Vec::new(), 0, 0);
    for worktree in &all {
        if is_open(worktree) || !worktree.state.is_safe_to_remove() {
            kept += 1;
            continue;
        }
        let answer = match remove(&client, worktree, false).await {
            // A worktree that cannot be removed, or has changed since it was listed, does not stop the others.
            Err(CliFailure::Refused(refusal)) => {
                context.out.print_note(&format!("kept {}: {}", worktree.session_id, refusal.error.message));
                kept += 1;
                continue;
            }
            answer => answer?,
        };
        print_removed(context, &answer)?;
        bytes += worktree.size_bytes;
        removed.push(answer);
    }
    if context.out.json {
        context.out.print_json(&removed)?;
    } else {
        let count = removed.len();
        context.out.print_note(&format!(
            "removed {count} ({}), kept {kept} that are open or have unmerged work",
            text::format_size(bytes)
        ));
    }
    Ok(CliExitCode::Success)
}

async fn remove(client: &DaemonClient, worktree: &Worktree, force: bool) -> Result<RemovedWorktree> {
    let query = if force { "?force=true" } else { "" };
    let answer = client.delete(&format!("{PATH}/{}{query}", worktree.session_id)).await?;
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
            .print_note(&format!("kept the branch {branch}: it has commits that are on no other branch"));
    }
    Ok(())
}

/// Asks for confirmation on a terminal. False without one.
async fn confirm(context: &VerbContext, stdin: &mut StdinLines, why: &str) -> bool {
    if !stdin.tty || !context.out.err_tty || context.out.json {
        return false;
    }
    context.out.print_stderr(&format!("{}; remove it anyway? [y/N] ", show_prose(why)));
    let line = stdin.next_line().await;
    context.out.line_was_typed();
    line.is_some_and(|line| matches!(line.trim(), "y" | "Y" | "yes"))
}

/// Finds the worktree of the session with this id, id prefix or title.
fn find_worktree<'a>(text: &str, all: &'a [Worktree]) -> Result<&'a Worktree> {
    let exact = |worktree: &&Worktree| worktree.session_id.as_str() == text;
    if let Some(worktree) = all.iter().find(exact) {
        return Ok(worktree);
    }
    let matches = |worktree: &&Worktree| {
        worktree.title.as_deref() == Some(text)
            || (!text.is_empty() && worktree.session_id.as_str().starts_with(text))
    };
    let mut found = all.iter().filter(matches);
    match (found.next(), found.next()) {
        (Some(worktree), None) => Ok(worktree),
        (None, _) => {
            Err(CliFailure::NotFound(format!("no session {text} has a worktree; see `qd worktrees`")))
        }
        (Some(first), Some(second)) => Err(CliFailure::Usage(format!(
            "{text} matches {} and {}; use more of the id",
            first.session_id, second.session_id
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::render::view_snapshot::assert_view;
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
            problem: None,
            changed_files: 3,
            ahead: 0,
            added: None,
            removed: None,
            size_bytes: 2048,
            overlaps: Vec::new(),
        }
    }

    #[test]
    fn a_worktree_is_found_by_id_prefix_or_title() {
        let all = [worktree("ses_ab", None), worktree("ses_abc", Some("nightly"))];
        assert_eq!(find_worktree("ses_ab", &all).unwrap().session_id.as_str(), "ses_ab");
        assert_eq!(find_worktree("nightly", &all).unwrap().session_id.as_str(), "ses_abc");
        assert_eq!(find_worktree("ses_a", &all).unwrap_err().exit_code(), CliExitCode::Usage);
        assert_eq!(find_worktree("x", &all).unwrap_err().exit_code(), CliExitCode::NotFound);
        assert_eq!(find_worktree("", &all).unwrap_err().exit_code(), CliExitCode::NotFound);
    }

    #[test]
    fn a_state_has_a_count_and_whether_its_session_is_open() {
        let dirty = worktree("ses_ab", None);
        assert_eq!(describe_state(&dirty), "dirty 3");
        let open =
            Worktree { session_state: Some(SessionStatus::Idle), state: WorktreeStatus::Merged, ..dirty };
        assert_eq!(describe_state(&open), "merged, open");
    }

    #[test]
    fn worktrees_read_well() {
        let open = Worktree {
            session_state: Some(SessionStatus::Running),
            title: Some("port the parser to the new tokenizer".to_owned()),
            path: "/home/ann/.local/share/quarterdeck/worktrees/ses_ar477mby3tane7hf".to_owned(),
            ..worktree("ses_ar477mby3tane7hf", None)
        };
        let merged = Worktree {
            session_state: Some(SessionStatus::Closed),
            title: Some("fix login".to_owned()),
            state: WorktreeStatus::Merged,
            path: "/home/ann/.local/share/quarterdeck/worktrees/ses_b07hx2k1m9d4vq8s".to_owned(),
            ..worktree("ses_b07hx2k1m9d4vq8s", None)
        };
        let purged = Worktree {
            state: WorktreeStatus::Ahead,
            ahead: 2,
            path: "/home/ann/.local/share/quarterdeck/worktrees/ses_c99pl3w7n2f5zt6r".to_owned(),
            ..worktree("ses_c99pl3w7n2f5zt6r", None)
        };
        let all = [open, merged, purged];
        assert_view("worktrees", |style, width| table(&all, &ShownIds::default()).render(style, width));
    }
}
