//! The worker process itself, what `qd __worker` runs: it reads what it is to be from its standard input, shows itself,
//! and takes connections until its sessions are gone. It outlives the daemon that started it.

use std::io::Read;
use std::os::fd::AsFd;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use qd_keeper::process_setup;
use qd_link::socket::Socket;
use qd_protocol::frame::{terminal, v1};
use qd_protocol::worker::WorkerHostSpec;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tokio::net::{UnixListener, UnixStream};
use tokio::signal::unix::{SignalKind, signal};
use tokio::task::JoinSet;
use tokio_tungstenite::tungstenite::http::StatusCode;
use tokio_tungstenite::tungstenite::http::header::SEC_WEBSOCKET_PROTOCOL;

use super::{WorkerHost, WorkerHostOptions};
use crate::agent_kind::AgentKind;
use crate::announcement::{WorkerAnnounceError, WorkerAnnouncement};

/// How long the daemon may take to say what this process is to be.
const SPEC_WAIT: Duration = Duration::from_secs(10);
/// The longest it may take to say it.
const SPEC_MAX: usize = 64 << 20;
/// How long a process that sessions share waits for the next one.
const IDLE_LINGER: Duration = Duration::from_secs(60);
/// Connections at once. A session has one, and for a moment after a break two.
const CONNECTIONS_MAX: usize = 4096;
/// After a failed accept: whatever is short may be there again.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Why a worker process cannot be what it should.
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

/// Runs a worker process to its end. To be called before anything else of the program has begun.
pub fn main() -> ExitCode {
    process_setup::set_process_name(c"qd-worker");
    // It outlives the daemon, whose listeners and clients must not live on in it.
    let closed = process_setup::close_inherited_descriptors();
    // The daemon has pointed stderr at a file; a worker that is well writes nothing into it.
    let log = tracing_subscriber::fmt()
        .with_writer(std::io::stderr)
        .with_ansi(false)
        .with_max_level(tracing::Level::WARN)
        .finish();
    // It is set already only where somebody else wants to see what we say.
    let _ours = tracing::subscriber::set_global_default(log);
    match closed.map_err(WorkerProcessError::from).and_then(|()| run()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<(), WorkerProcessError> {
    let spec = read_spec()?;
    // Closing a terminal or ending the daemon's group must not reach us; it fails only if we lead a group already.
    if let Err(error) = rustix::process::setsid() {
        tracing::warn!(%error, "the worker could not leave its session");
    }
    qd_keeper::become_subreaper()?;
    // No directory is kept from being removed by a worker that once was started there.
    std::env::set_current_dir("/")?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let ended = runtime.block_on(run_host(spec));
    // A thread that waits for a file of somebody's workspace is not waited for.
    runtime.shutdown_background();
    ended
}

/// All of standard input, to its end.
fn read_spec() -> Result<WorkerHostSpec, WorkerProcessError> {
    let until = Instant::now() + SPEC_WAIT;
    let mut stdin = std::io::stdin().lock();
    let mut json = Vec::new();
    loop {
        let left = until.saturating_duration_since(Instant::now());
        let limit = Timespec::try_from(left)
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
    let linger = if agents.iter().all(|spec| matches!(AgentKind::from_spec(spec), Ok(AgentKind::Echo))) {
        IDLE_LINGER
    } else {
        Duration::ZERO
    };
    for spec in agents {
        if let Err(error) = host.open_session(Box::new(spec)) {
            tracing::warn!(%error, "an agent could not be started");
        }
    }
    let end = async {
        tokio::select! {
            () = wait_until_unneeded(&host, linger) => {}
            _asked = terminate.recv() => {}
        }
        host.stop().await;
    };
    tokio::select! {
        // To the very end, so that the last words may be heard.
        () = accept_connections(&host, &listener) => {}
        () = announcement.renew_lease() => {}
        () = end => {}
    }
    Ok(())
}

/// Takes connections for ever; they end with it.
async fn accept_connections(host: &WorkerHost, listener: &UnixListener) {
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            accepted = listener.accept(), if connections.len() < CONNECTIONS_MAX => match accepted {
                Ok((stream, _)) => { connections.spawn(serve_connection(host.clone(), stream)); }
                Err(error) => {
                    tracing::warn!(%error, "a connection could not be taken");
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
        // A daemon may come and go as it likes; it is only of interest to somebody who looks for a fault.
        tracing::debug!(%error, "a connection ended");
    }
}

/// Waits until there has been no session for so long.
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
