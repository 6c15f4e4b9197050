//! Questions to a person, and the end: when nothing is open any more, and what it then amounts to.

use std::collections::BTreeMap;

use qd_protocol::AskId;
use qd_protocol::event::{
    Answer, Ask, AskKind, AskOpened, AskResolved, AskState, Body, FleetFinished, ResolvedBy, Source,
    StopReason,
};
use qd_protocol::fleet::{Ending, FleetState};
use qd_protocol::limits::FLEET_SHOWN_MAX;
use qd_protocol::policy::Risk;
use serde_json::json;

use super::{Draft, Ended, Reply, prompt};

impl Draft<'_> {
    /// Shows a person what has come of it, and waits for the answer.
    pub(super) fn open_ask(&mut self, id: AskId, from: &[Source], ended: &Ended) {
        let text = |run| ended.others.get(run).or((ended.run == *run).then_some(&ended.text));
        let results: BTreeMap<&str, String> = from
            .iter()
            .map(|source| {
                let texts = source.runs.iter().filter_map(text).map(String::as_str);
                let text = prompt::joined(texts);
                (source.session.as_str(), text[..text.floor_char_boundary(FLEET_SHOWN_MAX)].to_owned())
            })
            .collect();
        let shown = results.iter().map(|(name, text)| prompt::section(name, text));
        let ask = Ask {
            id: id.clone(),
            session_id: None,
            run_id: None,
            fleet_id: Some(self.id.clone()),
            kind: AskKind::Question,
            tool: None,
            input: json!({ "results": results }),
            risk: Risk::Low,
            prompt: format!("What is the result?\n\n{}", shown.collect::<Vec<_>>().join("\n\n")),
            options: Vec::new(),
            by_call: false,
            opened_at: self.world.now,
            state: AskState::Pending,
            answer: None,
        };
        self.emit(Body::AskOpened(AskOpened { ask_id: id, ask }));
    }

    pub(super) fn answer(&mut self, id: &AskId, answer: Answer) {
        let Some(ask) = self.asks.get(id) else {
            self.step.reply = Some(Reply::AskNotOpen);
            return;
        };
        if let Err(why) = crate::session::fits(ask, &answer) {
            self.step.reply = Some(Reply::InvalidAnswer(why));
            return;
        }
        let ask = Ask { state: AskState::Answered, answer: Some(answer), ..ask.clone() };
        self.emit(Body::AskResolved(AskResolved::new(ask.clone(), ResolvedBy::User)));
        self.step.reply = Some(Reply::Answered(Box::new(ask)));
        self.settle();
    }

    pub(super) fn withdraw_asks(&mut self) {
        let open: Vec<Ask> = self.asks.values().cloned().collect();
        for ask in open {
            let ask = Ask { state: AskState::Withdrawn, ..ask };
            self.emit(Body::AskResolved(AskResolved::new(ask, ResolvedBy::Cancel)));
        }
    }

    /// Ends the fleet if nothing is open.
    pub(super) fn settle(&mut self) {
        if self.finished.is_some() || !self.errands.is_empty() || !self.asks.is_empty() {
            return;
        }
        let state = self.verdict();
        let result = self.result.clone();
        self.emit(Body::FleetFinished(FleetFinished { fleet_id: self.id.clone(), state, result }));
    }

    /// What it amounts to: the last end of each session counts, unless a route has followed on it.
    fn verdict(&self) -> FleetState {
        let unfollowed = |ending| self.last.values().any(|last| last.ending == ending && !last.routed);
        match self.stopping.map(|stopping| stopping.by) {
            Some(StopReason::Cancel) => FleetState::Cancelled,
            Some(StopReason::Timeout) => FleetState::Failed,
            None if !self.problems.is_empty() || unfollowed(Ending::Failed) => FleetState::Failed,
            None if unfollowed(Ending::Cancelled) => FleetState::Cancelled,
            None => FleetState::Done,
        }
    }
}
