//! Permission for calls of our own tools, for agents that use the tools of MCP servers without asking. The policy judges
//! the call as if the agent had asked. Nothing is sent over the link: the tool call itself waits for the decision.

use qd_protocol::event::{AskAnswer, AskDelivered, EventBody, PermissionDecision};
use qd_protocol::link::{AskRequest, AskResolution};

use super::step_builder::SessionStepBuilder;
use super::{AskEntry, CommandRefusal, CommandReply};
use crate::policy::PolicyJudgement;

/// Whether a tool call may be performed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ToolCallVerdict {
    Allowed,
    Denied {
        reason: Option<String>,
    },
    /// A person has to decide.
    Pending,
}

impl ToolCallVerdict {
    /// The verdict of an answer to the permission request.
    pub fn from_answer(answer: &AskAnswer) -> Self {
        match answer.decision.is_some_and(PermissionDecision::allows) {
            true => Self::Allowed,
            false => Self::Denied { reason: answer.reason.clone() },
        }
    }
}

impl SessionStepBuilder<'_> {
    /// Judges a tool call before it is performed. A repeat of a request gets the verdict of the first. Without a turn, or
    /// while one is being stopped, only the policy can decide, because nobody can be asked. No event tells of it then,
    /// because it would belong to no run.
    pub(super) fn judge_tool_call(&mut self, request: AskRequest) {
        if let Some(entry) = self.asks.get(&request.id) {
            let verdict = match entry {
                AskEntry::Answered { reply: AskResolution::Answered(answer), .. } => {
                    ToolCallVerdict::from_answer(answer)
                }
                _ => ToolCallVerdict::Pending,
            };
            return self.set_reply(CommandReply::ToolCallJudged(verdict));
        }
        let turn = self.current_turn().filter(|(_, started)| started.stop.is_none());
        let run = turn.map(|(run, _)| run.id.clone());
        let id = request.id.clone();
        let mut ask = self.ask_from_request(run.clone(), request);
        ask.asked_by_tool = true;
        let (rule, granted, reason) = match self.judge_ask(&ask) {
            PolicyJudgement::Ask if run.is_none() => return self.refuse(CommandRefusal::NoTurn),
            PolicyJudgement::Ask if self.is_at_ask_limit() => {
                return self.refuse(CommandRefusal::TooManyAsks);
            }
            PolicyJudgement::Ask => {
                self.open_ask(run, &mut ask);
                return self.set_reply(CommandReply::ToolCallJudged(ToolCallVerdict::Pending));
            }
            PolicyJudgement::Allow { rule } => (rule, false, None),
            PolicyJudgement::Granted => (None, true, None),
            PolicyJudgement::Deny { rule, reason } => (rule, false, Some(reason)),
        };
        let verdict = match &reason {
            None => ToolCallVerdict::Allowed,
            reason => ToolCallVerdict::Denied { reason: reason.clone() },
        };
        if run.is_some() {
            let decision =
                if reason.is_none() { PermissionDecision::AllowOnce } else { PermissionDecision::Deny };
            self.answer_by_policy(ask, decision, reason, rule, granted);
            // The reply to the command is the delivery.
            self.emit(run, EventBody::AskDelivered(AskDelivered { ask_id: id }));
        }
        self.set_reply(CommandReply::ToolCallJudged(verdict));
    }
}
