//! What a server does with peers that offer a subprotocol in their upgrade. A worker of your own does not need this.

use std::sync::Arc;

use crate::executor::Executor;
use crate::socket::{ByteStream, Socket, SocketError};

/// Serves an executor to peers that offer a subprotocol, instead of with the plain frames.
pub trait Subprotocol: Send + Sync + 'static {
    /// The name that peers offer in `Sec-WebSocket-Protocol`; `None` if every peer gets the plain frames.
    const NAME: Option<&'static str>;

    /// Serves one connection until it ends. A run may continue without its connection.
    fn serve<E: Executor, W: ByteStream>(
        &self,
        executor: &Arc<E>,
        socket: Socket<W>,
    ) -> impl Future<Output = Result<(), SocketError>> + Send;

    /// Whether any run is active, with or without a connection.
    fn is_busy(&self) -> bool;
}

/// No subprotocol: every peer gets the plain frames.
#[derive(Debug, Clone, Copy, Default)]
pub struct PlainFramesOnly;

impl Subprotocol for PlainFramesOnly {
    const NAME: Option<&'static str> = None;

    async fn serve<E: Executor, W: ByteStream>(
        &self,
        _executor: &Arc<E>,
        _socket: Socket<W>,
    ) -> Result<(), SocketError> {
        // No peer can offer a subprotocol that has no name.
        Err(SocketError::Closed)
    }

    fn is_busy(&self) -> bool {
        false
    }
}
