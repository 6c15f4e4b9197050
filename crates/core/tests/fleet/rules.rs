//! The rules, one by one.

use qd_core::fleet::{FleetEffect, FleetInput, FleetReply};
use qd_protocol::event::{AskStatus, EventBody, FinishReason, ResolvedBy};
use qd_protocol::fleet::FleetStatus;

use crate::fleet_harness::{FleetHarness, spec};

const BLOCK: &str = "Here:\n```cap-subtasks\n[\"one\", \"two\", \"three\"]\n```\n";

#[test]
fn those_that_begin_get_the_task_and_nothing_else() {
    let crew = FleetHarness::start(spec(&["a", "b", "c"], &["a", "b"], &["a.done -> c"]));
    assert_eq!(crew.working(), ["a", "b"]);
    assert_eq!(crew.told("a"), "the task");
    assert_eq!(crew.stands(), FleetStatus::Running);
}

#[test]
fn a_pipeline_passes_the_last_message_on_with_the_task() {
    let mut crew = FleetHarness::start(spec(&["a", "b"], &["a"], &["a.done -> b"]));
    let decided = crew.end("a", FinishReason::EndTurn, "the plan");
    assert_eq!(decided.effects, [FleetEffect::DispatchRuns]);
    assert_eq!(crew.working(), ["b"]);
    assert_eq!(crew.told("b"), "the task\n\n--- from a ---\nthe plan");
    crew.says("b", "built");
    assert_eq!(crew.stands(), FleetStatus::Done);
    assert_eq!(crew.state.result.as_deref(), Some("built"));
}

#[test]
fn a_join_waits_for_all_and_counts_only_what_came_since_it_fired() {
    let routes = ["a.done => b, c", "b.done + c.done -> d", "d.done -> a max 1"];
    let mut crew = FleetHarness::start(spec(&["a", "b", "c", "d"], &["a"], &routes));
    crew.done("a");
    assert_eq!(crew.working(), ["b", "c"]);
    crew.done("c");
    assert_eq!(crew.working(), ["b"]);
    crew.says("b", "from b");
    assert_eq!(crew.working(), ["d"]);
    assert_eq!(crew.told("d"), "the task\n\n--- from b ---\nfrom b\n\n--- from c ---\nc says");
    crew.done("d").done("a").done("b");
    assert_eq!(crew.working(), ["c"], "the second round waits for both again");
    crew.done("c").done("d");
    assert_eq!(crew.stands(), FleetStatus::Done);
}

#[test]
fn a_failure_that_nobody_follows_is_the_fleets() {
    let mut crew = FleetHarness::start(spec(&["a", "b"], &["a"], &["a.done -> b"]));
    crew.fails("a");
    assert_eq!(crew.stands(), FleetStatus::Failed);
    assert_eq!(crew.state.result.as_deref(), Some("it broke"));

    let mut crew = FleetHarness::start(spec(&["a", "b"], &["a"], &["a.failed -> b"]));
    crew.fails("a");
    assert_eq!(crew.told("b"), "the task\n\n--- from a ---\nit broke");
    crew.done("b");
    assert_eq!(crew.stands(), FleetStatus::Done);
}

#[test]
fn every_end_but_a_good_one_and_a_cancel_is_a_failure() {
    for reason in [
        FinishReason::Error,
        FinishReason::MaxTokens,
        FinishReason::MaxTurns,
        FinishReason::BudgetExceeded,
        FinishReason::Timeout,
        FinishReason::Refused,
        FinishReason::Interrupted,
    ] {
        let mut crew =
            FleetHarness::start(spec(&["a", "b"], &["a"], &["a.failed -> b", "a.done -> a max 1"]));
        crew.end("a", reason, "");
        assert_eq!(crew.working(), ["b"], "{reason:?}");
    }
}

#[test]
fn a_cancelled_run_is_followed_as_such_or_ends_the_fleet_so() {
    let mut crew = FleetHarness::start(spec(&["a", "b"], &["a"], &["a.cancelled -> b"]));
    crew.cancelled("a").done("b");
    assert_eq!(crew.stands(), FleetStatus::Done);
    let mut crew = FleetHarness::start(spec(&["a", "b"], &["a"], &["a.done -> b"]));
    crew.cancelled("a");
    assert_eq!(crew.stands(), FleetStatus::Cancelled);
}

#[test]
fn a_matching_pattern_goes_first_and_past_its_max_it_is_not_there() {
    let routes = ["r.done ?", "r.done ~ (?i)needs work -> l max 2", "l.done -> r"];
    let mut crew = FleetHarness::start(spec(&["l", "r"], &["l"], &routes));
    for _ in 0..2 {
        crew.done("l").says("r", "Needs WORK");
        assert_eq!(crew.working(), ["l"]);
        assert!(crew.state.asks.is_empty());
    }
    crew.done("l").says("r", "still needs work");
    assert!(crew.working().is_empty());
    assert_eq!(crew.state.asks.len(), 1, "what has no pattern takes its place");
    assert_eq!(crew.stands(), FleetStatus::Waiting);
}

#[test]
fn a_pattern_on_other_triggers_keeps_nobody_back() {
    let routes = ["a.done ~ x -> b", "a.done -> c", "a.done + d.done -> e"];
    let mut crew = FleetHarness::start(spec(&["a", "b", "c", "d", "e"], &["a", "d"], &routes));
    crew.says("a", "x").done("d");
    assert_eq!(crew.working(), ["b", "e"]);
}

#[test]
fn subtasks_are_dealt_round_and_round_and_a_session_is_done_when_all_of_its_own_are() {
    let routes = ["l.done / a, b", "a.done + b.done -> r"];
    let mut crew = FleetHarness::start(spec(&["l", "a", "b", "r"], &["l"], &routes));
    crew.says("l", BLOCK);
    assert_eq!(crew.working(), ["a", "a", "b"]);
    assert_eq!(crew.told("a"), "one");
    assert_eq!(crew.told("b"), "two");
    crew.says("a", "1").says("b", "2");
    assert_eq!(crew.working(), ["a"]);
    assert_eq!(crew.told("a"), "three");
    crew.says("a", "3");
    assert_eq!(crew.told("r"), "the task\n\n--- from a ---\n1\n\n3\n\n--- from b ---\n2");
}

#[test]
fn a_session_that_was_dealt_nothing_holds_up_no_join() {
    let routes = ["l.done / a, b, c, d", "a.done + b.done + d.done -> r", "c.done + d.done -> s"];
    let mut crew = FleetHarness::start(spec(&["l", "a", "b", "c", "d", "r", "s"], &["l"], &routes));
    crew.says("l", BLOCK).done("a").done("b");
    assert_eq!(crew.working(), ["c", "r"]);
    crew.done("c");
    assert_eq!(crew.working(), ["r", "s"]);
    crew.done("r").done("s");
    assert_eq!(crew.stands(), FleetStatus::Done);
}

#[test]
fn a_missing_or_bad_block_fails_its_route() {
    for text in ["nothing", "```cap-subtasks\n[1]\n```", "```cap-subtasks\n[]\n```"] {
        let mut crew = FleetHarness::start(spec(&["l", "a"], &["l"], &["l.done / a"]));
        crew.says("l", text);
        assert_eq!(crew.stands(), FleetStatus::Failed, "{text}");
        assert!(crew.state.problems[0].starts_with("route 1: l: "), "{:?}", crew.state.problems);
    }
}

#[test]
fn one_that_fails_among_subtasks_makes_its_session_fail() {
    let routes = ["l.done / a", "a.done -> x", "a.failed -> y"];
    let mut crew = FleetHarness::start(spec(&["l", "a", "x", "y"], &["l"], &routes));
    crew.says("l", BLOCK).done("a").fails("a");
    assert_eq!(crew.working(), ["a"]);
    crew.done("a");
    assert_eq!(crew.working(), ["y"]);
}

#[test]
fn a_failed_run_is_given_again_as_often_as_the_file_says() {
    let mut declared = spec(&["a", "b"], &["a"], &["a.failed -> b"]);
    declared.sessions.get_mut("a").unwrap().retry = 2;
    let mut crew = FleetHarness::start(declared.clone());
    crew.fails("a").fails("a");
    assert_eq!(crew.working(), ["a"]);
    assert_eq!(crew.given.len(), 3, "each attempt is a run of its own");
    crew.fails("a");
    assert_eq!(crew.working(), ["b"]);

    let mut crew = FleetHarness::start(declared.clone());
    crew.cancelled("a");
    assert_eq!(crew.stands(), FleetStatus::Cancelled, "what was cancelled is not tried again");
    let mut crew = FleetHarness::start(declared);
    crew.end("a", FinishReason::BudgetExceeded, "");
    assert_eq!(crew.working(), ["b"], "nor is what has no money");
}

#[test]
fn a_person_is_shown_the_results_and_the_answer_is_the_fleets() {
    let mut crew = FleetHarness::start(spec(&["a", "b"], &["a", "b"], &["a.done + b.done ?"]));
    crew.says("b", "B!").says("a", "A!");
    let ask = crew.state.asks.values().next().unwrap().clone();
    assert_eq!((ask.session_id, ask.run_id), (None, None));
    assert_eq!(ask.fleet_id.as_ref(), Some(&crew.state.id));
    assert_eq!(ask.input["results"]["a"], "A!");
    assert_eq!(ask.input["results"]["b"], "B!");
    assert!(ask.prompt.contains("A!") && ask.prompt.contains("B!"));
    assert!(matches!(crew.answer("take b"), Some(FleetReply::Answered(_))));
    assert_eq!(crew.stands(), FleetStatus::Done);
    assert_eq!(crew.state.result.as_deref(), Some("take b"));
}

#[test]
fn a_cancel_stops_what_runs_follows_nothing_and_withdraws_questions() {
    let mut crew = FleetHarness::start(spec(
        &["a", "b", "c"],
        &["a", "b"],
        &["a.done ?", "b.done -> c", "b.cancelled -> c"],
    ));
    crew.done("a");
    assert_eq!(crew.cancel().len(), 1);
    assert!(crew.state.asks.is_empty());
    let withdrawn = crew.events.iter().any(|body| {
        matches!(body, EventBody::AskResolved(resolved)
            if resolved.by == ResolvedBy::Cancel && resolved.ask.state == AskStatus::Withdrawn)
    });
    assert!(withdrawn);
    assert_eq!(crew.stands(), FleetStatus::Running, "until it has stopped");
    assert_eq!(crew.crash().effects, [FleetEffect::CancelRuns], "also by another daemon");
    crew.end("b", FinishReason::Cancelled, "");
    assert_eq!(crew.stands(), FleetStatus::Cancelled);
    assert_eq!(crew.cancel(), []);
}

#[test]
fn a_fleet_over_its_time_is_stopped_and_has_failed() {
    let mut declared = spec(&["a"], &["a"], &[]);
    declared.timeout_s = Some(2.0);
    let mut crew = FleetHarness::start(declared);
    assert!(crew.at(1999).step(FleetInput::Tick).events.is_empty());
    assert_eq!(crew.at(2000).step(FleetInput::Tick).effects, [FleetEffect::CancelRuns]);
    crew.cancelled("a");
    assert_eq!(crew.stands(), FleetStatus::Failed);
}

#[test]
fn after_a_crash_everything_open_is_given_again_and_nothing_else() {
    let mut crew = FleetHarness::start(spec(&["a", "b", "c"], &["a"], &["a.done => b, c"]));
    crew.done("a");
    let (before, events) = (crew.open(), crew.events.len());
    assert_eq!(crew.crash().effects, [FleetEffect::DispatchRuns]);
    assert_eq!(crew.open(), before);
    assert_eq!(crew.events.len(), events);
}

#[test]
fn an_end_that_is_told_twice_counts_once() {
    let mut crew = FleetHarness::start(spec(&["a", "b"], &["a"], &["a.done -> b"]));
    let run = crew.open()[0].1.clone();
    crew.done("a");
    assert!(crew.end_run(&run, FinishReason::EndTurn, "again").events.is_empty());
    assert_eq!(crew.working(), ["b"]);
}

#[test]
fn a_template_says_what_a_session_is_told() {
    let mut declared = spec(&["a", "b", "c"], &["a"], &["a.done -> b", "b.done -> c"]);
    declared.routes[1].prompt = Some(
        "{{session}} ({{role}}), round {{round}}: {{task}} / {{from.a.text}} / {{from.text}}".to_owned(),
    );
    declared.sessions.get_mut("c").unwrap().role = Some("reviewer".to_owned());
    let mut crew = FleetHarness::start(declared);
    crew.says("a", "A").says("b", "B");
    assert_eq!(crew.told("c"), "c (reviewer), round 1: the task / A / --- from b ---\nB");
}
