//! Random fleets with random run ends, with crashes and repeats in between.

use std::collections::BTreeMap;

use proptest::prelude::*;
use qd_protocol::RunId;
use qd_protocol::event::{EventBody, FinishReason};
use qd_protocol::fleet::{
    FanOutSplit, FleetRoute, FleetSpec, FleetStatus, RouteAction, RouteTrigger, TriggerOutcome,
};

use crate::fleet::fleet_harness::{FleetHarness, spec};

const NAMES: [&str; 5] = ["a", "b", "c", "d", "e"];
/// More steps than any of these fleets can take.
const STEPS: usize = 4000;

fn trigger() -> impl Strategy<Value = RouteTrigger> {
    let on = prop_oneof![4 => Just(TriggerOutcome::Done), 1 => Just(TriggerOutcome::Failed), 1 => Just(TriggerOutcome::Cancelled)];
    (prop::sample::select(&NAMES[..]), on)
        .prop_map(|(name, on)| RouteTrigger { session: name.to_owned(), on })
}

fn action() -> impl Strategy<Value = RouteAction> {
    let targets = prop::sample::subsequence(&NAMES[..], 1..=3);
    let targets = targets.prop_map(|names| names.into_iter().map(str::to_owned).collect::<Vec<_>>());
    prop_oneof![
        3 => prop::sample::select(&NAMES[..]).prop_map(|name| RouteAction::RouteTo(name.to_owned())),
        2 => targets.clone().prop_map(|to| RouteAction::FanOut { to, split: FanOutSplit::Broadcast }),
        2 => targets.prop_map(|to| RouteAction::FanOut { to, split: FanOutSplit::BySubtask }),
        1 => Just(RouteAction::CollectHuman),
    ]
}

/// Every route has a `max`, so that all cycles end.
fn route() -> impl Strategy<Value = FleetRoute> {
    let when = prop::collection::btree_set(trigger(), 1..=3);
    (when, prop::bool::weighted(0.3), action(), 1_u32..=2).prop_map(|(when, has_pattern, then, max)| {
        let mut when: Vec<RouteTrigger> = when.into_iter().collect();
        if matches!(then, RouteAction::FanOut { split: FanOutSplit::BySubtask, .. }) {
            when.truncate(1);
        }
        FleetRoute {
            when,
            pattern: has_pattern.then(|| "again".to_owned()),
            then,
            max: Some(max),
            prompt: None,
        }
    })
}

pub(crate) fn fleet() -> impl Strategy<Value = FleetSpec> {
    let start = prop::sample::subsequence(&NAMES[..], 1..=3);
    (start, prop::collection::vec(route(), 0..=6), 0_u32..=1).prop_map(|(start, routes, retry)| {
        let mut declared = spec(&NAMES, &start, &[]);
        declared.routes = routes;
        if let Some(member) = declared.sessions.get_mut("a") {
            member.retry = retry;
        }
        declared
    })
}

/// What happens next: which open run ends, how, with which text, and whether the daemon dies after it.
type RandomRunEnd = (prop::sample::Index, u8, u8, bool);

fn reason(which: u8) -> FinishReason {
    match which % 6 {
        0 => FinishReason::Error,
        1 => FinishReason::Cancelled,
        _ => FinishReason::EndTurn,
    }
}

pub(crate) fn text(which: u8) -> &'static str {
    match which % 4 {
        0 => "again, please",
        1 => "```cap-subtasks\n[\"x\", \"y\"]\n```",
        2 => "```cap-subtasks\n[\"again\"]\n```",
        _ => "fine",
    }
}

/// Runs a fleet to its end.
fn run_fleet(declared: FleetSpec, run_ends: &[RandomRunEnd], crashes: bool) -> FleetHarness {
    let mut fleet = FleetHarness::start(declared);
    let mut next = run_ends.iter().cycle();
    for _ in 0..STEPS {
        let Some((pick, how, what, crash)) = next.next() else { break };
        let open = fleet.open_runs();
        if open.is_empty() && fleet.state.asks.is_empty() {
            break;
        }
        if fleet.state.asks.is_empty() || (!open.is_empty() && how % 3 != 0) {
            let (_, run) = pick.get(&open).clone();
            fleet.end_run(&run, reason(*how), text(*what));
            if crashes && *crash {
                fleet.crash();
                fleet.end_run(&run, reason(*how), text(*what));
            }
        } else {
            fleet.answer("so be it");
        }
    }
    fleet
}

/// Checks that every route fired at most `max` times, once for each set of ends, and that its runs were assigned.
pub(crate) fn check_routes(fleet: &FleetHarness) -> Result<(), TestCaseError> {
    let mut ends: BTreeMap<RouteTrigger, u32> = BTreeMap::new();
    let mut fired: BTreeMap<u32, u32> = BTreeMap::new();
    let mut consumed: BTreeMap<(u32, RunId), u32> = BTreeMap::new();
    for body in &fleet.events {
        let EventBody::FleetRouted(routed) = body else { continue };
        let count = fired.entry(routed.route).or_default();
        *count += 1;
        prop_assert_eq!(*count, routed.round, "rounds are counted");
        let route = &fleet.state.spec.routes[routed.route as usize];
        prop_assert!(*count <= route.max.unwrap_or(u32::MAX), "no more than its max");
        prop_assert!(!routed.from.is_empty(), "a route needs a source");
        for source in &routed.from {
            for run in &source.runs {
                let uses = consumed.entry((routed.route, run.clone())).or_default();
                *uses += 1;
                prop_assert_eq!(*uses, 1, "a join fires once for one set");
            }
        }
        for trigger in &route.when {
            *ends.entry(trigger.clone()).or_default() += 0;
        }
        for assigned in &routed.to {
            for run in &assigned.runs {
                prop_assert!(fleet.assigned.contains(run), "announced runs are assigned");
            }
        }
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 600, ..ProptestConfig::default() })]

    #[test]
    fn a_fleet_ends_with_nothing_open_and_keeps_its_rules(
        declared in fleet(),
        run_ends in prop::collection::vec(any::<RandomRunEnd>(), 1..40),
    ) {
        let fleet = run_fleet(declared, &run_ends, false);
        prop_assert!(fleet.status().is_final(), "{:?} with {:?}", fleet.status(), fleet.open_runs());
        prop_assert!(fleet.open_runs().is_empty() && fleet.state.asks.is_empty());
        let finished = fleet.events.iter().filter(|body| matches!(body, EventBody::FleetFinished(_))).count();
        prop_assert_eq!(finished, 1);
        prop_assert!(matches!(fleet.events.last(), Some(EventBody::FleetFinished(_))), "and nothing after it");
        let failed = fleet.state.last_outcomes.values().any(|last| last.ending == TriggerOutcome::Failed && !last.routed);
        prop_assert_eq!(fleet.status() == FleetStatus::Failed, failed || !fleet.state.problems.is_empty());
        check_routes(&fleet)?;
    }

    #[test]
    fn crashes_and_repeats_change_nothing(
        declared in fleet(),
        run_ends in prop::collection::vec(any::<RandomRunEnd>(), 1..40),
    ) {
        let calm = run_fleet(declared.clone(), &run_ends, false);
        let rough = run_fleet(declared, &run_ends, true);
        prop_assert_eq!(calm.assigned, rough.assigned);
        prop_assert_eq!(calm.state.last_outcomes, rough.state.last_outcomes);
        prop_assert_eq!(calm.state.finished, rough.state.finished);
    }

    #[test]
    fn a_cancel_at_any_moment_ends_it_and_gives_nothing_more(
        declared in fleet(),
        run_ends in prop::collection::vec(any::<RandomRunEnd>(), 1..20),
        after in 0_usize..10,
    ) {
        let mut fleet = FleetHarness::start(declared);
        for (pick, how, what, _) in run_ends.iter().take(after) {
            let open = fleet.open_runs();
            if open.is_empty() {
                break;
            }
            let (_, run) = pick.get(&open).clone();
            fleet.end_run(&run, reason(*how), text(*what));
        }
        let was_over = fleet.status().is_final();
        fleet.cancel();
        let assigned = fleet.assigned.clone();
        for (name, _) in fleet.open_runs() {
            fleet.end(&name, FinishReason::EndTurn, text(1));
        }
        prop_assert_eq!(&fleet.assigned, &assigned);
        prop_assert!(fleet.status().is_final());
        prop_assert!(was_over || fleet.status() == FleetStatus::Cancelled);
    }
}
