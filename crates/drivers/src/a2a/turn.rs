//! The state of one turn and of its task. Decisions here are immediate. Anything that takes time is stored in a field,
//! and the loop in `conversation` waits for all of them.
//!
//! Events of a task come on a stream: the response to a message, or a subscription opened again after a break. If an
//! agent has no streams or refuses to be subscribed to again, its task is polled. A stream that was opened again may
//! have missed something. So until it has shown the whole task, its events only trigger a poll.

use std::sync::Arc;
use std::time::Duration;

use qd_catalog::REMOTE_TOKEN;
use qd_link::LinkClosed;
use qd_protocol::event::{AskAnswer, RunError};
use qd_protocol::link::{AskRequest, TurnOutcome, TurnStopReason, TurnUpdate};
use serde_json::Value;

use super::client::{A2aClient, A2aEventStream, error_code};
use super::emitted_output::{A2aEmittedOutput, TURN_TEXT_MAX};
use super::event_source::{A2aEventSource, A2aOpenTask, A2aPending, A2aSourceEvent, A2aSourcePurpose};
use super::http::A2aHttpError;
use super::messages::{self, A2aEvent, A2aTask, A2aTaskRef, A2aTaskState, A2aTaskStatus};
use crate::asks::question_request;
use crate::emit::{EmitFuture, emit_all};
use crate::turn::DriverTurn;

/// The pause between two polls of a task.
const POLL_INTERVAL: Duration = Duration::from_secs(1);
/// The pause before the first reconnect; doubled before each later one.
const FIRST_RETRY_DELAY: Duration = Duration::from_millis(250);
/// The longest pause between two reconnects.
const MAX_RETRY_DELAY: Duration = Duration::from_secs(10);
/// Failed reconnects in a row before the turn fails. They take about forty seconds, in which a network comes back or a
/// server is restarted.
const RECONNECTS_MAX: u32 = 8;
/// The pause between two cancels: an agent may have missed one that came before it had begun.
const CANCEL_INTERVAL: Duration = Duration::from_millis(500);
/// How many times an agent may show a question that was answered. If it still does, it has not received the answer, and
/// the question is asked again.
const QUESTION_REPEATS_MAX: u32 = 3;
/// Random bytes in a message id.
const MESSAGE_ID_BYTES: usize = 16;

/// The state of one turn.
pub(super) struct A2aTurn<'t> {
    pub(super) turn: &'t DriverTurn<'t>,
    client: Arc<A2aClient>,
    task: A2aOpenTask,
    context: Option<String>,
    emitted: A2aEmittedOutput,
    /// Updates to emit next.
    queued_updates: Vec<TurnUpdate>,
    /// Updates that are being sent. The agent is not read meanwhile, which is how a slow journal slows it down.
    pub(super) emitting: Option<EmitFuture<'t>>,
    pub(super) source: A2aEventSource,
    /// Whether the source is known to have missed nothing.
    source_is_complete: bool,
    /// A poll of the task, possibly after a pause.
    pub(super) poll: A2aPending<'static, Result<A2aTask, A2aHttpError>>,
    /// A cancel of the task, possibly after a pause.
    pub(super) cancel_request: A2aPending<'static, Result<A2aTask, A2aHttpError>>,
    /// The result of the cancel, until it is handled.
    pub(super) cancel_result: Option<Result<A2aTask, A2aHttpError>>,
    pub(super) open_ask: A2aPending<'t, Result<Option<AskAnswer>, LinkClosed>>,
    /// A question to ask once all earlier updates are sent.
    queued_ask: Option<AskRequest>,
    /// The last question asked. The agent may show it until it has received the answer.
    last_question: Option<A2aQuestion>,
    /// How many times the agent has shown it since.
    question_repeats: u32,
    /// Failed attempts in a row.
    failed_attempts: u32,
    pub(super) cancelled: bool,
    /// Whether the agent refused to cancel the task.
    refuses_cancel: bool,
    /// How the turn ends once the agent has answered the cancel.
    outcome_after_cancel: Option<TurnOutcome>,
    /// How the turn ended. It is returned once all updates are sent.
    outcome: Option<TurnOutcome>,
}

/// Identifies one question of an agent.
#[derive(Debug, Clone, PartialEq, Eq)]
struct A2aQuestion {
    id: Option<String>,
    text: String,
    timestamp: String,
}

impl<'t> A2aTurn<'t> {
    /// A turn in which nothing is open yet.
    pub(super) fn new(turn: &'t DriverTurn<'t>, client: Arc<A2aClient>, context: Option<String>) -> Self {
        Self {
            turn,
            task: A2aOpenTask { client: Arc::clone(&client), id: None, is_over: false },
            client,
            context,
            emitted: A2aEmittedOutput::default(),
            queued_updates: Vec::new(),
            emitting: None,
            source: A2aEventSource::Idle,
            source_is_complete: true,
            poll: None,
            cancel_request: None,
            cancel_result: None,
            open_ask: None,
            queued_ask: None,
            last_question: None,
            question_repeats: 0,
            failed_attempts: 0,
            cancelled: false,
            refuses_cancel: false,
            outcome_after_cancel: None,
            outcome: None,
        }
    }

    /// The agent's id for the conversation.
    pub(super) fn context_id(&self) -> Option<String> {
        self.context.clone()
    }

    /// Does the next step that is due: sends queued updates, then handles the result of a cancel, asks a question, or
    /// ends the turn. Returns the outcome if the turn has ended.
    pub(super) fn advance(&mut self) -> Option<TurnOutcome> {
        if self.emitted.exceeds_limit() && self.outcome.is_none() && self.outcome_after_cancel.is_none() {
            let message =
                format!("the agent sent more than {TURN_TEXT_MAX} bytes in one turn and was cancelled");
            self.cancel_and_end(TurnOutcome::failed(RunError::new("agent_error", message)), None);
        }
        if self.emitting.is_some() {
            return None;
        }
        if self.queued_updates.is_empty()
            && self.outcome.is_none()
            && let Some(result) = self.cancel_result.take()
        {
            self.handle_cancel_result(result);
        }
        if !self.queued_updates.is_empty() {
            self.emitting = Some(Box::pin(emit_all(self.turn, std::mem::take(&mut self.queued_updates))));
            return None;
        }
        if self.outcome.is_none()
            && let Some(ask) = self.queued_ask.take()
        {
            self.open_ask = Some(Box::pin(self.turn.ask(ask)));
        }
        self.outcome.take()
    }

    /// Sends the agent a prompt or an answer.
    pub(super) fn send_to_agent(&mut self, parts: Vec<Value>) {
        let mut random = [0; MESSAGE_ID_BYTES];
        if let Err(cause) = getrandom::fill(&mut random) {
            return self.cancel_and_end(TurnOutcome::failed(randomness_error(cause)), None);
        }
        let id = hex::encode(random);
        let task_ref = A2aTaskRef { task: self.task.id.clone(), context: self.context.clone() };
        let message = messages::user_message(self.client.card.interface.version, &task_ref, &id, parts);
        let client = Arc::clone(&self.client);
        self.source = A2aEventSource::Opening(
            A2aSourcePurpose::SendMessage,
            Box::pin(async move { client.send_message(message).await }),
        );
    }

    /// Cancels the turn. A task whose id is not known yet is cancelled as soon as it is.
    pub(super) fn cancel(&mut self) {
        self.cancelled = true;
        self.open_ask = None;
        self.queued_ask = None;
        self.request_cancel(Duration::ZERO, None);
    }

    /// Handles the answer to a question.
    pub(super) fn handle_answer(&mut self, answer: Option<AskAnswer>) {
        match answer {
            Some(AskAnswer { value: Some(value), .. }) => {
                let version = self.client.card.interface.version;
                self.send_to_agent(vec![messages::text_part(version, &value)]);
            }
            // The protocol has no way to decline a question, so the task is cancelled.
            unanswered => {
                let reason = unanswered.and_then(|answer| answer.reason);
                let message = "the agent's question was not answered, so its task was cancelled";
                let error = RunError::new("question_refused", message);
                self.cancel_and_end(TurnOutcome::failed(error), reason);
            }
        }
    }

    /// Handles the result of a poll.
    pub(super) fn handle_poll(&mut self, result: Result<A2aTask, A2aHttpError>) {
        match result {
            Ok(task) => {
                self.failed_attempts = 0;
                self.handle_task(task);
                if self.refuses_cancel && self.outcome.is_none() {
                    self.abandon_task();
                } else if self.is_polling_only() {
                    self.poll_after(POLL_INTERVAL);
                }
            }
            Err(_) if self.refuses_cancel => self.abandon_task(),
            Err(error) if is_refused_with(&error, &[error_code::TASK_NOT_FOUND]) => {
                self.task.is_over = true;
                self.fail_turn(&error);
            }
            // The stream will show what is wrong.
            Err(_) if !matches!(self.source, A2aEventSource::Idle) => self.poll_after(POLL_INTERVAL),
            Err(error) if error.is_retryable() || matches!(error, A2aHttpError::Refused { .. }) => {
                self.reconnect(&error)
            }
            Err(error) => self.fail_turn(&error),
        }
    }

    /// Handles an event of the source.
    pub(super) fn handle_source_event(&mut self, event: A2aSourceEvent) {
        match event {
            A2aSourceEvent::Opened(purpose, Ok(stream)) => {
                self.source_is_complete = purpose == A2aSourcePurpose::SendMessage;
                self.source = A2aEventSource::Connected(stream);
                if !self.source_is_complete {
                    self.poll_after(POLL_INTERVAL);
                }
            }
            A2aSourceEvent::Opened(A2aSourcePurpose::SendMessage, Err(error)) if self.task.id.is_some() => {
                // It is uncertain whether the agent received the answer. If not, the question is asked again.
                self.last_question = None;
                self.source = A2aEventSource::Idle;
                if error.is_retryable() { self.reconnect(&error) } else { self.fail_turn(&error) }
            }
            A2aSourceEvent::Opened(A2aSourcePurpose::SendMessage, Err(error)) => self.fail_turn(&error),
            A2aSourceEvent::Opened(A2aSourcePurpose::Resubscribe, Err(error)) if error.is_retryable() => {
                self.reconnect(&error)
            }
            // The task cannot be subscribed to, so it is polled.
            A2aSourceEvent::Opened(A2aSourcePurpose::Resubscribe, Err(_)) => {
                self.source = A2aEventSource::Idle;
                self.poll_after(Duration::ZERO);
            }
            A2aSourceEvent::Received(Ok(Some(received))) => {
                self.failed_attempts = 0;
                self.handle_event(received);
            }
            A2aSourceEvent::Received(Ok(None)) => self.handle_stream_end(),
            // After an event that cannot be parsed, the next may be fine.
            A2aSourceEvent::Received(Err(A2aHttpError::InvalidResponse(_))) => {}
            A2aSourceEvent::Received(Err(error)) if self.task.id.is_none() => self.fail_turn(&error),
            A2aSourceEvent::Received(Err(error)) if error.is_retryable() => self.reconnect(&error),
            A2aSourceEvent::Received(Err(error @ A2aHttpError::TooLong(_))) => self.fail_turn(&error),
            A2aSourceEvent::Received(Err(_)) => {
                self.source = A2aEventSource::Idle;
                self.poll_after(Duration::ZERO);
            }
        }
    }

    fn handle_event(&mut self, event: A2aEvent) {
        match event {
            A2aEvent::Other => {}
            A2aEvent::Message(message) => {
                self.record_task_ref(&message.task_ref);
                self.queued_updates.extend(self.emitted.final_updates(Some(&message)));
                self.task.is_over = true;
                self.end_turn(TurnOutcome::of(TurnStopReason::EndTurn));
            }
            A2aEvent::Task(task) => {
                self.source_is_complete = true;
                self.poll = None;
                self.handle_task(task);
            }
            A2aEvent::Status { task_ref, status } => {
                self.record_task_ref(&task_ref);
                if !self.source_is_complete && status.state != A2aTaskState::Working {
                    // The status is known, but earlier artifacts may have been missed.
                    self.source = A2aEventSource::Idle;
                    self.poll_after(Duration::ZERO);
                } else {
                    self.handle_status(&status);
                }
            }
            A2aEvent::Artifact { task_ref, artifact, append } => {
                self.record_task_ref(&task_ref);
                if self.source_is_complete {
                    self.queued_updates.extend(self.emitted.artifact_updates(&artifact, append));
                } else if self.poll.is_none() {
                    self.poll_after(POLL_INTERVAL);
                }
            }
        }
    }

    fn handle_task(&mut self, task: A2aTask) {
        self.record_task_ref(&task.task_ref);
        self.queued_updates.extend(self.emitted.task_updates(&task));
        self.handle_status(&task.status);
    }

    /// Handles the status of the task.
    fn handle_status(&mut self, status: &A2aTaskStatus) {
        let A2aTaskStatus { state, message, timestamp } = status;
        let text = message.as_ref().map(|message| message.text.trim()).filter(|text| !text.is_empty());
        let failed = |what: &str| {
            let message = text.map_or_else(|| format!("{what} and did not say why"), str::to_owned);
            TurnOutcome::failed(RunError::new("agent_error", message))
        };
        self.task.is_over = state.is_over();
        match state {
            A2aTaskState::Working => {
                self.last_question = None;
                if let Some(message) = message {
                    self.queued_updates.extend(self.emitted.progress_updates(message));
                }
            }
            A2aTaskState::Completed => {
                self.queued_updates.extend(self.emitted.final_updates(message.as_ref()));
                self.end_turn(TurnOutcome::of(TurnStopReason::EndTurn));
            }
            A2aTaskState::Failed => self.end_turn(failed("the agent failed")),
            A2aTaskState::Rejected => self.end_turn(failed("the agent rejected the task")),
            A2aTaskState::Canceled if self.cancelled => self.end_turn(TurnOutcome::cancelled()),
            A2aTaskState::Canceled => {
                let why = text.map(|text| format!(": {text}")).unwrap_or_default();
                let message = format!("the task was cancelled at the remote agent, not from here{why}");
                self.end_turn(TurnOutcome::failed(RunError::new("agent_error", message)));
            }
            A2aTaskState::InputRequired => {
                let question = A2aQuestion {
                    id: message.as_ref().and_then(|message| message.id.clone()),
                    text: text
                        .unwrap_or("The agent needs an answer but did not say to which question.")
                        .to_owned(),
                    timestamp: timestamp.clone(),
                };
                if let Some(message) = message {
                    self.emitted.mark_emitted(message);
                }
                self.queue_question(question);
            }
            A2aTaskState::AuthRequired => {
                let text = text.map(|text| format!(" ({text})")).unwrap_or_default();
                let message = format!(
                    "the agent needs authorisation{text}: grant it at the agent, or give the session another \
                     {REMOTE_TOKEN}, and send the prompt again"
                );
                self.cancel_and_end(TurnOutcome::failed(RunError::new("auth_required", message)), None);
            }
        }
    }

    /// Queues a question of the agent. The agent sends nothing until it has the answer.
    fn queue_question(&mut self, question: A2aQuestion) {
        if self.cancelled || self.outcome_after_cancel.is_some() {
            return;
        }
        if self.last_question.as_ref() == Some(&question) && self.question_repeats < QUESTION_REPEATS_MAX {
            self.question_repeats += 1;
            return;
        }
        self.question_repeats = 0;
        let ask = match question_request(question.text.clone(), Vec::new()) {
            Ok(ask) => ask,
            Err(cause) => return self.cancel_and_end(TurnOutcome::failed(randomness_error(cause)), None),
        };
        self.queued_ask = Some(ask);
        self.last_question = Some(question);
        self.source = A2aEventSource::Idle;
        self.poll = None;
    }

    /// Handles the result of a cancel.
    fn handle_cancel_result(&mut self, result: Result<A2aTask, A2aHttpError>) {
        const CANCEL_REFUSED: [i64; 3] = [
            error_code::TASK_NOT_CANCELABLE,
            error_code::UNSUPPORTED_OPERATION,
            error_code::METHOD_NOT_FOUND,
        ];
        if let Some(outcome) = self.outcome_after_cancel.take() {
            // The agent was asked, and no more can be done. If it could not be reached, dropping the task asks once
            // more.
            self.task.is_over = !matches!(&result, Err(error) if error.is_retryable());
            return self.end_turn(outcome);
        }
        match result {
            Ok(task) if task.status.state.is_over() => self.handle_task(task),
            // Its new output is not emitted from here, because the stream may still bring it.
            Ok(_) => self.request_cancel(CANCEL_INTERVAL, None),
            Err(error) if is_refused_with(&error, &[error_code::TASK_NOT_FOUND]) => {
                self.task.is_over = true;
                self.end_turn(TurnOutcome::cancelled());
            }
            Err(error) if is_refused_with(&error, &CANCEL_REFUSED) => {
                self.refuses_cancel = true;
                self.poll_after(Duration::ZERO);
            }
            Err(_) => self.request_cancel(CANCEL_INTERVAL, None),
        }
    }

    /// Ends the turn without its task, which cannot be stopped. The agent starts another task for the next prompt.
    fn abandon_task(&mut self) {
        let task = self.task.id.clone().unwrap_or_default();
        let text = format!("the remote agent will not stop its task {task}, which may still be running");
        self.queued_updates.push(TurnUpdate::notice(text));
        self.task.is_over = true;
        self.end_turn(TurnOutcome::cancelled());
    }

    /// Records the ids of the task and the conversation. A cancel may have waited for the task's id.
    fn record_task_ref(&mut self, task_ref: &A2aTaskRef) {
        if task_ref.context.is_some() {
            self.context.clone_from(&task_ref.context);
        }
        if task_ref.task.is_some() && task_ref.task != self.task.id {
            self.task.id.clone_from(&task_ref.task);
            self.task.is_over = false;
            if self.cancelled {
                self.request_cancel(Duration::ZERO, None);
            }
        }
    }

    /// Cancels the task after a pause, unless there is none or a cancel is already pending.
    fn request_cancel(&mut self, pause: Duration, reason: Option<String>) {
        let Some(task) = self.task.id.clone().filter(|_| self.outcome.is_none() && !self.refuses_cancel)
        else {
            return;
        };
        if self.cancel_request.is_some() || self.cancel_result.is_some() {
            return;
        }
        let client = Arc::clone(&self.client);
        self.cancel_request = Some(Box::pin(async move {
            tokio::time::sleep(pause).await;
            client.cancel(&task, reason.as_deref()).await
        }));
    }

    fn poll_after(&mut self, pause: Duration) {
        let Some(task) = self.task.id.clone().filter(|_| self.outcome.is_none()) else { return };
        let client = Arc::clone(&self.client);
        self.poll = Some(Box::pin(async move {
            tokio::time::sleep(pause).await;
            client.get_task(&task).await
        }));
    }

    /// Whether polling is the only source of news about the task.
    fn is_polling_only(&self) -> bool {
        let has_ask = self.open_ask.is_some() || self.queued_ask.is_some();
        matches!(self.source, A2aEventSource::Idle)
            && !has_ask
            && self.outcome.is_none()
            && self.outcome_after_cancel.is_none()
    }

    /// Handles the end of a stream.
    fn handle_stream_end(&mut self) {
        let streamed = matches!(self.source, A2aEventSource::Connected(A2aEventStream::Stream(_)));
        self.source = A2aEventSource::Idle;
        if self.task.id.is_none() {
            let message = "the agent closed its response without an answer".to_owned();
            self.fail_turn(&A2aHttpError::InvalidResponse(message));
        } else if streamed {
            self.reconnect(&A2aHttpError::InvalidResponse(
                "the agent ended its stream before its task was over".to_owned(),
            ));
        } else {
            self.poll_after(POLL_INTERVAL);
        }
    }

    /// Subscribes or polls again after a break, a limited number of times.
    fn reconnect(&mut self, error: &A2aHttpError) {
        self.failed_attempts += 1;
        if self.failed_attempts > RECONNECTS_MAX {
            return self.fail_turn(error);
        }
        let Some(task) = self.task.id.clone() else { return self.fail_turn(error) };
        let pause = (FIRST_RETRY_DELAY * 2u32.saturating_pow(self.failed_attempts - 1)).min(MAX_RETRY_DELAY);
        let was_polling = matches!(self.source, A2aEventSource::Idle) && !self.client.card.streams;
        self.poll = None;
        if was_polling {
            return self.poll_after(pause);
        }
        let client = Arc::clone(&self.client);
        let subscription = Box::pin(async move {
            tokio::time::sleep(pause).await;
            client.subscribe(&task).await
        });
        self.source = A2aEventSource::Opening(A2aSourcePurpose::Resubscribe, subscription);
    }

    /// Fails the turn and cancels the task, which may still be running.
    fn fail_turn(&mut self, error: &A2aHttpError) {
        if self.cancelled {
            if self.task.id.is_none() || self.task.is_over {
                return self.end_turn(TurnOutcome::cancelled());
            }
            // A cancel is pending, and its result ends the turn.
            self.source = A2aEventSource::Idle;
            self.poll = None;
            return self.request_cancel(Duration::ZERO, None);
        }
        let code = if error.is_retryable() { "agent_unreachable" } else { "agent_error" };
        let mut message = self.client.describe_error(error);
        if self.task.id.is_none() && matches!(error, A2aHttpError::Broken(..)) {
            message.push_str("; the agent may have taken the prompt, so it was not sent again");
        }
        self.cancel_and_end(TurnOutcome::failed(RunError::new(code, message)), None);
    }

    /// Cancels the task and then ends the turn with this outcome.
    fn cancel_and_end(&mut self, outcome: TurnOutcome, reason: Option<String>) {
        self.source = A2aEventSource::Idle;
        self.poll = None;
        self.open_ask = None;
        self.queued_ask = None;
        if self.task.id.is_none() || self.task.is_over {
            return self.end_turn(outcome);
        }
        self.outcome_after_cancel = Some(outcome);
        self.request_cancel(Duration::ZERO, reason);
    }

    /// Ends the turn with this outcome, unless it has ended already.
    fn end_turn(&mut self, outcome: TurnOutcome) {
        self.source = A2aEventSource::Idle;
        self.poll = None;
        self.cancel_request = None;
        self.cancel_result = None;
        self.open_ask = None;
        self.queued_ask = None;
        self.outcome.get_or_insert(outcome);
    }
}

fn is_refused_with(error: &A2aHttpError, codes: &[i64]) -> bool {
    matches!(error, A2aHttpError::Refused { code, .. } if codes.contains(code))
}

fn randomness_error(cause: getrandom::Error) -> RunError {
    RunError::new("agent_error", format!("cannot generate random bytes: {cause}"))
}
