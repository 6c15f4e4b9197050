//! How the updates of a run reach a peer that speaks a subprotocol. A worker of your own does not need this: its server
//! speaks the plain frames by itself.

use std::fmt;
use std::pin::Pin;

use qd_protocol::frame::plain::PlainApproval;
use qd_protocol::link::TurnUpdate;
use qd_protocol::{AskId, EventNumber};

use super::RunStopped;

/// What a [`RunTransport`] returns: done once the peer's queue has taken the update.
pub type SendFuture<'a> = Pin<Box<dyn Future<Output = Result<(), RunStopped>> + Send + 'a>>;

/// Carries what one run sends to its peer. What the peer sends to the run goes through the
/// [`ExecutorTask`](super::ExecutorTask).
pub trait RunTransport: fmt::Debug + Send + Sync + 'static {
    /// Sends an update and waits while the peer is behind. The wait is dropped when the run is cancelled.
    fn send_update(&self, update: TurnUpdate) -> SendFuture<'_>;

    /// Sends a request for approval, waiting in the same way. The answer comes with
    /// [`ExecutorTask::resolve_ask`](super::ExecutorTask::resolve_ask).
    fn request_approval(&self, ask: AskId, approval: PlainApproval) -> SendFuture<'_>;

    /// Tells the peer that the run has taken its steer with this number. Must not wait: the text of the steer would be
    /// lost with the wait.
    fn confirm_steer(&self, number: EventNumber) -> SendFuture<'_>;

    /// Tells the peer that the run has got the answer to its request.
    fn confirm_answer(&self, ask: AskId) -> SendFuture<'_>;
}
