//! Handles the updates from the agent's side. The machine has the last word, not the agent: output that comes after a
//! run's end belongs to no run, and the outcome that an agent reports only counts if no stop was requested.

use qd_protocol::event::{
    Ask, AskAnswer, AskDelivered, AskKind, AskOpened, AskResolved, AskStatus, ContextCompacted,
    ContextUpdated, EmptyEventData, EventBody, MessageDelta, ModeChangeSource, ModeChanged, NoticeShown,
    PermissionDecision, PlanUpdated, ResolvedBy, RunError, RunStopCause, SessionUpdated, SteerTaken,
    TokenUsage, ToolCallEvent, UsageReported,
};
use qd_protocol::limits::{ASKS_OPEN_MAX, USAGE_COST_MAX_USD, USAGE_TOKENS_MAX};
use qd_protocol::link::{
    AgentUpdate, AskRequest, AskResolution, TurnOutcome, TurnStopReason, TurnUpdate, UpdateNumber,
};
use qd_protocol::mail::MailDelivery;
use qd_protocol::policy::{PolicyRule, Risk};
use qd_protocol::{AskId, EventNumber, FinishReason, MessageId, RunId};

use super::finish::RunEnding;
use super::step_builder::SessionStepBuilder;
use super::{AgentAvailability, AskEntry, SessionEffect};
use crate::ask_digest;
use crate::policy::{self, PolicyJudgement};

impl SessionStepBuilder<'_> {
    /// Handles one update. A repeated number is ignored: the link delivers at least once, and the journalled number
    /// makes that exactly once.
    pub(super) fn handle_update(&mut self, number: UpdateNumber, update: AgentUpdate) {
        if number <= self.last_update_number || self.closed {
            return;
        }
        self.set_update_number(number);
        match update {
            AgentUpdate::Ready { agent_session_id, .. } => {
                if agent_session_id.is_some() && agent_session_id != self.agent_session_id {
                    self.emit_update(SessionUpdated { agent_session_id, ..Default::default() });
                }
                self.advance();
            }
            AgentUpdate::Confined(report) => {
                if self.sandbox.as_ref() != Some(&report) {
                    self.emit_update(SessionUpdated { confined: Some(report), ..Default::default() });
                }
            }
            AgentUpdate::Turn { run, update } => self.record_agent_output(run, update),
            AgentUpdate::Ask { run, ask } => self.handle_ask_request(run, ask),
            AgentUpdate::AskWithdrawn { ask } => self.withdraw_ask(&ask, ResolvedBy::Agent),
            AgentUpdate::AskDelivered { ask } => {
                if let Some(AskEntry::Answered { run, .. }) = self.asks.get(&ask) {
                    let run = run.clone();
                    self.emit(run, EventBody::AskDelivered(AskDelivered { ask_id: ask }));
                }
            }
            AgentUpdate::SteerTaken { steer } => {
                if let Some((run, steer)) = self.find_sent_steer(steer) {
                    let mail = self.mail_of_steer(&run, steer);
                    self.emit(Some(run.clone()), EventBody::SteerTaken(SteerTaken { steer }));
                    if let Some(mail) = mail {
                        self.record_mail_delivery(mail, MailDelivery::Steer, &run);
                    }
                }
            }
            AgentUpdate::SteerMissed { steer } => {
                if let Some((run, steer)) = self.find_sent_steer(steer) {
                    self.settle_missed_steer(&run, steer, self.is_being_cancelled());
                }
            }
            AgentUpdate::TurnEnded { run, outcome } => self.handle_turn_end(&run, outcome),
            AgentUpdate::IdleStopped => self.advance(),
            AgentUpdate::Gone(gone) => self.handle_worker_gone(gone),
        }
    }

    /// The steer of the active run that was sent under this number.
    fn find_sent_steer(&self, sent: EventNumber) -> Option<(RunId, EventNumber)> {
        let (run, _) = self.active_run()?;
        let steer = run.steers.iter().find(|steer| steer.sent == Some(sent))?;
        Some((run.id.clone(), steer.accepted))
    }

    /// The active run was cancelled, and its turn has not stopped yet.
    fn is_being_cancelled(&self) -> bool {
        let stop = self.active_run().and_then(|(_, started)| started.stop);
        stop.is_some_and(|stop| stop.by.finish_reason() == FinishReason::Cancelled)
    }

    fn is_active(&self, run: &RunId) -> bool {
        self.active_run().is_some_and(|(active, _)| active.id == *run)
    }

    fn record_agent_output(&mut self, run: RunId, update: TurnUpdate) {
        let live = self.is_active(&run);
        let message_id = live.then(|| MessageId::assistant(&run));
        let after_run = (!live).then(|| run.clone());
        let tool = |call_id, after_run| ToolCallEvent {
            message_id: message_id.clone(),
            call_id,
            after_run,
            ..ToolCallEvent::default()
        };
        let mut reports_usage = false;
        let body = match update {
            TurnUpdate::Text { text } => EventBody::TextDelta(MessageDelta { message_id, text, after_run }),
            TurnUpdate::Thought { text } => {
                EventBody::ThoughtDelta(MessageDelta { message_id, text, after_run })
            }
            TurnUpdate::ToolStarted { call_id, name, input } => EventBody::ToolStarted(ToolCallEvent {
                name: Some(name),
                input: Some(input),
                ..tool(call_id, after_run)
            }),
            TurnUpdate::ToolOutput { call_id, text } => {
                EventBody::ToolOutput(ToolCallEvent { text: Some(text), ..tool(call_id, after_run) })
            }
            TurnUpdate::ToolFinished { call_id, name, output, is_error } => {
                EventBody::ToolFinished(ToolCallEvent {
                    name: Some(name),
                    output: Some(output),
                    is_error: Some(is_error),
                    ..tool(call_id, after_run)
                })
            }
            TurnUpdate::Plan { entries } => {
                EventBody::PlanUpdated(PlanUpdated { message_id, entries, after_run })
            }
            TurnUpdate::Notice { text, silent_s, limit } => {
                EventBody::NoticeShown(NoticeShown { text, after_run, silent_s, limit })
            }
            TurnUpdate::Usage { usage, conversation_cost_usd } => match absurd_usage(&usage) {
                Some(absurd) => {
                    let text = format!("refused a usage report of run {run}: {absurd}; it does not count");
                    EventBody::NoticeShown(NoticeShown { after_run, ..NoticeShown::new(text) })
                }
                None => {
                    reports_usage = true;
                    EventBody::UsageReported(UsageReported {
                        input_tokens: usage.input_tokens,
                        output_tokens: usage.output_tokens,
                        cost_usd: usage.cost_usd,
                        // A total that nobody can mean is not remembered: JSON cannot represent NaN or infinity.
                        conversation_cost_usd: conversation_cost_usd.filter(|cost| is_plausible_cost(*cost)),
                        after_run,
                    })
                }
            },
            TurnUpdate::ModelCall if live => EventBody::TurnStarted(EmptyEventData {}),
            TurnUpdate::ModelCall => return,
            TurnUpdate::Mode { mode } if self.settings.mode.as_ref() == Some(&mode) => return,
            TurnUpdate::Mode { mode } => {
                EventBody::ModeChanged(ModeChanged { mode, by: ModeChangeSource::Agent, after_run })
            }
            TurnUpdate::Context(context) if self.agent_context == Some(context) => return,
            TurnUpdate::Context(context) => EventBody::ContextUpdated(ContextUpdated { context, after_run }),
            TurnUpdate::Compacted { used_before } => {
                EventBody::ContextCompacted(ContextCompacted { used_before, after_run })
            }
        };
        self.emit(live.then_some(run), body);
        if reports_usage {
            self.add_effect(SessionEffect::CheckBudget);
        }
        let turns = self.current_turn().map_or(0, |(_, started)| started.turns);
        if live && self.settings.limits.max_turns.is_some_and(|max| turns > max) {
            self.stop_active_run(RunStopCause::MaxTurns, None);
        }
        if live && self.is_at_journal_limit() {
            self.stop_active_run(RunStopCause::JournalLimit, None);
        }
    }

    /// Opens an ask for a person, with the digest of its input.
    pub(super) fn open_ask(&mut self, run: Option<RunId>, ask: &mut Ask) {
        ask.input_sha256 = Some(ask_digest::input_sha256(&ask.input));
        let opened = AskOpened { ask_id: ask.id.clone(), ask: ask.clone() };
        self.emit(run.clone(), EventBody::AskOpened(opened));
        if self.pending_asks().count() == ASKS_OPEN_MAX {
            let text = format!(
                "{ASKS_OPEN_MAX} asks are open, which is the limit; further ones wait until some are answered"
            );
            self.emit(run, EventBody::NoticeShown(NoticeShown::of_limit("ASKS_OPEN_MAX", text)));
        }
    }

    /// Whether as many asks are open as may be.
    pub(super) fn is_at_ask_limit(&self) -> bool {
        self.pending_asks().count() >= ASKS_OPEN_MAX
    }

    fn handle_ask_request(&mut self, run: RunId, request: AskRequest) {
        if self.asks.contains_key(&request.id) {
            return;
        }
        let implicit = request.implicit;
        let mut ask = self.ask_from_request(Some(run.clone()), request);
        let stopping = match self.current_turn() {
            Some((active, started)) if active.id == run => started.stop.is_some(),
            _ => return self.open_withdrawn_ask(ask, None, ResolvedBy::End),
        };
        if stopping {
            return self.open_withdrawn_ask(ask, Some(run), ResolvedBy::Cancel);
        }
        // Our workers hold back what exceeds the limit, and leave as much to the asks of our own tools.
        if self.pending_asks().count() >= 2 * ASKS_OPEN_MAX {
            return self.open_withdrawn_ask(ask, Some(run), ResolvedBy::Agent);
        }
        match self.judge_ask(&ask) {
            // The agent itself would not have asked. People should not have to approve every file that it reads.
            PolicyJudgement::Ask if implicit && ask.risk == Risk::Low => {
                self.answer_by_policy(ask, PermissionDecision::AllowOnce, None, None, false);
            }
            PolicyJudgement::Ask => self.open_ask(Some(run), &mut ask),
            PolicyJudgement::Allow { rule } => {
                self.answer_by_policy(ask, PermissionDecision::AllowOnce, None, rule, false)
            }
            PolicyJudgement::Granted => {
                self.answer_by_policy(ask, PermissionDecision::AllowOnce, None, None, true)
            }
            PolicyJudgement::Deny { rule, reason } => {
                self.answer_by_policy(ask, PermissionDecision::Deny, Some(reason), rule, false)
            }
        }
    }

    /// The ask of this request, with our own assessment of its risk.
    pub(super) fn ask_from_request(&self, run: Option<RunId>, request: AskRequest) -> Ask {
        let AskRequest { id, kind, tool, input, risk, prompt, options, .. } = request;
        let directory = self.settings.directory.as_deref();
        let risk = policy::assess_risk(tool.as_deref().unwrap_or_default(), &input, risk, directory);
        Ask {
            id,
            session_id: Some(self.id.clone()),
            run_id: run,
            fleet_id: None,
            kind,
            tool,
            input_sha256: None,
            input,
            risk,
            prompt,
            options,
            asked_by_tool: false,
            opened_at: self.context.now.wall,
            state: AskStatus::Pending,
            answer: None,
        }
    }

    pub(super) fn judge_ask(&self, ask: &Ask) -> PolicyJudgement {
        match (&ask.kind, &ask.tool) {
            (AskKind::Permission, Some(tool)) => {
                let workspace = self.settings.directory.as_deref();
                let call = policy::ProposedToolCall { tool, input: &ask.input, risk: ask.risk, workspace };
                policy::judge(&self.settings.policy, self.grants.contains(tool), &call)
            }
            _ => PolicyJudgement::Ask,
        }
    }

    /// Answers an ask by policy. `granted` means that a person had allowed the tool for the rest of the session.
    pub(super) fn answer_by_policy(
        &mut self,
        mut ask: Ask,
        decision: PermissionDecision,
        reason: Option<String>,
        rule: Option<PolicyRule>,
        granted: bool,
    ) {
        ask.state = AskStatus::Answered;
        ask.answer = Some(AskAnswer { decision: Some(decision), value: None, reason });
        self.resolve_ask(AskResolved { rule, granted, ..AskResolved::new(ask, ResolvedBy::Policy) });
    }

    /// Journals an answer and sends it to the agent. The agent gets the reply that `evolve` made of it, which never
    /// contains "allow always".
    pub(super) fn resolve_ask(&mut self, resolved: AskResolved) {
        let (id, run) = (resolved.ask_id.clone(), resolved.ask.run_id.clone());
        let number = self.emit(run, EventBody::AskResolved(resolved));
        if let Some(AskEntry::Answered { reply, asked_by_tool: false, .. }) = self.asks.get(&id) {
            let reply = reply.clone();
            self.add_effect(SessionEffect::SendAnswer { number, ask: id, reply });
        }
    }

    /// Opens and at once withdraws an ask that cannot be answered, because its run is being stopped or has ended.
    /// This way readers still see what the agent asked for.
    fn open_withdrawn_ask(&mut self, mut ask: Ask, run: Option<RunId>, by: ResolvedBy) {
        let id: AskId = ask.id.clone();
        self.open_ask(run.clone(), &mut ask);
        ask.state = AskStatus::Withdrawn;
        let number = self.emit(run, EventBody::AskResolved(AskResolved::new(ask, by)));
        self.add_effect(SessionEffect::SendAnswer { number, ask: id, reply: AskResolution::Withdrawn });
    }

    fn handle_turn_end(&mut self, run: &RunId, outcome: TurnOutcome) {
        let turn = self.current_turn().filter(|(turn, _)| turn.id == *run);
        let Some(stopping) = turn.map(|(_, started)| started.stop.is_some()) else { return };
        let TurnOutcome { stop, text, error, processes, transcript, agent_ends, leaves_processes } = outcome;
        if stopping && leaves_processes {
            // The stop met the end of the turn, and the worker had not received it yet. When it does, it ends what the
            // turn left running and reports the end again. No event is emitted, so the state shows a running turn until
            // then: the stop is resent to a reattached worker, and followed by a kill if nothing is reported.
            return;
        }
        if agent_ends {
            // The agent still runs for a moment, but must not get the next prompt.
            self.context.agent = AgentAvailability::Starting;
        }
        let reason = match stop {
            TurnStopReason::EndTurn => FinishReason::EndTurn,
            // Only a run that somebody cancelled ends as cancelled. If a stop was requested, it decides the reason.
            TurnStopReason::Cancelled if stopping => FinishReason::Cancelled,
            TurnStopReason::Cancelled => FinishReason::Error,
            TurnStopReason::MaxTokens => FinishReason::MaxTokens,
            TurnStopReason::MaxTurns => FinishReason::MaxTurns,
            TurnStopReason::Refused => FinishReason::Refused,
            TurnStopReason::Timeout => FinishReason::Timeout,
            TurnStopReason::BudgetExceeded => FinishReason::BudgetExceeded,
            TurnStopReason::Error => FinishReason::Error,
            TurnStopReason::Suspended if !stopping => {
                self.suspend_run(run, transcript);
                return self.advance();
            }
            // A stop was requested and the turn has stopped, so there is nothing to wait for.
            TurnStopReason::Suspended => FinishReason::Cancelled,
        };
        let unspecified = || match stop {
            TurnStopReason::Cancelled => {
                RunError::new("agent_error", "the agent reported a cancel that nobody requested")
            }
            _ => RunError::new("agent_error", "the agent failed"),
        };
        let error = (reason == FinishReason::Error).then(|| error.unwrap_or_else(unspecified));
        self.finish_run_with(run, RunEnding { reason, text, error, processes });
        self.advance();
    }
}

/// Why a usage report is impossible, or `None` if it is plausible. Counting an impossible one would spoil sums and budgets
/// for good: JSON cannot represent NaN or infinity.
fn absurd_usage(usage: &TokenUsage) -> Option<String> {
    let TokenUsage { input_tokens, output_tokens, cost_usd } = *usage;
    for (tokens, kind) in [(input_tokens, "input"), (output_tokens, "output")] {
        if tokens > USAGE_TOKENS_MAX {
            return Some(format!("{tokens} {kind} tokens are more than {USAGE_TOKENS_MAX}"));
        }
    }
    (!is_plausible_cost(cost_usd))
        .then(|| format!("a cost of {cost_usd} US dollars is not between 0 and {USAGE_COST_MAX_USD}"))
}

fn is_plausible_cost(cost_usd: f64) -> bool {
    (0.0..=f64::from(USAGE_COST_MAX_USD)).contains(&cost_usd)
}
