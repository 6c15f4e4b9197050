//! How the confinement of an agent is written on the command line.

use clap::builder::{PossibleValuesParser, TypedValueParser};
use qd_protocol::sandbox::{NetworkSetting, SandboxSetting};

const LEVELS: [(&str, SandboxSetting); 4] = [
    ("auto", SandboxSetting::Auto),
    ("off", SandboxSetting::Off),
    ("deck", SandboxSetting::Deck),
    ("workspace", SandboxSetting::Workspace),
];
const NETWORKS: [(&str, NetworkSetting); 2] = [("on", NetworkSetting::On), ("off", NetworkSetting::Off)];

/// The level of this name. The error lists the names.
pub(crate) fn parse_sandbox(name: &str) -> Result<SandboxSetting, &'static str> {
    find(&LEVELS, name).ok_or("expected auto, off, deck or workspace")
}

/// Whether there is a network. The error lists the names.
pub(crate) fn parse_network(name: &str) -> Result<NetworkSetting, &'static str> {
    find(&NETWORKS, name).ok_or("expected on or off")
}

/// For flags: shells complete the names.
pub(super) fn sandbox_parser() -> impl TypedValueParser<Value = SandboxSetting> {
    PossibleValuesParser::new(LEVELS.map(|(name, _)| name)).try_map(|name| parse_sandbox(&name))
}

/// For flags: shells complete the names.
pub(super) fn network_parser() -> impl TypedValueParser<Value = NetworkSetting> {
    PossibleValuesParser::new(NETWORKS.map(|(name, _)| name)).try_map(|name| parse_network(&name))
}

fn find<T: Copy>(names: &[(&str, T)], name: &str) -> Option<T> {
    names.iter().find(|(known, _)| *known == name).map(|(_, setting)| *setting)
}
