//! What this machine can do to confine agents.

use std::path::Path;

use qd_protocol::sandbox::SandboxLevel;
use qd_protocol::sandbox_spec::SandboxSupport;

/// Tries how this machine can confine agents. The answer does not change while a process lives, so callers keep it.
///
/// In a build with debug assertions, `QD_SANDBOX_MAX=off` or `=deck` pretends that the machine can do no more, so that
/// the test suites see on every machine what happens then.
pub fn probe_sandbox_support() -> SandboxSupport {
    let support = qd_sandbox::probe_sandbox(Path::new("/proc/self/exe"));
    match pretended_maximum() {
        Some(maximum) if maximum < support.strongest => SandboxSupport {
            strongest: maximum,
            network_off: support.network_off && maximum > SandboxLevel::Off,
            missing: Some("QD_SANDBOX_MAX allows no more".to_owned()),
            ..support
        },
        _ => support,
    }
}

fn pretended_maximum() -> Option<SandboxLevel> {
    if !cfg!(debug_assertions) {
        return None;
    }
    match std::env::var("QD_SANDBOX_MAX").ok()?.as_str() {
        "off" => Some(SandboxLevel::Off),
        "deck" => Some(SandboxLevel::Deck),
        _ => None,
    }
}
