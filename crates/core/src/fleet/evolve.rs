//! How events change a fleet. A pure fold: what it needs to know is in the event or in the state.

use qd_protocol::event::{Body, FleetMentioned, FleetRouted, FleetUpdated, Given, RunEnded, Subtask};
use qd_protocol::fleet::Ending;

use super::state::{Errand, Last, Open, RouteState, Slot, Stopping};
use super::{Recorded, State};

/// Applies one event.
pub fn evolve(state: &mut State, event: &Recorded) {
    state.number = event.number;
    state.updated_at = event.ts;
    match &event.body {
        Body::FleetUpdated(FleetUpdated { ended, result, stops, .. }) => {
            if let Some(ended) = ended {
                end_run(state, ended);
            }
            if let Some(result) = result {
                state.result = Some(result.clone());
            }
            if let Some(by) = stops {
                state.stopping = Some(Stopping { by: *by, at: event.ts });
            }
        }
        Body::FleetRouted(routed) => follow(state, routed),
        Body::FleetMentioned(mentioned) => write_to(state, mentioned),
        Body::AskOpened(opened) => {
            state.asks.insert(opened.ask_id.clone(), opened.ask.clone());
        }
        Body::AskResolved(resolved) => {
            state.asks.remove(&resolved.ask_id);
            let answer = resolved.ask.answer.as_ref();
            if let Some(value) = answer.and_then(|answer| answer.value.as_ref()) {
                state.result = Some(value.clone());
            }
        }
        Body::FleetFinished(finished) => {
            state.finished = Some(finished.state);
            state.result.clone_from(&finished.result);
        }
        // Of no kind that a fleet has.
        _ => {}
    }
}

fn end_run(state: &mut State, ended: &RunEnded) {
    // Whatever was complete has been considered, when it became so: from here on it counts anew.
    for route in &mut state.routes {
        if route.is_full() {
            route.slots.fill(None);
        }
    }
    let at = state.errands.iter().position(|errand| errand.runs.iter().any(|open| open.run == ended.run_id));
    let Some(at) = at else { return };
    if ended.taken_in {
        // It never was a run of its own, so nothing follows on its end; the run that took it in ends by itself.
        state.errands.remove(at);
        return;
    }
    let Some(errand) = state.errands.get_mut(at) else { return };
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
        let errand = state.errands.remove(at);
        end_errand(state, &errand);
    }
}

/// How all of an errand ended: as badly as one of its runs.
fn ending(runs: &[Open]) -> Ending {
    let any = |ending| runs.iter().any(|open| open.ended == Some(ending));
    match () {
        () if any(Ending::Failed) => Ending::Failed,
        () if any(Ending::Cancelled) => Ending::Cancelled,
        () => Ending::Done,
    }
}

fn end_errand(state: &mut State, errand: &Errand) {
    let ending = ending(&errand.runs);
    let runs: Vec<_> = errand.runs.iter().map(|open| open.run.clone()).collect();
    for (index, (route, seen)) in (0..).zip(state.spec.routes.iter().zip(&mut state.routes)) {
        for (trigger, slot) in route.when.iter().zip(&mut seen.slots) {
            if trigger.session == errand.session && trigger.on == ending {
                *slot = Some(Slot::Ended {
                    runs: runs.clone(),
                    matches: errand.runs.iter().any(|open| open.matches.contains(&index)),
                    subtasks: errand.runs.iter().filter_map(|open| open.subtasks.clone()).collect(),
                });
            }
        }
    }
    state.last.insert(errand.session.clone(), Last { runs, ending, routed: false });
}

fn follow(state: &mut State, routed: &FleetRouted) {
    if let Some(seen) = state.routes.get_mut(routed.route as usize) {
        seen.fired = routed.round;
    }
    for source in &routed.from {
        if let Some(last) = state.last.get_mut(&source.session)
            && last.runs == source.runs
        {
            last.routed = true;
        }
    }
    if let Some(error) = &routed.error {
        state.problems.push(error.clone());
    }
    for Given { session, runs, subtasks } in &routed.to {
        if runs.is_empty() {
            excuse(state, session);
            continue;
        }
        let subtask = |at: usize| -> Option<Subtask> { subtasks.get(at).cloned() };
        let open = runs.iter().enumerate().map(|(at, run)| Open::new(run.clone(), subtask(at)));
        state.errands.push(Errand {
            session: session.clone(),
            route: Some(routed.route),
            round: routed.round,
            from: routed.from.iter().chain(&routed.quoted).cloned().collect(),
            runs: open.collect(),
            mention: false,
        });
        await_again(state, session);
    }
}

fn write_to(state: &mut State, mentioned: &FleetMentioned) {
    let FleetMentioned { round, from, to, error, .. } = mentioned;
    state.problems.extend(error.clone().filter(|error| !state.problems.contains(error)));
    for Given { session, runs, .. } in to {
        state.mentions += 1;
        state.errands.push(Errand {
            session: session.clone(),
            route: None,
            round: *round,
            from: vec![from.clone()],
            runs: runs.iter().map(|run| Open::new(run.clone(), None)).collect(),
            mention: true,
        });
        await_again(state, session);
    }
}

/// A session that was dealt nothing holds up no join, as long as it is not given something else.
fn excuse(state: &mut State, session: &str) {
    if state.errands.iter().any(|errand| errand.session == session) {
        return;
    }
    for_slots(state, session, |slot| {
        slot.get_or_insert(Slot::Excused);
    });
}

/// A session that is given something is waited for again; not by what has all it waits for, which counts anew after this
/// end anyhow.
fn await_again(state: &mut State, session: &str) {
    for_slots(state, session, |slot| {
        if *slot == Some(Slot::Excused) {
            *slot = None;
        }
    });
}

fn for_slots(state: &mut State, session: &str, change: impl Fn(&mut Option<Slot>)) {
    let incomplete = |(_, seen): &(_, &mut RouteState)| !seen.is_full();
    for (route, seen) in state.spec.routes.iter().zip(&mut state.routes).filter(incomplete) {
        for (trigger, slot) in route.when.iter().zip(&mut seen.slots) {
            if trigger.session == session && route.when.len() > 1 {
                change(slot);
            }
        }
    }
}
