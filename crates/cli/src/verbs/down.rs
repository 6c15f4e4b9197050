//! `qd down`: cancels fleets and says what it hit.

use qd_protocol::api::CancelResponse;
use serde_json::json;

use super::VerbContext;
use crate::failure::{CliExitCode, Result};
use crate::refs;

/// Cancels each of `ids`. All are looked up first: a wrong one among them cancels none.
pub(crate) async fn down(context: &VerbContext, ids: &[String]) -> Result<CliExitCode> {
    let client = context.client().await?;
    let mut fleets = Vec::new();
    for id in ids {
        fleets.push(refs::resolve_fleet(&client, id).await?);
    }
    let mut answers = Vec::new();
    for fleet in fleets {
        let hit: CancelResponse = client.post(&format!("{}/cancel", fleet.path()), &json!({})).await?;
        if context.out.json {
            answers.push(json!({ "fleet_id": fleet.id, "cancelled": hit.cancelled, "idle": hit.idle }));
            continue;
        }
        match hit.cancelled.len() {
            0 => context.out.print_note(&format!("{} had nothing to cancel", fleet.id)),
            count => context.out.print_line(&format!(
                "{} cancelled, {count} run{}",
                fleet.id,
                if count == 1 { "" } else { "s" }
            ))?,
        }
    }
    if context.out.json {
        context.out.print_json(&answers)?;
    }
    Ok(CliExitCode::Success)
}
