//! The halt: a barrier. Every awake actor has taken it before `halt.set` is written, so nothing that starts can lie
//! behind it in the journal.

use std::sync::Arc;

use qd_core::session::Command;
use qd_journal::{Append, NewEvent, Remember, RowChange, Scope, SessionFilter};
use qd_protocol::api::{Halt, HaltRequest};
use qd_protocol::event::{Body, Empty, HaltSet};
use qd_protocol::{ApiError, Millis};

use crate::actor::{IdempotencyKey, Mail, unwritable};
use crate::daemon::{Daemon, SessionRef, append_failed, read_failed};

/// The name of the halt among the things that the journal keeps for the whole daemon.
const META: &str = "halt";

impl Daemon {
    /// The halt as the journal has it.
    pub(crate) async fn read_halt(journal: &qd_journal::Journal) -> Result<Halt, ApiError> {
        let stored = journal.meta(META).await.map_err(read_failed)?;
        Ok(stored.and_then(|bytes| serde_json::from_slice(&bytes).ok()).unwrap_or_default())
    }

    /// From now on prompts are accepted and queued, but nothing starts.
    pub(crate) async fn set_halt_on(
        self: &Arc<Self>,
        request: HaltRequest,
        key: Option<IdempotencyKey>,
    ) -> Result<Halt, ApiError> {
        let _one_at_a_time = self.keys.lock("halt".to_owned()).await;
        let before = self.halt();
        self.set_halted(true);
        self.barrier().await;
        let HaltRequest { reason, cancel } = request;
        let set = HaltSet { reason, cancel };
        let ts = Millis::now();
        let halt = after_set(&before, &set, ts);
        if let Err(error) = self.append_halt(Body::HaltSet(set), ts, &halt, key).await {
            self.set_halted(before.halted);
            return Err(error);
        }
        self.set_halt(halt.clone());
        if cancel {
            self.for_live(|daemon, session| async move {
                daemon.command(&session, Command::CancelActive, None).await.map(drop)
            })
            .await?;
        }
        Ok(halt)
    }

    /// Things start again.
    pub(crate) async fn lift_halt(self: &Arc<Self>) -> Result<Halt, ApiError> {
        let _one_at_a_time = self.keys.lock("halt".to_owned()).await;
        if !self.halted() {
            return Ok(Halt::default());
        }
        self.append_halt(Body::HaltLifted(Empty {}), Millis::now(), &Halt::default(), None).await?;
        self.set_halt(Halt::default());
        self.set_halted(false);
        self.wake_live().await?;
        Ok(Halt::default())
    }

    /// Wakes every session that has runs which have not ended, or that owes another one something. Those that have a
    /// worker first, and they are waited for: the others may start one only if there is room beside them.
    pub(crate) async fn wake_live(self: &Arc<Self>) -> Result<(), ApiError> {
        let owing = SessionFilter { owes_only: true, ..SessionFilter::default() };
        for row in self.journal.sessions(owing, None, usize::MAX).await.map_err(read_failed)? {
            match self.session_ref(&row) {
                Ok(session) => self.send(&session, Mail::Wake)?,
                Err(error) => tracing::warn!(session = %row.id, %error, "a session has no workspace"),
            }
        }
        self.barrier().await;
        self.for_live(|daemon, session| async move { daemon.send(&session, Mail::Wake) }).await
    }

    async fn for_live<F: Future<Output = Result<(), ApiError>>>(
        self: &Arc<Self>,
        tell: impl Fn(Arc<Self>, Arc<SessionRef>) -> F,
    ) -> Result<(), ApiError> {
        let live = SessionFilter { live_only: true, ..SessionFilter::default() };
        for row in self.journal.sessions(live, None, usize::MAX).await.map_err(read_failed)? {
            match self.session_ref(&row) {
                Ok(session) => tell(Arc::clone(self), session).await?,
                Err(error) => tracing::warn!(session = %row.id, %error, "a live session has no workspace"),
            }
        }
        Ok(())
    }

    async fn append_halt(
        &self,
        body: Body,
        ts: Millis,
        halt: &Halt,
        key: Option<IdempotencyKey>,
    ) -> Result<(), ApiError> {
        let doc = serde_json::to_vec(halt).map_err(unwritable)?;
        let event = NewEvent {
            scope: Arc::new(Scope::default()),
            number: None,
            ts,
            run: None,
            kind: body.kind(),
            data: body.encode().map_err(unwritable)?,
            up: None,
        };
        let answer = doc.clone();
        let remember = key.map(|IdempotencyKey { key, fingerprint }| Remember {
            key,
            fingerprint,
            answer: Box::new(move |_| answer.clone()),
        });
        let rows = row(halt).into_iter().collect();
        let append = Append { events: vec![event], rows, remember, reserve: true };
        self.journal.append(append).await.map(drop).map_err(append_failed)
    }
}

/// The halt after `halt.set` was written at `ts`: one that is set again holds since it was first.
pub(crate) fn after_set(before: &Halt, set: &HaltSet, ts: Millis) -> Halt {
    Halt { halted: true, reason: set.reason.clone(), cancel: set.cancel, since: before.since.or(Some(ts)) }
}

/// The halt as the journal keeps it for the next daemon.
pub(crate) fn row(halt: &Halt) -> Option<RowChange> {
    let doc = serde_json::to_vec(halt).ok()?;
    Some(RowChange::Meta { key: META, value: halt.halted.then_some(doc) })
}
