//! `qd halt` and `qd unhalt`: stop and resume the start of new runs in all workspaces.

use qd_protocol::api::{HaltRequest, HaltStatus};

use super::VerbContext;
use crate::failure::{CliExitCode, Result};

const PATH: &str = "/v1/halt";

pub(crate) async fn halt(context: &VerbContext, cancel: bool, reason: &str) -> Result<CliExitCode> {
    let reason = (!reason.is_empty()).then(|| reason.to_owned());
    let halt: HaltStatus = context.client().await?.post(PATH, &HaltRequest { reason, cancel }).await?;
    if context.out.json {
        context.out.print_json(&halt)?;
    } else {
        let reason = halt.reason.map(|reason| format!(": {reason}")).unwrap_or_default();
        context.out.print_line(&format!("halted{reason}"))?;
        context.out.print_note("new prompts are queued until `qd unhalt`");
    }
    Ok(CliExitCode::Success)
}

pub(crate) async fn unhalt(context: &VerbContext) -> Result<CliExitCode> {
    let answer = context.client().await?.delete(PATH).await?;
    if context.out.json {
        context.out.print_json(&answer)?;
    } else {
        context.out.print_line("not halted")?;
    }
    Ok(CliExitCode::Success)
}
