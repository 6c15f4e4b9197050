//! `qd asks`: the open asks of all sessions, one ask as a whole, new ones as they arrive, and what was decided before.
//! Going through them one by one is in `asks_review.rs`.

use std::collections::HashMap;

use qd_protocol::api::{AskRecord, ReferenceKind, Session};
use qd_protocol::event::{Ask, AskKind, AskStatus, ResolvedBy};
use qd_protocol::fleet::Fleet;
use qd_protocol::limits::PAGE_MAX;
use qd_protocol::{FleetId, Millis, SessionId};

use super::answer::PENDING_PATH;
use super::ask_feed::AskFeed;
use super::{VerbContext, asks_review};
use crate::client::DaemonClient;
use crate::failure::{CliExitCode, CliFailure, Result};
use crate::refs;
use crate::render::asks_table::{DecidedAskRow, OpenAskRow, decided_asks, open_asks};
use crate::render::session_cells::{self, ShownIds};
use crate::render::visible_text::show_prose_line;
use crate::render::{ask, text};

/// Lists open asks. On a terminal it then goes through them one by one.
pub(crate) async fn asks(context: &VerbContext) -> Result<CliExitCode> {
    let client = context.client().await?;
    let asks: Vec<AskRecord> = client.list(PENDING_PATH).await?;
    if context.out.json {
        context.out.print_json(&asks)?;
        return Ok(CliExitCode::Success);
    }
    let asks: Vec<Ask> = asks.into_iter().map(|record| record.ask).collect();
    let titles = AskTitles::load(&client, &asks).await?;
    let ids = shown_ask_ids(context, &client, &asks).await?;
    let row = |ask: &Ask| OpenAskRow {
        risk: (ask.kind == AskKind::Permission).then_some(ask.risk),
        id: ids.shown(&ask.id),
        opened_at: ask.opened_at,
        title: titles.title(ask),
        summary: ask::summarize(ask),
    };
    let rows: Vec<OpenAskRow> = asks.iter().map(row).collect();
    let (style, width) = (context.out.out_style(), context.out.width());
    context.out.print_data(&open_asks(&rows, Millis::now(), style, width))?;
    if asks.is_empty() {
        return Ok(CliExitCode::Success);
    }
    if asks_review::is_possible(context) {
        return asks_review::review(context, &client, asks).await;
    }
    context.out.print_note("`qd asks ID` shows one whole; `qd allow`, `qd deny` or `qd answer` answers it");
    Ok(CliExitCode::Success)
}

/// Shows one ask as a whole, open or not.
pub(crate) async fn show_ask(context: &VerbContext, id: &str) -> Result<CliExitCode> {
    let client = context.client().await?;
    let id = refs::resolve_ask(&client, id).await?;
    let record: AskRecord = client.get(&format!("/v1/asks/{id}")).await?;
    if context.out.json {
        context.out.print_json(&record)?;
        return Ok(CliExitCode::Success);
    }
    let titles = AskTitles::load(&client, std::slice::from_ref(&record.ask)).await?;
    context.out.print_data(&format_with_owner(context, &titles, &record.ask))?;
    if record.ask.state == AskStatus::Pending {
        context.out.print_data(&ask::answer_commands(&record.ask))?;
    } else {
        let outcome = ask::describe_outcome(record.ask.state, record.ask.answer.as_ref());
        context.out.print_line(&format!("    {outcome}, by {}", describe_decider(&record)))?;
    }
    Ok(CliExitCode::Success)
}

/// Lists what was decided, the newest first.
pub(crate) async fn history(context: &VerbContext, limit: usize) -> Result<CliExitCode> {
    let client = context.client().await?;
    let mut records = newest_decided(&client, limit + 1).await?;
    let more = records.len() > limit;
    records.truncate(limit);
    // The daemon lists them by when they were asked.
    records.sort_by_key(|record| std::cmp::Reverse(decided_at(record)));
    if context.out.json {
        context.out.print_json(&records)?;
        return Ok(CliExitCode::Success);
    }
    let asks: Vec<Ask> = records.iter().map(|record| record.ask.clone()).collect();
    let titles = AskTitles::load(&client, &asks).await?;
    let ids = shown_ask_ids(context, &client, &asks).await?;
    let row = |record: &AskRecord| DecidedAskRow {
        at: decided_at(record),
        outcome: ask::describe_outcome(record.ask.state, record.ask.answer.as_ref()),
        by: describe_decider(record),
        id: ids.shown(&record.ask.id),
        title: titles.title(&record.ask),
        summary: ask::summarize(&record.ask),
    };
    let rows: Vec<DecidedAskRow> = records.iter().map(row).collect();
    let (style, width) = (context.out.out_style(), context.out.width());
    context.out.print_data(&decided_asks(&rows, Millis::now(), style, width))?;
    if more {
        context.out.print_note(&format!("these are the newest {limit}; `--limit N` shows more"));
    }
    Ok(CliExitCode::Success)
}

/// Prints the open asks, then every new one, each once and whole.
pub(crate) async fn follow_asks(context: &VerbContext) -> Result<CliExitCode> {
    let client = context.client().await?;
    let mut feed = AskFeed::open(&client).await?;
    loop {
        let ask = feed.next().await?;
        if context.out.json {
            context.out.print_json(&ask)?;
            continue;
        }
        let titles = AskTitles::load(&client, std::slice::from_ref(&ask)).await?;
        let whole = format_with_owner(context, &titles, &ask);
        context.out.print_data(&format!("{whole}{}", ask::answer_commands(&ask)))?;
    }
}

/// The whole ask and who asks.
pub(super) fn format_with_owner(context: &VerbContext, titles: &AskTitles, ask: &Ask) -> String {
    let whole = ask::format_ask(ask, context.out.out_style(), context.out.width());
    let owner = ask.session_id.as_ref().map(SessionId::as_str);
    let owner = owner.or(ask.fleet_id.as_ref().map(FleetId::as_str)).unwrap_or_default();
    let title = show_prose_line(&titles.title(ask));
    let age = text::format_age(ask.opened_at, Millis::now());
    format!("{whole}    of {title} ({owner}), {age} ago\n")
}

/// The titles of the sessions and fleets that ask.
#[derive(Debug)]
pub(super) struct AskTitles {
    sessions: HashMap<SessionId, String>,
    /// The tasks of the fleets.
    fleets: HashMap<FleetId, String>,
}

impl AskTitles {
    pub(super) async fn load(client: &DaemonClient, asks: &[Ask]) -> Result<Self> {
        let (mut sessions, mut fleets) = (HashMap::new(), HashMap::new());
        for id in asks.iter().filter_map(|ask| ask.session_id.as_ref()) {
            if !sessions.contains_key(id) {
                let found: Vec<Session> = client.list(&format!("/v1/sessions?ref={id}")).await?;
                let session = found.into_iter().find(|session| session.id == *id);
                let title = session.as_ref().map(session_cells::shown_title);
                sessions.insert(id.clone(), title.unwrap_or_else(|| id.to_string()));
            }
        }
        for id in asks.iter().filter_map(|ask| ask.fleet_id.as_ref()) {
            if !fleets.contains_key(id) {
                fleets.insert(id.clone(), fetch_task(client, id).await?);
            }
        }
        Ok(Self { sessions, fleets })
    }

    /// The title of the session that asks, as lists show it, or the task of the fleet.
    fn title(&self, ask: &Ask) -> String {
        match (&ask.session_id, &ask.fleet_id) {
            (Some(id), _) => self.sessions.get(id).cloned().unwrap_or_else(|| id.to_string()),
            (None, Some(id)) => self.fleets.get(id).cloned().unwrap_or_else(|| id.to_string()),
            (None, None) => "-".to_owned(),
        }
    }
}

/// The beginning of a fleet's task, or the id of a fleet that is gone.
async fn fetch_task(client: &DaemonClient, id: &FleetId) -> Result<String> {
    let fleet: Fleet = match refs::resolve_fleet(client, id.as_str()).await {
        Ok(fleet) => client.get(&fleet.path()).await?,
        // Its decisions are still listed.
        Err(CliFailure::NotFound(_)) => return Ok(id.to_string()),
        Err(failure) => return Err(failure),
    };
    Ok(format!("fleet: {}", text::first_line(&fleet.task, session_cells::TITLE_CHARS)))
}

/// When an ask was decided. Earlier releases did not record it.
fn decided_at(record: &AskRecord) -> Millis {
    record.resolved_at.unwrap_or(record.ask.opened_at)
}

async fn shown_ask_ids(context: &VerbContext, client: &DaemonClient, asks: &[Ask]) -> Result<ShownIds> {
    let ids = asks.iter().map(|ask| ask.id.to_string()).collect();
    refs::shown_ids(&context.out, client, &[ReferenceKind::Ask], ids).await
}

/// The newest asks that were answered, at most so many.
async fn newest_decided(client: &DaemonClient, limit: usize) -> Result<Vec<AskRecord>> {
    let mut records: Vec<AskRecord> = Vec::new();
    while records.len() < limit {
        let before = records.last().map(|record| record.ask.id.to_string()).unwrap_or_default();
        let size = (limit - records.len()).min(PAGE_MAX);
        let path = format!("/v1/asks?state=answered&before={before}&limit={size}");
        let mut page: Vec<AskRecord> = client.get(&path).await?;
        let is_last = page.len() < size;
        records.append(&mut page);
        if is_last {
            break;
        }
    }
    Ok(records)
}

/// Who or what resolved an ask.
fn describe_decider(record: &AskRecord) -> String {
    match record.by {
        Some(ResolvedBy::User) => "user",
        Some(ResolvedBy::Policy) if record.granted => "allowed always",
        Some(ResolvedBy::Policy) => "policy",
        Some(ResolvedBy::Cancel) => "cancel",
        Some(ResolvedBy::Agent) => "agent",
        Some(ResolvedBy::End) => "end of the run",
        None => "-",
    }
    .to_owned()
}
