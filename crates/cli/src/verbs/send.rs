//! `qd send`: sends a prompt to a session, or steers its running turn.

use qd_protocol::api::{SteerReceipt, SteerRequest};

use super::{VerbContext, prompt};
use crate::args::SendArgs;
use crate::failure::{CliExitCode, Result};
use crate::refs;

/// Sends the text and prints the id of the run.
pub(crate) async fn send(context: &VerbContext, flags: &SendArgs) -> Result<CliExitCode> {
    let text = prompt::read_prompt(&flags.text)?;
    let files = prompt::read_attachments(&flags.file)?;
    let client = context.client().await?;
    let session = refs::resolve_session(&client, &flags.id).await?;
    if flags.steer {
        let path = format!("{}/steer", session.agent_path());
        let steered: SteerReceipt = client.post(&path, &SteerRequest { text }).await?;
        if context.out.json {
            context.out.print_json(&steered)?;
        } else {
            context.out.print_line(steered.run_id.as_str())?;
        }
        return Ok(CliExitCode::Success);
    }
    let receipt = prompt::post_prompt(&client, &session, text, files).await?;
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
