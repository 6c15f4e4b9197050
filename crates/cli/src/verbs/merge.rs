//! `qd merge`: merges a session's worktree into a branch. Sessions that changed the same lines are named first. If
//! there are conflicts, they are shown and nothing is changed.

use qd_protocol::worktree::{MergeConflict, MergeRequest, MergeResult, Overlap, Worktree};

use super::{VerbContext, diff};
use crate::client::DaemonClient;
use crate::failure::{CliExitCode, CliFailure, Result};
use crate::refs::{self, ResolvedSession};
use crate::render::visible_text::{show_content, show_on_one_line};

/// Line ranges named per file; further ones are abbreviated to `…`.
const MAX_LINE_RANGES: usize = 5;

pub(crate) async fn merge(context: &VerbContext, id: &str, request: &MergeRequest) -> Result<CliExitCode> {
    let client = context.client().await?;
    let session = refs::resolve_session(&client, id).await?;
    let own = match context.out.json {
        true => None,
        false => warn_of_overlaps(context, &client, &session).await?,
    };
    let merged: MergeResult = match client.post(&format!("{}/merge", session.path()), request).await {
        Ok(merged) => merged,
        Err(CliFailure::Refused(refusal)) if refusal.error.code == "merge_conflict" => {
            let conflicts = refusal.error.details.get("conflicts").cloned().unwrap_or_default();
            let conflicts: Vec<MergeConflict> = serde_json::from_value(conflicts).unwrap_or_default();
            if !context.out.json {
                print_conflicts(context, &conflicts);
                let base = request.into.as_deref().or(own.as_ref().and_then(|own| own.target.as_deref()));
                let base = base.unwrap_or("the branch that it started from");
                context.out.print_note(&format!(
                    "nothing was changed. Let the agent resolve it, then merge again:\n    \
                     qd send {id} 'merge {base} into your branch and resolve the conflicts'\n    qd merge {id}"
                ));
            }
            return Err(CliFailure::Refused(refusal));
        }
        Err(failure) => return Err(failure),
    };
    if context.out.json {
        context.out.print_json(&merged)?;
    } else {
        context.out.print_data(&describe_merge(&merged))?;
    }
    Ok(CliExitCode::Success)
}

/// Prints which other sessions changed the same lines, before anything is merged. Returns the worktree of this one.
async fn warn_of_overlaps(
    context: &VerbContext,
    client: &DaemonClient,
    session: &ResolvedSession,
) -> Result<Option<Worktree>> {
    let all: Vec<Worktree> = client.list("/v1/worktrees").await?;
    let own = all.into_iter().find(|worktree| worktree.session_id == session.id);
    for overlap in own.iter().flat_map(|own| &own.overlaps) {
        context.out.print_note(&format!(
            "{} changed the same lines: {}",
            overlap.session_id,
            describe_overlap(overlap)
        ));
    }
    Ok(own)
}

/// The files and lines of an overlap, on one line.
pub(super) fn describe_overlap(overlap: &Overlap) -> String {
    let describe_file = |file: &qd_protocol::worktree::OverlapFile| {
        let lines = file.lines.iter().take(MAX_LINE_RANGES).map(|lines| match lines.first == lines.last {
            true => format!("{}", lines.first),
            false => format!("{}-{}", lines.first, lines.last),
        });
        let lines: Vec<String> = lines.collect();
        let more = if file.lines.len() > MAX_LINE_RANGES { ", …" } else { "" };
        match lines.is_empty() {
            true => file.path.clone(),
            false => format!("{} {}{more}", file.path, lines.join(", ")),
        }
    };
    show_on_one_line(&overlap.files.iter().map(describe_file).collect::<Vec<_>>().join("; "))
}

fn print_conflicts(context: &VerbContext, conflicts: &[MergeConflict]) {
    let style = context.out.err_style();
    for MergeConflict { path, what, hunks } in conflicts {
        context.out.print_stderr(&format!("{} ({what})\n", style.bold(&show_on_one_line(path))));
        context.out.print_stderr(&diff::colour_patch(&show_content(hunks), style));
    }
}

fn describe_merge(merged: &MergeResult) -> String {
    let short = |commit: &str| commit.get(..12).unwrap_or(commit).to_owned();
    let mut out = String::new();
    if let Some(commit) = &merged.committed {
        out.push_str(&format!("committed the uncommitted changes: {}\n", short(commit)));
    }
    if !merged.moved {
        out.push_str(&format!("{} already contains everything\n", merged.into));
        return out;
    }
    out.push_str(&format!("merged into {}: {}\n", merged.into, short(&merged.commit)));
    if let Some(path) = &merged.checkout {
        out.push_str(&format!("updated the checkout at {path}\n"));
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::render::view_snapshot::assert_view;
    use qd_protocol::SessionId;
    use qd_protocol::worktree::{LineRange, OverlapFile};

    #[test]
    fn overlaps_are_named_by_file_and_line() {
        let range = |first, last| LineRange { first, last };
        let files = vec![
            OverlapFile { path: "a.rs".to_owned(), lines: vec![range(2, 2), range(7, 9)] },
            OverlapFile { path: "logo.png".to_owned(), lines: Vec::new() },
        ];
        let overlap = Overlap { session_id: SessionId::parse("ses_1").unwrap(), files };
        assert_eq!(describe_overlap(&overlap), "a.rs 2, 7-9; logo.png");
    }

    #[test]
    fn a_merge_is_described_in_order() {
        let merged = MergeResult {
            into: "main".to_owned(),
            commit: "0123456789abcdef".to_owned(),
            moved: true,
            committed: Some("fedcba9876543210".to_owned()),
            checkout: Some("/work".to_owned()),
            overlaps: Vec::new(),
        };
        assert_eq!(
            describe_merge(&merged),
            "committed the uncommitted changes: fedcba987654\nmerged into main: 0123456789ab\n\
             updated the checkout at /work\n"
        );
        assert_eq!(
            describe_merge(&MergeResult { moved: false, committed: None, ..merged }),
            "main already contains everything\n"
        );
    }

    #[test]
    fn a_merge_reads_well() {
        let merged = MergeResult {
            into: "main".to_owned(),
            commit: "0123456789abcdef".to_owned(),
            moved: true,
            committed: Some("fedcba9876543210".to_owned()),
            checkout: Some("/home/ann/code/shop".to_owned()),
            overlaps: Vec::new(),
        };
        assert_view("merge", |_, _| describe_merge(&merged));
    }
}
