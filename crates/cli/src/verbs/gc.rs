//! `qd gc`: what the home holds, what could be freed, and with `--yes` the deed.

use qd_protocol::api::{Gc, GcRequest};

use super::Context;
use crate::failure::{Exit, Result};
use crate::render::text::size;

/// Sizes first, then what it would free, then the deed.
pub(crate) async fn gc(context: &Context, older_than_days: u32, yes: bool) -> Result<Exit> {
    let client = context.client().await?;
    let before: Gc = client.get(&format!("/v1/gc?older_than_days={older_than_days}")).await?;
    if !context.out.json {
        context.out.data(&sizes(&before, older_than_days))?;
    }
    if !yes {
        if context.out.json {
            context.out.value(&before)?;
        } else {
            context.out.note("nothing was freed; `qd gc --yes` does it");
        }
        return Ok(Exit::Well);
    }
    let after: Gc = client.post("/v1/gc", &GcRequest { older_than_days }).await?;
    if context.out.json {
        context.out.value(&after)?;
    } else {
        context.out.line(&format!("freed       {}", size(after.freed_bytes)))?;
    }
    Ok(Exit::Well)
}

fn sizes(gc: &Gc, days: u32) -> String {
    format!(
        "journal     {}\nblobs       {}\nlog         {}\n\
         would free  {} sessions closed for {days} days or more, with {} events, and {} files ({})\n",
        size(gc.journal_bytes),
        size(gc.blob_bytes),
        size(gc.log_bytes),
        gc.closed_sessions,
        gc.closed_events,
        gc.loose_blobs,
        size(gc.loose_blob_bytes),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_come_before_what_would_be_freed() {
        let gc = Gc { journal_bytes: 2048, closed_sessions: 3, closed_events: 9, ..Gc::default() };
        let text = sizes(&gc, 7);
        assert!(text.starts_with("journal     2.0 KiB\nblobs       0 B\n"), "{text}");
        assert!(
            text.ends_with("3 sessions closed for 7 days or more, with 9 events, and 0 files (0 B)\n"),
            "{text}"
        );
    }
}
