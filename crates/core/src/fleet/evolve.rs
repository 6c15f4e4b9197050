//! How an event changes a fleet. This is the only code that changes a [`FleetState`], live and on replay alike.

use qd_protocol::ClockReading;
use qd_protocol::event::{
    EventBody, FleetMentioned, FleetRouted, FleetRunEnded, FleetUpdated, RouteAssignment, SubtaskRef,
};
use qd_protocol::fleet::TriggerOutcome;

use super::state::{AssignedRun, AssignmentOutcome, FleetAssignment, FleetStop, RouteState, TriggerState};
use super::{FleetEvent, FleetState};

/// Applies one event.
pub fn evolve(state: &mut FleetState, event: &FleetEvent) {
    carry_clocks_over_reboot(state, event.ts);
    state.number = event.number;
    state.updated_at = event.ts.wall;
    match &event.body {
        EventBody::FleetUpdated(FleetUpdated { ended, result, stops, .. }) => {
            if let Some(ended) = ended {
                apply_run_ended(state, ended);
            }
            if let Some(result) = result {
                state.result = Some(result.clone());
            }
            if let Some(by) = stops {
                state.stopping = Some(FleetStop { by: *by, at: event.ts.wall });
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
        // Fleets have no other kinds of events.
        _ => {}
    }
}

/// Brings the start of the fleet to the clocks of the boot that the event is from, as a session does with its readings.
fn carry_clocks_over_reboot(state: &mut FleetState, now: ClockReading) {
    let Some(uptime) = now.uptime else { return };
    let last = state.last_uptime.replace(uptime);
    if last.is_none_or(|last| last.boot != uptime.boot) {
        state.created_at = state.created_at.carried_over_reboot(last, now);
    }
}

fn apply_run_ended(state: &mut FleetState, ended: &FleetRunEnded) {
    // A complete route was considered when it became complete; from now on it waits for its triggers anew.
    for route in &mut state.routes {
        if route.is_complete() {
            route.triggers.fill(None);
        }
    }
    let index = state
        .assignments
        .iter()
        .position(|assignment| assignment.runs.iter().any(|assigned| assigned.run == ended.run_id));
    let Some(index) = index else { return };
    if ended.delivered_as_steer {
        // This never was a run of its own, so no route follows; the run that received the steer ends by itself.
        state.assignments.remove(index);
        return;
    }
    let Some(assignment) = state.assignments.get_mut(index) else { return };
    if let Some(assigned) = assignment.runs.iter_mut().find(|assigned| assigned.run == ended.run_id) {
        match &ended.retried_as {
            Some(next) => {
                assigned.run = next.clone();
                assigned.attempt += 1;
            }
            None => {
                assigned.ended = Some(ended.finish_reason.into());
                assigned.matches = ended.matches.iter().copied().collect();
                let failed = ended.no_subtasks.clone().map(Err);
                assigned.subtasks = ended.subtasks.map(Ok).or(failed);
            }
        }
    }
    if assignment.runs.iter().all(|assigned| assigned.ended.is_some()) {
        let assignment = state.assignments.remove(index);
        finish_assignment(state, &assignment);
    }
}

/// The outcome of a whole assignment: the worst outcome of its runs.
fn combined_ending(runs: &[AssignedRun]) -> TriggerOutcome {
    let any = |ending| runs.iter().any(|assigned| assigned.ended == Some(ending));
    match () {
        () if any(TriggerOutcome::Failed) => TriggerOutcome::Failed,
        () if any(TriggerOutcome::Cancelled) => TriggerOutcome::Cancelled,
        () => TriggerOutcome::Done,
    }
}

fn finish_assignment(state: &mut FleetState, assignment: &FleetAssignment) {
    let ending = combined_ending(&assignment.runs);
    let runs: Vec<_> = assignment.runs.iter().map(|assigned| assigned.run.clone()).collect();
    for (route_index, (route, route_state)) in (0..).zip(state.spec.routes.iter().zip(&mut state.routes)) {
        for (trigger, trigger_state) in route.when.iter().zip(&mut route_state.triggers) {
            if trigger.session == assignment.session && trigger.on == ending {
                *trigger_state = Some(TriggerState::Ended {
                    runs: runs.clone(),
                    matches: assignment.runs.iter().any(|assigned| assigned.matches.contains(&route_index)),
                    subtasks: assignment
                        .runs
                        .iter()
                        .filter_map(|assigned| assigned.subtasks.clone())
                        .collect(),
                });
            }
        }
    }
    state.last_outcomes.insert(assignment.session.clone(), AssignmentOutcome { runs, ending, routed: false });
}

fn apply_routed(state: &mut FleetState, routed: &FleetRouted) {
    if let Some(route_state) = state.routes.get_mut(routed.route as usize) {
        route_state.fired = routed.round;
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
        let assigned_runs =
            runs.iter().enumerate().map(|(at, run)| AssignedRun::new(run.clone(), subtask(at)));
        state.assignments.push(FleetAssignment {
            session: session.clone(),
            route: Some(routed.route),
            round: routed.round,
            from: routed.from.iter().chain(&routed.quoted).cloned().collect(),
            runs: assigned_runs.collect(),
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

/// Lets no join wait for a session that got no subtasks, unless the session has other work.
fn excuse_session(state: &mut FleetState, session: &str) {
    if state.assignments.iter().any(|assignment| assignment.session == session) {
        return;
    }
    update_incomplete_triggers(state, session, |trigger_state| {
        trigger_state.get_or_insert(TriggerState::Excused);
    });
}

/// Lets incomplete joins wait again for a session that got new work. Complete routes are left alone, because they
/// start anew with the next run that ends.
fn await_session_again(state: &mut FleetState, session: &str) {
    update_incomplete_triggers(state, session, |trigger_state| {
        if *trigger_state == Some(TriggerState::Excused) {
            *trigger_state = None;
        }
    });
}

fn update_incomplete_triggers(
    state: &mut FleetState,
    session: &str,
    change: impl Fn(&mut Option<TriggerState>),
) {
    let incomplete = |(_, route_state): &(_, &mut RouteState)| !route_state.is_complete();
    for (route, route_state) in state.spec.routes.iter().zip(&mut state.routes).filter(incomplete) {
        for (trigger, trigger_state) in route.when.iter().zip(&mut route_state.triggers) {
            if trigger.session == session && route.when.len() > 1 {
                change(trigger_state);
            }
        }
    }
}
