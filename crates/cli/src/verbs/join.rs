//! `qd worker join`: runs agents on this machine for a daemon on another. This file connects to the daemon and checks
//! its certificate; the work itself is in `qd-worker`.

use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use qd_catalog::programs::{self, ProgramVersions};
use qd_catalog::{Catalog, policy_enforcement};
use qd_home::DaemonHome;
use qd_protocol::worker::Secret;
use qd_worker::join::{AgentOffer, ByteStream, DaemonDialError, DaemonDialer, JoinStatus, WorkerJoinOptions};
use serde_json::json;
use tokio::net::TcpStream;
use tokio::signal::unix::{SignalKind, signal};

use super::{VerbContext, workspace};
use crate::args::JoinArgs;
use crate::client::host::DaemonHost;
use crate::client::tls::{CertificateTrust, TlsHandshakeError};
use crate::failure::{CliExitCode, CliFailure, Result, format_error_chain};

/// Time limit for connecting.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// Works for the daemon until SIGINT or SIGTERM.
pub(crate) async fn join(context: &VerbContext, flags: JoinArgs) -> Result<CliExitCode> {
    let JoinArgs { url, token, label, root, fingerprint, agent } = flags;
    let host = parse_daemon_url(&url)?;
    let trust = CertificateTrust::from_fingerprint(fingerprint.as_deref(), "--fingerprint");
    let trust = trust.map_err(|error| CliFailure::Usage(format_error_chain(&error)))?;
    let home = &context.locator.home;
    home.prepare().map_err(anyhow::Error::from)?;
    crate::serve::start_log(&home.log().join("joined.log"), "warn")?;
    let offers = collect_offers(home, &agent)?;
    let choices = describe_choices(&label, &offers);
    let options = WorkerJoinOptions {
        token: Secret(token),
        name: machine_name(),
        labels: label,
        offers,
        workspace_root: root.as_deref().map(resolve_root).transpose()?,
        spool_dir: home.joined_spools(),
    };
    let mut terminate = signal(SignalKind::terminate()).map_err(anyhow::Error::from)?;
    let mut interrupt = signal(SignalKind::interrupt()).map_err(anyhow::Error::from)?;
    let stop = async {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
    };
    let mut joined = false;
    let on_status = |status| {
        let first = !joined;
        joined |= matches!(status, JoinStatus::Joined(_));
        report(context, &url, status, first);
        if first && joined {
            context.out.print_note(&choices);
        }
    };
    let dialler = JoinDialer { host, trust: Arc::new(trust) };
    qd_worker::join::join_daemon(options, dialler, stop, on_status).await.map_err(anyhow::Error::from)?;
    Ok(CliExitCode::Success)
}

/// Prints a change of the connection. Errors are ignored: a closed stdout must not end the worker.
fn report(context: &VerbContext, url: &str, status: JoinStatus, first: bool) {
    let out = &context.out;
    match status {
        JoinStatus::Joined(name) if first && out.json => {
            drop(out.print_json(&json!({ "joined": url, "name": name })))
        }
        JoinStatus::Joined(name) if first => drop(out.print_line(&format!("joined {url} as {name}"))),
        JoinStatus::Joined(name) => out.print_note(&format!("reconnected to {url} as {name}")),
        JoinStatus::Disconnected(reason) if first => {
            out.print_note(&format!("cannot connect to {url}: {reason}; trying again"))
        }
        JoinStatus::Disconnected(reason) => {
            out.print_note(&format!("lost the connection to {url}: {reason}; trying again"))
        }
    }
}

/// The agent names with which a session runs on this machine.
fn describe_choices(labels: &[String], offers: &[AgentOffer]) -> String {
    let each = labels
        .iter()
        .flat_map(|label| offers.iter().map(move |offer| format!("{}@{label}", offer.agent.name)));
    match labels.is_empty() {
        true => "no session can choose this machine without a --label".to_owned(),
        false => format!("sessions run here with --agent {}", each.collect::<Vec<_>>().join(", ")),
    }
}

/// Parses the daemon's address. Connections to other machines must use TLS.
fn parse_daemon_url(url: &str) -> Result<DaemonHost> {
    const FORMS: &str = "the daemon's address must be https://HOST:PORT or wss://HOST:PORT; http:// and ws:// are \
                         allowed only for this machine";
    let (rest, tls) = match url.split_once("://") {
        Some(("https" | "wss", rest)) => (rest, true),
        Some(("http" | "ws", rest)) => (rest, false),
        _ => return Err(CliFailure::Usage(FORMS.to_owned())),
    };
    let authority = rest.trim_end_matches('/');
    let has_port = authority.rsplit_once(':').is_some_and(|(_, port)| port.parse::<u16>().is_ok());
    let port = match (has_port, tls) {
        (true, _) => "",
        (false, true) => ":443",
        (false, false) => ":80",
    };
    let scheme = if tls { "https" } else { "http" };
    let host: DaemonHost =
        format!("{scheme}://{authority}{port}").parse().map_err(|_| CliFailure::Usage(FORMS.to_owned()))?;
    let name = host.server_name();
    let is_local = name == "localhost" || name.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback());
    if tls || is_local { Ok(host) } else { Err(CliFailure::Usage(FORMS.to_owned())) }
}

/// The agents to offer: those named by --agent, or all that are installed here.
fn collect_offers(home: &DaemonHome, named: &[String]) -> Result<Vec<AgentOffer>> {
    let catalog = Catalog::with_user_folders(&home.agent_folders());
    let names: Vec<String> = catalog.entries().map(|entry| entry.manifest.agent.name.clone()).collect();
    let offer = |name: &String| {
        let manifest = catalog.get(name).ok_or_else(|| {
            CliFailure::Usage(format!("unknown agent {name}; known agents: {}", names.join(", ")))
        })?;
        let about = qd_catalog::agent_listing(&manifest, "", &ProgramVersions::default());
        let manifest =
            programs::with_isolation(programs::with_program_path(manifest), &home.isolated_agents());
        let manifest = policy_enforcement::with_policy_file(manifest, &home.policy_files());
        let env = workspace::own_variables(&manifest.startup.pass_env);
        Ok(AgentOffer { agent: about, manifest, env })
    };
    let offers: Vec<AgentOffer> =
        if named.is_empty() { &names } else { named }.iter().map(offer).collect::<Result<_>>()?;
    Ok(offers.into_iter().filter(|offer| !named.is_empty() || offer.agent.available).collect())
}

fn resolve_root(root: &Path) -> Result<PathBuf> {
    let path = root.canonicalize().with_context(|| format!("cannot use --root {}", root.display()))?;
    match path.is_dir() {
        true => Ok(path),
        false => Err(CliFailure::Usage(format!("--root {} is not a directory", root.display()))),
    }
}

/// The host name, or `worker` if it is empty.
fn machine_name() -> String {
    let name = rustix::system::uname().nodename().to_string_lossy().into_owned();
    if name.is_empty() { "worker".to_owned() } else { name }
}

/// Connects to the daemon.
#[derive(Debug, Clone)]
struct JoinDialer {
    host: DaemonHost,
    trust: Arc<CertificateTrust>,
}

impl DaemonDialer for JoinDialer {
    fn host_header(&self) -> String {
        self.host.host_header().to_owned()
    }

    async fn open_stream(&self) -> Result<Box<dyn ByteStream>, DaemonDialError> {
        let unreachable =
            || DaemonDialError::Unreachable(format!("no connection within {} s", CONNECT_TIMEOUT.as_secs()));
        tokio::time::timeout(CONNECT_TIMEOUT, self.connect()).await.map_err(|_| unreachable())?
    }
}

impl JoinDialer {
    async fn connect(&self) -> Result<Box<dyn ByteStream>, DaemonDialError> {
        let unreachable = |error: anyhow::Error| DaemonDialError::Unreachable(format_error_chain(&error));
        let DaemonHost::Tcp { authority, tls } = &self.host else {
            return Err(DaemonDialError::Untrusted(
                "a unix socket cannot be joined; use the daemon's TCP address".to_owned(),
            ));
        };
        let stream = TcpStream::connect(authority).await.map_err(|error| unreachable(error.into()))?;
        // Without it, Nagle's algorithm holds a frame back until the one before is acknowledged.
        stream.set_nodelay(true).map_err(|error| unreachable(error.into()))?;
        if !tls {
            return Ok(Box::new(stream));
        }
        match self.trust.handshake(&self.host, stream).await {
            Ok(stream) => Ok(Box::new(stream)),
            Err(TlsHandshakeError::Untrusted(error)) => {
                Err(DaemonDialError::Untrusted(format_error_chain(&error)))
            }
            Err(TlsHandshakeError::Failed(error)) => Err(unreachable(error)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A home without files, in a folder that is deleted with the first value.
    fn home() -> (tempfile::TempDir, DaemonHome) {
        let folder = tempfile::tempdir().unwrap();
        let home = DaemonHome::resolve(Some(folder.path().to_owned()));
        (folder, home)
    }

    #[test]
    fn a_daemon_elsewhere_is_joined_over_tls_alone() {
        for (url, host) in [
            ("https://deck.example:7777", "https://deck.example:7777"),
            ("wss://deck.example/", "https://deck.example:443"),
            ("ws://127.0.0.1:7777", "http://127.0.0.1:7777"),
            ("http://localhost:7777/", "http://localhost:7777"),
            ("http://[::1]:7777", "http://[::1]:7777"),
        ] {
            assert_eq!(parse_daemon_url(url).unwrap().to_string(), host, "{url}");
        }
        for url in [
            "http://deck.example:7777",
            "ws://10.0.0.1:80",
            "deck.example:7777",
            "unix:/run/qd.sock",
            "https://",
        ] {
            assert_eq!(parse_daemon_url(url).unwrap_err().exit_code(), CliExitCode::Usage, "{url}");
        }
    }

    #[test]
    fn a_machine_prints_how_sessions_choose_it() {
        let (_folder, home) = home();
        let script = collect_offers(&home, &["script".to_owned()]).unwrap();
        let labels = ["gpu".to_owned(), "big".to_owned()];
        assert_eq!(
            describe_choices(&labels, &script),
            "sessions run here with --agent script@gpu, script@big"
        );
        assert!(describe_choices(&[], &script).contains("--label"));
    }

    #[test]
    fn only_known_agents_can_be_offered() {
        let (_folder, home) = home();
        assert!(collect_offers(&home, &[]).unwrap().iter().any(|offer| offer.agent.name == "echo"));
        assert_eq!(collect_offers(&home, &["script".to_owned()]).unwrap().len(), 1);
        assert_eq!(
            collect_offers(&home, &["nobody".to_owned()]).unwrap_err().exit_code(),
            CliExitCode::Usage
        );
    }
}
