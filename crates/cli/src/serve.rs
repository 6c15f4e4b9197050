//! `qd serve` and `qd doctor --rebuild`: the only two calls into the daemon's crate that do its work, and where its log
//! goes. The verbs know nothing of it.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::Mutex;

use anyhow::Context as _;
use qd_daemon::config::DaemonConfig;
use qd_daemon::edge::CertificateSource;
use qd_daemon::home::DaemonHome;
use qd_daemon::{DaemonServeError, ServeOptions};
use serde::Serialize;
use serde_json::json;
use tracing_subscriber::EnvFilter;

use crate::args::ServeArgs;
use crate::daemon;
use crate::failure::{CliExitCode, CliFailure, Result};
use crate::output::CliOutput;
use crate::verbs::VerbContext;

/// A log larger than this is put aside, in the place of the one put aside before, when a daemon starts.
const LOG_MAX: u64 = 16 << 20;

/// Runs the daemon until it is told to end.
pub(crate) fn serve(context: &VerbContext, flags: ServeArgs) -> Result<CliExitCode> {
    if flags.background {
        daemon::detach_from_caller();
    }
    let home = &context.locator.home;
    home.prepare().map_err(anyhow::Error::from)?;
    let config = DaemonConfig::load(home).context("the settings cannot be used")?;
    start_log(&home.log().join("daemon.log"), &config.log.value)?;
    let tls = match (flags.tls, flags.tls_cert, flags.tls_key) {
        (Some(_), ..) => Some(CertificateSource::SelfSigned),
        (None, Some(cert), Some(key)) => Some(CertificateSource::Files { cert, key }),
        _ => None,
    };
    let options = ServeOptions {
        home: Some(home.path().to_owned()),
        listen: flags.listen,
        allow_host: flags.allow_host,
        tls,
    };
    let exe =
        std::env::current_exe().context("our own binary cannot be found, and so no worker be started")?;
    match qd_daemon::serve(options, exe, &mut |line| announce(&context.out, line)) {
        Ok(()) => Ok(CliExitCode::Success),
        Err(error @ DaemonServeError::Address(_)) => Err(CliFailure::Usage(error.to_string())),
        Err(error) => Err(CliFailure::Other(error.into())),
    }
}

/// What a rebuild made.
#[derive(Debug, Clone, Copy, Serialize)]
pub(crate) struct RebuildSummary {
    /// Events read.
    pub(crate) events: u64,
    /// Workspaces made of them.
    pub(crate) workspaces: u64,
    /// Sessions.
    pub(crate) sessions: u64,
    /// Runs.
    pub(crate) runs: u64,
    /// Asks.
    pub(crate) asks: u64,
}

/// Makes the lists anew from the events.
pub(crate) fn rebuild_lists(home: &DaemonHome) -> Result<RebuildSummary> {
    let report = qd_daemon::doctor::rebuild(home.path()).context("the lists cannot be made anew")?;
    let qd_daemon::doctor::RebuildReport { events, workspaces, sessions, runs, asks, .. } = report;
    Ok(RebuildSummary { events, workspaces, sessions, runs, asks })
}

/// Tells where the daemon listens. That nobody reads it any more must not end the daemon.
fn announce(out: &CliOutput, line: &str) {
    let _ = match line.strip_prefix("listening on ") {
        Some(address) if out.json => out.print_json(&json!({ "listening_on": address })),
        _ if out.json => out.print_json(&json!({ "note": line })),
        _ => out.print_line(line).map_err(CliFailure::from),
    };
}

/// Sends what this process logs into a file of the home.
pub(crate) fn start_log(path: &Path, filter: &str) -> Result<()> {
    let filter = EnvFilter::try_new(filter).with_context(|| format!("`log = \"{filter}\"` is no filter"))?;
    let file = open_log(path).with_context(|| format!("{} cannot be opened", path.display()))?;
    let log =
        tracing_subscriber::fmt().with_env_filter(filter).with_ansi(false).with_writer(Mutex::new(file));
    // A log that cannot be written is no reason to complain on a stderr that cannot be written either: that panics.
    let log = log.log_internal_errors(false);
    // Only the first counts, and there is only one.
    let _ = log.try_init();
    Ok(())
}

fn open_log(path: &Path) -> std::io::Result<File> {
    if path.metadata().is_ok_and(|meta| meta.len() > LOG_MAX) {
        std::fs::rename(path, path.with_extension("log.1"))?;
    }
    OpenOptions::new().append(true).create(true).mode(0o600).open(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_large_log_is_put_aside_and_a_small_one_goes_on() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("daemon.log");
        std::fs::write(&path, "small").unwrap();
        open_log(&path).unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "small");
        File::create(&path).unwrap().set_len(LOG_MAX + 1).unwrap();
        open_log(&path).unwrap();
        assert_eq!(path.metadata().unwrap().len(), 0);
        assert_eq!(folder.path().join("daemon.log.1").metadata().unwrap().len(), LOG_MAX + 1);
    }
}
