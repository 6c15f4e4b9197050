//! `qd config`: which settings count for this home, and which line of which file says so. Reads the files itself: it
//! must work when they keep the daemon from starting.

use anyhow::Context as _;
use qd_daemon::config::Config;
use serde_json::Value;

use super::Context;
use crate::failure::{Exit, Result};
use crate::render::table::Table;

/// Shows the settings.
pub(crate) fn config(context: &Context) -> Result<Exit> {
    let config = Config::load(&context.whereabouts.home).context("the settings cannot be used")?;
    let entries = config.entries();
    if context.out.json {
        context.out.value(&entries)?;
        return Ok(Exit::Well);
    }
    let mut table = Table::new(&["KEY", "VALUE", "FROM"]);
    for entry in entries {
        let value = match entry.value {
            Value::Null => "-".to_owned(),
            Value::String(text) => text,
            other => other.to_string(),
        };
        table.row([entry.key.to_owned(), value, entry.origin]);
    }
    context.out.data(&table.render(context.out.out_style(), context.out.width()))?;
    Ok(Exit::Well)
}
