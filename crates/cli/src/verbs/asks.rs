//! `qd asks`: the open asks of all sessions, oldest first, and with `-f` new ones as they arrive.

use qd_protocol::Millis;
use qd_protocol::event::Ask;

use super::VerbContext;
use super::ask_feed::{AskFeed, PENDING_ASKS_PATH};
use crate::client::DaemonClient;
use crate::failure::{CliExitCode, Result};
use crate::render::table::TextTable;
use crate::render::{ask, text};

/// Lists open asks.
pub(crate) async fn asks(context: &VerbContext, follow: bool) -> Result<CliExitCode> {
    let client = context.client().await?;
    if follow {
        return follow_asks(context, &client).await;
    }
    let asks: Vec<Ask> = client.list(PENDING_ASKS_PATH).await?;
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
    let mut feed = AskFeed::open(client).await?;
    loop {
        print_ask(context, &feed.next().await?)?;
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
