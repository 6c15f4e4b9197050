//! `qd rm`: closes sessions, and with `--purge` deletes their events.

use serde_json::Value;

use super::VerbContext;
use crate::failure::{CliExitCode, Result};
use crate::refs;

/// Closes each of `ids`. All ids are resolved first: if one is wrong, nothing is closed.
pub(crate) async fn rm(context: &VerbContext, ids: &[String], purge: bool) -> Result<CliExitCode> {
    let client = context.client().await?;
    let mut sessions = Vec::new();
    for id in ids {
        sessions.push(refs::resolve_session(&client, id).await?);
    }
    let mut answers = Vec::new();
    for session in sessions {
        let query = if purge { "?purge=true" } else { "" };
        let answer = client.delete(&format!("{}{query}", session.path())).await?;
        if context.out.json {
            answers.push(if answer.is_null() { serde_json::json!({ "id": session.id }) } else { answer });
        } else {
            context.out.print_line(session.id.as_str())?;
            if let Some(path) = answer["worktree"].as_str() {
                context.out.print_note(&format!(
                    "its worktree is kept at {path}; remove it with `qd worktrees rm {}`",
                    session.id
                ));
            }
        }
    }
    if context.out.json {
        context.out.print_json(&Value::Array(answers))?;
    }
    Ok(CliExitCode::Success)
}
