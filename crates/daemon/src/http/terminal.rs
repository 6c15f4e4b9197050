//! Terminals: a person's WebSocket is joined to the one of the session's worker, frame by frame. What goes by is neither
//! read nor kept here.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::State;
use axum::response::Response;
use qd_link::socket::{Incoming, Moved, Role, Socket, SocketError, Wire};
use qd_protocol::error::ErrorBody;
use qd_protocol::frame::terminal::SUBPROTOCOL;
use qd_protocol::limits::HEARTBEAT_S;
use qd_protocol::{SessionId, WorkspaceId};
use tokio::time::Instant;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::describe::{Guarded, InSession, Missing};
use super::extract::Ids;
use super::sessions::find;
use crate::daemon::{Daemon, stopping};
use crate::edge::{Refusal, Upgrade};

/// Silence before a person's end is asked for a sign of life; it counts as gone after three times that.
const PING: Duration = Duration::from_secs(HEARTBEAT_S);

pub(super) fn routes() -> OpenApiRouter<Arc<Daemon>> {
    OpenApiRouter::new().routes(routes!(terminal))
}

/// The screen of a session's terminal, and keys for it. A WebSocket of the subprotocol `quarterdeck.terminal.v1`; any
/// number may look.
#[utoipa::path(get, path = "/v1/workspaces/{w}/sessions/{s}/terminal", operation_id = "terminal", tag = "sessions",
    params(InSession), responses(
    (status = 101, description = "The connection to the terminal"),
    (status = 400, description = "`invalid_request`: not an upgrade, or not to this subprotocol", body = ErrorBody),
    (status = 409, description = "`no_terminal`: its agent has none, or does not run", body = ErrorBody),
    Missing, Guarded,
))]
async fn terminal(
    State(daemon): State<Arc<Daemon>>,
    Ids((workspace, session)): Ids<(WorkspaceId, SessionId)>,
    upgrade: Upgrade,
) -> Result<Response, Refusal> {
    find(&daemon, &workspace, &session).await?;
    let upgrade = upgrade.offering(SUBPROTOCOL)?;
    if daemon.is_stopping() {
        return Err(stopping().into());
    }
    let worker = daemon.workers.look(&session).await?;
    let (response, line) = upgrade.accept(SUBPROTOCOL);
    let mut stop = daemon.stop_signal();
    daemon.spawn(async move {
        let Some(line) = line.await else { return };
        tracing::info!(%session, "somebody looks at a terminal");
        let viewer = Socket::upgraded(line, Role::Server).await;
        let ended = tokio::select! {
            ended = join(viewer, worker) => ended,
            _ = stop.wait_for(|stop| *stop) => Ok(()),
        };
        tracing::info!(%session, ?ended, "somebody has looked at a terminal");
    });
    Ok(response)
}

/// Passes frames on in both directions until either end has enough. Whoever is slow is waited for: the worker leaves out
/// what was on the screen meanwhile.
async fn join<V: Wire, W: Wire>(mut viewer: Socket<V>, mut worker: Socket<W>) -> Result<(), SocketError> {
    let (mut to_viewer, mut to_worker) = (false, false);
    let mut heard = Instant::now();
    let mut look = heard + PING;
    loop {
        tokio::select! {
            moved = viewer.moves(!to_worker, to_viewer) => match moved? {
                Moved::Written => to_viewer = false,
                Moved::Read(incoming) => {
                    heard = Instant::now();
                    to_worker = pass(incoming, &mut worker)?;
                }
            },
            moved = worker.moves(!to_viewer, to_worker) => match moved {
                Ok(Moved::Written) => to_worker = false,
                Ok(Moved::Read(incoming)) => to_viewer = pass(incoming, &mut viewer)?,
                Err(closed) => {
                    viewer.close().await;
                    return Err(closed);
                }
            },
            () = tokio::time::sleep_until(look) => {
                if heard.elapsed() >= 3 * PING {
                    return Err(SocketError::TimedOut);
                }
                // Whoever is there answers; what is being written is answered as well.
                if !to_viewer {
                    viewer.start_ping()?;
                    to_viewer = true;
                }
                look = Instant::now() + PING;
            }
        }
    }
}

/// Whether there was something to pass on.
fn pass<W: Wire>(incoming: Incoming, to: &mut Socket<W>) -> Result<bool, SocketError> {
    match incoming {
        Incoming::Binary(bytes) => to.start_binary(bytes)?,
        Incoming::Text(text) => to.start(text.as_str().to_owned())?,
        Incoming::Alive => return Ok(false),
    }
    Ok(true)
}
