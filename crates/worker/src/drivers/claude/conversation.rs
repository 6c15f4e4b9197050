//! A conversation with an agent that is ready: turns, and the time between them. One loop puts all that can happen
//! into one order; it writes while it reads, and stops reading while its session takes nothing more.
//!
//! Every message of ours has a name, and the agent tells what becomes of it. A turn is over when all that was sent for
//! it is settled, so that no result can be mistaken for another's, also if the agent has begun a turn by itself.

use futures_util::StreamExt;
use qd_link::{AgentOutput, LinkClosed};
use qd_protocol::RunId;
use qd_protocol::event::RunError;
use qd_protocol::link::{TurnOutcome, TurnUpdate};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::io::{AsyncRead, AsyncWrite};

use super::asks::{ClaudeApprovalRequest, ClaudeAsk, unattended_answer};
use super::event_decoder::ClaudeEventDecoder;
use super::messages::{self, ClaudeCommandState, ClaudeMessage, ClaudeTurnResult};
use super::prompt_content;
use super::turn::{ClaudeSteerOutcome, ClaudeTurn};
use crate::drivers::emit::{EmitFuture, emit_late, emit_late_and_notices, wait_for_emit};
use crate::drivers::line_transport::{LineTransport, log_ignored_line};
use crate::drivers::turn_state::OpenAsk;
use crate::turn::{DriverPrompt, DriverSteer, DriverTurn};

/// A conversation.
pub(super) struct ClaudeConversation<R, W> {
    lines: LineTransport<R, W>,
    session: String,
    decoder: ClaudeEventDecoder,
    /// Whether a turn can be steered.
    steers: bool,
    /// Whether the agent tells what becomes of messages. Those that do tell it before anything else of a turn.
    reports_lifecycle: bool,
    /// Requests of ours so far.
    last_request: u64,
    /// The turn that words between turns belong to, and how they are said.
    last_run: Option<RunId>,
    output: Option<AgentOutput>,
    /// Words between turns that are being said; they are not lost when a turn begins.
    late_output: Option<EmitFuture<'static>>,
    /// What the next turn is to tell first.
    first_notice: Option<String>,
}

impl<R: AsyncRead + Unpin, W: AsyncWrite + Unpin> ClaudeConversation<R, W> {
    /// Goes on after the opening, which may have found that the agent has forgotten what it was to remember.
    pub(super) fn new(
        lines: LineTransport<R, W>,
        session: String,
        decoder: ClaudeEventDecoder,
        steers: bool,
        forgot: Option<String>,
    ) -> Self {
        let told =
            |why| format!("the agent could not go on with its old conversation and began a new one: {why}");
        Self {
            lines,
            session,
            decoder,
            steers,
            reports_lifecycle: false,
            last_request: 0,
            last_run: None,
            output: None,
            late_output: None,
            first_notice: forgot.map(told),
        }
    }

    /// The agent's name for it.
    pub(super) fn session_id(&self) -> &str {
        &self.session
    }

    /// Closes the stream to the agent and gives the other one up.
    pub(super) fn hang_up(self) -> R {
        self.lines.hang_up()
    }

    /// One turn, from its prompt to the agent's last result; `None` if the agent is no more.
    pub(super) async fn turn(
        &mut self,
        turn: &DriverTurn<'_>,
        prompt: &DriverPrompt,
    ) -> Result<Option<TurnOutcome>, LinkClosed> {
        if turn.is_cancelled() {
            return Ok(Some(TurnOutcome::cancelled()));
        }
        let name = match messages::random_uuid() {
            Ok(name) => name,
            Err(cause) => return Ok(Some(TurnOutcome::failed(randomness_error(cause)))),
        };
        let before = self.last_run.replace(turn.run.clone());
        let (content, left_out) = prompt_content::content_blocks(prompt);
        self.lines.queue_message(&messages::user_message(&name, content));
        let mut round = ClaudeTurn::new(turn, name);
        let cannot = |name| format!("the agent cannot take the file {name}, which was left out");
        let notices = self.first_notice.take().into_iter().chain(left_out.into_iter().map(cannot)).collect();
        round.state.emitting = Some(Box::pin(emit_late_and_notices(turn, self.late_output.take(), notices)));
        loop {
            let listening = round.state.emitting.is_none();
            tokio::select! {
                // A cancel first; what was heard before what comes next.
                biased;
                () = turn.cancelled(), if !round.cancelled => self.cancel(&mut round),
                told = wait_for_emit(&mut round.state.emitting) => {
                    told?;
                    round.state.finish_emitting();
                }
                Some(answered) = round.state.pending_answers.next() => {
                    let (id, answer) = answered?;
                    if round.state.close_ask(&id).is_some() {
                        self.lines.queue_message(&messages::control_response(&id, answer));
                    }
                }
                steer = turn.next_steer(), if self.steers && round.takes_steers() => {
                    self.send_steer(&mut round, steer);
                }
                word = next_message(&mut self.lines, listening) => {
                    let Some(word) = word else { return Ok(None) };
                    self.handle_message(&mut round, before.as_ref(), word).await?;
                    if let Some(outcome) = round.take_outcome() {
                        self.deny_open_asks(&mut round);
                        return Ok(Some(outcome));
                    }
                }
            }
        }
    }

    /// The time between turns. What is said belongs to the turn before, and nobody is asked anything. Comes back when the
    /// agent is no more; nothing is lost if the wait is given up.
    pub(super) async fn idle(&mut self, voice: &AgentOutput) {
        self.output = Some(voice.clone());
        loop {
            let listening = self.late_output.is_none();
            tokio::select! {
                biased;
                // A session that has let go of its agent hears no late words either.
                _told = wait_for_emit(&mut self.late_output) => self.late_output = None,
                word = next_message(&mut self.lines, listening) => match word {
                    Some(word) => self.handle_idle_message(word),
                    None => return,
                },
            }
        }
    }

    /// Asks the agent to stop, and answers all that it waits for.
    fn cancel(&mut self, round: &mut ClaudeTurn<'_>) {
        round.cancelled = true;
        self.interrupt();
        // After that, so that it does not go on with a refusal.
        self.deny_open_asks(round);
    }

    /// Nobody answers any more: what works on in the background would wait for ever.
    fn deny_open_asks(&mut self, round: &mut ClaudeTurn<'_>) {
        for open in round.state.close_all_asks() {
            self.lines.queue_message(&messages::control_response(&open.id, unattended_answer()));
        }
    }

    /// What waits is dropped as well: it would begin as soon as the agent has stopped.
    fn interrupt(&mut self) {
        self.send_control_request(json!({"subtype": "interrupt", "cancel_queued": true}));
    }

    /// Wants something of the agent. Nothing depends on its answer: the fates of messages and the results tell more.
    fn send_control_request(&mut self, what: Value) {
        self.last_request += 1;
        self.lines.queue_message(&messages::control_request(&format!("qd-{}", self.last_request), what));
    }

    /// As another message, without any priority: while a tool runs or waits for a permission, it is taken into the turn
    /// with the tool's result; while the model speaks, it follows as soon as that is over, and nothing is cut off.
    fn send_steer(&mut self, round: &mut ClaudeTurn<'_>, steer: DriverSteer) {
        // Without a name it could not be told what becomes of it. It is missed then, and runs later.
        let Ok(name) = messages::random_uuid() else { return };
        self.lines.queue_message(&messages::user_message(&name, vec![messages::text_block(&steer.text)]));
        round.add_steer(name, steer.number);
    }

    /// What a word means to the turn. What is said before the turn has begun belongs to the turn before.
    async fn handle_message(
        &mut self,
        round: &mut ClaudeTurn<'_>,
        before: Option<&RunId>,
        word: ClaudeMessage,
    ) -> Result<(), LinkClosed> {
        match word {
            ClaudeMessage::Lifecycle { uuid, state: fate } => {
                self.reports_lifecycle = true;
                let settled = round.update_message(&uuid, fate);
                report_steers(round.state.turn, settled).await?;
                // The agent may have missed a cancel that reached it before it began with this.
                if fate == ClaudeCommandState::Started && round.cancelled && round.is_own_message(&uuid) {
                    self.interrupt();
                }
            }
            ClaudeMessage::Result(result) => {
                let said = self.decoder.count_result(&result);
                if !round.is_ended_by(&result, self.reports_lifecycle) {
                    self.emit(round, before, said.into_iter().collect());
                    return Ok(());
                }
                if let Some(said) = said {
                    round.state.turn.emit(said).await?;
                }
                let settled = round.apply_result(&result, self.reports_lifecycle);
                report_steers(round.state.turn, settled).await?;
                if round.has_failed() {
                    // What was to be told to a turn that has failed is better asked anew.
                    for uuid in round.waiting_steers() {
                        self.send_control_request(
                            json!({"subtype": "cancel_async_message", "message_uuid": uuid}),
                        );
                    }
                }
            }
            ClaudeMessage::ControlRequest { id, request } => self.open_ask(round, id, &request),
            ClaudeMessage::ControlCancelled { id } => {
                for ask in round.state.close_ask(&id).into_iter().flat_map(|open| open.ask_ids) {
                    round.state.turn.withdraw_ask(&ask).await;
                }
            }
            // The receipt of a cancel; what it names is dropped.
            ClaudeMessage::ControlResponse { answer: Ok(answer), .. } => {
                for uuid in answer["cancelled"].as_array().into_iter().flatten().filter_map(Value::as_str) {
                    let settled = round.update_message(uuid, ClaudeCommandState::Cancelled);
                    report_steers(round.state.turn, settled).await?;
                }
            }
            word => {
                self.update_session_id(&word);
                let said = match self.previous_run_target(round, before) {
                    Some(_) => self.decoder.decode_between_turns(word),
                    None => self.decoder.decode(word),
                };
                self.emit(round, before, said);
            }
        }
        Ok(())
    }

    fn emit(&self, round: &mut ClaudeTurn<'_>, before: Option<&RunId>, said: Vec<TurnUpdate>) {
        match self.previous_run_target(round, before) {
            Some((voice, run)) if !said.is_empty() => {
                round.state.emitting = Some(Box::pin(emit_late(voice.clone(), run.clone(), said)));
            }
            _ => round.state.emit(said),
        }
    }

    /// How and for which turn things are said that come before this one has begun.
    fn previous_run_target<'a>(
        &'a self,
        round: &ClaudeTurn<'_>,
        before: Option<&'a RunId>,
    ) -> Option<(&'a AgentOutput, &'a RunId)> {
        self.output.as_ref().zip(before).filter(|_| self.reports_lifecycle && !round.prompt_started)
    }

    fn open_ask(&mut self, round: &mut ClaudeTurn<'_>, id: String, request: &Value) {
        let Some(wanted) = self.parse_approval_request(&id, request) else { return };
        if round.cancelled {
            self.lines.queue_message(&messages::control_response(&id, unattended_answer()));
            return;
        }
        let plan = self.decoder.plan_for(&wanted.tool_name);
        match ClaudeAsk::from_request(wanted, plan) {
            Ok(asked) => {
                let open = OpenAsk { id, ask_ids: asked.ask_ids(), cancel_answer: () };
                round.state.ask(open, Box::pin(asked.ask_and_wait(round.state.turn)));
            }
            Err(cause) => {
                self.lines.queue_message(&messages::control_error(&id, &randomness_error(cause).message))
            }
        }
    }

    /// A tool that the agent wants to use; what else it may want is refused.
    fn parse_approval_request(&mut self, id: &str, request: &Value) -> Option<ClaudeApprovalRequest> {
        let why = match request["subtype"].as_str() {
            Some("can_use_tool") => match ClaudeApprovalRequest::deserialize(request) {
                Ok(wanted) => return Some(wanted),
                Err(cause) => format!("the request cannot be read: {cause}"),
            },
            Some(subtype) => format!("{subtype} is not supported"),
            None => "a request without a subtype is not supported".to_owned(),
        };
        self.lines.queue_message(&messages::control_error(id, &why));
        None
    }

    /// What a word means while no turn runs.
    fn handle_idle_message(&mut self, word: ClaudeMessage) {
        let said = match word {
            ClaudeMessage::Lifecycle { .. } => {
                self.reports_lifecycle = true;
                return;
            }
            ClaudeMessage::ControlRequest { id, request } => {
                if self.parse_approval_request(&id, &request).is_some() {
                    self.lines.queue_message(&messages::control_response(&id, unattended_answer()));
                }
                return;
            }
            ClaudeMessage::Result(result) => {
                let said = self.decoder.count_result(&result);
                said.into_iter().chain(failure_notice(&result)).collect()
            }
            word => {
                self.update_session_id(&word);
                self.decoder.decode_between_turns(word)
            }
        };
        // Before the first turn, it belongs to nobody.
        if let Some((voice, run)) =
            self.output.clone().zip(self.last_run.clone()).filter(|_| !said.is_empty())
        {
            self.late_output = Some(Box::pin(emit_late(voice, run, said)));
        }
    }

    /// The agent may go on under another name: some of its own commands begin a new conversation.
    fn update_session_id(&mut self, word: &ClaudeMessage) {
        if let ClaudeMessage::System { subtype, line } = word
            && subtype == "init"
            && let Some(session) = line["session_id"].as_str()
            && session != self.session
        {
            session.clone_into(&mut self.session);
        }
    }
}

/// The agent's next word, or `None` when there will be none. Nothing is lost if the wait is given up.
pub(super) async fn next_message<R, W>(
    lines: &mut LineTransport<R, W>,
    listening: bool,
) -> Option<ClaudeMessage>
where
    R: AsyncRead + Unpin,
    W: AsyncWrite + Unpin,
{
    loop {
        let line = lines.next_line(listening).await?;
        match ClaudeMessage::parse(&line) {
            Some(word) => return Some(word),
            None => log_ignored_line(&line),
        }
    }
}

async fn report_steers(
    turn: &DriverTurn<'_>,
    settled: impl IntoIterator<Item = ClaudeSteerOutcome>,
) -> Result<(), LinkClosed> {
    for steer in settled {
        match steer {
            ClaudeSteerOutcome::Taken(steer) => turn.report_steer_taken(steer).await?,
            ClaudeSteerOutcome::Missed(steer) => turn.report_steer_missed(steer).await?,
        }
    }
    Ok(())
}

/// What to tell of a turn that the agent began by itself and that went wrong.
fn failure_notice(result: &ClaudeTurnResult) -> Option<TurnUpdate> {
    let aborted = result.terminal_reason.as_deref().is_some_and(|reason| reason.starts_with("aborted"));
    let why = result.errors.first().or(result.result.as_ref()).filter(|_| result.is_error && !aborted)?;
    Some(TurnUpdate::Notice { text: format!("the agent went on by itself and failed: {why}") })
}

fn randomness_error(cause: getrandom::Error) -> RunError {
    RunError::new("agent_error", format!("there are no random bytes to name a message by: {cause}"))
}
