//! The halt is a barrier: every awake actor has seen it before `halt.set` is written, so in the journal no run starts
//! after it.
//!
//! Design: docs/design/halt-is-a-barrier.md

use std::sync::Arc;

use qd_core::session::SessionCommand;
use qd_journal::RowChange;
use qd_protocol::api::{HaltRequest, HaltStatus};
use qd_protocol::event::{EmptyEventData, EventActor, EventBody, HaltSet};
use qd_protocol::{ApiError, Millis};

use crate::actor::IdempotencyKey;
use crate::daemon::{Daemon, read_failed};

/// The key of the halt among the journal's daemon-wide values.
const HALT_META_KEY: &str = "halt";

impl Daemon {
    /// The halt as stored in the journal.
    pub(crate) async fn read_halt(journal: &qd_journal::Journal) -> Result<HaltStatus, ApiError> {
        let stored = journal.meta(HALT_META_KEY).await.map_err(read_failed)?;
        Ok(stored.and_then(|bytes| serde_json::from_slice(&bytes).ok()).unwrap_or_default())
    }

    /// Sets a halt: prompts are accepted and queued, but nothing starts.
    pub(crate) async fn apply_halt(
        self: &Arc<Self>,
        request: HaltRequest,
        actor: Arc<EventActor>,
        key: Option<IdempotencyKey>,
    ) -> Result<HaltStatus, ApiError> {
        let _one_at_a_time = self.key_locks.lock("halt".to_owned()).await;
        let before = self.halt_status();
        self.set_halted(true);
        self.wait_for_commits().await;
        let HaltRequest { reason, cancel } = request;
        let set = HaltSet { reason, cancel };
        let ts = Millis::now();
        let halt = halt_after_set(&before, &set, ts);
        if let Err(error) = self.append_halt(EventBody::HaltSet(set), &actor, ts, &halt, key).await {
            self.set_halted(before.halted);
            return Err(error);
        }
        self.set_halt_status(halt.clone());
        if cancel {
            self.for_each_live_session(move |daemon, session| {
                let actor = Arc::clone(&actor);
                async move {
                    daemon
                        .send_command(&session, &actor, SessionCommand::CancelActiveRun, None)
                        .await
                        .map(drop)
                }
            })
            .await?;
        }
        Ok(halt)
    }

    /// Lifts the halt, and wakes the sessions that waited for it.
    pub(crate) async fn lift_halt(self: &Arc<Self>, actor: &EventActor) -> Result<HaltStatus, ApiError> {
        let _one_at_a_time = self.key_locks.lock("halt".to_owned()).await;
        if !self.is_halted() {
            return Ok(HaltStatus::default());
        }
        self.append_halt(
            EventBody::HaltLifted(EmptyEventData {}),
            actor,
            Millis::now(),
            &HaltStatus::default(),
            None,
        )
        .await?;
        self.set_halt_status(HaltStatus::default());
        self.set_halted(false);
        self.wake_sessions_with_open_work().await?;
        Ok(HaltStatus::default())
    }

    async fn append_halt(
        &self,
        body: EventBody,
        actor: &EventActor,
        ts: Millis,
        halt: &HaltStatus,
        key: Option<IdempotencyKey>,
    ) -> Result<(), ApiError> {
        let record = key.map(|key| key.into_record(halt)).transpose()?;
        let rows = halt_row(halt).into_iter().collect();
        self.append_daemon_event(&body, actor, ts, rows, record).await
    }
}

/// The halt after `halt.set` was written at `ts`. A halt that is set again keeps its first time.
pub(crate) fn halt_after_set(before: &HaltStatus, set: &HaltSet, ts: Millis) -> HaltStatus {
    HaltStatus {
        halted: true,
        reason: set.reason.clone(),
        cancel: set.cancel,
        since: before.since.or(Some(ts)),
    }
}

/// The halt as stored for the next daemon.
pub(crate) fn halt_row(halt: &HaltStatus) -> Option<RowChange> {
    let doc = serde_json::to_vec(halt).ok()?;
    Some(RowChange::Meta { key: HALT_META_KEY.into(), value: halt.halted.then_some(doc) })
}
