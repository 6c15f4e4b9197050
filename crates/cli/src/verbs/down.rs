//! `qd down`: cancels fleets and says what it hit.

use qd_protocol::api::Cancelled;
use serde_json::json;

use super::Context;
use crate::failure::{Exit, Result};
use crate::refs;

/// Cancels each of `ids`. All are looked up first: a wrong one among them cancels none.
pub(crate) async fn down(context: &Context, ids: &[String]) -> Result<Exit> {
    let client = context.client().await?;
    let mut fleets = Vec::new();
    for id in ids {
        fleets.push(refs::fleet(&client, id).await?);
    }
    let mut answers = Vec::new();
    for fleet in fleets {
        let hit: Cancelled = client.post(&format!("{}/cancel", fleet.path()), &json!({})).await?;
        if context.out.json {
            answers.push(json!({ "fleet_id": fleet.id, "cancelled": hit.cancelled, "idle": hit.idle }));
            continue;
        }
        match hit.cancelled.len() {
            0 => context.out.note(&format!("{} had nothing to cancel", fleet.id)),
            count => context.out.line(&format!(
                "{} cancelled, {count} run{}",
                fleet.id,
                if count == 1 { "" } else { "s" }
            ))?,
        }
    }
    if context.out.json {
        context.out.value(&answers)?;
    }
    Ok(Exit::Well)
}
