//! Rules that every journal must obey, as one check that any suite can end with: the order of each run's events (rule
//! 5.3 of the contract), one active run at a time, seqs that only grow. Pure: it takes events and panics.

use std::collections::BTreeMap;

use crate::stream::{TestEvent, summarize_events};

/// Checks all rules. Events of several sessions may be mixed, but each session must be complete.
#[track_caller]
pub fn check(events: &[TestEvent]) {
    check_order(events);
    let mut runs: BTreeMap<&str, Vec<&TestEvent>> = BTreeMap::new();
    let mut active: BTreeMap<&str, &str> = BTreeMap::new();
    for event in events {
        let has_run = event.run_id.is_some();
        if ["workspace.", "session.", "worker."].iter().any(|kind| event.kind.starts_with(kind)) {
            assert!(!has_run, "{} must not have a run id: {event:?}", event.kind);
        }
        let Some(run) = event.run_id.as_deref() else { continue };
        let session = event.session_id.as_deref().unwrap_or_else(|| panic!("a run has a session: {event:?}"));
        runs.entry(run).or_default().push(event);
        match event.kind.as_str() {
            "run.started" => {
                let previous = active.insert(session, run);
                assert_eq!(previous, None, "{run} starts while another run is active");
            }
            "run.finished" if active.get(session) == Some(&run) => {
                active.remove(session);
            }
            _ => {}
        }
    }
    for (run, events) in runs {
        check_run(run, &events);
    }
}

/// Checks that seqs grow strictly.
#[track_caller]
pub fn check_order(events: &[TestEvent]) {
    for pair in events.windows(2) {
        assert!(pair[0].seq < pair[1].seq, "seq {} follows {}", pair[1].seq, pair[0].seq);
    }
}

/// How a run ended, from its single `run.finished` among `events`.
#[track_caller]
pub fn finish_reason(events: &[TestEvent], run: &str) -> String {
    let finished: Vec<_> = events.iter().filter(|event| event.is_of_run(run, "run.finished")).collect();
    let [finished] = finished[..] else {
        panic!("{run} has {} run.finished events: {}", finished.len(), summarize_events(events))
    };
    finished.data["finish_reason"].as_str().expect("an end has a reason").to_owned()
}

/// A run's text deltas, concatenated.
pub fn run_text(events: &[TestEvent], run: &str) -> String {
    let pieces = events.iter().filter(|event| event.is_of_run(run, "text.delta"));
    pieces.map(|event| event.data["text"].as_str().unwrap_or_default()).collect()
}

/// Finds the positions of events among those of one run.
struct RunEventChecker<'a> {
    run: &'a str,
    events: &'a [&'a TestEvent],
}

impl RunEventChecker<'_> {
    fn fail(&self, why: &str) -> ! {
        let events: Vec<_> = self.events.iter().map(|&event| event.clone()).collect();
        panic!("{}: {why}: {}", self.run, summarize_events(&events))
    }

    fn positions(&self, wanted: impl Fn(&TestEvent) -> bool) -> Vec<usize> {
        (0..self.events.len()).filter(|&at| wanted(self.events[at])).collect()
    }

    fn only_position(&self, what: &str, wanted: impl Fn(&TestEvent) -> bool) -> usize {
        match self.positions(wanted)[..] {
            [at] => at,
            ref many => self.fail(&format!("{what} occurs {} times instead of once", many.len())),
        }
    }

    fn expect_before(&self, what: &str, earlier: usize, later: usize) {
        if earlier >= later {
            self.fail(&format!("out of order: {what}"));
        }
    }
}

#[track_caller]
fn check_run(run: &str, events: &[&TestEvent]) {
    let checker = RunEventChecker { run, events };
    let kind = |wanted: &'static str| move |event: &TestEvent| event.kind == wanted;
    let message = |role: &'static str| {
        move |event: &TestEvent| event.kind == "message.created" && event.data["role"] == role
    };
    let accepted = checker.only_position("run.accepted", kind("run.accepted"));
    let user = checker.only_position("the user's message.created", message("user"));
    let assistant = checker.only_position("the assistant's message.created", message("assistant"));
    let closed = checker.only_position("message.finished", kind("message.finished"));
    let finished = checker.only_position("run.finished", kind("run.finished"));
    let started = checker.positions(kind("run.started"));
    if accepted != 0 {
        checker.fail("run.accepted is not the first event");
    }
    if finished != events.len() - 1 {
        checker.fail("an event follows run.finished");
    }
    checker.expect_before("the user's message after run.accepted", accepted, user);
    checker.expect_before("message.finished before run.finished", closed, finished);
    match started[..] {
        [] if assistant + 1 != closed => {
            checker.fail("the assistant's message is not directly before its end")
        }
        [] => {}
        [started] => {
            checker.expect_before("run.started after the user's message", user, started);
            if assistant.abs_diff(started) != 1 {
                checker.fail("the assistant's message is not next to run.started");
            }
        }
        _ => checker.fail("it is started more than once"),
    }
    let id = &events[assistant].data["message_id"];
    for event in events {
        let answer_kinds = ["text.delta", "thought.delta", "tool.started", "tool.output", "tool.finished"];
        if answer_kinds.contains(&event.kind.as_str()) && &event.data["message_id"] != id {
            checker.fail("a part of the answer has another message's id");
        }
        if answer_kinds.contains(&event.kind.as_str()) && started.is_empty() {
            checker.fail("it has output without run.started");
        }
    }
    if &events[closed].data["message_id"] != id || events[closed].data["role"] != "assistant" {
        checker.fail("message.finished is not the assistant's");
    }
    if events[closed].data["finish"]["reason"] != events[finished].data["finish_reason"] {
        checker.fail("the message and the run end for different reasons");
    }
    check_asks(&checker);
}

/// An ask is opened at most once and then resolved exactly once. A person can only answer an ask that was opened. An
/// ask that a policy decides is never opened. One that comes while its run is being stopped is opened and withdrawn at
/// once.
fn check_asks(checker: &RunEventChecker<'_>) {
    let mut asks: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for event in checker.events.iter().filter(|event| event.kind.starts_with("ask.")) {
        let id = event.data["ask_id"].as_str().unwrap_or_else(|| checker.fail("an ask without an id"));
        let what = match event.kind.as_str() {
            "ask.resolved" => {
                event.data["by"].as_str().unwrap_or_else(|| checker.fail("an ask is resolved without `by`"))
            }
            kind => kind,
        };
        asks.entry(id).or_default().push(what);
    }
    for steps in asks.values() {
        let (opened, rest) = match steps[..] {
            ["ask.opened", ref rest @ ..] => (true, rest),
            ref rest => (false, rest),
        };
        let valid = match rest {
            ["user"] | ["user", "ask.delivered"] => opened,
            ["policy"] | ["policy", "ask.delivered"] => !opened,
            ["cancel" | "agent" | "end"] => true,
            _ => false,
        };
        if !valid {
            checker.fail(&format!("invalid order of ask events: {steps:?}"));
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn events(list: &[(&str, Value)]) -> Vec<TestEvent> {
        let event = |(at, (kind, data)): (usize, &(&str, Value))| TestEvent {
            seq: at as u64 + 1,
            ts: String::new(),
            workspace_id: Some("ws_1".into()),
            session_id: Some("ses_1".into()),
            run_id: Some("run_1".into()),
            kind: (*kind).into(),
            data: data.clone(),
        };
        list.iter().enumerate().map(event).collect()
    }

    fn complete_run() -> Vec<(&'static str, Value)> {
        vec![
            ("run.accepted", json!({})),
            ("message.created", json!({"role": "user", "message_id": "u"})),
            ("run.started", json!({})),
            ("message.created", json!({"role": "assistant", "message_id": "a"})),
            ("text.delta", json!({"message_id": "a", "text": "hi"})),
            (
                "message.finished",
                json!({"message_id": "a", "role": "assistant", "finish": {"reason": "end_turn"}}),
            ),
            ("run.finished", json!({"finish_reason": "end_turn"})),
        ]
    }

    #[test]
    fn a_whole_run_passes() {
        check(&events(&complete_run()));
        assert_eq!(finish_reason(&events(&complete_run()), "run_1"), "end_turn");
        assert_eq!(run_text(&events(&complete_run()), "run_1"), "hi");
    }

    #[test]
    fn a_run_with_anything_missing_doubled_or_misplaced_does_not() {
        let fails = |list: &[(&'static str, Value)]| {
            let events = events(list);
            std::panic::catch_unwind(|| check(&events)).is_err()
        };
        for at in 0..complete_run().len() {
            let doubled = [&complete_run()[..=at], &complete_run()[at..]].concat();
            assert_eq!(
                fails(&doubled),
                complete_run()[at].0 != "text.delta",
                "doubled {}",
                complete_run()[at].0
            );
            let mut without = complete_run();
            let (kind, _) = without.remove(at);
            assert_eq!(fails(&without), kind != "text.delta", "without {kind}");
        }
        for at in 1..complete_run().len() {
            let mut swapped = complete_run();
            swapped.swap(at - 1, at);
            let harmless =
                swapped[at].0 == "run.started" && swapped[at - 1].0 == "message.created" && at == 3;
            let delta = swapped[at].0 == "text.delta";
            assert_eq!(fails(&swapped), !harmless && !delta, "swapped at {at}");
        }
    }
}
