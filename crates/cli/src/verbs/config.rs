//! `qd config`: shows the effective settings of this home with the file and line of each, and changes them. It reads
//! and writes the files itself, so it works even when a bad setting keeps the daemon from starting.

use anyhow::Context as _;
use qd_home::{ConfigError, DaemonConfig};
use serde_json::Value;

use super::VerbContext;
use crate::args::ConfigVerb;
use crate::failure::{CliExitCode, CliFailure, Result};
use crate::render::table::TextTable;

/// The key that `qd run` reads at every start. All others are read by the daemon when it starts.
const READ_BY_EVERY_RUN: &str = "agent";

pub(crate) async fn run_config_verb(context: &VerbContext, verb: Option<ConfigVerb>) -> Result<CliExitCode> {
    let home = &context.locator.home;
    let (key, config) = match verb {
        None => return show_config(context),
        Some(ConfigVerb::Set { key, value }) => {
            home.prepare().map_err(anyhow::Error::from)?;
            let config = DaemonConfig::set(home, &key, &value);
            (key, config)
        }
        Some(ConfigVerb::Unset { key }) => {
            let config = DaemonConfig::unset(home, &key);
            (key, config)
        }
    };
    let config = config.map_err(refuse_change)?;
    let entry = config.entries().into_iter().find(|entry| entry.key == key);
    let entry = entry.context("the key is not listed")?;
    if context.out.json {
        context.out.print_json(&entry)?;
    } else {
        context.out.print_line(&format!("{key} = {} ({})", format_value(&entry.value), entry.origin))?;
    }
    if key != READ_BY_EVERY_RUN && context.locator.connect(&context.out).await.is_ok() {
        context.out.print_note("the daemon uses it after a restart: qd stop (agents keep working)");
    }
    Ok(CliExitCode::Success)
}

/// A value or key that the settings cannot have is wrong usage; a file that cannot be read or written is a failure.
fn refuse_change(error: ConfigError) -> CliFailure {
    match error {
        ConfigError::NoSuchKey { .. } | ConfigError::Invalid { .. } => CliFailure::Usage(error.to_string()),
        error => CliFailure::Other(error.into()),
    }
}

fn show_config(context: &VerbContext) -> Result<CliExitCode> {
    let config = DaemonConfig::load(&context.locator.home).context("the settings are not valid")?;
    let entries = config.entries();
    if context.out.json {
        context.out.print_json(&entries)?;
        return Ok(CliExitCode::Success);
    }
    let mut table = TextTable::new(&["KEY", "VALUE", "FROM"]);
    for entry in entries {
        table.add_row([entry.key.to_owned(), format_value(&entry.value), entry.origin]);
    }
    context.out.print_data(&table.render(context.out.out_style(), context.out.width()))?;
    Ok(CliExitCode::Success)
}

fn format_value(value: &Value) -> String {
    match value {
        Value::Null => "-".to_owned(),
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}
