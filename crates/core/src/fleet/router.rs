//! Decides what follows when a run ends. Among the routes whose triggers have all happened, those with a matching
//! pattern come first; if one of them fires, routes without a pattern on the same triggers do not.

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
        let assigned = self.open_assigned_runs().find(|(_, assigned)| assigned.run == ended.run);
        let Some((assignment, assigned)) = assigned else { return };
        let name = assignment.session.clone();
        let is_last_run = assignment.runs.iter().filter(|assigned| assigned.ended.is_none()).count() == 1;
        let retried_as = self.retry_run_id(&name, assigned, ended.reason);
        let is_retried = retried_as.is_some();
        let mut ended_event = FleetRunEnded {
            run_id: ended.run.clone(),
            finish_reason: ended.reason,
            retried_as,
            matches: Vec::new(),
            subtasks: None,
            no_subtasks: None,
            delivered_as_steer: false,
        };
        if !is_retried {
            self.read_last_message(&name, ended, &mut ended_event);
        }
        self.emit_update(|updated| updated.ended = Some(ended_event));
        if is_retried {
            self.add_effect(FleetEffect::DispatchRuns);
        } else {
            let has_route = is_last_run && self.stopping.is_none() && self.follow_routes(&name, ended);
            let continues = self.send_to_mentioned(&name, ended) || has_route;
            if is_last_run && !continues && self.stopping.is_none() {
                let end = ended.text.floor_char_boundary(FLEET_RESULT_MAX);
                self.emit_update(|updated| updated.result = Some(ended.text[..end].to_owned()));
            }
        }
        self.finish_if_done();
    }

    /// Handles a mention that was delivered as a steer: there is no run left to wait for.
    pub(super) fn handle_run_delivered_as_steer(&mut self, run: &RunId) {
        if !self
            .open_assigned_runs()
            .any(|(assignment, assigned)| assignment.by_mention && assigned.run == *run)
        {
            return;
        }
        let ended_event = FleetRunEnded {
            run_id: run.clone(),
            finish_reason: FinishReason::EndTurn,
            retried_as: None,
            matches: Vec::new(),
            subtasks: None,
            no_subtasks: None,
            delivered_as_steer: true,
        };
        self.emit_update(|updated| updated.ended = Some(ended_event));
        self.finish_if_done();
    }

    /// The id under which a failed run is retried. A cancelled run was meant to end, and a run without budget would
    /// only fail again.
    fn retry_run_id(&self, name: &str, assigned: &AssignedRun, reason: FinishReason) -> Option<RunId> {
        let max_retries = self.spec.sessions.get(name).map_or(0, |member| member.retry);
        let failed =
            TriggerOutcome::from(reason) == TriggerOutcome::Failed && reason != FinishReason::BudgetExceeded;
        if !failed || assigned.attempt >= max_retries || self.stopping.is_some() {
            return None;
        }
        let (base, _) = assigned.run.as_str().rsplit_once('.')?;
        RunId::parse(&format!("{base}.{}", assigned.attempt + 1)).ok()
    }

    /// Reads what routes may need from the last message: matching patterns and subtasks.
    fn read_last_message(&self, name: &str, ended: &FinishedRun, ended_event: &mut FleetRunEnded) {
        for (index, route) in (0..).zip(&self.spec.routes) {
            if !route.when.iter().any(|trigger| trigger.session == name) {
                continue;
            }
            // The pattern was validated when the fleet file was read.
            let pattern = route.pattern.as_ref().and_then(|pattern| Regex::new(pattern).ok());
            if pattern.is_some_and(|pattern| pattern.is_match(&ended.text)) {
                ended_event.matches.push(index);
            }
            if matches!(route.then, RouteAction::FanOut { split: FanOutSplit::BySubtask, .. }) {
                match subtasks::parse_subtasks(&ended.text) {
                    Ok(entries) => ended_event.subtasks = u32::try_from(entries.len()).ok(),
                    Err(error) => ended_event.no_subtasks = Some(error.to_string()),
                }
            }
        }
    }

    /// Fires every complete route. Returns whether this session's end leads anywhere: a route on it fired, or a join
    /// has recorded it and still waits for other sessions.
    fn follow_routes(&mut self, name: &str, ended: &FinishedRun) -> bool {
        let mut considered: BTreeSet<usize> = BTreeSet::new();
        let mut has_fired = false;
        // A session that gets no subtasks may complete another join, so look again after each group.
        while let Some(first) = (0..self.routes.len())
            .find(|index| self.routes[*index].is_complete() && !considered.contains(index))
        {
            let group: Vec<usize> = (first..self.routes.len())
                .filter(|index| self.spec.routes[*index].has_same_trigger(&self.spec.routes[first]))
                .collect();
            considered.extend(&group);
            for index in self.select_firing_routes(&group) {
                has_fired |= self.spec.routes[index].when.iter().any(|trigger| trigger.session == name);
                self.fire_route(index, ended);
            }
        }
        let is_awaited = self.spec.routes.iter().zip(&self.routes).any(|(route, route_state)| {
            let trigger_states = route.when.iter().zip(&route_state.triggers);
            !route_state.is_complete()
                && trigger_states
                    .clone()
                    .any(|(trigger, trigger_state)| trigger.session == name && trigger_state.is_some())
        });
        has_fired || is_awaited
    }

    /// Which routes of a group with the same triggers fire.
    fn select_firing_routes(&self, group: &[usize]) -> Vec<usize> {
        let available =
            |index: &usize| self.spec.routes[*index].max.is_none_or(|max| self.routes[*index].fired < max);
        let matches = |index: &usize| {
            let trigger_states = self.routes[*index].triggers.iter().flatten();
            trigger_states
                .into_iter()
                .any(|trigger_state| matches!(trigger_state, TriggerState::Ended { matches: true, .. }))
        };
        let available: Vec<usize> = group.iter().copied().filter(available).collect();
        let has_pattern = |index: &usize| self.spec.routes[*index].pattern.is_some();
        let matching: Vec<usize> =
            available.iter().copied().filter(|index| has_pattern(index) && matches(index)).collect();
        match matching.is_empty() {
            false => matching,
            true => available.into_iter().filter(|index| !has_pattern(index)).collect(),
        }
    }

    fn fire_route(&mut self, index: usize, ended: &FinishedRun) {
        let route = self.spec.routes[index].clone();
        let round = self.routes[index].fired + 1;
        let from = self.route_sources(&route, index);
        let mut routed = FleetRouted {
            fleet_id: self.id.clone(),
            route: u32::try_from(index).unwrap_or(u32::MAX),
            round,
            quoted: self.quoted_sources(&route, &from),
            from,
            to: Vec::new(),
            ask_id: None,
            error: None,
        };
        let cause = format!("{index}-{round}");
        match &route.then {
            RouteAction::RouteTo(_) | RouteAction::FanOut { split: FanOutSplit::Broadcast, .. } => {
                let run = |name: &String| RunId::of_fleet(&self.id, &cause, name, 0, 0);
                let assignment = |name: &String| RouteAssignment {
                    session: name.clone(),
                    runs: vec![run(name)],
                    subtasks: Vec::new(),
                };
                routed.to = route.then.targets().iter().map(assignment).collect();
            }
            RouteAction::FanOut { to, split: FanOutSplit::BySubtask } => {
                match self.distribute_subtasks(index, &cause, to) {
                    Ok(assignments) => routed.to = assignments,
                    Err(error) => {
                        let from = route.when.first().map_or("", |trigger| trigger.session.as_str());
                        routed.error = Some(format!("route {}: {from}: {error}", index + 1));
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

    /// The sessions whose ends triggered the route, with the runs that ended.
    fn route_sources(&self, route: &FleetRoute, index: usize) -> Vec<RouteSource> {
        let trigger_states = route.when.iter().zip(&self.routes[index].triggers);
        trigger_states
            .filter_map(|(trigger, trigger_state)| match trigger_state {
                Some(TriggerState::Ended { runs, .. }) => {
                    Some(RouteSource { session: trigger.session.clone(), runs: runs.clone() })
                }
                Some(TriggerState::Excused) | None => None,
            })
            .collect()
    }

    /// Other sessions that the targets' prompts quote, with their last runs as of now.
    fn quoted_sources(&self, route: &FleetRoute, from: &[RouteSource]) -> Vec<RouteSource> {
        let mut names = BTreeSet::new();
        for target in route.then.targets() {
            let default_prompt = self.spec.sessions.get(target).and_then(|member| member.prompt.as_ref());
            if let Some(template) = route.prompt.as_ref().or(default_prompt) {
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

    /// Deals out the subtasks of the last message to the targets in turn.
    fn distribute_subtasks(
        &self,
        index: usize,
        cause: &str,
        to: &[String],
    ) -> Result<Vec<RouteAssignment>, String> {
        let no_subtasks = || "its last message has no block of subtasks".to_owned();
        let Some(Some(TriggerState::Ended { runs, subtasks, .. })) = self.routes[index].triggers.first()
        else {
            return Err(no_subtasks());
        };
        let mut entries = Vec::new();
        for (run, count) in runs.iter().zip(subtasks) {
            let count = count.clone()?;
            entries.extend((0..count).map(|entry| SubtaskRef { run: run.clone(), entry }));
        }
        if entries.is_empty() {
            return Err(no_subtasks());
        }
        let mut assignments: Vec<RouteAssignment> = to
            .iter()
            .map(|name| RouteAssignment { session: name.clone(), runs: Vec::new(), subtasks: Vec::new() })
            .collect();
        let count = assignments.len().max(1);
        for (nth, subtask) in entries.into_iter().enumerate() {
            if let Some(target) = assignments.get_mut(nth % count) {
                target.runs.push(RunId::of_fleet(&self.id, cause, &target.session, nth, 0));
                target.subtasks.push(subtask);
            }
        }
        Ok(assignments)
    }
}
