//! What is open in one turn, and what becomes of its task. Everything here is decided at once; what takes time is put
//! into one of its places, and the loop in `talk` waits for all of them.
//!
//! A task is heard on a line: the answer to what it was told, or one that was opened again after a break. Where an agent
//! has no streams, or will not be listened to again, its task is looked at again and again. A line that was opened again
//! may have missed something, so until it has shown the whole task, its events only say that it is time to look.

use std::sync::Arc;
use std::time::Duration;

use qd_catalog::REMOTE_TOKEN;
use qd_link::LinkClosed;
use qd_protocol::event::{AskAnswer, AskKind, RunError};
use qd_protocol::link::{AskRequest, TurnOutcome, TurnStopReason, TurnUpdate};
use serde_json::Value;

use super::client::{A2aClient, A2aEventStream, error_code};
use super::emitted_output::{A2aEmittedOutput, TURN_TEXT_MAX};
use super::event_source::{A2aEventSource, A2aOpenTask, A2aPending, A2aSourceEvent, A2aSourcePurpose};
use super::http::A2aHttpError;
use super::messages::{self, A2aEvent, A2aTask, A2aTaskRef, A2aTaskState, A2aTaskStatus};
use crate::drivers::emit::{EmitFuture, emit_all};
use crate::turn::{DriverTurn, new_ask_id};

/// Between two looks at a task.
const POLL_INTERVAL: Duration = Duration::from_secs(1);
/// Before the first attempt to listen again after a break; doubled before each one after it.
const FIRST_RETRY_DELAY: Duration = Duration::from_millis(250);
/// Between two attempts at most.
const MAX_RETRY_DELAY: Duration = Duration::from_secs(10);
/// Attempts in a row that come to nothing before a turn is given up: about forty seconds, in which a network comes back
/// or a server is started again.
const RECONNECTS_MAX: u32 = 8;
/// Between two requests to stop: an agent may have missed one that came before it had begun.
const CANCEL_INTERVAL: Duration = Duration::from_millis(500);
/// How often an agent may show a question that has been answered. One that still does has not taken the answer in, and
/// the question is asked again.
const QUESTION_REPEATS_MAX: u32 = 3;
/// Random bytes in the id of a message.
const MESSAGE_ID_BYTES: usize = 16;

/// What is open in one turn.
pub(super) struct A2aTurn<'t> {
    pub(super) turn: &'t DriverTurn<'t>,
    client: Arc<A2aClient>,
    task: A2aOpenTask,
    context: Option<String>,
    emitted: A2aEmittedOutput,
    /// What is to be said next.
    queued_updates: Vec<TurnUpdate>,
    /// What is being said; the agent is not listened to meanwhile, which is how a slow journal slows it down.
    pub(super) emitting: Option<EmitFuture<'t>>,
    pub(super) source: A2aEventSource,
    /// Whether the source has missed nothing.
    source_is_complete: bool,
    /// A look at the task, perhaps a later one.
    pub(super) poll: A2aPending<'static, Result<A2aTask, A2aHttpError>>,
    /// The request that the agent stop, perhaps a later one.
    pub(super) cancel_request: A2aPending<'static, Result<A2aTask, A2aHttpError>>,
    /// What came of it.
    pub(super) cancel_result: Option<Result<A2aTask, A2aHttpError>>,
    /// A question that waits for its answer.
    pub(super) open_ask: A2aPending<'t, Result<Option<AskAnswer>, LinkClosed>>,
    /// A question that is asked when all before it has been said.
    queued_ask: Option<AskRequest>,
    /// The last question that was asked: the agent may show it until it has taken the answer in.
    last_question: Option<A2aQuestion>,
    /// How often it has done so.
    question_repeats: u32,
    /// Attempts in a row that came to nothing.
    failed_attempts: u32,
    pub(super) cancelled: bool,
    /// Whether the agent has said that it cannot stop.
    refuses_cancel: bool,
    /// How the turn ends when the agent has been asked to stop.
    outcome_after_cancel: Option<TurnOutcome>,
    /// How it has ended; nothing but what is to be said comes before that.
    outcome: Option<TurnOutcome>,
}

/// What tells one question of an agent from another.
#[derive(Debug, Clone, PartialEq, Eq)]
struct A2aQuestion {
    id: Option<String>,
    text: String,
    timestamp: String,
}

impl<'t> A2aTurn<'t> {
    /// Nothing is open yet.
    pub(super) fn new(turn: &'t DriverTurn<'t>, client: Arc<A2aClient>, context: Option<String>) -> Self {
        Self {
            turn,
            task: A2aOpenTask { client: Arc::clone(&client), id: None, over: false },
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

    /// The agent's name for the conversation.
    pub(super) fn context_id(&self) -> Option<String> {
        self.context.clone()
    }

    /// Does what is due, in order: says what is to be said, and then ends the turn, hears what came of a stop, or asks.
    /// Gives the outcome if that was it.
    pub(super) fn advance(&mut self) -> Option<TurnOutcome> {
        if self.emitted.exceeds_limit() && self.outcome.is_none() && self.outcome_after_cancel.is_none() {
            let message =
                format!("the agent said more than {TURN_TEXT_MAX} bytes in one turn and was stopped");
            self.cancel_and_end(TurnOutcome::failed(RunError::new("agent_error", message)), None);
        }
        if self.emitting.is_some() {
            return None;
        }
        if self.queued_updates.is_empty()
            && self.outcome.is_none()
            && let Some(stopped) = self.cancel_result.take()
        {
            self.handle_cancel_result(stopped);
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

    /// Tells the agent a prompt or an answer.
    pub(super) fn send_to_agent(&mut self, parts: Vec<Value>) {
        let mut random = [0; MESSAGE_ID_BYTES];
        if let Err(cause) = getrandom::fill(&mut random) {
            return self.cancel_and_end(TurnOutcome::failed(randomness_error(cause)), None);
        }
        let id: String = random.iter().map(|byte| format!("{byte:02x}")).collect();
        let of = A2aTaskRef { task: self.task.id.clone(), context: self.context.clone() };
        let message = messages::user_message(self.client.card.interface.version, &of, &id, parts);
        let remote = Arc::clone(&self.client);
        self.source = A2aEventSource::Opening(
            A2aSourcePurpose::SendMessage,
            Box::pin(async move { remote.send_message(message).await }),
        );
    }

    /// The turn is to stop. A task that has no name yet is stopped as soon as it has one.
    pub(super) fn cancel(&mut self) {
        self.cancelled = true;
        self.open_ask = None;
        self.queued_ask = None;
        self.request_cancel(Duration::ZERO, None);
    }

    /// What a question was answered with.
    pub(super) fn handle_answer(&mut self, answer: Option<AskAnswer>) {
        match answer {
            Some(AskAnswer { value: Some(value), .. }) => {
                let version = self.client.card.interface.version;
                self.send_to_agent(vec![messages::text_part(version, &value)]);
            }
            // There is no word for a refusal but that the task is not wanted any more.
            refused => {
                let reason = refused.and_then(|answer| answer.reason);
                let message = "the agent's question was not answered, so its task was cancelled";
                let error = RunError::new("question_refused", message);
                self.cancel_and_end(TurnOutcome::failed(error), reason);
            }
        }
    }

    /// What came of a look.
    pub(super) fn handle_poll(&mut self, looked: Result<A2aTask, A2aHttpError>) {
        match looked {
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
            Err(fault) if is_refused_with(&fault, &[error_code::TASK_NOT_FOUND]) => {
                self.task.over = true;
                self.fail_turn(&fault);
            }
            // The line will say what is wrong.
            Err(_) if !matches!(self.source, A2aEventSource::Idle) => self.poll_after(POLL_INTERVAL),
            Err(fault) if fault.is_retryable() || matches!(fault, A2aHttpError::Refused { .. }) => {
                self.reconnect(&fault)
            }
            Err(fault) => self.fail_turn(&fault),
        }
    }

    /// What came from where the task is heard.
    pub(super) fn handle_source_event(&mut self, came: A2aSourceEvent) {
        match came {
            A2aSourceEvent::Opened(wanted, Ok(line)) => {
                self.source_is_complete = wanted == A2aSourcePurpose::SendMessage;
                self.source = A2aEventSource::Connected(line);
                if !self.source_is_complete {
                    self.poll_after(POLL_INTERVAL);
                }
            }
            A2aSourceEvent::Opened(A2aSourcePurpose::SendMessage, Err(fault)) if self.task.id.is_some() => {
                // Nobody knows whether the answer was taken. If it was not, the question is asked again.
                self.last_question = None;
                self.source = A2aEventSource::Idle;
                if fault.is_retryable() { self.reconnect(&fault) } else { self.fail_turn(&fault) }
            }
            A2aSourceEvent::Opened(A2aSourcePurpose::SendMessage, Err(fault)) => self.fail_turn(&fault),
            A2aSourceEvent::Opened(A2aSourcePurpose::Resubscribe, Err(fault)) if fault.is_retryable() => {
                self.reconnect(&fault)
            }
            // It cannot be listened to; then it is looked at.
            A2aSourceEvent::Opened(A2aSourcePurpose::Resubscribe, Err(_)) => {
                self.source = A2aEventSource::Idle;
                self.poll_after(Duration::ZERO);
            }
            A2aSourceEvent::Received(Ok(Some(heard))) => {
                self.failed_attempts = 0;
                self.handle_event(heard);
            }
            A2aSourceEvent::Received(Ok(None)) => self.handle_stream_end(),
            // One event that cannot be read says nothing of the next.
            A2aSourceEvent::Received(Err(A2aHttpError::InvalidResponse(_))) => {}
            A2aSourceEvent::Received(Err(fault)) if self.task.id.is_none() => self.fail_turn(&fault),
            A2aSourceEvent::Received(Err(fault)) if fault.is_retryable() => self.reconnect(&fault),
            A2aSourceEvent::Received(Err(fault @ A2aHttpError::TooLong(_))) => self.fail_turn(&fault),
            A2aSourceEvent::Received(Err(_)) => {
                self.source = A2aEventSource::Idle;
                self.poll_after(Duration::ZERO);
            }
        }
    }

    fn handle_event(&mut self, heard: A2aEvent) {
        match heard {
            A2aEvent::Other => {}
            A2aEvent::Message(message) => {
                self.record_task_ref(&message.task_ref);
                self.queued_updates.extend(self.emitted.final_updates(Some(&message)));
                self.task.over = true;
                self.end_turn(TurnOutcome::of(TurnStopReason::EndTurn));
            }
            A2aEvent::Task(task) => {
                self.source_is_complete = true;
                self.poll = None;
                self.handle_task(task);
            }
            A2aEvent::Status { task_ref: of, status } => {
                self.record_task_ref(&of);
                if !self.source_is_complete && status.state != A2aTaskState::Working {
                    // How it stands is known, and what it made before is not.
                    self.source = A2aEventSource::Idle;
                    self.poll_after(Duration::ZERO);
                } else {
                    self.handle_status(&status);
                }
            }
            A2aEvent::Artifact { task_ref: of, artifact, append } => {
                self.record_task_ref(&of);
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

    /// What it means to the turn how its task stands.
    fn handle_status(&mut self, status: &A2aTaskStatus) {
        let A2aTaskStatus { state, message, timestamp } = status;
        let words = message.as_ref().map(|message| message.text.trim()).filter(|text| !text.is_empty());
        let failed = |what: &str| {
            let message = words.map_or_else(|| format!("{what} and did not say why"), str::to_owned);
            TurnOutcome::failed(RunError::new("agent_error", message))
        };
        self.task.over = state.is_over();
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
            A2aTaskState::Rejected => self.end_turn(failed("the agent would not do it")),
            A2aTaskState::Canceled if self.cancelled => self.end_turn(TurnOutcome::cancelled()),
            A2aTaskState::Canceled => {
                let why = words.map(|words| format!(": {words}")).unwrap_or_default();
                let message = format!("the task was cancelled at the remote agent, not from here{why}");
                self.end_turn(TurnOutcome::failed(RunError::new("agent_error", message)));
            }
            A2aTaskState::InputRequired => {
                let question = A2aQuestion {
                    id: message.as_ref().and_then(|message| message.id.clone()),
                    text: words.unwrap_or("The agent needs an answer, and does not say to what.").to_owned(),
                    timestamp: timestamp.clone(),
                };
                if let Some(message) = message {
                    self.emitted.mark_emitted(message);
                }
                self.queue_question(question);
            }
            A2aTaskState::AuthRequired => {
                let words = words.map(|words| format!(" ({words})")).unwrap_or_default();
                let message = format!(
                    "the agent needs to be authorised{words}: see to that with the agent, or give the session another \
                     {REMOTE_TOKEN}, and send the prompt again"
                );
                self.cancel_and_end(TurnOutcome::failed(RunError::new("auth_required", message)), None);
            }
        }
    }

    /// The agent asks. Nothing is to be heard of it until it has its answer.
    fn queue_question(&mut self, question: A2aQuestion) {
        if self.cancelled || self.outcome_after_cancel.is_some() {
            return;
        }
        if self.last_question.as_ref() == Some(&question) && self.question_repeats < QUESTION_REPEATS_MAX {
            self.question_repeats += 1;
            return;
        }
        self.question_repeats = 0;
        let id = match new_ask_id() {
            Ok(id) => id,
            Err(cause) => return self.cancel_and_end(TurnOutcome::failed(randomness_error(cause)), None),
        };
        self.queued_ask = Some(AskRequest {
            id,
            kind: AskKind::Question,
            tool: None,
            input: Value::Null,
            risk: None,
            prompt: question.text.clone(),
            options: Vec::new(),
            implicit: false,
        });
        self.last_question = Some(question);
        self.source = A2aEventSource::Idle;
        self.poll = None;
    }

    /// What came of the request that the agent stop.
    fn handle_cancel_result(&mut self, stopped: Result<A2aTask, A2aHttpError>) {
        const CANCEL_REFUSED: [i64; 3] = [
            error_code::TASK_NOT_CANCELABLE,
            error_code::UNSUPPORTED_OPERATION,
            error_code::METHOD_NOT_FOUND,
        ];
        if let Some(verdict) = self.outcome_after_cancel.take() {
            // It was asked, which is all that can be done; one that could not be reached is asked once more.
            self.task.over = !matches!(&stopped, Err(fault) if fault.is_retryable());
            return self.end_turn(verdict);
        }
        match stopped {
            Ok(task) if task.status.state.is_over() => self.handle_task(task),
            // What it has made meanwhile is not told from here: the line may still bring it.
            Ok(_) => self.request_cancel(CANCEL_INTERVAL, None),
            Err(fault) if is_refused_with(&fault, &[error_code::TASK_NOT_FOUND]) => {
                self.task.over = true;
                self.end_turn(TurnOutcome::cancelled());
            }
            Err(fault) if is_refused_with(&fault, &CANCEL_REFUSED) => {
                self.refuses_cancel = true;
                self.poll_after(Duration::ZERO);
            }
            Err(_) => self.request_cancel(CANCEL_INTERVAL, None),
        }
    }

    /// The turn ends without its task, which cannot be stopped: the agent has other tasks for what comes next.
    fn abandon_task(&mut self) {
        let task = self.task.id.clone().unwrap_or_default();
        let text = format!("the remote agent will not stop its task {task}, which may still be at work");
        self.queued_updates.push(TurnUpdate::Notice { text });
        self.task.over = true;
        self.end_turn(TurnOutcome::cancelled());
    }

    /// Takes in which task this is about. A cancel may have waited for its name.
    fn record_task_ref(&mut self, of: &A2aTaskRef) {
        if of.context.is_some() {
            self.context.clone_from(&of.context);
        }
        if of.task.is_some() && of.task != self.task.id {
            self.task.id.clone_from(&of.task);
            self.task.over = false;
            if self.cancelled {
                self.request_cancel(Duration::ZERO, None);
            }
        }
    }

    /// Asks the agent to stop, after a pause, if there is something to be stopped and it is not being asked.
    fn request_cancel(&mut self, pause: Duration, reason: Option<String>) {
        let Some(task) = self.task.id.clone().filter(|_| self.outcome.is_none() && !self.refuses_cancel)
        else {
            return;
        };
        if self.cancel_request.is_some() || self.cancel_result.is_some() {
            return;
        }
        let remote = Arc::clone(&self.client);
        self.cancel_request = Some(Box::pin(async move {
            tokio::time::sleep(pause).await;
            remote.cancel(&task, reason.as_deref()).await
        }));
    }

    fn poll_after(&mut self, pause: Duration) {
        let Some(task) = self.task.id.clone().filter(|_| self.outcome.is_none()) else { return };
        let remote = Arc::clone(&self.client);
        self.poll = Some(Box::pin(async move {
            tokio::time::sleep(pause).await;
            remote.get_task(&task).await
        }));
    }

    /// Whether there is nothing but looks to hear of the task by.
    fn is_polling_only(&self) -> bool {
        let asks = self.open_ask.is_some() || self.queued_ask.is_some();
        matches!(self.source, A2aEventSource::Idle)
            && !asks
            && self.outcome.is_none()
            && self.outcome_after_cancel.is_none()
    }

    /// The agent has no more to say on this line.
    fn handle_stream_end(&mut self) {
        let streamed = matches!(self.source, A2aEventSource::Connected(A2aEventStream::Stream(_)));
        self.source = A2aEventSource::Idle;
        if self.task.id.is_none() {
            let message = "the agent ended its answer without one".to_owned();
            self.fail_turn(&A2aHttpError::InvalidResponse(message));
        } else if streamed {
            self.reconnect(&A2aHttpError::InvalidResponse(
                "the agent ended its stream before its task was over".to_owned(),
            ));
        } else {
            self.poll_after(POLL_INTERVAL);
        }
    }

    /// Listens again after a break, or looks; not for ever.
    fn reconnect(&mut self, fault: &A2aHttpError) {
        self.failed_attempts += 1;
        if self.failed_attempts > RECONNECTS_MAX {
            return self.fail_turn(fault);
        }
        let Some(task) = self.task.id.clone() else { return self.fail_turn(fault) };
        let pause = (FIRST_RETRY_DELAY * 2u32.saturating_pow(self.failed_attempts - 1)).min(MAX_RETRY_DELAY);
        let was_looking = matches!(self.source, A2aEventSource::Idle) && !self.client.card.streams;
        self.poll = None;
        if was_looking {
            return self.poll_after(pause);
        }
        let remote = Arc::clone(&self.client);
        let hearing = Box::pin(async move {
            tokio::time::sleep(pause).await;
            remote.subscribe(&task).await
        });
        self.source = A2aEventSource::Opening(A2aSourcePurpose::Resubscribe, hearing);
    }

    /// The turn failed. The agent is asked to stop what it may be doing.
    fn fail_turn(&mut self, fault: &A2aHttpError) {
        if self.cancelled {
            if self.task.id.is_none() || self.task.over {
                return self.end_turn(TurnOutcome::cancelled());
            }
            // It is being asked to stop, and what comes of that ends the turn.
            self.source = A2aEventSource::Idle;
            self.poll = None;
            return self.request_cancel(Duration::ZERO, None);
        }
        let code = if fault.is_retryable() { "agent_unreachable" } else { "agent_error" };
        let mut message = self.client.describe_error(fault);
        if self.task.id.is_none() && matches!(fault, A2aHttpError::Broken(..)) {
            message.push_str("; the agent may have taken the prompt, so it was not sent again");
        }
        self.cancel_and_end(TurnOutcome::failed(RunError::new(code, message)), None);
    }

    /// The turn ends so, when the agent has been asked to stop.
    fn cancel_and_end(&mut self, outcome: TurnOutcome, reason: Option<String>) {
        self.source = A2aEventSource::Idle;
        self.poll = None;
        self.open_ask = None;
        self.queued_ask = None;
        if self.task.id.is_none() || self.task.over {
            return self.end_turn(outcome);
        }
        self.outcome_after_cancel = Some(outcome);
        self.request_cancel(Duration::ZERO, reason);
    }

    /// The turn has ended so.
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

fn is_refused_with(fault: &A2aHttpError, codes: &[i64]) -> bool {
    matches!(fault, A2aHttpError::Refused { code, .. } if codes.contains(code))
}

fn randomness_error(cause: getrandom::Error) -> RunError {
    RunError::new("agent_error", format!("the kernel gives no randomness: {cause}"))
}
