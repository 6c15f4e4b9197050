//! Parses one manifest from text to a validated type: keys, names and patterns are checked here, once.

use std::io::Read;
use std::path::Path;

use qd_protocol::manifest::{DriverKind, DriverOffer, Manifest};
use qd_protocol::model_host::{InvalidModelHost, ModelHostSetting};
use regex::Regex;
use toml::{Table, Value};

use crate::peer_address::{PeerAddress, PeerAddressError};

/// The longest agent name, in bytes.
const NAME_MAX: usize = 64;

/// Why a manifest cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ManifestError {
    #[error("it cannot be read: {0}")]
    Unreadable(#[from] std::io::Error),
    #[error("it is longer than {0} bytes")]
    TooLong(u64),
    /// It is not TOML, or has an unknown key or a bad value.
    #[error("{0}")]
    Invalid(String),
    #[error("it has no `name` under `[agent]`")]
    Nameless,
    #[error("`{0}` cannot be the name of an agent: use 1 to {NAME_MAX} of a-z, 0-9, `-`, `_` and `.`")]
    BadName(String),
    #[error("it has neither `binary` under `[agent]` nor `command` under `[startup]`")]
    NothingToStart,
    /// It can only be driven by CAP's gRPC, which is not supported.
    #[error("it offers only CAP's grpc, which is not supported; set another `driver` under `[agent]`")]
    Grpc,
    /// It is a remote agent without an address.
    #[error("its driver is {driver}, which needs `{driver}_serve_at = \"{scheme}://…\"` under `[fast_path]`")]
    NoAddress {
        driver: DriverKind,
        /// How its address must begin.
        scheme: &'static str,
    },
    #[error(transparent)]
    BadAddress(#[from] PeerAddressError),
    /// The pattern for the files of conversations could lead out of the agent's folder, or there is no folder.
    #[error(
        "`files` under `[conversations]` needs `roots` and must be a path below them, without `.` and `..`"
    )]
    BadConversationFiles,
    #[error("`hosts` under `[sandbox]`: {0}")]
    BadHost(#[from] InvalidModelHost),
    #[error("`[modes]` needs `fallback`, the name of one of the modes in `offered`")]
    NoFallbackMode,
    /// A pattern is not a regular expression that runs in bounded time.
    #[error("the pattern `{pattern}` of `{key}` cannot be used: {why}")]
    BadPattern { key: &'static str, pattern: String, why: String },
}

/// Reads a text file, unless it is too long.
pub(crate) fn read_file(path: &Path, max_len: u64) -> Result<String, ManifestError> {
    // A pipe would block its reader.
    if !std::fs::metadata(path)?.is_file() {
        return Err(std::io::Error::new(std::io::ErrorKind::InvalidInput, "not a regular file").into());
    }
    let mut text = String::new();
    std::fs::File::open(path)?.take(max_len + 1).read_to_string(&mut text)?;
    if text.len() as u64 > max_len {
        return Err(ManifestError::TooLong(max_len));
    }
    Ok(text)
}

/// Parses the text as TOML, without experimental keys.
pub(crate) fn parse_table(text: &str) -> Result<Table, ManifestError> {
    let mut table: Table = toml::from_str(text).map_err(|error| invalid_error(&error))?;
    strip_experimental(&mut table);
    Ok(table)
}

/// The name of the agent that a manifest is about.
pub(crate) fn manifest_name(table: &Table, text: &str) -> Result<String, ManifestError> {
    match table.get("agent").and_then(|agent| agent.get("name")) {
        Some(Value::String(name)) if is_agent_name(name) => Ok(name.clone()),
        Some(Value::String(name)) => Err(ManifestError::BadName(name.clone())),
        // Parse the whole manifest for an error with a line number.
        Some(_) => Err(parse_manifest(text).err().unwrap_or(ManifestError::Nameless)),
        None => Err(ManifestError::Nameless),
    }
}

/// Parses a complete manifest.
pub(crate) fn parse_manifest(text: &str) -> Result<Manifest, ManifestError> {
    let manifest = match toml::from_str(text) {
        Ok(manifest) => manifest,
        // Try again without experimental keys. If that fails too, report the first error, which has a line number.
        Err(error) => match parse_table(text)?.try_into() {
            Ok(manifest) if text.contains(EXPERIMENTAL) => manifest,
            _ => return Err(invalid_error(&error)),
        },
    };
    check_manifest(manifest)
}

/// Parses a manifest that was overlaid on another one. `text` is the upper one, used for the line numbers of errors.
pub(crate) fn parse_merged(table: &Table, text: &str) -> Result<Manifest, ManifestError> {
    match table.clone().try_into() {
        Ok(manifest) => check_manifest(manifest),
        Err(error) => Err(match toml::from_str::<Manifest>(text) {
            Err(in_file) => invalid_error(&in_file),
            Ok(_) => invalid_error(&error),
        }),
    }
}

/// Overlays one table on another: tables are merged, everything else is replaced.
pub(crate) fn merge_tables(mut lower: Table, upper: Table) -> Table {
    for (key, value) in upper {
        let merged = match (lower.remove(&key), value) {
            (Some(Value::Table(low)), Value::Table(high)) => Value::Table(merge_tables(low, high)),
            (_, value) => value,
        };
        lower.insert(key, merged);
    }
    lower
}

/// CAP's prefix for experimental keys, which are ignored.
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
    let conversations = &manifest.conversations;
    let is_step_out = |part: &str| matches!(part, "" | "." | "..");
    if !conversations.files.is_empty()
        && (conversations.roots.is_empty() || conversations.files.split('/').any(is_step_out))
    {
        return Err(ManifestError::BadConversationFiles);
    }
    for host in &manifest.sandbox.hosts {
        host.parse::<ModelHostSetting>()?;
    }
    let modes = &manifest.modes;
    if !modes.offered.is_empty()
        && !modes.fallback.as_ref().is_some_and(|mode| modes.offered.contains_key(mode))
    {
        return Err(ManifestError::NoFallbackMode);
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
        ("parse.sign_in_lines", &parse.sign_in_lines),
        ("parse.quota_lines", &parse.quota_lines),
    ];
    let ready = manifest.startup.ready_when.as_ref().map(|ready| &ready.pattern);
    let single = [
        ("startup.ready_when.pattern", ready),
        ("probe.version_pattern", manifest.probe.version_pattern.as_ref()),
        ("agent.version_match", manifest.agent.version_match.as_ref()),
    ];
    let settings = manifest.policy.overridden_by.iter().flat_map(|setting| {
        let patterns = [
            ("policy.overridden_by.line", &setting.line),
            ("policy.overridden_by.passage", &setting.passage),
            ("policy.overridden_by.unless", &setting.unless),
        ];
        patterns.into_iter().filter_map(|(key, pattern)| Some((key, pattern.as_ref()?)))
    });
    let allowed = manifest.policy.allowed_by_settings.iter().flat_map(|allowed| &allowed.asked_with);
    let asked_lines =
        allowed.filter_map(|more| Some(("policy.allowed_by_settings.asked_with.line", more.line.as_ref()?)));
    let listed = lists.iter().flat_map(|(key, patterns)| patterns.iter().map(|pattern| (*key, pattern)));
    let single = single.iter().filter_map(|(key, pattern)| Some((*key, (*pattern)?)));
    for (key, pattern) in listed.chain(single).chain(settings).chain(asked_lines) {
        if let Err(error) = Regex::new(pattern) {
            let why = error.to_string().lines().last().unwrap_or_default().trim().to_owned();
            return Err(ManifestError::BadPattern { key, pattern: pattern.clone(), why });
        }
    }
    Ok(manifest)
}

/// The error on one line, with its position.
fn invalid_error(error: &toml::de::Error) -> ManifestError {
    let position = error.to_string().lines().next().unwrap_or_default().replace("TOML parse error at ", "");
    match position.strip_prefix("line ") {
        Some(_) => ManifestError::Invalid(format!("{position}: {}", error.message())),
        None => ManifestError::Invalid(error.message().to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A manifest like CAP's own examples.
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
    fn problems_are_reported_by_name() {
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
                "it must begin with ws://",
            ),
            (
                "[agent]\nname = 'a'\nbinary = 'a'\n[parse]\nidle = ['(?<=x)y']",
                "the pattern `(?<=x)y` of `parse.idle`",
            ),
            (
                "[agent]\nname = 'a'\nbinary = 'a'\n[conversations]\nroots = ['~']\nfiles = '../*.jsonl'",
                "without `.` and `..`",
            ),
            ("[agent", "line 1"),
        ] {
            let error = parse_table(text)
                .and_then(|table| manifest_name(&table, text))
                .and_then(|_| parse_manifest(text))
                .unwrap_err();
            assert!(error.to_string().contains(hint), "{text:?}: {error}");
        }
    }
}
