//! `qd config`: the effective settings of this home, and the file and line of each. It reads the files itself, so it
//! works even when a bad setting keeps the daemon from starting.

use anyhow::Context as _;
use qd_home::DaemonConfig;
use serde_json::Value;

use super::VerbContext;
use crate::failure::{CliExitCode, Result};
use crate::render::table::TextTable;

pub(crate) fn config(context: &VerbContext) -> Result<CliExitCode> {
    let config = DaemonConfig::load(&context.locator.home).context("the settings are not valid")?;
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
