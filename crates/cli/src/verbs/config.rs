//! `qd config`: shows the effective settings of this home with the file and line of each, and changes them. It reads
//! and writes the files itself, so it works even when a bad setting keeps the daemon from starting.

use anyhow::Context as _;
use qd_home::{ConfigEntry, ConfigError, DaemonConfig};
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
        ConfigError::NoSuchKey { .. } | ConfigError::InvalidChange { .. } | ConfigError::Invalid { .. } => {
            CliFailure::Usage(error.to_string())
        }
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
    context.out.print_data(&table(entries).render(context.out.out_style(), context.out.width()))?;
    Ok(CliExitCode::Success)
}

fn table(entries: Vec<ConfigEntry>) -> TextTable {
    let mut table = TextTable::new(&["KEY", "VALUE", "FROM"]);
    // The line number is at the end.
    table.keep_ends(2);
    for entry in entries {
        table.add_row([entry.key.to_owned(), format_value(&entry.value), entry.origin]);
    }
    table
}

fn format_value(value: &Value) -> String {
    match value {
        Value::Null => "-".to_owned(),
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::render::view_snapshot::assert_view;

    #[test]
    fn settings_read_well() {
        let entry = |key, value: Value, origin: &str| ConfigEntry { key, value, origin: origin.to_owned() };
        let entries = [
            entry("agent", "claude".into(), "/home/ann/.config/quarterdeck/config.toml:3"),
            entry(
                "listen",
                Value::from(vec!["127.0.0.1:7711"]),
                "/home/ann/.local/share/quarterdeck/config.toml:12",
            ),
            entry("max_agents", 16.into(), "default"),
            entry("tls", Value::Null, "default"),
        ];
        assert_view("config", |style, width| table(entries.to_vec()).render(style, width));
    }
}
