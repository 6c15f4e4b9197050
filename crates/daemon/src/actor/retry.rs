//! What follows when the journal does not take what a session decided: the waiting requests fail, the state is loaded
//! again, and inputs that nobody sends again are kept and judged again after a pause.

use std::time::Duration;

use qd_core::session::{SessionInput, deadline};
use qd_link::NumberedUpdate;
use qd_protocol::ApiError;
use qd_protocol::link::{AgentExitReason, AgentUpdate};
use tokio::time::Instant;

use super::batch::ActorBatch;
use super::{SessionActor, load};
use crate::clock::read_clocks;

/// The pause before inputs that the journal did not take are judged again, and before the state is loaded again.
const RETRY_DELAY: Duration = Duration::from_millis(250);

/// Inputs whose events the journal did not take. It exists even if there are no such inputs: a deadline that has passed
/// waits too, so that a failing journal is not tried without a pause.
pub(super) struct UnjournalledInputs {
    updates: Vec<NumberedUpdate>,
    attached: Option<SessionInput>,
    pub(super) gone: Option<AgentExitReason>,
    /// When they are judged again.
    pub(super) retry_at: Instant,
}

impl SessionActor {
    /// Undoes a batch whose append failed.
    pub(super) async fn roll_back(&mut self, batch: ActorBatch, error: ApiError) {
        tracing::warn!(session = %self.session.id, %error, "an append failed; the session is loaded again");
        self.launch_decided = false;
        let (attached, gone) = match self.unjournalled.take() {
            Some(earlier) => {
                (batch.attached.clone().or(earlier.attached), batch.gone.clone().or(earlier.gone))
            }
            None => (batch.attached.clone(), batch.gone.clone()),
        };
        let updates = self.agent.unacknowledged();
        batch.fail_waiters(error);
        loop {
            match load::load(&self.daemon, &self.session).await {
                Ok((state, _)) => {
                    self.state = state;
                    break;
                }
                Err(_) if self.daemon.is_stopping() => return,
                Err(_) => tokio::time::sleep(RETRY_DELAY).await,
            }
        }
        let retry_at = Instant::now() + RETRY_DELAY;
        self.unjournalled = Some(Box::new(UnjournalledInputs { updates, attached, gone, retry_at }));
    }

    /// Judges again what the journal did not take. If that fails again, a run that was told to stop is still killed or
    /// given up in time.
    pub(super) async fn retry_unjournalled(&mut self) {
        let Some(inputs) = self.unjournalled.take() else { return };
        let UnjournalledInputs { updates, attached, gone, .. } = *inputs;
        let mut batch = ActorBatch::default();
        for update in updates {
            self.handle_update(&mut batch, update);
        }
        if let Some(attached) = attached {
            batch.attached = Some(attached.clone());
            self.step_machine(&mut batch, attached);
        }
        if let Some(gone) = gone {
            self.step_worker_gone(&mut batch, gone);
        }
        // Whatever woke the session before has to be judged again.
        self.step_machine(&mut batch, SessionInput::Wake);
        self.commit(batch).await;
        if self.is_stop_overdue() {
            let mut batch = ActorBatch::default();
            self.step_machine(&mut batch, SessionInput::Tick);
            self.commit(batch).await;
        }
    }

    /// Whether a run that was told to stop has to be killed or given up now, although the journal has no space for what
    /// its agent said before. Other deadlines wait, because an update that met them may be among those.
    fn is_stop_overdue(&self) -> bool {
        let Some(inputs) = &self.unjournalled else { return false };
        let is_stopping = self.state.active_run().is_some_and(|(_, started)| started.stop.is_some());
        let ends_turn = |numbered: &NumberedUpdate| matches!(&numbered.update, AgentUpdate::TurnEnded { outcome, .. } if !outcome.leaves_processes);
        let has_ended = inputs.updates.iter().any(ends_turn);
        is_stopping
            && !has_ended
            && inputs.gone.is_none()
            && deadline(&self.state, self.agent_availability(), read_clocks()) == Some(0)
    }
}
