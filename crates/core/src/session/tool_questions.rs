//! Questions that an agent asks people by a tool call of ours instead of in its own protocol. They live and die with the
//! turn like any other, but nothing goes down the link: whoever made the call waits for the answer itself.

use qd_protocol::AskId;
use qd_protocol::event::{Ask, AskDelivered, AskKind, AskOpened, AskStatus, EventBody, ResolvedBy};
use qd_protocol::policy::Risk;
use serde_json::Value;

use super::step_builder::SessionStepBuilder;
use super::{AskEntry, CommandRefusal, CommandReply};

impl SessionStepBuilder<'_> {
    /// Opens a question in the turn that runs. One that is being stopped asks nothing any more.
    pub(super) fn open_question(&mut self, id: AskId, prompt: String, options: Vec<String>) {
        let Some((run, _)) = self.current_turn().filter(|(_, started)| started.stop.is_none()) else {
            return self.refuse(CommandRefusal::NoTurn);
        };
        let run = run.id.clone();
        let ask = Ask {
            id: id.clone(),
            session_id: Some(self.id.clone()),
            run_id: Some(run.clone()),
            fleet_id: None,
            kind: AskKind::Question,
            tool: None,
            input: Value::Null,
            risk: Risk::Low,
            prompt,
            options,
            by_call: true,
            opened_at: self.context.now,
            state: AskStatus::Pending,
            answer: None,
        };
        self.emit(Some(run), EventBody::AskOpened(AskOpened { ask_id: id.clone(), ask }));
        self.set_reply(CommandReply::QuestionOpened(id));
    }

    /// Written when the call has the answer; said again, it changes nothing.
    pub(super) fn record_answer_delivered(&mut self, id: &AskId) {
        if let Some(AskEntry::Answered { run, by_call: true, .. }) = self.asks.get(id) {
            let run = run.clone();
            self.emit(run, EventBody::AskDelivered(AskDelivered { ask_id: id.clone() }));
        }
        self.set_reply(CommandReply::Done);
    }

    /// Only a call takes back what a call asked.
    pub(super) fn withdraw_question(&mut self, id: &AskId) {
        if matches!(self.asks.get(id), Some(AskEntry::Pending(ask)) if ask.by_call) {
            self.withdraw_ask(id, ResolvedBy::Agent);
        }
        self.set_reply(CommandReply::Done);
    }
}
