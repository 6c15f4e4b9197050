//! What an actor has decided and not yet journalled: one append, then the outcomes. Texts that are too long for an
//! event become files here, synced before the append.

use std::collections::HashMap;

use qd_core::rows::{Row, RunDoc, SessionDoc, mail_receipt};
use qd_core::session::{Accept, Effect, Input, Large, Recorded, Reply, State, Step};
use qd_journal::{Append, AskRow, MailRow, NewEvent, Remember, RowChange, RunRow, SessionKey, SessionRow};
use qd_protocol::event::AskState;
use qd_protocol::link::Gone;
use qd_protocol::{ApiError, Body, Code, MailId, Number, RunId, Seq};
use tokio::sync::oneshot;

use super::reply::{Answer, Done, Said, answer};
use super::{IdempotencyKey, load};
use crate::daemon::{Daemon, SessionRef, append_failed, blob_failed};

/// A session that is created in the transaction of its parent's next event.
pub(crate) struct Birth {
    pub(crate) events: Vec<NewEvent>,
    pub(crate) rows: Vec<RowChange>,
    /// What its maker is told, remembered if it came under a key.
    pub(crate) answer: Vec<u8>,
}

/// One step's worth of what is to be answered and done.
pub(super) struct Outcome {
    pub(super) effects: Vec<Effect>,
    pub(super) answer: Option<Result<Answer, ApiError>>,
    pub(super) waiter: Option<oneshot::Sender<Result<Done, ApiError>>>,
}

struct Judged {
    effects: Vec<Effect>,
    reply: Option<Reply>,
    waiter: Option<oneshot::Sender<Result<Done, ApiError>>>,
    /// Where its events begin among the batch's.
    offset: usize,
}

#[derive(Default)]
pub(super) struct Batch {
    judged: Vec<Judged>,
    events: Vec<Recorded>,
    rows: Vec<Row>,
    large: Vec<Large>,
    session_changed: bool,
    snapshot: Option<(Number, Vec<u8>)>,
    key: Option<IdempotencyKey>,
    /// The answer under that key, if it is not the reply's own words.
    made: Option<Vec<u8>>,
    births: Vec<Birth>,
    /// Judged here, and to be judged again if the append fails.
    pub(super) gone: Option<Gone>,
    /// Likewise.
    pub(super) wake: bool,
    /// That a worker was reached, to be judged again if nothing comes of this.
    pub(super) attached: Option<Input>,
}

impl Batch {
    /// Adds a step. The state is as the step left it.
    pub(super) fn add(&mut self, step: Step, state: &State) {
        let Step { events, rows, session_changed, effects, reply, large } = step;
        let offset = self.events.len();
        if events.iter().any(|event| matches!(event.body, Body::RunFinished(_))) {
            self.snapshot = load::snapshot(state);
        }
        self.large.extend(large.into_iter().map(|large| Large { event: offset + large.event, ..large }));
        self.events.extend(events);
        self.rows.extend(rows);
        self.session_changed |= session_changed;
        self.judged.push(Judged { effects, reply, waiter: None, offset });
    }

    /// Says who waits for the last step, under which key, and what is born with it.
    pub(super) fn attach(
        &mut self,
        waiter: oneshot::Sender<Result<Done, ApiError>>,
        key: Option<IdempotencyKey>,
        birth: Option<Box<Birth>>,
    ) {
        let Some(last) = self.judged.last_mut() else { return };
        last.waiter = Some(waiter);
        if !matches!(last.reply, Some(Reply::Refused(_)) | None) {
            self.made = birth.as_ref().map(|birth| birth.answer.clone());
            self.key = key;
            self.births.extend(birth.map(|birth| *birth));
        }
    }

    pub(super) fn bodies(&self) -> impl Iterator<Item = &Body> {
        self.events.iter().map(|event| &event.body)
    }

    /// Puts it all into the journal, in one transaction, and gives the seq of the first event.
    pub(super) async fn append(
        &mut self,
        daemon: &Daemon,
        session: &SessionRef,
        state: &State,
        line: &[SessionKey],
    ) -> Result<Seq, ApiError> {
        if self.events.is_empty() && self.key.is_none() && !self.purges() {
            return Ok(daemon.journal.head());
        }
        self.keep_large(daemon, session).await?;
        let mut rows = self.row_changes(session, state, line)?;
        let mut events = Vec::with_capacity(self.events.len());
        for event in &self.events {
            events.push(NewEvent {
                scope: session.scope.clone(),
                number: Some(event.number),
                ts: event.ts,
                run: event.run.clone(),
                kind: event.body.kind(),
                data: event.body.encode().map_err(unwritable)?,
                up: event.up,
            });
        }
        for birth in &mut self.births {
            events.append(&mut birth.events);
            rows.append(&mut birth.rows);
        }
        let append = Append { events, rows, remember: self.remember(), reserve: self.may_use_reserve() };
        let appended = daemon.journal.append(append).await.map_err(append_failed)?;
        Ok(appended.first)
    }

    /// What is to be answered and done now that `first` is the seq of the first event.
    pub(super) fn outcomes(self, first: Seq) -> Vec<Outcome> {
        let events = self.events;
        let outcome = |judged: Judged| {
            let Judged { effects, reply, waiter, offset } = judged;
            let answer = reply.map(|reply| words(&reply, &events, offset, first));
            Outcome { effects, answer, waiter }
        };
        self.judged.into_iter().map(outcome).collect()
    }

    /// Tells everybody who waits that nothing came of it.
    pub(super) fn fail(self, error: ApiError) {
        for judged in self.judged {
            if let Some(waiter) = judged.waiter {
                // Whoever has gone away does not need the answer.
                let _gone = waiter.send(Err(error.clone()));
            }
        }
    }

    /// Cancels and ends still fit on a full disk; new work does not get that room.
    fn may_use_reserve(&self) -> bool {
        let ends = |body: &Body| {
            matches!(
                body,
                Body::RunFinished(_)
                    | Body::RunCancelRequested(_)
                    | Body::RunKillRequested(_)
                    | Body::AskResolved(_)
                    | Body::SessionClosed(_)
                    | Body::WorkerExited(_)
                    | Body::WorkerReattached(_)
            )
        };
        self.bodies().any(ends) && !self.bodies().any(|body| matches!(body, Body::RunAccepted(_)))
    }

    /// A session that is closed already is purged without another event.
    fn purges(&self) -> bool {
        self.judged.iter().any(|judged| judged.effects.contains(&Effect::Purge))
    }

    fn remember(&self) -> Option<Remember> {
        let IdempotencyKey { key, fingerprint } = self.key.clone()?;
        if let Some(made) = self.made.clone() {
            return Some(Remember { key, fingerprint, answer: Box::new(move |_| made.clone()) });
        }
        let judged = self.judged.last()?;
        let (reply, offset) = (judged.reply.clone()?, judged.offset);
        let said = said(&reply, &self.events, offset);
        let write = move |first: Seq| {
            let answer = answer(&reply, &said, |event| Seq(first.0 + (offset + event) as u64));
            answer.ok().and_then(|answer| serde_json::to_vec(&answer).ok()).unwrap_or_default()
        };
        Some(Remember { key, fingerprint, answer: Box::new(write) })
    }

    fn row_changes(
        &self,
        session: &SessionRef,
        state: &State,
        line: &[SessionKey],
    ) -> Result<Vec<RowChange>, ApiError> {
        if self.purges() {
            return Ok(vec![RowChange::Purge { session: session.key }]);
        }
        let mut changes = Vec::new();
        if self.session_changed {
            changes.push(session_row(session, state, line)?);
        }
        let begun = Begun::of(&self.events);
        for row in &self.rows {
            changes.push(row_change(session, row, &begun)?);
        }
        if let Some((number, state)) = self.snapshot.clone() {
            changes.push(RowChange::Snapshot { session: session.key, number, state });
        }
        Ok(changes)
    }

    /// Writes what does not fit an event to files, and names them in the event and in its run's row.
    async fn keep_large(&mut self, daemon: &Daemon, session: &SessionRef) -> Result<(), ApiError> {
        for Large { event, text } in std::mem::take(&mut self.large) {
            let Some(run) = self.events[event].run.clone() else { continue };
            let text = match text {
                Some(text) => text,
                None => {
                    let mut text = load::said(daemon, session, &run).await?;
                    for event in self.events.iter().filter(|event| event.run.as_ref() == Some(&run)) {
                        if let Body::TextDelta(delta) = &event.body {
                            text.push_str(&delta.text);
                        }
                    }
                    text
                }
            };
            let kept = daemon.journal.blobs().put(text).await.map_err(blob_failed)?;
            if let Body::RunFinished(finished) = &mut self.events[event].body {
                finished.blob = Some(kept.clone());
            }
            for row in &mut self.rows {
                if let Row::Run { id, doc: RunDoc { text_blob, finished_at: Some(_), .. }, .. } = row
                    && *id == run
                {
                    *text_blob = Some(kept.clone());
                }
            }
        }
        Ok(())
    }
}

fn words(reply: &Reply, events: &[Recorded], offset: usize, first: Seq) -> Result<Answer, ApiError> {
    let said = said(reply, events, offset);
    answer(reply, &said, |event| Seq(first.0 + (offset + event) as u64))
}

fn said(reply: &Reply, events: &[Recorded], offset: usize) -> Said {
    let (Reply::Accepted { event: Some(event), .. } | Reply::Mailed { event: Some(event) }) = reply else {
        return Said::default();
    };
    let Some(event) = events.get(offset + event) else { return Said::default() };
    let mail = match &event.body {
        Body::MailSent(sent) => Some(mail_receipt(sent, Seq(0))),
        _ => None,
    };
    Said { run: event.run.clone(), mail }
}

/// Where among an append's events runs were accepted and messages sent: their rows begin with those.
#[derive(Debug, Default)]
pub(crate) struct Begun<'a> {
    runs: HashMap<&'a RunId, usize>,
    mail: HashMap<&'a MailId, (usize, &'a str)>,
}

impl<'a> Begun<'a> {
    pub(crate) fn of(events: &'a [Recorded]) -> Self {
        let mut begun = Self::default();
        for (at, event) in events.iter().enumerate() {
            match (&event.body, &event.run) {
                (Body::RunAccepted(_), Some(run)) => {
                    begun.runs.insert(run, at);
                }
                (Body::MailSent(sent), _) => {
                    begun.mail.insert(&sent.mail.id, (at, &sent.fingerprint));
                }
                _ => {}
            }
        }
        begun
    }
}

/// The row of a session as it stands.
pub(crate) fn session_row(
    session: &SessionRef,
    state: &State,
    line: &[SessionKey],
) -> Result<RowChange, ApiError> {
    Ok(RowChange::Session(SessionRow {
        key: session.key,
        id: session.id.clone(),
        workspace: session.workspace_key,
        parent: line.get(1).copied(),
        title: state.settings.title.clone(),
        closed_at: state.closed.then_some(state.updated_at),
        live: state.busy(),
        // A worker that is left is to be found again by the next daemon.
        owes: state.owes() || state.worker.is_some(),
        cost_usd: state.usage.cost_usd,
        budget_usd: state.settings.limits.budget_usd,
        updated_at: state.updated_at,
        doc: serde_json::to_vec(&SessionDoc::of(state)).map_err(unwritable)?,
    }))
}

/// The row of a run, an ask or a message.
pub(crate) fn row_change(session: &SessionRef, row: &Row, begun: &Begun<'_>) -> Result<RowChange, ApiError> {
    Ok(match row {
        Row::Run { id, doc, prompt, fingerprint } => RowChange::Run(RunRow {
            id: id.clone(),
            session: session.key,
            workspace: session.workspace_key,
            accepted: begun.runs.get(id).copied(),
            seq: Seq(0),
            finished: doc.finished_at.is_some(),
            fingerprint: fingerprint.clone(),
            prompt: prompt.as_ref().map(serde_json::to_vec).transpose().map_err(unwritable)?,
            doc: serde_json::to_vec(doc).map_err(unwritable)?,
        }),
        Row::Ask(doc) => RowChange::Ask(AskRow {
            id: doc.ask.id.clone(),
            session: session.key,
            pending: doc.ask.state == AskState::Pending,
            doc: serde_json::to_vec(doc).map_err(unwritable)?,
        }),
        Row::Mail { id, doc, sent } => {
            let (sent_by, fingerprint) = begun.mail.get(id).copied().unzip();
            RowChange::Mail(MailRow {
                id: id.clone(),
                session: Some(session.key),
                sent_by,
                seq: Seq(0),
                open: doc.state.is_open(),
                fingerprint: fingerprint.unwrap_or_default().to_owned(),
                sent: sent.as_ref().map(serde_json::to_vec).transpose().map_err(unwritable)?,
                doc: serde_json::to_vec(doc).map_err(unwritable)?,
            })
        }
    })
}

/// Our own types always have a JSON form; if one day they do not, it is our fault and not the client's.
pub(crate) fn unwritable(error: serde_json::Error) -> ApiError {
    ApiError::new(Code::Internal, format!("an event could not be written as JSON: {error}"))
}

/// How many bytes of prompts an actor keeps in memory; the others are read from the journal when their turn comes.
const HELD_MAX: usize = 64 << 10;

/// Prompts on their way to the agent.
#[derive(Default)]
pub(super) struct Held {
    prompts: HashMap<RunId, Accept>,
}

impl Held {
    pub(super) fn keep(&mut self, prompt: &Accept) {
        let weight = |prompt: &Accept| {
            let files: usize =
                prompt.attachments.iter().filter_map(|file| file.data.as_ref()).map(String::len).sum();
            prompt.prompt.head.len() + files
        };
        let held: usize = self.prompts.values().map(weight).sum();
        if held + weight(prompt) <= HELD_MAX {
            self.prompts.insert(prompt.run.clone(), prompt.clone());
        }
    }

    pub(super) fn take(&mut self, run: &RunId) -> Option<Accept> {
        self.prompts.remove(run)
    }

    pub(super) fn forget_ended(&mut self, state: &State) {
        if !self.prompts.is_empty() {
            self.prompts.retain(|run, _| state.run(run).is_some());
        }
    }
}
