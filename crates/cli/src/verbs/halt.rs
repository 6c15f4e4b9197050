//! `qd halt` and `qd unhalt`: the brake for everything.

use qd_protocol::api::{Halt, HaltRequest};

use super::Context;
use crate::failure::{Exit, Result};

const PATH: &str = "/v1/halt";

/// Lets nothing start any more.
pub(crate) async fn halt(context: &Context, cancel: bool, reason: &str) -> Result<Exit> {
    let reason = (!reason.is_empty()).then(|| reason.to_owned());
    let halt: Halt = context.client().await?.post(PATH, &HaltRequest { reason, cancel }).await?;
    if context.out.json {
        context.out.value(&halt)?;
    } else {
        let reason = halt.reason.map(|why| format!(": {why}")).unwrap_or_default();
        context.out.line(&format!("halted{reason}"))?;
        context.out.note("prompts are accepted and wait; `qd unhalt` lets them start");
    }
    Ok(Exit::Well)
}

/// Lets things start again.
pub(crate) async fn unhalt(context: &Context) -> Result<Exit> {
    let answer = context.client().await?.delete(PATH).await?;
    if context.out.json {
        context.out.value(&answer)?;
    } else {
        context.out.line("not halted")?;
    }
    Ok(Exit::Well)
}
