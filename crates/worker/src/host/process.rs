//! The worker process, started as `qd __worker`: reads its specification from standard input, announces itself, and
//! accepts connections until its sessions have ended. It outlives the daemon that started it.

use qd_drivers::agent_launcher::{AgentLauncher, AgentLocation};
use std::io::Read;
use std::os::fd::AsFd;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use qd_keeper::process_setup;
use qd_link::socket::Socket;
use qd_protocol::frame::{terminal, v1};
use qd_protocol::worker::{AgentSpec, WorkerHostSpec};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tokio::net::{UnixListener, UnixStream};
use tokio::signal::unix::{SignalKind, signal};
use tokio::task::JoinSet;
use tokio_tungstenite::tungstenite::http::StatusCode;
use tokio_tungstenite::tungstenite::http::header::SEC_WEBSOCKET_PROTOCOL;

use super::{WorkerHost, WorkerHostOptions};
use crate::announcement::{WorkerAnnounceError, WorkerAnnouncement};
use crate::process_log;

/// How long the daemon may take to send the specification.
const SPEC_WAIT: Duration = Duration::from_secs(10);
/// The largest specification, in bytes.
const SPEC_MAX: usize = 64 << 20;
/// How long a process that sessions share waits for another session before it exits.
const IDLE_LINGER: Duration = Duration::from_secs(60);
/// The most connections at a time. A session has one, and for a moment after a break two.
const CONNECTIONS_MAX: usize = 4096;
/// Pause after a failed accept, in which a resource that ran out may become available again.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

#[derive(Debug, thiserror::Error)]
enum WorkerProcessError {
    #[error("failed to read the worker's specification: {0}")]
    ReadSpec(std::io::Error),
    #[error("the worker's specification did not come within {} s", SPEC_WAIT.as_secs())]
    SpecTimeout,
    #[error("the worker's specification is longer than {SPEC_MAX} bytes")]
    SpecTooLong,
    #[error("the worker's specification cannot be understood: {0}")]
    InvalidSpec(serde_json::Error),
    #[error(transparent)]
    Announce(#[from] WorkerAnnounceError),
    #[error("failed to start the worker: {0}")]
    Io(#[from] std::io::Error),
}

/// Runs a worker process to its end. Must be called before the program starts anything else, such as threads.
pub fn main() -> ExitCode {
    process_setup::set_process_name(c"qd-worker");
    // The worker outlives the daemon, whose listeners and client connections must not stay open in it.
    let closed = process_setup::close_inherited_descriptors();
    // The daemon has redirected stderr to a file; a healthy worker writes nothing to it.
    let log = process_log::log_to(std::io::stderr).with_max_level(tracing::Level::WARN).finish();
    // A subscriber is set already only where a test wants to see our log.
    let _ours = tracing::subscriber::set_global_default(log);
    let prepared = closed.and_then(|()| process_setup::survive_file_size_limit());
    match prepared.map_err(WorkerProcessError::from).and_then(|()| run()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<(), WorkerProcessError> {
    let spec = read_spec()?;
    // Closing a terminal or killing the daemon's process group must not reach us. This fails only if we already lead
    // a process group.
    if let Err(error) = rustix::process::setsid() {
        tracing::warn!(%error, "the worker failed to leave its terminal session");
    }
    qd_keeper::become_subreaper()?;
    // A worker must not keep the directory it was started in from being unmounted or removed.
    std::env::set_current_dir("/")?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let ended = runtime.block_on(run_host(spec));
    // Do not wait for a thread that is blocked on a file of somebody's workspace.
    runtime.shutdown_background();
    ended
}

/// Reads all of standard input, up to its end.
fn read_spec() -> Result<WorkerHostSpec, WorkerProcessError> {
    let deadline = Instant::now() + SPEC_WAIT;
    let mut stdin = std::io::stdin().lock();
    let mut json = Vec::new();
    loop {
        let remaining = deadline.saturating_duration_since(Instant::now());
        let limit = Timespec::try_from(remaining)
            .map_err(|error| WorkerProcessError::ReadSpec(std::io::Error::other(error)))?;
        let ready = poll(&mut [PollFd::new(&stdin.as_fd(), PollFlags::IN)], Some(&limit));
        if ready.map_err(|error| WorkerProcessError::ReadSpec(error.into()))? == 0 {
            return Err(WorkerProcessError::SpecTimeout);
        }
        let mut piece = [0; 64 << 10];
        match stdin.read(&mut piece).map_err(WorkerProcessError::ReadSpec)? {
            0 => return serde_json::from_slice(&json).map_err(WorkerProcessError::InvalidSpec),
            count => json.extend_from_slice(&piece[..count]),
        }
        if json.len() > SPEC_MAX {
            return Err(WorkerProcessError::SpecTooLong);
        }
    }
}

async fn run_host(spec: WorkerHostSpec) -> Result<(), WorkerProcessError> {
    let WorkerHostSpec { id, dir, secret, orphan_busy_ms, orphan_idle_ms, agents } = spec;
    let (mut announcement, listener) = WorkerAnnouncement::publish(&dir, &id)?;
    let mut terminate = signal(SignalKind::terminate())?;
    let host = WorkerHost::new(WorkerHostOptions {
        spool_dir: dir,
        secret,
        orphan_busy: Duration::from_millis(orphan_busy_ms),
        orphan_idle: Duration::from_millis(orphan_idle_ms),
    });
    let is_in_worker = |spec: &AgentSpec| {
        AgentLauncher::from_spec(spec).is_ok_and(|agent| agent.location() == AgentLocation::InWorker)
    };
    let linger = if agents.iter().all(is_in_worker) { IDLE_LINGER } else { Duration::ZERO };
    for spec in agents {
        if let Err(error) = host.open_session(Box::new(spec)) {
            tracing::warn!(%error, "failed to start an agent");
        }
    }
    let stop_when_done = async {
        tokio::select! {
            () = wait_until_unneeded(&host, linger) => {}
            _asked = terminate.recv() => {}
        }
        host.stop().await;
    };
    tokio::select! {
        // Connections are served to the very end, so that the daemon gets the last updates.
        () = accept_connections(&host, &listener) => {}
        () = announcement.renew_lease() => {}
        () = stop_when_done => {}
    }
    Ok(())
}

/// Accepts connections for ever. Dropping the future ends them.
async fn accept_connections(host: &WorkerHost, listener: &UnixListener) {
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            accepted = listener.accept(), if connections.len() < CONNECTIONS_MAX => match accepted {
                Ok((stream, _)) => { connections.spawn(serve_connection(host.clone(), stream)); }
                Err(error) => {
                    tracing::warn!(%error, "failed to accept a connection");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            },
            Some(ended) = connections.join_next() => {
                if let Err(error) = ended {
                    tracing::error!(%error, "a connection failed");
                }
            }
        }
    }
}

async fn serve_connection(host: WorkerHost, stream: UnixStream) {
    let upgraded = Socket::accept(stream, |request| {
        let offered = request.headers().get_all(SEC_WEBSOCKET_PROTOCOL);
        let ours = offered
            .iter()
            .filter_map(|names| names.to_str().ok())
            .flat_map(|names| names.split(','))
            .find(|name| [v1::SUBPROTOCOL, terminal::SUBPROTOCOL].contains(&name.trim()));
        match ours {
            Some(name) => Ok(Some(name.trim().to_owned())),
            None => Err((StatusCode::BAD_REQUEST, format!("offer the subprotocol {}", v1::SUBPROTOCOL))),
        }
    });
    let served = match upgraded.await {
        Ok((socket, Some(name))) if name == terminal::SUBPROTOCOL => host.serve_viewer(socket).await,
        Ok((socket, _)) => host.serve_connection(socket).await,
        Err(error) => Err(error),
    };
    if let Err(error) = served {
        // Daemons come and go; this only interests somebody who is debugging.
        tracing::debug!(%error, "a connection ended");
    }
}

/// Waits until there has been no session for `linger`.
async fn wait_until_unneeded(host: &WorkerHost, linger: Duration) {
    let mut count = host.session_count();
    loop {
        if count.wait_for(|count| *count == 0).await.is_err() {
            return;
        }
        tokio::select! {
            () = tokio::time::sleep(linger) => return,
            _more = count.wait_for(|count| *count > 0) => {}
        }
    }
}
