//! The life of the daemon process: take the home, open the journal, listen, resume where the last daemon stopped, and
//! shut down when told to.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use qd_home::{
    BadListenAddress, CREDENTIAL_PATHS, ConfigError, DaemonConfig, DaemonHome, HomeError, ListenAddress,
};
use qd_journal::faults::{FaultInjector, InjectedCrash};
use qd_journal::{Journal, JournalOpenError, JournalOptions};
use qd_protocol::ApiError;
use qd_protocol::limits::{AGENT_MEMORY_PERCENT, STOP_S};
use qd_protocol::worker::{AgentLimits, SilenceRules};
use tokio::signal::unix::{SignalKind, signal};

use crate::agents::LocalAgents;
use crate::client_tokens::ClientTokenStore;
use crate::clock::read_clocks;
use crate::daemon::{Daemon, RestoredHolds};
use crate::descriptors::DescriptorShares;
use crate::edge::{self, CertificateSource, EdgeError};
use crate::http;
use crate::quotas::ExhaustedQuotas;
use crate::workers::{SandboxDefaults, WorkerTimeouts, Workers};

/// The options of `qd serve`.
#[derive(Debug, Clone, Default)]
pub struct ServeOptions {
    /// `--home`.
    pub home: Option<PathBuf>,
    /// `--listen`, as written. If empty, the configured addresses apply.
    pub listen: Vec<String>,
    /// `--allow-host`.
    pub allow_host: Vec<String>,
    /// The certificate for TCP.
    pub tls: Option<CertificateSource>,
}

/// Why the daemon did not start.
#[derive(Debug, thiserror::Error)]
pub enum DaemonServeError {
    /// The home directory cannot be used.
    #[error(transparent)]
    Home(#[from] HomeError),
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// A `--listen` address is not valid.
    #[error(transparent)]
    Address(#[from] BadListenAddress),
    /// The journal cannot be opened; another daemon may hold its lock.
    #[error(transparent)]
    Journal(#[from] JournalOpenError),
    /// An address cannot be listened on.
    #[error(transparent)]
    Edge(#[from] EdgeError),
    #[error("could not resume the work of the last daemon: {0}")]
    Recover(#[from] ApiError),
    /// An agent that could start a daemon could answer its own asks there.
    #[error(
        "an agent may not start a daemon, and this process ({pid}) descends from one; start the daemon from a shell \
         of your own"
    )]
    BelowAgent { pid: u32 },
    /// The async runtime or its signal handlers could not be set up.
    #[error("could not start: {0}")]
    Io(#[from] std::io::Error),
}

/// Runs the daemon until SIGTERM, SIGINT or `POST /v1/shutdown`. `announce` gets one line per address once clients
/// can connect to it. `exe` is our own binary, which is also the worker's.
pub fn serve(
    options: ServeOptions,
    exe: PathBuf,
    announce: &mut dyn FnMut(&str),
) -> Result<(), DaemonServeError> {
    let pid = std::process::id();
    if qd_keeper::descends_from_agent(pid) {
        return Err(DaemonServeError::BelowAgent { pid });
    }
    let shares = DescriptorShares::of_this_process();
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().thread_name("qd").build()?;
    let ended = runtime.block_on(run(options, exe, shares, announce));
    // Normally only blocking reads that nobody waits for are left.
    runtime.shutdown_timeout(Duration::from_millis(100));
    ended
}

/// In a build with debug assertions, `QD_DIE_AT=17` makes the daemon die just before append 17 is committed, and
/// `QD_DIE_AT=17+` just after. The test suites crash it once at each append.
fn faults_from_env() -> Option<Arc<FaultInjector>> {
    if !cfg!(debug_assertions) {
        return None;
    }
    let setting = std::env::var("QD_DIE_AT").ok()?;
    let append = setting.trim_end_matches('+').parse().ok()?;
    Some(Arc::new(FaultInjector::crashing_at(InjectedCrash { append, after_commit: setting.ends_with('+') })))
}

/// Adds the home's socket unless another one is named: the command line of this machine needs one. TCP addresses come
/// first, because whoever starts a daemon reads its port from the first line.
fn with_socket(mut addresses: Vec<ListenAddress>, home: &DaemonHome) -> Vec<ListenAddress> {
    let is_socket = |address: &ListenAddress| matches!(address, ListenAddress::Unix(_));
    if !addresses.iter().any(is_socket) {
        addresses.push(ListenAddress::Unix(home.socket()));
    }
    addresses.sort_by_key(is_socket);
    addresses
}

async fn run(
    options: ServeOptions,
    exe: PathBuf,
    shares: DescriptorShares,
    announce: &mut dyn FnMut(&str),
) -> Result<(), DaemonServeError> {
    let home = DaemonHome::resolve(options.home);
    home.prepare()?;
    let config = DaemonConfig::load(&home)?;
    let given =
        options.listen.iter().map(|text| text.parse::<ListenAddress>()).collect::<Result<Vec<_>, _>>()?;
    let listen = with_socket(if given.is_empty() { config.listen.value.clone() } else { given }, &home);
    let mut allow_host = config.allow_host.value.clone();
    allow_host.extend(options.allow_host);

    let daemon = open_daemon(home, &config, exe, shares).await?;
    daemon.spawn(probe_sandbox_support(Arc::clone(&daemon)));
    let limits = edge::EdgeLimits::with_shares(shares);
    let edge_options = edge::EdgeOptions { listen, allow_host, tls: options.tls, limits };
    let bound = edge::open(&daemon.home, edge_options).await?;
    let bound = bound.with_worker_tokens(Arc::clone(daemon.workers.worker_tokens()));
    let bound = bound.with_client_tokens(Arc::clone(&daemon.client_tokens));
    let bound = bound.with_session_tokens(daemon.workers.session_tokens().clone());
    let bound = bound.with_session_sockets(daemon.workers.session_sockets().clone());
    if let Some(address) = bound.join_address() {
        daemon.workers.set_join_address(address);
    }
    // Signal handlers come before the announcements: a client may connect as soon as it reads a line.
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    daemon.recover().await?;
    for line in bound.announcements() {
        announce(&line);
    }
    if let Some(fingerprint) = bound.fingerprint() {
        announce(&format!("certificate fingerprint {fingerprint}"));
    }
    tracing::info!(pid = std::process::id(), home = %daemon.home.path().display(), "started");

    daemon.spawn(Arc::clone(&daemon).supervise());
    daemon.spawn(Arc::clone(&daemon).watch_mail_folders());
    daemon.spawn(Arc::clone(&daemon).watch_journal());
    daemon.spawn(Arc::clone(&daemon).watch_old_text());
    daemon.spawn(Arc::clone(&daemon).keep_derived_data());
    let (router, _) = http::router(Arc::clone(&daemon));
    let mut stop_signal = daemon.stop_signal();
    let mut serving = Some(Box::pin(edge::serve(bound, router, daemon.stop_signal())));
    tokio::select! {
        () = async { if let Some(serving) = &mut serving { serving.await } } => serving = None,
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
        _ = stop_signal.wait_for(|stop| *stop) => {}
    }
    shut_down(&daemon, serving).await;
    Ok(())
}

/// Opens the journal, and makes the daemon with all that the last one left there. Nothing is woken yet.
async fn open_daemon(
    home: DaemonHome,
    config: &DaemonConfig,
    exe: PathBuf,
    shares: DescriptorShares,
) -> Result<Arc<Daemon>, DaemonServeError> {
    let journal = Journal::open(
        home.path(),
        JournalOptions {
            faults: faults_from_env(),
            read_uptime: || read_clocks().uptime,
            ..JournalOptions::default()
        },
    )?;
    let halt = Daemon::read_halt(&journal).await?;
    let quotas = ExhaustedQuotas::new(Daemon::read_quotas(&journal).await?);
    let timeouts = WorkerTimeouts {
        lease: Duration::from_secs(config.remote_lease_s.value),
        reach: Duration::from_secs(config.reach_timeout_s.value),
        orphan_busy: Duration::from_secs(config.orphan_busy_s.value),
        orphan_idle: Duration::from_secs(config.orphan_idle_s.value),
    };
    let millis = |seconds: u64| (seconds > 0).then_some(seconds.saturating_mul(1000));
    let silence = SilenceRules {
        notice_ms: millis(config.silence_notice_s.value),
        end_ms: millis(config.silence_timeout_s.value),
    };
    let limited = |value: u64| (value > 0).then_some(value);
    let limits = AgentLimits {
        processes: limited(config.max_processes.value),
        memory_mb: config.max_memory_mb.value.and_then(limited),
        memory_percent: config.max_memory_mb.value.is_none().then_some(AGENT_MEMORY_PERCENT),
        output_mb_per_min: limited(config.max_output_mb_per_min.value),
    };
    let agents = LocalAgents::new(&home, config.prices.value.clone(), silence, limits);
    let sandbox = SandboxDefaults {
        level: config.sandbox.value,
        network: config.network.value,
        credential_paths: config
            .credential_paths
            .value
            .clone()
            .unwrap_or_else(|| CREDENTIAL_PATHS.map(str::to_owned).to_vec()),
        model_hosts: config.model_hosts.value.clone(),
    };
    let workers = Workers::new(&home, exe, agents, timeouts, sandbox)?;
    let client_tokens = Arc::new(ClientTokenStore::open(&home)?);
    let daemon =
        Daemon::new(journal, home, workers, client_tokens, config, shares, RestoredHolds { halt, quotas });
    daemon.load_workspaces().await?;
    Ok(daemon)
}

async fn probe_sandbox_support(daemon: Arc<Daemon>) {
    let probed = tokio::task::spawn_blocking(move || daemon.workers.probe_sandbox_support()).await;
    if let Err(error) = probed {
        tracing::error!(%error, "could not find out how this machine can confine agents");
    }
}

/// Ends open requests and tasks, and closes the journal. `serving` is the server, unless it has ended by itself.
async fn shut_down(daemon: &Daemon, serving: Option<impl Future<Output = ()>>) {
    tracing::info!("stopping");
    daemon.stop();
    let shutdown = async {
        if let Some(serving) = serving {
            serving.await;
        }
        daemon.end_tasks().await;
    };
    // Half of the time is for open requests and tasks, the rest for the last flush.
    if tokio::time::timeout(Duration::from_millis(STOP_S * 500), shutdown).await.is_err() {
        tracing::warn!("some requests did not end in time and were cut");
    }
    daemon.journal.close().await;
    tracing::info!("stopped");
}
