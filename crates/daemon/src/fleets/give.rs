//! Prompts on their way to sessions, and ends on their way back. Everything is looked up before it is done, so doing it
//! again changes nothing.

use std::collections::BTreeMap;
use std::sync::Arc;

use futures_util::{StreamExt, stream};
use qd_core::fleet::{Ended, Errand, Input, Open, State, prompt, subtasks};
use qd_core::rows::RunDoc;
use qd_core::session::{Accept, Command};
use qd_protocol::event::{FinishReason, StopCause};
use qd_protocol::limits::FLEET_PASSED_MAX;
use qd_protocol::mail::{Deliver, MailKind, MailState};
use qd_protocol::text::head;
use qd_protocol::{ApiError, Code, MailId, RunId, SessionId};

use super::actor::FleetActor;
use crate::actor::{unwritable, whole};
use crate::daemon::{Daemon, read_failed};
use crate::mail::{self, Outgoing, Sender};
use crate::words::{fingerprint, keep_text};

/// How many sessions are given something at once: as many as share a sync of the journal with profit.
const AT_ONCE: usize = 64;

/// What became of an open run that was looked after.
enum Found {
    /// Its session has it.
    There,
    /// It has ended.
    Over,
    /// It cannot be: the run ends with this.
    Refused(FinishReason, String),
    /// It will be no run: its words were told to one that its session already had.
    TakenIn,
    /// Perhaps later.
    Later,
}

impl FleetActor {
    /// Gives every open run to its session that does not have it: many sessions at once, to each its runs in order.
    pub(super) async fn give(&mut self) {
        let owed = self.state.open().filter(|(_, open)| !self.given.contains(&open.run));
        let owed = owed.map(|(errand, open)| (errand.clone(), open.clone())).collect();
        let (daemon, state) = (Arc::clone(&self.daemon), Arc::clone(&self.state));
        let found = each(owed, move |errand, open| {
            let (daemon, state) = (Arc::clone(&daemon), Arc::clone(&state));
            async move { deliver(&daemon, &state, &errand, &open).await }
        });
        let found = found.await;
        Box::pin(self.settle(found)).await;
    }

    /// Cancels every open run that its session has; one that it never got has ended with that.
    pub(super) async fn stop(&mut self) {
        let open = self.state.open().map(|(errand, open)| (errand.clone(), open.clone())).collect();
        let (daemon, state) = (Arc::clone(&self.daemon), Arc::clone(&self.state));
        let found = each(open, move |errand, open| {
            let (daemon, state) = (Arc::clone(&daemon), Arc::clone(&state));
            async move { cancel(&daemon, state.sessions.get(&errand.session), &open.run).await }
        });
        let found = found.await;
        Box::pin(self.settle(found)).await;
    }

    async fn settle(&mut self, found: Vec<(RunId, Result<Found, ApiError>)>) {
        for (run, found) in found {
            match found {
                Ok(Found::There) => {
                    self.given.insert(run);
                }
                Ok(Found::Over) => self.told.push_back(run),
                Ok(Found::Refused(reason, text)) => {
                    let ended = Ended { run, reason, text, others: BTreeMap::new() };
                    self.judge(Input::Ended(ended), None).await;
                }
                Ok(Found::TakenIn) => self.judge(Input::TakenIn(run), None).await,
                Ok(Found::Later) => self.again = true,
                Err(error) => {
                    tracing::warn!(fleet = %self.fleet.id, %run, %error, "a run of a fleet could not be looked after; it is tried again");
                    self.again = true;
                }
            }
        }
    }
}

/// Looks after open runs: several sessions at once, and those of one in the order in which it was given them.
async fn each<F>(
    runs: Vec<(Errand, Open)>,
    look: impl Fn(Errand, Open) -> F + Clone,
) -> Vec<(RunId, Result<Found, ApiError>)>
where
    F: Future<Output = Result<Found, ApiError>>,
{
    let mut sessions: BTreeMap<String, Vec<(Errand, Open)>> = BTreeMap::new();
    for (errand, open) in runs {
        sessions.entry(errand.session.clone()).or_default().push((errand, open));
    }
    let one = |runs: Vec<(Errand, Open)>| {
        let look = look.clone();
        async move {
            let mut found = Vec::with_capacity(runs.len());
            for (errand, open) in runs {
                let run = open.run.clone();
                let one = look(errand, open).await;
                let waits = matches!(one, Ok(Found::Later) | Err(_));
                found.push((run, one));
                // Those behind it come after it, whenever that is.
                if waits {
                    break;
                }
            }
            found
        }
    };
    stream::iter(sessions.into_values().map(one)).buffered(AT_ONCE).concat().await
}

/// How a run ended, with what the machine needs to judge that; `None` if it has not. One that was sent as mail may be
/// none at all.
pub(super) async fn ended(daemon: &Daemon, state: &State, run: &RunId) -> Result<Option<Input>, ApiError> {
    let (reason, text) = match outcome(daemon, run).await? {
        Some((Some(reason), text)) => (reason, text),
        Some((None, _)) => return Ok(None),
        None => match taken(daemon, run).await? {
            Some(Found::TakenIn) => return Ok(Some(Input::TakenIn(run.clone()))),
            Some(Found::Refused(reason, text)) => (reason, text),
            _ => return Ok(None),
        },
    };
    let mut others = BTreeMap::new();
    for other in state.wants_texts(run) {
        if let Some((_, text)) = outcome(daemon, &other).await? {
            others.insert(other, text);
        }
    }
    Ok(Some(Input::Ended(Ended { run: run.clone(), reason, text, others })))
}

/// Why a run ended and its last message; of one that failed without any, what went wrong.
async fn outcome(daemon: &Daemon, run: &RunId) -> Result<Option<(Option<FinishReason>, String)>, ApiError> {
    let Some(row) = daemon.journal.run(run).await.map_err(read_failed)? else { return Ok(None) };
    let doc: RunDoc = serde_json::from_slice(&row.doc).map_err(unwritable)?;
    let text = qd_protocol::Text { head: doc.text.unwrap_or_default(), blob: doc.text_blob };
    let text = whole(&daemon.home.blobs(), text).await?;
    let text = match (text.is_empty(), doc.error) {
        (true, Some(error)) => error.message,
        _ => text,
    };
    Ok(Some((doc.finish_reason.filter(|_| row.finished), text)))
}

async fn deliver(
    daemon: &Arc<Daemon>,
    state: &State,
    errand: &Errand,
    open: &Open,
) -> Result<Found, ApiError> {
    let _one_at_a_time = daemon.keys.lock(format!("run {}", open.run)).await;
    if let Some(row) = daemon.journal.run(&open.run).await.map_err(read_failed)? {
        return Ok(if row.finished { Found::Over } else { Found::There });
    }
    let Some(id) = state.sessions.get(&errand.session) else {
        return Ok(Found::Refused(FinishReason::Error, "the fleet has no such session".to_owned()));
    };
    if errand.mention {
        return write(daemon, state, errand, open, id).await;
    }
    let text = match words(daemon, state, errand, open).await? {
        text if text.trim().is_empty() => {
            return Ok(Found::Refused(FinishReason::Error, "its prompt is empty".to_owned()));
        }
        text => text,
    };
    let given = async {
        let session = daemon.find_session(id).await?;
        let fingerprint = fingerprint(id, &text, &[]);
        let prompt = keep_text(&daemon.journal, text).await?;
        let accept = Accept { run: open.run.clone(), prompt, attachments: Vec::new(), fingerprint };
        daemon.command(&session, Command::Accept(accept), None).await
    };
    match given.await {
        Ok(_) => Ok(Found::There),
        Err(error) => refused(error),
    }
}

/// Whether what a session did not take may be taken later.
fn refused(error: ApiError) -> Result<Found, ApiError> {
    match error.code {
        Code::QueueFull | Code::MailboxFull | Code::Overloaded | Code::Stopping => Ok(Found::Later),
        Code::NotFound
        | Code::SessionClosed
        | Code::RunIdConflict
        | Code::MailIdConflict
        | Code::InvalidValue => Ok(Found::Refused(FinishReason::Error, error.message)),
        _ => Err(error),
    }
}

/// Sends the last message of a session to one that it mentions. The message's id is its run's, so a repeat sends nothing.
async fn write(
    daemon: &Arc<Daemon>,
    state: &State,
    errand: &Errand,
    open: &Open,
    to: &SessionId,
) -> Result<Found, ApiError> {
    if let Some(found) = taken(daemon, &open.run).await? {
        return Ok(found);
    }
    let Some(source) = errand.from.first() else {
        return Ok(Found::Refused(FinishReason::Error, "nobody has mentioned it".to_owned()));
    };
    let mut text = String::new();
    for run in &source.runs {
        text.push_str(&outcome(daemon, run).await?.map(|(_, text)| text).unwrap_or_default());
    }
    text.truncate(head(&text, FLEET_PASSED_MAX).len());
    let from = match state.sessions.get(&source.session) {
        Some(id) => Sender::Session { id: id.clone(), name: Some(source.session.clone()) },
        None => return Ok(Found::Refused(FinishReason::Error, "the fleet has no such session".to_owned())),
    };
    let mail = Outgoing {
        from,
        id: Some(MailId::of_run(&open.run)),
        kind: MailKind::Task,
        text,
        in_reply_to: None,
        correlation_id: Some(state.id.to_string()),
        deliver: None,
        run: Some(open.run.clone()),
    };
    let sent = async {
        let session = daemon.find_session(to).await?;
        daemon.post_mail(&session, mail, None).await
    };
    match sent.await {
        Ok(_) => Ok(Found::There),
        Err(error) => refused(error),
    }
}

/// What became of a message that was to be a run and is none so far; `None`: there is no such message.
async fn taken(daemon: &Daemon, run: &RunId) -> Result<Option<Found>, ApiError> {
    let row = daemon.journal.mail(&MailId::of_run(run)).await.map_err(read_failed)?;
    let Some(row) = row else { return Ok(None) };
    if row.session.is_none() {
        return Ok(Some(Found::Refused(FinishReason::Cancelled, "its session was purged".to_owned())));
    }
    let mail = mail::view(&row)?;
    Ok(Some(match mail.state {
        MailState::Delivered if mail.delivered_as == Some(Deliver::Steer) => Found::TakenIn,
        MailState::Delivering | MailState::Delivered => Found::There,
        MailState::Waiting | MailState::Claimed | MailState::Acknowledged | MailState::Quarantined => {
            Found::Refused(FinishReason::Cancelled, mail.reason.unwrap_or_default())
        }
    }))
}

/// What a run is told.
async fn words(daemon: &Daemon, state: &State, errand: &Errand, open: &Open) -> Result<String, ApiError> {
    let mut texts = BTreeMap::new();
    for source in &errand.from {
        let mut said = Vec::with_capacity(source.runs.len());
        for run in &source.runs {
            said.push(outcome(daemon, run).await?.map(|(_, text)| text).unwrap_or_default());
        }
        texts.insert(source.session.clone(), prompt::joined(said.iter().map(String::as_str)));
    }
    let subtask = match &open.subtask {
        None => None,
        Some(subtask) => {
            let text = outcome(daemon, &subtask.run).await?.map(|(_, text)| text).unwrap_or_default();
            // It could be read when it was dealt, and has not changed since.
            let entries = subtasks::read(&text).unwrap_or_default();
            entries.into_iter().nth(subtask.entry as usize)
        }
    };
    Ok(prompt::compose(state, errand, &texts, subtask.as_deref()))
}

async fn cancel(daemon: &Arc<Daemon>, session: Option<&SessionId>, run: &RunId) -> Result<Found, ApiError> {
    let _one_at_a_time = daemon.keys.lock(format!("run {run}")).await;
    let cancelled = || Found::Refused(FinishReason::Cancelled, String::new());
    match daemon.journal.run(run).await.map_err(read_failed)? {
        None => return Ok(cancelled()),
        Some(row) if row.finished => return Ok(Found::Over),
        Some(_) => {}
    }
    let Some(session) = session else { return Ok(cancelled()) };
    let session = match daemon.find_session(session).await {
        Ok(session) => session,
        Err(error) if error.code == Code::NotFound => return Ok(cancelled()),
        Err(error) => return Err(error),
    };
    let command = Command::Cancel { run: Some(run.clone()), by: StopCause::Fleet, reason: None };
    match daemon.command(&session, command, None).await {
        Ok(_) => Ok(Found::There),
        Err(error) if matches!(error.code, Code::Overloaded | Code::Stopping) => Ok(Found::Later),
        Err(error) => Err(error),
    }
}
