//! What the agent's side says, and what becomes of it. The machine is the authority, not the agent: words that come
//! after a run's end are kept apart, and a terminal is one opinion among others.

use qd_protocol::event::{
    Answer, Ask, AskDelivered, AskKind, AskOpened, AskResolved, AskState, Body, Decision, Delta, Empty,
    Notice, Plan, ResolvedBy, RunError, SessionUpdated, SteerTaken, StopCause, Tool, UsageReported,
};
use qd_protocol::link::{AskRequest, Outcome, Reply as AskReply, Said, Stop, Up, UpNumber};
use qd_protocol::mail::Deliver;
use qd_protocol::policy::{Risk, Rule};
use qd_protocol::{AskId, FinishReason, MessageId, Number, RunId};

use super::draft::Draft;
use super::finish::Ending;
use super::{AskEntry, Effect, Link};
use crate::policy::{self, Judgement};

/// Dollars that one report may claim.
const COST_MAX: f64 = 1e9;

impl Draft<'_> {
    /// Something that was heard before makes nothing: delivery is at least once, the journal makes it exactly once.
    pub(super) fn heard(&mut self, number: UpNumber, up: Up) {
        if number <= self.taken || self.closed {
            return;
        }
        self.hearing(number);
        match up {
            Up::Ready { agent_session_id, .. } => {
                if agent_session_id.is_some() && agent_session_id != self.agent_session_id {
                    self.update(SessionUpdated { agent_session_id, ..Default::default() });
                }
                self.advance();
            }
            Up::Said { run, what } => self.said(run, what),
            Up::Ask { run, ask } => self.asked(run, ask),
            Up::AskWithdrawn { ask } => self.withdraw_one(&ask, ResolvedBy::Agent),
            Up::AskDelivered { ask } => {
                if let Some(AskEntry::Answered { run, .. }) = self.asks.get(&ask) {
                    let run = run.clone();
                    self.emit(run, Body::AskDelivered(AskDelivered { ask_id: ask }));
                }
            }
            Up::SteerTaken { steer } => {
                if let Some((run, steer)) = self.sent_steer(steer) {
                    let mail = self.mail_of_steer(&run, steer);
                    self.emit(Some(run.clone()), Body::SteerTaken(SteerTaken { steer }));
                    if let Some(mail) = mail {
                        self.delivered(mail, Deliver::Steer, &run);
                    }
                }
            }
            Up::SteerMissed { steer } => {
                if let Some((run, steer)) = self.sent_steer(steer) {
                    self.miss(&run, steer);
                }
            }
            Up::Terminal { run, outcome } => self.terminal(&run, outcome),
            Up::Rested => self.advance(),
            Up::Gone(gone) => self.gone(gone),
        }
    }

    /// The steer of the active run that went down under this number.
    fn sent_steer(&self, sent: Number) -> Option<(RunId, Number)> {
        let (run, _) = self.active()?;
        let steer = run.steers.iter().find(|steer| steer.sent == Some(sent))?;
        Some((run.id.clone(), steer.accepted))
    }

    fn is_active(&self, run: &RunId) -> bool {
        self.active().is_some_and(|(active, _)| active.id == *run)
    }

    fn said(&mut self, run: RunId, what: Said) {
        let live = self.is_active(&run);
        let message_id = live.then(|| MessageId::assistant(&run));
        let after_run = (!live).then(|| run.clone());
        let tool = |call_id, after_run| Tool {
            message_id: message_id.clone(),
            call_id,
            after_run,
            ..Tool::default()
        };
        let spends = matches!(what, Said::Usage { .. });
        let body = match what {
            Said::Text { text } => Body::TextDelta(Delta { message_id, text, after_run }),
            Said::Thought { text } => Body::ThoughtDelta(Delta { message_id, text, after_run }),
            Said::ToolStarted { call_id, name, input } => {
                Body::ToolStarted(Tool { name: Some(name), input: Some(input), ..tool(call_id, after_run) })
            }
            Said::ToolOutput { call_id, text } => {
                Body::ToolOutput(Tool { text: Some(text), ..tool(call_id, after_run) })
            }
            Said::ToolFinished { call_id, name, output, is_error } => Body::ToolFinished(Tool {
                name: Some(name),
                output: Some(output),
                is_error: Some(is_error),
                ..tool(call_id, after_run)
            }),
            Said::Plan { entries } => Body::PlanUpdated(Plan { message_id, entries, after_run }),
            Said::Notice { text } => Body::NoticeShown(Notice { text, after_run }),
            Said::Usage { usage } => Body::UsageReported(UsageReported {
                input_tokens: usage.input_tokens,
                output_tokens: usage.output_tokens,
                // JSON has no number for what is none, and sums of such would be lost for good.
                cost_usd: if usage.cost_usd.is_finite() { usage.cost_usd.clamp(0.0, COST_MAX) } else { 0.0 },
                after_run,
            }),
            Said::Turn if live => Body::TurnStarted(Empty {}),
            Said::Turn => return,
        };
        self.emit(live.then_some(run), body);
        if spends {
            self.effect(Effect::CheckBudget);
        }
        let turns = self.turn().map_or(0, |(_, started)| started.turns);
        if live && self.settings.limits.max_turns.is_some_and(|max| turns > max) {
            self.stop_active(StopCause::MaxTurns, None);
        }
    }

    fn asked(&mut self, run: RunId, request: AskRequest) {
        if self.asks.contains_key(&request.id) {
            return;
        }
        let AskRequest { id, kind, tool, input, risk, prompt, options, unasked } = request;
        let directory = self.settings.directory.as_deref();
        let risk = policy::assess(tool.as_deref().unwrap_or_default(), &input, risk, directory);
        let ask = Ask {
            id,
            session_id: Some(self.id.clone()),
            run_id: Some(run.clone()),
            fleet_id: None,
            kind,
            tool,
            input,
            risk,
            prompt,
            options,
            by_call: false,
            opened_at: self.world.now,
            state: AskState::Pending,
            answer: None,
        };
        let stopping = match self.turn() {
            Some((active, started)) if active.id == run => started.stop.is_some(),
            _ => return self.turn_away(ask, None, ResolvedBy::End),
        };
        if stopping {
            return self.turn_away(ask, Some(run), ResolvedBy::Cancel);
        }
        match self.judge(&ask) {
            // People are asked what the agent asks, and not about every file that it looks at.
            Judgement::Ask if unasked && ask.risk == Risk::Low => {
                self.decide(ask, Decision::AllowOnce, None, None, false);
            }
            Judgement::Ask => {
                let ask_id = ask.id.clone();
                self.emit(Some(run), Body::AskOpened(AskOpened { ask_id, ask }));
            }
            Judgement::Allow { rule } => self.decide(ask, Decision::AllowOnce, None, rule, false),
            Judgement::Granted => self.decide(ask, Decision::AllowOnce, None, None, true),
            Judgement::Deny { rule, reason } => self.decide(ask, Decision::Deny, Some(reason), rule, false),
        }
    }

    fn judge(&self, ask: &Ask) -> Judgement {
        match (&ask.kind, &ask.tool) {
            (AskKind::Permission, Some(tool)) => {
                let workspace = self.settings.directory.as_deref();
                let question = policy::Question { tool, input: &ask.input, risk: ask.risk, workspace };
                policy::judge(&self.settings.policy, self.grants.contains(tool), &question)
            }
            _ => Judgement::Ask,
        }
    }

    /// Answers in the policy's name; `granted`: because a person had allowed the tool for the rest of the session.
    fn decide(
        &mut self,
        mut ask: Ask,
        decision: Decision,
        reason: Option<String>,
        rule: Option<Rule>,
        granted: bool,
    ) {
        ask.state = AskState::Answered;
        ask.answer = Some(Answer { decision: Some(decision), value: None, reason });
        self.resolve(AskResolved { rule, granted, ..AskResolved::new(ask, ResolvedBy::Policy) });
    }

    /// Journals an answer and sends it down. What the agent is told is what `evolve` made of it: once, never always.
    pub(super) fn resolve(&mut self, resolved: AskResolved) {
        let (id, run) = (resolved.ask_id.clone(), resolved.ask.run_id.clone());
        let number = self.emit(run, Body::AskResolved(resolved));
        if let Some(AskEntry::Answered { reply, by_call: false, .. }) = self.asks.get(&id) {
            let reply = reply.clone();
            self.effect(Effect::Answer { number, ask: id, reply });
        }
    }

    /// An ask that nobody will answer, since its run is being stopped or is over: opened and withdrawn at once, so
    /// that readers see what the agent wanted.
    fn turn_away(&mut self, mut ask: Ask, run: Option<RunId>, by: ResolvedBy) {
        let id: AskId = ask.id.clone();
        self.emit(run.clone(), Body::AskOpened(AskOpened { ask_id: id.clone(), ask: ask.clone() }));
        ask.state = AskState::Withdrawn;
        let number = self.emit(run, Body::AskResolved(AskResolved::new(ask, by)));
        self.effect(Effect::Answer { number, ask: id, reply: AskReply::Withdrawn });
    }

    fn terminal(&mut self, run: &RunId, outcome: Outcome) {
        let turn = self.turn().filter(|(turn, _)| turn.id == *run);
        let Some(stopping) = turn.map(|(_, started)| started.stop.is_some()) else { return };
        let Outcome { stop, text, error, processes, transcript, agent_ends } = outcome;
        if agent_ends {
            // It is there for a moment still, and the next prompt is not for it.
            self.world.link = Link::Starting;
        }
        let reason = match stop {
            Stop::EndTurn => FinishReason::EndTurn,
            Stop::Cancelled => FinishReason::Cancelled,
            Stop::MaxTokens => FinishReason::MaxTokens,
            Stop::MaxTurns => FinishReason::MaxTurns,
            Stop::Refused => FinishReason::Refused,
            Stop::Timeout => FinishReason::Timeout,
            Stop::BudgetExceeded => FinishReason::BudgetExceeded,
            Stop::Error => FinishReason::Error,
            Stop::Suspended if !stopping => {
                self.suspend(run, transcript);
                return self.advance();
            }
            // Somebody wants it stopped, and it has: there is nothing to wait for.
            Stop::Suspended => FinishReason::Cancelled,
        };
        let failed = || RunError::new("agent_error", "the agent failed");
        let error = (stop == Stop::Error).then(|| error.unwrap_or_else(failed));
        self.end(run, Ending { reason, text, error, processes });
        self.advance();
    }
}
