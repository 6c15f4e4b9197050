//! `qd halt` and `qd unhalt`: the brake for everything.

use qd_protocol::api::{HaltRequest, HaltStatus};

use super::VerbContext;
use crate::failure::{CliExitCode, Result};

const PATH: &str = "/v1/halt";

/// Lets nothing start any more.
pub(crate) async fn halt(context: &VerbContext, cancel: bool, reason: &str) -> Result<CliExitCode> {
    let reason = (!reason.is_empty()).then(|| reason.to_owned());
    let halt: HaltStatus = context.client().await?.post(PATH, &HaltRequest { reason, cancel }).await?;
    if context.out.json {
        context.out.print_json(&halt)?;
    } else {
        let reason = halt.reason.map(|why| format!(": {why}")).unwrap_or_default();
        context.out.print_line(&format!("halted{reason}"))?;
        context.out.print_note("prompts are accepted and wait; `qd unhalt` lets them start");
    }
    Ok(CliExitCode::Success)
}

/// Lets things start again.
pub(crate) async fn unhalt(context: &VerbContext) -> Result<CliExitCode> {
    let answer = context.client().await?.delete(PATH).await?;
    if context.out.json {
        context.out.print_json(&answer)?;
    } else {
        context.out.print_line("not halted")?;
    }
    Ok(CliExitCode::Success)
}
