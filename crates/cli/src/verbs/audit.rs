//! `qd audit`: who did what, and when.

use qd_protocol::Millis;
use qd_protocol::audit::AuditPage;

use super::VerbContext;
use super::search::describe_incomplete;
use crate::args::AuditArgs;
use crate::client::percent_encode;
use crate::failure::{CliExitCode, Result};
use crate::refs::resolve_session;
use crate::render::audit::render_audit;

pub(crate) async fn audit(context: &VerbContext, args: AuditArgs) -> Result<CliExitCode> {
    let client = context.client().await?;
    let before = args.before.unwrap_or_default();
    let mut path = format!("/v1/audit?limit={}&before={}", args.limit, percent_encode(&before));
    if let Some(since) = args.since {
        path.push_str(&format!("&since={}", percent_encode(&since.to_string())));
    }
    if let Some(session) = &args.session {
        let session = resolve_session(&client, session).await?;
        path.push_str(&format!("&session={}", session.id));
    }
    let page: AuditPage = client.get(&path).await?;
    if context.out.json {
        context.out.print_json(&page)?;
        return Ok(CliExitCode::Success);
    }
    if page.entries.is_empty() {
        context.out.print_note("nothing was done");
    } else {
        let (style, width) = (context.out.out_style(), context.out.width());
        context.out.print_data(&render_audit(&page.entries, Millis::now()).render(style, width))?;
    }
    if let Some(next) = &page.next {
        context.out.print_note(&format!("there is more: add `--before {next}`"));
    }
    if !page.complete {
        context.out.print_note(&describe_incomplete(page.index));
    }
    Ok(CliExitCode::Success)
}
