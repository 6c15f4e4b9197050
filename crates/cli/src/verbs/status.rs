//! `qd status`: what happened while the user was away. The time of the last look is stored on this side, in the home, and
//! only moves forward after the report was printed on a terminal.

use std::collections::HashSet;

use qd_home::LastLook;
use qd_protocol::Millis;
use qd_protocol::api::{HaltStatus, ReferenceKind, Workspace};
use qd_protocol::fleet::Fleet;

use super::VerbContext;
use super::answer::PENDING_PATH;
use super::unmerged_work::fetch_unmerged_work;
use crate::args::StatusArgs;
use crate::client::DaemonClient;
use crate::failure::{CliExitCode, Result};
use crate::refs;
use crate::render::session_cells::{ShownIds, UnmergedWork};
use crate::render::status_report::{ReportPeriod, StatusFacts, StatusReport};
use crate::render::text;

/// How far back the first look goes.
const FIRST_LOOK_MS: u64 = 24 * 60 * 60 * 1000;
/// So long before a look, ends are remembered by their ids, because their times do not tell whether the look saw them. It
/// is longer than a commit takes, and than the clocks of two machines usually differ.
const LOOK_OVERLAP_MS: u64 = 60 * 1000;

pub(crate) async fn status(context: &VerbContext, flags: &StatusArgs) -> Result<CliExitCode> {
    let client = context.client().await?;
    // Read before anything is fetched, so that what ends meanwhile belongs to the next look.
    let now = Millis::now();
    let host = client.host().to_string();
    let last = context.locator.home.last_look(&host);
    let period = report_period(flags.since, last, now);
    let mut facts = fetch_facts(&client).await?;
    facts.ids = shown_ids(context, &client, &StatusReport::new(&facts, &period)).await?;
    let report = StatusReport::new(&facts, &period);
    if context.out.json {
        context.out.print_json(&report)?;
        return Ok(CliExitCode::Success);
    }
    context.out.print_data(&report.render(context.out.out_style(), context.out.width(), Millis::now()))?;
    if context.out.out_tty && flags.since.is_none() {
        let seen = facts.ended_since(overlap_start(now)).into_keys().collect();
        let recorded = context.locator.home.record_last_look(&host, LastLook { looked_at: now, seen });
        if let Err(error) = recorded {
            context.out.print_note(&format!("the time of this look was not stored: {error}"));
        }
    }
    Ok(CliExitCode::Success)
}

fn overlap_start(looked_at: Millis) -> Millis {
    Millis(looked_at.0.saturating_sub(LOOK_OVERLAP_MS))
}

fn report_period(flag: Option<Millis>, last: Option<LastLook>, now: Millis) -> ReportPeriod {
    let (since, description) = match (flag, &last) {
        (Some(since), _) => (since, format!("in the last {}", text::format_age(since, now))),
        (None, Some(last)) => {
            let age = text::format_age(last.looked_at, now);
            (last.looked_at, format!("since your last look, {age} ago"))
        }
        (None, None) => (Millis(now.0.saturating_sub(FIRST_LOOK_MS)), "in the last 24 hours".to_owned()),
    };
    match last.filter(|_| flag.is_none()) {
        Some(last) => {
            let after = overlap_start(last.looked_at);
            ReportPeriod { since, after, seen: HashSet::from_iter(last.seen), description }
        }
        None => ReportPeriod { since, after: since, seen: HashSet::new(), description },
    }
}

async fn fetch_facts(client: &DaemonClient) -> Result<StatusFacts> {
    let (sessions, asks, halt, workspaces) = tokio::join!(
        client.list("/v1/sessions?open=true"),
        client.list(PENDING_PATH),
        client.get::<HaltStatus>("/v1/halt"),
        client.list::<Workspace>("/v1/workspaces"),
    );
    let mut fleets: Vec<Fleet> = Vec::new();
    for workspace in workspaces? {
        fleets.extend(client.list::<Fleet>(&format!("/v1/workspaces/{}/fleets", workspace.id)).await?);
    }
    let halt = Some(halt?).filter(|halt| halt.halted);
    let mut facts = StatusFacts {
        ids: ShownIds::default(),
        sessions: sessions?,
        fleets,
        asks: asks?,
        halt,
        unmerged_work: UnmergedWork::unknown(),
    };
    facts.unmerged_work = fetch_unmerged_work(client, &facts.sessions).await;
    Ok(facts)
}

/// How the ids in the lines of a report are shown. Asks are shortened apart from the rest, because other verbs take them.
async fn shown_ids(context: &VerbContext, client: &DaemonClient, report: &StatusReport) -> Result<ShownIds> {
    let (watched, asks) = (report.listed_work(), report.listed_asks());
    let watched = refs::shown_ids(&context.out, client, &refs::WATCHED_KINDS, watched).await?;
    Ok(watched.and(refs::shown_ids(&context.out, client, &[ReferenceKind::Ask], asks).await?))
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Millis = Millis(1_000_000_000);

    #[test]
    fn a_report_begins_at_the_last_look_or_where_the_flag_says() {
        let first = report_period(None, None, NOW);
        assert_eq!((first.since, first.description.as_str()), (Millis(913_600_000), "in the last 24 hours"));
        let last = LastLook { looked_at: Millis(996_400_000), seen: vec!["run_1".to_owned()] };
        let next = report_period(None, Some(last.clone()), NOW);
        assert_eq!((next.since, next.after), (Millis(996_400_000), Millis(996_340_000)));
        assert_eq!(next.seen, HashSet::from(["run_1".to_owned()]));
        assert_eq!(next.description, "since your last look, 1h00m ago");
        let asked = report_period(Some(Millis(NOW.0 - 60_000)), Some(last), NOW);
        assert_eq!((asked.since, asked.seen.len()), (Millis(999_940_000), 0));
        assert_eq!(asked.description, "in the last 1m");
    }
}
