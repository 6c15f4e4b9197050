//! Questions that an agent asks people by a tool call of ours instead of in its own protocol. They live and die with the
//! turn like any other, but nothing goes down the link: whoever made the call waits for the answer itself.

use qd_protocol::AskId;
use qd_protocol::event::{Ask, AskDelivered, AskKind, AskOpened, AskState, Body, ResolvedBy};
use qd_protocol::policy::Risk;
use serde_json::Value;

use super::draft::Draft;
use super::{AskEntry, Refusal, Reply};

impl Draft<'_> {
    /// Opens a question in the turn that runs. One that is being stopped asks nothing any more.
    pub(super) fn question(&mut self, id: AskId, prompt: String, options: Vec<String>) {
        let Some((run, _)) = self.turn().filter(|(_, started)| started.stop.is_none()) else {
            return self.refuse(Refusal::NoTurn);
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
            opened_at: self.world.now,
            state: AskState::Pending,
            answer: None,
        };
        self.emit(Some(run), Body::AskOpened(AskOpened { ask_id: id.clone(), ask }));
        self.reply(Reply::Asked(id));
    }

    /// Written when the call has the answer; said again, it changes nothing.
    pub(super) fn answer_taken(&mut self, id: &AskId) {
        if let Some(AskEntry::Answered { run, by_call: true, .. }) = self.asks.get(id) {
            let run = run.clone();
            self.emit(run, Body::AskDelivered(AskDelivered { ask_id: id.clone() }));
        }
        self.reply(Reply::Done);
    }

    /// Only a call takes back what a call asked.
    pub(super) fn take_back(&mut self, id: &AskId) {
        if matches!(self.asks.get(id), Some(AskEntry::Pending(ask)) if ask.by_call) {
            self.withdraw_one(id, ResolvedBy::Agent);
        }
        self.reply(Reply::Done);
    }
}
