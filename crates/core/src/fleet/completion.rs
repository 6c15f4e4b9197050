//! Questions to a person, and the end of a fleet: when nothing is open any more, and its final status.

use std::collections::BTreeMap;

use qd_protocol::event::{
    Ask, AskAnswer, AskKind, AskOpened, AskResolved, AskStatus, EventBody, FleetFinished, FleetStopReason,
    ResolvedBy, RouteSource,
};
use qd_protocol::fleet::{FleetStatus, TriggerOutcome};
use qd_protocol::limits::FLEET_SHOWN_MAX;
use qd_protocol::policy::Risk;
use qd_protocol::{AskId, RunId};
use serde_json::json;

use super::{FinishedRun, FleetReply, FleetStepBuilder, prompt};
use crate::ask_digest;

impl FleetStepBuilder<'_> {
    /// Shows the results to a person, and waits for an answer.
    pub(super) fn open_ask(&mut self, id: AskId, from: &[RouteSource], ended: &FinishedRun) {
        let text = |run| ended.other_texts.get(run).or((ended.run == *run).then_some(&ended.text));
        let results: BTreeMap<&str, String> = from
            .iter()
            .map(|source| {
                let texts = source.runs.iter().filter_map(text).map(String::as_str);
                (source.session.as_str(), truncate_shown_text(prompt::join_texts(texts), &source.runs))
            })
            .collect();
        let shown = results.iter().map(|(name, text)| prompt::format_section(name, text));
        let input = json!({ "results": results });
        let ask = Ask {
            id: id.clone(),
            session_id: None,
            run_id: None,
            fleet_id: Some(self.id.clone()),
            kind: AskKind::Question,
            tool: None,
            input_sha256: Some(ask_digest::input_sha256(&input)),
            input,
            risk: Risk::Low,
            prompt: format!("What is the result?\n\n{}", shown.collect::<Vec<_>>().join("\n\n")),
            options: Vec::new(),
            asked_by_tool: false,
            opened_at: self.context.now.wall,
            state: AskStatus::Pending,
            answer: None,
        };
        self.emit(EventBody::AskOpened(AskOpened { ask_id: id, ask }));
    }

    pub(super) fn answer_ask(&mut self, id: &AskId, answer: AskAnswer, shown_sha256: Option<&str>) {
        let Some(ask) = self.asks.get(id) else {
            self.step.reply = Some(FleetReply::AskNotOpen);
            return;
        };
        if !ask_digest::matches_shown(ask, shown_sha256) {
            self.step.reply = Some(FleetReply::AskChanged);
            return;
        }
        if let Err(problem) = crate::session::validate_answer(ask, &answer) {
            self.step.reply = Some(FleetReply::InvalidAnswer(problem));
            return;
        }
        let ask = Ask { state: AskStatus::Answered, answer: Some(answer), ..ask.clone() };
        self.emit(EventBody::AskResolved(AskResolved::new(ask.clone(), ResolvedBy::User)));
        self.step.reply = Some(FleetReply::Answered(Box::new(ask)));
        self.finish_if_done();
    }

    pub(super) fn withdraw_asks(&mut self) {
        let open: Vec<Ask> = self.asks.values().cloned().collect();
        for ask in open {
            let ask = Ask { state: AskStatus::Withdrawn, ..ask };
            self.emit(EventBody::AskResolved(AskResolved::new(ask, ResolvedBy::Cancel)));
        }
    }

    /// Ends the fleet if nothing is open.
    pub(super) fn finish_if_done(&mut self) {
        if self.finished.is_some() || !self.assignments.is_empty() || !self.asks.is_empty() {
            return;
        }
        let state = self.final_status();
        let result = self.result.clone();
        self.emit(EventBody::FleetFinished(FleetFinished { fleet_id: self.id.clone(), state, result }));
    }

    /// The final status. The last outcome of each session counts, unless a route fired on it.
    fn final_status(&self) -> FleetStatus {
        let any_unrouted =
            |ending| self.last_outcomes.values().any(|outcome| outcome.ending == ending && !outcome.routed);
        match self.stopping.map(|stopping| stopping.by) {
            Some(FleetStopReason::Cancel) => FleetStatus::Cancelled,
            Some(FleetStopReason::Timeout) => FleetStatus::Failed,
            None if !self.problems.is_empty() || any_unrouted(TriggerOutcome::Failed) => FleetStatus::Failed,
            None if any_unrouted(TriggerOutcome::Cancelled) => FleetStatus::Cancelled,
            None => FleetStatus::Done,
        }
    }
}

/// The part of a result that a person is shown. A result that is cut says so, and where the rest is.
fn truncate_shown_text(mut text: String, runs: &[RunId]) -> String {
    let shown = text.floor_char_boundary(FLEET_SHOWN_MAX);
    let hidden = text.len() - shown;
    if hidden > 0 {
        let logs: Vec<String> = runs.iter().map(|run| format!("`qd logs {run}`")).collect();
        text.truncate(shown);
        text.push_str(&format!("\n[{hidden} more bytes: {}]", logs.join(", ")));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_result_that_is_cut_says_so_and_where_the_rest_is() {
        let runs = [RunId::parse("run_1").unwrap(), RunId::parse("run_2").unwrap()];
        assert_eq!(truncate_shown_text("short".to_owned(), &runs), "short");
        let long = "x".repeat(FLEET_SHOWN_MAX + 7);
        let shown = truncate_shown_text(long, &runs);
        assert!(shown.ends_with("x\n[7 more bytes: `qd logs run_1`, `qd logs run_2`]"), "{shown}");
    }
}
