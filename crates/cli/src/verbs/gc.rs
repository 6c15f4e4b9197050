//! `qd gc`: shows disk usage and what can be deleted, and with `--yes` deletes it.

use qd_protocol::api::{GcReport, GcRequest};

use super::VerbContext;
use crate::failure::{CliExitCode, Result};
use crate::render::text::format_size;

pub(crate) async fn gc(context: &VerbContext, older_than_days: u32, yes: bool) -> Result<CliExitCode> {
    let client = context.client().await?;
    let before: GcReport = client.get(&format!("/v1/gc?older_than_days={older_than_days}")).await?;
    if !context.out.json {
        context.out.print_data(&sizes(&before, older_than_days))?;
    }
    if !yes {
        if context.out.json {
            context.out.print_json(&before)?;
        } else {
            context.out.print_note("nothing was deleted; run `qd gc --yes` to delete");
        }
        return Ok(CliExitCode::Success);
    }
    let after: GcReport = client.post("/v1/gc", &GcRequest { older_than_days }).await?;
    if context.out.json {
        context.out.print_json(&after)?;
    } else {
        context.out.print_line(&format!("freed       {}", format_size(after.freed_bytes)))?;
    }
    Ok(CliExitCode::Success)
}

fn sizes(gc: &GcReport, days: u32) -> String {
    format!(
        "journal     {}\nblobs       {}\nindex       {}\nlog         {}\n\
         would free  {} sessions closed for {days} days or more, with {} events\n\
         would free  {} files that nothing refers to ({})\n\
         would merge {} events of streamed text ({})\n\
         unused      {} in the journal and {} in the index, which they reuse\n",
        format_size(gc.journal_bytes),
        format_size(gc.blob_bytes),
        format_size(gc.derived_bytes),
        format_size(gc.log_bytes),
        gc.closed_sessions,
        gc.closed_events,
        gc.loose_blobs,
        format_size(gc.loose_blob_bytes),
        gc.mergeable_events,
        format_size(gc.mergeable_bytes),
        format_size(gc.unused_bytes),
        format_size(gc.derived_unused_bytes),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::render::view_snapshot::assert_view;

    #[test]
    fn sizes_come_before_what_would_be_freed() {
        let gc =
            GcReport { journal_bytes: 2048, closed_sessions: 3, closed_events: 9, ..GcReport::default() };
        let gc = GcReport { mergeable_events: 700, mergeable_bytes: 4096, unused_bytes: 8192, ..gc };
        let gc = GcReport { derived_bytes: 3072, derived_unused_bytes: 1024, ..gc };
        let text = sizes(&gc, 7);
        let end = "would merge 700 events of streamed text (4.0 KiB)\n\
                   unused      8.0 KiB in the journal and 1.0 KiB in the index, which they reuse\n";
        assert!(text.ends_with(end), "{text}");
        assert!(text.starts_with("journal     2.0 KiB\nblobs       0 B\nindex       3.0 KiB\n"), "{text}");
        assert!(text.contains("would free  3 sessions closed for 7 days or more, with 9 events\n"), "{text}");
        assert!(text.contains("would free  0 files that nothing refers to (0 B)\n"), "{text}");
    }

    #[test]
    fn what_can_be_deleted_reads_well() {
        let report = GcReport {
            journal_bytes: 48 << 20,
            blob_bytes: 3 << 30,
            derived_bytes: 5 << 20,
            derived_unused_bytes: 1 << 20,
            log_bytes: 900,
            closed_sessions: 12,
            closed_events: 48_112,
            loose_blobs: 7,
            loose_blob_bytes: 1 << 20,
            mergeable_events: 70_000,
            mergeable_bytes: 4 << 20,
            unused_bytes: 8 << 20,
            ..GcReport::default()
        };
        assert_view("gc", |_, _| sizes(&report, 30));
    }
}
