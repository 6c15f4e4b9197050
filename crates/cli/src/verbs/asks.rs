//! `qd asks`: what agents of all sessions wait for, oldest first, and with `-f` what they ask from now on.

use std::collections::HashSet;

use qd_protocol::event::{Ask, AskOpened};
use qd_protocol::{AskId, Millis};

use super::Context;
use crate::client::Client;
use crate::client::stream::{EventStream, Next};
use crate::failure::{Exit, Result};
use crate::render::table::Table;
use crate::render::{ask, text};

const PENDING: &str = "/v1/asks?state=pending";
const OPENED: &str = "/v1/events?kinds=ask.opened";

/// Lists open asks.
pub(crate) async fn asks(context: &Context, follow: bool) -> Result<Exit> {
    let client = context.client().await?;
    if follow {
        return go_on(context, &client).await;
    }
    let asks: Vec<Ask> = client.list(PENDING).await?;
    if context.out.json {
        context.out.value(&asks)?;
        return Ok(Exit::Well);
    }
    let now = Millis::now();
    let mut table = Table::new(&["ID", "SESSION", "RISK", "AGE", "WANTS"]);
    for ask in &asks {
        let (id, session) = (ask.id.to_string(), of(ask));
        table.row([
            id,
            session,
            ask::risk(ask.risk).to_owned(),
            text::age(ask.opened_at, now),
            ask::summary(ask),
        ]);
    }
    context.out.data(&table.render(context.out.out_style(), context.out.width()))?;
    if !asks.is_empty() {
        context.out.note("`qd allow ID`, `qd deny ID [REASON]` or `qd answer ID VALUE` answers one");
    }
    Ok(Exit::Well)
}

/// The open ones, then every new one, each once.
async fn go_on(context: &Context, client: &Client) -> Result<Exit> {
    // The stream first, then the list: what is opened in between is in both, and shown once.
    let mut stream = EventStream::from_now(client, OPENED).await?;
    let mut shown: HashSet<AskId> = HashSet::new();
    let mut found: Vec<Ask> = client.list(PENDING).await?;
    loop {
        for ask in found.drain(..) {
            if shown.insert(ask.id.clone()) {
                show(context, &ask)?;
            }
        }
        match stream.next().await? {
            Next::Gap => found = client.list(PENDING).await?,
            Next::Event(arrived) => {
                let opened: AskOpened =
                    serde_json::from_value(arrived.event.data).map_err(anyhow::Error::from)?;
                found.push(opened.ask);
            }
        }
    }
}

fn show(context: &Context, ask: &Ask) -> Result<()> {
    if context.out.json {
        return context.out.value(ask);
    }
    context.out.data(&format!("{}    of {}\n{}", ask::block(ask), of(ask), ask::commands(ask)))?;
    Ok(())
}

/// Whose it is.
fn of(ask: &Ask) -> String {
    let session = ask.session_id.as_ref().map(ToString::to_string);
    session.or_else(|| ask.fleet_id.as_ref().map(ToString::to_string)).unwrap_or_default()
}
