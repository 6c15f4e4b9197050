//! How events change a fleet. A pure fold: what it needs to know is in the event or in the state.

use qd_protocol::event::{
    EventBody, FleetMentioned, FleetRouted, FleetRunEnded, FleetUpdated, RouteAssignment, SubtaskRef,
};
use qd_protocol::fleet::TriggerOutcome;

use super::state::{AssignedRun, AssignmentOutcome, FleetAssignment, FleetStop, RouteState, TriggerState};
use super::{FleetEvent, FleetState};

/// Applies one event.
pub fn evolve(state: &mut FleetState, event: &FleetEvent) {
    state.number = event.number;
    state.updated_at = event.ts;
    match &event.body {
        EventBody::FleetUpdated(FleetUpdated { ended, result, stops, .. }) => {
            if let Some(ended) = ended {
                apply_run_ended(state, ended);
            }
            if let Some(result) = result {
                state.result = Some(result.clone());
            }
            if let Some(by) = stops {
                state.stopping = Some(FleetStop { by: *by, at: event.ts });
            }
        }
        EventBody::FleetRouted(routed) => apply_routed(state, routed),
        EventBody::FleetMentioned(mentioned) => apply_mentioned(state, mentioned),
        EventBody::AskOpened(opened) => {
            state.asks.insert(opened.ask_id.clone(), opened.ask.clone());
        }
        EventBody::AskResolved(resolved) => {
            state.asks.remove(&resolved.ask_id);
            let answer = resolved.ask.answer.as_ref();
            if let Some(value) = answer.and_then(|answer| answer.value.as_ref()) {
                state.result = Some(value.clone());
            }
        }
        EventBody::FleetFinished(finished) => {
            state.finished = Some(finished.state);
            state.result.clone_from(&finished.result);
        }
        // Of no kind that a fleet has.
        _ => {}
    }
}

fn apply_run_ended(state: &mut FleetState, ended: &FleetRunEnded) {
    // Whatever was complete has been considered, when it became so: from here on it counts anew.
    for route in &mut state.routes {
        if route.is_complete() {
            route.triggers.fill(None);
        }
    }
    let at =
        state.assignments.iter().position(|errand| errand.runs.iter().any(|open| open.run == ended.run_id));
    let Some(at) = at else { return };
    if ended.delivered_as_steer {
        // It never was a run of its own, so nothing follows on its end; the run that took it in ends by itself.
        state.assignments.remove(at);
        return;
    }
    let Some(errand) = state.assignments.get_mut(at) else { return };
    if let Some(open) = errand.runs.iter_mut().find(|open| open.run == ended.run_id) {
        match &ended.retried_as {
            Some(next) => {
                open.run = next.clone();
                open.attempt += 1;
            }
            None => {
                open.ended = Some(ended.finish_reason.into());
                open.matches = ended.matches.iter().copied().collect();
                let failed = ended.no_subtasks.clone().map(Err);
                open.subtasks = ended.subtasks.map(Ok).or(failed);
            }
        }
    }
    if errand.runs.iter().all(|open| open.ended.is_some()) {
        let errand = state.assignments.remove(at);
        finish_assignment(state, &errand);
    }
}

/// How all of an errand ended: as badly as one of its runs.
fn combined_ending(runs: &[AssignedRun]) -> TriggerOutcome {
    let any = |ending| runs.iter().any(|open| open.ended == Some(ending));
    match () {
        () if any(TriggerOutcome::Failed) => TriggerOutcome::Failed,
        () if any(TriggerOutcome::Cancelled) => TriggerOutcome::Cancelled,
        () => TriggerOutcome::Done,
    }
}

fn finish_assignment(state: &mut FleetState, errand: &FleetAssignment) {
    let ending = combined_ending(&errand.runs);
    let runs: Vec<_> = errand.runs.iter().map(|open| open.run.clone()).collect();
    for (index, (route, seen)) in (0..).zip(state.spec.routes.iter().zip(&mut state.routes)) {
        for (trigger, slot) in route.when.iter().zip(&mut seen.triggers) {
            if trigger.session == errand.session && trigger.on == ending {
                *slot = Some(TriggerState::Ended {
                    runs: runs.clone(),
                    matches: errand.runs.iter().any(|open| open.matches.contains(&index)),
                    subtasks: errand.runs.iter().filter_map(|open| open.subtasks.clone()).collect(),
                });
            }
        }
    }
    state.last_outcomes.insert(errand.session.clone(), AssignmentOutcome { runs, ending, routed: false });
}

fn apply_routed(state: &mut FleetState, routed: &FleetRouted) {
    if let Some(seen) = state.routes.get_mut(routed.route as usize) {
        seen.fired = routed.round;
    }
    for source in &routed.from {
        if let Some(last) = state.last_outcomes.get_mut(&source.session)
            && last.runs == source.runs
        {
            last.routed = true;
        }
    }
    if let Some(error) = &routed.error {
        state.problems.push(error.clone());
    }
    for RouteAssignment { session, runs, subtasks } in &routed.to {
        if runs.is_empty() {
            excuse_session(state, session);
            continue;
        }
        let subtask = |at: usize| -> Option<SubtaskRef> { subtasks.get(at).cloned() };
        let open = runs.iter().enumerate().map(|(at, run)| AssignedRun::new(run.clone(), subtask(at)));
        state.assignments.push(FleetAssignment {
            session: session.clone(),
            route: Some(routed.route),
            round: routed.round,
            from: routed.from.iter().chain(&routed.quoted).cloned().collect(),
            runs: open.collect(),
            by_mention: false,
        });
        await_session_again(state, session);
    }
}

fn apply_mentioned(state: &mut FleetState, mentioned: &FleetMentioned) {
    let FleetMentioned { round, from, to, error, .. } = mentioned;
    state.problems.extend(error.clone().filter(|error| !state.problems.contains(error)));
    for RouteAssignment { session, runs, .. } in to {
        state.mention_count += 1;
        state.assignments.push(FleetAssignment {
            session: session.clone(),
            route: None,
            round: *round,
            from: vec![from.clone()],
            runs: runs.iter().map(|run| AssignedRun::new(run.clone(), None)).collect(),
            by_mention: true,
        });
        await_session_again(state, session);
    }
}

/// A session that was dealt nothing holds up no join, as long as it is not given something else.
fn excuse_session(state: &mut FleetState, session: &str) {
    if state.assignments.iter().any(|errand| errand.session == session) {
        return;
    }
    update_incomplete_triggers(state, session, |slot| {
        slot.get_or_insert(TriggerState::Excused);
    });
}

/// A session that is given something is waited for again; not by what has all it waits for, which counts anew after this
/// end anyhow.
fn await_session_again(state: &mut FleetState, session: &str) {
    update_incomplete_triggers(state, session, |slot| {
        if *slot == Some(TriggerState::Excused) {
            *slot = None;
        }
    });
}

fn update_incomplete_triggers(
    state: &mut FleetState,
    session: &str,
    change: impl Fn(&mut Option<TriggerState>),
) {
    let incomplete = |(_, seen): &(_, &mut RouteState)| !seen.is_complete();
    for (route, seen) in state.spec.routes.iter().zip(&mut state.routes).filter(incomplete) {
        for (trigger, slot) in route.when.iter().zip(&mut seen.triggers) {
            if trigger.session == session && route.when.len() > 1 {
                change(slot);
            }
        }
    }
}
