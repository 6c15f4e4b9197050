//! `qd cancel`: stops what sessions do, or single runs, and says what it hit.

use qd_protocol::api::{CancelRequest, Cancelled};
use serde_json::json;

use super::Context;
use crate::failure::{Exit, Result};
use crate::refs;

/// Cancels each of `ids`. All are looked up first: a wrong one among them cancels none.
pub(crate) async fn cancel(context: &Context, ids: &[String]) -> Result<Exit> {
    let client = context.client().await?;
    let mut targets = Vec::new();
    for id in ids {
        targets.push(refs::target(&client, id).await?);
    }
    let mut answers = Vec::new();
    for (id, target) in ids.iter().zip(targets) {
        let path = format!("{}/cancel", target.session().agent_path());
        let request = CancelRequest { run_id: target.run().cloned(), reason: None };
        let hit: Cancelled = client.post(&path, &request).await?;
        if context.out.json {
            let session = &target.session().id;
            answers.push(json!({ "session_id": session, "cancelled": hit.cancelled, "idle": hit.idle }));
            continue;
        }
        for run in &hit.cancelled {
            context.out.line(&format!("{run} cancelled"))?;
        }
        if hit.cancelled.is_empty() {
            context.out.note(&format!("{id} had nothing to cancel"));
        }
    }
    if context.out.json {
        context.out.value(&answers)?;
    }
    Ok(Exit::Well)
}
