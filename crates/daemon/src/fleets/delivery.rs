//! Prompts on their way to sessions, and ends on their way back. Every action is preceded by a lookup, so repeating it
//! changes nothing.
//!
//! Design: docs/design/fleets-assign-at-least-once.md

use std::collections::BTreeMap;
use std::sync::Arc;

use futures_util::{StreamExt, stream};
use qd_core::fleet::{AssignedRun, FinishedRun, FleetAssignment, FleetInput, FleetState, prompt, subtasks};
use qd_core::rows::RunDoc;
use qd_core::session::{PromptSubmission, SessionCommand};
use qd_protocol::event::{EventActor, FinishReason, RunStopCause};
use qd_protocol::limits::FLEET_PASSED_MAX;
use qd_protocol::mail::{MailDelivery, MailKind, MailStatus};
use qd_protocol::text::escaped_head;
use qd_protocol::{ApiError, ErrorCode, MailId, RunId, SessionId};

use super::actor::FleetActor;
use crate::actor::full_text;
use crate::daemon::{Daemon, read_failed};
use crate::http::unreadable_row;
use crate::mail::{self, MailSender, OutgoingMail};
use crate::user_content::{prompt_fingerprint, store_text};

/// How many sessions are handled at once: enough to share a sync of the journal well.
const CONCURRENT_SESSIONS: usize = 64;

/// What became of an open run.
enum DeliveryStatus {
    /// The session has accepted it.
    Delivered,
    /// It has ended.
    Ended,
    /// It can never be delivered: the run ends with this reason and text.
    Refused(FinishReason, String),
    /// It becomes no run: its text went to an active run as a steer.
    DeliveredAsSteer,
    /// It may be delivered later.
    RetryLater,
}

impl FleetActor {
    /// Delivers every open run that its session does not have yet: several sessions at once, each session's runs in
    /// order.
    pub(super) async fn deliver_open_runs(&mut self) {
        let undelivered =
            self.state.open_assigned_runs().filter(|(_, open)| !self.delivered.contains(&open.run));
        let undelivered = undelivered.map(|(assignment, open)| (assignment.clone(), open.clone())).collect();
        let (daemon, state) = (Arc::clone(&self.daemon), Arc::clone(&self.state));
        let statuses = for_each_session(undelivered, move |assignment, open| {
            let (daemon, state) = (Arc::clone(&daemon), Arc::clone(&state));
            async move { deliver_run(&daemon, &state, &assignment, &open).await }
        });
        let statuses = statuses.await;
        Box::pin(self.apply_statuses(statuses)).await;
    }

    /// Cancels every open run. A run that its session never got ends at once.
    pub(super) async fn cancel_open_runs(&mut self) {
        let open = self
            .state
            .open_assigned_runs()
            .map(|(assignment, open)| (assignment.clone(), open.clone()))
            .collect();
        let (daemon, state) = (Arc::clone(&self.daemon), Arc::clone(&self.state));
        let statuses = for_each_session(open, move |assignment, open| {
            let (daemon, state) = (Arc::clone(&daemon), Arc::clone(&state));
            async move { cancel_run(&daemon, &state, &assignment.session, &open.run).await }
        });
        let statuses = statuses.await;
        Box::pin(self.apply_statuses(statuses)).await;
    }

    async fn apply_statuses(&mut self, statuses: Vec<(RunId, Result<DeliveryStatus, ApiError>)>) {
        for (run, status) in statuses {
            match status {
                Ok(DeliveryStatus::Delivered) => {
                    self.delivered.insert(run);
                }
                Ok(DeliveryStatus::Ended) => self.ended_runs.push_back(run),
                Ok(DeliveryStatus::Refused(reason, text)) => {
                    let ended = FinishedRun { run, reason, text, other_texts: BTreeMap::new() };
                    self.step_machine(FleetInput::RunFinished(ended), None).await;
                }
                Ok(DeliveryStatus::DeliveredAsSteer) => {
                    self.step_machine(FleetInput::RunDeliveredAsSteer(run), None).await
                }
                Ok(DeliveryStatus::RetryLater) => self.needs_retry = true,
                Err(error) => {
                    tracing::warn!(fleet = %self.fleet.id, %run, %error, "could not deliver or cancel a run; trying again");
                    self.needs_retry = true;
                }
            }
        }
    }
}

/// Handles open runs: several sessions at once, the runs of one session in the order in which it was given them.
async fn for_each_session<F>(
    runs: Vec<(FleetAssignment, AssignedRun)>,
    handle: impl Fn(FleetAssignment, AssignedRun) -> F + Clone,
) -> Vec<(RunId, Result<DeliveryStatus, ApiError>)>
where
    F: Future<Output = Result<DeliveryStatus, ApiError>>,
{
    let mut sessions: BTreeMap<String, Vec<(FleetAssignment, AssignedRun)>> = BTreeMap::new();
    for (assignment, open) in runs {
        sessions.entry(assignment.session.clone()).or_default().push((assignment, open));
    }
    let handle_session = |runs: Vec<(FleetAssignment, AssignedRun)>| {
        let handle = handle.clone();
        async move {
            let mut statuses = Vec::with_capacity(runs.len());
            for (assignment, open) in runs {
                let run = open.run.clone();
                let status = handle(assignment, open).await;
                let must_wait = matches!(status, Ok(DeliveryStatus::RetryLater) | Err(_));
                statuses.push((run, status));
                // The later runs of this session must wait behind this one.
                if must_wait {
                    break;
                }
            }
            statuses
        }
    };
    stream::iter(sessions.into_values().map(handle_session)).buffered(CONCURRENT_SESSIONS).concat().await
}

/// The machine's input for a run that has ended; `None` if it has not. A run that was sent as mail may not exist as a
/// run.
pub(super) async fn run_end_input(
    daemon: &Daemon,
    state: &FleetState,
    run: &RunId,
) -> Result<Option<FleetInput>, ApiError> {
    let (reason, text) = match run_outcome(daemon, run).await? {
        Some((Some(reason), text)) => (reason, text),
        Some((None, _)) => return Ok(None),
        None => match mail_status(daemon, run).await? {
            Some(DeliveryStatus::DeliveredAsSteer) => {
                return Ok(Some(FleetInput::RunDeliveredAsSteer(run.clone())));
            }
            Some(DeliveryStatus::Refused(reason, text)) => (reason, text),
            _ => return Ok(None),
        },
    };
    let mut other_texts = BTreeMap::new();
    for other in state.required_texts(run) {
        if let Some((_, text)) = run_outcome(daemon, &other).await? {
            other_texts.insert(other, text);
        }
    }
    Ok(Some(FleetInput::RunFinished(FinishedRun { run: run.clone(), reason, text, other_texts })))
}

/// The reason why a run ended and its last message; if it failed without a message, the error's text.
async fn run_outcome(
    daemon: &Daemon,
    run: &RunId,
) -> Result<Option<(Option<FinishReason>, String)>, ApiError> {
    let Some(row) = daemon.journal.run(run).await.map_err(read_failed)? else { return Ok(None) };
    let doc: RunDoc = serde_json::from_slice(&row.doc).map_err(unreadable_row("run", run))?;
    let text = qd_protocol::LongText { head: doc.text.unwrap_or_default(), blob: doc.text_blob };
    let text = full_text(&daemon.home.blobs(), text).await?;
    let text = match (text.is_empty(), doc.error) {
        (true, Some(error)) => error.message,
        _ => text,
    };
    Ok(Some((doc.finish_reason.filter(|_| row.finished), text)))
}

async fn deliver_run(
    daemon: &Arc<Daemon>,
    state: &FleetState,
    assignment: &FleetAssignment,
    open: &AssignedRun,
) -> Result<DeliveryStatus, ApiError> {
    let _one_at_a_time = daemon.key_locks.lock(format!("run {}", open.run)).await;
    if let Some(row) = daemon.journal.run(&open.run).await.map_err(read_failed)? {
        return Ok(if row.finished { DeliveryStatus::Ended } else { DeliveryStatus::Delivered });
    }
    let Some(id) = state.sessions.get(&assignment.session) else {
        return Ok(DeliveryStatus::Refused(FinishReason::Error, "the fleet has no such session".to_owned()));
    };
    if assignment.by_mention {
        return send_mention(daemon, state, assignment, open, id).await;
    }
    let text = match compose_prompt(daemon, state, assignment, open).await? {
        text if text.trim().is_empty() => {
            return Ok(DeliveryStatus::Refused(FinishReason::Error, "its prompt is empty".to_owned()));
        }
        text => text,
    };
    let delivery = async {
        let session = daemon.find_session(id).await?;
        let fingerprint = prompt_fingerprint(id, &text, &[]);
        let prompt = store_text(&daemon.journal, text).await?;
        let submission =
            PromptSubmission { run: open.run.clone(), prompt, attachments: Vec::new(), fingerprint };
        let actor = Arc::new(EventActor::Fleet { fleet_id: state.id.clone() });
        daemon.send_command(&session, &actor, SessionCommand::AcceptPrompt(submission), None).await
    };
    match delivery.await {
        Ok(_) => Ok(DeliveryStatus::Delivered),
        Err(error) => status_of_refusal(error),
    }
}

/// Whether a delivery that a session refused can be tried again.
fn status_of_refusal(error: ApiError) -> Result<DeliveryStatus, ApiError> {
    match error.code {
        ErrorCode::QueueFull | ErrorCode::MailboxFull | ErrorCode::Overloaded | ErrorCode::Stopping => {
            Ok(DeliveryStatus::RetryLater)
        }
        ErrorCode::NotFound
        | ErrorCode::SessionClosed
        | ErrorCode::RunIdConflict
        | ErrorCode::MailIdConflict
        | ErrorCode::InvalidValue => Ok(DeliveryStatus::Refused(FinishReason::Error, error.message)),
        _ => Err(error),
    }
}

/// Sends the last message of a session to a session that it mentions. The message's id is derived from the run's, so a
/// repeat sends nothing.
async fn send_mention(
    daemon: &Arc<Daemon>,
    state: &FleetState,
    assignment: &FleetAssignment,
    open: &AssignedRun,
    to: &SessionId,
) -> Result<DeliveryStatus, ApiError> {
    if let Some(status) = mail_status(daemon, &open.run).await? {
        return Ok(status);
    }
    let Some(source) = assignment.from.first() else {
        return Ok(DeliveryStatus::Refused(FinishReason::Error, "no session has mentioned it".to_owned()));
    };
    let mut text = String::new();
    for run in &source.runs {
        text.push_str(&run_outcome(daemon, run).await?.map(|(_, text)| text).unwrap_or_default());
    }
    text.truncate(escaped_head(&text, FLEET_PASSED_MAX).len());
    let from = match state.sessions.get(&source.session) {
        Some(id) => MailSender::Session { id: id.clone(), name: Some(source.session.clone()) },
        None => {
            return Ok(DeliveryStatus::Refused(
                FinishReason::Error,
                "the fleet has no such session".to_owned(),
            ));
        }
    };
    let mail = OutgoingMail {
        from,
        id: Some(MailId::of_run(&open.run)),
        kind: MailKind::Task,
        text,
        in_reply_to: None,
        correlation_id: Some(state.id.to_string()),
        deliver: None,
        run: Some(open.run.clone()),
    };
    let delivery = async {
        let session = daemon.find_session(to).await?;
        let actor = Arc::new(EventActor::Fleet { fleet_id: state.id.clone() });
        daemon.post_mail(&session, &actor, mail, None).await
    };
    match delivery.await {
        Ok(_) => Ok(DeliveryStatus::Delivered),
        Err(error) => status_of_refusal(error),
    }
}

/// The status of a message that was to become a run and has not; `None` if there is no such message.
async fn mail_status(daemon: &Daemon, run: &RunId) -> Result<Option<DeliveryStatus>, ApiError> {
    let row = daemon.journal.mail(&MailId::of_run(run)).await.map_err(read_failed)?;
    let Some(row) = row else { return Ok(None) };
    if row.session.is_none() {
        return Ok(Some(DeliveryStatus::Refused(
            FinishReason::Cancelled,
            "its session was purged".to_owned(),
        )));
    }
    let mail = mail::mail_view(&row)?;
    Ok(Some(match mail.state {
        MailStatus::Delivered if mail.delivered_as == Some(MailDelivery::Steer) => {
            DeliveryStatus::DeliveredAsSteer
        }
        MailStatus::Delivering | MailStatus::Delivered => DeliveryStatus::Delivered,
        MailStatus::Waiting | MailStatus::Claimed | MailStatus::Acknowledged | MailStatus::Quarantined => {
            DeliveryStatus::Refused(FinishReason::Cancelled, mail.reason.unwrap_or_default())
        }
    }))
}

/// The prompt of a run.
async fn compose_prompt(
    daemon: &Daemon,
    state: &FleetState,
    assignment: &FleetAssignment,
    open: &AssignedRun,
) -> Result<String, ApiError> {
    let mut texts = BTreeMap::new();
    for source in &assignment.from {
        let mut outcomes = Vec::with_capacity(source.runs.len());
        for run in &source.runs {
            outcomes.push(run_outcome(daemon, run).await?.map(|(_, text)| text).unwrap_or_default());
        }
        texts.insert(source.session.clone(), prompt::join_texts(outcomes.iter().map(String::as_str)));
    }
    let subtask = match &open.subtask {
        None => None,
        Some(subtask) => {
            let text = run_outcome(daemon, &subtask.run).await?.map(|(_, text)| text).unwrap_or_default();
            // It could be parsed when the subtasks were assigned, and has not changed since.
            let entries = subtasks::parse_subtasks(&text).unwrap_or_default();
            entries.into_iter().nth(subtask.entry as usize)
        }
    };
    Ok(prompt::compose_prompt(state, assignment, &texts, subtask.as_deref()))
}

async fn cancel_run(
    daemon: &Arc<Daemon>,
    state: &FleetState,
    member: &str,
    run: &RunId,
) -> Result<DeliveryStatus, ApiError> {
    let _one_at_a_time = daemon.key_locks.lock(format!("run {run}")).await;
    let cancelled = || DeliveryStatus::Refused(FinishReason::Cancelled, String::new());
    match daemon.journal.run(run).await.map_err(read_failed)? {
        None => return Ok(cancelled()),
        Some(row) if row.finished => return Ok(DeliveryStatus::Ended),
        Some(_) => {}
    }
    let Some(session) = state.sessions.get(member) else { return Ok(cancelled()) };
    let session = match daemon.find_session(session).await {
        Ok(session) => session,
        Err(error) if error.code == ErrorCode::NotFound => return Ok(cancelled()),
        Err(error) => return Err(error),
    };
    let command = SessionCommand::Cancel { run: Some(run.clone()), by: RunStopCause::Fleet, reason: None };
    let actor = Arc::new(EventActor::Fleet { fleet_id: state.id.clone() });
    match daemon.send_command(&session, &actor, command, None).await {
        Ok(_) => Ok(DeliveryStatus::Delivered),
        Err(error) if matches!(error.code, ErrorCode::Overloaded | ErrorCode::Stopping) => {
            Ok(DeliveryStatus::RetryLater)
        }
        Err(error) => Err(error),
    }
}
