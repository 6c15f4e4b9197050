//! A batch: steps that an actor has decided but not journalled. It becomes one append, then a list of outcomes. Texts
//! too long for an event are written to blob files here, synced before the append.

use std::collections::HashMap;

use qd_core::rows::{RunDoc, SessionDoc, UpdatedRow, mail_receipt};
use qd_core::session::{
    CommandReply, OversizedText, PromptSubmission, SessionEffect, SessionEvent, SessionInput, SessionState,
    SessionStep,
};
use qd_journal::{
    AppendRequest, AskRow, IdempotencyRecord, MailRow, NewEvent, RowChange, RunRow, SessionKey, SessionRow,
};
use qd_protocol::event::AskStatus;
use qd_protocol::link::AgentExitReason;
use qd_protocol::{ApiError, ErrorCode, EventBody, EventNumber, MailId, RunId, Seq};
use tokio::sync::oneshot;

use super::reply::{ActorReply, CommandCompletion, ReplyDetails, to_actor_reply};
use super::{IdempotencyKey, load};
use crate::daemon::{Daemon, SessionAddress, append_failed, blob_failed};
use crate::quotas::quota_row;

/// A child session, created in the transaction of its parent's next event.
pub(crate) struct ChildCreation {
    pub(crate) events: Vec<NewEvent>,
    pub(crate) rows: Vec<RowChange>,
    /// The response to the request that created it, stored if the request had an idempotency key.
    pub(crate) response: Vec<u8>,
}

/// The reply and effects of one step.
pub(super) struct StepOutcome {
    pub(super) effects: Vec<SessionEffect>,
    pub(super) reply: Option<Result<ActorReply, ApiError>>,
    pub(super) waiter: Option<oneshot::Sender<Result<CommandCompletion, ApiError>>>,
}

struct PendingStep {
    effects: Vec<SessionEffect>,
    reply: Option<CommandReply>,
    waiter: Option<oneshot::Sender<Result<CommandCompletion, ApiError>>>,
    /// The index of the step's first event in the batch.
    offset: usize,
}

#[derive(Default)]
pub(super) struct ActorBatch {
    steps: Vec<PendingStep>,
    events: Vec<SessionEvent>,
    rows: Vec<UpdatedRow>,
    large_texts: Vec<OversizedText>,
    session_changed: bool,
    snapshot: Option<(EventNumber, Vec<u8>)>,
    key: Option<IdempotencyKey>,
    /// The response to store under the key, if it is not derived from the reply.
    created_response: Option<Vec<u8>>,
    created_children: Vec<ChildCreation>,
    /// An exit that was judged in this batch, to be judged again if the append fails.
    pub(super) gone: Option<AgentExitReason>,
    /// Likewise for a worker that connected.
    pub(super) attached: Option<SessionInput>,
}

impl ActorBatch {
    /// Adds a step. `state` is the state after it.
    pub(super) fn add(&mut self, step: SessionStep, state: &SessionState) {
        let SessionStep { events, rows, session_changed, effects, reply, oversized_texts } = step;
        let offset = self.events.len();
        if events.iter().any(|event| matches!(event.body, EventBody::RunFinished(_))) {
            self.snapshot = load::encode_snapshot(state);
        }
        self.large_texts.extend(
            oversized_texts
                .into_iter()
                .map(|large| OversizedText { event_index: offset + large.event_index, ..large }),
        );
        self.events.extend(events);
        self.rows.extend(rows);
        self.session_changed |= session_changed;
        self.steps.push(PendingStep { effects, reply, waiter: None, offset });
    }

    /// Attaches to the last step the client that waits for it, its idempotency key, and the child session created
    /// with it. A refused step stores no reply and creates no child.
    pub(super) fn attach_waiter(
        &mut self,
        waiter: oneshot::Sender<Result<CommandCompletion, ApiError>>,
        key: Option<IdempotencyKey>,
        child: Option<Box<ChildCreation>>,
    ) {
        let Some(last) = self.steps.last_mut() else { return };
        last.waiter = Some(waiter);
        if !matches!(last.reply, Some(CommandReply::Refused(_)) | None) {
            self.created_response = child.as_ref().map(|child| child.response.clone());
            self.key = key;
            self.created_children.extend(child.map(|child| *child));
        }
    }

    pub(super) fn event_bodies(&self) -> impl Iterator<Item = &EventBody> {
        self.events.iter().map(|event| &event.body)
    }

    /// Writes the batch to the journal in one transaction, and returns the seq of the first event.
    pub(super) async fn append(
        &mut self,
        daemon: &Daemon,
        session: &SessionAddress,
        state: &SessionState,
        lineage: &[SessionKey],
    ) -> Result<Seq, ApiError> {
        if self.events.is_empty() && self.key.is_none() && !self.is_purge() {
            return Ok(daemon.journal.head());
        }
        self.store_large_texts(daemon, session).await?;
        let mut rows = self.row_changes(session, state, lineage)?;
        let mut events = Vec::with_capacity(self.events.len());
        for event in &self.events {
            events.push(NewEvent {
                scope: session.scope.clone(),
                number: Some(event.number),
                ts: event.ts,
                run: event.run.clone(),
                kind: event.body.kind(),
                data: event.body.encode(event.actor.as_deref()).map_err(encode_failed)?,
                update_number: event.update_number,
            });
        }
        for child in &mut self.created_children {
            events.append(&mut child.events);
            rows.append(&mut child.rows);
        }
        let append = AppendRequest {
            events,
            rows,
            idempotency: self.remembered_reply(),
            may_use_reserve: self.may_use_reserve(),
        };
        let appended = daemon.journal.append(append).await.map_err(append_failed)?;
        Ok(appended.first)
    }

    /// The replies and effects of all steps. `first` is the seq of the batch's first event.
    pub(super) fn into_outcomes(self, first: Seq) -> Vec<StepOutcome> {
        let events = self.events;
        let outcome = |step: PendingStep| {
            let PendingStep { effects, reply, waiter, offset } = step;
            let reply = reply.map(|reply| step_reply(&reply, &events, offset, first));
            StepOutcome { effects, reply, waiter }
        };
        self.steps.into_iter().map(outcome).collect()
    }

    /// Fails every client that waits for a step of this batch.
    pub(super) fn fail_waiters(self, error: ApiError) {
        for step in self.steps {
            if let Some(waiter) = step.waiter {
                // A client that has disconnected does not need the answer.
                let _gone = waiter.send(Err(error.clone()));
            }
        }
    }

    /// Cancels and ends may use the disk reserve when the disk is full; new work may not.
    fn may_use_reserve(&self) -> bool {
        let ends = |body: &EventBody| {
            matches!(
                body,
                EventBody::RunFinished(_)
                    | EventBody::RunCancelRequested(_)
                    | EventBody::RunKillRequested(_)
                    | EventBody::AskResolved(_)
                    | EventBody::SessionClosed(_)
                    | EventBody::WorkerExited(_)
                    | EventBody::WorkerReattached(_)
            )
        };
        self.event_bodies().any(ends)
            && !self.event_bodies().any(|body| matches!(body, EventBody::RunAccepted(_)))
    }

    /// A session that is already closed is purged without another event, so the batch may have no events.
    fn is_purge(&self) -> bool {
        self.steps.iter().any(|step| step.effects.contains(&SessionEffect::Purge))
    }

    fn remembered_reply(&self) -> Option<IdempotencyRecord> {
        let IdempotencyKey { key, fingerprint } = self.key.clone()?;
        if let Some(response) = self.created_response.clone() {
            return Some(IdempotencyRecord {
                key,
                fingerprint,
                make_response: Box::new(move |_| response.clone()),
            });
        }
        let last = self.steps.last()?;
        let (reply, offset) = (last.reply.clone()?, last.offset);
        let details = reply_details(&reply, &self.events, offset);
        let make_response = move |first: Seq| {
            let answer = to_actor_reply(&reply, &details, |event| Seq(first.0 + (offset + event) as u64));
            answer.ok().and_then(|answer| serde_json::to_vec(&answer).ok()).unwrap_or_default()
        };
        Some(IdempotencyRecord { key, fingerprint, make_response: Box::new(make_response) })
    }

    fn row_changes(
        &self,
        session: &SessionAddress,
        state: &SessionState,
        lineage: &[SessionKey],
    ) -> Result<Vec<RowChange>, ApiError> {
        if self.is_purge() {
            return Ok(vec![RowChange::Purge { session: session.key }]);
        }
        let mut changes = Vec::new();
        if self.session_changed {
            changes.push(session_row(session, state, lineage)?);
        }
        let first_events = FirstEventIndex::of_events(&self.events);
        for row in &self.rows {
            changes.push(row_change(session, row, &first_events)?);
        }
        if let Some((number, state)) = self.snapshot.clone() {
            changes.push(RowChange::Snapshot { session: session.key, number, state });
        }
        Ok(changes)
    }

    /// Writes texts that do not fit into an event to blob files, and references those in the event and its run's row.
    async fn store_large_texts(&mut self, daemon: &Daemon, session: &SessionAddress) -> Result<(), ApiError> {
        for OversizedText { event_index: event, text } in std::mem::take(&mut self.large_texts) {
            let Some(run) = self.events[event].run.clone() else { continue };
            let text = match text {
                Some(text) => text,
                None => {
                    let mut text = load::run_text(daemon, session, &run).await?;
                    for event in self.events.iter().filter(|event| event.run.as_ref() == Some(&run)) {
                        if let EventBody::TextDelta(delta) = &event.body {
                            text.push_str(&delta.text);
                        }
                    }
                    text
                }
            };
            let blob = daemon.journal.blobs().put(text).await.map_err(blob_failed)?;
            if let EventBody::RunFinished(finished) = &mut self.events[event].body {
                finished.blob = Some(blob.clone());
            }
            for row in &mut self.rows {
                if let UpdatedRow::Run { id, doc: RunDoc { text_blob, finished_at: Some(_), .. }, .. } = row
                    && *id == run
                {
                    *text_blob = Some(blob.clone());
                }
            }
        }
        Ok(())
    }
}

fn step_reply(
    reply: &CommandReply,
    events: &[SessionEvent],
    offset: usize,
    first: Seq,
) -> Result<ActorReply, ApiError> {
    let details = reply_details(reply, events, offset);
    to_actor_reply(reply, &details, |event| Seq(first.0 + (offset + event) as u64))
}

fn reply_details(reply: &CommandReply, events: &[SessionEvent], offset: usize) -> ReplyDetails {
    let (CommandReply::Accepted { event: Some(event), .. }
    | CommandReply::MailAccepted { event: Some(event) }) = reply
    else {
        return ReplyDetails::default();
    };
    let Some(event) = events.get(offset + event) else { return ReplyDetails::default() };
    let mail = match &event.body {
        EventBody::MailSent(sent) => Some(mail_receipt(sent, Seq(0))),
        _ => None,
    };
    ReplyDetails { run: event.run.clone(), mail }
}

/// The index, within an append's events, at which each run was accepted and each message sent. Their rows refer to it.
#[derive(Debug, Default)]
pub(crate) struct FirstEventIndex<'a> {
    runs: HashMap<&'a RunId, usize>,
    mail: HashMap<&'a MailId, (usize, &'a str)>,
}

impl<'a> FirstEventIndex<'a> {
    pub(crate) fn of_events(events: &'a [SessionEvent]) -> Self {
        let mut index = Self::default();
        for (at, event) in events.iter().enumerate() {
            match (&event.body, &event.run) {
                (EventBody::RunAccepted(_), Some(run)) => {
                    index.runs.insert(run, at);
                }
                (EventBody::MailSent(sent), _) => {
                    index.mail.insert(&sent.mail.id, (at, &sent.fingerprint));
                }
                _ => {}
            }
        }
        index
    }
}

/// The row of a session in its current state.
pub(crate) fn session_row(
    session: &SessionAddress,
    state: &SessionState,
    lineage: &[SessionKey],
) -> Result<RowChange, ApiError> {
    Ok(RowChange::Session(SessionRow {
        key: session.key,
        id: session.id.clone(),
        workspace: session.workspace_key,
        parent: lineage.get(1).copied(),
        title: state.settings.title.clone(),
        closed_at: state.closed.then_some(state.updated_at),
        live: state.is_busy(),
        // The next daemon must reattach to a worker that is left.
        has_open_work: state.has_pending_obligations() || state.worker.is_some(),
        cost_usd: state.usage.cost_usd,
        budget_usd: state.settings.limits.budget_usd,
        updated_at: state.updated_at,
        doc: serde_json::to_vec(&SessionDoc::of(state)).map_err(encode_failed)?,
    }))
}

pub(crate) fn row_change(
    session: &SessionAddress,
    row: &UpdatedRow,
    first_events: &FirstEventIndex<'_>,
) -> Result<RowChange, ApiError> {
    Ok(match row {
        UpdatedRow::Run { id, doc, prompt, fingerprint } => RowChange::Run(RunRow {
            id: id.clone(),
            session: session.key,
            workspace: session.workspace_key,
            accepted_event: first_events.runs.get(id).copied(),
            seq: Seq(0),
            finished: doc.finished_at.is_some(),
            fingerprint: fingerprint.clone(),
            prompt: prompt.as_ref().map(serde_json::to_vec).transpose().map_err(encode_failed)?,
            doc: serde_json::to_vec(doc).map_err(encode_failed)?,
        }),
        UpdatedRow::Ask(doc) => RowChange::Ask(AskRow {
            id: doc.ask.id.clone(),
            session: session.key,
            pending: doc.ask.state == AskStatus::Pending,
            doc: serde_json::to_vec(doc).map_err(encode_failed)?,
        }),
        UpdatedRow::Quota(quota) => quota_row(quota)?,
        UpdatedRow::Mail { id, doc, sent } => {
            let (sent_by, fingerprint) = first_events.mail.get(id).copied().unzip();
            RowChange::Mail(MailRow {
                id: id.clone(),
                session: Some(session.key),
                sent_event: sent_by,
                seq: Seq(0),
                open: doc.state.is_open(),
                fingerprint: fingerprint.unwrap_or_default().to_owned(),
                sent: sent.as_ref().map(serde_json::to_vec).transpose().map_err(encode_failed)?,
                doc: serde_json::to_vec(doc).map_err(encode_failed)?,
            })
        }
    })
}

/// The error for a value that could not be encoded as JSON, which would be our bug.
pub(crate) fn encode_failed(error: serde_json::Error) -> ApiError {
    ApiError::new(ErrorCode::Internal, format!("an event could not be written as JSON: {error}"))
}

/// The most bytes of prompts that an actor keeps in memory; the others are read from the journal when they are due.
const PROMPT_CACHE_BYTES: usize = 64 << 10;

/// Accepted prompts that have not been sent to the agent.
#[derive(Default)]
pub(super) struct PromptCache {
    prompts: HashMap<RunId, PromptSubmission>,
}

impl PromptCache {
    pub(super) fn insert(&mut self, prompt: &PromptSubmission) {
        let size = |prompt: &PromptSubmission| {
            let files: usize =
                prompt.attachments.iter().filter_map(|file| file.data.as_ref()).map(String::len).sum();
            prompt.prompt.head.len() + files
        };
        let held: usize = self.prompts.values().map(size).sum();
        if held + size(prompt) <= PROMPT_CACHE_BYTES {
            self.prompts.insert(prompt.run.clone(), prompt.clone());
        }
    }

    pub(super) fn take(&mut self, run: &RunId) -> Option<PromptSubmission> {
        self.prompts.remove(run)
    }

    pub(super) fn forget_ended(&mut self, state: &SessionState) {
        if !self.prompts.is_empty() {
            self.prompts.retain(|run, _| state.run(run).is_some());
        }
    }
}
