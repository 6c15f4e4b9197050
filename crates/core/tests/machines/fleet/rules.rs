//! The rules, one by one.

use qd_core::fleet::{FleetCommand, FleetEffect, FleetInput, FleetReply};
use qd_protocol::event::{AskAnswer, AskStatus, EventActor, EventBody, FinishReason, ResolvedBy};
use qd_protocol::fleet::FleetStatus;

use crate::fleet::fleet_harness::{FleetHarness, command_input, spec};

const BLOCK: &str = "Here:\n```cap-subtasks\n[\"one\", \"two\", \"three\"]\n```\n";

#[test]
fn starting_sessions_get_the_task_and_nothing_else() {
    let fleet = FleetHarness::start(spec(&["a", "b", "c"], &["a", "b"], &["a.done -> c"]));
    assert_eq!(fleet.busy_sessions(), ["a", "b"]);
    assert_eq!(fleet.prompt_of("a"), "the task");
    assert_eq!(fleet.status(), FleetStatus::Running);
}

#[test]
fn a_pipeline_passes_the_last_message_on_with_the_task() {
    let mut fleet = FleetHarness::start(spec(&["a", "b"], &["a"], &["a.done -> b"]));
    let decided = fleet.end("a", FinishReason::EndTurn, "the plan");
    assert_eq!(decided.effects, [FleetEffect::DispatchRuns]);
    assert_eq!(fleet.busy_sessions(), ["b"]);
    assert_eq!(fleet.prompt_of("b"), "the task\n\n--- from a ---\nthe plan");
    fleet.done_with("b", "built");
    assert_eq!(fleet.status(), FleetStatus::Done);
    assert_eq!(fleet.state.result.as_deref(), Some("built"));
}

#[test]
fn a_join_waits_for_all_and_counts_only_ends_since_it_last_fired() {
    let routes = ["a.done => b, c", "b.done + c.done -> d", "d.done -> a max 1"];
    let mut fleet = FleetHarness::start(spec(&["a", "b", "c", "d"], &["a"], &routes));
    fleet.done("a");
    assert_eq!(fleet.busy_sessions(), ["b", "c"]);
    fleet.done("c");
    assert_eq!(fleet.busy_sessions(), ["b"]);
    fleet.done_with("b", "from b");
    assert_eq!(fleet.busy_sessions(), ["d"]);
    assert_eq!(fleet.prompt_of("d"), "the task\n\n--- from b ---\nfrom b\n\n--- from c ---\nc says");
    fleet.done("d").done("a").done("b");
    assert_eq!(fleet.busy_sessions(), ["c"], "the second round waits for both again");
    fleet.done("c").done("d");
    assert_eq!(fleet.status(), FleetStatus::Done);
}

#[test]
fn a_failure_that_no_route_follows_fails_the_fleet() {
    let mut fleet = FleetHarness::start(spec(&["a", "b"], &["a"], &["a.done -> b"]));
    fleet.fails("a");
    assert_eq!(fleet.status(), FleetStatus::Failed);
    assert_eq!(fleet.state.result.as_deref(), Some("it broke"));

    let mut fleet = FleetHarness::start(spec(&["a", "b"], &["a"], &["a.failed -> b"]));
    fleet.fails("a");
    assert_eq!(fleet.prompt_of("b"), "the task\n\n--- from a ---\nit broke");
    fleet.done("b");
    assert_eq!(fleet.status(), FleetStatus::Done);
}

#[test]
fn every_end_but_done_and_cancelled_is_a_failure() {
    for reason in [
        FinishReason::Error,
        FinishReason::MaxTokens,
        FinishReason::MaxTurns,
        FinishReason::BudgetExceeded,
        FinishReason::Timeout,
        FinishReason::Refused,
        FinishReason::Interrupted,
    ] {
        let mut fleet =
            FleetHarness::start(spec(&["a", "b"], &["a"], &["a.failed -> b", "a.done -> a max 1"]));
        fleet.end("a", reason, "");
        assert_eq!(fleet.busy_sessions(), ["b"], "{reason:?}");
    }
}

#[test]
fn a_cancelled_run_triggers_its_route_or_cancels_the_fleet() {
    let mut fleet = FleetHarness::start(spec(&["a", "b"], &["a"], &["a.cancelled -> b"]));
    fleet.cancelled("a").done("b");
    assert_eq!(fleet.status(), FleetStatus::Done);
    let mut fleet = FleetHarness::start(spec(&["a", "b"], &["a"], &["a.done -> b"]));
    fleet.cancelled("a");
    assert_eq!(fleet.status(), FleetStatus::Cancelled);
}

#[test]
fn a_matching_pattern_goes_first_until_its_max_is_reached() {
    let routes = ["r.done ?", "r.done ~ (?i)needs work -> l max 2", "l.done -> r"];
    let mut fleet = FleetHarness::start(spec(&["l", "r"], &["l"], &routes));
    for _ in 0..2 {
        fleet.done("l").done_with("r", "Needs WORK");
        assert_eq!(fleet.busy_sessions(), ["l"]);
        assert!(fleet.state.asks.is_empty());
    }
    fleet.done("l").done_with("r", "still needs work");
    assert!(fleet.busy_sessions().is_empty());
    assert_eq!(fleet.state.asks.len(), 1, "the route without a pattern fires instead");
    assert_eq!(fleet.status(), FleetStatus::Waiting);
}

#[test]
fn a_pattern_does_not_suppress_routes_on_other_triggers() {
    let routes = ["a.done ~ x -> b", "a.done -> c", "a.done + d.done -> e"];
    let mut fleet = FleetHarness::start(spec(&["a", "b", "c", "d", "e"], &["a", "d"], &routes));
    fleet.done_with("a", "x").done("d");
    assert_eq!(fleet.busy_sessions(), ["b", "e"]);
}

#[test]
fn subtasks_are_dealt_in_turn_and_a_session_is_done_when_all_of_its_own_are() {
    let routes = ["l.done / a, b", "a.done + b.done -> r"];
    let mut fleet = FleetHarness::start(spec(&["l", "a", "b", "r"], &["l"], &routes));
    fleet.done_with("l", BLOCK);
    assert_eq!(fleet.busy_sessions(), ["a", "a", "b"]);
    assert_eq!(fleet.prompt_of("a"), "one");
    assert_eq!(fleet.prompt_of("b"), "two");
    fleet.done_with("a", "1").done_with("b", "2");
    assert_eq!(fleet.busy_sessions(), ["a"]);
    assert_eq!(fleet.prompt_of("a"), "three");
    fleet.done_with("a", "3");
    assert_eq!(fleet.prompt_of("r"), "the task\n\n--- from a ---\n1\n\n3\n\n--- from b ---\n2");
}

#[test]
fn a_session_without_subtasks_does_not_block_a_join() {
    let routes = ["l.done / a, b, c, d", "a.done + b.done + d.done -> r", "c.done + d.done -> s"];
    let mut fleet = FleetHarness::start(spec(&["l", "a", "b", "c", "d", "r", "s"], &["l"], &routes));
    fleet.done_with("l", BLOCK).done("a").done("b");
    assert_eq!(fleet.busy_sessions(), ["c", "r"]);
    fleet.done("c");
    assert_eq!(fleet.busy_sessions(), ["r", "s"]);
    fleet.done("r").done("s");
    assert_eq!(fleet.status(), FleetStatus::Done);
}

#[test]
fn a_missing_or_bad_block_fails_its_route() {
    for text in ["nothing", "```cap-subtasks\n[1]\n```", "```cap-subtasks\n[]\n```"] {
        let mut fleet = FleetHarness::start(spec(&["l", "a"], &["l"], &["l.done / a"]));
        fleet.done_with("l", text);
        assert_eq!(fleet.status(), FleetStatus::Failed, "{text}");
        assert!(fleet.state.problems[0].starts_with("route 1: l: "), "{:?}", fleet.state.problems);
    }
}

#[test]
fn one_failed_subtask_makes_its_session_fail() {
    let routes = ["l.done / a", "a.done -> x", "a.failed -> y"];
    let mut fleet = FleetHarness::start(spec(&["l", "a", "x", "y"], &["l"], &routes));
    fleet.done_with("l", BLOCK).done("a").fails("a");
    assert_eq!(fleet.busy_sessions(), ["a"]);
    fleet.done("a");
    assert_eq!(fleet.busy_sessions(), ["y"]);
}

#[test]
fn a_failed_run_is_retried_as_often_as_the_file_says() {
    let mut declared = spec(&["a", "b"], &["a"], &["a.failed -> b"]);
    declared.sessions.get_mut("a").unwrap().retry = 2;
    let mut fleet = FleetHarness::start(declared.clone());
    fleet.fails("a").fails("a");
    assert_eq!(fleet.busy_sessions(), ["a"]);
    assert_eq!(fleet.assigned.len(), 3, "each attempt is a run of its own");
    fleet.fails("a");
    assert_eq!(fleet.busy_sessions(), ["b"]);

    let mut fleet = FleetHarness::start(declared.clone());
    fleet.cancelled("a");
    assert_eq!(fleet.status(), FleetStatus::Cancelled, "a cancelled run is not retried");
    let mut fleet = FleetHarness::start(declared);
    fleet.end("a", FinishReason::BudgetExceeded, "");
    assert_eq!(fleet.busy_sessions(), ["b"], "nor is a run without budget");
}

#[test]
fn a_person_is_shown_the_results_and_the_answer_is_the_result() {
    let mut fleet = FleetHarness::start(spec(&["a", "b"], &["a", "b"], &["a.done + b.done ?"]));
    fleet.done_with("b", "B!").done_with("a", "A!");
    let ask = fleet.state.asks.values().next().unwrap().clone();
    assert_eq!((ask.session_id, ask.run_id), (None, None));
    assert_eq!(ask.fleet_id.as_ref(), Some(&fleet.state.id));
    assert_eq!(ask.input["results"]["a"], "A!");
    assert_eq!(ask.input["results"]["b"], "B!");
    assert!(ask.prompt.contains("A!") && ask.prompt.contains("B!"));
    assert!(matches!(fleet.answer("take b"), Some(FleetReply::Answered(_))));
    assert_eq!(fleet.status(), FleetStatus::Done);
    assert_eq!(fleet.state.result.as_deref(), Some("take b"));
}

#[test]
fn an_answer_to_other_results_than_those_of_the_question_changes_nothing() {
    let mut fleet = FleetHarness::start(spec(&["a"], &["a"], &["a.done ?"]));
    fleet.done_with("a", "A!");
    let ask = fleet.state.asks.values().next().unwrap().clone();
    let before = fleet.state.clone();
    let mut answer = |shown: &str| {
        let answer = AskAnswer { value: Some("take a".to_owned()), ..AskAnswer::default() };
        let (ask, shown_sha256) = (ask.id.clone(), Some(shown.to_owned()));
        let step = fleet.step(command_input(FleetCommand::Answer { ask, answer, shown_sha256 }));
        (step, fleet.state.clone())
    };
    let (refused, after) = answer("of other results");
    assert_eq!(refused.reply, Some(FleetReply::AskChanged));
    assert!(refused.events.is_empty() && refused.effects.is_empty());
    assert_eq!(after, before);
    let (accepted, after) = answer(&ask.input_sha256.unwrap());
    assert!(matches!(accepted.reply, Some(FleetReply::Answered(_))));
    assert_eq!(after.result.as_deref(), Some("take a"));
}

#[test]
fn a_cancel_stops_runs_fires_no_route_and_withdraws_questions() {
    let mut fleet = FleetHarness::start(spec(
        &["a", "b", "c"],
        &["a", "b"],
        &["a.done ?", "b.done -> c", "b.cancelled -> c"],
    ));
    fleet.done("a");
    assert_eq!(fleet.cancel().len(), 1);
    assert!(fleet.state.asks.is_empty());
    let withdrawn = fleet.events.iter().any(|body| {
        matches!(body, EventBody::AskResolved(resolved)
            if resolved.by == ResolvedBy::Cancel && resolved.ask.state == AskStatus::Withdrawn)
    });
    assert!(withdrawn);
    assert_eq!(fleet.status(), FleetStatus::Running, "until it has stopped");
    assert_eq!(fleet.crash().effects, [FleetEffect::CancelRuns], "also after a restart");
    fleet.end("b", FinishReason::Cancelled, "");
    assert_eq!(fleet.status(), FleetStatus::Cancelled);
    assert_eq!(fleet.cancel(), []);
}

#[test]
fn a_fleet_that_exceeds_its_timeout_is_stopped_and_has_failed() {
    let mut declared = spec(&["a"], &["a"], &[]);
    declared.timeout_s = Some(2.0);
    let mut fleet = FleetHarness::start(declared);
    assert!(fleet.at(1999).step(FleetInput::Tick).events.is_empty());
    let step = fleet.at(2000).step(FleetInput::Tick);
    assert_eq!(step.effects, [FleetEffect::CancelRuns]);
    assert_eq!(step.events[0].actor.as_deref(), Some(&EventActor::DAEMON));
    fleet.cancelled("a");
    assert_eq!(fleet.status(), FleetStatus::Failed);
}

#[test]
fn after_a_crash_everything_open_is_assigned_again_and_nothing_else() {
    let mut fleet = FleetHarness::start(spec(&["a", "b", "c"], &["a"], &["a.done => b, c"]));
    fleet.done("a");
    let (before, events) = (fleet.open_runs(), fleet.events.len());
    assert_eq!(fleet.crash().effects, [FleetEffect::DispatchRuns]);
    assert_eq!(fleet.open_runs(), before);
    assert_eq!(fleet.events.len(), events);
}

#[test]
fn an_end_that_is_reported_twice_counts_once() {
    let mut fleet = FleetHarness::start(spec(&["a", "b"], &["a"], &["a.done -> b"]));
    let run = fleet.open_runs()[0].1.clone();
    fleet.done("a");
    assert!(fleet.end_run(&run, FinishReason::EndTurn, "again").events.is_empty());
    assert_eq!(fleet.busy_sessions(), ["b"]);
}

#[test]
fn a_template_composes_the_prompt() {
    let mut declared = spec(&["a", "b", "c"], &["a"], &["a.done -> b", "b.done -> c"]);
    declared.routes[1].prompt = Some(
        "{{session}} ({{role}}), round {{round}}: {{task}} / {{from.a.text}} / {{from.text}}".to_owned(),
    );
    declared.sessions.get_mut("c").unwrap().role = Some("reviewer".to_owned());
    let mut fleet = FleetHarness::start(declared);
    fleet.done_with("a", "A").done_with("b", "B");
    assert_eq!(fleet.prompt_of("c"), "c (reviewer), round 1: the task / A / --- from b ---\nB");
}
