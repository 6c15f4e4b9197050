//! Questions that an agent asks people through one of our tools instead of its own protocol. Like any other ask they
//! end with the turn, but nothing is sent over the link: the tool call itself waits for the answer.

use qd_protocol::AskId;
use qd_protocol::event::{Ask, AskDelivered, AskKind, AskStatus, EventBody, ResolvedBy};
use qd_protocol::policy::Risk;
use serde_json::Value;

use super::step_builder::SessionStepBuilder;
use super::{AskEntry, CommandRefusal, CommandReply};

impl SessionStepBuilder<'_> {
    /// Opens a question in the running turn. A turn that is being stopped cannot ask any more.
    pub(super) fn open_question(&mut self, id: AskId, prompt: String, options: Vec<String>) {
        let Some((run, _)) = self.current_turn().filter(|(_, started)| started.stop.is_none()) else {
            return self.refuse(CommandRefusal::NoTurn);
        };
        let run = run.id.clone();
        if self.is_at_ask_limit() {
            return self.refuse(CommandRefusal::TooManyAsks);
        }
        let mut ask = Ask {
            id: id.clone(),
            session_id: Some(self.id.clone()),
            run_id: Some(run.clone()),
            fleet_id: None,
            kind: AskKind::Question,
            tool: None,
            input_sha256: None,
            input: Value::Null,
            risk: Risk::Low,
            prompt,
            options,
            asked_by_tool: true,
            opened_at: self.context.now.wall,
            state: AskStatus::Pending,
            answer: None,
        };
        self.open_ask(Some(run), &mut ask);
        self.set_reply(CommandReply::QuestionOpened(id));
    }

    /// Records that the tool call has the answer. A repeat changes nothing.
    pub(super) fn record_answer_delivered(&mut self, id: &AskId) {
        if let Some(AskEntry::Answered { run, asked_by_tool: true, .. }) = self.asks.get(id) {
            let run = run.clone();
            self.emit(run, EventBody::AskDelivered(AskDelivered { ask_id: id.clone() }));
        }
        self.set_reply(CommandReply::Done);
    }

    /// Withdraws a question, if it was asked by a tool call.
    pub(super) fn withdraw_question(&mut self, id: &AskId) {
        if matches!(self.asks.get(id), Some(AskEntry::Pending(ask)) if ask.asked_by_tool) {
            self.withdraw_ask(id, ResolvedBy::Agent);
        }
        self.set_reply(CommandReply::Done);
    }
}
