//! Terminals: a viewer's WebSocket is connected to the one of the session's worker, frame by frame. The content is
//! neither read nor stored here.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::State;
use axum::response::Response;
use qd_link::socket::{ByteStream, IncomingFrame, Role, Socket, SocketError, SocketProgress};
use qd_protocol::error::ErrorBody;
use qd_protocol::frame::terminal::SUBPROTOCOL;
use qd_protocol::limits::HEARTBEAT_S;
use qd_protocol::{SessionId, WorkspaceId};
use tokio::time::Instant;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::api_document::{GuardResponses, NotFoundResponse, SessionPath, StreamLimitResponse};
use super::caller::Caller;
use super::extract::PathIds;
use super::sessions::find_session;
use crate::daemon::{Daemon, stopping_error};
use crate::edge::{HttpError, WebSocketRequest};

/// The silence after which a viewer is pinged; after three times that it counts as gone.
const PING_INTERVAL: Duration = Duration::from_secs(HEARTBEAT_S);

pub(super) fn routes() -> OpenApiRouter<Arc<Daemon>> {
    OpenApiRouter::new().routes(routes!(terminal))
}

/// Shows the screen of a session's terminal, and takes keys for it. A WebSocket of the subprotocol
/// `quarterdeck.terminal.v1`; any number of viewers may connect.
#[utoipa::path(get, path = "/v1/workspaces/{w}/sessions/{s}/terminal", operation_id = "terminal", tag = "sessions",
    params(SessionPath), responses(
    (status = 101, description = "The connection to the terminal"),
    (status = 400, description = "`invalid_request`: not an upgrade, or not to this subprotocol", body = ErrorBody),
    (status = 409, description = "`no_terminal`: the agent has none, or is not running", body = ErrorBody),
    NotFoundResponse, StreamLimitResponse, GuardResponses,
))]
async fn terminal(
    State(daemon): State<Arc<Daemon>>,
    caller: Caller,
    PathIds((workspace, session)): PathIds<(WorkspaceId, SessionId)>,
    upgrade: WebSocketRequest,
) -> Result<Response, HttpError> {
    find_session(&daemon, &workspace, &session).await?;
    let upgrade = upgrade.require_subprotocol(SUBPROTOCOL)?.require_stream_permit()?;
    if daemon.is_stopping() {
        return Err(stopping_error().into());
    }
    let worker = daemon.workers.connect_terminal(&session).await?;
    let (response, connection) = upgrade.accept(SUBPROTOCOL);
    let mut stop = daemon.stop_signal();
    daemon.spawn(async move {
        let Some(connection) = connection.await else { return };
        tracing::info!(%session, "a viewer connected to a terminal");
        let viewer = Socket::from_upgraded(connection, Role::Server).await;
        let ended = tokio::select! {
            ended = relay_terminal(viewer, worker) => ended,
            _ = stop.wait_for(|stop| *stop) => Ok(()),
            () = caller.wait_for_end() => Ok(()),
        };
        tracing::info!(%session, ?ended, "a viewer disconnected from a terminal");
    });
    Ok(response)
}

/// Relays frames in both directions until either end closes. A slow viewer is waited for; the worker skips what the
/// screen showed meanwhile.
async fn relay_terminal<V: ByteStream, W: ByteStream>(
    mut viewer: Socket<V>,
    mut worker: Socket<W>,
) -> Result<(), SocketError> {
    let (mut to_viewer, mut to_worker) = (false, false);
    let mut last_heard = Instant::now();
    let mut next_ping = last_heard + PING_INTERVAL;
    loop {
        tokio::select! {
            progress = viewer.progress(!to_worker, to_viewer) => match progress? {
                SocketProgress::Written => to_viewer = false,
                SocketProgress::Read(incoming) => {
                    last_heard = Instant::now();
                    to_worker = relay_frame(incoming, &mut worker)?;
                }
            },
            progress = worker.progress(!to_viewer, to_worker) => match progress {
                Ok(SocketProgress::Written) => to_worker = false,
                Ok(SocketProgress::Read(incoming)) => to_viewer = relay_frame(incoming, &mut viewer)?,
                Err(closed) => {
                    viewer.close().await;
                    return Err(closed);
                }
            },
            () = tokio::time::sleep_until(next_ping) => {
                if last_heard.elapsed() >= 3 * PING_INTERVAL {
                    return Err(SocketError::TimedOut);
                }
                // A live viewer answers the ping, or reads what is being sent to it.
                if !to_viewer {
                    viewer.queue_ping()?;
                    to_viewer = true;
                }
                next_ping = Instant::now() + PING_INTERVAL;
            }
        }
    }
}

/// Queues a frame for the other end. Returns whether there was anything to relay.
fn relay_frame<W: ByteStream>(incoming: IncomingFrame, to: &mut Socket<W>) -> Result<bool, SocketError> {
    match incoming {
        IncomingFrame::Binary(bytes) => to.queue_binary(bytes)?,
        IncomingFrame::Text(text) => to.queue_text(text.as_str().to_owned())?,
        IncomingFrame::Alive => return Ok(false),
    }
    Ok(true)
}
