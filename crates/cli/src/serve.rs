//! `qd serve`, and what `qd doctor` does with a journal while no daemon runs: the only calls into the daemon's crate. Also
//! sets up the log file.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::Arc;

use anyhow::Context as _;
use qd_daemon::edge::CertificateSource;
use qd_daemon::{DaemonServeError, ServeOptions};
use qd_home::{DaemonConfig, DaemonHome};
use serde::Serialize;
use serde_json::json;
use tracing_subscriber::EnvFilter;

use crate::args::ServeArgs;
use crate::daemon;
use crate::failure::{CliExitCode, CliFailure, Result};
use crate::output::CliOutput;
use crate::verbs::VerbContext;

/// A log larger than this is renamed to `.log.1` when a daemon starts, replacing the previous one.
const LOG_MAX: u64 = 16 << 20;

/// Runs the daemon until it is stopped.
pub(crate) fn serve(context: &VerbContext, flags: ServeArgs) -> Result<CliExitCode> {
    if flags.background {
        daemon::detach_from_caller();
    }
    let home = &context.locator.home;
    home.prepare().map_err(anyhow::Error::from)?;
    let config = DaemonConfig::load(home).context("the settings are not valid")?;
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
        std::env::current_exe().context("cannot find the path of the qd executable to start workers")?;
    match qd_daemon::serve(options, exe, &mut |line| announce(&context.out, line)) {
        Ok(()) => Ok(CliExitCode::Success),
        Err(error @ DaemonServeError::Address(_)) => Err(CliFailure::Usage(error.to_string())),
        Err(error) => Err(CliFailure::Other(error.into())),
    }
}

/// How many events a rebuild read, and how many rows it made of them.
#[derive(Debug, Clone, Copy, Serialize)]
pub(crate) struct RebuildSummary {
    pub(crate) events: u64,
    pub(crate) workspaces: u64,
    pub(crate) sessions: u64,
    pub(crate) runs: u64,
    pub(crate) asks: u64,
}

/// Rebuilds the rows of all lists from the events.
pub(crate) fn rebuild_lists(home: &DaemonHome) -> Result<RebuildSummary> {
    let report = qd_daemon::doctor::rebuild_lists(home.path()).context("cannot rebuild the lists")?;
    let qd_daemon::doctor::RebuildReport { events, workspaces, sessions, runs, asks, .. } = report;
    Ok(RebuildSummary { events, workspaces, sessions, runs, asks })
}

/// What is wrong with the file of the journal, for a home whose daemon cannot start; `None` if it seems whole.
pub(crate) fn find_journal_problem(home: &DaemonHome) -> Option<String> {
    qd_daemon::doctor::inspect_journal(home.path()).err().map(|error| error.to_string())
}

/// Prints where the daemon listens. Errors are ignored: a closed stdout must not end the daemon.
fn announce(out: &CliOutput, line: &str) {
    let _ = match line.strip_prefix("listening on ") {
        Some(address) if out.json => out.print_json(&json!({ "listening_on": address })),
        _ if out.json => out.print_json(&json!({ "note": line })),
        _ => out.print_line(line).map_err(CliFailure::from),
    };
}

/// Sends this process's log to a file.
pub(crate) fn start_log(path: &Path, filter: &str) -> Result<()> {
    let filter = EnvFilter::try_new(filter)
        .with_context(|| format!("`log = \"{filter}\"` is not a valid log filter"))?;
    let file = open_log(path).with_context(|| format!("cannot open {}", path.display()))?;
    // Shared without a lock: the file is open for appending, and each line is one write.
    let log = qd_worker::process_log::log_to(Arc::new(file)).with_env_filter(filter);
    // Fails only if a subscriber is already set, and this is called once per process.
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
    fn a_large_log_is_rotated_and_a_small_one_is_appended_to() {
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
