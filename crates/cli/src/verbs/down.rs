//! `qd down`: cancels fleets.

use qd_protocol::api::CancelResponse;
use serde_json::json;

use super::VerbContext;
use crate::failure::{CliExitCode, Result};
use crate::refs;

/// Cancels each of `ids`. All ids are resolved first: if one is wrong, nothing is cancelled.
pub(crate) async fn down(context: &VerbContext, ids: &[String]) -> Result<CliExitCode> {
    let client = context.client().await?;
    let mut fleets = Vec::new();
    for id in ids {
        fleets.push(refs::resolve_fleet(&client, id).await?);
    }
    let mut answers = Vec::new();
    for fleet in fleets {
        let response: CancelResponse = client.post(&format!("{}/cancel", fleet.path()), &json!({})).await?;
        if context.out.json {
            let CancelResponse { cancelled, idle } = &response;
            answers.push(json!({ "fleet_id": fleet.id, "cancelled": cancelled, "idle": idle }));
            continue;
        }
        match response.cancelled.len() {
            0 => context.out.print_note(&format!("{}: nothing to cancel", fleet.id)),
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
