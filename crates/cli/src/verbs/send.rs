//! `qd send`: one more prompt for a session, or a word to the run that is active.

use qd_protocol::api::{SteerReceipt, SteerRequest};

use super::{VerbContext, prompt};
use crate::failure::{CliExitCode, Result};
use crate::refs;

/// Sends `text` and prints the run's id.
pub(crate) async fn send(context: &VerbContext, id: &str, text: &str, steer: bool) -> Result<CliExitCode> {
    let words = prompt::read_prompt(text)?;
    let client = context.client().await?;
    let session = refs::resolve_session(&client, id).await?;
    if steer {
        let path = format!("{}/steer", session.agent_path());
        let steered: SteerReceipt = client.post(&path, &SteerRequest { text: words }).await?;
        if context.out.json {
            context.out.print_json(&steered)?;
        } else {
            context.out.print_line(steered.run_id.as_str())?;
        }
        return Ok(CliExitCode::Success);
    }
    let receipt = prompt::post_prompt(&client, &session, words).await?;
    if context.out.json {
        context.out.print_json(&receipt)?;
        return Ok(CliExitCode::Success);
    }
    context.out.print_line(receipt.run_id.as_str())?;
    if receipt.position > 0 {
        context.out.print_note(&format!("queued at {}", receipt.position));
    }
    Ok(CliExitCode::Success)
}
