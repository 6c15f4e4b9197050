//! `qd merge`: the work of a session into a branch. Whoever else changed the same lines is named before; what conflicts is
//! shown, and then nothing has changed.

use qd_protocol::worktree::{Conflict, MergeRequest, Merged, Overlap, Worktree};

use super::{Context, diff};
use crate::client::Client;
use crate::failure::{Exit, Failure, Result};
use crate::refs::{self, SessionRef};
use crate::render::text;

/// Places of one file that are named; more of them say no more.
const PLACES: usize = 5;

/// Merges.
pub(crate) async fn merge(context: &Context, id: &str, into: Option<String>, squash: bool) -> Result<Exit> {
    let client = context.client().await?;
    let session = refs::session(&client, id).await?;
    if !context.out.json {
        warn(context, &client, &session).await?;
    }
    let request = MergeRequest { into, squash };
    let merged: Merged = match client.post(&format!("{}/merge", session.path()), &request).await {
        Ok(merged) => merged,
        Err(Failure::Refused(refusal)) if refusal.error.code == "merge_conflict" => {
            let conflicts = refusal.error.details.get("conflicts").cloned().unwrap_or_default();
            let conflicts: Vec<Conflict> = serde_json::from_value(conflicts).unwrap_or_default();
            if !context.out.json {
                show(context, &conflicts);
            }
            return Err(Failure::Refused(refusal));
        }
        Err(failure) => return Err(failure),
    };
    if context.out.json {
        context.out.value(&merged)?;
    } else {
        context.out.data(&told(&merged))?;
    }
    Ok(Exit::Well)
}

/// Names who else changed the same lines, before anything is merged.
async fn warn(context: &Context, client: &Client, session: &SessionRef) -> Result<()> {
    let all: Vec<Worktree> = client.list("/v1/worktrees").await?;
    let own = all.iter().find(|one| one.session_id == session.id);
    for overlap in own.iter().flat_map(|own| &own.overlaps) {
        context.out.note(&format!("{} changed the same lines: {}", overlap.session_id, places(overlap)));
    }
    Ok(())
}

/// Where two changed the same, on one line.
pub(super) fn places(overlap: &Overlap) -> String {
    let of = |file: &qd_protocol::worktree::OverlapFile| {
        let lines = file.lines.iter().take(PLACES).map(|lines| match lines.first == lines.last {
            true => format!("{}", lines.first),
            false => format!("{}-{}", lines.first, lines.last),
        });
        let lines: Vec<String> = lines.collect();
        let more = if file.lines.len() > PLACES { ", …" } else { "" };
        match lines.is_empty() {
            true => file.path.clone(),
            false => format!("{} {}{more}", file.path, lines.join(", ")),
        }
    };
    text::clean(&overlap.files.iter().map(of).collect::<Vec<_>>().join("; "))
}

fn show(context: &Context, conflicts: &[Conflict]) {
    let style = context.out.err_style();
    for Conflict { path, what, hunks } in conflicts {
        context.out.aside(&format!("{} ({what})\n", style.bold(&text::clean(path))));
        context.out.aside(&diff::coloured(&text::clean(hunks), style));
    }
}

fn told(merged: &Merged) -> String {
    let short = |commit: &str| commit.get(..12).unwrap_or(commit).to_owned();
    let mut out = String::new();
    if let Some(commit) = &merged.committed {
        out.push_str(&format!("committed what was not: {}\n", short(commit)));
    }
    if !merged.moved {
        out.push_str(&format!("{} has all of it already\n", merged.into));
        return out;
    }
    out.push_str(&format!("merged into {}: {}\n", merged.into, short(&merged.commit)));
    if let Some(path) = &merged.checkout {
        out.push_str(&format!("moved the checkout at {path} along\n"));
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use qd_protocol::SessionId;
    use qd_protocol::worktree::{LineRange, OverlapFile};

    #[test]
    fn places_are_named_by_file_and_line() {
        let range = |first, last| LineRange { first, last };
        let files = vec![
            OverlapFile { path: "a.rs".to_owned(), lines: vec![range(2, 2), range(7, 9)] },
            OverlapFile { path: "logo.png".to_owned(), lines: Vec::new() },
        ];
        let overlap = Overlap { session_id: SessionId::parse("ses_1").unwrap(), files };
        assert_eq!(places(&overlap), "a.rs 2, 7-9; logo.png");
    }

    #[test]
    fn what_was_done_is_told_in_order() {
        let merged = Merged {
            into: "main".to_owned(),
            commit: "0123456789abcdef".to_owned(),
            moved: true,
            committed: Some("fedcba9876543210".to_owned()),
            checkout: Some("/work".to_owned()),
            overlaps: Vec::new(),
        };
        assert_eq!(
            told(&merged),
            "committed what was not: fedcba987654\nmerged into main: 0123456789ab\nmoved the checkout at /work along\n"
        );
        assert_eq!(told(&Merged { moved: false, committed: None, ..merged }), "main has all of it already\n");
    }
}
