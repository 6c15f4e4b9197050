//! `qd worker --listen`: serves an agent to any parent that speaks the worker frames. The frames and serve modes are in
//! `qd-worker-sdk`, the agents in `qd-worker`; this file has the command line, the TLS certificate and the shutdown.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use clap::{Args, ValueEnum};
use qd_catalog::{Catalog, programs};
use qd_link::LinkSubprotocol;
use qd_protocol::WorkerId;
use qd_worker_sdk::announce::{LeaseAnnouncement, record_of_this_process};
use qd_worker_sdk::{Executor, ServeMode, ServerTransport, WorkerServeError, WorkerServer};
use rustls::ServerConfig;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use serde_json::json;
use tokio::net::TcpStream;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;
use tokio_util::sync::CancellationToken;

use super::VerbContext;
use crate::args::seconds;
use crate::failure::{CliExitCode, CliFailure, Result};

/// How long `--serve reusable` waits for the next parent by default, in seconds.
const DEFAULT_IDLE_TIMEOUT_S: f64 = 600.0;
/// Environment variable with the token that parents must present. Unlike a flag it is not visible in the process list.
const TOKEN_VAR: &str = "QD_WORKER_TOKEN";
/// Random bytes in the id of an announced worker.
const NAME_BYTES: usize = 16;

/// `qd worker --listen ADDR --agent AGENT`.
#[derive(Debug, Args)]
pub(crate) struct WorkerArgs {
    /// Address to listen on: HOST:PORT (port 0: any free port)
    #[arg(long, value_name = "ADDR", value_parser = address)]
    listen: String,
    /// Agent to serve; each run gets a new instance
    #[arg(long, value_name = "AGENT")]
    agent: String,
    /// Which connections to accept
    #[arg(long, value_enum, value_name = "MODE", default_value_t = WorkerServeMode::Many)]
    serve: WorkerServeMode,
    /// With `--serve one`: exit with code 124 after this many seconds without a connection
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    accept_timeout_s: Option<f64>,
    /// With `--serve reusable`: exit after this many seconds without a connection [default: 600]
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    idle_timeout_s: Option<f64>,
    /// Directory in which to keep a record of this worker while it runs
    #[arg(long, value_name = "DIR")]
    announce: Option<PathBuf>,
    /// Token that parents must send as `Authorization: Bearer TOKEN`; required if other machines can connect
    /// [default: $QD_WORKER_TOKEN]
    #[arg(long, value_name = "TOKEN")]
    token: Option<String>,
    /// TLS certificate (PEM); required if other machines can connect
    #[arg(long, value_name = "FILE", requires = "tls_key")]
    tls_cert: Option<PathBuf>,
    /// Private key of the certificate (PEM)
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    tls_key: Option<PathBuf>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum WorkerServeMode {
    /// Accept one connection and exit when it closes
    One,
    /// Accept one connection after another and exit when idle
    Reusable,
    /// Accept any number of connections at once
    Many,
}

/// Serves until the serve mode ends it, or until a signal.
pub(crate) async fn worker(context: &VerbContext, flags: WorkerArgs) -> Result<CliExitCode> {
    let mode = serve_mode(&flags)?;
    let catalog = Catalog::with_user_folders(&context.locator.home.agent_folders());
    let Some(manifest) = catalog.get(&flags.agent) else {
        let known: Vec<&str> = catalog.entries().map(|entry| entry.manifest.agent.name.as_str()).collect();
        let message = format!("unknown agent {}; known agents: {}", flags.agent, known.join(", "));
        return Err(CliFailure::Usage(message));
    };
    let executor = qd_worker::executor(programs::with_program_path(manifest));
    let server = WorkerServer::bind(flags.listen.as_str()).await;
    let server = server.with_context(|| flags.listen.clone())?.with_subprotocol(LinkSubprotocol::default());
    // Not with clap's `env`: the variable would count as a flag here and conflict with `qd worker join`.
    let token =
        flags.token.clone().or_else(|| std::env::var(TOKEN_VAR).ok().filter(|token| !token.is_empty()));
    let server = match token {
        Some(token) => server.with_token(token),
        None => server,
    };
    match (&flags.tls_cert, &flags.tls_key) {
        (Some(cert), Some(key)) => {
            serve(context, &flags, server.with_transport(WorkerTls::from_files(cert, key)?), executor, mode)
                .await
        }
        _ => serve(context, &flags, server, executor, mode).await,
    }
}

async fn serve<T: ServerTransport>(
    context: &VerbContext,
    flags: &WorkerArgs,
    server: WorkerServer<T, LinkSubprotocol>,
    executor: impl Executor,
    mode: ServeMode,
) -> Result<CliExitCode> {
    if server.is_exposed() {
        return Err(CliFailure::Usage(WorkerServeError::Exposed(server.address()).to_string()));
    }
    let stop = CancellationToken::new();
    let (terminate, interrupt) = (signal(SignalKind::terminate()), signal(SignalKind::interrupt()));
    let signals = (terminate.map_err(anyhow::Error::from)?, interrupt.map_err(anyhow::Error::from)?);
    let endpoint = server.endpoint();
    // Dropping the announcement withdraws it, however this function ends.
    let _announcement =
        flags.announce.as_deref().map(|dir| announce(dir, &flags.agent, &endpoint)).transpose()?;
    match context.out.json {
        true => context.out.print_json(&json!({ "listening_on": endpoint }))?,
        false => context.out.print_line(&format!("listening on {endpoint}"))?,
    }
    // Boxed, because otherwise this large future would be part of the stack frame of every verb.
    let serving = Box::pin(server.with_shutdown(stop.clone()).serve(executor, mode));
    let result = tokio::select! {
        result = wait_for_signals(signals, &stop) => result,
        result = serving => result,
    };
    match result {
        Ok(()) => Ok(CliExitCode::Success),
        Err(error @ WorkerServeError::NoConnection(_)) => Err(CliFailure::TimedOut(error.to_string())),
        Err(error) => Err(CliFailure::Other(error.into())),
    }
}

/// The first signal starts a graceful shutdown; the second returns at once.
async fn wait_for_signals(
    (mut terminate, mut interrupt): (Signal, Signal),
    stop: &CancellationToken,
) -> std::result::Result<(), WorkerServeError> {
    for _ in 0..2 {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        if stop.is_cancelled() {
            break;
        }
        stop.cancel();
    }
    Ok(())
}

/// Checks the form of a listen address. Only binding can tell whether the host belongs to this machine.
fn address(text: &str) -> std::result::Result<String, String> {
    match text.rsplit_once(':') {
        Some((host, port)) if !host.is_empty() && port.parse::<u16>().is_ok() => Ok(text.to_owned()),
        _ => Err("expected HOST:PORT; port 0 is any free port".to_owned()),
    }
}

/// The serve mode. A timeout flag of another mode is an error.
fn serve_mode(flags: &WorkerArgs) -> Result<ServeMode> {
    let WorkerArgs { serve, accept_timeout_s, idle_timeout_s, .. } = flags;
    if accept_timeout_s.is_some() && *serve != WorkerServeMode::One {
        return Err(CliFailure::Usage("--accept-timeout-s needs --serve one".to_owned()));
    }
    if idle_timeout_s.is_some() && *serve != WorkerServeMode::Reusable {
        return Err(CliFailure::Usage("--idle-timeout-s needs --serve reusable".to_owned()));
    }
    Ok(match serve {
        WorkerServeMode::One => {
            ServeMode::One { accept_timeout: accept_timeout_s.map(Duration::from_secs_f64) }
        }
        WorkerServeMode::Reusable => ServeMode::Reusable {
            idle_timeout: Duration::from_secs_f64(idle_timeout_s.unwrap_or(DEFAULT_IDLE_TIMEOUT_S)),
        },
        WorkerServeMode::Many => ServeMode::Many,
    })
}

fn announce(dir: &Path, agent: &str, endpoint: &str) -> Result<LeaseAnnouncement> {
    let mut random = [0; NAME_BYTES];
    getrandom::fill(&mut random)
        .map_err(|error| anyhow::anyhow!("cannot read random bytes from the kernel: {error}"))?;
    let id = WorkerId::from_random(&random);
    let announced = LeaseAnnouncement::publish(dir, record_of_this_process(id.as_str(), agent, endpoint));
    Ok(announced.with_context(|| format!("cannot use --announce {}", dir.display()))?)
}

/// TLS with a certificate from PEM files.
struct WorkerTls(TlsAcceptor);

impl WorkerTls {
    fn from_files(cert: &Path, key: &Path) -> Result<Self> {
        let unusable = |path: &Path| format!("cannot use {}", path.display());
        let chain = CertificateDer::pem_file_iter(cert).and_then(Iterator::collect);
        let chain = chain.with_context(|| unusable(cert))?;
        let secret = PrivateKeyDer::from_pem_file(key).with_context(|| unusable(key))?;
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .and_then(|builder| builder.with_no_client_auth().with_single_cert(chain, secret));
        Ok(Self(TlsAcceptor::from(Arc::new(config.with_context(|| unusable(cert))?))))
    }
}

impl ServerTransport for WorkerTls {
    type WrappedStream = TlsStream<TcpStream>;
    const ENCRYPTED: bool = true;

    async fn wrap(&self, stream: TcpStream) -> io::Result<Self::WrappedStream> {
        self.0.accept(stream).await
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct WorkerCommandLine {
        #[command(flatten)]
        flags: WorkerArgs,
    }

    fn parse_mode(more: &[&str]) -> Result<ServeMode> {
        let line = ["worker", "--listen", "127.0.0.1:0", "--agent", "echo"].iter().chain(more);
        serve_mode(&WorkerCommandLine::parse_from(line).flags)
    }

    #[test]
    fn each_mode_has_its_own_timeout_flag() {
        assert_eq!(parse_mode(&[]).unwrap(), ServeMode::Many);
        assert_eq!(parse_mode(&["--serve", "one"]).unwrap(), ServeMode::One { accept_timeout: None });
        let half = Some(Duration::from_millis(500));
        let timed = parse_mode(&["--serve", "one", "--accept-timeout-s", "0.5"]).unwrap();
        assert_eq!(timed, ServeMode::One { accept_timeout: half });
        let idle = ServeMode::Reusable { idle_timeout: Duration::from_secs(600) };
        assert_eq!(parse_mode(&["--serve", "reusable"]).unwrap(), idle);
        for wrong in [&["--accept-timeout-s", "1"][..], &["--serve", "one", "--idle-timeout-s", "1"]] {
            assert_eq!(parse_mode(wrong).unwrap_err().exit_code(), CliExitCode::Usage);
        }
    }
}
