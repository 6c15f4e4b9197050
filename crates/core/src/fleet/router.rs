//! What follows on an end. Of the routes whose triggers have all happened, those with a matching pattern go first; if
//! one of them fires, those without a pattern on the same triggers do not.

use std::collections::BTreeSet;

use qd_protocol::event::{
    EventBody, FinishReason, FleetRouted, FleetRunEnded, RouteAssignment, RouteSource, SubtaskRef,
};
use qd_protocol::fleet::{FanOutSplit, FleetRoute, RouteAction, TriggerOutcome};
use qd_protocol::limits::FLEET_RESULT_MAX;
use qd_protocol::{AskId, RunId};
use regex::Regex;

use super::state::{AssignedRun, TriggerState};
use super::{FinishedRun, FleetEffect, FleetStepBuilder, prompt, subtasks};

impl FleetStepBuilder<'_> {
    pub(super) fn handle_run_finished(&mut self, ended: &FinishedRun) {
        let open = self.open_assigned_runs().find(|(_, open)| open.run == ended.run);
        let Some((errand, open)) = open else { return };
        let name = errand.session.clone();
        let whole = errand.runs.iter().filter(|open| open.ended.is_none()).count() == 1;
        let retried_as = self.retry_run_id(&name, open, ended.reason);
        let given_again = retried_as.is_some();
        let mut told = FleetRunEnded {
            run_id: ended.run.clone(),
            finish_reason: ended.reason,
            retried_as,
            matches: Vec::new(),
            subtasks: None,
            no_subtasks: None,
            delivered_as_steer: false,
        };
        if !given_again {
            self.read_last_message(&name, ended, &mut told);
        }
        self.emit_update(|updated| updated.ended = Some(told));
        if given_again {
            self.add_effect(FleetEffect::DispatchRuns);
        } else {
            let follows = whole && self.stopping.is_none() && self.follow_routes(&name, ended);
            let leads_on = self.send_to_mentioned(&name, ended) || follows;
            if whole && !leads_on && self.stopping.is_none() {
                let kept = ended.text.floor_char_boundary(FLEET_RESULT_MAX);
                self.emit_update(|updated| updated.result = Some(ended.text[..kept].to_owned()));
            }
        }
        self.finish_if_done();
    }

    /// There is no run to wait for any more.
    pub(super) fn handle_run_absorbed(&mut self, run: &RunId) {
        if !self.open_assigned_runs().any(|(errand, open)| errand.by_mention && open.run == *run) {
            return;
        }
        let told = FleetRunEnded {
            run_id: run.clone(),
            finish_reason: FinishReason::EndTurn,
            retried_as: None,
            matches: Vec::new(),
            subtasks: None,
            no_subtasks: None,
            delivered_as_steer: true,
        };
        self.emit_update(|updated| updated.ended = Some(told));
        self.finish_if_done();
    }

    /// The run that one which failed is given again as. One that was cancelled was meant to end, and one without money
    /// would only end again.
    fn retry_run_id(&self, name: &str, open: &AssignedRun, reason: FinishReason) -> Option<RunId> {
        let most = self.spec.sessions.get(name).map_or(0, |member| member.retry);
        let failed =
            TriggerOutcome::from(reason) == TriggerOutcome::Failed && reason != FinishReason::BudgetExceeded;
        if !failed || open.attempt >= most || self.stopping.is_some() {
            return None;
        }
        let (base, _) = open.run.as_str().rsplit_once('.')?;
        RunId::parse(&format!("{base}.{}", open.attempt + 1)).ok()
    }

    /// What there is to know of its last message: only what some route may need, once it has all that it waits for.
    fn read_last_message(&self, name: &str, ended: &FinishedRun, told: &mut FleetRunEnded) {
        for (index, route) in (0..).zip(&self.spec.routes) {
            if !route.when.iter().any(|trigger| trigger.session == name) {
                continue;
            }
            // It was checked when the file was read.
            let pattern = route.pattern.as_ref().and_then(|pattern| Regex::new(pattern).ok());
            if pattern.is_some_and(|pattern| pattern.is_match(&ended.text)) {
                told.matches.push(index);
            }
            if matches!(route.then, RouteAction::FanOut { split: FanOutSplit::BySubtask, .. }) {
                match subtasks::parse_subtasks(&ended.text) {
                    Ok(entries) => told.subtasks = u32::try_from(entries.len()).ok(),
                    Err(why) => told.no_subtasks = Some(why.to_string()),
                }
            }
        }
    }

    /// Follows every route that has all it waits for; tells whether one of them came of this session's end.
    fn follow_routes(&mut self, name: &str, ended: &FinishedRun) -> bool {
        let mut considered: BTreeSet<usize> = BTreeSet::new();
        let mut leads_on = false;
        // What is dealt to nobody may complete another join.
        while let Some(first) =
            (0..self.routes.len()).find(|at| self.routes[*at].is_complete() && !considered.contains(at))
        {
            let group: Vec<usize> = (first..self.routes.len())
                .filter(|at| self.spec.routes[*at].has_same_trigger(&self.spec.routes[first]))
                .collect();
            considered.extend(&group);
            for at in self.select_firing_routes(&group) {
                leads_on |= self.spec.routes[at].when.iter().any(|trigger| trigger.session == name);
                self.fire_route(at, ended);
            }
        }
        let waits = self.spec.routes.iter().zip(&self.routes).any(|(route, seen)| {
            let slots = route.when.iter().zip(&seen.triggers);
            !seen.is_complete()
                && slots.clone().any(|(trigger, slot)| trigger.session == name && slot.is_some())
        });
        leads_on || waits
    }

    /// Which of several routes with the same triggers fire.
    fn select_firing_routes(&self, group: &[usize]) -> Vec<usize> {
        let live = |at: &usize| self.spec.routes[*at].max.is_none_or(|max| self.routes[*at].fired < max);
        let matches = |at: &usize| {
            let slots = self.routes[*at].triggers.iter().flatten();
            slots.into_iter().any(|slot| matches!(slot, TriggerState::Ended { matches: true, .. }))
        };
        let live: Vec<usize> = group.iter().copied().filter(live).collect();
        let has_pattern = |at: &usize| self.spec.routes[*at].pattern.is_some();
        let matching: Vec<usize> = live.iter().copied().filter(|at| has_pattern(at) && matches(at)).collect();
        match matching.is_empty() {
            false => matching,
            true => live.into_iter().filter(|at| !has_pattern(at)).collect(),
        }
    }

    fn fire_route(&mut self, at: usize, ended: &FinishedRun) {
        let route = self.spec.routes[at].clone();
        let round = self.routes[at].fired + 1;
        let from = self.route_sources(&route, at);
        let mut routed = FleetRouted {
            fleet_id: self.id.clone(),
            route: u32::try_from(at).unwrap_or(u32::MAX),
            round,
            quoted: self.quoted_sources(&route, &from),
            from,
            to: Vec::new(),
            ask_id: None,
            error: None,
        };
        let cause = format!("{at}-{round}");
        match &route.then {
            RouteAction::RouteTo(_) | RouteAction::FanOut { split: FanOutSplit::Broadcast, .. } => {
                let run = |name: &String| RunId::of_fleet(&self.id, &cause, name, 0, 0);
                let given = |name: &String| RouteAssignment {
                    session: name.clone(),
                    runs: vec![run(name)],
                    subtasks: Vec::new(),
                };
                routed.to = route.then.targets().iter().map(given).collect();
            }
            RouteAction::FanOut { to, split: FanOutSplit::BySubtask } => {
                match self.distribute_subtasks(at, &cause, to) {
                    Ok(given) => routed.to = given,
                    Err(why) => {
                        let from = route.when.first().map_or("", |trigger| trigger.session.as_str());
                        routed.error = Some(format!("route {}: {from}: {why}", at + 1));
                    }
                }
            }
            RouteAction::CollectHuman => routed.ask_id = self.take_ask_id(),
        }
        if !routed.to.is_empty() {
            self.add_effect(FleetEffect::DispatchRuns);
        }
        let (ask, from) = (routed.ask_id.clone(), routed.from.clone());
        self.emit(EventBody::FleetRouted(routed));
        if let Some(ask) = ask {
            self.open_ask(ask, &from, ended);
        }
    }

    fn take_ask_id(&mut self) -> Option<AskId> {
        self.context.ask_ids.pop()
    }

    /// On whose ends it follows, with the runs that ended so.
    fn route_sources(&self, route: &FleetRoute, at: usize) -> Vec<RouteSource> {
        let slots = route.when.iter().zip(&self.routes[at].triggers);
        slots
            .filter_map(|(trigger, slot)| match slot {
                Some(TriggerState::Ended { runs, .. }) => {
                    Some(RouteSource { session: trigger.session.clone(), runs: runs.clone() })
                }
                Some(TriggerState::Excused) | None => None,
            })
            .collect()
    }

    /// Who else is named in what the targets are told: as they stand now, whatever they do later.
    fn quoted_sources(&self, route: &FleetRoute, from: &[RouteSource]) -> Vec<RouteSource> {
        let mut names = BTreeSet::new();
        for target in route.then.targets() {
            let own = self.spec.sessions.get(target).and_then(|member| member.prompt.as_ref());
            if let Some(template) = route.prompt.as_ref().or(own) {
                names.extend(prompt::quoted_sessions(template));
            }
        }
        let others = names.into_iter().filter(|name| from.iter().all(|source| source.session != *name));
        others
            .filter_map(|name| {
                let last = self.last_outcomes.get(&name)?;
                Some(RouteSource { session: name, runs: last.runs.clone() })
            })
            .collect()
    }

    /// Deals the subtasks of the last message round and round.
    fn distribute_subtasks(
        &self,
        at: usize,
        cause: &str,
        to: &[String],
    ) -> Result<Vec<RouteAssignment>, String> {
        let none = || "its last message has no block of subtasks".to_owned();
        let Some(Some(TriggerState::Ended { runs, subtasks, .. })) = self.routes[at].triggers.first() else {
            return Err(none());
        };
        let mut entries = Vec::new();
        for (run, count) in runs.iter().zip(subtasks) {
            let count = count.clone()?;
            entries.extend((0..count).map(|entry| SubtaskRef { run: run.clone(), entry }));
        }
        if entries.is_empty() {
            return Err(none());
        }
        let mut given: Vec<RouteAssignment> = to
            .iter()
            .map(|name| RouteAssignment { session: name.clone(), runs: Vec::new(), subtasks: Vec::new() })
            .collect();
        let count = given.len().max(1);
        for (nth, subtask) in entries.into_iter().enumerate() {
            if let Some(target) = given.get_mut(nth % count) {
                target.runs.push(RunId::of_fleet(&self.id, cause, &target.session, nth, 0));
                target.subtasks.push(subtask);
            }
        }
        Ok(given)
    }
}
