//! `qd send`: one more prompt for a session, or a word to the run that is active.

use qd_protocol::api::{SteerRequest, Steered};

use super::{Context, prompt};
use crate::failure::{Exit, Result};
use crate::refs;

/// Sends `text` and prints the run's id.
pub(crate) async fn send(context: &Context, id: &str, text: &str, steer: bool) -> Result<Exit> {
    let words = prompt::words(text)?;
    let client = context.client().await?;
    let session = refs::session(&client, id).await?;
    if steer {
        let path = format!("{}/steer", session.agent_path());
        let steered: Steered = client.post(&path, &SteerRequest { text: words }).await?;
        if context.out.json {
            context.out.value(&steered)?;
        } else {
            context.out.line(steered.run_id.as_str())?;
        }
        return Ok(Exit::Well);
    }
    let receipt = prompt::post(&client, &session, words).await?;
    if context.out.json {
        context.out.value(&receipt)?;
        return Ok(Exit::Well);
    }
    context.out.line(receipt.run_id.as_str())?;
    if receipt.position > 0 {
        context.out.note(&format!("queued at {}", receipt.position));
    }
    Ok(Exit::Well)
}
