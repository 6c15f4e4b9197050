//! `qd cancel`: cancels all runs of sessions, or single runs, and prints which were hit.

use qd_protocol::api::{CancelRequest, CancelResponse};
use serde_json::json;

use super::VerbContext;
use crate::failure::{CliExitCode, Result};
use crate::refs;

/// Cancels each of `ids`. All ids are resolved first: if one is wrong, nothing is cancelled.
pub(crate) async fn cancel(context: &VerbContext, ids: &[String]) -> Result<CliExitCode> {
    let client = context.client().await?;
    let mut targets = Vec::new();
    for id in ids {
        targets.push(refs::resolve_target(&client, id).await?);
    }
    let mut answers = Vec::new();
    for (id, target) in ids.iter().zip(targets) {
        let path = format!("{}/cancel", target.session().agent_path());
        let request = CancelRequest { run_id: target.run().cloned(), reason: None };
        let response: CancelResponse = client.post(&path, &request).await?;
        if context.out.json {
            let session = &target.session().id;
            let CancelResponse { cancelled, idle } = &response;
            answers.push(json!({ "session_id": session, "cancelled": cancelled, "idle": idle }));
            continue;
        }
        for run in &response.cancelled {
            context.out.print_line(&format!("{run} cancelled"))?;
        }
        if response.cancelled.is_empty() {
            context.out.print_note(&format!("{id}: nothing to cancel"));
        }
    }
    if context.out.json {
        context.out.print_json(&answers)?;
    }
    Ok(CliExitCode::Success)
}
