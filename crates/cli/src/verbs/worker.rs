//! `qd worker --listen`: serves an agent of this build to any parent that speaks the frames of a worker. The frames and
//! the modes are in `qd-link`, the agents in `qd-worker`; here are the command line, the certificate and the end.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use clap::{Args, ValueEnum};
use qd_catalog::{Catalog, find};
use qd_link::announce::{Announcement, record_of_this_process};
use qd_link::{Executor, Serve, ServeError, Server, Transport};
use qd_protocol::WorkerId;
use rustls::ServerConfig;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use serde_json::json;
use tokio::net::TcpStream;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;
use tokio_util::sync::CancellationToken;

use super::Context;
use crate::args::seconds;
use crate::failure::{Exit, Failure, Result};

/// How long `reusable` waits for the next parent, unless it is told.
const IDLE_S: f64 = 600.0;
/// What parents have to show, kept out of the list of processes.
const TOKEN: &str = "QD_WORKER_TOKEN";
/// Random bytes in the name of an announced worker.
const NAME_BYTES: usize = 16;

/// `qd worker --listen ADDR --agent A`.
#[derive(Debug, Args)]
pub(crate) struct Flags {
    /// Where to listen: HOST:PORT; port 0 is any free one
    #[arg(long, value_name = "ADDR", value_parser = address)]
    listen: String,
    /// The agent to serve; each run gets a fresh one
    #[arg(long, value_name = "A")]
    agent: String,
    /// Which connections to take
    #[arg(long, value_enum, default_value_t = Mode::Many)]
    serve: Mode,
    /// With `--serve one`: give up after so many seconds without a connection, with exit code 124
    #[arg(long, value_name = "N", value_parser = seconds)]
    accept_timeout_s: Option<f64>,
    /// With `--serve reusable`: end after so many seconds without a connection [default: 600]
    #[arg(long, value_name = "N", value_parser = seconds)]
    idle_timeout_s: Option<f64>,
    /// Keep a record of this worker in this folder
    #[arg(long, value_name = "DIR")]
    announce: Option<PathBuf>,
    /// What parents have to show as `Authorization: Bearer T`; needed where other machines reach it
    /// [default: $QD_WORKER_TOKEN]
    #[arg(long, value_name = "T")]
    token: Option<String>,
    /// The certificate, PEM; needed where other machines reach it
    #[arg(long, value_name = "FILE", requires = "tls_key")]
    tls_cert: Option<PathBuf>,
    /// Its key, PEM
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    tls_key: Option<PathBuf>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Mode {
    /// The first, and end with it
    One,
    /// One after another, and end when idle
    Reusable,
    /// Any number at once
    Many,
}

/// Serves until it is done or told to end.
pub(crate) async fn worker(context: &Context, flags: Flags) -> Result<Exit> {
    let mode = mode(&flags)?;
    let catalog = Catalog::of_user(&context.whereabouts.home.agent_folders());
    let Some(manifest) = catalog.get(&flags.agent) else {
        let known: Vec<&str> =
            catalog.entries().iter().map(|entry| entry.manifest.agent.name.as_str()).collect();
        let message = format!("there is no agent {}; known are: {}", flags.agent, known.join(", "));
        return Err(Failure::Usage(message));
    };
    let executor = qd_worker::executor(find::located(manifest));
    let server = Server::bind(flags.listen.as_str()).await;
    let server = server.with_context(|| flags.listen.clone())?;
    // Not by clap: a variable that counts as a flag of this verb would get in the way of `qd worker join`.
    let token = flags.token.clone().or_else(|| std::env::var(TOKEN).ok().filter(|token| !token.is_empty()));
    let server = match token {
        Some(token) => server.token(token),
        None => server,
    };
    match (&flags.tls_cert, &flags.tls_key) {
        (Some(cert), Some(key)) => {
            serve(context, &flags, server.over(Tls::read(cert, key)?), executor, mode).await
        }
        _ => serve(context, &flags, server, executor, mode).await,
    }
}

async fn serve<T: Transport>(
    context: &Context,
    flags: &Flags,
    server: Server<T>,
    executor: impl Executor,
    mode: Serve,
) -> Result<Exit> {
    if server.is_exposed() {
        return Err(Failure::Usage(ServeError::Exposed(server.address()).to_string()));
    }
    let stop = CancellationToken::new();
    let (terminate, interrupt) = (signal(SignalKind::terminate()), signal(SignalKind::interrupt()));
    let signals = (terminate.map_err(anyhow::Error::from)?, interrupt.map_err(anyhow::Error::from)?);
    let endpoint = server.endpoint();
    // It is withdrawn when this is dropped: at the end, however that comes.
    let _announcement =
        flags.announce.as_deref().map(|dir| announce(dir, &flags.agent, &endpoint)).transpose()?;
    match context.out.json {
        true => context.out.value(&json!({ "listening_on": endpoint }))?,
        false => context.out.line(&format!("listening on {endpoint}"))?,
    }
    // Boxed: TLS and all that is served would lie on the stack of every other verb.
    let serving = Box::pin(server.until(stop.clone()).serve(executor, mode));
    let ended = tokio::select! {
        ended = told_to_end(signals, &stop) => ended,
        ended = serving => ended,
    };
    match ended {
        Ok(()) => Ok(Exit::Well),
        Err(error @ ServeError::NobodyCame(_)) => Err(Failure::TimedOut(error.to_string())),
        Err(error) => Err(Failure::Other(error.into())),
    }
}

/// The first signal ends everything politely; the second is not waited for.
async fn told_to_end(
    (mut terminate, mut interrupt): (Signal, Signal),
    stop: &CancellationToken,
) -> std::result::Result<(), ServeError> {
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

/// What can be listened on. Whether the host is one of this machine's, only the kernel knows.
fn address(text: &str) -> std::result::Result<String, String> {
    match text.rsplit_once(':') {
        Some((host, port)) if !host.is_empty() && port.parse::<u16>().is_ok() => Ok(text.to_owned()),
        _ => Err("a worker listens on HOST:PORT; port 0 is any free one".to_owned()),
    }
}

/// What is said of a mode that was not chosen is a mistake, and not ignored.
fn mode(flags: &Flags) -> Result<Serve> {
    let Flags { serve, accept_timeout_s, idle_timeout_s, .. } = flags;
    if accept_timeout_s.is_some() && *serve != Mode::One {
        return Err(Failure::Usage("--accept-timeout-s goes with --serve one".to_owned()));
    }
    if idle_timeout_s.is_some() && *serve != Mode::Reusable {
        return Err(Failure::Usage("--idle-timeout-s goes with --serve reusable".to_owned()));
    }
    Ok(match serve {
        Mode::One => Serve::One { accept_timeout: accept_timeout_s.map(Duration::from_secs_f64) },
        Mode::Reusable => {
            Serve::Reusable { idle_timeout: Duration::from_secs_f64(idle_timeout_s.unwrap_or(IDLE_S)) }
        }
        Mode::Many => Serve::Many,
    })
}

fn announce(dir: &Path, agent: &str, endpoint: &str) -> Result<Announcement> {
    let mut random = [0; NAME_BYTES];
    getrandom::fill(&mut random)
        .map_err(|error| anyhow::anyhow!("the system gives no random numbers: {error}"))?;
    let name = WorkerId::from_random(&random);
    let announced = Announcement::begin(dir, record_of_this_process(name.as_str(), agent, endpoint));
    Ok(announced.with_context(|| format!("--announce {} cannot be used", dir.display()))?)
}

/// TLS with a certificate from files.
struct Tls(TlsAcceptor);

impl Tls {
    fn read(cert: &Path, key: &Path) -> Result<Self> {
        let unusable = |path: &Path| format!("{} cannot be used", path.display());
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

impl Transport for Tls {
    type Wire = TlsStream<TcpStream>;
    const PRIVATE: bool = true;

    async fn wrap(&self, stream: TcpStream) -> io::Result<Self::Wire> {
        self.0.accept(stream).await
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        flags: Flags,
    }

    fn read(more: &[&str]) -> Result<Serve> {
        let line = ["worker", "--listen", "127.0.0.1:0", "--agent", "echo"].iter().chain(more);
        mode(&Line::parse_from(line).flags)
    }

    #[test]
    fn each_mode_has_its_own_patience_and_no_other() {
        assert_eq!(read(&[]).unwrap(), Serve::Many);
        assert_eq!(read(&["--serve", "one"]).unwrap(), Serve::One { accept_timeout: None });
        let half = Some(Duration::from_millis(500));
        let timed = read(&["--serve", "one", "--accept-timeout-s", "0.5"]).unwrap();
        assert_eq!(timed, Serve::One { accept_timeout: half });
        let idle = Serve::Reusable { idle_timeout: Duration::from_secs(600) };
        assert_eq!(read(&["--serve", "reusable"]).unwrap(), idle);
        for wrong in [&["--accept-timeout-s", "1"][..], &["--serve", "one", "--idle-timeout-s", "1"]] {
            assert_eq!(read(wrong).unwrap_err().exit(), Exit::Usage);
        }
    }
}
