//! Random fleets under random ends, with crashes and repeats in between.

use std::collections::BTreeMap;

use proptest::prelude::*;
use qd_protocol::RunId;
use qd_protocol::event::{EventBody, FinishReason};
use qd_protocol::fleet::{
    FanOutSplit, FleetRoute, FleetSpec, FleetStatus, RouteAction, RouteTrigger, TriggerOutcome,
};

use crate::fleet_harness::{FleetHarness, spec};

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

/// Every route has a `max`, so that whatever circles there are come to an end.
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

/// What happens next: which open run, how it ends, what it says, and whether the daemon dies after it.
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

/// Lives through it to the end.
fn live(declared: FleetSpec, happenings: &[RandomRunEnd], crashes: bool) -> FleetHarness {
    let mut crew = FleetHarness::start(declared);
    let mut next = happenings.iter().cycle();
    for _ in 0..STEPS {
        let Some((pick, how, what, crash)) = next.next() else { break };
        let open = crew.open();
        if open.is_empty() && crew.state.asks.is_empty() {
            break;
        }
        if crew.state.asks.is_empty() || (!open.is_empty() && how % 3 != 0) {
            let (_, run) = pick.get(&open).clone();
            crew.end_run(&run, reason(*how), text(*what));
            if crashes && *crash {
                crew.crash();
                crew.end_run(&run, reason(*how), text(*what));
            }
        } else {
            crew.answer("so be it");
        }
    }
    crew
}

/// How often each route fired, and how often everything that it waits for can have happened by then.
pub(crate) fn check_routes(crew: &FleetHarness) -> Result<(), TestCaseError> {
    let mut ends: BTreeMap<RouteTrigger, u32> = BTreeMap::new();
    let mut fired: BTreeMap<u32, u32> = BTreeMap::new();
    let mut consumed: BTreeMap<(u32, RunId), u32> = BTreeMap::new();
    for body in &crew.events {
        let EventBody::FleetRouted(routed) = body else { continue };
        let count = fired.entry(routed.route).or_default();
        *count += 1;
        prop_assert_eq!(*count, routed.round, "rounds are counted");
        let route = &crew.state.spec.routes[routed.route as usize];
        prop_assert!(*count <= route.max.unwrap_or(u32::MAX), "no more than its max");
        prop_assert!(!routed.from.is_empty(), "nothing follows on nothing");
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
        for given in &routed.to {
            for run in &given.runs {
                prop_assert!(crew.given.contains(run), "what is announced is given");
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
        happenings in prop::collection::vec(any::<RandomRunEnd>(), 1..40),
    ) {
        let crew = live(declared, &happenings, false);
        prop_assert!(crew.stands().is_final(), "{:?} with {:?}", crew.stands(), crew.open());
        prop_assert!(crew.open().is_empty() && crew.state.asks.is_empty());
        let finished = crew.events.iter().filter(|body| matches!(body, EventBody::FleetFinished(_))).count();
        prop_assert_eq!(finished, 1);
        prop_assert!(matches!(crew.events.last(), Some(EventBody::FleetFinished(_))), "and nothing after it");
        let failed = crew.state.last_outcomes.values().any(|last| last.ending == TriggerOutcome::Failed && !last.routed);
        prop_assert_eq!(crew.stands() == FleetStatus::Failed, failed || !crew.state.problems.is_empty());
        check_routes(&crew)?;
    }

    #[test]
    fn crashes_and_repeats_change_nothing(
        declared in fleet(),
        happenings in prop::collection::vec(any::<RandomRunEnd>(), 1..40),
    ) {
        let calm = live(declared.clone(), &happenings, false);
        let rough = live(declared, &happenings, true);
        prop_assert_eq!(calm.given, rough.given);
        prop_assert_eq!(calm.state.last_outcomes, rough.state.last_outcomes);
        prop_assert_eq!(calm.state.finished, rough.state.finished);
    }

    #[test]
    fn a_cancel_at_any_moment_ends_it_and_gives_nothing_more(
        declared in fleet(),
        happenings in prop::collection::vec(any::<RandomRunEnd>(), 1..20),
        after in 0_usize..10,
    ) {
        let mut crew = FleetHarness::start(declared);
        for (pick, how, what, _) in happenings.iter().take(after) {
            let open = crew.open();
            if open.is_empty() {
                break;
            }
            let (_, run) = pick.get(&open).clone();
            crew.end_run(&run, reason(*how), text(*what));
        }
        let was_over = crew.stands().is_final();
        crew.cancel();
        let given = crew.given.clone();
        for (name, _) in crew.open() {
            crew.end(&name, FinishReason::EndTurn, text(1));
        }
        prop_assert_eq!(&crew.given, &given);
        prop_assert!(crew.stands().is_final());
        prop_assert!(was_over || crew.stands() == FleetStatus::Cancelled);
    }
}
