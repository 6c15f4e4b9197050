//! The halt: a barrier. Every awake actor has taken it before `halt.set` is written, so nothing that starts can lie
//! behind it in the journal.

use std::sync::Arc;

use qd_core::session::SessionCommand;
use qd_journal::{AppendRequest, EventScope, IdempotencyRecord, NewEvent, RowChange, SessionFilter};
use qd_protocol::api::{HaltRequest, HaltStatus};
use qd_protocol::event::{EmptyEventData, EventBody, HaltSet};
use qd_protocol::{ApiError, Millis};

use crate::actor::{ActorMessage, IdempotencyKey, encode_failed};
use crate::daemon::{Daemon, SessionAddress, append_failed, read_failed};

/// The name of the halt among the things that the journal keeps for the whole daemon.
const HALT_META_KEY: &str = "halt";

impl Daemon {
    /// The halt as the journal has it.
    pub(crate) async fn read_halt(journal: &qd_journal::Journal) -> Result<HaltStatus, ApiError> {
        let stored = journal.meta(HALT_META_KEY).await.map_err(read_failed)?;
        Ok(stored.and_then(|bytes| serde_json::from_slice(&bytes).ok()).unwrap_or_default())
    }

    /// From now on prompts are accepted and queued, but nothing starts.
    pub(crate) async fn apply_halt(
        self: &Arc<Self>,
        request: HaltRequest,
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
        if let Err(error) = self.append_halt(EventBody::HaltSet(set), ts, &halt, key).await {
            self.set_halted(before.halted);
            return Err(error);
        }
        self.set_halt_status(halt.clone());
        if cancel {
            self.for_each_live_session(|daemon, session| async move {
                daemon.send_command(&session, SessionCommand::CancelActiveRun, None).await.map(drop)
            })
            .await?;
        }
        Ok(halt)
    }

    /// Things start again.
    pub(crate) async fn lift_halt(self: &Arc<Self>) -> Result<HaltStatus, ApiError> {
        let _one_at_a_time = self.key_locks.lock("halt".to_owned()).await;
        if !self.is_halted() {
            return Ok(HaltStatus::default());
        }
        self.append_halt(
            EventBody::HaltLifted(EmptyEventData {}),
            Millis::now(),
            &HaltStatus::default(),
            None,
        )
        .await?;
        self.set_halt_status(HaltStatus::default());
        self.set_halted(false);
        self.wake_live_sessions().await?;
        Ok(HaltStatus::default())
    }

    /// Wakes every session that has runs which have not ended, or that owes another one something. Those that have a
    /// worker first, and they are waited for: the others may start one only if there is room beside them.
    pub(crate) async fn wake_live_sessions(self: &Arc<Self>) -> Result<(), ApiError> {
        let owing = SessionFilter { obligations_only: true, ..SessionFilter::default() };
        for row in self.journal.sessions(owing, None, usize::MAX).await.map_err(read_failed)? {
            match self.session_address(&row) {
                Ok(session) => self.send_message(&session, ActorMessage::Wake)?,
                Err(error) => tracing::warn!(session = %row.id, %error, "a session has no workspace"),
            }
        }
        self.wait_for_commits().await;
        self.for_each_live_session(|daemon, session| async move {
            daemon.send_message(&session, ActorMessage::Wake)
        })
        .await
    }

    async fn for_each_live_session<F: Future<Output = Result<(), ApiError>>>(
        self: &Arc<Self>,
        tell: impl Fn(Arc<Self>, Arc<SessionAddress>) -> F,
    ) -> Result<(), ApiError> {
        let live = SessionFilter { live_only: true, ..SessionFilter::default() };
        for row in self.journal.sessions(live, None, usize::MAX).await.map_err(read_failed)? {
            match self.session_address(&row) {
                Ok(session) => tell(Arc::clone(self), session).await?,
                Err(error) => tracing::warn!(session = %row.id, %error, "a live session has no workspace"),
            }
        }
        Ok(())
    }

    async fn append_halt(
        &self,
        body: EventBody,
        ts: Millis,
        halt: &HaltStatus,
        key: Option<IdempotencyKey>,
    ) -> Result<(), ApiError> {
        let doc = serde_json::to_vec(halt).map_err(encode_failed)?;
        let event = NewEvent {
            scope: Arc::new(EventScope::default()),
            number: None,
            ts,
            run: None,
            kind: body.kind(),
            data: body.encode().map_err(encode_failed)?,
            update_number: None,
        };
        let answer = doc.clone();
        let remember = key.map(|IdempotencyKey { key, fingerprint }| IdempotencyRecord {
            key,
            fingerprint,
            make_response: Box::new(move |_| answer.clone()),
        });
        let rows = halt_row(halt).into_iter().collect();
        let append =
            AppendRequest { events: vec![event], rows, idempotency: remember, may_use_reserve: true };
        self.journal.append(append).await.map(drop).map_err(append_failed)
    }
}

/// The halt after `halt.set` was written at `ts`: one that is set again holds since it was first.
pub(crate) fn halt_after_set(before: &HaltStatus, set: &HaltSet, ts: Millis) -> HaltStatus {
    HaltStatus {
        halted: true,
        reason: set.reason.clone(),
        cancel: set.cancel,
        since: before.since.or(Some(ts)),
    }
}

/// The halt as the journal keeps it for the next daemon.
pub(crate) fn halt_row(halt: &HaltStatus) -> Option<RowChange> {
    let doc = serde_json::to_vec(halt).ok()?;
    Some(RowChange::Meta { key: HALT_META_KEY, value: halt.halted.then_some(doc) })
}
