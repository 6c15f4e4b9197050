//! `qd asks`: the open asks of all sessions, oldest first, and with `-f` new ones as they arrive.

use std::collections::HashSet;

use qd_protocol::event::{Ask, AskOpened};
use qd_protocol::{AskId, Millis};

use super::VerbContext;
use crate::client::DaemonClient;
use crate::client::stream::{EventStream, EventStreamItem};
use crate::failure::{CliExitCode, Result};
use crate::render::table::TextTable;
use crate::render::{ask, text};

const PENDING_PATH: &str = "/v1/asks?state=pending";
const OPENED_PATH: &str = "/v1/events?kinds=ask.opened";

/// Lists open asks.
pub(crate) async fn asks(context: &VerbContext, follow: bool) -> Result<CliExitCode> {
    let client = context.client().await?;
    if follow {
        return follow_asks(context, &client).await;
    }
    let asks: Vec<Ask> = client.list(PENDING_PATH).await?;
    if context.out.json {
        context.out.print_json(&asks)?;
        return Ok(CliExitCode::Success);
    }
    let now = Millis::now();
    let mut table = TextTable::new(&["ID", "SESSION", "RISK", "AGE", "WANTS"]);
    for ask in &asks {
        let (id, session) = (ask.id.to_string(), owner_id(ask));
        table.add_row([
            id,
            session,
            ask::risk_name(ask.risk).to_owned(),
            text::format_age(ask.opened_at, now),
            ask::summary(ask),
        ]);
    }
    context.out.print_data(&table.render(context.out.out_style(), context.out.width()))?;
    if !asks.is_empty() {
        context.out.print_note("`qd allow ID`, `qd deny ID [REASON]` or `qd answer ID VALUE` answers one");
    }
    Ok(CliExitCode::Success)
}

/// Prints the open asks, then every new one, each once.
async fn follow_asks(context: &VerbContext, client: &DaemonClient) -> Result<CliExitCode> {
    // Open the stream before reading the list, so no ask is missed in between. An ask in both is printed once.
    let mut stream = EventStream::from_now(client, OPENED_PATH).await?;
    let mut shown: HashSet<AskId> = HashSet::new();
    let mut found: Vec<Ask> = client.list(PENDING_PATH).await?;
    loop {
        for ask in found.drain(..) {
            if shown.insert(ask.id.clone()) {
                print_ask(context, &ask)?;
            }
        }
        match stream.next().await? {
            EventStreamItem::Gap => found = client.list(PENDING_PATH).await?,
            EventStreamItem::Event(arrived) => {
                let opened: AskOpened =
                    serde_json::from_value(arrived.event.data).map_err(anyhow::Error::from)?;
                found.push(opened.ask);
            }
        }
    }
}

fn print_ask(context: &VerbContext, ask: &Ask) -> Result<()> {
    if context.out.json {
        return context.out.print_json(ask);
    }
    context.out.print_data(&format!(
        "{}    of {}\n{}",
        ask::format_ask(ask),
        owner_id(ask),
        ask::answer_commands(ask)
    ))?;
    Ok(())
}

/// The session or fleet that asks.
fn owner_id(ask: &Ask) -> String {
    let session = ask.session_id.as_ref().map(ToString::to_string);
    session.or_else(|| ask.fleet_id.as_ref().map(ToString::to_string)).unwrap_or_default()
}
