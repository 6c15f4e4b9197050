//! What is open in one turn, and what becomes of its task. Everything here is decided at once; what takes time is put
//! into one of its places, and the loop in `talk` waits for all of them.
//!
//! A task is heard on a line: the answer to what it was told, or one that was opened again after a break. Where an agent
//! has no streams, or will not be listened to again, its task is looked at again and again. A line that was opened again
//! may have missed something, so until it has shown the whole task, its events only say that it is time to look.

use std::sync::Arc;
use std::time::Duration;

use qd_catalog::REMOTE_TOKEN;
use qd_link::Closed;
use qd_protocol::event::{Answer, AskKind, RunError};
use qd_protocol::link::{AskRequest, Outcome, Said, Stop};
use serde_json::Value;

use super::http::Fault;
use super::open::{Came, Doing, OpenTask, Source, Wanted};
use super::remote::{Line, Remote, code};
use super::told::{ANSWER_MAX, Told};
use super::words::{self, Heard, Of, State, Status, Task};
use crate::drivers::telling::{Telling, tell};
use crate::turn::{Turn, ask_id};

/// Between two looks at a task.
const POLL: Duration = Duration::from_secs(1);
/// Before the first attempt to listen again after a break; doubled before each one after it.
const FIRST_PAUSE: Duration = Duration::from_millis(250);
/// Between two attempts at most.
const LONGEST_PAUSE: Duration = Duration::from_secs(10);
/// Attempts in a row that come to nothing before a turn is given up: about forty seconds, in which a network comes back
/// or a server is started again.
const RECONNECTS_MAX: u32 = 8;
/// Between two requests to stop: an agent may have missed one that came before it had begun.
const CANCEL_AGAIN: Duration = Duration::from_millis(500);
/// How often an agent may show a question that has been answered. One that still does has not taken the answer in, and
/// the question is asked again.
const SHOWN_AGAIN_MAX: u32 = 3;
/// Random bytes in the id of a message.
const MESSAGE_RANDOM: usize = 16;

/// What is open in one turn.
pub(super) struct Round<'t> {
    pub(super) turn: &'t Turn<'t>,
    remote: Arc<Remote>,
    task: OpenTask,
    context: Option<String>,
    told: Told,
    /// What is to be said next.
    said: Vec<Said>,
    /// What is being said; the agent is not listened to meanwhile, which is how a slow journal slows it down.
    pub(super) telling: Option<Telling<'t>>,
    pub(super) source: Source,
    /// Whether the source has missed nothing.
    exact: bool,
    /// A look at the task, perhaps a later one.
    pub(super) look: Doing<'static, Result<Task, Fault>>,
    /// The request that the agent stop, perhaps a later one.
    pub(super) stopping: Doing<'static, Result<Task, Fault>>,
    /// What came of it.
    pub(super) stopped: Option<Result<Task, Fault>>,
    /// A question that waits for its answer.
    pub(super) ask: Doing<'t, Result<Option<Answer>, Closed>>,
    /// A question that is asked when all before it has been said.
    next_ask: Option<AskRequest>,
    /// The last question that was asked: the agent may show it until it has taken the answer in.
    question: Option<Question>,
    /// How often it has done so.
    shown_again: u32,
    /// Attempts in a row that came to nothing.
    breaks: u32,
    pub(super) cancelled: bool,
    /// Whether the agent has said that it cannot stop.
    unstoppable: bool,
    /// How the turn ends when the agent has been asked to stop.
    verdict: Option<Outcome>,
    /// How it has ended; nothing but what is to be said comes before that.
    end: Option<Outcome>,
}

/// What tells one question of an agent from another.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Question {
    id: Option<String>,
    text: String,
    timestamp: String,
}

impl<'t> Round<'t> {
    /// Nothing is open yet.
    pub(super) fn new(turn: &'t Turn<'t>, remote: Arc<Remote>, context: Option<String>) -> Self {
        Self {
            turn,
            task: OpenTask { remote: Arc::clone(&remote), id: None, over: false },
            remote,
            context,
            told: Told::default(),
            said: Vec::new(),
            telling: None,
            source: Source::Silent,
            exact: true,
            look: None,
            stopping: None,
            stopped: None,
            ask: None,
            next_ask: None,
            question: None,
            shown_again: 0,
            breaks: 0,
            cancelled: false,
            unstoppable: false,
            verdict: None,
            end: None,
        }
    }

    /// The agent's name for the conversation.
    pub(super) fn context(&self) -> Option<String> {
        self.context.clone()
    }

    /// Does what is due, in order: says what is to be said, and then ends the turn, hears what came of a stop, or asks.
    /// Gives the outcome if that was it.
    pub(super) fn settle(&mut self) -> Option<Outcome> {
        if self.told.is_too_much() && self.end.is_none() && self.verdict.is_none() {
            let message = format!("the agent said more than {ANSWER_MAX} bytes in one turn and was stopped");
            self.give_up(Outcome::failed(RunError::new("agent_error", message)), None);
        }
        if self.telling.is_some() {
            return None;
        }
        if self.said.is_empty()
            && self.end.is_none()
            && let Some(stopped) = self.stopped.take()
        {
            self.has_stopped(stopped);
        }
        if !self.said.is_empty() {
            self.telling = Some(Box::pin(tell(self.turn, std::mem::take(&mut self.said))));
            return None;
        }
        if self.end.is_none()
            && let Some(ask) = self.next_ask.take()
        {
            self.ask = Some(Box::pin(self.turn.ask(ask)));
        }
        self.end.take()
    }

    /// Tells the agent a prompt or an answer.
    pub(super) fn tell_agent(&mut self, parts: Vec<Value>) {
        let mut random = [0; MESSAGE_RANDOM];
        if let Err(cause) = getrandom::fill(&mut random) {
            return self.give_up(Outcome::failed(no_randomness(cause)), None);
        }
        let id: String = random.iter().map(|byte| format!("{byte:02x}")).collect();
        let of = Of { task: self.task.id.clone(), context: self.context.clone() };
        let message = words::tell(self.remote.card.interface.version, &of, &id, parts);
        let remote = Arc::clone(&self.remote);
        self.source = Source::Opening(Wanted::Telling, Box::pin(async move { remote.tell(message).await }));
    }

    /// The turn is to stop. A task that has no name yet is stopped as soon as it has one.
    pub(super) fn cancel(&mut self) {
        self.cancelled = true;
        self.ask = None;
        self.next_ask = None;
        self.stop(Duration::ZERO, None);
    }

    /// What a question was answered with.
    pub(super) fn answered(&mut self, answer: Option<Answer>) {
        match answer {
            Some(Answer { value: Some(value), .. }) => {
                let version = self.remote.card.interface.version;
                self.tell_agent(vec![words::text(version, &value)]);
            }
            // There is no word for a refusal but that the task is not wanted any more.
            refused => {
                let reason = refused.and_then(|answer| answer.reason);
                let message = "the agent's question was not answered, so its task was cancelled";
                let error = RunError::new("question_refused", message);
                self.give_up(Outcome::failed(error), reason);
            }
        }
    }

    /// What came of a look.
    pub(super) fn looked(&mut self, looked: Result<Task, Fault>) {
        match looked {
            Ok(task) => {
                self.breaks = 0;
                self.hear_task(task);
                if self.unstoppable && self.end.is_none() {
                    self.leave_alone();
                } else if self.is_waiting() {
                    self.look_in(POLL);
                }
            }
            Err(_) if self.unstoppable => self.leave_alone(),
            Err(fault) if is_refused(&fault, &[code::TASK_NOT_FOUND]) => {
                self.task.over = true;
                self.fail(&fault);
            }
            // The line will say what is wrong.
            Err(_) if !matches!(self.source, Source::Silent) => self.look_in(POLL),
            Err(fault) if fault.may_pass() || matches!(fault, Fault::Refused { .. }) => self.again(&fault),
            Err(fault) => self.fail(&fault),
        }
    }

    /// What came from where the task is heard.
    pub(super) fn came(&mut self, came: Came) {
        match came {
            Came::Opened(wanted, Ok(line)) => {
                self.exact = wanted == Wanted::Telling;
                self.source = Source::Line(line);
                if !self.exact {
                    self.look_in(POLL);
                }
            }
            Came::Opened(Wanted::Telling, Err(fault)) if self.task.id.is_some() => {
                // Nobody knows whether the answer was taken. If it was not, the question is asked again.
                self.question = None;
                self.source = Source::Silent;
                if fault.may_pass() { self.again(&fault) } else { self.fail(&fault) }
            }
            Came::Opened(Wanted::Telling, Err(fault)) => self.fail(&fault),
            Came::Opened(Wanted::Hearing, Err(fault)) if fault.may_pass() => self.again(&fault),
            // It cannot be listened to; then it is looked at.
            Came::Opened(Wanted::Hearing, Err(_)) => {
                self.source = Source::Silent;
                self.look_in(Duration::ZERO);
            }
            Came::Heard(Ok(Some(heard))) => {
                self.breaks = 0;
                self.hear(heard);
            }
            Came::Heard(Ok(None)) => self.line_ended(),
            // One event that cannot be read says nothing of the next.
            Came::Heard(Err(Fault::Nonsense(_))) => {}
            Came::Heard(Err(fault)) if self.task.id.is_none() => self.fail(&fault),
            Came::Heard(Err(fault)) if fault.may_pass() => self.again(&fault),
            Came::Heard(Err(fault @ Fault::TooLong(_))) => self.fail(&fault),
            Came::Heard(Err(_)) => {
                self.source = Source::Silent;
                self.look_in(Duration::ZERO);
            }
        }
    }

    fn hear(&mut self, heard: Heard) {
        match heard {
            Heard::Other => {}
            Heard::Message(message) => {
                self.note(&message.of);
                self.said.extend(self.told.done(Some(&message)));
                self.task.over = true;
                self.close(Outcome::of(Stop::EndTurn));
            }
            Heard::Task(task) => {
                self.exact = true;
                self.look = None;
                self.hear_task(task);
            }
            Heard::Status { of, status } => {
                self.note(&of);
                if !self.exact && status.state != State::Working {
                    // How it stands is known, and what it made before is not.
                    self.source = Source::Silent;
                    self.look_in(Duration::ZERO);
                } else {
                    self.stand(&status);
                }
            }
            Heard::Artifact { of, artifact, append } => {
                self.note(&of);
                if self.exact {
                    self.said.extend(self.told.artifact(&artifact, append));
                } else if self.look.is_none() {
                    self.look_in(POLL);
                }
            }
        }
    }

    fn hear_task(&mut self, task: Task) {
        self.note(&task.of);
        self.said.extend(self.told.task(&task));
        self.stand(&task.status);
    }

    /// What it means to the turn how its task stands.
    fn stand(&mut self, status: &Status) {
        let Status { state, message, timestamp } = status;
        let words = message.as_ref().map(|message| message.text.trim()).filter(|text| !text.is_empty());
        let failed = |what: &str| {
            let message = words.map_or_else(|| format!("{what} and did not say why"), str::to_owned);
            Outcome::failed(RunError::new("agent_error", message))
        };
        self.task.over = state.is_over();
        match state {
            State::Working => {
                self.question = None;
                if let Some(message) = message {
                    self.said.extend(self.told.progress(message));
                }
            }
            State::Completed => {
                self.said.extend(self.told.done(message.as_ref()));
                self.close(Outcome::of(Stop::EndTurn));
            }
            State::Failed => self.close(failed("the agent failed")),
            State::Rejected => self.close(failed("the agent would not do it")),
            State::Canceled if self.cancelled => self.close(Outcome::cancelled()),
            State::Canceled => {
                let why = words.map(|words| format!(": {words}")).unwrap_or_default();
                let message = format!("the task was cancelled at the remote agent, not from here{why}");
                self.close(Outcome::failed(RunError::new("agent_error", message)));
            }
            State::InputRequired => {
                let question = Question {
                    id: message.as_ref().and_then(|message| message.id.clone()),
                    text: words.unwrap_or("The agent needs an answer, and does not say to what.").to_owned(),
                    timestamp: timestamp.clone(),
                };
                if let Some(message) = message {
                    self.told.pass_over(message);
                }
                self.inquire(question);
            }
            State::AuthRequired => {
                let words = words.map(|words| format!(" ({words})")).unwrap_or_default();
                let message = format!(
                    "the agent needs to be authorised{words}: see to that with the agent, or give the session another \
                     {REMOTE_TOKEN}, and send the prompt again"
                );
                self.give_up(Outcome::failed(RunError::new("auth_required", message)), None);
            }
        }
    }

    /// The agent asks. Nothing is to be heard of it until it has its answer.
    fn inquire(&mut self, question: Question) {
        if self.cancelled || self.verdict.is_some() {
            return;
        }
        if self.question.as_ref() == Some(&question) && self.shown_again < SHOWN_AGAIN_MAX {
            self.shown_again += 1;
            return;
        }
        self.shown_again = 0;
        let id = match ask_id() {
            Ok(id) => id,
            Err(cause) => return self.give_up(Outcome::failed(no_randomness(cause)), None),
        };
        self.next_ask = Some(AskRequest {
            id,
            kind: AskKind::Question,
            tool: None,
            input: Value::Null,
            risk: None,
            prompt: question.text.clone(),
            options: Vec::new(),
            unasked: false,
        });
        self.question = Some(question);
        self.source = Source::Silent;
        self.look = None;
    }

    /// What came of the request that the agent stop.
    fn has_stopped(&mut self, stopped: Result<Task, Fault>) {
        const WILL_NOT: [i64; 3] =
            [code::TASK_NOT_CANCELABLE, code::UNSUPPORTED_OPERATION, code::METHOD_NOT_FOUND];
        if let Some(verdict) = self.verdict.take() {
            // It was asked, which is all that can be done; one that could not be reached is asked once more.
            self.task.over = !matches!(&stopped, Err(fault) if fault.may_pass());
            return self.close(verdict);
        }
        match stopped {
            Ok(task) if task.status.state.is_over() => self.hear_task(task),
            // What it has made meanwhile is not told from here: the line may still bring it.
            Ok(_) => self.stop(CANCEL_AGAIN, None),
            Err(fault) if is_refused(&fault, &[code::TASK_NOT_FOUND]) => {
                self.task.over = true;
                self.close(Outcome::cancelled());
            }
            Err(fault) if is_refused(&fault, &WILL_NOT) => {
                self.unstoppable = true;
                self.look_in(Duration::ZERO);
            }
            Err(_) => self.stop(CANCEL_AGAIN, None),
        }
    }

    /// The turn ends without its task, which cannot be stopped: the agent has other tasks for what comes next.
    fn leave_alone(&mut self) {
        let task = self.task.id.clone().unwrap_or_default();
        let text = format!("the remote agent will not stop its task {task}, which may still be at work");
        self.said.push(Said::Notice { text });
        self.task.over = true;
        self.close(Outcome::cancelled());
    }

    /// Takes in which task this is about. A cancel may have waited for its name.
    fn note(&mut self, of: &Of) {
        if of.context.is_some() {
            self.context.clone_from(&of.context);
        }
        if of.task.is_some() && of.task != self.task.id {
            self.task.id.clone_from(&of.task);
            self.task.over = false;
            if self.cancelled {
                self.stop(Duration::ZERO, None);
            }
        }
    }

    /// Asks the agent to stop, after a pause, if there is something to be stopped and it is not being asked.
    fn stop(&mut self, pause: Duration, reason: Option<String>) {
        let Some(task) = self.task.id.clone().filter(|_| self.end.is_none() && !self.unstoppable) else {
            return;
        };
        if self.stopping.is_some() || self.stopped.is_some() {
            return;
        }
        let remote = Arc::clone(&self.remote);
        self.stopping = Some(Box::pin(async move {
            tokio::time::sleep(pause).await;
            remote.cancel(&task, reason.as_deref()).await
        }));
    }

    fn look_in(&mut self, pause: Duration) {
        let Some(task) = self.task.id.clone().filter(|_| self.end.is_none()) else { return };
        let remote = Arc::clone(&self.remote);
        self.look = Some(Box::pin(async move {
            tokio::time::sleep(pause).await;
            remote.look(&task).await
        }));
    }

    /// Whether there is nothing but looks to hear of the task by.
    fn is_waiting(&self) -> bool {
        let asks = self.ask.is_some() || self.next_ask.is_some();
        matches!(self.source, Source::Silent) && !asks && self.end.is_none() && self.verdict.is_none()
    }

    /// The agent has no more to say on this line.
    fn line_ended(&mut self) {
        let streamed = matches!(self.source, Source::Line(Line::Stream(_)));
        self.source = Source::Silent;
        if self.task.id.is_none() {
            let message = "the agent ended its answer without one".to_owned();
            self.fail(&Fault::Nonsense(message));
        } else if streamed {
            self.again(&Fault::Nonsense("the agent ended its stream before its task was over".to_owned()));
        } else {
            self.look_in(POLL);
        }
    }

    /// Listens again after a break, or looks; not for ever.
    fn again(&mut self, fault: &Fault) {
        self.breaks += 1;
        if self.breaks > RECONNECTS_MAX {
            return self.fail(fault);
        }
        let Some(task) = self.task.id.clone() else { return self.fail(fault) };
        let pause = (FIRST_PAUSE * 2u32.saturating_pow(self.breaks - 1)).min(LONGEST_PAUSE);
        let was_looking = matches!(self.source, Source::Silent) && !self.remote.card.streams;
        self.look = None;
        if was_looking {
            return self.look_in(pause);
        }
        let remote = Arc::clone(&self.remote);
        let hearing = Box::pin(async move {
            tokio::time::sleep(pause).await;
            remote.subscribe(&task).await
        });
        self.source = Source::Opening(Wanted::Hearing, hearing);
    }

    /// The turn failed. The agent is asked to stop what it may be doing.
    fn fail(&mut self, fault: &Fault) {
        if self.cancelled {
            if self.task.id.is_none() || self.task.over {
                return self.close(Outcome::cancelled());
            }
            // It is being asked to stop, and what comes of that ends the turn.
            self.source = Source::Silent;
            self.look = None;
            return self.stop(Duration::ZERO, None);
        }
        let code = if fault.may_pass() { "agent_unreachable" } else { "agent_error" };
        let mut message = self.remote.words(fault);
        if self.task.id.is_none() && matches!(fault, Fault::Broken(..)) {
            message.push_str("; the agent may have taken the prompt, so it was not sent again");
        }
        self.give_up(Outcome::failed(RunError::new(code, message)), None);
    }

    /// The turn ends so, when the agent has been asked to stop.
    fn give_up(&mut self, outcome: Outcome, reason: Option<String>) {
        self.source = Source::Silent;
        self.look = None;
        self.ask = None;
        self.next_ask = None;
        if self.task.id.is_none() || self.task.over {
            return self.close(outcome);
        }
        self.verdict = Some(outcome);
        self.stop(Duration::ZERO, reason);
    }

    /// The turn has ended so.
    fn close(&mut self, outcome: Outcome) {
        self.source = Source::Silent;
        self.look = None;
        self.stopping = None;
        self.stopped = None;
        self.ask = None;
        self.next_ask = None;
        self.end.get_or_insert(outcome);
    }
}

fn is_refused(fault: &Fault, codes: &[i64]) -> bool {
    matches!(fault, Fault::Refused { code, .. } if codes.contains(code))
}

fn no_randomness(cause: getrandom::Error) -> RunError {
    RunError::new("agent_error", format!("the kernel gives no randomness: {cause}"))
}
