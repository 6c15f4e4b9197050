//! One manifest, from text to a type that cannot be wrong: keys, names and patterns are checked here, once.

use std::io::Read;
use std::path::Path;

use qd_protocol::manifest::{DriverKind, DriverOffer, Manifest};
use regex::Regex;
use toml::{Table, Value};

use crate::peer_address::{PeerAddress, PeerAddressError};

/// The longest name of an agent.
const NAME_MAX: usize = 64;

/// Why a manifest cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ManifestError {
    /// It cannot be read.
    #[error("it cannot be read: {0}")]
    Unreadable(#[from] std::io::Error),
    /// It is larger than any manifest is.
    #[error("it is longer than {0} bytes")]
    TooLong(u64),
    /// It is not TOML, or a key or a value is not one of a manifest.
    #[error("{0}")]
    Invalid(String),
    /// It says nothing of whom it speaks.
    #[error("it has no `name` under `[agent]`")]
    Nameless,
    /// The name is not one.
    #[error("`{0}` cannot be the name of an agent: use 1 to {NAME_MAX} of a-z, 0-9, `-`, `_` and `.`")]
    BadName(String),
    /// There is nothing to start.
    #[error("it says neither `binary` under `[agent]` nor `command` under `[startup]`")]
    NothingToStart,
    /// It wants a driver that there is not.
    #[error("it offers only CAP's grpc, which is not spoken here; say another `driver` under `[agent]`")]
    Grpc,
    /// It is elsewhere and says no address.
    #[error("it is driven by {driver} and needs `{driver}_serve_at = \"{scheme}://…\"` under `[fast_path]`")]
    NoAddress {
        /// How it is driven.
        driver: DriverKind,
        /// How its address begins.
        scheme: &'static str,
    },
    /// Its address is none.
    #[error(transparent)]
    BadAddress(#[from] PeerAddressError),
    /// A pattern is no regular expression that can be tried in bounded time.
    #[error("the pattern `{pattern}` of `{key}` cannot be used: {why}")]
    BadPattern {
        /// Where it stands.
        key: &'static str,
        /// The pattern.
        pattern: String,
        /// What is wrong.
        why: String,
    },
}

/// The text of a file, if that is not too long.
pub(crate) fn read_file(path: &Path, longest: u64) -> Result<String, ManifestError> {
    let mut text = String::new();
    std::fs::File::open(path)?.take(longest + 1).read_to_string(&mut text)?;
    if text.len() as u64 > longest {
        return Err(ManifestError::TooLong(longest));
    }
    Ok(text)
}

/// Its tables, without what is experimental.
pub(crate) fn parse_table(text: &str) -> Result<Table, ManifestError> {
    let mut table: Table = toml::from_str(text).map_err(|error| invalid_error(&error))?;
    strip_experimental(&mut table);
    Ok(table)
}

/// Of whom it speaks.
pub(crate) fn manifest_name(table: &Table, text: &str) -> Result<String, ManifestError> {
    match table.get("agent").and_then(|agent| agent.get("name")) {
        Some(Value::String(name)) if is_agent_name(name) => Ok(name.clone()),
        Some(Value::String(name)) => Err(ManifestError::BadName(name.clone())),
        // What is wrong with it is better told with its line.
        Some(_) => Err(parse_manifest(text).err().unwrap_or(ManifestError::Nameless)),
        None => Err(ManifestError::Nameless),
    }
}

/// A manifest that stands for itself.
pub(crate) fn parse_manifest(text: &str) -> Result<Manifest, ManifestError> {
    let manifest = match toml::from_str(text) {
        Ok(manifest) => manifest,
        // Without its experimental keys, at the price of the line in what is said of the others.
        Err(error) => match parse_table(text)?.try_into() {
            Ok(manifest) if text.contains(EXPERIMENTAL) => manifest,
            _ => return Err(invalid_error(&error)),
        },
    };
    check_manifest(manifest)
}

/// A manifest that was laid over another; the text is that of the upper one.
pub(crate) fn parse_merged(table: &Table, text: &str) -> Result<Manifest, ManifestError> {
    match table.clone().try_into() {
        Ok(manifest) => check_manifest(manifest),
        Err(error) => Err(match toml::from_str::<Manifest>(text) {
            Err(in_file) => invalid_error(&in_file),
            Ok(_) => invalid_error(&error),
        }),
    }
}

/// One table over another: tables are merged, all else is replaced.
pub(crate) fn merge_tables(mut below: Table, above: Table) -> Table {
    for (key, value) in above {
        let merged = match (below.remove(&key), value) {
            (Some(Value::Table(low)), Value::Table(high)) => Value::Table(merge_tables(low, high)),
            (_, value) => value,
        };
        below.insert(key, merged);
    }
    below
}

/// How CAP marks keys that are nobody's promise.
const EXPERIMENTAL: &str = "x-";

fn strip_experimental(table: &mut Table) {
    table.retain(|key, _| !key.starts_with(EXPERIMENTAL));
    for (_, value) in table.iter_mut() {
        if let Value::Table(inner) = value {
            strip_experimental(inner);
        }
    }
}

fn is_agent_name(name: &str) -> bool {
    let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || matches!(c, '-' | '_' | '.');
    (1..=NAME_MAX).contains(&name.len()) && name.chars().all(plain) && !name.starts_with(['-', '.'])
}

fn check_manifest(manifest: Manifest) -> Result<Manifest, ManifestError> {
    let offers_grpc = manifest.fast_path.grpc.as_ref().is_some_and(DriverOffer::is_offered);
    match manifest.driver() {
        DriverKind::Echo => {}
        driver @ (DriverKind::A2a | DriverKind::Worker) => match (driver, manifest.address()) {
            (DriverKind::A2a, None) => return Err(ManifestError::NoAddress { driver, scheme: "http" }),
            (_, None) => return Err(ManifestError::NoAddress { driver, scheme: "ws" }),
            (DriverKind::Worker, Some(address)) => drop(PeerAddress::parse(address)?),
            (_, Some(_)) => {}
        },
        DriverKind::Pty if offers_grpc && manifest.agent.driver.is_none() => return Err(ManifestError::Grpc),
        _ if manifest.command().is_empty() => return Err(ManifestError::NothingToStart),
        _ => {}
    }
    let parse = &manifest.parse;
    let lists = [
        ("parse.idle", &parse.idle),
        ("parse.busy", &parse.busy),
        ("parse.tool_call_start", &parse.tool_call_start),
        ("parse.tool_call_end", &parse.tool_call_end),
        ("parse.plan_section", &parse.plan_section),
        ("parse.thought_section", &parse.thought_section),
        ("parse.ask_yes_no", &parse.ask_yes_no),
        ("parse.ask_options", &parse.ask_options),
        ("parse.error_lines", &parse.error_lines),
        ("parse.notice_lines", &parse.notice_lines),
    ];
    let ready = manifest.startup.ready_when.as_ref().map(|ready| &ready.pattern);
    let single = [
        ("startup.ready_when.pattern", ready),
        ("probe.version_pattern", manifest.probe.version_pattern.as_ref()),
        ("agent.version_match", manifest.agent.version_match.as_ref()),
    ];
    let listed = lists.iter().flat_map(|(key, patterns)| patterns.iter().map(|pattern| (*key, pattern)));
    let single = single.iter().filter_map(|(key, pattern)| Some((*key, (*pattern)?)));
    for (key, pattern) in listed.chain(single) {
        if let Err(error) = Regex::new(pattern) {
            let why = error.to_string().lines().last().unwrap_or_default().trim().to_owned();
            return Err(ManifestError::BadPattern { key, pattern: pattern.clone(), why });
        }
    }
    Ok(manifest)
}

/// The error on one line, with the place.
fn invalid_error(error: &toml::de::Error) -> ManifestError {
    let place = error.to_string().lines().next().unwrap_or_default().replace("TOML parse error at ", "");
    match place.strip_prefix("line ") {
        Some(_) => ManifestError::Invalid(format!("{place}: {}", error.message())),
        None => ManifestError::Invalid(error.message().to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What CAP's own examples look like.
    const CAP: &str = r#"
        [agent]
        name = "rscode"
        binary = "rscode"
        version_match = ">=0.3"
        profiles = ["cap-protocol/v1/profile/coding"]

        [probe]
        command = ["rscode", "--version"]
        version_pattern = 'rscode (\d+\.\d+\.\d+)'

        [startup]
        command = ["rscode", "--interactive"]
        cwd_arg = "--cwd"
        model_arg = "--model"
        session_id_env = "RSCODE_SESSION"
        ready_when = { pattern = '^rscode>' }
        init_timeout_seconds = 20

        [fast_path]
        stream_json = false
        grpc = false
        acp_stdio = ["rscode", "acp"]
        a2a_serve_at = false

        [pty]
        cols = 100
        rows = 30
        bracketed_paste = true
        sigint_cancels_turn = "graceful"
        queued_input_supported = true

        [parse]
        idle = ['^>\s*$']
        error_lines = ['^ERROR']

        [capabilities]
        streaming_output = true
        queued_input = true
        input_modalities = ["text"]
        ask_user = { yes_no = true, options = false, free_text = false }

        [cost]
        metered = true
        currency = "USD"

        [x-vendor]
        anything = 1
    "#;

    #[test]
    fn a_cap_manifest_is_read_with_all_of_its_fields() {
        let manifest = parse_manifest(CAP).unwrap();
        assert_eq!(manifest.driver(), DriverKind::Acp);
        assert_eq!(manifest.command(), ["rscode", "acp"]);
        assert_eq!(manifest.pty.cols, 100);
        assert!(manifest.capabilities.ask_user.any());
    }

    #[test]
    fn what_is_wrong_is_said_by_name() {
        for (text, hint) in [
            ("", "it has no `name`"),
            ("[agent]\nname = 'A b'", "`A b` cannot be the name"),
            ("[agent]\nname = 1", "line 2"),
            ("[agent]\nname = 'a'\n[start]", "unknown field `start`"),
            ("[agent]\nname = 'a'\n", "neither `binary`"),
            ("[agent]\nname = 'a'\nbinary = 'a'\ndriver = 'telepathy'", "line 4"),
            ("[agent]\nname = 'a'\nbinary = 'a'\n[fast_path]\ngrpc = true", "grpc"),
            ("[agent]\nname = 'a'\ndriver = 'a2a'", "a2a_serve_at"),
            ("[agent]\nname = 'a'\ndriver = 'worker'", "worker_serve_at"),
            (
                "[agent]\nname = 'a'\n[fast_path]\nworker_serve_at = 'http://127.0.0.1:1'",
                "it begins with ws://",
            ),
            (
                "[agent]\nname = 'a'\nbinary = 'a'\n[parse]\nidle = ['(?<=x)y']",
                "the pattern `(?<=x)y` of `parse.idle`",
            ),
            ("[agent", "line 1"),
        ] {
            let said = parse_table(text)
                .and_then(|table| manifest_name(&table, text))
                .and_then(|_| parse_manifest(text))
                .unwrap_err();
            assert!(said.to_string().contains(hint), "{text:?}: {said}");
        }
    }
}
