//! `qd config`: which settings count for this home, and which line of which file says so. Reads the files itself: it
//! must work when they keep the daemon from starting.

use anyhow::Context as _;
use qd_daemon::config::DaemonConfig;
use serde_json::Value;

use super::VerbContext;
use crate::failure::{CliExitCode, Result};
use crate::render::table::TextTable;

/// Shows the settings.
pub(crate) fn config(context: &VerbContext) -> Result<CliExitCode> {
    let config = DaemonConfig::load(&context.locator.home).context("the settings cannot be used")?;
    let entries = config.entries();
    if context.out.json {
        context.out.print_json(&entries)?;
        return Ok(CliExitCode::Success);
    }
    let mut table = TextTable::new(&["KEY", "VALUE", "FROM"]);
    for entry in entries {
        let value = match entry.value {
            Value::Null => "-".to_owned(),
            Value::String(text) => text,
            other => other.to_string(),
        };
        table.add_row([entry.key.to_owned(), value, entry.origin]);
    }
    context.out.print_data(&table.render(context.out.out_style(), context.out.width()))?;
    Ok(CliExitCode::Success)
}
