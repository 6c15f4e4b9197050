//! What follows on an end. Of the routes whose triggers have all happened, those with a matching pattern go first; if
//! one of them fires, those without a pattern on the same triggers do not.

use std::collections::BTreeSet;

use qd_protocol::event::{Body, FinishReason, FleetRouted, Given, RunEnded, Source, Subtask};
use qd_protocol::fleet::{Action, Ending, Route, Split};
use qd_protocol::limits::FLEET_RESULT_MAX;
use qd_protocol::{AskId, RunId};
use regex::Regex;

use super::state::{Open, Slot};
use super::{Draft, Effect, Ended, prompt, subtasks};

impl Draft<'_> {
    pub(super) fn ended(&mut self, ended: &Ended) {
        let open = self.open().find(|(_, open)| open.run == ended.run);
        let Some((errand, open)) = open else { return };
        let name = errand.session.clone();
        let whole = errand.runs.iter().filter(|open| open.ended.is_none()).count() == 1;
        let retried_as = self.retry(&name, open, ended.reason);
        let given_again = retried_as.is_some();
        let mut told = RunEnded {
            run_id: ended.run.clone(),
            finish_reason: ended.reason,
            retried_as,
            matches: Vec::new(),
            subtasks: None,
            no_subtasks: None,
            taken_in: false,
        };
        if !given_again {
            self.read(&name, ended, &mut told);
        }
        self.update(|updated| updated.ended = Some(told));
        if given_again {
            self.effect(Effect::Give);
        } else {
            let follows = whole && self.stopping.is_none() && self.follow(&name, ended);
            let leads_on = self.mention(&name, ended) || follows;
            if whole && !leads_on && self.stopping.is_none() {
                let kept = ended.text.floor_char_boundary(FLEET_RESULT_MAX);
                self.update(|updated| updated.result = Some(ended.text[..kept].to_owned()));
            }
        }
        self.settle();
    }

    /// There is no run to wait for any more.
    pub(super) fn taken_in(&mut self, run: &RunId) {
        if !self.open().any(|(errand, open)| errand.mention && open.run == *run) {
            return;
        }
        let told = RunEnded {
            run_id: run.clone(),
            finish_reason: FinishReason::EndTurn,
            retried_as: None,
            matches: Vec::new(),
            subtasks: None,
            no_subtasks: None,
            taken_in: true,
        };
        self.update(|updated| updated.ended = Some(told));
        self.settle();
    }

    /// The run that one which failed is given again as. One that was cancelled was meant to end, and one without money
    /// would only end again.
    fn retry(&self, name: &str, open: &Open, reason: FinishReason) -> Option<RunId> {
        let most = self.spec.sessions.get(name).map_or(0, |member| member.retry);
        let failed = Ending::from(reason) == Ending::Failed && reason != FinishReason::BudgetExceeded;
        if !failed || open.attempt >= most || self.stopping.is_some() {
            return None;
        }
        let (base, _) = open.run.as_str().rsplit_once('.')?;
        RunId::parse(&format!("{base}.{}", open.attempt + 1)).ok()
    }

    /// What there is to know of its last message: only what some route may need, once it has all that it waits for.
    fn read(&self, name: &str, ended: &Ended, told: &mut RunEnded) {
        for (index, route) in (0..).zip(&self.spec.routes) {
            if !route.when.iter().any(|trigger| trigger.session == name) {
                continue;
            }
            // It was checked when the file was read.
            let pattern = route.pattern.as_ref().and_then(|pattern| Regex::new(pattern).ok());
            if pattern.is_some_and(|pattern| pattern.is_match(&ended.text)) {
                told.matches.push(index);
            }
            if matches!(route.then, Action::FanOut { split: Split::BySubtask, .. }) {
                match subtasks::read(&ended.text) {
                    Ok(entries) => told.subtasks = u32::try_from(entries.len()).ok(),
                    Err(why) => told.no_subtasks = Some(why.to_string()),
                }
            }
        }
    }

    /// Follows every route that has all it waits for; tells whether one of them came of this session's end.
    fn follow(&mut self, name: &str, ended: &Ended) -> bool {
        let mut considered: BTreeSet<usize> = BTreeSet::new();
        let mut leads_on = false;
        // What is dealt to nobody may complete another join.
        while let Some(first) =
            (0..self.routes.len()).find(|at| self.routes[*at].is_full() && !considered.contains(at))
        {
            let group: Vec<usize> = (first..self.routes.len())
                .filter(|at| self.spec.routes[*at].has_same_trigger(&self.spec.routes[first]))
                .collect();
            considered.extend(&group);
            for at in self.firing(&group) {
                leads_on |= self.spec.routes[at].when.iter().any(|trigger| trigger.session == name);
                self.fire(at, ended);
            }
        }
        let waits = self.spec.routes.iter().zip(&self.routes).any(|(route, seen)| {
            let slots = route.when.iter().zip(&seen.slots);
            !seen.is_full() && slots.clone().any(|(trigger, slot)| trigger.session == name && slot.is_some())
        });
        leads_on || waits
    }

    /// Which of several routes with the same triggers fire.
    fn firing(&self, group: &[usize]) -> Vec<usize> {
        let live = |at: &usize| self.spec.routes[*at].max.is_none_or(|max| self.routes[*at].fired < max);
        let matches = |at: &usize| {
            let slots = self.routes[*at].slots.iter().flatten();
            slots.into_iter().any(|slot| matches!(slot, Slot::Ended { matches: true, .. }))
        };
        let live: Vec<usize> = group.iter().copied().filter(live).collect();
        let has_pattern = |at: &usize| self.spec.routes[*at].pattern.is_some();
        let matching: Vec<usize> = live.iter().copied().filter(|at| has_pattern(at) && matches(at)).collect();
        match matching.is_empty() {
            false => matching,
            true => live.into_iter().filter(|at| !has_pattern(at)).collect(),
        }
    }

    fn fire(&mut self, at: usize, ended: &Ended) {
        let route = self.spec.routes[at].clone();
        let round = self.routes[at].fired + 1;
        let from = self.sources(&route, at);
        let mut routed = FleetRouted {
            fleet_id: self.id.clone(),
            route: u32::try_from(at).unwrap_or(u32::MAX),
            round,
            quoted: self.quoted(&route, &from),
            from,
            to: Vec::new(),
            ask_id: None,
            error: None,
        };
        let cause = format!("{at}-{round}");
        match &route.then {
            Action::RouteTo(_) | Action::FanOut { split: Split::Broadcast, .. } => {
                let run = |name: &String| RunId::of_fleet(&self.id, &cause, name, 0, 0);
                let given = |name: &String| Given {
                    session: name.clone(),
                    runs: vec![run(name)],
                    subtasks: Vec::new(),
                };
                routed.to = route.then.targets().iter().map(given).collect();
            }
            Action::FanOut { to, split: Split::BySubtask } => match self.deal(at, &cause, to) {
                Ok(given) => routed.to = given,
                Err(why) => {
                    let from = route.when.first().map_or("", |trigger| trigger.session.as_str());
                    routed.error = Some(format!("route {}: {from}: {why}", at + 1));
                }
            },
            Action::CollectHuman => routed.ask_id = self.next_ask(),
        }
        if !routed.to.is_empty() {
            self.effect(Effect::Give);
        }
        let (ask, from) = (routed.ask_id.clone(), routed.from.clone());
        self.emit(Body::FleetRouted(routed));
        if let Some(ask) = ask {
            self.open_ask(ask, &from, ended);
        }
    }

    fn next_ask(&mut self) -> Option<AskId> {
        self.world.asks.pop()
    }

    /// On whose ends it follows, with the runs that ended so.
    fn sources(&self, route: &Route, at: usize) -> Vec<Source> {
        let slots = route.when.iter().zip(&self.routes[at].slots);
        slots
            .filter_map(|(trigger, slot)| match slot {
                Some(Slot::Ended { runs, .. }) => {
                    Some(Source { session: trigger.session.clone(), runs: runs.clone() })
                }
                Some(Slot::Excused) | None => None,
            })
            .collect()
    }

    /// Who else is named in what the targets are told: as they stand now, whatever they do later.
    fn quoted(&self, route: &Route, from: &[Source]) -> Vec<Source> {
        let mut names = BTreeSet::new();
        for target in route.then.targets() {
            let own = self.spec.sessions.get(target).and_then(|member| member.prompt.as_ref());
            if let Some(template) = route.prompt.as_ref().or(own) {
                names.extend(prompt::quoted(template));
            }
        }
        let others = names.into_iter().filter(|name| from.iter().all(|source| source.session != *name));
        others
            .filter_map(|name| {
                let last = self.last.get(&name)?;
                Some(Source { session: name, runs: last.runs.clone() })
            })
            .collect()
    }

    /// Deals the subtasks of the last message round and round.
    fn deal(&self, at: usize, cause: &str, to: &[String]) -> Result<Vec<Given>, String> {
        let none = || "its last message has no block of subtasks".to_owned();
        let Some(Some(Slot::Ended { runs, subtasks, .. })) = self.routes[at].slots.first() else {
            return Err(none());
        };
        let mut entries = Vec::new();
        for (run, count) in runs.iter().zip(subtasks) {
            let count = count.clone()?;
            entries.extend((0..count).map(|entry| Subtask { run: run.clone(), entry }));
        }
        if entries.is_empty() {
            return Err(none());
        }
        let mut given: Vec<Given> = to
            .iter()
            .map(|name| Given { session: name.clone(), runs: Vec::new(), subtasks: Vec::new() })
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
