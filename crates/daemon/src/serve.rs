//! The daemon's life: own the home, read what is, listen, go on where the last one stopped, and end when told to.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use qd_journal::faults::{FaultInjector, InjectedCrash};
use qd_journal::{Journal, JournalOpenError, JournalOptions};
use qd_protocol::ApiError;
use qd_protocol::limits::STOP_S;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::signal::unix::{SignalKind, signal};

use crate::agents::LocalAgents;
use crate::config::{ConfigError, DaemonConfig};
use crate::daemon::Daemon;
use crate::edge::{self, CertificateSource, EdgeError, ListenAddress};
use crate::home::{DaemonHome, HomeError};
use crate::http;
use crate::workers::{WorkerTimeouts, Workers};

/// Descriptors that are wanted.
const DESCRIPTOR_LIMIT: u64 = 65_536;
/// How long the first answer may wait for what the last daemon left to be settled.
const SETTLE_TIMEOUT: Duration = Duration::from_millis(500);

/// What `qd serve` was told.
#[derive(Debug, Clone, Default)]
pub struct ServeOptions {
    /// `--home`.
    pub home: Option<PathBuf>,
    /// `--listen`, as written; nothing: as configured, else the default socket alone.
    pub listen: Vec<String>,
    /// `--allow-host`.
    pub allow_host: Vec<String>,
    /// The certificate for TCP.
    pub tls: Option<CertificateSource>,
}

/// Why the daemon did not start, or did not end well.
#[derive(Debug, thiserror::Error)]
pub enum DaemonServeError {
    /// The home cannot be used.
    #[error(transparent)]
    Home(#[from] HomeError),
    /// A settings file cannot be read.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// An address is not one.
    #[error(transparent)]
    Address(#[from] edge::listen::BadListenAddress),
    /// The journal cannot be opened; perhaps another daemon has it.
    #[error(transparent)]
    Journal(#[from] JournalOpenError),
    /// Nothing can be listened on.
    #[error(transparent)]
    Edge(#[from] EdgeError),
    /// The journal cannot be read.
    #[error("could not go on where the last daemon stopped: {0}")]
    Recover(#[from] ApiError),
    /// The runtime or its signals.
    #[error("could not start: {0}")]
    Io(#[from] std::io::Error),
}

/// Runs the daemon until SIGTERM, SIGINT or `POST /v1/shutdown`. `announce` gets one line per address once
/// connections are taken there. `exe` is our own binary, which is also the worker's.
pub fn serve(
    options: ServeOptions,
    exe: PathBuf,
    announce: &mut dyn FnMut(&str),
) -> Result<(), DaemonServeError> {
    raise_descriptor_limit();
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().thread_name("qd").build()?;
    let ended = runtime.block_on(run(options, exe, announce));
    // What is left can only be reads that nobody waits for.
    runtime.shutdown_timeout(Duration::from_millis(100));
    ended
}

/// Connections, links and readers have a descriptor each, and the usual soft limit is 1024. Where it cannot be raised we
/// live with what there is.
/// A build with debug assertions can be told to die at an append: `QD_DIE_AT=17`, just before it is kept, or
/// `QD_DIE_AT=17+`, just after. So the suites hit each of them once.
fn faults_from_env() -> Option<Arc<FaultInjector>> {
    if !cfg!(debug_assertions) {
        return None;
    }
    let told = std::env::var("QD_DIE_AT").ok()?;
    let append = told.trim_end_matches('+').parse().ok()?;
    Some(Arc::new(FaultInjector::crashing_at(InjectedCrash { append, after_commit: told.ends_with('+') })))
}

fn raise_descriptor_limit() {
    let limit = getrlimit(Resource::Nofile);
    let wanted = limit.maximum.map_or(DESCRIPTOR_LIMIT, |most| most.min(DESCRIPTOR_LIMIT));
    if limit.current.is_some_and(|now| now < wanted) {
        let raised = setrlimit(Resource::Nofile, Rlimit { current: Some(wanted), ..limit });
        tracing::debug!(?raised, wanted, "the limit on descriptors");
    }
}

async fn run(
    options: ServeOptions,
    exe: PathBuf,
    announce: &mut dyn FnMut(&str),
) -> Result<(), DaemonServeError> {
    let home = DaemonHome::resolve(options.home);
    home.prepare()?;
    let config = DaemonConfig::load(&home)?;
    let mut listen =
        options.listen.iter().map(|text| text.parse::<ListenAddress>()).collect::<Result<Vec<_>, _>>()?;
    if listen.is_empty() {
        listen = config.listen.value.clone();
    }
    if listen.is_empty() {
        listen.push(ListenAddress::Unix(home.socket()));
    }
    let mut allow_host = config.allow_host.value.clone();
    allow_host.extend(options.allow_host);

    let journal = Journal::open(
        home.path(),
        JournalOptions { faults: faults_from_env(), ..JournalOptions::default() },
    )?;
    let halt = Daemon::read_halt(&journal).await?;
    let waits = WorkerTimeouts {
        lease: Duration::from_secs(config.remote_lease_s.value),
        orphan_busy: Duration::from_secs(config.orphan_busy_s.value),
        orphan_idle: Duration::from_secs(config.orphan_idle_s.value),
    };
    let agents = LocalAgents::new(&home, config.prices.value.clone());
    let workers = Workers::new(&home, exe, agents, waits)?;
    let daemon = Daemon::new(journal, home, workers, &config, halt);
    daemon.load_workspaces().await?;

    let edge_options =
        edge::EdgeOptions { listen, allow_host, tls: options.tls, limits: edge::EdgeLimits::default() };
    let bound = edge::open(&daemon.home, edge_options).await?;
    let bound = bound.with_worker_tokens(Arc::clone(daemon.workers.worker_tokens()));
    let bound = bound.with_session_tokens(daemon.workers.session_tokens().clone());
    if let Some(host) = bound.local_address() {
        daemon.workers.set_daemon_address(host);
    }
    if let Some(door) = bound.join_address() {
        daemon.workers.set_join_address(door);
    }
    // Handlers first, then words: whoever reads a line may connect at once.
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    daemon.wake_live_sessions().await?;
    daemon.wake_fleets().await?;
    // What the last daemon left is settled before anybody can ask: a run that died with it is not shown as running.
    // A very long list of them is not worth the wait; those are settled as they come.
    let settled = tokio::time::timeout(SETTLE_TIMEOUT, daemon.wait_for_commits()).await;
    tracing::debug!(all = settled.is_ok(), "settled what the last daemon left");
    for line in bound.announcements() {
        announce(&line);
    }
    if let Some(fingerprint) = bound.fingerprint() {
        announce(&format!("certificate fingerprint {fingerprint}"));
    }
    tracing::info!(pid = std::process::id(), home = %daemon.home.path().display(), "started");

    daemon.spawn(Arc::clone(&daemon).supervise());
    daemon.spawn(Arc::clone(&daemon).watch_mail_folders());
    let (router, _) = http::router(Arc::clone(&daemon));
    let mut told = daemon.stop_signal();
    let mut serving = Some(Box::pin(edge::serve(bound, router, daemon.stop_signal())));
    tokio::select! {
        () = async { if let Some(serving) = &mut serving { serving.await } } => serving = None,
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
        _ = told.wait_for(|stop| *stop) => {}
    }
    tracing::info!("stopping");
    daemon.stop();
    let quiet = async {
        if let Some(serving) = serving {
            serving.await;
        }
        daemon.end_tasks().await;
    };
    // Half of the time for what is under way, the rest for the last flush.
    if tokio::time::timeout(Duration::from_millis(STOP_S * 500), quiet).await.is_err() {
        tracing::warn!("some requests did not end in time and were cut");
    }
    daemon.journal.close().await;
    tracing::info!("stopped");
    Ok(())
}
